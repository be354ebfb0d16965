"""Measure reading cached latents in shuffled batches, compared with one file per item.

A batch of 8 counts as read when it is one tensor in reused memory, because a loader needs that
before it can copy the batch to the device. Two variants are ours: `memory`, the default cache type
(entries in slabs of host memory), and `disk` (entries in shards). The others keep one file per item
(safetensors, torch.save, gzip) and stack the tensors into the same memory. The variants take turns
of a few batches; a result is the median over the turns.

Results:

    warm        CPU time with one thread, when every variant has read everything once. `copy` is a
                lower bound: torch copies the same bytes within host memory. At 16x128x128 copying
                is most of the work, so no variant can be much faster.
    in_hand     the same without copying: the time from keys to tensors, wherever these are
    warm_cores  wall-clock time with all cores. Ours copy with all cores; the others read the items
                one after the other (`alone`) and with one thread per core (`threads`).
    cold        wall-clock time after a variant's files were dropped from the page cache
                (posix_fadvise DONTNEED). File names and sizes stay cached, which favours one file
                per item. Ours (`disk`) requests the items of a batch at once and verifies
                checksums, which the others do not; they read one after the other and with one
                thread per item. `memory` is missing, because the same reads fill it. `raw` is a
                lower bound: direct reads of as many bytes from the same files.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from gracetune.cache.memory_tier import (
    HitCounts,
    HostMemoryBudget,
    MemoryTier,
    allocate_page_aligned,
)
from gracetune.cache.shard_reader import AioQueue, ReadRequest
from gracetune.cache.shard_store import ShardStore
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    Read = Callable[[Sequence[int]], object]

OTHERS = {"safetensors": 10_000, "torch.save": 1_000, "gzip": 16}
"""File formats with one file per item, and the maximum number of items; slow ones read fewer."""
OURS = ("memory", "disk")
BATCH = 8
TURNS = 11
TURN_BATCHES = 25
COLD_TURNS = 7


class ReadBenchmark:
    """The same latents stored in every variant, with a reader for each variant."""

    def __init__(
        self, folder: Path, shape: tuple[int, ...], items: int, turns: int = TURNS
    ) -> None:
        self._folder = folder
        self._turns = turns
        self._counts = {name: min(items, most) for name, most in OTHERS.items()}
        self._counts |= dict.fromkeys([*OURS, "copy", "raw"], items)
        some = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        self._some = some
        self._nbytes = some[0].nbytes
        self._slab = allocate_page_aligned(BATCH * self._nbytes)
        self._batch = self._slab.view(torch.bfloat16).view(BATCH, *shape)
        self._write_items()
        self._disk = ShardStore(folder / "disk")
        self._memory = MemoryTier(
            "latents",
            HostMemoryBudget(8 * GIB),
            self._disk,
            print,
            allocate_page_aligned,
            HitCounts(),
        )
        self._plain = torch.empty(0)

    def measure(self) -> dict[str, object]:
        """Return microseconds per item, and how many times faster ours are than the best other."""
        self._memory.warm([key(n) for n in range(self._counts["memory"])])
        copy: dict[str, Read] = {"copy": self._copy_batch}
        cores = os.cpu_count() or 1
        alone = {**self._our_readers(), **self._sequential_readers()}
        warm = self._time_in_turns({**alone, **copy}, time.process_time)
        in_hand = self._time_in_turns(self._tensor_readers(), time.process_time)
        torch.set_num_threads(cores)
        together = {
            **self._our_readers(),
            **self._sequential_readers(),
            **self._threaded_readers(cores),
            **copy,
        }
        warm_cores = self._time_in_turns(together, time.perf_counter)
        torch.set_num_threads(1)
        self._plain = torch.empty(0)
        self._disk.close()
        raw = RawReads(self._folder / "disk", self._nbytes, self._slab)
        ours: dict[str, Read] = {"disk": self._our_readers()["disk"], "raw": raw}
        cold_readers = {**ours, **self._sequential_readers(), **self._threaded_readers(BATCH)}
        cold_turns = min(COLD_TURNS, self._turns)
        cold = self._time_in_turns(cold_readers, time.perf_counter, cold_turns)
        raw.close()
        measured = {"warm": warm, "in_hand": in_hand, "warm_cores": warm_cores, "cold": cold}
        return {
            "items": self._counts["memory"],
            "nbytes_an_item": self._nbytes,
            "cores": cores,
            "us_an_item": {
                what: {name: round(seconds * 1e6, 1) for name, seconds in ways.items()}
                for what, ways in measured.items()
            },
            "times_the_best_other": {what: speedups(ways) for what, ways in measured.items()},
        }

    def _time_in_turns(
        self, readers: Mapping[str, Read], clock: Callable[[], float], cold_turns: int = 0
    ) -> dict[str, float]:
        """Return the median seconds per item of each variant; the variants alternate."""
        seconds: dict[str, list[float]] = {name: [] for name in readers}
        if not cold_turns:
            for name, read in readers.items():
                for numbers in batches(shuffled(self._counts[folder_of(name)], 0)):
                    read(numbers)
        for turn in range(1, 1 + (cold_turns or self._turns)):
            for name, read in readers.items():
                order = shuffled(self._counts[folder_of(name)], turn)[: TURN_BATCHES * BATCH]
                if cold_turns:
                    self._drop_files_from_page_cache(folder_of(name))
                began = clock()
                for numbers in batches(order):
                    read(numbers)
                seconds[name].append((clock() - began) / len(order))
        return {name: median(taken) for name, taken in seconds.items()}

    def _our_readers(self) -> dict[str, Read]:
        """Return the readers of our two variants, which gather a batch in reused memory."""

        def ours(store: MemoryTier | ShardStore) -> Read:
            def read(numbers: Sequence[int]) -> None:
                keys = [key(n) for n in numbers]
                assert store.gather(keys, "latents", lambda nbytes: self._slab[:nbytes]) is not None

            return read

        return {"memory": ours(self._memory), "disk": ours(self._disk)}

    def _sequential_readers(self) -> dict[str, Read]:
        """Return the readers of the other variants, which load one item after the other."""

        def stacked(load: Callable[[int], Tensor]) -> Read:
            return lambda numbers: torch.stack(
                [load(n) for n in numbers], out=self._batch[: len(numbers)]
            )

        return {f"{name}.alone": stacked(load) for name, load in self._loaders().items()}

    def _threaded_readers(self, count: int) -> dict[str, Read]:
        """Return the readers of the other variants, with threads that load one item each."""
        pool = ThreadPoolExecutor(count)

        def threaded(load: Callable[[int], Tensor]) -> Read:
            def one(place: int, number: int) -> None:
                self._batch[place].copy_(load(number))

            return lambda numbers: [*pool.map(one, range(len(numbers)), numbers)]

        return {f"{name}.threads": threaded(load) for name, load in self._loaders().items()}

    def _tensor_readers(self) -> dict[str, Read]:
        """Return readers that only find or load the tensors of a batch, without stacking them."""

        def ours(store: MemoryTier | ShardStore) -> Read:
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
        """Return the functions that load one item, by variant."""
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

    def _copy_batch(self, numbers: Sequence[int]) -> None:
        """Copy a batch within host memory: the lower bound `copy`."""
        if not len(self._plain):
            plain = allocate_page_aligned(self._counts["copy"] * self._nbytes).fill_(1)
            self._plain = plain.view(torch.bfloat16).view(-1, *self._batch.shape[1:])
        torch.index_select(self._plain, 0, torch.tensor(numbers), out=self._batch[: len(numbers)])

    def _drop_files_from_page_cache(self, name: str) -> None:
        """Drop a variant's files from the page cache. Their data must have been written to disk."""
        self._disk.close()  # so that entries are read and checked again
        for path in (self._folder / name).rglob("*"):
            if path.is_file():
                drop_from_page_cache(path)

    def _write_items(self) -> None:
        """Write the items of all variants."""
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
        """Return a latent that differs from all others."""
        made = self._some[number % len(self._some)].clone()
        made.view(-1)[number] = number
        return made


class RawReads:
    """Direct reads (O_DIRECT) of item-sized blocks from the shards: the lower bound `raw`."""

    def __init__(self, folder: Path, nbytes: int, slab: Tensor) -> None:
        paths = sorted((folder / "shards").iterdir())
        self._files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        sizes = [path.stat().st_size // nbytes for path in paths]
        self._places = [
            (file, n) for file, size in zip(self._files, sizes, strict=True) for n in range(size)
        ]
        self._rooms = slab.numpy().reshape(BATCH, nbytes)
        self._nbytes = nbytes
        self._queue = AioQueue()

    def __call__(self, numbers: Sequence[int]) -> None:
        """Read one batch of blocks; `numbers` select their positions in the shards."""
        places = [self._places[number % len(self._places)] for number in numbers]
        wanted = [
            ReadRequest(file, place * self._nbytes, room)
            for (file, place), room in zip(places, self._rooms, strict=False)
        ]
        tickets = self._queue.submit(wanted)
        assert tickets is not None, self._queue.refusal
        assert all(self._queue.wait(ticket) == self._nbytes for ticket in tickets)

    def close(self) -> None:
        """Close the shards."""
        self._queue.close()
        for file in self._files:
            os.close(file)


def speedups(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return how many times faster each of our variants is than the fastest other one."""
    best = min(value for name, value in seconds.items() if folder_of(name) in OTHERS)
    return {name: round(best / seconds[name], 2) for name in OURS if name in seconds}


def folder_of(variant: str) -> str:
    """Return the folder that a variant reads from."""
    return variant.removesuffix(".alone").removesuffix(".threads")


def key(number: int) -> str:
    """Return a key as long as a real one."""
    return f"{number:040d}"


def shuffled(count: int, seed: int) -> list[int]:
    """Return the numbers below `count` in an order that depends on the seed."""
    order = [*range(count)]
    random.Random(seed).shuffle(order)
    return order


def batches(order: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split a list of item numbers into batches."""
    return (order[start : start + BATCH] for start in range(0, len(order), BATCH))


def drop_from_page_cache(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
