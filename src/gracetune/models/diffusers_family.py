"""Common code of the families that are loaded from a diffusers pipeline folder.

Such a folder has a `model_index.json` and one subfolder per component: transformer, VAE, scheduler,
text encoders and tokenizers. Every error names the run-file setting that is wrong.
"""

from __future__ import annotations

import copy
import html
import json
import math
import os
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ftfy
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from gracetune.errors import ModelError
from gracetune.models.family import EncodedShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import Config, PlannerShapes, SampleRequest, SampleShape

MODEL_INDEX = "model_index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMFYUI_PREFIX = "model.diffusion_model."
"""Prefix of every tensor name in some single-file checkpoints made for ComfyUI."""
READ_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""Errors that diffusers and transformers raise if a folder is incomplete or damaged."""

Component = TypeVar("Component")


class DiffusersFamily:
    """Base class of model families that are loaded from the folder of a diffusers pipeline."""

    folder: Path
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]

    def weights_digest(self) -> str:
        """Return a hash of the transformer's weights."""
        return digest_of_weights(self.transformer)

    def enable_gradient_checkpointing(self) -> None:
        """Turn on diffusers' gradient checkpointing, which recomputes block by block."""
        self.transformer.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> None:
        """Move the VAE and the text encoders, unless these were released, to a device."""
        for module in (self.vae, *self.text_encoders):
            module.to(device)

    def release_text_encoder(self) -> None:
        """Free the text encoders: they take gigabytes, and training does not need them."""
        self.text_encoders.clear()

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the sample's size: a control image has the same size, unless a family differs."""
        return width, height

    def set_tiling(self, enabled: bool) -> bool:
        """Turn the VAE's own tiling, which saves memory, on or off. Return True: it has tiling."""
        _set_vae_tiling(self.vae, enabled)
        return True

    def sampling_vae(self, request: SampleRequest) -> Any:
        """Return a copy of the VAE for sampling, with the same weights but its own state.

        Another thread may encode at the same time. A video VAE stores frames between its calls, so
        with a shared object each thread would use the other's frames.
        """
        vae = copy.copy(self.vae)
        _set_vae_tiling(vae, request.tiled)
        return vae

    def export(self, folder: Path) -> None:
        """Write a whole pipeline folder. Components that were not trained are linked or copied."""
        self.transformer.save_pretrained(folder / "transformer")
        copy_other_components(self.folder, folder, exclude=("transformer",))


def _set_vae_tiling(vae: Any, enabled: bool) -> None:
    (vae.enable_tiling if enabled else vae.disable_tiling)()


# Reading a pipeline folder


def find_model_folder(section: ModelSection) -> Path:
    """Return the folder that `model.path` names, downloaded from the Hugging Face hub if needed."""
    if section.path is None:
        raise ModelError(
            f"model.path is missing; {section.family} needs a folder saved by diffusers, or the "
            "name of a model on the Hugging Face hub."
        )
    folder = Path(section.path)
    if not folder.is_dir():
        folder = _download(section.path, section.revision)
    if not (folder / MODEL_INDEX).is_file():
        raise ModelError(
            f"model.path is {section.path!r}, which holds no {MODEL_INDEX}. Name the folder of a "
            "whole pipeline, with that file and the folders vae, text_encoder and transformer."
        )
    return folder


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.txt", "*/*"])
        )
    except GatedRepoError as error:
        raise ModelError(
            f"model.path is {name!r}, a gated model that you have no access to.\n"
            "  1. Accept its licence on the model's page.\n"
            "  2. Run `hf auth login`, or set HF_TOKEN.\n"
            "  Then start the same command again."
        ) from error
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.path is {name!r}, which is neither a folder here nor available from the "
            f"Hugging Face hub ({reason}). Check the name and the connection."
        ) from error


def read_model_index(folder: Path) -> dict[str, Any]:
    """Read `model_index.json`: the pipeline's class, components and settings."""
    try:
        index: dict[str, Any] = json.loads((folder / MODEL_INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder / MODEL_INDEX} cannot be read ({error}). Download the model again, or name "
            "another model.path."
        ) from error
    return index


def check_pipeline_class(
    folder: Path, index: Mapping[str, Any], known: Sequence[str], family: str
) -> None:
    """Raise if a folder holds another kind of pipeline, before gigabytes of it are read."""
    if index.get("_class_name") not in known:
        raise ModelError(
            f"model.path {str(folder)!r} holds a {index.get('_class_name')}, but {family} reads "
            f"{' or '.join(known)}. Name another folder, or set model.family to match this one."
        )


def read_component(folder: Path, name: str, read: Callable[[Path], Component]) -> Component:
    """Load one component by calling `read` with its subfolder; errors become ModelError."""
    component = folder / name
    if not component.is_dir():
        raise ModelError(
            f"model.path is {str(folder)!r}, which has no folder {name!r}. Download the model "
            "again, or name the folder of a whole pipeline."
        )
    try:
        with without_progress_bars():
            return read(component)
    except READ_ERRORS as error:
        raise ModelError(
            f"{component} cannot be read ({error}). Download the model again, or name another "
            "model.path."
        ) from error


def read_pretrained(folder: Path, name: str, cls: Any, **options: Any) -> Any:
    """Load one component with `cls.from_pretrained`, without network access."""
    return read_component(
        folder, name, lambda path: cls.from_pretrained(path, local_files_only=True, **options)
    )


def read_model_config(folder: Path, cls_name: str, model: str) -> dict[str, Any]:
    """Read the config.json of a diffusers model; raise if it is of another class.

    diffusers would load it all the same, without the weights that the class does not know.
    """
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        found = str(config["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file} is not a model configuration: {error}. Set model.path to a folder that "
            "diffusers has saved."
        ) from error
    if found != cls_name:
        raise ModelError(
            f"{folder} holds a {found}, but the {model} is a {cls_name}. Set model.family to the "
            "family of that folder, or name another folder."
        )
    return config


def read_vae(folder: Path, cls: Any) -> Any:
    """Load the VAE, frozen and in fp32: less precise latents would lose detail."""
    if (folder / "vae" / "config.json").is_file():  # else, reading it says what is missing
        read_model_config(folder / "vae", cls.__name__, "VAE of this family")
    vae = read_pretrained(folder, "vae", cls, torch_dtype=torch.float32)
    return vae.eval().requires_grad_(False)


def read_text_encoder(folder: Path, name: str, cls: Any) -> nn.Module:
    """Load a text encoder, frozen and in the dtype of its file."""
    encoder: nn.Module = read_pretrained(folder, name, cls, dtype="auto")
    return encoder.eval().requires_grad_(False)


def read_transformer(
    cls: Any,
    section: ModelSection,
    folder: Path,
    name: str,
    file: str | None,
    shapes: PlannerShapes | None = None,
) -> Any:
    """Load a transformer from its subfolder, or with the weights of a single file.

    `shapes` names the inputs that the family does not support; a transformer that takes one of them
    is an error.
    """
    if (folder / name / "config.json").is_file():  # else, reading it says what is missing
        config = read_model_config(folder / name, cls.__name__, f"transformer of {section.family}")
        if shapes is not None:
            shapes.check_config(config, f"{_describe_pipeline(folder)} whose transformer")
    if file is None:
        dtype = _weights_dtype(section, lambda: sorted((folder / name).glob("*.safetensors")))
        transformer, loaded = read_pretrained(
            folder, name, cls, torch_dtype=dtype, output_loading_info=True
        )
        if loaded["unexpected_keys"]:
            raise ModelError(
                f"{folder / name} has {len(loaded['unexpected_keys'])} weights that a "
                f"{cls.__name__} with this config.json does not have, first "
                f"{min(loaded['unexpected_keys'])}. Download it again, or name another model."
            )
        return _check_complete(transformer, folder / name)
    path = Path(file)
    if not path.is_file():
        raise ModelError(
            f"model.{name}_file is {file!r}, but there is no such file. Correct the path."
        )
    dtype = _weights_dtype(section, lambda: [path])
    try:
        weights = {k.removeprefix(COMFYUI_PREFIX): tensor for k, tensor in load_file(path).items()}
        parts = () if shapes is None else shapes.unsupported_weights
        foreign = next((key for key in weights if any(part in key for part in parts)), None)
        if shapes is not None and foreign is not None:
            raise ModelError(
                f"model.{name}_file is {file!r}, which has weights of an unsupported model: "
                f"{foreign}. {shapes.supported_models}. Name another file."
            )
        # The file has only weights; the configuration comes from the folder.
        transformer = cls.from_single_file(
            weights,
            config=str(folder),
            subfolder=name,
            torch_dtype=dtype,
            local_files_only=True,
        )
    except READ_ERRORS as error:
        raise ModelError(
            f"model.{name}_file is {file!r}, which does not fit {folder / name} ({error}). Name a "
            "file with the weights of that model."
        ) from error
    return _check_complete(transformer, path)


def check_channels(
    folder: Path, transformer: Any, passed: Sequence[int], family: str, supported: str
) -> None:
    """Raise if a transformer takes a number of channels that the family does not pass to it.

    `supported` is a sentence that names the models of the family.
    """
    found = transformer.config.in_channels
    if found not in passed:
        raise ModelError(
            f"{_describe_pipeline(folder)} whose transformer takes {found} channels, but {family} "
            f"passes {' or '.join(map(str, passed))}. {supported}. Name another model.path."
        )


def _describe_pipeline(folder: Path) -> str:
    return f"model.path {str(folder)!r} holds a {read_model_index(folder).get('_class_name')}"


def _weights_dtype(section: ModelSection, files: Callable[[], list[Path]]) -> torch.dtype:
    """Return `model.dtype`; for `auto`, bf16 if any tensor in the files is bf16, else fp32."""
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    for file in files():
        try:
            with safe_open(file, "pt") as opened:
                stored = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            break  # reading the weights will report what is wrong with the file
        if "BF16" in stored:  # a bf16 model may keep a few tensors in fp32
            return torch.bfloat16
    return torch.float32


def _check_complete(model: nn.Module, source: Path) -> Any:
    """Raise if weights are missing, which diffusers leaves on the meta device."""
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(
            f"{source} lacks {len(missing)} of the model's weights, first {missing[0]}. Download "
            "it again, or name another model."
        )
    return model


def read_scheduler(folder: Path) -> Any:
    """Return a new instance of the scheduler in the pipeline's folder."""
    import diffusers

    name = read_model_index(folder)["scheduler"][1]
    return read_component(folder, "scheduler", getattr(diffusers, name).from_pretrained)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn off progress bars and warnings of diffusers and transformers in the `with` block."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [(library.is_progress_bar_enabled(), library.get_verbosity()) for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
        library.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # diffusers still uses the older of torch's two weight norms.
            warnings.filterwarnings("ignore", r".*weight_norm` is deprecated", FutureWarning)
            yield
    finally:
        for library, (had_bars, verbosity) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if had_bars:
                library.enable_progress_bar()


def copy_other_components(source: Path, target: Path, exclude: Iterable[str]) -> None:
    """Copy a pipeline folder without some components, with hard links where possible."""
    skipped = set(exclude)
    for entry in sorted(source.iterdir()):
        if entry.name in skipped or entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, copy_function=_link_or_copy)
        else:
            _link_or_copy(str(entry), str(target / entry.name))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


# Digests. Caches and checkpoints store them, so they must not change.


def digest_of_folder(folder: Path) -> str:
    """Hash the name and the bytes of every file in a folder."""
    hasher = blake3(max_threads=blake3.AUTO)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        hasher.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\n".encode())
        if file.stat().st_size:
            hasher.update_mmap(file)
    return hasher.hexdigest(length=16)


def digest_of_weights(module: nn.Module) -> str:
    """Hash the name, shape, dtype and bytes of every tensor in a module."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(module.state_dict().items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        contiguous = tensor.detach().cpu().contiguous()
        hasher.update(contiguous.flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=16)


# Captions. Each is encoded alone and without padding: its embedding then does not depend on the
# other captions of a batch, and a short one costs less than a long one.


def clean_caption(caption: str) -> str:
    """Repair broken characters, resolve HTML escapes, collapse spaces, as Wan's pipeline does."""
    text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return re.sub(r"\s+", " ", text).strip()


def tokenize(
    tokenizer: Any, caption: str, length: int, *, pad: bool = False
) -> Mapping[str, Tensor]:
    """Return token ids and attention mask of one caption, cut to `length`; padded if `pad`."""
    tokens: Mapping[str, Tensor] = tokenizer(
        [caption],
        max_length=length,
        padding="max_length" if pad else False,
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


# Tensors of another size, such as the latents of an image to edit, in channels of cached latents


def append_channels(grid_BCHW: Tensor, values: Tensor) -> Tensor:  # noqa: N803
    """Append the values of each sample as more channels of the grid, padded with zeros."""
    count, _, height, width = grid_BCHW.shape
    flat = values.flatten(1)
    padded = nn.functional.pad(flat, (0, -flat.shape[1] % (height * width)))
    return torch.cat([grid_BCHW, padded.view(count, -1, height, width)], dim=1)


def restore_appended(channels_BCHW: Tensor, shape: tuple[int, ...]) -> Tensor:  # noqa: N803
    """Return the values in channels from `append_channels`, with their shape without the batch."""
    values = channels_BCHW.flatten(1)[:, : math.prod(shape)]
    return values.reshape(-1, *shape)


# Packed latents, one row for each patch of 2x2 cells: the input of Flux and Qwen-Image

PATCH_SIZE = 2
"""Latent cells along the edge of a patch. One patch is one token."""


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


def packed_shape(config: Config, sample: SampleShape, text_length: int) -> EncodedShape:
    """Return the shapes of a sample's latents and text embedding, for the memory planner.

    The VAE has cells of 8x8 pixels, and the transformer reads patches of 2x2 cells.
    """
    cells = (sample.height // 16) * PATCH_SIZE, (sample.width // 16) * PATCH_SIZE
    latents = (config["in_channels"] // PATCH_SIZE**2, *cells)
    return EncodedShape(latents, (text_length, config["joint_attention_dim"]))
