"""What CUDA has one kernel for and the CPU does in steps, put into a trace on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


class CudaKernels(TorchFunctionMode):
    """While it is entered, RMSNorm is one operator, and saves its input as it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """All else is as it was."""
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: Tensor,
    normalized_shape: object,  # noqa: ARG001
    weight: Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001
) -> Tensor:
    apply: Callable[..., Tensor] = _RmsNorm.apply
    return apply(input, weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor | None) -> Tensor:
        out: Tensor
        out, scale = _there(source, weight)
        ctx.save_for_backward(source, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        source, scale, weight = ctx.saved_tensors
        trains_weight = ctx.needs_input_grad[1]
        of_source, of_weight = _back(gradients[0], source, scale, weight, trains_weight)
        return of_source, of_weight if trains_weight else None


# On CUDA these are what they stand for, and can be timed. Elsewhere they only allocate as much.
@torch.library.custom_op("planned::rms_norm", mutates_args=(), device_types="cuda")
def _there(source: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    out, scale = aten._fused_rms_norm(source, source.shape[-1:], weight, None)
    return out, scale


@_there.register_kernel("cpu")
@_there.register_fake
def _(source: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    scale = source.new_empty((*source.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(source), scale


@torch.library.custom_op("planned::rms_norm_backward", mutates_args=(), device_types="cuda")
def _back(
    gradient: Tensor, source: Tensor, scale: Tensor, weight: Tensor | None, trains_weight: bool
) -> tuple[Tensor, Tensor]:
    of_source, of_weight = aten._fused_rms_norm_backward(
        gradient, source, source.shape[-1:], scale, weight, [True, trains_weight]
    )
    return of_source, of_weight if trains_weight else source.new_empty(0)


@_back.register_kernel("cpu")
@_back.register_fake
def _(
    gradient: Tensor,  # noqa: ARG001
    source: Tensor,
    scale: Tensor,  # noqa: ARG001
    weight: Tensor | None,
    trains_weight: bool,
) -> tuple[Tensor, Tensor]:
    if weight is None or not trains_weight:
        return torch.empty_like(source), source.new_empty(0)
    return torch.empty_like(source), torch.empty_like(weight)
