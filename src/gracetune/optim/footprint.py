"""What an optimizer keeps of each number that it updates."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gracetune.optim.build import STAGES, build_optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import OptimizerSection

PROBE_EDGE = 256
"""Edge of the matrix that an optimizer is tried on: factored ones keep less of larger ones."""


def nbytes_each(section: OptimizerSection, parameters: Sequence[Tensor]) -> float:
    """Bytes of state for each number of parameters that are mostly of one type."""
    numels: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        numels[parameter.dtype] += parameter.numel()
    return state_nbytes_each(section, numels.most_common(1)[0][0])


def state_nbytes_each(section: OptimizerSection, dtype: torch.dtype = torch.float32) -> float:
    """Bytes of state for each number of this type, found by one step on a small matrix."""
    probe = nn.Parameter(torch.zeros(PROBE_EDGE, PROBE_EDGE, dtype=dtype))
    optimizer = build_optimizer({f"{_stage(section)}.probe": probe}, section)
    probe.grad = torch.ones_like(probe)
    optimizer.step()
    kept = [
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(kept) / probe.numel()


def _stage(section: OptimizerSection) -> str:
    """Settings of one expert are refused where there are no experts."""
    named = section.model_dump(exclude_none=True)
    stages = [stage for stage in STAGES if any(key.startswith(f"{stage}_noise") for key in named)]
    return stages[0] if stages else "one"
