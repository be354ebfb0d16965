"""LoRA layers that share an input compute the same together as one by one."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from gracetune.adapters.compute.fused_lora import fuse_lora, fuse_shared_input

pytestmark = pytest.mark.filterwarnings("ignore")
"""The compiler reads attributes that torch warns about."""

NAMES = ["query", "key", "value"]


class ThreeProjections(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.query, self.key = nn.Linear(32, 48, bias=bias), nn.Linear(32, 48, bias=bias)
        self.value = nn.Linear(32, 16, bias=bias)
        self.shared = None

    def forward(self, x):
        if self.shared is not None:
            query, key, value = self.shared(x)
        else:
            query, key, value = self.query(x), self.key(x), self.value(x)
        return (query * key.tanh()).sum(-1, keepdim=True) * value


def make(alpha=8, dtype=torch.float64, bias=True, **settings):
    torch.manual_seed(0)
    model = ThreeProjections(bias).requires_grad_(False).to(dtype)
    config = LoraConfig(
        r=4, lora_alpha=alpha, target_modules=NAMES, init_lora_weights=False, **settings
    )
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    return model


def shared(model):
    assert fuse_lora(model) == 3
    model.shared = fuse_shared_input([model.query, model.key, model.value])
    assert model.shared is not None
    return model


def gradients(model, trains_input=True):
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
    x = x.to(model.query.base_layer.weight.dtype).requires_grad_(trains_input)
    y = model(x)
    y.square().sum().backward()
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    return [y.detach(), *([x.grad] if trains_input else []), *trained]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("trains_input", [True, False])
@pytest.mark.parametrize("alpha", [4, 8], ids=["scale 1", "scale 2"])
def test_fused_layers_with_one_input_compute_the_same(alpha, trains_input):
    expected = gradients(make(alpha), trains_input)
    assert_equal(gradients(shared(make(alpha)), trains_input), expected)


def test_bf16_matmuls_train_fp32_weights():
    found = gradients(shared(make(dtype=torch.bfloat16)))
    exact = gradients(make())
    assert {tensor.dtype for tensor in found[2:]} == {torch.float32}
    for ours, theirs in zip(found, exact, strict=True):
        similarity = torch.cosine_similarity(ours.double().flatten(), theirs.flatten(), dim=0)
        assert similarity > 0.999


def test_layers_with_one_input_compile_to_one_graph():
    expected = gradients(make())
    model = shared(make())
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert_equal(gradients(model), expected)


def test_a_disabled_adapter_has_no_effect():
    model = shared(make())
    x = torch.randn(5, 32, dtype=torch.float64)
    for name in NAMES:
        model.get_submodule(name).enable_adapters(False)
    plain = [model.get_submodule(name).base_layer(x) for name in NAMES]
    assert all(torch.equal(a, b) for a, b in zip(model.shared(x), plain, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"bias": False},
        {"use_dora": True},
        {"rank_pattern": {"key": 2}},
        {"alpha_pattern": {"value": 1}},
    ],
    ids=str,
)
def test_layers_that_differ_are_not_combined(settings):
    model = make(**settings)
    fuse_lora(model)
    assert fuse_shared_input([model.query, model.key, model.value]) is None


def test_layers_without_a_lora_are_not_combined():
    model = ThreeProjections()
    assert fuse_shared_input([model.query, model.key, model.value]) is None
