"""Grow device buffers while steps stall on copies, as long as growing helps.

Two sizes are tuned during a run, both by `GrowthController`: the number of slots of the weight ring
(`RingAutosizer`) and the number of blocks whose activations are prefetched before backward reaches
them (`PrefetchDistance`). They differ in what counts as a stall and in how fast they grow.

Decisions are made between passes, from complete stall windows, and never block on the device. They
change memory use and speed, never numbers. (The batch prefetcher of `cache/` has a simpler rule: it
adds one batch each time a step had to wait, and does not check whether that helped.)
"""

from __future__ import annotations

from functools import partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.events.types import Notice
from gracetune.offload.copies import CopyStream
from gracetune.offload.stall_timer import StallWindows
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.offload.copies import CopyEngine
    from gracetune.offload.ring import SlotPool
    from gracetune.offload.stall_timer import StallWindow


RING_WINDOW_PASSES = 4
"""Passes per window of the ring."""
MIN_STALL_SHARE = 0.005
"""Slots are added while the ring stalls for more than this share of the window."""
RING_REQUIRED_RATIO = 0.97
"""Added slots must reduce the stalls to this ratio or less of what they were."""
DISTANCE_WINDOW_PASSES = 3
"""Passes per window of the activation prefetch."""
DISTANCE_REQUIRED_RATIO = 0.9
"""A longer prefetch distance must reduce the stalls to this ratio or less."""


class GrowthController:
    """Increase a size while there are stalls, and undo the last increase if it does not help.

    One decision per window, for stalls `w` in this window and `w0` before the last increase:

        w > required_ratio * w0     go back to the size before the increase, and stop for good
        no stalls worth an increase keep the size, and keep watching
        otherwise                   increase the size, up to `max_size`
    """

    def __init__(self, size: int, windows: StallWindows, required_ratio: float) -> None:
        self.size = size
        self.settled = False
        """True once the size is final."""
        self._windows = windows
        self._required_ratio = required_ratio
        self._last_increase: _Increase | None = None

    def settle(self, size: int) -> None:
        """Use this size from now on."""
        self.size, self.settled = size, True

    def discard_window(self) -> None:
        """Ignore the current window, because other work ran between its passes."""
        self._windows.discard()

    def start_pass(
        self, max_size: int, is_stalled: Callable[[StallWindow], bool], extrapolate: bool
    ) -> StallWindow | None:
        """Count a pass that starts now. Return the window if the size changed because of it.

        The first increase is by one. With `extrapolate`, later ones add as many as would end the
        stalls if each helped as much as the last increase did.
        """
        window = None if self.settled else self._windows.start_pass()
        if window is None:
            return None
        last, self._last_increase = self._last_increase, None
        if last is not None and window.stalled_s > self._required_ratio * last.stalled_s:
            self.settle(last.size)
            return window
        if not is_stalled(window) or self.size >= max_size:
            return None
        step = 1
        if extrapolate and last is not None:
            saved_s = last.stalled_s - window.stalled_s
            step = ceil(window.stalled_s * (self.size - last.size) / saved_s)
        self._last_increase = _Increase(self.size, window.stalled_s)
        self.size = min(max_size, self.size + step)
        return window


class _Increase(NamedTuple):
    size: int
    """Size before the increase."""
    stalled_s: float
    """Stalls of the window before the increase, in seconds."""


class RingAutosizer:
    """Add slots to a weight ring within a device memory limit.

    Each slot starts the fetch of the next block one block earlier and saves two fetches per pass.
    The ring never gets fewer slots than it was created with.
    """

    def __init__(
        self,
        slots: SlotPool,
        copy_engine: CopyEngine,
        max_slots: int,
        limit_nbytes: int,
        emit: Callable[[Notice], None],
    ) -> None:
        """`limit_nbytes` is the device memory for slots beyond those the ring has now."""
        self._slots = slots
        self._min_slots = slots.count
        self._max_slots = min(max_slots, slots.count + limit_nbytes // slots.nbytes)
        self._emit = emit
        windows = StallWindows(
            partial(copy_engine.begin_stall_window, CopyStream.WEIGHTS), RING_WINDOW_PASSES
        )
        self._controller = GrowthController(slots.count, windows, RING_REQUIRED_RATIO)
        self._controller.settled = self._max_slots <= self._min_slots

    def sampling_pass(self) -> None:
        """Handle the start of a pass without backward, whose stalls say nothing about training."""
        self._controller.discard_window()

    def training_pass(self) -> None:
        """Handle the start of a training pass: resize the ring if a window was just completed."""
        window = self._controller.start_pass(self._max_slots, _ring_stalled, extrapolate=True)
        if window is None:
            return
        if self._controller.settled:
            self._settle(self._controller.size, "more slots did not help and were removed")
            return
        size = format_bytes(self._slots.nbytes)
        try:
            while self._slots.count < self._controller.size:
                self._slots.resize(self._slots.count + 1)
        except torch.OutOfMemoryError:
            self._settle(self._slots.count, f"there is no device memory for another {size}")
            return
        share = window.stalled_s / window.span_s
        self._emit(
            Notice(
                f"weight ring: {self._slots.count} slots of {size}; "
                f"steps waited {share:.1%} of their time for weights"
            )
        )

    def release_extra_slots(self) -> bool:
        """Free the added slots for good, as memory is short. Return False if there are none."""
        if self._slots.count == self._min_slots:
            return False
        self._settle(self._min_slots, "device memory is short, so the added slots were removed")
        return True

    def _settle(self, count: int, reason: str) -> None:
        self._controller.settle(count)
        self._slots.resize(count)
        self._emit(Notice(f"weight ring: {count} slots; {reason}"))


def _ring_stalled(window: StallWindow) -> bool:
    return window.stalled_s > MIN_STALL_SHARE * window.span_s


class PrefetchDistance:
    """Number of blocks whose activations are fetched before backward reaches them."""

    def __init__(
        self, blocks: int, limit_nbytes: int | None, begin: Callable[[], StallWindow]
    ) -> None:
        """`limit_nbytes` limits the memory of prefetched blocks; None: the number is fixed."""
        self._limit_nbytes = limit_nbytes
        windows = StallWindows(begin, DISTANCE_WINDOW_PASSES)
        self._controller = GrowthController(blocks, windows, DISTANCE_REQUIRED_RATIO)
        self._controller.settled = limit_nbytes is None

    @property
    def blocks(self) -> int:
        """Current number of blocks."""
        return self._controller.size

    def training_pass(self, block_nbytes: int) -> str:
        """Handle the start of a pass. Return a description of the change, or an empty string.

        `block_nbytes` is the size of the largest block's activations. The number grows by one at a
        time while any prefetched copy is late.
        """
        max_blocks = (self._limit_nbytes or 0) // max(1, block_nbytes)
        window = self._controller.start_pass(
            max_blocks, lambda window: window.late > 0, extrapolate=False
        )
        if window is None:
            return ""
        if self._controller.settled:
            return f"{self.blocks} again: prefetching more did not help, the link is saturated"
        per_pass_ms = window.stalled_s / DISTANCE_WINDOW_PASSES * 1e3
        return f"{self.blocks}: backward waited {per_pass_ms:.1f} ms per pass"
