"""The training loop: run optimizer steps, and do the work that is due between them.

`train_loop` is the entry point and `_run_steps` is the loop. Between two steps it logs metrics,
saves checkpoints, validates, obeys requests (from `gracetune now`, Ctrl-C or SIGTERM) and compares
the speed that the memory plan predicts with measured steps. The step itself is in `step.py`.
"""

from __future__ import annotations

import math
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gracetune.data.batch_order import LoaderState, RankShare, describe_imbalance
from gracetune.distributed.gradients import check_same_weights
from gracetune.distributed.heartbeat import StragglerWatch
from gracetune.errors import (
    CompiledBlockError,
    GracetuneError,
    InterruptedRunError,
    RunFailedError,
)
from gracetune.events.types import HealthChanged, Notice, RampChanged, RatesSpread, StepDone
from gracetune.optim.automagic import Automagic
from gracetune.optim.offloaded_state import FREE_DEVICE_MEMORY
from gracetune.train.checkpoint import Snapshot
from gracetune.train.export import checkpoint_headers
from gracetune.train.gradient_check import FirstStepCheck
from gracetune.train.health_checks import SamplesSeen
from gracetune.train.managed_overflow import SAMPLE_ROLES, device_full
from gracetune.train.requests import PROMPTS, RequestInbox
from gracetune.train.state import (
    detached_weights,
    flatten_optimizer_state,
    optimizer_shards,
    restore_torch_rng,
    rng_state,
    torch_rng_state,
)
from gracetune.train.step import train_step, turn_at
from gracetune.train.telemetry import Telemetry
from gracetune.train.validate import ValidationWriteError, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from gracetune.cache.batch_transfer import BatchIterator, BatchTransfer, PrefetchDepth
    from gracetune.data.pipeline import DataPipeline
    from gracetune.data.sample import Batch
    from gracetune.events.dispatcher import Emit
    from gracetune.events.types import BatchesFed
    from gracetune.plan.controller import PlanController
    from gracetune.train.build import Session
    from gracetune.train.step import StepResult, TrainProgress
    from gracetune.train.validate import ValidationSetup


WARMUP_STEPS, TIMED_STEPS = 2, 3
"""Number of steps to skip before a memory plan is timed, and number of steps to time."""
GC_FREEZE_STEPS = 20
"""Steps after which caches and pools are filled. The objects that exist then live until the end of
the run, so they are excluded from garbage collection (`gc.freeze`)."""
CHECKPOINT_REASONS = {
    "stop": "stopping",
    "save": "asked for",
    "clock": "every N minutes",
    "data failed": "the data failed",
}
"""Request that saves a checkpoint -> the reason that is logged with the checkpoint."""
MAX_SKIPPED_IN_A_ROW = 10
"""Steps that may be skipped in a row (`train.skip_bad_batches`) before the run counts as failed."""


def train_loop(
    session: Session, progress: TrainProgress, telemetry: Telemetry | None = None
) -> TrainProgress:
    """Train until `train.max_train_steps`, or until a stop is requested.

    `telemetry` collects measurements; by default, that of this machine.
    """
    telemetry = telemetry or Telemetry(session, progress.step)
    layout = session.state.layout
    share = RankShare(
        layout.data_rank, layout.data_size, session.micro_batches, session.batch_seconds
    )
    if layout.data_size > 1:
        _report_imbalance(session, share)
    with closing(BatchStream(session.pipeline, share, progress.consumed)) as stream:
        _register_trimmers(session, stream)
        telemetry.start(progress.step, lambda: stream.prefetch_depth)
        try:
            return _run_steps(session, stream, progress, telemetry)
        finally:
            telemetry.close()
            session.batch_transfer.end_observation()
            session.gc_freeze.unfreeze()


def _register_trimmers(session: Session, stream: BatchStream) -> None:
    """Register what the run can do without while managed memory is oversubscribed."""
    transfer = session.batch_transfer
    transfer.register_trimmer("prefetched batches", stream)
    for name, (component, on_host) in session.pipeline.trimmers().items():
        transfer.register_trimmer(name, component, on_host=on_host)
    if session.plan_controller is not None:
        name = "weight ring and prefetched activations"
        transfer.register_trimmer(name, session.plan_controller)


def _report_imbalance(session: Session, share: RankShare) -> None:
    """Log how long ranks wait for each other in the planned steps, if it is long."""
    train = session.state.run.train
    samples = None if train.effective_batch_size is None else train.batch_size
    text = describe_imbalance(session.pipeline.order, share, samples)
    if text:
        session.emit(Notice(text))


def _run_steps(
    session: Session, stream: BatchStream, progress: TrainProgress, telemetry: Telemetry
) -> TrainProgress:
    """Repeat: run a step, log it, then save a checkpoint, validate or stop if that is due."""
    run = session.state.run
    total = run.train.max_train_steps
    metrics = MetricsBuffer(
        session.emit, run.logging.every, session.batch_transfer, session.state.optimizer, telemetry
    )
    inbox = RequestInbox(session, metrics, telemetry)
    timing = PlanTiming(session, progress.step)
    stragglers = StragglerReport(session)
    check = FirstStepCheck(session)
    saved_at, saved_step, first_step = time.monotonic(), progress.step, progress.step
    micro_batches = session.micro_batches(progress.consumed)
    _check_ranks_have_same_weights(session, progress.step)

    late: set[str] = set()
    if _validation_is_missing(session, progress.step):
        _validate(session, metrics, progress.step)
    while progress.step < total:
        with _saving_if_data_fail(session, metrics, progress, saved_step):
            result = _step(session, stream, micro_batches, progress, timing, check)
        progress = progress.after(micro_batches, stream.state.consumed, result.expert)
        step = progress.step
        telemetry.note(step, "training")
        metrics.add(step, stream.state.epoch(session.pipeline.order), result)
        _prepare_process(session, metrics, timing, step - first_step)
        timing.after_step(step, stream.state.step_batches, metrics)
        stragglers.after_step(step)

        session.writer.poll()
        requests = late | inbox.take(step, saved_at)
        late = set()
        is_stopping = "stop" in requests and step < total
        # The checkpoint comes before validation, so that a failing validation loses no steps.
        if _is_due(step, run.train.checkpoint_every, total) or requests & CHECKPOINT_REASONS.keys():
            _save(session, metrics, progress, requests, is_last=is_stopping or step == total)
            _emit_transfer_statistics(session, stream, step)
            saved_at, saved_step = time.monotonic(), step
            timing.disturbed = True
        scheduled = run.validation.every > 0 and _is_due(step, run.validation.every, total)
        if scheduled and not is_stopping:
            requests.add("validate")
        if requests & {"validate", PROMPTS}:
            _validate_all(session, metrics, step, requests, inbox)
            timing.disturbed = True
            # Validation takes long. A stop that was requested meanwhile needs no further step.
            late = inbox.take(step, saved_at)
            if "stop" in late and not is_stopping and step < total:
                is_stopping = True
                if saved_step < step:
                    _save(session, metrics, progress, late, is_last=True)
        if is_stopping:
            session.writer.finish()
            raise _stopped(step, total, telemetry.stop_reason)
        micro_batches = _next_micro_batches(session, progress, micro_batches)
    metrics.flush()
    assert saved_step == total, (saved_step, total)
    return progress


def _prepare_process(
    session: Session, metrics: MetricsBuffer, timing: PlanTiming, steps: int
) -> None:
    """Do what must wait for the first steps of this process; `steps` is their number."""
    if steps == 1:
        metrics.flush()  # it may have compiled for a minute: show at once that training works
        session.writer.reserve(_state_tensors(session))  # the optimizer's state exists now
        metrics.restart_clock()
    elif steps == GC_FREEZE_STEPS:
        metrics.flush()
        session.gc_freeze.freeze()
        metrics.restart_clock()
        timing.disturbed = True


def _stopped(step: int, total: int, reason: str) -> InterruptedRunError:
    because = f" ({reason})" if reason else ""
    return InterruptedRunError(
        f"stopped after step {step} of {total}{because}; a checkpoint is saved. Run the same "
        "command again to continue."
    )


def _step(
    session: Session,
    stream: BatchStream,
    micro_batches: int,
    progress: TrainProgress,
    timing: PlanTiming,
    first_step_check: FirstStepCheck,
) -> StepResult:
    """Run one optimizer step; `first_step_check` checks its gradients if it is the first one.

    `micro_batches` is the number of micro-batches in the step, over all ranks. If the device of any
    rank is out of memory, all ranks change to a plan that needs less memory, or move more to
    managed memory, and repeat the step with the same batches and random numbers. The check takes
    memory that the plan does not contain, so the first repetition is without it. If a compiled
    block fails on any rank, all repeat the step with an eager plan; ranks that divide the weights
    cannot repeat a step.
    """
    state, controller = session.state, session.plan_controller
    expert = turn_at(state, progress).expert
    is_first = first_step_check.begin(expert)
    check = first_step_check.finish if is_first else None
    position, rng = stream.state, torch_rng_state()
    updates = state.stepper.num_steps
    compiled: Callable[[], AbstractContextManager[None]] = nullcontext
    if controller is not None and state.sharded is None:
        compiled = controller.recognizing_compiled_blocks
    while True:
        try:
            batches = stream.take_step()
            if controller is not None:
                batches = _counted(batches, controller)
            return train_step(state, batches, micro_batches, progress, check, compiled)
        except (torch.OutOfMemoryError, CompiledBlockError) as error:
            # Drop the tracebacks: their frames keep the tensors of the failed step alive.
            failure = error.with_traceback(None)
            failure.__context__ = None
        reason = next(iter(str(failure).splitlines()), "")
        if state.stepper.num_steps > updates:  # a second try would apply the update twice
            raise RunFailedError(
                f"the device ran out of memory after the optimizer's update ({reason}). Earlier "
                f"checkpoints are kept. {FREE_DEVICE_MEMORY} and run the same command again."
            ) from failure
        state.optimizer.zero_grad()
        if controller is not None and isinstance(failure, CompiledBlockError):
            first_step_check.cancel()
            controller.replan_without_compilation()
            first_step_check.begin(expert)  # the eager plan is checked instead
        elif first_step_check.cancel():
            first_step_check.skip(reason)
            session.clear_device_memory()
        elif not session.free_device_memory(reason, progress.step):
            raise device_full(reason, session.managed) from failure
        stream.rewind(position)
        restore_torch_rng(rng)  # the second try uses the same dropout masks
        timing.restart(progress.step)


def _counted(
    batches: Iterator[tuple[Batch, bool]], controller: PlanController
) -> Iterator[tuple[Batch, bool]]:
    for batch, is_last in batches:
        yield controller.count_batch(batch), is_last


def _next_micro_batches(session: Session, progress: TrainProgress, before: int) -> int:
    """Return the micro-batches of the next step, over all ranks.

    `before` is the number in the previous step. A difference, which comes from the ramp of the
    effective batch size, is logged; so is another size of the micro-batches.
    """
    micro_batches, ramp = session.micro_batches(progress.consumed), session.ramp
    if ramp is not None:
        size = ramp.micro_batch_size(progress.consumed)
        if micro_batches != before or size != ramp.micro_batch_size(progress.consumed - before):
            session.emit(RampChanged(progress.step, progress.micro_batches, micro_batches, size))
    return micro_batches


def _is_due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


# The data


DEVICE_MEMORY = "device memory"
"""Reason for which a reclamation shortens prefetching."""


class BatchStream:
    """Yields the batches of one rank, step by step; `state` is the position of the run."""

    def __init__(self, pipeline: DataPipeline, share: RankShare, consumed: int) -> None:
        self.state = LoaderState(consumed)
        self._pipeline = pipeline
        self._share = share
        self._batches = self._open()

    def take_step(self) -> Iterator[tuple[Batch, bool]]:
        """Yield this rank's micro-batches of the next step, each with True if it is the last.

        Each one is loaded when it is needed.
        """
        is_last = False
        while not is_last:
            batch, self.state = next(self._batches)
            is_last = self.state.batches_left == 0
            yield batch, is_last

    def rewind(self, state: LoaderState) -> None:
        """Go back to an earlier position, so that the batches after it come again, unchanged."""
        self._batches.close()
        counts = self._batches.counts
        self.state = state
        self._batches = self._open(self._batches.depth)
        self._batches.counts = counts

    def statistics(self, step: int) -> BatchesFed:
        """Return statistics of loading: where batches came from, how long steps waited for them."""
        return self._pipeline.batches_fed(step, self._batches)

    @property
    def prefetch_depth(self) -> PrefetchDepth:
        """The number of batches to prefetch, which may be changed."""
        return self._batches.depth

    def trim(self) -> int:
        """Prefetch one batch only; return the bytes of the others, which the next steps use up."""
        nbytes = self._batches.surplus_nbytes()
        return nbytes if self.prefetch_depth.shorten(DEVICE_MEMORY) else 0

    def restore(self) -> None:
        """Prefetch as many batches as before `trim`."""
        self.prefetch_depth.lengthen(DEVICE_MEMORY)

    def close(self) -> None:
        """Stop the threads that load and encode in the background."""
        self._batches.close()
        self._pipeline.close()

    def _open(self, depth: PrefetchDepth | None = None) -> BatchIterator:
        return self._pipeline.batches(self._share, self.state.consumed, depth)


# Checkpoints and validation


@contextmanager
def _saving_if_data_fail(
    session: Session, metrics: MetricsBuffer, progress: TrainProgress, saved_step: int
) -> Iterator[None]:
    """Save what was trained, if the step in the `with` block fails because of its data.

    With several ranks this is not possible: the others wait for this one in the middle of a step.
    """
    try:
        yield
    except GracetuneError as error:
        is_alone, failed = session.state.ranks.world_size == 1, session.state.recorder.data_failed
        if failed and is_alone and saved_step < progress.step:
            session.state.optimizer.zero_grad()
            cause = f"a batch cannot be loaded: {error}"
            action = f"the run saves a checkpoint of step {progress.step} and ends"
            advice = "Fix the file or the disk, and run the same command again to continue."
            session.emit(
                HealthChanged(progress.step, "loader_stalled", "stopping", cause, action, advice)
            )
            _save(session, metrics, progress, {"data failed"}, is_last=True)
        raise


def _save(
    session: Session,
    metrics: MetricsBuffer,
    progress: TrainProgress,
    requests: set[str],
    *,
    is_last: bool,
) -> None:
    """Save a checkpoint. Metrics are flushed first, which raises if a loss is not finite.

    The last one of a process is not saved in the background: there is nothing to train meanwhile.
    """
    metrics.flush()
    metrics.telemetry.note(progress.step, "saving")
    if session.state.ranks.is_main:
        _check_folder(session, metrics.telemetry)
    if is_last:
        metrics.telemetry.before_stop(progress.step)
    _check_ranks_have_same_weights(session, progress.step)
    snapshot = _take_snapshot(session, progress)
    adapter = None
    # A whole model would double the size of the checkpoint.
    if session.state.run.adapter is not None and session.state.ranks.is_main:
        adapter = session.collect_adapter()
    reason = _checkpoint_reason(requests, progress.step, session.state.run.train.max_train_steps)
    session.writer.save(snapshot, adapter, reason, in_background=not is_last)
    metrics.telemetry.note(progress.step, "training")
    metrics.restart_clock()


def _check_folder(session: Session, telemetry: Telemetry) -> None:
    """Let the run stop if its output folder was moved or deleted; raise if another run is there.

    The checkpoint is saved to a new folder, which lacks the lock, the settings and the log.
    """
    if not session.control.has_lost_folder() or telemetry.stop_reason:
        return
    telemetry.stop_reason = (
        f"output_dir {session.state.run.output_dir} was moved or deleted while the run trained"
    )
    text = f"{telemetry.stop_reason}; it is created anew for this checkpoint"
    session.emit(Notice(text, level="warning"))


def _check_ranks_have_same_weights(session: Session, step: int) -> None:
    """Raise if the trained weights differ between ranks, which would make the result arbitrary."""
    name = check_same_weights(session.state.layout, session.state.parameters)
    if name:
        raise RunFailedError(
            f"the ranks have different weights after step {step}: {name} differs. All ranks need "
            "the same model, versions and GPU. Earlier checkpoints are kept."
        )


def _take_snapshot(session: Session, progress: TrainProgress) -> Snapshot:
    """Collect the state to resume from: weights, optimizer, EMA, and the RNGs of all ranks."""
    state = session.state
    state.stepper.synchronize()
    tensors = _state_tensors(session)
    shards = {}
    if state.sharded is not None:
        own = state.sharded.shards()
        shards = dict.fromkeys(tensors, own)
        shards["optimizer"] = optimizer_shards(tensors["optimizer"], state.parameters, own)
    # The ranks of a context group draw the same numbers.
    for rank, states in enumerate(state.ranks.gather(rng_state())[:: state.layout.context_size]):
        tensors[f"generators-{rank}"] = states
    headers = checkpoint_headers(state, session.adapted_modules, session.base_weights)
    return Snapshot(
        progress,
        session.identity,
        tensors,
        headers,
        session.execution_record(),
        shards=shards,
    )


def _state_tensors(session: Session) -> dict[str, Mapping[str, Tensor]]:
    """Return the live weights, optimizer state and EMA of this rank, by kind and name."""
    state = session.state
    tensors: dict[str, Mapping[str, Tensor]] = {
        "weights": detached_weights(state.parameters),
        "optimizer": flatten_optimizer_state(state.optimizer, state.parameters),
    }
    if state.ema is not None:
        tensors["ema"] = state.ema.averages
    return tensors


def _checkpoint_reason(requests: set[str], step: int, total: int) -> str:
    if step == total:
        return "the end"
    reasons = (reason for request, reason in CHECKPOINT_REASONS.items() if request in requests)
    return next(reasons, "every N steps")


def _validation_is_missing(session: Session, step: int) -> bool:
    """Return True if validation samples of the current step are due but do not exist.

    That is the case before the first step, unless `validation.at_start` is false, and when an
    earlier process was killed between saving its checkpoint and writing the samples.
    """
    run = session.state.run
    every, total = run.validation.every, run.train.max_train_steps
    is_due = run.validation.at_start if step == 0 else _is_due(step, every, total)
    if session.validation is None or every == 0 or not is_due:
        return False
    exists = step > 0 and session.validation.grid_path(step).exists()
    return not session.state.ranks.broadcast(exists)


def _validate_all(
    session: Session, metrics: MetricsBuffer, step: int, requests: set[str], inbox: RequestInbox
) -> None:
    """Validate as scheduled or requested, and with the prompts that came with requests."""
    if "validate" in requests:
        _validate(session, metrics, step)
    for requested in inbox.take_prompts(step):
        _validate(session, metrics, step, requested)


def _validate(
    session: Session,
    metrics: MetricsBuffer,
    step: int,
    requested: ValidationSetup | None = None,
) -> None:
    """Validate; if the device is out of memory, free some of it and try again.

    A run that streams weights frees the device buffers that it has added for them; a run that may
    overflow moves one more role to managed memory. If that is not enough, training continues
    without these samples, and a warning says why. `requested` has prompts that came with a request.
    """
    validation = requested or session.validation
    if validation is None:
        return
    if session.validation is not None:  # a request brings prompts, but no batches from another rank
        validation = replace(validation, held_out=session.validation.held_out)
    metrics.flush()
    telemetry = metrics.telemetry
    telemetry.note(step, "validating")
    controller = session.plan_controller
    problem = _try_to_validate(session, validation, step, telemetry)
    if problem and controller is not None and controller.shrink_ring(problem):
        problem = _try_to_validate(session, validation, step, telemetry)
    reason = f"The validation of step {step} has too little memory: {problem}"
    if problem and session.overflow(reason, step, SAMPLE_ROLES):
        problem = _try_to_validate(session, validation, step, telemetry)
    if problem:
        text = (
            f"no samples of step {step}: {problem} Training continues. Lower validation.width, "
            f"height or frames, or plan.device_memory; {session.managed.state()}."
        )
        session.emit(Notice(text, level="warning", fallback=True))
        telemetry.after_validation(SamplesSeen(step, 0, failed=problem))
    telemetry.note(step, "training")
    metrics.restart_clock()


def _try_to_validate(
    session: Session, validation: ValidationSetup, step: int, telemetry: Telemetry
) -> str:
    """Validate; return torch's message if the device is out of memory, else an empty string."""
    try:
        result = validate(session.state, validation, step)
        session.emit(result.event)
        telemetry.add_held_out(step, result.held_out)
        telemetry.after_validation(result.seen)
    except ValidationWriteError as error:
        if step == 0:  # nothing is lost yet, and later samples could not be written either
            raise
        session.emit(Notice(f"{error} Training continues.", level="warning", fallback=True))
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0]
    return ""


def _emit_transfer_statistics(session: Session, stream: BatchStream, step: int) -> None:
    """Log statistics of loading batches and of streaming weights, counted since the start."""
    session.emit(stream.statistics(step))
    controller = session.plan_controller
    streamed = None if controller is None else controller.streaming_stats(step)
    if streamed is not None:
        session.emit(streamed)


# Metrics


class PlanTiming:
    """Times a few training steps, to compare them with the speed that the memory plan predicts.

    Timing starts after the warm-up steps. If other work (a checkpoint, a validation, a compilation)
    falls between the timed steps, `disturbed` is set and timing starts over. With several ranks,
    the time that a rank waits for others is not counted.
    """

    def __init__(self, session: Session, first_step: int) -> None:
        self.disturbed = True
        """True if work other than training steps has taken time since the clock started."""
        self._planned = session.plan_controller
        self._controller = session.plan_controller
        """None once the plan has been checked."""
        self._ranks = session.state.ranks
        self._timer = session.state.reducer.timer
        self._total = session.state.run.train.max_train_steps
        self._first_step = first_step
        self._started_at = 0.0
        self._steps = self._micro_batches = 0

    def after_step(self, step: int, accumulation: int, metrics: MetricsBuffer) -> None:
        """Count a step; after `TIMED_STEPS` steps, let the controller check its memory plan.

        If a block could not be compiled in this step, the run is planned again first.
        """
        if self._planned is not None and self._planned.has_failed_to_compile():
            metrics.flush()
            if self._planned.replan_without_compilation():
                self._controller = self._planned
                self.restart(step)
            metrics.restart_clock()  # the search for another plan is not part of a step
        if self._controller is None or step - self._first_step < WARMUP_STEPS:
            return
        if self.disturbed:
            metrics.flush()  # waits for the device
            self._controller.start_measuring()
            self.disturbed, self._started_at = False, self._clock()
            self._steps = self._micro_batches = 0
            return
        self._steps += 1
        self._micro_batches += accumulation  # differs between steps of a ramp
        if self._steps == TIMED_STEPS:
            metrics.flush()
            (has_compiled,) = self._ranks.any(self._controller.has_compiled())
            if has_compiled:  # compilation is not part of a step
                self.disturbed = True
                return
            seconds = (self._clock() - self._started_at) / self._micro_batches
            has_changed = self._controller.check(seconds, (self._total - step) * accumulation)
            metrics.restart_clock()  # the search for a better plan is not part of a step
            if has_changed:
                self.restart(step)  # the plan has changed: time the new one as well
            else:
                self._controller = None

    def _clock(self) -> float:
        return time.monotonic() if self._ranks.world_size == 1 else self._timer.total_seconds()

    def restart(self, step: int) -> None:
        """Start over with warm-up and timing at this step, because the plan has changed."""
        self._first_step, self.disturbed = step, True


class StragglerReport:
    """Compares how long ranks compute, every `logging.every` steps, and names one that is slow."""

    def __init__(self, session: Session) -> None:
        self._ranks = session.state.ranks
        self._timer = session.state.reducer.timer
        self._every = session.state.run.logging.every
        self._emit = session.emit
        self._watch = StragglerWatch(self._ranks.hosts, self._every)
        self._counted = 0.0

    def after_step(self, step: int) -> None:
        """Compare the ranks, if this step is logged; `MetricsBuffer` has waited for the device."""
        if self._ranks.world_size == 1 or step % self._every:
            return
        total = self._timer.total_seconds()
        seconds = (total - self._counted) / self._every
        self._counted = total
        text = self._watch.add(self._ranks.gather(seconds))
        if text:
            self._emit(Notice(text, level="warning"))


class MetricsBuffer:
    """Collects the results of steps, and logs them together every `logging.every` steps.

    Results are tensors on the device. Reading them makes the CPU wait, so it is done rarely.
    """

    def __init__(
        self,
        emit: Emit,
        every: int,
        batch_transfer: BatchTransfer,
        optimizer: Optimizer,
        telemetry: Telemetry,
    ) -> None:
        self.every = every
        """Steps between two times of logging; a request can change it."""
        self.telemetry = telemetry
        self._emit = emit
        self._skipped_in_a_row = 0
        self._batch_transfer = batch_transfer
        self._optimizer = optimizer
        self._pending: list[tuple[int, int, StepResult]] = []
        self._losses: tuple[float, float] | None = None
        """The first and the last finite loss of this process."""
        self._started_at = time.monotonic()

    def add(self, step: int, epoch: int, result: StepResult) -> None:
        """Keep the result of a step; every `logging.every` steps, log all kept results.

        Reclaims memory first, if managed memory is oversubscribed.
        """
        self._batch_transfer.observe(step)
        self._pending.append((step, epoch, result))
        if result.is_skipped:
            self._report_skipped(step, result)
        else:
            self._skipped_in_a_row = 0
        if step % self.every == 0:
            self.flush()

    def _report_skipped(self, step: int, result: StepResult) -> None:
        """Log a skipped step; raise if too many steps in a row are skipped."""
        loss, norm = float(result.loss), float(result.grad_norm)
        self._emit(self.telemetry.skipped(step, loss, norm, result.micro_batches))
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise self._diverged(step, loss, norm)

    def _diverged(self, step: int, loss: float, norm: float) -> RunFailedError:
        advice = self.telemetry.diverged(step, loss, norm, self._losses or (loss, loss))
        return RunFailedError(
            f"training diverged at step {step}: the loss is {loss} and the gradient norm "
            f"is {norm}. {advice} Checkpoints saved before are kept."
        )

    def flush(self) -> None:
        """Log all kept results; raise at the first loss or gradient norm that is not finite."""
        if not self._pending:
            return
        numbers = torch.stack(
            [torch.stack([r.loss, r.grad_norm, r.samples]) for _, _, r in self._pending]
        ).tolist()
        seconds = (time.monotonic() - self._started_at) / len(self._pending)
        done = []
        for (step, epoch, result), (loss, norm, samples) in zip(
            self._pending, numbers, strict=True
        ):
            event = StepDone(
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
            self._emit(event)
            done.append(event)
            if math.isfinite(loss):
                self._losses = (self._losses or (loss, loss))[0], loss
            if not (math.isfinite(loss) and math.isfinite(norm)) and not result.is_skipped:
                raise self._diverged(step, loss, norm)
        last_step = self._pending[-1][0]
        memory = self._batch_transfer.memory_used(last_step)
        self._emit(memory)
        for histogram in learning_rate_histograms(self._optimizer, last_step):
            self._emit(histogram)
        self._pending.clear()
        self.telemetry.collect(done, memory)
        self._started_at = time.monotonic()

    def restart_clock(self) -> None:
        """Restart the step timer, so that work between two steps is not counted as step time."""
        self._started_at = time.monotonic()


RATE_DECADES = (-9, 0)
"""Range of the learning-rate histograms: exponents of ten, lowest and highest."""
BINS_PER_DECADE = 4


def learning_rate_histograms(optimizer: Optimizer, step: int) -> list[RatesSpread]:
    """Return a histogram of learning rates for each trained transformer (Wan 2.2 has two).

    Only Automagic has a learning rate for each element; the list is empty for other optimizers.
    """
    if not isinstance(optimizer, Automagic):
        return []
    low, high = RATE_DECADES
    num_bins = (high - low) * BINS_PER_DECADE
    limits = tuple(10 ** (low + index / BINS_PER_DECADE) for index in range(num_bins + 1))
    return [
        RatesSpread(step, expert, limits, tuple(int(count) for count in counts.tolist()))
        for expert, counts in optimizer.lr_histogram(low, high, num_bins).items()
    ]
