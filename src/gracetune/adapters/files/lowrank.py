"""Adapters as products of thin matrices: added up exactly, or cut to a rank by SVD.

Every cut says what it lost: the norm of what is left out over the norm of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from gracetune.adapters.files.fused_projections import parts_of, split_fused, swap_halves
from gracetune.adapters.files.keys import LayerPath, is_bare_parameter
from gracetune.adapters.files.layers import Adapter, Layer, delta, delta_bias, delta_shape, scale_of
from gracetune.adapters.files.merge import ModelWeights, Weight, open_model
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable


MAX_FULL_SVD = 1024
"""The smaller side up to which a whole SVD is quick; beyond it, a random range finder."""
OVERSAMPLING, POWER_ITERATIONS = 16, 3
"""Halko, Martinsson and Tropp 2011: columns beside the rank, and passes that sharpen the range."""


@dataclass(frozen=True)
class TruncationLoss:
    """What an approximation lost."""

    mean: float
    worst: float
    worst_at: str


def combine_adapters(
    adapters: Sequence[tuple[Adapter, float]], rank: int | None, generator: torch.Generator
) -> tuple[Adapter, TruncationLoss | None]:
    """Several adapters, each with its strength, as one: exactly by rank, or cut to `rank`."""
    first = adapters[0][0]
    for other, _ in adapters[1:]:
        if other.table.family != first.table.family:
            raise AdapterError(
                f"a {first.table.family} adapter and a {other.table.family} adapter cannot be one. "
                "Give adapters of one model.",
                kind="other-model",
            )
    gathered: dict[LayerPath, list[tuple[Layer, float]]] = {}
    for adapter, strength in _cut_alike(adapters, rank):
        for place, layer in adapter.layers.items():
            gathered.setdefault(place, []).append((layer, strength))
    layers, losses = {}, {}
    for place, parts in gathered.items():
        _check_alike(place, parts)
        limit = None if is_bare_parameter(place.module, first.table) else rank
        layers[place], losses[place] = _sum(place, parts, limit, generator)
    metadata = {k: v for k, v in first.metadata.items() if not k.startswith("gracetune.run")}
    made = replace(first, layers=layers, format=None, metadata=metadata)
    return made, None if rank is None else summarize_loss(losses)


def convert_to_lora(
    adapter: Adapter, rank: int, generator: torch.Generator
) -> tuple[Adapter, TruncationLoss]:
    """Every layer as a LoRA of at most this rank; those that are so already stay as they are."""
    layers, losses = {}, {}
    for place, layer in adapter.layers.items():
        thin = layer.algorithm == "lora" and "mid" not in layer.tensors
        small = thin and layer.tensors["down"].shape[0] <= rank
        if small or is_bare_parameter(place.module, adapter.table) or not _has_rank(layer):
            layers[place], losses[place] = layer, 0.0
        else:
            _check_plain(place, layer)
            layers[place], losses[place] = _sum(place, [(layer, 1.0)], rank, generator)
    return replace(adapter, layers=layers, format=None), summarize_loss(losses)


def factorize(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Layer, float]:
    """The best LoRA of a rank for a change of any shape, and the share of it that is lost."""
    flat = matrix.float().flatten(1)
    rank = min(rank, *flat.shape)
    u, s, v = _leading(flat, rank, generator)
    kernel = matrix.shape[1:]
    root = s.sqrt()
    tensors = {
        "down": (root[:, None] * v).reshape(rank, *kernel),
        "up": (u * root).reshape(-1, rank, *[1] * (matrix.dim() - 2)),
    }
    # The rest is computed, not the norms subtracted: those differ by less than they round.
    return Layer("lora", tensors), _share(flat - (u * s) @ v, flat)


def summarize_loss(losses: Mapping[LayerPath, float]) -> TruncationLoss:
    """Losses of all modules in one."""
    worst = max(losses, key=lambda place: losses[place])
    return TruncationLoss(sum(losses.values()) / len(losses), losses[worst], worst.module)


def _has_rank(layer: Layer) -> bool:
    """A norm's or a bias' change has none."""
    shape = delta_shape(layer)
    return len(shape) > 1 and shape[1] > 0


def _cut_alike(
    adapters: Sequence[tuple[Adapter, float]], rank: int | None
) -> Sequence[tuple[Adapter, float]]:
    """In parts what one has as a fused projection and another has in parts.

    Other wholes stay: their rank is cut together, and any algorithm adds up.
    """
    used = {place for adapter, _ in adapters for place in adapter.layers}
    table = adapters[0][0].table
    cut = {place for place in used if not used.isdisjoint(parts_of(place, table))}
    return [
        (split_fused(_by_rows(adapter, cut, rank), cut), strength) for adapter, strength in adapters
    ]


def _by_rows(adapter: Adapter, cut: Set[LayerPath], rank: int | None) -> Adapter:
    """With a rank nothing needs to stay what it is: a LoKr that is to be cut becomes its matrix."""
    layers = dict(adapter.layers)
    for place in cut & layers.keys():
        layer = layers[place]
        if rank is not None and layer.algorithm == "lokr":
            _check_plain(place, layer)
            bias = delta_bias(layer)
            beside = {} if bias is None else {"diff_b": bias}
            layers[place] = Layer("full", {"diff": delta(layer), **beside})
    return replace(adapter, layers=layers)


def _sum(
    place: LayerPath,
    parts: Sequence[tuple[Layer, float]],
    rank: int | None,
    generator: torch.Generator,
) -> tuple[Layer, float]:
    thin = all(layer.algorithm == "lora" and "mid" not in layer.tensors for layer, _ in parts)
    lost = 0.0
    if thin:
        made = _concatenated(parts)
        if rank is not None and made.tensors["down"].shape[0] > rank:
            made, lost = _shrunk(made, rank)
    elif all(layer.algorithm == "full" for layer, _ in parts):
        made = _summed(parts)
        if rank is not None and made.tensors.get("diff", torch.empty(0)).dim() > 1:
            made, lost = factorize(made.tensors["diff"], rank, generator)
    elif rank is None:
        kinds = sorted({layer.algorithm for layer, _ in parts})
        raise AdapterError(
            f"{place.module} is {' and '.join(kinds)}: only LoRAs add up exactly, and full "
            "matrices. Give --rank to approximate the sum by a LoRA.",
            kind="not-exact",
            key=place.module,
        )
    else:
        shape = delta_shape(parts[0][0])
        whole = torch.stack([strength * delta(layer, shape) for layer, strength in parts]).sum(0)
        made, lost = factorize(whole, rank, generator)
    biases = [(bias, s) for layer, s in parts if (bias := delta_bias(layer)) is not None]
    if biases:
        total = torch.stack([strength * bias for bias, strength in biases]).sum(0)
        made = replace(made, tensors={**made.tensors, "diff_b": total})
    return made, lost


def _concatenated(parts: Sequence[tuple[Layer, float]]) -> Layer:
    """Ranks beside each other: sum of s_i B_i A_i = [s_1 B_1, s_2 B_2, ...] [A_1; A_2; ...]."""
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    ups = [strength * scale_of(layer) * layer.tensors["up"].float() for layer, strength in parts]
    downs = [layer.tensors["down"].float() for layer, _ in parts]
    return Layer("lora", {"down": torch.cat(downs), "up": torch.cat(ups, 1)})


def _summed(parts: Sequence[tuple[Layer, float]]) -> Layer:
    diffs = [s * layer.tensors["diff"].float() for layer, s in parts if "diff" in layer.tensors]
    return Layer("full", {"diff": torch.stack(diffs).sum(0)} if diffs else {})


def _shrunk(layer: Layer, rank: int) -> tuple[Layer, float]:
    """SVD of a product by its factors: exact, and as cheap as they are thin."""
    up, down = layer.tensors["up"], layer.tensors["down"]
    q_up, r_up = torch.linalg.qr(up.float().flatten(1) * scale_of(layer))
    q_down, r_down = torch.linalg.qr(down.float().flatten(1).T)
    u, s, v = torch.linalg.svd(r_up @ r_down.T)
    rank = min(rank, len(s))
    root = s[:rank].sqrt()
    tensors = {
        "down": (root[:, None] * (v[:rank] @ q_down.T)).reshape(rank, *down.shape[1:]),
        "up": ((q_up @ u[:, :rank]) * root).reshape(-1, rank, *up.shape[2:]),
    }
    return Layer("lora", tensors), _share(s[rank:], s)


def _leading(flat: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The leading singular triples of a matrix."""
    if min(flat.shape) <= max(MAX_FULL_SVD, 2 * rank):
        u, s, v = torch.linalg.svd(flat, full_matrices=False)
        return u[:, :rank], s[:rank], v[:rank]
    guess = torch.randn(flat.shape[1], rank + OVERSAMPLING, generator=generator)
    basis, _ = torch.linalg.qr(flat @ guess)
    for _ in range(POWER_ITERATIONS):
        basis, _ = torch.linalg.qr(flat.T @ basis)
        basis, _ = torch.linalg.qr(flat @ basis)
    u, s, v = torch.linalg.svd(basis.T @ flat, full_matrices=False)
    return basis @ u[:, :rank], s[:rank], v[:rank]


def _share(rest: Tensor, whole: Tensor) -> float:
    return float(rest.norm() / whole.norm()) if bool(whole.any()) else 0.0


def _check_alike(place: LayerPath, parts: Sequence[tuple[Layer, float]]) -> None:
    for layer, _ in parts:
        _check_plain(place, layer)
    shapes = {math.prod(delta_shape(layer)) for layer, _ in parts}
    if len(shapes) > 1:
        sizes = " and ".join("x".join(map(str, delta_shape(layer))) for layer, _ in parts)
        raise AdapterError(
            f"{place.module} is {sizes} in the two files: they are for models of another size.",
            kind="other-model",
            key=place.module,
        )


def _check_plain(place: LayerPath, layer: Layer) -> None:
    if layer.is_dora:
        raise AdapterError(
            f"{place.module} has magnitudes (DoRA), whose change depends on the weight below. "
            "Merge it into the model instead: `gracetune adapter merge` with --into MODEL.",
            kind="not-exact",
            key=place.module,
        )


# ------------------------------------------------------------------------------------------
# An adapter from two models: what tuning did to each matrix, as a LoRA of some rank.


@dataclass(frozen=True)
class Extraction:
    """What an extraction found."""

    adapter: Adapter
    loss: TruncationLoss
    left_out: tuple[str, ...]
    """Weights that differ too and are not in the adapter: norms, biases, bare parameters."""


def extract(
    base: Path,
    tuned: Path,
    table: KeyTable,
    rank: int,
    generator: torch.Generator,
    keep_rest: bool,
) -> Extraction:
    """The LoRA of a rank that comes nearest to what tuning did to each matrix."""
    before, after = open_model(base, table), open_model(tuned, table)
    if before.naming != after.naming:
        raise AdapterError(
            f"{base} is in {before.naming} names and {tuned} in {after.naming} names. Give both in "
            "one naming.",
            kind="other-model",
        )
    _check_same_weights(before, after)
    layers: dict[LayerPath, Layer] = {}
    losses: dict[LayerPath, float] = {}
    rest = []
    for weight in sorted(before.keys):
        change = _difference(before, after, weight)
        if not bool(change.any()):
            continue
        place = LayerPath(None, weight.module)
        if change.dim() > 1 and not weight.bias and not is_bare_parameter(weight.module, table):
            layers[place], losses[place] = factorize(change, rank, generator)
        else:
            rest.append(before.keys[weight][1])
            if keep_rest:
                layers[place] = _beside(layers.get(place), weight.bias, change)
    if not losses:
        raise AdapterError(f"{base} and {tuned} have the same matrices: nothing to extract.")
    adapter = Adapter(table, layers)
    if before.naming == "original":
        adapter = swap_halves(adapter)
    return Extraction(adapter, summarize_loss(losses), () if keep_rest else tuple(rest))


def _check_same_weights(before: ModelWeights, after: ModelWeights) -> None:
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
