"""A frozen layer with a LyCORIS module beside it.

LyCORIS's own way, replacing a layer's `forward` from outside, keeps the new weights out of the
model's parameters; here they are its own, so that optimizers, checkpoints and wrappers see them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gracetune.adapters.compute.lora_matmul import lora_input_gradient
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.adapters.inject import ModuleSettings
    from gracetune.config.schema import AdapterSection


LYCORIS_MODULES = {
    "locon": ("lycoris.modules.locon", "LoConModule"),
    "loha": ("lycoris.modules.loha", "LohaModule"),
    "lokr": ("lycoris.modules.lokr", "LokrModule"),
}


class AdaptedLayer(nn.Module):
    """y = layer(x) + adapter(dropout(x)).

    Models ask a layer for its weight's dtype and for its sizes: it answers for the frozen one.
    """

    def __init__(self, base_layer: nn.Module, adapter: Any, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.adapter = adapter
        # Of none at all, a compiler would still make a copy, and keep it for backward.
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    @property
    def weight(self) -> Tensor:
        """The frozen layer's."""
        weight = self.base_layer.weight
        assert isinstance(weight, Tensor), type(weight)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's."""
        bias = self.base_layer.bias
        assert isinstance(bias, Tensor | None), type(bias)
        return bias

    @property
    def in_features(self) -> int:
        """The frozen layer's; a convolution has none."""
        size = self.base_layer.in_features
        assert isinstance(size, int), type(size)
        return size

    @property
    def out_features(self) -> int:
        """The frozen layer's; a convolution has none."""
        size = self.base_layer.out_features
        assert isinstance(size, int), type(size)
        return size

    def forward(self, x: Tensor) -> Tensor:
        """The frozen layer as it is, and what is trained beside it."""
        base: Tensor = self.base_layer(x)
        beside: Tensor = self.adapter.bypass_forward_diff(self.dropout(x))
        return base + beside.to(base.dtype)


class LokrLinear(AdaptedLayer):
    """y = layer(x) + kron(w1, w2) dropout(x), with the weights of LyCORIS's LoKr."""

    def __init__(self, base_layer: nn.Module, adapter: Any, dropout: float) -> None:
        super().__init__(base_layer, adapter, dropout)
        thin = not adapter.use_w2 and can_fuse(adapter.lokr_w1, adapter.lokr_w2_b)
        plain = type(base_layer.weight) is nn.Parameter  # neither quantised nor packed
        self.is_fused = thin and plain and not dropout
        """Whether it is one product with the frozen layer, as long as that is what it was."""

    def forward(self, x: Tensor) -> Tensor:
        """As above, by our own products."""
        adapter = self.adapter
        w1 = adapter.lokr_w1 * adapter.scale
        layer = self._one_product_with(x)
        if layer is not None:
            a, b, dtype = adapter.lokr_w2_a, adapter.lokr_w2_b, layer.weight.dtype
            y: Tensor = LokrMatmul.apply(  # type: ignore[no-untyped-call]
                x.to(dtype).flatten(0, -2),
                layer.weight,
                layer.bias,
                torch.kron(w1, b).to(dtype),
                a.to(dtype),
            )
            return y.view(*x.shape[:-1], -1)
        base: Tensor = self.base_layer(x)
        x = self.dropout(x)
        if adapter.use_w2:
            beside = kron_linear(x, w1.to(x.dtype), adapter.lokr_w2.to(x.dtype))
        else:
            beside = low_rank_kron_linear(x, w1, adapter.lokr_w2_a, adapter.lokr_w2_b)
        return base + beside.to(base.dtype)

    def _one_product_with(self, x: Tensor) -> nn.Linear | None:
        """The frozen layer; none where autocast would round what this product does not."""
        layer = self.base_layer
        if not self.is_fused or type(layer) is not nn.Linear:
            return None
        in_fp32 = layer.weight.dtype == torch.float32
        return None if in_fp32 and torch.is_autocast_enabled(x.device.type) else layer


class FullDelta(nn.Module):
    """A whole matrix, and a bias where the layer has one, that start at nothing.

    LyCORIS has the same as `full`, but copies every frozen weight and cannot work beside it.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        weight, bias = _shapes(layer)
        self.diff = nn.Parameter(torch.zeros(weight))
        self.diff_b = None if bias is None else nn.Parameter(torch.zeros(bias))
        self._layer = [layer]

    def bypass_forward_diff(self, x: Tensor) -> Tensor:
        """What the difference adds."""
        weight = self.diff.to(x.dtype)
        bias = None if self.diff_b is None else self.diff_b.to(x.dtype)
        (layer,) = self._layer
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            made: Tensor = layer._conv_forward(x, weight, bias)
            return made
        return functional.linear(x, weight, bias)


def add_lycoris_adapter(
    model: nn.Module, name: str, section: AdapterSection, setting: ModuleSettings
) -> None:
    """Put an adapter beside one layer, in the layer's place."""
    layer = model.get_submodule(name)
    if section.kind == "full":
        adapter: nn.Module = FullDelta(layer)
    else:
        adapter = _lycoris(layer, section, setting)
    adapter.to(next(layer.parameters()).device)
    by_kronecker = section.kind == "lokr" and isinstance(layer, nn.Linear)
    cls = LokrLinear if by_kronecker else AdaptedLayer
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, cls(layer, adapter, setting.dropout))


def _lycoris(layer: nn.Module, section: AdapterSection, setting: ModuleSettings) -> nn.Module:
    where, cls = LYCORIS_MODULES[section.kind]
    try:
        module = import_module(where)
    except ImportError as error:
        raise ConfigError(
            f"adapter.kind is {section.kind!r}, which needs the package lycoris-lora. Run "
            "`pip install gracetune[lycoris]`."
        ) from error
    options: dict[str, object] = {}
    if section.kind == "lokr":
        options = {"factor": setting.factor, "full_matrix": section.full_matrix}
    made: nn.Module = getattr(module, cls)(
        "", layer, 1.0, setting.rank, setting.alpha, bypass_mode=True, **options
    )
    return made


def _shapes(layer: nn.Module) -> tuple[torch.Size | tuple[int, int], torch.Size | None]:
    bias = layer.bias
    assert isinstance(bias, Tensor | None), type(bias)
    if isinstance(layer, nn.Linear):  # a quantised weight may be stored in another shape
        weight: torch.Size | tuple[int, int] = (layer.out_features, layer.in_features)
    else:
        assert isinstance(layer.weight, Tensor), type(layer.weight)
        weight = layer.weight.shape
    return weight, None if bias is None else bias.shape


# ------------------------------------------------------------------------------------------
# LoKr beside a linear layer, in the order that moves least memory.
#
# A row x of u * v numbers is a matrix X of u rows, and kron(w1, w2) x is w1 X w2^T. Where w2 is the
# product of two thin matrices, w2 = a b, everything but the last product is thin: w1 goes into b
# once
# and not into every row. LyCORIS multiplies by w1 last, at full width and between two transposes:
# twice the activations of a LoRA, and on a GPU by kernels of its own that no plan knows.
#
# With a plain frozen layer, both products are one operator of torch's registry, as for a LoRA: what
# is trained adds itself onto the frozen product in place, and a memory policy keeps one tensor.


MAX_FUSED_ROWS = 256
"""Rows of kron(w1, b) up to which it is worth its arithmetic: a LoRA of that rank."""


@torch.library.custom_op("gracetune::kron_linear", mutates_args=())
def lokr_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, joined: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """`x W^T` with a thin LoKr, and the narrow tensor between; `joined` is kron(w1, b)."""
    narrow = functional.linear(x, joined)
    y = functional.linear(x, weight, bias)
    y.view(-1, len(a)).addmm_(narrow.view(-1, a.shape[1]), a.t())
    return y, narrow


@torch.library.custom_op("gracetune::kron_gradients", mutates_args=())
def lokr_gradients(
    grad: Tensor, x: Tensor, narrow: Tensor, a: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What `joined` and `a` get, and the narrow gradient between them."""
    groups = grad.reshape(-1, len(a))
    between = (groups @ a).view(narrow.shape)
    return between.t() @ x, groups.t() @ narrow.view(-1, a.shape[1]), between


lokr_linear.register_fake(
    lambda x, weight, _, joined, __: (
        x.new_empty(len(x), len(weight)),
        x.new_empty(len(x), len(joined)),
    )
)
lokr_gradients.register_fake(
    lambda _, x, narrow, a: (
        x.new_empty(narrow.shape[1], x.shape[1]),
        torch.empty_like(a),
        torch.empty_like(narrow),
    )
)


class LokrMatmul(torch.autograd.Function):
    """`kron_beside_linear` that can be trained; `x` is (rows, columns)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, joined: Tensor, a: Tensor
    ) -> Tensor:
        """Both products at once."""
        y: Tensor
        y, narrow = lokr_linear(x, weight, bias, joined, a)
        ctx.save_for_backward(x, narrow, weight, joined, a)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The frozen weight gets none."""
        x, narrow, weight, joined, a = ctx.saved_tensors
        grad_joined, grad_a, between = lokr_gradients(grads[0], x, narrow, a)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = lora_input_gradient(grads[0], between, weight, joined)
        return grad_x, None, None, grad_joined, grad_a


def can_fuse(w1: Tensor, b: Tensor) -> bool:
    """Whether kron(w1, b) is thin enough to be made."""
    return len(w1) * len(b) <= MAX_FUSED_ROWS


def low_rank_kron_linear(x: Tensor, w1: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`kron(w1, a b) x` for every row x; the weights may be of another type than the rows."""
    if can_fuse(w1, b):
        narrow = functional.linear(x, torch.kron(w1, b).to(x.dtype))
        groups = _cut(narrow, len(w1))
    else:
        thin = functional.linear(_cut(x, w1.shape[1]), b.to(x.dtype))
        groups = _mixed(thin, w1.to(x.dtype))
    return functional.linear(groups, a.to(x.dtype)).flatten(-2)


def kron_linear(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """`kron(w1, w2) x` for every row x, by the narrower way."""
    (up, u), (down, v) = w1.shape, w2.shape
    groups = _cut(x, u)
    if u * down <= up * v:
        return _mixed(functional.linear(groups, w2), w1).flatten(-2)
    return functional.linear(_mixed(groups, w1), w2).flatten(-2)


def _cut(x: Tensor, rows: int) -> Tensor:
    """Every row as a matrix."""
    return x.reshape(*x.shape[:-1], rows, -1)


def _mixed(groups: Tensor, w1: Tensor) -> Tensor:
    """w1 X, as one product of all rows and not as many small ones."""
    return functional.linear(groups.mT, w1).mT
