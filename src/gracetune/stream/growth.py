"""How many slots a ring has: more while computing waits for weights and more of them help.

Each slot brings the next block a block earlier, and saves two fetches a pass. The first is added to
see what one is worth; then as many as the rest of the waiting asks for. The number asked for is
never gone below. Looked at between passes, without waiting for the device.
"""

from __future__ import annotations

import time
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.events.types import Notice
from gracetune.stream.movers import Lane
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.stream.movers import Mover
    from gracetune.stream.slots import Slots

WINDOW = 6
"""Passes that are looked at before the number changes: the device is behind by one or two."""
WORTH = 0.005
"""Of the time of these passes, what must be waited before slots are added."""
GAIN = 0.97
"""They must bring waiting below this part of what it was, or they are given back."""


class Tried(NamedTuple):
    """A number of slots, and what a window of passes waited with it."""

    slots: int
    waited_s: float


class Growth:
    """Watches one ring and adds to its slots, within so much device memory."""

    def __init__(
        self,
        slots: Slots,
        mover: Mover,
        most_slots: int,
        limit_nbytes: int,
        tell: Callable[[Notice], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._mover = mover
        self._least = slots.count
        self._most = min(most_slots, slots.count + limit_nbytes // slots.nbytes)
        self._tell = tell
        self._clock = clock
        self._passes = 0
        self._began = clock()
        self._seconds = mover.waits_seen(Lane.WEIGHTS).seconds
        self._before: Tried | None = None
        """The number before slots were last added; none: none were, or nothing waits any more."""
        self._settled = self._most <= self._least

    def observe(self) -> None:
        """A pass begins."""
        self._passes += 1
        if self._settled or self._passes % WINDOW:
            return
        now, seconds = self._clock(), self._mover.waits_seen(Lane.WEIGHTS).seconds
        waited_s, took_s = seconds - self._seconds, now - self._began
        self._began, self._seconds = now, seconds
        if self._before is not None and waited_s > GAIN * self._before.waited_s:
            self._settle(self._before.slots, "more did not help, so they are given back")
        elif waited_s < WORTH * took_s:
            self._before = None
        elif self._slots.count < self._most:
            self._add(waited_s, waited_s / max(took_s, 1e-9))

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
        self._tell(Notice(f"slots of the ring: {self._slots.count} of {size}; {why}"))

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
        self._tell(Notice(f"slots of the ring: {count}; {why}"))
