"""Products with a frozen weight and a LoRA beside it, with no pass over memory too many.

`y = x W^T + b + s (x A^T) B^T`. Written with torch's own operators, the second product is a tensor
of its own that somebody has to add. Here it is computed first, and the frozen product, which is
bound by arithmetic and not by memory, adds itself on top in place; the same on the way back. They
are operators of torch's registry, so compiled graphs call them as they are and a memory policy can
tell them from elementwise work.

In fp8 both operands of the frozen product are rounded, each row with a scale of its own. Where the
main directions of the input are known (`directions`), what lies along them is taken out first and
multiplied in bf16 by the same small product that adds the LoRA. The gradient of the input needs the
weight along its other side: the weight's scales are multiplied into the incoming gradient first, so
that one stored copy serves both ways.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from typing import Any

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_OUTPUT_DTYPE = torch.bfloat16
"""What a product of fp8 is given out in: the one type that every kernel for it has."""
MIN_SCALE = 1e-12
"""A row of zeros has no scale of its own."""


@torch.library.custom_op("gracetune::lora_linear", mutates_args=())
def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The product with its LoRA, and the narrow tensor between the LoRA's two halves."""
    narrow = functional.linear(x, down)
    return lora_output(narrow, up, bias, scale).addmm_(x, weight.t()), narrow


@torch.library.custom_op("gracetune::lora_linear_fp8", mutates_args=())
def lora_linear_fp8(  # noqa: PLR0913  an operator has no objects to hold its arguments
    x: Tensor,
    rounded: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    main: Tensor | None,
    across: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same with the frozen product in fp8; the LoRA sees `x` as it was.

    `main` is what was taken out of `x` before it was rounded, `across` the weight for that.
    """
    y = _scaled(rounded, weight.t(), row_scales, weight_scales.t(), x.dtype, bias)
    narrow = functional.linear(x, down)
    if main is None or across is None:
        return y.addmm_(narrow, up.t(), alpha=scale), narrow
    beside_it, ups = torch.cat([narrow * scale, main], 1), torch.cat([up, across], 1)
    return y.addmm_(beside_it, ups.t()), narrow


@torch.library.custom_op("gracetune::apart", mutates_args=())
def split_outliers(x: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """How far each row goes along the main directions, and what is left of it.

    An operator, so that memory policies do not take it for a product that is worth keeping.
    """
    main = functional.linear(x, along)
    return main, torch.addmm(x, main, along, alpha=-1)


@torch.library.custom_op("gracetune::lora_gradients", mutates_args=())
def lora_gradients(
    grad: Tensor, x: Tensor, narrow: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What both halves of the LoRA get, and the narrow gradient between them."""
    between, grad_up = grad @ up, grad.t() @ narrow
    if scale != 1.0:
        torch._foreach_mul_([between, grad_up], scale)
    return between.t() @ x, grad_up, between


@torch.library.custom_op("gracetune::lora_input_gradient", mutates_args=())
def lora_input_gradient(grad: Tensor, between: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    """What the input gets from both paths."""
    return (between @ down).addmm_(grad, weight)


@torch.library.custom_op("gracetune::lora_input_gradient_fp8", mutates_args=())
def lora_input_gradient_fp8(
    rounded: Tensor, row_scales: Tensor, between: Tensor, turned: Tensor, down: Tensor
) -> Tensor:
    """The same from a rounded gradient that already holds the weight's scales.

    `turned` is the weight's transpose, made outside: compilers know faster ways to do that.
    """
    return input_gradient_fp8(rounded, row_scales, turned, down.dtype).addmm_(between, down)


lora_linear.register_fake(lambda x, weight, _, down, *__: _wide_and_narrow(x, weight, down))
lora_linear_fp8.register_fake(
    lambda x, _, __, weight, ___, ____, _____, ______, down, *_______: _wide_and_narrow(
        x, weight, down
    )
)
split_outliers.register_fake(
    lambda x, along: (x.new_empty(len(x), len(along)), x.new_empty(x.shape))
)
lora_gradients.register_fake(
    lambda _, x, narrow, up, __: (
        x.new_empty(up.shape[1], x.shape[1]),
        torch.empty_like(up),
        torch.empty_like(narrow),
    )
)
lora_input_gradient.register_fake(
    lambda grad, _, weight, __: grad.new_empty(len(grad), weight.shape[1])
)
lora_input_gradient_fp8.register_fake(
    lambda rounded, _, __, turned, down: down.new_empty(len(rounded), len(turned))
)


def _wide_and_narrow(x: Tensor, weight: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(down))


def lora_output(narrow: Tensor, up: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The LoRA's own product, and the bias: what the frozen product adds itself to."""
    if bias is None:
        return (narrow * scale) @ up.t()
    return torch.addmm(bias, narrow, up.t(), alpha=scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in fp8, and what to multiply it with to have it back."""
    scales = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=MIN_SCALE) / FP8_MAX
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def input_gradient_fp8(
    rounded: Tensor, row_scales: Tensor, turned: Tensor, dtype: torch.dtype
) -> Tensor:
    """The frozen path's share of the input's gradient."""
    ones = torch.ones(1, len(turned), device=turned.device)
    return _scaled(rounded, turned.t(), row_scales, ones, dtype, None)


class LoraMatmul(torch.autograd.Function):
    """`lora_linear` that can be trained: gradients for the input and both halves of the LoRA."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        """`x` is (rows, columns)."""
        y: Tensor
        y, narrow = lora_linear(x, weight, bias, down, up, scale)
        ctx.save_for_backward(x, narrow, weight, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The frozen weight gets none."""
        grad = grads[0]
        x, narrow, weight, down, up = ctx.saved_tensors
        grad_down, grad_up, between = lora_gradients(grad, x, narrow, up, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_input_gradient(grad, between, weight, down)
        return grad_x, None, None, grad_down, grad_up, None


class LoraMatmulFp8(torch.autograd.Function):
    """`LoraProduct` whose frozen products are in fp8, both ways."""

    @staticmethod
    def forward(  # noqa: PLR0913  nor has this one
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_scales: Tensor,
        bias: Tensor | None,
        along: Tensor | None,
        across: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        """`weight` is in fp8, `weight_scales` has one number a row of it."""
        main, rest = (None, x) if along is None else split_outliers(x, along)
        sides = (*quantize_rows(rest), weight, weight_scales, bias, main, across)
        y: Tensor
        y, narrow = lora_linear_fp8(x, *sides, down, up, scale)
        ctx.save_for_backward(x, narrow, weight, weight_scales, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The frozen weight gets none."""
        grad = grads[0]
        x, narrow, weight, weight_scales, down, up = ctx.saved_tensors
        grad_down, grad_up, between = lora_gradients(grad, x, narrow, up, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            rounded = quantize_rows(grad.float() * weight_scales.t())
            turned = weight.t().contiguous()
            grad_x = lora_input_gradient_fp8(*rounded, between, turned, down)
        return grad_x, None, None, None, None, None, grad_down, grad_up, None


class FrozenMatmulFp8(torch.autograd.Function):
    """A frozen product in fp8 with nothing beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_scales: Tensor,
        bias: Tensor | None,
        along: Tensor | None,
        across: Tensor | None,
    ) -> Tensor:
        """`x` is (rows, columns)."""
        ctx.save_for_backward(weight, weight_scales)
        main, rest = (None, x) if along is None else split_outliers(x, along)
        y = _scaled(*_sides(*quantize_rows(rest), weight, weight_scales), x.dtype, bias)
        return y if main is None or across is None else torch.addmm(y, main, across.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """For the input alone."""
        grad = grads[0]
        weight, weight_scales = ctx.saved_tensors
        rounded = quantize_rows(grad.float() * weight_scales.t())
        turned = weight.t().contiguous()
        return input_gradient_fp8(*rounded, turned, grad.dtype), *[None] * 5


def _sides(
    rounded: Tensor, row_scales: Tensor, weight: Tensor, weight_scales: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rounded, weight.t(), row_scales, weight_scales.t()


def _scaled(
    left: Tensor,
    right: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """The product of two rounded matrices; where no unit does it, the same numbers by hand."""
    if left.is_cuda:
        added = None if bias is None else bias.to(dtype)
        rows = left.contiguous()  # rounding keeps the strides of what came in; kernels want rows
        return torch._scaled_mm(
            rows, right, left_scales, right_scales, added, out_dtype=dtype, use_fast_accum=True
        )
    with torch.autocast(left.device.type, enabled=False):
        product = (left.float() * left_scales) @ (right.float() * right_scales)
    return (product if bias is None else product + bias.float()).to(dtype)
