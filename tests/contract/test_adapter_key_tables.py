"""The key tables agree with diffusers' models and checkpoint converters."""

import re

import diffusers
import pytest
import torch
from adapter_examples import TABLES, make_lora
from adapter_tools import (
    TABLE_NAMES,
    TRANSFORMER_TABLES,
    VARIANTS,
    table_of,
    transformer_config,
)
from diffusers import (
    Flux2Pipeline,
    Krea2Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
)
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_ldm_unet_checkpoint,
    convert_sd3_transformer_checkpoint_to_diffusers,
    convert_wan_transformer_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from safetensors.torch import load_file, save_file
from torch import nn

from gracetune.adapters.files.check_loading import check_file
from gracetune.adapters.files.detect_family import detect_table
from gracetune.adapters.files.io import read_adapter, write_adapter
from gracetune.adapters.files.keys import KeyIndex, LayerPath, parse_key, template_of
from gracetune.adapters.files.layers import Adapter, delta
from gracetune.adapters.files.merge_into_model import merge_into, open_model
from gracetune.config.schema import ModelSection
from gracetune.errors import AdapterError
from gracetune.models.family import SampleShape
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.plan.meta_models import build_meta_model

SD15_DOWN = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
SD15_UP = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
UNET = {"norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
UNETS = {
    "sdxl": lambda: UNet2DConditionModel(
        **UNET,
        block_out_channels=(4, 8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=32,
    ),
    "sd15": lambda: UNet2DConditionModel(
        **UNET,
        block_out_channels=(4, 8, 16, 16),
        down_block_types=SD15_DOWN,
        up_block_types=SD15_UP,
    ),
}
"""U-Nets with all modules of the published ones, by key table. They are named one by one."""


def build_model(family):
    """Return a model with every module that the miniatures of a key table have."""
    if family in UNETS:
        return UNETS[family]()
    models = []
    for small in VARIANTS:
        if table_of(small).family == family:
            _, config = transformer_config(small)
            with without_progress_bars():
                models.append(getattr(diffusers, config["_class_name"]).from_config(config))
    return max(models, key=lambda model: len({template_of(n)[0] for n, _ in model.named_modules()}))


@pytest.fixture(scope="module")
def small_models():
    torch.manual_seed(0)
    return {family: build_model(family) for family in TABLES}


def names_of(table):
    wholes = {one.whole for one in table.fused}
    return ({ours for _, ours in table.rows} | set(table.unfused)) - wholes


@pytest.mark.parametrize("family", TABLES)
def test_every_linear_module_of_a_model_is_in_the_table(family, small_models):
    known = names_of(TABLES[family])
    linear = (nn.Linear, nn.Conv2d, nn.Conv3d)
    modules = [name for name, m in small_models[family].named_modules() if isinstance(m, linear)]
    assert not [name for name in modules if not {name, template_of(name)[0]} & known]


@pytest.mark.parametrize("family", TABLES)
def test_every_name_in_the_table_is_in_the_model(family, small_models):
    parameters = {
        name.removesuffix(".weight") for name, _ in small_models[family].named_parameters()
    }
    assert not [name for name in names_of(TABLES[family]) if name.format(0) not in parameters]


@pytest.mark.parametrize("family", TABLES)
def test_block_linears_are_linear_modules(family, small_models):
    table = TABLES[family]
    linears = {name for name, m in small_models[family].named_modules() if isinstance(m, nn.Linear)}
    assert {name.format(0) for name in table.block_linears} <= linears
    assert set(table.block_linears) <= names_of(table)


@pytest.mark.parametrize("family", TRANSFORMER_TABLES)
def test_block_linears_are_all_linear_modules_of_blocks_but_modulations(family, small_models):
    table = TABLES[family]
    blocks = tuple(f"{kind}.{{}}." for kind, _ in table.max_blocks)
    inside = {
        template
        for name, module in small_models[family].named_modules()
        if isinstance(module, nn.Linear) and (template := template_of(name)[0]).startswith(blocks)
    }
    assert set(table.block_linears) <= inside
    left_out = {name.rpartition("}.")[2] for name in inside - set(table.block_linears)}
    of_images = {"attn2.add_k_proj", "attn2.add_v_proj"}  # of Wan 2.1 I2V
    assert all(re.search(r"norm|_mod\.|modulation", name) for name in left_out - of_images)


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


# Conversion to original names, and loading in diffusers


def original_checkpoint(table, state):
    """Return the weights of a diffusers model with the names and shapes of the original one."""
    parts = {fused.whole: [part for part, _ in fused.parts] for fused in table.fused}
    found = {}
    for theirs, ours in table.rows:
        for number in range(5) if "{}" in ours else [0]:
            names = [name.format(number) for name in parts.get(ours, [ours])]
            for kind in (".weight", ".bias"):
                if all(name + kind in state for name in names):
                    whole = torch.cat([state[name + kind] for name in names])
                    rows, columns = (*state[f"{names[0]}.weight"].shape, 0)[:2]
                    if ours in table.swapped_halves and rows == 2 * columns:
                        whole = torch.cat(whole.chunk(2)[::-1])
                    found[theirs.format(number) + kind] = whole
    return found


def convert_unet(checkpoint, config):
    named = {f"model.diffusion_model.{name}": tensor for name, tensor in checkpoint.items()}
    return convert_ldm_unet_checkpoint(named, config)


CONVERTERS = {
    "flux2": lambda checkpoint, _: convert_flux2_transformer_checkpoint_to_diffusers(checkpoint),
    "sd3": lambda checkpoint, _: convert_sd3_transformer_checkpoint_to_diffusers(
        checkpoint | {"pos_embed": torch.ones(1)}
    ),
    "z_image": lambda checkpoint, _: convert_z_image_transformer_checkpoint_to_diffusers(
        checkpoint
    ),
    "krea2": lambda checkpoint, _: convert_krea2_transformer_checkpoint_to_diffusers(checkpoint),
    "sdxl": convert_unet,
    "sd15": convert_unet,
}


@pytest.mark.parametrize("family", CONVERTERS)
def test_tables_match_diffusers_converters(family, small_models):
    model, table = small_models[family], TABLES[family]
    state = model.state_dict()
    checkpoint = original_checkpoint(table, state)
    converted = CONVERTERS[family](dict(checkpoint), model.config)
    converted.pop("pos_embed.pos_embed", None)
    covered = {
        name
        for name in state
        if {x := name.rpartition(".")[0], template_of(x)[0]} & names_of(table)
    }
    assert set(converted) == covered
    for name, tensor in converted.items():
        assert torch.equal(tensor, state[name]), name


def test_chroma_has_the_names_of_flux():
    flux, chroma = dict(TABLES["flux"].rows), dict(TABLES["chroma"].rows)
    shared = {theirs: ours for theirs, ours in chroma.items() if "guidance" not in theirs}
    assert shared.items() <= flux.items()
    assert TABLES["chroma"].fused == TABLES["flux"].fused


LORA_LOADERS = {
    ("flux2", "comfyui"): Flux2Pipeline,
    ("flux2", "kohya"): Flux2Pipeline,
    ("z_image", "simpletuner-comfyui"): ZImagePipeline,
    ("z_image", "kohya-diffusers"): ZImagePipeline,
    ("krea2", "comfyui"): Krea2Pipeline,
    ("sdxl", "kohya"): StableDiffusionXLPipeline,
    ("sdxl", "kohya-diffusers"): StableDiffusionXLPipeline,
    ("sd15", "kohya-diffusers"): StableDiffusionPipeline,
}


def small_adapter(family, model):
    generator = torch.Generator().manual_seed(2)
    table = TABLES[family]
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers = {
        LayerPath(None, name): make_lora(*m.weight.shape, generator, alpha=2.0)
        for name, m in linears.items()
        if {name, template_of(name)[0]} & set(table.block_linears)
    }
    return Adapter(table, layers)


@pytest.mark.parametrize(("family", "form"), LORA_LOADERS)
def test_diffusers_reads_the_same_lora_from_other_formats(family, form, small_models, tmp_path):
    """diffusers' own conversion of the keys gives the dW of the adapter for every module."""
    model = small_models[family]
    adapter = small_adapter(family, model)
    path = write_adapter(tmp_path / "a.safetensors", adapter, form)
    extra = {"unet_config": model.config} if family == "sdxl" else {}
    result = LORA_LOADERS[family, form].lora_state_dict(load_file(path), **extra)
    tensors, alphas = result if isinstance(result, tuple) else (result, {})
    tensors |= {key: torch.tensor(alpha) for key, alpha in (alphas or {}).items()}
    save_file({key: t.contiguous() for key, t in tensors.items()}, tmp_path / "b.safetensors")
    found = read_adapter(tmp_path / "b.safetensors", {}, adapter.table)
    assert set(found.layers) == set(adapter.layers)
    for place, layer in adapter.layers.items():
        torch.testing.assert_close(delta(found.layers[place]), delta(layer), msg=str(place))


def families_without_header(path):
    """Return the families that a file may be for: one and those with the same names and sizes.

    The miniatures of some families differ in their width alone, which makes the file ambiguous.
    """
    try:
        table = read_adapter(path, TABLES).table
    except AdapterError as error:
        if error.kind != "ambiguous":
            raise
        return str(error).partition(" is a key in ")[2].partition(" adapters")[0].split(" and ")
    return [table.family, *table.preferred_over]


@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize(
    "form", ["comfyui", "diffusers", "kohya", "kohya-diffusers", "lycoris", "peft", "bare-original"]
)
def test_families_are_read_in_all_formats(family, form, small_models, tmp_path):
    adapter = small_adapter(family, small_models[family])
    name = "folder" if form == "peft" else "a.safetensors"
    path = write_adapter(tmp_path / name, adapter, form)
    tensors = load_file(path)
    save_file(tensors, path)  # without the header, which names the family
    assert family in families_without_header(path)
    found = read_adapter(path, TABLES, adapter.table)
    back = write_adapter(tmp_path / "back.safetensors", found, "diffusers")
    assert all(key.startswith(f"{adapter.table.component}.") for key in load_file(back))
    found = read_adapter(back, TABLES)
    assert set(found.layers) == set(adapter.layers)
    for place, layer in adapter.layers.items():
        torch.testing.assert_close(delta(found.layers[place]), delta(layer), msg=str(place))


@pytest.mark.parametrize("family", TABLES)
def test_the_family_of_a_published_model_is_found_without_a_header(family):
    """The names, numbers and sizes of the layers suffice, except for families with equal ones."""
    table = TABLES[family]
    name = next(family for family, table_name in TABLE_NAMES.items() if table_name == table.family)
    published = build_meta_model(ModelSection(family=name), SampleShape(512, 512)).model
    tensors = {}
    for module, linear in published.named_modules():
        known = {module, template_of(module)[0]} & set(table.block_linears)
        if isinstance(linear, nn.Linear) and known:
            rows, columns = linear.weight.shape
            start = f"{table.component}.{module}"
            tensors[f"{start}.lora_A.weight"] = torch.empty(4, columns, device="meta")
            tensors[f"{start}.lora_B.weight"] = torch.empty(rows, 4, device="meta")
    found, notices = detect_table(tensors, {}, TABLES)
    assert found.family == family or (notices and family in found.preferred_over)


LITERAL_KEYS = {
    "sdxl": [
        (
            "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.lora_down.weight",
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
        ),
        (
            "lora_unet_middle_block_1_transformer_blocks_9_ff_net_0_proj.lora_up.weight",
            "mid_block.attentions.0.transformer_blocks.9.ff.net.0.proj",
        ),
        ("lora_unet_output_blocks_5_1_proj_in.alpha", "up_blocks.1.attentions.2.proj_in"),
        ("lora_unet_output_blocks_2_2_conv.lora_down.weight", "up_blocks.0.upsamplers.0.conv"),
        (
            "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_out_0.dora_scale",
            "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0",
        ),
        (
            "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora.up.weight",
            "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0",
        ),
    ],
    "sd15": [
        (
            "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn2_to_v.lora_up.weight",
            "down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_v",
        ),
        ("lora_unet_output_blocks_2_1_conv.lora_down.weight", "up_blocks.0.upsamplers.0.conv"),
        (
            "unet.up_blocks.1.attentions.0.proj_in.lora.down.weight",
            "up_blocks.1.attentions.0.proj_in",
        ),
    ],
    "z_image": [
        ("lora_unet_layers_3_attention_qkv.lora_down.weight", "layers.3.attention.to_qkv"),
        ("lora_unet_layers_3_attention_to_out_0.alpha", "layers.3.attention.to_out.0"),
        (
            "diffusion_model.noise_refiner.0.adaLN_modulation.0.lora_A.weight",
            "noise_refiner.0.adaLN_modulation.0",
        ),
        ("diffusion_model.layers.3.attention.out.lora_B.weight", "layers.3.attention.to_out.0"),
    ],
    "flux2": [
        (
            "diffusion_model.single_blocks.47.linear1.lokr_w1",
            "single_transformer_blocks.47.attn.to_qkv_mlp_proj",
        ),
        (
            "lycoris_transformer_blocks_0_ff_context_linear_in.lokr_w2",
            "transformer_blocks.0.ff_context.linear_in",
        ),
        (
            "transformer.transformer_blocks.0.attn.to_qkv.lokr_w1",
            "transformer_blocks.0.attn.to_qkv",
        ),
    ],
    "krea2": [
        (
            "lora_unet_txtfusion_layerwise_blocks_1_mlp_down.lora_down.weight",
            "text_fusion.layerwise_blocks.1.ff.down",
        ),
        ("base_model.model.blocks.0.attn.wo.lora_A.weight", "transformer_blocks.0.attn.to_out.0"),
    ],
    "sd3": [
        (
            "lora_unet_joint_blocks_23_x_block_attn2_qkv.lora_down.weight",
            "transformer_blocks.23.attn2.to_qkv",
        ),
        (
            "lora_transformer_transformer_blocks_0_attn_add_q_proj.alpha",
            "transformer_blocks.0.attn.add_q_proj",
        ),
    ],
    "chroma": [
        (
            "diffusion_model.distilled_guidance_layer.layers.4.in_layer.lora_A.weight",
            "distilled_guidance_layer.layers.4.linear_1",
        ),
    ],
}


@pytest.mark.parametrize(
    ("family", "key", "module"),
    [(family, *case) for family, cases in LITERAL_KEYS.items() for case in cases],
)
def test_literal_keys_are_parsed(family, key, module):
    found = parse_key(key, KeyIndex(TABLES[family]))
    assert found.path == LayerPath(None, module)


def test_families_with_the_same_keys_are_told_apart_by_sizes(small_models, tmp_path):
    adapter = small_adapter("flux2", small_models["flux2"])
    path = write_adapter(tmp_path / "a.safetensors", adapter, "kohya")
    tensors = load_file(path)
    save_file(tensors, path)
    assert read_adapter(path, TABLES).table.family == "flux2"
    attention = {key: t for key, t in tensors.items() if "img_attn_qkv" in key}
    save_file(attention, path)
    found = read_adapter(path, TABLES)
    assert found.table.family == "flux"
    assert "flux is assumed" in found.notices[0]
    save_file(attention, path, metadata={"modelspec.architecture": "Flux-2-dev/lora"})
    assert read_adapter(path, TABLES).table.family == "flux2"


def test_the_last_text_norm_of_sd3_is_swapped(small_models, tmp_path):
    """It has (scale, shift) in diffusers and (shift, scale) in the original; others have six."""
    generator = torch.Generator().manual_seed(3)
    table = TABLES["sd3"]
    rows = {
        "transformer_blocks.0.norm1_context.linear": 6,
        "transformer_blocks.1.norm1_context.linear": 2,
    }
    layers = {LayerPath(None, name): make_lora(16 * n, 16, generator) for name, n in rows.items()}
    path = write_adapter(tmp_path / "a.safetensors", Adapter(table, layers), "comfyui")
    up = {key: t for key, t in load_file(path).items() if "lora_B" in key}
    first, last = (layer.tensors["up"] for layer in layers.values())
    name = "diffusion_model.joint_blocks.{}.context_block.adaLN_modulation.1.lora_B.weight"
    assert torch.equal(up[name.format(0)], first)
    assert torch.equal(up[name.format(1)], torch.cat(last.chunk(2)[::-1]))
    found = read_adapter(path, {}, table)
    for place, layer in layers.items():
        assert torch.equal(found.layers[place].tensors["up"], layer.tensors["up"])
