"""One function over many files by threads: results in order, few in flight."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Item = TypeVar("Item")
Result = TypeVar("Result")


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
