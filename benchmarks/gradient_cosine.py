"""Gradients of one batch by blocks, computed in several ways, and the angles between them."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

import torch
from shapes_wan import losses
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapes_wan import Asked
    from torch import Tensor, nn


def compare_gradients(
    figures: dict[str, object], name: str, models: Mapping[str, nn.Module], asked: Asked
) -> None:
    """fp8 against bf16 by blocks; both against fp32, of which the least is noted."""
    found = {way: gradients(model, asked) for way, model in models.items()}
    for what in ("adapter", "input"):
        pairs = {"fp8_bf16": ("fp8", "bf16"), "bf16_fp32": ("bf16", "fp32")}
        for pair, (one, other) in pairs.items():
            each = [
                cosine(mine, theirs)
                for mine, theirs in zip(found[one][what], found[other][what], strict=True)
            ]
            figures[f"{name}.{what}.{pair}"] = json.dumps([round(value, 5) for value in each])
            figures[f"{name}.{what}.{pair}_least"] = min(each)
            print(f"{name} {what} {pair}: least {min(each):.5f}, mean {mean(each):.5f}", flush=True)


def gradients(model: nn.Module, asked: Asked) -> dict[str, list[Tensor]]:
    """By blocks: of the adapter, as one vector, and of what came into the block."""
    entering: dict[int, Tensor] = {}

    def remember(index: int) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            inputs[0].register_hook(lambda grad: entering.__setitem__(index, grad.float()))

        handles.append(model.blocks[index].register_forward_pre_hook(hook))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for index in range(len(model.blocks)):
        remember(index)
    model.zero_grad()
    asked.noisy.requires_grad_()  # so that the first block has an input gradient too
    losses(model, asked, autocast=False).mean().backward()
    for handle in handles:
        handle.remove()
    asked.noisy.requires_grad_(False).grad = None
    adapters = [
        torch.cat([p.grad.float().flatten() for p in block.parameters() if p.requires_grad])
        for block in model.blocks
    ]
    model.zero_grad()
    return {"adapter": adapters, "input": [entering[index] for index in sorted(entering)]}


def cosine(one: Tensor, other: Tensor) -> float:
    """Of two gradients as vectors."""
    return float(functional.cosine_similarity(one.flatten().double(), other.flatten().double(), 0))
