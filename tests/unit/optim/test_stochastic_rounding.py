"""Stochastic rounding of fp32 values to bf16."""

import pytest
import torch

from gracetune.optim.automagic import stochastic_round_


def rounded(source, position=(0, 0, 1)):
    target = torch.empty_like(source, dtype=torch.bfloat16)
    stochastic_round_(target, source, position)
    return target


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, -0.7654321])
def test_the_mean_of_many_roundings_is_the_value(value):
    source = torch.full((200_000,), value)
    target = rounded(source)
    neighbours = target.unique().float()
    assert len(neighbours) == 2
    assert neighbours.min() < source[0] < neighbours.max()
    spacing = float(neighbours.max() - neighbours.min())
    assert target.double().mean().item() == pytest.approx(source[0].item(), abs=spacing / 100)


def test_values_that_bf16_represents_exactly_are_unchanged():
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert torch.equal(rounded(source).float(), source)


def test_infinity_and_nan_are_unchanged():
    source = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    source = source.repeat(100)
    torch.testing.assert_close(rounded(source).float(), source, rtol=0, atol=0, equal_nan=True)


def test_rounding_depends_only_on_seed_parameter_and_step():
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = rounded(source, (3, 1, 4))
    torch.manual_seed(2)
    assert torch.equal(rounded(source, (3, 1, 4)), first)
    for other in ((4, 1, 4), (3, 2, 4), (3, 1, 5)):
        assert not torch.equal(rounded(source, other), first)
