"""The fast path of LoRA: peft's layers keep their weights and names, and compute by `products`.

peft's own forward stays for everything it alone can do: dropout, DoRA, several adapters at once, an
adapter that is switched off or merged.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from gracetune.adapters.compute.lora_matmul import (
    FP8_OUTPUT_DTYPE,
    FrozenMatmulFp8,
    LoraMatmul,
    LoraMatmulFp8,
    lora_output,
    quantize_rows,
)
from gracetune.adapters.compute.outlier_subspace import InputObserver
from gracetune.errors import GracetuneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import ExitStack


MIN_FP8_CAPABILITY = (8, 9)
"""The compute capability from which on there are fp8 products."""
FP8_ALIGNMENT = 16
"""Kernels want both sides of a weight in multiples of this."""
BASE_LAYER = "base_layer"
"""What adapters, peft's and ours, call the layer that they are around."""


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight is stored, moved and multiplied in fp8.

    `along` are the main directions of its input, where they are known: what lies along them is
    multiplied in bf16.
    """

    def __init__(self, linear: nn.Linear, along: nn.Parameter | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        """Of the layer that this was."""
        weight, scales = quantize_rows(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias
        self.outlier_basis, self.outlier_weight = (
            along,
            None if along is None else _met(linear.weight, along),
        )
        """The directions, and the weight as it is met along them."""

    @property
    def frozen_tensors(self) -> tuple[Tensor | None, ...]:
        """All that the products take of this layer, in order."""
        return self.weight, self.weight_scales, self.bias, self.outlier_basis, self.outlier_weight

    def forward(self, x: Tensor) -> Tensor:
        """As the linear layer, within the rounding."""
        y: Tensor = FrozenMatmulFp8.apply(  # type: ignore[no-untyped-call]
            x.to(FP8_OUTPUT_DTYPE).flatten(0, -2), *self.frozen_tensors
        )
        return self.to_layer_dtype(y).view(*x.shape[:-1], -1)

    def to_layer_dtype(self, y: Tensor) -> Tensor:
        """A product in the type that whoever comes next was made for."""
        if self.dtype == FP8_OUTPUT_DTYPE or torch.is_autocast_enabled(y.device.type):
            return y
        return y.to(self.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Conversion:
    """What became of the frozen linear layers of some blocks."""

    converted: int
    """Computed in fp8 from now on."""
    skipped: int
    """As they were: no kernel takes their sides."""
    uncalibrated: int = 0
    """Of those, without main directions: nothing was seen of what comes into them."""


def check_fp8_support(device: torch.device) -> None:
    """Refuse fp8 products by name where the hardware has none."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        check_fp8_capability(torch.cuda.get_device_name(device), capability)
    else:
        check_fp8_capability(str(device), (0, 0))


def check_fp8_capability(name: str, capability: tuple[int, int]) -> None:
    """The same for a device by its name and compute capability."""
    if capability >= MIN_FP8_CAPABILITY:
        return
    raise GracetuneError(
        f"model.frozen_compute: fp8 needs a GPU with fp8 products (compute capability "
        f"{'.'.join(map(str, MIN_FP8_CAPABILITY))} or more); {name} has none. Set it to bf16."
    )


def convert_to_fp8(blocks: Iterable[nn.Module]) -> Fp8Conversion:
    """Store every frozen linear weight of the blocks in fp8, where a kernel takes its sides."""
    return _check_any([_freeze(block, None) for block in blocks])


def convert_to_fp8_calibrated(
    run: Callable[[], object], blocks: Sequence[nn.Module], device: torch.device
) -> Fp8Conversion:
    """The same with the main directions of what comes in when `run` passes each block first.

    Each block is on the device for its turn alone, and then back where it was. `run` may try again
    after a pass that came to no end: what has been frozen stays as it is.
    """
    watched = {block: _Turn(block, device) for block in blocks}
    try:
        with torch.no_grad():
            run()
    finally:
        for turn in watched.values():
            turn.close()
    return _check_any([turn.frozen or _freeze(block, None) for block, turn in watched.items()])


@torch.no_grad()
def _met(weight: Tensor, along: Tensor) -> nn.Parameter:
    across = weight.float() @ along.float().t()
    return nn.Parameter(across.to(FP8_OUTPUT_DTYPE), requires_grad=False)


class _Turn:
    """One block's part in the pass that shows layers their inputs."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.frozen: Fp8Conversion | None = None
        frozen = [p for p in block.parameters() if not p.requires_grad]
        self._block = block
        # Small ones may be on the device already.
        self._home = max(frozen, key=torch.numel, default=torch.empty(0)).device
        self._device = device
        self._watch = InputObserver([])
        self._handles = [
            block.register_forward_pre_hook(self._before),
            block.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        """Look no more: what comes too late changes nothing."""
        for handle in self._handles:
            handle.remove()
        self._end()

    def _before(self, block: nn.Module, _: object) -> None:
        self._watch.close()  # of a pass that came to no end
        block.to(self._device)
        if self.frozen is None:
            self._watch = InputObserver(
                (module if name == BASE_LAYER else child, child)
                for module, name, child in _frozen_linears(block)
            )

    def _after(self, block: nn.Module, _: object, __: object) -> None:
        if self.frozen is None:
            replaced = [child for *_, child in _frozen_linears(block)]
            self.frozen = _freeze(block, self._watch)
            for layer in replaced:  # adapters may refer to them, and to nothing on the device
                layer.to(self._home)
        self._end()

    def _end(self) -> None:
        """Nothing of this turn stays on the device."""
        self._watch.close()
        self._watch = InputObserver([])
        self._block.to(self._home)


def _freeze(block: nn.Module, seen: InputObserver | None) -> Fp8Conversion:
    count = left = blind = 0
    for module, name, child in _frozen_linears(block):
        if child.in_features % FP8_ALIGNMENT or child.out_features % FP8_ALIGNMENT:
            left += 1
            continue
        along = None if seen is None else seen.basis(child)
        module._modules[name] = Fp8Linear(child, along)
        count += 1
        blind += along is None
    return Fp8Conversion(count, left, blind)


def _frozen_linears(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Each with its place."""
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad:
                yield module, name, child


def _check_any(parts: Sequence[Fp8Conversion]) -> Fp8Conversion:
    """All of them together."""
    count, left, blind = (sum(each) for each in zip(*map(astuple, parts), strict=True))
    if not count:
        raise GracetuneError(
            f"model.frozen_compute is fp8, but none of {left} frozen linear layers has sides that "
            f"are multiples of {FP8_ALIGNMENT}, which fp8 products need. Set it to bf16."
        )
    return Fp8Conversion(count, left, blind)


def fuse_lora(model: nn.Module, undo: ExitStack | None = None) -> int:
    """Let the model's LoRA layers compute by the fused products; gives how many could.

    What would leave the model as it was is put on `undo`.
    """
    layers = [module for module in model.modules() if type(module) is LoraLinear]
    fused = [FusedLora(layer) for layer in layers if _fusable(layer)]
    if not fused:
        return 0
    hook = model.register_forward_pre_hook(lambda *_: _refresh(fused), prepend=True)
    if undo is not None:
        undo.callback(hook.remove)
        for one in fused:
            undo.callback(setattr, one.layer, "forward", one.peft_forward)
    return len(fused)


def runs_in_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all of a model is in this type, or is used in copies that are: nobody has to cast."""
    copied = {
        weight
        for layer in model.modules()
        if isinstance(layer.forward, MethodType)
        and isinstance(one := layer.forward.__self__, FusedLora)
        and one.dtype == dtype
        for weight in one.weights
    }
    return all(
        parameter.dtype == dtype or parameter in copied
        for module in model.modules()
        if not isinstance(module, Fp8Linear)  # it takes and gives what the layer did
        for parameter in module.parameters(recurse=False)
    )


class FusedLora:
    """One LoRA layer's fast path, and its halves as the products want them."""

    def __init__(self, layer: LoraLinear) -> None:
        (self.name,) = layer.lora_A
        self.base = layer.get_base_layer()
        self.dtype = (
            FP8_OUTPUT_DTYPE if isinstance(self.base, Fp8Linear) else self.base.weight.dtype
        )
        self.layer = layer
        self.peft_forward = layer.forward
        self.cast_weights: tuple[Tensor, Tensor] | None = None
        """The halves in the type of the products, where they are trained in another."""
        layer.forward = self.forward

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Both halves as the layer has them now: whoever traces it puts others in their place."""
        down, up = self.layer.lora_A[self.name], self.layer.lora_B[self.name]
        return down.weight, up.weight

    @property
    def scale(self) -> float:
        """Of what the LoRA adds."""
        scaling: float = self.layer.scaling[self.name]
        return scaling

    def compute_weights(self) -> tuple[Tensor, Tensor]:
        """Both halves in the type of the products."""
        return self.weights if self.cast_weights is None else self.cast_weights

    def is_active(self, x: Tensor) -> bool:
        """Whether this is a plain LoRA now: neither switched off nor merged."""
        layer = self.layer
        off = layer.disable_adapters or layer.merged or layer.active_adapters != [self.name]
        # Autocast rounds what is in fp32; these products would not be rounded, and be slow.
        by_torch = self.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
        return not (off or by_torch)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """What peft gives, where that is a plain LoRA at work."""
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
        else:
            y = LoraMatmul.apply(  # type: ignore[no-untyped-call]
                rows, base.weight, base.bias, *self.compute_weights(), self.scale
            )
        return y.view(*x.shape[:-1], -1)


class MultiTensorCast(torch.autograd.Function):
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


def _refresh(fused: Sequence[FusedLora]) -> None:
    """Once a pass: the halves as they are now, in the type of the products."""
    for dtype in {one.dtype for one in fused}:
        alike = [one for one in fused if one.dtype == dtype]
        weights = [weight for one in alike for weight in one.weights]
        if all(weight.dtype == dtype for weight in weights):
            for one in alike:
                one.cast_weights = None
            continue
        copies = MultiTensorCast.apply(dtype, *weights)  # type: ignore[no-untyped-call]
        for one, down, up in zip(alike, copies[::2], copies[1::2], strict=True):
            one.cast_weights = (down, up)


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
        and not any(parameter.requires_grad for parameter in base.parameters())
        and len(names) == 1
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and not layer.use_dora[names[0]]
        and layer.lora_B[names[0]].bias is None
    )


# ------------------------------------------------------------------------------------------
# Several LoRA products of one input, as queries, keys and values are: its passes are shared.
#
# The narrow halves stand on top of each other, so that the input is read once on the way there and
# once for their gradients; what it gets back is summed by the products themselves.


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
        lora_output(part, up, bias, scale).addmm_(x, weight.t())
        for part, up, bias, weight in zip(parts, ups, biases, weights, strict=True)
    ]
    return [*given, narrow]


@torch.library.custom_op("gracetune::lora_gradients_of_all", mutates_args=())
def lora_linears_gradients(
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
def lora_linears_input_gradient(
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
lora_linears_gradients.register_fake(
    lambda _, x, narrow, ups, __: [
        x.new_empty(narrow.shape[1], x.shape[1]),
        torch.empty_like(narrow),
        *(torch.empty_like(up) for up in ups),
    ]
)
lora_linears_input_gradient.register_fake(
    lambda grads, _, weights, __: grads[0].new_empty(len(grads[0]), weights[0].shape[1])
)


class SharedInputLoraMatmul(torch.autograd.Function):
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
        grad_down, between, *grad_ups = lora_linears_gradients(given, x, narrow, ups, ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_linears_input_gradient(given, between, weights, down)
        return grad_x, grad_down, None, *([None] * (2 * len(grads))), *grad_ups


class SharedInputLora:
    """LoRA layers that are always given the same."""

    def __init__(self, layers: Sequence[FusedLora]) -> None:
        self._layers = tuple(layers)

    def __call__(self, x: Tensor) -> list[Tensor]:
        """What each layer gives, in order."""
        layers = self._layers
        if not all(layer.is_active(x) for layer in layers):
            return [layer.forward(x) for layer in layers]
        halves = [layer.compute_weights() for layer in layers]
        given = SharedInputLoraMatmul.apply(  # type: ignore[no-untyped-call]
            x.to(layers[0].dtype).flatten(0, -2),
            torch.cat([down for down, _ in halves]),
            layers[0].scale,
            *(layer.base.weight for layer in layers),
            *(layer.base.bias for layer in layers),
            *(up for _, up in halves),
        )
        return [y.view(*x.shape[:-1], -1) for y in given]


def fuse_shared_input(layers: Sequence[nn.Module]) -> SharedInputLora | None:
    """Let fused LoRA layers compute together; none where they are too different for that."""
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


def _thirds(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    size = len(tensors) // 3
    return list(tensors[:size]), list(tensors[size : 2 * size]), list(tensors[2 * size :])
