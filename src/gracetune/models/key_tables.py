"""Share the names of modules in other tools' adapter files among model families.

The module of a family has its own `KEY_TABLE`, made from these parts. The tables of SDXL and SD 1.5
are here because no family has them yet. They have no diffusers pipeline, so that `gracetune adapter
check` reads files of these models and does not load them.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from gracetune.adapters.files.keys import FusedProjection, KeyTable, PipelineSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.adapters.files.check_loading import LayerShapes
    from gracetune.adapters.files.keys import Naming

    ComfyuiPrefixes = tuple[tuple[str, str, Naming], ...]

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
IN_ORIGINAL_NAMES: ComfyuiPrefixes = (
    ("diffusion_model.", ".", "original"),
    ("lora_unet_", "_", "original"),
)
"""Prefixes that ComfyUI knows for every model."""


def pipeline_spec(
    pipeline: str, transformer: str, config: Callable[[LayerShapes], dict[str, object]]
) -> PipelineSpec:
    """Return the functions that build a pipeline without weights, from diffusers' class names.

    `config` returns the configuration of a transformer that fits the layers of an adapter file.
    """
    return PipelineSpec(partial(_empty_pipeline, pipeline, transformer), config)


def _empty_pipeline(pipeline: str, transformer: str, build: Callable[[Any], Any]) -> Any:
    """Return a pipeline whose components are None, except for the transformer."""
    import diffusers

    cls = getattr(diffusers, pipeline)
    parameters = signature(cls).parameters.values()
    components = {p.name: None for p in parameters if p.default is p.empty}
    return cls(**components | {"transformer": build(getattr(diffusers, transformer))})


def fuse_qkv(whole: str, parts: Sequence[str]) -> FusedProjection:
    """Return a fused projection with parts of equal size."""
    return FusedProjection(whole, tuple((part, 1) for part in parts))


def part_names(fused: Sequence[FusedProjection]) -> tuple[str, ...]:
    """Return diffusers' names of all parts of fused projections."""
    return tuple(part for projection in fused for part, _ in projection.parts)


# FLUX.1, FLUX.2, Chroma and SD3. Original checkpoints fuse query, key and value (and, in single
# blocks, the MLP) into one projection; diffusers keeps them separate.

IMAGE_QKV = fuse_qkv(f"{DOUBLE}.attn.to_qkv", [f"{DOUBLE}.attn.to_{x}" for x in "qkv"])
TEXT_QKV = fuse_qkv(f"{DOUBLE}.attn.to_added_qkv", [f"{DOUBLE}.attn.add_{x}_proj" for x in "qkv"])
STREAM_ROWS = (
    ("double_blocks.{}.img_attn.qkv", IMAGE_QKV.whole),
    ("double_blocks.{}.txt_attn.qkv", TEXT_QKV.whole),
    ("double_blocks.{}.img_attn.proj", f"{DOUBLE}.attn.to_out.0"),
    ("double_blocks.{}.txt_attn.proj", f"{DOUBLE}.attn.to_add_out"),
    ("img_in", "x_embedder"),
    ("txt_in", "context_embedder"),
    ("final_layer.linear", "proj_out"),
)
"""Names that FLUX.1, FLUX.2 and Chroma share."""
FLUX_FUSED = (
    IMAGE_QKV,
    TEXT_QKV,
    FusedProjection(
        f"{SINGLE}.attn.to_qkv_mlp_proj",
        (*((f"{SINGLE}.attn.to_{x}", 1) for x in "qkv"), (f"{SINGLE}.proj_mlp", 4)),
    ),
)
FLUX_ROWS = (
    *STREAM_ROWS,
    ("double_blocks.{}.img_mlp.0", f"{DOUBLE}.ff.net.0.proj"),
    ("double_blocks.{}.img_mlp.2", f"{DOUBLE}.ff.net.2"),
    ("double_blocks.{}.txt_mlp.0", f"{DOUBLE}.ff_context.net.0.proj"),
    ("double_blocks.{}.txt_mlp.2", f"{DOUBLE}.ff_context.net.2"),
    ("single_blocks.{}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
    ("single_blocks.{}.linear2", f"{SINGLE}.proj_out"),
)
"""Names that FLUX.1 and Chroma share."""
FLUX_BLOCK_LINEARS = (
    *part_names(FLUX_FUSED),
    f"{DOUBLE}.attn.to_out.0",
    f"{DOUBLE}.attn.to_add_out",
    f"{DOUBLE}.ff.net.0.proj",
    f"{DOUBLE}.ff.net.2",
    f"{DOUBLE}.ff_context.net.0.proj",
    f"{DOUBLE}.ff_context.net.2",
    f"{SINGLE}.proj_out",
)
FLUX_ROW_RATIOS = (
    (f"{DOUBLE}.ff.net.0.proj", 4),
    (f"{DOUBLE}.ff_context.net.0.proj", 4),
    (f"{SINGLE}.attn.to_qkv_mlp_proj", 7),
)
FLUX_PREFIXES: ComfyuiPrefixes = (
    *IN_ORIGINAL_NAMES,
    ("transformer.", ".", "diffusers"),
    ("lycoris_", "_", "diffusers"),
    ("lora_transformer_", "_", "diffusers"),
    ("", ".", "diffusers"),
)


def flux_config(shapes: LayerShapes, default_width: int = 3072) -> dict[str, object]:
    """Return settings of a transformer with double and single blocks, from an adapter's layers."""
    double, single = "transformer_blocks", "single_transformer_blocks"
    names = [f"{double}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{double}.attn.add_{x}_proj" for x in "qkv"]
    names += [f"{double}.{x}" for x in ("ff.net", "ff_context.net")]
    names += [f"{double}.{x}.linear_out" for x in ("ff", "ff_context")]
    names += [f"{single}.attn.to_{x}" for x in ("q", "k", "v", "out")]
    return {
        **shapes.heads(shapes.size(0, default_width, *names, f"{single}.proj_out", "x_embedder")),
        "num_layers": shapes.num_blocks(double),
        "num_single_layers": shapes.num_blocks(single),
    }


# SDXL and SD 1.5: U-Nets whose original names count all layers of the encoder and of the decoder

RESNET_NAMES = (
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
)
ATTENTION_LINEARS = tuple(f"attn{n}.to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out.0"))
FEED_FORWARD_LINEARS = ("ff.net.0.proj", "ff.net.2")
LAYERS_PER_BLOCK = 2


def unet_rows(widths: Sequence[int], depths: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """Return the original name and diffusers' name of each module of a U-Net.

    `widths` are the channels of each resolution and `depths` the transformer blocks in its
    attention layers, 0 without attention. The middle has the largest depth.
    """
    return (
        ("input_blocks.0.0", "conv_in"),
        ("time_embed.0", "time_embedding.linear_1"),
        ("time_embed.2", "time_embedding.linear_2"),
        *_encoder_rows(widths, depths),
        *_resnet_rows("middle_block.0", "mid_block.resnets.0", False),
        *_attention_rows("middle_block.1", "mid_block.attentions.0", max(depths)),
        *_resnet_rows("middle_block.2", "mid_block.resnets.1", False),
        *_decoder_rows(depths),
        ("out.0", "conv_norm_out"),
        ("out.2", "conv_out"),
    )


def _encoder_rows(widths: Sequence[int], depths: Sequence[int]) -> Iterator[tuple[str, str]]:
    number = 1
    for level, depth in enumerate(depths):
        block = f"down_blocks.{level}"
        for layer in range(LAYERS_PER_BLOCK):
            original = f"input_blocks.{number}"
            has_shortcut = layer == 0 and level > 0 and widths[level] != widths[level - 1]
            yield from _resnet_rows(f"{original}.0", f"{block}.resnets.{layer}", has_shortcut)
            yield from _attention_rows(f"{original}.1", f"{block}.attentions.{layer}", depth)
            number += 1
        if level < len(depths) - 1:
            yield f"input_blocks.{number}.0.op", f"{block}.downsamplers.0.conv"
            number += 1


def _decoder_rows(depths: Sequence[int]) -> Iterator[tuple[str, str]]:
    number = 0
    for level, depth in enumerate(reversed(depths)):
        block = f"up_blocks.{level}"
        for layer in range(LAYERS_PER_BLOCK + 1):
            original = f"output_blocks.{number}"
            yield from _resnet_rows(f"{original}.0", f"{block}.resnets.{layer}", True)
            yield from _attention_rows(f"{original}.1", f"{block}.attentions.{layer}", depth)
            number += 1
        if level < len(depths) - 1:
            position = 2 if depth else 1
            yield f"{original}.{position}.conv", f"{block}.upsamplers.0.conv"


def _resnet_rows(original: str, ours: str, has_shortcut: bool) -> Iterator[tuple[str, str]]:
    for theirs, name in RESNET_NAMES:
        yield f"{original}.{theirs}", f"{ours}.{name}"
    if has_shortcut:
        yield f"{original}.skip_connection", f"{ours}.conv_shortcut"


def _attention_rows(original: str, ours: str, depth: int) -> Iterator[tuple[str, str]]:
    norms = ("norm1", "norm2", "norm3")
    names = [
        f"transformer_blocks.{number}.{name}"
        for number in range(depth)
        for name in (*ATTENTION_LINEARS, *FEED_FORWARD_LINEARS, *norms)
    ]
    for name in (*(("norm", "proj_in", "proj_out") if depth else ()), *names):
        yield f"{original}.{name}", f"{ours}.{name}"


def unet_linears(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return diffusers' names of the linear modules of a U-Net's transformer blocks."""
    names = (*ATTENTION_LINEARS, *FEED_FORWARD_LINEARS)
    return tuple(ours for _, ours in rows if ours.endswith(names))


UNET_PREFIXES: ComfyuiPrefixes = (
    *IN_ORIGINAL_NAMES,
    ("lora_unet_", "_", "diffusers"),
    ("lycoris_", "_", "diffusers"),
)
SDXL_ROWS = (
    *unet_rows((320, 640, 1280), (0, 2, 10)),
    ("label_emb.0.0", "add_embedding.linear_1"),
    ("label_emb.0.2", "add_embedding.linear_2"),
)
SDXL = KeyTable(
    family="sdxl",
    component="unet",
    header_words=("stable-diffusion-xl", "sdxl"),
    rows=SDXL_ROWS,
    block_linears=unet_linears(SDXL_ROWS),
    default_formats=(("other", "kohya"),),
    comfyui_prefixes=UNET_PREFIXES,
)
SD15_ROWS = unet_rows((320, 640, 1280, 1280), (1, 1, 1, 0))
SD15 = KeyTable(
    family="sd15",
    aliases=("sd1", "sd1.5"),
    component="unet",
    header_words=("stable-diffusion-v1", "sd_v1", "sd1"),
    rows=SD15_ROWS,
    block_linears=unet_linears(SD15_ROWS),
    # sd-scripts trains diffusers' U-Net of SD 1.5, and diffusers reads no other names for it.
    default_formats=(("other", "kohya-diffusers"),),
    comfyui_prefixes=UNET_PREFIXES,
)

PREPARED_TABLES = {table.family: table for table in (SDXL, SD15)}
