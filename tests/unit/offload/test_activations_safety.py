"""Device memory is freed in time, and in-place changes of offloaded tensors are refused.

That memory is not read or freed while a copy uses it is tested in `test_interleavings.py`.
"""

import gc
from functools import partial

import pytest
import torch
from offloaded_model import MIN_NBYTES, offloaded
from streamed_model import assert_same, build_model, step
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.offload.activations import MAX_OUTGOING_CALLS, offload_activations
from gracetune.offload.checkpointing import wrap_blocks
from gracetune.offload.copy_engine import POISON, CopyStream, OffloadError, SynchronousCopyEngine


class WatchingEngine(SynchronousCopyEngine):
    """Records what is sent and fetched, and how much of it is still on the device."""

    def __init__(self):
        super().__init__()
        self.sent, self.fetched = [], []

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        poisoning = source.storage_offset() != 0 or (source == POISON).all()
        if stream is CopyStream.ACTIVATIONS_OUT and not poisoning:
            self.sent.append((StorageWeakRef(source.untyped_storage()), len(source)))
        elif stream is CopyStream.ACTIVATIONS_IN:
            self.fetched.append((StorageWeakRef(target.untyped_storage()), len(target)))
        return super().copy(target, source, poison, stream)

    def device_nbytes(self):
        return sum(n for ref, n in self.sent + self.fetched if not ref.expired())


@pytest.mark.parametrize("prefetch_blocks", [1, 2])
def test_device_memory_is_limited_to_outgoing_and_prefetched_blocks(prefetch_blocks, recorder):
    copy_engine = WatchingEngine()
    twin, offload = offloaded(
        build_model(num_blocks=8),
        recorder,
        copy_engine=copy_engine,
        prefetch_blocks=prefetch_blocks,
    )
    forward, backward = [], []
    for block in twin.blocks:
        block.register_forward_hook(lambda *_: forward.append(copy_engine.device_nbytes()))
        block.a.register_hook(lambda _: backward.append(copy_engine.device_nbytes()))
    step(twin, 0)
    block_nbytes = offload._policy.block_nbytes
    hidden_nbytes = 2 * 5 * 12 * 4
    limit = MAX_OUTGOING_CALLS * block_nbytes + hidden_nbytes  # the output is the next input
    assert max(forward) <= limit
    assert min(forward[2:]) > (MAX_OUTGOING_CALLS - 1) * block_nbytes
    assert max(backward[2:]) <= (1 + prefetch_blocks) * block_nbytes + hidden_nbytes
    gc.collect()
    assert copy_engine.device_nbytes() == 0, "nothing is kept between steps"
    assert offload.counters().on_demand == 0


@pytest.mark.parametrize("recomputed_by", ["policy", "checkpoint"])
@pytest.mark.parametrize("named", [True, False])
def test_device_memory_of_offloaded_inputs_is_freed(recomputed_by, named, recorder):
    """Nothing that recomputes a block may keep its inputs alive in another way."""
    model, copy_engine = build_model(num_blocks=8), WatchingEngine()
    blocks = list(model.blocks)
    if recomputed_by == "policy":
        wrap_blocks(blocks, ["recompute"] * 8, None)
        offload = offload_activations(blocks, copy_engine, None, recorder, MIN_NBYTES)
    else:
        offload = offload_activations(
            [], copy_engine, None, recorder, MIN_NBYTES, other_blocks=blocks
        )
    x = torch.randn(2, 5, 12, requires_grad=True) * 1
    input_nbytes, alive = x.numel() * x.element_size(), []
    for block in blocks:
        arguments = ((), {"x": x, "shift": 0.1}) if named else ((x, 0.1), {})
        call = block if recomputed_by == "policy" else partial(offload.checkpoint, block)
        x = call(*arguments[0], **arguments[1])
        del arguments
        alive.append(copy_engine.device_nbytes())
    assert offload.counters().sent == 8
    assert max(alive) <= MAX_OUTGOING_CALLS * input_nbytes
    x.sum().backward()
    assert offload.counters().fetched_nbytes == (8 - MAX_OUTGOING_CALLS) * input_nbytes


def test_other_blocks_show_how_far_a_pass_has_come(recorder):
    """Otherwise the last offloaded blocks would stay on the device until backward."""
    copy_engine = WatchingEngine()
    twin, offload = offloaded(build_model(num_blocks=8), recorder, [0, 1, 2], copy_engine)
    forward = []
    twin.blocks[6].register_forward_hook(lambda *_: forward.append(copy_engine.device_nbytes()))
    for seed in range(2):
        step(twin, seed)
    assert forward == [0, 0]
    assert offload.counters().on_demand == 0
    assert offload.counters().fetched_nbytes == offload.counters().sent_nbytes


def test_a_block_is_fetched_when_backward_reaches_the_next_one(recorder):
    copy_engine = WatchingEngine()
    twin, _ = offloaded(build_model(num_blocks=6), recorder, copy_engine=copy_engine)
    fetched = []
    for index, block in enumerate(twin.blocks):
        block.b.register_hook(
            lambda _, index=index: fetched.append((index, len(copy_engine.fetched)))
        )
    step(twin, 0)
    counts = dict(fetched)
    assert counts[5] == 0, "the last blocks are still on the device"
    steps = [counts[k] - counts[k + 1] for k in range(4, -1, -1)]
    assert steps[0] > 0, "block 3 is fetched with block 4"
    assert steps[-1] == 0, "nothing is left to fetch at block 0"


@pytest.mark.parametrize("when", [2, 3])
def test_an_in_place_change_is_refused_as_autograd_does(when, recorder):
    """In the tensor's own block, or in the next one while it is copied out."""
    model = build_model()
    twin, _ = offloaded(model, recorder)
    modify_input_of_norm(model, when)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, 0)
    hooks = modify_input_of_norm(twin, when)
    with pytest.raises(OffloadError, match=r"tensor of shape \(2, 5, 12\) .* changed in place"):
        step(twin, 0)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert_same(step(twin, 1), step(build_model(), 1))


def test_an_in_place_change_after_the_copy_is_harmless(recorder):
    model = build_model()
    twin, _ = offloaded(model, recorder)
    modify_input_of_norm(twin, when=4)
    assert_same(step(twin, 0), step(model, 0))


def modify_input_of_norm(model, when):
    kept = []

    def change(module, args, output):
        with torch.no_grad():
            kept.pop().add_(1)

    return [
        model.blocks[2].norm.register_forward_hook(lambda m, args, _: kept.append(args[0])),
        model.blocks[when].mix.register_forward_hook(change),
    ]
