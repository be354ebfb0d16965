"""The learning rate as a pure function of the step: nothing to save, nothing to lose."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from gracetune.optim.automagic import Automagic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from gracetune.config.schema import OptimizerSection


SCHEDULE_DEPENDS_ON_LENGTH = {"constant": False, "linear": True, "cosine": True}
"""Whether a run with more steps has other rates in the steps it shares with a shorter one."""


def lr_scale(section: OptimizerSection, step: int, total_steps: int) -> float:
    """The share of `lr` that holds in step 0, 1, ... total_steps - 1."""
    warmup = section.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    falling = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[section.schedule]
    floor = 1.0 if section.schedule == "constant" else section.final_lr_share
    return floor + (1.0 - floor) * falling


# ------------------------------------------------------------------------------------------
# What happens to an optimizer between its steps: the schedule's share, what rate it really used,
# and the averaged weights of those that have two sets.


@runtime_checkable
class AveragingOptimizer(Protocol):
    """An optimizer whose parameters are not what it has learnt until it is asked for that."""

    def train(self) -> None:
        """Parameters become those that gradients are taken at."""
        ...

    def eval(self) -> None:
        """Parameters become the average."""
        ...


def set_lr(optimizer: Optimizer, share: float) -> None:
    """Give every group its share of its highest rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def effective_lr(optimizer: Optimizer) -> float | Tensor:
    """The rate of the last step; a tensor stays on the device until someone logs it."""
    if isinstance(optimizer, Automagic):
        return optimizer.mean_lr()
    group = optimizer.param_groups[0]
    rate: float = group["lr"] * group.get("d", 1.0)  # Prodigy's estimate
    return rate


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Let parameters be what is to be used, where that is not what is trained.

    The trained ones come back bit for bit: looking at a run must not change it.
    """
    if not isinstance(optimizer, AveragingOptimizer):
        yield
        return
    parameters = [p.data for group in optimizer.param_groups for p in group["params"]]
    kept = [p.clone() for p in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_(parameters, kept)
