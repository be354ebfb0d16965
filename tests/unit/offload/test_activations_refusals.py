"""What is refused by name, what closing leaves, and blocks that fail, are interrupted or nest."""

import copy
import gc

import pytest
import torch
from offloaded_model import SMALL, offloaded
from streamed_model import assert_same, made, step
from torch import nn

from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.copies import StreamError, SynchronousCopyEngine
from gracetune.offload.ring import stream_weights


def test_backward_after_closing_is_refused(told):
    twin, offload = offloaded(made(), told)
    loss = twin(torch.randn(2, 5, 4)).square().mean()
    offload.close()
    offload.close()
    with pytest.raises(StreamError, match="host memory was given up"):
        loss.backward()


def test_closing_leaves_no_trace(told):
    model = made()
    twin, offload = offloaded(model, told)
    step(twin, 0)
    offload.close()
    for module in twin.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert offload.counters().host_nbytes == 0
    assert_same(step(twin, 1), step(model, 1))
    copy.deepcopy(twin)


def test_closing_inside_a_block_leaves_no_hooks_behind(told):
    twin, offload = offloaded(made(), told)
    handle = twin.blocks[2].down.register_forward_pre_hook(lambda module, args: offload.close())
    assert twin(torch.randn(1, 5, 4)).mean().isfinite()
    handle.remove()
    step(twin, 0)


def test_the_ring_goes_on_when_the_offload_is_closed(told):
    model = made()
    twin = copy.deepcopy(model)
    mover = SynchronousCopyEngine()
    stream_weights(twin, list(twin.blocks), mover, told, 2, poison=True)
    offload = offload_activations(list(twin.blocks), mover, None, told, SMALL)
    assert_same(step(twin, 0), step(model, 0))
    offload.close()
    assert_same(step(twin, 1), step(model, 1))


def test_a_model_that_is_copied_is_refused(told):
    twin, _ = offloaded(made(), told)
    with pytest.raises(StreamError, match="cannot be copied while its activations are offloaded"):
        copy.deepcopy(twin)


@pytest.mark.parametrize("where", [0, 3])
def test_an_interrupt_that_skips_our_hooks_is_recovered_from(where, told):
    """Modules tell always-called hooks of exceptions, not of interrupts."""
    model = made()
    twin, offload = offloaded(model, told)

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


def test_a_block_that_calls_itself(told):
    torch.manual_seed(0)
    model = nn.Sequential(SelfCaller(), SelfCaller())
    twin = copy.deepcopy(model)
    offload = offload_activations(
        list(twin),
        SynchronousCopyEngine(),
        None,
        told,
        SMALL,
        settings=OffloadSettings(poison=True),
    )
    x = torch.randn(8, 4)
    for each in (model, twin):
        each(x).sum().backward()
    for mine, reference in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, reference.grad)
    assert offload.counters().sent > 0


def test_bad_input(told):
    model = made()
    blocks = list(model.blocks)

    def refused(*args, **kwargs):
        with pytest.raises(StreamError) as caught:
            offload_activations(*args, **kwargs)
        return str(caught.value)

    mover = SynchronousCopyEngine()
    assert "no blocks to offload" in refused([], mover, None, told)
    assert "given twice" in refused(blocks, mover, None, told, others=blocks[:1])
    assert "min_nbytes is 0" in refused(blocks, mover, None, told, 0)
    compiled = made().blocks[0]
    compiled.compile(backend="eager")
    assert "Compile its forward instead" in refused([compiled], mover, None, told)
    far = OffloadSettings(ahead=0)
    assert "ahead is 0" in refused(blocks, mover, None, told, settings=far)


def test_a_block_is_offloaded_or_recomputed_not_both(told):
    twin, offload = offloaded(made(), told)
    with pytest.raises(StreamError, match="Block is offloaded already"):
        offload.checkpoint(twin.blocks[0], torch.randn(1, 5, 12))


def test_a_block_that_fails_before_our_hook_is_no_end_of_another(told):
    model = made()
    twin, offload = offloaded(model, told)

    def fail(module, args):
        raise ArithmeticError("of the user's")

    hook = twin.blocks[3].register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ArithmeticError):
        step(twin, 0)
    hook.remove()
    assert offload._running == []
    assert_same(step(twin, 0), step(model, 0))
