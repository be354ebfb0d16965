"""Errors of the activation offload, close(), and blocks that fail, are interrupted or nested."""

import copy
import gc

import pytest
import torch
from offloaded_model import MIN_NBYTES, offloaded
from streamed_model import assert_same, build_model, step
from torch import nn

from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.copy_engine import OffloadError, SynchronousCopyEngine
from gracetune.offload.ring import stream_weights


def test_backward_after_closing_the_offload_is_refused(recorder):
    twin, offload = offloaded(build_model(), recorder)
    loss = twin(torch.randn(2, 5, 4)).square().mean()
    offload.close()
    offload.close()
    with pytest.raises(OffloadError, match="host memory was freed"):
        loss.backward()


def test_close_removes_hooks_and_frees_host_memory(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder)
    step(twin, 0)
    offload.close()
    for module in twin.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert offload.counters().host_nbytes == 0
    assert_same(step(twin, 1), step(model, 1))
    copy.deepcopy(twin)


def test_close_inside_a_block_removes_all_hooks(recorder):
    twin, offload = offloaded(build_model(), recorder)
    handle = twin.blocks[2].down.register_forward_pre_hook(lambda module, args: offload.close())
    assert twin(torch.randn(1, 5, 4)).mean().isfinite()
    handle.remove()
    step(twin, 0)


def test_the_ring_keeps_working_after_the_offload_is_closed(recorder):
    model = build_model()
    twin = copy.deepcopy(model)
    copy_engine = SynchronousCopyEngine()
    stream_weights(twin, list(twin.blocks), copy_engine, recorder, 2, poison=True)
    offload = offload_activations(list(twin.blocks), copy_engine, None, recorder, MIN_NBYTES)
    assert_same(step(twin, 0), step(model, 0))
    offload.close()
    assert_same(step(twin, 1), step(model, 1))


def test_copying_an_offloaded_model_is_refused(recorder):
    twin, _ = offloaded(build_model(), recorder)
    with pytest.raises(OffloadError, match="cannot be copied while its activations are offloaded"):
        copy.deepcopy(twin)


@pytest.mark.parametrize("where", [0, 3])
def test_an_interrupt_inside_a_block_is_recovered_from(where, recorder):
    """torch calls `always_call` hooks after exceptions, but not after interrupts."""
    model = build_model()
    twin, offload = offloaded(model, recorder)

    def interrupt(module, args, output):
        raise KeyboardInterrupt

    hook = twin.blocks[where].down.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(twin, 0)
    hook.remove()
    gc.collect()
    for seed in range(2):
        assert_same(step(twin, seed), step(model, seed))
    sent = offload.counters().sent
    step(twin, 2)
    assert offload.counters().sent > sent
    assert len(offload._running) == 0


class SelfCaller(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        x = self.linear(x).sin()
        return self(x, depth - 1) * self.linear(x) if depth else x


def test_an_offloaded_block_may_call_itself(recorder):
    torch.manual_seed(0)
    model = nn.Sequential(SelfCaller(), SelfCaller())
    twin = copy.deepcopy(model)
    offload = offload_activations(
        list(twin),
        SynchronousCopyEngine(),
        None,
        recorder,
        MIN_NBYTES,
        settings=OffloadSettings(poison=True),
    )
    x = torch.randn(8, 4)
    for each in (model, twin):
        each(x).sum().backward()
    for parameter, reference in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)
    assert offload.counters().sent > 0


def test_invalid_arguments_are_refused(recorder):
    model = build_model()
    blocks = list(model.blocks)

    def error_of(*args, **kwargs):
        with pytest.raises(OffloadError) as caught:
            offload_activations(*args, **kwargs)
        return str(caught.value)

    copy_engine = SynchronousCopyEngine()
    assert "called without blocks" in error_of([], copy_engine, None, recorder)
    assert "was passed twice" in error_of(
        blocks, copy_engine, None, recorder, other_blocks=blocks[:1]
    )
    assert "min_nbytes is 0" in error_of(blocks, copy_engine, None, recorder, 0)
    compiled = build_model().blocks[0]
    compiled.compile(backend="eager")
    assert "Compile its forward instead" in error_of([compiled], copy_engine, None, recorder)
    no_prefetch = OffloadSettings(prefetch_blocks=0)
    assert "prefetch_blocks is 0" in error_of(
        blocks, copy_engine, None, recorder, settings=no_prefetch
    )


def test_an_offloaded_block_cannot_be_recomputed_as_well(recorder):
    twin, offload = offloaded(build_model(), recorder)
    with pytest.raises(OffloadError, match="Block is already offloaded"):
        offload.checkpoint(twin.blocks[0], torch.randn(1, 5, 12))


def test_a_block_that_fails_before_its_hook_does_not_end_another(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder)

    def fail(module, args):
        raise ArithmeticError("raised by user code")

    hook = twin.blocks[3].register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ArithmeticError):
        step(twin, 0)
    hook.remove()
    assert offload._running == []
    assert_same(step(twin, 0), step(model, 0))
