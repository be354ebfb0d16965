"""What every model family can do; the trainer knows families by this and nothing else.

Shapes: B samples, C channels, F frames, H and W in pixels for pictures and in cells for latents, s
noise levels in [0, 1] with 1 being pure noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import nn

from gracetune import registry
from gracetune.models.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable
    from gracetune.config.schema import ModelSection

    Config = Mapping[str, Any]
    Forward = Callable[..., Any]
    """A transformer, a wrapper around it, or one expert of a pair."""


MediaKind = Literal["image", "video", "audio"]
PredictionType = Literal["flow", "epsilon", "v"]
"""What a model says of a noisy latent: the velocity e - x0 of flow matching, the noise, or the v of
Salimans and Ho. Loss weights depend on it."""


class AudioFormat(NamedTuple):
    """What a family of sounds asks of its clips."""

    channels: int
    sample_rate: int
    max_length: int
    """In samples."""


class Family(Protocol):
    """A model with its encoders, loaded."""

    @property
    def name(self) -> str:
        """As a run file spells it."""
        ...

    @property
    def transformer(self) -> nn.Module:
        """What is trained; where `boundary` says that there are two, an `Experts` with both."""
        ...

    @property
    def boundary(self) -> float | None:
        """The level from which on the high-noise expert works; none: one transformer does all."""
        ...

    @property
    def kinds(self) -> Sequence[MediaKind]:
        """The kinds of sample that `encode` takes."""
        ...

    @property
    def audio(self) -> AudioFormat | None:
        """For families of sounds."""
        ...

    @property
    def starts_from(self) -> Literal["text", "image"]:
        """Whether a sample is made of a caption alone, or of a picture and a caption."""
        ...

    @property
    def takes_control(self) -> bool:
        """Whether training pictures come with a control picture (a reference, to be edited)."""
        ...

    @property
    def pixel_step(self) -> int:
        """Picture edges must be multiples of this."""
        ...

    @property
    def max_edge(self) -> int:
        """The longest edge, in pixels, that the model can place."""
        ...

    @property
    def prediction(self) -> PredictionType:
        """What `predict` gives."""
        ...

    @property
    def adapter_targets(self) -> Sequence[str]:
        """Endings of the modules an adapter should sit on."""
        ...

    def identity(self) -> Mapping[str, str]:
        """What `latents` and `text` depend on: caches are keyed by it."""
        ...

    def weights_digest(self) -> str:
        """A name for the transformer's weights as they are now; reads all of them."""
        ...

    def blocks(self) -> Sequence[nn.Module]:
        """The repeated blocks in the order of a forward pass; of two experts, high noise first."""
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in backward instead of keeping them."""
        ...

    def to(self, device: torch.device) -> None:
        """Move what encodes; where the transformer lives is for the trainer to say."""
        ...

    def release_text_encoder(self) -> None:
        """Nothing is encoded from here on: give its memory back."""
        ...

    def set_tiling(self, enabled: bool) -> bool:
        """Encode by tiles from now on, or whole; whether this family can tile."""
        ...

    def encode(self, media: Tensor) -> Tensor:
        """Pictures (BCHW), clips (BCFHW) in [-1, 1] or sounds (BCN) to what caches keep of them.

        A control picture follows its picture as three more channels.
        """
        ...

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What is noised of an encoded batch, and what the model is given as it is."""
        ...

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """What `encode` makes of one sample of this shape, as buckets have them."""
        ...

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """How many tokens the transformer makes of one latent: some shift noise levels by it."""
        ...

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Those that are longer than the model reads, so that their ends are not learnt."""
        ...

    def encode_text(
        self, captions: Sequence[str], images: Sequence[Tensor] = ()
    ) -> list[dict[str, Tensor]]:
        """Each caption's embeddings, without padding.

        Families that take a control are given it (CHW in [-1, 1]) with each caption.
        """
        ...

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Embeddings of several captions as one batch, padded as the model expects."""
        ...

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """What `prediction` says, of the same shape as `noisy`; the text and the given as one.

        `transformer` is ours, a wrapper around it, or one expert; all levels are that expert's.
        """
        ...

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Make what is ordered with the weights as they are, through the family's own pipeline.

        Another thread may encode meanwhile.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write the model so that `model.path` can name the folder."""
        ...


class LoadFamily(Protocol):
    """How a family is made from its section of the run file."""

    def __call__(self, section: ModelSection) -> Family: ...


def load_family(section: ModelSection) -> Family:
    """Load the model that the run file names."""
    loaders = {name: f"{info.module}:load" for name, info in FAMILIES.items()}
    load = cast("LoadFamily", registry.load("family", section.family, loaders))
    return load(section)


def key_tables() -> dict[str, KeyTable]:
    """Return the key table of every family that other tools write adapters for, by its name."""
    modules = (import_module(info.module) for info in FAMILIES.values() if info.has_key_table)
    tables: list[KeyTable] = [module.KEY_TABLE for module in modules]
    return {table.family: table for table in tables}


# ------------------------------------------------------------------------------------------
# What is asked of a family when it samples, and what comes back.


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample a prompt; sample i starts from the noise of seed + i, whatever the others are."""

    texts: Sequence[Mapping[str, Tensor]]
    """Of each prompt, as `encode_text` gives them."""
    empty_text: Mapping[str, Tensor]
    """Of no caption, for guidance."""
    shape: tuple[int, ...]
    """As buckets have them: width and height, with frames for videos; channels and samples."""
    seed: int
    steps: int
    guidance: float
    """1: none."""
    images: Sequence[Tensor] = ()
    """For families that start from a picture, one a prompt: CHW in [-1, 1], of the order's size."""
    empty_texts: Sequence[Mapping[str, Tensor]] = ()
    """Where the text depends on the picture: `empty` with each of them."""
    tiled: bool = False
    """Whether to decode by tiles, for a family that has them."""


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """One picture (CHW), clip (CFHW) in [-1, 1] or sound (CN), on the CPU."""

    kind: MediaKind
    data: Tensor
    rate: float = 0.0
    """Frames or samples a second."""


# ------------------------------------------------------------------------------------------
# Two transformers as one module: which of them a call reaches is said by name.
#
# Parameters are called `high.*` and `low.*`: optimizer groups, checkpoints and files tell them
# apart
# by that. Which expert a level belongs to is decided in `train/experts.py`, not here.


Expert = Literal["high", "low"]
EXPERTS: tuple[Expert, Expert] = ("high", "low")


class Experts(nn.Module):
    """The high-noise and the low-noise transformer."""

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.high = high
        self.low = low

    def forward(self, *args: Any, expert: Expert, **kwargs: Any) -> Any:
        """One expert's forward pass; through here, so that wrappers see every call."""
        return (self.high if expert == "high" else self.low)(*args, **kwargs)


def bind_expert(transformer: Forward, expert: Expert | None) -> Forward:
    """The transformer as a family calls it; none: there is only one."""
    return transformer if expert is None else partial(transformer, expert=expert)


def transformers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Each transformer by its expert's name; a single one by the empty name."""
    return {"high": model.high, "low": model.low} if isinstance(model, Experts) else {"": model}


# Shapes for the planner


@dataclass(frozen=True, slots=True)
class SampleShape:
    """The size of one training sample in pixels. An image is a video of one frame."""

    width: int
    height: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class EncodedShape:
    """The shapes of one sample in the cache."""

    latent_shape: tuple[int, ...]
    text_shape: tuple[int, int]
    """Tokens of the longest caption, with padding, and the width of each token."""


@dataclass(frozen=True)
class PlannerShapes:
    """A family's transformer as the planner builds and calls it, without its weights.

    A family module subclasses it and puts one instance into `PLANNER_SHAPES`. `config` in the
    methods is the transformer's full diffusers configuration.
    """

    class_name: str
    """Class of the transformer in diffusers."""
    published_config: Config
    """Differences between the published model and the defaults of that class."""
    published_name: str
    """The published model in words, for the plan's report."""
    blocks: tuple[str, ...]
    """Attributes of the transformer that hold its repeated blocks, in the order of forward."""
    targets: tuple[str, ...]
    """Modules that an adapter is placed on by default."""
    probe_config: Config
    """Changes that give a dozen very narrow blocks, to time kernel launches on the CPU.

    With fewer blocks the CPU would find them all in its caches and look faster than it is.
    """
    experts: int = 1
    """Number of transformers of this shape."""
    dtype: torch.dtype = torch.bfloat16
    """Type of the weights, unless `model.dtype` is float32."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and text."""
        raise NotImplementedError

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised tensors for the transformer's forward pass, by argument name."""
        raise NotImplementedError

    def extra_arguments(self, encoded: EncodedShape, batch_size: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the arguments of the forward pass that are not tensors."""
        return {}


def planner_shapes(family: str) -> PlannerShapes:
    """Return the shapes of one of the `PLANNABLE` families."""
    shapes: PlannerShapes = import_module(FAMILIES[family].module).PLANNER_SHAPES
    return shapes


PLANNABLE = tuple(sorted(name for name, info in FAMILIES.items() if info.has_planner_shapes))
"""Families whose runs can be planned without loading the model."""

PROBE_ATTENTION = {"num_attention_heads": 2, "attention_head_dim": 16}
PROBE_JOINT_ATTENTION = {
    **PROBE_ATTENTION,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
"""Parts of `PlannerShapes.probe_config` that several families share."""
