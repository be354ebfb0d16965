"""Decide which expert of a two-expert model (Wan 2.2) each optimizer step trains.

Wan 2.2 has one transformer for high noise and one for low noise, split at a boundary timestep. The
experts take turns. A turn follows from the step number alone, so all ranks agree and a resumed run
continues with the right expert. All micro-batches of a step train the same expert, on timesteps
from its half-open window; a timestep exactly on the boundary belongs to high noise.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.data.buckets import frame_counts
from gracetune.errors import ConfigError
from gracetune.models.family import EXPERTS
from gracetune.train.timesteps import (
    FULL_WINDOW,
    TimestepWindow,
    expert_windows,
    intersect,
    window_probability,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import RunFile, TrainSection
    from gracetune.data.batch_order import BatchOrder
    from gracetune.data.sample import Shape
    from gracetune.models.family import Expert, Family

    TokenCounts = Mapping[int, int]
    """Sequence length in tokens -> number of samples drawn with it."""

SINGLE_SIZE: TokenCounts = {1: 1}
"""Sequence length -> number of samples, if the length does not matter: one sample of length 1."""


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """The transformer of Wan 2.2 that one step trains (an expert), and its range of timesteps."""

    expert: Expert | None = None
    """The high-noise or low-noise transformer of Wan 2.2. None for a model with one transformer."""
    window: TimestepWindow = FULL_WINDOW


SINGLE_TRANSFORMER = ExpertTurn()
"""The value for every step of a model with a single transformer: it trains on all timesteps."""


@dataclass(frozen=True, slots=True)
class ExpertSchedule:
    """Decides which transformer of Wan 2.2 each step trains: high noise or low noise.

    A run that trains both alternates between them, in turns of several steps.
    """

    steps_per_turn: int
    high_share: float
    """Share of turns that train the high-noise transformer; a turn is `steps_per_turn` steps."""
    windows: Mapping[Expert, TimestepWindow]
    """The range of timesteps of each trained transformer, `high` or `low` noise."""

    def expert_at(self, step: int) -> ExpertTurn:
        """Return the transformer and timesteps for the step that follows `step` completed steps.

        A turn is `steps_per_turn` steps. High-noise turns are spread evenly, as in Bresenham's
        line: a turn is high noise if the rounded running sum of `high_share` grows in it.
        """
        turn = step // self.steps_per_turn
        before, after = (math.floor(n * self.high_share + 0.5) for n in (turn, turn + 1))
        expert: Expert = "high" if after > before else "low"
        return ExpertTurn(expert, self.windows[expert])

    def describe(self, boundary: float) -> str:
        """Return one line for the log: which transformers are trained, and in which turns."""
        if len(self.windows) == 1:
            (expert,) = self.windows
            return f"experts: only {expert} noise is trained (boundary {boundary:g})"
        return (
            f"experts: high noise for timesteps from {boundary:g}, low noise below; "
            f"{self.steps_per_turn} steps per turn, {self.high_share:.1%} of the turns high noise"
        )


def build_expert_schedule(
    section: TrainSection, boundary: float | None, token_counts: TokenCounts = SINGLE_SIZE
) -> ExpertSchedule | None:
    """Return the schedule that alternates between the two transformers of Wan 2.2.

    Returns None for a model with one transformer. The distribution of timesteps may depend on the
    sequence length, so probabilities are averaged over `token_counts`.
    """
    if boundary is None:
        if section.experts != "both":
            raise ConfigError(
                f"train.experts is {section.experts!r}, but the model has one transformer for all "
                "timesteps. Remove it; use train.timestep_window to restrict the timesteps."
            )
        return None
    windows = {expert: expert_windows(boundary)[expert] for expert in EXPERTS}
    trained = {e: window for e, window in windows.items() if section.experts in ("both", e)}
    for window in trained.values():  # both calls raise for a window with nothing to draw
        intersect(window, TimestepWindow(*section.timestep_window))
        mean_window_probability(section, window, token_counts)
    if len(trained) == 1:
        high_share = 1.0 if "high" in trained else 0.0
    elif section.expert_turns == "proportional":
        high_share = mean_window_probability(section, windows["high"], token_counts)
    else:
        high_share = 0.5
    return ExpertSchedule(section.switch_every, high_share, trained)


def mean_window_probability(
    section: TrainSection, window: TimestepWindow, token_counts: TokenCounts
) -> float:
    """Return the probability that a timestep falls into `window`, averaged over all samples."""
    total = sum(token_counts.values())
    weighted = (
        count * window_probability(section, window, tokens)
        for tokens, count in token_counts.items()
    )
    return sum(weighted) / total


def expected_token_counts(run: RunFile, family: Family) -> TokenCounts:
    """Return the sequence lengths that the run file implies, each counted once.

    Assumes square images of each resolution, and clips of every allowed number of frames. Used to
    reject impossible settings before the data are read.
    """
    shapes: list[Shape] = []
    for data in run.datasets:
        squares = [(edge, edge) for edge in data.resolutions]
        if data.dataset_type == "video":
            shapes += [(*square, frames) for square in squares for frames in frame_counts(data)]
        else:
            shapes += squares
    return _count_tokens(family, dict.fromkeys(shapes, 1))


def drawn_token_counts(order: BatchOrder, family: Family) -> TokenCounts:
    """Return the sequence lengths of the run's buckets, and how many samples have each."""
    return _count_tokens(family, order.draws_by_size())


def _count_tokens(family: Family, draws: Mapping[Shape, int]) -> TokenCounts:
    if family.boundary is None:
        return SINGLE_SIZE
    counts: Counter[int] = Counter()
    for shape, count in draws.items():
        counts[family.num_tokens(family.latent_shape(*shape))] += count
    return counts
