"""The gradient-accumulation ramp: small effective batches first, large ones later.

A ramp is a pure function of the micro-batches done so far; its position is one number in the
checkpoint. The trainer asks between optimizer steps only, so that no accumulation ever changes its
length half-way: inside one, the loss weights would be wrong.
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
    """How many micro-batches make an optimizer step, at any point of a run."""

    initial: int
    """Effective batch at the start: samples in an optimizer step, over all ranks."""
    target: int
    """Effective batch once `length` micro-batches are done."""
    length: int
    shape: Literal["quadratic", "linear"]
    samples_per_micro_batch: int
    """Over all ranks."""

    def accumulation(self, micro_batches: int) -> int:
        """Micro-batches in the optimizer step that starts after this many."""
        done = min(1.0, micro_batches / self.length)
        share = done if self.shape == "linear" else done * done
        effective = self.initial + (self.target - self.initial) * share
        return math.ceil(round(effective, 6) / self.samples_per_micro_batch)

    @property
    def is_constant(self) -> bool:
        """Whether it never changes anything."""
        return self.accumulation(0) == self.accumulation(self.length)


def constant(accumulation: int) -> AccumulationRamp:
    """No ramp: the same number of micro-batches always."""
    return AccumulationRamp(accumulation, accumulation, 1, "linear", 1)


def build_ramp(run: RunFile, world_size: int) -> tuple[AccumulationRamp, list[str]]:
    """The run's ramp, and what the user should know about it."""
    section, batch = run.gh200_optimizations, run.train.batch_size
    plain = run.train.gradient_accumulation_steps
    if not section.enable_batch_size_rampup:
        return constant(plain), []
    per_micro_batch = batch * world_size
    micro = f"one micro-batch ({batch} samples on each of {world_size} ranks)"
    initial = section.initial_effective_batch_size
    assert initial is not None, "rules demand it"
    target = section.target_effective_batch_size or per_micro_batch * plain
    if target < per_micro_batch:
        raise ConfigError(
            f"gh200_optimizations.target_effective_batch_size is {target}, less than {micro}. "
            f"Raise it to {per_micro_batch} or more, or lower train.batch_size."
        )
    if initial > target:
        raise ConfigError(
            f"gh200_optimizations.initial_effective_batch_size is {initial}, more than the target "
            f"{target}; a ramp grows. Lower it, or raise target_effective_batch_size."
        )
    ramp = AccumulationRamp(
        initial, target, section.batch_rampup_steps, section.rampup_shape, per_micro_batch
    )
    return ramp, _notes(ramp, micro)


def _notes(ramp: AccumulationRamp, micro: str) -> list[str]:
    size = ramp.samples_per_micro_batch
    first, last = (ramp.accumulation(at) * size for at in (0, ramp.length))
    notes = [
        f"GH200 gradient accumulation ramp enabled: effective batch {first} -> {last} "
        f"over {ramp.length} micro-batches, {ramp.shape}"
    ]
    if last != ramp.target:
        notes.append(
            f"target_effective_batch_size {ramp.target} is no multiple of {micro}: "
            f"rounded up to {last}"
        )
    if first != ramp.initial:
        notes.append(
            f"initial_effective_batch_size {ramp.initial} is no multiple of {micro}: "
            f"rounded up to {first}"
        )
    if ramp.is_constant:
        notes.append(
            "the ramp changes nothing: it starts and ends with the same number of micro-batches; "
            "lower train.batch_size to begin smaller"
        )
    return notes
