"""The trade: of all choices that fit, the fastest, with the next best beside it.

Choices are predicted in the order of what they could reach at best, and the search ends where no
other could win any more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

from gracetune.errors import GracetuneError
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.result import BlockPlan, Plan
from gracetune.plan.simulate import PlanCandidate, lower_bound_seconds, predict_seconds
from gracetune.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.plan.cost import CostModel
    from gracetune.plan.result import ActivationMode, WeightPlacement

    Treatment = tuple[ActivationMode, bool]
    """Of activations, and whether a recomputed block's input is offloaded."""


TIE_MARGIN = 0.005
"""Plans within this share of the fastest are as fast: the simpler one is taken."""
MAX_ALTERNATIVES = 4


class PlanError(GracetuneError):
    """No plan fits what there is."""


@dataclass(frozen=True, slots=True)
class RunFileBatchPlan:
    """What a run gets with the micro-batch of its run file, which training keeps."""

    batch: int
    plan: Plan | None
    """None: nothing fits with that batch."""
    why: str = ""
    """Then, what is too small."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan, and what else there was."""

    best: Plan
    others: tuple[Plan, ...]
    """The best of other kinds, fastest first."""
    num_tried: int
    as_written: RunFileBatchPlan | None = None
    """None: nobody asked, or the plan has the run file's own batch."""


def find_best_plan(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, wishes: Constraints, simulated: bool
) -> SearchResult:
    """The fastest plan within the budget; an error names the least that would do."""
    wishes = wishes.for_budget(budget)
    if not wishes.batch_sizes():
        raise PlanError(
            f"a step of {wishes.samples} samples cannot be made of micro-batches of "
            f"{' or '.join(map(str, wishes.batches or ()))}. Name a batch that divides it."
        )
    open_choices = sorted(
        (
            lower_bound_seconds(model.at(choice.batch), choice, model.speeds) / choice.batch,
            number,
            choice,
        )
        for number, choice in enumerate(candidates(model, fixed, budget, wishes))
    )
    if not open_choices:
        raise PlanError(_too_small(model, fixed, budget, wishes))
    plans: list[Plan] = []
    kinds: dict[object, float] = {}
    for least, _, choice in open_choices:
        fastest = sorted(kinds.values())
        if len(fastest) > MAX_ALTERNATIVES and least > fastest[MAX_ALTERNATIVES]:
            break
        if least > kinds.get(_kind(choice), float("inf")):
            continue
        plan = predict(model, choice, fixed, simulated)
        plans.append(plan)
        pace = 1 / plan.samples_per_second
        kinds[_kind(plan)] = min(pace, kinds.get(_kind(plan), float("inf")))
    best = _simplest(plans)
    best = _stream_less(model, best, fixed, budget, simulated)
    others = _others(plans, best)
    return SearchResult(best, others, len(plans))


def compare_with_run_file(
    planned: SearchResult,
    model: CostModel,
    fixed: FixedMemory,
    budget: PlanBudget,
    wishes: Constraints,
) -> SearchResult:
    """The same, with what the run file's own micro-batch would get where the plan has another."""
    best, batch = planned.best, wishes.run_file_batch
    if batch is None or best.batch == batch:
        return planned
    try:
        written = find_best_plan(
            model, fixed, budget, replace(wishes, batches=(batch,)), best.simulated
        )
    except PlanError as error:
        return replace(planned, as_written=RunFileBatchPlan(batch, None, str(error)))
    return replace(planned, as_written=RunFileBatchPlan(batch, written.best))


def predict(model: CostModel, choice: PlanCandidate, fixed: FixedMemory, simulated: bool) -> Plan:
    """What one choice takes."""
    costs = model.at(choice.batch)
    return Plan(
        blocks=choice.blocks,
        batch=choice.batch,
        accumulation=choice.accumulation,
        slots=choice.slots,
        compiled=choice.compiled,
        frozen_compute=model.frozen_compute,
        device=device_bytes(costs, choice, fixed),
        host=host_bytes(costs, choice, fixed),
        seconds=predict_seconds(
            costs, choice, model.speeds, fixed.optimizer_nbytes // fixed.experts
        ),
        simulated=simulated,
        host_state=choice.host_state,
    )


def _kind(plan: Plan | PlanCandidate) -> object:
    """What makes two plans different enough to show both."""
    streams = bool(plan.streamed)
    treatments = frozenset((b.activations, b.offload_input) for b in plan.blocks)
    return plan.batch, plan.compiled, streams, treatments, bool(plan.host_state)


def _simplest(plans: list[Plan]) -> Plan:
    """Of the fastest, the one with the least machinery."""
    top = max(plan.samples_per_second for plan in plans)
    close = [plan for plan in plans if plan.samples_per_second >= top * (1 - TIE_MARGIN)]
    return min(
        close,
        key=lambda plan: (
            plan.host_state,
            any(b.activations == "offload" or b.offload_input for b in plan.blocks),
            len(plan.streamed),
            plan.slots,
            plan.device.total,
        ),
    )


def _stream_less(
    model: CostModel, plan: Plan, fixed: FixedMemory, budget: PlanBudget, simulated: bool
) -> Plan:
    """Let weights stay that have room: the coarse search leaves some."""
    few, many = 0, len(plan.streamed)
    while few < many:
        count = (few + many) // 2
        choice = _with_streamed(plan, count)
        if fits(model, choice, fixed, budget):
            many = count
        else:
            few = count + 1
    if many == len(plan.streamed):
        return plan
    fewer = predict(model, _with_streamed(plan, many), fixed, simulated)
    return fewer if fewer.seconds.step <= plan.seconds.step * (1 + TIE_MARGIN) else plan


def _with_streamed(plan: Plan, count: int) -> PlanCandidate:
    inside = set(evenly_spaced(count, len(plan.blocks))) if count else set()
    blocks = tuple(
        replace(block, weights="streamed" if index in inside else "resident")
        for index, block in enumerate(plan.blocks)
    )
    slots = plan.slots if inside else 0
    return PlanCandidate(
        blocks, plan.batch, plan.accumulation, slots, plan.compiled, plan.host_state
    )


def _others(plans: list[Plan], best: Plan) -> tuple[Plan, ...]:
    shown = {_kind(best)}
    others = []
    for plan in sorted(plans, key=lambda plan: -plan.samples_per_second):
        if _kind(plan) not in shown:
            shown.add(_kind(plan))
            others.append(plan)
    return tuple(others[:MAX_ALTERNATIVES])


def _too_small(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, wishes: Constraints
) -> str:
    """Which tier lacks how much, and what would help."""
    least = smallest_candidate(model, fixed, budget, wishes)

    def need(device_nbytes: int) -> int:
        return required_device_nbytes(model, least, fixed.for_budget(device_nbytes), budget)

    if need(budget.device_nbytes) > budget.device_nbytes:
        kind = "memory, which host and device share," if budget.one_memory else "device memory"
        ways = " and ".join(sorted({block.activations for block in least.blocks}))
        return (
            f"{format_bytes(budget.device_nbytes)} of {kind} are too few for {model.name}: "
            f"the least is {_enough(need)} (batch {least.batch}, {_streamed(least)}, "
            f"activations: {ways}). Raise the budget, lower the resolution or the frames, or train "
            "less."
        )
    roomy = replace(budget, host_nbytes=sys.maxsize)
    host = min(
        host_bytes(model.at(choice.batch), choice, fixed).total
        for choice in candidates(model, fixed, roomy, wishes)
    )
    return (
        f"{format_bytes(budget.host_nbytes)} of host memory are too few for {model.name} in "
        f"{format_bytes(budget.device_nbytes)} of device memory: the least that was found for what "
        f"does not fit on the device is {_enough(lambda _: host)}. Give the device more, quantise "
        "what is frozen, or use a machine with more memory."
    )


def _enough(need: Callable[[int], int]) -> str:
    """The least that is enough as it is printed, where what is needed may grow with what there is.

    It grows by a small part of that, so the search ends soon.
    """
    nbytes = need(0)
    while True:
        text = _rounded_up(nbytes)
        given = parse_bytes(text)
        if need(given) <= given:
            return text
        nbytes = max(need(given), nbytes + 1)


def _rounded_up(nbytes: int) -> str:
    """As `format_bytes` prints it, and never less than it is."""
    text = format_bytes(nbytes)
    if parse_bytes(text) >= nbytes:
        return text
    return format_bytes(nbytes + parse_bytes(f"0.1 {text.split()[1]}"))


def _streamed(choice: PlanCandidate) -> str:
    if not choice.streamed:
        return "no weights streamed"
    if len(choice.streamed) == len(choice.blocks):
        return "all weights streamed"
    return f"{len(choice.streamed)} of {len(choice.blocks)} blocks streamed"


# ------------------------------------------------------------------------------------------
# The choices worth predicting: what each would need, and which of them fit.
#
# Blocks late in forward are the first in backward: what they keep is held for a short time, and
# gone
# before earlier blocks recompute. So the last blocks get the faster treatment, the first the
# leaner.


KEEP: Treatment = ("keep", False)
LEAN: Treatment = ("lean", False)
RECOMPUTE: Treatment = ("recompute", False)
RECOMPUTE_FROM_HOST: Treatment = ("recompute", True)
OFFLOAD: Treatment = ("offload", False)
COMPILED_MIXES: tuple[tuple[tuple[Treatment, ...], Treatment], ...] = (
    ((LEAN,), KEEP),
    ((RECOMPUTE,), LEAN),
    ((RECOMPUTE,), KEEP),
    ((OFFLOAD,), LEAN),
    ((OFFLOAD,), KEEP),
    ((OFFLOAD, RECOMPUTE), LEAN),
    ((OFFLOAD, RECOMPUTE, RECOMPUTE, RECOMPUTE), LEAN),
    ((RECOMPUTE_FROM_HOST,), LEAN),
)
"""What the first blocks do, in turns, and what the last ones do, as many as fit."""
EAGER_MIXES: tuple[tuple[tuple[Treatment, ...], Treatment], ...] = (
    ((LEAN,), KEEP),
    ((RECOMPUTE,), KEEP),
    ((RECOMPUTE,), LEAN),
    ((OFFLOAD,), KEEP),
    ((RECOMPUTE_FROM_HOST,), KEEP),
)
STREAMED_PARTS = 8
"""How finely the number of streamed blocks is tried."""


@dataclass(frozen=True, slots=True)
class PlanBudget:
    """What a plan may take."""

    device_nbytes: int
    host_nbytes: int
    fragmentation: float = 0.0
    """Share of the device's peak that the allocator holds beside it."""
    one_memory: bool = False
    """Host and device have the same memory: `device_nbytes` is for both together."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a run leaves open, and what it does not."""

    samples: int = 1
    """Of an optimizer step, on this device: batch times accumulation."""
    batches: tuple[int, ...] | None = None
    """Micro-batches that may be tried; none: every divisor of `samples`."""
    compile: tuple[bool, ...] = (True, False)
    stream: bool = True
    offload: bool = True
    slots: tuple[int, ...] = (3, 2, 4)
    host_state: tuple[float, ...] = (0.0,)
    """Shares of the optimizer's state that may live in host memory."""
    run_file_batch: int | None = None
    """The run file's own micro-batch, to hold beside a plan with another; none: nobody asks."""

    def batch_sizes(self) -> list[int]:
        """Largest first."""
        divisors = [n for n in range(self.samples, 0, -1) if self.samples % n == 0]
        return [n for n in divisors if self.batches is None or n in self.batches]

    def for_budget(self, budget: PlanBudget) -> Constraints:
        """What is left of them where host and device are one memory: there is nothing to move."""
        if not budget.one_memory:
            return self
        return replace(self, stream=False, offload=False, host_state=(0.0,))


@dataclass(frozen=True, slots=True)
class PartialCandidate:
    """A choice without its activations."""

    num_blocks: int
    streamed: tuple[int, ...]
    slots: int
    batch: int
    samples: int
    compiled: bool
    host_state: float

    def candidate(
        self, first: Sequence[Treatment], last: Treatment, num_last: int
    ) -> PlanCandidate:
        """With the first blocks treated in turns, and so many last ones in their own way."""
        inside = set(self.streamed)
        blocks = []
        for index in range(self.num_blocks):
            is_last = index >= self.num_blocks - num_last
            activations, offload_input = last if is_last else first[index % len(first)]
            weights: WeightPlacement = "streamed" if index in inside else "resident"
            blocks.append(BlockPlan(weights, activations, offload_input))
        accumulation = self.samples // self.batch
        return PlanCandidate(
            tuple(blocks), self.batch, accumulation, self.slots, self.compiled, self.host_state
        )


def candidates(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, wishes: Constraints
) -> Iterator[PlanCandidate]:
    """Every choice that fits, each with as many fast blocks as there is room for."""

    def fit(choice: PlanCandidate) -> bool:
        return fits_device(model, choice, fixed, budget)

    for frame in _frames(model, wishes):
        for first, last in _mixes(frame.compiled, wishes):
            found = _most(frame, first, last, fit)
            # The more blocks stay on the device, the less the host must hold.
            if found is not None and fits(model, found, fixed, budget):
                yield found


def _frames(model: CostModel, wishes: Constraints) -> Iterator[PartialCandidate]:
    for batch, compiled, share in product(wishes.batch_sizes(), wishes.compile, wishes.host_state):
        for streamed, slots in _streams(model.num_blocks, wishes):
            yield PartialCandidate(
                model.num_blocks, streamed, slots, batch, wishes.samples, compiled, share
            )


def fits(model: CostModel, choice: PlanCandidate, fixed: FixedMemory, budget: PlanBudget) -> bool:
    """Whether both tiers have room."""
    host = host_bytes(model.at(choice.batch), choice, fixed).total
    return host <= budget.host_nbytes and fits_device(model, choice, fixed, budget)


def fits_device(
    model: CostModel, choice: PlanCandidate, fixed: FixedMemory, budget: PlanBudget
) -> bool:
    """Whether the device has room, for the allocator's losses too."""
    return required_device_nbytes(model, choice, fixed, budget) <= budget.device_nbytes


def required_device_nbytes(
    model: CostModel, choice: PlanCandidate, fixed: FixedMemory, budget: PlanBudget
) -> int:
    """Device memory at its fullest, with what an allocator loses; of one memory, the host's too."""
    costs = model.at(choice.batch)
    need = ceil(device_bytes(costs, choice, fixed).total * (1 + budget.fragmentation))
    return need + host_bytes(costs, choice, fixed).total if budget.one_memory else need


def smallest_candidate(
    model: CostModel, fixed: FixedMemory, budget: PlanBudget, wishes: Constraints
) -> PlanCandidate:
    """What needs least of the device, of all that is offered.

    That is not always the smallest batch, nor all that can be elsewhere: gradients that are
    accumulated, and slots, take room too.
    """
    choices = (
        frame.candidate(first, last, 0)
        for frame in _frames(model, wishes)
        for first, last in _mixes(frame.compiled, wishes)
    )
    return min(choices, key=lambda choice: required_device_nbytes(model, choice, fixed, budget))


def evenly_spaced(count: int, num_blocks: int) -> tuple[int, ...]:
    """So many blocks, as evenly as can be: the link then always has some work."""
    return tuple(index * num_blocks // count for index in range(count))


def _streams(num_blocks: int, wishes: Constraints) -> Iterator[tuple[tuple[int, ...], int]]:
    yield (), 0
    if not wishes.stream:
        return
    counts = {
        max(2, round(num_blocks * part / STREAMED_PARTS)) for part in range(1, STREAMED_PARTS + 1)
    }
    for count in sorted(n for n in counts if n <= num_blocks):
        for slots in wishes.slots:
            if slots < count or slots == min(wishes.slots):
                yield evenly_spaced(count, num_blocks), slots


def _mixes(
    compiled: bool, wishes: Constraints
) -> Iterator[tuple[tuple[Treatment, ...], Treatment]]:
    for first, last in COMPILED_MIXES if compiled else EAGER_MIXES:
        if wishes.offload or not any(t == OFFLOAD or t[1] for t in first):
            yield first, last


def _most(
    frame: PartialCandidate,
    first: tuple[Treatment, ...],
    last: Treatment,
    fit: Callable[[PlanCandidate], bool],
) -> PlanCandidate | None:
    """As many last blocks as fit; none where not even the first kind does."""
    few, many = 0, frame.num_blocks
    best = frame.candidate(first, last, few)
    if not fit(best):
        return None
    while few < many:
        middle = (few + many + 1) // 2
        choice = frame.candidate(first, last, middle)
        if fit(choice):
            few, best = middle, choice
        else:
            many = middle - 1
    return best
