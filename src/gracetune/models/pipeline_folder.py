"""Read and write the folders of diffusers pipelines.

Such a folder has a `model_index.json` and one subfolder per component: transformer, VAE, scheduler,
text encoders and tokenizers. Every error names the run-file setting that is wrong.
"""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from gracetune.atomic_files import link_or_copy
from gracetune.errors import ModelError
from gracetune.models.checkpoint_header import FP8_TYPES, read_header
from gracetune.models.locate import locate_model
from gracetune.models.registry import MODEL_INDEX, family_info
from gracetune.models.single_file import (
    dequantize,
    load_transformer,
    read_transformer_weights,
    unscaled_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from gracetune.config.schema import ModelSection
    from gracetune.models.family import PlannerShapes

TRANSFORMER_FOLDERS = {"": "transformer", "high": "transformer", "low": "transformer_2"}
"""Folder of each transformer: of a single one, and of those for high and low noise."""
TEXT_ENCODER = "text_encoder"
"""Start of the names of text encoders."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
READ_ERRORS = (OSError, ValueError, KeyError, IndexError, RuntimeError, SafetensorError)
"""Errors that diffusers and transformers raise if a folder is incomplete or damaged."""

Component = TypeVar("Component")


@dataclass(frozen=True)
class PipelineParts:
    """The components of a diffusers pipeline, such as `vae`, read from a folder."""

    folder: Path
    index: Mapping[str, Any]
    """The content of `model_index.json`: the pipeline's class, components and settings."""
    components: dict[str, Any]
    """Component by its name in the pipeline; None if the folder has none, or if it is not loaded.
    """
    unloaded: list[str] = field(default_factory=list)
    """Names of the text encoders that are not loaded, which is all of them at first."""

    @property
    def encoders(self) -> dict[str, nn.Module]:
        """The text encoders that are loaded, by name."""
        return {
            name: module
            for name, module in self.components.items()
            if name.startswith(TEXT_ENCODER) and module is not None
        }

    def pipeline(self, **replaced: Any) -> Any:
        """Return diffusers' pipeline of these components, some of which may be replaced."""
        import diffusers

        cls = getattr(diffusers, self.index["_class_name"])
        known = inspect.signature(cls.__init__).parameters
        settings = {k: v for k, v in self.index.items() if k in known and k not in self.components}
        pipeline = cls(**settings | self.components | replaced)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def find_model_folder(section: ModelSection) -> Path:
    """Return the local folder of the model that `model.path` names."""
    folder = Path(str(locate_model(section).path))
    if not (folder / MODEL_INDEX).is_file():
        raise ModelError(
            f"model.path is {str(folder)!r}, which holds no {MODEL_INDEX}. Name the folder of a "
            "whole pipeline, with that file and the folders vae, text_encoder and transformer."
        )
    return folder


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


def read_parts(
    section: ModelSection,
    shapes: PlannerShapes,
    pipelines: Sequence[str],
    vae: str = "AutoencoderKL",
    transformers: Mapping[str, Any] | None = None,
    ignored: Sequence[str] = (),
) -> PipelineParts:
    """Read all components of the pipeline that `model.path` names, except text encoders.

    Those are only checked: `load_text_encoder` loads them when a text is encoded. Components in
    `ignored`, and those that the family never needs, are None. `pipelines` are the classes of
    pipelines that the family reads, and `vae` is its VAE's class. `transformers`, if given, are
    used instead of those in the folder.
    """
    import diffusers

    section = locate_model(section)
    ignored = (*ignored, *family_info(section.family).unused_components)
    folder = find_model_folder(section)
    index = read_model_index(folder)
    check_pipeline_class(folder, index, pipelines, section.family)
    text_encoders = _check_text_encoders(folder, index)  # before gigabytes are read
    components: dict[str, Any] = {}
    for name, entry in index.items():
        if not _is_component(entry):
            continue
        library, cls_name = entry
        if cls_name is None or name in ignored or name in (transformers or {}):
            components[name] = (transformers or {}).get(name)
        elif name.startswith(shapes.component):
            is_second = name == "transformer_2"
            file = section.transformer_2_file if is_second else section.transformer_file
            cls = getattr(diffusers, shapes.class_name)
            components[name] = read_transformer(cls, section, folder, name, file, shapes)
        elif name == "vae":
            components[name] = read_vae(folder, getattr(diffusers, vae))
        elif name == "scheduler" or name in text_encoders:
            components[name] = None  # a scheduler has state, so it is read for every sampling
        else:
            components[name] = _read_other(folder, name, library, cls_name)
    if section.transformer_2_file is not None and components.get("transformer_2") is None:
        raise ModelError(
            f"model.transformer_2_file is {section.transformer_2_file!r}, but {folder} has one "
            "transformer. Remove the setting, or name a folder with two transformers."
        )
    for name in ("vae", shapes.component):
        if components.get(name) is None:
            raise ModelError(
                f"{folder / MODEL_INDEX} names no {name}. Download the model again, or name "
                "another model.path."
            )
    return PipelineParts(folder, index, components, text_encoders)


def _is_component(entry: object) -> bool:
    """Return True for the package and class of a component, False for a setting."""
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(part is None or isinstance(part, str) for part in entry)
    )


def _read_other(folder: Path, name: str, library: str, cls_name: str) -> Any:
    """Read a tokenizer, an image processor, or a frozen model such as a text encoder."""
    import transformers

    if name.startswith("tokenizer"):
        is_processor = cls_name.endswith("Processor")  # of texts and images
        auto = transformers.AutoProcessor if is_processor else transformers.AutoTokenizer
        return read_pretrained(folder, name, auto)
    if "processor" in name or "extractor" in name:
        return read_pretrained(folder, name, transformers.AutoImageProcessor)
    cls = _find_class(folder, name, library, cls_name)
    if library != "transformers":
        model = read_pretrained(folder, name, cls, torch_dtype=torch.float32)
        return model.eval().requires_grad_(False)
    return read_text_encoder(folder, name, cls)


def _find_class(folder: Path, name: str, library: str, cls_name: str) -> Any:
    """Return the class of a frozen model that `model_index.json` names."""
    import diffusers
    import transformers

    # diffusers' index names the package of a model of its own, such as `stable_audio`.
    cls = getattr(transformers if library == "transformers" else diffusers, cls_name, None)
    if cls is None:
        raise ModelError(
            f"{folder / MODEL_INDEX} names the class {library}.{cls_name} for {name}, which is not "
            "in the installed versions of diffusers and transformers. Name another model.path."
        )
    return cls


def load_text_encoder(parts: PipelineParts, name: str) -> nn.Module:
    """Load a text encoder that is not loaded."""
    library, cls_name = parts.index[name]
    model: nn.Module = _read_other(parts.folder, name, library, cls_name)
    return model


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


def _check_text_encoders(folder: Path, index: Mapping[str, Any]) -> list[str]:
    """Raise if a text encoder is incomplete, without reading its weights; return all names.

    Other faults are found when a text is encoded, which is still before training: cache keys have
    a digest of the folder, so no embedding of a damaged text encoder is cached.
    """
    entries = {name: entry for name, entry in index.items() if name.startswith(TEXT_ENCODER)}
    names = [name for name, entry in entries.items() if _is_component(entry) and entry[1]]
    for name in names:
        _find_class(folder, name, *index[name])
        read_component(folder, name, _check_files)
    return names


def _check_files(folder: Path) -> None:
    """Raise if a model has no configuration, or if a file with weights is missing or cut."""
    json.loads((folder / "config.json").read_text())
    shards = folder / "model.safetensors.index.json"
    files = {file for file in [folder / "model.safetensors"] if file.is_file()}
    if not files and shards.is_file():
        files = {folder / name for name in json.loads(shards.read_text())["weight_map"].values()}
    if not files and not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
        raise FileNotFoundError("it has no file with weights")
    for file in sorted(files):
        with safe_open(file, "pt"):
            pass


def read_text_encoder(folder: Path, name: str, cls: Any) -> nn.Module:
    """Load a text encoder, frozen and in the dtype of its file; fp8 weights become bf16."""
    files = sorted((folder / name).glob("*.safetensors"))
    if _has_fp8(files):

        def read(path: Path) -> nn.Module:
            config = cls.config_class.from_pretrained(path, local_files_only=True)
            return _load_fp8(lambda: cls(config), files, torch.bfloat16)

        encoder = read_component(folder, name, read)
    else:
        encoder = read_pretrained(folder, name, cls, dtype="auto")
    return encoder.eval().requires_grad_(False)


def _load_fp8(
    build: Callable[[], nn.Module], files: Sequence[Path], dtype: torch.dtype
) -> nn.Module:
    """Return a model with weights that are stored in fp8, in `dtype`.

    diffusers and transformers would load the fp8 numbers without their scales.
    """
    from accelerate import init_empty_weights

    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= load_file(file)
    unscaled = unscaled_weights(stored)
    if unscaled:
        raise ValueError(f"{unscaled[0]} is stored in fp8 without a scale, but others have one")
    weights = dequantize(stored, dtype)
    with init_empty_weights():
        model: Any = build()
    kept = set(model._keep_in_fp32_modules or ())
    for name, tensor in weights.items():
        if tensor.is_floating_point():
            is_kept = not kept.isdisjoint(name.split("."))
            weights[name] = tensor.to(torch.float32 if is_kept else dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if missing or unexpected:
        wrong = sorted([*missing, *unexpected])
        raise ValueError(f"{len(wrong)} weights are missing or unknown, first {wrong[0]}")
    loaded: nn.Module = model
    return loaded


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
    config: dict[str, Any] = {}
    if (folder / name / "config.json").is_file():  # else, reading it says what is missing
        config = read_model_config(folder / name, cls.__name__, f"transformer of {section.family}")
        if shapes is not None:
            shapes.check_config(config, f"{_describe_pipeline(folder)} whose transformer")
    if file is None:
        return _read_transformer_folder(cls, section, folder / name, config)
    setting = "model.transformer_2_file" if name == "transformer_2" else "model.transformer_file"
    header = read_header(file, setting)
    dtype = _weights_dtype(section, lambda: [header.path])
    parts = () if shapes is None else shapes.foreign_weights(config)
    foreign = next((key for key in header.transformer if any(part in key for part in parts)), None)
    if shapes is not None and foreign is not None:
        raise ModelError(
            f"{setting} is {file!r}, which has weights of an unsupported model: "
            f"{foreign}. {shapes.supported_models}. Name another file."
        )
    source = f"{setting} is {file!r}, which"
    try:
        with without_progress_bars():
            weights = read_transformer_weights(header, dtype)
            transformer = load_transformer(cls, folder / name, weights, dtype, source)
    except READ_ERRORS as error:
        raise ModelError(
            f"{source} does not fit {folder / name} ({error}). Name a file with the weights of "
            "that model."
        ) from error
    return _check_complete(transformer, header.path)


def _read_transformer_folder(
    cls: Any, section: ModelSection, folder: Path, config: Mapping[str, Any]
) -> Any:
    """Load a transformer from its subfolder, which has this configuration."""
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "another tool")
        raise ModelError(
            f"{folder} has weights that are quantized by {method}, which cannot be trained on. "
            "Name a model.path with weights in fp32, bf16 or fp8. model.quantize quantizes "
            "them again."
        )
    files = sorted(folder.glob("*.safetensors"))
    dtype = _weights_dtype(section, lambda: files)
    if _has_fp8(files):
        return read_component(
            folder.parent,
            folder.name,
            lambda _: _load_fp8(lambda: cls.from_config(config), files, dtype),
        )
    transformer, loaded = read_pretrained(
        folder.parent, folder.name, cls, torch_dtype=dtype, output_loading_info=True
    )
    if loaded["unexpected_keys"]:
        raise ModelError(
            f"{folder} has {len(loaded['unexpected_keys'])} weights that a {cls.__name__} with "
            f"this config.json does not have, first {min(loaded['unexpected_keys'])}. Download it "
            "again, or name another model."
        )
    return _check_complete(transformer, folder)


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
    """Return `model.dtype`; for `auto`, bf16 if any tensor in the files is bf16 or fp8, else fp32.

    A bf16 model may keep a few tensors in fp32.
    """
    if section.dtype != "auto":
        return DTYPES[section.dtype]
    is_short = not _stored_dtypes(files()).isdisjoint(("BF16", *FP8_TYPES))
    return torch.bfloat16 if is_short else torch.float32


def _has_fp8(files: Sequence[Path]) -> bool:
    return not _stored_dtypes(files).isdisjoint(FP8_TYPES)


def _stored_dtypes(files: Sequence[Path]) -> set[str]:
    """Return the names of the dtypes of all tensors in safetensors files."""
    stored: set[str] = set()
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                stored |= {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            break  # reading the weights will report what is wrong with the file
    return stored


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
            # diffusers still uses the older of torch's two weight norms, and names of its own.
            old = r".*(weight_norm|FluxPosEmbed)` is deprecated"
            warnings.filterwarnings("ignore", old, FutureWarning)
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
            shutil.copytree(entry, target / entry.name, copy_function=link_or_copy)
        else:
            link_or_copy(str(entry), str(target / entry.name))


# Digests. Caches and checkpoints store them, so they must not change.


def digest_of_folder(folder: Path) -> str:
    """Hash the name and the bytes of every file in a folder."""
    hasher = blake3(max_threads=blake3.AUTO)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        hasher.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\n".encode())
        if file.stat().st_size:
            hasher.update_mmap(file)
    return hasher.hexdigest(length=16)


def weights_hasher(module: nn.Module) -> Callable[[], str]:
    """Return a function that hashes the tensors that a module has now."""
    return partial(digest_of_tensors, module.state_dict())


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash the name, shape, dtype and bytes of every tensor. Other threads run meanwhile."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        contiguous = tensor.detach().cpu().contiguous()
        hasher.update(contiguous.flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=16)
