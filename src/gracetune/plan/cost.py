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

The second half of the file estimates the overhead of fp8.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.plan.trace_records import HostCalls, Op, TracesByMode, plain_checkpointing_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.machines import EffectiveRates
    from gracetune.plan.result import ActivationMode, BlockPlan, FrozenCompute
    from gracetune.plan.sharding import ModelDivision, StepDivision
    from gracetune.plan.trace_records import BlockTraces, ModelTraces, Trace


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

        With `plain_checkpointing`, recomputed blocks recompute attention too, as torch's own
        checkpointing does.
        """
        self.name = shapes.name
        self.rates = rates
        self.frozen_compute = frozen_compute
        # fp8 matmuls read weights that are stored, and streamed, in fp8.
        self._stored_share = 0.5 if frozen_compute == "fp8" else 1.0
        self._plain_checkpointing = plain_checkpointing
        self._shapes = shapes
        self._compute_factor = 1.0
        self._division: ModelDivision | None = None
        self._costs: dict[int, ModelCosts] = {}

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model."""
        return len(self._shapes.order)

    @property
    def trained_nbytes(self) -> int:
        """The bytes of the trained weights."""
        return self._shapes.trained_nbytes

    def rescaled(self, compute_factor: float, link_factor: float) -> CostModel:
        """Return a copy with scaled compute times and scaled host-device bandwidth."""
        other = copy(self)
        other.rates = replace(
            self.rates,
            link_in=self.rates.link_in * link_factor,
            link_out=self.rates.link_out * link_factor,
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
            outside=self._mode_costs(shapes.outside, scale, compiled=False),
            outside_frozen_nbytes=shapes.outside_frozen_nbytes,
            trained_nbytes=shapes.trained_nbytes,
            batch_nbytes=int(shapes.batch_nbytes * scale),
            cast_copies_nbytes=shapes.cast_copies_nbytes,
            optimizer_host_s=self._compute_factor
            * self.rates.host.optimizer_s
            * sum(block.num_trained for block in shapes.blocks),
            division=None if division is None else division.at(blocks, self.rates),
        )

    def _block_costs(self, kind: BlockTraces, scale: float) -> BlockCosts:
        extra = fp8_extra_nbytes(kind.eager.keep) if self.frozen_compute == "fp8" else 0
        return BlockCosts(
            frozen_nbytes=int(kind.frozen_nbytes * self._stored_share) + extra,
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
        if self.frozen_compute == "fp8":
            traces = with_fp8_overhead(traces, compiled)
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
        backward_peak_nbytes = int(trace.backward_peak_nbytes * scale) + trace.transposed_nbytes
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
                compute = self._compute_seconds(op, scale, timed, compiled)
                spent[op.kind] += max(compute, nbytes / rates.memory)
            elif timed is None:
                spent[op.kind] += nbytes / (rates.compiled if compiled else rates.eager)
            else:
                spent[op.kind] += timed
            spent["gaps"] += rates.gap_s if timed is None else 0.0  # a timing includes its gap
        return PassSeconds(**spent)

    def _timed(self, op: Op, scale: float) -> float | None:
        """Return the kernel's measured time on this machine in seconds; None if there is none."""
        is_fp8 = op.frozen and self.frozen_compute == "fp8"  # the timer runs bf16 kernels
        if self.rates.timer is None or is_fp8:
            return None
        dequantizes = op.kind == "elementwise" and op.weights_nbytes == op.nbytes
        return self.rates.timer(op, 1.0 if dequantizes else scale)

    def _compute_seconds(self, op: Op, scale: float, timed: float | None, compiled: bool) -> float:
        if timed is None:
            return op.flops * scale / self._flops_rate(op)
        return timed / self.rates.step_share if compiled else timed

    def _flops_rate(self, op: Op) -> float:
        rates = self.rates
        if op.kind == "attention":
            return rates.attention_backward if op.backward else rates.attention_forward
        if op.frozen and self.frozen_compute == "fp8":
            return rates.fp8
        return rates.gemm


# fp8 overhead
#
# A model is traced in bf16, before its weights are converted. Frozen layers in fp8 do more than the
# traced matmul x W^T. With V the basis of the layer's outlier subspace (adapters/compute/
# lora_matmul.py) and fp8() for scaling and rounding:
#
#     z = x V^T                               split the input: the part in the subspace, in bf16,
#     r = x - z V                             and the rest, which is small
#     y = fp8(r) fp8(W)^T + z (W V^T)^T       one fp8 and one bf16 matmul
#
# Backward also transposes the weight. The functions below add the time, memory and kernel launches
# of these steps to the trace. The constants were checked against a block of Wan-14B that was
# converted before tracing: compiled on a CPU, and eager on fake tensors.


EAGER_FORWARD_NBYTES, EAGER_BACKWARD_NBYTES = 2.8, 7.0
"""Extra peak memory of eager fp8 blocks in forward and in backward, in bytes per element of the
largest matmul input. Rounding makes fp32 copies of the input, and in backward also of the
gradient."""
SUBSPACE_DIMENSIONS = 32
"""Dimensions of an fp8 layer's outlier subspace, in most layers: the few input directions with
large values, which are multiplied in bf16."""
BF16_NBYTES, SCALE_NBYTES = 2, 4
SPLIT_PASSES = 3
"""Number of times that an fp8 layer reads or writes its input to split it: one read for the part
with large values (outliers), one read and one write for the rest."""
ROUNDING_KERNELS = {False: 9, True: 2}
"""Number of kernels that scale and round a matrix to fp8; True: in a compiled block."""
SPLIT_KERNELS, MATMUL_KERNELS = 2, 6
"""Number of kernels per fp8 layer in forward: to split outliers from the input, and to multiply
both parts."""
LORA_GRADIENT_KERNELS, INPUT_GRADIENT_KERNELS, TRANSPOSE_KERNELS = 3, 3, 1
"""Number of kernels per fp8 layer in backward: for the gradients of LoRA's two matrices, for the
input's gradient (without rounding), and to transpose the weight."""
SAVED_PER_LAYER, VIEWS_PER_LAYER = 1.5, 2
"""Extra tensors that autograd saves per fp8 layer, and extra views per fp8 layer in an eager
backward."""


def fp8_extra_nbytes(keep: Trace) -> int:
    """Return the bytes that one block's fp8 layers store beside their weights.

    These are the basis of the outlier subspace (input directions with large values, multiplied in
    bf16), the weight projected onto it, and the weight's scales.
    """
    return sum(
        SUBSPACE_DIMENSIONS * BF16_NBYTES * (op.dims[1] + op.dims[2]) + SCALE_NBYTES * op.dims[2]
        for op in keep.forward
        if _is_frozen_matmul(op) and op.reads_frozen_weight
    )


def with_fp8_overhead(traces: TracesByMode, compiled: bool) -> TracesByMode:
    """Return a block's kernels and memory (traces) as if its frozen matmuls ran in fp8."""
    keep, lean, recompute = (
        _with_splitting(_with_fp8_calls(trace, traces.keep, compiled), traces.keep)
        for trace in (traces.keep, traces.lean, traces.recompute)
    )
    if compiled:
        return TracesByMode(
            keep, _with_rounded_inputs(lean, keep), _with_rounded_inputs(recompute, keep)
        )
    widest = max(_input_sizes((*keep.forward, *keep.backward)), default=0)
    forward_nbytes = int(EAGER_FORWARD_NBYTES * widest)
    backward_nbytes = int(EAGER_BACKWARD_NBYTES * widest)
    # A recomputed block peaks in its recomputed forward or in the backward that follows.
    keep_peak = keep.backward_peak_nbytes + backward_nbytes
    return TracesByMode(
        *(
            replace(
                trace,
                forward_peak_nbytes=trace.forward_peak_nbytes + forward_nbytes,
                backward_peak_nbytes=max(trace.backward_peak_nbytes + forward_nbytes, keep_peak),
            )
            for trace in (keep, lean, recompute)
        )
    )


def _with_fp8_calls(trace: Trace, keep: Trace, compiled: bool) -> Trace:
    """Replace the CPU's operator calls for bf16 layers by those for fp8 layers in a trace.

    Each fp8 layer calls its own operators, while bf16 layers with the same input may share one.
    """
    rounding = ROUNDING_KERNELS[compiled]
    num_layers, num_input_grads = _num_layers(keep.forward), _num_layers(keep.backward)
    num_recomputed = _num_layers(trace.backward) - num_input_grads
    per_layer = HostCalls(
        dispatched=rounding + 2,
        kernels=rounding + SPLIT_KERNELS + MATMUL_KERNELS,
        custom_ops=2,
        saved_tensors=SAVED_PER_LAYER,
    )
    forward = _exchange_calls(trace.forward_calls, trace.forward, per_layer.scaled(num_layers))
    per_input_grad = rounding + TRANSPOSE_KERNELS
    backward = HostCalls(
        dispatched=2 * num_layers + per_input_grad * num_input_grads,
        kernels=LORA_GRADIENT_KERNELS * num_layers
        + (per_input_grad + INPUT_GRADIENT_KERNELS) * num_input_grads,
        views=0 if compiled else VIEWS_PER_LAYER * num_layers,
        custom_ops=num_layers + num_input_grads,
        saved_tensors=SAVED_PER_LAYER * num_layers,
    )
    if compiled:  # recomputed work is part of the backward graph
        backward = replace(
            backward,
            kernels=backward.kernels + per_layer.kernels * num_recomputed,
            custom_ops=backward.custom_ops + 2 * num_recomputed,
        )
        backward = _exchange_calls(trace.backward_calls, trace.backward, backward)
        return replace(trace, forward_calls=forward, backward_calls=backward)
    recompute = trace.recompute_calls
    if recompute.dispatched:
        share = recompute.dispatched / trace.forward_calls.dispatched
        repeated = trace.backward[: len(trace.backward) - len(keep.backward)]
        # An input is rounded again even where the matmul's output was kept.
        kernels = (rounding + SPLIT_KERNELS) * num_layers * share + MATMUL_KERNELS * num_recomputed
        kernels += recompute.kernels - _num_frozen_kernels(repeated)
        recompute = replace(forward.scaled(share), kernels=kernels)
    backward = _exchange_calls(trace.backward_calls, keep.backward, backward)
    return replace(trace, forward_calls=forward, recompute_calls=recompute, backward_calls=backward)


def _exchange_calls(calls: HostCalls, ops: Sequence[Op], fp8_calls: HostCalls) -> HostCalls:
    """Return `calls` with those of the bf16 operators in `ops` replaced by `fp8_calls`."""
    dispatched = calls.dispatched and calls.dispatched - calls.custom_ops + fp8_calls.dispatched
    return replace(
        calls,
        dispatched=dispatched,
        kernels=calls.kernels - _num_frozen_kernels(ops) + fp8_calls.kernels,
        views=calls.views + fp8_calls.views,
        custom_ops=fp8_calls.custom_ops,
        saved_tensors=calls.saved_tensors + fp8_calls.saved_tensors,
        policy_calls=calls.policy_calls and dispatched,
    )


def _num_layers(ops: Sequence[Op]) -> int:
    return sum(op.reads_frozen_weight for op in ops)


def _num_frozen_kernels(ops: Sequence[Op]) -> int:
    """Return the number of kernels in `ops` of frozen layers, including those of their LoRA."""
    return sum(op.frozen for op in ops)


def _with_splitting(trace: Trace, keep: Trace) -> Trace:
    """Add the kernels that split outliers from the inputs of fp8 layers to a block's trace.

    They run in forward and again in a recomputed forward.
    """

    def split(numel: int) -> Op:
        return Op("elementwise", 0.0, float(SPLIT_PASSES * BF16_NBYTES * numel))

    forward = [split(numel) for numel in _input_sizes(trace.forward)]
    recomputed = _recomputed_numel(trace, keep)
    backward = [split(recomputed)] if recomputed else []
    return replace(trace, forward=(*trace.forward, *forward), backward=(*trace.backward, *backward))


def _recomputed_numel(trace: Trace, keep: Trace) -> int:
    """Return the total number of input elements of the frozen matmuls that backward recomputes."""
    return max(0, sum(_input_sizes(trace.backward)) - sum(_input_sizes(keep.backward)))


def _with_rounded_inputs(trace: Trace, keep: Trace) -> Trace:
    """Add the extra memory of a compiled fp8 backward to a trace, if it recomputes matmuls.

    Inductor first rounds the inputs of all recomputed matmuls to fp8 and keeps them, beside one
    transposed weight.
    """
    recomputed = _recomputed_numel(trace, keep)
    if not recomputed:
        return trace
    transposed = max(op.dims[1] * op.dims[2] for op in trace.backward if _is_frozen_matmul(op))
    peak_nbytes = trace.backward_peak_nbytes + int(recomputed)
    return replace(trace, backward_peak_nbytes=peak_nbytes, transposed_nbytes=transposed)


def _input_sizes(ops: Sequence[Op]) -> list[int]:
    """Return the number of elements of each input to the frozen matmuls in `ops`.

    Matmuls inside one custom operator share an input; it is listed once.
    """
    found: list[int] = []
    in_custom_op = is_shared = False
    for op in ops:
        if op.starts_custom_op or not op.frozen:
            in_custom_op, is_shared = op.starts_custom_op, False
        if _is_frozen_matmul(op):
            numel = op.dims[0] * op.dims[1]
            found.append(max(found.pop(), numel) if is_shared else numel)
            is_shared = in_custom_op
    return found


def _is_frozen_matmul(op: Op) -> bool:
    return op.frozen and op.kind == "gemm" and bool(op.dims)
