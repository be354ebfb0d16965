"""Sample timesteps in [0, 1] from a distribution, with a shift towards noise and within a window.

Without a window, the distribution is sampled directly. Within a window it is sampled by inverting
its cumulative distribution function (CDF): draw a uniform number between the CDF at the two edges
of the window, and apply the quantile function. Every draw lies in the window, none is rejected, and
the density keeps its shape.

Timestep 0 is the clean latent and 1 is pure noise; see `objective.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator

    from gracetune.config.schema import TrainSection

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)


class TimestepWindow(NamedTuple):
    """A half-open interval [low, high) of timesteps."""

    low: float
    high: float


FULL_WINDOW = TimestepWindow(0.0, 1.0)
MIN_PROBABILITY = 1e-9
"""Smallest probability that a window may have. Below it, float64 is too coarse to invert the tail
of the distribution."""


def expert_windows(boundary: float) -> dict[str, TimestepWindow]:
    """Return the timesteps of the two transformers of Wan 2.2, which meet at `boundary`.

    `high` noise is trained on timesteps from the boundary up, `low` noise on those below.
    """
    return {"high": TimestepWindow(boundary, 1.0), "low": TimestepWindow(0.0, boundary)}


def sample_timesteps(
    section: TrainSection,
    count: int,
    generator: Generator,
    window: TimestepWindow = FULL_WINDOW,
    num_tokens: int = 1,
) -> Tensor:
    """Draw `count` timesteps that lie in `window` and in `train.timestep_window`.

    `num_tokens` is the sequence length of one sample; only resolution-dependent shifts use it.
    """
    window = intersect(window, TimestepWindow(*section.timestep_window))
    shift = shift_for(section, num_tokens)
    distribution = DISTRIBUTIONS[section.timestep_sampling]
    if window == FULL_WINDOW:
        return apply_shift(distribution.sample(count, generator, section), shift)
    low, high = cdf_at_edges(section, window, shift)
    uniform = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
    unshifted = distribution.quantile(low + (high - low) * uniform, section)
    return apply_shift(unshifted, shift).float().clamp(*fp32_bounds(window))


def scheduled_timesteps(positions: Tensor, schedule: Tensor | None) -> Tensor:
    """Return the timesteps at positions in [0, 1] of a discrete noise schedule.

    With equal probability for each position, each of the schedule's timesteps is equally likely.
    Without a schedule, the positions are the timesteps.
    """
    if schedule is None:
        return positions
    index = (positions * len(schedule)).long().clamp(max=len(schedule) - 1)
    return schedule.to(positions.device)[index]


def window_probability(section: TrainSection, window: TimestepWindow, num_tokens: int = 1) -> float:
    """Return the probability that a timestep drawn by this run falls into `window`."""
    shift, allowed = shift_for(section, num_tokens), TimestepWindow(*section.timestep_window)
    low, high = cdf_at_edges(section, intersect(window, allowed), shift)
    lowest, highest = cdf_at_edges(section, allowed, shift)
    return (high - low) / (highest - lowest)


def intersect(window: TimestepWindow, allowed: TimestepWindow) -> TimestepWindow:
    """Return the timesteps that are in both intervals; raise if there are none.

    `window` is the range of one transformer (Wan 2.2 has two), `allowed` the setting
    `train.timestep_window`.
    """
    both = TimestepWindow(max(window.low, allowed.low), min(window.high, allowed.high))
    if both.low >= both.high:
        raise ConfigError(
            f"train.timestep_window is [{allowed.low:g}, {allowed.high:g}), but the trained expert "
            f"covers [{window.low:g}, {window.high:g}), and the two do not overlap. Widen "
            "train.timestep_window, or train the other expert (train.experts)."
        )
    return both


def cdf_at_edges(
    section: TrainSection, window: TimestepWindow, shift: float
) -> tuple[float, float]:
    """Return the CDF of the timesteps, after the shift, at both edges of a window."""
    distribution = DISTRIBUTIONS[section.timestep_sampling]

    def cdf(timestep: float) -> float:
        unshifted = apply_shift(timestep, 1 / shift) if 0 < timestep < 1 else timestep
        if unshifted <= 0 or unshifted >= 1:  # 0 also when a tiny timestep underflows
            return float(unshifted >= 1)
        return distribution.cdf(unshifted, section)

    low, high = cdf(window.low), cdf(window.high)
    if high - low < MIN_PROBABILITY:
        raise ConfigError(
            f"train.timestep_sampling {section.timestep_sampling} with shift {shift:g} draws only "
            f"{high - low:.1e} of its timesteps from [{window.low:g}, {window.high:g}), too few to "
            "train on. Set train.timestep_sampling: uniform, or change train.timestep_shift."
        )
    return low, high


def fp32_bounds(window: TimestepWindow) -> tuple[float, float]:
    """Return the smallest and the largest fp32 timestep inside a window.

    Rounding must not move a timestep out of the window, which belongs to one of two transformers.
    Each bound is therefore inside the window both in fp32 and as a Python float: 0.9 in fp32, for
    example, is less than the float 0.9.
    """
    low, high = np.float32(window.low), np.float32(window.high)
    smallest = low if float(low) >= window.low else np.nextafter(low, np.float32(1))
    return float(smallest), float(np.nextafter(high, np.float32(0)))


# Shifts


def apply_shift(timestep: FloatOrTensor, shift: float) -> FloatOrTensor:
    """Shift timesteps towards noise: shift t / (1 + (shift - 1) t). To undo it, pass 1 / shift."""
    return shift * timestep / (1 + (shift - 1) * timestep)


SHIFT_POINTS = {
    "flux": ((256, 0.5), (4096, 1.15)),
    "qwen_image": ((256, 0.5), (8192, 0.9)),
}
"""Two points (number of tokens, mu) on the line that gives mu, the logarithm of the timestep shift,
for each model. Its scheduler has them as base_shift at base_image_seq_len and max_shift at
max_image_seq_len."""


def shift_for(section: TrainSection, num_tokens: int) -> float:
    """Return the timestep shift for samples with this many tokens.

    Larger images need more noise before their content is lost, so their shift is larger.
    `flux`, `qwen_image`: exp(mu), with mu linear in the number of tokens. `sd3`: proportional to
    the square root of the area, 3 at 4096 tokens (Esser et al. 2024).
    """
    rule = section.timestep_shift
    if isinstance(rule, float):
        return rule
    if rule == "sd3":
        return 3.0 * math.sqrt(num_tokens / 4096)
    (x0, y0), (x1, y1) = SHIFT_POINTS[rule]
    return math.exp(y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0))


def largest_known_tokens(rule: float | str) -> int | None:
    """Return the largest number of tokens that a rule is known for; None if it has no limit.

    The lines of `SHIFT_POINTS` go on beyond their points, but the models are not trained there.
    """
    known = isinstance(rule, str) and rule in SHIFT_POINTS
    return SHIFT_POINTS[str(rule)][1][0] if known else None


# Distributions (Esser et al. 2024), all before the shift

MODE_SCALE = 1.29


class Distribution(NamedTuple):
    """A distribution of timesteps: functions to sample it, its quantile function and its CDF."""

    sample: Callable[[int, Generator, TrainSection], Tensor]
    """Draws timesteps from the whole distribution. Does not use `quantile`, so that runs without a
    window reproduce the random numbers of earlier versions."""
    quantile: Callable[[Tensor, TrainSection], Tensor]
    """The inverse of the CDF: probabilities to timesteps."""
    cdf: Callable[[float, TrainSection], float]
    """The probability that a drawn timestep is smaller than the given one, which is in (0, 1)."""


def _uniform(count: int, generator: Generator, _: TrainSection) -> Tensor:
    return torch.rand(count, generator=generator, device=generator.device)


def _logit_normal(count: int, generator: Generator, section: TrainSection) -> Tensor:
    """Draw sigmoid(z) with a normally distributed z."""
    normal = torch.randn(count, generator=generator, device=generator.device)
    return (section.timestep_mean + section.timestep_std * normal).sigmoid()


def _logit_normal_quantile(u: Tensor, section: TrainSection) -> Tensor:
    normal: Tensor = torch.special.ndtri(u)
    return (section.timestep_mean + section.timestep_std * normal).sigmoid()


def _logit_normal_cdf(timestep: float, section: TrainSection) -> float:
    logit = math.log(timestep / (1 - timestep))
    z = (logit - section.timestep_mean) / section.timestep_std
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _mode(count: int, generator: Generator, section: TrainSection) -> Tensor:
    return _mode_quantile(_uniform(count, generator, section), section)


def _mode_quantile(u: Tensor, _: TrainSection) -> Tensor:
    """Return u - k (sin^2(pi u / 2) - u), k = `MODE_SCALE`: most timesteps are in the middle."""
    return u - MODE_SCALE * ((u * (math.pi / 2)).sin().square() - u)


def _mode_cdf(timestep: float, _: TrainSection) -> float:
    """Invert the quantile function by bisection, because its inverse has no closed form."""
    low, high = 0.0, 1.0
    for _step in range(60):  # until float64 has no more digits
        u = (low + high) / 2
        found = u - MODE_SCALE * (math.sin(u * math.pi / 2) ** 2 - u)
        low, high = (u, high) if found < timestep else (low, u)
    return (low + high) / 2


def _cosmap(count: int, generator: Generator, section: TrainSection) -> Tensor:
    return _cosmap_quantile(_uniform(count, generator, section), section)


def _cosmap_quantile(u: Tensor, _: TrainSection) -> Tensor:
    """Return 1 - 1 / (tan(pi u / 2) + 1), which gives the log-SNR of a cosine schedule."""
    tangent = (u * (math.pi / 2)).tan()
    return 1 - 1 / (tangent + 1)


def _cosmap_cdf(timestep: float, _: TrainSection) -> float:
    return 2 / math.pi * math.atan(timestep / (1 - timestep))


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution(_uniform, lambda u, _: u, lambda timestep, _: timestep),
    "logit_normal": Distribution(_logit_normal, _logit_normal_quantile, _logit_normal_cdf),
    "mode": Distribution(_mode, _mode_quantile, _mode_cdf),
    "cosmap": Distribution(_cosmap, _cosmap_quantile, _cosmap_cdf),
}
