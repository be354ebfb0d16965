"""Predict the peak of device memory and the use of host memory for one candidate plan.

Device memory consists of a constant part and a part that changes during the step:

    peak = constant + max over moments (activations + workspace + gradients)

The constant part is resident weights, the ring's slots, adapters, optimizer state, caches and
library workspaces. The changing part is computed at each moment that could be the peak: forward of
each block, the loss, backward of each block, and the end of the step. Saved activations pile up in
forward and are freed in backward:

    moment       forward 0   forward 1   ...   loss   ...   backward 1   backward 0   end of step
    on device    H_0         H_1         ...   H_n    ...   H_2          H_1          gradients

If block i saves s_i bytes, of which o_i are offloaded to the host, then

    H_i        = bytes saved outside of blocks + sum of (s_j - o_j) over the blocks j < i
    forward i  = H_i + s_i + copies of earlier blocks that are still leaving for the host
                 + workspace of block i + accumulated gradients
    backward i = H_(i+1) + offloaded activations that were fetched for blocks i, i-1, ...
                 + workspace of block i + gradients so far

If ranks store shards of the model (plan/sharding.py), the constant part has the shards of weights
and state, and the weights of blocks are there only while they are needed:

    forward i  += weights of block i, twice (gathered in one buffer, then copied to each parameter)
                  + buffers of the blocks that are gathered ahead
    backward i += weights of block i + buffers of the blocks that are gathered ahead
                  + gradients of the whole block i, and a copy in the dtype of the reduction
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.plan.managed import managed_nbytes, offloaded_nbytes
from gracetune.plan.result import MAX_BLOCKS_IN_FLIGHT, Bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.memory.managed_roles import ManagedRole
    from gracetune.plan.cost import ModelCosts
    from gracetune.plan.sharding import ShardedSizes
    from gracetune.plan.simulate import PlanCandidate


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """Memory that a run needs whatever plan is chosen, and what decides it. Sizes are in bytes."""

    optimizer_nbytes: int
    """Bytes of optimizer state, for all transformers of the model together."""
    num_transformers: int = 1
    """Number of equally large transformers in the model: 2 for Wan 2.2 (high noise and low noise).
    A step uses one of them; all get the same plan."""
    device_caches_nbytes: int = 0
    """Bytes of text embeddings that stay on the device."""
    text_nbytes: int = 0
    """Bytes of the text embeddings of the whole dataset: the most that could stay on the device."""
    text_part: int = 0
    """If not 0: text embeddings may fill 1/text_part of the device memory budget, and `for_budget`
    sets `device_caches_nbytes` accordingly."""
    host_caches_nbytes: int = 0
    """Bytes of encoded samples in host memory."""
    library_nbytes: int = 0
    """Bytes of the workspaces of cuBLAS and cuDNN."""
    averages_nbytes: int = 0
    """Bytes of exponential moving averages of the trained weights."""
    state_slots_nbytes: int = 0
    """Bytes of the device buffers through which optimizer state is copied, if any of it is in host
    memory."""
    batches_ahead: int = 1
    """Number of batches prefetched to the device besides the one in use."""

    def for_budget(self, device_nbytes: int) -> FixedMemory:
        """Return a copy for a device memory budget.

        If `text_part` is set, text embeddings may fill 1/text_part of the budget.
        """
        if not self.text_part:
            return self
        text = min(self.text_nbytes, device_nbytes // self.text_part)
        return replace(self, device_caches_nbytes=text)


@dataclass(frozen=True, slots=True)
class _Moment:
    """The part of device memory that changes during a step, at one point of the step, in bytes."""

    activations: int
    workspace: int
    gradients: int
    gathered: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.workspace + self.gradients + self.gathered


def device_bytes(costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory) -> Bytes:
    """Return the device memory in bytes at its peak, by use: weights, activations, caches etc."""
    if (sizes := _sharded_sizes(costs)) is not None:
        return _sharded_device_bytes(costs, candidate, fixed, sizes)
    peak = max(_moments(costs, candidate, fixed.num_transformers), key=lambda moment: moment.total)
    managed = managed_nbytes(costs, candidate, fixed)

    def in_managed(role: ManagedRole) -> int:
        return managed[role] if role in candidate.managed else 0

    resident = sum(
        block.frozen_nbytes
        for block, plan in zip(costs.blocks, candidate.blocks, strict=True)
        if plan.weights == "resident"
    )
    slots = candidate.slots * costs.slot_nbytes if candidate.streamed else 0
    return Bytes(
        weights=fixed.num_transformers * (costs.outside_frozen_nbytes + resident)
        - in_managed("weights")
        + slots,
        adapters=fixed.num_transformers * (costs.trained_nbytes + costs.cast_copies_nbytes)
        - in_managed("trained")
        + fixed.averages_nbytes
        - in_managed("ema"),
        gradients=peak.gradients,
        optimizer=_state_on_device(candidate.host_state, fixed) - in_managed("optimizer"),
        activations=peak.activations,
        caches=fixed.device_caches_nbytes
        - in_managed("caches")
        + costs.batch_nbytes * (1 + fixed.batches_ahead),
        workspace=peak.workspace + fixed.library_nbytes,
    )


def host_bytes(costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory) -> Bytes:
    """Return the host memory in bytes by use: weights, optimizer state, activations and caches.

    It is that at the end of forward, when the host holds all offloaded activations.
    """
    sizes = _sharded_sizes(costs)
    if sizes is not None and sizes.choice.cpu_offload:
        return Bytes(
            weights=fixed.num_transformers * sizes.frozen_nbytes,
            adapters=fixed.num_transformers * sizes.trained_nbytes + fixed.averages_nbytes,
            gradients=_gradient_shards(sizes, candidate, fixed.num_transformers),
            optimizer=fixed.optimizer_nbytes,
            caches=fixed.host_caches_nbytes,
        )
    streamed = sum(costs.blocks[index].frozen_nbytes for index in candidate.streamed)
    managed = managed_nbytes(costs, candidate, fixed)

    def in_managed(role: ManagedRole) -> int:
        return managed[role] if role in candidate.managed else 0

    return Bytes(
        weights=fixed.num_transformers * streamed + in_managed("weights"),
        adapters=in_managed("trained") + in_managed("ema"),
        gradients=in_managed("gradients"),
        optimizer=int(candidate.host_state * fixed.optimizer_nbytes) + in_managed("optimizer"),
        activations=offloaded_nbytes(costs, candidate),
        caches=fixed.host_caches_nbytes + in_managed("caches"),
    )


def _state_on_device(host_share: float, fixed: FixedMemory) -> int:
    slots = fixed.state_slots_nbytes if host_share else 0
    return fixed.optimizer_nbytes - int(host_share * fixed.optimizer_nbytes) + slots


def _moments(costs: ModelCosts, candidate: PlanCandidate, experts: int) -> Iterator[_Moment]:
    """Yield the changing part of device memory at each moment of a step that could be the peak.

    That part is activations, workspace and gradients.
    """
    # With accumulation, gradients of earlier micro-batches exist all the time, possibly for each of
    # two experts.
    is_managed = "gradients" in candidate.managed
    keeps = candidate.accumulation > 1 and not is_managed
    accumulated = experts * costs.trained_nbytes if keeps else 0
    gradients = accumulated
    held = [costs.outside.saved_nbytes]
    """Bytes of activations that are on the device before the forward of each block."""
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
        if is_managed:  # each leaves the device as soon as it is computed
            gradients = block.gradients_nbytes
        elif candidate.accumulation == 1 or costs.cast_copies_nbytes:
            gradients += block.gradients_nbytes
        yield _Moment(held[index + 1] + fetched, workspace, gradients)
    if is_managed:
        return
    if costs.cast_copies_nbytes:
        # Gradients of the bf16 copies are cast to gradients of the fp32 weights all at once.
        yield _Moment(0, 0, costs.cast_copies_nbytes + costs.trained_nbytes + accumulated)
    yield _Moment(0, 0, max(costs.trained_nbytes, accumulated))


# Sharded models


def _sharded_sizes(costs: ModelCosts) -> ShardedSizes | None:
    """Return the sizes of the shards; None if every rank has the whole model."""
    division = costs.division
    return division.sizes if division is not None and division.sizes.choice.is_sharded else None


def _sharded_device_bytes(
    costs: ModelCosts, candidate: PlanCandidate, fixed: FixedMemory, sizes: ShardedSizes
) -> Bytes:
    moments = _sharded_moments(costs, candidate, fixed.num_transformers, sizes)
    peak = max(moments, key=lambda moment: moment.total)
    on_device = 0 if sizes.choice.cpu_offload else 1
    return Bytes(
        weights=on_device * fixed.num_transformers * sizes.frozen_nbytes,
        adapters=on_device
        * (fixed.num_transformers * sizes.trained_nbytes + fixed.averages_nbytes),
        gradients=peak.gradients,
        optimizer=on_device * _state_on_device(candidate.host_state, fixed),
        activations=peak.activations,
        caches=fixed.device_caches_nbytes + costs.batch_nbytes * (1 + fixed.batches_ahead),
        workspace=peak.workspace + fixed.library_nbytes,
        gathered=peak.gathered,
    )


def _sharded_moments(
    costs: ModelCosts, candidate: PlanCandidate, experts: int, sizes: ShardedSizes
) -> Iterator[_Moment]:
    """Yield the changing part of device memory of a sharded step, as `_moments` does.

    The root (what is outside of blocks) stays gathered from the start of forward to the end of
    backward.
    """
    choice, blocks = sizes.choice, sizes.blocks
    weights = [unit.gathered_nbytes for unit in blocks]
    on_device = 0 if choice.cpu_offload else 1
    accumulates = candidate.accumulation > 1
    gradients = on_device * experts * sizes.trained_nbytes if accumulates else 0
    held = [costs.outside.saved_nbytes]
    for index, (block, plan) in enumerate(zip(costs.blocks, candidate.blocks, strict=True)):
        mode = block.costs_of(plan.activations, candidate.compiled)
        workspace = mode.forward_peak_nbytes - mode.saved_nbytes + block.input_nbytes
        ahead = sum(weights[index : index + 1 + choice.prefetch_blocks])
        in_use = weights[index] if choice.reshard else sum(weights[: index + 1])
        gathered = sizes.root.gathered_nbytes + in_use + ahead
        yield _Moment(held[-1] + mode.saved_nbytes, workspace, gradients, gathered)
        held.append(held[-1] + block.resident_nbytes(plan, candidate.compiled))
    outside = costs.outside
    stays = 0 if choice.reshard else sum(weights)
    peak = max(outside.forward_peak_nbytes, outside.backward_peak_nbytes)
    root = sizes.root.gathered_nbytes
    yield _Moment(held[-1], peak - outside.saved_nbytes, gradients, root + stays)
    reducing = 0
    """Bytes of the previous block's gradients, which are being reduced."""
    for index in range(len(blocks) - 1, -1, -1):
        block, plan, unit = costs.blocks[index], candidate.blocks[index], blocks[index]
        mode = block.costs_of(plan.activations, candidate.compiled)
        workspace = mode.backward_peak_nbytes - mode.saved_nbytes
        if choice.reshard:
            in_use = sum(weights[max(0, index - choice.prefetch_blocks) : index + 1])
        else:
            in_use = sum(weights[: index + 1])
        if not accumulates:
            gradients += on_device * unit.trained_nbytes
        buffers = unit.gradients_nbytes + max(reducing, unit.reduced_nbytes)
        reducing = unit.reduced_nbytes
        yield _Moment(held[index + 1], workspace, gradients, root + in_use + buffers)
    buffers = sizes.root.gradients_nbytes + max(reducing, sizes.root.reduced_nbytes)
    total = on_device * _gradient_shards(sizes, candidate, experts)
    yield _Moment(0, 0, total, root + buffers)


def _gradient_shards(sizes: ShardedSizes, candidate: PlanCandidate, experts: int) -> int:
    """Return the bytes of the gradients of a rank's shards at the end of a step.

    A step with one micro-batch trains one expert.
    """
    return (experts if candidate.accumulation > 1 else 1) * sizes.trained_nbytes
