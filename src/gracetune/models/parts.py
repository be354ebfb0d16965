"""Where a model's parts are, and how each is read: every way it can fail names the setting."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from gracetune.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from gracetune.config.schema import ModelSection

INDEX = "model_index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PREFIX = "model.diffusion_model."
"""What files for ComfyUI may have before every name."""
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What diffusers and transformers raise on folders that are not what they seem."""

Part = TypeVar("Part")


def locate(section: ModelSection) -> Path:
    """The folder of the model: `model.path` itself, or a copy of what the hub has by that name."""
    if section.path is None:
        raise ModelError(
            f"model.path is missing; {section.family} needs a folder as diffusers saves it, or a "
            "name on the Hugging Face hub."
        )
    folder = Path(section.path)
    if not folder.is_dir():
        folder = _downloaded(section.path, section.revision)
    if not (folder / INDEX).is_file():
        raise ModelError(
            f"model.path is {section.path!r}, which holds no {INDEX}. Name the folder of a whole "
            "pipeline, with its vae, text_encoder and transformer beside that file."
        )
    return folder


def read_index(folder: Path) -> dict[str, Any]:
    """What the pipeline's own file says: its class, its parts, its settings."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / INDEX} cannot be read: {error}") from error
    return index


def demand_class(folder: Path, index: Mapping[str, Any], known: Sequence[str], family: str) -> None:
    """Another model's folder is refused before gigabytes of it are read."""
    if index.get("_class_name") not in known:
        raise ModelError(
            f"model.path {str(folder)!r} holds a {index.get('_class_name')}; {family} reads "
            f"{' or '.join(known)}. Name another folder, or set model.family to what it is."
        )


def read_part(folder: Path, name: str, read: Callable[[Path], Part]) -> Part:
    """One part of a pipeline's folder."""
    part = folder / name
    if not part.is_dir():
        raise ModelError(f"model.path {str(folder)!r} has no folder {name!r}.")
    try:
        with without_bars():
            return read(part)
    except UNREADABLE as error:
        raise ModelError(f"{part} cannot be read: {error}") from error


def read_transformer(
    cls: Any, section: ModelSection, folder: Path, name: str, file: str | None
) -> Any:
    """A transformer from its own folder, or from one file that the run file names."""
    if file is None:
        dtype = _dtype(section, lambda: sorted((folder / name).glob("*.safetensors")))
        return read_part(
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
            {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path).items()},
            config=str(folder),
            subfolder=name,
            torch_dtype=dtype,
            local_files_only=True,
        )
    except UNREADABLE as error:
        raise ModelError(
            f"model.{name}_file {file!r} does not fit {folder / name}: {error}"
        ) from error
    return _whole(model, path)


def read_scheduler(folder: Path) -> Any:
    """A fresh one, as the pipeline was published with."""
    import diffusers

    name = read_index(folder)["scheduler"][1]
    return read_part(folder, "scheduler", getattr(diffusers, name).from_pretrained)


@contextmanager
def without_bars() -> Iterator[None]:
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


def copy_rest(source: Path, target: Path, leave_out: Iterable[str]) -> None:
    """All of a pipeline's folder but the named parts; links where the disk is the same one."""
    skipped = set(leave_out)
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
