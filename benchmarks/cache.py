"""What the cache's claims rest on: reading against one file an item, text without padding, opening.

Latents are read by shuffled batches of 8 until the batch is one tensor in memory that is used again
and again: what a loader needs before it can move a batch. Ours are `memory` (the cache type that a
run has unless told otherwise: entries live in slabs of host memory) and `disk` (they stay in
shards). The others are one file an item, each way by its own reader, and their tensors are stacked
into the same memory. The ways take turns of a few batches, over and over; the median of their turns
counts.

`warm`: every way has read everything once, and nothing waits for a disk. Everyone has one thread,
and the seconds of the CPU count, which on a quiet machine are the seconds that pass and on a busy
one leave out the time that others had. `copy` is the floor: the same bytes copied from memory to
memory and nothing else. At 16x128x128 that copy is most of what ours do, so nothing can be much
faster; `in_hand` is what is left without it: from keys to tensors, wherever they lie. `warm_cores`:
the same with every core for everyone, by the seconds that pass. Ours have nothing to set, torch
copies with all of them; the others read each item by itself, one after the other (`alone`) and by
as many threads as there are cores (`threads`).

`cold`: the kernel is asked to forget the files of a way before each of its turns (posix_fadvise
DONTNEED), and the seconds that pass are counted. Names and sizes stay known to the kernel, which
favours one file an item. Ours asks the disk for the items of a batch at once; the others read one
after the other and by as many threads as a batch has items. Every entry is compared with its
checksum by ours and by nobody else. `disk` is ours here; `memory` is filled by the same reads.

`python benchmarks/cache.py --write` takes about 12 GB of disk and some minutes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import random
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import results
import torch
from safetensors.torch import load_file, save_file

from gracetune.cache.arena import ArenaStore, Budget, Tally, whole_pages
from gracetune.cache.index import Index, Row, ShardRow, TensorPlace
from gracetune.cache.keys import text_key
from gracetune.cache.shard_store import INDEX, ShardStore
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    Read = Callable[[Sequence[int]], object]

SHAPES = {"16x64x64": 10_000, "16x128x128": 4_000}
"""What pictures of 512 and of 1024 pixels become, and how many of them are read."""
OTHERS = {"safetensors": 10_000, "torch.save": 1_000, "gzip": 16}
"""Most items of each other way: the slow ones are measured on fewer."""
OURS = ("memory", "disk")
BATCH = 8
TURNS = 11
TURN_BATCHES = 25
COLD_TURNS = 7
TOKENS = 512
WIDTH = 4096
ENTRIES = 1_000_000
OPENING = "a photo of"
WORDS = ("an", "old", "wooden", "table", "with", "oranges", "beside", "a", "window", "in", "light")


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results/cache.json")
    parser.add_argument("--items", type=int, default=10_000, help="most latents that are read")
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="cache-bench-", dir=args.folder))
    try:
        read = {}
        for shape, items in SHAPES.items():
            (folder / shape).mkdir()
            size = tuple(map(int, shape.split("x")))
            read[shape] = Reading(folder / shape, size, min(items, args.items)).measured()
            shutil.rmtree(folder / shape)
        figures = {
            "read": read,
            "text": measure_text(folder / "text"),
            "index": measure_index(folder / "index"),
        }
    finally:
        shutil.rmtree(folder)
    for name, value in results.flatten(figures):
        print(f"{name:<52} {value}")
    if args.write:
        print(results.write("cache", figures))


class Reading:
    """The same latents in every way, and how each has a batch of them."""

    def __init__(self, folder: Path, shape: tuple[int, ...], items: int) -> None:
        self._folder = folder
        self._counts = {name: min(items, most) for name, most in OTHERS.items()}
        self._counts |= dict.fromkeys([*OURS, "copy"], items)
        some = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        self._some = some
        self._nbytes = some[0].nbytes
        self._slab = whole_pages(BATCH * self._nbytes)
        self._batch = self._slab.view(torch.bfloat16).view(BATCH, *shape)
        self._write()
        self._disk = ShardStore(folder / "disk")
        self._memory = ArenaStore(
            "latents", Budget(8 * GIB), self._disk, print, whole_pages, Tally()
        )
        self._plain = torch.empty(0)

    def measured(self) -> dict[str, object]:
        """Microseconds an item, and how many times faster than the best of the others."""
        self._memory.warm([key(n) for n in range(self._counts["memory"])])
        copy: dict[str, Read] = {"copy": self._copied}
        cores = os.cpu_count() or 1
        alone = {**self._readers(), **self._stacked()}
        warm = self._turns({**alone, **copy}, time.process_time)
        in_hand = self._turns(self._hands(), time.process_time)
        torch.set_num_threads(cores)
        together = {**self._readers(), **self._stacked(), **self._by_threads(cores), **copy}
        warm_cores = self._turns(together, time.perf_counter)
        torch.set_num_threads(1)
        self._plain = torch.empty(0)
        self._disk.close()
        ways = {"disk": self._readers()["disk"], **self._stacked(), **self._by_threads(BATCH)}
        cold = self._turns(ways, time.perf_counter, COLD_TURNS)
        measured = {"warm": warm, "in_hand": in_hand, "warm_cores": warm_cores, "cold": cold}
        return {
            "items": self._counts["memory"],
            "nbytes_an_item": self._nbytes,
            "cores": cores,
            "us_an_item": {
                what: {name: round(seconds * 1e6, 1) for name, seconds in ways.items()}
                for what, ways in measured.items()
            },
            "times_the_best_other": {what: ratios(ways) for what, ways in measured.items()},
        }

    def _turns(
        self, ways: Mapping[str, Read], clock: Callable[[], float], cold_turns: int = 0
    ) -> dict[str, float]:
        """The median of each way's seconds an item, over turns that they take one by one."""
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        if not cold_turns:
            for name, read in ways.items():
                for numbers in batches(shuffled(self._counts[files_of(name)], 0)):
                    read(numbers)
        for turn in range(1, 1 + (cold_turns or TURNS)):
            for name, read in ways.items():
                order = shuffled(self._counts[files_of(name)], turn)[: TURN_BATCHES * BATCH]
                if cold_turns:
                    self._forget(files_of(name))
                began = clock()
                for numbers in batches(order):
                    read(numbers)
                seconds[name].append((clock() - began) / len(order))
        return {name: median(taken) for name, taken in seconds.items()}

    def _readers(self) -> dict[str, Read]:
        """How ours have a batch in the slab."""

        def ours(store: ArenaStore | ShardStore) -> Read:
            def read(numbers: Sequence[int]) -> None:
                keys = [key(n) for n in numbers]
                assert store.gather(keys, "latents", lambda nbytes: self._slab[:nbytes]) is not None

            return read

        return {"memory": ours(self._memory), "disk": ours(self._disk)}

    def _stacked(self) -> dict[str, Read]:
        """The others, one item after the other."""

        def stacked(load: Callable[[int], Tensor]) -> Read:
            return lambda numbers: torch.stack(
                [load(n) for n in numbers], out=self._batch[: len(numbers)]
            )

        return {f"{name}.alone": stacked(load) for name, load in self._loaders().items()}

    def _by_threads(self, count: int) -> dict[str, Read]:
        """The others, each item by a thread that also copies it to its place."""
        pool = ThreadPoolExecutor(count)

        def threaded(load: Callable[[int], Tensor]) -> Read:
            def one(place: int, number: int) -> None:
                self._batch[place].copy_(load(number))

            return lambda numbers: [*pool.map(one, range(len(numbers)), numbers)]

        return {f"{name}.threads": threaded(load) for name, load in self._loaders().items()}

    def _hands(self) -> dict[str, Read]:
        """How each way has the tensors of a batch, wherever they lie."""

        def ours(store: ArenaStore | ShardStore) -> Read:
            return lambda numbers: [
                entry["latents"]
                for entry in store.get_many([key(n) for n in numbers])
                if entry is not None
            ]

        def loaded(load: Callable[[int], Tensor]) -> Read:
            return lambda numbers: [load(n) for n in numbers]

        return {
            "memory": ours(self._memory),
            "disk": ours(self._disk),
            **{f"{name}.alone": loaded(load) for name, load in self._loaders().items()},
        }

    def _loaders(self) -> dict[str, Callable[[int], Tensor]]:
        """One item of each other way."""
        folder = self._folder

        def unzipped(number: int) -> Tensor:
            data = gzip.decompress((folder / "gzip" / f"{number}").read_bytes())
            loaded: Tensor = torch.load(io.BytesIO(data), weights_only=True)
            return loaded

        return {
            "safetensors": lambda n: load_file(folder / "safetensors" / f"{n}")["latents"],
            "torch.save": lambda n: torch.load(folder / "torch.save" / f"{n}", weights_only=True),
            "gzip": unzipped,
        }

    def _copied(self, numbers: Sequence[int]) -> None:
        """From one place in memory to another."""
        if not len(self._plain):
            self._plain = torch.empty(
                self._counts["copy"], *self._some.shape[1:], dtype=torch.bfloat16
            )
            self._plain.fill_(1)
        torch.index_select(self._plain, 0, torch.tensor(numbers), out=self._batch[: len(numbers)])

    def _forget(self, name: str) -> None:
        """Drop the pages of a way's files; they were written back before."""
        self._disk.close()  # whoever has just begun has read and checked nothing
        for path in (self._folder / name).rglob("*"):
            if path.is_file():
                forget(path)

    def _write(self) -> None:
        """Every item differs, so that nothing is cheaper than it would be."""
        for name in OTHERS:
            (self._folder / name).mkdir()
        with ShardStore(self._folder / "disk") as store:
            for start in range(0, self._counts["disk"], 64):
                numbers = range(start, min(start + 64, self._counts["disk"]))
                store.put_many({key(n): {"latents": self._item(n)} for n in numbers})
        for n in range(self._counts["safetensors"]):
            save_file({"latents": self._item(n)}, self._folder / "safetensors" / f"{n}")
        for n in range(self._counts["torch.save"]):
            torch.save(self._item(n), self._folder / "torch.save" / f"{n}")
        for n in range(self._counts["gzip"]):
            buffer = io.BytesIO()
            torch.save(self._item(n), buffer)
            (self._folder / "gzip" / f"{n}").write_bytes(gzip.compress(buffer.getvalue(), 6))
        os.sync()

    def _item(self, number: int) -> Tensor:
        """A latent of its own."""
        made = self._some[number % len(self._some)].clone()
        made.view(-1)[number] = number
        return made


def ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    """How many times faster each of ours is than the fastest of the others."""
    best = min(value for name, value in seconds.items() if files_of(name) in OTHERS)
    return {name: round(best / seconds[name], 2) for name in OURS if name in seconds}


def files_of(way: str) -> str:
    """The folder that a way reads from."""
    return way.removesuffix(".alone").removesuffix(".threads")


def key(number: int) -> str:
    """As long as a real one."""
    return f"{number:040d}"


def shuffled(count: int, seed: int) -> list[int]:
    """Another order for each seed."""
    order = [*range(count)]
    random.Random(seed).shuffle(order)
    return order


def batches(order: Sequence[int]) -> Iterator[Sequence[int]]:
    """In eights."""
    return (order[start : start + BATCH] for start in range(0, len(order), BATCH))


def forget(path: Path) -> None:
    """Have the kernel drop what it keeps of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_text(folder: Path) -> dict[str, object]:
    """Bytes of captions of natural length (6 to 60 words, about 1.3 tokens a word)."""
    draw, captions = random.Random(0), 200
    with ShardStore(folder) as store:
        for number in range(captions):
            text = " ".join([OPENING, *draw.choices(WORDS, k=draw.randint(3, 57)), str(number)])
            tokens = round(len(text.split()) * 1.3) + 2
            entry = {
                "tokens": torch.zeros(tokens, WIDTH, dtype=torch.bfloat16),
                "mask": torch.ones(tokens, dtype=torch.bool),
            }
            store.put(text_key(text, "encoder"), entry)
        kept = sum(path.stat().st_blocks * 512 for path in store.shards.iterdir())
    kept += (folder / INDEX).stat().st_size
    padded = captions * TOKENS * (WIDTH * 2 + 1)
    return {
        "captions": captions,
        "nbytes": kept,
        "padded_nbytes": padded,
        "share": round(kept / padded, 4),
    }


def measure_index(folder: Path) -> dict[str, object]:
    """Opening a cache of a million entries, and the first question."""
    ShardStore(folder).close()
    index = Index(folder / INDEX)
    index.add_shard(ShardRow("shard", 4096, 4096))
    places = (TensorPlace("latents", "BF16", (16, 128, 128), 0, 524288),)
    about = {"kind": "latents", "sample": "0" * 64, "geometry": "centre", "encoder": "0" * 40}
    for start in range(0, ENTRIES, 50_000):
        numbers = range(start, start + 50_000)
        rows = [Row(0, key(n), "shard", n << 19, 524288, places, bytes(16), about) for n in numbers]
        index.add(rows, "shard", 4096)
    index.close()
    forget(folder / INDEX)
    began = time.perf_counter()
    with ShardStore(folder) as store:
        opened = time.perf_counter() - began
        found = store.has([key(ENTRIES // 2), "absent"])
        answered = time.perf_counter() - began
    assert found == [True, False]
    return {
        "entries": ENTRIES,
        "nbytes": (folder / INDEX).stat().st_size,
        "open_s": round(opened, 4),
        "open_and_ask_s": round(answered, 4),
    }


if __name__ == "__main__":
    main()
