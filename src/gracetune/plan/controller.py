"""Compare a plan with its first steps, correct it once, and shrink it if memory runs out.

Life of a plan during training:

1. `PlanController` applies the plan. The loop times a few steps and calls `check`.
2. If time or memory differ clearly from the prediction, `check` calibrates the cost model with the
   measurement and plans again. This happens once per run, and only if the new plan is clearly
   better or the old one exceeds the budget.
3. If a block cannot be compiled after all, it runs eagerly to the end of the step.
   `replan_without_compilation` then applies an eager plan. If a compiled block fails while it runs,
   forward or backward, all ranks apply the eager plan and repeat the step.
4. If a step runs out of device memory, `reduce_memory` releases slots that the ring added, or
   applies a smaller plan. The loop then repeats the step.

Plans change between steps only. Plans differ in rounding at most: compiled blocks round differently
from eager ones. A checkpoint therefore stores the plan, and a resumed run uses it again.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.distributed.heartbeat import is_lost_rank_error
from gracetune.distributed.ranks import SINGLE
from gracetune.errors import CompiledBlockError
from gracetune.events.types import Notice, WeightsStreamed
from gracetune.memory.oversubscription import hard_reclamation
from gracetune.offload.copy_engine import OffloadError
from gracetune.plan.planner_input import COMPILE_FAILURE
from gracetune.plan.report import describe, describe_speed
from gracetune.plan.search import PlanError, predict
from gracetune.plan.simulate import candidate_of
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.data.sample import Batch, Shape
    from gracetune.distributed.ranks import RankGroup
    from gracetune.events.types import Event
    from gracetune.memory.oversubscription import GcFreeze
    from gracetune.offload.ring import RingCounters
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.cost import CostModel
    from gracetune.plan.launch_overhead import LaunchCosts
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.planner_input import PlanProblem
    from gracetune.plan.result import Plan

    Emit = Callable[[Event], None]


PIN_NBYTES_PER_S = 2e9
"""Rough rate, in bytes per second, at which host memory is pinned and filled with weights."""
MIN_GAIN = 0.03
"""A new plan must save at least this share of a micro-batch's time to replace the current plan."""
SMALLER_SHARES = (0.85, 0.92, 0.97)
"""After an out-of-memory error, a plan is searched that needs at most this share of the failed
plan's memory. The shares are tried in order."""
MEMORY_TOLERANCE, TIME_TOLERANCE = 0.03, 0.10
"""Largest accepted error of predicted memory and time, as a share of the prediction."""
MIN_LINK_FACTOR, MAX_LINK_FACTOR, LINK_BISECTIONS = 0.25, 4.0, 12
"""Smallest and largest bandwidth of the link between host and device that calibration considers,
relative to the assumed one, and number of bisection steps to find it."""


class MemoryMeter(Protocol):
    """Measures the peak of device memory during steps."""

    def restart(self) -> None:
        """Start a new measurement."""
        ...

    def peak_nbytes(self) -> int | None:
        """Return the peak since `restart`, in bytes, or None if it is unknown.

        Memory that was allocated before the meter was created is not counted.
        """
        ...

    def clear(self) -> None:
        """Free memory that the allocator caches, before another plan allocates other sizes."""
        ...


class CudaMemoryMeter:
    """Measures the peak with torch's CUDA allocator.

    Create the meter before the model is on the device: memory allocated earlier is not counted,
    except `counted_nbytes` that the plan contains.
    """

    def __init__(self, device: torch.device, gc_freeze: GcFreeze, counted_nbytes: int = 0) -> None:
        self._device = device
        self._reclaim = hard_reclamation(device.index, gc_freeze)
        self._before = torch.cuda.memory_allocated(device) - counted_nbytes

    def restart(self) -> None:
        """Reset the allocator's peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_nbytes(self) -> int:
        """Return the peak of allocated bytes, without memory that the allocator only caches."""
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def clear(self) -> None:
        """Collect garbage and empty the allocator's cache; synchronizes with the device."""
        self._reclaim()


class NullMemoryMeter:
    """Measures nothing, for rehearsals on the CPU."""

    def restart(self) -> None:
        """Do nothing."""

    def peak_nbytes(self) -> None:
        """Return None: the peak is unknown."""

    def clear(self) -> None:
        """Do nothing."""


class PlanController:
    """Holds the plan that is applied to a run's transformer, and changes it if necessary."""

    def __init__(
        self,
        problem: PlanProblem,
        plan: Plan,
        apply: Callable[[Plan, int], AppliedPlan],
        meter: MemoryMeter,
        largest_numel: int,
        emit: Emit,
        was_checked: bool = False,
        ranks: RankGroup = SINGLE,
    ) -> None:
        """Apply the plan; with several ranks, all must apply the same one.

        `apply` applies a plan to the transformer; its second argument is the device memory, in
        bytes, that the plan leaves free. `largest_numel` is the number of elements in the latents
        of one sample of the largest bucket, for which the plan is made. With `was_checked`, the
        plan was checked before the run was resumed, and `check` does not change it.
        """
        self.plan = plan
        self.size_seconds: dict[Shape, tuple[float, float]] = {}
        """Seconds of a micro-batch of one sample and of a full one, planned at the start, by sample
        size. Only a few sizes are planned, and none in a run with one rank."""
        self._problem = problem
        self._apply = apply
        self._meter = meter
        self._largest_numel = largest_numel
        self._emit = emit
        self._was_checked = was_checked
        self._ranks = ranks
        self._closed_rings: list[RingCounters] = []
        self._applied = apply(plan, problem.spare_nbytes(plan))
        self.start_measuring()

    def start_measuring(self) -> None:
        """Start measuring time and memory, which `check` compares with the plan."""
        self._meter.restart()
        self._micro_batches = self._full_size = 0
        self._stalled_before = self._applied.stall_seconds()
        self._graphs_before = self._num_graphs

    def count_batch(self, batch: Batch) -> Batch:
        """Count a micro-batch and return it unchanged.

        Full batches of the largest bucket (sample size) are counted separately, because only they
        are comparable with the plan.
        """
        self._micro_batches += 1
        is_full = len(batch) >= self.plan.batch
        self._full_size += is_full and batch.latents[0].numel() >= self._largest_numel
        return batch

    def has_compiled(self) -> bool:
        """Return True if a block was compiled since `start_measuring`, which distorts the times."""
        return self._num_graphs > self._graphs_before

    def check(self, seconds: float, remaining: int) -> bool:
        """Compare measured time and memory with the plan; return True if the plan was changed.

        `seconds` is the measured time per micro-batch, and `remaining` the number of micro-batches
        still to come. Only the first call may change the plan.
        """
        stalled = self._applied.stall_seconds() - self._stalled_before
        peak = self._meter.peak_nbytes()
        self._emit(Notice(self._comparison(seconds, peak)))
        compiler = self._applied.compiler
        if self._ranks.is_main and compiler is not None and not compiler.failure:
            self._problem.remember_graphs(self.plan)
        is_first, self._was_checked = not self._was_checked, True
        measured = StepMeasurement(
            seconds=seconds if self._full_size == self._micro_batches else None,
            stalled_s=stalled / max(self._micro_batches, 1),
            peak_nbytes=peak if self._full_size else None,
        )
        worst = worst_measurement(self._ranks.gather(measured))
        is_wrong = is_first and worst.is_known and plan_is_inaccurate(self.plan, worst)
        if self._ranks.broadcast(is_wrong):
            return self._correct(worst, remaining)
        self._allow_ring_growth(measured.peak_nbytes)
        return False

    def has_failed_to_compile(self) -> bool:
        """Return True once after a block could not be compiled, on this or another rank.

        Call this after each step, on all ranks together. The blocks of the plan run eagerly since
        then, in modes that keep no more than the compiled plan (`CostModel.eager_modes`).
        """
        if not self.plan.compiled or self._problem.constraints.compile == (False,):
            return False
        (gave_up,) = self._ranks.any(self._gave_up_compiling)
        return gave_up

    @contextmanager
    def recognizing_compiled_blocks(self) -> Iterator[None]:
        """Raise `CompiledBlockError` if a compiled block raises an error in the `with` statement.

        Blocks run eagerly from then on. `replan_without_compilation` must follow on all ranks
        before the step is repeated.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            compiler = self._applied.compiler
            if compiler is None or is_lost_rank_error(error):
                raise
            if not compiler.handle_failed_step(error):
                raise
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise CompiledBlockError(reason) from None

    def replan_without_compilation(self) -> bool:
        """Apply the best eager plan, because a block could not be compiled.

        Call this between steps, on all ranks together. Returns False if no eager plan fits: then
        the blocks stay as they are.
        """
        self._problem = self._problem.without_compilation(self._report_other_ranks())
        eager = None
        with suppress(PlanError):
            eager = self._problem_now().solve(self._problem.budget)
        eager = self._of_main_rank(eager)
        if eager is None:
            return False
        text = f"the run is planned again without compilation: {describe(eager)}; expect "
        self._emit(Notice(text + describe_speed(eager), level="warning", fallback=True))
        failure = self._try_to_change_to(eager)
        if failure and not self.reduce_memory(failure):
            raise PlanError(f"the blocks cannot be compiled, and no eager plan fits: {failure}")
        return True

    def _report_other_ranks(self) -> str:
        """Emit why blocks run eagerly if only other ranks know: the main rank writes the log.

        Returns the reason in a few words.
        """
        compiler = self._applied.compiler
        own = ("", "") if compiler is None else (compiler.failure, compiler.reason)
        failures = self._ranks.gather(own)
        failed = [rank for rank, (text, _) in enumerate(failures) if text]
        assert failed, "no rank has given up compiling"
        text, reason = failures[failed[0]]
        if self._ranks.is_main and failed[0] > 0:
            text = f"{self._ranks.name(failed[0])}: {text}"
            self._emit(Notice(text, level="warning", fallback=True))
        return reason

    def reduce_memory(self, reason: str) -> bool:
        """Release ring slots or apply a smaller plan, after an out-of-memory error.

        `reason` is the error's text for the warning. Returns False if no smaller plan exists. All
        ranks call this together, also those that had enough memory.
        """
        if self.shrink_ring(reason):
            return True
        self.keep_plan()
        while (smaller := self._smaller_plan()) is not None:
            text = f"{reason} Continuing with a smaller plan: {describe(smaller)}; expect "
            self._emit(Notice(text + describe_speed(smaller), level="warning", fallback=True))
            room = int(smaller.device.total * (1 + self._problem.budget.fragmentation))
            budget = replace(self._problem.budget, device_nbytes=room)
            self._problem = replace(self._problem, budget=budget)
            reason = self._try_to_change_to(smaller)
            if not reason:
                return True
        return False

    def keep_plan(self) -> None:
        """Let `check` change nothing, because device memory has run out.

        A correction would plan for the memory that has just proved insufficient, or blame compute
        for the time of what overflows to managed memory.
        """
        self._was_checked = True

    def change_to(self, plan: Plan) -> None:
        """Replace the applied plan by another one. Call this between steps."""
        if self._applied.ring is not None:
            self._closed_rings.append(self._applied.ring.counters())
        self._applied.close()
        self._meter.clear()
        self._applied = self._apply(plan, self._problem.spare_nbytes(plan))
        self.plan = plan

    def shrink_ring(self, reason: str) -> bool:
        """Free the slots that the weight ring has added; return False if there were none.

        `reason` is the text of the out-of-memory error for the warning.
        """
        (released,) = self._ranks.any(self._applied.shrink_ring())
        if released:
            text = f"{reason} Continuing without the slots that were added to the weight ring."
            self._emit(Notice(text, level="warning", fallback=True))
        return released

    def trim(self) -> int:
        """Free device memory that only makes copies earlier, on this rank; return the bytes."""
        return self._applied.trim()

    def restore(self) -> None:
        """Let the weight ring and the prefetched activations grow again."""
        self._applied.restore()

    def clear_cached_memory(self) -> None:
        """Free memory that torch's allocator caches after work outside the plan."""
        self._meter.clear()

    @property
    def launch_costs(self) -> LaunchCosts:
        """The CPU's costs of launching kernels, with which the plan was made."""
        return self._problem.model.rates.host

    @property
    def slots_nbytes(self) -> int:
        """Device memory of the weight ring's slots, in bytes.

        Reading it synchronizes with the device.
        """
        if self._applied.ring is None:
            return 0
        counters = self._applied.ring.counters()
        return counters.slots * counters.slot_nbytes

    def stall_seconds(self) -> float:
        """Return the seconds that compute has waited for copies since the plan was applied.

        Copies are those of weights and activations. Synchronizes with the device.
        """
        return self._applied.stall_seconds()

    def streaming_stats(self, step: int) -> WeightsStreamed | None:
        """Return counts and times of weight streaming in this run, including earlier plans.

        Returns None if no weight was ever streamed. Synchronizes with the device.
        """
        ring = self._applied.ring
        rings = self._closed_rings if ring is None else [*self._closed_rings, ring.counters()]
        if not rings:
            return None
        nbytes = sum(one.fetched_nbytes for one in rings)
        stalled_s = sum(one.stalled_s for one in rings)
        return WeightsStreamed(
            step=step,
            slots=0 if ring is None else rings[-1].slots,
            fetches=sum(one.fetches for one in rings),
            nbytes=nbytes,
            late=sum(one.late for one in rings),
            on_demand=sum(one.on_demand for one in rings),
            waited_s=stalled_s,
            hidden_s=max(0.0, nbytes / self._problem.model.rates.link_in - stalled_s),
        )

    def record(self) -> dict[str, object]:
        """Return the plan's decisions for a checkpoint; `PlannerInputs.saved_plan` takes them."""
        decisions = asdict(candidate_of(self.plan)) | {"was_checked": self._was_checked}
        failure = self._problem_now().compile_failure
        if failure is not None:
            decisions |= {"compiled": False, COMPILE_FAILURE: asdict(failure)}
        return decisions

    def close(self) -> None:
        """Remove the plan's hooks. Streamed weights stay on the host, so the model cannot run."""
        self._applied.close()

    @property
    def _num_graphs(self) -> int:
        return 0 if self._applied.compiler is None else self._applied.compiler.graphs

    def _comparison(self, seconds: float, peak: int | None) -> str:
        plan = self.plan
        text = (
            f"measured: {plan.batch / seconds:.3f} samples/s "
            f"(expected {plan.samples_per_second:.3f})"
        )
        if peak is not None:
            expected = format_bytes(plan.device.total)
            text += f", {format_bytes(peak)} of device memory (expected {expected})"
        smaller = self._micro_batches - self._full_size
        if smaller:
            text += (
                f"; {smaller} of {self._micro_batches} micro-batches were smaller than the largest "
                "bucket, for which the plan is made"
            )
        compiler = self._applied.compiler
        if compiler is not None:
            text += f"; {compiler.graphs} graphs compiled in {format_seconds(compiler.seconds)}"
        return text

    def _correct(self, measured: StepMeasurement, remaining: int) -> bool:
        """Calibrate the cost model with a measurement and plan again.

        Applies the new plan if it is worth the change. Returns False if the old plan was kept.
        """
        model, fixed = calibrate(self._problem.model, self._problem.fixed, self.plan, measured)
        self._problem = replace(self._problem, model=model, fixed=fixed)
        current = predict(model, candidate_of(self.plan), fixed, simulated=False)
        better = self._of_main_rank(self._better_plan(current, remaining))
        if better is None:
            self.plan = current
            self._allow_ring_growth(measured.peak_nbytes)
            return False
        text = (
            f"plan corrected after the first steps: {describe(better)}. Expect "
            f"{describe_speed(better)}; the first plan would give {describe_speed(current)}"
        )
        self._emit(Notice(text))
        failure = self._try_to_change_to(better)
        if failure:
            text = f"{failure} Returning to the first plan."
            self._emit(Notice(text, level="warning", fallback=True))
            self.change_to(current)
        return True

    def _better_plan(self, current: Plan, remaining: int) -> Plan | None:
        """Return a plan that saves more time in the rest of the run than the change costs, or None.

        If the current plan does not fit the memory, the best plan that fits is returned.
        """
        problem = replace(self._problem_now(), micro_batches=remaining)
        if current.compiled and not self._gave_up_compiling:
            # The graphs exist: compiled plans cost nothing extra.
            constraints = replace(problem.constraints, compile=(True,))
            problem = replace(problem, constraints=constraints)
        with suppress(PlanError):
            other = problem.solve(problem.budget)
            if candidate_of(other) == candidate_of(current):
                return None
            if not problem.fits(current):
                return other
            saved = current.seconds.step - other.seconds.step
            is_clear = saved > MIN_GAIN * current.seconds.step
            seconds = other.host.weights / PIN_NBYTES_PER_S
            seconds += problem.compile_seconds(other, current)
            if is_clear and remaining * saved > seconds:
                return other
        return None

    def _smaller_plan(self) -> Plan | None:
        budget = self._problem.budget
        required = self.plan.device.total * (1 + budget.fragmentation)
        for share in SMALLER_SHARES:
            with suppress(PlanError):
                smaller = replace(budget, device_nbytes=int(required * share))
                return self._of_main_rank(self._problem_now().solve(smaller))
        return self._of_main_rank(None)

    @property
    def _gave_up_compiling(self) -> bool:
        compiler = self._applied.compiler
        return compiler is not None and bool(compiler.failure)

    def _problem_now(self) -> PlanProblem:
        """Return the planning problem for a change of the plan.

        There are no compiled plans in it if compilation has failed. What is in managed memory stays
        there, so plans that have it on the device would not be what runs.
        """
        problem, compiler = self._problem, self._applied.compiler
        if compiler is not None and compiler.failure:
            problem = problem.without_compilation(compiler.reason)
        kept, choices = self.plan.managed, problem.constraints.managed
        choices = tuple(roles for roles in choices if {*roles} >= {*kept}) or (kept,)
        return replace(problem, constraints=replace(problem.constraints, managed=choices))

    def _of_main_rank(self, plan: Plan | None) -> Plan | None:
        """Return the main rank's plan, with this rank's prediction of its time and memory."""
        candidate = self._ranks.broadcast(None if plan is None else candidate_of(plan))
        if candidate is None:
            return None
        if self._ranks.is_main:
            return plan
        return predict(self._problem.model, candidate, self._problem.fixed, simulated=False)

    def _try_to_change_to(self, plan: Plan) -> str:
        """Apply a plan. Return an empty string, or the error's first line if memory ran out.

        The exception itself is dropped, because its traceback would keep tensors alive. An error on
        one rank counts for all.
        """
        failure = ""
        try:
            self.change_to(plan)
        except (torch.OutOfMemoryError, OffloadError) as error:  # device memory, or pinned memory
            self.plan = plan
            failure = str(error).splitlines()[0]
        return next(filter(None, self._ranks.gather(failure)), "")

    def _allow_ring_growth(self, peak_nbytes: int | None) -> None:
        spare = self._problem.spare_nbytes(self.plan, peak_nbytes)
        self._applied.allow_ring_growth(max(0, spare))


# Calibration


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Measured time and memory of a micro-batch, averaged over a few steps."""

    seconds: float | None
    """Seconds per micro-batch; None if some were smaller than those that the plan is made for."""
    stalled_s: float
    """Seconds per micro-batch in which compute waited for copies of weights or activations."""
    peak_nbytes: int | None
    """Peak of device memory in bytes; None if unknown, or if no micro-batch had full size."""

    @property
    def is_known(self) -> bool:
        """True if time or memory was measured with micro-batches that the plan is made for."""
        return self.seconds is not None or self.peak_nbytes is not None


def worst_measurement(measured: Sequence[StepMeasurement]) -> StepMeasurement:
    """Return the slowest and largest of the ranks' measurements; unknown values are left out."""
    seconds = [one.seconds for one in measured if one.seconds is not None]
    peaks = [one.peak_nbytes for one in measured if one.peak_nbytes is not None]
    return StepMeasurement(
        max(seconds, default=None),
        max(one.stalled_s for one in measured),
        max(peaks, default=None),
    )


def plan_is_inaccurate(plan: Plan, measured: StepMeasurement) -> bool:
    """Return True if measured memory or time differs too much from the plan's prediction."""
    return _is_memory_off(plan, measured) or _is_time_off(plan, measured)


def calibrate(
    model: CostModel, fixed: FixedMemory, plan: Plan, measured: StepMeasurement
) -> tuple[CostModel, FixedMemory]:
    """Adjust the cost model and the fixed memory, so that they predict what was measured.

    The difference in memory is assumed to be the same in every plan:

        library_nbytes += measured peak - predicted peak

    Time is fitted in two steps. First the compute times are scaled, from the time without stalls:

        compute_factor = (seconds - stalled) / (predicted step - predicted waits)

    Then the bandwidth between host and device is chosen such that the simulated step takes the
    measured time.

    Kernels wait for managed memory while they run, so stalls do not contain that. If a plan has
    any, time that is longer than predicted counts as waiting for it, because its prediction is the
    least certain: it depends on where pages are.
    """
    if _is_memory_off(plan, measured):
        assert measured.peak_nbytes is not None
        unpredicted = measured.peak_nbytes - plan.device.total
        fixed = replace(fixed, library_nbytes=fixed.library_nbytes + unpredicted)
    if _is_time_off(plan, measured):
        assert measured.seconds is not None
        model = _fit_rates(model, fixed, plan, measured.seconds, measured.stalled_s)
    return model, fixed


def _is_memory_off(plan: Plan, measured: StepMeasurement) -> bool:
    peak, planned = measured.peak_nbytes, plan.device.total
    return peak is not None and abs(peak - planned) > MEMORY_TOLERANCE * planned


def _is_time_off(plan: Plan, measured: StepMeasurement) -> bool:
    seconds, planned = measured.seconds, plan.seconds.step
    return seconds is not None and abs(seconds - planned) > TIME_TOLERANCE * planned


def _fit_rates(
    model: CostModel, fixed: FixedMemory, plan: Plan, seconds: float, stalled_s: float
) -> CostModel:
    predicted = plan.seconds
    managed_s = predicted.wait_managed
    waits = predicted.wait_weights + predicted.wait_activations + managed_s
    computed = predicted.step - waits
    compute_factor = (seconds - stalled_s) / computed
    if compute_factor <= 0:  # the step was nothing but stalls, which says nothing about compute
        compute_factor = 1.0
    in_place_factor: float | None = None
    if managed_s > 0:
        compute_factor = min(compute_factor, 1.0)
        measured_s = seconds - stalled_s - compute_factor * computed
        measured_s = max(measured_s, managed_s / MAX_LINK_FACTOR)
        in_place_factor = max(managed_s / measured_s, MIN_LINK_FACTOR)

    def rescaled(link_factor: float) -> CostModel:
        return model.rescaled(compute_factor, link_factor, in_place_factor)

    def step_with(link_factor: float) -> float:
        again = predict(rescaled(link_factor), candidate_of(plan), fixed, simulated=False)
        return again.seconds.step

    uses_link = predicted.link_in > 0 or predicted.link_out > 0
    return rescaled(_fit_link(seconds, step_with) if uses_link else 1.0)


def _fit_link(seconds: float, step_with: Callable[[float], float]) -> float:
    """Return the factor by which to multiply the bandwidth between host and device.

    With it, a simulated step takes `seconds`. It is found by bisection; `step_with` simulates a
    step with a given factor.
    """
    if abs(step_with(1.0) - seconds) <= 0.01 * seconds:
        return 1.0
    low, high = MIN_LINK_FACTOR, MAX_LINK_FACTOR
    for _ in range(LINK_BISECTIONS):  # a faster link never makes the step longer
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_with(middle) > seconds else (low, middle)
    # If compute dominates, the step hardly depends on the link, so keep the assumed bandwidth.
    return low if abs(step_with(low) - seconds) <= abs(step_with(1.0) - seconds) * 0.5 else 1.0
