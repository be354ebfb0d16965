"""Putting an adapter onto a model: which modules it sits on, and the new weights themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import AdapterSection

NAME = "default"
"""peft's name for the one adapter that is trained."""


def match_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """The linear modules whose names are a target or end with one; each target must match some."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    idle = [t for t in targets if not any(_is_target(name, t) for name in linears)]
    if idle:
        endings = sorted({_ending(name) for name in linears})
        raise ConfigError(
            f"adapter.targets: {', '.join(idle)} match no linear module of the model. "
            f"There are: {', '.join(endings)}."
        )
    return [name for name in linears if any(_is_target(name, t) for t in targets)]


def add_lora(
    model: nn.Module, section: AdapterSection, default_targets: Sequence[str], seed: int
) -> list[str]:
    """Freeze the model and put LoRA beside its targets; says which modules it took."""
    modules = match_targets(model, section.targets or default_targets)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=alpha_of(section),
        lora_dropout=section.dropout,
        target_modules=modules,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=NAME)
    return modules


def alpha_of(section: AdapterSection) -> float:
    """Alpha, by default equal to the rank: the update is not scaled."""
    return section.rank if section.alpha is None else section.alpha


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ending(name: str) -> str:
    """A name without its block number, as a target would be written."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    first = numbers[0] + 1 if numbers and numbers[0] + 1 < len(parts) else 0
    return ".".join(parts[first:])
