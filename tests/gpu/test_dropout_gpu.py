"""Dropout masks of eager and compiled blocks on a GPU."""

import pytest
import torch
from torch import nn

from gracetune.adapters.compute.dropout import DropoutSeeds
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(64, 64) for _ in range(3))
        self.drop_query, self.drop_key = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.out(self.query(self.drop_query(x)) * self.key(self.drop_key(x)))


def gradients(model, seeds):
    x = torch.linspace(-1, 1, 64 * 256, device="cuda").view(256, 64)
    model.zero_grad()
    outputs = []
    for micro_batch in range(2):
        seeds.set(1000 + micro_batch)
        y = model(x)
        y.square().mean().backward()
        outputs.append(y.detach())
    return [*outputs, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.parametrize("mode", ["keep", "lean", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_masks_are_the_same_however_blocks_run(mode, compiled, recorder):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).cuda().train()
    seeds = DropoutSeeds(model)
    expected = gradients(model, seeds)
    compiler = BlockCompiler(recorder) if compiled else None
    wrapped = wrap_blocks(list(model), [mode] * 3, compiler)
    found = gradients(model, seeds)
    wrapped.close()
    if compiler is not None:
        compiler.close()
    assert not [event for event in recorder.events if event.fallback]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
