"""Windows of some passes, each judged when the device is through with it.

The host queues passes ahead of the device. What it waits for is known late, and what changes after
a decision is seen later still: so every window has waits of its own, and none begins before the
one before it was judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.stream.waits import Lap


class PassWindow:
    """One window after the other."""

    def __init__(self, begin: Callable[[], Lap], passes: int) -> None:
        self._begin = begin
        self._length = passes
        self._lap: Lap | None = None
        self._passes = 0

    def drop(self) -> None:
        """What is under way is of no use: something else has come between its passes."""
        self._lap, self._passes = None, 0

    def last(self) -> Lap | None:
        """At the start of a pass: the window that is over, where one is."""
        if self._lap is None:
            self._lap = self._begin()
            return None
        self._passes += 1
        if self._passes == self._length:
            self._begin()  # what comes from here on is none of it
        if self._passes < self._length or not self._lap.is_over():
            return None
        lap, self._lap, self._passes = self._lap, self._begin(), 0
        return lap
