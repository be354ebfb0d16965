"""A block's outputs and gradients are compared with those of a plain copy of the block."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gracetune.adapters.compute.dropout import DropoutSeeds
from gracetune.train.block_check import (
    MAX_ERROR_RATIO,
    MIN_FP8_COSINE,
    BlockReference,
    CapturedCall,
    KindResult,
)

WIDTH = 32


class Block(nn.Module):
    """A block with two outputs, of which the second is not used, and inputs in a dictionary."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        self.down = nn.Linear(2 * WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH, 4) * 0.1)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, extra):
        hidden = self.down(functional.gelu(self.up(x) + extra["shift"]))
        if "again" in extra:
            hidden = hidden * extra["again"]
        low_rank = self.dropout(x) @ self.a.t() @ self.b.t()
        return x + hidden + low_rank.to(hidden.dtype), hidden.sum()


def run_step(block, reference, dtype=torch.float32, calls=1):
    """Run the block as a training step does, and return the recorded call."""
    captured = CapturedCall(reference)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, WIDTH, generator=generator).to(dtype).requires_grad_()
    y = x * 1
    for _ in range(calls):
        y, _ = block(y, {"shift": torch.ones((), dtype=dtype)})
    y.float().square().mean().backward()
    captured.close()
    return captured


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def results(block, tamper=lambda _: None, **settings):
    reference = BlockReference("blocks.0", block)
    call = run_step(block, reference, **settings)
    tamper(call)
    return {result.kind: result for result in reference.compare(call)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_unchanged_block_has_the_error_of_its_copy(block, dtype):
    compared = results(block.to(dtype), dtype=dtype)
    for result in compared.values():
        assert result.passed
        assert result.error == pytest.approx(result.eager_error, rel=1e-6)
        assert 0 < result.error < (1e-6 if dtype == torch.float32 else 1e-2)


def test_rounding_to_lower_precision_than_the_run_fails(block):
    def compute_in_bf16(module, args, kwargs):
        with torch.no_grad():
            module.up.weight.copy_(module.up.weight.bfloat16())

    reference = BlockReference("blocks.0", block)
    exact = copy.deepcopy(block.up.weight)
    handle = block.register_forward_pre_hook(compute_in_bf16, with_kwargs=True)
    call = run_step(block, reference)
    handle.remove()
    block.up.weight.data.copy_(exact)
    failed = [result for result in reference.compare(call) if not result.passed]
    # The gradients of the adapter do not depend on this weight.
    assert {result.kind for result in failed} == {"output", "input gradient"}
    assert "limit 2" in failed[0].describe()


def test_a_single_wrong_tensor_fails_by_name(block):
    """Its share of all gradients is too small for the error of the kind."""
    block.b.data *= 100  # the gradient of `a` is then much larger than that of `b`

    def tamper(call):
        call._weight_gradients[block.b].mul_(1 + 1e-3)

    compared = results(block.bfloat16(), tamper, dtype=torch.bfloat16)["weight gradient"]
    assert compared.passed, "within rounding of bf16"

    def swap_sign(call):
        call._weight_gradients[block.b].neg_()

    compared = results(block, swap_sign, dtype=torch.bfloat16)["weight gradient"]
    assert not compared.passed
    assert compared.worst_tensor == "b"
    assert compared.worst_ratio > 10


@pytest.mark.parametrize("kind", ["output", "input gradient", "weight gradient"])
def test_nan_fails(block, kind):
    def tamper(call):
        tensors = call.results(BlockReference("", block).trained)[kind]
        next(iter(tensors.values())).view(-1)[0] = float("nan")

    compared = results(block, tamper)
    assert not compared.pop(kind).passed
    assert all(result.passed for result in compared.values())


def test_a_missing_weight_gradient_fails(block):
    compared = results(block, lambda call: call._weight_gradients.pop(block.a))
    assert not compared["weight gradient"].passed
    assert compared["weight gradient"].worst_tensor == "a"


def test_gradients_are_those_of_one_call_alone(block):
    """Shared inputs get gradients from every block; here the block itself is called three times."""
    reference = BlockReference("blocks.0", block)
    call = run_step(block, reference, calls=3)
    compared = {result.kind: result for result in reference.compare(call)}
    assert compared["output"].passed
    assert compared["input gradient"].passed
    assert not compared["weight gradient"].passed, "these are summed over the three calls"


def test_a_tensor_may_be_passed_twice(block):
    """Its gradient is that of both uses together, in the run and in the copy."""
    reference = BlockReference("blocks.0", block)
    captured = CapturedCall(reference)
    x = torch.randn(3, 7, 2 * WIDTH, requires_grad=True)[..., :1]
    shifted = x.expand(3, 7, WIDTH) * 1
    y, _ = block(shifted, {"shift": torch.zeros(()), "again": shifted})
    (y + block(shifted, {"shift": torch.ones(())})[0]).square().mean().backward()
    captured.close()
    compared = {result.kind: result for result in reference.compare(captured)}
    assert compared["input gradient"].passed
    assert compared["input gradient"].eager_error > 0


def test_the_copy_uses_the_dropout_masks_of_the_step(block):
    block.dropout = nn.Dropout(0.5)
    assert BlockReference("blocks.0", block).draws_random_numbers
    seeds = DropoutSeeds(block)
    seeds.set(123)
    reference = BlockReference("blocks.0", block)
    assert not reference.draws_random_numbers
    seeds.set(456)
    call = run_step(block, reference)
    seeds.set(457)  # the next micro-batch
    assert all(result.passed for result in reference.compare(call))
    call.dropout_seeds["dropout"] += 1
    assert not all(result.passed for result in reference.compare(call))


def test_autocast_is_repeated(block):
    reference = BlockReference("blocks.0", block)
    with torch.autocast("cpu", torch.bfloat16):
        call = run_step(block, reference)
    assert call.autocast_dtype == torch.bfloat16
    for result in reference.compare(call):
        assert result.passed
        assert result.eager_error > 1e-4, "of bf16"


def test_nothing_is_recorded_without_gradients_or_after_close(block):
    reference = BlockReference("blocks.0", block)
    captured = CapturedCall(reference)
    x = torch.randn(1, 2, WIDTH)
    with torch.no_grad():
        block(x, {"shift": torch.ones(())})
    assert not captured.is_complete
    assert captured.nbytes == 0
    captured.close()
    block(x, {"shift": torch.ones(())})[0].sum().backward()
    assert not captured.is_complete
    assert block.a._backward_hooks in (None, {})
    assert not block._forward_pre_hooks


@pytest.mark.parametrize("cosine", [MIN_FP8_COSINE, 0.979, float("nan")])
def test_fp8_must_also_be_similar_to_bf16(cosine):
    result = KindResult("weight gradient", 0.05, 0.05, "a", 1.0, cosine)
    assert result.passed == (cosine == MIN_FP8_COSINE)
    assert f"at least {MIN_FP8_COSINE}" in result.describe()


@pytest.mark.parametrize(
    ("error", "eager", "passed"),
    [(0.02, 0.01, True), (0.0201, 0.01, False), (1e-6, 0.0, True), (2e-6, 0.0, False)],
)
def test_the_limit_is_twice_the_plain_error_or_a_millionth(error, eager, passed):
    assert MAX_ERROR_RATIO == 2
    assert KindResult("output", error, eager, "", 1.0).passed == passed
