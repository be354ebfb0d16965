import json

import pytest
import torch
from safetensors import safe_open

from gracetune.adapters.files import FILE_NAME, save_lora
from gracetune.adapters.inject import add_lora, match_targets
from gracetune.config.schema import AdapterSection, ModelSection
from gracetune.errors import ConfigError
from gracetune.models.tiny import load

TARGETS = ("attn.to_q", "ff.net.2")


@pytest.fixture
def model():
    return load(ModelSection()).transformer


def predict(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return model(
            torch.randn(1, 48, 4, 4, generator=generator),
            encoder_hidden_states=torch.randn(1, 16, 64, generator=generator),
            pooled_projections=torch.randn(1, 64, generator=generator),
            timestep=torch.tensor([500.0]),
            return_dict=False,
        )[0]


def test_targets_match_whole_names_only(model):
    assert match_targets(model, ["attn.to_q"]) == [
        f"transformer_blocks.{i}.attn.to_q" for i in range(4)
    ]
    assert match_targets(model, ["transformer_blocks.2.attn.to_q"]) == [
        "transformer_blocks.2.attn.to_q"
    ]


def test_a_target_that_matches_nothing_lists_what_there_is(model):
    with pytest.raises(ConfigError, match=r"attn\.to_qq match no linear.*attn\.to_q,"):
        match_targets(model, ["attn.to_q", "attn.to_qq"])


def test_a_new_adapter_changes_nothing_and_alone_is_trained(model):
    before = predict(model)
    modules = add_lora(model, AdapterSection(rank=4), TARGETS, seed=1)
    assert torch.equal(predict(model), before)
    assert len(modules) == 8
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 16
    assert all("lora_" in name for name in trained)


def test_its_start_is_a_function_of_the_seed():
    starts = []
    for seed in (1, 1, 2):
        model = load(ModelSection()).transformer
        add_lora(model, AdapterSection(rank=4), TARGETS, seed)
        starts.append(torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize("alpha", [None, 2.0])
@pytest.mark.parametrize("named", [True, False])  # diffusers reads the header only when named
def test_diffusers_loads_the_file_and_computes_the_same(model, tmp_path, alpha, named):
    section = AdapterSection(rank=4, alpha=alpha)
    modules = add_lora(model, section, TARGETS, seed=1)
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    path = save_lora(tmp_path, model, section, modules, {"gracetune.family": "tiny"})
    assert path.name == FILE_NAME
    with safe_open(path, "pt") as file:
        assert file.metadata()["gracetune.family"] == "tiny"
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert settings["transformer.lora_alpha"] == settings["transformer.r"] == 4

    fresh = load(ModelSection()).transformer
    plain = predict(fresh)
    where = {"weight_name": FILE_NAME} if named else {}
    fresh.load_lora_adapter(str(tmp_path if named else path), prefix="transformer", **where)
    torch.testing.assert_close(predict(fresh), predict(model))
    assert not torch.allclose(plain, predict(fresh))
