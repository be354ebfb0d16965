"""How noise levels s in (0, 1) are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor

    from gracetune.config.schema import TrainSection


def uniform(count: int, generator: Generator) -> Tensor:
    """Every level alike."""
    return torch.rand(count, generator=generator, device=generator.device)


def logit_normal(count: int, generator: Generator) -> Tensor:
    """Most in the middle: the sigmoid of a standard normal (Esser et al. 2024)."""
    return torch.randn(count, generator=generator, device=generator.device).sigmoid()


DISTRIBUTIONS: dict[str, Callable[[int, Generator], Tensor]] = {
    "uniform": uniform,
    "logit_normal": logit_normal,
}


def shifted(s: Tensor, shift: float) -> Tensor:
    """Push levels towards noise: s -> shift s / (1 + (shift - 1) s)."""
    return shift * s / (1 + (shift - 1) * s)


def draw_levels(section: TrainSection, count: int, generator: Generator) -> Tensor:
    """The levels of one micro-batch."""
    return shifted(
        DISTRIBUTIONS[section.timestep_sampling](count, generator), section.timestep_shift
    )
