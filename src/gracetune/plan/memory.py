"""The bytes of one choice: what is on the device when most is there, and what the host holds.

The walk goes through a step block by block, forward and back, and keeps its highest moment. What
stays the same throughout is added once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.plan.result import MAX_BLOCKS_IN_FLIGHT, Bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.plan.cost import ModelCosts
    from gracetune.plan.simulate import PlanCandidate


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """What a run needs whatever is chosen."""

    optimizer_nbytes: int
    """The optimizer's state of all experts."""
    experts: int = 1
    """Transformers of this shape; a step uses one, and treats both alike."""
    device_caches_nbytes: int = 0
    """Encoded text that stays on the device."""
    text_nbytes: int = 0
    """All encoded text there is, as far as it may stay on the device."""
    text_part: int = 0
    """It may fill one part in so many of the device's budget; 0: it does not follow that."""
    host_caches_nbytes: int = 0
    """Encoded samples in host memory."""
    host_weights_nbytes: int = 0
    """Models that wait in host memory: another expert, encoders."""
    library_nbytes: int = 0
    """Workspaces of the libraries that kernels come from."""
    averages_nbytes: int = 0
    """Moving averages of what is trained."""
    state_slots_nbytes: int = 0
    """What state passes through on the device, where it lives in host memory."""
    batches_ahead: int = 1
    """Batches on the device beside the one in use."""

    def for_budget(self, device_nbytes: int) -> FixedMemory:
        """The same in another budget of device memory."""
        if not self.text_part:
            return self
        text = min(self.text_nbytes, device_nbytes // self.text_part)
        return replace(self, device_caches_nbytes=text)


@dataclass(frozen=True, slots=True)
class _Moment:
    activations: int
    workspace: int
    gradients: int

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.gradients


def device_bytes(costs: ModelCosts, choice: PlanCandidate, fixed: FixedMemory) -> Bytes:
    """Device memory by role, when it is fullest."""
    top = max(_moments(costs, choice, fixed.experts), key=lambda moment: moment.total)
    resident = sum(
        block.frozen_nbytes
        for block, plan in zip(costs.blocks, choice.blocks, strict=True)
        if plan.weights == "resident"
    )
    slots = choice.slots * costs.slot_nbytes if choice.streamed else 0
    return Bytes(
        weights=fixed.experts * (costs.outside_frozen_nbytes + resident) + slots,
        adapters=fixed.experts * (costs.trained_nbytes + costs.cast_copies_nbytes)
        + fixed.averages_nbytes,
        gradients=top.gradients,
        optimizer=_state_on_device(choice.host_state, fixed),
        activations=top.activations,
        caches=fixed.device_caches_nbytes + costs.batch_nbytes * (1 + fixed.batches_ahead),
        workspace=top.workspace + fixed.library_nbytes,
    )


def host_bytes(costs: ModelCosts, choice: PlanCandidate, fixed: FixedMemory) -> Bytes:
    """Host memory by role; activations are in it by the end of forward."""
    out = sum(
        block.offloaded_nbytes(plan, choice.compiled)
        for block, plan in zip(costs.blocks, choice.blocks, strict=True)
    )
    slab = sum(costs.blocks[index].frozen_nbytes for index in choice.streamed)
    return Bytes(
        weights=fixed.experts * slab + fixed.host_weights_nbytes,
        optimizer=int(choice.host_state * fixed.optimizer_nbytes),
        activations=out,
        caches=fixed.host_caches_nbytes,
    )


def _state_on_device(host_share: float, fixed: FixedMemory) -> int:
    slots = fixed.state_slots_nbytes if host_share else 0
    return fixed.optimizer_nbytes - int(host_share * fixed.optimizer_nbytes) + slots


def _moments(costs: ModelCosts, choice: PlanCandidate, experts: int) -> Iterator[_Moment]:
    """Every moment that could be the highest."""
    # From the second micro-batch on, gradients are there all the time; of two experts, maybe both.
    accumulated = experts * costs.trained_nbytes if choice.accumulation > 1 else 0
    gradients = accumulated
    held = [costs.outside.saved_nbytes]
    """On the device before each block's forward, and so after its backward."""
    out = [
        block.offloaded_nbytes(plan, choice.compiled)
        for block, plan in zip(costs.blocks, choice.blocks, strict=True)
    ]
    """What each block sends to the host; the newest may still be on their way."""
    for index, (block, plan) in enumerate(zip(costs.blocks, choice.blocks, strict=True)):
        way = block.costs_of(plan.activations, choice.compiled)
        work = way.forward_peak_nbytes - way.saved_nbytes + block.input_nbytes
        leaving = sum(out[max(0, index - MAX_BLOCKS_IN_FLIGHT + 1) : index])
        yield _Moment(held[-1] + leaving + way.saved_nbytes, work, gradients)
        held.append(held[-1] + block.resident_nbytes(plan, choice.compiled))
    outside = costs.outside
    peak = max(outside.forward_peak_nbytes, outside.backward_peak_nbytes)
    yield _Moment(
        held[-1] + sum(out[-MAX_BLOCKS_IN_FLIGHT:]), peak - outside.saved_nbytes, gradients
    )
    for index in range(len(costs.blocks) - 1, -1, -1):
        block, plan = costs.blocks[index], choice.blocks[index]
        way = block.costs_of(plan.activations, choice.compiled)
        work = way.backward_peak_nbytes - way.saved_nbytes
        arriving = sum(out[max(0, index - choice.activation_prefetch) : index + 1])
        if choice.accumulation == 1 or costs.cast_copies_nbytes:
            gradients += block.gradients_nbytes
        yield _Moment(held[index + 1] + arriving, work, gradients)
    if costs.cast_copies_nbytes:  # their gradients all become those of what is trained, at once
        yield _Moment(0, 0, costs.cast_copies_nbytes + costs.trained_nbytes + accumulated)
    yield _Moment(0, 0, max(costs.trained_nbytes, accumulated))
