"""Measure how long compute waits for copies (stalls), in total and per window of passes.

On CUDA the host queues work far ahead of the device, so a stall is recorded as a pair of events and
read only after the device has passed them. Nothing here blocks the host except
`StallTimer.synchronize`.

A window collects the stalls that the host recorded while the window was open, no matter when the
device reaches them. `StallWindows` cuts training into windows of a few passes; the controllers in
`offload/buffer_autosize.py` decide from one window at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

MIN_STALL_S = 20e-6
"""Waits shorter than this many seconds count as none: two consecutive CUDA events are a few
microseconds apart anyway."""
COLLECT_EVERY = 512
"""After this many recorded waits, the times of finished waits are read, so that the queue stays
short."""


@dataclass(frozen=True, slots=True)
class StallTotals:
    """Stall time and number of late copies of one copy stream since it was created."""

    late: int
    """Number of prefetched copies that had not finished when they were needed."""
    stalled_s: float
    """Seconds that compute waited for copies."""


class StallWindow(Protocol):
    """Time that compute waited for one copy stream in a few consecutive training passes."""

    @property
    def late(self) -> int:
        """Number of prefetched copies that had not finished when they were needed."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds that compute waited for copies."""
        ...

    @property
    def span_s(self) -> float:
        """Seconds from the first recorded wait for a copy in this window to the end of the last."""
        ...

    def is_complete(self) -> bool:
        """Return True once the window has ended and the device has passed its last wait.

        Does not block.
        """
        ...


class StallWindows:
    """Measure stalls in consecutive windows of a fixed number of training passes.

    A decision made from a window changes the stalls of passes queued later. The passes that are
    already queued when a window ends therefore belong to no window, and the next window starts only
    when the last one has been read:

        host    | window 1: n passes | passes in no window | window 2 ...
        device            | window 1: n passes | ...
                                               ^ complete: start_pass() returns window 1
    """

    def __init__(self, begin: Callable[[], StallWindow], num_passes: int) -> None:
        """`begin` ends the current `StallWindow`, if any, and returns a new one."""
        self._begin = begin
        self._num_passes = num_passes
        self._window: StallWindow | None = None
        self._passes = 0

    def discard(self) -> None:
        """Drop the current window, because sampling ran between its training passes."""
        self._window, self._passes = None, 0

    def start_pass(self) -> StallWindow | None:
        """Count a training pass that starts now.

        Returns the last stall window once the device has completed it, else None.
        """
        if self._window is None:
            self._window = self._begin()
            return None
        self._passes += 1
        if self._passes == self._num_passes:
            self._begin()  # ends the window; later passes are not part of it
        if self._passes < self._num_passes or not self._window.is_complete():
            return None
        window, self._window, self._passes = self._window, self._begin(), 0
        return window


class HostStallWindow:
    """Stall window for copies that the host makes itself, timed with the host's clock.

    It is complete as soon as it ends.
    """

    late = 0

    def __init__(self, now: float, stalled_s: float) -> None:
        """Start the window at the time `now`.

        `stalled_s` is the total time, until then, that compute has waited for copies (stalled).
        """
        self._began, self._stalled_before = now, stalled_s
        self._measured: tuple[float, float] | None = None

    def end(self, now: float, stalled_s: float) -> None:
        """End the window at the time `now`; `stalled_s` is the total stall time by then."""
        self._measured = now - self._began, stalled_s - self._stalled_before

    @property
    def stalled_s(self) -> float:
        """Seconds spent on copies in this window. Compute waits for all of them."""
        return 0.0 if self._measured is None else self._measured[1]

    @property
    def span_s(self) -> float:
        """Seconds from the start of the window to its end."""
        return 0.0 if self._measured is None else self._measured[0]

    def is_complete(self) -> bool:
        """Return True once the window has ended."""
        return self._measured is not None


class StallTimer:
    """Add up the time that the compute stream waits for one copy stream."""

    def __init__(self) -> None:
        self._waits: deque[_Wait] = deque()
        self._window: DeviceStallWindow | None = None
        self._late = 0
        self._stalled_s = 0.0

    def begin_window(self) -> DeviceStallWindow:
        """End the current stall window and return a new one, to which later waits are added."""
        if self._window is not None:
            self._window.ended = True
        self._window = DeviceStallWindow(self)
        return self._window

    def record(self, asked: torch.cuda.Event, resumed: torch.cuda.Event, prefetched: bool) -> None:
        """Add a wait of the compute stream, given by CUDA events just before and just after it.

        `prefetched`: the copy had been requested before it was needed.
        """
        self._waits.append(_Wait(asked, resumed, prefetched, self._window))
        if self._window is not None:
            self._window.unread += 1
        if len(self._waits) % COLLECT_EVERY == 0:
            self.collect()

    def synchronize(self) -> None:
        """Block the host until the device has passed every recorded wait."""
        if self._waits:
            self._waits[-1].resumed.synchronize()

    def collect(self) -> StallTotals:
        """Add up the waits that the device has finished, and return the totals so far."""
        while self._waits and self._waits[0].is_past():
            wait = self._waits.popleft()
            stalled_s = wait.stalled_s()
            self._late += stalled_s > 0 and wait.prefetched
            self._stalled_s += stalled_s
            if wait.window is not None:
                wait.window.add(wait, stalled_s)
        return StallTotals(self._late, self._stalled_s)


class DeviceStallWindow:
    """Stall window measured with CUDA events. Its `StallTimer` adds each wait that has finished."""

    def __init__(self, timer: StallTimer) -> None:
        self.late = 0
        self.stalled_s = 0.0
        self.span_s = 0.0
        self.unread = 0
        """Number of recorded waits whose length is not known yet, because the device may not be
        done."""
        self.ended = False
        self._timer = timer
        self._first: torch.cuda.Event | None = None

    def add(self, wait: _Wait, stalled_s: float) -> None:
        """Add a wait that the device has finished; `stalled_s` is its length in seconds."""
        if self._first is None:
            self._first = wait.asked
        self.unread -= 1
        self.late += stalled_s > 0 and wait.prefetched
        self.stalled_s += stalled_s
        self.span_s = _elapsed_s(self._first, wait.resumed)

    def is_complete(self) -> bool:
        """Return True if the window has ended and the lengths of all its waits are known.

        First reads the waits that the device has finished; does not block.
        """
        self._timer.collect()
        return self.ended and self.unread == 0


class _Wait(NamedTuple):
    asked: torch.cuda.Event
    resumed: torch.cuda.Event
    prefetched: bool
    window: DeviceStallWindow | None

    def stalled_s(self) -> float:
        seconds = _elapsed_s(self.asked, self.resumed)
        return seconds if seconds > MIN_STALL_S else 0.0

    def is_past(self) -> bool:
        return bool(self.resumed.query())  # type: ignore[no-untyped-call]


def _elapsed_s(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3
