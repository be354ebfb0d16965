"""The model family `sd3`: Stable Diffusion 3 and 3.5 for images, with diffusers' classes.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. A caption is embedded by
two CLIP models and T5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gracetune.models.diffusers_family import DiffusersFamily, captions_longer_than
from gracetune.models.family import PROBE_ATTENTION, EncodedShape, PlannerShapes
from gracetune.models.pipeline_folder import PipelineParts, read_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

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
    text_length = T5_LENGTH

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

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the embeddings of captions into a batch; all have the same length."""
        return {key: torch.stack([text[key] for text in texts]) for key in ("tokens", "pooled")}

    def prompt_arguments(
        self, text: Mapping[str, Tensor], empty: Mapping[str, Tensor], guidance: float
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for a prompt."""
        return {
            "prompt_embeds": text["tokens"],
            "pooled_prompt_embeds": text["pooled"],
            "negative_prompt_embeds": empty["tokens"],
            "negative_pooled_prompt_embeds": empty["pooled"],
            "guidance_scale": guidance,
        }
