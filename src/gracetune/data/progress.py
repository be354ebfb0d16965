"""How a long pass over files tells where it is, without drowning whoever listens."""

from __future__ import annotations

import time
from collections.abc import Callable

from gracetune.events.types import Event, StageProgress

Tell = Callable[[Event], None]
"""Where events go; called from one thread."""

INTERVAL_S = 0.1


class Progress:
    """Counts what is done and tells it ten times a second at most, and always at the end."""

    def __init__(
        self, stage: str, total: int, tell: Tell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stage = stage
        self._total = total
        self._tell = tell
        self._clock = clock
        self._done = 0
        self._told_at = clock()

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        now = self._clock()
        if self._done == self._total or now - self._told_at >= INTERVAL_S:
            self._told_at = now
            self._tell(StageProgress(self._stage, self._done, self._total))
