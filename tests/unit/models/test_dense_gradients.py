"""A gradient that is a part of wider rows arrives without gaps, and unchanged."""

import pytest
import torch
from torch import nn

from gracetune.models.attention_processors import contiguous_grad
from gracetune.plan.launch_probe import build_probe_model


class Double(nn.Module):
    """Remembers how the gradient of what it gave lay in memory."""

    def forward(self, x):
        y = 2 * x
        y.register_hook(self.arrived.append)
        return y


def gradient(dense):
    attention = Double()
    attention.arrived = []
    if dense:
        contiguous_grad(attention)
    torch.manual_seed(0)
    x, beside = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 5, 7)
    joined = torch.cat([attention(x), beside], dim=2)
    joined.backward(torch.randn_like(joined))
    return x.grad, attention.arrived[0].is_contiguous()


def test_what_comes_back_lies_in_rows_of_its_own():
    plain, plain_dense = gradient(dense=False)
    found, found_dense = gradient(dense=True)
    assert torch.equal(found, plain)
    assert (plain_dense, found_dense) == (False, True)


class Block(nn.Module):
    """Attention beside something else, as one piece."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cat([self.attn(x), x], dim=1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_block_takes_it_as_it_is():
    block = Block()
    x = torch.randn(4, 3, requires_grad=True)
    block(x).square().sum().backward()
    expected, x.grad = x.grad, None
    contiguous_grad(block.attn)
    torch.compile(block, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_flux_has_it_in_its_single_blocks_and_others_nowhere():
    flux, qwen = (build_probe_model(family, has_adapter=False).model for family in ("flux", "qwen_image"))
    hooked = {name for name, module in flux.named_modules() if module._forward_hooks}
    singles = range(len(flux.single_transformer_blocks))
    assert hooked == {f"single_transformer_blocks.{number}.attn" for number in singles}
    assert not any(module._forward_hooks for module in qwen.modules())
