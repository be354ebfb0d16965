"""Stalls are read once the device has passed them, and belong to the window of their record."""

from dataclasses import dataclass

import pytest
from streamed_model import FakeStallWindow

from gracetune.offload.copy_engine import CopyStream, SynchronousCopyEngine
from gracetune.offload.stall_timer import COLLECT_EVERY, StallTimer, StallTotals, StallWindows


@dataclass
class FakeEvent:
    """A CUDA event at a given time of a device whose clock the test sets."""

    ms: float
    clock: dict

    def query(self):
        return self.ms <= self.clock["ms"]

    def elapsed_time(self, other):
        assert self.query(), "read before the device has reached it"
        assert other.query(), "read before the device has reached it"
        return other.ms - self.ms

    def synchronize(self):
        self.clock["ms"] = max(self.clock["ms"], self.ms)


@pytest.fixture
def clock():
    return {"ms": 0.0}


@pytest.fixture
def record(clock):
    def record(timer, asked, resumed, prefetched=True):
        timer.record(FakeEvent(asked, clock), FakeEvent(resumed, clock), prefetched)

    return record


def test_totals_include_the_stalls_that_the_device_has_passed(clock, record):
    timer = StallTimer()
    record(timer, 1.0, 3.0)
    record(timer, 4.0, 4.01)
    record(timer, 5.0, 9.0, prefetched=False)
    assert timer.collect() == StallTotals(0, 0.0)
    clock["ms"] = 4.5
    assert timer.collect() == StallTotals(1, 0.002)
    timer.synchronize()
    assert clock["ms"] == 9.0
    assert timer.collect() == StallTotals(1, 0.006)


def test_a_window_has_its_own_stalls_however_late_they_are_read(clock, record):
    timer = StallTimer()
    record(timer, 1.0, 2.0)
    first = timer.begin_window()
    record(timer, 10.0, 14.0)
    record(timer, 20.0, 20.01)
    second = timer.begin_window()
    record(timer, 30.0, 31.0)
    clock["ms"] = 15.0
    assert not first.is_complete(), "the device has not reached its second use"
    clock["ms"] = 25.0
    assert first.is_complete()
    assert not second.is_complete()
    assert (first.late, first.stalled_s, first.span_s) == (1, 0.004, pytest.approx(0.01001))
    clock["ms"] = 40.0
    timer.begin_window()
    assert second.is_complete()
    assert (second.late, second.stalled_s, second.span_s) == (1, 0.001, 0.001)
    assert first.stalled_s == 0.004


def test_a_window_without_uses_is_complete_when_it_ends():
    timer = StallTimer()
    window = timer.begin_window()
    assert not window.is_complete()
    timer.begin_window()
    assert window.is_complete()
    assert window.stalled_s == window.span_s == 0


def test_recorded_waits_do_not_pile_up_if_nobody_reads_them(clock, record):
    timer = StallTimer()
    clock["ms"] = 1e9
    for number in range(3 * COLLECT_EVERY):
        record(timer, number, number + 1)
    assert len(timer._waits) < COLLECT_EVERY
    assert timer.collect().late == 3 * COLLECT_EVERY


def test_a_window_ends_after_its_passes_and_the_next_starts_once_it_was_read():
    started = []

    def begin():
        started.append(FakeStallWindow(complete=False))
        return started[-1]

    windows = StallWindows(begin, 2)
    assert [windows.start_pass() for _ in range(2)] == [None, None]
    assert len(started) == 1, "one pass of two"
    assert windows.start_pass() is None
    assert len(started) == 2, "the window has ended, but the device has not reached its end"
    assert [windows.start_pass() for _ in range(5)] == [None] * 5
    assert len(started) == 2, "passes queued meanwhile belong to no window"
    started[0].complete = True
    assert windows.start_pass() is started[0]
    assert len(started) == 3
    started[2].complete = True
    assert [windows.start_pass() for _ in range(2)] == [None, started[2]]


def test_the_synchronous_engine_times_each_copy_stream_separately():
    engine = SynchronousCopyEngine()
    target, source = engine.allocate_pinned(1 << 16), engine.allocate_host(1 << 16)
    engine.copy(target, source, True, CopyStream.ACTIVATIONS_OUT).wait(prefetched=True)
    assert engine.stalls(CopyStream.ACTIVATIONS_OUT).stalled_s > 0
    assert engine.stalls(CopyStream.ACTIVATIONS_IN) == engine.stalls() == StallTotals(0, 0.0)
    window = engine.begin_stall_window(CopyStream.ACTIVATIONS_OUT)
    engine.copy(target, source, True, CopyStream.ACTIVATIONS_OUT).wait(prefetched=True)
    assert not window.is_complete()
    after = engine.begin_stall_window(CopyStream.ACTIVATIONS_OUT)
    assert window.is_complete()
    assert 0 < window.stalled_s < window.span_s
    engine.begin_stall_window(CopyStream.ACTIVATIONS_OUT)
    assert after.stalled_s == 0 < after.span_s
    engine.free_host(target)
    engine.close()
