import pytest
import torch
from torch import nn

from gracetune.adapters.inject import add_adapter
from gracetune.config.schema import AdapterSection
from gracetune.train.weight_movement import WeightMovement, block_name, sampled_norms

KINDS = [
    {"kind": "lora", "rank": 3, "alpha": 6},
    {"kind": "loha", "rank": 3, "alpha": 6},
    {"kind": "lokr", "rank": 3, "alpha": 6},
    {"kind": "lokr", "full_matrix": True},
    {"kind": "full"},
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(24, 16, bias=False)
        self.out = nn.Linear(16, 24, bias=False)

    def forward(self, x):
        return self.out(self.proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 24, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["lora", "full fine-tuning"])
def test_weight_norms_are_those_of_the_trained_weights(model, kind, dtype):
    model.blocks[0].proj = nn.Linear(24, 400, bias=False)  # larger than a sample
    model.blocks[0].out = nn.Linear(400, 24, bias=False)
    norms, adapted = sampled_norms(model), {}
    if kind == "lora":
        section = AdapterSection(kind="lora", rank=3)
        adapted = add_adapter({"": model}, section, ["proj", "out"], 0)
    model.to(dtype)
    movement = WeightMovement(trained(model), adapted, norms)
    expected = {}
    for name, parameter in trained(model).items():
        square = float(parameter.detach().double().square().sum())
        expected[block_name(name)] = expected.get(block_name(name), 0.0) + square
    tolerance = 1e-5 if kind == "lora" else 0.05
    roots = {block: square**0.5 for block, square in expected.items()}
    assert movement.weight_norms() == pytest.approx(roots, rel=tolerance)


@pytest.mark.parametrize("section", KINDS, ids=lambda section: "-".join(map(str, section.values())))
def test_the_distance_of_an_adapter_is_the_norm_of_its_change(model, section):
    norms, plain = (
        sampled_norms(model),
        {n: p.detach().clone() for n, p in model.named_parameters()},
    )
    adapted = add_adapter({"": model}, AdapterSection(**section), ["proj", "out"], 0)
    movement = WeightMovement(trained(model), adapted, norms)
    assert movement.distances() == pytest.approx({"blocks.0": 0.0, "blocks.1": 0.0}, abs=1e-6)

    with torch.no_grad():
        for name, parameter in trained(model).items():
            if "blocks.1" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    found = movement.distances()
    assert found["blocks.0"] == pytest.approx(0.0, abs=1e-6)
    squares = [0.0, 0.0]
    for name in ("proj", "out"):
        layer, weight = getattr(model.blocks[1], name), plain[f"blocks.1.{name}.weight"]
        change = (layer(torch.eye(weight.shape[1])).T - weight).detach()
        squares[0] += float(change.square().sum())
        squares[1] += float(weight.square().sum())
    assert found["blocks.1"] == pytest.approx((squares[0] / squares[1]) ** 0.5, rel=1e-4)


def test_the_distance_of_a_whole_model_is_relative_to_its_start(model):
    movement = WeightMovement(trained(model), {}, {})
    with torch.no_grad():
        model.blocks[0].proj.weight.mul_(1.5)
        model.blocks[0].out.weight.mul_(1.5)
    assert movement.measure == "full"
    expected = {"blocks.0": 0.5, "blocks.1": 0.0, "head": 0.0}
    assert movement.distances() == pytest.approx(expected)


def test_large_weights_are_sampled():
    large = nn.Linear(600, 500, bias=False)
    exact = float(large.weight.detach().norm())
    assert sampled_norms(large)["weight"] == pytest.approx(exact, rel=0.05)
    movement = WeightMovement(trained(large), {}, {})
    with torch.no_grad():
        large.weight.add_(0.1 * torch.randn_like(large.weight))
    moved = 0.1 * 600**0.5 * 500**0.5 / exact
    assert movement.distances()["weight"] == pytest.approx(moved, rel=0.05)


def test_gradient_norms_are_added_up_by_block(model):
    movement = WeightMovement(trained(model), {}, {})
    model(torch.ones(2, 24)).sum().backward()
    names, norms = movement.gradient_norms(torch.tensor(0.5))
    found = movement.by_block(dict(zip(names, norms.tolist(), strict=True)))
    gradients = [model.blocks[1].proj.weight.grad, model.blocks[1].out.weight.grad]
    expected = 0.5 * float(torch.cat([g.flatten() for g in gradients]).norm())
    assert found["blocks.1"] == pytest.approx(expected)
    assert list(found) == ["blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(
    ("parameter", "block"),
    [
        ("transformer_blocks.3.attn.to_q.lora_A.default.weight", "transformer_blocks.3"),
        ("high.blocks.12.ffn.net.0.weight", "high.blocks.12"),
        ("context_embedder.weight", "context_embedder"),
        ("low.proj_out.bias", "low.proj_out"),
    ],
)
def test_the_block_of_a_parameter(parameter, block):
    assert block_name(parameter) == block
