"""Flux.1: the original keeps query, key and value (and a single block's MLP) in one projection."""

from __future__ import annotations

from gracetune.adapters.files.key_table import FusedProjection, NameTable

DOUBLE, SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"
FUSED = (
    FusedProjection(
        f"{DOUBLE}.attn.to_qkv",
        ((f"{DOUBLE}.attn.to_q", 1), (f"{DOUBLE}.attn.to_k", 1), (f"{DOUBLE}.attn.to_v", 1)),
    ),
    FusedProjection(
        f"{DOUBLE}.attn.to_added_qkv",
        (
            (f"{DOUBLE}.attn.add_q_proj", 1),
            (f"{DOUBLE}.attn.add_k_proj", 1),
            (f"{DOUBLE}.attn.add_v_proj", 1),
        ),
    ),
    FusedProjection(
        f"{SINGLE}.attn.to_qkv_mlp_proj",
        (
            (f"{SINGLE}.attn.to_q", 1),
            (f"{SINGLE}.attn.to_k", 1),
            (f"{SINGLE}.attn.to_v", 1),
            (f"{SINGLE}.proj_mlp", 4),
        ),
    ),
)
"""The wholes go by the names that diffusers gives to fused projections elsewhere."""

FLUX = NameTable(
    family="flux",
    rows=(
        ("double_blocks.{}.img_attn.qkv", f"{DOUBLE}.attn.to_qkv"),
        ("double_blocks.{}.txt_attn.qkv", f"{DOUBLE}.attn.to_added_qkv"),
        ("double_blocks.{}.img_attn.proj", f"{DOUBLE}.attn.to_out.0"),
        ("double_blocks.{}.txt_attn.proj", f"{DOUBLE}.attn.to_add_out"),
        ("double_blocks.{}.img_mlp.0", f"{DOUBLE}.ff.net.0.proj"),
        ("double_blocks.{}.img_mlp.2", f"{DOUBLE}.ff.net.2"),
        ("double_blocks.{}.txt_mlp.0", f"{DOUBLE}.ff_context.net.0.proj"),
        ("double_blocks.{}.txt_mlp.2", f"{DOUBLE}.ff_context.net.2"),
        ("double_blocks.{}.img_mod.lin", f"{DOUBLE}.norm1.linear"),
        ("double_blocks.{}.txt_mod.lin", f"{DOUBLE}.norm1_context.linear"),
        ("single_blocks.{}.linear1", f"{SINGLE}.attn.to_qkv_mlp_proj"),
        ("single_blocks.{}.linear2", f"{SINGLE}.proj_out"),
        ("single_blocks.{}.modulation.lin", f"{SINGLE}.norm.linear"),
        ("img_in", "x_embedder"),
        ("txt_in", "context_embedder"),
        ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
        ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
        ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
        ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
        ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
        ("final_layer.linear", "proj_out"),
    ),
    parts=tuple(part for one in FUSED for part, _ in one.parts),
    fused=FUSED,
    swapped=frozenset({"norm_out.linear"}),
    surface=(
        *(part for one in FUSED for part, _ in one.parts),
        f"{DOUBLE}.attn.to_out.0",
        f"{DOUBLE}.attn.to_add_out",
        f"{DOUBLE}.ff.net.0.proj",
        f"{DOUBLE}.ff.net.2",
        f"{DOUBLE}.ff_context.net.0.proj",
        f"{DOUBLE}.ff_context.net.2",
        f"{SINGLE}.proj_out",
    ),
    num_blocks=(("transformer_blocks", 19), ("single_transformer_blocks", 38)),
)
