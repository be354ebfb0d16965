"""Phases of a start follow one another and add up to the whole."""

from gracetune.events.phase_timer import PhaseTimer
from gracetune.events.types import StartTimed


def test_phases_add_up_and_may_have_several_parts():
    times = iter([100.0, 101.0, 103.0, 110.0])
    timer = PhaseTimer(lambda: next(times))
    for phase in ("loading", "hashing", "loading"):
        timer.end(phase)
    assert timer.event() == StartTimed({"loading": 8.0, "hashing": 2.0}, 10.0)
