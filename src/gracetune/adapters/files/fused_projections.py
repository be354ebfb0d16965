"""Layers taken apart and put together by rows of dW: fused projections, and swapped halves.

A LoRA of q, k and v becomes one of their fused projection by standing on a diagonal, or by sharing
`down` where all three have the same; taken apart again it is what it was, bit for bit. LoHa and
full matrices go by rows as they are. A LoKr goes only where its blocks end at the cuts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.files.keys import LayerPath, template_of
from gracetune.adapters.files.layers import (
    Adapter,
    Layer,
    is_dora_per_row,
    lokr_sizes,
    out_features,
    scale_of,
)
from gracetune.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from gracetune.adapters.files.keys import FusedProjection, KeyTable

Span = tuple[int, int]


def split_fused(adapter: Adapter, only: Collection[LayerPath] | None = None) -> Adapter:
    """Every fused projection, or these alone, in its parts, as diffusers has them."""
    layers: dict[LayerPath, Layer] = {}
    for place, layer in adapter.layers.items():
        parts = parts_of(place, adapter.table)
        if not parts or (only is not None and place not in only):
            layers[place] = layer
            continue
        spans = _spans(out_features(layer), [*parts.values()])
        for part, one in zip(parts, _split(place.module, layer, spans), strict=True):
            if one is not None:
                if part in adapter.layers:
                    raise _twice(place.module, part.module)
                layers[part] = one
    return replace(adapter, layers=layers)


def parts_of(place: LayerPath, table: KeyTable) -> dict[LayerPath, int]:
    """What a fused projection consists of, with the share of each; nothing for other modules."""
    template, number = template_of(place.module)
    fused = next((one for one in table.fused if one.whole == template), None)
    if fused is None:
        return {}
    return {LayerPath(place.stage, part.format(number)): share for part, share in fused.parts}


def join_fused(adapter: Adapter) -> Adapter:
    """Every part in its fused projection, as the original has it."""
    whole_of = {part: one for one in adapter.table.fused for part, _ in one.parts}
    layers: dict[LayerPath, Layer] = {}
    gathered: dict[LayerPath, dict[str, Layer]] = {}
    for place, layer in adapter.layers.items():
        template, number = template_of(place.module)
        if template in whole_of:
            whole = LayerPath(place.stage, whole_of[template].whole.format(number))
            if whole in adapter.layers:
                raise _twice(whole.module, place.module)
            gathered.setdefault(whole, {})[template] = layer
            layers.setdefault(whole, layer)  # keeps the order of the file
        else:
            layers[place] = layer
    for whole, parts in gathered.items():
        fused = whole_of[next(iter(parts))]
        layers[whole] = _join(whole.module, fused, parts)
    return replace(adapter, layers=layers)


def swap_halves(adapter: Adapter) -> Adapter:
    """Scale and shift in the other order, where the two namings differ in it; its own inverse."""
    layers = dict(adapter.layers)
    for place, layer in adapter.layers.items():
        if place.module in adapter.table.swapped_halves:
            half = out_features(layer) // 2
            layers[place] = select_rows(place.module, layer, [(half, 2 * half), (0, half)])
    return replace(adapter, layers=layers)


def select_rows(module: str, layer: Layer, spans: Sequence[Span]) -> Layer:
    """The layer of these rows of dW, one span after the other."""
    tensors = dict(layer.tensors)
    rows, per_row = out_features(layer), 1
    if layer.algorithm == "lora":
        by_rows = {"up": 0}
    elif layer.algorithm == "loha":
        axis = 1 if "hada_t1" in tensors else 0
        by_rows = {"hada_w1_a": axis, "hada_w2_a": axis}
    elif layer.algorithm == "lokr":
        by_rows, per_row = _lokr_rows(module, layer, spans)
    else:
        by_rows = {"diff": 0} if "diff" in tensors else {}
    for role, axis in by_rows.items():
        tensors[role] = _cut(tensors[role], spans, axis, per_row)
    if "diff_b" in tensors:
        tensors["diff_b"] = _cut(tensors["diff_b"], spans, 0, 1)
    if layer.is_dora:
        if not is_dora_per_row(layer) and spans != [(0, rows)]:
            raise _refusal(module, "its magnitudes (DoRA) go by columns, over all the rows")
        tensors["dora"] = _cut(tensors["dora"], spans, 0, 1)
    return replace(layer, tensors=tensors)


def _split(module: str, layer: Layer, spans: Sequence[Span]) -> list[Layer | None]:
    """The parts of a fused layer; None for a part that was never there."""
    blocks = _diagonal(layer, spans)
    if blocks is not None:
        return blocks
    return [select_rows(module, layer, [span]) for span in spans]


def _diagonal(layer: Layer, spans: Sequence[Span]) -> list[Layer | None] | None:
    """Undo `_on_diagonal`: one block of the rank for each part, nothing off the diagonal."""
    if set(layer.tensors) != {"down", "up"}:
        return None
    up, down = layer.tensors["up"], layer.tensors["down"]
    rank, odd = divmod(down.shape[0], len(spans))
    if odd or rank == 0:
        return None
    parts: list[Layer | None] = []
    for i, (start, end) in enumerate(spans):
        columns = slice(i * rank, (i + 1) * rank)
        rows = up[start:end].flatten(1)
        if rows[:, : columns.start].any() or rows[:, columns.stop :].any():
            return None
        parts.append(_trimmed(layer, up[start:end, columns], down[columns]))
    if all(part is None for part in parts):
        return None
    return parts


def _trimmed(layer: Layer, up: Tensor, down: Tensor) -> Layer | None:
    """A block without the padding that made all of one rank."""
    used = up.flatten(1).any(0) | down.flatten(1).any(1)
    if not used.any():
        return None
    rank = int(used.nonzero().max()) + 1
    scale = scale_of(layer)
    alpha = None if layer.alpha is None else scale * rank
    return Layer("lora", {"down": down[:rank].clone(), "up": up[:, :rank].clone()}, alpha)


def _join(module: str, fused: FusedProjection, parts: Mapping[str, Layer]) -> Layer:
    present = list(parts.values())
    if any(layer.is_dora or "diff_b" in layer.tensors for layer in present):
        if len(parts) < len(fused.parts):
            raise _refusal(module, "its parts have magnitudes (DoRA) or biases and one is missing")
        if not all(layer.is_dora == present[0].is_dora for layer in present):
            raise _refusal(module, "only some of its parts have magnitudes (DoRA)")
    whole = len(parts) == len(fused.parts)
    if whole:
        ordered = [parts[part] for part, _ in fused.parts]
        stacked = _stacked(module, ordered)
        if stacked is not None:
            return stacked
    if {layer.algorithm for layer in present} != {"lora"} or any(
        "mid" in layer.tensors or layer.is_dora or "diff_b" in layer.tensors for layer in present
    ):
        raise _refusal(module, "its parts share no factor that the whole could keep")
    return _on_diagonal(fused, parts)


def _stacked(module: str, parts: Sequence[Layer]) -> Layer | None:
    """One layer whose rows are theirs, where all of them share everything but rows."""
    first = parts[0]
    if any(set(one.tensors) != set(first.tensors) or one.alpha != first.alpha for one in parts):
        return None
    rows = _row_axes(module, first)
    shared = set(first.tensors) - set(rows)
    if not all(
        torch.equal(one.tensors[role], first.tensors[role]) for one in parts for role in shared
    ):
        return None
    tensors = {
        role: torch.cat([one.tensors[role] for one in parts], rows[role]) if role in rows else t
        for role, t in first.tensors.items()
    }
    return replace(first, tensors=tensors)


def _row_axes(module: str, layer: Layer) -> dict[str, int]:
    """Which tensors go by rows of dW, and along which axis."""
    axes = {"diff_b": 0} if "diff_b" in layer.tensors else {}
    if layer.is_dora:
        if not is_dora_per_row(layer):
            raise _refusal(module, "its magnitudes (DoRA) go by columns, over all the rows")
        axes["dora"] = 0
    if layer.algorithm == "lora":
        return axes | {"up": 0}
    if layer.algorithm == "loha":
        axis = 1 if "hada_t1" in layer.tensors else 0
        return axes | {"hada_w1_a": axis, "hada_w2_a": axis}
    if layer.algorithm == "lokr":
        return axes | {"lokr_w1" if "lokr_w1" in layer.tensors else "lokr_w1_a": 0}
    return axes | ({"diff": 0} if "diff" in layer.tensors else {})


def _on_diagonal(fused: FusedProjection, parts: Mapping[str, Layer]) -> Layer:
    """LoRAs beside each other: block i of the rank works on the rows of part i alone."""
    first = next(iter(parts.values()))
    share_of = dict(fused.parts)
    unit = next(out_features(layer) // share_of[part] for part, layer in parts.items())
    ranks = {part: layer.tensors["down"].shape[0] for part, layer in parts.items()}
    rank = max(ranks.values())
    scales = {scale_of(layer) for layer in parts.values()}
    total = rank * len(fused.parts)
    dtype = _common_dtype([layer.tensors["up"] for layer in parts.values()], scales)
    spans = _spans(unit * sum(share_of.values()), list(share_of.values()))
    up = torch.zeros(spans[-1][1], total, dtype=dtype)
    down = torch.zeros(total, *first.tensors["down"].shape[1:], dtype=first.tensors["down"].dtype)
    for i, ((part, _), (start, end)) in enumerate(zip(fused.parts, spans, strict=True)):
        if part in parts:
            layer, columns = parts[part], slice(i * rank, i * rank + ranks[part])
            factor = 1.0 if len(scales) == 1 else scale_of(layer)
            up[start:end, columns] = (layer.tensors["up"].flatten(1).to(dtype)) * factor
            down[columns] = layer.tensors["down"]
    common = scales.pop() if len(scales) == 1 else 1.0
    kernel = [1] * (first.tensors["up"].dim() - 2)
    alpha = None if common == 1.0 and first.alpha is None else common * total
    return Layer("lora", {"down": down, "up": up.reshape(*up.shape, *kernel)}, alpha)


def _lokr_rows(module: str, layer: Layer, spans: Sequence[Span]) -> tuple[dict[str, int], int]:
    """Rows of dW are blocks: w1's row i times all rows of w2. Cuts must fall between blocks."""
    (rows1, rows2), _ = lokr_sizes(layer)
    if all(start % rows2 == 0 and end % rows2 == 0 for start, end in spans):
        return {"lokr_w1" if "lokr_w1" in layer.tensors else "lokr_w1_a": 0}, rows2
    if rows1 == 1:
        role = "lokr_w2" if "lokr_w2" in layer.tensors else "lokr_w2_a"
        return {role: 1 if "lokr_t2" in layer.tensors else 0}, 1
    raise _refusal(module, f"its blocks of {rows2} rows do not end where the parts do")


def _refusal(module: str, why: str) -> AdapterError:
    return AdapterError(
        f"{module}: this adapter cannot be rewritten exactly for a naming that cuts the projection "
        f"elsewhere, because {why}. Keep the form it has (ComfyUI loads both namings of Flux), or "
        "approximate it by a LoRA: --lora-rank, and --rank where adapters are merged.",
        kind="not-exact",
        key=module,
    )


def _twice(whole: str, part: str) -> AdapterError:
    return AdapterError(
        f"{whole} and {part}, which is a part of it, are both in this adapter: one module cannot "
        "carry two changes. Remove one.",
        kind="duplicate",
        key=part,
    )


def _spans(rows: int, shares: Sequence[int]) -> list[Span]:
    unit, odd = divmod(rows, sum(shares))
    if odd:
        raise AdapterError(
            f"a fused projection of {rows} rows cannot be cut in shares {list(shares)}: the file "
            "is for a model of another shape.",
            kind="other-model",
        )
    ends = [unit * sum(shares[: i + 1]) for i in range(len(shares))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _cut(tensor: Tensor, spans: Sequence[Span], axis: int, per_row: int) -> Tensor:
    pieces = [tensor.narrow(axis, a // per_row, (b - a) // per_row) for a, b in spans]
    return torch.cat(pieces, axis)


def _common_dtype(tensors: Sequence[Tensor], scales: set[float]) -> torch.dtype:
    """Different scales are multiplied in, which narrow floats would round."""
    return tensors[0].dtype if len(scales) == 1 else torch.float32
