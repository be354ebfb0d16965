"""Find a rank that failed, was killed or stalled, name it on every other rank, and end the run.

A collective operation with a dead rank fails with a text such as "connection closed by peer", or
hangs. So every rank runs two daemon threads beside its main thread:

    heartbeat   publishes what this rank is doing to a key-value store (a `TCPStore` that rank 0
                hosts), and reads what the other ranks have published
    watch       looks for a lost rank: one that has published an error, whose process has
                disappeared from this machine, or that has published nothing for
                `distributed.stall_timeout_s`

If a rank is lost, the main thread usually gets an error from torch.distributed, which
`RankMonitor.naming_lost_ranks` replaces by one that names the rank, its host and the actual error.
A main thread that hangs in NCCL or gloo cannot raise, so the watch thread ends the process.

The heartbeat thread only shows that a process lives. A rank whose main thread is busy for minutes
(compilation, encoding, validation) is not lost; if the others wait longer than
`distributed.timeout_s`, their collective operation fails, and the error names the rank that made no
progress for the longest time.

Clocks of machines differ, so each rank measures ages with its own clock, from the moment when it
first reads a new heartbeat.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gracetune.config.environment import process_environment
from gracetune.distributed.rank_table import Heartbeat, LostRank, RankTable
from gracetune.errors import GracetuneError, InterruptedRunError, RunFailedError, redact_urls
from gracetune.events.run_control import process_start_time
from gracetune.events.types import (
    CheckpointSaved,
    Notice,
    RunStarted,
    StageProgress,
    StepDone,
    Validated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._C._distributed_c10d import TCPStore

    from gracetune.config.schema import DistributedSection
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.types import Event

TICK_S = 1.0
"""Seconds between two looks for a lost rank; less if `distributed.heartbeat_s` is short."""
GRACE_S = 3.0
"""Seconds that the main thread has to end by itself when a rank is lost."""
CLEAN_UP_S = 20.0
"""Seconds that a main thread which is ending has for cleaning up."""
LINGER_S = 5.0
"""Seconds that a failed rank 0, which hosts the store, waits until the others have read its
error."""
MAX_ERROR_LENGTH = 2000
MIN_COMPARED = 4
"""Smallest number of times of each rank from which a slow rank is named."""
_BEAT, _CHANGES = "beat/", "changes"
"""Keys in the store: the heartbeat of each rank, and the number of ranks that ended or failed."""


# Errors


class LostRankError(RunFailedError):
    """Another rank failed, was killed or stalled, so this rank cannot continue.

    `cause` is the text about that rank. The exit code is that of the rank that failed.
    """

    def __init__(self, message: str, cause: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.cause = cause
        self.exit_code = exit_code


_DISTRIBUTED_ERROR = re.compile(
    r"\bgloo\b|nccl|connection (closed|reset|refused)|broken pipe|TCPStore|process group",
    re.IGNORECASE,
)
"""Words in errors of torch.distributed, which often are plain RuntimeErrors."""
_ADDRESS = re.compile(r"\[([0-9a-f.:]+)\]:\d+")
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


def is_lost_rank_error(error: BaseException) -> bool:
    """Return True for an error of torch.distributed: another rank is lost or cannot be reached."""
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError | ConnectionError):
        return False
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    is_other = isinstance(error, torch.OutOfMemoryError)
    return has_peers and not is_other and _DISTRIBUTED_ERROR.search(str(error)) is not None


def lost_contact_text(error: BaseException, timeout_s: float) -> str:
    """Return the text about a lost rank of which nothing more than torch's error is known."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    address = _ADDRESS.search(reason)
    where = f" at {address[1]}" if address else ""
    return (
        f"contact to another rank{where} is lost ({reason}). That rank was killed, has failed, or "
        f"took longer than distributed.timeout_s ({timeout_s:g} s); its own output tells more"
    )


# The threads


class RankMonitor:
    """Watches the other ranks while a run is built and trained; one process has none to watch.

    It is an event sink as well: every event is a sign of progress.
    """

    def __init__(
        self,
        group: RankGroup,
        settings: DistributedSection,
        resume_hint: Callable[[], str] = str,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        """Prepare to watch; `watch_ranks` starts and stops the threads.

        `resume_hint` returns what to do after a failure, for error messages. `exit_process` ends
        this process at once.
        """
        self._group = group
        self._settings = settings
        self._resume_hint = resume_hint
        self._exit_process = exit_process
        self._tick_s = min(TICK_S, settings.heartbeat_s / 2)
        self._activity, self._progress_at = Heartbeat(0, None).activity, time.monotonic()
        self._report: Callable[[str], None] | None = None
        self._own = Heartbeat(os.getpid(), process_start_time(os.getpid()))
        self._now = 0.0
        """Seconds since the start without those in which this process was stopped: a rank that was
        stopped has not heard of the others, and must not conclude that they are lost."""
        self._table: RankTable | None = None
        self._store_error = ""
        self._is_ending = self._has_seen_failure = self._wants_refresh = False
        self._wake, self._is_published = threading.Event(), threading.Event()
        self._is_left = threading.Event()
        self._threads: list[threading.Thread] = []

    # For the run

    def progress(self, text: str) -> None:
        """Remember what this rank has just done; other ranks show it if this one is lost."""
        self._activity, self._progress_at = text, time.monotonic()

    def handle(self, event: Event) -> None:
        """Take an event as a sign of progress."""
        match event:
            case StepDone():
                self.progress(f"step {event.step}")
            case StageProgress():
                self.progress(f"{event.stage}: {event.done} of {event.total} {event.unit}")
            case CheckpointSaved():
                self.progress(f"the checkpoint of step {event.step}")
            case Validated():
                self.progress(f"validation at step {event.step}")
            case RunStarted():
                self.progress(f"step {event.start_step}")
            case Notice():
                self._progress_at = time.monotonic()
            case _:
                pass

    def close(self) -> None:
        """Do nothing; `watch_ranks` ends the threads."""

    @contextmanager
    def reporting_to(self, report: Callable[[str], None]) -> Iterator[None]:
        """Name lost ranks in errors of the `with` block.

        `report` receives the message before the watch thread ends a process that hangs, so that
        the log of the run has it.
        """
        self._report = report
        try:
            with self.naming_lost_ranks():
                yield
        finally:
            self._report = None

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Replace an error of torch.distributed by one that names the lost rank and its error."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if not is_lost_rank_error(error):
                raise
            self._is_ending = True
            lost = self._find_cause(error)
            text = lost_contact_text(error, self._settings.timeout_s) if lost is None else lost.text
            code = 1 if lost is None else lost.exit_code
            raise LostRankError(self._message(text), text, code) from error

    # The start and the end

    def start(self) -> None:
        """Connect to the store and start the threads. All ranks must call this together."""
        store, problem = self._connect()
        problems = self._group.gather(problem)
        for rank, text in enumerate(problems):
            if text:
                raise RunFailedError(
                    f"{self._group.name(rank)} cannot connect to the heartbeats of "
                    f"{self._group.name(0)}: {text}. The machines must reach each other on all "
                    "ports: check firewalls, and the host name or address of the first machine."
                )
        assert store is not None
        store.set(f"{_BEAT}{self._group.rank}", self._own.encode())
        store.add(_CHANGES, 0)
        beats = self._group.gather(self._own)  # so every rank has set its key
        timeout = self._settings.stall_timeout_s
        self._table = RankTable(self._group, beats, timeout, _is_alive, self._now)
        targets = {"heartbeat": lambda: self._exchange(store), "watch": self._watch}
        for name, target in targets.items():
            thread = threading.Thread(target=target, name=f"gracetune-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self, error: BaseException | None) -> None:
        """Tell the other ranks how this rank ended, and stop watching them.

        Rank 0 hosts the store, so it waits: after an error until the others know it, else until
        the others have ended, too.
        """
        self._is_ending = True
        self._publish_end(_final_heartbeat(self._own, error))
        limit = LINGER_S if error is not None else self._settings.stall_timeout_s
        deadline = time.monotonic() + limit
        while self._group.is_main and self._is_awaited() and time.monotonic() < deadline:
            time.sleep(self._tick_s / 4)
        self._is_left.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(LINGER_S)  # a thread that waits for a dead connection is left behind

    def _is_awaited(self) -> bool:
        """Return True while another rank still needs the store."""
        assert self._table is not None
        if self._own.state == "failed":
            present = self._table.find_present(self._now, 3 * self._settings.heartbeat_s)
            return any(not self._table.beats[rank].has_seen_failure for rank in present)
        return bool(self._table.running) and self._find_lost() is None

    def _connect(self) -> tuple[TCPStore | None, str]:
        """Return this rank's connection to the store of rank 0, or the reason why there is none."""
        timeout = timedelta(seconds=self._settings.stall_timeout_s)
        master = process_environment().get("MASTER_ADDR", "")
        open_store: type[TCPStore] = dist.TCPStore  # type: ignore[attr-defined]
        store, problem = None, ""
        if self._group.is_main:
            try:
                store = open_store(
                    "127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False
                )
            except RuntimeError as error:
                problem = str(error).splitlines()[0]
        port = 0 if store is None else store.port
        address, port = self._group.broadcast((address_towards(master), port))
        if self._group.is_main or not port:
            return store, problem
        if 0 in self._group.local_ranks:
            address = "127.0.0.1"
        host = address or master or self._group.hosts[0]
        try:
            return open_store(host, port, is_master=False, timeout=timeout), ""
        except RuntimeError as error:
            return None, f"{host}:{port}: {str(error).splitlines()[0]}"

    # The heartbeat thread

    def _exchange(self, store: TCPStore) -> None:
        """Publish this rank's heartbeat and read those of the others, until the run has ended."""
        assert self._table is not None
        published_at = read_at = float("-inf")
        known_changes = 0
        keys = [f"{_BEAT}{rank}" for rank in range(self._group.world_size)]
        last = self._own
        try:
            while not self._is_left.is_set():
                now, period = time.monotonic(), self._settings.heartbeat_s
                if now - published_at >= period or self._has_news(last):
                    published_at, last = now, self._publish(store, last)
                changes = store.add(_CHANGES, 0)
                # Not when this rank publishes: a rank with news in every tick would never read.
                is_due = now - read_at >= period
                if is_due or changes != known_changes or self._wants_refresh:
                    read = [Heartbeat(**json.loads(text)) for text in store.multi_get(keys)]
                    self._table.update(read, self._now)
                    read_at, known_changes, self._wants_refresh = now, changes, False
                    self._acknowledge(read)
                else:
                    self._table.touch(self._now)
                self._wake.wait(self._tick_s)
                self._wake.clear()
        except (RuntimeError, ConnectionError) as error:  # rank 0 and its store are gone
            self._store_error = str(error).splitlines()[0]
            self._is_published.set()

    def _has_news(self, last: Heartbeat) -> bool:
        """Return True if this rank has changed since its last heartbeat."""
        own = self._own
        is_same = own.state == last.state and self._activity == last.activity
        return not is_same or self._has_seen_failure != last.has_seen_failure

    def _publish(self, store: TCPStore, last: Heartbeat) -> Heartbeat:
        """Publish this rank's heartbeat; `last` is the one before it."""
        beat = replace(
            self._own,
            count=last.count + 1,
            activity=self._activity,
            idle_s=time.monotonic() - self._progress_at,
            has_seen_failure=self._has_seen_failure,
        )
        store.set(f"{_BEAT}{self._group.rank}", beat.encode())
        if beat.state != last.state:
            store.add(_CHANGES, 1)
        if beat.state != "running":
            self._is_published.set()
        return beat

    def _acknowledge(self, beats: Sequence[Heartbeat]) -> None:
        """Let the others know that this rank has read of a failure."""
        has_failure = any(beat.state == "failed" for beat in beats)
        if has_failure and not self._has_seen_failure:
            self._has_seen_failure = True
            self._wake.set()

    def _publish_end(self, beat: Heartbeat) -> None:
        """Let the heartbeat thread publish the last heartbeat, and wait for it.

        Only that thread uses the store: a connection to a lost machine can block it for long.
        """
        self._own = beat
        self._wake.set()
        self._is_published.wait(2.0)

    # The watch thread

    def _watch(self) -> None:
        """Look for a lost rank, and end this process if its main thread does not end by itself."""
        before = time.monotonic()
        while not self._is_left.wait(self._tick_s):
            now = time.monotonic()
            self._now += min(now - before, 3 * self._tick_s)
            before = now
            lost = None if self._own.state != "running" else self._find_lost()
            if lost is not None:
                self._end_process(lost)
                return

    def _end_process(self, lost: LostRank) -> None:
        if self._is_left.wait(GRACE_S):
            return
        if self._is_ending and self._is_left.wait(CLEAN_UP_S):
            return
        message = self._message(lost.text)
        if not self._is_ending:  # else the main thread has reported it, and its clean-up hangs
            # Not `sys.stderr`: the main thread may hold its lock.
            with suppress(OSError):
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _line(message))
            self._report_in_time(message)
            own = replace(self._own, state="failed", error=lost.text, is_cause=False)
            self._publish_end(replace(own, exit_code=lost.exit_code))
        self._kill_stalled(lost.rank)
        self._exit_process(lost.exit_code)

    def _report_in_time(self, message: str) -> None:
        """Report to the log of the run. The main thread may hold its lock, so do not wait long."""
        report = self._report
        if report is None:
            return
        thread = threading.Thread(target=report, args=(message,), daemon=True)
        thread.start()
        thread.join(2.0)

    def _kill_stalled(self, rank: int) -> None:
        """Kill a stalled process of this machine, which would keep its memory and its GPU."""
        assert self._table is not None
        beat = self._table.beats[rank]
        is_local = rank in self._group.local_ranks
        if is_local and beat.state == "running" and _is_alive(beat):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, signal.SIGKILL)

    def _find_lost(self) -> LostRank | None:
        assert self._table is not None
        return self._table.find_lost(self._now, self._store_error)

    def _find_cause(self, error: BaseException) -> LostRank | None:
        """Return the rank because of which torch.distributed failed; wait a little to learn it."""
        if self._table is None:
            return None
        heartbeat_s = self._settings.heartbeat_s
        deadline = time.monotonic() + min(3 * heartbeat_s, self._settings.stall_timeout_s) + 1
        self._wants_refresh = True  # to learn the newest activity of the other ranks
        self._wake.set()
        refreshed_by = time.monotonic() + 1
        while self._wants_refresh and not self._store_error and time.monotonic() < refreshed_by:
            time.sleep(0.01)
        while time.monotonic() < deadline:
            lost = self._find_lost()
            if lost is not None:
                return lost
            time.sleep(self._tick_s / 4)
        is_timeout = _TIMEOUT.search(str(error)) is not None
        return self._table.most_behind(self._now, heartbeat_s, is_timeout)

    def _message(self, text: str) -> str:
        own = self._group.name(self._group.rank)
        return f"{text.rstrip('.')}. So {own} ends, too. {self._resume_hint()}".rstrip()


@contextmanager
def watch_ranks(
    group: RankGroup, settings: DistributedSection, resume_hint: Callable[[], str] = str
) -> Iterator[RankMonitor]:
    """Watch the other ranks while the `with` block runs. All ranks must enter it together.

    An error of torch.distributed in the block is replaced by one that names the lost rank. Other
    errors are published, so that the other ranks name them. With one process nothing is watched.
    """
    monitor = RankMonitor(group, settings, resume_hint)
    if group.world_size == 1:
        yield monitor
        return
    monitor.start()
    try:
        with monitor.naming_lost_ranks():
            yield monitor
    except BaseException as error:  # also Ctrl-C and SystemExit: the other ranks must learn it
        monitor.finish(error)
        raise
    monitor.finish(None)


def _final_heartbeat(own: Heartbeat, error: BaseException | None) -> Heartbeat:
    """Return the last heartbeat of a rank that ends, with its error if it has failed."""
    if error is None or isinstance(error, InterruptedRunError):
        return replace(own, state="ended")
    if isinstance(error, LostRankError):
        code = error.exit_code
        return replace(own, state="failed", error=error.cause, is_cause=False, exit_code=code)
    if isinstance(error, GracetuneError):
        return replace(own, state="failed", error=str(error), exit_code=error.exit_code)
    text = redact_urls(f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH].rstrip(": \n"))
    return replace(own, state="failed", error=text, exit_code=1)


def _is_alive(beat: Heartbeat) -> bool:
    """Return True if the process of a rank on this machine still exists."""
    return process_start_time(beat.pid) == beat.birth


def _line(message: str) -> bytes:
    return f"gracetune: {message}\n".encode(errors="replace")


def address_towards(host: str) -> str:
    """Return this machine's address on the network that leads to `host`, or an empty string.

    The address is empty if the host is unknown, or if it is this machine under a name that has
    only a loopback address, which other machines cannot use. No packet is sent.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            address = str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


# Stragglers


class StragglerWatch:
    """Finds a rank that is persistently slower than the others.

    All ranks wait for the slowest one in every step, so one hot or shared GPU slows down the run.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        steps_each: int = 1,
        window: int = 20,
        factor: float = 1.25,
        every: int = 500,
    ) -> None:
        """Compare the last `window` steps; repeat a message after `every` steps at the earliest.

        Times are added after each `steps_each` steps; at least four such times are compared. A rank
        is slow if its steps take more than `factor` times the median of the other ranks.
        """
        self._hosts = list(hosts)
        self._steps_each = steps_each
        self._factor = factor
        self._every = max(1, every // steps_each)
        self._times: deque[Sequence[float]] = deque(maxlen=max(MIN_COMPARED, window // steps_each))
        self._until_next = 0

    def add(self, seconds: Sequence[float]) -> str | None:
        """Add the seconds per step that each rank computed, without its waiting for other ranks.

        Returns a message if a rank was slow in the last steps, in sum and three times out of four.
        """
        assert len(seconds) == len(self._hosts), (len(seconds), len(self._hosts))
        self._until_next -= 1
        self._times.append(tuple(seconds))
        count = len(self._times)
        if len(seconds) < 2 or count != self._times.maxlen or self._until_next > 0:
            return None
        totals = [sum(column) for column in zip(*self._times, strict=True)]
        rank = max(range(len(totals)), key=totals.__getitem__)
        usual = _median_of_others(totals, rank)
        num_slow = sum(
            times[rank] > self._factor * _median_of_others(times, rank) for times in self._times
        )
        if totals[rank] <= self._factor * usual or 4 * num_slow < 3 * count:
            return None
        self._until_next = self._every
        own, others = totals[rank] / count, usual / count
        return (
            f"rank {rank} on {self._hosts[rank]} is slow: it needed {own:.3g} s for its part of a "
            f"step, the others {others:.3g} s (mean of {count * self._steps_each} steps), and all "
            "ranks wait for it. Check temperature and clocks of its GPU (nvidia-smi -q -d "
            "PERFORMANCE), other processes on that machine, and its disk."
        )


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return statistics.median(value for other, value in enumerate(values) if other != rank)
