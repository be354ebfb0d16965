"""The model family `sd15`: Stable Diffusion 1.5 for images, with diffusers' classes.

Latents have C channels, H rows and W columns; a cell is eight pixels wide. A caption is embedded by
CLIP. `models/unet.py` has what it shares with SDXL.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gracetune.config.schema import ModelSection


def load(section: ModelSection) -> SD15:
    """Load the Stable Diffusion 1.5 pipeline that `model.path` names, without a safety checker."""
    pipelines = ("StableDiffusionPipeline",)
    parts = read_parts(section, PLANNER_SHAPES, pipelines)
    return SD15(replace(parts, index={**parts.index, "requires_safety_checker": False}))


PLANNER_SHAPES = UNetShapes(
    class_name="UNet2DConditionModel",
    published_config={"sample_size": 64, "cross_attention_dim": 768},
    published_name="the published Stable Diffusion 1.5, 0.86 B",
    component="unet",
    blocks=("down_blocks", "mid_block", "up_blocks"),
    targets=(*ATTENTION_LINEARS, *FEED_FORWARD_LINEARS),
    input_layer="conv_in",
    probe_config={
        "block_out_channels": (32, 32, 32, 32),
        "norm_num_groups": 16,
        "attention_head_dim": 2,
        "cross_attention_dim": 16,
    },
    supported_models="sd15 trains Stable Diffusion 1.5",
    unsupported_inputs={
        **UNSUPPORTED_INPUTS,
        "addition_embed_type": "more conditions, as SDXL does",
    },
)


class SD15(UNetFamily):
    """A loaded Stable Diffusion 1.5 model. `Family` documents the members."""

    name = "sd15"
    cache_name = "sd15"
    shapes = PLANNER_SHAPES

    def encode_caption(
        self,
        caption: str,
        images: Sequence[Tensor] = (),  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Encode a caption to the hidden states of CLIP (`tokens`)."""
        tokens, _ = self.parts.pipeline().encode_prompt(caption, self.encoder_device(), 1, False)
        return {"tokens": tokens[0]}


def _adapter_pipeline(unet: Callable[[Any], Any]) -> Any:
    """Return a pipeline without weights, to test whether diffusers loads an adapter file."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    return StableDiffusionPipeline(
        scheduler=None,
        vae=None,
        text_encoder=None,
        tokenizer=None,
        unet=unet(UNet2DConditionModel),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


ROWS = unet_rows((320, 640, 1280, 1280), (1, 1, 1, 0))
KEY_TABLE = KeyTable(
    family="sd15",
    aliases=("sd1", "sd1.5"),
    component="unet",
    header_words=("stable-diffusion-v1", "sd_v1", "sd1"),
    rows=ROWS,
    block_linears=unet_linears(ROWS),
    # sd-scripts trains diffusers' U-Net of SD 1.5, and diffusers reads no other names for it.
    default_formats=(("other", "kohya-diffusers"),),
    columns=text_columns(768),
    kernels=(*UNET_KERNELS, ("proj_in", (1, 1)), ("proj_out", (1, 1))),
    comfyui_prefixes=UNET_PREFIXES,
    pipeline=PipelineSpec(_adapter_pipeline, partial(unet_config, PLANNER_SHAPES.published_config)),
)
