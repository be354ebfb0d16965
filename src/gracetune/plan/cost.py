"""Seconds and bytes of each block at any batch, from a trace at one.

A kernel takes as long as its products or its bytes do, whichever is longer. Everything grows with
the batch but weights and their gradients, so one trace tells the rest.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gracetune.plan.shapes import HostCalls, Op, TracesByMode, plain_checkpointing_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.machines import EffectiveRates
    from gracetune.plan.result import ActivationMode, BlockPlan, FrozenCompute
    from gracetune.plan.shapes import BlockShapes, ModelShapes, Trace


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of one pass, by what they go to."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    gaps: float = 0.0
    """Between kernels."""

    @property
    def total(self) -> float:
        """The pass."""
        return self.gemm + self.attention + self.elementwise + self.gaps

    def __add__(self, other: PassSeconds) -> PassSeconds:
        return PassSeconds(
            gemm=self.gemm + other.gemm,
            attention=self.attention + other.attention,
            elementwise=self.elementwise + other.elementwise,
            gaps=self.gaps + other.gaps,
        )

    def scaled(self, factor: float) -> PassSeconds:
        """Each part so many times as long."""
        return PassSeconds(
            gemm=self.gemm * factor,
            attention=self.attention * factor,
            elementwise=self.elementwise * factor,
            gaps=self.gaps * factor,
        )


@dataclass(frozen=True, slots=True)
class ModeCosts:
    """One kind of block, run one way at one batch."""

    forward: PassSeconds
    backward: PassSeconds
    saved_nbytes: int
    saves_input: bool
    forward_peak_nbytes: int
    backward_peak_nbytes: int
    forward_host_s: float = 0.0
    """What the host needs to queue it."""
    backward_host_s: float = 0.0
    forward_kernels: float = 0.0
    backward_kernels: float = 0.0
    num_saved: float = 0.0
    """Tensors that autograd saves."""


@dataclass(frozen=True, slots=True)
class CostsByMode:
    """A block at one batch by what it keeps."""

    keep: ModeCosts
    lean: ModeCosts
    recompute: ModeCosts


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """A block at one batch, every way it can run."""

    frozen_nbytes: int
    trained_nbytes: int
    input_nbytes: int
    eager: CostsByMode
    compiled: CostsByMode
    gradients_nbytes: int
    """What its backward leaves."""

    def costs_of(self, activations: ActivationMode, compiled: bool) -> ModeCosts:
        """How it runs; of what is offloaded, a compiled block keeps the lean set."""
        ways = self.compiled if compiled else self.eager
        if activations == "recompute":
            return ways.recompute
        is_lean = activations == "lean" or (activations == "offload" and compiled)
        return ways.lean if is_lean else ways.keep

    def recompute_seconds(self, activations: ActivationMode, compiled: bool) -> float:
        """Seconds that keeping everything would spare."""
        mine, keep = self.costs_of(activations, compiled), self.costs_of("keep", compiled)
        return (mine.forward + mine.backward).total - (keep.forward + keep.backward).total

    def saved_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """What there is between forward and backward, here or in host memory."""
        way = self.costs_of(plan.activations, compiled)
        return way.saved_nbytes + (self.input_nbytes if way.saves_input else 0)

    def offloaded_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """What of it waits in host memory; what an eager checkpoint keeps itself cannot."""
        if not is_offloaded(plan):
            return 0
        if plan.activations == "recompute" and not compiled:
            return self.input_nbytes
        return self.saved_nbytes(plan, compiled)

    def resident_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """What of it stays on the device."""
        return self.saved_nbytes(plan, compiled) - self.offloaded_nbytes(plan, compiled)


def is_offloaded(plan: BlockPlan) -> bool:
    """Whether a block's activations go to the host."""
    return plan.activations == "offload" or plan.offload_input


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model at one batch on one machine."""

    batch: int
    blocks: tuple[BlockCosts, ...]
    outside: ModeCosts
    outside_frozen_nbytes: int
    trained_nbytes: int
    batch_nbytes: int
    cast_copies_nbytes: int = 0
    """Of what is trained: in the type of the products, held from one pass to the next."""
    optimizer_host_s: float = 0.0
    """What the host needs to queue an update."""

    @property
    def slot_nbytes(self) -> int:
        """A slot of the ring fits any block."""
        return max(block.frozen_nbytes for block in self.blocks)


class CostModel:
    """What was traced, on a machine of these speeds; asked for one batch after another."""

    def __init__(
        self,
        shapes: ModelShapes,
        speeds: EffectiveRates,
        frozen_compute: FrozenCompute = "bf16",
        stored_share: float = 1.0,
        plain_checkpointing: bool = False,
    ) -> None:
        """`stored_share`: of the traced frozen weights' bytes, what quantised ones take.

        `plain_checkpointing`: recomputed blocks do attention again too, as other tools do it.
        """
        self.name = shapes.name
        self.speeds = speeds
        self.frozen_compute = frozen_compute
        # Weights for fp8 products are kept and moved in fp8.
        self._stored_share = min(stored_share, 0.5) if frozen_compute == "fp8" else stored_share
        self._plain = plain_checkpointing
        self._shapes = shapes
        self._slower = 1.0
        self._made: dict[int, ModelCosts] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self._shapes.order)

    @property
    def trained_nbytes(self) -> int:
        """What the optimizer updates."""
        return self._shapes.trained_nbytes

    def rescaled(self, slower: float, link: float) -> CostModel:
        """The same on a machine that was measured: so many times as slow, its link so many times as
        fast as it was thought to be.
        """
        other = copy(self)
        other.speeds = replace(
            self.speeds,
            link_in=self.speeds.link_in * link,
            link_out=self.speeds.link_out * link,
        )
        other._slower = self._slower * slower
        other._made = {}
        return other

    def at(self, batch: int) -> ModelCosts:
        """The model at this batch."""
        if batch not in self._made:
            self._made[batch] = self._make(batch)
        return self._made[batch]

    def _make(self, batch: int) -> ModelCosts:
        shapes, scale = self._shapes, batch / self._shapes.batch
        kinds = [self._block(kind, scale) for kind in shapes.kinds]
        return ModelCosts(
            batch=batch,
            blocks=tuple(kinds[kind] for kind in shapes.order),
            outside=self._way(shapes.outside, scale, compiled=False),
            outside_frozen_nbytes=shapes.outside_frozen_nbytes,
            trained_nbytes=shapes.trained_nbytes,
            batch_nbytes=int(shapes.batch_nbytes * scale),
            cast_copies_nbytes=shapes.cast_copies_nbytes,
            optimizer_host_s=self._slower
            * self.speeds.host.optimizer_s
            * sum(block.num_trained for block in shapes.blocks),
        )

    def _block(self, kind: BlockShapes, scale: float) -> BlockCosts:
        beside = fp8_extra_nbytes(kind.eager.keep) if self.frozen_compute == "fp8" else 0
        return BlockCosts(
            frozen_nbytes=int(kind.frozen_nbytes * self._stored_share) + beside,
            trained_nbytes=kind.trained_nbytes,
            input_nbytes=int(kind.input_nbytes * scale),
            eager=self._ways(kind, scale, compiled=False),
            compiled=self._ways(kind, scale, compiled=True),
            gradients_nbytes=kind.gradients_nbytes,
        )

    def _ways(self, kind: BlockShapes, scale: float, compiled: bool) -> CostsByMode:
        ways = kind.compiled if compiled else kind.eager
        if self.frozen_compute == "fp8":
            ways = with_fp8_overhead(ways, compiled)
        again = (
            plain_checkpointing_trace(ways.keep, kind.input_nbytes)
            if self._plain
            else ways.recompute
        )
        keep, lean, recompute = (
            self._way(trace, scale, compiled) for trace in (ways.keep, ways.lean, again)
        )
        return CostsByMode(keep, lean, recompute)

    def _way(self, trace: Trace, scale: float, compiled: bool) -> ModeCosts:
        return ModeCosts(
            forward=self._seconds(trace.forward, scale, compiled).scaled(self._slower),
            backward=self._seconds(trace.backward, scale, compiled).scaled(self._slower),
            saved_nbytes=int(trace.saved_nbytes * scale),
            saves_input=trace.saves_input,
            forward_peak_nbytes=int(trace.forward_peak_nbytes * scale),
            backward_peak_nbytes=int(trace.backward_peak_nbytes * scale) + trace.transposed_nbytes,
            forward_host_s=self.speeds.host.forward_seconds(trace) * self._slower,
            backward_host_s=self.speeds.host.backward_seconds(trace) * self._slower,
            forward_kernels=trace.forward_calls.kernels,
            backward_kernels=trace.recompute_calls.kernels + trace.backward_calls.kernels,
            num_saved=trace.forward_calls.saved_tensors,
        )

    def _seconds(self, ops: Sequence[Op], scale: float, compiled: bool) -> PassSeconds:
        spent = {"gemm": 0.0, "attention": 0.0, "elementwise": 0.0, "gaps": 0.0}
        for op in ops:
            timed = self._timed(op, scale)
            nbytes = op.weights_nbytes + (op.nbytes - op.weights_nbytes) * scale
            if op.kind != "elementwise":
                spent[op.kind] += max(
                    self._computing_s(op, scale, timed, compiled), nbytes / self.speeds.memory
                )
            elif timed is None:
                spent[op.kind] += nbytes / (self.speeds.compiled if compiled else self.speeds.eager)
            else:
                spent[op.kind] += timed
            spent["gaps"] += self.speeds.gap_s if timed is None else 0.0  # or it was timed with it
        return PassSeconds(**spent)

    def _timed(self, op: Op, scale: float) -> float | None:
        is_fp8 = op.frozen and self.frozen_compute == "fp8"  # it has rates of its own
        return None if self.speeds.timer is None or is_fp8 else self.speeds.timer(op, scale)

    def _computing_s(self, op: Op, scale: float, timed: float | None, compiled: bool) -> float:
        if timed is None:
            return op.flops * scale / self._flops_rate(op)
        return timed / self.speeds.step_share if compiled else timed

    def _flops_rate(self, op: Op) -> float:
        speeds = self.speeds
        if op.kind == "attention":
            return speeds.attention_backward if op.backward else speeds.attention_forward
        if op.frozen and self.frozen_compute == "fp8":
            return speeds.fp8
        return speeds.gemm


# ------------------------------------------------------------------------------------------
# What frozen products in fp8 need beside them: their inputs, rounded, a weight turned round, the
# main directions along which they compute in bf16, and a host that queues all that.
#
# A model is traced before its weights are rounded, so this is reckoned from the products of the
# trace. Held against a block of Wan-14B that was rounded first, compiled on a CPU and eager on
# fakes.


EAGER_THERE, EAGER_BACK = 2.8, 7.0
"""Bytes of each number of the widest input: one operation at a time, rounding has copies in fp32 of
it, on the way back those of a gradient that holds the weight's scales."""


DIRECTIONS = 32
"""Of a layer's input, as most layers have them."""
BF16_NBYTES, SCALE_NBYTES = 2, 4
PASSES = 3
"""Over an input that is taken apart: read for what lies along its directions, read and written for
what is left."""
ROUNDED = {False: 9, True: 2}
"""Kernels that give a matrix scales and round it: one operation at a time, and compiled."""
APART, PRODUCT = 2, 6
"""Inside of our operators: what takes an input apart; the product with all that is beside it."""
GRADIENTS, INPUT_GRADIENT, TURNED = 3, 3, 1
"""On the way back: of the LoRA's halves; of the input, beside rounding; and the weight, turned."""
SAVED, LOOKED_AT = 1.5, 2
"""By a layer that shares nothing, beside what it did: tensors that autograd saves, and looks at
memory on the way back."""


def fp8_extra_nbytes(keep: Trace) -> int:
    """Of one block: directions of every frozen weight, what it is along them, and its scales."""
    return sum(
        DIRECTIONS * BF16_NBYTES * (op.dims[1] + op.dims[2]) + SCALE_NBYTES * op.dims[2]
        for op in keep.forward
        if _is_frozen(op) and op.reads_frozen_weight
    )


def with_fp8_overhead(ways: TracesByMode, compiled: bool) -> TracesByMode:
    """The same block with its frozen products in fp8."""
    ways = TracesByMode(
        *(
            _taken_apart(_queued(trace, ways.keep, compiled), ways.keep)
            for trace in (ways.keep, ways.lean, ways.recompute)
        )
    )
    if compiled:
        lean, recompute = (_again(trace, ways.keep) for trace in (ways.lean, ways.recompute))
        return TracesByMode(ways.keep, lean, recompute)
    widest = max(_inputs((*ways.keep.forward, *ways.keep.backward)), default=0)
    there, back = int(EAGER_THERE * widest), int(EAGER_BACK * widest)
    most = ways.keep.backward_peak_nbytes + back
    keep, lean, recompute = (
        replace(
            trace,
            forward_peak_nbytes=trace.forward_peak_nbytes + there,
            # What is done again is a forward pass, before the way back of a block that kept all.
            backward_peak_nbytes=max(trace.backward_peak_nbytes + there, most),
        )
        for trace in (ways.keep, ways.lean, ways.recompute)
    )
    return TracesByMode(keep, lean, recompute)


def _queued(trace: Trace, keep: Trace, compiled: bool) -> Trace:
    """With what the host has to call; a layer in fp8 computes by itself, whatever it shares."""
    rounds, layers, given = ROUNDED[compiled], _layers(keep.forward), _layers(keep.backward)
    once = HostCalls(
        dispatched=rounds + 2, kernels=rounds + APART + PRODUCT, custom_ops=2, saved_tensors=SAVED
    )
    there = _exchanged(trace.forward_calls, trace.forward, once.scaled(layers))
    twice = _layers(trace.backward) - given
    """Layers that are computed once more."""
    back = HostCalls(
        dispatched=2 * layers + (rounds + TURNED) * given,
        kernels=GRADIENTS * layers + (rounds + TURNED + INPUT_GRADIENT) * given,
        views=0 if compiled else LOOKED_AT * layers,
        custom_ops=layers + given,
        saved_tensors=SAVED * layers,
    )
    if compiled:  # in the same graph as the way back
        back = replace(
            back,
            kernels=back.kernels + once.kernels * twice,
            custom_ops=back.custom_ops + 2 * twice,
        )
        back = _exchanged(trace.backward_calls, trace.backward, back)
        return replace(trace, forward_calls=there, backward_calls=back)
    again = trace.recompute_calls
    if again.dispatched:
        share = again.dispatched / trace.forward_calls.dispatched
        repeated = trace.backward[: len(trace.backward) - len(keep.backward)]
        # Rounding is done again even where a product was kept.
        kernels = (rounds + APART) * layers * share + PRODUCT * twice
        again = replace(there.scaled(share), kernels=again.kernels - _inside(repeated) + kernels)
    back = _exchanged(trace.backward_calls, keep.backward, back)
    return replace(trace, forward_calls=there, recompute_calls=again, backward_calls=back)


def _exchanged(calls: HostCalls, ops: Sequence[Op], others: HostCalls) -> HostCalls:
    """Other operators of ours instead of those that were traced."""
    dispatched = calls.dispatched and calls.dispatched - calls.custom_ops + others.dispatched
    return replace(
        calls,
        dispatched=dispatched,
        kernels=calls.kernels - _inside(ops) + others.kernels,
        views=calls.views + others.views,
        custom_ops=others.custom_ops,
        saved_tensors=calls.saved_tensors + others.saved_tensors,
        policy_calls=calls.policy_calls and dispatched,
    )


def _layers(ops: Sequence[Op]) -> int:
    return sum(op.reads_frozen_weight for op in ops)


def _inside(ops: Sequence[Op]) -> int:
    """Kernels of frozen layers, and of what is beside them."""
    return sum(op.frozen for op in ops)


def _taken_apart(trace: Trace, keep: Trace) -> Trace:
    """Every input is, on the way forward and where that is done again; gradients are not."""

    def passes(numbers: int) -> Op:
        return Op("elementwise", 0.0, float(PASSES * BF16_NBYTES * numbers))

    there = [passes(numbers) for numbers in _inputs(trace.forward)]
    again = _done_again(trace, keep)
    back = [passes(again)] if again else []
    return replace(trace, forward=(*trace.forward, *there), backward=(*trace.backward, *back))


def _done_again(trace: Trace, keep: Trace) -> int:
    """Numbers in inputs of products that are computed once more on the way back."""
    return max(0, sum(_inputs(trace.backward)) - sum(_inputs(keep.backward)))


def _again(trace: Trace, keep: Trace) -> Trace:
    """A compiler rounds the inputs of all products that are done again first, and holds them."""
    again = _done_again(trace, keep)
    if not again:
        return trace
    turned = max(op.dims[1] * op.dims[2] for op in trace.backward if _is_frozen(op))
    peak_nbytes = trace.backward_peak_nbytes + int(again)
    return replace(trace, backward_peak_nbytes=peak_nbytes, transposed_nbytes=turned)


def _inputs(ops: Sequence[Op]) -> list[int]:
    """Numbers in the inputs of frozen products; those of one operator of ours share theirs."""
    found: list[int] = []
    inside = shares = False
    """Of one of our operators; whether the input of what comes is known already."""
    for op in ops:
        if op.starts_custom_op or not op.frozen:
            inside, shares = op.starts_custom_op, False
        if _is_frozen(op):
            numbers = op.dims[0] * op.dims[1]
            found.append(max(found.pop(), numbers) if shares else numbers)
            shares = inside
    return found


def _is_frozen(op: Op) -> bool:
    return op.frozen and op.kind == "gemm" and bool(op.dims)
