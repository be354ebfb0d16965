"""Pass the events of a run to experiment trackers, which may fail without ending the run.

A tracker is a class with the methods of `Tracker`, in a file of its own. `TrackerSink` calls them:
from a thread, so that a slow service does not delay steps, and inside a guard, so that a broken one
does not end the run. The first failure is a notice, all are counted, and the end of the run shows
how much is missing.

A resumed run repeats the steps since its last checkpoint, with the same values. Services that only
add values would show them twice, so steps that a tracker already has are not sent again
(`Tracker.last_step`).
"""

from __future__ import annotations

import json
import queue
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gracetune.errors import ConfigError
from gracetune.events.trackers.scalars import event_scalars
from gracetune.events.types import (
    HealthChanged,
    Notice,
    RatesSpread,
    RunDescribed,
    RunEnded,
    RunStarted,
    StageProgress,
    StartTimed,
    Validated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gracetune.events.types import Event

    Emit = Callable[[Event], None]

PACKAGES = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Name in `logging.trackers` -> the package it needs. The extra has the tracker's name."""
MAX_WAITING = 10_000
"""Events that may wait to be sent; further ones are left out and counted."""
MAX_FAILURES = 5
"""Failures in a row after which a tracker is not called any more."""
CLOSE_S = 60.0
"""Seconds that the end of a run waits for a tracker."""
FAILED_CLOSE_S = 10.0
"""The same for a run that failed: other ranks may be waiting for this process to end."""
MAX_REASON = 300
NO_STEP = -1
"""`Tracker.last_step` of a run that has no values yet."""


@dataclass(frozen=True, slots=True)
class SampleFile:
    """One validation sample."""

    number: int
    path: Path
    """The sample itself: PNG, MP4 or WAV."""
    kind: Literal["image", "video", "audio"]
    prompt: str


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """The settings that all trackers have in common."""

    folder: Path
    """The output folder of the run."""
    project: str
    run_name: str
    settings: Mapping[str, Any]
    """All settings of the run, without credentials."""
    offline: bool = False
    """Keep everything on this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment variables of the process."""


class Tracker(Protocol):
    """The interface to one tool. One thread calls it, in the order of steps; any call may raise."""

    last_step: int
    """The last step that the tool has values of, from earlier processes; `NO_STEP` if none."""
    address: str
    """Where to look at the run, in words."""

    def describe(self, parts: Mapping[str, Any]) -> None:
        """Store facts about the run by name, such as `machine` and `plan`."""
        ...

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step; its samples and histograms have been stored before."""
        ...

    def log_histogram(
        self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]
    ) -> None:
        """Store a histogram; a tool without histograms ignores it."""
        ...

    def log_samples(self, step: int, grid: Path, samples: Sequence[SampleFile]) -> None:
        """Store validation samples, and an image with all of them."""
        ...

    def log_health(self, event: HealthChanged, text: str) -> None:
        """Store that a health check changed its level; `text` is one line about it."""
        ...

    def finish(self, status: str) -> None:
        """Send the rest and close; `status` is that of `RunEnded`."""
        ...


def check_installed(names: Iterable[str]) -> None:
    """Raise if the package of a tracker is not installed; import nothing."""
    for name in names:
        package = PACKAGES.get(name)
        if package is not None and find_spec(package) is None:
            raise ConfigError(
                f"logging.trackers has {name}, which needs the package {package}: "
                f"pip install 'gracetune[{name}]'."
            )


class TrackerSink:
    """An event sink that passes events to one tracker, and survives its failures."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        *,
        settings: Mapping[str, Any],
        send_samples: bool = True,
        in_thread: bool = True,
        close_s: float = CLOSE_S,
    ) -> None:
        """`in_thread=False` is for a tracker that writes local files.

        Then nothing waits in memory, and a killed process loses nothing.
        """
        self._name = name
        self._open_tracker = open_tracker
        self._settings = settings
        self._send_samples = send_samples
        self._close_s = close_s
        self._emit: Emit | None = None
        self._tracker: Tracker | None = None
        self._row: dict[str, float] = {}
        self._row_step = NO_STEP
        self._in_a_row = 0
        self._is_off = self._is_closed = self._has_ended = False
        self._unreported: list[Notice] = []
        self.num_calls = 0
        """Calls of the tracker, and events that were left out."""
        self.num_missing = 0
        """Those that failed, and events that were left out."""
        self._waiting: queue.Queue[Event | None] | None = None
        self._thread: threading.Thread | None = None
        if in_thread:
            self._waiting = queue.Queue(MAX_WAITING)
            self._thread = threading.Thread(
                target=self._work, name=f"gracetune-{name}", daemon=True
            )
            self._thread.start()
        else:
            self._open()

    def handle(self, event: Event) -> None:
        """Queue an event, and report what has failed since the last one."""
        if self._is_closed:
            return
        if self._waiting is None:
            self._process(event)
        else:
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                self.num_calls += 1
                self.num_missing += 1
        if isinstance(event, RunEnded):
            self._finish(event)
        self._report()

    def close(self) -> None:
        """Close the tracker, if the end of the run has not done so."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._waiting is None:
            self._end("failed")
        elif self._thread is not None and self._thread.is_alive():
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                return
            self._thread.join(FAILED_CLOSE_S)

    def report_to(self, emit: Emit) -> None:
        """Emit notices about failures from now on, for the other sinks of the run."""
        self._emit = emit
        self._report()

    # The thread of events

    def _finish(self, event: RunEnded) -> None:
        """Wait for the last values; the notices about them come before the end of the run."""
        self._is_closed = True
        if self._waiting is not None and self._thread is not None:
            limit = FAILED_CLOSE_S if event.status == "failed" else self._close_s
            try:
                self._waiting.put(None, timeout=limit)
                self._thread.join(limit)
            except queue.Full:
                pass
            if self._thread.is_alive():
                text = f"did not finish within {limit:.0f} s; what it has not sent is missing there"
                self._unreported.append(self._warning(text))
        if self.num_missing:
            text = f"{self.num_missing:,} of {self.num_calls:,} records are missing there"
            self._unreported.append(self._warning(text))

    def _report(self) -> None:
        while self._emit is not None and self._unreported:
            self._emit(self._unreported.pop(0))

    def _warning(self, text: str) -> Notice:
        advice = "Training is not affected; events.jsonl has everything."
        return Notice(f"{self._name}: {text}. {advice}", level="warning", fallback=True)

    # The thread of the tracker

    def _work(self) -> None:
        assert self._waiting is not None
        self._open()
        while (event := self._waiting.get()) is not None:
            self._process(event)
        self._end("failed")

    def _open(self) -> None:
        with self._guarded("could not be started"):
            self._tracker = self._open_tracker()
        if self._tracker is None:
            self._is_off = True
            return
        if self._tracker.address:
            self._unreported.append(Notice(f"tracker: {self._name}: {self._tracker.address}"))
        self._call(lambda tracker: tracker.describe({"settings": self._settings}))

    def _process(self, event: Event) -> None:
        match event:
            case RunStarted():
                facts = asdict(event)
                self._call(lambda tracker: tracker.describe({"run": facts}))
            case RunDescribed():
                self._call(lambda tracker: tracker.describe(_facts(event)))
            case RunEnded():
                self._end(event.status)
            case Notice() | StageProgress() | StartTimed():
                pass
            case _:
                self._process_step(event)

    def _end(self, status: str) -> None:
        """Close the tracker, once: at the end of the run, or if its end never came."""
        if not self._has_ended:
            self._has_ended = True
            self._flush()
            self._call(lambda tracker: tracker.finish(status))

    def _process_step(self, event: Event) -> None:
        """Send what an event has about a step, unless an earlier process has sent that step."""
        assert not isinstance(event, Notice | RunStarted | StageProgress | StartTimed)
        if self._tracker is not None and event.step <= self._tracker.last_step:
            return
        if values := event_scalars(event):
            self._add(event.step, values)
        step = max(event.step, self._row_step)  # services refuse steps that go back
        match event:
            case Validated(grid=str(grid)) if self._send_samples:
                self._call(
                    lambda t: t.log_samples(step, Path(grid), read_validation_samples(Path(grid)))
                )
            case HealthChanged():
                self._call(lambda tracker: tracker.log_health(event, health_text(event)))
            case RatesSpread():
                name = f"train/rates_{event.expert}" if event.expert else "train/rates"
                self._call(lambda t: t.log_histogram(step, name, event.limits, event.counts))

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        """Collect the numbers of a step, which come in several events, and send them together.

        Without a thread they are sent at once.
        """
        if step > self._row_step:
            self._flush()
            self._row_step = step
        self._row.update(values)
        if self._waiting is None:
            self._flush()

    def _flush(self) -> None:
        if self._row:
            step, row = self._row_step, self._row
            self._row = {}
            self._call(lambda tracker: tracker.log_scalars(step, row))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        self.num_calls += 1
        if self._is_off or self._tracker is None:
            self.num_missing += 1
            return
        tracker = self._tracker
        with self._guarded("failed"):
            call(tracker)
            self._in_a_row = 0
            return
        self.num_missing += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_FAILURES:
            self._is_off = True

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Keep any exception of a tracker's package from the run; the first one is a notice."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  a tracker's package may raise anything
            if self.num_missing == 0:
                reason = " ".join(str(error).split())[:MAX_REASON].rstrip(".")
                text = f"{what}: {type(error).__name__}: {reason}".rstrip(": ")
                self._unreported.append(self._warning(text))


def read_validation_samples(grid: Path) -> list[SampleFile]:
    """Return the samples of a validation, from the `samples.json` in the folder beside its grid."""
    folder = grid.with_suffix("")
    records = json.loads((folder / "samples.json").read_text(encoding="utf-8"))["samples"]
    return [
        SampleFile(one["number"], folder / one["file"], one["kind"], one["prompt"])
        for one in records
    ]


def health_text(event: HealthChanged) -> str:
    """Return one line about a change of health."""
    parts = (event.cause, event.action, event.advice)
    text = ". ".join(part.rstrip(".") for part in parts if part)
    return f"{event.level}: {text}" if text else event.level


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as one mapping with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= flatten_settings(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            found |= flatten_settings(
                {str(index): one for index, one in enumerate(value)}, f"{key}."
            )
        else:
            found[key] = value
    return found


class TrackerState:
    """A small JSON file in the output folder, by which a resumed run finds its run in a tool."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / "trackers" / f"{name}.json"
        self.values: dict[str, Any] = {}
        if self._path.is_file():
            self.values = json.loads(self._path.read_text(encoding="utf-8"))

    def update(self, **values: object) -> None:
        """Change some values and write the file."""
        self.values |= values
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Without fsync: this is called for every step, and only kills of the process matter.
        staging = self._path.with_suffix(".staging")
        staging.write_text(json.dumps(self.values) + "\n", encoding="utf-8")
        staging.replace(self._path)


def _facts(event: RunDescribed) -> dict[str, Any]:
    """Return what trackers store of a run's description; the names of unreadable files are not."""
    data = {name: value for name, value in event.data.items() if name != "corrupt"}
    data["unreadable_files"] = len(event.data.get("corrupt") or ())  # type: ignore[arg-type]
    facts: dict[str, Any] = {
        "machine": dict(event.machine),
        "versions": dict(event.versions),
        "data": data,
    }
    if event.plan is not None:
        facts["plan"] = dict(event.plan)
    return facts
