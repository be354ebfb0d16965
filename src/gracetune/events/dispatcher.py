"""Send the events of a run to every sink, and report the progress of long stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Self

from gracetune.errors import redact_urls
from gracetune.events.types import Event, Notice, RunEnded, StageProgress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from gracetune.events.types import Sink


class EventDispatcher:
    """Passes each event to every sink, one event at a time; thread-safe.

    A fallback notice (a slower method is used than requested) with the same text is passed on
    only once.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)
        # Re-entrant: a signal handler may emit while the interrupted thread is emitting.
        self._lock = RLock()
        self._fallbacks: dict[str, None] = {}
        self._closed = False

    def emit(self, event: Event) -> None:
        """Pass an event to all sinks, in the order in which they were given.

        Credentials in URLs are removed from notices and error messages.
        """
        if isinstance(event, Notice):
            event = replace(event, text=redact_urls(event.text))
        elif isinstance(event, RunEnded):
            event = replace(event, message=redact_urls(event.message))
        with self._lock:
            assert not self._closed, f"an event after the end of the run: {event}"
            if isinstance(event, Notice) and event.fallback:
                if event.text in self._fallbacks:
                    return
                self._fallbacks[event.text] = None
            for sink in self._sinks:
                sink.handle(event)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The texts of all notices so far that a slower method is used than requested, in order."""
        with self._lock:
            return tuple(self._fallbacks)

    def close(self) -> None:
        """Close every sink, even if closing one of them fails; a second call does nothing."""
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


Emit = Callable[[Event], None]
"""A function that takes an event, usually `EventDispatcher.emit`."""

INTERVAL_S = 0.1
"""The shortest time between two progress events of a stage."""


class ProgressReporter:
    """Counts finished items, such as encoded files, and emits `StageProgress` events.

    There are at most ten events per second; the last item is always reported.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        total_nbytes: int | None = None,
    ) -> None:
        """Start a stage of `total` items.

        With `total_nbytes`, which may be an estimate, events also contain bytes and seconds.
        """
        self._stage = stage
        self._total = total
        self._emit = emit
        self._clock = clock
        self._total_nbytes = total_nbytes
        self._done = 0
        self._nbytes = 0
        self._started_at = self._emitted_at = clock()

    def advance(self, count: int = 1, nbytes: int = 0) -> None:
        """Add finished items and their bytes, and emit the progress if it is time."""
        self._done += count
        self._nbytes += nbytes
        now = self._clock()
        if self._done == self._total or now - self._emitted_at >= INTERVAL_S:
            self._emitted_at = now
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
            seconds=now - self._started_at,
        )
