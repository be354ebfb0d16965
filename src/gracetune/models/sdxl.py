"""The model family `sdxl`: Stable Diffusion XL for images, with diffusers' classes.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. A caption is embedded by
two CLIP models. `models/unet.py` has what it shares with Stable Diffusion 1.5.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gracetune.adapters.files.keys import KeyTable, PipelineSpec
from gracetune.models.pipeline_folder import read_parts
from gracetune.models.unet import (
    ATTENTION_LINEARS,
    FEED_FORWARD_LINEARS,
    UNET_KERNELS,
    UNET_PREFIXES,
    UNSUPPORTED_INPUTS,
    UNetFamily,
    UNetShapes,
    text_columns,
    unet_config,
    unet_linears,
    unet_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, EncodedShape, Forward

NUM_TIME_IDS = 6
"""Height and width of the original image, top and left of the crop, height and width to generate.
"""


def load(section: ModelSection) -> SDXL:
    """Load the Stable Diffusion XL pipeline that `model.path` names."""
    pipelines = ("StableDiffusionXLPipeline",)
    return SDXL(read_parts(section, PLANNER_SHAPES, pipelines))


class SDXLShapes(UNetShapes):
    """Describes the U-Net of SDXL to the memory planner."""

    def conditions(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised embeddings: `tokens`, `pooled` of CLIP, and `time_ids` of sizes."""
        time_width = NUM_TIME_IDS * config["addition_time_embed_dim"]
        pooled_width = config["projection_class_embeddings_input_dim"] - time_width
        return {
            **super().conditions(config, encoded, batch_size, dtype),
            "pooled": torch.empty(batch_size, pooled_width, dtype=dtype),
            "time_ids": torch.empty(batch_size, NUM_TIME_IDS, dtype=dtype),
        }

    def arguments(
        self,
        config: Config,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the U-Net's arguments, with pooled text and sizes in `added_cond_kwargs`."""
        added = {
            "text_embeds": conditions["pooled"].to(dtype),
            "time_ids": conditions["time_ids"].to(dtype),
        }
        arguments = super().arguments(config, noisy, sigmas, conditions, dtype)
        return {**arguments, "added_cond_kwargs": added}


PLANNER_SHAPES = SDXLShapes(
    class_name="UNet2DConditionModel",
    nests_arguments=True,
    published_config={
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    published_name="the published SDXL, 2.6 B",
    component="unet",
    blocks=("down_blocks", "mid_block", "up_blocks"),
    targets=(*ATTENTION_LINEARS, *FEED_FORWARD_LINEARS),
    input_layer="conv_in",
    probe_config={
        "block_out_channels": (32, 32, 32),
        "norm_num_groups": 16,
        "transformer_layers_per_block": 1,
        "attention_head_dim": 2,
        "cross_attention_dim": 16,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
    },
    supported_models="sdxl trains Stable Diffusion XL base models",
    unsupported_inputs=UNSUPPORTED_INPUTS,
)


class SDXL(UNetFamily):
    """A loaded Stable Diffusion XL model. `Family` documents the members."""

    name = "sdxl"
    cache_name = "sdxl"
    shapes = PLANNER_SHAPES
    text_arguments = (("tokens", "prompt_embeds"), ("pooled", "pooled_prompt_embeds"))

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption: embeddings of both CLIP models (`tokens`), and the pooled one."""
        tokens, _, pooled, _ = self.parts.pipeline().encode_prompt(
            caption, device=self.encoder_device(), do_classifier_free_guidance=False
        )
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Run the U-Net. Its sizes are those of an image that is generated and not cropped."""
        size = [cells * self.vae_scale for cells in noisy.shape[-2:]]
        time_ids = torch.tensor([*size, 0, 0, *size], device=noisy.device, dtype=torch.float32)
        given = {**conditions, "time_ids": time_ids.expand(len(noisy), -1)}
        return super().predict(transformer, noisy, sigmas, given)

    def unconditional(self, empty: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return zeros for most models: their guidance takes zeros instead of an empty prompt."""
        if self.parts.index.get("force_zeros_for_empty_prompt", True):
            return {name: torch.zeros_like(tensor) for name, tensor in empty.items()}
        return empty


def _adapter_pipeline(unet: Callable[[Any], Any]) -> Any:
    """Return a pipeline without weights, to test whether diffusers loads an adapter file."""
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel

    return StableDiffusionXLPipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        unet=unet(UNet2DConditionModel),
    )


ROWS = (
    *unet_rows((320, 640, 1280), (0, 2, 10)),
    ("label_emb.0.0", "add_embedding.linear_1"),
    ("label_emb.0.2", "add_embedding.linear_2"),
)
KEY_TABLE = KeyTable(
    family="sdxl",
    component="unet",
    header_words=("stable-diffusion-xl", "sdxl"),
    rows=ROWS,
    block_linears=unet_linears(ROWS),
    default_formats=(("other", "kohya"),),
    kernels=UNET_KERNELS,
    columns=text_columns(2048),
    preferred_over=("sd15",),
    comfyui_prefixes=UNET_PREFIXES,
    pipeline=PipelineSpec(_adapter_pipeline, partial(unet_config, PLANNER_SHAPES.published_config)),
)
