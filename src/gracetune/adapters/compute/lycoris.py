"""Add LyCORIS adapters (LoCon, LoHa, LoKr) and full weight deltas next to frozen layers.

LyCORIS itself replaces a layer's `forward` from outside and keeps the new weights out of the
model's parameters. Here an `AdaptedLayer` replaces the layer and owns the frozen layer and the
adapter, so that optimizers, checkpoints and wrappers see the new weights. LyCORIS's modules only
compute the delta, the adapter's part of the output.

LoKr on a linear layer is computed by matmuls of this module, in the order that moves the least
memory. A row x of u * v numbers is reshaped to a matrix X with u rows, and

    kron(w1, w2) x = w1 X w2^T

With a low-rank w2 = a b, the matrix kron(w1, b) is built if it has at most `MAX_FUSED_ROWS` rows.
Then everything before the last matmul is narrow, like a LoRA of that rank:

    hidden = kron(w1, b) x        one matmul over all rows
    y      = hidden a^T           with hidden reshaped to rows of length rank

LyCORIS multiplies by w1 last, at full width and between two transposes, which takes twice the
activation memory of a LoRA. If the frozen layer is a plain `nn.Linear`, `lokr_linear` computes the
frozen matmul and the delta as a single operator: the delta is added to the frozen output in place,
and checkpointing saves one tensor.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gracetune.adapters.compute.lora_matmul import lora_input_gradient
from gracetune.adapters.compute.operators import Operator
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.adapters.inject import ModuleSettings
    from gracetune.config.schema import AdapterSection


LYCORIS_MODULES = {
    "locon": ("lycoris.modules.locon", "LoConModule"),
    "loha": ("lycoris.modules.loha", "LohaModule"),
    "lokr": ("lycoris.modules.lokr", "LokrModule"),
}
"""LyCORIS's Python module and class for each adapter kind."""
MAX_FUSED_ROWS = 256
"""Largest number of rows for which the matrix kron(w1, b) of a LoKr kron(w1, a b) is built. A
matmul with it costs as much as a LoRA whose rank is that number of rows."""


def add_lycoris_adapter(
    model: nn.Module, name: str, section: AdapterSection, settings: ModuleSettings
) -> None:
    """Replace the layer `name` of the model by an `AdaptedLayer` around it."""
    layer = model.get_submodule(name)
    if section.kind == "full":
        adapter: nn.Module = FullDelta(layer)
    else:
        adapter = _build_lycoris_module(layer, section, settings)
    adapter.to(next(layer.parameters()).device)
    is_lokr_linear = section.kind == "lokr" and isinstance(layer, nn.Linear)
    cls = LokrLinear if is_lokr_linear else AdaptedLayer
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, cls(layer, adapter, settings.dropout))


class AdaptedLayer(nn.Module):
    """A frozen layer with an adapter: y = layer(x) + adapter(dropout(x)).

    Models read `weight`, `bias` and the sizes of a layer; these are the frozen layer's.
    """

    def __init__(self, base_layer: nn.Module, adapter: Any, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.adapter = adapter
        # A compiler would copy the input for a dropout of 0, and save the copy for backward.
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    @property
    def weight(self) -> Tensor:
        """Weight of the frozen layer."""
        weight = self.base_layer.weight
        assert isinstance(weight, Tensor), type(weight)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Bias of the frozen layer."""
        bias = self.base_layer.bias
        assert isinstance(bias, Tensor | None), type(bias)
        return bias

    @property
    def in_features(self) -> int:
        """Input size of the frozen linear layer; convolutions have none."""
        size = self.base_layer.in_features
        assert isinstance(size, int), type(size)
        return size

    @property
    def out_features(self) -> int:
        """Output size of the frozen linear layer; convolutions have none."""
        size = self.base_layer.out_features
        assert isinstance(size, int), type(size)
        return size

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output plus the adapter's."""
        base: Tensor = self.base_layer(x)
        delta: Tensor = self.adapter.bypass_forward_diff(self.dropout(x))
        return base + delta.to(base.dtype)


class LokrLinear(AdaptedLayer):
    """A frozen linear layer with a LoKr: y = layer(x) + kron(w1, w2) dropout(x)."""

    def __init__(self, base_layer: nn.Module, adapter: Any, dropout: float) -> None:
        super().__init__(base_layer, adapter, dropout)
        narrow = not adapter.use_w2 and can_fuse(adapter.lokr_w1, adapter.lokr_w2_b)
        self.is_fused = narrow and type(base_layer) is nn.Linear and not dropout
        """True if adapter and frozen layer can be computed by one operator, `lokr_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output plus the LoKr's."""
        adapter = self.adapter
        w1 = adapter.lokr_w1 * adapter.scale
        layer = self._fused_layer(x)
        if layer is not None:
            a, b, dtype = adapter.lokr_w2_a, adapter.lokr_w2_b, layer.weight.dtype
            y: Tensor = LokrMatmul.apply(  # type: ignore[no-untyped-call]
                x.to(dtype).flatten(0, -2),
                layer.weight,
                layer.bias,
                torch.kron(w1, b).to(dtype),
                a.to(dtype),
            )
            return y.view(*x.shape[:-1], y.shape[-1])
        base: Tensor = self.base_layer(x)
        x = self.dropout(x)
        if adapter.use_w2:
            delta = kron_linear(x, w1.to(x.dtype), adapter.lokr_w2.to(x.dtype))
        else:
            delta = low_rank_kron_linear(x, w1, adapter.lokr_w2_a, adapter.lokr_w2_b)
        return base + delta.to(base.dtype)

    def _fused_layer(self, x: Tensor) -> nn.Linear | None:
        """Return the frozen layer if `lokr_linear` can be used now, else None.

        It cannot if the frozen layer has been replaced by an `Fp8Linear`, or if autocast would
        compute an fp32 layer in a lower precision.
        """
        layer = self.base_layer
        if not self.is_fused or type(layer) is not nn.Linear:
            return None
        is_fp32 = layer.weight.dtype == torch.float32
        return None if is_fp32 and torch.is_autocast_enabled(x.device.type) else layer


class FullDelta(nn.Module):
    """Trainable changes of a layer's whole weight and bias, which start at zero.

    It replaces LyCORIS's `full` module, which copies every frozen weight and cannot compute the
    change of the output separately.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        weight, bias = _parameter_shapes(layer)
        self.diff = nn.Parameter(torch.zeros(weight))
        self.diff_b = None if bias is None else nn.Parameter(torch.zeros(bias))
        self._layer = [layer]  # in a list, so that it is not registered as a submodule twice

    def bypass_forward_diff(self, x: Tensor) -> Tensor:
        """Return the change of the layer's output. LyCORIS's modules have the same method."""
        weight = self.diff.to(x.dtype)
        bias = None if self.diff_b is None else self.diff_b.to(x.dtype)
        (layer,) = self._layer
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            y: Tensor = layer._conv_forward(x, weight, bias)
            return y
        return functional.linear(x, weight, bias)


def _build_lycoris_module(
    layer: nn.Module, section: AdapterSection, settings: ModuleSettings
) -> nn.Module:
    module_name, class_name = LYCORIS_MODULES[section.kind]
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"adapter.kind is {section.kind!r}, which needs the package lycoris-lora. Run "
            "`pip install gracetune[lycoris]`."
        ) from error
    options: dict[str, object] = {}
    if section.kind == "lokr":
        options = {"factor": settings.factor, "full_matrix": section.full_matrix}
    adapter: nn.Module = getattr(module, class_name)(
        "", layer, 1.0, settings.rank, settings.alpha, bypass_mode=True, **options
    )
    return adapter


def _parameter_shapes(layer: nn.Module) -> tuple[torch.Size | tuple[int, int], torch.Size | None]:
    bias = layer.bias
    assert isinstance(bias, Tensor | None), type(bias)
    if isinstance(layer, nn.Linear):  # a quantized weight may be stored in another shape
        weight: torch.Size | tuple[int, int] = (layer.out_features, layer.in_features)
    else:
        assert isinstance(layer.weight, Tensor), type(layer.weight)
        weight = layer.weight.shape
    return weight, None if bias is None else bias.shape


# LoKr matmuls. `kron_b` is kron(w1, b), and `hidden` is x kron_b^T.


class LokrMatmul(torch.autograd.Function):
    """Autograd function for `lokr_linear`, a frozen linear layer with a low-rank LoKr."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kron_b: Tensor, a: Tensor
    ) -> Tensor:
        """Return the layer's output for `x` of shape (rows, columns)."""
        y: Tensor
        y, hidden = lokr_linear(x, weight, bias, kron_b, a)
        ctx.save_for_backward(x, hidden, weight, kron_b, a)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`; None for frozen weight and bias."""
        x, hidden, weight, kron_b, a = ctx.saved_tensors
        grad_kron_b, grad_a, grad_hidden = lokr_gradients(grads[0], x, hidden, a)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_input_gradient(grads[0], grad_hidden, weight, kron_b)
        return grad_x, None, None, grad_kron_b, grad_a


@Operator
def lokr_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, kron_b: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of a frozen linear layer with a LoKr kron(w1, a b), and `hidden`.

    `kron_b` is kron(w1, b), and `hidden` is x kron_b^T.
    """
    hidden = functional.linear(x, kron_b)
    y = functional.linear(x, weight, bias)
    y.view(-1, len(a)).addmm_(hidden.view(-1, a.shape[1]), a.t())
    return y, hidden


@Operator
def lokr_gradients(
    grad: Tensor, x: Tensor, hidden: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `kron_b`, `a` and `hidden`, for a LoKr kron(w1, a b).

    `kron_b` is kron(w1, b), and `hidden` is x kron_b^T. `grad` is the output's gradient.
    """
    groups = grad.reshape(-1, len(a))
    grad_hidden = (groups @ a).view(hidden.shape)
    return grad_hidden.t() @ x, groups.t() @ hidden.view(-1, a.shape[1]), grad_hidden


lokr_linear.register_fake(
    lambda x, weight, _, kron_b, __: (
        x.new_empty(x.shape[0], weight.shape[0]),
        x.new_empty(x.shape[0], kron_b.shape[0]),
    )
)
lokr_gradients.register_fake(
    lambda _, x, hidden, a: (
        x.new_empty(hidden.shape[1], x.shape[1]),
        torch.empty_like(a),
        torch.empty_like(hidden),
    )
)


def can_fuse(w1: Tensor, b: Tensor) -> bool:
    """Return True if kron(w1, b), for a LoKr kron(w1, a b), is small enough to be built.

    It may have at most `MAX_FUSED_ROWS` rows.
    """
    return len(w1) * len(b) <= MAX_FUSED_ROWS


def low_rank_kron_linear(x: Tensor, w1: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return kron(w1, a b) x for every row of `x`. The weights are cast to the dtype of `x`."""
    if can_fuse(w1, b):
        hidden = functional.linear(x, torch.kron(w1, b).to(x.dtype))
        groups = _rows_to_matrices(hidden, len(w1))
    else:
        hidden = functional.linear(_rows_to_matrices(x, w1.shape[1]), b.to(x.dtype))
        groups = _left_matmul(hidden, w1.to(x.dtype))
    return functional.linear(groups, a.to(x.dtype)).flatten(-2)


def kron_linear(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Return kron(w1, w2) x for every row of `x`.

    w1 or w2 is applied first, whichever gives the smaller intermediate result.
    """
    (out1, in1), (out2, in2) = w1.shape, w2.shape
    groups = _rows_to_matrices(x, in1)
    if in1 * out2 <= out1 * in2:
        return _left_matmul(functional.linear(groups, w2), w1).flatten(-2)
    return functional.linear(_left_matmul(groups, w1), w2).flatten(-2)


def _rows_to_matrices(x: Tensor, height: int) -> Tensor:
    """Reshape each row of `x` to a matrix with `height` rows."""
    return x.reshape(*x.shape[:-1], height, x.shape[-1] // height)


def _left_matmul(groups: Tensor, w1: Tensor) -> Tensor:
    """Return w1 X for every matrix X in `groups`, by one large matmul instead of many small."""
    return functional.linear(groups.mT, w1).mT
