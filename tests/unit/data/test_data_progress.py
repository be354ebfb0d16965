from __future__ import annotations

from itertools import pairwise

from gracetune.events.dispatcher import ProgressReporter
from gracetune.events.types import Event, StageProgress


def test_tells_ten_times_a_second_and_at_the_end() -> None:
    now = 0.0
    events: list[Event] = []
    progress = ProgressReporter("staging", 1001, events.append, lambda: now)
    for _ in range(1001):
        now += 0.001
        progress.advance()
    counts = [event.done for event in events if isinstance(event, StageProgress)]
    assert len(counts) in (10, 11)
    assert counts[-1] == 1001
    assert all(later - earlier >= 99 for earlier, later in pairwise(counts[:-1]))


def test_a_slow_stage_tells_each_one() -> None:
    now = 0.0
    events: list[Event] = []
    progress = ProgressReporter("reading", 3, events.append, lambda: now)
    for _ in range(3):
        now += 5
        progress.advance()
    assert events == [StageProgress("reading", done, 3) for done in (1, 2, 3)]


def test_bytes_and_seconds_are_told_where_bytes_are_foretold() -> None:
    now = 100.0
    events: list[Event] = []
    progress = ProgressReporter("staging", 10, events.append, lambda: now, total_nbytes=1000)
    now += 2
    progress.advance(4, 500)
    now += 2
    progress.advance(6, 700)  # more than was foretold
    assert events == [
        StageProgress("staging", 4, 10, nbytes=500, total_nbytes=1000, seconds=2.0),
        StageProgress("staging", 10, 10, nbytes=1200, total_nbytes=1200, seconds=4.0),
    ]
