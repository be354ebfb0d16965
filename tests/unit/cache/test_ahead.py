import threading
import time
from contextlib import contextmanager

import pytest
import torch

from gracetune.cache.batch_transfer import PrefetchDepth, InlineBatches, PrefetchedBatches, batch_nbytes
from gracetune.data.loader import LoaderState
from gracetune.data.sample import Batch
from gracetune.errors import DataError


class Road:
    """A lane that knows what is on it; nothing really moves."""

    def __init__(self):
        self.sent_batches = 0
        self.received = []
        self.worker = None

    @contextmanager
    def active(self):
        self.worker = threading.current_thread()
        yield
        self.worker = None

    def record_arrival(self):
        assert threading.current_thread() is self.worker
        self.sent_batches += 1
        return self.sent_batches

    def wait_for(self, batch, arrival):
        assert threading.current_thread() is not self.worker
        self.received.append(arrival)


def batch(number):
    return Batch(torch.full((2, 4), float(number)), {"t": torch.zeros(2, 2)}, ())


def numbered(count, wait_s=0.0, seen=None):
    for number in range(count):
        time.sleep(wait_s)
        if seen is not None:
            seen.append(number)
        yield batch(number), LoaderState(number + 1)


def wait_until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_batches_come_in_order_each_with_its_own_state():
    road = Road()
    ahead = PrefetchedBatches(numbered(5), road, PrefetchDepth(3, None))
    assert iter(ahead) is ahead
    taken = list(ahead)
    assert [b.latents[0, 0].item() for b, _ in taken] == [0, 1, 2, 3, 4]
    assert [state.consumed for _, state in taken] == [1, 2, 3, 4, 5]
    assert road.received == [1, 2, 3, 4, 5]
    ahead.close()


def test_the_state_is_that_of_the_batch_taken_not_of_those_brought():
    seen = []
    ahead = PrefetchedBatches(numbered(100, seen=seen), Road(), PrefetchDepth(4, None))
    _, state = next(ahead)
    wait_until(lambda: len(seen) == 5)
    time.sleep(0.02)
    assert len(seen) == 5  # one taken, four ahead, no more
    assert state.consumed == 1
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "gracetune-prefetch"]


def test_a_number_stays_as_it_is_however_long_steps_wait():
    ahead = PrefetchedBatches(numbered(6, wait_s=0.01), Road(), PrefetchDepth(1, None))
    assert len(list(ahead)) == 6
    assert ahead.depth.batches == 1
    assert ahead.counts.waits == 6
    ahead.close()


def test_auto_deepens_while_steps_wait_within_its_budget():
    one = batch_nbytes(batch(0))
    assert one == 2 * 4 * 4 + 2 * 2 * 4
    ahead = PrefetchedBatches(numbered(12, wait_s=0.005), Road(), PrefetchDepth(2, 5 * one))
    assert len(list(ahead)) == 12
    assert ahead.depth.batches == 5
    ahead.close()


def test_auto_does_not_deepen_where_nobody_waits():
    seen = []
    ahead = PrefetchedBatches(numbered(8, seen=seen), Road(), PrefetchDepth(2, 2**30))
    for taken in range(8):
        wait_until(lambda taken=taken: len(seen) >= min(8, taken + 2))
        time.sleep(0.002)
        next(ahead)
    assert ahead.depth.batches == 2
    assert ahead.counts.waits == 0
    assert ahead.counts.waited_s == 0
    assert ahead.counts.hidden_s == ahead.counts.busy_s > 0
    ahead.close()


def test_waiting_is_counted_and_not_hidden():
    ahead = PrefetchedBatches(numbered(4, wait_s=0.02), Road(), PrefetchDepth(1, None))
    list(ahead)
    counts = ahead.counts
    assert counts.batches == 4
    assert counts.waited_s > 0.06
    assert counts.hidden_s < counts.busy_s / 2
    ahead.close()


def test_an_error_reaches_the_step_after_the_batches_before_it():
    def failing():
        yield from numbered(2)
        raise DataError("a picture is gone")

    ahead = PrefetchedBatches(failing(), Road(), PrefetchDepth(4, None))
    assert [next(ahead)[1].consumed, next(ahead)[1].consumed] == [1, 2]
    with pytest.raises(DataError, match="a picture is gone"):
        next(ahead)
    ahead.close()


def test_without_a_way_to_go_there_is_no_thread():
    before = threading.active_count()
    inline = InlineBatches(numbered(3))
    assert next(inline)[1].consumed == 1
    assert threading.active_count() == before
    assert (inline.counts.batches, inline.counts.waits, inline.depth.batches) == (1, 0, 0)
    inline.close()
