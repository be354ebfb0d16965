"""The learning rate as a pure function of the step: nothing to save, nothing to lose."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gracetune.config.schema import OptimizerSection

DEPENDS_ON_LENGTH = {"constant": False, "linear": True, "cosine": True}
"""Whether a run with more steps has other rates in the steps it shares with a shorter one."""


def rate_share(section: OptimizerSection, step: int, total_steps: int) -> float:
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
