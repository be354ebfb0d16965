"""The number of micro-batches in an optimizer step, and a ramp that increases it during a run.

A step has the same micro-batches at any number of ranks, which share them. Their number depends
only on the micro-batches done so far, so a checkpoint stores nothing but that count. It changes
between optimizer steps only: in the middle of a step, a change would give samples the wrong
weights.

A ramp may begin below one micro-batch. Then each of its first steps has one micro-batch that is
smaller than `train.batch_size`: batches of the usual size are cut into pieces, in their usual order
(`first_sizes` of `BatchOrder`). The size doubles from the initial one, so that there are few sizes,
because blocks are compiled for each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import RunFile


@dataclass(frozen=True, slots=True)
class AccumulationRamp:
    """Computes the number and the size of the micro-batches in an optimizer step.

    Both depend on the run's progress only.
    """

    initial: int
    """Effective batch size at the start: samples in an optimizer step, over all ranks."""
    target: int
    """Effective batch size after `length` micro-batches."""
    length: int
    """Micro-batches that all ranks together do until the target is reached."""
    shape: Literal["quadratic", "linear"]
    batch_size: int
    """Samples in one micro-batch of the usual size."""
    world_size: int = 1
    """Number of ranks."""
    is_split: bool = True
    """True if steps may be smaller than one micro-batch for each rank. False for a run that an
    earlier version started, which rounded them up to that."""

    def effective(self, done: int) -> float:
        """Return the effective batch size, not rounded, when `done` micro-batches are done."""
        progress = min(1.0, done / self.length)
        share = progress if self.shape == "linear" else progress * progress
        return round(self.initial + (self.target - self.initial) * share, 6)

    def accumulation(self, done: int) -> int:
        """Return the micro-batches of the next step over all ranks, when `done` are done."""
        count = math.ceil(self.effective(done) / self.batch_size)
        return max(1 if self.is_split else self.world_size, count)

    def micro_batch_size(self, done: int) -> int:
        """Return the samples in the micro-batches of the next step, when `done` are done."""
        size = self.initial
        while size < self.effective(done):
            size *= 2
        return min(size, self.batch_size) if self.is_split else self.batch_size

    def first_sizes(self) -> list[int]:
        """Return the sizes of the first micro-batches, up to the last one below `batch_size`."""
        sizes = itertools.takewhile(
            lambda size: size < self.batch_size, map(self.micro_batch_size, range(self.length + 1))
        )
        return list(sizes)

    def samples(self, done: int) -> int:
        """Return the samples of the next step over all ranks, when `done` micro-batches are done.

        Batches at the end of a bucket may have fewer.
        """
        return self.accumulation(done) * self.micro_batch_size(done)

    @property
    def is_constant(self) -> bool:
        """True if steps have the same number of samples at the start and the end."""
        return self.samples(0) == self.samples(self.length)


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


def build_ramp(run: RunFile, world_size: int, *, is_split: bool = True) -> AccumulationRamp | None:
    """Return the ramp that the run file configures; None if it configures none.

    `is_split` is False for a run that an earlier version started; see `AccumulationRamp`.
    """
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
        initial,
        target,
        section.batch_rampup_steps,
        section.rampup_shape,
        batch,
        world_size,
        is_split,
    )


def samples_in_step(run: RunFile, world_size: int, consumed: int, *, is_split: bool = True) -> int:
    """Return the samples of a step over all ranks, when `consumed` micro-batches are done."""
    ramp = build_ramp(run, world_size, is_split=is_split)
    if ramp is None:
        return run.train.batch_size * micro_batches_per_step(run, world_size)
    return ramp.samples(consumed)


def ramp_notes(ramp: AccumulationRamp) -> list[str]:
    """Return messages about the ramp for the log, including rounding to whole micro-batches."""
    size = ramp.batch_size
    first, last = (ramp.samples(at) for at in (0, ramp.length))
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
    sizes = sorted(set(ramp.first_sizes()))
    if sizes:
        notes.append(
            f"ramp: the first micro-batches have {', '.join(map(str, sizes))} samples, because the "
            f"effective batch starts below train.batch_size ({size})"
        )
    if ramp.initial < ramp.world_size:
        notes.append(
            f"ramp: the effective batch starts at {ramp.initial} samples, but {ramp.world_size} "
            "ranks need one each: the first steps have more"
        )
    if ramp.is_constant:
        notes.append(
            "ramp: no effect, it starts and ends with the same number of samples; lower "
            "initial_effective_batch_size to start smaller"
        )
    return notes
