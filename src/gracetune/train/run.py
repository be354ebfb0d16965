"""Run one training run, from a checked run file to the exported result.

`run_training` checks the output folder, finds the checkpoint to resume from, opens the log and the
other event sinks, builds the session (`build.py`), trains (`loop.py`) and exports the result.
"""

from __future__ import annotations

import filecmp
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from gracetune.atomic_files import check_writable, full_disk_named, write_text
from gracetune.config.environment import process_environment
from gracetune.config.load import resolved_json
from gracetune.config.schema import RunFile
from gracetune.distributed.heartbeat import is_lost_rank_error, lost_contact_text, watch_ranks
from gracetune.distributed.layout import build_layout
from gracetune.distributed.ranks import SINGLE, connect_ranks
from gracetune.errors import CheckpointError, ConfigError, InterruptedRunError, RunFailedError
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.phase_timer import PhaseTimer
from gracetune.events.run_control import STOP_SIGNALS, VERBS, RunControl, reserve_folder
from gracetune.events.trackers.prometheus import PrometheusSink
from gracetune.events.trackers.tracker import TrackerOptions, TrackerSink
from gracetune.events.trackers.webhooks import WebhookSink
from gracetune.events.types import (
    FINISHED,
    CheckpointSaved,
    Notice,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)
from gracetune.memory.sensors import MachineSensors
from gracetune.optim.registry import SCHEDULE_DEPENDS_ON_LENGTH
from gracetune.train import checkpoint
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.checkpoint import ADAPTERS_FOLDER, CHECKPOINT_FOLDER
from gracetune.train.export import find_result, result_folder
from gracetune.train.last_seen import LastSeen, explain_previous_end, recording_crashes
from gracetune.train.loop import train_loop
from gracetune.train.preflight import RESUME_WORDS, check_before_torch, effective_run
from gracetune.train.run_identity import (
    changed_settings,
    check_same_run,
    identity_settings,
    removed_settings,
)
from gracetune.train.telemetry import Telemetry
from gracetune.train.validate import VALIDATION_FOLDER, grid_path, validation_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import FrameType, TracebackType
    from typing import Literal

    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.trackers.tracker import Tracker
    from gracetune.events.types import Event, Sink
    from gracetune.train.build import Session
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.export import ExportedResult
    from gracetune.train.step import TrainProgress

    Status = Literal["done", "interrupted", "failed"]
    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


LOG_FILE = "events.jsonl"
RECORD_FILE = "run.json"
OTHER_RECORD_FILE = "run.resolved.json"
"""Name of the record of a run if the user has a `run.json` in the output folder."""
MAX_NAMED = 5
"""Number of changed settings that the message of a finished run names."""
RECORDED_SECTIONS = {"output_dir", "seed", "model", "datasets", "train", "optimizer", "logging"}
"""Sections that every `run.json` written by a run has."""
PRECISION_NAMES = {"no": "fp32", "bf16": "bf16"}


def run_training(
    run: RunFile,
    resume_from: str = "auto",
    sinks: Iterable[Sink] = (),
    notices: Iterable[str] = (),
    telemetry: Mapping[str, Any] = MappingProxyType({}),
    timer: PhaseTimer | None = None,
) -> RunEnded:
    """Train as the run file says, export the result and return the `RunEnded` event.

    `resume_from` is `auto` or `latest` (the newest checkpoint, if any), `none`, or the path of a
    checkpoint. Events go to `sinks`, to the log in the output folder and to the configured
    trackers. `notices` are remarks from reading the run file; they are written to the log.
    `telemetry` has arguments for `Telemetry`, such as other `sensors`. The returned event lists the
    output files. `timer` was started with the process, to report how long its imports took.
    """
    started_at = time.monotonic()
    (timer := timer or PhaseTimer()).end("imports")
    check_before_torch(run, resume_from)
    if not run.use_gh200_trainer:
        run = effective_run(run)
        notices = (*notices, "use_gh200_trainer is false: gh200_optimizations has no effect.")
    with SignalHandler() as signals, naming_lost_ranks(run), ExitStack() as stack:
        # First, everything that can be checked without the model and the data.
        accelerator = start_accelerator(run)
        layout = build_layout(run.distributed, connect_ranks(run.distributed.timeout_s))
        ranks, is_main = layout.ranks, layout.ranks.is_main
        monitor = stack.enter_context(watch_ranks(ranks, run.distributed, lambda: resume_hint(run)))
        folder = Path(run.output_dir)
        stack.enter_context(full_disk_named(folder))
        check_writable(folder)
        warnings: list[str] = []
        if is_main:  # for all ranks of the run
            stack.enter_context(reserve_folder(folder, warnings.append))
            stack.enter_context(recording_crashes(folder))
        snapshot = find_resume_point(folder, resume_from, warnings.append, ranks)
        check_ranks_agree(ranks, 0 if snapshot is None else snapshot.progress.step)
        if snapshot is None:
            check_result_absent(result_folder(run))
        else:
            check_resumable(
                run, snapshot, accelerator.mixed_precision, warnings.append, layout.data_size
            )
        has_steps = snapshot is None or snapshot.progress.step < run.train.max_train_steps
        # Then open the event sinks, build the session, resume, train and export.
        latest = LatestOutputs(folder, 0 if snapshot is None else snapshot.progress.step)
        trackers = open_trackers(run, folder, latest.step) if is_main else []
        with (
            RunControl(folder).listening(_supported_requests(run), is_main) as control,
            EventDispatcher(
                [
                    latest,
                    monitor,
                    *trackers,  # first, so that the console can show what they miss at the end
                    *(_open_sinks(run, folder, sinks, signals) if is_main else ()),
                ]
            ) as events,
            EndReporter(events, latest, started_at) as end,
            monitor.reporting_to(end.report_failure),
            observing(run, folder, latest.step, events, is_main) as last_seen,
        ):
            for tracker in trackers:
                tracker.report_to(events.emit)
            _report_settings(events, notices, warnings)
            if not has_steps:
                events.emit(Notice(f"{FINISHED}{nothing_left(run, folder)}"))
            if has_steps or not ranks.broadcast(has_current_outputs(run)):
                with closing(
                    build_session(
                        *(run, accelerator, events.emit, control, signals),
                        resumed=None if snapshot is None else snapshot.execution,
                        layout=layout,
                        timer=timer,
                    )
                ) as session:
                    latest.loads_in = session.tools_for_adapter()
                    progress = session.resume(snapshot)
                    snapshot = None  # its mapped files may be deleted while the run trains
                    if is_main:
                        _claim_folder(run, folder, progress, events)
                    _report_start(session, progress, timer)
                    with signals.deferred():
                        observer = Telemetry(
                            session, progress.step, last_seen=last_seen, **telemetry
                        )
                        train_loop(session, progress, observer)
                        if is_main or layout.is_sharded:  # parts of weights are gathered
                            latest.set_result(session.export())
            else:
                latest.set_result(find_result(run))
    accelerator.end_training()
    assert end.event is not None
    return end.event


# Checks before anything is loaded


def find_resume_point(
    folder: Path, resume_from: str, warn: Callable[[str], None], ranks: RankGroup = SINGLE
) -> Snapshot | None:
    """Load the checkpoint to resume from; None for a new run.

    Raises if a new run would overwrite the checkpoints of another one.
    """
    resume_from = RESUME_WORDS.get(resume_from, resume_from)
    checkpoints = folder / CHECKPOINT_FOLDER
    existing = checkpoint.complete_checkpoints(checkpoints)
    if resume_from == "none" and existing:
        raise ConfigError(
            f"--resume is none, but {folder} has a run with {existing[-1].name}, which starting "
            "over would overwrite. Choose another output_dir, or remove that folder."
        )
    return checkpoint.find_snapshot(checkpoints, resume_from, warn, ranks)


def check_ranks_agree(ranks: RankGroup, step: int) -> None:
    """Raise if the ranks of a run resume from different steps."""
    steps = ranks.gather(step)
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"ranks would resume from different steps: {', '.join(map(str, steps))}. output_dir "
            "must be one folder that all ranks can read. Name a checkpoint that is whole for each "
            "of them with --resume PATH."
        )


def check_result_absent(result: Path) -> None:
    """Raise if the result folder exists: a new run would replace the result of another one."""
    if result.exists():
        raise ConfigError(
            f"{result} already exists, but there is no checkpoint to resume from: this run would "
            "replace the result of another one. Move it away, or choose another output_dir."
        )


def check_resumable(
    run: RunFile,
    snapshot: Snapshot,
    precision: str,
    warn: Callable[[str], None],
    num_ranks: int = 1,
) -> None:
    """Raise if the settings do not allow the run to continue from this checkpoint.

    Called before the data are encoded, which can take hours. The data are compared later.
    """
    check_same_run(
        snapshot.identity, identity_settings(run, precision), snapshot.num_ranks, num_ranks
    )
    removed = removed_settings(snapshot.identity)
    if removed:
        names = ", ".join(removed)
        warn(f"the checkpoint has settings that gracetune no longer has, and ignores: {names}.")
    done, total = snapshot.progress.step, run.train.max_train_steps
    if done > total:
        raise CheckpointError(
            f"train.max_train_steps is {total}, but the run has already done {done} steps. "
            "Raise it, or resume from an earlier checkpoint with --resume PATH."
        )


def nothing_left(run: RunFile, folder: Path) -> str:
    """Return the text that a finished run has nothing left to do, and how to train further.

    It names the settings that have changed since the run in `folder` was started.
    """
    total = run.train.max_train_steps
    text = f"all {total:,} steps are done, and nothing is left to do."
    record = _run_record(folder)
    changed = [] if record is None else changed_settings(record, run.model_dump(mode="json"))
    changed = [name for name in changed if name not in ("output_dir", "train.max_train_steps")]
    if changed:
        names = ", ".join(changed[:MAX_NAMED])
        names += f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        text += (
            f" Settings that have changed since have no effect: {names}. To train with them, "
            f"delete {folder}, or set another output_dir."
        )
    if SCHEDULE_DEPENDS_ON_LENGTH[run.optimizer.schedule]:
        return (
            f"{text} optimizer.schedule is {run.optimizer.schedule}, which ends with the run: to "
            "train longer, set another output_dir and a larger train.max_train_steps."
        )
    return f"{text} To train further, add --set train.max_train_steps={2 * total}."


def has_current_outputs(run: RunFile) -> bool:
    """Return True if a run with no steps left has its result and its last samples.

    The result must be that of the last step: a run that was made longer has one of an earlier step
    until it exports again. For a whole model, this is unknown, and the result is False.
    """
    folder, step = Path(run.output_dir), run.train.max_train_steps
    saved = checkpoint.saved_adapters(folder).get(step)
    if run.adapter is None or saved is None:
        return False
    if run.validation.every > 0 and not grid_path(folder / VALIDATION_FOLDER, step).exists():
        return False
    names = [file.name for file in saved.iterdir()]
    return not any(filecmp.cmpfiles(saved, result_folder(run), names, shallow=False)[1:])


# The output folder and the events


def _claim_folder(
    run: RunFile, folder: Path, progress: TrainProgress, events: EventDispatcher
) -> None:
    """Write `run.json`, and move checkpoints that are newer than the resumed step aside.

    The main rank calls this once set-up has succeeded: if set-up fails, the files of an earlier run
    stay as they are.
    """
    path = folder / RECORD_FILE
    if path.exists() and not _is_run_record(path):
        other, path = path, folder / OTHER_RECORD_FILE
        events.emit(Notice(f"{other} was not written by a run and is kept; see {path.name}"))
    write_text(path, resolved_json(run))
    for newer in checkpoint.set_aside_newer(folder / CHECKPOINT_FOLDER, progress.step):
        text = f"resuming from step {progress.step}; a newer checkpoint is kept as {newer}"
        events.emit(Notice(text, level="warning"))
    for newer in checkpoint.set_aside_newer(folder / ADAPTERS_FOLDER, progress.step):
        text = f"resuming from step {progress.step}; a newer adapter is kept as {newer}"
        events.emit(Notice(text))


def _run_record(folder: Path) -> dict[str, object] | None:
    """Return the settings that the run in a folder was last started with; None if unknown."""
    for path in (folder / RECORD_FILE, folder / OTHER_RECORD_FILE):
        if path.exists() and _is_run_record(path):
            settings: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
            return settings
    return None


def _is_run_record(path: Path) -> bool:
    """Return True if a run wrote this `run.json`, False if the user did.

    A run writes all sections in a fixed format, so loading and writing them again gives the same
    text. An earlier version may have had fewer settings, and wrote credentials.
    """
    try:
        text = path.read_text(encoding="utf-8")
        settings = RunFile.model_validate_json(text).model_dump(exclude_unset=True)
    except (OSError, ValueError):
        return False
    written = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return settings.keys() >= RECORDED_SECTIONS and written == text


def open_trackers(run: RunFile, folder: Path, start_step: int) -> list[TrackerSink]:
    """Return a sink for each tracker of the run; their packages are imported in their threads."""
    logging, settings = run.logging, run.model_dump(mode="json")
    options = TrackerOptions(
        folder=folder,
        project=logging.tracker_project,
        run_name=logging.tracker_run_name or folder.resolve().name,
        settings=settings,
        offline=logging.tracker_offline,
        environment=process_environment(),
    )
    names = list(dict.fromkeys(logging.trackers))
    if logging.tensorboard and "tensorboard" not in names:
        names.insert(0, "tensorboard")
    return [
        TrackerSink(
            name,
            lambda name=name: open_tracker(name, options, start_step),  # type: ignore[misc]
            settings=settings,
            send_samples=logging.tracker_samples,
            in_thread=name != "tensorboard",
        )
        for name in names
    ]


def open_tracker(name: str, options: TrackerOptions, start_step: int) -> Tracker:
    """Import and start a tracker by its name in `logging.trackers`."""
    match name:
        case "wandb":
            from gracetune.events.trackers.wandb import WandbTracker

            return WandbTracker(options)
        case "trackio":
            from gracetune.events.trackers.trackio import TrackioTracker

            return TrackioTracker(options)
        case "mlflow":
            from gracetune.events.trackers.mlflow import MlflowTracker

            return MlflowTracker(options)
    from gracetune.events.trackers.tensorboard import TensorBoardTracker

    assert name == "tensorboard", name
    return TensorBoardTracker(options.folder / "tensorboard", start_step + 1)


def _open_sinks(
    run: RunFile, folder: Path, sinks: Iterable[Sink], signals: SignalHandler
) -> list[Sink]:
    shown = [TerminalSink(sink, signals) for sink in sinks]
    opened: list[Sink] = [*shown, JsonlLog(folder / LOG_FILE)]
    if run.logging.prometheus_port is not None:
        logging = run.logging
        assert logging.prometheus_port is not None
        opened.append(PrometheusSink(logging.prometheus_port, logging.prometheus_host, folder.name))
    if run.logging.webhooks:
        opened.append(WebhookSink(run.logging.webhooks, folder.name))
    return opened


@contextmanager
def observing(
    run: RunFile, folder: Path, step: int, events: EventDispatcher, is_main: bool
) -> Iterator[LastSeen | None]:
    """Explain how the previous process in the folder ended, and keep a record of this one.

    Only the main rank does; others get None.
    """
    if not is_main:
        yield None
        return
    sensors = MachineSensors("not read here", {"output": folder})
    if run.health.enabled and "previous_run" not in run.health.ignore:
        kills = sensors.read().host.get("oom_kills")
        found = explain_previous_end(folder, step, kills, _resume_action(step))
        if found is not None:
            events.emit(found)
    with LastSeen(folder, sensors) as last_seen:
        yield last_seen


def _resume_action(step: int) -> str:
    return f"resumes from the checkpoint of step {step}" if step else "starts from the beginning"


def _supported_requests(run: RunFile) -> list[str]:
    return [verb for verb in VERBS if verb != "validate" or validation_enabled(run)]


def _report_settings(
    events: EventDispatcher, notices: Iterable[str], warnings: Iterable[str]
) -> None:
    """Emit the remarks from reading the run file, and what the first checks have found."""
    for text in notices:
        events.emit(Notice(f"config: {text}"))
    for text in warnings:
        events.emit(Notice(text, level="warning", fallback=True))


def _report_start(session: Session, progress: TrainProgress, timer: PhaseTimer) -> None:
    """Emit how long the start took, and what is trained."""
    timer.end("other")
    session.emit(timer.event())
    state = session.state
    session.emit(
        RunStarted(
            output_dir=state.run.output_dir,
            model=state.family.name,
            trainable_parameters=state.num_trained,
            total_steps=state.run.train.max_train_steps,
            start_step=progress.step,
            num_samples=len(session.pipeline.train_samples),
            device=str(state.accelerator.device),
            precision=PRECISION_NAMES[state.accelerator.mixed_precision],
        )
    )


class LatestOutputs:
    """An event sink that remembers the last step and the paths of the newest output files."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.outputs = {"log": str(folder / LOG_FILE)}
        self.loads_in: tuple[str, ...] = ()
        self._folder = folder
        if step:
            self._find_adapter(step)

    def handle(self, event: Event) -> None:
        """Remember the newest step, grid of validation samples and checkpoint."""
        if isinstance(event, StepDone):
            self.step = event.step
        elif isinstance(event, Validated) and event.grid is not None:
            self.outputs["pictures"] = event.grid
        elif isinstance(event, CheckpointSaved):
            self.outputs["checkpoint"] = event.path
            self._find_adapter(event.step)

    def set_result(self, result: ExportedResult) -> None:
        """Remember the result of the run, which replaces the adapter of the last checkpoint."""
        self.outputs.pop("adapter", None)
        self.outputs["result"], self.loads_in = str(result.path), result.loads_in

    def close(self) -> None:
        """Do nothing; there is nothing to flush."""

    def _find_adapter(self, step: int) -> None:
        adapter = checkpoint.saved_adapters(self._folder).get(step)
        if adapter is not None:
            self.outputs["adapter"] = str(adapter)


class EndReporter:
    """A context manager that emits `RunEnded` when the run ends, also after an error."""

    def __init__(self, events: EventDispatcher, latest: LatestOutputs, started_at: float) -> None:
        self.event: RunEnded | None = None
        self._events = events
        self._latest = latest
        self._started_at = started_at

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        stopped = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        status: Status = "done" if kind is None else "interrupted" if stopped else "failed"
        self._emit(status, "" if error is None else str(error) or type(error).__name__)

    def report_failure(self, message: str) -> None:
        """Emit that the run has failed; for a process that hangs and ends without an exception."""
        self._emit("failed", message)

    def _emit(self, status: Status, message: str) -> None:
        self.event = RunEnded(
            self._latest.step,
            status,
            time.monotonic() - self._started_at,
            self._latest.outputs,
            message,
            self._latest.loads_in,
        )
        self._events.emit(self.event)


# Signals


class SignalHandler:
    """Lets a run save a checkpoint and stop when it receives one of STOP_SIGNALS.

    Inside `deferred`, the first signal only sets `received`: the loop finishes its step, saves a
    checkpoint and stops. Before `deferred` there is nothing to save, and the first signal raises
    KeyboardInterrupt. Launchers repeat signals while a run is still saving, so further signals are
    ignored, except for a second Ctrl-C, which ends the process at once. Signals that were ignored
    when the process started stay so (`nohup`).
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that asks the loop to stop; None until there is one."""
        self._is_deferring = self._is_over = False
        self._num_interrupts = 0
        self._previous: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """While the `with` block runs, store a signal in `received` instead of raising.

        After it, the run is saved, and signals do not disturb the rest.
        """
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring, self._is_over = False, True

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._num_interrupts += number == signal.SIGINT
        if self._num_interrupts > 1:
            os._exit(130)
        is_first = self.received is None
        self.received = self.received or signal.Signals(number).name
        if not is_first or self._is_over:
            return
        if not self._is_deferring:
            raise KeyboardInterrupt(f"by {self.received}")
        again = "again" if number == signal.SIGINT else "twice"
        # The terminal may be gone (SIGHUP), or this thread may be writing to it right now.
        with suppress(OSError, RuntimeError, ValueError):
            sys.stderr.write(
                f"\n{self.received}: finishing the step and saving a checkpoint. "
                f"Press Ctrl-C {again} to quit at once without saving.\n"
            )
            sys.stderr.flush()


class TerminalSink:
    """Passes events to a sink that shows them to the user, who may have closed the terminal.

    Once the run is stopping, for example because of that, a failing sink must not keep it from
    saving its checkpoint.
    """

    def __init__(self, sink: Sink, signals: SignalHandler) -> None:
        self._sink = sink
        self._signals = signals

    def handle(self, event: Event) -> None:
        """Pass an event on."""
        with self._tolerating_errors():
            self._sink.handle(event)

    def close(self) -> None:
        """Close the sink."""
        with self._tolerating_errors():
            self._sink.close()

    @contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            if self._signals.received is None:
                raise


# Lost ranks


@contextmanager
def naming_lost_ranks(run: RunFile) -> Iterator[None]:
    """Turn an error of torch.distributed into one that says what to do.

    It means that another rank was killed or cannot be reached. Once the ranks are connected,
    `watch_ranks` knows which one.
    """
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if not is_lost_rank_error(error):
            raise
        text = lost_contact_text(error, run.distributed.timeout_s)
        raise RunFailedError(f"{text}. {resume_hint(run)}") from error


def resume_hint(run: RunFile) -> str:
    """Return what happens if the command is started again after a failure."""
    saved = checkpoint.complete_checkpoints(Path(run.output_dir) / CHECKPOINT_FOLDER)
    resume = f"resumes from {saved[-1].name}" if saved else "starts over: there is no checkpoint"
    return f"Starting the same command again {resume}."
