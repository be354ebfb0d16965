"""What the cache's claims rest on: reading against one file an item, text without padding, opening.

Latents of 16x128x128 in bf16 are read by shuffled batches of 8. Warm: everything is in the page
cache, and each way has read everything once; the ways take turns, and the best pass of each counts,
because other work on the machine only ever adds time. `warm` counts until the
tensors of a batch are in hand: for shards and safetensors these are views of mapped files, so no
byte of them is read. `gathered` counts until they are one tensor, with every byte copied: this is
what a loader pays, and there the copy, which is the same for all, is most of ours.

Cold: the files are written back and the kernel is asked to forget them (posix_fadvise DONTNEED),
which needs no root; names and sizes of files stay known to it, which favours one file an item.
Batches are gathered, so that every byte is read, and compared with its checksum by ours. Our store
is told sixteen batches ahead what will be needed, as a loader that knows its order can; the ways
with one file an item have nothing to tell.

`python benchmarks/cache.py --write` takes about 12 GB of disk and three minutes.
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
from pathlib import Path
from typing import TYPE_CHECKING

import results
import torch
from safetensors.torch import load_file, save_file

from gracetune.cache.index import Index, Row, ShardRow, TensorPlace
from gracetune.cache.keys import text_key
from gracetune.cache.shard_store import INDEX, ShardStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Read = Callable[[Sequence[int]], list[Tensor]]

SHAPE = (16, 128, 128)
BATCH = 8
COUNTS = {"shards": 10_000, "safetensors": 10_000, "torch.save": 2_000, "gzip": 100}
"""Items of each way. The slow ones are measured on fewer; all figures are seconds an item."""
WARM_PASSES = 2
COLD_ITEMS = 600
AHEAD = 16
"""Batches that our store is told of before they are read cold."""
TOKENS = 512
WIDTH = 4096
ENTRIES = 1_000_000
OPENING = "a photo of"
WORDS = ("an", "old", "wooden", "table", "with", "oranges", "beside", "a", "window", "in", "light")


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results/cache.json")
    parser.add_argument("--items", type=int, default=10_000, help="latents that are read")
    parser.add_argument("--folder", type=Path, default=None, help="a disk to measure on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="cache-bench-", dir=args.folder))
    try:
        figures = {
            "read": measure_reading(folder, args.items),
            "text": measure_text(folder / "text"),
            "index": measure_index(folder / "index"),
        }
    finally:
        shutil.rmtree(folder)
    for name, value in results.flatten(figures):
        print(f"{name:<44} {value}")
    if args.write:
        print(results.write("cache", figures))


def measure_reading(folder: Path, items: int) -> dict[str, object]:
    """Microseconds an item, and how many times faster than the best of the others."""
    counts = {name: min(count, items) for name, count in COUNTS.items()}
    latents = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    write_all(folder, counts, latents)
    store = ShardStore(folder / "shards")
    ways = readers(folder, store)
    for name, read in ways.items():
        one_pass(read, counts[name], seed=0)
    warm, gathered = dict.fromkeys(ways, 1.0), dict.fromkeys(ways, 1.0)
    slab = torch.empty(BATCH, *SHAPE, dtype=torch.bfloat16)
    for seed in range(1, 1 + WARM_PASSES):
        for name, read in ways.items():
            warm[name] = min(warm[name], one_pass(read, counts[name], seed))
            gathered[name] = min(
                gathered[name], one_pass(gathering(read, slab), counts[name], seed)
            )
    store.close()
    cold = {name: cold_pass(folder, name, counts[name], slab) for name in ways}
    measured = {"warm": warm, "gathered": gathered, "cold": cold}
    return {
        "items": items,
        "nbytes_an_item": latents[0].nbytes,
        "items_of": counts,
        "us_an_item": {
            what: {name: round(seconds * 1e6, 1) for name, seconds in ways.items()}
            for what, ways in measured.items()
        },
        "times_the_best_other": {
            what: round(best_of_others(ways) / ways["shards"], 2) for what, ways in measured.items()
        },
    }


def best_of_others(seconds: dict[str, float]) -> float:
    """The fastest way that is not ours."""
    return min(value for name, value in seconds.items() if name != "shards")


def write_all(folder: Path, counts: dict[str, int], latents: Tensor) -> None:
    """Every item differs, so that nothing is cheaper than it would be."""
    for name in counts:
        (folder / name).mkdir()
    with ShardStore(folder / "shards") as store:
        for start in range(0, counts["shards"], 64):
            numbers = range(start, min(start + 64, counts["shards"]))
            store.put_many({key(n): {"latents": item(latents, n)} for n in numbers})
    for n in range(counts["safetensors"]):
        save_file({"latents": item(latents, n)}, folder / "safetensors" / f"{n}")
    for n in range(counts["torch.save"]):
        torch.save(item(latents, n), folder / "torch.save" / f"{n}")
    for n in range(counts["gzip"]):
        buffer = io.BytesIO()
        torch.save(item(latents, n), buffer)
        (folder / "gzip" / f"{n}").write_bytes(gzip.compress(buffer.getvalue(), 6))
    os.sync()


def item(latents: Tensor, number: int) -> Tensor:
    """A latent of its own."""
    made = latents[number % len(latents)].clone()
    made.view(-1)[number] = number
    return made


def key(number: int) -> str:
    """As long as a real one."""
    return f"{number:040d}"


def readers(folder: Path, store: ShardStore) -> dict[str, Read]:
    """How each way has the tensors of a batch in hand."""

    def shards(numbers: Sequence[int]) -> list[Tensor]:
        entries = store.get_many([key(n) for n in numbers])
        return [entry["latents"] for entry in entries if entry is not None]

    def unpickled(numbers: Sequence[int]) -> list[Tensor]:
        paths = (folder / "torch.save" / f"{n}" for n in numbers)
        return [torch.load(path, weights_only=True) for path in paths]

    def unzipped(numbers: Sequence[int]) -> list[Tensor]:
        data = (gzip.decompress((folder / "gzip" / f"{n}").read_bytes()) for n in numbers)
        return [torch.load(io.BytesIO(one), weights_only=True) for one in data]

    return {
        "shards": shards,
        "safetensors": lambda numbers: [
            load_file(folder / "safetensors" / f"{n}")["latents"] for n in numbers
        ],
        "torch.save": unpickled,
        "gzip": unzipped,
    }


def gathering(read: Read, slab: Tensor) -> Read:
    """The same, into one tensor that is used again and again."""
    return lambda numbers: [torch.stack(read(numbers), out=slab[: len(numbers)])]


def shuffled(count: int, seed: int) -> list[int]:
    """Another order for each seed."""
    order = [*range(count)]
    random.Random(seed).shuffle(order)
    return order


def one_pass(read: Read, count: int, seed: int, limit: int | None = None) -> float:
    """Seconds an item over shuffled batches."""
    order = shuffled(count, seed)[:limit]
    began = time.perf_counter()
    for start in range(0, len(order), BATCH):
        read(order[start : start + BATCH])
    return (time.perf_counter() - began) / len(order)


def telling(read: Read, store: ShardStore, order: Sequence[int]) -> Read:
    """The same, with the store told what comes."""
    told = iter(range(0, len(order), BATCH))

    def next_one() -> None:
        start = next(told, None)
        if start is not None:
            store.will_need([key(n) for n in order[start : start + BATCH]])

    for _ in range(AHEAD):
        next_one()

    def both(numbers: Sequence[int]) -> list[Tensor]:
        next_one()
        return read(numbers)

    return both


def cold_pass(folder: Path, name: str, count: int, slab: Tensor) -> float:
    """The best of a few passes, each after the kernel forgot the files."""
    seconds = []
    for seed in (1, 2, 3):
        for path in (folder / name).rglob("*"):
            if path.is_file():
                forget(path)
        with ShardStore(folder / "shards") as store:
            read = gathering(readers(folder, store)[name], slab)
            if name == "shards":
                read = telling(read, store, shuffled(count, seed)[:COLD_ITEMS])
            seconds.append(one_pass(read, count, seed, COLD_ITEMS))
    return min(seconds)


def forget(path: Path) -> None:
    """Drop a file's pages; they were written back before."""
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
    places = (TensorPlace("latents", "BF16", SHAPE, 0, 524288),)
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
