"""Two transformers as one module: which of them a call reaches is said by name.

Parameters are called `high.*` and `low.*`: optimizer groups, checkpoints and files tell them apart
by that. Which expert a level belongs to is decided in `train/experts.py`, not here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

if TYPE_CHECKING:
    from gracetune.models.family import Forward

Expert = Literal["high", "low"]
EXPERTS: tuple[Expert, Expert] = ("high", "low")


class Experts(nn.Module):
    """The high-noise and the low-noise transformer."""

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.high = high
        self.low = low

    def forward(self, *args: Any, expert: Expert, **kwargs: Any) -> Any:
        """One expert's forward pass; through here, so that wrappers see every call."""
        return (self.high if expert == "high" else self.low)(*args, **kwargs)


def routed(transformer: Forward, expert: Expert | None) -> Forward:
    """The transformer as a family calls it; none: there is only one."""
    return transformer if expert is None else partial(transformer, expert=expert)


def transformers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Each transformer by its expert's name; a single one by the empty name."""
    return {"high": model.high, "low": model.low} if isinstance(model, Experts) else {"": model}
