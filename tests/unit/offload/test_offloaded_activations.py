"""Host buffers, released memory, shared inputs, and helpers for storages."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from gracetune.offload.copy_engine import ALIGNMENT, POISON, CopyStream, SynchronousCopyEngine
from gracetune.offload.offloaded_activations import (
    HostBufferPool,
    OffloadCopies,
    ReleasedStorage,
    SharedInputs,
    is_plain_tensor,
    is_sole_owner,
    large_weight_storages,
    storage_bytes,
    storages_in,
)


class CountingEngine(SynchronousCopyEngine):
    def __init__(self):
        super().__init__()
        self.allocated, self.freed = [], []

    def allocate_pinned(self, nbytes):
        self.allocated.append(nbytes)
        return super().allocate_pinned(nbytes)

    def free_host(self, memory):
        self.freed.append(len(memory))


def build_pool(slab_nbytes=4096, limit_nbytes=1 << 20):
    copy_engine = CountingEngine()
    return HostBufferPool(copy_engine, slab_nbytes, lambda used: limit_nbytes - used), copy_engine


def test_buffers_are_cut_from_slabs_and_large_ones_get_their_own():
    pool, copy_engine = build_pool()
    buffers = [pool.take(nbytes) for nbytes in (1000, 1000, 5000, 2000)]
    assert [len(buffer) for buffer in buffers] == [1000, 1000, 5000, 2000]
    assert copy_engine.allocated == [4096, 5120]
    assert pool.nbytes == 4096 + 5120
    starts = [buffer.data_ptr() for buffer in buffers]
    assert starts[1] - starts[0] == 1024
    assert all((start - starts[0]) % ALIGNMENT == 0 for start in starts[:2])


def test_a_returned_buffer_is_reused_for_the_same_size():
    pool, copy_engine = build_pool()
    first, second = pool.take(1000), pool.take(1000)
    start = first.data_ptr()
    pool.put_back(first)
    assert pool.take(700).data_ptr() != start, "another size"
    assert pool.take(1001).data_ptr() == start
    assert len(copy_engine.allocated) == 1
    del second


def test_slabs_are_cut_again_once_all_buffers_are_back():
    pool, copy_engine = build_pool()
    for sizes in ([1000] * 4, [4000], [100] * 16, [3000, 1000]):
        buffers = [pool.take(nbytes) for nbytes in sizes]
        assert None not in buffers
        for buffer in buffers:
            pool.put_back(buffer)
    assert copy_engine.allocated == [4096]


def test_slabs_are_no_larger_than_what_the_engine_may_allocate():
    """In managed memory, a whole slab may exceed the cap although the buffer fits."""
    pool, copy_engine = build_pool()
    copy_engine.pinned_room = 3000
    assert len(pool.take(1000)) == 1000
    copy_engine.pinned_room = 0
    pool.take(5000)  # the engine decides, and names its limit
    assert copy_engine.allocated == [3000, 5120]


@pytest.mark.parametrize("seed", range(5))
def test_taken_buffers_never_overlap(seed):
    rng = random.Random(seed)
    pool, _ = build_pool(slab_nbytes=8192)
    taken = []
    for _ in range(300):
        if taken and rng.random() < 0.55:
            pool.put_back(taken.pop(rng.randrange(len(taken))))
        else:
            taken.append(pool.take(rng.choice([1, 256, 300, 1000, 5000, 9000])))
        spans = sorted((b.data_ptr(), b.data_ptr() + len(b)) for b in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_take_returns_none_at_the_limit_and_the_last_slab_fits_it():
    pool, copy_engine = build_pool(limit_nbytes=6000)
    assert pool.take(4000) is not None
    assert pool.take(1000) is not None
    assert copy_engine.allocated == [4096, 6000 - 4096]
    assert pool.take(1000) is None


def test_closing_the_pool_frees_all_slabs():
    pool, copy_engine = build_pool()
    pool.take(1000)
    pool.take(5000)
    pool.close()
    assert copy_engine.freed == copy_engine.allocated
    assert pool.nbytes == 0


@pytest.mark.parametrize("poison", [False, True])
def test_released_memory_is_poisoned_unless_another_tensor_uses_it(poison):
    pool, copy_engine = build_pool()
    copies = OffloadCopies(copy_engine, pool, poison)
    host, device, held = pool.take(64), torch.zeros(16), torch.zeros(16)
    host.zero_()
    other = held.view(4, 4)
    pending_copy = copy_engine.copy(
        device.view(torch.uint8), host, False, CopyStream.ACTIVATIONS_IN
    )
    copies.released += [ReleasedStorage(host, device, pending_copy)]
    copies.reclaim_host_buffers()
    assert bool((host == POISON).all()) == poison
    assert bool(device.isnan().all()) == poison
    copies._poison_released(held)
    assert (other == 0).all()
    assert pool._num_taken == 0


def test_the_first_block_learns_its_shared_inputs_from_the_previous_pass():
    first, second = nn.Identity(), nn.Identity()
    shared = SharedInputs()
    found = []
    for _ in range(2):
        shared.begin_pass()
        text, x, y = (torch.zeros(2) for _ in range(3))
        first_inputs = storages_in(((x,), {"text": text}))
        second_inputs = storages_in(((text, y), {}))
        text_storage = {first_inputs[1].cdata}
        found.append(
            (
                shared.find(first, first_inputs) == text_storage,
                shared.find(second, second_inputs) == text_storage,
            )
        )
    assert found == [(False, True), (True, True)]


def test_a_freed_storage_is_not_mistaken_for_a_new_one():
    """The allocator reuses memory at once, so addresses alone do not identify storages."""
    first, second = nn.Identity(), nn.Identity()
    shared = SharedInputs()
    for _ in range(50):
        shared.begin_pass()
        x = torch.zeros(8)
        shared.find(first, storages_in(x))
        del x
        y = torch.zeros(8)
        assert shared.find(second, storages_in([y])) == frozenset()


def test_plain_tensors_are_recognized():
    device = torch.device("cpu")
    assert is_plain_tensor(torch.zeros(2), device)
    assert is_plain_tensor(nn.Parameter(torch.zeros(2)), device)
    assert not is_plain_tensor(torch.zeros(2, device="meta"), device)
    assert not is_plain_tensor(torch.eye(2).to_sparse(), device)
    assert not is_plain_tensor(torch.zeros(2, dtype=torch.complex64).conj(), device)
    assert not is_plain_tensor(torch.zeros(2).as_subclass(Subclass), device)


class Subclass(torch.Tensor):
    pass


def test_storage_bytes_covers_the_whole_storage_and_owners_are_counted():
    whole = torch.arange(6, dtype=torch.int16)
    part = whole[2:4]
    assert storage_bytes(part).view(torch.int16).tolist() == list(range(6))
    assert storage_bytes(part).data_ptr() == whole.data_ptr()
    alias = whole.detach()
    assert not is_sole_owner(alias)
    del whole, part
    assert is_sole_owner(alias)


def test_large_weights_and_buffers_of_a_block():
    block = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(4))
    block.register_buffer("table", torch.zeros(2048))
    block.register_parameter("none", None)
    expected = {t.untyped_storage()._cdata for t in (block[0].weight, block.table)}
    assert large_weight_storages(block, 1024) == expected
