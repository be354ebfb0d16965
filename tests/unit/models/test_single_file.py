"""Single-file checkpoints: recognition, conversion of names, fp8 scales, and whole models."""

from __future__ import annotations

import json
from importlib import import_module

import diffusers
import pytest
import torch
from fakes.hub_server import Repository, serve_hub, use_hub
from fakes.miniatures import MINIATURES, write_miniature
from safetensors.torch import load_file, save_file

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError
from gracetune.models.checkpoint_header import (
    check_family,
    matching_models,
    read_header,
)
from gracetune.models.family import load_family
from gracetune.models.locate import locate_model
from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.models.registry import FAMILIES, QWEN_NAMES
from gracetune.models.single_file import _convert, dequantize

COMFYUI = "model.diffusion_model."
NAMES = ("qwen-image", "flux2-dev", "flux2-klein", "sd35-large", "sd35-medium", "z-image", "krea2")
NAMES += ("wan21-t2v", "wan21-i2v", "sd15", "sdxl")
"""Miniatures that diffusers' conversion works for: those of FLUX.1 and Chroma need a full width."""
NORMS = {
    "flux": (
        ("img_attn.norm.query_norm.scale", "attn.norm_q.weight"),
        ("img_attn.norm.key_norm.scale", "attn.norm_k.weight"),
        ("txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight"),
        ("txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight"),
    ),
}
RENAMED = {
    "flux2": [
        *((f"double_blocks.{{}}.{a}", f"transformer_blocks.{{}}.{b}") for a, b in NORMS["flux"]),
        (
            "single_blocks.{}.norm.query_norm.scale",
            "single_transformer_blocks.{}.attn.norm_q.weight",
        ),
        ("single_blocks.{}.norm.key_norm.scale", "single_transformer_blocks.{}.attn.norm_k.weight"),
    ],
    "sd3": [
        ("pos_embed", "pos_embed.pos_embed"),
        *(
            (
                f"joint_blocks.{{}}.{part}_block.{attn}.ln_{x}.weight",
                f"transformer_blocks.{{}}.{ours}",
            )
            for part, attn, x, ours in (
                ("x", "attn", "q", "attn.norm_q.weight"),
                ("x", "attn", "k", "attn.norm_k.weight"),
                ("context", "attn", "q", "attn.norm_added_q.weight"),
                ("context", "attn", "k", "attn.norm_added_k.weight"),
                ("x", "attn2", "q", "attn2.norm_q.weight"),
                ("x", "attn2", "k", "attn2.norm_k.weight"),
            )
        ),
    ],
    "z_image": [
        *(
            (f"{blocks}.{{}}.attention.{x}_norm.weight", f"{blocks}.{{}}.attention.norm_{x}.weight")
            for blocks in ("layers", "noise_refiner", "context_refiner")
            for x in "qk"
        ),
    ],
    "krea2": [
        ("blocks.{}.attn.qknorm.qnorm.scale", "transformer_blocks.{}.attn.norm_q.weight"),
        ("blocks.{}.attn.qknorm.knorm.scale", "transformer_blocks.{}.attn.norm_k.weight"),
        ("blocks.{}.prenorm.scale", "transformer_blocks.{}.norm1.weight"),
        ("blocks.{}.postnorm.scale", "transformer_blocks.{}.norm2.weight"),
        ("last.norm.scale", "final_layer.norm.weight"),
        ("txtmlp.0.scale", "txt_in.norm.weight"),
        ("last.modulation.lin", "final_layer.scale_shift_table"),
    ],
}
"""Original and diffusers' names of the weights that an adapter never changes, by family."""


def original_weights(family, state):
    """Return a diffusers model's weights by the names and in the shapes of the original one."""
    table = import_module(FAMILIES[family].module).KEY_TABLE
    parts = {fused.whole: [part for part, _ in fused.parts] for fused in table.fused}
    found, used = {}, set()
    for theirs, ours in table.rows:
        for number in range(4) if "{}" in ours else [0]:
            names = [name.format(number) for name in parts.get(ours, [ours])]
            for kind in (".weight", ".bias", ""):
                if not all(name + kind in state for name in names):
                    continue
                whole = torch.cat([state[name + kind] for name in names])
                weight = state.get(f"{names[0]}.weight")
                is_pair = weight is not None and weight.shape[0] == 2 * weight.shape[-1]
                if ours in table.swapped_halves and is_pair:
                    whole = torch.cat(whole.chunk(2)[::-1])
                found[theirs.format(number) + kind] = whole
                used |= {name + kind for name in names}
    for theirs, ours in RENAMED.get(family, []):
        for number in range(4):
            if ours.format(number) in state:
                found[theirs.format(number)] = state[ours.format(number)]
                used.add(ours.format(number))
    for name in set(state) - used:  # the rest, with the original release's names where they differ
        found[RENAMES_OF_REST.get(family, lambda n: n)(name)] = state[name]
    return {name: tensor.clone() for name, tensor in found.items()}


def krea2_name(name):
    for ours, theirs in (
        ("transformer_blocks.", "blocks."),
        ("text_fusion.", "txtfusion."),
        (".attn.norm_q.weight", ".attn.qknorm.qnorm.scale"),
        (".attn.norm_k.weight", ".attn.qknorm.knorm.scale"),
        (".norm1.weight", ".prenorm.scale"),
        (".norm2.weight", ".postnorm.scale"),
        (".scale_shift_table", ".mod.lin"),
    ):
        name = name.replace(ours, theirs)
    return name


RENAMES_OF_REST = {
    "krea2": krea2_name,
    "wan22": lambda name: (
        name.replace(".norm2.", ".norm3.")
        .replace("attn1.norm_", "self_attn.norm_")
        .replace("attn2.norm_added_", "cross_attn.norm_k_img.")
        .replace("attn2.norm_", "cross_attn.norm_")
    ),
}


def transformer_file(folder):
    (file,) = [*folder.glob("transformer/*.safetensors"), *folder.glob("unet/*.safetensors")]
    return file


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Return a function that writes a miniature with other weights than `miniature`, in bf16."""
    folders = {}

    def write(name):
        if name not in folders:
            folder = write_miniature(name, tmp_path_factory.mktemp("others") / name, seed=5)
            state = load_file(transformer_file(folder))
            save_file({k: t.bfloat16() for k, t in state.items()}, transformer_file(folder))
            folders[name] = folder
        return folders[name]

    return write


def load(name, path, **settings):
    return load_family(ModelSection(family=MINIATURES[name].family, path=str(path), **settings))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_in_original_names_gives_the_same_weights(name, miniature, others, tmp_path):
    other, family = others(name), MINIATURES[name].family
    original = original_weights(family, load_file(transformer_file(other)))
    prefix = COMFYUI if name in ("qwen-image", "sd15", "wan21-t2v") else ""
    file = tmp_path / "model.safetensors"
    save_file({f"{prefix}{key}": tensor for key, tensor in original.items()}, file)
    assert family in matching_models(read_header(str(file), "model.path"))
    loaded = load(name, miniature(name), transformer_file=str(file))
    assert loaded.weights_hasher()() == load(name, other).weights_hasher()()
    assert loaded.dtype == torch.bfloat16


def test_both_experts_can_come_from_files(miniature, others, tmp_path):
    other = others("wan21-t2v")
    original = original_weights("wan22", load_file(transformer_file(other)))
    high, low = tmp_path / "high.safetensors", tmp_path / "low.safetensors"
    save_file(original, high)
    save_file({f"diffusion_model.{key}": -tensor for key, tensor in original.items()}, low)
    files = {"transformer_file": str(high), "transformer_2_file": str(low)}
    found = load("wan22-t2v", miniature("wan22-t2v"), **files).transformer
    expected = load("wan21-t2v", other).transformer.state_dict()
    for expert, sign in ((found.high, 1), (found.low, -1)):
        for key, tensor in expert.state_dict().items():
            assert torch.equal(tensor, sign * expected[key]), key


@pytest.mark.parametrize("name", ["flux", "chroma"])
def test_files_of_flux_and_chroma_are_converted_at_the_published_width(name):
    """Weights are columns of eight values: diffusers' conversion knows only the width of 3,072."""
    cls = {"flux": diffusers.FluxTransformer2DModel, "chroma": diffusers.ChromaTransformer2DModel}
    with torch.device("meta"), without_progress_bars():
        model = cls[name](num_layers=1, num_single_layers=1, **WIDE[name])
    generator = torch.Generator().manual_seed(0)
    state = {
        key: torch.randn(tensor.shape[0], *([8] if tensor.dim() == 2 else []), generator=generator)
        for key, tensor in model.state_dict().items()
    }
    table = import_module(FAMILIES[name].module).KEY_TABLE
    swapped = [f"{module}.weight" for module in table.swapped_halves if f"{module}.weight" in state]
    for key in swapped:  # the size tells which have halves
        state[key] = torch.randn(state[key].shape[0], state[key].shape[0] // 2, generator=generator)
    converted = _convert(cls[name], model.config, original_weights(name, state))
    assert set(converted) == set(state)
    for key, tensor in converted.items():
        assert torch.equal(tensor, state[key]), key


WIDE = {"flux": {"guidance_embeds": True}, "chroma": {"approximator_layers": 1}}
RENAMED["flux"] = RENAMED["chroma"] = [
    *RENAMED["flux2"],
    ("distilled_guidance_layer.norms.{}.scale", "distilled_guidance_layer.norms.{}.weight"),
]


# fp8


def scale_in_fp8(weights, style, layers):
    """Return weights in fp8 with a scale for each, as ComfyUI and others store them."""
    found = {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if name not in layers:
            found[name] = tensor
            continue
        rows = style == "weight_scale"
        largest = tensor.float().abs().amax(1, keepdim=True) if rows else tensor.float().abs().max()
        scale = largest / 448
        found[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        found[f"{module}.{style}"] = scale
        if style == "scale_weight":
            found[f"{module}.scale_input"] = torch.ones(1)
        else:
            found[f"{module}.comfy_quant"] = torch.zeros(8, dtype=torch.uint8)
    if style == "scale_weight":
        found["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    return found


@pytest.mark.parametrize("style", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_scaled_fp8_weights_are_multiplied_by_their_scale(
    style, dtype, miniature, others, tmp_path, recorder
):
    other = others("z-image")
    original = original_weights("z_image", load_file(transformer_file(other)))
    layers = {
        n for n in original if n.startswith("layers.") and n.endswith("feed_forward.w1.weight")
    }
    stored = scale_in_fp8(original, style, layers)
    file = tmp_path / "fp8.safetensors"
    save_file({f"{COMFYUI}{key}": tensor for key, tensor in stored.items()}, file)
    section = ModelSection(
        family="z_image", path=str(miniature("z-image")), transformer_file=str(file), dtype=dtype
    )
    found = load_family(section, recorder).transformer.state_dict()
    wanted = torch.bfloat16 if dtype == "auto" else torch.float32
    assert len(layers) == 2
    for name in layers:
        scale = stored[f"{name.removesuffix('.weight')}.{style}"]
        expected = (stored[name].float() * scale).to(wanted)
        assert torch.equal(found[name], expected), name
        torch.testing.assert_close(
            found[name].float(), original[name].float(), rtol=0.07, atol=1e-3
        )
    shown = "bfloat16" if dtype == "auto" else "float32"
    text = "model: fp8.safetensors has 2 weights in fp8, 2 of them with a scale; they are mult"
    assert any(t.startswith(text) and t.endswith(shown) for t in recorder.texts())


def test_scales_of_blocks_and_plain_fp8_are_exact():
    weight = torch.randn(4, 6).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    found = dequantize(
        {"a.weight": weight, "a.weight_scale": scale, "b.weight": weight}, torch.bfloat16
    )
    blocks = scale.repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert torch.equal(found["a.weight"], (weight.float() * blocks).bfloat16())
    assert torch.equal(found["b.weight"].float(), weight.float())
    assert set(found) == {"a.weight", "b.weight"}
    with pytest.raises(ValueError, match="does not fit"):
        dequantize({"a.weight": weight, "a.weight_scale": torch.ones(3)}, torch.bfloat16)


# Files that are refused


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.gguf", b"GGUF1234", "a GGUF file"),
        ("x.safetensors", b"GGUF1234", "a GGUF file"),
        ("x.ckpt", b"PK\x03\x04zzzz", "pickle format"),
        ("x.safetensors", b"abc", "cut off"),
        ("x.safetensors", b"\x02\0\0\0\0\0\0\0[]", "cannot be read as a safetensors file"),
    ],
)
def test_other_files_are_refused_by_their_format(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"model\.path is '.*{name}.*{message}"):
        locate_model(ModelSection(family="flux", path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"diffusion_model.blocks.0.q.lora_A.weight": torch.zeros(1)}, "holds an adapter"),
        ({"a.weight_scale_2": torch.zeros(1)}, "quantized as NVFP4"),
        ({"a.weight": torch.zeros(1, dtype=torch.uint8)}, "a.weight is stored as U8"),
    ],
)
def test_adapters_and_other_quantizations_are_refused(tensors, message, tmp_path):
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=message):
        locate_model(ModelSection(family="flux", path=str(tmp_path / "x.safetensors")))


@pytest.mark.parametrize("start", ["", "https://huggingface.co/"])
def test_a_file_on_the_hub_says_how_to_download_it(start):
    path = f"{start}Comfy-Org/Qwen/{'blob/main/' if start else ''}split_files/qwen.safetensors"
    with pytest.raises(ModelError, match="`hf download Comfy-Org/Qwen split_files/qwen"):
        locate_model(ModelSection(family="qwen_image", path=path))


def test_a_file_that_is_cut_off_is_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ModelError, match="so it is cut off"):
        read_header(str(file), "model.path")


@pytest.mark.parametrize("setting", ["path", "transformer_file"])
def test_a_file_of_another_family_names_it(setting, miniature, tmp_path):
    marks = ("double_blocks.0.img_attn.norm.key_norm.scale", "guidance_in.in_layer.bias")
    save_file({f"{COMFYUI}{key}": torch.zeros(2) for key in marks}, tmp_path / "x.safetensors")
    section = {"family": "sd15", "path": str(miniature("sd15"))}
    section[setting] = str(tmp_path / "x.safetensors")
    message = rf"model\.{setting} is .*looks like a model of flux, but model\.family is sd15"
    with pytest.raises(ModelError, match=message):
        locate_model(ModelSection(**section))


def test_a_file_for_the_demo_family_names_its_family(tmp_path):
    save_file({"txtfusion.projector.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=r"Set model\.family: krea2"):
        locate_model(ModelSection(path=str(tmp_path / "x.safetensors")))


@pytest.mark.parametrize("family", ["ideogram4", "stable_audio"])
def test_a_family_without_a_single_file_form_names_its_model(family, tmp_path):
    save_file({"x.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=rf"reads no single file of {family}\. Set model\.path to"):
        locate_model(ModelSection(family=family, path=str(tmp_path / "x.safetensors")))


def test_a_file_of_another_variant_names_the_weights(miniature, others, tmp_path):
    original = original_weights("wan22", load_file(transformer_file(others("wan21-t2v"))))
    extra = {"blocks.7.self_attn.q.weight": original["blocks.0.self_attn.q.weight"].clone()}
    save_file(original | extra, tmp_path / "more.safetensors")
    first = next(iter(original))
    save_file({k: t for k, t in original.items() if k != first}, tmp_path / "less.safetensors")
    for name, message in (
        ("more", r"has 1 weights that a WanTransformer3DModel .* first blocks\.7\.attn1\.to_q"),
        ("less", "lacks 1 of the weights that a WanTransformer3DModel"),
    ):
        with pytest.raises(ModelError, match=message):
            load(
                "wan21-t2v",
                miniature("wan21-t2v"),
                transformer_file=str(tmp_path / f"{name}.safetensors"),
            )


# Recognition of published models by names and shapes


@pytest.mark.parametrize(
    ("tensors", "family", "models"),
    [
        ({"head.modulation": (1,), "patch_embedding.weight": (1536, 16)}, "wan22", ["1.3B"]),
        ({"head.modulation": (1,), "patch_embedding.weight": (3072, 48)}, "wan22", ["5B"]),
        (
            {"head.modulation": (1,), "patch_embedding.weight": (5120, 16)},
            "wan22",
            ["Wan2.2-T2V-A14B", "Wan2.1-T2V-14B"],
        ),
        (
            {
                "head.modulation": (1,),
                "patch_embedding.weight": (5120, 36),
                "img_emb.proj.1.weight": (1,),
            },
            "wan22",
            ["480P", "720P"],
        ),
        (
            {"single_stream_modulation.lin.weight": (1,), "img_in.weight": (4096, 1)},
            "flux2",
            ["base-9B", "klein-9B"],
        ),
        ({"single_stream_modulation.lin.weight": (1,), "img_in.weight": (7, 1)}, "flux2", []),
        ({"joint_blocks.37.x_block.mlp.fc1.weight": (1,)}, "sd3", ["3.5-large"]),
        ({"joint_blocks.0.x_block.attn2.qkv.weight": (1,)}, "sd3", ["3.5-medium"]),
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (1,)}, "flux", ["schnell"]),
        (dict.fromkeys(QWEN_NAMES, (1,)), "qwen_image", ["Qwen-Image", "Edit", "2509"]),
        (
            dict.fromkeys((*QWEN_NAMES, "__index_timestep_zero__"), (1,)),
            "qwen_image",
            ["Edit-2511"],
        ),
    ],
)
def test_published_models_are_told_apart(tensors, family, models, tmp_path):
    file = tmp_path / "x.safetensors"
    stored = {
        n: torch.zeros((), dtype=torch.bfloat16).expand(s).contiguous() for n, s in tensors.items()
    }
    save_file(stored, file)
    found = check_family(read_header(str(file), "model.path"), family, "model.path")
    assert len(found) == len(models)
    assert all(part in model.name for part, model in zip(models, found, strict=True))


def test_one_of_two_experts_needs_a_pipeline(tmp_path):
    file = tmp_path / "high.safetensors"
    save_file(
        {"head.modulation": torch.zeros(1), "patch_embedding.weight": torch.zeros(5120, 16)}, file
    )
    with pytest.raises(
        ModelError, match=r"Wan2\.2-T2V-A14B-Diffusers has two\. Set model\.path to"
    ):
        locate_model(ModelSection(family="wan22", path=str(file)))


# Whole models


def ldm_vae(state):
    """Return the VAE of a miniature by the names of the original release."""
    found = {}
    for name, tensor in state.items():
        side, _, rest = name.partition(".")
        blocks = 2
        rest = rest.replace("mid_block.resnets.0", "mid.block_1").replace(
            "mid_block.resnets.1", "mid.block_2"
        )
        rest = rest.replace("mid_block.attentions.0.group_norm", "mid.attn_1.norm")
        rest = rest.replace("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out")
        for x in "qkv":
            rest = rest.replace(f"mid_block.attentions.0.to_{x}", f"mid.attn_1.{x}")
        for block in range(blocks):
            rest = rest.replace(f"down_blocks.{block}.resnets", f"down.{block}.block")
            rest = rest.replace(f"down_blocks.{block}.downsamplers.0", f"down.{block}.downsample")
            rest = rest.replace(f"up_blocks.{block}.resnets", f"up.{blocks - 1 - block}.block")
            rest = rest.replace(
                f"up_blocks.{block}.upsamplers.0", f"up.{blocks - 1 - block}.upsample"
            )
        rest = rest.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        is_linear = "mid.attn_1" in rest and tensor.dim() == 2
        found[f"first_stage_model.{side}.{rest}"] = (
            tensor[:, :, None, None] if is_linear else tensor
        )
    return found


def open_clip(state):
    """Return a CLIP text model by the names of OpenCLIP, as SDXL has its second one."""
    prefix, found = "conditioner.embedders.1.model.", {}
    fixed = {
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
        "text_model.final_layer_norm.weight": "ln_final.weight",
        "text_model.final_layer_norm.bias": "ln_final.bias",
    }
    for name, tensor in state.items():
        if name in fixed:
            found[prefix + fixed[name]] = tensor
        elif name == "text_projection.weight":
            found[prefix + "text_projection"] = tensor.T.contiguous()
        elif ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            layer = name.split(".")[3]
            kind = "in_proj_weight" if name.endswith("weight") else "in_proj_bias"
            found[f"{prefix}transformer.resblocks.{layer}.attn.{kind}"] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            new = name.replace("text_model.encoder.layers.", "transformer.resblocks.")
            for ours, theirs in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                new = new.replace(ours, theirs)
            found[prefix + new] = tensor
    return found


def component(folder, name):
    (file,) = (folder / name).glob("*.safetensors")
    return load_file(file)


def text_model(state):
    """Return names with `text_model.`, which transformers leaves out of some CLIP models."""
    return {
        key if key.startswith(("text_model.", "text_projection")) else f"text_model.{key}": tensor
        for key, tensor in state.items()
    }


def whole_checkpoint(name, folder):
    """Return the tensors of a file with U-Net or transformer, VAE and text encoders."""
    family = MINIATURES[name].family
    unet = original_weights(family, load_file(transformer_file(folder)))
    found = {f"{COMFYUI}{key}": tensor for key, tensor in unet.items()}
    found |= ldm_vae(component(folder, "vae"))
    first = text_model(component(folder, "text_encoder"))
    if name == "sd15":  # with the names of older files
        found |= {
            f"cond_stage_model.transformer.{key.removeprefix('text_model.')}": tensor
            for key, tensor in first.items()
        }
    elif name == "sdxl":
        found |= {f"conditioner.embedders.0.transformer.{key}": t for key, t in first.items()}
        found |= open_clip(component(folder, "text_encoder_2"))
    else:
        first["text_projection.weight"] = torch.eye(len(first["text_projection.weight"]))
        found |= {f"text_encoders.clip_l.transformer.{key}": t for key, t in first.items()}
        second = text_model(component(folder, "text_encoder_2"))
        found |= {f"text_encoders.clip_g.transformer.{key}": t for key, t in second.items()}
        third = component(folder, "text_encoder_3")
        found |= {f"text_encoders.t5xxl.transformer.{key}": t for key, t in third.items()}
    return {key: tensor.contiguous().clone() for key, tensor in found.items()}


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd35-medium"])
def test_a_whole_model_gives_its_vae_and_text_encoders(
    name, miniature, others, tmp_path, monkeypatch, recorder
):
    other, family = others(name), MINIATURES[name].family
    file = tmp_path / "whole.safetensors"
    save_file(whole_checkpoint(name, other), file)
    with serve_hub() as server:
        base = check_family(read_header(str(file), "model.path"), family, "model.path")[0].name
        server.repositories[base] = Repository(miniature(name))
        use_hub(monkeypatch, server.endpoint, tmp_path / "cache")
        section = ModelSection(family=family, path=str(file))
        loaded = load_family(section, recorder)
        assert not [path for path in server.downloads() if path.endswith(".safetensors")]
    expected = load(name, other)
    assert loaded.weights_hasher()() == expected.weights_hasher()()
    assert torch.equal(*(f.encode(torch.ones(1, 3, 32, 32)) for f in (loaded, expected)))
    if name != "sd35-medium":  # there, the file does not have the first projection
        found, wanted = (f.encode_text(["a red box"])[0] for f in (loaded, expected))
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    again = load_family(section.model_copy(update={"path": str(file)}))
    assert again.identity() == loaded.identity()
    assert again.identity() != load(name, miniature(name)).identity()


def test_a_whole_model_that_predicts_v_says_so(miniature, others, tmp_path, monkeypatch):
    tensors = whole_checkpoint("sdxl", others("sdxl"))
    file = tmp_path / "v.safetensors"
    save_file(tensors | {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}, file)
    with serve_hub({FAMILIES["sdxl"].default_model: Repository(miniature("sdxl"))}) as server:
        use_hub(monkeypatch, server.endpoint, tmp_path / "cache")
        family = load_family(ModelSection(family="sdxl", path=str(file)))
    assert family.prediction == "v"
    scheduler = json.loads((family.folder / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["rescale_betas_zero_snr"] is True


def test_a_single_transformer_takes_the_other_parts_from_the_published_model(
    miniature, others, tmp_path, monkeypatch, recorder
):
    file = tmp_path / "z.safetensors"
    save_file(original_weights("z_image", load_file(transformer_file(others("z-image")))), file)
    with serve_hub({FAMILIES["z_image"].default_model: Repository(miniature("z-image"))}) as server:
        use_hub(monkeypatch, server.endpoint, tmp_path / "cache")
        family = load_family(ModelSection(family="z_image", path=str(file)), recorder)
        weights = [path for path in server.downloads() if path.endswith(".safetensors")]
    assert [path.partition("/")[0] for path in weights] == ["text_encoder", "vae"]
    assert family.weights_hasher()() == load("z-image", others("z-image")).weights_hasher()()
    family.export(tmp_path / "exported")
    assert load("z-image", tmp_path / "exported").weights_hasher()() == family.weights_hasher()()
    assert any("If it was made from Tongyi-MAI/Z-Image-Turbo" in text for text in recorder.texts())
