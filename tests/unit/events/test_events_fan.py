from threading import Thread

import pytest

from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.types import Event, Notice


class Ear:
    """Hears everything; notices when two threads talk at once."""

    def __init__(self, fails_to_close: bool = False) -> None:
        self.heard: list[Event] = []
        self.closed = 0
        self._busy = False
        self._fails_to_close = fails_to_close

    def handle(self, event: Event) -> None:
        assert not self._busy
        self._busy = True
        for _ in range(50):
            pass
        self.heard.append(event)
        self._busy = False

    def close(self) -> None:
        self.closed += 1
        if self._fails_to_close:
            raise OSError("disk full")


def test_every_sink_hears_every_event_in_order() -> None:
    ears = [Ear(), Ear()]
    events = [Notice("a"), Notice("a"), Notice("b", "warning")]
    with EventDispatcher(ears) as fan:
        for event in events:
            fan.emit(event)
    assert [ear.heard for ear in ears] == [events, events]
    assert [ear.closed for ear in ears] == [1, 1]


def test_a_fallback_is_told_once_and_counted() -> None:
    ear = Ear()
    fan = EventDispatcher([ear])
    for text in ("no cuda", "no lz4", "no cuda"):
        fan.emit(Notice(text, fallback=True))
    assert len(ear.heard) == 2
    assert fan.fallbacks == ("no cuda", "no lz4")


def test_threads_take_turns() -> None:
    ear = Ear()
    fan = EventDispatcher([ear])
    workers = [Thread(target=lambda: [fan.emit(Notice("x")) for _ in range(300)]) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(ear.heard) == 1200


def test_one_sink_that_fails_to_close_leaves_none_open() -> None:
    ears = [Ear(), Ear(fails_to_close=True), Ear()]
    fan = EventDispatcher(ears)
    with pytest.raises(OSError, match="disk full"):
        fan.close()
    fan.close()
    assert [ear.closed for ear in ears] == [1, 1, 1]


def test_nothing_is_told_after_the_end() -> None:
    fan = EventDispatcher([])
    fan.close()
    with pytest.raises(AssertionError, match="after the end"):
        fan.emit(Notice("late"))
