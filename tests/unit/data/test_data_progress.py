from __future__ import annotations

from itertools import pairwise

from gracetune.events.dispatcher import ProgressReporter
from gracetune.events.types import Event, StageProgress


def test_progress_is_emitted_ten_times_a_second_and_at_the_end() -> None:
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


def test_a_slow_stage_emits_progress_for_every_item() -> None:
    now = 0.0
    events: list[Event] = []
    progress = ProgressReporter("reading", 3, events.append, lambda: now)
    for _ in range(3):
        now += 5
        progress.advance()
    assert events == [StageProgress("reading", done, 3) for done in (1, 2, 3)]


def test_progress_has_bytes_and_seconds_if_the_total_bytes_are_given() -> None:
    now = 100.0
    events: list[Event] = []
    progress = ProgressReporter("staging", 10, events.append, lambda: now, total_nbytes=1000)
    now += 2
    progress.advance(4, 500)
    now += 2
    progress.advance(6, 700)  # more than the expected total
    assert events == [
        StageProgress("staging", 4, 10, nbytes=500, total_nbytes=1000, seconds=2.0),
        StageProgress("staging", 10, 10, nbytes=1200, total_nbytes=1200, seconds=4.0),
    ]
