"""The gradient-accumulation ramp: increase the effective batch size during a run.

The number of micro-batches in a step depends only on the micro-batches done so far, so a checkpoint
stores nothing but that count. It changes between optimizer steps only: in the middle of a step, a
change would give samples the wrong weights.
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
    """Micro-batches that each rank does until the target is reached."""
    shape: Literal["quadratic", "linear"]
    samples_per_micro_batch: int
    """Samples in one micro-batch, over all ranks."""

    def accumulation(self, micro_batches: int) -> int:
        """Return the number of micro-batches in the next step, when `micro_batches` are done."""
        done = min(1.0, micro_batches / self.length)
        share = done if self.shape == "linear" else done * done
        effective = self.initial + (self.target - self.initial) * share
        return math.ceil(round(effective, 6) / self.samples_per_micro_batch)

    @property
    def is_constant(self) -> bool:
        """True if steps have the same number of micro-batches at the start and the end."""
        return self.accumulation(0) == self.accumulation(self.length)


def build_ramp(run: RunFile, world_size: int) -> AccumulationRamp | None:
    """Return the ramp that the run file configures; None if it configures none."""
    section, batch = run.gh200_optimizations, run.train.batch_size
    if not section.enable_batch_size_rampup:
        return None
    per_micro_batch = batch * world_size
    initial = section.initial_effective_batch_size
    assert initial is not None, "config.checks requires it when a ramp is enabled"
    target = section.target_effective_batch_size
    target = target or per_micro_batch * run.train.gradient_accumulation_steps
    if target < per_micro_batch:
        raise ConfigError(
            f"gh200_optimizations.target_effective_batch_size is {target}, less than one "
            f"micro-batch ({batch} samples on each of {world_size} ranks). Raise it to "
            f"{per_micro_batch} or more, or lower train.batch_size."
        )
    if initial > target:
        raise ConfigError(
            f"gh200_optimizations.initial_effective_batch_size is {initial}, more than the target "
            f"{target}, but a ramp can only grow. Lower it, or raise target_effective_batch_size."
        )
    return AccumulationRamp(
        initial, target, section.batch_rampup_steps, section.rampup_shape, per_micro_batch
    )


def ramp_notes(ramp: AccumulationRamp) -> list[str]:
    """Return messages about the ramp for the log, including rounding to whole micro-batches."""
    size = ramp.samples_per_micro_batch
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
            notes.append(
                f"ramp: {setting} {value} is not a multiple of one micro-batch ({size} samples): "
                f"rounded up to {rounded}"
            )
    if ramp.is_constant:
        notes.append(
            "ramp: no effect, it starts and ends with the same number of micro-batches; lower "
            "train.batch_size to start smaller"
        )
    return notes
