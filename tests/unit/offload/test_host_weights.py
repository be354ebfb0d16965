"""Streamed weights are selected and moved to host memory without a second copy of the model."""

from mmap import PAGESIZE
from types import SimpleNamespace

import pytest
import torch
from fakes.recorded_cuda import RecordedCopyEngine, record_cuda
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.distributed.ranks import SINGLE
from gracetune.offload.copy_engine import CudaCopyEngine, SynchronousCopyEngine
from gracetune.offload.host_weights import (
    SMALL_WEIGHT_DIVISOR,
    _different_weight,
    _have_equal_bytes,
    load_resident_weights,
    map_shared_memory,
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


@pytest.mark.parametrize("pin", [True, False])
def test_memory_of_the_caller_is_pinned_until_the_engine_is_closed(pin, monkeypatch):
    calls = []
    with record_cuda() as cuda:
        runtime = SimpleNamespace(
            cudaHostRegister=lambda *call: calls.append(call) or 0,
            cudaHostUnregister=lambda address: calls.append((address,)) or 0,
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        (memory,) = map_shared_memory([3 * PAGESIZE + 5], SINGLE, print)
        engine = RecordedCopyEngine(cuda, pin=pin)
        engine.adopt_host(memory)
        address = memory.data_ptr()
        engine.close()
    assert calls == ([(address, 3 * PAGESIZE + 5, 0), (address,)] if pin else [])


def test_bits_are_compared_whatever_the_shape_type_and_alignment():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for shape in ((), (3,), (2, 3), (0,), (8, 8)):
            stored = torch.zeros(65, dtype=dtype).view(dtype)
            for offset in (0, 1):
                first = stored.as_strided(shape, torch.empty(shape).stride(), offset)
                other = torch.zeros(shape, dtype=dtype)
                assert _have_equal_bytes(first, other)
                if other.numel():
                    other.reshape(-1).view(torch.uint8)[-1] ^= 0x80  # -0 equals 0, but not in bits
                    assert not _have_equal_bytes(first, other)


def test_weights_of_any_layout_are_compared():
    conv = nn.Conv2d(4, 4, 3, bias=False).to(memory_format=torch.channels_last)
    sliced = nn.Linear(4, 4, bias=False)
    sliced.weight = nn.Parameter(torch.randn(8, 8)[::2, ::2])
    model = nn.Sequential(conv, sliced).requires_grad_(False)
    blocks = select_streamed_weights(model, list(model))
    for block, weight in zip(blocks, (conv.weight, sliced.weight), strict=True):
        memory = torch.zeros(block.nbytes, dtype=torch.uint8)
        block.weights[0].view(memory.view(torch.float32)).copy_(weight)
        assert _different_weight(block, memory) == ""
        memory[17] ^= 1
        assert _different_weight(block, memory) == block.weights[0].name


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


def test_pages_exist_before_they_are_pinned(monkeypatch):
    """The driver would create them one after the other; torch creates them in several threads."""
    pinned = []

    def register(_, pages):
        pinned.append(pages.tolist())

    monkeypatch.setattr(CudaCopyEngine, "_register", register)
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: torch.full(size, 7, **kind))
    with record_cuda() as cuda:
        RecordedCopyEngine(cuda).allocate_pinned(5)
    assert pinned == [[0] * PAGESIZE]
