"""Windows of timesteps that keep to one expert.

For the stage below a boundary, ai-toolkit's window begins at the last timestep *above* it: one draw
in some hundreds goes to the other expert, which gets a gradient in the wrong stage, or has none to
give where only one is trained. Its window follows from its boundaries, so a boundary is handed to
it from which the right window follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

OUTSIDE_STAGES = ("one_step", "two_step", "four_step", "eight_step", "next_sample")
"""Ways of drawing that take no window at all."""
SCALE = 1000


def stage_boundaries(timesteps: Tensor, boundaries: Sequence[float], stage: int) -> list[float]:
    """Boundaries to be handed to ai-toolkit while it draws for one stage.

    `timesteps` fall from 1000; stage 0 ends above the first boundary, as the model itself decides.
    """
    found = [1.0, *boundaries]
    above = int((timesteps > found[stage] * SCALE).sum()) if stage else 0
    below = int((timesteps > found[stage + 1] * SCALE).sum())
    if below <= above:
        raise ConfigError(
            f"train.timestep_type made no timestep between {found[stage] * SCALE:g} and "
            f"{found[stage + 1] * SCALE:g}, which stage {stage} of the model trains on. Set "
            "timestep_type: linear, or shift."
        )
    if stage == 0:
        return list(boundaries)
    # The window begins at the last timestep that is not below what it is handed.
    changed = list(boundaries)
    changed[stage - 1] = float(timesteps[above]) / SCALE
    return changed


def demand_stages(timestep_type: str) -> None:
    """Some ways of drawing know no stages: with two experts they train the wrong one."""
    if timestep_type in OUTSIDE_STAGES:
        raise ConfigError(
            f"train.timestep_type is {timestep_type}, which draws for both experts at once and "
            "trains the one whose turn it is. Set timestep_type: shift, sigmoid or linear, or "
            "gracetune.stage_timesteps: false."
        )
