"""Add adapters, convert them to LoRA, and extract a LoRA from two models, with truncated SVDs.

The sum of LoRAs is exact: their factors are concatenated along the rank. Everything else is
approximated by a truncated SVD. The loss that is returned with it is the norm of the error divided
by the norm of the exact weight change.
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
from gracetune.adapters.files.merge_into_model import ModelWeights, Weight, open_model
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from pathlib import Path

    from torch import Tensor

    from gracetune.adapters.files.keys import KeyTable


MAX_FULL_SVD = 1024
"""Largest size of a matrix's smaller dimension for which a full SVD is computed. Above it, a
randomized SVD is used, unless the rank is at least half of that dimension."""
OVERSAMPLING, POWER_ITERATIONS = 16, 3
"""Extra columns and number of power iterations of the randomized SVD (Halko, Martinsson and Tropp,
2011)."""


@dataclass(frozen=True)
class TruncationError:
    """Errors of low-rank approximations of weight changes, each divided by the norm of the change.

    The fields are part of the JSON output.
    """

    mean: float
    """Relative error of a low-rank approximation, averaged over all modules."""
    worst: float
    """Largest relative error of a low-rank approximation in any module."""
    worst_at: str
    """Name of the module whose low-rank approximation has the largest relative error."""


def combine_adapters(
    adapters: Sequence[tuple[Adapter, float]], rank: int | None, generator: torch.Generator
) -> tuple[Adapter, TruncationError | None]:
    """Return the sum of adapters, each multiplied by its strength, and the approximation error.

    Without `rank` the sum is exact: its rank is the sum of the adapters' ranks, and the error is
    None. With `rank`, the sum in each module is approximated by a LoRA of at most that rank.
    """
    first = adapters[0][0]
    for other, _ in adapters[1:]:
        if other.table.family != first.table.family:
            raise AdapterError(
                f"a {first.table.family} adapter and a {other.table.family} adapter cannot be "
                "combined. Give adapters for the same model.",
                kind="other-model",
            )
    gathered: dict[LayerPath, list[tuple[Layer, float]]] = {}
    for adapter, strength in _split_alike(adapters, rank):
        for path, layer in adapter.layers.items():
            gathered.setdefault(path, []).append((layer, strength))
    layers, losses = {}, {}
    for path, terms in gathered.items():
        _check_addable(path, terms)
        max_rank = None if is_bare_parameter(path.module, first.table) else rank
        layers[path], losses[path] = _add_layers(path, terms, max_rank, generator)
    metadata = {k: v for k, v in first.metadata.items() if not k.startswith("gracetune.run")}
    combined = replace(first, layers=layers, format=None, metadata=metadata)
    return combined, None if rank is None else summarize_loss(losses)


def convert_to_lora(
    adapter: Adapter, rank: int, generator: torch.Generator
) -> tuple[Adapter, TruncationError]:
    """Approximate every layer of an adapter by a LoRA of at most this rank.

    LoRAs whose rank is not larger, and changes of normalization weights and biases, stay as they
    are.
    """
    layers, losses = {}, {}
    for path, layer in adapter.layers.items():
        is_small = _is_plain_lora(layer) and layer.tensors["down"].shape[0] <= rank
        if is_small or is_bare_parameter(path.module, adapter.table) or not _is_matrix(layer):
            layers[path], losses[path] = layer, 0.0
        else:
            _refuse_dora(path, layer)
            layers[path], losses[path] = _add_layers(path, [(layer, 1.0)], rank, generator)
    return replace(adapter, layers=layers, format=None), summarize_loss(losses)


def factorize(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Layer, float]:
    """Approximate a weight change by a LoRA; return the LoRA and its relative error.

    The error is the norm of the difference, divided by the norm of `matrix`.
    """
    flat = matrix.float().flatten(1)
    rank = min(rank, *flat.shape)
    u, s, v = _truncated_svd(flat, rank, generator)
    kernel = matrix.shape[1:]
    root = s.sqrt()
    tensors = {
        "down": (root[:, None] * v).reshape(rank, *kernel),
        "up": (u * root).reshape(-1, rank, *[1] * (matrix.dim() - 2)),
    }
    # The error matrix is computed, because a difference of two norms would be lost in rounding.
    return Layer("lora", tensors), _relative_norm(flat - (u * s) @ v, flat)


def summarize_loss(losses: Mapping[LayerPath, float]) -> TruncationError:
    """Return the mean and the largest of the modules' relative approximation errors."""
    worst = max(losses, key=lambda path: losses[path])
    return TruncationError(sum(losses.values()) / len(losses), losses[worst], worst.module)


def _is_plain_lora(layer: Layer) -> bool:
    return layer.algorithm == "lora" and "mid" not in layer.tensors


def _changes_weight(layer: Layer) -> bool:
    """Return False if the layer changes the bias alone."""
    return layer.algorithm != "full" or "diff" in layer.tensors


def _is_matrix(layer: Layer) -> bool:
    """Return True if the layer changes a matrix; False for a vector (normalization) or a bias."""
    shape = delta_shape(layer)
    return len(shape) > 1 and shape[1] > 0


def _split_alike(
    adapters: Sequence[tuple[Adapter, float]], rank: int | None
) -> Sequence[tuple[Adapter, float]]:
    """Split a fused projection, such as qkv, if another of the adapters has its parts separately.

    A projection that is fused in all adapters stays fused, because splitting it may not be exact,
    and because one LoRA is enough for all parts.
    """
    used = {path for adapter, _ in adapters for path in adapter.layers}
    table = adapters[0][0].table
    to_split = {path for path in used if not used.isdisjoint(parts_of(path, table))}
    return [
        (split_fused(_expand_lokr(adapter, to_split, rank), to_split), strength)
        for adapter, strength in adapters
    ]


def _expand_lokr(adapter: Adapter, to_split: Set[LayerPath], rank: int | None) -> Adapter:
    """Replace each LoKr on a projection in `to_split` by its full matrix.

    A full matrix, unlike a LoKr, can be split at any row. Without `rank` nothing is replaced: only
    with it is the large matrix approximated by a small LoRA afterwards.
    """
    layers = dict(adapter.layers)
    for path in to_split & layers.keys():
        layer = layers[path]
        if rank is not None and layer.algorithm == "lokr":
            _refuse_dora(path, layer)
            bias = delta_bias(layer)
            extra = {} if bias is None else {"diff_b": bias}
            layers[path] = Layer("full", {"diff": delta(layer), **extra})
    return replace(adapter, layers=layers)


def _add_layers(
    path: LayerPath,
    terms: Sequence[tuple[Layer, float]],
    rank: int | None,
    generator: torch.Generator,
) -> tuple[Layer, float]:
    """Return the sum of one module's layers, each times its strength, and the relative error.

    With `rank`, the sum is approximated by a LoRA of at most that rank.
    """
    loss = 0.0
    changes = [(layer, strength) for layer, strength in terms if _changes_weight(layer)]
    if not changes:
        total = Layer("full", {})
    elif all(_is_plain_lora(layer) for layer, _ in changes):
        total = concatenate_ranks(changes)
        if rank is not None and total.tensors["down"].shape[0] > rank:
            total, loss = _truncate_lora(total, rank)
    elif all(layer.algorithm == "full" for layer, _ in changes):
        diff = torch.stack([s * layer.tensors["diff"].float() for layer, s in changes]).sum(0)
        total = Layer("full", {"diff": diff})
        if rank is not None and diff.dim() > 1:
            total, loss = factorize(diff, rank, generator)
    elif rank is None:
        kinds = sorted({layer.algorithm for layer, _ in changes})
        raise AdapterError(
            f"{path.module} is {' and '.join(kinds)}, but only LoRAs and full matrices add up "
            "exactly. Give --rank to approximate the sum by a LoRA.",
            kind="not-exact",
            key=path.module,
        )
    else:
        shape = delta_shape(changes[0][0])
        whole = torch.stack([strength * delta(layer, shape) for layer, strength in changes]).sum(0)
        total, loss = factorize(whole, rank, generator)
    biases = [(bias, s) for layer, s in terms if (bias := delta_bias(layer)) is not None]
    if biases:
        bias_sum = torch.stack([strength * bias for bias, strength in biases]).sum(0)
        total = replace(total, tensors={**total.tensors, "diff_b": bias_sum})
    return total, loss


def concatenate_ranks(terms: Sequence[tuple[Layer, float]]) -> Layer:
    """Add LoRAs exactly: sum of s_i B_i A_i = [s_1 B_1, s_2 B_2, ...] [A_1; A_2; ...]."""
    if len(terms) == 1 and terms[0][1] == 1.0:
        return terms[0][0]
    ups = [strength * scale_of(layer) * layer.tensors["up"].float() for layer, strength in terms]
    downs = [layer.tensors["down"].float() for layer, _ in terms]
    return Layer("lora", {"down": torch.cat(downs), "up": torch.cat(ups, 1)})


def _truncate_lora(layer: Layer, rank: int) -> tuple[Layer, float]:
    """Reduce the rank of a LoRA by SVD; return the result and its relative error.

    The SVD is exact, and cheap because it is computed from QR decompositions of the factors.
    """
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
    return Layer("lora", tensors), _relative_norm(s[rank:], s)


def _truncated_svd(
    flat: Tensor, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `rank` largest singular values of a matrix and their vectors, as (U, S, V^T)."""
    if min(flat.shape) <= max(MAX_FULL_SVD, 2 * rank):
        u, s, v = torch.linalg.svd(flat, full_matrices=False)
        return u[:, :rank], s[:rank], v[:rank]
    start = torch.randn(flat.shape[1], rank + OVERSAMPLING, generator=generator)
    basis, _ = torch.linalg.qr(flat @ start)
    for _ in range(POWER_ITERATIONS):
        basis, _ = torch.linalg.qr(flat.T @ basis)
        basis, _ = torch.linalg.qr(flat @ basis)
    u, s, v = torch.linalg.svd(basis.T @ flat, full_matrices=False)
    return basis @ u[:, :rank], s[:rank], v[:rank]


def _relative_norm(rest: Tensor, whole: Tensor) -> float:
    return float(rest.norm() / whole.norm()) if bool(whole.any()) else 0.0


def _check_addable(path: LayerPath, terms: Sequence[tuple[Layer, float]]) -> None:
    for layer, _ in terms:
        _refuse_dora(path, layer)
    weights = [delta_shape(layer) for layer, _ in terms if _changes_weight(layer)]
    biases = [tuple(b.shape) for layer, _ in terms if (b := delta_bias(layer)) is not None]
    for what, shapes in ((path.module, weights), (f"the bias of {path.module}", biases)):
        if len(set(map(math.prod, shapes))) > 1:
            named = " and ".join("x".join(map(str, shape)) for shape in shapes)
            raise AdapterError(
                f"{what} is {named} in the files: they are for models of different sizes. Give "
                "adapters for the same model.",
                kind="other-model",
                key=path.module,
            )


def _refuse_dora(path: LayerPath, layer: Layer) -> None:
    if layer.is_dora:
        raise AdapterError(
            f"{path.module} has magnitudes (DoRA), so its change depends on the model's weight. "
            "Merge it into the model instead: `gracetune adapter merge` with --into MODEL.",
            kind="not-exact",
            key=path.module,
        )


# Extraction from two models


@dataclass(frozen=True)
class Extraction:
    """A LoRA extracted from the difference of two models."""

    adapter: Adapter
    loss: TruncationError
    left_out: tuple[str, ...]
    """Keys of weights that differ between the models but are not in the adapter, because a LoRA
    cannot change them: normalization weights, biases and parameters outside of modules."""


def extract_lora(
    base: Path,
    tuned: Path,
    table: KeyTable,
    rank: int,
    generator: torch.Generator,
    keep_rest: bool,
) -> Extraction:
    """Approximate the difference of two models by a LoRA of the given rank.

    A LoRA cannot change normalization weights, biases and parameters outside of modules. With
    `keep_rest`, the adapter holds their differences as full tensors.
    """
    before, after = open_model(base, table), open_model(tuned, table)
    if before.naming != after.naming:
        raise AdapterError(
            f"{base} has {before.naming} names and {tuned} has {after.naming} names. Give both "
            "models in the same naming.",
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
        path = LayerPath(None, weight.module)
        if change.dim() > 1 and not weight.bias and not is_bare_parameter(weight.module, table):
            layers[path], losses[path] = factorize(change, rank, generator)
        else:
            rest.append(before.keys[weight][1])
            if keep_rest:
                layers[path] = _add_full_tensor(layers.get(path), weight.bias, change)
    if not losses:
        raise AdapterError(f"{base} and {tuned} have the same matrices: nothing to extract.")
    adapter = Adapter(table, layers)
    if before.naming == "original":
        adapter = swap_halves(adapter)
    return Extraction(adapter, summarize_loss(losses), () if keep_rest else tuple(rest))


def _check_same_weights(before: ModelWeights, after: ModelWeights) -> None:
    """Raise an error if one model lacks weights of the other, for example a shard."""
    unpaired = sorted(before.keys.keys() ^ after.keys.keys())
    if unpaired:
        first = {**before.keys, **after.keys}[unpaired[0]][1]
        raise AdapterError(
            f"{len(unpaired)} weights are in only one of the models, first {first!r}. Give both "
            "models completely: the folder, if the weights are in several files.",
            kind="other-model",
            key=first,
        )


def _add_full_tensor(layer: Layer | None, bias: bool, change: Tensor) -> Layer:
    """Add a change that is not a LoRA to a module's layer, or to a new layer if there is none.

    Such changes are those of biases and of normalization weights.
    """
    role = "diff_b" if bias else "diff"
    if layer is None:
        return Layer("full", {role: change})
    return replace(layer, tensors={**layer.tensors, role: change})


def _difference(before: ModelWeights, after: ModelWeights, weight: Weight) -> Tensor:
    tensors: list[Tensor] = []
    for model in (before, after):
        file, key = model.keys[weight]
        with safe_open(file, "pt") as source:
            tensors.append(source.get_tensor(key).float())
    if tensors[0].shape != tensors[1].shape:
        raise AdapterError(
            f"{before.keys[weight][1]!r} has another shape in the tuned model: they are different "
            "models.",
            kind="other-model",
            key=before.keys[weight][1],
        )
    return tensors[1] - tensors[0]
