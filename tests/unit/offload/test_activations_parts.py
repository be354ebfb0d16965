"""Host memory that is cut and cut again, the distance, the mover's lanes, and shared inputs."""

import random
from itertools import pairwise

import pytest
import torch
from streamed_model import SaidLap
from torch import nn

from gracetune.offload.copies import POISON, CopyStream, SynchronousCopyEngine
from gracetune.offload.offloaded_tensors import (
    ALIGNMENT,
    WINDOW,
    Distance,
    HostPool,
    OffloadCopies,
    Remains,
    SharedInputs,
    bytes_of,
    has_one_owner,
    is_plain,
    storages_in,
    weights_of,
)
from gracetune.offload.stall_timer import Waits


class Counting(SynchronousCopyEngine):
    def __init__(self):
        super().__init__()
        self.slabs, self.gone = [], []

    def landing_memory(self, nbytes):
        self.slabs.append(nbytes)
        return super().landing_memory(nbytes)

    def let_go(self, memory):
        self.gone.append(len(memory))


def pool_of(slab_nbytes=4096, room_nbytes=1 << 20):
    mover = Counting()
    return HostPool(mover, slab_nbytes, lambda taken: room_nbytes - taken), mover


def test_buffers_are_cut_from_slabs_and_large_ones_have_their_own():
    pool, mover = pool_of()
    buffers = [pool.take(nbytes) for nbytes in (1000, 1000, 5000, 2000)]
    assert [len(buffer) for buffer in buffers] == [1000, 1000, 5000, 2000]
    assert mover.slabs == [4096, 5120]
    assert pool.nbytes == 4096 + 5120
    starts = [buffer.data_ptr() for buffer in buffers]
    assert starts[1] - starts[0] == 1024
    assert all((start - starts[0]) % ALIGNMENT == 0 for start in starts[:2])


def test_a_buffer_is_given_out_again_for_its_size_while_others_are_lent():
    pool, mover = pool_of()
    first, second = pool.take(1000), pool.take(1000)
    start = first.data_ptr()
    pool.put_back(first)
    assert pool.take(700).data_ptr() != start, "of another size"
    assert pool.take(1001).data_ptr() == start
    assert len(mover.slabs) == 1
    del second


def test_all_are_back_so_slabs_are_cut_anew():
    pool, mover = pool_of()
    for sizes in ([1000] * 4, [4000], [100] * 16, [3000, 1000]):
        buffers = [pool.take(nbytes) for nbytes in sizes]
        assert None not in buffers
        for buffer in buffers:
            pool.put_back(buffer)
    assert mover.slabs == [4096]


@pytest.mark.parametrize("seed", range(5))
def test_no_two_lent_buffers_overlap(seed):
    dice = random.Random(seed)
    pool, _ = pool_of(slab_nbytes=8192)
    lent = []
    for _ in range(300):
        if lent and dice.random() < 0.55:
            pool.put_back(lent.pop(dice.randrange(len(lent))))
        else:
            lent.append(pool.take(dice.choice([1, 256, 300, 1000, 5000, 9000])))
        spans = sorted((b.data_ptr(), b.data_ptr() + len(b)) for b in lent)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_a_host_without_room_gives_none_and_the_last_slab_is_no_larger_than_there_is_room():
    pool, mover = pool_of(room_nbytes=6000)
    assert pool.take(4000) is not None
    assert pool.take(1000) is not None
    assert mover.slabs == [4096, 6000 - 4096]
    assert pool.take(1000) is None


def test_a_closed_pool_gives_everything_up():
    pool, mover = pool_of()
    pool.take(1000)
    pool.take(5000)
    pool.close()
    assert mover.gone == mover.slabs
    assert pool.nbytes == 0


@pytest.mark.parametrize("poison", [False, True])
def test_memory_that_is_given_up_is_poisoned_unless_others_hold_it(poison):
    pool, mover = pool_of()
    transport = OffloadCopies(mover, pool, poison)
    host, device, held = pool.take(64), torch.zeros(16), torch.zeros(16)
    host.zero_()
    other = held.view(4, 4)
    arrival = mover.copy(device.view(torch.uint8), host, False, CopyStream.BACK)
    transport.left += [Remains(host, device, arrival)]
    transport.clear_up()
    assert bool((host == POISON).all()) == poison
    assert bool(device.isnan().all()) == poison
    transport._spoil(held)
    assert (other == 0).all()
    assert pool._lent == 0


def run(distance, waits, block_nbytes=10):
    """What is said after windows of so many late blocks and seconds."""
    said = []
    distance.observe(block_nbytes)
    for late, seconds in waits:
        if distance.laps:
            distance.laps[-1].late, distance.laps[-1].seconds = late, seconds
        for passed in range(WINDOW):
            text = distance.observe(block_nbytes)
            assert text == "" or passed == WINDOW - 1
        said.append(text)
    return said


def watched(ahead, limit_nbytes):
    """A distance, and the windows that it has begun."""

    def begin():
        laps.append(SaidLap())
        return laps[-1]

    laps = []
    distance = Distance(ahead, limit_nbytes, begin)
    distance.laps = laps
    return distance


def test_the_distance_grows_while_that_helps_and_goes_back_when_it_does_not():
    distance = watched(1, limit_nbytes=100)
    said = run(distance, [(9, 1.0), (5, 0.5), (5, 0.49), (5, 0.3), (9, 9.0)])
    assert [text.partition(":")[0] for text in said] == ["2", "3", "2 again", "", ""]
    assert "333.3 ms a pass" in said[0]
    assert distance.ahead == 2


def test_the_distance_stays_where_nobody_waits_or_there_is_no_room():
    distance = watched(1, limit_nbytes=100)
    assert run(distance, [(0, 1.0), (0, 5.0)]) == ["", ""]
    assert run(distance, [(5, 1.0)], block_nbytes=51) == [""]
    assert distance.ahead == 1
    fixed = watched(2, limit_nbytes=None)
    assert run(fixed, [(5, 1.0), (5, 1.0)]) == ["", ""]
    assert fixed.ahead == 2


def test_lanes_have_stopwatches_of_their_own():
    mover = SynchronousCopyEngine()
    one, other = mover.landing_memory(1 << 16), mover.host_memory(1 << 16)
    mover.copy(one, other, True, CopyStream.OUT).wait(ahead=True)
    assert mover.waits(CopyStream.OUT).seconds > 0
    assert mover.waits(CopyStream.BACK) == mover.waits() == Waits(0, 0.0)
    lap = mover.lap(CopyStream.OUT)
    mover.copy(one, other, True, CopyStream.OUT).wait(ahead=True)
    assert not lap.is_over()
    after = mover.lap(CopyStream.OUT)
    assert lap.is_over()
    assert 0 < lap.seconds < lap.span_s
    mover.lap(CopyStream.OUT)
    assert after.seconds == 0 < after.span_s
    mover.let_go(one)
    mover.release()


def test_the_first_block_of_a_pass_knows_what_the_second_had_from_the_pass_before():
    first, second = nn.Identity(), nn.Identity()
    shared = SharedInputs()
    found = []
    for _ in range(2):
        shared.begin()
        text, x, y = (torch.zeros(2) for _ in range(3))
        mine = storages_in(((x,), {"text": text}))
        theirs = storages_in(((text, y), {}))
        of_text = {mine[1].cdata}
        found.append((shared.of(first, mine) == of_text, shared.of(second, theirs) == of_text))
    assert found == [(False, True), (True, True)]


def test_a_storage_that_ended_is_not_taken_for_a_new_one():
    """Memory is given out again at once; what was an input before must not make it shared."""
    first, second = nn.Identity(), nn.Identity()
    shared = SharedInputs()
    for _ in range(50):
        shared.begin()
        x = torch.zeros(8)
        shared.of(first, storages_in(x))
        del x
        y = torch.zeros(8)
        assert shared.of(second, storages_in([y])) == frozenset()


def test_what_is_plain():
    device = torch.device("cpu")
    assert is_plain(torch.zeros(2), device)
    assert is_plain(nn.Parameter(torch.zeros(2)), device)
    assert not is_plain(torch.zeros(2, device="meta"), device)
    assert not is_plain(torch.eye(2).to_sparse(), device)
    assert not is_plain(torch.zeros(2, dtype=torch.complex64).conj(), device)
    assert not is_plain(torch.zeros(2).as_subclass(Special), device)


class Special(torch.Tensor):
    pass


def test_bytes_are_those_of_the_whole_storage_and_owners_are_counted():
    whole = torch.arange(6, dtype=torch.int16)
    part = whole[2:4]
    assert bytes_of(part).view(torch.int16).tolist() == list(range(6))
    assert bytes_of(part).data_ptr() == whole.data_ptr()
    alone = whole.detach()
    assert not has_one_owner(alone)
    del whole, part
    assert has_one_owner(alone)


def test_large_weights_and_buffers_of_a_block():
    block = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(4))
    block.register_buffer("table", torch.zeros(2048))
    block.register_parameter("none", None)
    expected = {t.untyped_storage()._cdata for t in (block[0].weight, block.table)}
    assert weights_of(block, 1024) == expected
