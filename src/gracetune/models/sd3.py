"""The model family `sd3`: Stable Diffusion 3 and 3.5 for images, with diffusers' classes.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. A caption is embedded by
two CLIP models and T5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.files.keys import KeyTable
from gracetune.models.diffusers_family import DiffusersFamily, captions_longer_than
from gracetune.models.family import PROBE_ATTENTION, EncodedShape, PlannerShapes
from gracetune.models.key_tables import (
    DOUBLE,
    IMAGE_QKV,
    IN_ORIGINAL_NAMES,
    TEXT_QKV,
    fuse_qkv,
    part_names,
    pipeline_spec,
)
from gracetune.models.pipeline_folder import PipelineParts, read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, SampleShape

CLIP_LENGTH = 77
T5_LENGTH = 256
"""Number of tokens of every caption. T5 runs without a mask, so padding is embedded as well."""
NUM_TIMESTEPS = 1000
VAE_SCALE = 8
TARGETS = (
    "attn*.to_q",  # attn, and in some blocks of SD3.5 medium attn2
    "attn*.to_k",
    "attn*.to_v",
    "attn*.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)


def load(section: ModelSection) -> SD3:
    """Load the Stable Diffusion 3 pipeline that `model.path` names."""
    return SD3(read_parts(section, PLANNER_SHAPES, ("StableDiffusion3Pipeline",)))


class SD3Shapes(PlannerShapes):
    """Describes the transformer of Stable Diffusion 3 to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and of the embeddings of CLIP and T5."""
        cells = sample.height // VAE_SCALE, sample.width // VAE_SCALE
        text = (CLIP_LENGTH + T5_LENGTH, config["joint_attention_dim"])
        return EncodedShape((config["in_channels"], *cells), text)

    def conditions(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised embeddings: `tokens` of CLIP and T5, and `pooled` of CLIP."""
        pooled = torch.empty(batch_size, config["pooled_projection_dim"], dtype=dtype)
        return {**super().conditions(config, encoded, batch_size, dtype), "pooled": pooled}

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the transformer's arguments; timesteps are from 0 to 1000."""
        return {
            "hidden_states": noisy.to(dtype),
            "timestep": sigmas * NUM_TIMESTEPS,
            "encoder_hidden_states": conditions["tokens"].to(dtype),
            "pooled_projections": conditions["pooled"].to(dtype),
        }


SD3_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
PLANNER_SHAPES = SD3Shapes(
    class_name="SD3Transformer2DModel",
    published_config={
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
    published_name="the published SD3.5 large, 8 B",
    other_published={  # as in copies of their config.json in public repositories
        "stabilityai/stable-diffusion-3.5-medium": {
            **SD3_MEDIUM,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
        },
        "stabilityai/stable-diffusion-3-medium-diffusers": {**SD3_MEDIUM, "qk_norm": None},
    },
    blocks=("transformer_blocks",),
    targets=TARGETS,
    input_layer="pos_embed.proj",
    probe_config={
        **PROBE_ATTENTION,
        "num_layers": 12,
        "joint_attention_dim": 16,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 16,
    },
    supported_models="sd3 trains Stable Diffusion 3 and 3.5 medium and large",
)


class SD3(DiffusersFamily):
    """A loaded Stable Diffusion 3 or 3.5 model. `Family` documents the members."""

    name = "sd3"
    cache_name = "sd3"
    shapes = PLANNER_SHAPES
    text_arguments = (("tokens", "prompt_embeds"), ("pooled", "pooled_prompt_embeds"))
    text_length = T5_LENGTH
    has_fixed_text_length = True

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        config = self.transformer.config
        self.patch_size = config.patch_size
        self.max_edge = config.pos_embed_max_size * self.pixel_step

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions with more tokens than T5 reads."""
        return captions_longer_than(self.parts.components["tokenizer_3"], captions, T5_LENGTH)

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption: embeddings of CLIP and T5 (`tokens`), CLIP's pooled ones (`pooled`)."""
        tokens, _, pooled, _ = self.parts.pipeline().encode_prompt(
            caption,
            None,
            None,
            self.encoder_device(),
            do_classifier_free_guidance=False,
            max_sequence_length=T5_LENGTH,
        )
        return {"tokens": tokens[0], "pooled": pooled[0]}


# Key names in other tools

SECOND_QKV = fuse_qkv(f"{DOUBLE}.attn2.to_qkv", [f"{DOUBLE}.attn2.to_{x}" for x in "qkv"])
FUSED = (IMAGE_QKV, TEXT_QKV, SECOND_QKV)


def _adapter_config(shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a transformer that fits the layers of an adapter file.

    The last block has no output for the text; a file with one is for a model with more blocks.
    """
    block = "transformer_blocks"
    names = [f"{block}.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out", "to_add_out")]
    names += [f"{block}.attn.add_{x}_proj" for x in "qkv"]
    second = [f"{block}.attn2.to_{x}" for x in ("q", "k", "v", "out")]
    text = [f"{block}.{x}" for x in ("attn.to_add_out", "ff_context.net")]
    width = shapes.size(0, 2432, *names, *second, f"{block}.ff.net", f"{block}.ff_context.net")
    count = shapes.num_blocks(block)
    patch = 2 * 2
    return {
        **shapes.heads(width),
        "num_layers": max(count, *(1 + shapes.num_blocks(block, name) for name in text)),
        "dual_attention_layers": tuple(range(count)) if shapes.size(0, 0, *second) else (),
        "caption_projection_dim": width,
        "joint_attention_dim": shapes.size(1, 4096, "context_embedder"),
        "pooled_projection_dim": shapes.size(1, 2048, "time_text_embed.text_embedder.linear_1"),
        "in_channels": shapes.fan_in(16 * patch, "pos_embed.proj") // patch,
        "out_channels": shapes.size(0, 16 * patch, "proj_out") // patch,
        "qk_norm": "rms_norm",
    }


KEY_TABLE = KeyTable(
    family="sd3",
    aliases=("sd35", "sd3.5"),
    header_words=("stable-diffusion-3", "sd3", "sd_3"),
    rows=(
        ("joint_blocks.{}.x_block.attn.qkv", IMAGE_QKV.whole),
        ("joint_blocks.{}.context_block.attn.qkv", TEXT_QKV.whole),
        ("joint_blocks.{}.x_block.attn2.qkv", SECOND_QKV.whole),
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
    unfused=part_names(FUSED),
    fused=FUSED,
    # The text stream of the last block has only (scale, shift) of its norm.
    swapped_halves=frozenset({"norm_out.linear", f"{DOUBLE}.norm1_context.linear"}),
    block_linears=(
        *part_names(FUSED),
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
    pipeline=pipeline_spec("StableDiffusion3Pipeline", "SD3Transformer2DModel", _adapter_config),
)
