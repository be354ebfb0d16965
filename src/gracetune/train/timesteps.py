"""How noise levels s in [0, 1] are drawn: a distribution, pushed by a shift, inside a window.

A distribution is known by its quantiles. Inside a window its shares run from one edge's to the
other's, so that every draw lies in the window, none is thrown away, and the shape stays what it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Generator, Tensor

    from gracetune.config.schema import TrainSection


class TimestepWindow(NamedTuple):
    """Levels from `low` up to, and without, `high`."""

    low: float
    high: float


FULL_WINDOW = TimestepWindow(0.0, 1.0)
MIN_PROBABILITY = 1e-9
"""A window with less of the distribution is one that nobody meant; near the end of a tail its
levels could not be told apart."""


class Distribution(NamedTuple):
    """Of levels between picture (0) and noise (1), before any shift."""

    sample: Callable[[int, Generator, TrainSection], Tensor]
    """Without a window, by the usual recipe: the same numbers as every version drew."""
    quantile: Callable[[Tensor, TrainSection], Tensor]
    """The level that a share of all draws stays below."""
    cdf: Callable[[float, TrainSection], float]
    """Its inverse, for a level strictly between 0 and 1."""


def expert_windows(boundary: float) -> dict[str, TimestepWindow]:
    """The two experts' levels: high noise from the boundary on, low noise below it."""
    return {"high": TimestepWindow(boundary, 1.0), "low": TimestepWindow(0.0, boundary)}


def sample_timesteps(
    section: TrainSection,
    count: int,
    generator: Generator,
    window: TimestepWindow = FULL_WINDOW,
    num_tokens: int = 1,
) -> Tensor:
    """The levels of one micro-batch, all in the window and in `train.timestep_window`.

    `num_tokens` of one sample matters only where the shift follows the resolution.
    """
    window = intersect(window, TimestepWindow(*section.timestep_window))
    shift = shift_for(section, num_tokens)
    distribution = DISTRIBUTIONS[section.timestep_sampling]
    if window == FULL_WINDOW:
        return apply_shift(distribution.sample(count, generator, section), shift)
    low, high = cdf_at_edges(section, window, shift)
    shares = torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)
    levels = apply_shift(distribution.quantile(low + (high - low) * shares, section), shift)
    return levels.float().clamp(*fp32_bounds(window))


def window_probability(section: TrainSection, window: TimestepWindow, num_tokens: int = 1) -> float:
    """How much of what is drawn lies in a window: what experts can be weighed by."""
    shift, allowed = shift_for(section, num_tokens), TimestepWindow(*section.timestep_window)
    low, high = cdf_at_edges(section, intersect(window, allowed), shift)
    lowest, highest = cdf_at_edges(section, allowed, shift)
    return (high - low) / (highest - lowest)


def intersect(one: TimestepWindow, other: TimestepWindow) -> TimestepWindow:
    """The levels that lie in both."""
    both = TimestepWindow(max(one.low, other.low), min(one.high, other.high))
    if both.low >= both.high:
        raise ConfigError(
            f"no noise level is both in [{one.low:g}, {one.high:g}) and in "
            f"[{other.low:g}, {other.high:g}). Widen train.timestep_window, or train the "
            "other expert."
        )
    return both


def cdf_at_edges(section: TrainSection, window: TimestepWindow, shift: float) -> tuple[float, float]:
    """The shares of draws that stay below each edge of a window over shifted levels."""
    distribution = DISTRIBUTIONS[section.timestep_sampling]

    def below(level: float) -> float:
        drawn = _shifted(level, 1 / shift) if 0 < level < 1 else level
        if drawn <= 0 or drawn >= 1:  # the least numbers there are become 0
            return float(drawn >= 1)
        return distribution.cdf(drawn, section)

    low, high = below(window.low), below(window.high)
    if high - low < MIN_PROBABILITY:
        raise ConfigError(
            f"train.timestep_sampling {section.timestep_sampling} with shift {shift:g} has "
            f"{high - low:.1e} of its levels in [{window.low:g}, {window.high:g}), too few to draw "
            "from. Set train.timestep_sampling: uniform, or another train.timestep_shift."
        )
    return low, high


def fp32_bounds(window: TimestepWindow) -> tuple[float, float]:
    """The least and the greatest fp32 level of a window.

    Both are on the right side of each edge whether it is compared in fp32, where 0.9 is a little
    less than 0.9, or as a Python number: no level reaches the wrong expert by rounding.
    """
    low, high = np.float32(window.low), np.float32(window.high)
    least = low if float(low) >= window.low else np.nextafter(low, np.float32(1))
    return float(least), float(np.nextafter(high, np.float32(0)))


# Shifts


def apply_shift(s: Tensor, shift: float) -> Tensor:
    """Push levels towards noise: s -> shift s / (1 + (shift - 1) s)."""
    return shift * s / (1 + (shift - 1) * s)


def _shifted(s: float, shift: float) -> float:
    return shift * s / (1 + (shift - 1) * s)


SHIFT_POINTS = {
    "flux": ((256, 0.5), (4096, 1.15)),
    "qwen_image": ((256, 0.5), (8192, 0.9)),
}
"""Tokens and mu, as the models' schedulers have them: base_shift at base_image_seq_len, max_shift
at max_image_seq_len."""


def shift_for(section: TrainSection, num_tokens: int) -> float:
    """What levels are shifted by: larger pictures take more noise until their content is lost.

    `flux` and `qwen_image`: exp(mu), with mu linear in the tokens. `sd3`: by the root of the area,
    from the published 3 at 4096 tokens (Esser et al. 2024).
    """
    rule = section.timestep_shift
    if isinstance(rule, float):
        return rule
    if rule == "sd3":
        return 3.0 * math.sqrt(num_tokens / 4096)
    (x0, y0), (x1, y1) = SHIFT_POINTS[rule]
    return math.exp(y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0))


# Distributions

MODE_SCALE = 1.29


def _uniform(count: int, generator: Generator, _: TrainSection) -> Tensor:
    return torch.rand(count, generator=generator, device=generator.device)


def _logit_normal(count: int, generator: Generator, section: TrainSection) -> Tensor:
    """The sigmoid of a normal (Esser et al. 2024)."""
    normal = torch.randn(count, generator=generator, device=generator.device)
    return (section.timestep_mean + section.timestep_std * normal).sigmoid()


def _logit_normal_quantile(share: Tensor, section: TrainSection) -> Tensor:
    normal: Tensor = torch.special.ndtri(share)
    return (section.timestep_mean + section.timestep_std * normal).sigmoid()


def _logit_normal_cdf(level: float, section: TrainSection) -> float:
    z = (math.log(level / (1 - level)) - section.timestep_mean) / section.timestep_std
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _mode(count: int, generator: Generator, section: TrainSection) -> Tensor:
    return _mode_quantile(_uniform(count, generator, section), section)


def _mode_quantile(share: Tensor, _: TrainSection) -> Tensor:
    """u - k (sin^2(pi u / 2) - u): most in the middle, and the ends never empty (ibid.)."""
    return share - MODE_SCALE * ((share * (math.pi / 2)).sin().square() - share)


def _mode_cdf(level: float, _: TrainSection) -> float:
    low, high = 0.0, 1.0
    for _step in range(60):  # halves until float64 has no more digits
        share = (low + high) / 2
        found = share - MODE_SCALE * (math.sin(share * math.pi / 2) ** 2 - share)
        low, high = (share, high) if found < level else (low, share)
    return (low + high) / 2


def _cosmap(count: int, generator: Generator, section: TrainSection) -> Tensor:
    return _cosmap_quantile(_uniform(count, generator, section), section)


def _cosmap_quantile(share: Tensor, _: TrainSection) -> Tensor:
    """1 - 1 / (tan(pi u / 2) + 1): the log-SNR of a cosine schedule (ibid.)."""
    tangent = (share * (math.pi / 2)).tan()
    return 1 - 1 / (tangent + 1)


def _cosmap_cdf(level: float, _: TrainSection) -> float:
    return 2 / math.pi * math.atan(level / (1 - level))


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": Distribution(_uniform, lambda share, _: share, lambda level, _: level),
    "logit_normal": Distribution(_logit_normal, _logit_normal_quantile, _logit_normal_cdf),
    "mode": Distribution(_mode, _mode_quantile, _mode_cdf),
    "cosmap": Distribution(_cosmap, _cosmap_quantile, _cosmap_cdf),
}
