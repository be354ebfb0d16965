"""Slots and prefetched blocks are added while steps stall, and removed if that does not help."""

import random

import pytest
import torch
from streamed_model import FakeStallWindow, assert_same, build_model, step, streamed

from gracetune.offload import buffer_autosize
from gracetune.offload.buffer_autosize import (
    DISTANCE_WINDOW_PASSES,
    RING_WINDOW_PASSES,
    PrefetchDistance,
    RingAutosizer,
)
from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import SlotPool

NBYTES = 512


class FakeStallEngine(SynchronousCopyEngine):
    """An engine whose stall windows the test fills in, with memory for a number of slots."""

    def __init__(self, free_slots=100):
        super().__init__()
        self.windows = []
        self.free_slots = free_slots

    def begin_stall_window(self, stream):
        self.windows.append(FakeStallWindow(complete=False))
        return self.windows[-1]

    def allocate_device(self, nbytes):
        if self.free_slots == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.free_slots -= 1
        return super().allocate_device(nbytes)


class AutosizedRing:
    """Slots with an autosizer, and passes of one second of which a given share is stalled."""

    def __init__(self, recorder, max_slots=8, limit_nbytes=10 * NBYTES, free_slots=100):
        self.engine = FakeStallEngine(free_slots)
        self.slots = SlotPool(self.engine, NBYTES, 3)
        self.autosizer = RingAutosizer(self.slots, self.engine, max_slots, limit_nbytes, recorder)
        self.autosizer.training_pass()

    def run_window(self, stall_share, windows_queued=0):
        """Run a window; the device completes it `windows_queued` windows later."""
        before, window = len(self.slots), self.engine.windows[-1]
        for _ in range(RING_WINDOW_PASSES * (1 + windows_queued) - 1):
            self.autosizer.training_pass()
            assert len(self.slots) == before
        window.stalled_s, window.span_s = stall_share * RING_WINDOW_PASSES, RING_WINDOW_PASSES
        window.complete = True
        self.autosizer.training_pass()
        return len(self.slots)


def test_the_number_of_added_slots_is_extrapolated_from_what_the_first_one_saved(recorder):
    """One slot saves 0.06 of 0.25, so four more should end the stalls. A little is left."""
    ring = AutosizedRing(recorder, max_slots=20, limit_nbytes=20 * NBYTES)
    assert [ring.run_window(share) for share in (0.25, 0.19, 0.02, 0.0, 0.0)] == [4, 8, 9, 9, 9]
    assert [text.partition(";")[0] for text in recorder.texts()] == [
        f"weight ring: {count} slots of 512 B" for count in (4, 8, 9)
    ]
    assert "waited 25.0% of their time" in recorder.texts()[0]


def test_slots_that_do_not_help_are_removed_for_good(recorder):
    ring = AutosizedRing(recorder)
    assert [ring.run_window(share) for share in (0.2, 0.15, 0.149, 0.5)] == [4, 7, 4, 4]
    assert "did not help" in recorder.texts()[-1]
    assert len(recorder.texts()) == 3


def test_decisions_wait_until_the_device_has_completed_the_window(recorder):
    """Each window has its own stalls, however many passes were queued since."""
    ring = AutosizedRing(recorder)
    assert [ring.run_window(share, windows_queued=3) for share in (0.25, 0.19, 0.0)] == [4, 8, 8]


def test_a_window_with_a_sampling_pass_is_ignored(recorder):
    """Validation stalls more, and may run between any two steps."""
    ring = AutosizedRing(recorder, max_slots=4)
    assert [ring.run_window(share) for share in (0.3, 0.2)] == [4, 4]
    ring.engine.windows[-1].stalled_s = 99.0
    for _ in range(RING_WINDOW_PASSES - 1):
        ring.autosizer.training_pass()
    ring.autosizer.sampling_pass()
    ring.engine.windows[-1].complete = True
    ring.autosizer.training_pass()
    assert [ring.run_window(share) for share in (0.2, 0.2, 0.3)] == [4, 4, 4]
    assert not [text for text in recorder.texts() if "removed" in text]


def test_trimmed_slots_are_added_again_after_restoring(recorder):
    ring = AutosizedRing(recorder, max_slots=20, limit_nbytes=20 * NBYTES)
    assert [ring.run_window(share) for share in (0.25, 0.19)] == [4, 8]
    assert ring.autosizer.trim() == 5 * NBYTES
    assert len(ring.slots) == 3
    for _ in range(3 * RING_WINDOW_PASSES):
        ring.autosizer.training_pass()
    assert (len(ring.slots), ring.autosizer.trim()) == (3, 0)
    ring.autosizer.restore()
    ring.autosizer.training_pass()
    assert [ring.run_window(share) for share in (0.25, 0.19)] == [4, 8]


def test_negligible_stalls_add_no_slots(recorder):
    ring = AutosizedRing(recorder)
    assert [ring.run_window(0.004) for _ in range(5)] == [3] * 5
    assert ring.run_window(0.1) == 4, "it still watches"


@pytest.mark.parametrize(("max_slots", "limit", "reached"), [(5, 10 * NBYTES, 5), (8, NBYTES, 4)])
def test_slots_are_limited_by_the_number_of_blocks_and_by_memory(
    recorder, max_slots, limit, reached
):
    ring = AutosizedRing(recorder, max_slots, limit)
    for share in (0.4, 0.3, 0.2, 0.1, 0.05):
        ring.run_window(share)
    assert len(ring.slots) == reached


def test_running_out_of_memory_ends_the_growth(recorder):
    ring = AutosizedRing(recorder, free_slots=4)
    assert [ring.run_window(share) for share in (0.3, 0.2, 0.1)] == [4, 4, 4]
    assert "there is no device memory for another" in recorder.texts()[-1]
    assert len(recorder.texts()) == 2


def test_added_slots_can_be_released_once(recorder):
    ring = AutosizedRing(recorder)
    ring.run_window(0.3)
    ring.run_window(0.2)
    assert ring.autosizer.release_extra_slots()
    assert len(ring.slots) == 3
    assert not ring.autosizer.release_extra_slots()
    assert ring.run_window(0.5) == 3, "memory was short, so it does not grow again"


def test_a_ring_without_autosizing_has_no_extra_slots(recorder):
    _, ring = streamed(build_model(), recorder)
    assert not ring.release_extra_slots()


def test_gradients_do_not_depend_on_the_number_of_slots(recorder, monkeypatch):
    """Bit for bit, with poisoned slots, whatever is decided between passes."""

    class RandomStallEngine(SynchronousCopyEngine):
        """Random stalls, so that every decision is made at some point."""

        def begin_stall_window(self, stream):
            return FakeStallWindow(rng.random() ** 4)

    monkeypatch.setattr(buffer_autosize, "RING_WINDOW_PASSES", 1)
    rng = random.Random(1)
    model = build_model(num_blocks=7)
    twin, ring = streamed(model, recorder, slots=2, copy_engine=RandomStallEngine())
    sizes = set()
    for seed in range(40):
        if seed % 6 == 0:
            ring.release_extra_slots()
            ring.enable_autosize(rng.choice([1, 3, 99]) * ring.counters().slot_nbytes)
        assert_same(step(twin, seed), step(model, seed))
        sizes.add(ring.counters().slots)
    assert len(sizes) >= 3, sizes
    notices = " ".join(recorder.texts())
    assert "did not help" in notices
    assert "the added slots were removed" in notices
    counters = ring.counters()
    assert counters.order_mismatches == counters.extra_slots == 0


def test_a_ring_with_a_slot_for_every_block_fetches_nothing_more(recorder, monkeypatch):
    class ImprovingEngine(SynchronousCopyEngine):
        """Stalls that shrink with every window."""

        windows = 0

        def begin_stall_window(self, stream):
            self.windows += 1
            return FakeStallWindow(0.9**self.windows)

    monkeypatch.setattr(buffer_autosize, "RING_WINDOW_PASSES", 1)
    model = build_model(num_blocks=5)
    twin, ring = streamed(model, recorder, slots=2, copy_engine=ImprovingEngine())
    ring.enable_autosize(10**9)
    for seed in range(4):
        assert_same(step(twin, seed), step(model, seed))
    assert ring.counters().slots == 5
    fetches = ring.counters().fetches
    assert_same(step(twin, 7), step(model, 7))
    assert ring.counters().fetches == fetches


class WatchedDistance:
    """A prefetch distance, and the stall windows that it has started."""

    def __init__(self, blocks, limit_nbytes):
        self.windows = []
        self.distance = PrefetchDistance(blocks, limit_nbytes, self.begin)

    def begin(self):
        self.windows.append(FakeStallWindow())
        return self.windows[-1]

    def run(self, stalls, block_nbytes=10):
        """Run one window for each (late copies, stalled seconds); return what was reported."""
        reports = []
        self.distance.training_pass(block_nbytes)
        for late, stalled_s in stalls:
            if self.windows:
                self.windows[-1].late, self.windows[-1].stalled_s = late, stalled_s
            for passed in range(DISTANCE_WINDOW_PASSES):
                report = self.distance.training_pass(block_nbytes)
                assert report == "" or passed == DISTANCE_WINDOW_PASSES - 1
            reports.append(report)
        return reports


def test_the_prefetch_distance_grows_while_that_helps_and_then_goes_back():
    watched = WatchedDistance(1, limit_nbytes=100)
    reports = watched.run([(9, 1.0), (5, 0.5), (5, 0.49), (5, 0.3), (9, 9.0)])
    assert [text.partition(":")[0] for text in reports] == [
        "raised to 2 blocks",
        "raised to 3 blocks",
        "lowered to 2 blocks",
        "",
        "",
    ]
    assert "333.3 ms per pass" in reports[0]
    assert watched.distance.blocks == 2


def test_the_prefetch_distance_stays_if_nothing_is_late_or_memory_is_used_up():
    watched = WatchedDistance(1, limit_nbytes=100)
    assert watched.run([(0, 1.0), (0, 5.0)]) == ["", ""]
    assert watched.run([(5, 1.0)], block_nbytes=51) == [""]
    assert watched.distance.blocks == 1
    fixed = WatchedDistance(2, limit_nbytes=None)
    assert fixed.run([(5, 1.0), (5, 1.0)]) == ["", ""]
    assert fixed.distance.blocks == 2


def test_a_trimmed_distance_grows_again_after_restoring():
    tuned = WatchedDistance(1, 100)
    tuned.run([(3, 9.0), (3, 5.0)])
    raised = tuned.distance.blocks
    assert raised > 1
    assert tuned.distance.trim(10) == (raised - 1) * 10
    tuned.run([(3, 9.0), (3, 5.0)])
    assert tuned.distance.blocks == 1
    tuned.distance.restore()
    tuned.run([(3, 9.0), (3, 5.0)])
    assert tuned.distance.blocks > 1
