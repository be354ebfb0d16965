"""Common code of the families that are loaded from the folder of a diffusers pipeline.

`DiffusersFamily` is a family that lacks only what is special in a model. The functions below it are
for captions and latents.
"""

from __future__ import annotations

import copy
import html
import math
import re
from typing import TYPE_CHECKING, Any, Literal

import ftfy
import torch
from PIL import Image
from torch import nn

from gracetune.models.family import EncodedShape, GeneratedSample, transformers_of
from gracetune.models.pipeline_folder import (
    TRANSFORMER_FOLDERS,
    PipelineParts,
    check_channels,
    copy_other_components,
    digest_of_folder,
    load_text_encoder,
    read_scheduler,
    weights_hasher,
    without_progress_bars,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.models.family import (
        AudioFormat,
        Config,
        Forward,
        MediaKind,
        PlannerShapes,
        PredictionType,
        SampleRequest,
        SampleShape,
    )

PATCH_SIZE = 2
"""Latent cells along the edge of a patch in most models. One patch is one token."""


class DiffusersFamily:
    """A model family that is loaded from the folder of a diffusers pipeline.

    It has what image models share. A family's class overrides what is special in its model; no
    family inherits from another. Most need `encode_caption`, `text_arguments` and the method
    `arguments` of their `PlannerShapes`. The pipeline's own code encodes captions and generates
    samples.
    """

    name: str
    shapes: PlannerShapes
    boundary: float | None = None
    kinds: tuple[MediaKind, ...] = ("image",)
    audio: AudioFormat | None = None
    starts_from: Literal["text", "image"] = "text"
    max_controls: int = 0
    max_edge: int = 4096
    prediction: PredictionType = "flow"
    noise_schedule: Tensor | None = None
    patch_size: int = PATCH_SIZE
    """Latent cells along the edge of a patch, which is one token."""
    video_vae: bool = False
    """True if the VAE is that of Qwen-Image, which encodes an image as a video of one frame."""
    channels_per_patch: bool = False
    """True if the transformer reads packed latents: the cells of a patch are its channels."""
    text_length: int = 512
    """Number of tokens to which captions are cut."""
    has_fixed_text_length: bool = False
    """True if all embeddings have the same number of tokens, because padding is embedded too."""
    min_text_tokens: int = 1
    """Number of tokens to which shorter captions are padded. Compiled blocks of a model that
    computes text on its own need 16: fewer tokens are not dynamic (offload/checkpointing.py)."""
    text_arguments: Sequence[tuple[str, str]] = (("tokens", "prompt_embeds"),)
    """Names of an encoded caption's tensors and of the pipeline's arguments for them. The names for
    a negative prompt start with `negative_`."""
    cache_name: str
    """Start of the strings that identify the encoders in cache keys. Never change it."""

    def __init__(self, parts: PipelineParts) -> None:
        self.parts = parts
        self.folder = parts.folder
        self._device = torch.device("cpu")
        self.vae = parts.components["vae"]
        self.transformer = parts.components[self.shapes.component]
        check_channels(
            parts.folder,
            self.transformer,
            self.input_channels,
            self.name,
            self.shapes.supported_models,
        )

    # Facts

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Name endings of the modules that an adapter is placed on by default."""
        return self.shapes.targets

    @property
    def text_encoders(self) -> list[nn.Module]:
        """The text encoders that are loaded; `encode_text` loads all."""
        return list(self.parts.encoders.values())

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the text encoder that limits the length of a caption."""
        return self.parts.components["tokenizer"]

    @property
    def uses_negative_prompt(self) -> bool:
        """True if the pipeline has classifier-free guidance, which takes a negative prompt."""
        return True

    @property
    def takes_control(self) -> bool:
        """True if every training image comes with control images, such as the one to edit."""
        return self.max_controls > 0

    @property
    def vae_scale(self) -> int:
        """Pixels along each edge of a latent cell."""
        if self.video_vae:
            return int(2 ** len(self.vae.temperal_downsample))
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def latent_channels(self) -> int:
        """Channels of the VAE's latents."""
        return int(self.vae.config["z_dim" if self.video_vae else "latent_channels"])

    @property
    def input_channels(self) -> tuple[int, ...]:
        """Numbers of channels that the transformer may take."""
        cells = self.patch_size**2 if self.channels_per_patch else 1
        return (self.latent_channels * cells,)

    @property
    def pixel_step(self) -> int:
        """Pixels along each edge of a patch: width and height must be multiples of it."""
        return self.vae_scale * self.patch_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the transformer's inputs."""
        layer: Any = next(iter(self._transformers.values())).get_submodule(self.shapes.input_layer)
        dtype: torch.dtype = layer.weight.dtype
        return dtype

    @property
    def _transformers(self) -> dict[str, Any]:
        return transformers_of(self.transformer)

    def identity(self) -> dict[str, str]:
        """Return strings for cache keys: hashes of the encoders' files, and sizes of the inputs."""
        return {
            "latents": f"{self.cache_name}-mode-{digest_of_folder(self.folder / 'vae')}",
            "text": f"{self.cache_name}-{self.text_length}-{self.text_digest()}",
        }

    def text_digest(self, *others: str) -> str:
        """Hash the files of all tokenizers and text encoders, and of other components."""
        numbers = ("", *(f"_{number}" for number in range(2, 5)))
        names = [f"{kind}{n}" for n in numbers for kind in ("tokenizer", "text_encoder")]
        folders = (self.folder / name for name in (*names, *others))
        return "-".join(digest_of_folder(folder) for folder in folders if folder.is_dir())

    def weights_hasher(self) -> Callable[[], str]:
        """Return a function that hashes the present weights of all transformers."""
        return weights_hasher(self.transformer)

    def blocks(self) -> list[nn.Module]:
        """Return the blocks in forward order, those of a high-noise transformer first."""
        return [
            block
            for transformer in self._transformers.values()
            for block in self.shapes.find_blocks(transformer)
        ]

    def enable_gradient_checkpointing(self) -> None:
        """Turn on diffusers' gradient checkpointing, which recomputes block by block."""
        for transformer in self._transformers.values():
            transformer.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> None:
        """Move all models but the transformers to a device, also those that are loaded later."""
        self._device = device
        for name, component in self.parts.components.items():
            if isinstance(component, nn.Module) and not name.startswith(self.shapes.component):
                component.to(device)

    def release_text_encoder(self) -> None:
        """Free the text encoders: they take gigabytes, and training does not need them."""
        encoders = list(self.parts.encoders)
        self.parts.unloaded.extend(encoders)
        self.parts.components.update(dict.fromkeys(encoders))

    def text_encoder_nbytes(self) -> int:
        """Return the size in bytes of the files of all text encoders that are not loaded."""
        return sum(
            file.stat().st_size
            for name in self.parts.unloaded
            for file in (self.folder / name).glob("*.safetensors")
        )

    def restore_text_encoder(self, device: torch.device) -> None:
        """Load the text encoders that are not loaded, to a device."""
        # Weights that a file lacks are random. A run's own numbers must not depend on the cache.
        with torch.random.fork_rng(devices=[]):
            while self.parts.unloaded:
                name = self.parts.unloaded[-1]
                self.parts.components[name] = load_text_encoder(self.parts, name).to(device)
                self.parts.unloaded.pop()

    def export(self, folder: Path) -> None:
        """Write a whole pipeline folder. Components that were not trained are linked or copied."""
        folders = TRANSFORMER_FOLDERS | {"": self.shapes.component}
        for expert, transformer in self._transformers.items():
            transformer.save_pretrained(folder / folders[expert])
        copy_other_components(self.folder, folder, exclude=folders.values())

    # Images

    def set_tiling(self, enabled: bool) -> bool:
        """Turn the VAE's own tiling, which saves memory, on or off. Return True: it has tiling."""
        _set_vae_tiling(self.vae, enabled)
        return True

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the sample's size: a control image has the same size, unless a family differs."""
        return width, height

    def text_control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that the VAE encodes: the text encoder's is equal, unless it differs."""
        return self.control_size(width, height)

    def encode_image(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode images to latents: the mode of the VAE's distribution, shifted and scaled."""
        if self.video_vae:
            return standardize_latents(vae, pixels.unsqueeze(2))[:, :, 0]
        with torch.no_grad():
            raw: Tensor = vae.encode(pixels.to(next(vae.parameters()))).latent_dist.mode()
        return (raw - float(vae.config.shift_factor or 0)) * float(vae.config.scaling_factor)

    def encode(self, media: Tensor) -> Tensor:
        """Encode images to normalised latents; those of control images follow as channels."""
        latents = self.encode_image(self.vae, media[:, :3])
        if not self.takes_control:
            return latents
        width, height = self.control_size(media.shape[-1], media.shape[-2])
        # One at a time and not in tiles: the caller decides both for the size to generate.
        vae = copy.copy(self.vae)
        vae.disable_tiling()
        for references in restore_all_appended(media[:, 3:], (3, height, width)):
            encoded = [self.encode_image(vae, reference[None]) for reference in references]
            latents = append_channels(latents, torch.cat(encoded))
        return latents

    def split_encoded(self, encoded: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the latents to add noise to, and those of control images: `references` (BNCHW)."""
        if not self.takes_control:
            return encoded, {}
        shape = self._reference_shape(*encoded.shape[-2:])
        channels = self._plain_shape(*encoded.shape[-2:])[0]
        references = restore_all_appended(encoded[:, channels:], shape)
        return encoded[:, :channels], {"references": torch.stack(references, dim=1)}

    def latent_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of an encoded image: channels, rows, columns.

        If the model takes control images, more channels hold the latents of one. Each further one
        adds as many channels.
        """
        width, height = shape
        channels, rows, columns = self._plain_shape(
            height // self.vae_scale, width // self.vae_scale
        )
        if self.takes_control:
            channels += num_appended(self._reference_shape(rows, columns), (rows, columns))
        return (channels, rows, columns)

    def _plain_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        return (self.latent_channels, rows, columns)

    def _reference_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Return the shape of a control image's latents, by rows and columns of the image's."""
        width, height = self.control_size(columns * self.vae_scale, rows * self.vae_scale)
        return self._plain_shape(height // self.vae_scale, width // self.vae_scale)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Return the number of patches, each one token, without those of control images."""
        *_, height, width = latent_shape
        return (height // self.patch_size) * (width // self.patch_size)

    # Captions

    def truncated_captions(self, captions: Sequence[str]) -> list[str]:
        """Return the captions with more tokens than the model reads."""
        return captions_longer_than(self.tokenizer, captions, self.text_length)

    def encode_text(
        self, captions: Sequence[str], images: Sequence[Sequence[Tensor]] = ()
    ) -> list[dict[str, Tensor]]:
        """Encode each caption on its own, with its control images if the model takes any.

        The text encoders are loaded first if they are not: a run whose texts are all in the cache
        never needs them.
        """
        self.restore_text_encoder(self._device)
        with torch.no_grad(), without_progress_bars():
            if not images:
                return [self.encode_caption(caption) for caption in captions]
            pairs = zip(captions, images, strict=True)
            return [self.encode_caption(caption, controls) for caption, controls in pairs]

    def encode_caption(self, caption: str, images: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """Return the embeddings of one caption, without padding; `tokens` has one per token."""
        raise NotImplementedError

    def encoder_device(self) -> torch.device:
        """Return the device of the text encoders."""
        return next(self.text_encoders[0].parameters()).device

    def stack_text(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Stack captions. If their tokens can differ in number, pad them and add a `mask`.

        The tokens are padded with zeros to the longest caption; `mask` is True for real tokens.
        """
        if self.has_fixed_text_length:
            return {key: torch.stack([text[key] for text in texts]) for key in texts[0]}
        stacked = {k: torch.stack([text[k] for text in texts]) for k in texts[0] if k != "tokens"}
        tokens = [text["tokens"] for text in texts]
        length = max(self.min_text_tokens, *map(len, tokens))
        return {
            "tokens": pad_embeddings(tokens, length),
            "mask": padding_mask(tokens, length),
            **stacked,
        }

    # Prediction and sampling

    def predict(
        self,
        transformer: Forward,
        noisy: Tensor,
        sigmas: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Run the transformer once and return its prediction, shaped like `noisy`."""
        config = next(iter(self._transformers.values())).config
        arguments = self.shapes.arguments(config, noisy, sigmas, conditions, self.dtype)
        return self.shapes.prediction(transformer(**arguments, return_dict=False)[0], noisy)

    def prompt_arguments(
        self, text: Mapping[str, Tensor], empty: Mapping[str, Tensor], guidance: float
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for a prompt; `empty` is for classifier-free guidance.

        Both are batches of one from `stack_text`, on the device and in the dtype of the
        transformer. `guidance` 1 turns guidance off.
        """
        arguments: dict[str, Any] = {name: text[key] for key, name in self.text_arguments}
        if self.uses_negative_prompt:
            arguments |= {f"negative_{name}": empty[key] for key, name in self.text_arguments}
        return {**arguments, "guidance_scale": guidance}

    def unconditional(self, empty: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the embeddings for guidance without a negative prompt, from an empty caption."""
        return empty

    def image_arguments(
        self, pipeline: Any, images: Sequence[Tensor], width: int, height: int
    ) -> dict[str, Any]:
        """Return the pipeline's arguments for control images or a first frame."""
        raise NotImplementedError

    def sampling_pipeline(self, request: SampleRequest) -> Any:
        """Return the pipeline with the current transformers, without text encoders."""
        return self.parts.pipeline(
            **dict.fromkeys(self.parts.encoders),
            vae=self.sampling_vae(request),
            scheduler=read_scheduler(self.folder),
        )

    def sampling_vae(self, request: SampleRequest) -> Any:
        """Return a copy of the VAE for sampling, with the same weights but its own state.

        Another thread may encode at the same time. A video VAE stores frames between its calls, so
        with a shared object each thread would use the other's frames.
        """
        vae = copy.copy(self.vae)
        _set_vae_tiling(vae, request.tiled)
        return vae

    def sample(self, request: SampleRequest) -> list[GeneratedSample]:
        """Generate one sample per prompt with the pipeline's own sampler."""
        pipeline = self.sampling_pipeline(request)
        device, dtype = next(self.transformer.parameters()).device, self.dtype
        width, height = request.shape
        empty_texts = request.empty_texts or [request.empty_text] * len(request.texts)
        samples = []
        for number, pair in enumerate(zip(request.texts, empty_texts, strict=True)):
            text, empty = (
                {
                    name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
                    for name, tensor in self.stack_text([one]).items()
                }
                for one in pair
            )
            if not request.has_negative:
                empty = self.unconditional(empty)
            start: dict[str, Any] = {}
            if request.images:
                start = self.image_arguments(pipeline, request.images[number], width, height)
            image = pipeline(
                **self.prompt_arguments(text, empty, request.guidance),
                **start,
                width=width,
                height=height,
                num_inference_steps=request.steps,
                generator=torch.Generator().manual_seed(request.seed + number),
                output_type="pt",
            ).images[0]
            samples.append(GeneratedSample("image", image.float().cpu() * 2 - 1))
        return samples


def _set_vae_tiling(vae: Any, enabled: bool) -> None:
    (vae.enable_tiling if enabled else vae.disable_tiling)()


# Captions. Each is encoded alone and without padding: its embedding then does not depend on the
# other captions of a batch, and a short one costs less than a long one.


def clean_caption(caption: str) -> str:
    """Repair broken characters, resolve HTML escapes, collapse spaces, as Wan's pipeline does."""
    text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return re.sub(r"\s+", " ", text).strip()


def tokenize(tokenizer: Any, caption: str, length: int) -> Mapping[str, Tensor]:
    """Return token ids and attention mask of one caption, cut to `length` and not padded."""
    tokens: Mapping[str, Tensor] = tokenizer(
        [caption],
        max_length=length,
        padding=False,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return tokens


def captions_longer_than(tokenizer: Any, captions: Sequence[str], length: int) -> list[str]:
    """Return the captions with more than `length` tokens."""
    if not captions:
        return []
    ids = tokenizer(list(captions), add_special_tokens=True, verbose=False)["input_ids"]
    return [caption for caption, tokens in zip(captions, ids, strict=True) if len(tokens) > length]


def pad_embeddings(texts: Sequence[Tensor], length: int) -> Tensor:
    """Stack embeddings into a batch, each padded with zeros to `length` tokens."""
    out = texts[0].new_zeros((len(texts), length, *texts[0].shape[1:]))
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = text
    return out


def padding_mask(texts: Sequence[Tensor], length: int) -> Tensor:
    """Return a mask (batch, length) that is True for tokens and False for padding."""
    counts = torch.tensor([len(text) for text in texts], device=texts[0].device)
    return torch.arange(length, device=texts[0].device) < counts[:, None]


# Images and latents


def to_pil(pixels_CHW: Tensor) -> Image.Image:  # noqa: N803
    """Convert pixels in [-1, 1] to an 8-bit PIL image."""
    scaled = pixels_CHW.clamp(-1, 1).add(1).mul(127.5).round().byte()
    return Image.fromarray(scaled.permute(1, 2, 0).cpu().numpy())


def standardize_latents(vae: Any, clip_BCFHW: Tensor) -> Tensor:  # noqa: N803
    """Encode a clip, and subtract the mean and divide by the deviation in the VAE's config."""
    with torch.no_grad():
        raw: Tensor = vae.encode(clip_BCFHW.to(next(vae.parameters()))).latent_dist.mode()
    mean, std = (
        torch.tensor(values, device=raw.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (raw - mean) / std


# Tensors of another size, such as the latents of an image to edit, in channels of cached latents


def append_channels(grid: Tensor, values: Tensor) -> Tensor:
    """Append the values of each sample as more channels of a grid (BCHW or BCFHW).

    They are padded with zeros.
    """
    count, _, *cells = grid.shape
    flat = values.flatten(1)
    padded = nn.functional.pad(flat, (0, -flat.shape[1] % math.prod(cells)))
    return torch.cat([grid, padded.view(count, -1, *cells)], dim=1)


def num_appended(shape: Sequence[int], cells: Sequence[int]) -> int:
    """Return the number of channels of this many cells that hold values of a shape."""
    return -(-math.prod(shape) // math.prod(cells))


def restore_all_appended(channels: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """Return what `append_channels` appended in several calls, each with values of this shape."""
    parts = torch.split(channels, num_appended(shape, channels.shape[2:]), dim=1)
    return [restore_appended(part, shape) for part in parts]


def references_of(conditions: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the latents of each control image (BCHW), from the conditions of a prediction."""
    return list(conditions["references"].unbind(1)) if "references" in conditions else []


def restore_appended(channels: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the values in channels from `append_channels`, with their shape without the batch."""
    values = channels.flatten(1)[:, : math.prod(shape)]
    return values.reshape(-1, *shape)


# Packed latents, one row for each patch of 2x2 cells: the input of Flux and Qwen-Image


def pack_latents(latents_BCHW: Tensor) -> Tensor:  # noqa: N803
    """Turn each patch of 2x2 latent cells into one row of values, in reading order."""
    count, channels, height, width = latents_BCHW.shape
    rows, columns = height // PATCH_SIZE, width // PATCH_SIZE
    cells = latents_BCHW.view(count, channels, rows, PATCH_SIZE, columns, PATCH_SIZE)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * PATCH_SIZE**2)


def unpack_latents(rows_BLC: Tensor, height: int, width: int) -> Tensor:  # noqa: N803
    """Undo `pack_latents` for latents of this height and width."""
    count, _, values = rows_BLC.shape
    channels = values // PATCH_SIZE**2
    rows, columns = height // PATCH_SIZE, width // PATCH_SIZE
    cells = rows_BLC.view(count, rows, columns, channels, PATCH_SIZE, PATCH_SIZE)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(count, channels, height, width)


def num_patches(latent_shape: Sequence[int]) -> int:
    """Return the number of 2x2 patches in latents of this shape (C, H, W)."""
    _, height, width = latent_shape
    return (height // PATCH_SIZE) * (width // PATCH_SIZE)


def patch_positions(rows: int, columns: int, like: Tensor, image: int = 0) -> Tensor:
    """Return the position of every patch, as (number of the image, row, column), for RoPE."""
    positions = like.new_zeros(rows, columns, 3)
    positions[..., 0] = image
    positions[..., 1] = torch.arange(rows, device=like.device)[:, None]
    positions[..., 2] = torch.arange(columns, device=like.device)[None]
    return positions.view(-1, 3)


def packed_shape(config: Config, sample: SampleShape, text_length: int) -> EncodedShape:
    """Return the shapes of a sample's latents and text embedding, for the memory planner.

    The VAE has cells of 8x8 pixels, and the transformer reads patches of 2x2 cells.
    """
    cells = (sample.height // 16) * PATCH_SIZE, (sample.width // 16) * PATCH_SIZE
    latents = (config["in_channels"] // PATCH_SIZE**2, *cells)
    return EncodedShape(latents, (text_length, config["joint_attention_dim"]))
