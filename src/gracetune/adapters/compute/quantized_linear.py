"""Store frozen linear layers in int8, fp8 or nf4, and compute with them.

`QuantizedLinear` replaces an `nn.Linear`. It stores its weight W as a few plain tensors, `parts`:
quantized values and their scales. These are streamed, copied and saved like any other weights. A
matmul dequantizes W into memory that is freed after the matmul:

    y      = x W^T + b
    grad x = g W            W is dequantized again, from the stored parts

Autograd saves the parts, which backward can fetch from host memory if they are streamed. It would
save the dequantized weight, twice to four times as large, if dequantizing were a separate operator.
So each matmul is one custom operator together with its dequantization.

    int8   round(W / scale), one fp32 scale per row: max |row| / 127.5
    fp8    W / scale in e4m3, one fp32 scale per row: max |row| / 448
    nf4    bitsandbytes' 4-bit values; 64 of them share a scale, and the scales are 8-bit values

A LoRA on such a layer computes through fused_lora.py.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gracetune.adapters.compute.lora_matmul import (
    FP8,
    lora_gradients,
    lora_output,
    quantize_rows,
)
from gracetune.adapters.compute.operators import Operator
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from typing import Any

QuantizationKind = Literal["fp8", "int8", "nf4"]
"""A value of `model.quantize`."""
INT8_RANGE = -128, 127
INT8_STEPS = 127.5
"""Half of the number of steps between the smallest and the largest int8 value."""
MIN_INT8_SCALE = torch.finfo(torch.float32).eps
NF4_BLOCK, NF4_SCALES_BLOCK = 64, 256
"""Number of nf4 values that share a scale, and number of 8-bit scales that share one."""
PART_NAMES = ("weight", "weight_scales", "scale_scales", "scale_values", "scale_offset")
"""Names of the parameters that store a weight. Int8 and fp8 have the first two. In nf4 the scales
are 8-bit indices into `scale_values`, times `scale_scales`, plus `scale_offset`."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight is stored in int8, fp8 or nf4.

    It is an `nn.Linear` so that adapters recognise it, but `weight` holds quantized values.
    """

    def __init__(self, linear: nn.Linear, kind: QuantizationKind) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind = kind
        self.dtype = linear.weight.dtype
        """Data type of the original weight."""
        parts = _quantize(linear.weight.detach(), kind)
        for name, part in zip(PART_NAMES, parts, strict=False):
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        self.bias = linear.bias
        self._num_parts = len(parts)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that store the weight: values, scales, and for nf4 the scales' own scales."""
        return [cast("Tensor", getattr(self, name)) for name in PART_NAMES[: self._num_parts]]

    @property
    def shape(self) -> list[int]:
        """Shape of the dequantized weight."""
        return [self.out_features, self.in_features]

    def dequantize(self) -> Tensor:
        """Return the weight in its original data type."""
        return _dequantize(self.parts, self.kind, self.shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b in the data type of x, or in that of autocast."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rows = x.flatten(0, -2)
        if torch.is_grad_enabled() and rows.requires_grad:
            y: Tensor = QuantizedMatmul.apply(  # type: ignore[no-untyped-call]
                rows, self.bias, self.kind, self.shape, *self.parts
            )
        else:  # the compiler of torch 2.13 fails on an autograd function that needs no gradient
            y = quantized_linear(rows, self.parts, self.kind, self.shape, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        """Return the sizes and the kind, which tell blocks apart that do different work."""
        return f"{super().extra_repr()}, kind={self.kind}, dtype={self.dtype}"


class QuantizedMatmul(torch.autograd.Function):
    """Autograd function for a frozen linear layer with a quantized weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, kind: str, shape: list[int], *parts: Tensor
    ) -> Tensor:
        """Return the layer's output for `x` of shape (rows, columns)."""
        ctx.save_for_backward(*parts)
        ctx.kind, ctx.shape = kind, shape
        y: Tensor = quantized_linear(x, list(parts), kind, shape, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input, and None for everything else."""
        parts = list(ctx.saved_tensors)
        grad_x = quantized_input_gradient(grads[0], parts, ctx.kind, ctx.shape)
        return grad_x, None, None, None, *[None] * len(parts)


class QuantizedLoraMatmul(torch.autograd.Function):
    """Autograd function for a frozen linear layer with a quantized weight and a LoRA."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        kind: str,
        shape: list[int],
        *parts: Tensor,
    ) -> Tensor:
        """Return the layer's output for `x` of shape (rows, columns)."""
        y: Tensor
        y, hidden = quantized_lora_linear(x, list(parts), kind, shape, bias, down, up, scale)
        ctx.save_for_backward(x, hidden, down, up, *parts)
        ctx.scale, ctx.kind, ctx.shape = scale, kind, shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the LoRA's factors, and None for the rest."""
        grad = grads[0]
        x, hidden, down, up, *parts = ctx.saved_tensors
        grad_down, grad_up, grad_hidden = lora_gradients(grad, x, hidden, up, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = quantized_lora_input_gradient(
                *(grad, grad_hidden, parts, ctx.kind, ctx.shape, down),
            )
        return grad_x, None, grad_down, grad_up, None, None, None, *[None] * len(parts)


# Operators. `parts`, `kind` and `shape` are those of a `QuantizedLinear`; `hidden` is x A^T, the
# narrow tensor between the LoRA's factors A ("down") and B ("up").


@Operator
def quantized_linear(
    x: Tensor, parts: list[Tensor], kind: str, shape: list[int], bias: Tensor | None
) -> Tensor:
    """Return x W^T + b for a quantized weight W."""
    return functional.linear(x, _dequantize(parts, kind, shape, x.dtype), _cast(bias, x.dtype))


@Operator
def quantized_lora_linear(
    x: Tensor,
    parts: list[Tensor],
    kind: str,
    shape: list[int],
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return x W^T + b + scale (x down^T) up^T for a quantized weight W, and x down^T."""
    hidden = functional.linear(x, down)
    y = lora_output(hidden, up, _cast(bias, x.dtype), scale)
    return y.addmm_(x, _dequantize(parts, kind, shape, x.dtype).t()), hidden


@Operator
def quantized_input_gradient(
    grad: Tensor, parts: list[Tensor], kind: str, shape: list[int]
) -> Tensor:
    """Return the gradient of a layer's input, from the output's gradient `grad`."""
    return grad @ _dequantize(parts, kind, shape, grad.dtype)


@Operator
def quantized_lora_input_gradient(
    grad: Tensor,
    grad_hidden: Tensor,
    parts: list[Tensor],
    kind: str,
    shape: list[int],
    down: Tensor,
) -> Tensor:
    """Return the gradient of the input of a layer with a LoRA.

    `grad` is the output's gradient, and `grad_hidden` that of the tensor between the factors.
    """
    return (grad_hidden @ down).addmm_(grad, _dequantize(parts, kind, shape, grad.dtype))


quantized_linear.register_fake(lambda x, _, __, shape, ___: x.new_empty(x.shape[0], shape[0]))
quantized_lora_linear.register_fake(
    lambda x, _, __, shape, ___, down, *____: (
        x.new_empty(x.shape[0], shape[0]),
        x.new_empty(x.shape[0], down.shape[0]),
    )
)
quantized_input_gradient.register_fake(
    lambda grad, _, __, shape: grad.new_empty(grad.shape[0], shape[1])
)
quantized_lora_input_gradient.register_fake(
    lambda grad, _, __, ___, shape, ____: grad.new_empty(grad.shape[0], shape[1])
)


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


# Formats


def _quantize(weight: Tensor, kind: QuantizationKind) -> tuple[Tensor, ...]:
    if kind == "nf4":
        return _quantize_nf4(weight)
    if kind == "fp8":
        values, scales = quantize_rows(weight)
        return values.view(torch.uint8), scales  # peft would cast an adapter to a float8 type
    largest = weight.abs().amax(dim=-1, keepdim=True).float()
    scales = (largest / INT8_STEPS).clamp(min=MIN_INT8_SCALE)
    return (weight * (1.0 / scales)).round().clamp(*INT8_RANGE).to(torch.int8), scales


def _dequantize(parts: list[Tensor], kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return the weight that the parts store. It is computed in fp32 and rounded once."""
    values, scales, *nested = parts
    if kind == "int8":
        weight = torch.empty(shape, dtype=dtype, device=values.device)
        return torch.mul(values, scales, out=weight)
    if kind == "fp8":
        return values.view(FP8).to(dtype).mul_(scales)
    weight = dequantize_nf4(values, scales, *nested, shape, dtype)
    return cast("Tensor", weight.to(dtype))


def _quantize_nf4(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of an nf4 weight, from bitsandbytes; on the meta device, their shapes."""
    if weight.is_meta:
        num_scales = math.ceil(weight.numel() / NF4_BLOCK)
        values = weight.new_empty(math.ceil(weight.numel() / 2), 1, dtype=torch.uint8)
        scale_scales = weight.new_empty(
            math.ceil(num_scales / NF4_SCALES_BLOCK), dtype=torch.float32
        )
        scale_values = scale_scales.new_empty(NF4_SCALES_BLOCK)
        return (
            values,
            values.new_empty(num_scales),
            scale_scales,
            scale_values,
            scale_scales.new_empty(()),
        )
    values, state = _bitsandbytes().quantize_4bit(
        weight, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    scales = state.state2
    assert scales.blocksize == NF4_SCALES_BLOCK, f"bitsandbytes groups {scales.blocksize} scales"
    return values, state.absmax, scales.absmax, scales.code.clone(), state.offset


# The operator is not in gracetune's namespace: it is no matmul, and the tracer must see one kernel.
@torch.library.custom_op("nf4::dequantize", mutates_args=())
def dequantize_nf4(
    values: Tensor,
    scales: Tensor,
    scale_scales: Tensor,
    scale_values: Tensor,
    scale_offset: Tensor,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """Return an nf4 weight in bf16, fp16 or fp32; in fp32 for another dtype."""
    package = _bitsandbytes()
    state = package.QuantState(
        absmax=scales,
        shape=torch.Size(shape),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=_nf4_dtype(dtype),
        offset=scale_offset.float(),
        state2=package.QuantState(
            absmax=scale_scales.float(),
            code=scale_values.float(),
            blocksize=NF4_SCALES_BLOCK,
            dtype=torch.float32,
        ),
    )
    weight: Tensor = package.dequantize_4bit(values, state)
    return weight


@dequantize_nf4.register_fake
def _(
    values: Tensor,
    scales: Tensor,  # noqa: ARG001
    scale_scales: Tensor,  # noqa: ARG001
    scale_values: Tensor,  # noqa: ARG001
    scale_offset: Tensor,  # noqa: ARG001
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return values.new_empty(shape, dtype=_nf4_dtype(dtype))


def _nf4_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _bitsandbytes() -> Any:
    try:
        return import_module("bitsandbytes.functional")
    except ImportError as error:
        raise ConfigError(
            f"model.quantize is 'nf4', which needs the package bitsandbytes ({error}). Run "
            "`pip install gracetune[quantize]`, or set model.quantize: int8, fp8 or none."
        ) from error
