"""The key tables agree with diffusers' models and checkpoint converters."""

import pytest
import torch
from adapter_examples import TABLES, make_lora
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    WanTransformer3DModel,
)
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_wan_transformer_to_diffusers,
)
from safetensors.torch import load_file, save_file
from torch import nn

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.io import write_adapter
from gracetune.adapters.files.keys import KeyIndex, LayerPath, template_of
from gracetune.adapters.files.layers import Adapter
from gracetune.adapters.files.merge_into_model import merge_into, open_model

with torch.device("meta"):
    MODELS = {
        "wan": WanTransformer3DModel(num_layers=2, image_dim=16, added_kv_proj_dim=16),
        "flux": FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True),
        "qwen_image": QwenImageTransformer2DModel(num_layers=2),
    }


def names_of(table):
    wholes = {one.whole for one in table.fused}
    return ({ours for _, ours in table.rows} | set(table.unfused)) - wholes


@pytest.mark.parametrize("family", TABLES)
def test_every_linear_module_of_a_model_is_in_the_table(family):
    known = names_of(TABLES[family])
    linear = (nn.Linear, nn.Conv3d)
    modules = [name for name, m in MODELS[family].named_modules() if isinstance(m, linear)]
    assert {template_of(name)[0] for name in modules} <= known


@pytest.mark.parametrize("family", TABLES)
def test_every_name_in_the_table_is_in_the_model(family):
    parameters = {name.removesuffix(".weight") for name, _ in MODELS[family].named_parameters()}
    for template in names_of(TABLES[family]):
        assert template.format(1) in parameters, template


@pytest.mark.parametrize("family", TABLES)
def test_block_linears_are_the_linear_modules_of_blocks(family):
    table = TABLES[family]
    inside = {
        template_of(name)[0]
        for name, module in MODELS[family].named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name
    }
    assert set(table.block_linears) <= inside
    left_out = {name.rpartition("}.")[2] for name in inside - set(table.block_linears)}
    modulation = {"norm1.linear", "norm1_context.linear", "norm.linear", "img_mod.1", "txt_mod.1"}
    assert left_out <= modulation | {"attn2.add_k_proj", "attn2.add_v_proj"}


def original_wan():
    """Return (original, diffusers) names of every tensor of a checkpoint with two blocks."""
    names = []
    for theirs, ours in TABLES["wan"].rows:
        for number in (0, 1) if "{}" in theirs else ("",):
            name = theirs.format(number)
            tail = "" if ours in TABLES["wan"].bare_parameters else ".weight"
            names.append((name + tail, ours.format(number) + tail))
    return names


def test_wan_names_match_diffusers_converter():
    names = original_wan()
    checkpoint = {theirs: torch.tensor([float(i)]) for i, (theirs, _) in enumerate(names)}
    converted = convert_wan_transformer_to_diffusers(dict(checkpoint))
    assert set(converted) == {ours for _, ours in names}
    for theirs, ours in names:
        assert torch.equal(converted[ours], checkpoint[theirs]), (theirs, ours)


def original_flux(hidden=8):
    """Return a tiny Flux checkpoint in original names, with all that the converter needs."""
    generator = torch.Generator().manual_seed(0)
    index = KeyIndex(TABLES["flux"])
    sizes = {"qkv": 3, "linear1": 7, "img_mlp.0": 4, "txt_mlp.0": 4, "modulation.lin": 3}
    sizes |= {"img_mod.lin": 6, "txt_mod.lin": 6, "adaLN_modulation.1": 2}
    into = {"linear2": 5, "mlp.2": 4}
    tensors = {}
    for template in index.templates("original").values():
        name = template.format(0)
        rows = next((n for end, n in sizes.items() if name.endswith(end)), 1) * hidden
        columns = next((n for end, n in into.items() if name.endswith(end)), 1) * hidden
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator)
        tensors[f"{name}.bias"] = torch.randn(rows, generator=generator)
    for norm in ("img_attn.norm", "txt_attn.norm"):
        for kind in ("query_norm", "key_norm"):
            tensors[f"double_blocks.0.{norm}.{kind}.scale"] = torch.ones(hidden)
    for kind in ("query_norm", "key_norm"):
        tensors[f"single_blocks.0.norm.{kind}.scale"] = torch.ones(hidden)
    return tensors


def test_merging_commutes_with_diffusers_conversion_of_the_checkpoint(tmp_path):
    """Covers fused projections, swapped halves and names, at the full width of the model."""
    hidden = 3072  # the converter assumes the published width
    generator = torch.Generator().manual_seed(1)
    checkpoint = {
        name: torch.zeros(()).expand(tensor.shape[0] // 8 * hidden, *tensor.shape[1:])
        for name, tensor in original_flux().items()
        if "norm." not in name or "scale" not in name
    }
    checkpoint = {name: tensor.clone() for name, tensor in checkpoint.items()}
    for name, tensor in original_flux().items():
        if name.endswith(".scale"):
            checkpoint[name] = tensor
    for name in (
        "double_blocks.0.img_attn.qkv",
        "single_blocks.0.linear1",
        "final_layer.adaLN_modulation.1",
    ):
        tensor = checkpoint[f"{name}.weight"]
        checkpoint[f"{name}.weight"] = torch.randn(tensor.shape, generator=generator)
    save_file(checkpoint, tmp_path / "original.safetensors")
    save_file(
        convert_flux_transformer_checkpoint_to_diffusers(dict(checkpoint)),
        tmp_path / "diffusers.safetensors",
    )
    sizes = {
        "transformer_blocks.0.attn.to_q": hidden,
        "transformer_blocks.0.attn.to_v": hidden,
        "single_transformer_blocks.0.attn.to_k": hidden,
        "single_transformer_blocks.0.proj_mlp": 4 * hidden,
        "norm_out.linear": 2 * hidden,
        "transformer_blocks.0.ff_context.net.0.proj": 4 * hidden,
    }
    layers = {LayerPath(None, name): make_lora(out, 8, generator) for name, out in sizes.items()}
    adapter = Adapter(TABLES["flux"], layers)
    for name in ("original", "diffusers"):
        source = tmp_path / f"{name}.safetensors"
        assert open_model(source, TABLES["flux"]).naming == name
        merge_into(
            source, tmp_path / f"{name}-merged.safetensors", [(adapter, 1.0)], TABLES["flux"]
        )
    merged = load_file(tmp_path / "original-merged.safetensors")
    expected = load_file(tmp_path / "diffusers-merged.safetensors")
    found = convert_flux_transformer_checkpoint_to_diffusers(dict(merged))
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, msg=key)
    for name in sizes:
        assert expected[f"{name}.weight"].any()


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_a_flux_lora_of_fused_projections_loads_in_diffusers(form, tmp_path):
    generator = torch.Generator().manual_seed(1)
    names = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0"]
    layers = {
        LayerPath(None, f"transformer_blocks.0.attn.{name}"): make_lora(
            12, 12, generator, alpha=2.0
        )
        for name in names
    }
    path = write_adapter(tmp_path / "a.safetensors", Adapter(TABLES["flux"], layers), form)
    found = check_file(path, TABLES, table=TABLES["flux"])
    assert [target.matched for target in found.results] == [7, 7], found.lines()
