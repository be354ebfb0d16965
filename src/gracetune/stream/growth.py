"""How many slots a ring has: one more while computing waits for weights and that helps.

Each slot brings the next block a block earlier, and saves two fetches a pass. The number asked for
is never gone below. Looked at between passes, without waiting for the device.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from gracetune.events.types import Notice
from gracetune.stream.movers import Lane
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.stream.movers import Mover
    from gracetune.stream.slots import Slots

WINDOW = 8
"""Passes that are looked at before the number changes: the device is behind by one or two."""
WORTH = 0.005
"""Of the time of these passes, what must be waited before a slot is added."""
GAIN = 0.97
"""A slot must bring waiting below this part of what it was, or it is given back."""


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
        self._share_before: float | None = None
        """What was waited before a slot was last added; none: none was, or it has proved itself."""
        self._settled = self._most <= self._least

    def observe(self) -> None:
        """A pass begins."""
        self._passes += 1
        if self._settled or self._passes % WINDOW:
            return
        now, seconds = self._clock(), self._mover.waits_seen(Lane.WEIGHTS).seconds
        share = (seconds - self._seconds) / max(now - self._began, 1e-9)
        self._began, self._seconds = now, seconds
        if self._share_before is not None and share > GAIN * self._share_before:
            self._settle(self._slots.count - 1, "one more did not help, so it is given back")
        elif share < WORTH:
            self._share_before = None
        elif self._slots.count < self._most:
            self._add(share)

    def give_back(self) -> bool:
        """Only what was asked for from here on, since memory is short; false where that is all."""
        if self._slots.count == self._least:
            return False
        self._settle(self._least, "device memory is short, so what was added is given back")
        return True

    def _add(self, share: float) -> None:
        size = format_bytes(self._slots.nbytes)
        try:
            self._slots.resize(self._slots.count + 1)
        except torch.OutOfMemoryError:
            self._settle(self._slots.count, f"there is no room for another of {size}")
            return
        self._share_before = share
        why = f"steps waited {share:.1%} of their time for weights"
        self._tell(Notice(f"slots of the ring: {self._slots.count} of {size}; {why}"))

    def _settle(self, count: int, why: str) -> None:
        self._settled = True
        self._share_before = None
        self._slots.resize(count)
        self._tell(Notice(f"slots of the ring: {count}; {why}"))
