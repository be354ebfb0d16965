"""Quantize the frozen linear layers of a model's blocks, for `model.quantize`.

Activations and trained weights are not quantized. `adapters/compute/quantized_linear.py` has the
formats and computes with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from gracetune.adapters.compute.quantized_linear import QuantizedLinear
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.adapters.compute.quantized_linear import QuantizationKind
    from gracetune.config.schema import AdapterSection


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
    """Quantize every linear layer in the blocks, freeze the blocks, and count these layers.

    On the meta device, layers get parts of the right sizes without values.
    """
    count = 0
    for block in blocks:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                # A subclass may have its weight read by other code, such as torch's attention.
                if type(child) is nn.Linear:
                    setattr(module, name, QuantizedLinear(child, kind))
                    count += 1
        block.requires_grad_(False)
    return count
