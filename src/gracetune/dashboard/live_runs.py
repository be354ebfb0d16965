"""Follow the logs of several runs in one thread, and pass what is new to the open pages.

The thread reads new lines a few times a second and hands each change to a callback as the JSON text
that all pages receive. Requests read the same state under a lock.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from gracetune.dashboard.log_tail import LogTail
from gracetune.dashboard.run_folder import (
    LOG_NAME,
    RunStatus,
    SampleIndex,
    find_run_folders,
    read_settings,
    run_status,
)
from gracetune.dashboard.run_state import RunState
from gracetune.dashboard.series import dump_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gracetune.dashboard.log_tail import LogChunk

POLL_S = 0.1
STATUS_EVERY_S = 1.0
RESCAN_EVERY_S = 5.0
MAX_RUNS = 64
DAMAGED = (OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError)
"""Errors that files with unexpected contents can cause. They concern one run, not the others."""


@dataclass
class LiveRun:
    """A run folder with everything that was read from it. Use it with its lock held."""

    id: str
    folder: Path
    name: str
    state: RunState = field(default_factory=RunState)
    lock: threading.RLock = field(default_factory=threading.RLock)
    reading: float = 0.0
    """Share of the log that has been read, until its end is reached for the first time."""

    problem: str = ""
    """Why the run's files cannot be read; empty if they can."""

    def __post_init__(self) -> None:
        self.tail = LogTail(self.folder / LOG_NAME)
        self.samples = SampleIndex(self.folder)
        self.status = RunStatus("waiting", "", 0, 0)
        self._has_new_samples = False
        self.refresh_status()

    def poll(self) -> dict[str, object] | None:
        """Read a part of the log; return the change for open pages, or None."""
        try:
            chunk = self.tail.read()
            with self.lock:
                self.problem = ""
                return self._apply(chunk)
        except DAMAGED as error:
            self.problem, self.reading = _name_error(error), 1.0
            return None

    def _apply(self, chunk: LogChunk) -> dict[str, object] | None:
        if chunk.restarted:
            self.state.restart()
            self.samples.clear()
        self.state.damaged += chunk.damaged
        for record in chunk.records:
            try:
                self.state.apply(record)
                if record["event"] == "validated":
                    self._has_new_samples |= self.samples.add(record) is not None
            except DAMAGED:
                self.state.damaged += 1
        self.reading = chunk.share
        if not chunk.at_end:
            return None
        delta = self.state.take_delta()
        if delta is None:
            return None
        if self._has_new_samples and "reload" not in delta:
            delta["samples"] = [one.to_json() for one in self.samples.sets]
        self._has_new_samples = False
        return delta

    def refresh_status(self) -> bool:
        """Check whether the process is alive; return True if something changed."""
        with self.lock:
            try:
                problem, found = self.problem, run_status(self.folder, self.state)
            except DAMAGED as error:
                problem, found = _name_error(error), self.status
            if problem:
                text = f"The files in {self.folder} cannot be read: {problem}"
                found = replace(found, state="unreadable", text=text, verbs=())
            changed = found != self.status
            self.status = found
        return changed

    def snapshot(
        self, points: int, low: int | None = None, high: int | None = None
    ) -> dict[str, object]:
        """Return everything about the run for a page."""
        with self.lock:
            found = self.state.snapshot(points, low, high)
            found |= self.head()
            found["samples"] = [one.to_json() for one in self.samples.sets]
        found["run_file"] = read_settings(self.folder)
        return found

    def head(self) -> dict[str, object]:
        """Return the name and the state of the run."""
        return {
            "id": self.id,
            "name": self.name,
            "folder": str(self.folder),
            "status": asdict(self.status),
            "reading": self.reading,
            "last_time": self.state.last_time,
        }


@dataclass(frozen=True)
class PlannedRun:
    """A run that has not started: its plan and its settings, as JSON."""

    id: str
    name: str
    plan: Mapping[str, object]
    run_file: object

    def snapshot(self) -> dict[str, object]:
        """Return everything about the plan for a page."""
        status = {"state": "planned", "text": "This run has not started.", "step": 0}
        return {
            "id": self.id,
            "name": self.name,
            "folder": "",
            "status": status | {"total_steps": 0, "pid": None, "verbs": []},
            "version": 0,
            "reading": 1.0,
            "plan": self.plan,
            "run_file": self.run_file,
            "tables": {},
            "latest": {},
            "records": {},
            "stages": [],
            "samples": [],
        }


class LiveRuns:
    """The runs of the page, followed by a thread from `start` to `stop`."""

    def __init__(self, paths: Sequence[Path], plans: Sequence[PlannedRun] = ()) -> None:
        self._paths = tuple(paths)
        self.plans = {plan.id: plan for plan in plans}
        self.runs: dict[str, LiveRun] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow logs", daemon=True)
        self._publish: Callable[[str], None] = _discard
        self._add_new_folders()

    def start(self) -> None:
        """Start to follow the logs, without sending changes to clients yet."""
        self._thread.start()

    def publish_to(self, publish: Callable[[str], None]) -> None:
        """Pass changes as JSON texts to a function, in the thread that follows the logs."""
        self._publish = publish

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def read_all(self) -> None:
        """Read every log to its end, for a report."""
        for run in self.runs.values():
            while run.poll() is None and run.reading < 1.0:
                pass
            run.refresh_status()

    def heads(self) -> list[dict[str, object]]:
        """Return name and state of every run and plan."""
        live = [run.head() for run in self.runs.values()]
        keys = ("id", "name", "folder", "status", "reading")
        return live + [{key: plan.snapshot()[key] for key in keys} for plan in self.plans.values()]

    def _add_new_folders(self) -> bool:
        known = {run.folder for run in self.runs.values()}
        new = [folder for folder in find_run_folders(self._paths) if folder not in known]
        for folder in new[: MAX_RUNS - len(self.runs)]:
            names = {run.name for run in self.runs.values()}
            name = folder.name
            if name in names:
                name = f"{folder.parent.name}/{folder.name}"
            number = len(self.runs)
            # A new dictionary, because requests iterate over this one in other threads.
            self.runs = self.runs | {f"r{number}": LiveRun(f"r{number}", folder, name)}
        return bool(new)

    def _follow(self) -> None:
        try:
            self._follow_until_stopped()
        finally:
            # The thread dies of an error of ours, which Python prints. Pages must not show old
            # states as if they were new.
            if not self._stopping.is_set():
                for run in self.runs.values():
                    run.problem = "the dashboard has failed; see its terminal, and start it again"
                self._check_runs()

    def _follow_until_stopped(self) -> None:
        status_at = rescan_at = 0.0
        while not self._stopping.is_set():
            busy = False
            for run in self.runs.values():
                delta = run.poll()
                if delta is not None:
                    with run.lock:
                        run.refresh_status()
                        self._send("delta", run.head() | delta)
                busy |= run.reading < 1.0 and delta is None and run.state.num_events > 0
            now = time.monotonic()
            if now >= status_at:
                status_at = now + STATUS_EVERY_S
                self._check_runs()
            if now >= rescan_at:
                rescan_at = now + RESCAN_EVERY_S
                with suppress(OSError):  # a folder that cannot be listed now; tried again later
                    if self._add_new_folders():
                        self._send("runs", {})
            self._stopping.wait(0.001 if busy else POLL_S)

    def _check_runs(self) -> None:
        for run in self.runs.values():
            if run.refresh_status() or run.reading < 1.0:
                self._send("status", run.head())

    def _send(self, kind: str, content: Mapping[str, object]) -> None:
        self._publish(f"event: {kind}\ndata: {dump_json(content)}\n\n")


def _name_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _discard(_text: str) -> None:
    pass
