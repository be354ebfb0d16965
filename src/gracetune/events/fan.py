"""One place to tell events to, many that hear them."""

from __future__ import annotations

from contextlib import ExitStack
from threading import RLock
from typing import TYPE_CHECKING, Self

from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from gracetune.events.types import Event, Sink


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

    def tell(self, event: Event) -> None:
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
