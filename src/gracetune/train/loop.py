"""The training loop: steps, and what happens between them."""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object

from gracetune.data.loader import Loader, LoaderState
from gracetune.errors import InterruptedRunError, RunFailedError
from gracetune.events.types import CheckpointSaved, Notice, RampChanged, RatesSpread, StepDone
from gracetune.memory.stages import ASIDE
from gracetune.optim.automagic import Automagic
from gracetune.train import checkpoint
from gracetune.train.checkpoint import Snapshot
from gracetune.train.state import (
    rng_state,
    flatten_optimizer_state,
    restore_torch_rng,
    torch_rng_state,
    detached_weights,
)
from gracetune.train.step import train_step
from gracetune.train.validate import ValidationWriteError, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from gracetune.cache.batch_transfer import BatchTransfer
    from gracetune.cache.prefetch import BatchIterator
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.events.run_control import RunControl
    from gracetune.events.types import BatchesFed, Event, MemoryUsed
    from gracetune.plan.controller import Settled
    from gracetune.train.ramp import AccumulationRamp
    from gracetune.train.run import SignalHandler
    from gracetune.train.state import TrainProgress
    from gracetune.train.step import StepResult, TrainState
    from gracetune.train.validate import ValidationSetup


WARM, TIMED = 2, 3
"""Steps before a plan is timed, and steps that it is timed by."""
MADE = 20
"""Steps after which all has been made that stays, and it is worth a look to set it aside."""
SAVING = {"stop": "stopping", "save": "asked for", "clock": "every N minutes"}
"""What makes a checkpoint beside the count of steps, and how the log calls it."""
MAKE_ROOM = "Lower validation.width, height or frames, or plan.device_memory."


@dataclass(frozen=True, slots=True)
class Session:
    """A run, built and ready."""

    state: TrainState
    pipeline: DataPipeline
    ramp: AccumulationRamp
    validation: ValidationSetup | None
    checkpoints: Path
    identity: Mapping[str, object]
    batch_transfer: BatchTransfer
    control: RunControl
    signals: SignalHandler
    emit: Callable[[Event], None]
    plan_controller: Settled | None = None
    """The plan at work; none: the transformer is simply on the device."""


class BatchStream:
    """The batches of one rank, and the state after the last one that was taken."""

    def __init__(self, feed: DataPipeline, rank: int, world_size: int, consumed: int) -> None:
        self.state = LoaderState(consumed)
        self._feed = feed
        self._rank, self._world_size = rank, world_size
        self._batches = self._open()

    def take(self, count: int) -> Iterator[Batch]:
        """The next few, each loaded or awaited when it is asked for."""
        for _ in range(count):
            batch, self.state = next(self._batches)
            yield batch

    def go_back(self, state: LoaderState) -> None:
        """The next batch is the one after this state, as it was the first time."""
        self._batches.close()
        counts = self._batches.counts
        self.state = state
        self._batches = self._open()
        self._batches.counts = counts

    def fed(self, step: int) -> BatchesFed:
        """What the batches so far have cost."""
        return self._feed.fed(step, self._batches)

    def close(self) -> None:
        """End what works beside the steps."""
        self._batches.close()
        self._feed.close()

    def _open(self) -> BatchIterator:
        """From the state on."""
        feed, consumed = self._feed, self.state.consumed
        loader = Loader(
            feed.order,
            feed.load,
            self._rank,
            self._world_size,
            consumed,
            will_need=feed.will_need,
        )
        return feed.ahead(iter(loader))


def train_loop(s: Session, progress: TrainProgress) -> TrainProgress:
    """Train to the end, or until someone asks to stop."""
    accelerator = s.state.accelerator
    rank, world = accelerator.process_index, accelerator.num_processes
    with closing(BatchStream(s.pipeline, rank, world, progress.consumed)) as stream:
        try:
            return _steps(s, stream, progress)
        finally:
            ASIDE.unfreeze()


def _steps(s: Session, stream: BatchStream, progress: TrainProgress) -> TrainProgress:
    run = s.state.run
    total = run.train.max_train_steps
    record = MetricsBuffer(s.emit, run.logging.every, s.batch_transfer.memory_used, learning_rate_histograms(s.state.optimizer))
    accumulation = s.ramp.accumulation(progress.micro_batches)
    saved_at, saved_step = time.monotonic(), progress.step

    if _owed(s, progress.step, total):
        _validate(s, record, progress.step)
    first, timing = progress.step, PlanTiming(s, progress.step)
    while progress.step < total:
        result = _step(s, stream, accumulation, progress, timing)
        progress = progress.after(accumulation, stream.state.consumed, result.expert)
        record.add(progress.step, stream.state.epoch(s.pipeline.order), result)
        if progress.step == first + MADE:
            record.flush()
            ASIDE.freeze()
            record.resume()
            timing.disturbed = True
        timing.after(progress.step, accumulation, record)

        asked = _asked(s, progress.step, saved_at)
        stop = "stop" in asked and progress.step < total
        if _due(progress.step, run.train.checkpoint_every, total) or asked & SAVING.keys():
            _save(s, record, progress, _reason(asked, progress.step, total))
            _report_moved(s, stream, progress.step)
            saved_at, saved_step = time.monotonic(), progress.step
            timing.disturbed = True
        scheduled = run.validation.every > 0 and _due(progress.step, run.validation.every, total)
        if (scheduled and not stop) or "validate" in asked:  # saved first, whatever comes of it
            _validate(s, record, progress.step)
            timing.disturbed = True
        if stop:
            raise InterruptedRunError(
                f"stopped after step {progress.step} of {total}; the state is saved. "
                "The same command goes on from here."
            )
        accumulation = _next_accumulation(s, progress, accumulation)
    record.flush()
    assert saved_step == total, (saved_step, total)
    return progress


class PlanTiming:
    """Holds a plan against a few steps with nothing between them."""

    def __init__(self, s: Session, first: int) -> None:
        self.disturbed = True
        """Whether something else than steps has taken time since the clock was started."""
        self._settled = s.plan_controller
        self._total = s.state.run.train.max_train_steps
        self._first = first
        self._began = 0.0
        self._steps = self._micro_batches = 0

    def after(self, step: int, accumulation: int, record: MetricsBuffer) -> None:
        """Start the clock after the first steps, and again where it was disturbed."""
        if self._settled is None or step - self._first < WARM:
            return
        if self.disturbed:
            record.flush()  # waits for the device
            self._settled.watch()
            self.disturbed, self._began = False, time.monotonic()
            self._steps = self._micro_batches = 0
            return
        self._steps += 1
        self._micro_batches += accumulation  # which a ramp raises from step to step
        if self._steps == TIMED:
            record.flush()
            if self._settled.has_compiled():  # which is no part of a step
                self.disturbed = True
                return
            seconds = (time.monotonic() - self._began) / self._micro_batches
            if self._settled.check(seconds, (self._total - step) * accumulation):
                self.restart(step)  # the new plan is timed as well
                record.resume()
            else:
                self._settled = None

    def restart(self, step: int) -> None:
        """After so many steps the plan is another one."""
        self._first, self.disturbed = step, True


def _step(
    s: Session, stream: BatchStream, length: int, progress: TrainProgress, timing: PlanTiming
) -> StepResult:
    """One step; where the device is too small for the plan, again with a smaller plan."""
    if s.plan_controller is None:
        return train_step(s.state, stream.take(length), length, progress)
    began, drawn = stream.state, torch_rng_state()
    updates = s.state.update.count
    while True:
        try:
            batches = map(s.plan_controller.saw, stream.take(length))
            return train_step(s.state, batches, length, progress)
        except torch.OutOfMemoryError as error:
            full = error.with_traceback(None)  # whose frames hold what did not fit
        reason = str(full).splitlines()[0]
        if s.state.update.count > updates:
            raise RunFailedError(
                f"the device was full after an update ({reason}), which a second try would make "
                "again. Checkpoints saved before are kept. Go on from the last one with a lower "
                "plan.device_memory."
            ) from full
        s.state.optimizer.zero_grad()
        if not s.plan_controller.step_down(reason):
            raise full
        stream.go_back(began)
        restore_torch_rng(drawn)  # dropout falls in a second try as in the first
        timing.restart(progress.step)


def _reason(asked: set[str], step: int, total: int) -> str:
    """Why a checkpoint is made, for whoever reads the log."""
    if step == total:
        return "the end"
    return next((why for what, why in SAVING.items() if what in asked), "every N steps")


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _next_accumulation(s: Session, progress: TrainProgress, before: int) -> int:
    """Ask the ramp; here, between two optimizer steps, is the only place where it may change."""
    accumulation = s.ramp.accumulation(progress.micro_batches)
    if accumulation != before:
        s.emit(RampChanged(progress.step, progress.micro_batches, accumulation))
    return accumulation


def _asked(s: Session, step: int, saved_at: float) -> set[str]:
    """What the user, a signal or the clock wants now; ranks agree when losses are logged anyway."""
    run, accelerator = s.state.run, s.state.accelerator
    if accelerator.num_processes > 1 and step % run.logging.every:
        return set()
    asked = s.control.take_requests() if accelerator.is_main_process else set()
    if s.signals.received is not None:
        asked.add("stop")
    minutes = run.train.checkpoint_minutes
    if minutes and time.monotonic() - saved_at >= 60 * minutes:
        asked.add("clock")
    return set(gather_object(list(asked))) if accelerator.num_processes > 1 else asked


def _owed(s: Session, step: int, total: int) -> bool:
    """Whether there should be samples of this step already: of the first weights, or since the run
    ended between a checkpoint and its samples.
    """
    every = s.state.run.validation.every
    if s.validation is None or every == 0 or not (step == 0 or _due(step, every, total)):
        return False
    there = step > 0 and s.validation.grid_path(step).exists()
    return not gather_object([there])[0]


def _validate(s: Session, record: MetricsBuffer, step: int) -> None:
    """Where neither the device nor the disk has room for samples, training goes on without them."""
    if s.validation is None:
        return
    record.flush()
    full = _try_to_validate(s, s.validation, step)
    if full and s.plan_controller is not None and s.plan_controller.give_back(full):
        full = _try_to_validate(s, s.validation, step)
    if full:
        text = f"{full} There are no samples of step {step}; training goes on. {MAKE_ROOM}"
        s.emit(Notice(text, level="warning", fallback=True))
    record.resume()


def _try_to_validate(s: Session, validation: ValidationSetup, step: int) -> str:
    """Gives what the device says where it is full."""
    try:
        s.emit(validate(s.state, validation, step))
    except ValidationWriteError as error:
        if step == 0:  # no step is lost with it, and no later samples could be kept either
            raise
        s.emit(Notice(f"{error} Training goes on.", level="warning", fallback=True))
    except torch.OutOfMemoryError as error:
        if s.state.accelerator.num_processes > 1:  # the others wait for this one
            raise
        return str(error).splitlines()[0]
    return ""


def _report_moved(s: Session, stream: BatchStream, step: int) -> None:
    """What batches and streamed weights have cost by now."""
    s.emit(stream.fed(step))
    streamed = None if s.plan_controller is None else s.plan_controller.streamed(step)
    if streamed is not None:
        s.emit(streamed)


def _save(s: Session, record: MetricsBuffer, progress: TrainProgress, reason: str) -> None:
    """Only after the losses so far are known to be numbers."""
    record.flush()
    snapshot = snapshot_of(s, progress)
    accelerator = s.state.accelerator
    if accelerator.is_main_process:
        saved = checkpoint.save_snapshot(s.checkpoints, snapshot, s.state.run.train.keep_checkpoints)
        s.emit(CheckpointSaved(progress.step, str(saved.path), saved.nbytes, saved.seconds, reason))
    accelerator.wait_for_everyone()
    record.resume()


def snapshot_of(s: Session, progress: TrainProgress) -> Snapshot:
    """Everything that going on from here needs."""
    t = s.state
    t.update.rest()
    tensors: dict[str, Mapping[str, Tensor]] = {
        "weights": detached_weights(t.parameters),
        "optimizer": flatten_optimizer_state(t.optimizer, t.parameters),
    }
    if t.ema is not None:
        tensors["ema"] = t.ema.averages
    for rank, states in enumerate(gather_object([rng_state()])):
        tensors[f"generators-{rank}"] = states
    return Snapshot(progress, s.identity, tensors)


# ------------------------------------------------------------------------------------------
# Losses on their way from the device to the log, a window at a time.


RATE_DECADES = (-9, 0)
"""The rates of histograms, as powers of ten."""
BINS_PER_DECADE = 4


class MetricsBuffer:
    """Keeps results as tensors until a window is full, then reads them all at once."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        every: int,
        memory_used: Callable[[int], MemoryUsed],
        rates: Callable[[int], list[RatesSpread]] = lambda _: [],
    ) -> None:
        self._emit = emit
        self._memory_used = memory_used
        self._rates = rates
        self._every = every
        self._pending: list[tuple[int, int, StepResult]] = []
        self._since = time.monotonic()

    def add(self, step: int, epoch: int, result: StepResult) -> None:
        """Take one step's result."""
        self._pending.append((step, epoch, result))
        if step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Tell what is pending. The first loss that is no number ends the run."""
        if not self._pending:
            return
        numbers = torch.stack(
            [torch.stack([r.loss, r.grad_norm, r.samples]) for _, _, r in self._pending]
        ).tolist()
        seconds = (time.monotonic() - self._since) / len(self._pending)
        for (step, epoch, result), (loss, norm, samples) in zip(
            self._pending, numbers, strict=True
        ):
            self._emit(
                StepDone(
                    step=step,
                    loss=loss,
                    lr=float(result.lr),
                    grad_norm=norm,
                    samples=int(samples),
                    accumulation=result.micro_batches,
                    epoch=epoch,
                    seconds=seconds,
                    expert=result.expert or "",
                )
            )
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunFailedError(
                    f"at step {step} the loss is {loss} and the gradient's norm is {norm}. "
                    "Checkpoints saved before are kept. Begin anew in another output_dir, with a "
                    "lower optimizer.lr or train.max_grad_norm."
                )
        self._emit(self._memory_used(self._pending[-1][0]))
        for spread in self._rates(self._pending[-1][0]):
            self._emit(spread)
        self._pending.clear()
        self._since = time.monotonic()

    def resume(self) -> None:
        """Steps count again from now."""
        self._since = time.monotonic()


def learning_rate_histograms(optimizer: Optimizer) -> Callable[[int], list[RatesSpread]]:
    """How to tell the spread of learning rates, where every element has one; else nothing."""
    if not isinstance(optimizer, Automagic):
        return lambda _: []
    low, high = RATE_DECADES
    num_bins = (high - low) * BINS_PER_DECADE
    limits = tuple(10 ** (low + index / BINS_PER_DECADE) for index in range(num_bins + 1))

    def spread(step: int) -> list[RatesSpread]:
        by_stage = optimizer.rate_counts(low, high, num_bins)
        return [
            RatesSpread(step, stage, limits, tuple(int(count) for count in counts.tolist()))
            for stage, counts in by_stage.items()
        ]

    return spread
