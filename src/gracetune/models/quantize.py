"""Frozen weights in fewer bits: the linear layers of a model's blocks, by one setting.

torchao keeps each layer and stores its weight as int8 or fp8; bitsandbytes has a layer of its own
for nf4. Activations and all that is trained stay as they are.
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

    Kind = Literal["fp8", "int8", "nf4"]

PACKAGES = {"fp8": "torchao", "int8": "torchao", "nf4": "bitsandbytes"}


def check_quantizable(kind: Kind, adapter: AdapterSection | None) -> None:
    """Only what is frozen can be kept so, and DoRA needs the weights themselves."""
    if adapter is None:
        raise ConfigError(
            f"model.quantize is {kind!r}, but without an adapter every weight is trained. Add an "
            "adapter section, or set model.quantize: none."
        )
    if adapter.kind == "dora":
        raise ConfigError(
            f"model.quantize is {kind!r} and adapter.kind is 'dora', which measures the frozen "
            "weights in every step. Choose adapter.kind: lora, or set model.quantize: none."
        )


def quantize_blocks(blocks: Sequence[nn.Module], kind: Kind) -> int:
    """Quantise every linear layer inside the blocks; says how many there were."""
    change = QUANTIZERS[kind](_package(kind))
    count = 0
    for block in blocks:
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                change(block, name, module)
                count += 1
        block.requires_grad_(False)
    return count


def _package(kind: Kind) -> Any:
    name = PACKAGES[kind]
    try:
        return import_module(f"{name}.quantization" if name == "torchao" else name)
    except ImportError as error:
        raise ConfigError(
            f"model.quantize is {kind!r}, which needs the package {name} ({error}). Run "
            "`pip install gracetune[quantize]`, or set model.quantize: none."
        ) from error


def _by_torchao(config: str) -> Callable[[Any], Callable[[nn.Module, str, nn.Linear], None]]:
    def made(torchao: Any) -> Callable[[nn.Module, str, nn.Linear], None]:
        chosen = getattr(torchao, config)()
        return lambda _block, _name, layer: torchao.quantize_(layer, chosen)

    return made


def _by_bitsandbytes(bitsandbytes: Any) -> Callable[[nn.Module, str, nn.Linear], None]:
    def change(block: nn.Module, name: str, layer: nn.Linear) -> None:
        dtype = layer.weight.dtype
        new = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=dtype if dtype == torch.float32 else torch.bfloat16,
            quant_type="nf4",
        )
        new.load_state_dict(layer.state_dict())
        parent, _, own = name.rpartition(".")
        setattr(block.get_submodule(parent), own, new.to(layer.weight.device))  # it packs on moving

    return change


QUANTIZERS: dict[str, Callable[[Any], Callable[[nn.Module, str, nn.Linear], None]]] = {
    "fp8": _by_torchao("Float8WeightOnlyConfig"),
    "int8": _by_torchao("Int8WeightOnlyConfig"),
    "nf4": _by_bitsandbytes,
}
