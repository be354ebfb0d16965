"""LoKr's products on a GPU: as in float64, eager and compiled, resident and streamed.

LoCon and LoHa compute by LyCORIS, which has kernels of its own there.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from waiting import never_waiting

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.memory.platform import Link
from gracetune.offload.copies import open_copy_engine
from gracetune.plan.apply import PlanLayout, apply_plan
from gracetune.plan.result import BlockPlan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # compilers warn
DEVICE = torch.device("cuda", 0)
WIDTH, BLOCKS = 256, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(functional.gelu(self.inner(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make(dtype, kind="lokr"):
    torch.manual_seed(0)
    model = Model().to(dtype)
    section = AdapterSection(kind=kind, rank=8, factor=8)
    add_adapter({"": model}, section, ["inner", "outer"], seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data = drawn.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return model


def step(model, device, dtype):
    """What the model gives, and what its adapters get."""
    x = torch.randn(2, 128, WIDTH, generator=torch.Generator().manual_seed(3))
    y = model(x.to(device, dtype))
    (y.float() if dtype == torch.bfloat16 else y).square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [t.detach().double().cpu() for t in (y, *gradients)]


def near(found, expected, least):
    for one, other in zip(found, expected, strict=True):
        assert functional.cosine_similarity(one.flatten(), other.flatten(), 0) > least
        assert one.norm() == pytest.approx(float(other.norm()), rel=0.02)


@pytest.fixture(scope="module")
def expected():
    return step(make(torch.float64), torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("activations", ["keep", "lean", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_is_what_it_is_in_float64(expected, weights, activations, compiled):
    model = make(torch.bfloat16)
    layout = PlanLayout([BlockPlan(weights, activations)] * BLOCKS, compiled, 2)
    mover = open_copy_engine(DEVICE, Link.MANAGED)
    placed = apply_plan(model, {model: list(model.blocks)}, layout, mover, lambda _: None)
    try:
        near(step(model, DEVICE, torch.bfloat16), expected, 0.995)
    finally:
        placed.close()


@pytest.mark.parametrize("kind", ["locon", "loha"])
@pytest.mark.parametrize("activations", ["keep", "lean", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_so_is_a_step_by_lycoris(kind, activations, compiled):
    expected = step(make(torch.float64, kind), torch.device("cpu"), torch.float64)
    model = make(torch.bfloat16, kind)
    layout = PlanLayout([BlockPlan("streamed", activations)] * BLOCKS, compiled, 2)
    mover = open_copy_engine(DEVICE, Link.MANAGED)
    placed = apply_plan(model, {model: list(model.blocks)}, layout, mover, lambda _: None)
    try:
        near(step(model, DEVICE, torch.bfloat16), expected, 0.99)
    finally:
        placed.close()


def test_nobody_waits_for_the_device_inside_a_step():
    model = make(torch.bfloat16).to(DEVICE)
    x = torch.randn(2, 128, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    model(x).sum().backward()
    with never_waiting():
        model(x).sum().backward()
