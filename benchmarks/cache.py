"""Measure gracetune's cache: reading latents, the size of text embeddings, opening the index.

    PYTHONPATH=src:benchmarks python benchmarks/cache.py --write | --rehearse

Takes about 12 GB of disk and some minutes. Reading is compared with one file per item, as
`cache_read.py` explains. Text embeddings are stored without padding, so their size is measured on
captions of natural length. Opening is measured on an index of a million entries that was dropped
from the page cache.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

import results
import torch
from cache_read import TURNS, ReadBenchmark, drop_from_page_cache, key

from gracetune.cache.index import CacheIndex, EntryRow, ShardRow, TensorSlice
from gracetune.cache.keys import text_key
from gracetune.cache.shard_format import SEALED_SUFFIX
from gracetune.cache.shard_store import INDEX, ShardStore

SHAPES = {"16x64x64": 10_000, "16x128x128": 4_000}
"""Latent shapes of images of 512 and 1024 pixels, and the number of items to read."""
TOKENS = 512
WIDTH = 4096
CAPTIONS = 200
ENTRIES = 1_000_000
OPENING = "a photo of"
WORDS = ("an", "old", "wooden", "table", "with", "oranges", "beside", "a", "window", "in", "light")


def main() -> None:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results/cache.json")
    parser.add_argument(
        "--items", type=int, default=10_000, help="maximum number of latents to read"
    )
    parser.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure")
    args = results.parse_arguments(parser)
    torch.set_num_threads(1)
    shapes = {"8x16x16": 32} if args.rehearse else SHAPES
    turns = 1 if args.rehearse else TURNS
    folder = Path(tempfile.mkdtemp(prefix="cache-bench-", dir=args.folder))
    try:
        read = {}
        for shape, items in shapes.items():
            (folder / shape).mkdir()
            size = tuple(map(int, shape.split("x")))
            bench = ReadBenchmark(folder / shape, size, min(items, args.items), turns)
            read[shape] = bench.measure()
            shutil.rmtree(folder / shape)
        figures = {
            "read": read,
            "text": measure_text(folder / "text", 5 if args.rehearse else CAPTIONS),
            "index": measure_index(folder / "index", 1_000 if args.rehearse else ENTRIES),
        }
    finally:
        shutil.rmtree(folder)
    for name, value in results.flatten(figures):
        print(f"{name:<52} {value}")
    if args.write or args.rehearse:
        print(results.write("cache", figures, args.out, args.commit))


def measure_text(folder: Path, captions: int) -> dict[str, object]:
    """Return the stored bytes of caption embeddings, compared with padding all to 512 tokens.

    Captions have 7 to 61 words, with about 1.3 tokens per word.
    """
    draw = random.Random(0)
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


def measure_index(folder: Path, entries: int) -> dict[str, object]:
    """Return the seconds to open a cache of many entries, and to finish the first lookup."""
    ShardStore(folder).close()
    index = CacheIndex(folder / INDEX)
    length = entries << 19
    index.add_shard(ShardRow("shard", 4096, length))
    places = (TensorSlice("latents", "BF16", (16, 128, 128), 0, 524288),)
    about = {"kind": "latents", "sample": "0" * 64, "geometry": "centre", "encoder": "0" * 40}
    for start in range(0, entries, 50_000):
        numbers = range(start, min(start + 50_000, entries))
        rows = [
            EntryRow(0, key(n), "shard", n << 19, 524288, places, bytes(16), about) for n in numbers
        ]
        index.add(rows, "shard", length)
    index.close()
    with open(folder / "shards" / f"shard{SEALED_SUFFIX}", "wb") as shard:
        shard.truncate(length)  # sparse; a lookup checks the length of the shard
    drop_from_page_cache(folder / INDEX)
    began = time.perf_counter()
    with ShardStore(folder) as store:
        opened = time.perf_counter() - began
        found = store.has([key(entries // 2), "absent"])
        answered = time.perf_counter() - began
    assert found == [True, False]
    return {
        "entries": entries,
        "nbytes": (folder / INDEX).stat().st_size,
        "open_s": round(opened, 4),
        "open_and_ask_s": round(answered, 4),
    }


if __name__ == "__main__":
    main()
