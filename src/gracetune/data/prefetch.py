"""Run tasks in worker threads or processes before their results are needed; keep their order.

`prefetched` is for decoding samples: it limits the number of tasks in progress and waits at most
`timeout_s` for a result. If a worker hangs, raises an exception or dies, the run stops with an
error that names the sample. `ordered_map` is for short reads that cannot hang.

Other modules prefetch other things: cache/batch_transfer.py copies batches to the device, and
cache/shard_reader.py reads cache files asynchronously.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

from gracetune.errors import GracetuneError, RunFailedError
from gracetune.events.run_control import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection


Task = TypeVar("Task")
Result = TypeVar("Result")

_KILL_TIMEOUT_S = 5.0
"""Seconds to wait for a killed worker process to end."""


class Prefetch(NamedTuple):
    """Settings for running tasks in advance: number and kind of workers, and limits."""

    num_workers: int = 0
    """Number of workers. With 0, each task runs in the caller's thread when its result is needed.
    """
    depth: int = 8
    """Largest number of tasks that are queued, running, or done but not yet taken."""
    timeout_s: float = 300.0
    """Longest time in seconds to wait for a result."""
    processes: bool = False
    """Use processes instead of threads, for work that holds the GIL or may crash."""


def worker_threads(num_workers: int | None, depth: int, timeout_s: float) -> Prefetch:
    """Return the settings for worker threads; `num_workers` None means one thread per CPU."""
    return Prefetch(num_workers or default_workers(), depth, timeout_s)


@dataclass(slots=True)
class _PendingTask(Generic[Task, Result]):
    """A submitted task; once done, either `result` or `error` is set."""

    task: Task
    done: threading.Event = field(default_factory=threading.Event)
    result: list[Result] = field(default_factory=list)
    error: Exception | None = None


def prefetched(
    tasks: Iterable[Task],
    work: Callable[[Task], Result],
    name: Callable[[Task], str],
    settings: Prefetch,
) -> Iterator[Result]:
    """Yield `work(task)` for each task, in order; workers compute the results in advance.

    `name(task)` is the name of a task in error messages. With worker processes, `work`, tasks and
    results are pickled: `work` must be a module-level function, and nothing may contain a lock or
    an open file.
    """
    if settings.num_workers == 0:
        for task in tasks:
            slot: _PendingTask[Task, Result] = _PendingTask(task)
            _run_task(slot, work)
            yield _result_of(slot, name)
        return
    with closing(_Workers(work, settings)) as workers:
        waiting: deque[_PendingTask[Task, Result]] = deque()
        for task in tasks:
            waiting.append(workers.submit(task))
            if len(waiting) >= settings.depth:
                yield _wait_for(waiting.popleft(), name, settings.timeout_s)
        while waiting:
            yield _wait_for(waiting.popleft(), name, settings.timeout_s)


def _wait_for(
    slot: _PendingTask[Task, Result], name: Callable[[Task], str], timeout_s: float
) -> Result:
    if not slot.done.wait(timeout_s):
        raise RunFailedError(
            f"{name(slot.task)}: loading it took longer than timeout_s ({timeout_s:g} s). "
            "Fix or remove it, or raise timeout_s."
        )
    return _result_of(slot, name)


def _result_of(slot: _PendingTask[Task, Result], name: Callable[[Task], str]) -> Result:
    if slot.error is not None:
        shown = str(slot.error)
        if not isinstance(slot.error, GracetuneError):
            shown = f"{type(slot.error).__name__}: {shown}"
        raise RunFailedError(
            f"{name(slot.task)} cannot be loaded: {shown.rstrip('.')}. Fix or remove it."
        ) from slot.error
    return slot.result[0]


def _run_task(slot: _PendingTask[Task, Result], work: Callable[[Task], Result]) -> None:
    try:
        slot.result.append(work(slot.task))
    except Exception as error:  # noqa: BLE001  raised again by the consumer, with the task's name
        slot.error = error
    slot.done.set()


class _Workers(Generic[Task, Result]):
    """Worker threads or processes that run submitted tasks.

    Threads are daemons, so that a thread that hangs cannot keep the process from exiting.
    """

    def __init__(self, work: Callable[[Task], Result], settings: Prefetch) -> None:
        self._inbox: queue.SimpleQueue[_PendingTask[Task, Result] | None] = queue.SimpleQueue()
        self._children = [
            _Child(work) for _ in range(settings.num_workers if settings.processes else 0)
        ]
        calls: list[Callable[[Task], Result]] = [child.do for child in self._children]
        self._num_workers = settings.num_workers
        for number, do in enumerate(calls or [work] * settings.num_workers):
            thread = threading.Thread(
                target=self._serve, args=(do,), name=f"gracetune-load-{number}", daemon=True
            )
            thread.start()

    def submit(self, task: Task) -> _PendingTask[Task, Result]:
        slot: _PendingTask[Task, Result] = _PendingTask(task)
        self._inbox.put(slot)
        return slot

    def close(self) -> None:
        """Discard queued tasks and kill worker processes; threads finish their current task."""
        while not self._inbox.empty():
            self._inbox.get()
        for _ in range(self._num_workers):
            self._inbox.put(None)
        for child in self._children:
            child.kill()

    def _serve(self, do: Callable[[Task], Result]) -> None:
        while (slot := self._inbox.get()) is not None:
            _run_task(slot, do)


class _Child(Generic[Task, Result]):
    """A worker process. One thread of this process sends it tasks and waits for the results."""

    def __init__(self, work: Callable[[Task], Result]) -> None:
        context = multiprocessing.get_context("spawn")  # do not inherit locks and threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child_main, args=(theirs, work), daemon=True)
        self._process.start()
        self._joining = threading.Lock()
        theirs.close()

    def do(self, task: Task) -> Result:
        try:
            self._connection.send(task)
            failure, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            code = self._join()
            raise RunFailedError(f"its worker process died with exit code {code}") from error
        if failure is not None:
            raise RunFailedError(failure)
        return cast("Result", result)

    def kill(self) -> None:
        self._process.kill()
        self._join()

    def _join(self) -> int | None:
        # If two threads join one process, the second returns before the exit code is known
        with self._joining:
            self._process.join(_KILL_TIMEOUT_S)
        return self._process.exitcode


def _child_main(connection: Connection, work: Callable[[Task], Result]) -> None:
    """Run tasks from the pipe in a worker process, until the parent closes the pipe or exits."""
    for number in STOP_SIGNALS:  # launchers send them to the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        slot: _PendingTask[Task, Result] = _PendingTask(task)
        _run_task(slot, work)
        if slot.error is None:
            connection.send((None, slot.result[0]))
        else:
            connection.send((f"{type(slot.error).__name__}: {slot.error}", None))


# Short reads

Item = TypeVar("Item")

CHUNK_FILES = 256
CHUNK_NBYTES = 16 * 1024**2
"""A chunk is the group of files that a worker reads as one task. It has at most CHUNK_FILES files
and CHUNK_NBYTES bytes: larger chunks spread the work less evenly, smaller ones cost scheduling."""


def default_workers() -> int:
    """Return the number of CPU cores that this process may use, at most 72 (one Grace CPU)."""
    return min(72, len(os.sched_getaffinity(0)))


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, computed by threads.

    At most two calls per thread are started in advance, which limits memory.
    """
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


def chunks(sizes: Sequence[int], num_workers: int, max_files: int | None) -> Iterator[range]:
    """Split files into chunks, one per task of a worker, and yield the index range of each chunk.

    `sizes` has the size of each file in bytes. A chunk has at most `max_files` consecutive files;
    by default so few that every worker gets several chunks.
    """
    fair = -(-len(sizes) // (4 * num_workers))
    limit = max_files or max(1, min(CHUNK_FILES, fair))
    first = nbytes = 0
    for row, size in enumerate(sizes):
        if row > first and (row - first >= limit or nbytes + size > CHUNK_NBYTES):
            yield range(first, row)
            first, nbytes = row, 0
        nbytes += size
    if first < len(sizes):
        yield range(first, len(sizes))
