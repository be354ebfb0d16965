"""One function over many files by threads: results in order, few in flight."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")

CHUNK_FILES = 256
CHUNK_NBYTES = 16 * 1024**2
"""What a worker takes at a time: enough to make the hand-over cheap, little enough to share out."""


def default_workers() -> int:
    """As many as this process may use CPUs; more than a Grace CPU's 72 only adds contention."""
    return min(72, len(os.sched_getaffinity(0)))


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Iterator[Result]:
    """Like `map`, by threads; few are in flight, so a consumer who stops early stops the reads."""
    window: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="gracetune-read")
    try:
        for item in items:
            window.append(pool.submit(function, item))
            if len(window) > 2 * num_workers:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def chunks(sizes: Sequence[int], num_workers: int, most_files: int | None) -> Iterator[range]:
    """Cut rows with these sizes into the pieces that workers take: by files and by bytes.

    Every worker gets some, however few there are: a piece has no more than its share.
    """
    fair = -(-len(sizes) // (4 * num_workers))
    limit = most_files or max(1, min(CHUNK_FILES, fair))
    first = nbytes = 0
    for row, size in enumerate(sizes):
        if row > first and (row - first >= limit or nbytes + size > CHUNK_NBYTES):
            yield range(first, row)
            first, nbytes = row, 0
        nbytes += size
    if first < len(sizes):
        yield range(first, len(sizes))
