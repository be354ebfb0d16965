"""From the optimizer section to an optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gracetune import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from gracetune.config.schema import OptimizerSection

OPTIMIZERS = {"adamw": "gracetune.optim.build:adamw"}


def adamw(parameters: Iterable[Parameter], section: OptimizerSection) -> Optimizer:
    """Loshchilov and Hutter's, one kernel for all parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=True,
    )


def build_optimizer(parameters: Iterable[Parameter], section: OptimizerSection) -> Optimizer:
    """The optimizer that the run file names."""
    build: Callable[[Iterable[Parameter], OptimizerSection], Optimizer]
    build = registry.load("optimizer", section.name, OPTIMIZERS)  # type: ignore[assignment]
    return build(parameters, section)
