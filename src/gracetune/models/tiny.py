"""The model family `tiny`: a diffusion transformer small enough to train on one CPU core.

The transformer is diffusers' SD3 class with four narrow layers. Its "VAE" folds 4x4 pixels into
channels without loss; its text encoder gives every word a fixed random vector. Nothing is
downloaded: weights come from a seed, or from a folder that an earlier run exported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from blake3 import blake3
from diffusers import SD3Transformer2DModel
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from gracetune.errors import ModelError
from gracetune.models.family import EncodedShape, GeneratedSample, PlannerShapes
from gracetune.models.key_tables import JOINT_ATTENTION_LINEARS
from gracetune.models.pipeline_folder import weights_hasher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import (
        AudioFormat,
        Config,
        Forward,
        MediaKind,
        PredictionType,
        SampleRequest,
        SampleShape,
    )

    Predict = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
    Text = Mapping[str, Tensor]


CELL = 4
"""Pixels along each edge of a latent cell."""
TEXT_WIDTH = 64
TOKEN_MULTIPLE = 16
"""Captions are padded to a multiple of this number of words."""
POSITION_WEIGHT = 0.3
"""Factor by which a position's vector is multiplied before it is added to a word's vector."""
MAX_CELLS = 16
CONFIG = {
    "sample_size": MAX_CELLS,
    "patch_size": 1,
    "in_channels": 3 * CELL * CELL,
    "out_channels": 3 * CELL * CELL,
    "num_layers": 4,
    "attention_head_dim": 24,
    "num_attention_heads": 4,
    "joint_attention_dim": TEXT_WIDTH,
    "caption_projection_dim": 96,
    "pooled_projection_dim": TEXT_WIDTH,
    "pos_embed_max_size": MAX_CELLS,
}


def load(section: ModelSection) -> Tiny:
    """Load a model from the folder `model.path`, or initialise one with `model.init_seed`."""
    if section.path is not None:
        return Tiny(_read(Path(section.path)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(section.init_seed)
        return Tiny(SD3Transformer2DModel(**CONFIG))


def _read(folder: Path) -> nn.Module:
    weights = folder / "transformer"
    if not (weights / "config.json").is_file():
        found = (
            "is not a model of this family: it holds no transformer/config.json"
            if folder.exists()
            else "does not exist"
        )
        raise ModelError(
            f"model.family is 'tiny', but model.path is {str(folder)!r}, which {found}. Remove "
            "model.path (--set model.path=null) to start from new weights, or name the `model` "
            "folder that full fine-tuning of tiny has written."
        )
    try:
        cls = json.loads((weights / "config.json").read_text()).get("_class_name")
        if cls != SD3Transformer2DModel.__name__:
            raise ModelError(
                f"model.path is {str(folder)!r}, which holds a {cls}, but tiny reads a "
                f"{SD3Transformer2DModel.__name__}. Name a folder that full fine-tuning of tiny "
                "has written, or set model.family to the family of this model."
            )
        model: nn.Module = SD3Transformer2DModel.from_pretrained(
            weights, local_files_only=True, low_cpu_mem_usage=False
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"model.path {str(folder)!r} cannot be read: {error}") from error
    return model


@dataclass(frozen=True)
class Tiny:
    """A loaded model of the family `tiny`, for demos and tests. `Family` documents the members."""

    transformer: nn.Module
    name: str = "tiny"
    boundary: None = None
    kinds: tuple[MediaKind, ...] = ("image",)
    audio: AudioFormat | None = None
    starts_from: Literal["text", "image"] = "text"
    uses_negative_prompt: bool = True
    takes_control: bool = False
    max_controls: int = 0
    pixel_step: int = CELL
    max_edge: int = CELL * MAX_CELLS
    prediction: PredictionType = "flow"
    noise_schedule: None = None
    adapter_targets: tuple[str, ...] = (
        *JOINT_ATTENTION_LINEARS,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
        "context_embedder",
    )
    _words: dict[str, Tensor] = field(default_factory=dict)

    def identity(self) -> dict[str, str]:
        """Return strings for cache keys, made of the constants that the encoders depend on."""
        return {
            "latents": f"tiny-unshuffle-{CELL}",
            "text": f"tiny-words-{TEXT_WIDTH}-{POSITION_WEIGHT}",
        }

    def weights_hasher(self) -> Callable[[], str]:
        """Return a function that hashes the transformer's present weights."""
        return weights_hasher(self.transformer)

    def blocks(self) -> Sequence[nn.Module]:
        """Return the transformer's blocks in forward order."""
        return list(self.transformer.get_submodule("transformer_blocks").children())

    def enable_gradient_checkpointing(self) -> None:
        """Turn on diffusers' gradient checkpointing."""
        assert isinstance(self.transformer, SD3Transformer2DModel)
        self.transformer.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> None:
        """Do nothing: the encoders have no weights."""

    def release_text_encoder(self) -> None:
        """Do nothing: the text encoder has no weights."""

    def text_encoder_nbytes(self) -> int:
        """Return 0: the text encoder has no weights."""
        return 0

    def restore_text_encoder(self, device: torch.device) -> None:
        """Do nothing: the text encoder has no weights."""

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the sample's size; this family takes no control images."""
        return width, height

    def set_tiling(self, enabled: bool) -> bool:  # noqa: ARG002
        """Return False: this family has no tiled encoding and needs none."""
        return False

    def encode(self, media: Tensor) -> Tensor:
        """Encode images without a VAE: fold each cell of 4x4 pixels into channels."""
        return functional.pixel_unshuffle(media, CELL)

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the encoded images unchanged, and an empty dict: there are no image conditions."""
        return encoded, {}

    def decode(self, latents_BCHW: Tensor) -> Tensor:  # noqa: N803
        """Turn latents back into pixels: the inverse of `encode`."""
        return functional.pixel_shuffle(latents_BCHW, CELL)

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of an image's latents: channels, rows and columns."""
        width, height = shape
        return (3 * CELL * CELL, height // CELL, width // CELL)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of latent cells: each is one token."""
        _, height, width = latent_shape
        return height * width

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:  # noqa: ARG002
        """Return an empty list: captions may have any length."""
        return []

    def encode_text(
        self,
        captions: Sequence[str],
        images: Sequence[Sequence[Tensor]] = (),  # noqa: ARG002
    ) -> list[dict[str, Tensor]]:
        """Encode each word of a caption (`tokens`) as the sum of a word and a position vector."""
        return [{"tokens": self._tokens(caption.lower().split())} for caption in captions]

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions, padded with zeros; `pooled` is the scaled sum of a caption's words."""
        longest = max(len(text["tokens"]) for text in texts)
        length = max(1, -(-longest // TOKEN_MULTIPLE)) * TOKEN_MULTIPLE
        tokens = torch.stack(
            [functional.pad(t["tokens"], (0, 0, 0, length - len(t["tokens"]))) for t in texts]
        )
        return {"tokens": tokens, "pooled": tokens.sum(1) / TOKEN_MULTIPLE}

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the predicted velocity. SD3 expects timesteps from 0 to 1000."""
        velocity: Tensor = transformer(
            noisy,
            encoder_hidden_states=conditions["tokens"],
            pooled_projections=conditions["pooled"],
            timestep=sigmas * 1000,
            return_dict=False,
        )[0]
        return velocity

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Generate all images in one batch with Euler's method."""
        device = next(self.transformer.parameters()).device
        shape, count = self.latent_shape(*request.shape), len(request.texts)
        noise = [
            torch.randn(shape, generator=torch.Generator().manual_seed(request.seed + number))
            for number in range(count)
        ]
        both = self.stack_text([*request.texts, *[request.empty_text] * count])
        text, empty = (
            {key: t[part].to(device) for key, t in both.items()}
            for part in (slice(None, count), slice(count, None))
        )
        latents = euler(
            lambda x, s, text: self.predict(self.transformer, x, s, text).float(),
            torch.stack(noise).to(device),
            text,
            empty,
            steps=request.steps,
            guidance=request.guidance,
        )
        return [GeneratedSample("image", image.cpu()) for image in self.decode(latents)]

    def export(self, folder: Path) -> None:
        """Write the transformer as diffusers saves it."""
        assert isinstance(self.transformer, SD3Transformer2DModel)
        self.transformer.save_pretrained(folder / "transformer")

    def _tokens(self, words: Sequence[str]) -> Tensor:
        if not words:
            return torch.zeros(0, TEXT_WIDTH)
        positions = [self._vector(f"<place {i}>") for i in range(len(words))]
        vectors = [self._vector(word) for word in words]
        return torch.stack(vectors) + POSITION_WEIGHT * torch.stack(positions)

    def _vector(self, word: str) -> Tensor:
        if word not in self._words:
            seed = int.from_bytes(blake3(word.encode()).digest(length=7), "big")
            generator = torch.Generator().manual_seed(seed)
            self._words[word] = torch.randn(TEXT_WIDTH, generator=generator)
        return self._words[word]


def euler(
    predict: Predict, noise: Tensor, text: Text, empty: Text, *, steps: int, guidance: float
) -> Tensor:
    """Generate latents from noise with Euler's method and classifier-free guidance.

    Solves dx/ds = v from sigma s = 1 to 0, with v = v_empty + guidance * (v_text - v_empty).
    """
    x = noise
    guided = guidance != 1.0
    both = {key: torch.cat([text[key], empty[key]]) for key in text} if guided else text
    sigmas = torch.linspace(1.0, 0.0, steps + 1).tolist()
    for s, s_next in pairwise(sigmas):
        x_in = torch.cat([x, x]) if guided else x
        v = predict(x_in, torch.full((len(x_in),), s, device=x.device), both)
        if guided:
            v_text, v_empty = v.chunk(2)
            v = v_empty + guidance * (v_text - v_empty)
        x = x + (s_next - s) * v
    return x


class TinyShapes(PlannerShapes):
    """Describes the transformer of `tiny` to the memory planner."""

    def encoded_shape(self, config: Config, sample: SampleShape) -> EncodedShape:
        """Return the shapes of a sample's latents and of a caption of `TOKEN_MULTIPLE` words."""
        latents = (config["in_channels"], sample.height // CELL, sample.width // CELL)
        return EncodedShape(latents, (TOKEN_MULTIPLE, config["joint_attention_dim"]))

    def inputs(
        self, config: Config, encoded: EncodedShape, batch_size: int, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return uninitialised tensors like those that `predict` passes to the transformer."""
        pooled_width = config["pooled_projection_dim"]
        return {
            "hidden_states": torch.empty(batch_size, *encoded.latent_shape, dtype=dtype),
            "encoder_hidden_states": torch.empty(batch_size, *encoded.text_shape, dtype=dtype),
            "pooled_projections": torch.empty(batch_size, pooled_width, dtype=dtype),
            "timestep": torch.empty(batch_size, dtype=dtype),
        }


PLANNER_SHAPES = TinyShapes(
    class_name="SD3Transformer2DModel",
    published_config=CONFIG,
    published_name="the family's own model",
    blocks=("transformer_blocks",),
    targets=Tiny.adapter_targets,
    probe_config={},  # it is narrow enough as it is
    dtype=torch.float32,
)
