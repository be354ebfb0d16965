"""Define the `Family` protocol, through which the trainer uses every model.

A family is a kind of model, such as FLUX.1 or Wan 2.2. It is one module in this package, listed in
`models/registry.py`, or a class from another package (entry-point group `gracetune.family`). This
module also defines the objects that families and the trainer exchange: sampling requests, pairs of
expert transformers, and shapes for the memory planner.

Letters in shapes: B samples, C channels, F frames, H rows, W columns, N audio samples. Rows and
columns are pixels for images and cells for latents. A sigma is a noise level in [0, 1], from clean
latents to pure noise: the timestep t of `train/objective.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from gracetune import entry_points
from gracetune.errors import ModelError
from gracetune.models.locate import ignore_event, locate_model
from gracetune.models.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable
    from gracetune.config.schema import ModelSection
    from gracetune.events.dispatcher import Emit

    Config = Mapping[str, Any]
    """The configuration of a diffusers model."""
    Forward = Callable[..., Any]
    """A transformer, a wrapper around it, or one expert of a pair."""


MediaKind = Literal["image", "video", "audio"]
PredictionType = Literal["flow", "epsilon", "v"]
"""The quantity that a model predicts: the velocity `noise - x0` of flow matching, the noise, or the
v of Salimans and Ho (2022). Loss weights depend on it."""


class AudioFormat(NamedTuple):
    """The audio format that a family requires of its clips."""

    channels: int
    sample_rate: int
    """Samples per second."""
    max_length: int
    """Length of the longest clip, in samples."""


class Family(Protocol):
    """A loaded model of one kind, such as FLUX.1: transformer, encoders, sampler and facts."""

    @property
    def name(self) -> str:
        """The family's name, which a run file gives as `model.family`."""
        ...

    @property
    def transformer(self) -> nn.Module:
        """The module that is trained: a transformer, or `Experts`, which holds two.

        The two are the high-noise and the low-noise transformer of a model such as Wan 2.2.
        """
        ...

    @property
    def boundary(self) -> float | None:
        """The sigma from which on the high-noise transformer is used, instead of the low-noise one.

        None for a model with one transformer.
        """
        ...

    @property
    def kinds(self) -> Sequence[MediaKind]:
        """The kinds of sample that can be encoded and trained on: image, video or audio."""
        ...

    @property
    def audio(self) -> AudioFormat | None:
        """The format of audio clips. None for families without audio."""
        ...

    @property
    def starts_from(self) -> Literal["text", "image"]:
        """`image` if samples are generated from an image and a caption, else `text`."""
        ...

    @property
    def uses_negative_prompt(self) -> bool:
        """True if sampling has classifier-free guidance, in which a negative prompt has an effect.

        False for a model with guidance built in, such as FLUX.1.
        """
        ...

    @property
    def takes_control(self) -> bool:
        """True if every training image comes with control images, such as the one to edit."""
        ...

    @property
    def max_controls(self) -> int:
        """The largest number of control images of one sample. Read only if `takes_control`."""
        ...

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of each control image of a sample of this size.

        `encode` gets control images of this size. Called only if `takes_control` is true.
        """
        ...

    def text_control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of each control image that `encode_text` gets.

        Called only if `takes_control` is true.
        """
        ...

    @property
    def pixel_step(self) -> int:
        """Number of pixels of which the width and the height of a sample must be multiples."""
        ...

    @property
    def max_edge(self) -> int:
        """The longest width or height, in pixels, for which the model has position embeddings."""
        ...

    @property
    def prediction(self) -> PredictionType:
        """The quantity that the model predicts: velocity (`flow`), noise (`epsilon`) or `v`."""
        ...

    @property
    def noise_schedule(self) -> Tensor | None:
        """The timesteps of a discrete noise schedule, in rising order.

        A run draws positions in it: 0 is its first timestep and 1 its last. None for a model that
        is trained on any timestep in [0, 1]; the drawn positions are then the timesteps.
        """
        ...

    @property
    def adapter_targets(self) -> Sequence[str]:
        """Name endings of the modules that an adapter is placed on by default."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Return strings that identify the VAE (`latents`) and the text encoder (`text`).

        They are part of the keys of cached latents and embeddings, so they must change when an
        encoder's output changes.
        """
        ...

    def weights_hasher(self) -> Callable[[], str]:
        """Return a function that hashes the present weights of the transformer. It reads them all.

        It is called in another thread, while modules may be added to the transformer.
        """
        ...

    def blocks(self) -> Sequence[nn.Module]:
        """Return the transformer's repeated blocks in forward order.

        Of two transformers, the high-noise one comes first.
        """
        ...

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in backward instead of keeping them."""
        ...

    def to(self, device: torch.device) -> None:
        """Move the VAE and the text encoders to a device. The trainer moves the transformer."""
        ...

    def release_text_encoder(self) -> None:
        """Free the text encoder's memory. No text is encoded after this call."""
        ...

    def set_tiling(self, enabled: bool) -> bool:
        """Turn tiled encoding, which saves memory, on or off; return False if there is none."""
        ...

    def encode(self, media: Tensor) -> Tensor:
        """Encode a batch of images, clips or audio to the latents that are cached.

        Images have the shape BCHW and clips BCFHW, both in [-1, 1]; audio has the shape BCN. The
        values of control images, such as the one to edit, follow those of the image as more
        channels. Each may have another size (`control_size`), and is padded with zeros to whole
        channels, so that the number of channels tells how many there are.
        """
        ...

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Split a batch from `encode` into the latents to add noise to, and the conditions.

        Conditions are inputs that stay free of noise, such as the latents of a given first frame.
        """
        ...

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of one encoded sample, without the batch, from the sample's size.

        `shape` is width and height, then frames for a video; channels and samples for audio.
        """
        ...

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of transformer tokens for latents of this shape.

        A shift of the training timesteps may depend on it.
        """
        ...

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions that are too long for the text encoder, so that a run can warn."""
        ...

    def encode_text(
        self, captions: Sequence[str], images: Sequence[Sequence[Tensor]] = ()
    ) -> list[dict[str, Tensor]]:
        """Return the embeddings of each caption, encoded on its own and without padding.

        If the model takes control images, `images` holds those of each caption: CHW in [-1, 1], of
        the size that `text_control_size` returns.
        """
        ...

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the embeddings of several captions into a batch, padded as the model expects."""
        ...

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Run the transformer once and return its prediction, shaped like `noisy`.

        `sigmas` has one noise level per sample. `conditions` are the results of `stack_text` and
        `split_encoded` together. `transformer` is the family's own, a wrapper around it, or one of
        its high-noise and low-noise transformers; then all sigmas belong to that one.
        """
        ...

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Generate samples with the current weights and the family's own pipeline.

        Another thread may call `encode` at the same time.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write the model to a folder that `model.path` of another run can name."""
        ...


@runtime_checkable
class ReloadableText(Protocol):
    """A family that can load its text encoders again, to encode prompts while a run trains."""

    def text_encoder_nbytes(self) -> int:
        """Return the memory that the text encoders need, in bytes."""
        ...

    def restore_text_encoder(self, device: torch.device) -> None:
        """Load the text encoders again, after `release_text_encoder`, to a device."""
        ...


class LoadFamily(Protocol):
    """Type of the function `load` of a family's module, which loads the run file's model."""

    def __call__(self, section: ModelSection) -> Family: ...


def load_family(
    section: ModelSection, emit: Emit = ignore_event, *, is_first: bool = True
) -> Family:
    """Load the model that the run file names, which may have to be downloaded first.

    `emit` gets the progress of the download. `is_first` is False for all ranks of a machine but
    one, which downloads.
    """
    loaders = {name: f"{info.module}:load" for name, info in FAMILIES.items()}
    load = cast("LoadFamily", entry_points.load("family", section.family, loaders))
    if section.family in FAMILIES:  # in other packages, `path` may mean anything
        section = locate_model(section, emit, is_first=is_first)
    return load(section)


def unused_weights(family: Family) -> list[str]:
    """Return patterns for the names of weights that never get a gradient, in each transformer."""
    if family.name not in FAMILIES:
        return []
    transformers = transformers_of(family.transformer)
    last = len(family.blocks()) // len(transformers) - 1
    return [
        f"{f'{expert}.' if expert else ''}{pattern.format(last=last)}"
        for expert in transformers
        for pattern in FAMILIES[family.name].unused_weights
    ]


def key_tables() -> dict[str, KeyTable]:
    """Return, by family, the tables that translate other tools' module names to diffusers'."""
    modules = (import_module(info.module) for info in FAMILIES.values() if info.has_key_table)
    tables: list[KeyTable] = [module.KEY_TABLE for module in modules]
    return {table.family: table for table in tables}


# Sampling


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to generate one sample for each prompt.

    Sample i starts from the noise of `seed + i`, so it does not depend on the other prompts.
    """

    texts: Sequence[Mapping[str, Tensor]]
    """The encoded prompts, from `Family.encode_text`."""
    empty_text: Mapping[str, Tensor]
    """The encoded empty caption, or a negative prompt, for classifier-free guidance."""
    shape: tuple[int, ...]
    """Width and height, then frames for a video; channels and samples for audio."""
    seed: int
    steps: int
    """Steps of the sampler."""
    guidance: float
    """Scale of classifier-free guidance. 1 turns it off."""
    images: Sequence[Sequence[Tensor]] = ()
    """First frame, or images to edit of the size `Family.control_size`, for each prompt: CHW in
    [-1, 1]. Empty for families that generate from text alone."""
    empty_texts: Sequence[Mapping[str, Tensor]] = ()
    """The empty caption, or negative prompt, encoded with the images of each prompt, for families
    that encode text with images."""
    has_negative: bool = False
    """True if `empty_text` is that of a negative prompt. Some families replace an empty caption."""
    tiled: bool = False
    """True to decode in tiles, which saves memory, if the family supports it."""


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """One image (CHW) or clip (CFHW) in [-1, 1], or audio (CN), on the CPU."""

    kind: MediaKind
    data: Tensor
    rate: float = 0.0
    """Frames or audio samples per second. 0 for an image."""


# Experts

Expert = Literal["high", "low"]
EXPERTS: tuple[Expert, Expert] = ("high", "low")


class Experts(nn.Module):
    """The high-noise and the low-noise transformer (experts) of one model, as one module.

    Parameter names start with `high.` or `low.`; optimizer groups, checkpoints and files tell the
    two apart by that. `train/experts.py` decides which one a sigma belongs to.
    """

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.high = high
        self.low = low

    def forward(self, *args: Any, expert: Expert, **kwargs: Any) -> Any:
        """Run the high-noise or the low-noise transformer, as `expert` says.

        Callers use this method so that wrappers such as DDP see every call.
        """
        return (self.high if expert == "high" else self.low)(*args, **kwargs)


def bind_expert(transformer: Forward, expert: Expert | None) -> Forward:
    """Return a callable that runs the `high` or `low` noise transformer of an `Experts` module.

    If `expert` is None, the model has one transformer, which is returned itself.
    """
    return transformer if expert is None else partial(transformer, expert=expert)


def transformers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's transformers: keys "high" and "low" (noise), or "" for a single one."""
    return {"high": model.high, "low": model.low} if isinstance(model, Experts) else {"": model}


# Shapes for the planner


@dataclass(frozen=True, slots=True)
class SampleShape:
    """The size of one training sample in pixels. An image is a video of one frame."""

    width: int
    height: int
    frames: int = 1
    controls: int = 0
    """Number of control images that the sample comes with, such as the one to edit."""


@dataclass(frozen=True, slots=True)
class EncodedShape:
    """The shapes of the latents and of the text embedding of one sample."""

    latent_shape: tuple[int, ...]
    text_shape: tuple[int, int]
    """Number of tokens of the longest caption, with padding, and width of a token's embedding."""
    control_shape: tuple[int, ...] = ()
    """Number of control images, then the shape of the latents of each; empty without any."""


@dataclass(frozen=True)
class PlannerShapes:
    """The facts about a family's transformer that do not depend on its weights.

    The memory planner builds the transformer from them without weights, and traces it to predict
    memory and time; `DiffusersFamily` calls the loaded one with them. The module of a family
    subclasses this class and assigns one instance to `PLANNER_SHAPES`. In the methods, `config` is
    the transformer's full diffusers configuration.
    """

    class_name: str
    """Name of the transformer's class in diffusers."""
    published_config: Config
    """Settings in which the family's default model differs from its diffusers class."""
    published_name: str
    """Name of the family's default model, for the report of `gracetune plan`."""
    blocks: tuple[str, ...]
    """Names of the transformer's attributes that hold its repeated blocks, in forward order."""
    targets: tuple[str, ...]
    """Name endings of the modules that an adapter is placed on by default."""
    probe_config: Config
    """Configuration changes for a transformer of a dozen very narrow blocks.

    The planner times kernel launches on it. With fewer blocks, all of their Python objects would
    fit into the CPU's caches, and launches would look faster than in a real model.
    """
    nests_arguments: bool = False
    """True if the transformer takes lists or dictionaries of tensors. The planner then traces it
    from the tensors that `arguments` puts into them."""
    component: str = "transformer"
    """Name of the transformer in the pipeline, and of its folder: `unet` for a U-Net."""
    other_published: Mapping[str, Config] = field(default_factory=dict)
    """The family's other models on the hub: the name -> the settings in which the transformer
    differs from `published_config`. Every model of the registry but the default has an entry."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the weights, unless `model.dtype` is float32."""
    input_layer: str = ""
    """Name of the layer that reads the latents. Its weights have the dtype of the inputs."""
    fp32_layers: tuple[str, ...] = ()
    """Names of layers, without the path, whose weights stay in fp32, as diffusers loads them."""
    supported_models: str = ""
    """Names of the models that the family trains, for error messages."""
    unsupported_inputs: Mapping[str, str] = field(default_factory=dict)
    """Inputs that the family does not pass to a transformer: the setting of its configuration that
    makes it take the input -> what the input is."""
    unsupported_weights: tuple[str, ...] = ()
    """Parts of weight names, in files of the original release, that mark an unsupported model."""

    def check_config(self, config: Config, model: str) -> None:
        """Raise if a transformer takes an input that the family does not pass to it.

        Such a transformer would run without it, and give wrong results. `model` starts the error.
        """
        for setting, what in self.unsupported_inputs.items():
            if config.get(setting):
                raise ModelError(
                    f"{model} takes {what} ({setting}: {config[setting]}), which is not supported. "
                    f"{self.supported_models}. Name another model.path."
                )

    def foreign_weights(self, config: Config) -> tuple[str, ...]:  # noqa: ARG002
        """Return parts of weight names that mark a file of another model than this config's."""
        return self.unsupported_weights

    def find_blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """Return the repeated blocks of a transformer in forward order."""
        return [b for name in self.blocks for b in transformer.get_submodule(name).children()]

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of the latents and the text embedding of a training sample."""
        raise NotImplementedError

    def arguments(
        self,
        config: Config,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """Return the arguments of the transformer's forward pass, the noisy latents first.

        `conditions` are those of `Family.predict`. Floating-point arguments have this dtype, except
        those for which the diffusers pipeline uses fp32.
        """
        raise NotImplementedError

    def prediction(self, output: Any, noisy: Tensor) -> Tensor:  # noqa: ARG002
        """Return the model's prediction, shaped like `noisy`, from the transformer's output."""
        prediction: Tensor = output
        return prediction

    def conditions(
        self,
        config: Config,  # noqa: ARG002
        encoded: EncodedShape,
        batch_size: int,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Return uninitialised conditions of a batch, without padding, for `arguments`."""
        tokens = {"tokens": torch.empty(batch_size, *encoded.text_shape, dtype=dtype)}
        if not encoded.control_shape:
            return tokens
        references = torch.empty(batch_size, *encoded.control_shape, dtype=dtype)
        return {**tokens, "references": references}

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised tensors for `call`: the forward pass's, by argument name.

        If arguments are nested, they are those of which `arguments` makes them.
        """
        noisy = torch.empty(batch_size, *encoded.latent_shape, dtype=dtype)
        sigmas = torch.empty(batch_size)
        conditions = self.conditions(config, encoded, batch_size, dtype)
        if self.nests_arguments:
            return {"noisy": noisy, "sigmas": sigmas, **conditions}
        arguments = self.arguments(config, noisy, sigmas, conditions, dtype)
        return {k: tensor for k, tensor in arguments.items() if isinstance(tensor, torch.Tensor)}

    def extra_arguments(self, encoded: EncodedShape, batch_size: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the arguments of the forward pass that are not tensors."""
        return {}

    def call(
        self, transformer: Forward, encoded: EncodedShape, inputs: Mapping[str, Tensor]
    ) -> Any:
        """Run the transformer with tensors from `inputs`, and return its output."""
        if self.nests_arguments:
            noisy = inputs["noisy"]
            arguments = self.arguments({}, noisy, inputs["sigmas"], inputs, noisy.dtype)
            return self.prediction(transformer(**arguments, return_dict=False)[0], noisy)
        batch_size = len(next(iter(inputs.values())))
        extra = self.extra_arguments(encoded, batch_size)
        return transformer(**inputs, **extra, return_dict=False)[0]


def planner_shapes(family: str) -> PlannerShapes:
    """Return the facts from which the memory planner builds a family's transformer.

    The family must be one of `PLANNABLE`.
    """
    shapes: PlannerShapes = import_module(FAMILIES[family].module).PLANNER_SHAPES
    return shapes


PLANNABLE = tuple(sorted(name for name, info in FAMILIES.items() if info.has_planner_shapes))
"""Names of the families for which the memory planner can plan a run without loading the model."""

PROBE_ATTENTION = {"num_attention_heads": 2, "attention_head_dim": 16}
PROBE_JOINT_ATTENTION = {
    **PROBE_ATTENTION,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
"""Settings of a transformer with very narrow blocks, on which the planner times kernel launches.
Several families share them."""
