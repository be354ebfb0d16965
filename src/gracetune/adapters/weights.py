"""The weights of a model on disk, by our names: one file, or a folder of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from gracetune.adapters.names import KeyIndex
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.adapters.tables.types import NameTable, Naming

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
"""What may stand before a model's own names in a file."""


class Weight(NamedTuple):
    """Where a weight is: its module by our name, and whether it is the bias."""

    module: str
    bias: bool


@dataclass(frozen=True)
class ModelWeights:
    """The weights of one transformer on disk, found but not read."""

    files: tuple[Path, ...]
    naming: Naming
    keys: Mapping[Weight, tuple[Path, str]]


def open_model(path: Path, table: NameTable) -> ModelWeights:
    """Find every weight of a model that the table has a name for."""
    files = tuple(sorted(path.glob("*.safetensors"))) if path.is_dir() else (path,)
    if not files:
        raise AdapterError(
            f"{path} holds no .safetensors file. Name a transformer's folder or file.",
            kind="missing",
        )
    index = KeyIndex(table)
    found: dict[Naming, dict[Weight, list[tuple[Path, str]]]] = {"original": {}, "diffusers": {}}
    for file in files:
        for key in _keys(file):
            for naming, weights in found.items():
                weight = _weight(key, naming, index)
                if weight is not None:
                    weights.setdefault(weight, []).append((file, key))
    naming = max(found, key=lambda name: len(found[name]))
    if not found[naming]:
        raise AdapterError(
            f"{path} has no weight that {table.family} models have: it is another model.",
            kind="other-model",
        )
    return ModelWeights(files, naming, {weight: _only(at) for weight, at in found[naming].items()})


def _only(places: Sequence[tuple[Path, str]]) -> tuple[Path, str]:
    """Where a weight is; one that is there twice would be changed in one place alone."""
    if len(places) > 1:
        (file, key), (other, twin) = places[:2]
        raise AdapterError(
            f"{key!r} of {file.name} and {twin!r} of {other.name} are the same weight. Name one "
            "file, or move the one that is not meant out of the folder.",
            kind="duplicate",
            key=twin,
        )
    return places[0]


def _weight(key: str, naming: Naming, index: KeyIndex) -> Weight | None:
    """What a model's key is in one naming."""
    for prefix in PREFIXES:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        for tail, bias in ((".weight", False), (".bias", True), ("", False)):
            if name.endswith(tail):
                module = index.find(name.removesuffix(tail), naming, ".")
                if module is not None:
                    return Weight(module, bias)
    return None


def _keys(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as source:
            return list(source.keys())
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{file} cannot be read as safetensors: {error}. Copy or download it again.",
            kind="truncated",
        ) from error
