"""Attention whose gradient lies in rows of its own.

torch keeps cuDNN's graphs of attention by the layout of queries, keys and values, and not by the
gradient's. A single block of Flux puts what attention gives beside what its MLP gives, so its
gradient comes back as a part of wider rows; a double block's does not. All else is equal, so one
kind gets the graph of the other, which reads past the end or, worse, the wrong numbers (seen on an
H200 with torch 2.11). With rows of its own everywhere there is one layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffusers import FluxTransformer2DModel
from torch.autograd import Function

if TYPE_CHECKING:
    from torch import Tensor, nn


class Dense(Function):
    """The tensor as it is; its gradient without gaps between rows."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        """Nothing is computed."""
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        """A copy where there are gaps."""
        return grad.contiguous()


def with_dense_gradients(transformer: nn.Module) -> None:
    """Let Flux's single blocks have it; other models need nothing."""
    if isinstance(transformer, FluxTransformer2DModel):
        for block in transformer.single_transformer_blocks:
            take_densely(block.attn)


def take_densely(attention: nn.Module) -> None:
    """Let a module that gives one tensor take its gradient in this way."""
    attention.register_forward_hook(_take)


def _take(_module: nn.Module, _given: tuple[Any, ...], out: Tensor) -> Tensor:
    dense: Tensor = Dense.apply(out)  # type: ignore[no-untyped-call]
    return dense
