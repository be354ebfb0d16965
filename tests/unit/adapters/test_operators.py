"""Operators run without torch's dispatcher, unless something observes them."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gracetune.adapters.compute.lora_matmul import lora_input_gradient

pytestmark = pytest.mark.filterwarnings("ignore")
"""The compiler reads attributes that torch warns about."""


class Names(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append(func.name())
        return func(*args, **(kwargs or {}))


def tensors():
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in ((6, 4), (6, 2), (4, 5), (2, 5))]


@pytest.fixture(params=["the operator", "its overload", "a compiled graph"])
def call(request):
    """Ways to call an operator; compiled graphs call the overload."""
    if request.param == "a compiled graph":
        yield torch.compile(lambda *args: lora_input_gradient(*args), backend="inductor")
        torch._dynamo.reset()
    else:
        yield (
            lora_input_gradient
            if request.param == "the operator"
            else (lora_input_gradient.overload)
        )


def test_the_dispatcher_is_called_only_under_a_mode(call):
    expected = lora_input_gradient.function(*tensors())
    assert call(*tensors()).equal(expected)  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert call(*tensors()).equal(expected)
    names = {event.name for event in profiler.events()}
    assert "aten::mm" in names
    assert lora_input_gradient.name not in names


def test_a_mode_sees_the_operator():
    expected = lora_input_gradient.function(*tensors())
    for call in (lora_input_gradient, lora_input_gradient.overload):
        args = tensors()
        with Names() as names:
            found = call(*args)
        assert found.equal(expected)
        assert names.found == [lora_input_gradient.name]
