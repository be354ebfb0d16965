"""What computing waited for: in all, and from one moment to another.

The device is behind the host that queues its work. Waits are pairs of events on it, and are read
when it is through with them; nothing here waits for it but `catch_up`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

LATE_S = 20e-6
"""Two events in a row are some microseconds apart even when nothing is waited for."""
HARVEST_EVERY = 512


@dataclass(frozen=True, slots=True)
class Waits:
    """What computing waited for."""

    late: int
    """Copies asked for ahead of use that were not done in time."""
    seconds: float


class Lap(Protocol):
    """What computing waits for from one moment to another, however far the device is behind."""

    @property
    def late(self) -> int:
        """Copies asked for ahead of use that were not done in time."""
        ...

    @property
    def seconds(self) -> float:
        """Of waiting."""
        ...

    @property
    def span_s(self) -> float:
        """In which that was, from the first use to the last."""
        ...

    def is_over(self) -> bool:
        """Whether it has ended and the device is through with it; waits for nothing."""
        ...


class PlainLap:
    """A lap where the host does all work itself, and is never behind."""

    late = 0

    def __init__(self, now: float, seconds: float) -> None:
        self._began, self._before = now, seconds
        self._ended: tuple[float, float] | None = None

    def end(self, now: float, seconds: float) -> None:
        """So much was waited in all by now."""
        self._ended = now - self._began, seconds - self._before

    @property
    def seconds(self) -> float:
        """Of copying, since that is waited for."""
        return 0.0 if self._ended is None else self._ended[1]

    @property
    def span_s(self) -> float:
        """From its beginning to its end."""
        return 0.0 if self._ended is None else self._ended[0]

    def is_over(self) -> bool:
        """There is no device that is behind."""
        return self._ended is not None


class _Wait(NamedTuple):
    asked: torch.cuda.Event
    resumed: torch.cuda.Event
    ahead: bool
    lap: _DeviceLap | None

    def seconds(self) -> float:
        seconds = _seconds(self.asked, self.resumed)
        return seconds if seconds > LATE_S else 0.0

    def is_over(self) -> bool:
        return bool(self.resumed.query())  # type: ignore[no-untyped-call]


class StallTimer:
    """How long computing stood still for one lane, by pairs of events."""

    def __init__(self) -> None:
        self._waits: deque[_Wait] = deque()
        self._lap: _DeviceLap | None = None
        self._late = 0
        self._seconds = 0.0

    def begin_lap(self) -> _DeviceLap:
        """All that is noted from here on is of this one."""
        if self._lap is not None:
            self._lap.ended = True
        self._lap = _DeviceLap(self)
        return self._lap

    def note(self, asked: torch.cuda.Event, resumed: torch.cuda.Event, ahead: bool) -> None:
        """One wait, to be read when the device is through with it."""
        self._waits.append(_Wait(asked, resumed, ahead, self._lap))
        if self._lap is not None:
            self._lap.unread += 1
        if len(self._waits) % HARVEST_EVERY == 0:
            self.read()

    def catch_up(self) -> None:
        """Wait until the device is through with all of them."""
        if self._waits:
            self._waits[-1].resumed.synchronize()

    def read(self) -> Waits:
        """Add up those that are over."""
        while self._waits and self._waits[0].is_over():
            wait = self._waits.popleft()
            seconds = wait.seconds()
            self._late += seconds > 0 and wait.ahead
            self._seconds += seconds
            if wait.lap is not None:
                wait.lap.add(wait, seconds)
        return Waits(self._late, self._seconds)


class _DeviceLap:
    def __init__(self, stopwatch: StallTimer) -> None:
        self.late = 0
        self.seconds = 0.0
        self.span_s = 0.0
        self.unread = 0
        self.ended = False
        self._stopwatch = stopwatch
        self._first: torch.cuda.Event | None = None

    def add(self, wait: _Wait, seconds: float) -> None:
        """One of its waits is over, after so many seconds."""
        if self._first is None:
            self._first = wait.asked
        self.unread -= 1
        self.late += seconds > 0 and wait.ahead
        self.seconds += seconds
        self.span_s = _seconds(self._first, wait.resumed)

    def is_over(self) -> bool:
        """Reads what there is to read."""
        self._stopwatch.read()
        return self.ended and self.unread == 0


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3
