"""Which expert an optimizer step trains, and the noise levels that are its own.

A turn is a pure function of the steps done, so every rank agrees and a resumed run goes on with the
right expert. All micro-batches of a step have one expert; its window is half-open, and a level that
is exactly the boundary belongs to high noise.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gracetune.data.buckets import frame_counts
from gracetune.errors import ConfigError
from gracetune.models.family import EXPERTS
from gracetune.train.timesteps import FULL_WINDOW, TimestepWindow, expert_windows, intersect, window_probability

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import RunFile, TrainSection
    from gracetune.data.loader import BatchOrder
    from gracetune.data.sample import Shape
    from gracetune.models.family import Expert, Family

    Mix = Mapping[int, int]
    """How many samples are drawn of each number of tokens."""

SINGLE_SIZE: Mix = {1: 1}
"""Enough for shifts that do not follow the size."""


@dataclass(frozen=True, slots=True)
class ExpertTurn:
    """Who is trained, on which levels."""

    expert: Expert | None = None
    """None: the model has one transformer."""
    window: TimestepWindow = FULL_WINDOW


SINGLE_TRANSFORMER = ExpertTurn()
"""Of a model without experts."""


@dataclass(frozen=True, slots=True)
class ExpertSchedule:
    """The turns of a run."""

    steps_per_turn: int = 1
    """Optimizer steps in a turn."""
    high_share: float = 1.0
    """How many of the turns are the high-noise expert's."""
    windows: Mapping[Expert, TimestepWindow] = field(default_factory=dict)
    """Of the experts that are trained; empty: there is one transformer."""

    def at(self, step: int) -> ExpertTurn:
        """The turn of the step that follows after so many."""
        if not self.windows:
            return SINGLE_TRANSFORMER
        number = step // self.steps_per_turn
        # As many as the share asks for, evenly spread: whenever the running sum passes a whole one.
        before, after = (math.floor(n * self.high_share + 0.5) for n in (number, number + 1))
        expert: Expert = "high" if after > before else "low"
        return ExpertTurn(expert, self.windows[expert])

    def turns(self) -> list[ExpertTurn]:
        """One of each kind."""
        if not self.windows:
            return [SINGLE_TRANSFORMER]
        return [ExpertTurn(expert, window) for expert, window in self.windows.items()]


def build_expert_schedule(section: TrainSection, boundary: float | None, mix: Mix = SINGLE_SIZE) -> ExpertSchedule:
    """From the run file and the model's boundary to turns; what cannot be is refused by name.

    Larger samples may be shifted towards noise: shares are means over all that is drawn.
    """
    if boundary is None:
        if section.experts != "both":
            raise ConfigError(
                f"train.experts is {section.experts!r}, but the model has one transformer for all "
                "noise levels. Leave it out; train.timestep_window says which levels are drawn."
            )
        return ExpertSchedule()
    named = {name: expert_windows(boundary)[name] for name in EXPERTS}
    trained = {e: w for e, w in named.items() if section.experts in ("both", e)}
    for window in trained.values():
        intersect(window, TimestepWindow(*section.timestep_window))  # refuses one without any level
        mean_window_probability(section, window, mix)
    if len(trained) == 1:
        return ExpertSchedule(section.switch_every, 1.0 if "high" in trained else 0.0, trained)
    share = 0.5
    if section.expert_turns == "proportional":
        share = mean_window_probability(section, named["high"], mix)
    return ExpertSchedule(section.switch_every, share, trained)


def mean_window_probability(section: TrainSection, window: TimestepWindow, mix: Mix) -> float:
    """How much of what is drawn of these samples lies in a window."""
    drawn = sum(mix.values())
    return sum(n * window_probability(section, window, tokens) for tokens, n in mix.items()) / drawn


def expected_token_counts(run: RunFile, family: Family) -> Mix:
    """Before the data are looked at: every length of clip that they may have, as squares."""
    shapes: list[Shape] = []
    for data in run.datasets:
        square = (data.resolution, data.resolution)
        is_video = data.dataset_type == "video"
        shapes += [(*square, frames) for frames in frame_counts(data)] if is_video else [square]
    return _count_tokens(family, dict.fromkeys(shapes, 1))


def drawn_token_counts(order: BatchOrder, family: Family) -> Mix:
    """What a run really draws, by the buckets that its data fill."""
    return _count_tokens(family, order.draws_by_size())


def _count_tokens(family: Family, draws: Mapping[Shape, int]) -> Mix:
    if family.boundary is None:
        return SINGLE_SIZE
    mix: Counter[int] = Counter()
    for shape, count in draws.items():
        mix[family.num_tokens(family.latent_shape(*shape))] += count
    return mix


def describe_schedule(turns: ExpertSchedule, boundary: float | None) -> str | None:
    """One line for the log, where there is something to tell."""
    if not turns.windows:
        return None
    if len(turns.windows) == 1:
        (expert,) = turns.windows
        return f"two experts: only the {expert}-noise one is trained; they change at {boundary:g}"
    return (
        f"two experts: high noise from level {boundary:g} on, low noise below; {turns.steps_per_turn} "
        f"steps a turn, {turns.high_share:.1%} of the turns are high noise's"
    )
