"""One training run from a run file to its result: the folder, the log, resuming, the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Self

from gracetune.config.load import resolved
from gracetune.config.schema import Gh200Section, RunFile
from gracetune.atomic_files import write_text
from gracetune.errors import CheckpointError, ConfigError, InterruptedRunError
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.run_control import VERBS, RunControl
from gracetune.events.trackers.tensorboard import TensorBoardSink
from gracetune.events.types import (
    CheckpointSaved,
    Notice,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)
from gracetune.train import checkpoint
from gracetune.train.build import CHECKPOINT_FOLDER, build, resume, start_accelerator
from gracetune.train.export import result_folder
from gracetune.train.identity import check_same_run, identity_settings
from gracetune.train.loop import train_loop
from gracetune.train.validate import validation_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    Status = Literal["done", "interrupted", "failed"]
    from collections.abc import Iterator
    from types import FrameType, TracebackType

    from gracetune.events.types import Event, Sink
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.loop import Session
    from gracetune.train.state import TrainProgress

    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


LOG = "events.jsonl"
PRECISION_NAMES = {"no": "fp32", "bf16": "bf16"}


class LatestOutputs:
    """A sink that remembers what the last event should name."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.outputs = {"log": str(folder / LOG)}

    def handle(self, event: Event) -> None:
        """Keep the newest of each kind."""
        if isinstance(event, StepDone):
            self.step = event.step
        elif isinstance(event, Validated) and event.grid is not None:
            self.outputs["pictures"] = event.grid
        elif isinstance(event, CheckpointSaved):
            self.outputs["checkpoint"] = event.path

    def close(self) -> None:
        """Nothing to flush."""


class Ending:
    """Tells how a run ended, whatever ended it."""

    def __init__(self, fan: EventDispatcher, landmarks: LatestOutputs, started: float) -> None:
        self._fan = fan
        self._landmarks = landmarks
        self._started = started

        self.ended: RunEnded | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        stopped = isinstance(error, InterruptedRunError | KeyboardInterrupt)
        status: Status = "done" if kind is None else "interrupted" if stopped else "failed"
        self.ended = RunEnded(
            self._landmarks.step,
            status,
            time.monotonic() - self._started,
            self._landmarks.outputs,
            "" if error is None else str(error) or type(error).__name__,
        )
        self._fan.emit(self.ended)


def run_training(
    run: RunFile, resume_from: str = "auto", sinks: Iterable[Sink] = (), notices: Iterable[str] = ()
) -> RunEnded:
    """Train; gives the last event, which names what there is to look at."""
    started = time.monotonic()
    if not run.use_gh200_trainer:
        run = run.model_copy(update={"gh200_optimizations": Gh200Section(enable_uvm_hints=False)})
        notices = (*notices, "use_gh200_trainer is false: gh200_optimizations are left out")
    with SignalHandler() as interrupt:
        accelerator = start_accelerator(run)
        folder = Path(run.output_dir)
        check_output_outside_datasets(run)
        check_writable(folder)
        warnings: list[str] = []
        snapshot = find_resume_point(folder, resume_from, warnings.append)
        if snapshot is None:
            check_result_absent(result_folder(run))
        else:
            check_resumable(run, snapshot, accelerator.mixed_precision)
        landmarks = LatestOutputs(folder, 0 if snapshot is None else snapshot.progress.step)
        with RunControl(folder).listening(_verbs(run), accelerator.is_main_process) as requests:
            told = _sinks(run, folder, landmarks.step, sinks) if accelerator.is_main_process else []
            with (
                EventDispatcher([landmarks, *told]) as fan,
                Ending(fan, landmarks, started) as ending,
            ):
                for text in notices:
                    fan.emit(Notice(text))
                for text in warnings:
                    fan.emit(Notice(text, level="warning", fallback=True))
                with closing(build(run, accelerator, fan.emit, requests, interrupt)) as built:
                    progress = resume(built.session, snapshot)
                    if accelerator.is_main_process:
                        _take_over(run, folder, progress, fan)
                    fan.emit(_started(built.session, progress))
                    with interrupt.deferred():
                        train_loop(built.session, progress)
                        if accelerator.is_main_process:
                            landmarks.outputs["result"] = str(built.export())
    accelerator.end_training()
    assert ending.ended is not None
    return ending.ended


def _take_over(run: RunFile, folder: Path, progress: TrainProgress, fan: EventDispatcher) -> None:
    """The run goes on for certain: only now does its folder change. One rank does it."""
    path = folder / "run.json"
    if path.exists() and not _is_ours(path):
        there, path = path, folder / "run.resolved.json"
        fan.emit(Notice(f"{there} is not as a run writes it, and stays: {path.name} is this run's"))
    write_text(path, resolved(run))
    for later in checkpoint.set_aside_newer(folder / CHECKPOINT_FOLDER, progress.step):
        text = f"resuming before a checkpoint that exists; that one is kept as {later}"
        fan.emit(Notice(text, level="warning"))


def _is_ours(path: Path) -> bool:
    """Whether a run has written this file, which is then the same when it is written again."""
    try:
        text = path.read_text(encoding="utf-8")
        return resolved(RunFile.model_validate_json(text)) == text
    except (OSError, ValueError):
        return False


def check_output_outside_datasets(run: RunFile) -> None:
    """A run that writes among its samples would train on its own pictures."""
    folder = Path(run.output_dir).resolve()
    for index, dataset in enumerate(run.datasets):
        if dataset.instance_data_dir is None:
            continue
        samples = Path(dataset.instance_data_dir).resolve()
        if folder.is_relative_to(samples):
            raise ConfigError(
                f"output_dir {run.output_dir!r} lies in datasets.{index}.instance_data_dir "
                f"({dataset.instance_data_dir!r}), so that pictures of the run would become "
                "samples. Name a folder outside it."
            )


def check_result_absent(result: Path) -> None:
    """A new run replaces nobody's folder with its result."""
    if result.exists():
        raise ConfigError(
            f"{result} exists, and this run has no checkpoint, so it is another's; the result "
            "would replace it. Move it away, or choose another output_dir."
        )


def check_resumable(run: RunFile, snapshot: Snapshot, precision: str) -> None:
    """What can be refused now is not refused after an hour of encoding."""
    check_same_run(snapshot.identity, identity_settings(run, precision), contents=False)
    done, total = snapshot.progress.step, run.train.max_train_steps
    if done > total:
        raise CheckpointError(
            f"train.max_train_steps is {total}, but the run has done {done} steps. Raise it, or "
            "name an earlier checkpoint with --resume PATH."
        )


def check_writable(folder: Path) -> None:
    """Find out now, not when the first checkpoint is due."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"output_dir {str(folder)!r} cannot be written: {error.strerror or error}. "
            "Name a folder that can."
        ) from error


def find_resume_point(folder: Path, resume_from: str, warn: Callable[[str], None]) -> Snapshot | None:
    """What to go on from. To begin anew over a run that has checkpoints is refused."""
    checkpoints = folder / CHECKPOINT_FOLDER
    existing = checkpoint.complete_checkpoints(checkpoints)
    if resume_from == "none" and existing:
        raise ConfigError(
            f"--resume none would overwrite the run in {folder}, which has {existing[-1].name}. "
            "Choose another output_dir, or remove that folder."
        )
    return checkpoint.find_snapshot(checkpoints, resume_from, warn)


def _sinks(run: RunFile, folder: Path, first_step: int, sinks: Iterable[Sink]) -> list[Sink]:
    chosen: list[Sink] = [*sinks, JsonlLog(folder / LOG)]
    if run.logging.tensorboard:
        chosen.append(TensorBoardSink(folder / "tensorboard", first_step + 1))
    return chosen


def _verbs(run: RunFile) -> list[str]:
    return [verb for verb in VERBS if verb != "validate" or validation_enabled(run)]


def _started(session: Session, progress: TrainProgress) -> RunStarted:
    t = session.state
    return RunStarted(
        output_dir=t.run.output_dir,
        model=t.family.name,
        trainable_parameters=sum(p.numel() for p in t.parameters.values()),
        total_steps=t.run.train.max_train_steps,
        start_step=progress.step,
        num_samples=len(session.pipeline.train_samples),
        device=str(t.accelerator.device),
        precision=PRECISION_NAMES[t.accelerator.mixed_precision],
    )


# ------------------------------------------------------------------------------------------
# Ctrl-C and SIGTERM: between steps they stop a run well, before its first step at once.
#
# Inside `between_steps` the first signal is only noted: the loop finishes and saves. A second one
# leaves at once. Outside there is nothing to save, and either is a KeyboardInterrupt.


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalHandler:
    """While open, `asked` names the signal that came between steps, if any."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._waits = False
        self._before: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals wait here until the loop looks."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(130)
        if not self._waits:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        sys.stderr.write(
            f"\n{self.received}: finishing the step and saving; once more leaves at once, unsaved\n"
        )
        sys.stderr.flush()
