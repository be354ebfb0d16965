"""Merge adapters into the weights of a model on disk.

A model is a safetensors file, a folder of safetensors files, or the folder of a diffusers pipeline.
Its keys may be the original checkpoint's or diffusers'. Weights are read and written one file at a
time.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from gracetune.adapters.files.fused_projections import split_fused, swap_halves
from gracetune.adapters.files.io import save_tensors
from gracetune.adapters.files.keys import KeyIndex, template_of
from gracetune.adapters.files.layers import delta_bias, delta_shape, merge_weight
from gracetune.atomic_files import atomic_file, atomic_folder, remove_stale_staging
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
"""Subfolder of a diffusers pipeline that holds the high-noise and the low-noise transformer; None
stands for a model with a single transformer."""
MODEL_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
"""Prefixes that the keys of a model file may have before the weight's name."""


@dataclass(frozen=True)
class MergeReport:
    """The result of merging adapters into a model. The fields are part of the JSON output."""

    changed: int
    """Number of modules that were changed."""
    files: tuple[str, ...]
    """Names of the written files that hold the model's weights."""


def merge_into(
    path: Path, out: Path, adapters: Sequence[tuple[Adapter, float]], table: KeyTable
) -> MergeReport:
    """Write a copy of a transformer with adapters merged into it, each times its strength."""
    model = open_model(path, table)
    updates = _plan_updates(model, adapters)
    changed = len({layer.module for adapter, _ in adapters for layer in adapter.layers})
    remove_stale_staging(out.parent, out.name)  # of a killed merge: a copy of a whole model
    if not path.is_dir():
        with atomic_file(out) as staging:
            _rewrite_file(path, staging, updates.get(path, {}))
        return MergeReport(changed, (out.name,))
    with atomic_folder(out) as folder:
        for file in sorted(path.iterdir()):
            if file in model.files:
                _rewrite_file(file, folder / file.name, updates.get(file, {}))
            elif file.is_file():
                shutil.copy2(file, folder / file.name)
    return MergeReport(changed, tuple(file.name for file in model.files))


def merge_into_pipeline(
    path: Path,
    out: Path,
    by_stage: Mapping[Stage | None, Sequence[tuple[Adapter, float]]],
    table: KeyTable,
) -> dict[str, MergeReport]:
    """Write a copy of a pipeline's folder with adapters merged into its transformers.

    `by_stage` has the adapters and strengths for the high-noise (`high`) and low-noise (`low`)
    transformer, or for None if there is a single transformer.
    """
    is_unet = table.component == "unet"
    targets = {
        "unet" if is_unet else SUBFOLDERS[stage]: adapters for stage, adapters in by_stage.items()
    }
    for name in targets:
        if not (path / name).is_dir():
            raise AdapterError(
                f"{path} has no {name}/, which would be the expert that the adapter is for: the "
                "model has a single transformer. Give --stage high to merge the adapter into it.",
                kind="other-model",
            )
    reports = {}
    remove_stale_staging(out.parent, out.name)
    with atomic_folder(out) as folder:
        for entry in sorted(path.iterdir()):
            copy = folder / entry.name
            if entry.name in targets:
                reports[entry.name] = merge_into(entry, copy, targets[entry.name], table)
            elif entry.is_dir():
                shutil.copytree(entry, copy)
            else:
                shutil.copy2(entry, copy)
    return reports


def holds_transformers(path: Path) -> bool:
    """Return True for a folder with transformers in subfolders, such as a diffusers pipeline."""
    return any((path / name).is_dir() for name in (*SUBFOLDERS.values(), "unet"))


class WeightUpdate(NamedTuple):
    """The change that an adapter layer makes to a model's weight, or to some rows of the weight."""

    layer: Layer
    strength: float
    bias: bool
    rows: tuple[int, int, int] | None
    """(start, end, total): the weight's rows are divided into `total` equal parts, and parts start
    to end - 1 are changed. None for all rows."""


def _plan_updates(
    model: ModelWeights, adapters: Sequence[tuple[Adapter, float]]
) -> dict[Path, dict[str, list[WeightUpdate]]]:
    """Return the updates that the adapters make to each weight of a model, by file and key."""
    updates: dict[Path, dict[str, list[WeightUpdate]]] = {}
    for adapter, strength in adapters:
        is_original = model.naming == "original"
        fitted = swap_halves(adapter) if is_original else split_fused(adapter)
        fused_rows = _rows_in_fused(adapter.table) if is_original else {}
        for path, layer in fitted.layers.items():
            template, number = template_of(path.module)
            name, rows = fused_rows.get(template, (path.module, None))
            for bias in _changes_bias(layer):
                location = model.keys.get(Weight(name.format(number), bias))
                if location is None:
                    what = "bias" if bias else "weight"
                    raise AdapterError(
                        f"the model has no {what} for {path.module}, which the adapter changes. "
                        "The adapter is for another model.",
                        kind="other-model",
                        key=path.module,
                    )
                file, key = location
                update = WeightUpdate(layer, strength, bias, rows)
                updates.setdefault(file, {}).setdefault(key, []).append(update)
    return updates


def _changes_bias(layer: Layer) -> list[bool]:
    """Return [False] if a layer changes the weight, [True] for the bias, [False, True] for both."""
    kinds = [] if set(layer.tensors) == {"diff_b"} else [False]
    return [*kinds, True] if "diff_b" in layer.tensors else kinds


def _rows_in_fused(table: KeyTable) -> dict[str, tuple[str, tuple[int, int, int]]]:
    """Return, for each part of a fused projection, such as q of qkv, the projection and the rows.

    The rows of the part are (start, end, total), in units of the projection's rows / total.
    """
    found = {}
    for fused in table.fused:
        total = sum(share for _, share in fused.parts)
        start = 0
        for part, share in fused.parts:
            found[part] = (fused.whole, (start, start + share, total))
            start += share
    return found


def _rewrite_file(file: Path, out: Path, updates: Mapping[str, Sequence[WeightUpdate]]) -> None:
    with safe_open(file, "pt") as source:
        metadata = source.metadata()
        tensors = {key: source.get_tensor(key) for key in source.keys()}  # noqa: SIM118
    for key, weight_updates in updates.items():
        _refuse_quantized(key, tensors[key])
        weight = tensors[key].float()
        for update in weight_updates:
            weight = _update_rows(key, weight, update)
        tensors[key] = weight.to(tensors[key].dtype)  # rounded once, after all adapters
    save_tensors(tensors, out, metadata)


def _refuse_quantized(key: str, weight: Tensor) -> None:
    if weight.element_size() < 2:
        raise AdapterError(
            f"{key!r} is {str(weight.dtype).removeprefix('torch.')}: merging into a quantized "
            "weight would round the adapter away. Merge into the bfloat16 model, then quantize it.",
            kind="dtype",
            key=key,
        )


def _update_rows(key: str, weight: Tensor, update: WeightUpdate) -> Tensor:
    """Return a copy of a float32 weight with one update applied."""
    if update.rows is None:
        return _apply_update(key, weight, update)
    start, end, total = (len(weight) * share // update.rows[2] for share in update.rows)
    assert total == len(weight)
    whole = weight.clone()
    whole[start:end] = _apply_update(key, weight[start:end], update)
    return whole


def _apply_update(key: str, weight: Tensor, update: WeightUpdate) -> Tensor:
    if update.bias:
        change = delta_bias(update.layer)
        assert change is not None, key
        bias: Tensor = weight + update.strength * change
        return bias
    shape = delta_shape(update.layer)
    if weight.numel() != torch.Size(shape).numel():
        shapes = ["x".join(map(str, one)) for one in (weight.shape, shape)]
        raise AdapterError(
            f"{key!r} is {shapes[0]} in the model and {shapes[1]} in the adapter, which is for a "
            "model of another size. Merge it into that model, or name another adapter.",
            kind="other-model",
            key=key,
        )
    return merge_weight(update.layer, weight, update.strength)


# Finding the weights of a model


class Weight(NamedTuple):
    """Identifier of a module's weight, or of its bias, by diffusers' name of the module."""

    module: str
    bias: bool


@dataclass(frozen=True)
class ModelWeights:
    """Locations of a transformer's weights on disk."""

    files: tuple[Path, ...]
    naming: Naming
    keys: Mapping[Weight, tuple[Path, str]]
    """File of each weight, and key of the weight in the file."""


def open_model(path: Path, table: KeyTable) -> ModelWeights:
    """Find the file and the key of every weight of a model whose name the family's table has.

    No weights are read.
    """
    files = tuple(sorted(path.glob("*.safetensors"))) if path.is_dir() else (path,)
    if not files:
        raise AdapterError(
            f"{path} has no .safetensors file. Give the folder or the file of a transformer.",
            kind="missing",
        )
    index = KeyIndex(table)
    found: dict[Naming, dict[Weight, list[tuple[Path, str]]]] = {"original": {}, "diffusers": {}}
    for file in files:
        for key in _read_keys(file):
            for naming, weights in found.items():
                weight = _parse_weight(key, naming, index)
                if weight is not None:
                    weights.setdefault(weight, []).append((file, key))
    naming = max(found, key=lambda name: len(found[name]))
    if not found[naming]:
        raise AdapterError(
            f"{path} has none of the weights of a {table.family} model: it is another model.",
            kind="other-model",
        )
    locations = {weight: _single(places) for weight, places in found[naming].items()}
    return ModelWeights(files, naming, locations)


def _single(places: Sequence[tuple[Path, str]]) -> tuple[Path, str]:
    """Return the only location of a weight; raise an error if there are several.

    With several copies of a weight in the files, a merge would change only one.
    """
    if len(places) > 1:
        (file, key), (other_file, other_key) = places[:2]
        raise AdapterError(
            f"{key!r} in {file.name} and {other_key!r} in {other_file.name} are the same weight. "
            "Give one of the files, or move the wrong one out of the folder.",
            kind="duplicate",
            key=other_key,
        )
    return places[0]


def _parse_weight(key: str, naming: Naming, index: KeyIndex) -> Weight | None:
    """Return the weight that a model file's key stands for in a naming of modules, or None."""
    for prefix in MODEL_PREFIXES:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        for suffix, bias in ((".weight", False), (".bias", True), ("", False)):
            if name.endswith(suffix):
                module = index.to_diffusers(name.removesuffix(suffix), naming, ".")
                if module is not None:
                    return Weight(module, bias)
    return None


def _read_keys(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as source:
            return list(source.keys())
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{file} cannot be read as safetensors: {error}. Copy or download it again.",
            kind="truncated",
        ) from error
