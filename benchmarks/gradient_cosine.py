"""Compare the gradients of one batch, block by block, between precisions."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

import torch
from lora_quality_training import losses
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_quality_training import ModelInputs
    from torch import Tensor, nn


def compare_gradients(
    figures: dict[str, object], name: str, models: Mapping[str, nn.Module], inputs: ModelInputs
) -> None:
    """Record, for each block, the cosines between gradients in fp8 and bf16, and bf16 and fp32."""
    found = {precision: gradients(model, inputs) for precision, model in models.items()}
    for what in ("adapter", "input"):
        pairs = {"fp8_bf16": ("fp8", "bf16"), "bf16_fp32": ("bf16", "fp32")}
        for pair, (one, other) in pairs.items():
            cosines = [
                cosine(a, b) for a, b in zip(found[one][what], found[other][what], strict=True)
            ]
            figures[f"{name}.{what}.{pair}"] = json.dumps([round(value, 5) for value in cosines])
            figures[f"{name}.{what}.{pair}_least"] = min(cosines)
            print(
                f"{name} {what} {pair}: smallest {min(cosines):.5f}, mean {mean(cosines):.5f}",
                flush=True,
            )


def gradients(model: nn.Module, inputs: ModelInputs) -> dict[str, list[Tensor]]:
    """Return the gradients of each block: of its adapter, as one vector, and of its input."""
    input_grads: dict[int, Tensor] = {}

    def watch(index: int) -> None:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            arguments[0].register_hook(lambda grad: input_grads.__setitem__(index, grad.float()))

        handles.append(model.blocks[index].register_forward_pre_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for index in range(len(model.blocks)):
        watch(index)
    model.zero_grad()
    inputs.noisy.requires_grad_()  # so that the first block has an input gradient too
    losses(model, inputs, autocast=False).mean().backward()
    for handle in handles:
        handle.remove()
    inputs.noisy.requires_grad_(False).grad = None
    adapters = [
        torch.cat([p.grad.float().flatten() for p in block.parameters() if p.requires_grad])
        for block in model.blocks
    ]
    model.zero_grad()
    return {"adapter": adapters, "input": [input_grads[index] for index in sorted(input_grads)]}


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two gradients, taken as vectors."""
    return float(functional.cosine_similarity(one.flatten().double(), other.flatten().double(), 0))
