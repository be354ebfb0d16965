"""A plan at work: held against its first steps, corrected once, and given up where it is too large.

Whatever is changed is changed between two steps, and no number that is trained on depends on it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.events.types import Notice, WeightsStreamed
from gracetune.memory.stages import hard_reclamation
from gracetune.offload.copies import OffloadError
from gracetune.plan.report import describe, describe_speed
from gracetune.plan.search import PlanError, predict
from gracetune.plan.simulate import PlanCandidate
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.data.sample import Batch
    from gracetune.events.types import Event
    from gracetune.memory.stages import GcFreeze
    from gracetune.offload.ring import RingCounters
    from gracetune.plan.apply import AppliedPlan
    from gracetune.plan.planner import PlanProblem
    from gracetune.plan.result import Plan

    Emit = Callable[[Event], None]
    from gracetune.plan.cost import CostModel
    from gracetune.plan.memory import FixedMemory


COMPILING_S = 90.0
"""What compiling the blocks of a model takes, about, the first time."""
MOVED_NBYTES_S = 2e9
"""Host memory that is pinned and filled in a second, about."""
CLEAR_GAIN = 0.03
"""Of a micro-batch's seconds: what another plan must be predicted to save before it is taken."""
SMALLER = (0.85, 0.92, 0.97)
"""Of what a plan needed that did not fit, what the next one may need: the first that can be."""


class MemoryMeter(Protocol):
    """What steps take of the device."""

    def restart(self) -> None:
        """What is measured from here on is the steps' own."""
        ...

    def peak_nbytes(self) -> int | None:
        """The most since then, beside what was there before the plan; none: nobody counts it."""
        ...

    def clear(self) -> None:
        """Give back what nobody uses: another plan cuts memory in other pieces."""
        ...


class CudaMemoryMeter:
    """By torch's allocator; made before anything that is planned is on the device."""

    def __init__(self, device: torch.device, gc_freeze: GcFreeze) -> None:
        self._device = device
        self._reclaim = hard_reclamation(device.index, gc_freeze)
        self._before = torch.cuda.memory_allocated(device)

    def restart(self) -> None:
        """Begin anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_nbytes(self) -> int:
        """Of what is allocated, not of what the allocator holds."""
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def clear(self) -> None:
        """Waits for the device."""
        self._reclaim()


class NullMemoryMeter:
    """A rehearsal on the CPU: nobody counts."""

    def restart(self) -> None:
        """Nothing to begin."""

    def peak_nbytes(self) -> None:
        """Not known."""

    def clear(self) -> None:
        """Nothing is held."""


class PlanController:
    """The plan, and the transformer as it says."""

    def __init__(
        self,
        ask: PlanProblem,
        plan: Plan,
        place_as: Callable[[Plan, int], AppliedPlan],
        meter: MemoryMeter,
        largest_numel: int,
        emit: Emit,
    ) -> None:
        """`place_as`: a plan, and the bytes that it leaves free. `largest_numel`: of one sample's
        latents in the bucket that the plan is for."""
        self.plan = plan
        self._ask = ask
        self._place_as = place_as
        self._meter = meter
        self._largest_numel = largest_numel
        self._emit = emit
        self._checked = False
        self._ended_rings: list[RingCounters] = []
        self._placed = place_as(plan, ask.spare_nbytes(plan))
        self.start_measuring()

    def start_measuring(self) -> None:
        """What is measured from here on is the steps' own."""
        self._meter.restart()
        self._micro_batches = self._large = 0
        self._waited_before = self._placed.stall_seconds()
        self._graphs_before = self._graphs

    def count_batch(self, batch: Batch) -> Batch:
        """A micro-batch is trained on: the plan is for full ones of the largest bucket."""
        self._micro_batches += 1
        full = len(batch) >= self.plan.batch
        self._large += full and batch.latents[0].numel() >= self._largest_numel
        return batch

    def has_compiled(self) -> bool:
        """Whether blocks were compiled in what is measured: for a bucket that came late."""
        return self._graphs > self._graphs_before

    def check(self, seconds: float, left: int) -> bool:
        """Hold a micro-batch of the first steps against the plan, the first time to correct it.

        `left`: micro-batches still to come. True where the plan was changed.
        """
        waited = (self._placed.stall_seconds() - self._waited_before) / max(self._micro_batches, 1)
        peak = self._meter.peak_nbytes()
        self._emit(Notice(self._comparison(seconds, peak)))
        first, self._checked = not self._checked, True
        measured = StepMeasurement(
            seconds=seconds if self._large == self._micro_batches else None,
            waited_s=waited,
            peak_nbytes=peak if self._large else None,
        )
        if first and self._large and is_off(self.plan, measured):
            return self._correct(measured, left)
        self._let_grow(measured.peak_nbytes)
        return False

    def reduce_memory(self, reason: str) -> bool:
        """Go on in clearly less memory; false where there is no way to."""
        if self.shrink_ring(reason):
            return True
        while (smaller := self._smaller()) is not None:
            text = f"{reason} Going on with less: {describe(smaller)}; {describe_speed(smaller)}"
            self._emit(Notice(text, level="warning", fallback=True))
            self._checked = True  # the device has said how much there is
            room = int(smaller.device.total * (1 + self._ask.budget.fragmentation))
            self._ask = replace(self._ask, budget=replace(self._ask.budget, device_nbytes=room))
            reason = self._try_to_change_to(smaller)
            if not reason:
                return True
        return False

    def shrink_ring(self, reason: str) -> bool:
        """Go on without the slots that were added to the ring; false where none were."""
        given = self._placed.shrink_ring()
        if given:
            text = f"{reason} Going on without the slots that were added."
            self._emit(Notice(text, level="warning", fallback=True))
        return given

    @property
    def slots_nbytes(self) -> int:
        """Device memory that streamed weights pass through. Waits for the device."""
        if self._placed.ring is None:
            return 0
        counters = self._placed.ring.counters()
        return counters.slots * counters.slot_nbytes

    def streaming_stats(self, step: int) -> WeightsStreamed | None:
        """What streaming has cost so far, by the plans before this one too; none where no weight
        was ever streamed. Waits for the device."""
        ring = self._placed.ring
        every = self._ended_rings if ring is None else [*self._ended_rings, ring.counters()]
        if not every:
            return None
        nbytes, waited_s = sum(c.fetched_nbytes for c in every), sum(c.stalled_s for c in every)
        return WeightsStreamed(
            step=step,
            slots=0 if ring is None else every[-1].slots,
            fetches=sum(c.fetches for c in every),
            nbytes=nbytes,
            late=sum(c.late for c in every),
            on_demand=sum(c.on_demand for c in every),
            waited_s=waited_s,
            hidden_s=max(0.0, nbytes / self._ask.model.speeds.link_in - waited_s),
        )

    def close(self) -> None:
        """The transformer is only good for reading after this."""
        self._placed.close()

    @property
    def _graphs(self) -> int:
        return 0 if self._placed.compiler is None else self._placed.compiler.graphs

    def _comparison(self, seconds: float, peak: int | None) -> str:
        text = (
            f"measured: {self.plan.batch / seconds:.3f} samples/s, "
            f"{seconds / self.plan.seconds.step:.2f} times the predicted time"
        )
        if peak is not None:
            share = peak / self.plan.device.total
            text += f"; {format_bytes(peak)} of device memory at most, {share:.2f} of the plan's"
        if self._large < self._micro_batches:
            text += (
                f"; {self._micro_batches - self._large} of {self._micro_batches} micro-batches "
                "were smaller than those that the plan is for"
            )
        compiler = self._placed.compiler
        if compiler is not None:
            text += f"; {compiler.graphs} graphs compiled in {format_seconds(compiler.seconds)}"
        return text

    def _correct(self, measured: StepMeasurement, left: int) -> bool:
        """Plan once more with what was learnt; change where that is clearly better, or needed."""
        model, fixed = calibrate(self._ask.model, self._ask.fixed, self.plan, measured)
        self._ask = replace(self._ask, model=model, fixed=fixed)
        now = predict(model, candidate_of(self.plan), fixed, simulated=False)
        other = self._other(now, left)
        if other is None:
            self.plan = now
            self._let_grow(measured.peak_nbytes)
            return False
        text = (
            f"corrected once, since the first steps were not as predicted: {describe(other)}. "
            f"Predicted from what was measured: {describe_speed(other)}; as it was: {describe_speed(now)}"
        )
        self._emit(Notice(text))
        full = self._try_to_change_to(other)
        if full:
            text = f"{full} The plan stays as it was."
            self._emit(Notice(text, level="warning", fallback=True))
            self._change_to(now)
        return True

    def _other(self, now: Plan, left: int) -> Plan | None:
        """A plan that is worth the change, for what is left of the run."""
        ask = replace(self._ask, micro_batches=left)
        if now.compiled:  # what is compiled already costs nothing
            ask = replace(ask, constraints=replace(ask.constraints, compile=(True,)))
        with suppress(PlanError):
            other = ask.solve(ask.budget)
            if candidate_of(other) == candidate_of(now):
                return None
            if not ask.fits(now):
                return other
            saved = now.seconds.step - other.seconds.step
            if saved > CLEAR_GAIN * now.seconds.step and left * saved > _change_s(now, other):
                return other
        return None

    def _smaller(self) -> Plan | None:
        asked = self._ask.budget
        needed = self.plan.device.total * (1 + asked.fragmentation)
        for share in SMALLER:
            with suppress(PlanError):
                return self._ask.solve(replace(asked, device_nbytes=int(needed * share)))
        return None

    def _try_to_change_to(self, plan: Plan) -> str:
        """Gives why there is no room; then nothing is placed, and no frame holds what did not."""
        try:
            self._change_to(plan)
        except (torch.OutOfMemoryError, OffloadError) as error:  # no room, or none can be pinned
            self.plan = plan
            return str(error).splitlines()[0]
        return ""

    def _change_to(self, plan: Plan) -> None:
        if self._placed.ring is not None:
            self._ended_rings.append(self._placed.ring.counters())
        self._placed.close()
        self._meter.clear()
        self._placed = self._place_as(plan, self._ask.spare_nbytes(plan))
        self.plan = plan

    def _let_grow(self, peak_nbytes: int | None) -> None:
        self._placed.allow_ring_growth(max(0, self._ask.spare_nbytes(self.plan, peak_nbytes)))


def _change_s(now: Plan, other: Plan) -> float:
    """What going over to another plan takes: weights move, and blocks that run as none did before
    are compiled.
    """
    ways, before = (
        {(block.weights, block.activations) for block in plan.blocks} for plan in (other, now)
    )
    compiles = other.compiled and not (now.compiled and ways <= before)
    return other.host.weights / MOVED_NBYTES_S + (COMPILING_S if compiles else 0.0)


# ------------------------------------------------------------------------------------------
# What the first steps teach the planner: bytes and rates as they were, for asking it once more.
#
# Bytes that the plan did not foresee are there whatever is chosen. Time that was computed scales
# the
# rates of computing; what is left is the link's, as far as the step showed how fast that is.


CLEAR_BYTES, CLEAR_SECONDS = 0.03, 0.10
"""Shares of the plan beyond which it was wrong, and not the measurement."""
LEAST_LINK, MOST_LINK, HALVINGS = 0.25, 4.0, 12
"""Between these shares of its rate the link is looked for, so finely."""


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """A micro-batch of the first steps; none: not measured by samples that the plan is for."""

    seconds: float | None
    waited_s: float
    """Of them, how long computing stood still for copies."""
    peak_nbytes: int | None


def is_off(plan: Plan, measured: StepMeasurement) -> bool:
    """Whether the plan was clearly missed, either way, in memory or in time."""
    return _bytes_wrong(plan, measured) or _seconds_wrong(plan, measured)


def calibrate(
    model: CostModel, fixed: FixedMemory, plan: Plan, measured: StepMeasurement
) -> tuple[CostModel, FixedMemory]:
    """The model and what is fixed, such that this plan is predicted as it was measured."""
    if _bytes_wrong(plan, measured):
        assert measured.peak_nbytes is not None
        more = measured.peak_nbytes - plan.device.total
        fixed = replace(fixed, library_nbytes=fixed.library_nbytes + more)
    if _seconds_wrong(plan, measured):
        assert measured.seconds is not None
        model = _at_pace(model, fixed, plan, measured.seconds, measured.waited_s)
    return model, fixed


def candidate_of(plan: Plan) -> PlanCandidate:
    """What was decided, without what it was predicted to take."""
    return PlanCandidate(
        plan.blocks, plan.batch, plan.accumulation, plan.slots, plan.compiled, plan.host_state
    )


def _bytes_wrong(plan: Plan, measured: StepMeasurement) -> bool:
    peak, planned = measured.peak_nbytes, plan.device.total
    return peak is not None and abs(peak - planned) > CLEAR_BYTES * planned


def _seconds_wrong(plan: Plan, measured: StepMeasurement) -> bool:
    seconds, planned = measured.seconds, plan.seconds.step
    return seconds is not None and abs(seconds - planned) > CLEAR_SECONDS * planned


def _at_pace(
    model: CostModel, fixed: FixedMemory, plan: Plan, seconds: float, waited_s: float
) -> CostModel:
    """Computing first, by the time that nothing was waited for; the link by what is left."""
    predicted = plan.seconds
    waits = predicted.wait_weights + predicted.wait_activations
    slower = (seconds - waited_s) / (predicted.step - waits)
    if slower <= 0:  # all was waiting: that says nothing of computing
        slower = 1.0

    def step_with(link: float) -> float:
        paced = model.rescaled(slower, link)
        return predict(paced, candidate_of(plan), fixed, simulated=False).seconds.step

    moves = predicted.link_in > 0 or predicted.link_out > 0
    return model.rescaled(slower, _link_for(seconds, step_with) if moves else 1.0)


def _link_for(seconds: float, step_with: Callable[[float], float]) -> float:
    """The share of the link's rate nearest to 1 with which a step takes so long."""
    if abs(step_with(1.0) - seconds) <= 0.01 * seconds:
        return 1.0
    low, high = LEAST_LINK, MOST_LINK
    for _ in range(HALVINGS):  # a faster link never makes a longer step
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_with(middle) > seconds else (low, middle)
    # Where computing alone takes as long, any link would do: then nothing was learnt of it.
    return low if abs(step_with(low) - seconds) <= abs(step_with(1.0) - seconds) * 0.5 else 1.0
