"""Compute a frozen linear layer and its LoRA with as few passes over memory as possible.

For rows x, frozen weight W (bf16), bias b and LoRA factors A ("down"), B ("up") with scale s:

    y = x W^T + b + s (x A^T) B^T

**Order of the matmuls.** Written with separate operators, the LoRA term is a tensor of y's size
that a third kernel reads and adds. Here it is computed first, into y, and the frozen matmul then
accumulates onto it in place (`y.addmm_`, a GEMM with beta = 1). The frozen matmul is limited by
arithmetic, so reading y in its epilogue costs nothing, and the extra pass is gone. The gradient of
the input, `g W + s (g B) A`, is computed in the same order.

**fp8.** `Q` rounds a row to e4m3 with a scale of its own, max |row| / 448. The relative error of a
rounded number is at most eps = 2^-4 (for numbers below 2^-6 after scaling, which are subnormal in
e4m3, the absolute error is bounded instead). So that large inputs are not rounded, the component of
x in the outlier subspace is removed first and multiplied in bf16. The rows of V are an orthonormal
basis of that subspace (see outlier_subspace.py):

    z = x V^T                       coefficients, (rows, dimensions)
    r = x - z V                     the rest, which is small
    y = Q(r) Q(W)^T  +  z (W V^T)^T  +  b + s (x A^T) B^T
        fp8 tensor cores  bf16: one matmul of [s x A^T, z] with [B, W V^T]

Only r and W are rounded, so the error is bounded by |r| instead of by |x|:

    |y - exact| <= (2 eps + eps^2) |r| |W_j|      for each row r and output column j

fp8 kernels cannot accumulate, so here the order is reversed: the frozen matmul comes first, and the
bf16 matmul adds the LoRA and the outliers onto it together.

**Gradient of the input in fp8.** `g W` needs W's scales along the summed axis, where a kernel
cannot apply them. With W = diag(w) W8 they move into the gradient, g W = (g diag(w)) W8, so one
stored copy of W serves forward and backward. Gradients are rounded without outlier correction:
their rounding errors average out over tokens (docs/precision.md).

These computations are registered as operators (operators.py): compiled graphs call them unchanged,
and the checkpointing policy recognises them as matmuls by name (offload/checkpointing.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_variadic

from gracetune.adapters.compute.operators import Operator

if TYPE_CHECKING:
    from typing import Any

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP8_OUTPUT_DTYPE = torch.bfloat16
"""Output dtype of fp8 matmuls: the only one that every kernel supports."""
MIN_SCALE = 1e-12
"""Smallest value that is used as a row's maximum, so that the scale of a row of zeros is not 0."""


class LoraMatmul(torch.autograd.Function):
    """Autograd function for a frozen linear layer with a LoRA, computed by `lora_linear`.

    It has gradients for the input and both LoRA factors.
    """

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
        """Return the layer's output for `x` of shape (rows, columns)."""
        y: Tensor
        y, hidden = lora_linear(x, weight, bias, down, up, scale)
        ctx.save_for_backward(x, hidden, weight, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`; None for frozen weight and bias."""
        grad = grads[0]
        x, hidden, weight, down, up = ctx.saved_tensors
        grad_down, grad_up, grad_hidden = lora_gradients(grad, x, hidden, up, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_input_gradient(grad, grad_hidden, weight, down)
        return grad_x, None, None, grad_down, grad_up, None


class LoraMatmulFp8(torch.autograd.Function):
    """Autograd function for a frozen linear layer with a LoRA; the frozen weight is in fp8.

    The matmuls with the frozen weight are in fp8 in forward and in backward.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  autograd functions take tensors one by one
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_scales: Tensor,
        bias: Tensor | None,
        outlier_basis: Tensor | None,
        outlier_weight: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
    ) -> Tensor:
        """Return the layer's output for `x` of shape (rows, columns).

        `weight` is in fp8, and `weight_scales` has the scale of each of its rows. `outlier_basis`
        spans the directions in which x is large. They are multiplied with `outlier_weight` in bf16
        instead of being rounded to fp8; both are None for a layer without calibration.
        """
        outliers, rest = None, x
        if outlier_basis is not None:
            outliers, rest = split_outliers(x, outlier_basis)
        frozen = (*quantize_rows(rest), weight, weight_scales, bias, outliers, outlier_weight)
        y: Tensor
        y, hidden = lora_linear_fp8(x, *frozen, down, up, scale)
        ctx.save_for_backward(x, hidden, weight, weight_scales, down, up)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`; None for frozen tensors."""
        grad = grads[0]
        x, hidden, weight, weight_scales, down, up = ctx.saved_tensors
        grad_down, grad_up, grad_hidden = lora_gradients(grad, x, hidden, up, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            quantized = quantize_rows(grad.float() * weight_scales.t())
            weight_t = weight.t().contiguous()
            grad_x = lora_input_gradient_fp8(*quantized, grad_hidden, weight_t, down)
        return grad_x, None, None, None, None, None, grad_down, grad_up, None


class FrozenMatmulFp8(torch.autograd.Function):
    """Autograd function for a frozen linear layer in fp8 without a LoRA."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        weight_scales: Tensor,
        bias: Tensor | None,
        outlier_basis: Tensor | None,
        outlier_weight: Tensor | None,
    ) -> Tensor:
        """Return the layer's output for `x` of shape (rows, columns).

        `weight` is in fp8, and `weight_scales` has the scale of each of its rows. `outlier_basis`
        spans the directions in which x is large. They are multiplied with `outlier_weight` in bf16
        instead of being rounded to fp8; both are None for a layer without calibration.
        """
        ctx.save_for_backward(weight, weight_scales)
        outliers, rest = None, x
        if outlier_basis is not None:
            outliers, rest = split_outliers(x, outlier_basis)
        rows, scales = quantize_rows(rest)
        y = scaled_matmul(rows, weight.t(), scales, weight_scales.t(), x.dtype, bias)
        if outliers is None or outlier_weight is None:
            return y
        return torch.addmm(y, outliers, outlier_weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input, and None for all frozen tensors."""
        grad = grads[0]
        weight, weight_scales = ctx.saved_tensors
        quantized = quantize_rows(grad.float() * weight_scales.t())
        weight_t = weight.t().contiguous()
        return input_gradient_fp8(*quantized, weight_t, grad.dtype), *[None] * 5


# Operators. `hidden` is x A^T, the narrow tensor between the two LoRA factors.


@Operator
def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return y = x W^T + b + s (x A^T) B^T, and `hidden` = x A^T.

    W is the frozen `weight`, A is `down`, B is `up` and s is `scale`.
    """
    hidden = functional.linear(x, down)
    return lora_output(hidden, up, bias, scale).addmm_(x, weight.t()), hidden


@Operator
def lora_linear_fp8(  # noqa: PLR0913  operators take tensors one by one
    x: Tensor,
    quantized: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    outliers: Tensor | None,
    outlier_weight: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output of a frozen fp8 layer with a LoRA, and `hidden`, the input times `down`^T.

    `quantized` and `row_scales` are the part of x that was rounded to fp8. `outliers`, of shape
    (rows, dimensions), are the coefficients of x in the outlier basis, and `outlier_weight` is the
    weight times that basis; they are multiplied in bf16. The LoRA's input is x itself, not rounded.
    """
    y = scaled_matmul(quantized, weight.t(), row_scales, weight_scales.t(), x.dtype, bias)
    hidden = functional.linear(x, down)
    if outliers is None or outlier_weight is None:
        return y.addmm_(hidden, up.t(), alpha=scale), hidden
    narrow, wide = torch.cat([hidden * scale, outliers], 1), torch.cat([up, outlier_weight], 1)
    return y.addmm_(narrow, wide.t()), hidden


@Operator
def split_outliers(x: Tensor, outlier_basis: Tensor) -> tuple[Tensor, Tensor]:
    """Split x into its coefficients in the outlier basis, and the rest, which is small.

    The rows of `outlier_basis` are the few directions in which x is largest. This is a custom
    operator because activation checkpointing saves the results of matmuls, but should not save
    these.
    """
    outliers = functional.linear(x, outlier_basis)
    return outliers, torch.addmm(x, outliers, outlier_basis, alpha=-1)


@Operator
def lora_gradients(
    grad: Tensor, x: Tensor, hidden: Tensor, up: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the LoRA's factors `down` and `up`, and of `hidden`.

    `hidden` is x `down`^T, the narrow tensor between the factors. `grad` is the output's gradient.
    """
    grad_hidden, grad_up = grad @ up, grad.t() @ hidden
    if scale != 1.0:
        torch._foreach_mul_([grad_hidden, grad_up], scale)
    return grad_hidden.t() @ x, grad_up, grad_hidden


@Operator
def lora_input_gradient(grad: Tensor, grad_hidden: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    """Return the gradient of the input of a frozen linear layer with a LoRA.

    `grad` is the output's gradient, and `grad_hidden` that of the tensor between the LoRA factors.
    The part from the LoRA is computed first, and the part from the frozen weight is added in place.
    """
    return (grad_hidden @ down).addmm_(grad, weight)


@Operator
def lora_input_gradient_fp8(
    quantized: Tensor, row_scales: Tensor, grad_hidden: Tensor, weight_t: Tensor, down: Tensor
) -> Tensor:
    """Return the gradient of the input of a LoRA layer with a frozen fp8 weight W.

    `quantized` and `row_scales` are the output's gradient, first multiplied by W's scales and then
    rounded to fp8. `grad_hidden` is the gradient of the tensor between the LoRA factors. `weight_t`
    is W^T, contiguous; the caller transposes it, because `torch.compile` does that faster outside
    of a custom operator.
    """
    return input_gradient_fp8(quantized, row_scales, weight_t, down.dtype).addmm_(grad_hidden, down)


lora_linear.register_fake(lambda x, weight, _, down, *__: _empty_outputs(x, weight, down))
lora_linear_fp8.register_fake(
    lambda x, _, __, weight, ___, ____, _____, ______, down, *_______: _empty_outputs(
        x, weight, down
    )
)
split_outliers.register_fake(
    lambda x, basis: (x.new_empty(x.shape[0], basis.shape[0]), x.new_empty(x.shape))
)
lora_gradients.register_fake(
    lambda _, x, hidden, up, __: (
        x.new_empty(up.shape[1], x.shape[1]),
        torch.empty_like(up),
        torch.empty_like(hidden),
    )
)
lora_input_gradient.register_fake(
    lambda grad, _, weight, __: grad.new_empty(grad.shape[0], weight.shape[1])
)
lora_input_gradient_fp8.register_fake(
    lambda quantized, _, __, weight_t, down: down.new_empty(quantized.shape[0], weight_t.shape[0])
)


def _empty_outputs(x: Tensor, weight: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    # `len(x)` would fix the number of tokens in a compiled graph: it is always a plain int.
    rows = x.shape[0]
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, down.shape[0])


def lora_output(hidden: Tensor, up: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return bias + scale hidden up^T, the output of a layer without its frozen matmul.

    `hidden` is x A^T for the input x and the LoRA's factor A. The caller adds the frozen matmul to
    the result in place.
    """
    if bias is None:
        return (hidden * scale) @ up.t()
    return torch.addmm(bias, hidden, up.t(), alpha=scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to fp8, with a scale for each row; return the fp8 numbers and the scales."""
    scales = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=MIN_SCALE) / FP8_MAX
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def input_gradient_fp8(
    quantized: Tensor, row_scales: Tensor, weight_t: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the part of the input's gradient that comes from a frozen fp8 weight W.

    `quantized` and `row_scales` are the output's gradient, first multiplied by W's scales and then
    rounded to fp8. `weight_t` is W^T, contiguous.
    """
    ones = torch.ones(1, len(weight_t), device=weight_t.device)
    return scaled_matmul(quantized, weight_t.t(), row_scales, ones, dtype, None)


def scaled_matmul(
    left: Tensor,
    right: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Multiply two fp8 matrices with their scales. On a CPU, the fp8 numbers are cast to fp32.

    A `TorchFunctionMode` can replace this function, as the planner does to trace the GPU's kernel.
    """
    if has_torch_function_variadic(left, right):
        arguments = (left, right, left_scales, right_scales, dtype, bias)
        replaced: Tensor = handle_torch_function(scaled_matmul, (left, right), *arguments)
        return replaced
    if left.is_cuda:
        return scaled_matmul_kernel(left, right, left_scales, right_scales, dtype, bias)
    with torch.autocast(left.device.type, enabled=False):
        y = (left.float() * left_scales) @ (right.float() * right_scales)
    return (y if bias is None else y + bias.float()).to(dtype)


def scaled_matmul_kernel(
    left: Tensor,
    right: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Multiply two fp8 matrices with their scales by the kernel for fp8 tensor cores."""
    cast_bias = None if bias is None else bias.to(dtype)
    rows = left.contiguous()  # rounding keeps the input's strides; the kernel needs rows
    return torch._scaled_mm(
        rows, right, left_scales, right_scales, cast_bias, out_dtype=dtype, use_fast_accum=True
    )
