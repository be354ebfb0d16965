"""Several LoRA products of one input, as queries, keys and values are: its passes are shared.

The narrow halves stand on top of each other, so that the input is read once on the way there and
once for their gradients; what it gets back is summed by the products themselves.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.adapters.fused import FusedLora
from gracetune.adapters.products import beside

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


@torch.library.custom_op("gracetune::lora_linears", mutates_args=())
def lora_linears(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    down: Tensor,
    ups: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Each product with its LoRA, and last the narrow tensor between all halves."""
    narrow = x @ down.t()
    parts = narrow.chunk(len(ups), dim=1)
    given = [
        beside(part, up, bias, scale).addmm_(x, weight.t())
        for part, up, bias, weight in zip(parts, ups, biases, weights, strict=True)
    ]
    return [*given, narrow]


@torch.library.custom_op("gracetune::lora_gradients_of_all", mutates_args=())
def lora_gradients_of_all(
    grads: list[Tensor], x: Tensor, narrow: Tensor, ups: list[Tensor], scale: float
) -> list[Tensor]:
    """What the lower halves get, the narrow gradient between, and what each upper half gets."""
    between = torch.empty_like(narrow)
    parts = between.chunk(len(ups), dim=1)
    for grad, up, part in zip(grads, ups, parts, strict=True):
        torch.mm(grad, up, out=part)
    kept = narrow.chunk(len(ups), dim=1)
    given = [grad.t() @ part for grad, part in zip(grads, kept, strict=True)]
    if scale != 1.0:
        torch._foreach_mul_([between, *given], scale)
    return [between.t() @ x, between, *given]


@torch.library.custom_op("gracetune::lora_input_gradient_of_all", mutates_args=())
def lora_input_gradient_of_all(
    grads: list[Tensor], between: Tensor, weights: list[Tensor], down: Tensor
) -> Tensor:
    """What the input gets from all paths."""
    given = between @ down
    for grad, weight in zip(grads, weights, strict=True):
        given.addmm_(grad, weight)
    return given


lora_linears.register_fake(
    lambda x, weights, _, down, *__: [
        *(x.new_empty(len(x), len(weight)) for weight in weights),
        x.new_empty(len(x), len(down)),
    ]
)
lora_gradients_of_all.register_fake(
    lambda _, x, narrow, ups, __: [
        x.new_empty(narrow.shape[1], x.shape[1]),
        torch.empty_like(narrow),
        *(torch.empty_like(up) for up in ups),
    ]
)
lora_input_gradient_of_all.register_fake(
    lambda grads, _, weights, __: grads[0].new_empty(len(grads[0]), weights[0].shape[1])
)


class LoraProducts(torch.autograd.Function):
    """`lora_linears` that can be trained; weights, biases and upper halves come in a row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, scale: float, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """`x` is (rows, columns)."""
        weights, biases, ups = _thirds(rest)
        *given, narrow = lora_linears(x, weights, biases, down, ups, scale)
        ctx.save_for_backward(x, narrow, down, *weights, *ups)
        ctx.scale = scale
        return tuple(given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The frozen weights get none."""
        x, narrow, down, *rest = ctx.saved_tensors
        weights, ups = rest[: len(grads)], rest[len(grads) :]
        given = list(grads)
        grad_down, between, *grad_ups = lora_gradients_of_all(given, x, narrow, ups, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_input_gradient_of_all(given, between, weights, down)
        return grad_x, grad_down, None, *([None] * (2 * len(grads))), *grad_ups


class SharedInput:
    """LoRA layers that are always given the same."""

    def __init__(self, layers: Sequence[FusedLora]) -> None:
        self._layers = tuple(layers)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """What each layer gives, in order."""
        layers = self._layers
        if not all(layer.is_at_work(x) for layer in layers):
            return [layer.forward(x) for layer in layers]
        halves = [layer.halves() for layer in layers]
        given = LoraProducts.apply(  # type: ignore[no-untyped-call]
            x.to(layers[0].dtype).flatten(0, -2),
            torch.cat([down for down, _ in halves]),
            layers[0].scale,
            *(layer.base.weight for layer in layers),
            *(layer.base.bias for layer in layers),
            *(up for _, up in halves),
        )
        return [y.view(*x.shape[:-1], -1) for y in given]


def share_input(layers: Sequence[nn.Module]) -> SharedInput | None:
    """Let fused LoRA layers compute together; none where they are too different for that."""
    fused = [
        layer.forward.__self__
        for layer in layers
        if isinstance(layer.forward, MethodType) and isinstance(layer.forward.__self__, FusedLora)
    ]
    if len(fused) < len(layers):
        return None
    kinds = {(one.dtype, one.scale, *one.trained[0].shape) for one in fused}
    plain = all(type(one.base) is nn.Linear and one.base.bias is not None for one in fused)
    return SharedInput(fused) if plain and len(kinds) == 1 else None


def _thirds(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    size = len(tensors) // 3
    return list(tensors[:size]), list(tensors[size : 2 * size]), list(tensors[2 * size :])
