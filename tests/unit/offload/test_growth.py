"""A ring adds slots while it is waited for, keeps what helps, and gives back what does not."""

import random

import pytest
import torch
from streamed_model import SaidLap, assert_same, made, step, streamed
from test_ring_safety import LastMinute

from gracetune.offload import autosize
from gracetune.offload.autosize import WINDOW, RingAutosizer
from gracetune.offload.copies import SynchronousCopyEngine
from gracetune.offload.ring import Slots

NBYTES = 512


class Waited(SynchronousCopyEngine):
    """A link whose waits are said by hand; memory for so many slots more."""

    def __init__(self, room=100):
        super().__init__()
        self.laps = []
        self.room = room

    def lap(self, lane):
        self.laps.append(SaidLap(over=False))
        return self.laps[-1]

    def device_memory(self, nbytes):
        if self.room == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.room -= 1
        return super().device_memory(nbytes)


class Steps:
    """Passes of a second each, of which some part is waited for."""

    def __init__(self, told, most_slots=8, limit_nbytes=10 * NBYTES, room=100):
        self.mover = Waited(room)
        self.slots = Slots(self.mover, NBYTES, 3)
        self.growth = RingAutosizer(self.slots, self.mover, most_slots, limit_nbytes, told)
        self.growth.observe()

    def window(self, share, behind=0):
        """So many windows of passes are queued before the device is through with this one."""
        before, lap = len(self.slots), self.mover.laps[-1]
        for _ in range(WINDOW * (1 + behind) - 1):
            self.growth.observe()
            assert len(self.slots) == before
        lap.seconds, lap.span_s, lap.over = share * WINDOW, WINDOW, True
        self.growth.observe()
        return len(self.slots)


def test_as_many_slots_are_added_as_what_one_saves_asks_for(told):
    """One saves 0.06 of 0.25, so four more should end it. They leave a little: one more."""
    steps = Steps(told, most_slots=20, limit_nbytes=20 * NBYTES)
    assert [steps.window(share) for share in (0.25, 0.19, 0.02, 0.0, 0.0)] == [4, 8, 9, 9, 9]
    assert [text.partition(";")[0] for text in told.texts()] == [
        f"slots of the ring: {count} of 512 B" for count in (4, 8, 9)
    ]
    assert "waited 25.0% of their time" in told.texts()[0]


def test_slots_that_do_not_help_are_given_back_and_none_is_tried_again(told):
    steps = Steps(told)
    assert [steps.window(share) for share in (0.2, 0.15, 0.149, 0.5)] == [4, 7, 4, 4]
    assert "did not help" in told.texts()[-1]
    assert len(told.texts()) == 3


def test_what_is_decided_is_of_passes_that_the_device_is_through_with(told):
    """Each window has its own waits, however many passes were queued since."""
    steps = Steps(told)
    assert [steps.window(share, behind=3) for share in (0.25, 0.19, 0.0)] == [4, 8, 8]


def test_passes_that_sample_are_no_reason(told):
    """A validation waits more, between any two steps."""
    steps = Steps(told, most_slots=4)
    assert [steps.window(share) for share in (0.3, 0.2)] == [4, 4]
    steps.mover.laps[-1].seconds = 99.0
    for _ in range(WINDOW - 1):
        steps.growth.observe()
    steps.growth.sampling()
    steps.mover.laps[-1].over = True
    steps.growth.observe()
    assert [steps.window(share) for share in (0.2, 0.2, 0.3)] == [4, 4, 4]
    assert not [text for text in told.texts() if "given back" in text]


def test_nothing_happens_where_nothing_is_waited_for(told):
    steps = Steps(told)
    assert [steps.window(0.004) for _ in range(5)] == [3] * 5
    assert steps.window(0.1) == 4, "it is still looked at"


@pytest.mark.parametrize(("most", "limit", "reached"), [(5, 10 * NBYTES, 5), (8, NBYTES, 4)])
def test_there_are_never_more_than_blocks_nor_than_memory_allows(told, most, limit, reached):
    steps = Steps(told, most, limit)
    for share in (0.4, 0.3, 0.2, 0.1, 0.05):
        steps.window(share)
    assert len(steps.slots) == reached


def test_memory_that_others_took_meanwhile_ends_it(told):
    steps = Steps(told, room=4)
    assert [steps.window(share) for share in (0.3, 0.2, 0.1)] == [4, 4, 4]
    assert "there is no room for another" in told.texts()[-1]
    assert len(told.texts()) == 2


def test_what_was_added_can_be_taken_back_once(told):
    steps = Steps(told)
    steps.window(0.3)
    steps.window(0.2)
    assert steps.growth.give_back()
    assert len(steps.slots) == 3
    assert not steps.growth.give_back()
    assert steps.window(0.5) == 3, "memory was short: it is not tried again"


def test_an_unasked_ring_has_nothing_to_give_back(told):
    _, ring = streamed(made(), told)
    assert not ring.give_back()


@pytest.mark.parametrize("kind", [SynchronousCopyEngine, LastMinute])
def test_gradients_stay_the_same_while_slots_come_and_go(kind, told, monkeypatch):
    """Bit for bit, with memory of slots poisoned, whatever is decided between passes."""

    class Moody(kind):
        """Waits at random, so that every decision is taken at some time."""

        def lap(self, lane):
            return SaidLap(dice.random() ** 4)

    monkeypatch.setattr(autosize, "WINDOW", 1)
    dice = random.Random(1)
    model = made(num_blocks=7)
    twin, ring = streamed(model, told, slots=2, mover=Moody())
    sizes = set()
    for seed in range(40):
        if seed % 6 == 0:
            ring.give_back()
            ring.grow_within(dice.choice([1, 3, 99]) * ring.counters().slot_nbytes)
        assert_same(step(twin, seed), step(model, seed))
        sizes.add(ring.counters().slots)
    assert len(sizes) >= 3, sizes
    told_of = " ".join(told.texts())
    assert "did not help" in told_of
    assert "given back" in told_of
    counters = ring.counters()
    assert counters.surprises == counters.extra_slots == 0


def test_a_ring_with_room_for_all_fetches_no_more(told, monkeypatch):
    class Better(SynchronousCopyEngine):
        """A link that is waited for less and less."""

        laps = 0

        def lap(self, lane):
            self.laps += 1
            return SaidLap(0.9**self.laps)

    monkeypatch.setattr(autosize, "WINDOW", 1)
    model = made(num_blocks=5)
    twin, ring = streamed(model, told, slots=2, mover=Better())
    ring.grow_within(10**9)
    for seed in range(4):
        assert_same(step(twin, seed), step(model, seed))
    assert ring.counters().slots == 5
    fetches = ring.counters().fetches
    assert_same(step(twin, 7), step(model, 7))
    assert ring.counters().fetches == fetches
