from threading import Thread

import pytest

from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.types import Event, Notice


class RecordingSink:
    """Keeps every event, and asserts that `handle` is never called twice at the same time."""

    def __init__(self, fails_to_close: bool = False) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self._busy = False
        self._fails_to_close = fails_to_close

    def handle(self, event: Event) -> None:
        assert not self._busy
        self._busy = True
        for _ in range(50):
            pass
        self.events.append(event)
        self._busy = False

    def close(self) -> None:
        self.closed += 1
        if self._fails_to_close:
            raise OSError("disk full")


def test_every_sink_receives_every_event_in_order() -> None:
    sinks = [RecordingSink(), RecordingSink()]
    events = [Notice("a"), Notice("a"), Notice("b", "warning")]
    with EventDispatcher(sinks) as dispatcher:
        for event in events:
            dispatcher.emit(event)
    assert [sink.events for sink in sinks] == [events, events]
    assert [sink.closed for sink in sinks] == [1, 1]


def test_a_repeated_fallback_is_emitted_once() -> None:
    sink = RecordingSink()
    dispatcher = EventDispatcher([sink])
    for text in ("no cuda", "no lz4", "no cuda"):
        dispatcher.emit(Notice(text, fallback=True))
    assert len(sink.events) == 2
    assert dispatcher.fallbacks == ("no cuda", "no lz4")


def test_events_of_several_threads_do_not_overlap() -> None:
    sink = RecordingSink()
    dispatcher = EventDispatcher([sink])
    workers = [
        Thread(target=lambda: [dispatcher.emit(Notice("x")) for _ in range(300)]) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(sink.events) == 1200


def test_all_sinks_are_closed_even_if_one_fails_to_close() -> None:
    sinks = [RecordingSink(), RecordingSink(fails_to_close=True), RecordingSink()]
    dispatcher = EventDispatcher(sinks)
    with pytest.raises(OSError, match="disk full"):
        dispatcher.close()
    dispatcher.close()
    assert [sink.closed for sink in sinks] == [1, 1, 1]


def test_no_event_is_accepted_after_closing() -> None:
    dispatcher = EventDispatcher([])
    dispatcher.close()
    with pytest.raises(AssertionError, match="after the end"):
        dispatcher.emit(Notice("late"))
