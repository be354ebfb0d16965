"""What frozen products in fp8 need beside them: their inputs, rounded, a weight turned round, the
main directions along which they compute in bf16, and a host that queues all that.

A model is traced before its weights are rounded, so this is reckoned from the products of the
trace. Held against a block of Wan-14B that was rounded first, compiled on a CPU and eager on fakes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gracetune.plan.shapes import Calls, Op, Ways

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.shapes import Trace

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


def beside_nbytes(keep: Trace) -> int:
    """Of one block: directions of every frozen weight, what it is along them, and its scales."""
    return sum(
        DIRECTIONS * BF16_NBYTES * (op.extent[1] + op.extent[2]) + SCALE_NBYTES * op.extent[2]
        for op in keep.forward
        if _is_frozen(op) and op.holds_frozen
    )


def in_fp8(ways: Ways, compiled: bool) -> Ways:
    """The same block with its frozen products in fp8."""
    ways = Ways(
        *(
            _taken_apart(_queued(trace, ways.keep, compiled), ways.keep)
            for trace in (ways.keep, ways.lean, ways.recompute)
        )
    )
    if compiled:
        lean, recompute = (_again(trace, ways.keep) for trace in (ways.lean, ways.recompute))
        return Ways(ways.keep, lean, recompute)
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
    return Ways(keep, lean, recompute)


def _queued(trace: Trace, keep: Trace, compiled: bool) -> Trace:
    """With what the host has to call; a layer in fp8 computes by itself, whatever it shares."""
    rounds, layers, given = ROUNDED[compiled], _layers(keep.forward), _layers(keep.backward)
    once = Calls(dispatched=rounds + 2, kernels=rounds + APART + PRODUCT, own=2, saved=SAVED)
    there = _exchanged(trace.forward_calls, trace.forward, once.times(layers))
    twice = _layers(trace.backward) - given
    """Layers that are computed once more."""
    back = Calls(
        dispatched=2 * layers + (rounds + TURNED) * given,
        kernels=GRADIENTS * layers + (rounds + TURNED + INPUT_GRADIENT) * given,
        views=0 if compiled else LOOKED_AT * layers,
        own=layers + given,
        saved=SAVED * layers,
    )
    if compiled:  # in the same graph as the way back
        back = replace(back, kernels=back.kernels + once.kernels * twice, own=back.own + 2 * twice)
        back = _exchanged(trace.backward_calls, trace.backward, back)
        return replace(trace, forward_calls=there, backward_calls=back)
    again = trace.again_calls
    if again.dispatched:
        share = again.dispatched / trace.forward_calls.dispatched
        repeated = trace.backward[: len(trace.backward) - len(keep.backward)]
        # Rounding is done again even where a product was kept.
        kernels = (rounds + APART) * layers * share + PRODUCT * twice
        again = replace(there.times(share), kernels=again.kernels - _inside(repeated) + kernels)
    back = _exchanged(trace.backward_calls, keep.backward, back)
    return replace(trace, forward_calls=there, again_calls=again, backward_calls=back)


def _exchanged(calls: Calls, ops: Sequence[Op], others: Calls) -> Calls:
    """Other operators of ours instead of those that were traced."""
    dispatched = calls.dispatched and calls.dispatched - calls.own + others.dispatched
    return replace(
        calls,
        dispatched=dispatched,
        kernels=calls.kernels - _inside(ops) + others.kernels,
        views=calls.views + others.views,
        own=others.own,
        saved=calls.saved + others.saved,
        policed=calls.policed and dispatched,
    )


def _layers(ops: Sequence[Op]) -> int:
    return sum(op.holds_frozen for op in ops)


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
    turned = max(op.extent[1] * op.extent[2] for op in trace.backward if _is_frozen(op))
    peak_nbytes = trace.backward_peak_nbytes + int(again)
    return replace(trace, backward_peak_nbytes=peak_nbytes, turned_nbytes=turned)


def _inputs(ops: Sequence[Op]) -> list[int]:
    """Numbers in the inputs of frozen products; those of one operator of ours share theirs."""
    found: list[int] = []
    inside = shares = False
    """Of one of our operators; whether the input of what comes is known already."""
    for op in ops:
        if op.own or not op.frozen:
            inside, shares = op.own, False
        if _is_frozen(op):
            numbers = op.extent[0] * op.extent[1]
            found.append(max(found.pop(), numbers) if shares else numbers)
            shares = inside
    return found


def _is_frozen(op: Op) -> bool:
    return op.frozen and op.kind == "gemm" and bool(op.extent)
