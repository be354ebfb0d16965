"""Which block is needed next, from the order in which earlier passes used them.

Pure bookkeeping over block numbers: no tensors, no clocks. A pass is one call of the model with
the backward that follows it. Its order is guessed for the first pass of a kind, learnt from that,
and held against every later one. Uses of the same block in a row count as one. Of several models
that share the blocks' memory, such as two experts, a pass runs one.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST_PASS = 64
"""Uses a block that are remembered: what is longer was never announced as several passes."""


class Pass(Enum):
    """What a call of the model leads to."""

    TRAIN = "train"
    """Forward, then backward; with recomputation each block still comes once on the way back."""
    SAMPLE = "sample"
    """Forward alone."""


class FetchSchedule:
    """The expected order of each kind of pass, and where in it we are."""

    def __init__(self, num_blocks: int, starts: Sequence[int] = (0,)) -> None:
        """`starts` has the first block of each model."""
        self.surprises = 0
        """Uses that a learnt order did not have next."""
        self._orders: dict[tuple[Pass, int], list[int]] = {}
        for model, (start, end) in enumerate(pairwise([*starts, num_blocks])):
            there = list(range(start, end))
            self._orders[Pass.TRAIN, model] = there + there[-2::-1]
            self._orders[Pass.SAMPLE, model] = there
        self._learnt: set[tuple[Pass, int]] = set()
        self._kind = (Pass.TRAIN, 0)
        self._seen: list[int] = []
        self._longest = LONGEST_PASS * num_blocks
        self._next = 0

    def begin(self, kind: Pass, model: int = 0) -> None:
        """A model is called: learn from the pass that is over, expect the first block."""
        self._learn()
        self._kind = (kind, model)
        self._seen = []
        self._next = 0

    def expected(self) -> int | None:
        """The next block, if the pass goes as the ones before; none: it should be over."""
        order = self._orders[self._kind]
        return order[self._next] if self._next < len(order) else None

    def used(self, block: int) -> bool:
        """Take note of a use; false where another was expected from a learnt order."""
        if len(self._seen) < self._longest:
            self._seen.append(block)
        as_expected = block == self.expected()
        if as_expected:
            self._next += 1
        else:
            self._find(block)
        if as_expected or self._kind not in self._learnt:
            return True
        self.surprises += 1
        return False

    def ahead(self) -> list[int]:
        """Every block still to come, this pass and the next of its kind, soonest first."""
        order = self._orders[self._kind]
        return list(dict.fromkeys(order[self._next :] + order))

    def _find(self, block: int) -> None:
        """Go on from the nearest place that has this block: one was skipped, or repeated."""
        order = self._orders[self._kind]
        places = [place for place, other in enumerate(order) if other == block]
        if places:  # of two as near, the later: more passes skip a block than repeat one
            self._next = 1 + min(places, key=lambda place: (abs(place - self._next), -place))

    def _learn(self) -> None:
        if not self._seen or len(self._seen) == self._longest:
            return
        order = self._orders[self._kind]
        if self._seen != order[: len(self._seen)]:  # a pass without its backward teaches nothing
            self._orders[self._kind] = self._seen
        self._learnt.add(self._kind)
