"""One training run from a run file to its result: the folder, the log, resuming, the end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from gracetune.config.render import resolved
from gracetune.config.schema import Gh200Section
from gracetune.durable import write_text
from gracetune.errors import ConfigError, GracetuneError, InterruptedRunError
from gracetune.events.fan import Fan
from gracetune.events.log import JsonlLog
from gracetune.events.requests import VERBS, Requests
from gracetune.events.tensorboard import TensorBoardSink
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
from gracetune.train.identity import demand_same, settings_of
from gracetune.train.interrupt import Interrupt
from gracetune.train.loop import train_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gracetune.config.schema import RunFile
    from gracetune.events.types import Event, Sink
    from gracetune.train.checkpoint import Snapshot
    from gracetune.train.loop import Session
    from gracetune.train.state import Progress

LOG = "events.jsonl"
PRECISION_NAMES = {"no": "fp32", "bf16": "bf16"}


class Landmarks:
    """A sink that remembers what the last event should name."""

    def __init__(self, folder: Path) -> None:
        self.step = 0
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


def run_training(
    run: RunFile, resume_from: str = "auto", sinks: Iterable[Sink] = (), notices: Iterable[str] = ()
) -> RunEnded:
    """Train, and give the last event; an error that a user can mend is logged, then raised."""
    started = time.monotonic()
    if not run.use_gh200_trainer:
        run = run.model_copy(update={"gh200_optimizations": Gh200Section(enable_uvm_hints=False)})
        notices = (*notices, "use_gh200_trainer is false: gh200_optimizations are left out")
    accelerator = start_accelerator(run)
    folder, landmarks = Path(run.output_dir), Landmarks(Path(run.output_dir))
    demand_writable(folder)
    warnings: list[str] = []
    snapshot = find_snapshot(folder, resume_from, warnings.append)
    first_step = 0
    if snapshot is not None:
        first_step = snapshot.progress.step
        # What can be refused now is not refused after an hour of encoding.
        settings = settings_of(run, accelerator.mixed_precision)
        demand_same(snapshot.identity, settings, contents=False)
    requests, interrupt = Requests(folder), Interrupt()
    if accelerator.is_main_process:
        requests.open(os.getpid(), _verbs(run))
    told = _sinks(run, folder, first_step, sinks) if accelerator.is_main_process else []
    with Fan([landmarks, *told]) as fan:
        try:
            if accelerator.is_main_process:
                write_text(folder / "run.json", resolved(run))
            for text in notices:
                fan.tell(Notice(text))
            for text in warnings:
                fan.tell(Notice(text, level="warning", fallback=True))
            built = build(run, accelerator, fan.tell, requests, interrupt)
            progress = resume(built.session, snapshot)
            fan.tell(_started(built.session, progress))
            with interrupt:
                progress = train_loop(built.session, progress)
            if accelerator.is_main_process:
                landmarks.outputs["result"] = str(built.export())
            ended = RunEnded(progress.step, "done", time.monotonic() - started, landmarks.outputs)
            fan.tell(ended)
        except GracetuneError as error:
            fan.tell(
                RunEnded(
                    landmarks.step,
                    "interrupted" if isinstance(error, InterruptedRunError) else "failed",
                    time.monotonic() - started,
                    landmarks.outputs,
                    str(error),
                )
            )
            raise
        finally:
            if accelerator.is_main_process:
                requests.close()
    accelerator.end_training()
    return ended


def demand_writable(folder: Path) -> None:
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


def find_snapshot(folder: Path, resume_from: str, warn: Callable[[str], None]) -> Snapshot | None:
    """What to go on from. To begin anew over a run that has checkpoints is refused."""
    checkpoints = folder / CHECKPOINT_FOLDER
    existing = checkpoint.complete(checkpoints)
    if resume_from == "none" and existing:
        raise ConfigError(
            f"--resume none would overwrite the run in {folder}, which has {existing[-1].name}. "
            "Choose another output_dir, or remove that folder."
        )
    return checkpoint.find(checkpoints, resume_from, warn)


def _sinks(run: RunFile, folder: Path, first_step: int, sinks: Iterable[Sink]) -> list[Sink]:
    chosen: list[Sink] = [*sinks, JsonlLog(folder / LOG)]
    if run.logging.tensorboard:
        chosen.append(TensorBoardSink(folder / "tensorboard", first_step + 1))
    return chosen


def _verbs(run: RunFile) -> list[str]:
    manual = run.validation.enable_manual_validation and run.validation.every > 0
    return [verb for verb in VERBS if verb != "validate" or manual]


def _started(session: Session, progress: Progress) -> RunStarted:
    t = session.trainee
    return RunStarted(
        output_dir=t.run.output_dir,
        model=t.family.name,
        trainable_parameters=sum(p.numel() for p in t.parameters.values()),
        total_steps=t.run.train.max_train_steps,
        start_step=progress.step,
        num_samples=len(session.feed.trained),
        device=str(t.accelerator.device),
        precision=PRECISION_NAMES[t.accelerator.mixed_precision],
    )
