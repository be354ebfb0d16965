"""Streamed weights are selected and moved to host memory without a second copy of the model."""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.host_weights import (
    SMALL_WEIGHT_DIVISOR,
    load_resident_weights,
    move_to_host,
    select_streamed_weights,
)
from gracetune.offload.ring import stream_weights

NUM_BLOCKS = 4


def build_model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*blocks).requires_grad_(False)


class WatchingAllocator:
    """Allocates memory, and records how many original storages of the model are alive each time."""

    def __init__(self, model):
        self.originals = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
        self.alive, self.requested = [], []

    def __call__(self, nbytes):
        self.alive.append(sum(not storage.expired() for storage in self.originals))
        self.requested.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def test_the_old_memory_of_a_block_is_freed_before_the_next_block_is_moved():
    model = build_model()
    expected = [p.detach().clone() for p in model.parameters()]
    allocator = WatchingAllocator(model)
    memory = move_to_host(select_streamed_weights(model, list(model)), allocator)
    per_block = len(expected) // NUM_BLOCKS
    assert allocator.alive == [per_block * left for left in range(NUM_BLOCKS, 0, -1)]
    assert [len(block) for block in memory] == allocator.requested
    assert all(map(torch.equal, model.parameters(), expected))


def test_a_second_ring_replaces_the_memory_of_the_first_block_by_block():
    model = build_model()
    first = move_to_host(select_streamed_weights(model, list(model)), WatchingAllocator(model))
    first.clear()
    allocator = WatchingAllocator(model)
    move_to_host(select_streamed_weights(model, list(model)), allocator)
    assert allocator.alive == sorted(allocator.alive, reverse=True)
    assert allocator.alive[-1] == len(allocator.originals) // NUM_BLOCKS


def test_a_block_without_frozen_weights_allocates_nothing():
    model = build_model()
    model[1].requires_grad_(True)
    allocator = WatchingAllocator(model)
    memory = move_to_host(select_streamed_weights(model, list(model)), allocator)
    assert len(allocator.requested) == NUM_BLOCKS - 1
    assert len(memory[1]) == 0


def wide_block(bias=None):
    """Build a block whose bias is too small to stream."""
    linear = nn.Linear(2 * SMALL_WEIGHT_DIVISOR, 8)
    if bias is not None:
        linear.bias = bias
    return nn.Sequential(linear).requires_grad_(False)


def streamed_names(model):
    blocks = select_streamed_weights(model, list(model))
    return [[weight.name for weight in block.weights] for block in blocks]


def test_weights_that_are_small_in_their_block_stay_resident():
    model = nn.Sequential(wide_block(), wide_block())
    x = torch.randn(3, 2 * SMALL_WEIGHT_DIVISOR)
    assert streamed_names(model) == [["0.0.weight"], ["1.0.weight"]]
    expected = [block(x) for block in model]
    biases = [block[0].bias.data_ptr() for block in model]
    ring = stream_weights(model, list(model), SynchronousCopyEngine(), print)
    assert [block[0].bias.data_ptr() for block in model] == biases
    assert ring.counters().slot_nbytes == model[0][0].weight.nbytes
    model.forward = lambda x: [block(x) for block in model]
    assert all(map(torch.equal, model(x), expected))
    assert ring.counters().fetches == len(model)


def test_a_shared_weight_that_is_small_in_only_one_block_streams_in_both():
    narrow = nn.Sequential(nn.Linear(4, 8)).requires_grad_(False)
    model = nn.Sequential(wide_block(bias=narrow[0].bias), narrow)
    assert streamed_names(model) == [["0.0.weight", "0.0.bias"], ["1.0.weight", "1.0.bias"]]


def test_a_buffer_with_several_names_is_moved_once():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    shared = torch.zeros(3)
    for module, name in ((model[0], "a"), (model[0], "b"), (model[1], "c")):
        module.register_buffer(name, shared)
    load_resident_weights(model, [], torch.device("meta"))
    assert model[0].a.device.type == "meta"
    assert model[0].a is model[0].b
    assert model[0].a is model[1].c
