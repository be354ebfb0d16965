"""Predict the peak of device memory and the use of host memory for one candidate plan.

Device memory consists of a constant part and a part that changes during the step:

    peak = constant + max over moments (activations held + workspace + gradients)

Constant are resident weights, the ring's slots, adapters, optimizer state, caches and library
workspaces. The moments are: each block's forward, the loss, each block's backward, and the end of
the step. For block i with saved bytes s_i, of which o_i go to the host:

    held before block i         H_i = outside + sum over j < i of (s_j - o_j)
    forward of block i          H_i + s_i + its workspace + copies still leaving
    backward of block i         H_(i+1) + offloaded activations fetched for blocks i, i-1, ...
                                + its workspace + gradients so far
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
    """Memory that a run needs whatever plan is chosen. All sizes are in bytes."""

    optimizer_nbytes: int
    """The optimizer's state, of all experts."""
    experts: int = 1
    """Transformers of this shape. A step uses one of them; all get the same plan."""
    device_caches_nbytes: int = 0
    """Text embeddings that stay on the device."""
    text_nbytes: int = 0
    """All text embeddings that may stay on the device."""
    text_part: int = 0
    """Text embeddings may fill 1/text_part of the device budget; 0: they have a fixed limit."""
    host_caches_nbytes: int = 0
    """Encoded samples in host memory."""
    host_weights_nbytes: int = 0
    """Models kept in host memory, such as text encoders."""
    library_nbytes: int = 0
    """Workspaces of cuBLAS and cuDNN."""
    averages_nbytes: int = 0
    """Exponential moving averages of the trained weights."""
    state_slots_nbytes: int = 0
    """Device buffers through which optimizer state passes, if any of it lives in host memory."""
    batches_ahead: int = 1
    """Batches prefetched to the device beside the one in use."""

    def for_budget(self, device_nbytes: int) -> FixedMemory:
        """Return a copy whose text embeddings fill their share of this device budget."""
        if not self.text_part:
            return self
        text = min(self.text_nbytes, device_nbytes // self.text_part)
        return replace(self, device_caches_nbytes=text)


@dataclass(frozen=True, slots=True)
class _Moment:
    """The changing part of device memory at one point of a step, in bytes."""

    activations: int
    workspace: int
    gradients: int

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.gradients


def device_bytes(costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory) -> Bytes:
    """Return device memory by role at its peak."""
    peak = max(_moments(costs, candidate, fixed.experts), key=lambda moment: moment.total)
    resident = sum(
        block.frozen_nbytes
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
        if plan.weights == "resident"
    )
    slots = candidate.slots * costs.slot_nbytes if candidate.streamed else 0
    return Bytes(
        weights=fixed.experts * (costs.outside_frozen_nbytes + resident) + slots,
        adapters=fixed.experts * (costs.trained_nbytes + costs.cast_copies_nbytes)
        + fixed.averages_nbytes,
        gradients=peak.gradients,
        optimizer=_state_on_device(candidate.host_state, fixed),
        activations=peak.activations,
        caches=fixed.device_caches_nbytes + costs.batch_nbytes * (1 + fixed.batches_ahead),
        workspace=peak.workspace + fixed.library_nbytes,
    )


def host_bytes(costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory) -> Bytes:
    """Return host memory by role at the end of forward, when all activations have arrived."""
    offloaded = sum(
        block.offloaded_nbytes(plan, candidate.compiled)
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
    )
    streamed = sum(costs.blocks[index].frozen_nbytes for index in candidate.streamed)
    return Bytes(
        weights=fixed.experts * streamed + fixed.host_weights_nbytes,
        optimizer=int(candidate.host_state * fixed.optimizer_nbytes),
        activations=offloaded,
        caches=fixed.host_caches_nbytes,
    )


def _state_on_device(host_share: float, fixed: FixedMemory) -> int:
    slots = fixed.state_slots_nbytes if host_share else 0
    return fixed.optimizer_nbytes - int(host_share * fixed.optimizer_nbytes) + slots


def _moments(costs: ModelCosts, candidate: PlanCandidate, experts: int) -> Iterator[_Moment]:
    """Yield every moment of a step that could be the peak."""
    # With accumulation, gradients of earlier micro-batches are held all the time; of two experts,
    # both may have some.
    accumulated = experts * costs.trained_nbytes if candidate.accumulation > 1 else 0
    gradients = accumulated
    held = [costs.outside.saved_nbytes]
    """Activations on the device before each block's forward, and so after its backward."""
    offloaded = [
        block.offloaded_nbytes(plan, candidate.compiled)
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
    ]
    for index, (block, plan) in enumerate(zip(costs.blocks, candidate.blocks, strict=True)):
        mode = block.costs_of(plan.activations, candidate.compiled)
        workspace = mode.forward_peak_nbytes - mode.saved_nbytes + block.input_nbytes
        leaving = sum(offloaded[max(0, index - MAX_BLOCKS_IN_FLIGHT + 1) : index])
        yield _Moment(held[-1] + leaving + mode.saved_nbytes, workspace, gradients)
        held.append(held[-1] + block.resident_nbytes(plan, candidate.compiled))
    outside = costs.outside
    peak = max(outside.forward_peak_nbytes, outside.backward_peak_nbytes)
    leaving = sum(offloaded[-MAX_BLOCKS_IN_FLIGHT:])
    yield _Moment(held[-1] + leaving, peak - outside.saved_nbytes, gradients)
    for index in range(len(costs.blocks) - 1, -1, -1):
        block, plan = costs.blocks[index], candidate.blocks[index]
        mode = block.costs_of(plan.activations, candidate.compiled)
        workspace = mode.backward_peak_nbytes - mode.saved_nbytes
        fetched = sum(offloaded[max(0, index - candidate.activation_prefetch) : index + 1])
        if candidate.accumulation == 1 or costs.cast_copies_nbytes:
            gradients += block.gradients_nbytes
        yield _Moment(held[index + 1] + fetched, workspace, gradients)
    if costs.cast_copies_nbytes:
        # Gradients of the bf16 copies are cast to gradients of the fp32 weights all at once.
        yield _Moment(0, 0, costs.cast_copies_nbytes + costs.trained_nbytes + accumulated)
    yield _Moment(0, 0, max(costs.trained_nbytes, accumulated))
