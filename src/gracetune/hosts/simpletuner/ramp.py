"""The ramp on SimpleTuner's own loop: accumulation changes between optimizer steps only.

Accelerate divides each loss by the accumulation of the moment and steps when its own count is a
multiple of it. Both are set here at once, right after a step, and the count begins anew: so every
optimizer step weighs 1. Where a ramp is after a number of optimizer steps follows from that number,
so that resuming needs nothing saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from gracetune.config.schema import Gh200Section


class Accelerator(Protocol):
    """The part of accelerate's that is used."""

    gradient_accumulation_steps: int
    sync_gradients: bool
    step: int
    num_processes: int


@dataclass(frozen=True, slots=True)
class AccumulationSchedule:
    """Micro-batches of an optimizer step, by the micro-batches before it: as the trainer's own."""

    initial: int
    target: int
    length: int
    shape: Literal["quadratic", "linear"]
    samples_per_micro_batch: int

    def accumulation(self, micro_batches: int) -> int:
        """Micro-batches in the optimizer step that starts after this many."""
        done = min(1.0, micro_batches / self.length)
        share = done if self.shape == "linear" else done * done
        effective = self.initial + (self.target - self.initial) * share
        return math.ceil(round(effective, 6) / self.samples_per_micro_batch)

    def position(self, optimizer_steps: int) -> int:
        """Micro-batches that so many optimizer steps have taken."""
        done = 0
        for _ in range(optimizer_steps):
            done += self.accumulation(done)
        return done


class Accumulation(int):
    """Micro-batches of the optimizer step at work, as SimpleTuner's configuration holds them.

    SimpleTuner validates, and uploads a checkpoint, where its count of micro-batches is a multiple
    of this number. While the number grows, that is in the middle of a step, or never: so the
    remainder answers what is asked by it, and is 0 where a step ends.
    """

    _ends_step: Callable[[], bool]

    def __new__(cls, value: int, ends_step: Callable[[], bool]) -> Accumulation:
        made = super().__new__(cls, value)
        made._ends_step = ends_step
        return made

    def __rmod__(self, micro_batches: int) -> int:
        return 0 if self._ends_step() else micro_batches % int(self) or 1

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy, such as the one that trackers are given, is a plain number."""
        return int, (int(self),)


def build_schedule(
    section: Gh200Section, batch_size: int, accumulation: int, world_size: int
) -> AccumulationSchedule | None:
    """The ramp that a configuration asks for, if it does."""
    if not section.enable_batch_size_rampup:
        return None
    size = batch_size * world_size
    initial = section.initial_effective_batch_size
    target = section.target_effective_batch_size or size * accumulation
    if initial is None or not initial <= target or target < size:
        raise ConfigError(
            f"gh200_optimizations.initial_effective_batch_size is {initial} and the target is "
            f"{target}; a ramp needs both, grows, and ends with at least one micro-batch "
            f"({batch_size} samples on each of {world_size} ranks)."
        )
    return AccumulationSchedule(
        initial, target, section.batch_rampup_steps, section.rampup_shape, size
    )


@dataclass
class SimpleTunerRamp:
    """A schedule on its way; `enter` goes where the loop opens `accelerator.accumulate`."""

    schedule: AccumulationSchedule
    accelerator: Accelerator
    steps_done: Callable[[], int]
    """Optimizer steps so far: asked once, when the loop begins."""
    tell: Callable[[int], None]
    """Called with each new accumulation, which others must know too."""
    _micro_batches: int | None = None

    def enter(
        self, accumulate: Callable[..., AbstractContextManager[object]], *models: object
    ) -> AbstractContextManager[object]:
        """Set what the step that begins now has, then let accelerate count."""
        if self._micro_batches is None:
            self._micro_batches = self.schedule.position(self.steps_done())
            self._begin_step()
        elif self.accelerator.sync_gradients:
            self._begin_step()
        self._micro_batches += 1
        return accumulate(*models)

    def _begin_step(self) -> None:
        assert self._micro_batches is not None
        wanted = self.schedule.accumulation(self._micro_batches)
        self.accelerator.step = 0
        if self.accelerator.gradient_accumulation_steps != wanted:
            self.accelerator.gradient_accumulation_steps = wanted
        self.tell(wanted)
