"""The training objective: add noise to latents, compute the model's target and the loss.

All functions are pure; the caller draws the noise and the timesteps. A timestep t is a point on the
path from the clean latents x_0 (t = 0) to pure noise (t = 1):

    x_t = alpha_t x_0 + sigma_t noise

    prediction  alpha_t        sigma_t        target                       paper
    flow        1 - t          t              velocity = noise - x_0       Lipman 2023, Liu 2023
    epsilon     cos(pi t / 2)  sin(pi t / 2)  noise                        Ho 2020
    v           cos(pi t / 2)  sin(pi t / 2)  alpha_t noise - sigma_t x_0  Salimans 2022

The loss is the mean squared error between prediction and target. With flow matching t = sigma_t. A
step of a discrete noise schedule has t = 2 / pi atan(sigma / alpha), from its own alpha and sigma.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gracetune.config.schema import TrainSection
    from gracetune.models.family import PredictionType


def alpha_sigma(timesteps: Tensor, prediction: PredictionType) -> tuple[Tensor, Tensor]:
    """Return alpha_t and sigma_t, the factors of the clean latents and of the noise in x_t."""
    if prediction == "flow":
        return 1 - timesteps, timesteps
    angle = timesteps * (math.pi / 2)
    return angle.cos(), angle.sin()


def add_noise(
    x0: Tensor, noise: Tensor, timesteps: Tensor, prediction: PredictionType = "flow"
) -> Tensor:
    """Return x_t = alpha_t x_0 + sigma_t noise, with one timestep for each sample."""
    alpha, sigma = alpha_sigma(_broadcast(timesteps, x0), prediction)
    return alpha * x0 + sigma * noise


def target(x0: Tensor, noise: Tensor, timesteps: Tensor, prediction: PredictionType) -> Tensor:
    """Return the tensor that the model should predict from the noisy latents x_t."""
    if prediction == "flow":
        return velocity(x0, noise)
    if prediction == "epsilon":
        return noise
    alpha, sigma = alpha_sigma(_broadcast(timesteps, x0), prediction)
    return alpha * noise - sigma * x0


def velocity(x0: Tensor, noise: Tensor) -> Tensor:
    """Return dx_t / dt = noise - x_0, the constant velocity of the flow-matching path."""
    return noise - x0


def sample_losses(
    predicted: Tensor,
    target: Tensor,
    mask_BHW: Tensor | None = None,  # noqa: N803
) -> Tensor:
    """Return the mean squared error of each sample, in fp32.

    `mask_BHW` has a weight for the error of each latent cell.
    """
    squared = (predicted.float() - target.float()).square()
    if mask_BHW is not None:
        batch_size, *cells = mask_BHW.shape
        squared = squared * mask_BHW.view(batch_size, *[1] * (squared.ndim - 3), *cells)
    return squared.flatten(1).mean(1)


def loss_weights(
    timesteps: Tensor, section: TrainSection, prediction: PredictionType
) -> Tensor | None:
    """Return the min-SNR weight of each sample (Hang et al. 2023), or None for equal weights.

    Min-SNR weights the squared error of x_0 by min(SNR, gamma), with SNR = (alpha_t / sigma_t)^2.
    For the squared error of the quantity that the model predicts, this weight becomes:

        epsilon   min(SNR, gamma) / SNR          = min(1, gamma sigma^2 / alpha^2)
        v         min(SNR, gamma) / (SNR + 1)    = min(alpha^2, gamma sigma^2)
        flow      min(SNR, gamma) sigma^2        = min(alpha^2, gamma sigma^2)

    The right-hand sides never divide by sigma, so t = 0 is safe.
    """
    gamma = section.min_snr_gamma
    if gamma is None or (prediction == "flow" and section.min_snr_in_flow == "identity"):
        return None
    alpha, sigma = alpha_sigma(timesteps, prediction)
    if prediction == "epsilon":
        return (gamma * (sigma / alpha).square()).clamp(max=1.0)
    return torch.minimum(alpha.square(), gamma * sigma.square())


def min_snr_notes(section: TrainSection, prediction: PredictionType) -> list[str]:
    """Explain what `train.min_snr_gamma` does to a flow-matching model, if it is set."""
    gamma = section.min_snr_gamma
    if gamma is None or prediction != "flow":
        return []
    if section.min_snr_in_flow == "identity":
        return [
            f"config: train.min_snr_gamma is {gamma:g} but has no effect: flow matching weighs all "
            "timesteps alike. Set train.min_snr_in_flow: exact to apply the published weights."
        ]
    return [
        f"config: min-SNR weighs timestep t by min((1-t)^2, {gamma:g} t^2), "
        f"for example {min(0.125**2, gamma * 0.875**2):.3f} at t = 0.875."
    ]


def _broadcast(timesteps: Tensor, x: Tensor) -> Tensor:
    """Reshape one value per sample so that it multiplies every element of that sample."""
    return timesteps.view(-1, *[1] * (x.ndim - 1))
