"""Which expert an optimizer step trains, and the noise levels that are its own.

A turn is a pure function of the steps done, so every rank agrees and a resumed run goes on with the
right expert. All micro-batches of a step have one expert; its window is half-open, and a level that
is exactly the boundary belongs to high noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError
from gracetune.models.experts import EXPERTS
from gracetune.train.timesteps import WHOLE, Window, expert_windows, overlap, share_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.config.schema import TrainSection
    from gracetune.models.experts import Expert


@dataclass(frozen=True, slots=True)
class Turn:
    """Who is trained, on which levels."""

    expert: Expert | None = None
    """None: the model has one transformer."""
    window: Window = WHOLE


ALONE = Turn()
"""Of a model without experts."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a run."""

    every: int = 1
    """Optimizer steps in a turn."""
    high_share: float = 1.0
    """How many of the turns are the high-noise expert's."""
    windows: Mapping[Expert, Window] = field(default_factory=dict)
    """Of the experts that are trained; empty: there is one transformer."""

    def at(self, step: int) -> Turn:
        """The turn of the step that follows after so many."""
        if not self.windows:
            return ALONE
        number = step // self.every
        # As many as the share asks for, evenly spread: whenever the running sum passes a whole one.
        before, after = (math.floor(n * self.high_share + 0.5) for n in (number, number + 1))
        expert: Expert = "high" if after > before else "low"
        return Turn(expert, self.windows[expert])

    def all(self) -> list[Turn]:
        """One of each kind."""
        if not self.windows:
            return [ALONE]
        return [Turn(expert, window) for expert, window in self.windows.items()]


def plan_turns(section: TrainSection, boundary: float | None, num_tokens: int = 1) -> Turns:
    """From the run file and the model's boundary to turns; what cannot be is refused by name."""
    if boundary is None:
        if section.experts != "both":
            raise ConfigError(
                f"train.experts is {section.experts!r}, but the model has one transformer for all "
                "noise levels. Leave it out; train.timestep_window says which levels are drawn."
            )
        return Turns()
    named = {name: expert_windows(boundary)[name] for name in EXPERTS}
    trained = {e: w for e, w in named.items() if section.experts in ("both", e)}
    for window in trained.values():
        overlap(window, Window(*section.timestep_window))  # refuses one without any level
        share_of(section, window, num_tokens)
    if len(trained) == 1:
        return Turns(section.switch_every, 1.0 if "high" in trained else 0.0, trained)
    share = 0.5
    if section.expert_turns == "proportional":
        share = share_of(section, named["high"], num_tokens)
    return Turns(section.switch_every, share, trained)


def tell_turns(turns: Turns, boundary: float | None) -> str | None:
    """One line for the log, where there is something to tell."""
    if not turns.windows:
        return None
    if len(turns.windows) == 1:
        (expert,) = turns.windows
        return f"two experts: only the {expert}-noise one is trained; they change at {boundary:g}"
    return (
        f"two experts: high noise from level {boundary:g} on, low noise below; {turns.every} "
        f"steps a turn, {turns.high_share:.1%} of the turns are high noise's"
    )
