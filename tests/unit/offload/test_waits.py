"""Waits are read when the device is through with them, each for the lap that it was noted in."""

from dataclasses import dataclass

import pytest

from gracetune.offload.stall_timer import HARVEST_EVERY, StallTimer


@dataclass
class Moment:
    """An event at some millisecond of a device, which is as far as it says."""

    ms: float
    now: dict

    def query(self):
        return self.ms <= self.now["ms"]

    def elapsed_time(self, other):
        assert self.query(), "read before it has come to pass"
        assert other.query(), "read before it has come to pass"
        return other.ms - self.ms

    def synchronize(self):
        self.now["ms"] = max(self.now["ms"], self.ms)


@pytest.fixture
def now():
    return {"ms": 0.0}


@pytest.fixture
def note(now):
    def note(stopwatch, asked, resumed, ahead=True):
        stopwatch.note(Moment(asked, now), Moment(resumed, now), ahead)

    return note


def test_what_was_waited_is_known_as_far_as_the_device_has_got(now, note):
    stopwatch = StallTimer()
    note(stopwatch, 1.0, 3.0)
    note(stopwatch, 4.0, 4.01)
    note(stopwatch, 5.0, 9.0, ahead=False)
    assert (stopwatch.read().late, stopwatch.read().seconds) == (0, 0.0)
    now["ms"] = 4.5
    assert (stopwatch.read().late, stopwatch.read().seconds) == (1, 0.002)
    stopwatch.catch_up()
    assert now["ms"] == 9.0
    assert (stopwatch.read().late, stopwatch.read().seconds) == (1, 0.006)


def test_a_lap_has_its_own_waits_however_late_they_are_read(now, note):
    stopwatch = StallTimer()
    note(stopwatch, 1.0, 2.0)
    first = stopwatch.begin_lap()
    note(stopwatch, 10.0, 14.0)
    note(stopwatch, 20.0, 20.01)
    second = stopwatch.begin_lap()
    note(stopwatch, 30.0, 31.0)
    now["ms"] = 15.0
    assert not first.is_over(), "the device has not come to its second use"
    now["ms"] = 25.0
    assert first.is_over()
    assert not second.is_over()
    assert (first.late, first.seconds, first.span_s) == (1, 0.004, pytest.approx(0.01001))
    now["ms"] = 40.0
    stopwatch.begin_lap()
    assert second.is_over()
    assert (second.late, second.seconds, second.span_s) == (1, 0.001, 0.001)
    assert first.seconds == 0.004


def test_a_lap_without_a_use_is_over_when_it_has_ended():
    stopwatch = StallTimer()
    lap = stopwatch.begin_lap()
    assert not lap.is_over()
    stopwatch.begin_lap()
    assert lap.is_over()
    assert lap.seconds == lap.span_s == 0


def test_waits_do_not_pile_up_where_nobody_reads_them(now, note):
    stopwatch = StallTimer()
    now["ms"] = 1e9
    for number in range(3 * HARVEST_EVERY):
        note(stopwatch, number, number + 1)
    assert len(stopwatch._waits) < HARVEST_EVERY
    assert stopwatch.read().late == 3 * HARVEST_EVERY
