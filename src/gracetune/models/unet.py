"""Common code of the families whose model is a U-Net: Stable Diffusion 1.5 and SDXL.

A U-Net consists of ResNets and transformer blocks. They are the units of weight streaming and
recomputation, because its stages (`down_blocks`, `mid_block`, `up_blocks`) differ greatly in size.

The model is trained on the discrete timesteps of its scheduler. The trainer's timesteps t in [0, 1]
(`train/objective.py`), which `Family.predict` calls sigmas, are rounded to the nearest of them, and
the U-Net gets its number.
"""

from __future__ import annotations

import math
import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from gracetune.errors import ModelError
from gracetune.models.diffusers_family import DiffusersFamily
from gracetune.models.family import EncodedShape, PlannerShapes, PredictionType
from gracetune.models.key_tables import IN_ORIGINAL_NAMES
from gracetune.models.pipeline_folder import PipelineParts, read_scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from gracetune.adapters.files.placeholder_models import LayerShapes
    from gracetune.models.family import Config, Forward, SampleShape
    from gracetune.models.key_tables import ComfyuiPrefixes

CLIP_LENGTH = 77
"""Number of tokens of every caption. CLIP runs without a mask, so padding is embedded as well."""
VAE_SCALE = 8
PREDICTIONS: Mapping[str, PredictionType] = {"epsilon": "epsilon", "v_prediction": "v"}
"""The setting `prediction_type` of a scheduler -> the quantity that the model predicts."""
UNSUPPORTED_INPUTS = {
    "time_cond_proj_dim": "an embedding of the guidance scale, as models of LCM do",
    "encoder_hid_dim_type": "embeddings of images",
    "class_embed_type": "a class",
}


class UNetShapes(PlannerShapes):
    """Describes the U-Net of a Stable Diffusion model to the memory planner."""

    def find_blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """Return the ResNets and the transformer blocks of a U-Net in forward order."""
        unet: Any = transformer
        blocks: list[nn.Module] = []
        for stage in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
            attentions = dict(stage.named_children()).get("attentions", ())
            for resnet, attention in zip_longest(stage.resnets, attentions):
                blocks += [resnet, *(() if attention is None else attention.transformer_blocks)]
        return blocks

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and of the embedding of its caption."""
        cells = sample.height // VAE_SCALE, sample.width // VAE_SCALE
        text = (CLIP_LENGTH, config["cross_attention_dim"])
        return EncodedShape((config["in_channels"], *cells), text)

    def arguments(
        self,
        config: Config,  # noqa: ARG002
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the U-Net's arguments; `sigmas` are the numbers of timesteps, from 0."""
        return {
            "sample": noisy.to(dtype),
            "timestep": sigmas,
            "encoder_hidden_states": conditions["tokens"].to(dtype),
        }


class UNetFamily(DiffusersFamily):
    """A loaded model with a U-Net. A family's class adds its text encoders."""

    text_length = CLIP_LENGTH
    has_fixed_text_length = True
    noise_schedule: Tensor

    def __init__(self, parts: PipelineParts) -> None:
        super().__init__(parts)
        self.patch_size = 2 ** (len(self.transformer.config.block_out_channels) - 1)
        self.noise_schedule, self.prediction = _read_schedule(parts)

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Run the U-Net at the discrete timesteps that are nearest to the sigmas."""
        middles = (self.noise_schedule[1:] + self.noise_schedule[:-1]) / 2
        numbers = torch.bucketize(sigmas, middles.to(sigmas))
        return super().predict(transformer, noisy, numbers.to(sigmas), conditions)


def _read_schedule(parts: PipelineParts) -> tuple[Tensor, PredictionType]:
    """Return t in [0, 1] of each discrete timestep, and the quantity that the model predicts."""
    scheduler = read_scheduler(parts.folder)
    name = f"The scheduler of {str(parts.folder)!r}, {type(scheduler).__name__},"
    kind = scheduler.config.get("prediction_type", "epsilon")
    if kind not in PREDICTIONS:
        raise ModelError(
            f"{name} has the prediction_type {kind!r}, but training supports "
            f"{' and '.join(PREDICTIONS)}. Name another model.path."
        )
    if not hasattr(scheduler, "alphas_cumprod"):
        raise ModelError(
            f"{name} has no table of discrete timesteps (alphas_cumprod), on which U-Nets are "
            "trained. Name another model.path."
        )
    alphas = scheduler.alphas_cumprod.double()  # alpha^2 and 1 - sigma^2 of objective.py
    angles = torch.atan2((1 - alphas).sqrt(), alphas.sqrt())
    return (angles * (2 / math.pi)).float(), PREDICTIONS[kind]


# Names in adapter files. The original names count all layers of the encoder and of the decoder.

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


_LEVEL = re.compile(
    r"(?:(down|up)_blocks\.(\d)|mid_block)\."
    r"(?:resnets\.\d\.\w+|attentions\.\d\.(?:proj_in|proj_out|.*\.(?:to_\w|to_out\.0|ff\.net\.2)))"
)
"""Matches modules whose rows are the width of their resolution: (direction, block)."""


def unet_config(published: Config, shapes: LayerShapes) -> dict[str, object]:
    """Return the configuration of a U-Net that fits the layers of an adapter file.

    Widths that no layer shows are those of the published model, in the ratio of the others.
    """
    defaults: tuple[int, ...] = published.get("block_out_channels", (320, 640, 1280, 1280))
    widths = _widths(shapes.by_module, len(defaults))
    if all(widths.get(level, width) == width for level, width in enumerate(defaults)):
        return dict(published)
    known = min(widths)
    ratio = widths[known] / defaults[known]
    text = [s[1] for name, s in shapes.by_module.items() if name.endswith(("2.to_k", "2.to_v"))]
    config: dict[str, object] = {
        **published,
        "block_out_channels": tuple(
            widths.get(level, max(1, round(width * ratio))) for level, width in enumerate(defaults)
        ),
        "cross_attention_dim": text[0] if text else published["cross_attention_dim"],
        "in_channels": shapes.fan_in(4 * 9, "conv_in") // 9,
        "out_channels": shapes.size(0, 4, "conv_out"),
        # Neither changes the shape of a weight.
        "norm_num_groups": 1,
        "attention_head_dim": 1,
    }
    if "projection_class_embeddings_input_dim" in published:
        added = "projection_class_embeddings_input_dim"
        config[added] = shapes.size(1, published[added], "add_embedding.linear_1")
    return config


def _widths(shapes: Mapping[str, tuple[int, ...]], levels: int) -> dict[int, int]:
    """Return the channels of each resolution that the weights of a U-Net show."""
    found: dict[int, int] = {}
    for name, shape in shapes.items():
        match = _LEVEL.fullmatch(name)
        if match:
            block = int(match[2] or levels - 1)
            found.setdefault(levels - 1 - block if match[1] == "up" else block, shape[0])
        elif name in ("conv_in", "time_embedding.linear_1"):
            found[0] = shape[0] if name == "conv_in" else shape[1]
    return found


def text_columns(width: int) -> tuple[tuple[str, int], ...]:
    """Return the columns of the modules that read text, which tell U-Nets apart."""
    return ("attn2.to_k", width), ("attn2.to_v", width)


UNET_KERNELS = (
    *((name, (3, 3)) for name in ("conv_in", "conv1", "conv2", "conv", "conv_out")),
    ("conv_shortcut", (1, 1)),
)
"""Kernels of a U-Net's convolutions, by the end of their names."""
UNET_PREFIXES: ComfyuiPrefixes = (
    *IN_ORIGINAL_NAMES,
    ("lora_unet_", "_", "diffusers"),
    ("lycoris_", "_", "diffusers"),
    ("unet.", ".", "diffusers"),
    ("", ".", "diffusers"),
)
