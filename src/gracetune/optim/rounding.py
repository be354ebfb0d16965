"""Stochastic rounding: weights in bf16 take steps smaller than their last digit, on average.

A value between two neighbours goes to the nearer one more often, so that the mean is the value.
bf16 is the upper half of an fp32 number: noise in the lower half, then cutting it off, does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LOWER_BITS = 16


def round_into(target: Tensor, source: Tensor, position: tuple[int, int, int]) -> None:
    """Put fp32 values into a bf16 tensor; `position` (seed, place, step) fixes every draw.

    Draws by position and not by history: resuming needs no state, and ranks that hold copies of a
    weight round them alike. The same code runs on CPU and GPU.
    """
    assert (target.dtype, source.dtype) == (torch.bfloat16, torch.float32), target.dtype
    seed, place, step = position
    generator = torch.Generator(source.device)
    generator.manual_seed((seed * 1_000_003 + place) * 1_000_003 + step & (2**63 - 1))
    noise = torch.randint(
        0,
        1 << LOWER_BITS,
        source.shape,
        generator=generator,
        device=source.device,
        dtype=torch.int32,
    )
    bits = noise.add_(source.contiguous().view(torch.int32)).bitwise_and_(-1 << LOWER_BITS)
    # NaN and infinity are not rounded: noise could turn one into the other.
    target.copy_(torch.where(source.isfinite(), bits.view(torch.float32), source))
