"""Adapter files as other trainers write them are read with the right dW, or refused by name.

Each file here has literal keys and tensors in the shapes that the tool gives them. The expected
weight changes are computed from the same tensors by the formulas of the tool. The files of
test_adapter_spellings.py are written by gracetune first; these are not.
"""

import re

import pytest
import torch
from adapter_examples import TABLES, make_lora, map_tensors
from adapter_tools import adapted_modules, build_transformer, make_adapter
from safetensors.torch import load_file, save_file
from test_adapter_spellings import SPELLINGS, write_spelling

from gracetune.adapters.files.fused_projections import split_fused
from gracetune.adapters.files.io import read_adapter, write_adapter
from gracetune.adapters.files.keys import LayerPath
from gracetune.adapters.files.layers import Adapter, delta, delta_bias, merge_weight
from gracetune.cli.main import main
from gracetune.errors import AdapterError

RANK = 4


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def lora(rows, columns, *kernel):
    """Return the factors of a LoRA, `down` and `up`, in the shapes of a layer or convolution."""
    ones = [1] * len(kernel)
    return randn(RANK, columns, *kernel), randn(rows, RANK, *ones, seed=1)


def product(down, up, scale=1.0):
    return (up.flatten(1) @ down.flatten(1)).reshape(len(up), *down.shape[1:]) * scale


def kohya(name, down, up, alpha=None):
    tensors = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    return tensors if alpha is None else tensors | {f"{name}.alpha": alpha}


TEXT_ENCODERS = {
    **kohya("lora_te1_text_model_encoder_layers_0_mlp_fc1", *lora(8, 8), torch.tensor(2.0)),
    **kohya("lora_te2_text_model_encoder_layers_0_self_attn_k_proj", *lora(8, 8)),
}
CROSS, MID = "down_blocks.1.attentions.0", "mid_block.attentions.0"


def sdxl_locon():
    """sd-scripts with `conv_dim`: sgm names, half precision, alpha of any kind, both encoders."""
    conv, shortcut, linear, wide = (
        lora(16, 8, 3, 3),
        lora(16, 8, 1, 1),
        lora(8, 8),
        lora(8, 8, 1, 1),
    )
    tensors = {
        **kohya("lora_unet_input_blocks_4_0_in_layers_2", *conv, torch.tensor(2.0)),
        **kohya("lora_unet_input_blocks_4_0_skip_connection", *shortcut, torch.tensor([8.0])),
        **kohya("lora_unet_input_blocks_4_1_proj_in", *linear, torch.tensor(1, dtype=torch.int64)),
        **kohya("lora_unet_middle_block_1_proj_out", *wide),  # a 1x1 convolution in SD 1.5
        **TEXT_ENCODERS,
    }
    tensors = {k: t.half() if t.is_floating_point() else t for k, t in tensors.items()}
    half = {
        name: [t.half().float() for t in pair]
        for name, pair in {
            "conv": conv,
            "shortcut": shortcut,
            "linear": linear,
            "wide": wide,
        }.items()
    }
    return tensors, {
        "down_blocks.1.resnets.0.conv1": product(*half["conv"], 2 / RANK),
        "down_blocks.1.resnets.0.conv_shortcut": product(*half["shortcut"], 8 / RANK),
        f"{CROSS}.proj_in": product(*half["linear"], 1 / RANK),
        f"{MID}.proj_out": product(*half["wide"]),
    }


def old_attention_processors():
    """diffusers of 2023: `save_attn_procs`, without a prefix, and with alpha after the weight."""
    block = "down_blocks.0.attentions.0.transformer_blocks.0"
    query, out = lora(8, 8), lora(8, 8)
    tensors = {
        f"{block}.attn1.processor.to_q_lora.down.weight": query[0],
        f"{block}.attn1.processor.to_q_lora.up.weight": query[1],
        f"{block}.attn1.processor.to_q_lora.down.weight.alpha": torch.tensor(2.0),
        f"{block}.attn2.processor.to_out_lora.down.weight": out[0],
        f"{block}.attn2.processor.to_out_lora.up.weight": out[1],
    }
    return tensors, {
        f"{block}.attn1.to_q": product(*query, 2 / RANK),
        f"{block}.attn2.to_out.0": product(*out),
    }


def comfyui_saved():
    """ComfyUI's node that saves the difference of two models: small weights as `diff`."""
    linear, norm, bias = lora(8, 8), randn(8), randn(8, seed=3)
    tensors = {
        **kohya("diffusion_model.input_blocks.4.1.proj_in", *linear),
        "diffusion_model.input_blocks.4.1.proj_in.diff_b": bias,
        "diffusion_model.input_blocks.4.1.norm.diff": norm,
        "diffusion_model.input_blocks.4.1.norm.diff_b": bias,
        **kohya(
            "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1", *lora(8, 8)
        ),
    }
    return tensors, {f"{CROSS}.proj_in": product(*linear), f"{CROSS}.norm": norm}


def lycoris_norms_and_cores():
    """LyCORIS: trained norms, Tucker decompositions, and a LoKr with a flattened kernel."""
    conv = "lora_unet_input_blocks_4_0_in_layers_2"
    down, up, core = randn(RANK, 8, 1, 1), randn(16, RANK, 1, 1), randn(RANK, RANK, 3, 3)
    w1, w2_a, w2_b = randn(2, 2), randn(8, RANK), randn(RANK, 4 * 9)
    norm = randn(8)
    tensors = {
        **kohya(conv, down, up, torch.tensor(2.0)),
        f"{conv}.lora_mid.weight": core,
        "lora_unet_input_blocks_5_0_in_layers_2.lokr_w1": w1,
        "lora_unet_input_blocks_5_0_in_layers_2.lokr_w2_a": w2_a,
        "lora_unet_input_blocks_5_0_in_layers_2.lokr_w2_b": w2_b,
        "lora_unet_input_blocks_5_0_in_layers_2.alpha": torch.tensor(2.0),
        "lora_unet_input_blocks_4_1_norm.w_norm": norm,
        "lora_unet_input_blocks_4_1_norm.b_norm": norm,
    }
    tucker = torch.einsum("abxy,oa,bi->oixy", core, up.flatten(1), down.flatten(1)) * 2 / RANK
    return tensors, {
        "down_blocks.1.resnets.0.conv1": tucker,
        "down_blocks.1.resnets.1.conv1": torch.kron(w1, w2_a @ w2_b) * 2 / RANK,
        f"{CROSS}.norm": norm,
    }


def wan_distilled():
    """Distilled Wan (CausVid, LightX2V): biases, norms, a 5-D patch embedding, modulations."""
    query, patch, bias = lora(8, 8), randn(8, 4, 1, 2, 2), randn(8)
    start = "diffusion_model.blocks.0"
    tensors = {
        **kohya(f"{start}.self_attn.q", *query),
        f"{start}.self_attn.q.diff_b": bias,
        f"{start}.self_attn.norm_k.diff": bias,
        f"{start}.norm3.diff": bias,
        f"{start}.norm3.diff_b": bias,
        "diffusion_model.patch_embedding.diff": patch,
        "diffusion_model.patch_embedding.diff_b": bias,
        "diffusion_model.time_projection.1.diff_b": bias,
        f"{start}.diff_m": randn(1, 6, 8),
    }
    return tensors, {
        "blocks.0.attn1.to_q": product(*query),
        "blocks.0.attn1.norm_k": bias,
        "blocks.0.norm2": bias,
        "patch_embedding": patch,
        "blocks.0.scale_shift_table": randn(1, 6, 8),
    }


def qwen_lightning():
    """Qwen-Image-Lightning: no prefix, kohya's suffixes, and mixed dtypes."""
    down, up = lora(8, 8)
    block = "transformer_blocks.0.attn.add_k_proj"
    alpha = torch.tensor(2.0, dtype=torch.bfloat16)
    other = "transformer_blocks.0.img_mod.1"
    tensors = kohya(block, down.bfloat16(), up.half(), alpha) | kohya(other, down, up)
    return tensors, {
        block: product(down.bfloat16().float(), up.half().float(), 2 / RANK),
        other: product(down, up),
    }


def flux2_with_cut_names():
    """Some exports of FLUX.2 have cut `transformer_blocks` to `sformer_blocks`."""
    down, up = lora(8, 8)
    names = ("sformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_out")
    factors = {"lora_A": down, "lora_B": up}
    tensors = {f"diffusion_model.{n}.{x}.weight": t for n in names for x, t in factors.items()}
    return tensors, {
        "transformer_blocks.0.attn.to_q": product(down, up),
        "single_transformer_blocks.0.attn.to_out": product(down, up),
    }


FILES = {
    "sd-scripts, convolutions": ("sdxl", sdxl_locon),
    "save_attn_procs": ("sd15", old_attention_processors),
    "saved by ComfyUI": ("sdxl", comfyui_saved),
    "LyCORIS, norms and cores": ("sdxl", lycoris_norms_and_cores),
    "distilled Wan": ("wan", wan_distilled),
    "Qwen-Image-Lightning": ("qwen_image", qwen_lightning),
    "FLUX.2, cut names": ("flux2", flux2_with_cut_names),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_another_tool_has_the_dw_of_the_tool(case, tmp_path):
    family, build = FILES[case]
    tensors, expected = build()
    path = tmp_path / "a.safetensors"
    save_file({key: t.clone() for key, t in tensors.items()}, path)
    found = read_adapter(path, TABLES)
    assert found.table.family == family
    modules = {path.module: layer for path, layer in found.layers.items()}
    assert expected.keys() == {m for m, x in modules.items() if x.tensors.keys() != {"diff_b"}}
    for module, change in expected.items():
        torch.testing.assert_close(delta(modules[module], change.shape), change, msg=module)
    dropped = any("te1" in key or "text_encoders" in key for key in tensors)
    assert len([n for n in found.notices if "text encoders" in n]) == dropped
    copied = write_adapter(tmp_path / "b.safetensors", found, "comfyui")
    back = split_fused(read_adapter(copied, TABLES))
    for place, layer in found.layers.items():
        if "diff_b" in layer.tensors:
            assert torch.equal(delta_bias(back.layers[place]), delta_bias(layer))
        if place.module in expected:
            torch.testing.assert_close(delta(back.layers[place]), delta(layer))


DORAS = {
    "LyCORIS, rows": ("lora_unet_input_blocks_4_0_in_layers_2", "dora_scale", (16, 1, 1, 1), True),
    "OneTrainer, columns": (
        "lora_unet_down_blocks_1_resnets_0_conv1",
        "dora_scale",
        (1, 8, 1, 1),
        False,
    ),
    "a vector": ("lora_unet_down_blocks_1_resnets_0_conv1", "dora_scale", (16,), True),
    "peft": ("unet.down_blocks.1.resnets.0.conv1", "lora_magnitude_vector", (1, 16, 1, 1), True),
    "peft, live": (
        "base_model.model.down_blocks.1.resnets.0.conv1",
        "lora_magnitude_vector.default.weight",
        (1, 16, 1, 1),
        True,
    ),
}


@pytest.mark.parametrize("case", DORAS)
def test_magnitudes_of_a_convolution_are_read_by_rows_or_by_columns(case, tmp_path):
    """A DoRA of peft has the rows on the second axis, where other tools have the columns."""
    name, suffix, shape, by_rows = DORAS[case]
    down, up = lora(16, 8, 3, 3)
    magnitude = randn(*shape).abs() + 0.5
    if suffix == "dora_scale":
        tensors = kohya(name, down, up)
    else:
        middle = ".default" if "default" in suffix else ""
        tensors = {f"{name}.lora_A{middle}.weight": down, f"{name}.lora_B{middle}.weight": up}
    path = tmp_path / "a.safetensors"
    save_file(tensors | {f"{name}.{suffix}": magnitude}, path)
    (layer,) = read_adapter(path, TABLES, TABLES["sdxl"]).layers.values()
    weight = randn(16, 8, 3, 3, seed=5)
    changed = weight + product(down, up)
    axes = (1, 2, 3) if by_rows else (0, 2, 3)
    factors = magnitude.reshape((-1, 1, 1, 1) if by_rows else (1, -1, 1, 1))
    expected = changed * factors / torch.linalg.vector_norm(changed, dim=axes, keepdim=True)
    torch.testing.assert_close(merge_weight(layer, weight), expected)


@pytest.fixture(scope="module")
def small_adapters():
    """Return an adapter of every family, on a few modules in and outside of its blocks."""
    found = {}
    for family, table in TABLES.items():
        model = build_transformer(family)
        whole = make_adapter(family, "lora", model, 3.0, outside=True)
        inside = [LayerPath(None, name) for name in adapted_modules(family, model)[:14]]
        outside = [path for path in whole.layers if path not in inside][-11:]
        found[family] = Adapter(table, {p: whole.layers[p] for p in (*inside, *outside)})
    return found


@pytest.mark.parametrize("family", sorted(TABLES))
def test_every_spelling_is_read_for_every_family(family, small_adapters, tmp_path):
    adapter = small_adapters[family]
    component = adapter.table.component
    for name, (form, change, stage) in SPELLINGS.items():
        if stage is not None:
            continue

        def spell(key, change=change):
            key = change(re.sub(f"^{component}\\.", "transformer.", key))
            return re.sub(r"\btransformer\.(?!.*\btransformer\.)", f"{component}.", key)

        path = write_spelling(tmp_path / f"{name.replace('/', '')}", adapter, form, spell)
        found = split_fused(read_adapter(path, TABLES, adapter.table)).layers
        assert found.keys() == adapter.layers.keys(), name
        for place, layer in adapter.layers.items():
            change_of = delta(layer)
            torch.testing.assert_close(delta(found[place], change_of.shape), change_of, msg=name)


REFUSED = {
    "IA3": (
        [
            "lora_unet_input_blocks_4_1_proj_in.weight",
            "lora_unet_input_blocks_4_1_proj_in.on_input",
        ],
        "IA3",
    ),
    "OFT": (
        [
            "lora_unet_input_blocks_4_1_proj_in.oft_blocks",
            "lora_unet_input_blocks_4_1_proj_in.rescale",
        ],
        "OFT",
    ),
    "GLoRA": (
        [f"lora_unet_input_blocks_4_1_proj_in.{x}.weight" for x in ("a1", "a2", "b1", "b2")],
        "GLoRA",
    ),
    "T-LoRA": (
        [
            f"lora_unet_input_blocks_4_1_proj_in.{x}"
            for x in ("q_layer.weight", "p_layer.weight", "lambda_layer")
        ],
        "T-LoRA",
    ),
    "a whole model": (
        [
            "model.diffusion_model.input_blocks.0.0.weight",
            "model.diffusion_model.input_blocks.0.0.bias",
        ],
        "weight of the model itself",
    ),
    "a whole transformer": (
        ["transformer_blocks.0.attn.to_q.weight"],
        "weight of the model itself",
    ),
    "textual inversion": (["clip_g", "clip_l"], "textual inversion"),
    "LLLite": (
        ["lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight"],
        "control network",
    ),
    "Control-LoRA": (["lora_controlnet", "input_blocks.0.0.weight"], "control network"),
    "Custom Diffusion": (
        [
            "mid_block.attentions.0.transformer_blocks.0.attn2.processor.to_k_custom_diffusion.weight"
        ],
        "Custom Diffusion",
    ),
    "modules_to_save": (["base_model.model.conv_in.modules_to_save.weight"], "modules_to_save"),
    "norms of Flux": (
        ["diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff"],
        "changes a norm",
    ),
    "VeRA": (["base_model.model.conv_in.vera_lambda_b"], "method of peft"),
    "text encoders alone": (list(TEXT_ENCODERS), "belong to text encoders"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(case, tmp_path, capsys):
    keys, reason = REFUSED[case]
    path = tmp_path / "a.safetensors"
    save_file({key: torch.ones(4, 4) for key in keys}, path)
    with pytest.raises(AdapterError, match=reason) as caught:
        read_adapter(path, TABLES)
    assert caught.value.kind == "unsupported"
    assert main(["adapter", "inspect", str(path)]) != 0
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("form", ["kohya", "diffusers", "lycoris", "comfyui"])
def test_mixed_dtypes_are_converted(form, tmp_path):
    """Some tools merge adapters of different precisions into one file."""
    layers = {
        LayerPath(None, f"{CROSS}.transformer_blocks.0.attn1.to_{x}"): map_tensors(
            make_lora(8, 8, torch.Generator().manual_seed(i), alpha=3.0), lambda t, d=dtype: t.to(d)
        )
        for i, (x, dtype) in enumerate(
            (("q", torch.half), ("k", torch.bfloat16), ("v", torch.float))
        )
    }
    path = write_adapter(tmp_path / "a.safetensors", Adapter(TABLES["sdxl"], layers), form)
    if form == "kohya":
        assert {t.dtype for t in load_file(path).values()} == {
            torch.half,
            torch.bfloat16,
            torch.float,
        }
    back = read_adapter(path, TABLES)
    for place, layer in layers.items():
        torch.testing.assert_close(delta(back.layers[place]), delta(layer))


@pytest.mark.parametrize(("width", "family"), [(768, "sd15"), (2048, "sdxl"), (16, "sdxl")])
def test_unets_are_told_apart_by_the_width_of_text(width, family, tmp_path):
    """A file on few modules may have names that both models have."""
    name = f"unet.{CROSS}.transformer_blocks.0.attn2.to_k"
    down, up = lora(8, width)
    path = tmp_path / "a.safetensors"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, path)
    found = read_adapter(path, TABLES)
    assert found.table.family == family
    assert [note for note in found.notices if "sdxl is assumed" in note] == [] or width == 16
