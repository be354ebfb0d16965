"""Quantize the frozen linear layers of a model's blocks, for `model.quantize`.

torchao keeps the layer and stores its weight as int8 or fp8; bitsandbytes replaces the layer by its
own for nf4. Activations and trained weights are not quantized.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.config.schema import AdapterSection

    QuantizationKind = Literal["fp8", "int8", "nf4"]
    QuantizeLayer = Callable[[nn.Module, str, nn.Linear], None]
    """Quantizes one layer in place; called with (block, name of the layer in it, layer)."""

PACKAGES = {"fp8": "torchao", "int8": "torchao", "nf4": "bitsandbytes"}


def check_quantizable(kind: QuantizationKind, adapter: AdapterSection | None) -> None:
    """Raise if weights to be quantized are trained, or needed in full precision (by DoRA)."""
    if adapter is None:
        raise ConfigError(
            f"model.quantize is {kind!r}, but without an adapter every weight is trained. Add an "
            "adapter section, or set model.quantize: none."
        )
    if adapter.kind == "dora":
        raise ConfigError(
            f"model.quantize is {kind!r} and adapter.kind is 'dora', which needs the norm of the "
            "frozen weights in every step. Set adapter.kind: lora, or model.quantize: none."
        )


def quantize_blocks(blocks: Sequence[nn.Module], kind: QuantizationKind) -> int:
    """Quantize every linear layer in the blocks, freeze the blocks, and count these layers."""
    quantize_layer = QUANTIZERS[kind](_import_package(kind))
    count = 0
    for block in blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                quantize_layer(block, name, module)
                count += 1
        block.requires_grad_(False)
    return count


def _import_package(kind: QuantizationKind) -> Any:
    name = PACKAGES[kind]
    try:
        return import_module(f"{name}.quantization" if name == "torchao" else name)
    except ImportError as error:
        raise ConfigError(
            f"model.quantize is {kind!r}, which needs the package {name} ({error}). Run "
            "`pip install gracetune[quantize]`, or set model.quantize: none."
        ) from error


def _torchao_quantizer(config_name: str) -> Callable[[Any], QuantizeLayer]:
    def build(torchao: Any) -> QuantizeLayer:
        config = getattr(torchao, config_name)()
        return lambda _block, _name, layer: torchao.quantize_(layer, config)

    return build


def _nf4_quantizer(bitsandbytes: Any) -> QuantizeLayer:
    def quantize_layer(block: nn.Module, name: str, layer: nn.Linear) -> None:
        dtype = layer.weight.dtype
        quantized = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=dtype if dtype == torch.float32 else torch.bfloat16,
            quant_type="nf4",
        )
        quantized.load_state_dict(layer.state_dict())
        parent, _, attribute = name.rpartition(".")
        # bitsandbytes packs the weight when the layer is moved to its device.
        setattr(block.get_submodule(parent), attribute, quantized.to(layer.weight.device))

    return quantize_layer


QUANTIZERS: dict[str, Callable[[Any], QuantizeLayer]] = {
    "fp8": _torchao_quantizer("Float8WeightOnlyConfig"),
    "int8": _torchao_quantizer("Int8WeightOnlyConfig"),
    "nf4": _nf4_quantizer,
}
"""Dict from a value of `model.quantize` to a function. The function takes the imported torchao or
bitsandbytes and returns a function that quantizes one layer."""
