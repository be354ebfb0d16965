"""The moving average of the trained weights, which usually samples better than the weights do."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


class Ema:
    """Averages beside the parameters they follow, in the same order."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._live = [parameter.data for parameter in parameters.values()]
        self.averages = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self, step: int) -> None:
        """Follow; early steps count more, so that the first weights are soon forgotten."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.averages.values()), self._live, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model hold the averages for a while."""
        kept = [p.clone() for p in self._live]
        torch._foreach_copy_(self._live, list(self.averages.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(self._live, kept)
