"""Activation checkpointing of eager blocks: the numbers of a plain call, from its inputs alone."""

import gc
import sys

import pytest
import torch
from fakes.cuda_tensors import CudaGenerator, CudaTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gracetune.errors import GracetuneError
from gracetune.offload.recompute import checkpoint_block

WEIGHT = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()


def block(x, *, scale, tables=None):
    hidden = functional.dropout((x * scale).sin() @ WEIGHT, 0.5)
    return hidden.softmax(-1) + (0 if tables is None else tables[0] * x)


def plain(call, args, kwargs):
    return call(*args, **kwargs)


def torch_checkpoint(call, args, kwargs):
    return checkpoint(call, *args, use_reentrant=False, **kwargs)


def gradients(way, call=block, passes=1):
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 12).view(3, 4).requires_grad_()
    scale = torch.full((4,), 1.5, requires_grad=True)
    tables = (torch.ones(4), torch.ones(4))
    with torch.autocast("cpu", torch.bfloat16):
        out = way(call, (x.exp(),), {"scale": scale, "tables": tables})
    torch.manual_seed(1)
    for number in range(passes):
        out.float().square().sum().backward(retain_graph=number + 1 < passes)
    drawn = torch.rand(1)
    found = [out.detach(), x.grad, scale.grad, WEIGHT.grad, drawn]
    WEIGHT.grad = None
    return found


@pytest.mark.parametrize("passes", [1, 2])
def test_a_recomputed_call_gives_the_same_numbers_bit_for_bit(passes):
    """With dropout, autocast, and a graph that is kept for a second backward."""
    expected = gradients(plain, passes=passes)
    found = gradients(checkpoint_block, passes=passes)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_recomputation_has_the_random_state_of_the_device_and_restores_it(monkeypatch):
    generator, drawn = CudaGenerator(monkeypatch), []

    def call(x):
        drawn.append(generator.drawn)
        generator.drawn += 1
        return x.exp() * 2

    generator.drawn = 5
    x = torch.ones(3, requires_grad=True)
    out = checkpoint_block(call, (x.as_subclass(CudaTensor),), {})
    generator.drawn = 70
    out.sum().backward()
    assert drawn == [5, 5]
    assert generator.drawn == 70


def test_autograd_keeps_the_inputs_alone_and_hooks_see_them():
    x, scale = torch.ones(3, 4, requires_grad=True).sin(), torch.ones(4)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint_block(block, (x,), {"scale": scale})
    assert [one.data_ptr() for one in kept] == [x.data_ptr(), scale.data_ptr()]


class Calls(TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.operator
        return func(*args, **(kwargs or {}))


def test_what_follows_the_last_saved_tensor_is_not_recomputed():
    x = torch.ones(3, requires_grad=True)
    out = checkpoint_block(lambda x: (x.sin() * 2).neg(), (x,), {})
    with Calls(torch.ops.aten.sin.default) as sines, Calls(torch.ops.aten.neg.default) as negations:
        out.sum().backward()
    assert (sines.count, negations.count) == (0, 1), "sin saves its input, which is known"
    assert torch.equal(x.grad, -2 * x.detach().cos())


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            lambda x: x.exp().sin()[:1] * x,
            r"shape \(3,\) in float32 in forward, but a tensor of shape \(1,\)",
        ),
        (lambda x: x.sin(), "saved 4 tensors in forward, but 1 when backward ran it again"),
    ],
)
def test_another_result_in_backward_is_an_error(now, message):
    forwards = iter([lambda x: x.exp().sin() * x, now])
    x = torch.ones(3, requires_grad=True)
    out = checkpoint_block(lambda x: next(forwards)(x), (x,), {})
    with pytest.raises(GracetuneError, match=message):
        out.sum().backward()


def python_calls(way, num_saved):
    """Return the number of Python functions that forward and backward of a block call."""
    x = torch.ones(3, requires_grad=True)
    count = 0

    def called(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    def call(x):
        for _ in range(num_saved):
            x = x.sin()
        return x

    gc.collect()
    gc.disable()  # objects of earlier tests may call functions when they are collected
    sys.setprofile(called)
    try:
        way(call, (x,), {}).sum().backward()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_each_saved_tensor_takes_few_calls_of_python_functions():
    """Eager steps of small batches are bound by the CPU."""
    ours, torchs = (
        (python_calls(way, 120) - python_calls(way, 60)) / 60
        for way in (checkpoint_block, torch_checkpoint)
    )
    assert ours <= 4
    assert torchs > 3 * ours
