"""What frozen products in fp8 need beside them: their inputs, rounded, and a weight turned round.

A model is traced before its weights are rounded, so this is reckoned from the products of the
trace. Held against a block of Wan-14B that was rounded first, compiled on a CPU and eager on fakes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gracetune.plan.shapes import Ways

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.shapes import Op, Trace

EAGER_THERE, EAGER_BACK = 2.8, 7.0
"""Bytes of each number of the widest input: one operation at a time, rounding has copies in fp32 of
it, on the way back those of a gradient that holds the weight's scales."""


def in_fp8(ways: Ways, compiled: bool) -> Ways:
    """The same block with its frozen products in fp8."""
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


def _again(trace: Trace, keep: Trace) -> Trace:
    """A compiler rounds the inputs of all products that are done again first, and holds them."""
    again = sum(_inputs(trace.backward)) - sum(_inputs(keep.backward))
    if again <= 0:
        return trace
    turned = max(op.extent[1] * op.extent[2] for op in trace.backward if _is_frozen(op))
    return replace(trace, backward_peak_nbytes=trace.backward_peak_nbytes + int(again) + turned)


def _inputs(ops: Sequence[Op]) -> list[int]:
    """Numbers in the inputs of frozen products; those of one operator of ours share theirs."""
    found: list[int] = []
    shares = False
    """Whether the input of what comes is known already."""
    for op in ops:
        shares = shares and op.frozen and not op.own
        if _is_frozen(op):
            numbers = op.extent[0] * op.extent[1]
            found.append(max(found.pop(), numbers) if shares else numbers)
            shares = True
    return found


def _is_frozen(op: Op) -> bool:
    return op.frozen and op.kind == "gemm" and bool(op.extent)
