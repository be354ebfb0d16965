"""What the planner knows of diffusers' classes: where blocks are, and what a batch looks like.

Shapes: B samples, C channels, F frames, H rows and W columns of latents, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gracetune.models import flux, qwen_image, tiny, wan22

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What one sample is, in pixels; a picture is a video of one frame."""

    width: int
    height: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as caches hold it."""

    latent_shape: tuple[int, ...]
    text_shape: tuple[int, int]
    """Tokens with their padding, and the width of each: the most that a caption takes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A class of diffusers."""

    blocks: tuple[str, ...]
    """Where its lists of blocks are, in the order of forward."""
    targets: tuple[str, ...]
    encoded: Callable[[Config, SampleShape], Encoded]
    inputs: Callable[[Config, Encoded, int, torch.dtype], dict[str, Tensor]]
    others: Callable[[Encoded, int], dict[str, Any]]
    """Arguments that are no tensors."""
    narrow: Config
    """What makes a configuration one of a dozen blocks with hardly any numbers: fewer of them would
    run from the processor's caches."""


@dataclass(frozen=True, slots=True)
class Published:
    """A family's published shape."""

    class_name: str
    config: Config
    note: str
    experts: int = 1
    dtype: torch.dtype = torch.bfloat16


def _wan_encoded(config: Config, picture: SampleShape) -> Encoded:
    edge = 16 if config["in_channels"] == 48 else 8  # TI2V-5B has a VAE of its own
    frames = (picture.frames - 1) // 4 + 1
    shape = (config["in_channels"], frames, picture.height // edge, picture.width // edge)
    return Encoded(shape, (wan22.TEXT_LENGTH, config["text_dim"]))


def _wan_inputs(
    config: Config, encoded: Encoded, batch: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    _, frames, height, width = encoded.latent_shape
    across, up, along = config["patch_size"]
    tokens = (frames // across) * (height // up) * (width // along)
    per_token = config["in_channels"] == 48  # TI2V-5B: each token has a noise level of its own
    return {
        "hidden_states": torch.empty(batch, *encoded.latent_shape, dtype=dtype),
        "encoder_hidden_states": torch.empty(batch, *encoded.text_shape, dtype=dtype),
        "timestep": torch.empty(batch, tokens) if per_token else torch.empty(batch),
    }


def _packed(config: Config, picture: SampleShape, text: tuple[int, int]) -> Encoded:
    """Latents of 8 pixels a cell, folded two by two into tokens."""
    cells = (picture.height // 16) * 2, (picture.width // 16) * 2
    return Encoded((config["in_channels"] // 4, *cells), text)


def _num_tokens(encoded: Encoded) -> int:
    _, height, width = encoded.latent_shape
    return (height // 2) * (width // 2)


def _flux_inputs(
    config: Config, encoded: Encoded, batch: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    tokens = _num_tokens(encoded)
    inputs = {
        "hidden_states": torch.empty(batch, tokens, config["in_channels"], dtype=dtype),
        "encoder_hidden_states": torch.empty(batch, *encoded.text_shape, dtype=dtype),
        "pooled_projections": torch.empty(batch, config["pooled_projection_dim"], dtype=dtype),
        "timestep": torch.empty(batch, dtype=dtype),
        "img_ids": torch.empty(tokens, 3),
        "txt_ids": torch.empty(encoded.text_shape[0], 3),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = torch.empty(batch, dtype=dtype)
    return inputs


def _qwen_inputs(
    config: Config, encoded: Encoded, batch: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.empty(
            batch, _num_tokens(encoded), config["in_channels"], dtype=dtype
        ),
        "encoder_hidden_states": torch.empty(batch, *encoded.text_shape, dtype=dtype),
        "timestep": torch.empty(batch, dtype=dtype),
    }


def _qwen_others(encoded: Encoded, batch: int) -> dict[str, Any]:
    _, height, width = encoded.latent_shape
    return {"img_shapes": [[(1, height // 2, width // 2)]] * batch}


def _sd3_inputs(
    config: Config, encoded: Encoded, batch: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.empty(batch, *encoded.latent_shape, dtype=dtype),
        "encoder_hidden_states": torch.empty(batch, *encoded.text_shape, dtype=dtype),
        "pooled_projections": torch.empty(batch, config["pooled_projection_dim"], dtype=dtype),
        "timestep": torch.empty(batch, dtype=dtype),
    }


def _nothing(_encoded: Encoded, _batch: int) -> dict[str, Any]:
    return {}


_NARROW = {"num_attention_heads": 2, "attention_head_dim": 16}
_JOINT = {**_NARROW, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)}

SHAPES: Mapping[str, Shape] = {
    "WanTransformer3DModel": Shape(
        ("blocks",),
        wan22.TARGETS,
        _wan_encoded,
        _wan_inputs,
        _nothing,
        {**_NARROW, "num_layers": 12, "ffn_dim": 32, "text_dim": 16, "freq_dim": 16},
    ),
    "FluxTransformer2DModel": Shape(
        ("transformer_blocks", "single_transformer_blocks"),
        flux.TARGETS,
        lambda config, picture: _packed(config, picture, (512, config["joint_attention_dim"])),
        _flux_inputs,
        _nothing,
        {**_JOINT, "num_layers": 4, "num_single_layers": 8, "pooled_projection_dim": 16},
    ),
    "QwenImageTransformer2DModel": Shape(
        ("transformer_blocks",),
        qwen_image.TARGETS,
        lambda config, picture: _packed(config, picture, (512, config["joint_attention_dim"])),
        _qwen_inputs,
        _qwen_others,
        {**_JOINT, "num_layers": 12},
    ),
    "SD3Transformer2DModel": Shape(
        ("transformer_blocks",),
        tiny.Tiny.adapter_targets,
        lambda config, picture: Encoded(
            (config["in_channels"], picture.height // tiny.CELL, picture.width // tiny.CELL),
            (tiny.TOKEN_STEP, config["joint_attention_dim"]),
        ),
        _sd3_inputs,
        _nothing,
        {},
    ),
}
"""By the name of the class."""

PUBLISHED: Mapping[str, Published] = {
    "tiny": Published(
        "SD3Transformer2DModel", tiny.CONFIG, "the family's own", dtype=torch.float32
    ),
    "wan22": Published(
        "WanTransformer3DModel", {}, "the published A14B, with two experts", experts=2
    ),
    "flux": Published(
        "FluxTransformer2DModel", {"guidance_embeds": True}, "the published FLUX.1-dev, 12 B"
    ),
    "qwen_image": Published("QwenImageTransformer2DModel", {}, "the published Qwen-Image, 20 B"),
}
"""By the family's name in a run file."""
