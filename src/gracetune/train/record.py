"""Losses on their way from the device to the log, a window at a time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from gracetune.errors import RunFailedError
from gracetune.events.types import RatesSpread, StepDone
from gracetune.optim.automagic import Automagic

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from gracetune.events.types import Event, MemoryUsed
    from gracetune.train.step import StepResult

RATE_DECADES = (-9, 0)
"""The rates of histograms, as powers of ten."""
BINS_PER_DECADE = 4


class MetricsBuffer:
    """Keeps results as tensors until a window is full, then reads them all at once."""

    def __init__(
        self,
        tell: Callable[[Event], None],
        every: int,
        memory_used: Callable[[int], MemoryUsed],
        rates: Callable[[int], list[RatesSpread]] = lambda _: [],
    ) -> None:
        self._tell = tell
        self._memory_used = memory_used
        self._rates = rates
        self._every = every
        self._pending: list[tuple[int, int, StepResult]] = []
        self._since = time.monotonic()

    def add(self, step: int, epoch: int, result: StepResult) -> None:
        """Take one step's result."""
        self._pending.append((step, epoch, result))
        if step % self._every == 0:
            self.flush()

    def flush(self) -> None:
        """Tell what is pending. The first loss that is no number ends the run."""
        if not self._pending:
            return
        numbers = torch.stack(
            [torch.stack([r.loss, r.grad_norm, r.samples]) for _, _, r in self._pending]
        ).tolist()
        seconds = (time.monotonic() - self._since) / len(self._pending)
        for (step, epoch, result), (loss, norm, samples) in zip(
            self._pending, numbers, strict=True
        ):
            self._tell(
                StepDone(
                    step=step,
                    loss=loss,
                    lr=float(result.lr),
                    grad_norm=norm,
                    samples=int(samples),
                    accumulation=result.micro_batches,
                    epoch=epoch,
                    seconds=seconds,
                    expert=result.expert or "",
                )
            )
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RunFailedError(
                    f"at step {step} the loss is {loss} and the gradient's norm is {norm}. "
                    "Checkpoints saved before are kept. Begin anew in another output_dir, with a "
                    "lower optimizer.lr or train.max_grad_norm."
                )
        self._tell(self._memory_used(self._pending[-1][0]))
        for spread in self._rates(self._pending[-1][0]):
            self._tell(spread)
        self._pending.clear()
        self._since = time.monotonic()

    def resume(self) -> None:
        """Steps count again from now."""
        self._since = time.monotonic()


def rates_of(optimizer: Optimizer) -> Callable[[int], list[RatesSpread]]:
    """How to tell the spread of learning rates, where every element has one; else nothing."""
    if not isinstance(optimizer, Automagic):
        return lambda _: []
    low, high = RATE_DECADES
    num_bins = (high - low) * BINS_PER_DECADE
    limits = tuple(10 ** (low + index / BINS_PER_DECADE) for index in range(num_bins + 1))

    def spread(step: int) -> list[RatesSpread]:
        by_stage = optimizer.rate_counts(low, high, num_bins)
        return [
            RatesSpread(step, stage, limits, tuple(int(count) for count in counts.tolist()))
            for stage, counts in by_stage.items()
        ]

    return spread
