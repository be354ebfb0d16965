"""How a long pass over files tells where it is, without drowning whoever listens."""

from __future__ import annotations

import time
from collections.abc import Callable

from gracetune.events.types import Event, StageProgress

Tell = Callable[[Event], None]
"""Where events go; called from one thread."""

INTERVAL_S = 0.1


class ProgressReporter:
    """Counts what is done and tells it ten times a second at most, and always at the end."""

    def __init__(
        self,
        stage: str,
        total: int,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
        total_nbytes: int | None = None,
    ) -> None:
        """With `total_nbytes`, an estimate, the pace in bytes is told too."""
        self._stage = stage
        self._total = total
        self._tell = tell
        self._clock = clock
        self._total_nbytes = total_nbytes
        self._done = 0
        self._nbytes = 0
        self._began_at = self._told_at = clock()

    def advance(self, count: int = 1, nbytes: int = 0) -> None:
        """So many more are done."""
        self._done += count
        self._nbytes += nbytes
        now = self._clock()
        if self._done == self._total or now - self._told_at >= INTERVAL_S:
            self._told_at = now
            self._tell(self._event(now))

    def _event(self, now: float) -> StageProgress:
        if self._total_nbytes is None:
            return StageProgress(self._stage, self._done, self._total)
        return StageProgress(
            self._stage,
            self._done,
            self._total,
            nbytes=self._nbytes,
            total_nbytes=max(self._total_nbytes, self._nbytes),
            seconds=now - self._began_at,
        )
