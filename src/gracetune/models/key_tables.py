"""Share the names of modules, in diffusers and in other tools' adapter files, among model families.

The module of a family has its own `KEY_TABLE`, made from these parts.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from gracetune.adapters.files.keys import FusedProjection, PipelineSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.adapters.files.keys import Naming
    from gracetune.adapters.files.placeholder_models import LayerShapes

    ComfyuiPrefixes = tuple[tuple[str, str, Naming], ...]

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
JOINT_ATTENTION_LINEARS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Name endings of the linear modules of diffusers' attention over image and text together."""
FLUX_LINEARS = (
    *JOINT_ATTENTION_LINEARS,
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
    "single_transformer_blocks.*.proj_mlp",
    "single_transformer_blocks.*.proj_out",
)
"""Name endings of the linear modules in the blocks of FLUX.1 and Chroma."""
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
