"""Seconds and bytes of each block at any batch, from traces at batch 1 and 2.

A kernel takes as long as its products or its bytes do, whichever is longer. Everything grows with
the batch along a straight line, so two traces tell the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.plan.rates import Speeds
    from gracetune.plan.result import Activations, BlockPlan, FrozenCompute
    from gracetune.plan.shapes import BlockShapes, ModelShapes, Op, Trace


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of one pass, by what they go to."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    gaps: float = 0.0
    """Between kernels, and where the host cannot queue them fast enough."""

    @property
    def total(self) -> float:
        """The pass."""
        return self.gemm + self.attention + self.elementwise + self.gaps

    def __add__(self, other: Parts) -> Parts:
        return _combine(self, other, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Way:
    """One kind of block, run one way at one batch."""

    forward: Parts
    backward: Parts
    saved_nbytes: int
    saves_input: bool
    forward_peak_nbytes: int
    backward_peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block at one batch, every way it can run."""

    frozen_nbytes: int
    trained_nbytes: int
    input_nbytes: int
    eager: Way
    compiled: Way
    lean: Way
    lean_budget: float

    def way(self, activations: Activations, compiled: bool) -> Way:
        """How it runs; without compilation nothing is lean, and all that is saved is offloaded."""
        if not compiled:
            return self.eager
        return self.lean if activations in ("lean", "offload") else self.compiled

    def outgoing_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """What waits in host memory between forward and backward."""
        if plan.activations == "offload":
            way = self.way(plan.activations, compiled)
            return way.saved_nbytes + (self.input_nbytes if way.saves_input else 0)
        return self.input_nbytes if plan.offload_input else 0

    def held_nbytes(self, plan: BlockPlan, compiled: bool) -> int:
        """What stays on the device between forward and backward."""
        if plan.activations == "offload" or plan.offload_input:
            return 0
        if plan.activations == "recompute":
            return self.input_nbytes
        way = self.way(plan.activations, compiled)
        return way.saved_nbytes + (self.input_nbytes if way.saves_input else 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """A model at one batch on one machine."""

    batch: int
    blocks: tuple[Block, ...]
    outside: Way
    outside_frozen_nbytes: int
    trained_nbytes: int
    batch_nbytes: int

    @property
    def slot_nbytes(self) -> int:
        """A slot of the ring fits any block."""
        return max(block.frozen_nbytes for block in self.blocks)


class Model:
    """What was traced, on a machine of these speeds; asked for one batch after another."""

    def __init__(
        self,
        one: ModelShapes,
        two: ModelShapes,
        speeds: Speeds,
        frozen_compute: FrozenCompute = "bf16",
        stored_share: float = 1.0,
    ) -> None:
        """`stored_share`: of the traced frozen weights' bytes, what quantised ones take."""
        assert (one.batch, two.batch) == (1, 2), (one.batch, two.batch)
        assert one.order == two.order, "the batch changes which blocks are alike"
        self.name = one.name
        self.speeds = speeds
        self.frozen_compute = frozen_compute
        self._stored_share = stored_share
        self._one = one
        self._two = two
        self._made: dict[int, Costs] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return len(self._one.order)

    @property
    def trained_nbytes(self) -> int:
        """What the optimizer updates."""
        return self._one.trained_nbytes

    def at(self, batch: int) -> Costs:
        """The model at this batch."""
        if batch not in self._made:
            self._made[batch] = self._make(batch)
        return self._made[batch]

    def _make(self, batch: int) -> Costs:
        one, two = self._one, self._two
        kinds = [self._block(a, b, batch) for a, b in zip(one.kinds, two.kinds, strict=True)]
        outside = self._way(one.outside, two.outside, batch, self.speeds.eager)
        return Costs(
            batch=batch,
            blocks=tuple(kinds[kind] for kind in one.order),
            outside=outside,
            outside_frozen_nbytes=one.outside_frozen_nbytes,
            trained_nbytes=one.trained_nbytes,
            batch_nbytes=_line(one.batch_nbytes, two.batch_nbytes, batch),
        )

    def _block(self, one: BlockShapes, two: BlockShapes, batch: int) -> Block:
        speeds = self.speeds
        return Block(
            frozen_nbytes=self._stored(one.frozen_nbytes),
            trained_nbytes=one.trained_nbytes,
            input_nbytes=_line(one.input_nbytes, two.input_nbytes, batch),
            eager=self._way(one.eager, two.eager, batch, speeds.eager),
            compiled=self._way(one.compiled, two.compiled, batch, speeds.compiled),
            lean=self._way(one.lean, two.lean, batch, speeds.compiled),
            lean_budget=one.lean_budget,
        )

    def _stored(self, nbytes: int) -> int:
        return int(nbytes * self._stored_share)

    def _way(self, one: Trace, two: Trace, batch: int, elementwise: float) -> Way:
        def seconds(a: Sequence[Op], b: Sequence[Op]) -> Parts:
            busy = [self._busy(ops, elementwise) for ops in (a, b)]
            parts = _combine(busy[0], busy[1], 2.0 - batch, batch - 1.0)
            speeds = self.speeds
            gaps = max(len(b) * speeds.gap_s, len(b) * speeds.issue_s - parts.total)
            return replace(parts, gaps=gaps)

        return Way(
            forward=seconds(one.forward, two.forward),
            backward=seconds(one.backward, two.backward),
            saved_nbytes=_line(one.saved_nbytes, two.saved_nbytes, batch),
            saves_input=two.saves_input,
            forward_peak_nbytes=_line(one.forward_peak_nbytes, two.forward_peak_nbytes, batch),
            backward_peak_nbytes=_line(one.backward_peak_nbytes, two.backward_peak_nbytes, batch),
        )

    def _busy(self, ops: Sequence[Op], elementwise: float) -> Parts:
        spent = {"gemm": 0.0, "attention": 0.0, "elementwise": 0.0}
        for op in ops:
            bytes_s = op.nbytes / (elementwise if op.kind == "elementwise" else self.speeds.memory)
            spent[op.kind] += max(op.flops / self._flops_rate(op), bytes_s)
        return Parts(**spent)

    def _flops_rate(self, op: Op) -> float:
        speeds = self.speeds
        if op.kind == "attention":
            return speeds.attention_backward if op.backward else speeds.attention_forward
        if op.frozen and self.frozen_compute == "fp8":
            return speeds.fp8
        return speeds.gemm


def _line(one: int, two: int, batch: int) -> int:
    return one + (two - one) * (batch - 1)


def _combine(a: Parts, b: Parts, of_a: float, of_b: float) -> Parts:
    return Parts(
        gemm=of_a * a.gemm + of_b * b.gemm,
        attention=of_a * a.attention + of_b * b.attention,
        elementwise=of_a * a.elementwise + of_b * b.elementwise,
        gaps=of_a * a.gaps + of_b * b.gaps,
    )
