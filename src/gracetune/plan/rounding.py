"""What frozen products in fp8 need beside them: their inputs, rounded, a weight turned round, and
the main directions along which they compute in bf16.

A model is traced before its weights are rounded, so this is reckoned from the products of the
trace. Held against a block of Wan-14B that was rounded first, compiled on a CPU and eager on fakes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gracetune.plan.shapes import Op, Ways

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
        *(_taken_apart(trace, ways.keep) for trace in (ways.keep, ways.lean, ways.recompute))
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
