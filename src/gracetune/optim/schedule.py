"""Compute the learning rate of each step, and switch an optimizer to its averaged weights.

The learning rate is a pure function of the step, so a resumed run has nothing to restore.
"""

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


def lr_scale(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Return the factor by which the schedule multiplies the peak learning rate in a step.

    Steps are counted from 0.
    """
    warmup = section.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup)
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[section.schedule]
    floor = 1.0 if section.schedule == "constant" else section.final_lr_share
    return floor + (1.0 - floor) * decay


def set_lr(optimizer: Optimizer, scale: float) -> None:
    """Set the learning rate of every parameter group to its peak learning rate times `scale`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * scale


def effective_lr(optimizer: Optimizer) -> float | Tensor:
    """Return the learning rate of the last step.

    For Automagic it is a tensor, which may be on the device. It is not converted to a float,
    because the CPU would have to wait for the device.
    """
    if isinstance(optimizer, Automagic):
        return optimizer.mean_lr()
    group = optimizer.param_groups[0]
    lr: float = group["lr"] * group.get("d", 1.0)  # `d` is Prodigy's step-size estimate
    return lr


@runtime_checkable
class AveragingOptimizer(Protocol):
    """An optimizer that trains one set of weights and averages them into another.

    The averaged weights are used for validation and saving. Schedule-free optimizers are of this
    kind.
    """

    def train(self) -> None:
        """Set the parameters to the weights at which gradients are computed."""
        ...

    def eval(self) -> None:
        """Set the parameters to the averaged weights."""
        ...


@contextmanager
def averaged_weights(optimizer: Optimizer) -> Iterator[None]:
    """Set the parameters to the optimizer's averaged weights, if it has any, inside the context.

    Afterwards the training weights are restored bit for bit, so that validating or saving does not
    change the run. (`train()` alone would recompute them with rounding errors.)
    """
    if not isinstance(optimizer, AveragingOptimizer):
        yield
        return
    parameters = [p.data for group in optimizer.param_groups for p in group["params"]]
    training_weights = [p.clone() for p in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        torch._foreach_copy_(parameters, training_weights)
