"""Selection of offloaded tensors, counters and notices, and use of host memory."""

import gc

import pytest
import torch
from offloaded_model import MixedModel, offloaded
from streamed_model import FakeStallWindow, assert_same, build_model, step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.offload.activations import offload_activations
from gracetune.offload.copy_engine import CopyStream, OffloadError, SynchronousCopyEngine
from gracetune.offload.offloaded_activations import available_host_nbytes

KIB = 1024


class RecordingEngine(SynchronousCopyEngine):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        if stream is CopyStream.ACTIVATIONS_OUT:
            self.sizes.append(len(source))
        return super().copy(target, source, poison, stream)


class Chain(nn.Module):
    """Blocks that each call a function, with inputs that all of them share."""

    def __init__(self, *functions):
        super().__init__()
        self.blocks = nn.ModuleList(Step(function) for function in functions)

    def forward(self, x, *shared, **named):
        for block in self.blocks:
            x = block(x, *shared, **named)
        return x


class Step(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((256, 1), 0.5), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def offloaded_sizes(recorder, *functions, inputs=(), named=None, passes=1, **extra):
    """Return the sizes that a chain offloads in each pass, and the counters."""
    copy_engine = RecordingEngine()
    model = Chain(*functions)
    offload = offload_activations(list(model.blocks), copy_engine, None, recorder, KIB, **extra)
    sizes = []
    for _ in range(passes):
        copy_engine.sizes.clear()
        x = torch.randn(256, 4)
        out = model(x, *inputs, **(named or {}))
        sizes.append(list(copy_engine.sizes))
        out.sum().backward()
        del out
    return sizes, offload.counters()


STORAGE_NBYTES = 256 * 4 * 4


def test_a_storage_saved_as_several_views_is_copied_once(recorder):
    def twice(block, x):
        q = x * block.gain
        return (q * q.view(4, 256).t().exp()).sin() + q.t().reshape(256, 4)

    sizes, _ = offloaded_sizes(recorder, twice)
    assert sizes[0].count(STORAGE_NBYTES) == len(sizes[0])
    resident = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: resident.append(t) or t, lambda t: t):
        Chain(twice)(torch.randn(256, 4))
    large = [t for t in resident if t.untyped_storage().nbytes() >= KIB]
    assert len(sizes[0]) == len({t.untyped_storage()._cdata for t in large}) < len(large)


def test_a_storage_is_offloaded_only_if_nearly_all_of_it_was_saved(recorder):
    def all_parts(block, x):
        joint = (x * block.gain).repeat(1, 3)
        q, k, v = joint.chunk(3, dim=1)
        return q.sin() + k.sin() * v

    def one_part(block, x):
        joint = (x * block.gain).repeat(1, 3)
        return joint.chunk(3, dim=1)[1].sin()

    (sizes,), counters = offloaded_sizes(recorder, all_parts)
    assert sizes.count(3 * STORAGE_NBYTES) == 1
    assert counters.unsupported == 0
    (sizes,), counters = offloaded_sizes(recorder, one_part)
    assert 3 * STORAGE_NBYTES not in sizes
    assert counters.unsupported == 1


def test_tensors_that_stay_are_freed_with_their_graph(recorder):
    storages = []

    def one_part(block, x):
        joint = (x * block.gain).repeat(1, 3)
        storages.append(StorageWeakRef(joint.untyped_storage()))
        return joint.chunk(3, dim=1)[1].sin()

    offloaded_sizes(recorder, one_part, one_part, passes=2)
    assert all(storage.expired() for storage in storages)


def test_inputs_shared_by_blocks_stay_on_the_device(recorder):
    def use(block, x, rotary, text):
        return (x * block.gain * rotary[0] * rotary[1]).sin() + text * block.gain

    rotary, text = (torch.randn(256, 4), torch.randn(256, 4)), torch.randn(256, 4)
    sizes, counters = offloaded_sizes(
        recorder, use, use, use, inputs=(rotary,), named={"text": text}, passes=3
    )
    per_block = len(sizes[1]) // 3
    assert len(sizes[1]) == len(sizes[2]) == 3 * per_block, "the first block has learnt it too"
    assert len(sizes[0]) == 3 * per_block + 3, (
        "nothing is known about the first block of the first pass"
    )
    assert counters.shared == 3 * 3 * 3 - 3


def test_weights_stay_on_the_device(recorder):
    def weigh(block, x):
        return (x * block.gain) @ block.big * block.weight

    def trained(block, x):
        block.weight.requires_grad_(True)
        return x * block.weight

    model = Chain(weigh, trained)
    for block in model.blocks:
        block.weight = nn.Parameter(torch.randn(256, 4), requires_grad=False)
        block.register_buffer("big", torch.randn(4, 4).repeat(32, 32)[:4, :4].contiguous())
    copy_engine = RecordingEngine()
    offload = offload_activations(list(model.blocks), copy_engine, None, recorder, KIB)
    model(torch.randn(256, 4)).sum().backward()
    assert offload.counters().shared == 2
    assert copy_engine.sizes == [STORAGE_NBYTES, STORAGE_NBYTES], (
        "the factor of the weight and the second block's input"
    )


def test_small_sparse_and_conjugate_tensors_stay_on_the_device(recorder):
    def small(block, x):
        return x + (x[:2].clone() * block.gain).exp().sum()

    (sizes,), counters = offloaded_sizes(recorder, small)
    assert sizes == []
    assert counters.too_small > 0

    def conjugate(block, x):
        z = torch.view_as_complex((x * block.gain).view(256, 2, 2)).conj()
        return torch.view_as_real(z * z).reshape(256, 4)

    _, counters = offloaded_sizes(recorder, conjugate)
    assert counters.unsupported > 0

    def sparse(block, x):
        return torch.sparse.mm(torch.eye(256).to_sparse(), x * block.gain)

    _, counters = offloaded_sizes(recorder, sparse)
    assert counters.unsupported == 1


def test_integers_and_masks_are_offloaded_too(recorder):
    def pick(block, x):
        order = torch.arange(1024).flip(0).view(256, 4) % 256
        return (x * block.gain).gather(0, order).masked_fill(order > 9, 0.0)

    (sizes,), _ = offloaded_sizes(recorder, pick)
    assert sorted(sizes) == [KIB, STORAGE_NBYTES, STORAGE_NBYTES, 2 * STORAGE_NBYTES], (
        "including a mask and the indices"
    )


@pytest.mark.parametrize("mode", ["inputs", "inside"])
def test_only_the_input_of_a_recomputed_block_is_offloaded(mode, recorder):
    mixed = MixedModel(build_model(num_blocks=4), [mode] * 4, [], recorder)
    step(mixed.model, 0)
    counters = mixed.offload.counters()
    assert counters.sent == 4
    assert counters.sent_nbytes == 4 * 2 * 5 * 12 * 4
    assert counters.on_demand == 0


def test_other_tensors_saved_by_a_checkpointed_block_stay_on_the_device(recorder):
    """The compiler may choose to save more than the inputs of a checkpointed block."""

    def wave(block, x):
        return (x * block.gain).sin()

    model, copy_engine = Chain(wave, wave), RecordingEngine()
    offload = offload_activations(
        [], copy_engine, None, recorder, KIB, checkpointed_blocks=list(model.blocks)
    )
    model(torch.randn(256, 4)).sum().backward()
    assert copy_engine.sizes == [STORAGE_NBYTES, STORAGE_NBYTES]
    assert offload.counters().unsupported == 2


def test_the_offload_counters_are_consistent(recorder):
    twin, offload = offloaded(build_model(), recorder)
    step(twin, 0)
    before = offload.counters()
    for seed in range(3):
        step(twin, seed)
    after = offload.counters()
    assert after.sent == 4 * before.sent
    assert after.sent_nbytes == 4 * before.sent_nbytes
    assert after.fetched_nbytes == 4 * before.fetched_nbytes
    kept_at_the_turn = before.sent_nbytes - before.fetched_nbytes
    assert kept_at_the_turn * 3 == before.sent_nbytes, (
        "2 of 6 blocks are still on the device when backward starts"
    )
    assert after.host_nbytes == before.host_nbytes
    assert after.stalled_s > before.stalled_s > 0, "synchronous copies are always waited for"
    assert after.late == after.on_demand == 0
    assert after.too_small > 0
    assert after.shared > 0
    assert recorder.texts() == ["offloaded activations use 256.0 MiB of host memory."]


def test_host_buffers_are_returned_whatever_happens_to_the_graph(recorder):
    twin, offload = offloaded(build_model(), recorder)
    pool = offload._pool

    def fail(module, args, output):
        raise ArithmeticError("raised by user code")

    twin(torch.randn(2, 5, 4))  # a graph that is never used
    kept = twin(torch.randn(2, 5, 4)).square().mean()
    hook = twin.blocks[3].down.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        twin(torch.randn(2, 5, 4))
    hook.remove()
    kept.backward()
    del kept
    gc.collect()
    offload._copies.reclaim_host_buffers()
    assert pool._num_taken == 0
    assert set(pool._used_nbytes) == {0}, "all slabs are free again"


def test_smaller_batches_reuse_the_memory_of_the_largest(recorder, monkeypatch):
    monkeypatch.setattr("gracetune.offload.activations.SLAB_NBYTES", 4 * KIB)
    model = build_model()
    twin, offload = offloaded(model, recorder)
    for rows in (4, 2, 3, 4, 1, 3):
        for each in (twin, model):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(rows)
            each(torch.randn(rows, 5, 4)).square().mean().backward()
        assert torch.equal(twin.blocks[0].a.grad, model.blocks[0].a.grad)
    assert len(recorder.texts()) == 1, recorder.texts()
    each(torch.randn(9, 5, 4)).square().mean().backward()
    twin(torch.randn(9, 5, 4)).square().mean().backward()
    assert len(recorder.texts()) == 2
    assert "(was " in recorder.texts()[1]
    assert offload.counters().host_nbytes > 0


def test_a_full_host_is_an_error_with_the_memory_needed(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder, host_nbytes=8 * KIB)
    with pytest.raises(OffloadError) as caught:
        step(twin, 0)
    message = str(caught.value)
    need = 6 * offload._policy.block_nbytes
    assert f"need about {need / KIB:.1f} KiB of host memory" in message
    assert "but only 0 B are available besides the 8.0 KiB in use" in message
    assert "Offload fewer blocks" in message
    gc.collect()
    offload.close()
    assert_same(step(twin, 0), step(model, 0))


def test_without_a_limit_the_host_memory_is_the_limit(recorder):
    _, offload = offloaded(build_model(), recorder)
    assert available_host_nbytes(100, 30) == 70
    assert 0 < offload._pool.available_nbytes() < 2**44


class LateEngine(SynchronousCopyEngine):
    """Prefetched copies are late, by less in each window."""

    windows = 0

    def begin_stall_window(self, stream):
        assert stream is CopyStream.ACTIVATIONS_IN
        self.windows += 1
        return FakeStallWindow(0.8**self.windows, late=1)


def test_the_prefetch_distance_grows_within_its_budget_with_a_notice(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder, copy_engine=LateEngine(), prefetch_nbytes=10 * KIB)
    for seed in range(10):
        assert_same(step(twin, seed), step(model, seed))
    block_nbytes = offload._policy.block_nbytes
    assert offload.counters().prefetch_blocks == 10 * KIB // block_nbytes > 1
    changes = [text for text in recorder.texts() if "prefetch distance" in text]
    assert changes[0].startswith("activation prefetch distance raised to 2 blocks: backward waited")


def test_keyword_inputs_are_offloaded_too(recorder):
    def mix(block, x, *, text):
        return (x * block.gain).sin() * text

    model, copy_engine = Chain(mix), RecordingEngine()
    offload = offload_activations(
        [], copy_engine, None, recorder, KIB, other_blocks=list(model.blocks)
    )
    x, text = torch.randn(256, 4, requires_grad=True), torch.randn(256, 4)
    out = offload.checkpoint(model.blocks[0], text=text, x=x * 2)
    assert copy_engine.sizes == [STORAGE_NBYTES, STORAGE_NBYTES]
    out.sum().backward()
    grad, x.grad = x.grad, None
    model(x * 2, text=text).sum().backward()
    assert torch.equal(x.grad, grad)


def test_a_block_is_fetched_again_for_every_backward(recorder):
    """Its device memory is released after it was read."""
    model = build_model(num_blocks=2)
    twin, offload = offloaded(model, recorder, [0])
    results = []
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        hidden = each.blocks[0](torch.randn(2, 5, 12))
        each.blocks[1](torch.randn(2, 5, 12))
        each.blocks[1](torch.randn(2, 5, 12))
        loss = hidden.square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        results.append(([loss.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(*results)
    counters = offload.counters()
    assert counters.fetched_nbytes == 3 * counters.sent_nbytes
    assert counters.on_demand == 3 * counters.sent
