"""The maths of adapters: what each of them adds to a weight.

Written from the published equations and checked against the live forward of lycoris-lora and peft.
Neither library's merge is used: LyCORIS multiplies LoHa and decomposed LoKr by alpha / rank twice
there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gracetune.adapters.layers import scale_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gracetune.adapters.layers import Layer


def delta(layer: Layer, shape: Sequence[int] | None = None) -> Tensor:
    """dW in float32, magnitudes (DoRA) aside; `shape` is the weight's, for flattened kernels."""
    t = {role: tensor.detach().float() for role, tensor in layer.tensors.items()}
    if layer.algorithm == "lora":
        change = _lora(t)
    elif layer.algorithm == "loha":
        change = _hada(t, "1") * _hada(t, "2")
    elif layer.algorithm == "lokr":
        change = _kron(_lokr_w1(t), _lokr_w2(t))
    else:
        change = t["diff"]
    change = change * scale_of(layer)
    return change if shape is None else change.reshape(tuple(shape))


def delta_bias(layer: Layer) -> Tensor | None:
    """The change of the bias, where there is one."""
    bias = layer.tensors.get("diff_b")
    return None if bias is None else bias.detach().float()


def delta_shape(layer: Layer) -> tuple[int, ...]:
    """The shape of dW without computing it; kernels that were flattened stay flattened."""
    t = layer.tensors
    if layer.algorithm == "lora":
        kernel = t["mid"].shape[2:] if "mid" in t else t["down"].shape[2:]
        return (t["up"].shape[0], t["down"].shape[1], *kernel)
    if layer.algorithm == "loha":
        if "hada_t1" in t:
            return (t["hada_w1_a"].shape[1], t["hada_w1_b"].shape[1], *t["hada_t1"].shape[2:])
        return (t["hada_w1_a"].shape[0], t["hada_w1_b"].shape[1])
    if layer.algorithm == "lokr":
        rows, columns = lokr_sizes(layer)
        core = t.get("lokr_t2", t.get("lokr_w2", t.get("lokr_w2_b")))
        assert core is not None, "a whole LoKr layer has a second half"
        kernel = core.shape[2:]
        return (rows[0] * rows[1], columns[0] * columns[1], *kernel)
    return tuple(t["diff"].shape) if "diff" in t else (t["diff_b"].shape[0], 0)


def merged(layer: Layer, weight: Tensor, strength: float = 1.0) -> Tensor:
    """The weight with the adapter in it, in the weight's dtype; computed in float32.

    DoRA: W' = m (W + dW) / |W + dW|, the norm over the axis that `m` does not have. A strength
    other than one goes part of the way from W to W'.
    """
    base = weight.detach().float()
    if layer.algorithm == "full" and "diff" not in layer.tensors:
        return weight.detach().clone()
    changed = base + delta(layer, base.shape)
    if layer.dora:
        magnitude = layer.tensors["dora"].detach().float()
        changed = _decomposed(changed, magnitude, dora_by_rows(layer))
    if strength != 1.0:
        changed = base + strength * (changed - base)
    return changed.to(weight.dtype)


def norm(layer: Layer) -> float:
    """|dW|, by the factors where they allow it: a whole dW of a large model is large."""
    t = {role: tensor.detach().float() for role, tensor in layer.tensors.items()}
    scale = abs(scale_of(layer))
    if layer.algorithm == "lora" and "mid" not in t:
        up, down = t["up"].flatten(1), t["down"].flatten(1)
        # |BA|^2 = trace(A^T B^T B A) = sum of (B^T B) * (A A^T)
        inner = ((up.T @ up).double() * (down @ down.T).double()).sum()
        return scale * math.sqrt(max(float(inner), 0.0))
    if layer.algorithm == "lokr":
        return scale * float(_lokr_w1(t).norm()) * float(_lokr_w2(t).norm())
    if layer.algorithm == "full" and "diff" not in t:
        return 0.0
    return float(delta(layer).norm())


def out_features(layer: Layer) -> int:
    """Rows of dW."""
    return delta_shape(layer)[0]


def _lora(t: dict[str, Tensor]) -> Tensor:
    up, down = t["up"].flatten(1), t["down"]
    if "mid" in t:
        return torch.einsum("ij...,pi,jr->pr...", t["mid"], up, down.flatten(1))
    return (up @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


def _hada(t: dict[str, Tensor], half: str) -> Tensor:
    a, b = t[f"hada_w{half}_a"], t[f"hada_w{half}_b"]
    if f"hada_t{half}" in t:
        return torch.einsum("ij...,ip,jr->pr...", t[f"hada_t{half}"], a, b)
    return a @ b


def _lokr_w1(t: dict[str, Tensor]) -> Tensor:
    return t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]


def _lokr_w2(t: dict[str, Tensor]) -> Tensor:
    if "lokr_w2" in t:
        return t["lokr_w2"]
    a, b = t["lokr_w2_a"], t["lokr_w2_b"]
    if "lokr_t2" in t:
        return torch.einsum("ij...,ip,jr->pr...", t["lokr_t2"], a, b)
    return (a @ b.flatten(1)).reshape(a.shape[0], *b.shape[1:])


def _kron(w1: Tensor, w2: Tensor) -> Tensor:
    """kron over the first two axes; a kernel's axes are w2's own."""
    return torch.kron(w1.reshape(*w1.shape, *[1] * (w2.dim() - 2)), w2.contiguous())


def lokr_sizes(layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows (of w1, of w2) and columns (of w1, of w2)."""
    t = layer.tensors
    rows1, columns1 = (
        t["lokr_w1"].shape if "lokr_w1" in t else (t["lokr_w1_a"].shape[0], t["lokr_w1_b"].shape[1])
    )
    core = "lokr_t2" in t
    if "lokr_w2" in t:
        rows2, columns2 = t["lokr_w2"].shape[:2]
    else:
        rows2, columns2 = t["lokr_w2_a"].shape[1 if core else 0], t["lokr_w2_b"].shape[1]
    return (rows1, rows2), (columns1, columns2)


def dora_by_rows(layer: Layer) -> bool:
    """Whether the magnitude has a value a row (peft's way, LyCORIS' default) or one a column."""
    magnitude = layer.tensors["dora"]
    return magnitude.dim() == 1 or magnitude.shape[0] == magnitude.numel()


def _decomposed(weight: Tensor, magnitude: Tensor, by_rows: bool) -> Tensor:
    ones = [1] * (weight.dim() - 1)
    if by_rows:
        lengths = weight.flatten(1).norm(dim=1).reshape(-1, *ones)
        magnitude = magnitude.reshape(-1, *ones)
    else:
        lengths = weight.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *ones[1:])
        magnitude = magnitude.reshape(1, -1, *ones[1:])
    factors: Tensor = magnitude / (lengths + torch.finfo(torch.float32).eps)
    return weight * factors
