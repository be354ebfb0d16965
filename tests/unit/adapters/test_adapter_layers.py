"""Our dW matches the forward passes of lycoris-lora and peft."""

import pytest
import torch
from adapter_examples import TABLES
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

from gracetune.adapters.files.convert import import_tensors
from gracetune.adapters.files.keys import any_name_table
from gracetune.adapters.files.layers import (
    Layer,
    delta,
    delta_norm,
    delta_shape,
    merge_weight,
    rank_of,
    scale_of,
)

lycoris = pytest.importorskip("lycoris.modules.lokr")
from lycoris.modules.full import FullModule  # noqa: E402
from lycoris.modules.locon import LoConModule  # noqa: E402
from lycoris.modules.loha import LohaModule  # noqa: E402
from lycoris.modules.lokr import LokrModule  # noqa: E402

KINDS = {"locon": LoConModule, "loha": LohaModule, "lokr": LokrModule}


def fill(module, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def linear(out=24, into=16):
    torch.manual_seed(0)
    return nn.Linear(into, out)


def conv(kernel=3):
    torch.manual_seed(0)
    return nn.Conv2d(8, 12, kernel, padding=1)


def layer_of(module):
    state = {f"transformer.x.{role}": t for role, t in module.custom_state_dict().items()}
    adapter = import_tensors(state, {}, TABLES, any_name_table("any"))
    (layer,) = adapter.layers.values()
    return layer


def live_change(kind, base, **options):
    """Return what a LyCORIS module adds to an output, and our layer of its file."""
    module = KINDS[kind]("x", base, 1.0, 4, options.pop("alpha", 2.0), **options)
    fill(module)
    layer = layer_of(module)
    module.org_forward = base.forward
    return module, layer


CASES = [
    ("locon", linear, {}),
    ("locon", linear, {"rs_lora": True}),
    ("locon", conv, {}),
    ("locon", conv, {"use_tucker": True}),
    ("loha", linear, {}),
    ("loha", conv, {}),
    ("loha", conv, {"use_tucker": True}),
    ("lokr", linear, {"factor": 4}),
    ("lokr", linear, {"factor": 4, "full_matrix": True}),
    ("lokr", lambda: linear(128, 96), {"factor": 8, "decompose_both": True, "alpha": 1.0}),
    ("lokr", lambda: linear(128, 144), {"factor": 12, "decompose_both": True}),
    ("lokr", lambda: nn.Conv2d(32, 48, 3, padding=1), {"factor": 2, "use_tucker": True}),
    ("lokr", lambda: nn.Conv2d(32, 48, 3, padding=1), {"factor": 2}),
    ("lokr", conv, {"full_matrix": True}),
    ("locon", linear, {"weight_decompose": True}),
    ("locon", linear, {"weight_decompose": True, "wd_on_out": False}),
    ("loha", linear, {"weight_decompose": True}),
    ("lokr", linear, {"weight_decompose": True, "factor": 4}),
]


@pytest.mark.parametrize(("kind", "make", "options"), CASES)
def test_a_lycoris_module_computes_the_same_as_the_merged_weight(kind, make, options):
    base = make()
    module, layer = live_change(kind, base, **dict(options))
    weight = merge_weight(layer, base.weight)
    x = torch.randn(
        2, *((base.in_features,) if isinstance(base, nn.Linear) else (base.in_channels, 5, 5))
    )
    with torch.no_grad():
        live = module(x)
        if isinstance(base, nn.Linear):
            ours = functional.linear(x, weight, base.bias)
        else:
            ours = functional.conv2d(x, weight, base.bias, padding=1)
        plain = base(x)
    torch.testing.assert_close(ours, live, rtol=2e-4, atol=2e-4)
    assert not torch.allclose(live, plain, atol=1e-2)


def test_our_merge_of_loha_is_right_where_lycoris_is_wrong():
    base = linear()
    module, layer = live_change("loha", base)
    theirs = module.get_diff_weight()[0]
    with torch.no_grad():
        live = module(torch.eye(16)).T - base(torch.eye(16)).T
    torch.testing.assert_close(delta(layer), live, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(theirs, live * 0.5, rtol=1e-4, atol=1e-4)  # alpha / rank, twice


def test_a_full_delta_is_the_difference_itself():
    base = linear()
    module = FullModule("x", base)
    fill(module)
    state = {
        "transformer.x.diff": module.weight.detach(),
        "transformer.x.diff_b": module.bias.detach(),
    }
    (layer,) = import_tensors(state, {}, TABLES, any_name_table("any")).layers.values()
    torch.testing.assert_close(
        merge_weight(layer, base.weight), (base.weight + module.weight).detach()
    )
    assert rank_of(layer) is None
    assert delta_norm(layer) == pytest.approx(float(module.weight.detach().norm()))


@pytest.mark.parametrize("alpha", [9999999999.0, float("inf")])
def test_alpha_has_no_effect_in_a_lokr_of_whole_matrices(alpha):
    w1, w2 = torch.randn(4, 4), torch.randn(6, 4)
    state = {
        "diffusion_model.blocks.0.self_attn.q.lokr_w1": w1,
        "diffusion_model.blocks.0.self_attn.q.lokr_w2": w2,
        "diffusion_model.blocks.0.self_attn.q.alpha": torch.tensor(alpha),
    }
    adapter = import_tensors(state, {}, TABLES)
    (layer,) = adapter.layers.values()
    assert scale_of(layer) == 1.0
    torch.testing.assert_close(delta(layer), torch.kron(w1, w2))
    assert "without a rank, alpha has no effect" in adapter.notices[0]


PEFT = [
    (LoraConfig(r=4, lora_alpha=6, target_modules=["x"]), {}),
    (LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["x"]), {"use_rslora": True}),
    (LoraConfig(r=4, lora_alpha=6, use_dora=True, target_modules=["x"]), {}),
    (LoHaConfig(r=4, alpha=6, target_modules=["x"]), {}),
    (LoKrConfig(r=2, alpha=6, decompose_factor=4, target_modules=["x"]), {}),
    (LoKrConfig(r=64, alpha=6, decompose_factor=4, target_modules=["x"]), {}),
]


@pytest.mark.parametrize(("config", "extra"), PEFT)
def test_a_peft_module_computes_the_same_as_the_merged_weight(config, extra):
    model = nn.Sequential()
    model.add_module("x", linear())
    base = model.x
    inject_adapter_in_model(config, model)
    fill(nn.ParameterList([p for p in model.parameters() if p.requires_grad]))
    state = {
        f"base_model.model.{name}": p.detach()
        for name, p in model.named_parameters()
        if "base_layer" not in name
    }
    settings = {"r": config.r, "lora_alpha": 6, "alpha": 6} | extra
    adapter = import_tensors(state, {}, TABLES, any_name_table("any"), settings)
    (layer,) = adapter.layers.values()
    x = torch.randn(3, 16)
    with torch.no_grad():
        live = model(x)
        ours = functional.linear(x, merge_weight(layer, base.weight), base.bias)
    torch.testing.assert_close(ours, live, rtol=1e-4, atol=1e-4)
    assert adapter.format == "peft-live"


def test_strength_interpolates_between_weight_and_merged_weight():
    base = linear()
    for options in ({}, {"weight_decompose": True}):
        _, layer = live_change("locon", base, **options)
        whole, half = merge_weight(layer, base.weight), merge_weight(layer, base.weight, 0.5)
        torch.testing.assert_close(half, (whole + base.weight) / 2)
        torch.testing.assert_close(merge_weight(layer, base.weight, 0.0), base.weight.detach())


@pytest.mark.parametrize(("kind", "make", "options"), CASES)
def test_norm_and_shape_match_the_computed_delta(kind, make, options):
    base = make()
    _, layer = live_change(kind, base, **dict(options))
    change = delta(layer, base.weight.shape)
    assert delta_norm(layer) == pytest.approx(float(change.norm()), rel=1e-4)
    assert torch.Size(delta_shape(layer)).numel() == base.weight.numel()
    assert delta_shape(layer)[0] == base.weight.shape[0]


def test_a_change_of_only_the_bias_keeps_the_weight():
    layer = Layer("full", {"diff_b": torch.ones(24)})
    base = linear()
    assert torch.equal(merge_weight(layer, base.weight), base.weight)
    assert delta_norm(layer) == 0.0


def test_merging_keeps_the_dtype_and_rounds_once():
    base = linear().weight.detach().bfloat16()
    layer = Layer("lora", {"down": torch.randn(4, 16) * 1e-3, "up": torch.randn(24, 4)})
    expected = (base.float() + delta(layer)).bfloat16()
    assert torch.equal(merge_weight(layer, base), expected)


def test_lycoris_scalar_is_multiplied_in():
    base = linear()
    module = LoConModule("x", base, 1.0, 4, 2.0, use_scalar=True)
    fill(module)
    state = {f"lycoris_x.{name}": p.detach() for name, p in module.named_parameters()}
    state["lycoris_x.alpha"] = torch.tensor(2.0)
    from adapter_examples import table_of_modules

    (layer,) = import_tensors(state, {}, TABLES, table_of_modules("any", ("x",))).layers.values()
    module.org_forward = base.forward
    with torch.no_grad():
        live = module(torch.eye(16)).T - base(torch.eye(16)).T
    torch.testing.assert_close(delta(layer), live, rtol=1e-4, atol=1e-4)


def test_the_cases_cover_every_lokr_decomposition():
    found = set()
    for kind, make, options in CASES:
        if kind == "lokr":
            _, layer = live_change(kind, make(), **dict(options))
            found.add(frozenset(layer.tensors) - {"dora"})
    assert {"lokr_w1", "lokr_w2"} in found
    assert {"lokr_w1", "lokr_w2_a", "lokr_w2_b"} in found
    assert {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"} in found
    assert {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2"} in found
