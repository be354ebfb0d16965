"""Adapter files load in a diffusers Wan pipeline of two tiny transformers, or fail as reported."""

import copy

import pytest
import torch
from adapter_examples import (
    FFN,
    HIDDEN,
    TABLES,
    WAN,
    make_loha,
    make_lokr,
    make_lora,
    make_wan,
    map_tensors,
    shape_of,
    wan_modules,
)
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.io import AdapterMetadata, read_adapter, read_tensors, write_adapter
from gracetune.adapters.files.keys import LayerPath, any_name_table
from gracetune.adapters.files.layers import Adapter, delta, merge_weight
from gracetune.errors import AdapterError

STAGES = ("high", "low")
ALL = len(wan_modules())


@pytest.fixture(scope="module")
def pipeline_template():
    """Build the pipeline once; tests use copies."""
    torch.manual_seed(1)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": HIDDEN // 2,
        "num_layers": 2,
        "ffn_dim": FFN,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 8,
        "freq_dim": 8,
    }
    parts = {name: WanTransformer3DModel(**config) for name in ("transformer", "transformer_2")}
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=None, boundary_ratio=0.875, **parts
    )


@pytest.fixture
def pipeline(pipeline_template):
    parts = {
        name: copy.deepcopy(getattr(pipeline_template, name))
        for name in ("transformer", "transformer_2")
    }
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=None, boundary_ratio=0.875, **parts
    )


def of_stage(pipeline, stage):
    return pipeline.transformer_2 if stage == "low" else pipeline.transformer


@torch.no_grad()
def predict(model):
    generator = torch.Generator().manual_seed(2)
    return model(
        torch.randn(1, 4, 1, 4, 4, generator=generator),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 3, 8, generator=generator),
        return_dict=False,
    )[0]


def scaled_down(adapter, factor=0.05):
    """Scale an adapter down so that the model's output stays finite and close."""
    layers = {
        place: map_tensors(layer, lambda t: t * factor) for place, layer in adapter.layers.items()
    }
    return Adapter(adapter.table, layers)


def merged_copy(model, adapter):
    """Return a copy of the model with dW merged into its weights."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for place, layer in adapter.layers.items():
            module = changed.get_submodule(place.module)
            module.weight.copy_(merge_weight(layer, module.weight))
            if "diff_b" in layer.tensors:
                module.bias.add_(layer.tensors["diff_b"])
    return changed


LOADED = ["comfyui", "lightning", "kohya", "diffusers"]


@pytest.mark.parametrize("alpha", [None, 2.0, 3.0])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", LOADED)
def test_a_lora_loads_in_either_expert_and_matches_the_merged_weights(
    form, stage, alpha, pipeline, tmp_path
):
    adapter = scaled_down(make_wan("lora", alpha=alpha))
    adapter = Adapter(
        WAN, {p: type(x)(x.algorithm, x.tensors, alpha) for p, x in adapter.layers.items()}
    )
    path = write_adapter(tmp_path / "a.safetensors", adapter, form, AdapterMetadata(stage=stage))
    model, other = of_stage(pipeline, stage), of_stage(pipeline, {"high": "low"}.get(stage, "high"))
    plain, untouched = predict(model), predict(other)
    expected = predict(merged_copy(model, adapter))
    pipeline.load_lora_weights(
        str(tmp_path),
        weight_name=path.name,
        adapter_name="a",
        load_into_transformer_2=stage == "low",
        local_files_only=True,
    )
    carriers = [name for name, _ in model.named_modules() if name.endswith("lora_A.a")]
    assert len(carriers) == ALL
    torch.testing.assert_close(predict(model), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, plain, atol=1e-3)
    assert torch.equal(predict(other), untouched)

    found = check_file(path, TABLES)
    assert found.stage == stage
    assert found.ok
    assert found.results[0].matched == found.results[0].expected == ALL


def test_a_dora_loads_with_its_magnitudes(pipeline, tmp_path):
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for name in wan_modules():
        layer = make_lora(*shape_of(name), generator, dora=True)
        layers[LayerPath(None, name)] = map_tensors(layer, lambda t: t * 0.3)
    adapter = Adapter(WAN, layers)
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    expected = predict(merged_copy(pipeline.transformer, adapter))
    pipeline.load_lora_weights(str(tmp_path), weight_name=path.name, local_files_only=True)
    torch.testing.assert_close(predict(pipeline.transformer), expected, rtol=1e-4, atol=1e-5)
    assert check_file(path, TABLES).results[0].loads

    with pytest.raises(AdapterError, match=r"norms of W.*diffusers.*--into") as caught:
        write_adapter(tmp_path / "b.safetensors", adapter, "comfyui")
    assert caught.value.kind == "not-exact"


def test_dropped_magnitudes_are_detected(tmp_path):
    """diffusers drops dora_scale with a log line and computes a plain LoRA."""
    generator = torch.Generator().manual_seed(0)
    layer = make_lora(HIDDEN, HIDDEN, generator, dora=True)
    prefix = "transformer.blocks.0.attn1.to_q"
    tensors = {
        f"{prefix}.lora_A.weight": layer.tensors["down"],
        f"{prefix}.lora_B.weight": layer.tensors["up"],
        f"{prefix}.dora_scale": layer.tensors["dora"],
    }
    save_file(tensors, tmp_path / "a.safetensors")
    found = check_file(tmp_path / "a.safetensors", TABLES)
    assert not found.ok
    assert found.results[0].is_wrong
    assert "drops the magnitudes" in found.results[0].reason


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["lokr", "lokr-whole", "lokr-both"])
def test_a_lokr_loads_into_a_transformer_and_matches_the_merged_weights(
    kind, stage, pipeline, tmp_path
):
    adapter = scaled_down(make_wan(kind, alpha=3.0), 0.2)
    path = write_adapter(
        tmp_path / "a.safetensors", adapter, "diffusers", AdapterMetadata(stage=stage)
    )
    model = of_stage(pipeline, stage)
    expected, plain = predict(merged_copy(model, read_adapter(path, TABLES))), predict(model)
    model.load_lora_adapter(read_tensors(path)[0], prefix="transformer", adapter_name="a")
    torch.testing.assert_close(predict(model), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, plain, atol=1e-3)
    found = check_file(path, TABLES)
    assert found.ok
    assert found.results[0].matched == ALL


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "lokr-whole"])
def test_lycoris_loads_its_format_and_matches_the_merged_weights(kind, pipeline, tmp_path):
    wrapper = pytest.importorskip("lycoris.wrapper")
    adapter = scaled_down(make_wan(kind, alpha=None if kind == "lokr-whole" else 3.0), 0.3)
    path = write_adapter(tmp_path / "a.safetensors", adapter, "lycoris")
    model = pipeline.transformer_2
    expected, plain = predict(merged_copy(model, read_adapter(path, TABLES))), predict(model)
    with torch.no_grad():
        network, _ = wrapper.create_lycoris_from_weights(1.0, str(path), model)
    assert len(network.loras) == ALL
    network.apply_to()
    torch.testing.assert_close(predict(model), expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(expected, plain, atol=1e-3)


NOWHERE = {
    "bare": "loads nothing",
    "diffsynth": "loads nothing",
    "simpletuner-comfyui": "refuses the file: ValueError",
    "lycoris": "refuses the file: ValueError",
    "lycoris-original": "refuses the file: ValueError",
    "peft-live": "loads nothing",
}


@pytest.mark.parametrize("form", NOWHERE)
def test_a_file_that_no_tool_loads_fails_the_check(form, tmp_path):
    path = write_adapter(tmp_path / "a.safetensors", make_wan("lora"), form)
    found = check_file(path, TABLES)
    assert not found.ok
    assert NOWHERE[form] in found.results[0].reason
    assert found.results[1].matched == 0
    with pytest.raises(AdapterError, match="does not load completely") as caught:
        found.raise_if_failed()
    assert caught.value.kind == "partial"


def test_transformer_2_keys_load_nothing_in_diffusers(tmp_path):
    adapter = Adapter(WAN, {LayerPath("low", p.module): x for p, x in make_wan().layers.items()})
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers-both")
    found = check_file(path, TABLES)
    assert found.stage == "low"
    assert [target.matched for target in found.results] == [0, 0]
    assert "without an error" in found.results[0].reason


def test_kohya_needs_every_linear_module_in_diffusers(tmp_path):
    attention = {p: x for p, x in make_wan().layers.items() if "attn" in p.module}
    path = write_adapter(tmp_path / "a.safetensors", Adapter(WAN, attention), "kohya")
    found = check_file(path, TABLES)
    assert "KeyError" in found.results[0].reason
    assert found.results[1].loads
    assert found.ok
    assert not check_file(path, TABLES, required_tools=("diffusers",)).ok
    path = write_adapter(tmp_path / "b.safetensors", Adapter(WAN, attention), "comfyui")
    assert check_file(path, TABLES, required_tools=("diffusers", "comfyui")).ok


@pytest.mark.parametrize("kind", ["lokr", "loha", "full"])
def test_other_algorithms_load_only_in_comfyui(kind, tmp_path):
    for form, loads in (("comfyui", True), ("kohya", True), ("lycoris", False)):
        path = write_adapter(tmp_path / "a.safetensors", make_wan(kind), form)
        found = check_file(path, TABLES)
        assert found.results[0].matched == 0
        assert found.results[1].loads == found.ok == loads


def test_a_file_with_both_experts_is_refused(tmp_path):
    adapter = make_wan("lora", stages=STAGES)
    path = write_adapter(tmp_path / "a.safetensors", adapter, "ai-toolkit-combined")
    with pytest.raises(AdapterError, match=r"transformer_2\..*holds both") as caught:
        check_file(path, TABLES)
    assert caught.value.kind == "mixed-stages"
    assert caught.value.key.startswith("diffusion_model.transformer_2.")


def test_a_file_with_too_few_modules_is_refused(tmp_path):
    layers = dict(make_wan().layers)
    del layers[LayerPath(None, "blocks.1.ffn.net.2")]
    path = write_adapter(tmp_path / "a.safetensors", Adapter(WAN, layers), "comfyui")
    assert check_file(path, TABLES).expected == ALL - 1
    with pytest.raises(AdapterError, match="lacks 1 of 20") as caught:
        check_file(path, TABLES, modules=wan_modules())
    assert caught.value.key == "blocks.1.ffn.net.2"


def test_a_file_for_a_model_of_another_size_fails_the_check(pipeline_template, tmp_path):
    path = write_adapter(tmp_path / "a.safetensors", make_wan(), "comfyui")
    config = dict(pipeline_template.transformer.config) | {"ffn_dim": 64}
    found = check_file(path, TABLES, config=config)
    assert not found.results[0].loads
    assert "size mismatch" in found.results[0].reason
    assert check_file(path, TABLES, config=dict(pipeline_template.transformer.config)).ok


def test_checking_a_14b_adapter_needs_no_model(tmp_path):
    """Two blocks of the 14 B model's widths: the pipeline takes no memory for its weights."""
    generator = torch.Generator().manual_seed(0)
    layers = {
        LayerPath(None, name): make_lora(*shape_of(name, 5120, 13824), generator, rank=2)
        for name in wan_modules()
    }
    path = write_adapter(tmp_path / "a_low_noise.safetensors", Adapter(WAN, layers), "comfyui")
    found = check_file(path, TABLES)
    assert found.ok
    assert found.stage == "low"
    assert [target.matched for target in found.results] == [ALL, ALL]


def test_a_wrong_scale_is_detected(tmp_path, monkeypatch):
    path = write_adapter(tmp_path / "a.safetensors", make_wan(alpha=2.0), "comfyui")
    from gracetune.adapters.files import check_loading as check

    honest = check._load

    def doubling(pipeline, path, stage):
        honest(pipeline, path, stage)
        pipeline.transformer.blocks[1].attn2.to_v.scaling["checked"] *= 2

    monkeypatch.setattr(check, "_load", doubling)
    found = check_file(path, TABLES)
    assert not found.ok
    assert found.results[0].first_missing == "blocks.1.attn2.to_v"
    assert "another dW" in found.results[0].reason


def test_a_written_adapter_has_the_same_delta(tmp_path):
    adapter = make_wan("lora", alpha=2.0)
    back = read_adapter(write_adapter(tmp_path / "a.safetensors", adapter, "diffusers"), TABLES)
    for place, layer in adapter.layers.items():
        expected = layer.tensors["up"] @ layer.tensors["down"] * 0.5
        torch.testing.assert_close(delta(back.layers[place]), expected)


def test_a_lokr_whose_factors_peft_would_ignore_is_written_as_whole_matrices(tmp_path):
    """peft builds a whole matrix if the rank is half its width or more, and loads no factors."""
    layers = {
        LayerPath(None, name): make_lokr(HIDDEN, HIDDEN, torch.Generator().manual_seed(0), rank=3)
        for name in ("blocks.0.attn1.to_q", "blocks.0.attn1.to_k")
    }
    path = write_adapter(tmp_path / "a.safetensors", Adapter(WAN, layers), "diffusers")
    assert check_file(path, TABLES).results[0].loads
    raw = {
        f"transformer.{at.module}.{role}": tensor.clone()
        for at, layer in layers.items()
        for role, tensor in layer.tensors.items()
    }
    save_file(raw, path, {"gracetune.family": "wan"})
    unconverted = check_file(path, TABLES)
    assert not unconverted.ok
    assert unconverted.results[0].is_wrong


def test_a_file_of_a_family_without_a_pipeline_is_read_but_not_loaded(tmp_path):
    layer = make_loha(16, 8, torch.Generator().manual_seed(0))
    adapter = Adapter(any_name_table("tiny"), {LayerPath(None, "context_embedder"): layer})
    path = write_adapter(tmp_path / "a.safetensors", adapter, "diffusers")
    report = check_file(path, TABLES)
    assert not report.ok
    assert "adapter convert FILE --to peft" in report.lines()[0]
    for required in ((), ("comfyui",)):
        with pytest.raises(AdapterError, match="does not load completely"):
            check_file(path, TABLES, required_tools=required).raise_if_failed()
