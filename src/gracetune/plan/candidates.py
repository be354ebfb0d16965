"""The choices worth predicting: what each would need, and which of them fit.

Blocks late in forward are the first in backward: what they keep is held for a short time, and gone
before earlier blocks recompute. So the last blocks get the faster treatment, the first the leaner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import TYPE_CHECKING

from gracetune.plan.peak import device_bytes, host_bytes
from gracetune.plan.result import BlockPlan
from gracetune.plan.step import PlanCandidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.plan.cost import CostModel
    from gracetune.plan.peak import Fixed
    from gracetune.plan.result import Activations, Weights

    Treatment = tuple[Activations, bool]
    """Of activations, and whether a recomputed block's input is offloaded."""

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
    written: int | None = None
    """The run file's own micro-batch, to hold beside a plan with another; none: nobody asks."""

    def batch_sizes(self) -> list[int]:
        """Largest first."""
        divisors = [n for n in range(self.samples, 0, -1) if self.samples % n == 0]
        return [n for n in divisors if self.batches is None or n in self.batches]

    def within(self, budget: PlanBudget) -> Constraints:
        """What is left of them where host and device are one memory: there is nothing to move."""
        if not budget.one_memory:
            return self
        return replace(self, stream=False, offload=False, host_state=(0.0,))


@dataclass(frozen=True, slots=True)
class Frame:
    """A choice without its activations."""

    num_blocks: int
    streamed: tuple[int, ...]
    slots: int
    batch: int
    samples: int
    compiled: bool
    host_state: float

    def choice(self, first: Sequence[Treatment], last: Treatment, num_last: int) -> PlanCandidate:
        """With the first blocks treated in turns, and so many last ones in their own way."""
        inside = set(self.streamed)
        blocks = []
        for index in range(self.num_blocks):
            is_last = index >= self.num_blocks - num_last
            activations, offload_input = last if is_last else first[index % len(first)]
            weights: Weights = "streamed" if index in inside else "resident"
            blocks.append(BlockPlan(weights, activations, offload_input))
        accumulation = self.samples // self.batch
        return PlanCandidate(
            tuple(blocks), self.batch, accumulation, self.slots, self.compiled, self.host_state
        )


def candidates(
    model: CostModel, fixed: Fixed, budget: PlanBudget, wishes: Constraints
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


def _frames(model: CostModel, wishes: Constraints) -> Iterator[Frame]:
    for batch, compiled, share in product(wishes.batch_sizes(), wishes.compile, wishes.host_state):
        for streamed, slots in _streams(model.num_blocks, wishes):
            yield Frame(model.num_blocks, streamed, slots, batch, wishes.samples, compiled, share)


def fits(model: CostModel, choice: PlanCandidate, fixed: Fixed, budget: PlanBudget) -> bool:
    """Whether both tiers have room."""
    host = host_bytes(model.at(choice.batch), choice, fixed).total
    return host <= budget.host_nbytes and fits_device(model, choice, fixed, budget)


def fits_device(model: CostModel, choice: PlanCandidate, fixed: Fixed, budget: PlanBudget) -> bool:
    """Whether the device has room, for the allocator's losses too."""
    return device_need(model, choice, fixed, budget) <= budget.device_nbytes


def device_need(model: CostModel, choice: PlanCandidate, fixed: Fixed, budget: PlanBudget) -> int:
    """Device memory at its fullest, with what an allocator loses; of one memory, the host's too."""
    costs = model.at(choice.batch)
    need = ceil(device_bytes(costs, choice, fixed).total * (1 + budget.fragmentation))
    return need + host_bytes(costs, choice, fixed).total if budget.one_memory else need


def leanest(
    model: CostModel, fixed: Fixed, budget: PlanBudget, wishes: Constraints
) -> PlanCandidate:
    """What needs least of the device, of all that is offered.

    That is not always the smallest batch, nor all that can be elsewhere: gradients that are
    accumulated, and slots, take room too.
    """
    choices = (
        frame.choice(first, last, 0)
        for frame in _frames(model, wishes)
        for first, last in _mixes(frame.compiled, wishes)
    )
    return min(choices, key=lambda choice: device_need(model, choice, fixed, budget))


def spread(count: int, num_blocks: int) -> tuple[int, ...]:
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
                yield spread(count, num_blocks), slots


def _mixes(
    compiled: bool, wishes: Constraints
) -> Iterator[tuple[tuple[Treatment, ...], Treatment]]:
    for first, last in COMPILED_MIXES if compiled else EAGER_MIXES:
        if wishes.offload or not any(t == OFFLOAD or t[1] for t in first):
            yield first, last


def _most(
    frame: Frame,
    first: tuple[Treatment, ...],
    last: Treatment,
    fit: Callable[[PlanCandidate], bool],
) -> PlanCandidate | None:
    """As many last blocks as fit; none where not even the first kind does."""
    few, many = 0, frame.num_blocks
    best = frame.choice(first, last, few)
    if not fit(best):
        return None
    while few < many:
        middle = (few + many + 1) // 2
        choice = frame.choice(first, last, middle)
        if fit(choice):
            few, best = middle, choice
        else:
            many = middle - 1
    return best
