"""LoKr, LoCon and LoHa on a GPU agree with float64: eager and compiled, resident and streamed."""

import pytest
import torch
from sync_checks import forbid_host_syncs
from torch import nn
from torch.nn import functional

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.memory.platform import Link
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.plan.apply import PlanLayout, apply_plan
from gracetune.plan.result import BlockPlan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler warns
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


def build_model(dtype, kind="lokr"):
    torch.manual_seed(0)
    model = Model().to(dtype)
    section = AdapterSection(kind=kind, rank=8, factor=8)
    add_adapter({"": model}, section, ["inner", "outer"], seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data = values.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return model


def step(model, device, dtype):
    """Return the output of the model and the gradients of its adapters."""
    x = torch.randn(2, 128, WIDTH, generator=torch.Generator().manual_seed(3))
    y = model(x.to(device, dtype))
    (y.float() if dtype == torch.bfloat16 else y).square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [t.detach().double().cpu() for t in (y, *gradients)]


def assert_close(results, references, min_cosine):
    for result, reference in zip(results, references, strict=True):
        assert functional.cosine_similarity(result.flatten(), reference.flatten(), 0) > min_cosine
        assert result.norm() == pytest.approx(float(reference.norm()), rel=0.02)


@pytest.fixture(scope="module")
def expected():
    return step(build_model(torch.float64), torch.device("cpu"), torch.float64)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("activations", ["keep", "lean", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_lokr_step_agrees_with_float64(expected, weights, activations, compiled):
    model = build_model(torch.bfloat16)
    layout = PlanLayout([BlockPlan(weights, activations)] * BLOCKS, compiled, 2)
    copy_engine = open_copy_engine(DEVICE, Link.MANAGED)
    applied = apply_plan(model, {model: list(model.blocks)}, layout, copy_engine, lambda _: None)
    try:
        assert_close(step(model, DEVICE, torch.bfloat16), expected, 0.995)
    finally:
        applied.close()


@pytest.mark.parametrize("kind", ["locon", "loha"])
@pytest.mark.parametrize("activations", ["keep", "lean", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_lycoris_step_agrees_with_float64(kind, activations, compiled):
    expected = step(build_model(torch.float64, kind), torch.device("cpu"), torch.float64)
    model = build_model(torch.bfloat16, kind)
    layout = PlanLayout([BlockPlan("streamed", activations)] * BLOCKS, compiled, 2)
    copy_engine = open_copy_engine(DEVICE, Link.MANAGED)
    applied = apply_plan(model, {model: list(model.blocks)}, layout, copy_engine, lambda _: None)
    try:
        assert_close(step(model, DEVICE, torch.bfloat16), expected, 0.99)
    finally:
        applied.close()


def test_a_lokr_step_has_no_host_syncs():
    model = build_model(torch.bfloat16).to(DEVICE)
    x = torch.randn(2, 128, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    model(x).sum().backward()
    with forbid_host_syncs():
        model(x).sum().backward()
