"""One place to tell events to, many that hear them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Self

from gracetune.events.types import Event, Notice, StageProgress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from gracetune.events.types import Sink


class EventDispatcher:
    """Hands each event to every sink, one at a time, from whichever thread it comes.

    A fallback is told once, however often it is taken and by however many workers.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)
        # Re-entrant, because a signal handler may tell something while its own thread is telling.
        self._lock = RLock()
        self._fallbacks: dict[str, None] = {}
        self._closed = False

    def emit(self, event: Event) -> None:
        """Give the event to all sinks, in the order they were named."""
        with self._lock:
            assert not self._closed, f"told after the end of the run: {event}"
            if isinstance(event, Notice) and event.fallback:
                if event.text in self._fallbacks:
                    return
                self._fallbacks[event.text] = None
            for sink in self._sinks:
                sink.handle(event)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What is done in a lesser way than asked for, in the order it was told."""
        with self._lock:
            return tuple(self._fallbacks)

    def close(self) -> None:
        """Close every sink, also when one of them fails to; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with ExitStack() as stack:
                for sink in reversed(self._sinks):
                    stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


# ------------------------------------------------------------------------------------------
# How a long pass over files tells where it is, without drowning whoever listens.


Emit = Callable[[Event], None]
"""Where events go; called from one thread."""

INTERVAL_S = 0.1


class ProgressReporter:
    """Counts what is done and tells it ten times a second at most, and always at the end."""

    def __init__(
        self,
        stage: str,
        total: int,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        total_nbytes: int | None = None,
    ) -> None:
        """With `total_nbytes`, an estimate, the pace in bytes is told too."""
        self._stage = stage
        self._total = total
        self._emit = emit
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
            self._emit(self._event(now))

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
