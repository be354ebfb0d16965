"""Flow matching (Lipman et al. 2023; Liu et al. 2023): what the model is trained to say.

Pure functions of their arguments; noise and levels are drawn by the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def noisy(x0: Tensor, noise: Tensor, s_B: Tensor) -> Tensor:  # noqa: N803
    """x_s = (1 - s) x0 + s e."""
    s = _like(s_B, x0)
    return (1 - s) * x0 + s * noise


def velocity(x0: Tensor, noise: Tensor) -> Tensor:
    """dx_s / ds = e - x0."""
    return noise - x0


def losses(predicted: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of each sample, in fp32."""
    return (predicted.float() - target.float()).square().flatten(1).mean(1)


def _like(s_B: Tensor, x: Tensor) -> Tensor:  # noqa: N803
    return s_B.view(-1, *[1] * (x.ndim - 1))
