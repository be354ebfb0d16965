"""What families of a diffusers folder have in common: a transformer, a VAE, text encoders."""

from __future__ import annotations

import copy
import html
import json
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
    from gracetune.models.family import Config, SampleRequest, SampleShape


class DiffusersFamily:
    """The members of `Family` that do not depend on the model."""

    folder: Path
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]

    def weights_digest(self) -> str:
        """Of the transformer."""
        return digest_of_weights(self.transformer)

    def enable_gradient_checkpointing(self) -> None:
        """As diffusers does it, block by block."""
        self.transformer.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> None:
        """The VAE, and the text encoders as long as they are there."""
        for part in (self.vae, *self.text_encoders):
            part.to(device)

    def release_text_encoder(self) -> None:
        """Gigabytes that training does not need."""
        self.text_encoders.clear()

    def set_tiling(self, enabled: bool) -> bool:
        """The VAE's own tiles."""
        _tile(self.vae, enabled)
        return True

    def sampling_vae(self, request: SampleRequest) -> Any:
        """To sample with: the same weights, but tiles and kept frames of its own.

        A generation may be encoded meanwhile. A VAE of clips keeps frames between its calls, and
        either would go on with the other's.
        """
        vae = copy.copy(self.vae)
        _tile(vae, request.tiled)
        return vae

    def export(self, folder: Path) -> None:
        """A whole pipeline's folder; what was not trained is linked or copied."""
        self.transformer.save_pretrained(folder / "transformer")
        copy_other_components(self.folder, folder, exclude=("transformer",))


def _tile(vae: Any, on: bool) -> None:
    (vae.enable_tiling if on else vae.disable_tiling)()


# ------------------------------------------------------------------------------------------
# Where a model's parts are, and how each is read: every way it can fail names the setting.


MODEL_INDEX = "model_index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
COMFYUI_PREFIX = "model.diffusion_model."
"""What files for ComfyUI may have before every name."""
READ_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What diffusers and transformers raise on folders that are not what they seem."""

Part = TypeVar("Part")


def find_model_folder(section: ModelSection) -> Path:
    """The folder of the model: `model.path` itself, or a copy of what the hub has by that name."""
    if section.path is None:
        raise ModelError(
            f"model.path is missing; {section.family} needs a folder as diffusers saves it, or a "
            "name on the Hugging Face hub."
        )
    folder = Path(section.path)
    if not folder.is_dir():
        folder = _downloaded(section.path, section.revision)
    if not (folder / MODEL_INDEX).is_file():
        raise ModelError(
            f"model.path is {section.path!r}, which holds no {MODEL_INDEX}. Name the folder of a whole "
            "pipeline, with its vae, text_encoder and transformer beside that file."
        )
    return folder


def read_model_index(folder: Path) -> dict[str, Any]:
    """What the pipeline's own file says: its class, its parts, its settings."""
    try:
        index: dict[str, Any] = json.loads((folder / MODEL_INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / MODEL_INDEX} cannot be read: {error}") from error
    return index


def check_pipeline_class(
    folder: Path, index: Mapping[str, Any], known: Sequence[str], family: str
) -> None:
    """Another model's folder is refused before gigabytes of it are read."""
    if index.get("_class_name") not in known:
        raise ModelError(
            f"model.path {str(folder)!r} holds a {index.get('_class_name')}; {family} reads "
            f"{' or '.join(known)}. Name another folder, or set model.family to what it is."
        )


def read_component(folder: Path, name: str, read: Callable[[Path], Part]) -> Part:
    """One part of a pipeline's folder."""
    part = folder / name
    if not part.is_dir():
        raise ModelError(f"model.path {str(folder)!r} has no folder {name!r}.")
    try:
        with without_progress_bars():
            return read(part)
    except READ_ERRORS as error:
        raise ModelError(f"{part} cannot be read: {error}") from error


def read_transformer(
    cls: Any, section: ModelSection, folder: Path, name: str, file: str | None
) -> Any:
    """A transformer from its own folder, or from one file that the run file names."""
    if file is None:
        dtype = _dtype(section, lambda: sorted((folder / name).glob("*.safetensors")))
        return read_component(
            folder,
            name,
            lambda part: _whole(
                cls.from_pretrained(part, torch_dtype=dtype, local_files_only=True), part
            ),
        )
    path = Path(file)
    if not path.is_file():
        raise ModelError(f"model.{name}_file is {file!r}, which is no file.")
    dtype = _dtype(section, lambda: [path])
    try:
        # The shape comes from the folder: the file has weights alone.
        model = cls.from_single_file(
            {name.removeprefix(COMFYUI_PREFIX): tensor for name, tensor in load_file(path).items()},
            config=str(folder),
            subfolder=name,
            torch_dtype=dtype,
            local_files_only=True,
        )
    except READ_ERRORS as error:
        raise ModelError(
            f"model.{name}_file {file!r} does not fit {folder / name}: {error}"
        ) from error
    return _whole(model, path)


def read_scheduler(folder: Path) -> Any:
    """A fresh one, as the pipeline was published with."""
    import diffusers

    name = read_model_index(folder)["scheduler"][1]
    return read_component(folder, "scheduler", getattr(diffusers, name).from_pretrained)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """The libraries' progress bars and advice are not what a run should print."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    before = [(library.is_progress_bar_enabled(), library.get_verbosity()) for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
        library.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # diffusers still asks torch for the older of its two weight norms
            warnings.filterwarnings("ignore", r".*weight_norm` is deprecated", FutureWarning)
            yield
    finally:
        for library, (shown, verbosity) in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
            if shown:
                library.enable_progress_bar()


def digest_of_folder(folder: Path) -> str:
    """Of every file's name and bytes."""
    hasher = blake3(max_threads=blake3.AUTO)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        hasher.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\n".encode())
        if file.stat().st_size:
            hasher.update_mmap(file)
    return hasher.hexdigest(length=16)


def copy_other_components(source: Path, target: Path, exclude: Iterable[str]) -> None:
    """All of a pipeline's folder but the named parts; links where the disk is the same one."""
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


def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.txt", "*/*"])
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.path is {name!r}: there is no such folder, and the Hugging Face hub does not "
            f"give it by that name ({reason}). Name a folder that exists, or mend the name or the "
            "connection."
        ) from error


def _dtype(section: ModelSection, files: Callable[[], list[Path]]) -> torch.dtype:
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    for file in files():
        try:
            with safe_open(file, "pt") as opened:
                kinds = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            break  # whoever reads the weights says what is wrong with the file
        if "BF16" in kinds:  # beside it, a few tensors may be kept in fp32
            return torch.bfloat16
    return torch.float32


def _whole(model: nn.Module, source: Path) -> Any:
    """diffusers leaves what a file lacks without a value."""
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    if empty:
        raise ModelError(f"{source} lacks {len(empty)} of the model's weights, first {empty[0]}.")
    return model


# ------------------------------------------------------------------------------------------
# Captions to embeddings as a pipeline would make them, one caption at a time and without padding.
#
# Alone, a caption gives the same bits whoever its neighbours are, and short ones are not computed
# as
# if they were long.


def clean_caption(caption: str) -> str:
    """Mended characters, no HTML escapes, single spaces: what Wan's pipeline does."""
    text = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return re.sub(r"\s+", " ", text).strip()


def tokenize(
    tokenizer: Any, caption: str, length: int, *, pad: bool = False
) -> Mapping[str, Tensor]:
    """Ids and mask of one caption, cut after `length` tokens and padded only if asked."""
    found: Mapping[str, Tensor] = tokenizer(
        [caption],
        max_length=length,
        padding="max_length" if pad else False,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return found


def captions_longer_than(tokenizer: Any, captions: Sequence[str], length: int) -> list[str]:
    """Those with more tokens than fit."""
    if not captions:
        return []
    ids = tokenizer(list(captions), add_special_tokens=True, verbose=False)["input_ids"]
    return [caption for caption, tokens in zip(captions, ids, strict=True) if len(tokens) > length]


def pad_embeddings(texts: Sequence[Tensor], length: int) -> Tensor:
    """As one batch, with zeros behind each."""
    out = texts[0].new_zeros((len(texts), length, *texts[0].shape[1:]))
    for row, text in zip(out, texts, strict=True):
        row[: len(text)] = text
    return out


def padding_mask(texts: Sequence[Tensor], length: int) -> Tensor:
    """Which of the padded places hold a token."""
    counts = torch.tensor([len(text) for text in texts], device=texts[0].device)
    return torch.arange(length, device=texts[0].device) < counts[:, None]


# ------------------------------------------------------------------------------------------
# Latents as rows of 2x2 patches, the way Flux and Qwen-Image read them.


PATCH_SIZE = 2


def pack_latents(latents_BCHW: Tensor) -> Tensor:  # noqa: N803
    """One row a patch, in reading order; its values channel by channel."""
    count, channels, height, width = latents_BCHW.shape
    cells = latents_BCHW.view(
        count, channels, height // PATCH_SIZE, PATCH_SIZE, width // PATCH_SIZE, PATCH_SIZE
    )
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * PATCH_SIZE * PATCH_SIZE)


def unpack_latents(rows_BLC: Tensor, height: int, width: int) -> Tensor:  # noqa: N803
    """The same patches at their places in latents of this height and width."""
    count, _, values = rows_BLC.shape
    channels = values // (PATCH_SIZE * PATCH_SIZE)
    cells = rows_BLC.view(
        count, height // PATCH_SIZE, width // PATCH_SIZE, channels, PATCH_SIZE, PATCH_SIZE
    )
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(count, channels, height, width)


# ------------------------------------------------------------------------------------------
# A short name for a set of weights, so that a run knows whether it goes on with the same ones.


def digest_of_weights(module: nn.Module) -> str:
    """Of every parameter's name, shape, type and bytes."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(module.state_dict().items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        contiguous = tensor.detach().cpu().contiguous()
        hasher.update(contiguous.flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=16)


def packed_shape(config: Config, sample: SampleShape, text_length: int) -> EncodedShape:
    """Return what the planner assumes: 8 pixels per latent cell, two by two cells per token."""
    cells = (sample.height // 16) * PATCH_SIZE, (sample.width // 16) * PATCH_SIZE
    return EncodedShape(
        (config["in_channels"] // PATCH_SIZE**2, *cells),
        (text_length, config["joint_attention_dim"]),
    )


def num_patches(latent_shape: Sequence[int]) -> int:
    """Return the number of tokens that latents (C, H, W) are packed into."""
    _, height, width = latent_shape
    return (height // PATCH_SIZE) * (width // PATCH_SIZE)
