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
from gracetune.offload.copy_engine import CopyStream
from gracetune.offload.stall_timer import StallWindows
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.offload.copy_engine import CopyEngine
    from gracetune.offload.ring import SlotPool
    from gracetune.offload.stall_timer import StallWindow


RING_WINDOW_PASSES = 4
"""Length, in training passes, of a stall window: the time over which waits for streamed weights
are added up."""
MIN_STALL_SHARE = 0.005
"""Slots are added to the weight ring while compute waits for weights for more than this share of
the time."""
RING_REQUIRED_RATIO = 0.97
"""Slots added to the weight ring are kept if they cut the stall time to at most this fraction of
the time before."""
DISTANCE_WINDOW_PASSES = 3
"""Length, in training passes, of a stall window: the time over which waits for prefetched
activations are added up."""
DISTANCE_REQUIRED_RATIO = 0.9
"""A longer activation prefetch distance is kept if it cuts the stall time to at most this fraction
of the time before."""


class GrowthController:
    """Increase a buffer's size while steps stall, and undo the last increase if it does not help.

    It decides once per stall window (a few training passes), from the stall time `w` in this window
    and the stall time `w0` in the window before the last increase:

        w > required_ratio * w0       go back to the size before the increase, and stop for good
        too few stalls, or max_size   keep the size, and keep watching
        otherwise                     increase the size
    """

    def __init__(self, size: int, windows: StallWindows, required_ratio: float) -> None:
        self.size = size
        self.settled = False
        """True once the size is final and no longer tuned."""
        self.paused = False
        """True while memory is short: the size does not grow."""
        self._windows = windows
        self._required_ratio = required_ratio
        self._last_increase: _Increase | None = None

    def settle(self, size: int) -> None:
        """Set the size for good; it is not tuned any more."""
        self.size, self.settled = size, True

    def pause(self, size: int) -> None:
        """Set the size, and keep it until `paused` is reset."""
        self.size, self.paused = min(size, self.size), True
        self._last_increase = None
        self._windows.discard()

    def discard_window(self) -> None:
        """Drop the current stall window, because sampling ran between its training passes."""
        self._windows.discard()

    def start_pass(
        self, max_size: int, is_stalled: Callable[[StallWindow], bool], extrapolate: bool
    ) -> StallWindow | None:
        """Count a training pass that starts now; change the size if a stall window is complete.

        Returns the window if its stalls changed the size, else None. The first increase is by one.
        With `extrapolate`, a later increase is as large as is needed to end the stalls, assuming
        that each added unit of size saves as much time as in the last increase.
        """
        window = None if self.settled or self.paused else self._windows.start_pass()
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
    """Buffer size before it was increased."""
    stalled_s: float
    """Stall time, in seconds, of the window before the buffer was increased."""


class RingAutosizer:
    """Add slots to a weight ring while steps stall, within a device memory limit.

    A slot is a device buffer for the weights of one block. With one more slot, copies of weights
    start one block earlier, and two copies per pass are saved: one more block is still on the
    device when forward turns to backward, and when the next pass starts. The ring never gets fewer
    slots than it was created with.
    """

    def __init__(
        self,
        slots: SlotPool,
        copy_engine: CopyEngine,
        max_slots: int,
        limit_nbytes: int,
        emit: Callable[[Notice], None],
    ) -> None:
        """`limit_nbytes` is the device memory, in bytes, that the added slots may take."""
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
        """Drop the current measurement: stalls while the model generates samples do not count."""
        self._controller.discard_window()

    def training_pass(self) -> None:
        """Handle the start of a training pass: resize the ring if enough passes were measured."""
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
        """Free the added slots and add no more, because device memory ran out.

        Returns False if no slots were added.
        """
        if self._slots.count == self._min_slots:
            return False
        self._settle(self._min_slots, "device memory is short, so the added slots were removed")
        return True

    def trim(self) -> int:
        """Free the added slots, and add none until `restore`; return their bytes."""
        added = self._slots.count - self._min_slots
        self._controller.pause(self._min_slots)
        self._slots.resize(self._min_slots)
        return added * self._slots.nbytes

    def restore(self) -> None:
        """Let the ring grow again while steps stall."""
        self._controller.paused = False

    def _settle(self, count: int, reason: str) -> None:
        self._controller.settle(count)
        self._slots.resize(count)
        self._emit(Notice(f"weight ring: {count} slots; {reason}"))


def _ring_stalled(window: StallWindow) -> bool:
    return window.stalled_s > MIN_STALL_SHARE * window.span_s


class PrefetchDistance:
    """Tune the activation prefetch distance: how many blocks backward fetches in advance."""

    def __init__(
        self, blocks: int, limit_nbytes: int | None, begin: Callable[[], StallWindow]
    ) -> None:
        """Start with a distance of `blocks`.

        `limit_nbytes` is the device memory for prefetched activations; None: the distance is fixed.
        `begin` ends the running measurement of stall time, if any, and starts a new one.
        """
        self._limit_nbytes = limit_nbytes
        self._min_blocks = blocks
        windows = StallWindows(begin, DISTANCE_WINDOW_PASSES)
        self._controller = GrowthController(blocks, windows, DISTANCE_REQUIRED_RATIO)
        self._controller.settled = limit_nbytes is None

    @property
    def blocks(self) -> int:
        """Current prefetch distance, in blocks."""
        return self._controller.size

    def trim(self, block_nbytes: int) -> int:
        """Return to the distance of the start until `restore`; return the bytes of the difference.

        `block_nbytes` is the size of the largest block's activations.
        """
        raised = self.blocks - self._min_blocks
        self._controller.pause(self._min_blocks)
        return raised * block_nbytes

    def restore(self) -> None:
        """Let the distance grow again while backward waits."""
        self._controller.paused = False

    def training_pass(self, block_nbytes: int) -> str:
        """Handle the start of a training pass: raise the distance by one if a prefetch was late.

        `block_nbytes` is the size of the largest block's activations. Returns a description of the
        change for a notice, or an empty string.
        """
        max_blocks = (self._limit_nbytes or 0) // max(1, block_nbytes)
        window = self._controller.start_pass(
            max_blocks, lambda window: window.late > 0, extrapolate=False
        )
        if window is None:
            return ""
        if self._controller.settled:
            return f"lowered to {self.blocks} blocks: more did not help, the link is saturated"
        per_pass_ms = window.stalled_s / DISTANCE_WINDOW_PASSES * 1e3
        return f"raised to {self.blocks} blocks: backward waited {per_pass_ms:.1f} ms per pass"
