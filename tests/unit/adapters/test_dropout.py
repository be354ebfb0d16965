"""Dropout masks depend on the seed, not on how the model is executed."""

import pytest
import torch
from torch import nn

from gracetune.adapters.compute.dropout import DropoutSeeds, PositionalDropout
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.drop_query, self.drop_key = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.out(self.query(self.drop_query(x)) * self.key(self.drop_key(x)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Dropout(0.0)).train()


def gradients(model, seeds):
    """Return outputs and gradients of two micro-batches, with other draws in between."""
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    model.zero_grad()
    found = []
    for micro_batch in range(2):
        torch.rand(micro_batch * 3)
        seeds.set(1000 + micro_batch)
        y = model(x)
        y.square().sum().backward()
        found.append(y.detach())
    return [*found, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.parametrize("mode", ["keep", "lean", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_are_the_same_however_blocks_run(model, mode, compiled, recorder):
    seeds = DropoutSeeds(model)
    expected = gradients(model, seeds)
    # The default backend takes minutes on a busy machine; tests/gpu uses it.
    compiler = BlockCompiler(recorder, backend="aot_eager") if compiled else None
    blocks = list(model[:3])
    wrapped = wrap_blocks(blocks, [mode] * 3, compiler)
    found = gradients(model, seeds)
    wrapped.close()
    if compiler is not None:
        compiler.close()
        assert not [event for event in recorder.events if event.fallback]
        assert compiler.graphs == 1, "all blocks share one compilation, whatever their seeds are"
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if not compiled else 1e-6)


def test_layers_and_micro_batches_have_masks_of_their_own(model):
    seeds = DropoutSeeds(model)
    assert len(seeds) == 6, "a dropout of 0 needs no seed"
    layers = [layer for layer in model.modules() if isinstance(layer, PositionalDropout)]
    x = torch.ones(64, 64)
    masks = []
    for seed in (1, 2**63 - 9):
        seeds.set(seed)
        masks += [layer(x) for layer in layers]
    for index, mask in enumerate(masks):
        kept = (mask != 0).float().mean()
        assert kept == pytest.approx(0.7, abs=0.03)
        assert mask.max() == pytest.approx(1 / 0.7)
        assert not any(torch.equal(mask, other) for other in masks[:index]), index


def test_global_generators_are_not_used(model):
    seeds = DropoutSeeds(model)
    before = torch.get_rng_state()
    seeds.set(5)
    model(torch.ones(4, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_dropped_outside_of_training(model):
    DropoutSeeds(model)
    x = torch.ones(4, 8)
    model.eval()
    assert all(
        torch.equal(layer(x), x) for layer in model.modules() if isinstance(layer, nn.Dropout)
    )
