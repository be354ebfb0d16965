"""How many slots a ring has: more while computing waits for weights and more of them help.

Each slot brings the next block a block earlier, and saves two fetches a pass. The first is added to
see what one is worth; then as many as the rest of the waiting asks for. The number asked for is
never gone below. Looked at between passes, without waiting for the device.
"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.events.types import Notice
from gracetune.offload.copies import CopyStream
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.offload.copies import CopyEngine
    from gracetune.offload.ring import Slots
    from gracetune.offload.stall_timer import Lap


WINDOW = 4
"""Passes that are looked at before the number changes."""
WORTH = 0.005
"""Of the time of these passes, what must be waited before slots are added."""
GAIN = 0.97
"""They must bring waiting below this part of what it was, or they are given back."""


class Tried(NamedTuple):
    """A number of slots, and what a window of passes waited with it."""

    slots: int
    waited_s: float


class RingAutosizer:
    """Watches one ring and adds to its slots, within so much device memory."""

    def __init__(
        self,
        slots: Slots,
        mover: CopyEngine,
        most_slots: int,
        limit_nbytes: int,
        emit: Callable[[Notice], None],
    ) -> None:
        self._slots = slots
        self._least = slots.count
        self._most = min(most_slots, slots.count + limit_nbytes // slots.nbytes)
        self._emit = emit
        self._laps = PassWindow(partial(mover.lap, CopyStream.WEIGHTS), WINDOW)
        self._before: Tried | None = None
        """The number before slots were last added; none: none were, or nothing waits any more."""
        self._settled = self._most <= self._least

    def sampling(self) -> None:
        """A pass begins that is not of training, and waits in another way."""
        self._laps.drop()

    def observe(self) -> None:
        """A pass of training begins."""
        lap = None if self._settled else self._laps.last()
        if lap is None:
            return
        if self._before is not None and lap.seconds > GAIN * self._before.waited_s:
            self._settle(self._before.slots, "more did not help, so they are given back")
        elif lap.seconds <= WORTH * lap.span_s:
            self._before = None
        elif self._slots.count < self._most:
            self._add(lap.seconds, lap.seconds / lap.span_s)
        else:
            self._before = None  # all there may be, and they help

    def give_back(self) -> bool:
        """Only what was asked for from here on, since memory is short; false where that is all."""
        if self._slots.count == self._least:
            return False
        self._settle(self._least, "device memory is short, so what was added is given back")
        return True

    def _add(self, waited_s: float, share: float) -> None:
        size = format_bytes(self._slots.nbytes)
        before = Tried(self._slots.count, waited_s)
        wanted = min(self._most, before.slots + self._missing(waited_s))
        try:
            while self._slots.count < wanted:
                self._slots.resize(self._slots.count + 1)
        except torch.OutOfMemoryError:
            self._settle(self._slots.count, f"there is no room for another of {size}")
            return
        self._before = before
        why = f"steps waited {share:.1%} of their time for weights"
        self._emit(Notice(f"slots of the ring: {self._slots.count} of {size}; {why}"))

    def _missing(self, waited_s: float) -> int:
        """As many as would end the waiting if each were worth what the last ones were."""
        if self._before is None:
            return 1
        saved_s = self._before.waited_s - waited_s
        return ceil(waited_s * (self._slots.count - self._before.slots) / saved_s)

    def _settle(self, count: int, why: str) -> None:
        self._settled = True
        self._before = None
        self._slots.resize(count)
        self._emit(Notice(f"slots of the ring: {count}; {why}"))


# ------------------------------------------------------------------------------------------
# Windows of some passes, each judged when the device is through with it.
#
# The host queues passes ahead of the device. What it waits for is known late, and what changes
# after
# a decision is seen later still: so every window has waits of its own, and none begins before the
# one before it was judged.


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
