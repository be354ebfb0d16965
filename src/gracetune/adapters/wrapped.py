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

from gracetune.adapters.kronecker import (
    KroneckerProduct,
    can_join,
    kron_linear,
    thin_kron_linear,
)
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.adapters.targets import Setting
    from gracetune.config.schema import AdapterSection

MODULES = {
    "locon": ("lycoris.modules.locon", "LoConModule"),
    "loha": ("lycoris.modules.loha", "LohaModule"),
    "lokr": ("lycoris.modules.lokr", "LokrModule"),
}


class Adapted(nn.Module):
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


class KroneckerAdapted(Adapted):
    """y = layer(x) + kron(w1, w2) dropout(x), with the weights of LyCORIS's LoKr."""

    def __init__(self, base_layer: nn.Module, adapter: Any, dropout: float) -> None:
        super().__init__(base_layer, adapter, dropout)
        thin = not adapter.use_w2 and can_join(adapter.lokr_w1, adapter.lokr_w2_b)
        plain = type(base_layer.weight) is nn.Parameter  # neither quantised nor packed
        self.joins = thin and plain and not dropout
        """Whether it is one product with the frozen layer, as long as that is what it was."""

    def forward(self, x: Tensor) -> Tensor:
        """As above, by our own products."""
        adapter = self.adapter
        w1 = adapter.lokr_w1 * adapter.scale
        layer = self._one_product_with(x)
        if layer is not None:
            a, b, dtype = adapter.lokr_w2_a, adapter.lokr_w2_b, layer.weight.dtype
            y: Tensor = KroneckerProduct.apply(  # type: ignore[no-untyped-call]
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
            beside = thin_kron_linear(x, w1, adapter.lokr_w2_a, adapter.lokr_w2_b)
        return base + beside.to(base.dtype)

    def _one_product_with(self, x: Tensor) -> nn.Linear | None:
        """The frozen layer; none where autocast would round what this product does not."""
        layer = self.base_layer
        if not self.joins or type(layer) is not nn.Linear:
            return None
        in_fp32 = layer.weight.dtype == torch.float32
        return None if in_fp32 and torch.is_autocast_enabled(x.device.type) else layer


class Difference(nn.Module):
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


def adapt(model: nn.Module, name: str, section: AdapterSection, setting: Setting) -> None:
    """Put an adapter beside one layer, in the layer's place."""
    layer = model.get_submodule(name)
    if section.kind == "full":
        adapter: nn.Module = Difference(layer)
    else:
        adapter = _lycoris(layer, section, setting)
    adapter.to(next(layer.parameters()).device)
    by_kronecker = section.kind == "lokr" and isinstance(layer, nn.Linear)
    cls = KroneckerAdapted if by_kronecker else Adapted
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, cls(layer, adapter, setting.dropout))


def _lycoris(layer: nn.Module, section: AdapterSection, setting: Setting) -> nn.Module:
    where, cls = MODULES[section.kind]
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
