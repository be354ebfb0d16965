"""Qwen-Image and its edit models: the authors published them in diffusers' names."""

from __future__ import annotations

from gracetune.adapters.files.key_table import NameTable

SURFACE = tuple(
    f"transformer_blocks.{{}}.{name}"
    for name in (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
)
OTHERS = (
    *(
        f"transformer_blocks.{{}}.{name}"
        for name in (
            "img_mod.1",
            "txt_mod.1",
            "attn.norm_q",
            "attn.norm_k",
            "attn.norm_added_q",
            "attn.norm_added_k",
        )
    ),
    "img_in",
    "txt_in",
    "txt_norm",
    "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.linear_2",
    "norm_out.linear",
    "proj_out",
)

QWEN_IMAGE = NameTable(
    family="qwen_image",
    rows=tuple((name, name) for name in (*SURFACE, *OTHERS)),
    surface=SURFACE,
    num_blocks=(("transformer_blocks", 60),),
)
