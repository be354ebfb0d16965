"""From noise to latents: Euler's method along the predicted velocity, with guidance."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Predict = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
    Text = Mapping[str, Tensor]


def euler(
    predict: Predict, noise: Tensor, text: Text, empty: Text, *, steps: int, guidance: float
) -> Tensor:
    """Solve dx/ds = v from s = 1 to 0, v = v_empty + guidance * (v_text - v_empty)."""
    x = noise
    guided = guidance != 1.0
    both = {key: torch.cat([text[key], empty[key]]) for key in text} if guided else text
    levels = torch.linspace(1.0, 0.0, steps + 1).tolist()
    for s, s_next in pairwise(levels):
        x_in = torch.cat([x, x]) if guided else x
        v = predict(x_in, torch.full((len(x_in),), s, device=x.device), both)
        if guided:
            v_text, v_empty = v.chunk(2)
            v = v_empty + guidance * (v_text - v_empty)
        x = x + (s_next - s) * v
    return x
