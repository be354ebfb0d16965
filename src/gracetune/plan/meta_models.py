"""Models by their configuration alone: on the meta device, with the batches they are called with.

A run file's `model.path` says what the model is, if it is a folder; otherwise the published shape
of the family stands for it, and the plan says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gracetune.errors import ConfigError, ModelError
from gracetune.models import flux, qwen_image, tiny, wan22
from gracetune.models.attention_processors import with_dense_gradients
from gracetune.plan.trace import Subject

if TYPE_CHECKING:
    from gracetune.config.schema import ModelSection


@dataclass(frozen=True)
class Outline:
    """A model without weights."""

    name: str
    model: nn.Module
    shape: Shape
    experts: int
    encoded: Encoded
    """One sample of the run."""
    dtype: torch.dtype
    note: str
    """Where its shape is from."""

    def subject(self) -> Subject:
        """For the tracer; an adapter must be in place by now."""
        blocks = [
            b for name in self.shape.blocks for b in self.model.get_submodule(name).children()
        ]
        return Subject(self.name, self.model, blocks, self._inputs, self._predict, self.dtype)

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        config = cast("Any", self.model).config
        return self.shape.inputs(config, self.encoded, batch, self.dtype)

    def _predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        others = self.shape.others(self.encoded, len(batch["timestep"]))
        prediction: Tensor = model(**batch, **others, return_dict=False)[0]
        return prediction


def outline(
    section: ModelSection,
    picture: SampleShape,
    changes: Mapping[str, Any] | None = None,
    device: str = "meta",
) -> Outline:
    """The model that a run file names, or the published shape of its family.

    `changes` are to its configuration: fewer layers, say. On another device than `meta` its weights
    have values, any.
    """
    if section.family not in PUBLISHED:
        raise ConfigError(
            f"model.family is {section.family!r}; the planner knows the shapes of "
            f"{', '.join(sorted(PUBLISHED))}. `gracetune train` plans others from the model that "
            "it has loaded; in Python, gracetune.plan.trace.trace_model takes a Subject that names "
            "the model's blocks."
        )
    published = PUBLISHED[section.family]
    class_name, config = published.class_name, published.config
    experts, note = published.experts, published.note
    file = None if section.path is None else Path(section.path) / "transformer" / "config.json"
    if file is not None and file.is_file():
        class_name, config = _read(file)
        experts = 2 if (file.parents[1] / "transformer_2").is_dir() else 1
        note = f"as in {file}"
    if class_name not in SHAPES:
        raise ModelError(
            f"model.path {section.path!r} holds a {class_name}, whose blocks the planner cannot "
            f"find; it knows those of {', '.join(sorted(SHAPES))}. Set plan: off, or plan in "
            "Python: gracetune.plan.trace.trace_model takes a Subject that names the blocks."
        )
    dtype = torch.float32 if section.dtype == "float32" else published.dtype
    model = _make(class_name, {**config, **(changes or {})}, dtype, device)
    return Outline(
        name=section.family,
        model=model,
        shape=SHAPES[class_name],
        experts=experts,
        encoded=SHAPES[class_name].encoded(cast("Any", model).config, picture),
        dtype=dtype,
        note=note,
    )


def _make(class_name: str, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> nn.Module:
    """A model of diffusers, all of it frozen."""
    cls = getattr(import_module("diffusers"), class_name)
    with torch.device(device):
        model = cast("nn.Module", cls.from_config(dict(config)))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with_dense_gradients(model)  # as its family loads it
    return model.requires_grad_(False)


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        return str(config["_class_name"]), config
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{file} cannot be read as a model's configuration: {error}. Name a folder as "
            "diffusers saves it."
        ) from error


# ------------------------------------------------------------------------------------------
# What the planner knows of diffusers' classes: where blocks are, and what a batch looks like.
#
# Shapes: B samples, C channels, F frames, H rows and W columns of latents, N tokens.


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
