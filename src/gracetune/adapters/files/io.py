"""Read adapter files of any training tool, and write them with the keys of any tool.

The header of a written file describes the adapter and the run that trained it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gracetune.adapters.files.checkpoint_weights import (
    CHECKPOINT_ADAPTER,
    CHECKPOINT_FILES,
    import_parameters,
    is_checkpoint,
    is_sharded_checkpoint,
)
from gracetune.adapters.files.convert import (
    FAMILY_KEY,
    PEFT_SETTINGS_KEY,
    export_tensors,
    import_tensors,
    layers_to_write,
)
from gracetune.adapters.files.keys import get_format, is_known_to_comfyui, kernel_of
from gracetune.adapters.files.layers import Adapter, lokr_sizes, rank_of, with_stage
from gracetune.atomic_files import atomic_file, write_text
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from gracetune.adapters.files.formats import KeyFormat
    from gracetune.adapters.files.keys import KeyTable, Stage
    from gracetune.adapters.files.layers import Layer

ALPHA_KEY = "gracetune.alpha"
"""Header entry with the alpha that the adapter was trained with."""
FILE_NAME = "pytorch_lora_weights.safetensors"
"""Name of the file that diffusers' `load_lora_weights` looks for in a folder."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Names of the files that `PeftModel.save_pretrained` writes."""
STAGE_BY_FILE_NAME: dict[str, Stage] = {"high_noise": "high", "low_noise": "low"}
"""Transformer that an adapter file is for, high-noise or low-noise, by a part of the file's name.
ai-toolkit and gracetune use these names."""
STAGE_IN_NAME = re.compile("(high|low)[-_ ]?noise", re.IGNORECASE)
"""Matches the same in the file names of other tools, such as `HighNoise`."""
STAGES: dict[str, Stage] = {"high": "high", "low": "low"}
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


@dataclass(frozen=True)
class AdapterMetadata:
    """Facts about an adapter that are written to the header of its file.

    Values that are empty or None are unknown and left out.
    """

    base_model: str = ""
    stage: Stage | None = None
    boundary: float | None = None
    """Sigma below which the low-noise transformer takes over from the high-noise one; None for a
    model with one transformer."""
    trigger: str = ""
    """Trigger word or instance prompt of the run."""
    run_digest: str = ""
    """Digest of the settings of the run that trained the adapter."""

    def header(self) -> dict[str, str]:
        """Return the known values as entries of a safetensors header."""
        entries = {
            "gracetune.base_model": self.base_model,
            "gracetune.stage": self.stage or "",
            "gracetune.boundary": "" if self.boundary is None else f"{self.boundary:g}",
            "gracetune.trigger": self.trigger,
            "modelspec.trigger_phrase": self.trigger,  # user interfaces for images show this one
            "gracetune.run_digest": self.run_digest,
        }
        return {name: value for name, value in entries.items() if value}


# Reading


def read_adapter(
    path: Path, tables: Mapping[str, KeyTable], table: KeyTable | None = None
) -> Adapter:
    """Read the adapter in a file or folder.

    `table` has the module names of the model family, if the family is known.
    """
    adapter, _ = read_adapter_and_tensors(resolve_path(path), tables, table)
    return adapter


def read_adapter_and_tensors(
    path: Path, tables: Mapping[str, KeyTable], table: KeyTable | None = None
) -> tuple[Adapter, dict[str, Tensor]]:
    """Read an adapter file; return the adapter, and the file's tensors by their original keys."""
    tensors, metadata = read_tensors(path)
    adapter = import_parameters(path, tensors, metadata, tables, table)
    if adapter is None:
        config = _read_peft_config(path, tensors)
        adapter = import_tensors(tensors, metadata, tables, table, config)
    return adapter, tensors


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the header of a safetensors file. Pickle files raise an error."""
    if path.suffix in PICKLE_SUFFIXES:
        raise AdapterError(
            f"{path} looks like a pickle, which can run code when it is read. Give a .safetensors "
            "file; the tool that wrote this file can save one.",
            kind="not-safetensors",
        )
    if not path.is_file():
        raise AdapterError(
            f"{path} does not exist. Name a .safetensors file or the folder of an adapter.",
            kind="missing",
        )
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}. "
            "It is truncated or another kind of file. Copy or download it again.",
            kind="truncated",
        ) from error
    return tensors, metadata


def resolve_path(path: Path) -> Path:
    """Return the path of the adapter file: the path itself, or the adapter file in a folder.

    In a folder, it is diffusers' or peft's file, or the only .safetensors file. In a checkpoint, it
    is the adapter as the run exports it; if that is two files, one for each expert, it is the file
    of the checkpoint that holds both.
    """
    if not path.is_dir():
        return path
    if is_checkpoint(path):
        exported = list((path / CHECKPOINT_ADAPTER).glob("*.safetensors"))
        if len(exported) == 1:
            return exported[0]
        if is_sharded_checkpoint(path):
            raise AdapterError(
                f"{path} is a checkpoint of a run that trains a whole model on several ranks. It "
                "has no adapter.",
                kind="missing",
            )
        return next(path / name for name in CHECKPOINT_FILES if (path / name).is_file())
    for name in (FILE_NAME, PEFT_FILE):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    found = f"it has {', '.join(file.name for file in files)}" if files else "it has none"
    raise AdapterError(
        f"{path} is a folder. Give one of its .safetensors files ({found}).", kind="missing"
    )


def find_stage(adapter: Adapter, path: Path) -> tuple[Stage | None, str]:
    """Return the transformer that a file is for, `high` or `low` noise, and where that was found.

    The place is "its keys", "its header" or "its name". The result is (None, "") if nothing was
    found, or if the file is for both transformers.
    """
    in_keys = adapter.stages
    in_header = adapter.metadata.get("gracetune.stage")
    in_name = {STAGES[word.lower()] for word in STAGE_IN_NAME.findall(path.stem)}
    if in_keys != (None,):
        if len(in_keys) == 1 and in_header not in (None, "", in_keys[0]):
            raise AdapterError(
                f"the header of {path.name} says stage {in_header}, but its keys say "
                f"{in_keys[0]}. Write the file again with --stage high or --stage low.",
                kind="mixed-stages",
            )
        return (in_keys[0], "its keys") if len(in_keys) == 1 else (None, "")
    if in_header in STAGES:
        return STAGES[in_header], "its header"
    return (in_name.pop(), "its name") if len(in_name) == 1 else (None, "")


def _read_peft_config(path: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, object] | None:
    """Read the adapter_config.json, which has alpha, next to a file with peft's keys.

    The result is None if there is no such file, or if the keys are not peft's.
    """
    config = path.with_name(PEFT_CONFIG)
    if not any(key.startswith("base_model.") for key in tensors) or not config.is_file():
        return None
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{config}, which holds the adapter's alpha, cannot be read: {error}.", kind="damaged"
        ) from error
    return content if isinstance(content, dict) else None


# Writing


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file whose bytes depend on nothing but the tensors and the metadata.

    The safetensors library writes the entries of the metadata in a random order; they are sorted
    here. The sorted header has the same length, so it replaces the other one in place.
    """
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    if not metadata:
        return
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, (len(text), length)
        file.seek(8)
        file.write(text.ljust(length))


def write_adapter(
    path: Path,
    adapter: Adapter,
    key_format: KeyFormat | str,
    metadata: AdapterMetadata | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write an adapter to one file and return its path; see `output_file`.

    The header has the entries of the file that the adapter was read from, a description of its
    layers, and the entries of `metadata`. Without `dtype`, each tensor keeps its dtype.
    """
    key_format = get_format(key_format) if isinstance(key_format, str) else key_format
    path = output_file(path, key_format)
    tensors = export_tensors(adapter, key_format, dtype)
    is_peft = key_format.name == "peft"
    config = _peft_config(layers_to_write(adapter, key_format)) if is_peft else None
    header = {
        **adapter.metadata,
        **describe_adapter(adapter),
        **(metadata or AdapterMetadata()).header(),
        "gracetune.form": key_format.name,
        "format": "pt",
    }
    header.pop(PEFT_SETTINGS_KEY, None)  # its alpha is in the weights or in the keys now
    if len(adapter.stages) > 1:
        header.pop("gracetune.stage", None)  # joined from files of one expert each
    with atomic_file(path) as staging:
        save_tensors(tensors, staging, header)
    if config is not None:
        write_text(path.with_name(PEFT_CONFIG), json.dumps(config, indent=2) + "\n")
    return path


def output_file(path: Path, key_format: KeyFormat) -> Path:
    """Return the file to write for the path that a user gives.

    It is the path itself, except for peft, which loads a folder of two files with fixed names: the
    path is that folder, or the file of the weights in it.
    """
    if key_format.name != "peft" or path.name == PEFT_FILE:
        return path
    if path.suffix == ".safetensors":
        raise AdapterError(
            f"{path} is not a name that peft finds: PeftModel.from_pretrained loads a folder with "
            f"{PEFT_FILE} and {PEFT_CONFIG}. Give a folder, or {path.with_name(PEFT_FILE)}."
        )
    return path / PEFT_FILE


def write_stages(
    path: Path,
    adapter: Adapter,
    key_format: KeyFormat | str,
    metadata: AdapterMetadata | None = None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write an adapter to one file, or to one file for each transformer, and return the paths.

    Two files are written for a high-noise and a low-noise transformer if the key format cannot hold
    both. Without `dtype`, each tensor keeps its dtype.
    """
    key_format = get_format(key_format) if isinstance(key_format, str) else key_format
    written: list[Path] = []
    for stage, file in stage_files(path, adapter, key_format).items():
        if stage is None:
            return [write_adapter(file, adapter, key_format, metadata, dtype)]
        stage_metadata = replace(metadata or AdapterMetadata(), stage=stage)
        part = with_stage(adapter.select_stage(stage), None)
        written.append(write_adapter(file, part, key_format, stage_metadata, dtype))
    return written


def stage_files(path: Path, adapter: Adapter, key_format: KeyFormat) -> dict[Stage | None, Path]:
    """Return the file to write for the high-noise and for the low-noise transformer.

    The keys are `high` and `low`, or None if one file is enough: the key format holds both
    transformers, or the adapter changes only one.
    """
    if key_format.stages or len(adapter.stages) == 1:
        return {None: output_file(path, key_format)}
    if key_format.name == "peft" and path.name == PEFT_FILE:
        path = path.parent
    return {
        stage: output_file(path.with_name(f"{path.stem}_{part}{path.suffix}"), key_format)
        for part, stage in STAGE_BY_FILE_NAME.items()
    }


def default_format(adapter: Adapter) -> KeyFormat:
    """Return the key format (a tool's naming of tensors) in which most tools load the adapter."""
    layers = adapter.layers.values()
    algorithms = {layer.algorithm for layer in layers}
    if any(layer.is_dora for layer in layers) and algorithms == {"lora"}:
        return get_format("diffusers")  # the only one that keeps magnitudes under peft's name
    kind = algorithms.pop() if len(algorithms) == 1 else "other"
    by_kind = dict(adapter.table.default_formats)
    return get_format(by_kind.get(kind, by_kind["other"]))


def loading_tools(adapter: Adapter) -> tuple[str, ...]:
    """Return the names of the tools that load the adapter in its default format.

    `check_loading.check_file` tries it for a file, which takes seconds. See docs/adapters.md.
    """
    layers = adapter.layers.values()
    if adapter.table.pipeline is None:
        return ()
    if any(layer.is_dora for layer in layers):
        return ("diffusers",)
    if all(layer.algorithm == "lora" for layer in layers):
        return ("diffusers", "ComfyUI")
    return ("ComfyUI",) if is_known_to_comfyui(default_format(adapter), adapter.table) else ()


def describe_adapter(adapter: Adapter) -> dict[str, str]:
    """Return model family, algorithm, rank and alpha as entries of a safetensors header."""
    algorithms = sorted(
        {("dora+" if layer.is_dora else "") + layer.algorithm for layer in adapter.layers.values()}
    )
    ranks = sorted({rank for layer in adapter.layers.values() if (rank := rank_of(layer))})
    alphas = sorted(
        {
            float(layer.alpha if layer.alpha is not None else rank)
            for layer in adapter.layers.values()
            if (rank := rank_of(layer)) is not None
        }
    )
    return {
        FAMILY_KEY: adapter.table.family,
        "gracetune.algorithm": ",".join(algorithms),
        "gracetune.rank": ",".join(map(str, ranks)) or "full",
        ALPHA_KEY: ",".join(f"{alpha:g}" for alpha in alphas) or "none",
    }


def _peft_config(adapter: Adapter) -> dict[str, object]:
    """Return the adapter_config.json that `PeftModel.from_pretrained` needs.

    `adapter` has the layers that are written: alpha equals the rank, because the weights are
    already multiplied by the scale.
    """
    algorithms = {layer.algorithm for layer in adapter.layers.values()}
    if len(algorithms) > 1:
        raise AdapterError(
            "peft has one algorithm for a whole adapter, and some modules of this one have others "
            f"({describe_adapter(adapter)['gracetune.algorithm']}). Write another format, or "
            "approximate it by a LoRA: `gracetune adapter convert` with --lora-rank.",
            kind="not-exact",
        )
    (algorithm,) = algorithms
    layers = {path.module: layer for path, layer in adapter.layers.items()}
    kernels = {module: kernel_of(module, adapter.table) for module in layers}
    ranks = {module: _peft_rank(layer) for module, layer in layers.items()}
    common = max(set(ranks.values()), key=list(ranks.values()).count)
    exceptions = {f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != common}
    config: dict[str, object] = {
        "peft_type": algorithm.upper(),
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": common,
        "rank_pattern": exceptions,
        "alpha_pattern": exceptions,
        # peft would also match the names in a list to the ends of longer names.
        "target_modules": "|".join(map(re.escape, sorted(ranks))),
    }
    if algorithm == "lora":
        is_biased = any("diff_b" in layer.tensors for layer in layers.values())
        is_dora = any(layer.is_dora for layer in layers.values())
        return config | {"lora_alpha": common, "use_dora": is_dora, "lora_bias": is_biased}
    has_core = any({"hada_t1", "lokr_t2"} & layer.tensors.keys() for layer in layers.values())
    config |= {"alpha": common, "use_effective_conv2d": has_core}
    return (
        config
        if algorithm == "loha"
        else config | {"decompose_factor": _peft_factor(layers, kernels)}
    )


def _peft_rank(layer: Layer) -> int:
    """Return the rank for which peft creates the tensors of a layer.

    For a LoKr of whole matrices, it is the larger dimension of the second one.
    """
    whole = layer.tensors.get("lokr_w2")
    rank = rank_of(layer) if whole is None else max(whole.shape[:2])
    assert rank is not None, "peft's format holds no full matrices"
    return rank


def _peft_factor(layers: Mapping[str, Layer], kernels: Mapping[str, tuple[int, ...]]) -> int:
    """Return the setting `decompose_factor` for which peft creates LoKr factors of these sizes."""
    from peft.tuners.lokr.layer import factorization

    sizes = {module: lokr_sizes(layer, kernels[module]) for module, layer in layers.items()}
    for factor in (-1, *sorted({rows[0] for rows, _ in sizes.values()})):
        if all(
            factorization(first * second, factor) == (first, second)
            for dimensions in sizes.values()
            for first, second in dimensions
        ):
            return factor
    module, (rows, columns) = next(iter(sizes.items()))
    raise AdapterError(
        f"{module} is the Kronecker product of {rows[0]}x{columns[0]} and {rows[1]}x{columns[1]}, "
        "but peft has one `decompose_factor` for all modules, and none gives the sizes of these. "
        "Write another format, or approximate it by a LoRA: `gracetune adapter convert` with "
        "--lora-rank.",
        kind="not-exact",
        key=module,
    )
