"""Adapters merged into the weights of a model.

A model is one safetensors file in original or diffusers' names, a folder of them, or a pipeline's
folder. Weights are read and written a file at a time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gracetune.adapters.files.fused_projections import split_fused, swap_halves
from gracetune.adapters.files.keys import KeyIndex, template_of
from gracetune.adapters.files.layers import delta_bias, delta_shape, merge_weight
from gracetune.atomic_files import atomic_file, atomic_folder
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable, Naming, Stage
    from gracetune.adapters.files.layers import Adapter, Layer


SUBFOLDERS: dict[Stage | None, str] = {
    None: "transformer",
    "high": "transformer",
    "low": "transformer_2",
}


class WeightUpdate(NamedTuple):
    """What one layer does to one weight, or to some of its rows."""

    layer: Layer
    strength: float
    bias: bool
    rows: tuple[int, int, int] | None
    """From which share of the rows to which, of how many; None for all."""


@dataclass(frozen=True)
class MergeReport:
    """What a merge did."""

    changed: int
    files: tuple[str, ...]


def merge_into(
    path: Path, out: Path, adapters: Sequence[tuple[Adapter, float]], table: KeyTable
) -> MergeReport:
    """Write a copy of a transformer with the adapters in its weights."""
    model = open_model(path, table)
    plan = _plan(model, adapters)
    if not path.is_dir():
        with atomic_file(out) as staging:
            _rewrite(path, staging, plan.get(path, {}))
        return MergeReport(len(_modules(adapters)), (out.name,))
    with atomic_folder(out) as folder:
        for file in sorted(path.iterdir()):
            if file in model.files:
                _rewrite(file, folder / file.name, plan.get(file, {}))
            elif file.is_file():
                shutil.copy2(file, folder / file.name)
    return MergeReport(len(_modules(adapters)), tuple(file.name for file in model.files))


def holds_transformers(path: Path) -> bool:
    """Whether this is a pipeline's folder, or what full training has written: parts in folders."""
    return any((path / name).is_dir() for name in SUBFOLDERS.values())


def merge_into_pipeline(
    path: Path,
    out: Path,
    by_stage: Mapping[Stage | None, Sequence[tuple[Adapter, float]]],
    table: KeyTable,
) -> dict[str, MergeReport]:
    """Write a copy of a pipeline's folder with adapters in the transformers of their stages."""
    targets = {SUBFOLDERS[stage]: adapters for stage, adapters in by_stage.items()}
    for name in targets:
        if not (path / name).is_dir():
            raise AdapterError(
                f"{path} has no {name}/, which the adapter's stage belongs to: it is a model of "
                "one stage. Give --stage high for its only transformer.",
                kind="other-model",
            )
    done = {}
    with atomic_folder(out) as folder:
        for entry in sorted(path.iterdir()):
            if entry.name in targets:
                done[entry.name] = merge_into(
                    entry, folder / entry.name, targets[entry.name], table
                )
            elif entry.is_dir():
                shutil.copytree(entry, folder / entry.name)
            else:
                shutil.copy2(entry, folder / entry.name)
    return done


def _plan(
    model: ModelWeights, adapters: Sequence[tuple[Adapter, float]]
) -> dict[Path, dict[str, list[WeightUpdate]]]:
    """By file and key, what is to be done to a weight."""
    plan: dict[Path, dict[str, list[WeightUpdate]]] = {}
    for adapter, strength in adapters:
        whole = model.naming == "original"
        fitted = swap_halves(adapter) if whole else split_fused(adapter)
        rows_of = _rows_in_wholes(adapter.table) if whole else {}
        for place, layer in fitted.layers.items():
            template, number = template_of(place.module)
            name, rows = rows_of.get(template, (place.module, None))
            for bias in _kinds(layer):
                at = model.keys.get(Weight(name.format(number), bias))
                if at is None:
                    what = "bias" if bias else "weight"
                    raise AdapterError(
                        f"the model has no {what} for {place.module}, which the adapter changes: "
                        "it is for another model.",
                        kind="other-model",
                        key=place.module,
                    )
                change = WeightUpdate(layer, strength, bias, rows)
                plan.setdefault(at[0], {}).setdefault(at[1], []).append(change)
    return plan


def _kinds(layer: Layer) -> list[bool]:
    """Whether a layer changes the weight (False), the bias (True), or both."""
    kinds = [] if set(layer.tensors) == {"diff_b"} else [False]
    return [*kinds, True] if "diff_b" in layer.tensors else kinds


def _rows_in_wholes(table: KeyTable) -> dict[str, tuple[str, tuple[int, int, int]]]:
    """For parts of fused projections: the whole, and from which share to which of how many."""
    found = {}
    for fused in table.fused:
        total = sum(share for _, share in fused.parts)
        start = 0
        for part, share in fused.parts:
            found[part] = (fused.whole, (start, start + share, total))
            start += share
    return found


def _rewrite(file: Path, out: Path, changes: Mapping[str, Sequence[WeightUpdate]]) -> None:
    with safe_open(file, "pt") as source:
        metadata = source.metadata()
        tensors = {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118
    for key, parts in changes.items():
        _check_wide(key, tensors[key])
        weight = tensors[key].float()
        for change in parts:
            weight = _changed(key, weight, change)
        tensors[key] = weight.to(tensors[key].dtype)  # once, however many adapters there are
    save_file(tensors, out, metadata=metadata)


def _check_wide(key: str, weight: Tensor) -> None:
    if weight.element_size() < 2:
        raise AdapterError(
            f"{key!r} is {str(weight.dtype).removeprefix('torch.')}: merging into a quantised "
            "weight would round the adapter away. Merge into the bfloat16 model and quantise that.",
            kind="dtype",
            key=key,
        )


def _changed(key: str, weight: Tensor, change: WeightUpdate) -> Tensor:
    """The weight in fp32, with one more change."""
    if change.rows is None:
        return _with_change(key, weight, change)
    start, end, total = (len(weight) * share // change.rows[2] for share in change.rows)
    assert total == len(weight)
    whole = weight.clone()
    whole[start:end] = _with_change(key, weight[start:end], change)
    return whole


def _with_change(key: str, weight: Tensor, change: WeightUpdate) -> Tensor:
    if change.bias:
        added = delta_bias(change.layer)
        assert added is not None, key
        bias: Tensor = weight + change.strength * added
        return bias
    shape = delta_shape(change.layer)
    if weight.numel() != torch.Size(shape).numel():
        sizes = ["x".join(map(str, one)) for one in (weight.shape, shape)]
        raise AdapterError(
            f"{key!r} is {sizes[0]} in the model and {sizes[1]} in the adapter: it is for a model "
            "of another size.",
            kind="other-model",
            key=key,
        )
    return merge_weight(change.layer, weight, change.strength)


def _modules(adapters: Sequence[tuple[Adapter, float]]) -> set[str]:
    return {place.module for adapter, _ in adapters for place in adapter.layers}


# ------------------------------------------------------------------------------------------
# The weights of a model on disk, by our names: one file, or a folder of them.


MODEL_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
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


def open_model(path: Path, table: KeyTable) -> ModelWeights:
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
    for prefix in MODEL_PREFIXES:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        for tail, bias in ((".weight", False), (".bias", True), ("", False)):
            if name.endswith(tail):
                module = index.to_diffusers(name.removesuffix(tail), naming, ".")
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
