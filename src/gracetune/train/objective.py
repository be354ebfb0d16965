"""What the model is trained to say of a noisy latent, and how much each sample counts.

Pure functions of their arguments; noise and levels are drawn by the caller. Every kind of model is
asked along a path x_s = alpha x0 + sigma e with a level s in [0, 1]:

    flow       alpha = 1 - s          sigma = s              Lipman et al. 2023; Liu et al. 2023
    epsilon    alpha = cos(pi s / 2)  sigma = sin(pi s / 2)  Ho et al. 2020
    v          the same                                      Salimans and Ho 2022

For the last two s is the angle of the path: a family with a table of its own finds its timestep by
s = 2/pi atan(sigma / alpha).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.config.schema import TrainSection
    from gracetune.models.family import Prediction


def alpha_sigma(s: Tensor, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """How much of the picture and how much of the noise there is at a level."""
    if prediction == "flow":
        return 1 - s, s
    angle = s * (math.pi / 2)
    return angle.cos(), angle.sin()


def add_noise(
    x0: Tensor,
    noise: Tensor,
    s_B: Tensor,  # noqa: N803
    prediction: Prediction = "flow",
) -> Tensor:
    """x_s = alpha x0 + sigma e."""
    alpha, sigma = alpha_sigma(_broadcast(s_B, x0), prediction)
    return alpha * x0 + sigma * noise


def target(x0: Tensor, noise: Tensor, s_B: Tensor, prediction: Prediction) -> Tensor:  # noqa: N803
    """What the model should say at x_s."""
    if prediction == "flow":
        return velocity(x0, noise)
    if prediction == "epsilon":
        return noise
    alpha, sigma = alpha_sigma(_broadcast(s_B, x0), prediction)
    return alpha * noise - sigma * x0


def velocity(x0: Tensor, noise: Tensor) -> Tensor:
    """dx_s / ds = e - x0, along the path of flow matching."""
    return noise - x0


def sample_losses(
    predicted: Tensor,
    target: Tensor,
    weights_BHW: Tensor | None = None,  # noqa: N803
) -> Tensor:
    """The mean squared error of each sample, in fp32; cells count as `weights_BHW` says."""
    squared = (predicted.float() - target.float()).square()
    if weights_BHW is not None:
        count, *cells = weights_BHW.shape
        squared = squared * weights_BHW.view(count, *[1] * (squared.ndim - 3), *cells)
    return squared.flatten(1).mean(1)


def loss_weights(s_B: Tensor, section: TrainSection, prediction: Prediction) -> Tensor | None:  # noqa: N803
    """How much each sample's loss counts; none: all alike.

    Min-SNR (Hang et al. 2023) bounds the weight of the loss in x0, min(SNR, gamma) with SNR =
    (alpha / sigma)^2, and is divided by what a kind's own loss already weighs: epsilon SNR, v
    SNR + 1, flow 1 / s^2. Written with alpha and sigma, so that no level divides by zero.
    """
    gamma = section.min_snr_gamma
    if gamma is None or (prediction == "flow" and section.min_snr_in_flow == "identity"):
        return None
    alpha, sigma = alpha_sigma(s_B, prediction)
    if prediction == "epsilon":
        return (gamma * (sigma / alpha).square()).clamp(max=1.0)
    # sigma^2 min(SNR, gamma), for flow and for v, where SNR + 1 = 1 / sigma^2.
    return torch.minimum(alpha.square(), gamma * sigma.square())


def min_snr_notes(section: TrainSection, prediction: Prediction) -> list[str]:
    """What the user should know once about the weights of this run."""
    gamma = section.min_snr_gamma
    if gamma is None or prediction != "flow":
        return []
    if section.min_snr_in_flow == "identity":
        return [
            f"train.min_snr_gamma {gamma:g} changes nothing: flow matching is trained with all "
            "levels alike. train.min_snr_in_flow: exact asks for the published weights"
        ]
    return [
        f"min-SNR in flow matching weighs level s by min((1-s)^2, {gamma:g} s^2): "
        f"{min(0.125**2, gamma * 0.875**2):.3f} at 0.875"
    ]


def _broadcast(s_B: Tensor, x: Tensor) -> Tensor:  # noqa: N803
    return s_B.view(-1, *[1] * (x.ndim - 1))
