"""How fast data sets are staged and read from memory, and what that costs in bytes.

One function a claim. What is compared takes turns within one run, each of them first in as many
turns as the others. A figure is the median of its turns, and a ratio the median of the ratios
within turns: what else runs on the machine disturbs neighbours in time alike. Decoding has a script
of its own, data_decode.py. Both make their pictures: 5,000 JPEG files with the statistics of
photographs.

    python benchmarks/data.py [--pictures 5000] [--turns 20] [--workers 2]
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

from gracetune.config.schema import InMemorySection
from gracetune.data.prefetch import default_workers
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.data.source import Source

MANY = (10_000, 100_000, 1_000_000)
NEVER = InMemorySection(compression="none")


def main() -> None:
    """Measure every claim and write results/data.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--part", help="for the script itself: a measurement in a fresh process")
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](*json.loads(sys.stdin.read()))))
        return
    # Only here: what they import would be counted as a fresh process's own memory.
    import results
    from synthetic_data import make_pictures

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "pictures"
        make_pictures(folder, args.pictures)
        figures = {
            "staging": staging(folder, args.turns, args.workers),
            "random reads": random_reads(folder, args.turns),
            "memory": in_a_fresh_process("memory", str(folder)),
            "sharing": sharing(folder, Path(name) / "meet"),
            "codec": codec(folder),
            "many files": {f"{n:,}": in_a_fresh_process("many files", n) for n in MANY},
            "load average at the end": round(os.getloadavg()[0], 1),
        }
    for name, value in results.flatten(figures):
        print(f"{name}: {value}")
    print(results.write("data", figures))


def staging(folder: Path, turns: int, workers: int) -> dict[str, object]:
    """Staging against `cat files > /dev/null` by as many processes, warm."""
    source = FolderSource(folder)
    paths = [str(folder / key) for key in source.keys()]  # noqa: SIM118
    share = -(-len(paths) // workers)
    section = NEVER.model_copy(update={"num_workers": workers})

    def cat() -> None:
        command = ["xargs", "-0", "-P", str(workers), "-n", str(share), "cat"]
        names = "\0".join(paths).encode()
        subprocess.run(command, input=names, stdout=subprocess.DEVNULL, check=True)

    def stage() -> StagedSource:
        return StagedSource.stage(source, source.keys(), section, quiet)

    nbytes = sum(map(os.path.getsize, paths))
    spent = take_turns({"cat": cat, "staging": stage}, turns, seconds_and_processor)
    wall = {name: [seconds for seconds, _ in each] for name, each in spent.items()}
    processor = {name: [seconds for _, seconds in each] for name, each in spent.items()}
    return {
        "files": len(paths),
        "mean KB a file": round(nbytes / len(paths) / 1e3, 1),
        "workers": workers,
        "GB a second.cat": round(nbytes / median(wall["cat"]) / 1e9, 3),
        "GB a second.staging": round(nbytes / median(wall["staging"]) / 1e9, 3),
        "files a second": round(len(paths) / median(wall["staging"])),
        "share of cat's speed": round(ratio(wall["cat"], wall["staging"]), 3),
        "share of cat's speed, by processor time": round(
            ratio(processor["cat"], processor["staging"]), 3
        ),
    }


def random_reads(folder: Path, turns: int) -> dict[str, object]:
    """Files a second in random order: opened and read, or found in the arena; one thread.

    By processor time: nothing waits here, and what else runs on the machine does not count.
    """
    source = FolderSource(folder)
    staged = StagedSource.stage(source, source.keys(), NEVER, quiet)
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

    ways = {"files": from_files, "in place": each(staged.view), "copied": each(staged.read)}
    spent = take_turns(ways, turns, lambda: (time.thread_time(),))
    seconds = {name: [one for (one,) in each] for name, each in spent.items()}
    return {
        "files a second": {name: round(len(keys) / median(s)) for name, s in seconds.items()},
        "microseconds in place": round(median(seconds["in place"]) / len(keys) * 1e6, 3),
        "times files, in place": round(ratio(seconds["files"], seconds["in place"]), 1),
        "times files, copied": round(ratio(seconds["files"], seconds["copied"]), 2),
    }


def memory(folder: str) -> dict[str, object]:
    """What this process and the machine hold for a staged data set, over its bytes."""
    source = FolderSource(folder)
    before = private_nbytes()
    staged = StagedSource.stage(source, source.keys(), NEVER, quiet)
    held = staged.resident_nbytes + private_nbytes() - before
    return {
        "resident over stored bytes": round(held / staged.stored_nbytes, 4),
        "arena over stored bytes": round(staged.resident_nbytes / staged.stored_nbytes, 4),
        "bytes of index a file": round(staged.index_nbytes / len(staged.keys()), 1),
    }


def sharing(folder: Path, meet_in: Path) -> dict[str, object]:
    """What each further process of the machine adds, in its own memory, once it has read all."""
    source = FolderSource(folder)
    staged = StagedSource.stage(source, source.keys(), NEVER, quiet, meet_in=meet_in)
    joined = in_a_fresh_process("join", str(folder), str(meet_in))
    share = joined["private bytes"] / staged.stored_nbytes
    return {"share of the arena a further rank": round(share, 4), **joined}


def join(folder: str, meet_in: str) -> dict[str, object]:
    """The further process: maps what is there, and reads a byte of each page."""
    source = FolderSource(folder)
    before, began = private_nbytes(), time.perf_counter()
    events: list[object] = []
    keys = list(source.keys())
    staged = StagedSource.stage(source, keys, NEVER, events.append, meet_in=Path(meet_in))
    seconds = time.perf_counter() - began
    assert "sharing" in str(events[-1]), events
    for key in keys:
        sum(staged.view(key)[::4096])
    return {"private bytes": private_nbytes() - before, "seconds to join": round(seconds, 4)}


def codec(folder: Path) -> dict[str, object]:
    """What `auto` does to pictures and to their captions."""
    with tempfile.TemporaryDirectory() as name:
        captions = Path(name)
        words = [f"word{number}" for number in range(500)]
        choose = random.Random(0).choices
        for number in range(1000):
            (captions / f"{number}.txt").write_text(" ".join(choose(words, k=100)))
        return {
            "saved of JPEG files": saved(FolderSource(folder)),
            "saved of captions": saved(FolderSource(captions)),
        }


def saved(source: Source) -> float:
    """The share of its bytes that `auto` saves."""
    staged = StagedSource.stage(source, source.keys(), InMemorySection(), quiet)
    whole = sum(staged.nbytes(key) for key in staged.keys())  # noqa: SIM118
    return round(1 - staged.stored_nbytes / whole, 4)


class Tiny:
    """Any number of files of 48 bytes, made when they are read: no file system in between."""

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


def many_files(count: int) -> dict[str, object]:
    """Time and memory of so many tiny files: both must be linear."""
    source = Tiny(count)
    before, began = private_nbytes(), seconds_and_processor()
    staged = StagedSource.stage(source, source.keys(), NEVER, quiet)
    seconds, processor = (b - a for a, b in zip(began, seconds_and_processor(), strict=True))
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
    "memory": memory,
    "join": join,
    "many files": many_files,
}


def quiet(_event: object) -> None:
    """Nobody listens while it is measured."""


def take_turns(
    ways: dict[str, Callable[[], object]], turns: int, clocks: Callable[[], tuple[float, ...]]
) -> dict[str, list[tuple[float, ...]]]:
    """What each took in each turn, by each clock; what a way returns is dropped off the clocks."""
    names = list(ways)
    spent: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = clocks()
            kept = ways[name]()
            ended = clocks()
            spent[name].append(tuple(b - a for a, b in zip(began, ended, strict=True)))
            del kept
    return spent


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast, in the median turn."""
    return median(a / b for a, b in zip(theirs, ours, strict=True))


def seconds_and_processor() -> tuple[float, float]:
    """Of the clock; and of processors, by this process and by those it has waited for."""
    own, theirs = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    used = own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
    return time.perf_counter(), used


def in_a_fresh_process(part: str, *arguments: object) -> dict[str, float]:
    """Memory can only be told from a process that has done nothing else."""
    command = [sys.executable, __file__, "--part", part]
    text = json.dumps(arguments)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def private_nbytes() -> int:
    """Resident memory of this process alone: what it shares with others is not in it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
