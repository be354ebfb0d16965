"""Several optimizers, each with parameters of its own, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class MultiOptimizer(Optimizer):
    """Steps its parts one after the other; groups and state are the parts' own."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Every part's step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch makes new groups and a new state; the parts are given them."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self._parts:
            last = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:last]
            part.state = self.state
            first = last
