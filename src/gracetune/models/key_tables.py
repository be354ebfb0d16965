"""Define the module names of model families in other tools' adapter files.

These tables are for families without a file of their own in models/; a family's file takes its
table over. A table has no diffusers pipeline yet, so that `gracetune adapter check` reads files of
the family and does not load them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.adapters.files.keys import FusedProjection, KeyTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.adapters.files.keys import Naming

    ComfyuiPrefixes = tuple[tuple[str, str, Naming], ...]

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
IN_ORIGINAL_NAMES: ComfyuiPrefixes = (
    ("diffusion_model.", ".", "original"),
    ("lora_unet_", "_", "original"),
)
"""Prefixes that ComfyUI knows for every model."""


def fuse_qkv(whole: str, parts: Sequence[str]) -> FusedProjection:
    """Return a fused projection with parts of equal size."""
    return FusedProjection(whole, tuple((part, 1) for part in parts))


def part_names(fused: Sequence[FusedProjection]) -> tuple[str, ...]:
    """Return diffusers' names of all parts of fused projections."""
    return tuple(part for projection in fused for part, _ in projection.parts)


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
"""Names that FLUX.2 and Chroma share with FLUX.1."""


# Chroma: the names of FLUX.1, without modulations and with a guidance network

CHROMA_FUSED = (
    IMAGE_QKV,
    TEXT_QKV,
    FusedProjection(
        f"{SINGLE}.attn.to_qkv_mlp_proj",
        (*((f"{SINGLE}.attn.to_{x}", 1) for x in "qkv"), (f"{SINGLE}.proj_mlp", 4)),
    ),
)
CHROMA_GUIDANCE = "distilled_guidance_layer"
CHROMA = KeyTable(
    family="chroma",
    header_words=("chroma",),
    rows=(
        *STREAM_ROWS,
        ("double_blocks.{}.img_mlp.0", f"{DOUBLE}.ff.net.0.proj"),
        ("double_blocks.{}.img_mlp.2", f"{DOUBLE}.ff.net.2"),
        ("double_blocks.{}.txt_mlp.0", f"{DOUBLE}.ff_context.net.0.proj"),
        ("double_blocks.{}.txt_mlp.2", f"{DOUBLE}.ff_context.net.2"),
        ("single_blocks.{}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
        ("single_blocks.{}.linear2", f"{SINGLE}.proj_out"),
        (f"{CHROMA_GUIDANCE}.in_proj", f"{CHROMA_GUIDANCE}.in_proj"),
        (f"{CHROMA_GUIDANCE}.out_proj", f"{CHROMA_GUIDANCE}.out_proj"),
        (f"{CHROMA_GUIDANCE}.layers.{{}}.in_layer", f"{CHROMA_GUIDANCE}.layers.{{}}.linear_1"),
        (f"{CHROMA_GUIDANCE}.layers.{{}}.out_layer", f"{CHROMA_GUIDANCE}.layers.{{}}.linear_2"),
    ),
    unfused=part_names(CHROMA_FUSED),
    fused=CHROMA_FUSED,
    block_linears=(
        *part_names(CHROMA_FUSED),
        f"{DOUBLE}.attn.to_out.0",
        f"{DOUBLE}.attn.to_add_out",
        f"{DOUBLE}.ff.net.0.proj",
        f"{DOUBLE}.ff.net.2",
        f"{DOUBLE}.ff_context.net.0.proj",
        f"{DOUBLE}.ff_context.net.2",
        f"{SINGLE}.proj_out",
    ),
    max_blocks=(("transformer_blocks", 19), ("single_transformer_blocks", 38)),
    row_ratios=(
        (f"{DOUBLE}.ff.net.0.proj", 4),
        (f"{DOUBLE}.ff_context.net.0.proj", 4),
        (f"{SINGLE}.attn.to_qkv_mlp_proj", 7),
    ),
    widths=(3072,),
    comfyui_prefixes=(
        *IN_ORIGINAL_NAMES,
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
        ("lora_transformer_", "_", "diffusers"),
    ),
)


# FLUX.2: modulations are shared by all blocks, and single blocks stay fused in diffusers

FLUX2 = KeyTable(
    family="flux2",
    aliases=("flux2_dev", "flux2_klein"),
    header_words=("flux-2", "flux2", "flux_2", "klein"),
    rows=(
        *STREAM_ROWS,
        ("double_blocks.{}.img_mlp.0", f"{DOUBLE}.ff.linear_in"),
        ("double_blocks.{}.img_mlp.2", f"{DOUBLE}.ff.linear_out"),
        ("double_blocks.{}.txt_mlp.0", f"{DOUBLE}.ff_context.linear_in"),
        ("double_blocks.{}.txt_mlp.2", f"{DOUBLE}.ff_context.linear_out"),
        ("single_blocks.{}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
        ("single_blocks.{}.linear2", f"{SINGLE}.attn.to_out"),
        ("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
        ("guidance_in.in_layer", "time_guidance_embed.guidance_embedder.linear_1"),
        ("guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2"),
        ("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
        ("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
        ("single_stream_modulation.lin", "single_stream_modulation.linear"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    ),
    unfused=part_names((IMAGE_QKV, TEXT_QKV)),
    fused=(IMAGE_QKV, TEXT_QKV),
    swapped_halves=frozenset({"norm_out.linear"}),
    block_linears=(
        *part_names((IMAGE_QKV, TEXT_QKV)),
        f"{DOUBLE}.attn.to_out.0",
        f"{DOUBLE}.attn.to_add_out",
        f"{DOUBLE}.ff.linear_in",
        f"{DOUBLE}.ff.linear_out",
        f"{DOUBLE}.ff_context.linear_in",
        f"{DOUBLE}.ff_context.linear_out",
        f"{SINGLE}.attn.to_qkv_mlp_proj",
        f"{SINGLE}.attn.to_out",
    ),
    max_blocks=(("transformer_blocks", 8), ("single_transformer_blocks", 48)),
    row_ratios=(
        (f"{DOUBLE}.ff.linear_in", 6),
        (f"{DOUBLE}.ff_context.linear_in", 6),
        (f"{SINGLE}.attn.to_qkv_mlp_proj", 9),
    ),
    widths=(6144, 4096, 3072),
    # ComfyUI knows diffusers' names of FLUX.1 alone, and diffusers reads the original ones.
    default_formats=(("other", "comfyui"),),
    comfyui_prefixes=IN_ORIGINAL_NAMES,
)


# SD3.5

SD3_SECOND_QKV = fuse_qkv(f"{DOUBLE}.attn2.to_qkv", [f"{DOUBLE}.attn2.to_{x}" for x in "qkv"])
SD3_FUSED = (IMAGE_QKV, TEXT_QKV, SD3_SECOND_QKV)
SD3 = KeyTable(
    family="sd3",
    aliases=("sd35", "sd3.5"),
    header_words=("stable-diffusion-3", "sd3", "sd_3"),
    rows=(
        ("joint_blocks.{}.x_block.attn.qkv", IMAGE_QKV.whole),
        ("joint_blocks.{}.context_block.attn.qkv", TEXT_QKV.whole),
        ("joint_blocks.{}.x_block.attn2.qkv", SD3_SECOND_QKV.whole),
        ("joint_blocks.{}.x_block.attn.proj", f"{DOUBLE}.attn.to_out.0"),
        ("joint_blocks.{}.context_block.attn.proj", f"{DOUBLE}.attn.to_add_out"),
        ("joint_blocks.{}.x_block.attn2.proj", f"{DOUBLE}.attn2.to_out.0"),
        ("joint_blocks.{}.x_block.mlp.fc1", f"{DOUBLE}.ff.net.0.proj"),
        ("joint_blocks.{}.x_block.mlp.fc2", f"{DOUBLE}.ff.net.2"),
        ("joint_blocks.{}.context_block.mlp.fc1", f"{DOUBLE}.ff_context.net.0.proj"),
        ("joint_blocks.{}.context_block.mlp.fc2", f"{DOUBLE}.ff_context.net.2"),
        ("joint_blocks.{}.x_block.adaLN_modulation.1", f"{DOUBLE}.norm1.linear"),
        ("joint_blocks.{}.context_block.adaLN_modulation.1", f"{DOUBLE}.norm1_context.linear"),
        ("joint_blocks.{}.x_block.attn.ln_q", f"{DOUBLE}.attn.norm_q"),
        ("joint_blocks.{}.x_block.attn.ln_k", f"{DOUBLE}.attn.norm_k"),
        ("joint_blocks.{}.context_block.attn.ln_q", f"{DOUBLE}.attn.norm_added_q"),
        ("joint_blocks.{}.context_block.attn.ln_k", f"{DOUBLE}.attn.norm_added_k"),
        ("joint_blocks.{}.x_block.attn2.ln_q", f"{DOUBLE}.attn2.norm_q"),
        ("joint_blocks.{}.x_block.attn2.ln_k", f"{DOUBLE}.attn2.norm_k"),
        ("context_embedder", "context_embedder"),
        ("x_embedder.proj", "pos_embed.proj"),
        ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
        ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
        ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
        ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ),
    unfused=part_names(SD3_FUSED),
    fused=SD3_FUSED,
    # The text stream of the last block has only (scale, shift) of its norm.
    swapped_halves=frozenset({"norm_out.linear", f"{DOUBLE}.norm1_context.linear"}),
    block_linears=(
        *part_names(SD3_FUSED),
        f"{DOUBLE}.attn.to_out.0",
        f"{DOUBLE}.attn.to_add_out",
        f"{DOUBLE}.attn2.to_out.0",
        f"{DOUBLE}.ff.net.0.proj",
        f"{DOUBLE}.ff.net.2",
        f"{DOUBLE}.ff_context.net.0.proj",
        f"{DOUBLE}.ff_context.net.2",
    ),
    max_blocks=(("transformer_blocks", 38),),
    widths=(1536, 2432),
    comfyui_prefixes=(
        *IN_ORIGINAL_NAMES,
        ("transformer.", ".", "diffusers"),
        ("base_model.model.", ".", "diffusers"),
        ("lora_transformer_", "_", "diffusers"),
        ("lycoris_", "_", "diffusers"),
    ),
)


# Z-Image: diffusers' names, except in ComfyUI's checkpoints, which fuse query, key and value

Z_IMAGE_BLOCKS = ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
Z_IMAGE_LINEARS = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
Z_IMAGE_FUSED = tuple(
    fuse_qkv(f"{block}.attention.to_qkv", [f"{block}.attention.to_{x}" for x in "qkv"])
    for block in Z_IMAGE_BLOCKS
)
Z_IMAGE = KeyTable(
    family="z_image",
    aliases=("zimage",),
    header_words=("z-image", "zimage", "z_image"),
    rows=(
        *(
            (f"{block}.{theirs}", f"{block}.{ours}")
            for block in Z_IMAGE_BLOCKS
            for theirs, ours in (
                ("attention.qkv", "attention.to_qkv"),
                ("attention.out", "attention.to_out.0"),
                ("attention.q_norm", "attention.norm_q"),
                ("attention.k_norm", "attention.norm_k"),
                *((name, name) for name in Z_IMAGE_LINEARS),
                *((f"{x}_norm{n}", f"{x}_norm{n}") for x in ("attention", "ffn") for n in (1, 2)),
            )
        ),
        *(
            (f"{block}.adaLN_modulation.0", f"{block}.adaLN_modulation.0")
            for block in Z_IMAGE_BLOCKS[:2]
        ),
        ("x_embedder", "all_x_embedder.2-1"),
        ("cap_embedder.0", "cap_embedder.0"),
        ("cap_embedder.1", "cap_embedder.1"),
        ("t_embedder.mlp.0", "t_embedder.mlp.0"),
        ("t_embedder.mlp.2", "t_embedder.mlp.2"),
        ("final_layer.linear", "all_final_layer.2-1.linear"),
        ("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1"),
    ),
    unfused=part_names(Z_IMAGE_FUSED),
    fused=Z_IMAGE_FUSED,
    block_linears=tuple(
        f"{block}.{name}"
        for block in Z_IMAGE_BLOCKS
        for name in (*(f"attention.to_{x}" for x in ("q", "k", "v", "out.0")), *Z_IMAGE_LINEARS)
    ),
    max_blocks=(("layers", 30), ("noise_refiner", 2), ("context_refiner", 2)),
    widths=(3840,),
    comfyui_prefixes=(
        *IN_ORIGINAL_NAMES,
        ("diffusion_model.", ".", "diffusers"),
        ("transformer.", ".", "diffusers"),
        ("lycoris_", "_", "diffusers"),
    ),
)


# Krea 2

KREA2_BLOCKS = (
    ("blocks.{}", DOUBLE),
    ("txtfusion.layerwise_blocks.{}", "text_fusion.layerwise_blocks.{}"),
    ("txtfusion.refiner_blocks.{}", "text_fusion.refiner_blocks.{}"),
)
KREA2_LINEARS = (
    ("attn.wq", "attn.to_q"),
    ("attn.wk", "attn.to_k"),
    ("attn.wv", "attn.to_v"),
    ("attn.wo", "attn.to_out.0"),
    ("attn.gate", "attn.to_gate"),
    ("mlp.gate", "ff.gate"),
    ("mlp.up", "ff.up"),
    ("mlp.down", "ff.down"),
)
KREA2 = KeyTable(
    family="krea2",
    header_words=("krea2", "krea-2", "krea_2"),
    rows=(
        *(
            (f"{original}.{theirs}", f"{block}.{ours}")
            for original, block in KREA2_BLOCKS
            for theirs, ours in KREA2_LINEARS
        ),
        ("first", "img_in"),
        ("last.linear", "final_layer.linear"),
        ("tmlp.0", "time_embed.linear_1"),
        ("tmlp.2", "time_embed.linear_2"),
        ("tproj.1", "time_mod_proj"),
        ("txtmlp.1", "txt_in.linear_1"),
        ("txtmlp.3", "txt_in.linear_2"),
        ("txtfusion.projector", "text_fusion.projector"),
    ),
    block_linears=tuple(f"{DOUBLE}.{ours}" for _, ours in KREA2_LINEARS),
    max_blocks=(("transformer_blocks", 28),),
    widths=(6144,),
    # diffusers reads the original names, which are those of ComfyUI.
    default_formats=(("other", "comfyui"),),
    comfyui_prefixes=IN_ORIGINAL_NAMES,
)


PREPARED_TABLES = {table.family: table for table in (CHROMA, FLUX2, SD3, Z_IMAGE, KREA2)}
