"""Adapter files: read whatever tool wrote them, write any form with what one should know of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gracetune.adapters.files.convert import (
    FAMILY_KEY,
    PEFT_SETTINGS_KEY,
    export_tensors,
    import_tensors,
)
from gracetune.adapters.files.fused_projections import split_fused
from gracetune.adapters.files.keys import get_format
from gracetune.adapters.files.layers import Adapter, rank_of, with_stage
from gracetune.atomic_files import atomic_file, write_text
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from gracetune.adapters.files.formats import KeyFormat
    from gracetune.adapters.files.keys import KeyTable, Stage

FILE_NAME = "pytorch_lora_weights.safetensors"
"""What diffusers' `load_lora_weights` looks for in a folder."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
STAGE_BY_FILE_NAME: dict[str, Stage] = {"high_noise": "high", "low_noise": "low"}
"""How file names tell the stage, in ai-toolkit's and in our own."""
STAGES: dict[str, Stage] = {"high": "high", "low": "low"}
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


@dataclass(frozen=True)
class AdapterMetadata:
    """What a file says of itself beside its weights. Empty means unknown."""

    base_model: str = ""
    stage: Stage | None = None
    boundary: float | None = None
    """The noise level at which the high expert hands over to the low one."""
    trigger: str = ""
    run_digest: str = ""

    def header(self) -> dict[str, str]:
        """As strings, those that are known."""
        said = {
            "gracetune.base_model": self.base_model,
            "gracetune.stage": self.stage or "",
            "gracetune.boundary": "" if self.boundary is None else f"{self.boundary:g}",
            "gracetune.trigger": self.trigger,
            "gracetune.run_digest": self.run_digest,
        }
        return {name: value for name, value in said.items() if value}


def read_adapter(
    path: Path, tables: Mapping[str, KeyTable], table: KeyTable | None = None
) -> Adapter:
    """The adapter in a file or folder; any fault is a verdict with the first key that shows it."""
    adapter, _ = read_adapter_and_tensors(resolve_path(path), tables, table)
    return adapter


def read_adapter_and_tensors(
    path: Path, tables: Mapping[str, KeyTable], table: KeyTable | None = None
) -> tuple[Adapter, dict[str, Tensor]]:
    """The adapter in a file, beside the file's own tensors by its own keys."""
    tensors, metadata = read_tensors(path)
    return import_tensors(tensors, metadata, tables, table, _peft_config(path, tensors)), tensors


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header, on the CPU; never anything that executes what it reads."""
    if path.suffix in PICKLE_SUFFIXES:
        raise AdapterError(
            f"{path} is a pickle by its name, which runs code when it is read. "
            "Give a .safetensors file; the tool that wrote this one can save it so.",
            kind="not-safetensors",
        )
    if not path.is_file():
        raise AdapterError(f"{path} is not there.", kind="missing")
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as safetensors: {error}. "
            "It is truncated or another kind of file: copy or download it again.",
            kind="truncated",
        ) from error
    return tensors, metadata


def find_stage(adapter: Adapter, path: Path) -> tuple[Stage | None, str]:
    """The stage of a file that holds one, and who says so: keys, header or file name."""
    keyed = adapter.stages
    said = adapter.metadata.get("gracetune.stage")
    named = [stage for word, stage in STAGE_BY_FILE_NAME.items() if word in path.stem]
    if keyed != (None,):
        if len(keyed) == 1 and said not in (None, "", keyed[0]):
            raise AdapterError(
                f"the header of {path.name} says stage {said}, its keys say {keyed[0]}. "
                "One of them is wrong; write it again with --stage.",
                kind="mixed-stages",
            )
        return (keyed[0], "its keys") if len(keyed) == 1 else (None, "")
    if said in STAGES:
        return STAGES[said], "its header"
    return (named[0], "its name") if len(named) == 1 else (None, "")


def write_adapter(
    path: Path,
    adapter: Adapter,
    form: KeyFormat | str,
    about: AdapterMetadata | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write one file of one form; the header says what it is, and keeps what it said before."""
    form = get_format(form) if isinstance(form, str) else form
    tensors = export_tensors(adapter, form, dtype)
    header = {
        **adapter.metadata,
        **describe_adapter(adapter),
        **(about or AdapterMetadata()).header(),
        "gracetune.form": form.name,
        "format": "pt",
    }
    header.pop(PEFT_SETTINGS_KEY, None)  # its alpha is in the weights or in the keys now
    if len(adapter.stages) > 1:
        header.pop("gracetune.stage", None)  # joined from files of one stage each
    with atomic_file(path) as staging:
        save_file(tensors, staging, metadata=header)
    if form.name == "peft" and path.name == PEFT_FILE:
        config = _config_of(split_fused(adapter))  # by the modules that `spell` has written
        write_text(path.with_name(PEFT_CONFIG), json.dumps(config, indent=2) + "\n")
    return path


def default_format(adapter: Adapter) -> KeyFormat:
    """The form that most tools load this adapter from."""
    layers = adapter.layers.values()
    algorithms = {layer.algorithm for layer in layers}
    if any(layer.is_dora for layer in layers) and algorithms == {"lora"}:
        return get_format("diffusers")  # it alone keeps magnitudes, under peft's own name
    kind = algorithms.pop() if len(algorithms) == 1 else "other"
    by_kind = dict(adapter.table.default_formats)
    return get_format(by_kind.get(kind, by_kind["other"]))


def write_stages(
    path: Path,
    adapter: Adapter,
    form: KeyFormat | str,
    about: AdapterMetadata | None = None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """To `stage_files`, all of the adapter."""
    form = get_format(form) if isinstance(form, str) else form
    written = []
    for stage, file in stage_files(path, adapter, form).items():
        if stage is None:
            return [write_adapter(file, adapter, form, about, dtype)]
        known = about or AdapterMetadata()
        told = AdapterMetadata(
            known.base_model, stage, known.boundary, known.trigger, known.run_digest
        )
        part = with_stage(adapter.select_stage(stage), None)
        written.append(write_adapter(file, part, form, told, dtype))
    return written


def stage_files(path: Path, adapter: Adapter, form: KeyFormat) -> dict[Stage | None, Path]:
    """One file a stage where the form holds one, named by it; one file otherwise."""
    if form.stages or len(adapter.stages) == 1:
        return {None: path}
    return {stage: _named(path, word) for word, stage in STAGE_BY_FILE_NAME.items()}


def describe_adapter(adapter: Adapter) -> dict[str, str]:
    """Family, algorithm, rank and alpha as header entries."""
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
        "gracetune.alpha": ",".join(f"{alpha:g}" for alpha in alphas) or "none",
    }


def resolve_path(path: Path) -> Path:
    """A folder stands for the file that diffusers or peft would look for in it."""
    if not path.is_dir():
        return path
    for name in (FILE_NAME, PEFT_FILE):
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    found = f"there are {', '.join(file.name for file in files)}" if files else "there is none"
    raise AdapterError(
        f"{path} is a folder; give one of its .safetensors files ({found}).", kind="missing"
    )


def _peft_config(path: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, object] | None:
    """peft's settings beside its own file: without them alpha is lost."""
    config = path.with_name(PEFT_CONFIG)
    if not any(key.startswith("base_model.") for key in tensors) or not config.is_file():
        return None
    try:
        known = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{config} cannot be read: {error}. It holds the adapter's alpha.", kind="damaged"
        ) from error
    return known if isinstance(known, dict) else None


def _config_of(adapter: Adapter) -> dict[str, object]:
    """What `PeftModel.from_pretrained` needs beside the weights; alpha is already in them."""
    kinds = {"lora": "LORA", "loha": "LOHA", "lokr": "LOKR"}
    algorithms = {layer.algorithm for layer in adapter.layers.values()}
    ranks = {place.module: rank_of(layer) or 1 for place, layer in adapter.layers.items()}
    most = max(set(ranks.values()), key=list(ranks.values()).count)
    others = {f"^{module}": rank for module, rank in ranks.items() if rank != most}
    alpha = "lora_alpha" if algorithms == {"lora"} else "alpha"
    return {
        "peft_type": kinds[algorithms.pop()] if len(algorithms) == 1 else None,
        "r": most,
        alpha: most,
        "rank_pattern": others,
        "alpha_pattern": others,
        "use_dora": any(layer.is_dora for layer in adapter.layers.values()),
        "target_modules": sorted(ranks),
    }


def _named(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}_{word}{path.suffix}")
