"""Wan 2.1 and 2.2: T2V, I2V and TI2V, both experts."""

from __future__ import annotations

from gracetune.adapters.files.key_table import NameTable

ATTENTION = (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
SIDES = (("self_attn", "attn1"), ("cross_attn", "attn2"))
LINEARS = (
    *(
        (f"blocks.{{}}.{theirs}.{a}", f"blocks.{{}}.{ours}.{b}")
        for theirs, ours in SIDES
        for a, b in ATTENTION
    ),
    ("blocks.{}.ffn.0", "blocks.{}.ffn.net.0.proj"),
    ("blocks.{}.ffn.2", "blocks.{}.ffn.net.2"),
)
IMAGE = (
    ("blocks.{}.cross_attn.k_img", "blocks.{}.attn2.add_k_proj"),
    ("blocks.{}.cross_attn.v_img", "blocks.{}.attn2.add_v_proj"),
)
"""Wan 2.1 I2V alone has these."""
REPLACED = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")

WAN = NameTable(
    family="wan",
    rows=(
        *LINEARS,
        *IMAGE,
        ("blocks.{}.self_attn.norm_q", "blocks.{}.attn1.norm_q"),
        ("blocks.{}.self_attn.norm_k", "blocks.{}.attn1.norm_k"),
        ("blocks.{}.cross_attn.norm_q", "blocks.{}.attn2.norm_q"),
        ("blocks.{}.cross_attn.norm_k", "blocks.{}.attn2.norm_k"),
        ("blocks.{}.cross_attn.norm_k_img", "blocks.{}.attn2.norm_added_k"),
        ("blocks.{}.norm3", "blocks.{}.norm2"),
        ("blocks.{}.modulation", "blocks.{}.scale_shift_table"),
        ("patch_embedding", "patch_embedding"),
        ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
        ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
        ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
        ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
        ("time_projection.1", "condition_embedder.time_proj"),
        ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
        ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
        ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
        ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
        ("head.head", "proj_out"),
        ("head.modulation", "scale_shift_table"),
    ),
    # The old converter looked for `to_out.0` and `ffn.net.0.proj` with their dots, where
    # underscored names have none: it replaced the other words and left these.
    mixed=(
        *((a, b) for a, b in (*LINEARS, *IMAGE) if b.endswith(REPLACED)),
        ("blocks.{}.self_attn.to_out.0", "blocks.{}.attn1.to_out.0"),
        ("blocks.{}.cross_attn.to_out.0", "blocks.{}.attn2.to_out.0"),
        ("blocks.{}.ffn.net.0.proj", "blocks.{}.ffn.net.0.proj"),
        ("blocks.{}.ffn.net.2", "blocks.{}.ffn.net.2"),
    ),
    bare=frozenset({"blocks.{}.scale_shift_table", "scale_shift_table"}),
    surface=tuple(ours for _, ours in LINEARS),
    num_blocks=(("blocks", 40),),
    staged=True,
    # ComfyUI knows no diffusers' names of Wan; diffusers reads the original's.
    interchange=(("other", "comfyui"),),
)
