"""The number of micro-batches in an optimizer step, and a ramp that increases it during a run.

A step has the same micro-batches at any number of ranks, which share them. Their number depends
only on the micro-batches done so far, so a checkpoint stores nothing but that count. It changes
between optimizer steps only: in the middle of a step, a change would give samples the wrong
weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import RunFile


@dataclass(frozen=True, slots=True)
class AccumulationRamp:
    """Computes the number of micro-batches in an optimizer step from the run's progress."""

    initial: int
    """Effective batch size at the start: samples in an optimizer step, over all ranks."""
    target: int
    """Effective batch size after `length` micro-batches."""
    length: int
    """Micro-batches that all ranks together do until the target is reached."""
    shape: Literal["quadratic", "linear"]
    batch_size: int
    """Samples in one micro-batch."""
    world_size: int = 1
    """Number of ranks; each has at least one micro-batch in a step."""

    def accumulation(self, done: int) -> int:
        """Return the micro-batches of the next step over all ranks, when `done` are done."""
        progress = min(1.0, done / self.length)
        share = progress if self.shape == "linear" else progress * progress
        effective = self.initial + (self.target - self.initial) * share
        return max(self.world_size, math.ceil(round(effective, 6) / self.batch_size))

    @property
    def is_constant(self) -> bool:
        """True if steps have the same number of micro-batches at the start and the end."""
        return self.accumulation(0) == self.accumulation(self.length)


def micro_batches_per_step(run: RunFile, world_size: int) -> int:
    """Return the micro-batches in each step of a run without a ramp, over all ranks."""
    train = run.train
    if train.effective_batch_size is None:
        return train.gradient_accumulation_steps * world_size
    count = train.effective_batch_size // train.batch_size
    if count < world_size:
        raise ConfigError(
            f"train.effective_batch_size is {train.effective_batch_size}, but {world_size} ranks "
            f"with a train.batch_size of {train.batch_size} need at least "
            f"{train.batch_size * world_size}. Raise it, lower train.batch_size, or use fewer GPUs."
        )
    return count


def build_ramp(run: RunFile, world_size: int) -> AccumulationRamp | None:
    """Return the ramp that the run file configures; None if it configures none."""
    section, batch = run.gh200_optimizations, run.train.batch_size
    if not section.enable_batch_size_rampup:
        return None
    initial = section.initial_effective_batch_size
    assert initial is not None, "config.checks requires it when a ramp is enabled"
    target = section.target_effective_batch_size
    target = target or batch * micro_batches_per_step(run, world_size)
    if target < batch * world_size:
        raise ConfigError(
            f"gh200_optimizations.target_effective_batch_size is {target}, less than one "
            f"micro-batch ({batch} samples on each of {world_size} ranks). Raise it to "
            f"{batch * world_size} or more, or lower train.batch_size."
        )
    if initial > target:
        raise ConfigError(
            f"gh200_optimizations.initial_effective_batch_size is {initial}, more than the target "
            f"{target}, but a ramp can only grow. Lower it, or raise target_effective_batch_size."
        )
    return AccumulationRamp(
        initial, target, section.batch_rampup_steps, section.rampup_shape, batch, world_size
    )


def samples_in_step(run: RunFile, world_size: int, consumed: int) -> int:
    """Return the samples of a step over all ranks, when `consumed` micro-batches are done."""
    ramp = build_ramp(run, world_size)
    count = micro_batches_per_step(run, world_size) if ramp is None else ramp.accumulation(consumed)
    return run.train.batch_size * count


def ramp_notes(ramp: AccumulationRamp) -> list[str]:
    """Return messages about the ramp for the log, including rounding to whole micro-batches."""
    size = ramp.batch_size
    first, last = (ramp.accumulation(at) * size for at in (0, ramp.length))
    # "GH200 ... enabled" is what the GH200 forks print; users search their logs for it.
    notes = [
        f"ramp: GH200 gradient accumulation ramp enabled: effective batch {first} -> {last} "
        f"over {ramp.length} micro-batches, {ramp.shape}"
    ]
    for setting, value, rounded in (
        ("target_effective_batch_size", ramp.target, last),
        ("initial_effective_batch_size", ramp.initial, first),
    ):
        if rounded != value:
            ranks = f" on each of {ramp.world_size} ranks" if ramp.world_size > 1 else ""
            notes.append(
                f"ramp: {setting} {value} is not a multiple of one micro-batch ({size} samples), "
                f"or less than one{ranks}: rounded up to {rounded}"
            )
    if ramp.is_constant:
        notes.append(
            "ramp: no effect, it starts and ends with the same number of micro-batches; lower "
            "train.batch_size to start smaller"
        )
    return notes
