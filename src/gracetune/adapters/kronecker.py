"""LoKr beside a linear layer, in the order that moves least memory.

A row x of u * v numbers is a matrix X of u rows, and kron(w1, w2) x is w1 X w2^T. Where w2 is the
product of two thin matrices, w2 = a b, everything but the last product is thin: w1 goes into b once
and not into every row. LyCORIS multiplies by w1 last, at full width and between two transposes:
twice the activations of a LoRA, and on a GPU by kernels of its own that no plan knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

MOST_JOINED = 256
"""Rows of kron(w1, b) up to which it is worth its arithmetic: a LoRA of that rank."""


def thin_kron_linear(x: Tensor, w1: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`kron(w1, a b) x` for every row x; the weights may be of another type than the rows."""
    if len(w1) * len(b) <= MOST_JOINED:
        narrow = functional.linear(x, torch.kron(w1, b).to(x.dtype))
        groups = _cut(narrow, len(w1))
    else:
        thin = functional.linear(_cut(x, w1.shape[1]), b.to(x.dtype))
        groups = _mixed(thin, w1.to(x.dtype))
    return functional.linear(groups, a.to(x.dtype)).flatten(-2)


def kron_linear(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """`kron(w1, w2) x` for every row x, by the narrower way."""
    (up, u), (down, v) = w1.shape, w2.shape
    groups = _cut(x, u)
    if u * down <= up * v:
        return _mixed(functional.linear(groups, w2), w1).flatten(-2)
    return functional.linear(_mixed(groups, w1), w2).flatten(-2)


def _cut(x: Tensor, rows: int) -> Tensor:
    """Every row as a matrix."""
    return x.reshape(*x.shape[:-1], rows, -1)


def _mixed(groups: Tensor, w1: Tensor) -> Tensor:
    """w1 X, as one product of all rows and not as many small ones."""
    return functional.linear(groups.mT, w1).mT
