"""LoKr beside a linear layer, in the order that moves least memory.

A row x of u * v numbers is a matrix X of u rows, and kron(w1, w2) x is w1 X w2^T. Where w2 is the
product of two thin matrices, w2 = a b, everything but the last product is thin: w1 goes into b once
and not into every row. LyCORIS multiplies by w1 last, at full width and between two transposes:
twice the activations of a LoRA, and on a GPU by kernels of its own that no plan knows.

With a plain frozen layer, both products are one operator of torch's registry, as for a LoRA: what
is trained adds itself onto the frozen product in place, and a memory policy keeps one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from gracetune.adapters.products import lora_input_gradient

if TYPE_CHECKING:
    from typing import Any

MOST_JOINED = 256
"""Rows of kron(w1, b) up to which it is worth its arithmetic: a LoRA of that rank."""


@torch.library.custom_op("gracetune::kron_linear", mutates_args=())
def kron_beside_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, joined: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """`x W^T` with a thin LoKr, and the narrow tensor between; `joined` is kron(w1, b)."""
    narrow = functional.linear(x, joined)
    y = functional.linear(x, weight, bias)
    y.view(-1, len(a)).addmm_(narrow.view(-1, a.shape[1]), a.t())
    return y, narrow


@torch.library.custom_op("gracetune::kron_gradients", mutates_args=())
def kron_gradients(
    grad: Tensor, x: Tensor, narrow: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `joined` and `a` get, and the narrow gradient between them."""
    groups = grad.reshape(-1, len(a))
    between = (groups @ a).view(narrow.shape)
    return between.t() @ x, groups.t() @ narrow.view(-1, a.shape[1]), between


kron_beside_linear.register_fake(
    lambda x, weight, _, joined, __: (
        x.new_empty(len(x), len(weight)),
        x.new_empty(len(x), len(joined)),
    )
)
kron_gradients.register_fake(
    lambda _, x, narrow, a: (
        x.new_empty(narrow.shape[1], x.shape[1]),
        torch.empty_like(a),
        torch.empty_like(narrow),
    )
)


class KroneckerProduct(torch.autograd.Function):
    """`kron_beside_linear` that can be trained; `x` is (rows, columns)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, joined: Tensor, a: Tensor
    ) -> Tensor:
        """Both products at once."""
        y: Tensor
        y, narrow = kron_beside_linear(x, weight, bias, joined, a)
        ctx.save_for_backward(x, narrow, weight, joined, a)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The frozen weight gets none."""
        x, narrow, weight, joined, a = ctx.saved_tensors
        grad_joined, grad_a, between = kron_gradients(grads[0], x, narrow, a)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_input_gradient(grads[0], between, weight, joined)
        return grad_x, None, None, grad_joined, grad_a


def can_join(w1: Tensor, b: Tensor) -> bool:
    """Whether kron(w1, b) is thin enough to be made."""
    return len(w1) * len(b) <= MOST_JOINED


def thin_kron_linear(x: Tensor, w1: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`kron(w1, a b) x` for every row x; the weights may be of another type than the rows."""
    if can_join(w1, b):
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
