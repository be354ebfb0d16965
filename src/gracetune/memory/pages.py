"""The pages of one managed range, kept as runs of equal state.

A terabyte of pages in one state is one run, so a simulation of any size costs bookkeeping only for
the places where neighbours differ.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class PageState:
    """What is known of a page."""

    places: frozenset[int] = frozenset()
    """Where it has a valid copy; empty: never written, or discarded."""
    preferred: int | None = None
    last_prefetch: int | None = None
    read_mostly: bool = False
    accessed_by: frozenset[int] = frozenset()
    used: int = 0
    """When it was last brought or touched; the smallest is evicted first."""


class Run(NamedTuple):
    """Pages `first` up to, not including, `last`, all in one state."""

    first: int
    last: int
    state: PageState


class PageTable:
    """All pages of a range, in order."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._starts = [0]
        self._states = [PageState()]

    def runs(self, first: int = 0, last: int | None = None) -> Iterator[Run]:
        """The runs that cover these pages, cut at both ends."""
        last = self.num_pages if last is None else last
        index = bisect_right(self._starts, first) - 1
        while first < last:
            end = self._end(index)
            yield Run(first, min(end, last), self._states[index])
            first, index = end, index + 1

    def update(self, first: int, last: int, change: Callable[[PageState], PageState]) -> None:
        """Change the state of these pages, and join what has become equal."""
        if first >= last:
            return
        low, high = self._cut(first), self._cut(last)
        self._states[low:high] = [change(state) for state in self._states[low:high]]
        for index in range(min(high, len(self._states) - 1), max(low - 1, 0), -1):
            if self._states[index] == self._states[index - 1]:
                del self._starts[index], self._states[index]

    def _cut(self, page: int) -> int:
        """Make `page` the first of a run, and say which run that is."""
        if page == self.num_pages:
            return len(self._starts)
        index = bisect_right(self._starts, page) - 1
        if self._starts[index] == page:
            return index
        self._starts.insert(index + 1, page)
        self._states.insert(index + 1, self._states[index])
        return index + 1

    def _end(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else self.num_pages
