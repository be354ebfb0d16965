import pytest
import torch
from torch import nn

from gracetune.adapters.compute.lycoris import AdaptedLayer
from gracetune.adapters.files.keys import any_name_table
from gracetune.adapters.files.layers import delta, delta_bias, scale_of
from gracetune.adapters.inject import (
    adapter_from_model,
    adapter_weights,
    add_adapter,
    matches,
    select_modules,
    settings_for,
    target_suffix,
)
from gracetune.config.schema import AdapterSection
from gracetune.errors import ConfigError

KINDS = ("lora", "dora", "locon", "loha", "lokr", "full")
TARGETS = ("attn.to_q", "ff.0")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"to_q": nn.Linear(24, 36), "norm": nn.LayerNorm(24)})
        self.ff = nn.Sequential(nn.Linear(24, 24, bias=False), nn.GELU())

    def forward(self, x):
        return self.attn["to_q"](self.ff(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.patch = nn.Conv2d(3, 24, 2, 2)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        return torch.cat([block(x) for block in self.blocks], -1)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def image():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))


def randomize(model, by=0.2):
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * by)


def test_targets_are_names_suffixes_patterns_or_expressions(model):
    section = AdapterSection(targets=("blocks.1.attn.to_q",))
    assert list(select_modules({"": model}, section, ())[""]) == ["blocks.1.attn.to_q"]
    section = AdapterSection(targets=("to_q",))
    assert list(select_modules({"": model}, section, ())[""]) == [
        "blocks.0.attn.to_q",
        "blocks.1.attn.to_q",
    ]
    section = AdapterSection(targets=("blocks.0.*",))
    assert list(select_modules({"": model}, section, ())[""]) == [
        "blocks.0.attn.to_q",
        "blocks.0.ff.0",
    ]
    section = AdapterSection(targets=(r"re:blocks\.\d+\.ff\.0",))
    assert list(select_modules({"": model}, section, ())[""]) == ["blocks.0.ff.0", "blocks.1.ff.0"]


def test_a_suffix_matches_only_whole_name_parts():
    assert matches("blocks.0.attn.to_q", "attn.to_q")
    assert not matches("blocks.0.xattn.to_q", "attn.to_q")
    assert not matches("blocks.0.attn.to_q", "blocks.0.attn")


@pytest.mark.parametrize("target", ["attn.to_qq", "nothing.*", "re:.*none"])
def test_a_target_that_matches_nothing_is_refused_with_candidates(model, target):
    section = AdapterSection(targets=("attn.to_q", target))
    with pytest.raises(ConfigError, match=r"adapter\.targets: .* Candidates: .*attn\.to_q"):
        select_modules({"": model}, section, ())


def test_a_target_that_matches_only_unsupported_layers_is_refused(model):
    section = AdapterSection(targets=("attn.norm",))
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn\.norm \(LayerNorm\), which is not"):
        select_modules({"": model}, section, ())
    with pytest.raises(ConfigError, match=r"patch \(Conv2d\)"):
        select_modules({"": model}, AdapterSection(targets=("patch",)), ())


def test_a_family_without_default_targets_needs_the_setting(model):
    with pytest.raises(ConfigError, match=r"adapter\.targets is empty.* Candidates: attn\.to_q"):
        add_adapter({"": model}, AdapterSection(), (), seed=0)


def test_an_invalid_expression_is_refused(model):
    with pytest.raises(ConfigError, match="is not a valid regular expression"):
        select_modules({"": model}, AdapterSection(targets=("re:(",)), ())


def test_a_target_must_match_in_both_experts_unless_it_names_one(model):
    other = Model()
    other.blocks[0].attn["to_q"] = nn.Identity()
    other.blocks[1].attn["to_q"] = nn.Identity()
    both = {"high": model, "low": other}
    with pytest.raises(ConfigError, match="of the low-noise expert"):
        select_modules(both, AdapterSection(targets=("attn.to_q",)), ())
    chosen = select_modules(both, AdapterSection(targets=("high.blocks.*.to_q",)), ())
    assert (len(chosen["high"]), len(chosen["low"])) == (2, 0)


def test_the_last_matching_override_counts(model):
    section = AdapterSection(
        rank=8,
        alpha=4,
        dropout=0.1,
        overrides={
            "blocks.*.attn.*": {"rank": 2},
            "blocks.1.attn.to_q": {"alpha": 6, "dropout": 0.5, "factor": 3},
        },
    )
    first, second, plain = (
        settings_for(section, name)
        for name in ("blocks.0.attn.to_q", "blocks.1.attn.to_q", "blocks.0.ff.0")
    )
    assert (first.rank, first.alpha, first.dropout, first.factor) == (2, 2.0, 0.1, -1)
    assert (second.rank, second.alpha, second.dropout, second.factor) == (2, 6.0, 0.5, 3)
    assert (plain.rank, plain.alpha, plain.dropout) == (8, 4.0, 0.1)
    chosen = select_modules({"": model}, section, TARGETS)[""]
    assert chosen["blocks.1.attn.to_q"] == second


def test_an_override_that_matches_no_adapted_module_is_refused(model):
    section = AdapterSection(overrides={"ff.0": {"rank": 2}})
    with pytest.raises(ConfigError, match=r"adapter\.overrides: 'ff\.0' matches no module"):
        select_modules({"": model}, section, ("attn.to_q",))


@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
def test_overrides_apply_to_the_modules(model, kind):
    section = AdapterSection(
        kind=kind, rank=4, overrides={"ff.0": {"rank": 2, "alpha": 1, "dropout": 0.25}}
    )
    add_adapter({"": model}, section, TARGETS, seed=1)
    adapter = adapter_from_model(
        {"": model}, settings_of_model(model, section), any_name_table("toy")
    )
    ranks = {
        place.module: min(t.shape[0] for t in layer.tensors.values() if t.dim() == 2)
        for place, layer in adapter.layers.items()
    }
    assert ranks == {
        "blocks.0.attn.to_q": 4,
        "blocks.1.attn.to_q": 4,
        "blocks.0.ff.0": 2,
        "blocks.1.ff.0": 2,
    }
    assert {scale_of(layer) for layer in adapter.layers.values()} == {1.0, 0.5}
    dropped = [m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p]
    assert dropped == [0.25, 0.25]


def settings_of_model(model, section):
    return {"": {name: settings_for(section, name) for name in adapter_weights(model)}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_keeps_the_output_and_is_the_only_trained_part(model, image, kind):
    before = model(image)
    chosen = add_adapter({"": model}, AdapterSection(kind=kind, rank=2), TARGETS, seed=1)
    assert list(chosen[""]) == [
        "blocks.0.attn.to_q",
        "blocks.0.ff.0",
        "blocks.1.attn.to_q",
        "blocks.1.ff.0",
    ]
    torch.testing.assert_close(model(image), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not any("base_layer" in name or name.startswith("patch") for name in trained)
    model(image).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_are_fp32_next_to_frozen_bf16_weights(model, kind):
    model.to(torch.bfloat16)
    add_adapter({"": model}, AdapterSection(kind=kind, rank=2), TARGETS, seed=1)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    assert model(torch.randn(1, 3, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_initial_weights_depend_only_on_the_seed(kind):
    starts = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = Model()
        torch.manual_seed(4)
        expected = torch.rand(2)
        torch.manual_seed(4)
        add_adapter({"": model}, AdapterSection(kind=kind, rank=2), TARGETS, seed)
        assert torch.equal(torch.rand(2), expected)
        starts.append(torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("alpha", [None, 1.0])
@pytest.mark.parametrize("kind", ["lora", "locon", "loha", "lokr", "full"])
def test_the_forward_is_the_frozen_layer_plus_the_delta(model, kind, alpha):
    """The formula, applied to the tensors that would be saved, matches the module's output."""
    frozen = {name: m.weight.clone() for name, m in model.named_modules() if hasattr(m, "weight")}
    bias = model.blocks[0].attn["to_q"].bias.clone()
    section = AdapterSection(kind=kind, rank=2, alpha=alpha)
    chosen = add_adapter({"": model}, section, TARGETS, seed=1)
    randomize(model)
    adapter = adapter_from_model({"": model}, chosen, any_name_table("toy"))
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(2))
    name = "blocks.0.attn.to_q"
    (layer,) = [layer for place, layer in adapter.layers.items() if place.module == name]
    more = delta_bias(layer)
    wanted = x @ (frozen[name] + delta(layer)).T + bias + (0 if more is None else more)
    torch.testing.assert_close(model.get_submodule(name)(x), wanted)


@pytest.mark.parametrize("kind", ["locon", "loha", "lokr", "full"])
def test_convolutions_can_be_adapted(model, image, kind):
    before = model(image)
    section = AdapterSection(kind=kind, rank=2, targets=("patch",))
    chosen = add_adapter({"": model}, section, (), seed=1)
    assert isinstance(model.patch, AdaptedLayer)
    torch.testing.assert_close(model(image), before)
    randomize(model)
    (layer,) = adapter_from_model({"": model}, chosen, any_name_table("toy")).layers.values()
    conv = model.patch.base_layer
    more = delta_bias(layer)
    wanted = nn.functional.conv2d(
        image,
        conv.weight + delta(layer, conv.weight.shape),
        conv.bias + (0 if more is None else more),
        stride=2,
    )
    torch.testing.assert_close(model.patch(image), wanted)


@pytest.mark.parametrize("kind", ["locon", "loha", "lokr", "full"])
def test_an_adapted_layer_has_the_attributes_of_the_frozen_one(model, kind):
    linear, bare, conv = model.blocks[0].attn["to_q"], model.blocks[0].ff[0], model.patch
    section = AdapterSection(kind=kind, rank=2, targets=("re:.*",))
    add_adapter({"": model}, section, (), seed=1)
    adapted = model.blocks[0].attn["to_q"]
    assert adapted.weight is linear.weight
    assert adapted.bias is linear.bias
    assert (adapted.in_features, adapted.out_features) == (24, 36)
    assert model.blocks[0].ff[0].weight is bare.weight
    assert model.blocks[0].ff[0].bias is None
    assert model.patch.weight is conv.weight
    assert not hasattr(model.patch, "in_features")
    assert not any(name.endswith("to_q.weight") for name, _ in model.named_parameters())


def test_a_lokr_can_have_whole_matrices_and_a_given_factor(model):
    section = AdapterSection(kind="lokr", rank=2, factor=4, full_matrix=True)
    add_adapter({"": model}, section, TARGETS, seed=1)
    weights = adapter_weights(model)["blocks.0.attn.to_q"]
    assert weights["lokr_w1"].shape == (4, 4)
    assert weights["lokr_w2"].shape == (9, 6)


def test_dropout_is_active_only_in_training(model, image):
    add_adapter({"": model}, AdapterSection(kind="loha", rank=2, dropout=0.5), TARGETS, seed=1)
    randomize(model)
    model.train()
    assert not torch.equal(model(image), model(image))
    model.eval()
    assert torch.equal(model(image), model(image))


def test_experts_without_a_target_are_not_changed(model):
    other = Model()
    section = AdapterSection(rank=2, targets=("high.blocks.*.to_q",))
    chosen = add_adapter({"high": model, "low": other}, section, (), seed=1)
    assert chosen["low"] == {}
    assert not any(p.requires_grad for p in other.parameters())
    assert not adapter_weights(other)


def test_target_suffix_removes_the_block_number():
    assert target_suffix("blocks.12.attn.to_q") == "attn.to_q"
    assert target_suffix("proj_out") == "proj_out"
    assert target_suffix("head.0") == "head.0"
