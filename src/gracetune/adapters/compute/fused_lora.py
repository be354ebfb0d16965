"""Run peft's LoRA layers through the fused matmuls of lora_matmul.py.

peft's modules keep their weights and names; only `forward` is replaced. Layers with dropout, DoRA
or several adapters keep peft's forward, and so does an adapter while it is disabled or merged.

LoRA weights are trained in fp32. A hook on the model casts all of them to the compute dtype at the
start of each forward pass, in a few kernels instead of two for each layer.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from gracetune.adapters.compute.fp8_linear import Fp8Linear
from gracetune.adapters.compute.lora_matmul import (
    FP8_OUTPUT_DTYPE,
    LoraMatmul,
    LoraMatmulFp8,
    lora_output,
)
from gracetune.adapters.compute.operators import Operator
from gracetune.adapters.compute.quantized_linear import QuantizedLinear, QuantizedLoraMatmul

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import ExitStack


def fuse_lora(model: nn.Module, undo: ExitStack | None = None) -> int:
    """Compute a model's LoRA layers and the frozen layers under them by fused matmuls.

    Replaces the forward of every peft LoRA layer that has one adapter without dropout, DoRA or
    bias. Returns the number of these layers. Callbacks that restore the model are pushed onto
    `undo`.
    """
    layers = [module for module in model.modules() if type(module) is LoraLinear]
    fused = [FusedLora(layer) for layer in layers if _is_fusable(layer)]
    if not fused:
        return 0
    by_dtype = [
        (dtype, [one for one in fused if one.dtype == dtype])
        for dtype in dict.fromkeys(one.dtype for one in fused)
    ]
    hook = model.register_forward_pre_hook(lambda *_: _refresh_casts(by_dtype), prepend=True)
    if undo is not None:
        undo.callback(hook.remove)
        for one in fused:
            undo.callback(setattr, one.layer, "forward", one.peft_forward)
    return len(fused)


def runs_in_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return True if the whole model computes in this dtype, so that autocast is not needed.

    Every parameter must have the dtype, or be a LoRA weight that is cast to it before use.
    """
    cast = {
        weight
        for layer in model.modules()
        if isinstance(layer.forward, MethodType)
        and isinstance(fused := layer.forward.__self__, FusedLora)
        and fused.dtype == dtype
        for weight in fused.weights
    }
    return all(
        parameter.dtype == dtype or parameter in cast
        for module in model.modules()
        # The inputs and outputs of these keep the original type.
        if not isinstance(module, Fp8Linear)
        and not (isinstance(module, QuantizedLinear) and module.dtype == dtype)
        for parameter in module.parameters(recurse=False)
    )


class FusedLora:
    """Replaces the forward of one of peft's LoRA layers by a matmul fused with the frozen one."""

    def __init__(self, layer: LoraLinear) -> None:
        (self.name,) = layer.lora_A
        self.down = layer.lora_A[self.name]
        """The linear layer with the factor A."""
        self.up = layer.lora_B[self.name]
        """The linear layer with the factor B."""
        self.base = layer.get_base_layer()
        self.dtype = _matmul_dtype(self.base)
        """Data type of the matmuls."""
        self.layer = layer
        self.peft_forward = layer.forward
        self.cast_weights: tuple[Tensor, Tensor] | None = None
        """Copies of the factors A and B in `dtype`; None if they are trained in that dtype."""
        layer.forward = self.forward

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """The trained factors A and B.

        They are read from the layer each time, because `functional_call` may have replaced them.
        """
        return self.down.weight, self.up.weight

    @property
    def scale(self) -> float:
        """The LoRA's scale, alpha / rank."""
        scaling: float = self.layer.scaling[self.name]
        return scaling

    def compute_weights(self) -> tuple[Tensor, Tensor]:
        """Return the factors A and B in `dtype`, the data type of the matmuls."""
        return self.weights if self.cast_weights is None else self.cast_weights

    def is_active(self, x: Tensor) -> bool:
        """Return True if the fused forward can be used now.

        The adapter must be enabled, active and not merged, and an fp32 layer must not be under
        autocast.
        """
        layer = self.layer
        # peft's other properties say the same after more calls, which eager blocks would notice.
        off = (
            layer.disable_adapters
            or layer.merged_adapters
            or layer.active_adapter not in (self.name, [self.name])
        )
        # Autocast computes fp32 layers in bf16. The fused matmul would stay in fp32, and be slow.
        needs_autocast = self.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
        return not (off or needs_autocast)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the layer's output, from the fused matmul if it can be used, else from peft."""
        if not self.is_active(x):
            plain: Tensor = self.peft_forward(x, *args, **kwargs)
            return plain
        base, rows = self.base, x.to(self.dtype).flatten(0, -2)
        y: Tensor
        if isinstance(base, Fp8Linear):
            y = LoraMatmulFp8.apply(  # type: ignore[no-untyped-call]
                rows, *base.frozen_tensors, *self.compute_weights(), self.scale
            )
            y = base.to_layer_dtype(y)
        elif isinstance(base, QuantizedLinear):
            y = QuantizedLoraMatmul.apply(  # type: ignore[no-untyped-call]
                rows,
                base.bias,
                *self.compute_weights(),
                self.scale,
                base.kind,
                base.shape,
                *base.parts,
            )
        else:
            y = LoraMatmul.apply(  # type: ignore[no-untyped-call]
                rows, base.weight, base.bias, *self.compute_weights(), self.scale
            )
        return y.view(*x.shape[:-1], y.shape[-1])


def _matmul_dtype(base: nn.Linear | Fp8Linear) -> torch.dtype:
    if isinstance(base, Fp8Linear):
        return FP8_OUTPUT_DTYPE
    return base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype


def _is_fusable(layer: LoraLinear) -> bool:
    base = layer.get_base_layer()
    names = list(layer.lora_A)
    return (
        type(base) in (nn.Linear, Fp8Linear, QuantizedLinear)
        and not any(parameter.requires_grad for parameter in base.parameters())
        and len(names) == 1
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and not layer.use_dora[names[0]]
        and layer.lora_B[names[0]].bias is None
    )


# Casting all LoRA weights at once


class MultiTensorCast(torch.autograd.Function):
    """Autograd function that casts many small tensors, and their gradients, with a few kernels."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return a copy of each tensor in `dtype`."""
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_cast_copies(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return each gradient in the dtype of its tensor before the cast; None if it has none."""
        used = [index for index, grad in enumerate(grads) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        dtypes = [ctx.dtypes[index] for index in used]
        copies = dict(zip(used, _cast_copies(present, dtypes), strict=True))
        return None, *(copies.get(index) for index in range(len(grads)))


def _refresh_casts(by_dtype: Iterable[tuple[torch.dtype, Sequence[FusedLora]]]) -> None:
    """Cast the LoRA weights of all layers to the compute dtype, before each forward pass."""
    for dtype, layers in by_dtype:
        # Not by attribute: a module looks for those in Python code, for hundreds of layers here.
        weights = [linear._parameters["weight"] for one in layers for linear in (one.down, one.up)]
        if {weight.dtype for weight in weights} == {dtype}:
            for one in layers:
                one.cast_weights = None
            continue
        copies = MultiTensorCast.apply(dtype, *weights)  # type: ignore[no-untyped-call]
        for one, down, up in zip(layers, copies[::2], copies[1::2], strict=True):
            one.cast_weights = (down, up)


def _cast_copies(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(t, dtype=d) for t, d in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


# LoRA layers that share their input, such as query, key and value. Their A factors are stacked, so
# that the input is read once in forward and once for the gradients of A; the gradient of the input
# is accumulated by the matmuls.


class SharedInputLora:
    """Calls several LoRA layers that always have the same input, such as query, key and value."""

    def __init__(self, layers: Sequence[FusedLora]) -> None:
        self._layers = tuple(layers)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return the output of each layer for the input `x`, in the order of the layers."""
        layers = self._layers
        if not all(layer.is_active(x) for layer in layers):
            return [layer.forward(x) for layer in layers]
        weights = [layer.compute_weights() for layer in layers]
        outputs = SharedInputLoraMatmul.apply(  # type: ignore[no-untyped-call]
            x.to(layers[0].dtype).flatten(0, -2),
            torch.cat([down for down, _ in weights]),
            layers[0].scale,
            *(layer.base.weight for layer in layers),
            *(layer.base.bias for layer in layers),
            *(up for _, up in weights),
        )
        return [y.view(*x.shape[:-1], y.shape[-1]) for y in outputs]


def fuse_shared_input(layers: Sequence[nn.Module]) -> SharedInputLora | None:
    """Return a callable that computes LoRA layers with the same input together, or None.

    The layers must have been changed by `fuse_lora` and have the same compute dtype, scale and
    shape of A, and their frozen layers must be plain `nn.Linear` layers with a bias. Otherwise the
    result is None.
    """
    fused = [
        layer.forward.__self__
        for layer in layers
        if isinstance(layer.forward, MethodType) and isinstance(layer.forward.__self__, FusedLora)
    ]
    if len(fused) < len(layers):
        return None
    kinds = {(one.dtype, one.scale, *one.weights[0].shape) for one in fused}
    plain = all(type(one.base) is nn.Linear and one.base.bias is not None for one in fused)
    return SharedInputLora(fused) if plain and len(kinds) == 1 else None


class SharedInputLoraMatmul(torch.autograd.Function):
    """Autograd function that computes several LoRA layers with the same input.

    It has gradients for the input and all LoRA factors.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, scale: float, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the output of each LoRA layer for the same input `x`.

        `down` is the stacked A factors. `rest` is all frozen weights, then all biases, then all B
        factors.
        """
        weights, biases, ups = _split_thirds(rest)
        *outputs, hidden = lora_linears(x, weights, biases, down, ups, scale)
        ctx.save_for_backward(x, hidden, down, *weights, *ups)
        ctx.scale = scale
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`; None for frozen tensors."""
        x, hidden, down, *rest = ctx.saved_tensors
        weights, ups = rest[: len(grads)], rest[len(grads) :]
        incoming = list(grads)
        grad_down, grad_hidden, *grad_ups = lora_linears_gradients(
            incoming, x, hidden, ups, ctx.scale
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_linears_input_gradient(incoming, grad_hidden, weights, down)
        return grad_x, grad_down, None, *([None] * (2 * len(grads))), *grad_ups


@Operator
def lora_linears(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    down: Tensor,
    ups: list[Tensor],
    scale: float,
) -> list[Tensor]:
    """Return the output of each LoRA layer for the same input x, and `hidden` as the last tensor.

    `down` is the stacked A factors of all layers, and `hidden` is x down^T.
    """
    hidden = x @ down.t()
    parts = hidden.chunk(len(ups), dim=1)
    outputs = [
        lora_output(part, up, bias, scale).addmm_(x, weight.t())
        for part, up, bias, weight in zip(parts, ups, biases, weights, strict=True)
    ]
    return [*outputs, hidden]


@Operator
def lora_linears_gradients(
    grads: list[Tensor], x: Tensor, hidden: Tensor, ups: list[Tensor], scale: float
) -> list[Tensor]:
    """Return the gradients of the stacked A factors, of `hidden`, and of each B factor.

    `grads` are the gradients of the outputs of LoRA layers with the same input x, `hidden` is x
    times the transposed stack of A factors, and `ups` are the B factors.
    """
    grad_hidden = torch.empty_like(hidden)
    grad_parts = grad_hidden.chunk(len(ups), dim=1)
    for grad, up, grad_part in zip(grads, ups, grad_parts, strict=True):
        torch.mm(grad, up, out=grad_part)
    parts = hidden.chunk(len(ups), dim=1)
    grad_ups = [grad.t() @ part for grad, part in zip(grads, parts, strict=True)]
    if scale != 1.0:
        torch._foreach_mul_([grad_hidden, *grad_ups], scale)
    return [grad_hidden.t() @ x, grad_hidden, *grad_ups]


@Operator
def lora_linears_input_gradient(
    grads: list[Tensor], grad_hidden: Tensor, weights: list[Tensor], down: Tensor
) -> Tensor:
    """Return the gradient of the input that several LoRA layers share, summed over the layers."""
    grad_x = grad_hidden @ down
    for grad, weight in zip(grads, weights, strict=True):
        grad_x.addmm_(grad, weight)
    return grad_x


lora_linears.register_fake(
    lambda x, weights, _, down, *__: [
        *(x.new_empty(x.shape[0], weight.shape[0]) for weight in weights),
        x.new_empty(x.shape[0], down.shape[0]),
    ]
)
lora_linears_gradients.register_fake(
    lambda _, x, hidden, ups, __: [
        x.new_empty(hidden.shape[1], x.shape[1]),
        torch.empty_like(hidden),
        *(torch.empty_like(up) for up in ups),
    ]
)
lora_linears_input_gradient.register_fake(
    lambda grads, _, weights, __: grads[0].new_empty(grads[0].shape[0], weights[0].shape[1])
)


def _split_thirds(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    size = len(tensors) // 3
    return list(tensors[:size]), list(tensors[size : 2 * size]), list(tensors[2 * size :])
