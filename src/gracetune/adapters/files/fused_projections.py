"""Split the fused projections of an adapter into parts, and join parts into fused projections.

Flux's original checkpoint has one projection for query, key and value; diffusers has three. An
adapter file with the names of one must be rewritten for the other. The rows of a fused projection's
weight change dW are the rows of its parts, one part after the other, and the result must be exact:

- Joining LoRAs. If all parts share `down`, their `up` factors are concatenated. Otherwise they form
  a block diagonal, whose rank is the sum of the parts' ranks:

      up = [ up_q                ]    down = [ down_q ]
           [        up_k         ]           [ down_k ]
           [               up_v  ]           [ down_v ]

  Splitting recognises such a block diagonal and returns the parts bit for bit.
- LoHa and full matrices are split and joined by rows.
- A LoKr, dW = kron(w1, w2), has one block of rows for each row of w1, and can be split only between
  two blocks.

Everything else raises an error with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.files.keys import LayerPath, template_of
from gracetune.adapters.files.layers import (
    Adapter,
    Layer,
    delta_shape,
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
"""Range of rows: the first row, and the row after the last one."""


def split_fused(adapter: Adapter, only: Collection[LayerPath] | None = None) -> Adapter:
    """Split an adapter's fused projections, such as qkv, into the separate modules of diffusers.

    With `only`, all other projections stay fused.
    """
    layers: dict[LayerPath, Layer] = {}
    for path, layer in adapter.layers.items():
        parts = parts_of(path, adapter.table)
        if not parts or (only is not None and path not in only):
            layers[path] = layer
            continue
        spans = _spans(out_features(layer), [*parts.values()])
        for part, part_layer in zip(parts, _split(path.module, layer, spans), strict=True):
            if part_layer is not None:
                if part in adapter.layers:
                    raise _duplicate_error(path.module, part.module)
                layers[part] = part_layer
    return replace(adapter, layers=layers)


def parts_of(path: LayerPath, table: KeyTable) -> dict[LayerPath, int]:
    """Return the modules that a fused projection is split into, each with its share of the rows.

    The shares are a ratio: 1, 1 and 1 for equal parts. For any other module the result is empty.
    """
    template, number = template_of(path.module)
    projections = (*table.fused, *table.other_fused)
    fused = next((fused for fused in projections if fused.whole == template), None)
    if fused is None:
        return {}
    return {LayerPath(path.stage, part.format(number)): share for part, share in fused.parts}


def join_fused(adapter: Adapter) -> Adapter:
    """Join an adapter's separate projections, such as q, k and v, into the original model's qkv."""
    fused_by_part = {part: fused for fused in adapter.table.fused for part, _ in fused.parts}
    layers: dict[LayerPath, Layer] = {}
    gathered: dict[LayerPath, dict[str, Layer]] = {}
    for path, layer in adapter.layers.items():
        template, number = template_of(path.module)
        if template in fused_by_part:
            whole = LayerPath(path.stage, fused_by_part[template].whole.format(number))
            if whole in adapter.layers:
                raise _duplicate_error(whole.module, path.module)
            gathered.setdefault(whole, {})[template] = layer
            layers.setdefault(whole, layer)  # reserves its position in the order of the file
        else:
            layers[path] = layer
    for whole, parts in gathered.items():
        fused = fused_by_part[next(iter(parts))]
        layers[whole] = _join(whole.module, fused, parts)
    return replace(adapter, layers=layers)


def swap_halves(adapter: Adapter) -> Adapter:
    """Swap the upper and lower half of the rows of the weight change in some modules.

    These are the modules of `table.swapped_halves`, whose output is (scale, shift) in diffusers and
    (shift, scale) in the original model. Swapping twice restores the adapter.
    """
    layers = dict(adapter.layers)
    for path, layer in adapter.layers.items():
        if has_swapped_halves(path.module, layer, adapter.table):
            half = out_features(layer) // 2
            layers[path] = select_rows(path.module, layer, [(half, 2 * half), (0, half)])
    return replace(adapter, layers=layers)


def has_swapped_halves(module: str, layer: Layer, table: KeyTable) -> bool:
    """Return True if a module's output is (scale, shift) in diffusers only; see `KeyTable`."""
    template, number = template_of(module)
    if template not in table.swapped_halves:
        return False
    rows, columns = (*delta_shape(layer), 0)[:2]
    return not number or rows == 2 * columns


def select_rows(module: str, layer: Layer, spans: Sequence[Span]) -> Layer:
    """Return a layer with only these rows of its weight change dW, in the order of the spans."""
    tensors = dict(layer.tensors)
    rows, rows_per_entry = out_features(layer), 1
    if layer.algorithm == "lora":
        row_axes = {"up": 0}
    elif layer.algorithm == "loha":
        axis = 1 if "hada_t1" in tensors else 0
        row_axes = {"hada_w1_a": axis, "hada_w2_a": axis}
    elif layer.algorithm == "lokr":
        row_axes, rows_per_entry = _lokr_row_axes(module, layer, spans)
    else:
        row_axes = {"diff": 0} if "diff" in tensors else {}
    for role, axis in row_axes.items():
        tensors[role] = _select_spans(tensors[role], spans, axis, rows_per_entry)
    if "diff_b" in tensors:
        tensors["diff_b"] = _select_spans(tensors["diff_b"], spans, 0, 1)
    if layer.is_dora:
        if not is_dora_per_row(layer) and spans != [(0, rows)]:
            raise _not_exact_error(module, "its magnitudes (DoRA) span all rows of a column")
        tensors["dora"] = _select_spans(tensors["dora"], spans, 0, 1)
    return replace(layer, tensors=tensors)


# Splitting


def _split(module: str, layer: Layer, spans: Sequence[Span]) -> list[Layer | None]:
    """Split a fused layer into one layer for each span of rows.

    A part that had no adapter when the parts were joined is None.
    """
    blocks = _split_block_diagonal(layer, spans)
    if blocks is not None:
        return blocks
    return [select_rows(module, layer, [span]) for span in spans]


def _split_block_diagonal(layer: Layer, spans: Sequence[Span]) -> list[Layer | None] | None:
    """Split a LoRA whose `up` is block diagonal into one LoRA for each span of rows.

    The result is None if `up` is not block diagonal. In the list, None stands for a part of zeros.
    """
    if set(layer.tensors) != {"down", "up"}:
        return None
    up, down = layer.tensors["up"], layer.tensors["down"]
    rank, remainder = divmod(down.shape[0], len(spans))
    if remainder or rank == 0:
        return None
    parts: list[Layer | None] = []
    for i, (start, end) in enumerate(spans):
        columns = slice(i * rank, (i + 1) * rank)
        rows = up[start:end].flatten(1)
        if rows[:, : columns.start].any() or rows[:, columns.stop :].any():
            return None
        parts.append(_trim_padding(layer, up[start:end, columns], down[columns]))
    if all(part is None for part in parts):
        return None
    return parts


def _trim_padding(layer: Layer, up: Tensor, down: Tensor) -> Layer | None:
    """Return one LoRA, cut out of a block-diagonal LoRA, without the zeros that pad its rank.

    The result is None if the LoRA has only zeros.
    """
    used = up.flatten(1).any(0) | down.flatten(1).any(1)
    if not used.any():
        return None
    rank = int(used.nonzero().max()) + 1
    scale = scale_of(layer)
    alpha = None if layer.alpha is None else scale * rank
    return Layer("lora", {"down": down[:rank].clone(), "up": up[:, :rank].clone()}, alpha)


def _lokr_row_axes(module: str, layer: Layer, spans: Sequence[Span]) -> tuple[dict[str, int], int]:
    """Return the tensor of a LoKr that must be cut to select rows of dW = kron(w1, w2).

    The result is ({role of the tensor: axis to cut}, rows of dW per entry on that axis). Each row
    of w1 gives a block of rows of dW. If all cuts are between blocks, w1 is cut; otherwise, if w1
    has one row, w2 is cut.
    """
    (rows1, rows2), _ = lokr_sizes(layer)
    if all(start % rows2 == 0 and end % rows2 == 0 for start, end in spans):
        return {"lokr_w1" if "lokr_w1" in layer.tensors else "lokr_w1_a": 0}, rows2
    if rows1 == 1:
        role = "lokr_w2" if "lokr_w2" in layer.tensors else "lokr_w2_a"
        return {role: 1 if "lokr_t2" in layer.tensors else 0}, 1
    raise _not_exact_error(module, f"its blocks of {rows2} rows do not end where the parts do")


# Joining


def _join(module: str, fused: FusedProjection, parts: Mapping[str, Layer]) -> Layer:
    if all(layer.algorithm == "full" for layer in parts.values()):
        parts = _with_zero_parts(fused, parts)
    present = list(parts.values())
    if any(layer.is_dora for layer in present):
        if len(parts) < len(fused.parts):
            raise _not_exact_error(module, "it has magnitudes (DoRA) and one part is missing")
        if not all(layer.is_dora == present[0].is_dora for layer in present):
            raise _not_exact_error(module, "only some of its parts have magnitudes (DoRA)")
    if len(parts) == len(fused.parts):
        concatenated = _concatenate_rows(module, [parts[part] for part, _ in fused.parts])
        if concatenated is not None:
            return concatenated
    if {layer.algorithm for layer in present} != {"lora"} or any(
        "mid" in layer.tensors or layer.is_dora for layer in present
    ):
        raise _not_exact_error(module, "its parts have no factor in common")
    return _block_diagonal(fused, parts)


def _with_zero_parts(fused: FusedProjection, parts: Mapping[str, Layer]) -> Mapping[str, Layer]:
    """Return the full matrices of all parts, with the same tensors; what is missing is zeros."""
    shares = dict(fused.parts)
    unit = next(out_features(layer) // shares[part] for part, layer in parts.items())
    examples = {role: t for layer in parts.values() for role, t in layer.tensors.items()}
    return {
        part: Layer(
            "full",
            {
                role: parts[part].tensors[role]
                if part in parts and role in parts[part].tensors
                else example.new_zeros(unit * share, *example.shape[1:])
                for role, example in examples.items()
            },
        )
        for part, share in fused.parts
    }


def _concatenate_rows(module: str, parts: Sequence[Layer]) -> Layer | None:
    """Concatenate layers along the rows of their weight changes.

    The result is None if they differ in a tensor that has no axis for these rows, such as a LoRA's
    `down`.
    """
    first = parts[0]
    if any(set(part.tensors) != set(first.tensors) or part.alpha != first.alpha for part in parts):
        return None
    row_axes = _row_axes(module, first)
    shared = set(first.tensors) - set(row_axes)
    if not all(
        torch.equal(part.tensors[role], first.tensors[role]) for part in parts for role in shared
    ):
        return None
    tensors = {
        role: torch.cat([part.tensors[role] for part in parts], row_axes[role])
        if role in row_axes
        else tensor
        for role, tensor in first.tensors.items()
    }
    return replace(first, tensors=tensors)


def _row_axes(module: str, layer: Layer) -> dict[str, int]:
    """Return, for each tensor whose axis is the rows of the weight change, that axis, by role.

    For a LoRA it is {"up": 0}.
    """
    axes = {"diff_b": 0} if "diff_b" in layer.tensors else {}
    if layer.is_dora:
        if not is_dora_per_row(layer):
            raise _not_exact_error(module, "its magnitudes (DoRA) span all rows of a column")
        axes["dora"] = 0
    if layer.algorithm == "lora":
        return axes | {"up": 0}
    if layer.algorithm == "loha":
        axis = 1 if "hada_t1" in layer.tensors else 0
        return axes | {"hada_w1_a": axis, "hada_w2_a": axis}
    if layer.algorithm == "lokr":
        return axes | {"lokr_w1" if "lokr_w1" in layer.tensors else "lokr_w1_a": 0}
    return axes | ({"diff": 0} if "diff" in layer.tensors else {})


def _block_diagonal(fused: FusedProjection, parts: Mapping[str, Layer]) -> Layer:
    """Join the LoRAs of separate projections into one LoRA whose `up` is block diagonal.

    The i-th block changes only the rows of part i. Zeros pad every block to the largest rank, and a
    missing part is a block of zeros.
    """
    first = next(iter(parts.values()))
    share_of = dict(fused.parts)
    unit = next(out_features(layer) // share_of[part] for part, layer in parts.items())
    ranks = {part: layer.tensors["down"].shape[0] for part, layer in parts.items()}
    rank = max(ranks.values())
    scales = {scale_of(layer) for layer in parts.values()}
    total = rank * len(fused.parts)
    # Different scales are multiplied in, which would round in the dtype of the file.
    dtype = first.tensors["up"].dtype if len(scales) == 1 else torch.float32
    spans = _spans(unit * sum(share_of.values()), list(share_of.values()))
    up = torch.zeros(spans[-1][1], total, dtype=dtype)
    bias = torch.zeros(spans[-1][1])
    down = torch.zeros(total, *first.tensors["down"].shape[1:], dtype=first.tensors["down"].dtype)
    for i, ((part, _), (start, end)) in enumerate(zip(fused.parts, spans, strict=True)):
        if part in parts:
            layer, columns = parts[part], slice(i * rank, i * rank + ranks[part])
            factor = 1.0 if len(scales) == 1 else scale_of(layer)
            up[start:end, columns] = (layer.tensors["up"].flatten(1).to(dtype)) * factor
            down[columns] = layer.tensors["down"]
            if "diff_b" in layer.tensors:
                bias[start:end] = layer.tensors["diff_b"]
    common = scales.pop() if len(scales) == 1 else 1.0
    kernel = [1] * (first.tensors["up"].dim() - 2)
    alpha = None if common == 1.0 and first.alpha is None else common * total
    tensors = {"down": down, "up": up.reshape(*up.shape, *kernel)}
    if any("diff_b" in layer.tensors for layer in parts.values()):
        tensors["diff_b"] = bias
    return Layer("lora", tensors, alpha)


# Rows and errors


def _spans(rows: int, shares: Sequence[int]) -> list[Span]:
    """Return the range of rows of each part of a projection; `shares` are the ratio of sizes."""
    unit, remainder = divmod(rows, sum(shares))
    if remainder:
        raise AdapterError(
            f"a fused projection of {rows} rows cannot be split in the ratio "
            f"{':'.join(map(str, shares))}: the file is for a model of another shape.",
            kind="other-model",
        )
    ends = [unit * sum(shares[: i + 1]) for i in range(len(shares))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _select_spans(tensor: Tensor, spans: Sequence[Span], axis: int, rows_per_entry: int) -> Tensor:
    pieces = [
        tensor.narrow(axis, start // rows_per_entry, (end - start) // rows_per_entry)
        for start, end in spans
    ]
    return torch.cat(pieces, axis)


def _not_exact_error(module: str, reason: str) -> AdapterError:
    return AdapterError(
        f"{module} cannot be split or joined exactly, as the other format needs it, because "
        f"{reason}. Keep the file's format (`gracetune adapter check` tells which tools load it), "
        "or approximate the adapter by a LoRA: with --lora-rank when converting, with --rank when "
        "merging.",
        kind="not-exact",
        key=module,
    )


def _duplicate_error(whole: str, part: str) -> AdapterError:
    return AdapterError(
        f"this adapter has both {whole} and {part}, which is a part of it. Remove one of them.",
        kind="duplicate",
        key=part,
    )
