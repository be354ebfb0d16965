"""Cost model: predict the time and memory of each block, at any batch size, on one machine.

The model is traced once, at a small batch. For a batch that is s times as large, a kernel takes

    bytes(s)          = weight bytes + s * other bytes
    matmul, attention = max(s * flops / rate, bytes(s) / memory bandwidth)
    elementwise       = bytes(s) / elementwise bandwidth (eager or compiled)
    gap               = a constant after each kernel

and a pass over a block takes the sum over its kernels. Saved activations and peaks of memory are s
times the traced ones; weights and their gradients do not depend on s.

On the machine at hand, measured times of single kernels replace the formulas
(`EffectiveRates.timer`). The rates are for machines that are only known by name.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.plan.trace_records import plain_checkpointing_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.offload.checkpointing import CheckpointMode
    from gracetune.plan.machines import EffectiveRates
    from gracetune.plan.result import ActivationMode, BlockPlan, FrozenCompute, Plan
    from gracetune.plan.sharding import ModelDivision, StepDivision
    from gracetune.plan.trace_records import BlockTraces, ModelTraces, Op, Trace, TracesByMode


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Compute time of one forward or backward pass in seconds, by kind of kernel."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    gaps: float = 0.0
    """Idle time between consecutive kernels."""

    @property
    def total(self) -> float:
        """The time of the whole pass."""
        return self.gemm + self.attention + self.elementwise + self.gaps

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            gemm=self.gemm + other.gemm,
            attention=self.attention + other.attention,
            elementwise=self.elementwise + other.elementwise,
            gaps=self.gaps + other.gaps,
        )

    def scaled(self, factor: float) -> PassSeconds:
        """Return a copy with every part multiplied by a factor."""
        return PassSeconds(
            gemm=self.gemm * factor,
            attention=self.attention * factor,
            elementwise=self.elementwise * factor,
            gaps=self.gaps * factor,
        )


@dataclass(frozen=True, slots=True)
class ModeCosts:
    """Time and memory of one block at one batch size in one activation mode.

    The mode decides which activations are kept for backward, and which are recomputed.
    """

    forward: PassSeconds
    backward: PassSeconds
    """Time of backward, including the forward work that it recomputes."""
    saved_nbytes: int
    """Bytes kept from forward to backward, without weights and the block's input."""
    saves_input: bool
    """True if the block's input is kept for backward too."""
    forward_peak_nbytes: int
    backward_peak_nbytes: int
    forward_host_s: float = 0.0
    """CPU seconds to launch the kernels of forward."""
    backward_host_s: float = 0.0
    """CPU seconds to launch the kernels of backward and of recomputed forward work."""
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    num_saved: float = 0.0
    """Number of tensors that autograd saves."""


@dataclass(frozen=True, slots=True)
class CostsByMode:
    """Time and memory of one block at one batch size, by activation mode.

    The mode decides which activations are kept for backward, and which are recomputed.
    """

    keep: ModeCosts
    lean: ModeCosts
    recompute: ModeCosts


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Time and memory of one block at one batch size, eager and compiled."""

    frozen_nbytes: int
    trained_nbytes: int
    input_nbytes: int
    eager: CostsByMode
    compiled: CostsByMode | None
    """None if the run does not compile."""
    gradients_nbytes: int
    """Bytes of weight gradients that the block's backward adds."""

    def costs_of(self, activations: ActivationMode, compiled: bool) -> ModeCosts:
        """Return the block's costs in an activation mode.

        An offloaded block takes as much compute as a block that keeps the same tensors on the
        device: mode `lean` if compiled, mode `keep` if eager.
        """
        modes = self.compiled if compiled else self.eager
        assert modes is not None, "the block was not traced compiled"
        if activations == "recompute":
            return modes.recompute
        is_lean = activations == "lean" or (activations == "offload" and compiled)
        return modes.lean if is_lean else modes.keep

    def recompute_seconds(self, activations: ActivationMode, compiled: bool) -> float:
        """Return how many more seconds of compute an activation mode takes than mode `keep`."""
        mode, keep = self.costs_of(activations, compiled), self.costs_of("keep", compiled)
        return (mode.forward + mode.backward).total - (keep.forward + keep.backward).total

    def saved_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """Return the bytes kept between forward and backward, on the device or in host memory."""
        mode = self.costs_of(plan.activations, compiled)
        return mode.saved_nbytes + (self.input_nbytes if mode.saves_input else 0)

    def offloaded_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """Return the bytes of saved activations that are kept in host memory.

        In an eager recomputed block that is the input alone. The other tensors are stored by
        selective checkpointing, where saved-tensor hooks do not see them.
        """
        if not is_offloaded(plan):
            return 0
        if plan.activations == "recompute" and not compiled:
            return self.input_nbytes
        return self.saved_nbytes(plan, compiled)

    def resident_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """Return the bytes of saved activations that stay on the device."""
        return self.saved_nbytes(plan, compiled) - self.offloaded_nbytes(plan, compiled)

    def eager_mode(self, plan: BlockPlan) -> CheckpointMode:
        """Return the mode of the block if it cannot be compiled after all and must run eagerly.

        It is the one that recomputes least of those that keep no more than the compiled block: an
        eager block keeps 8 to 21 % more in the same mode. Mode `recompute` keeps least. An
        offloaded block keeps everything, which saved-tensor hooks move to host memory.
        """
        if plan.activations == "offload":
            return "keep"
        limit = self.saved_nbytes(plan, compiled=True)
        modes: tuple[CheckpointMode, ...] = ("keep", "lean")
        for mode in modes:
            if self.saved_nbytes(replace(plan, activations=mode), compiled=False) <= limit:
                return mode
        return "recompute"


def is_offloaded(plan: BlockPlan) -> bool:
    """Return True if a block's plan keeps any of its activations in host memory."""
    return plan.activations == "offload" or plan.offload_input


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Time and memory of a whole model at one batch size on one machine."""

    batch: int
    blocks: tuple[BlockCosts, ...]
    outside: ModeCosts
    """Costs of everything outside of blocks: embeddings, head and loss."""
    outside_frozen_nbytes: int
    trained_nbytes: int
    batch_nbytes: int
    """Bytes of the batch itself: latents, text, timesteps."""
    cast_copies_nbytes: int = 0
    """Bytes of the copies of trained weights in the compute dtype, which exist throughout a
    step."""
    optimizer_host_s: float = 0.0
    """CPU seconds to launch the kernels of an optimizer step."""
    division: StepDivision | None = None
    """How ranks divide the model, and what they exchange; None: a single process, or ranks whose
    exchange is not modelled."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot of the weight ring, which must fit the frozen weights of any block."""
        return max(block.frozen_nbytes for block in self.blocks)


class CostModel:
    """Predicts time and memory of a traced model on one machine, at any batch size."""

    def __init__(
        self,
        shapes: ModelTraces,
        rates: EffectiveRates,
        frozen_compute: FrozenCompute = "bf16",
        plain_checkpointing: bool = False,
    ) -> None:
        """Store the inputs of the prediction; method `at` computes it.

        `frozen_compute` is the type of frozen matmuls; for fp8, the traced layers are in fp8.
        With `plain_checkpointing`, recomputed blocks recompute attention too, as torch's own
        checkpointing does.
        """
        self.name = shapes.name
        self.rates = rates
        self.frozen_compute = frozen_compute
        self._plain_checkpointing = plain_checkpointing
        self._shapes = shapes
        self._compute_factor = 1.0
        self._division: ModelDivision | None = None
        self._costs: dict[int, ModelCosts] = {}

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model."""
        return len(self._shapes.order)

    def graphs(self, *, dynamic: bool) -> tuple[int, ...]:
        """Return a number for each block, in forward order: of those that share a compiled graph.

        `dynamic` says that graphs accept several shapes.
        """
        shapes = self._shapes
        return (shapes.dynamic_graphs if dynamic else shapes.graphs) or shapes.order

    @property
    def trained_nbytes(self) -> int:
        """The bytes of the trained weights."""
        return self._shapes.trained_nbytes

    def rescaled(
        self, compute_factor: float, link_factor: float, in_place_factor: float | None = None
    ) -> CostModel:
        """Return a copy with scaled compute times and scaled host-device bandwidth.

        `in_place_factor` scales the bandwidth with which kernels use managed memory, and with which
        its pages move; by default, it is scaled like that of copies.
        """
        managed_factor = link_factor if in_place_factor is None else in_place_factor
        other = copy(self)
        other.rates = replace(
            self.rates,
            link_in=self.rates.link_in * link_factor,
            link_out=self.rates.link_out * link_factor,
            in_place=self.rates.in_place * managed_factor,
            prefetch=self.rates.prefetch * managed_factor,
        )
        other._compute_factor = self._compute_factor * compute_factor
        other._costs = {}
        return other

    def divided(self, division: ModelDivision) -> CostModel:
        """Return a copy for ranks that divide the model, or the tokens of a sample, among them."""
        other = copy(self)
        other._division = division
        other._costs = {}
        return other

    def at(self, batch: int) -> ModelCosts:
        """Return the predicted time and memory of the model at a batch size."""
        if batch not in self._costs:
            self._costs[batch] = self._model_costs(batch)
        return self._costs[batch]

    def eager_modes(self, plan: Plan) -> tuple[CheckpointMode, ...]:
        """Return the mode of each block of a compiled plan that cannot be compiled after all."""
        blocks = zip(self.at(plan.batch).blocks, plan.blocks, strict=True)
        return tuple(costs.eager_mode(block) for costs, block in blocks)

    def _model_costs(self, batch: int) -> ModelCosts:
        shapes, division = self._shapes, self._division
        scale = batch / shapes.batch
        if division is not None:
            # A rank has 1/n of the tokens, and in attention 1/n of the heads with all tokens.
            scale /= division.sizes.choice.context_size
        kinds = [self._block_costs(kind, scale) for kind in shapes.kinds]
        blocks = tuple(kinds[kind] for kind in shapes.order)
        return ModelCosts(
            batch=batch,
            blocks=blocks,
            outside=self._outside_costs(scale),
            outside_frozen_nbytes=shapes.outside_frozen_nbytes,
            trained_nbytes=shapes.trained_nbytes,
            batch_nbytes=int(shapes.batch_nbytes * scale),
            cast_copies_nbytes=shapes.cast_copies_nbytes,
            optimizer_host_s=self._compute_factor
            * self.rates.host.optimizer_s
            * sum(block.num_trained for block in shapes.blocks),
            division=None if division is None else division.at(blocks, self.rates),
        )

    def _outside_costs(self, scale: float) -> ModeCosts:
        """Return the costs outside of blocks, with the casts of trained weights."""
        outside, host = (
            self._mode_costs(self._shapes.outside, scale, compiled=False),
            self.rates.host,
        )
        num_cast = sum(one.num_trained for one in self._shapes.blocks if one.cast_copies_nbytes)
        factor = self._compute_factor * num_cast
        return replace(
            outside,
            forward_host_s=outside.forward_host_s + factor * host.cast_s,
            backward_host_s=outside.backward_host_s + factor * host.cast_backward_s,
        )

    def _block_costs(self, kind: BlockTraces, scale: float) -> BlockCosts:
        return BlockCosts(
            frozen_nbytes=kind.frozen_nbytes,
            trained_nbytes=kind.trained_nbytes,
            input_nbytes=int(kind.input_nbytes * scale),
            eager=self._costs_by_mode(kind, kind.eager, scale, compiled=False),
            compiled=None
            if kind.compiled is None
            else self._costs_by_mode(kind, kind.compiled, scale, compiled=True),
            gradients_nbytes=kind.gradients_nbytes,
        )

    def _costs_by_mode(
        self, kind: BlockTraces, traces: TracesByMode, scale: float, compiled: bool
    ) -> CostsByMode:
        recompute = traces.recompute
        if self._plain_checkpointing:
            recompute = plain_checkpointing_trace(traces.keep, kind.input_nbytes)
        return CostsByMode(
            *(
                self._mode_costs(trace, scale, compiled, kind.dequantized_nbytes)
                for trace in (traces.keep, traces.lean, recompute)
            )
        )

    def _mode_costs(
        self, trace: Trace, scale: float, compiled: bool, dequantized_nbytes: int = 0
    ) -> ModeCosts:
        host, factor = self.rates.host, self._compute_factor
        transposed = trace.transposed_nbytes  # a weight, whatever the batch
        backward_peak_nbytes = int((trace.backward_peak_nbytes - transposed) * scale) + transposed
        return ModeCosts(
            forward=self._seconds(trace.forward, scale, compiled).scaled(factor),
            backward=self._seconds(trace.backward, scale, compiled).scaled(factor),
            saved_nbytes=int(trace.saved_nbytes * scale),
            saves_input=trace.saves_input,
            forward_peak_nbytes=int(trace.forward_peak_nbytes * scale) + dequantized_nbytes,
            backward_peak_nbytes=backward_peak_nbytes + dequantized_nbytes,
            forward_host_s=host.forward_seconds(trace) * factor,
            backward_host_s=host.backward_seconds(trace) * factor,
            forward_kernels=trace.forward_calls.kernels,
            backward_kernels=trace.recompute_calls.kernels + trace.backward_calls.kernels,
            num_saved=trace.forward_calls.saved_tensors,
        )

    def _seconds(self, ops: Sequence[Op], scale: float, compiled: bool) -> PassSeconds:
        rates = self.rates
        spent = {"gemm": 0.0, "attention": 0.0, "elementwise": 0.0, "gaps": 0.0}
        for op in ops:
            timed = self._timed(op, scale)
            nbytes = op.weights_nbytes + (op.nbytes - op.weights_nbytes) * scale
            if op.kind != "elementwise":
                compute = self._compute_seconds(op, scale, timed)
                spent[op.kind] += max(compute, nbytes / rates.memory)
            elif timed is None:
                spent[op.kind] += nbytes / (rates.compiled if compiled else rates.eager)
            else:
                spent[op.kind] += timed
            spent["gaps"] += rates.gap_s if timed is None else 0.0  # a timing includes its gap
        return PassSeconds(**spent)

    def _timed(self, op: Op, scale: float) -> float | None:
        """Return the kernel's measured time on this machine in seconds; None if there is none."""
        if self.rates.timer is None:
            return None
        return self.rates.timer(op, 1.0 if op.prepares_weight else scale)

    def _compute_seconds(self, op: Op, scale: float, timed: float | None) -> float:
        if timed is None:
            return op.flops * scale / self._flops_rate(op)
        # `step_share` was fitted to steps whose kernels had rates. It lengthens timed attention,
        # too, for which there is no measurement of its own.
        return timed / self.rates.step_share

    def _flops_rate(self, op: Op) -> float:
        rates = self.rates
        if op.kind == "attention":
            return rates.attention_backward if op.backward else rates.attention_forward
        return rates.fp8 if op.fp8 else rates.gemm
