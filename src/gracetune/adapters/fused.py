"""The fast path of LoRA: peft's layers keep their weights and names, and compute by `products`.

peft's own forward stays for everything it alone can do: dropout, DoRA, several adapters at once, an
adapter that is switched off or merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from gracetune.adapters.products import (
    FrozenProductFp8,
    LoraProduct,
    LoraProductFp8,
    round_rows,
)
from gracetune.errors import GracetuneError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LEAST_FP8 = (8, 9)
"""The compute capability from which on there are fp8 products."""


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight is stored, moved and multiplied in fp8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        """Of what goes in and out."""
        weight, scales = round_rows(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer, within the rounding."""
        y: Tensor = FrozenProductFp8.apply(  # type: ignore[no-untyped-call]
            x.to(self.dtype).flatten(0, -2), self.weight, self.weight_scales, self.bias
        )
        return y.view(*x.shape[:-1], -1)


def demand_fp8(device: torch.device) -> None:
    """Refuse fp8 products by name where the hardware has none."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_FP8:
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    raise GracetuneError(
        f"model.frozen_compute: fp8 needs a GPU with fp8 products (compute capability "
        f"{'.'.join(map(str, LEAST_FP8))} or more); {name} has none. Set it to bf16."
    )


def freeze_in_fp8(blocks: Iterable[nn.Module]) -> int:
    """Store every frozen linear weight of the blocks in fp8; gives how many."""
    done = 0
    for block in blocks:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and not child.weight.requires_grad:
                    module._modules[name] = Fp8Linear(child)
                    done += 1
    return done


def fuse_lora(model: nn.Module) -> int:
    """Let the model's LoRA layers compute by the fused products; gives how many could."""
    layers = [module for module in model.modules() if type(module) is LoraLinear]
    fused = [Fused(layer) for layer in layers if _fusable(layer)]
    if fused:
        model.register_forward_pre_hook(lambda *_: _refresh(fused), prepend=True)
    return len(fused)


class Fused:
    """One LoRA layer's fast path, and its halves as the products want them."""

    def __init__(self, layer: LoraLinear) -> None:
        (self.name,) = layer.lora_A
        self.base = layer.get_base_layer()
        self.dtype = self.base.dtype if isinstance(self.base, Fp8Linear) else self.base.weight.dtype
        self.layer = layer
        self.by_peft = layer.forward
        self.trained = (layer.lora_A[self.name].weight, layer.lora_B[self.name].weight)
        self.halves: tuple[Tensor, Tensor] = self.trained
        layer.forward = self.forward

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """What peft gives, where that is a plain LoRA at work."""
        layer, base = self.layer, self.base
        off = layer.disable_adapters or layer.merged or layer.active_adapters != [self.name]
        # Autocast rounds what is in fp32; these products would not be rounded, and be slow.
        if off or (self.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)):
            plain: Tensor = self.by_peft(x, *args, **kwargs)
            return plain
        rows, scale = x.to(self.dtype).flatten(0, -2), layer.scaling[self.name]
        y: Tensor
        if isinstance(base, Fp8Linear):
            y = LoraProductFp8.apply(  # type: ignore[no-untyped-call]
                rows, base.weight, base.weight_scales, base.bias, *self.halves, scale
            )
        else:
            y = LoraProduct.apply(  # type: ignore[no-untyped-call]
                rows, base.weight, base.bias, *self.halves, scale
            )
        return y.view(*x.shape[:-1], -1)


class CastTogether(torch.autograd.Function):
    """Many small tensors in another type by a few kernels; their gradients come back likewise."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copies, in order."""
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_copied(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What was not used gets none."""
        used = [index for index, grad in enumerate(grads) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        copies = dict(zip(used, _copied(given, [ctx.dtypes[index] for index in used]), strict=True))
        return None, *(copies.get(index) for index in range(len(grads)))


def _refresh(fused: Sequence[Fused]) -> None:
    """Once a pass: the halves as they are now, in the type of the products."""
    for dtype in {one.dtype for one in fused}:
        alike = [one for one in fused if one.dtype == dtype]
        weights = [weight for one in alike for weight in one.trained]
        if any(weight.dtype != dtype for weight in weights):
            weights = CastTogether.apply(dtype, *weights)  # type: ignore[no-untyped-call]
        for one, down, up in zip(alike, weights[::2], weights[1::2], strict=True):
            one.halves = (down, up)


def _copied(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(t, dtype=d) for t, d in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def _fusable(layer: LoraLinear) -> bool:
    base = layer.get_base_layer()
    names = list(layer.lora_A)
    return (
        (type(base) is nn.Linear or type(base) is Fp8Linear)
        and len(names) == 1
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and not layer.use_dora[names[0]]
        and layer.lora_B[names[0]].bias is None
    )
