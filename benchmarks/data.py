"""Measure how fast datasets are staged in host memory and read from it, and the memory they need.

Each `measure_*` function measures one claim. The compared variants run in turns, and each variant
goes first equally often. A figure is the median over the turns; a ratio is the median of the ratios
within a turn, because other programs on the machine then disturb both sides alike. The data are
5,000 synthetic JPEG files. data_decode.py measures decoding.

    python benchmarks/data.py [--pictures 5000] [--turns 20] [--workers 2] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from gracetune.config.dataset_schema import InMemorySection
from gracetune.data.prefetch import default_workers
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.data.source import Source

FILE_COUNTS = (10_000, 100_000, 1_000_000)
UNCOMPRESSED = InMemorySection(compression="none")


def main() -> None:
    """Measure everything and write results/data.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--part", help="internal: the measurement to run in this new process")
    if "--part" in sys.argv:
        args = parser.parse_args()
        print(json.dumps(PARTS[args.part](*json.loads(sys.stdin.read()))))
        return
    # Imported here only: in a new process, these modules would count as its own memory.
    import results
    from synthetic_data import make_images

    args = results.parse_arguments(parser)
    if args.rehearse:
        args.pictures, args.turns = 24, 2
    counts = (100,) if args.rehearse else FILE_COUNTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "pictures"
        make_images(folder, args.pictures)
        figures = {
            "staging": measure_staging(folder, args.turns, args.workers),
            "random reads": measure_random_reads(folder, args.turns),
            "memory": run_in_new_process("memory", str(folder)),
            "sharing": measure_sharing(folder, Path(name) / "meet"),
            "codec": measure_compression(folder),
            "many files": {f"{n:,}": run_in_new_process("many files", n) for n in counts},
            "load average at the end": round(os.getloadavg()[0], 1),
        }
    for name, value in results.flatten(figures):
        print(f"{name}: {value}")
    print(results.write("data", figures, args.out, args.commit))


def measure_staging(folder: Path, turns: int, workers: int) -> dict[str, object]:
    """Compare staging with `cat files > /dev/null` in as many processes, with a warm page cache."""
    source = FolderSource(folder)
    paths = [str(folder / key) for key in source.keys()]  # noqa: SIM118
    share = -(-len(paths) // workers)
    section = UNCOMPRESSED.model_copy(update={"num_workers": workers})

    def cat() -> None:
        command = ["xargs", "-0", "-P", str(workers), "-n", str(share), "cat"]
        names = "\0".join(paths).encode()
        subprocess.run(command, input=names, stdout=subprocess.DEVNULL, check=True)

    def stage() -> StagedSource:
        return StagedSource.stage(source, source.keys(), section, ignore_event)

    nbytes = sum(map(os.path.getsize, paths))
    spent = take_turns({"cat": cat, "staging": stage}, turns, wall_and_cpu_seconds)
    wall = {name: [seconds for seconds, _ in each] for name, each in spent.items()}
    processor = {name: [seconds for _, seconds in each] for name, each in spent.items()}
    return {
        "files": len(paths),
        "mean KB a file": round(nbytes / len(paths) / 1e3, 1),
        "workers": workers,
        "GB a second.cat": round(nbytes / median(wall["cat"]) / 1e9, 3),
        "GB a second.staging": round(nbytes / median(wall["staging"]) / 1e9, 3),
        "files a second": round(len(paths) / median(wall["staging"])),
        "share of cat's speed": round(median_ratio(wall["cat"], wall["staging"]), 3),
        "share of cat's speed, by processor time": round(
            median_ratio(processor["cat"], processor["staging"]), 3
        ),
    }


def measure_random_reads(folder: Path, turns: int) -> dict[str, object]:
    """Compare random reads of files on disk with random reads of staged files, in one thread.

    Measures CPU time, which other programs on the machine hardly affect.
    """
    source = FolderSource(folder)
    staged = StagedSource.stage(source, source.keys(), UNCOMPRESSED, ignore_event)
    keys = list(source.keys())
    random.Random(0).shuffle(keys)

    def from_files() -> None:
        for key in keys:
            with open(f"{folder}/{key}", "rb") as file:
                file.read()

    def each(read: Callable[[str], object]) -> Callable[[], None]:
        def run() -> None:
            for key in keys:
                read(key)

        return run

    variants = {"files": from_files, "in place": each(staged.view), "copied": each(staged.read)}
    spent = take_turns(variants, turns, lambda: (time.thread_time(),))
    seconds = {name: [one for (one,) in each] for name, each in spent.items()}
    return {
        "files a second": {name: round(len(keys) / median(s)) for name, s in seconds.items()},
        "microseconds in place": round(median(seconds["in place"]) / len(keys) * 1e6, 3),
        "times files, in place": round(median_ratio(seconds["files"], seconds["in place"]), 1),
        "times files, copied": round(median_ratio(seconds["files"], seconds["copied"]), 2),
    }


def measure_memory(folder: str) -> dict[str, object]:
    """Return the memory of a staged dataset relative to its stored bytes."""
    source = FolderSource(folder)
    before = private_nbytes()
    staged = StagedSource.stage(source, source.keys(), UNCOMPRESSED, ignore_event)
    held = staged.resident_nbytes + private_nbytes() - before
    return {
        "resident over stored bytes": round(held / staged.stored_nbytes, 4),
        "arena over stored bytes": round(staged.resident_nbytes / staged.stored_nbytes, 4),
        "bytes of index a file": round(staged.index_nbytes / len(staged.keys()), 1),
    }


def measure_sharing(folder: Path, shared_folder: Path) -> dict[str, object]:
    """Return the private memory of a second process that maps and reads the staged dataset."""
    source = FolderSource(folder)
    staged = StagedSource.stage(
        source, source.keys(), UNCOMPRESSED, ignore_event, shared_folder=shared_folder
    )
    joined = run_in_new_process("join", str(folder), str(shared_folder))
    share = joined["private bytes"] / staged.stored_nbytes
    return {"share of the arena a further rank": round(share, 4), **joined}


def join_shared_arena(folder: str, shared_folder: str) -> dict[str, object]:
    """Map the dataset that another process has staged, and read a byte of each page."""
    source = FolderSource(folder)
    before, began = private_nbytes(), time.perf_counter()
    events: list[object] = []
    keys = list(source.keys())
    staged = StagedSource.stage(
        source, keys, UNCOMPRESSED, events.append, shared_folder=Path(shared_folder)
    )
    seconds = time.perf_counter() - began
    assert "sharing" in str(events[-1]), events
    for key in keys:
        sum(staged.view(key)[::4096])
    return {"private bytes": private_nbytes() - before, "seconds to join": round(seconds, 4)}


def measure_compression(folder: Path) -> dict[str, object]:
    """Return the shares of bytes that `compression: auto` saves on JPEG files and on captions."""
    with tempfile.TemporaryDirectory() as name:
        captions = Path(name)
        words = [f"word{number}" for number in range(500)]
        choose = random.Random(0).choices
        for number in range(1000):
            (captions / f"{number}.txt").write_text(" ".join(choose(words, k=100)))
        return {
            "saved of JPEG files": saved_share(FolderSource(folder)),
            "saved of captions": saved_share(FolderSource(captions)),
        }


def saved_share(source: Source) -> float:
    """Return the share of a source's bytes that `compression: auto` saves."""
    staged = StagedSource.stage(source, source.keys(), InMemorySection(), ignore_event)
    whole = sum(staged.nbytes(key) for key in staged.keys())  # noqa: SIM118
    return round(1 - staged.stored_nbytes / whole, 4)


class TinyFiles:
    """A source of any number of files of 48 bytes that exist only when they are read."""

    def __init__(self, count: int) -> None:
        self._keys = [f"folder/{number:012d}.bin" for number in range(count)]

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        return key.encode() * 2

    def nbytes(self, key: str) -> int:
        return 2 * len(key)

    def describe(self) -> str:
        return f"{len(self._keys)} tiny files"


def measure_many_files(count: int) -> dict[str, object]:
    """Return the time and memory of staging `count` tiny files; both must grow linearly."""
    source = TinyFiles(count)
    before, began = private_nbytes(), wall_and_cpu_seconds()
    staged = StagedSource.stage(source, source.keys(), UNCOMPRESSED, ignore_event)
    seconds, processor = (b - a for a, b in zip(began, wall_and_cpu_seconds(), strict=True))
    last = f"folder/{count - 1:012d}.bin"
    assert staged.read(last) == last.encode() * 2
    return {
        "seconds": round(seconds, 3),
        "microseconds a file": round(seconds / count * 1e6, 2),
        "processor microseconds a file": round(processor / count * 1e6, 2),
        "bytes of index a file": round(staged.index_nbytes / count, 1),
        "bytes of the arena a file": round(staged.resident_nbytes / count, 1),
        "private bytes a file": round(max(0, private_nbytes() - before) / count, 1),
    }


PARTS: dict[str, Callable[..., dict[str, object]]] = {
    "memory": measure_memory,
    "join": join_shared_arena,
    "many files": measure_many_files,
}


def ignore_event(_event: object) -> None:
    """Drop an event."""


def take_turns(
    variants: dict[str, Callable[[], object]], turns: int, clocks: Callable[[], tuple[float, ...]]
) -> dict[str, list[tuple[float, ...]]]:
    """Return, by variant, its time in each turn on each clock.

    The result of a variant is freed after the clocks were read.
    """
    names = list(variants)
    spent: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = clocks()
            kept = variants[name]()
            ended = clocks()
            spent[name].append(tuple(b - a for a, b in zip(began, ended, strict=True)))
            del kept
    return spent


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return how many times faster ours is: the median over the turns."""
    return median(a / b for a, b in zip(theirs, ours, strict=True))


def wall_and_cpu_seconds() -> tuple[float, float]:
    """Return the wall-clock time, and the CPU time of this process and its finished children."""
    own, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    used = own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
    return time.perf_counter(), used


def run_in_new_process(part: str, *arguments: object) -> dict[str, float]:
    """Run one of PARTS in a new process, because memory of earlier work would be counted too."""
    command = [sys.executable, __file__, "--part", part]
    text = json.dumps(arguments)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def private_nbytes() -> int:
    """Return the resident memory of this process in bytes, without memory that it shares."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
