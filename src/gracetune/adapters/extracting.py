"""An adapter from two models: what tuning did to each matrix, as a LoRA of some rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safetensors import safe_open

from gracetune.adapters.layers import Adapter, Layer
from gracetune.adapters.lowrank import Cut, factor, summary
from gracetune.adapters.names import LayerPath, is_bare
from gracetune.adapters.rows import swap_halves
from gracetune.adapters.weights import ModelWeights, Weight, open_model
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from gracetune.adapters.tables.types import NameTable


@dataclass(frozen=True)
class Extracted:
    """What an extraction found."""

    adapter: Adapter
    cut: Cut
    rest: tuple[str, ...]
    """Weights that differ too and are not in the adapter: norms, biases, bare parameters."""


def extract(
    base: Path,
    tuned: Path,
    table: NameTable,
    rank: int,
    generator: torch.Generator,
    keep_rest: bool,
) -> Extracted:
    """The LoRA of a rank that comes nearest to what tuning did to each matrix."""
    before, after = open_model(base, table), open_model(tuned, table)
    if before.naming != after.naming:
        raise AdapterError(
            f"{base} is in {before.naming} names and {tuned} in {after.naming} names. Give both in "
            "one naming.",
            kind="other-model",
        )
    _demand_same_weights(before, after)
    layers: dict[LayerPath, Layer] = {}
    losses: dict[LayerPath, float] = {}
    rest = []
    for weight in sorted(before.keys):
        change = _difference(before, after, weight)
        if not bool(change.any()):
            continue
        place = LayerPath(None, weight.module)
        if change.dim() > 1 and not weight.bias and not is_bare(weight.module, table):
            layers[place], losses[place] = factor(change, rank, generator)
        else:
            rest.append(before.keys[weight][1])
            if keep_rest:
                layers[place] = _beside(layers.get(place), weight.bias, change)
    if not losses:
        raise AdapterError(f"{base} and {tuned} have the same matrices: nothing to extract.")
    adapter = Adapter(table, layers)
    if before.naming == "original":
        adapter = swap_halves(adapter)
    return Extracted(adapter, summary(losses), () if keep_rest else tuple(rest))


def _demand_same_weights(before: ModelWeights, after: ModelWeights) -> None:
    """What one of them lacks, as a single shard of a folder would, cannot be compared."""
    odd = sorted(before.keys.keys() ^ after.keys.keys())
    if odd:
        first = {**before.keys, **after.keys}[odd[0]][1]
        raise AdapterError(
            f"{len(odd)} weights are in one model and not in the other, {first!r} first. Name the "
            "whole of both: the folder, where weights are in several files.",
            kind="other-model",
            key=first,
        )


def _beside(layer: Layer | None, bias: bool, change: Tensor) -> Layer:
    """A change without a rank, alone or beside the LoRA of its module (weights come first)."""
    role = "diff_b" if bias else "diff"
    if layer is None:
        return Layer("full", {role: change})
    return replace(layer, tensors={**layer.tensors, role: change})


def _difference(before: ModelWeights, after: ModelWeights, weight: Weight) -> Tensor:
    pair: list[Tensor] = []
    for model in (before, after):
        file, key = model.keys[weight]
        with safe_open(file, "pt") as source:
            pair.append(source.get_tensor(key).float())
    if pair[0].shape != pair[1].shape:
        raise AdapterError(
            f"{before.keys[weight][1]!r} has another shape in the tuned model: two models.",
            kind="other-model",
            key=before.keys[weight][1],
        )
    return pair[1] - pair[0]
