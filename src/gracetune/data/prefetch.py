"""Work done ahead by threads or processes: results in order, few in flight, and never a deadlock.

Only whoever asks for results hands out tasks, each worker holds one at a time, and nobody waits for
a worker longer than `timeout_s`: one that hangs, raises or dies ends the run with the task's name.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection


Task = TypeVar("Task")
Result = TypeVar("Result")

_KILLED_S = 5.0
"""How long the kernel may take to end a process that was killed."""


class Prefetch(NamedTuple):
    """How much is done ahead, and by whom."""

    num_workers: int = 0
    """0: nothing is done ahead, each task is worked on when its result is asked for."""
    depth: int = 8
    """Most tasks handed out, or done and not yet taken."""
    timeout_s: float = 300.0
    """How long a result may keep its taker waiting."""
    processes: bool = False
    """Processes instead of threads: for work that holds Python's lock, or may crash."""


def by_threads(num_workers: int | None, depth: int, timeout_s: float) -> Prefetch:
    """Threads; as many as there are CPUs where no number is given."""
    return Prefetch(num_workers or default_workers(), depth, timeout_s)


@dataclass(slots=True)
class _PendingTask(Generic[Task, Result]):
    """A task on its way; either `result` or `error` is there once it is done."""

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
    """Like `map(work, tasks)`, ahead of its taker. `name` is for messages: which sample it was.

    With processes, `work`, tasks and results cross by multiprocessing's own means: `work` is a
    function of a module, and none of them holds a lock or an open file.
    """
    if settings.num_workers == 0:
        for task in tasks:
            slot: _PendingTask[Task, Result] = _PendingTask(task)
            _fill(slot, work)
            yield _result_of(slot, name)
        return
    with closing(_Crew(work, settings)) as crew:
        waiting: deque[_PendingTask[Task, Result]] = deque()
        for task in tasks:
            waiting.append(crew.hand_out(task))
            if len(waiting) >= settings.depth:
                yield _taken(waiting.popleft(), name, settings.timeout_s)
        while waiting:
            yield _taken(waiting.popleft(), name, settings.timeout_s)


def _taken(
    slot: _PendingTask[Task, Result], name: Callable[[Task], str], timeout_s: float
) -> Result:
    if not slot.done.wait(timeout_s):
        raise RunFailedError(
            f"{name(slot.task)}: loading it keeps the run waiting for more than timeout_s "
            f"({timeout_s:g} s). Mend or remove it, or raise timeout_s."
        )
    return _result_of(slot, name)


def _result_of(slot: _PendingTask[Task, Result], name: Callable[[Task], str]) -> Result:
    if slot.error is not None:
        shown = str(slot.error)
        if not isinstance(slot.error, GracetuneError):
            shown = f"{type(slot.error).__name__}: {shown}"
        raise RunFailedError(
            f"{name(slot.task)} cannot be loaded: {shown.rstrip('.')}. Mend or remove it."
        ) from slot.error
    return slot.result[0]


def _fill(slot: _PendingTask[Task, Result], work: Callable[[Task], Result]) -> None:
    try:
        slot.result.append(work(slot.task))
    except Exception as error:  # noqa: BLE001  whoever waits for the result raises it, by name
        slot.error = error
    slot.done.set()


class _Crew(Generic[Task, Result]):
    """The workers. Threads are daemons: one that hangs must not keep the process from ending."""

    def __init__(self, work: Callable[[Task], Result], settings: Prefetch) -> None:
        self._inbox: queue.SimpleQueue[_PendingTask[Task, Result] | None] = queue.SimpleQueue()
        self._children = [
            _Child(work) for _ in range(settings.num_workers if settings.processes else 0)
        ]
        doers: list[Callable[[Task], Result]] = [child.do for child in self._children]
        self._num_workers = settings.num_workers
        for number, do in enumerate(doers or [work] * settings.num_workers):
            thread = threading.Thread(
                target=self._serve, args=(do,), name=f"gracetune-load-{number}", daemon=True
            )
            thread.start()

    def hand_out(self, task: Task) -> _PendingTask[Task, Result]:
        slot: _PendingTask[Task, Result] = _PendingTask(task)
        self._inbox.put(slot)
        return slot

    def close(self) -> None:
        """Drop what nobody will take; children end now, threads after what they are at."""
        while not self._inbox.empty():
            self._inbox.get()
        for _ in range(self._num_workers):
            self._inbox.put(None)
        for child in self._children:
            child.kill()

    def _serve(self, do: Callable[[Task], Result]) -> None:
        while (slot := self._inbox.get()) is not None:
            _fill(slot, do)


class _Child(Generic[Task, Result]):
    """A process that does one task after another; a thread of ours waits for it."""

    def __init__(self, work: Callable[[Task], Result]) -> None:
        context = multiprocessing.get_context("spawn")  # no copies of our locks and threads
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_child_main, args=(theirs, work), daemon=True)
        self._process.start()
        theirs.close()

    def do(self, task: Task) -> Result:
        try:
            self._connection.send(task)
            failure, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(_KILLED_S)
            code = self._process.exitcode
            raise RunFailedError(f"its worker process died with exit code {code}") from error
        if failure is not None:
            raise RunFailedError(failure)
        return cast("Result", result)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_KILLED_S)


def _child_main(connection: Connection, work: Callable[[Task], Result]) -> None:
    """Ends with its parent: the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        slot: _PendingTask[Task, Result] = _PendingTask(task)
        _fill(slot, work)
        if slot.error is None:
            connection.send((None, slot.result[0]))
        else:
            connection.send((f"{type(slot.error).__name__}: {slot.error}", None))


# ------------------------------------------------------------------------------------------
# One function over many files by threads: results in order, few in flight.


Item = TypeVar("Item")

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
