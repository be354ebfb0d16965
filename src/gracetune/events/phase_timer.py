"""Measure how long the phases of a run's start take, for the event `start_timed`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gracetune.events.types import StartTimed

if TYPE_CHECKING:
    from collections.abc import Callable


class PhaseTimer:
    """A clock whose phases follow one another, so that their times add up to the whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the first phase."""
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._phase_began_at = clock()

    def end(self, phase: str) -> None:
        """Count the time since the last call as that of `phase`; a phase may have several parts."""
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._phase_began_at
        self._phase_began_at = now

    def event(self) -> StartTimed:
        """Return the seconds of the phases so far, as an event."""
        return StartTimed(dict(self._seconds), sum(self._seconds.values()))
