"""What happens to an optimizer between its steps: the schedule's share, what rate it really used,
and the averaged weights of those that have two sets."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from gracetune.optim.automagic import Automagic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.optim import Optimizer


@runtime_checkable
class Averaging(Protocol):
    """An optimizer whose parameters are not what it has learnt until it is asked for that."""

    def train(self) -> None:
        """Parameters become those that gradients are taken at."""
        ...

    def eval(self) -> None:
        """Parameters become the average."""
        ...


def set_rates(optimizer: Optimizer, share: float) -> None:
    """Give every group its share of its highest rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def used_rate(optimizer: Optimizer) -> float | Tensor:
    """The rate of the last step; a tensor stays on the device until someone logs it."""
    if isinstance(optimizer, Automagic):
        return optimizer.mean_rate()
    group = optimizer.param_groups[0]
    rate: float = group["lr"] * group.get("d", 1.0)  # Prodigy's estimate
    return rate


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Let parameters be what is to be used, where that is not what is trained.

    The trained ones come back bit for bit: looking at a run must not change it.
    """
    if not isinstance(optimizer, Averaging):
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
