"""A run in a few figures, read from its log: what a baseline keeps of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from gracetune.errors import DataError
from gracetune.events.log import read_events
from gracetune.events.types import KINDS, BatchesFed, MemoryUsed, RunStarted, StepDone

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOSS_SHARE = 4
"""The loss of a run is the mean over its last quarter: single steps say little."""


class Measures(BaseModel):
    """One run, its warm-up left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples_per_s: float
    step_p50_s: float
    step_p90_s: float
    step_p99_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    wait_share: float | None
    """Of the time in steps, from the first: how much went into waiting for batches."""
    loss: float


class RunMeasurement(BaseModel):
    """The figures, and what they were taken from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    measures: Measures
    steps: int
    """Steps that were measured."""
    device: str
    precision: str


def measure(log: Path, warmup_steps: int) -> RunMeasurement:
    """Read a run's log. Where a resumed run repeats a step, the later line counts."""
    steps: dict[int, tuple[float, float, float]] = {}
    device_peak = host_peak = 0
    waited: list[float] = []  # of each process: it counts from its own beginning
    started: dict[str, object] = {}
    for record in read_events(log):
        kind = record["event"]
        if kind == KINDS[StepDone]:
            numbers = (_number(record, name) for name in ("samples", "seconds", "loss"))
            samples, seconds, loss = numbers
            steps[int(_number(record, "step"))] = (samples, seconds, loss)
        elif kind == KINDS[MemoryUsed]:
            device_peak = max(device_peak, int(_number(record, "device_peak")))
            host_peak = max(host_peak, int(_number(record, "host")))
        elif kind == KINDS[BatchesFed]:
            waited[-1:] = [_number(record, "waited_s")]
        elif kind == KINDS[RunStarted]:
            started = record
            waited += [0.0] if waited else []
    counted = [steps[step] for step in sorted(steps)][warmup_steps:]
    if not counted:
        raise DataError(
            f"{log} has {len(steps)} steps and {warmup_steps} of them are warm-up, so nothing is "
            "left to measure. Train for more steps, or lower --warmup."
        )
    seconds_each = sorted(seconds for _, seconds, _ in counted)
    losses = [loss for _, _, loss in counted][-max(1, len(counted) // LOSS_SHARE) :]
    in_steps = sum(seconds for _, seconds, _ in steps.values())
    return RunMeasurement(
        measures=Measures(
            samples_per_s=sum(samples for samples, _, _ in counted) / sum(seconds_each),
            step_p50_s=percentile(seconds_each, 0.50),
            step_p90_s=percentile(seconds_each, 0.90),
            step_p99_s=percentile(seconds_each, 0.99),
            device_peak_bytes=device_peak,
            host_peak_bytes=host_peak,
            wait_share=sum(waited) / in_steps if waited else None,
            loss=sum(losses) / len(losses),
        ),
        steps=len(counted),
        device=str(started.get("device", "unknown")),
        precision=str(started.get("precision", "unknown")),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """A value so that this share lies below it, by a straight line between neighbours."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _number(record: dict[str, object], name: str) -> float:
    value = record[name]
    assert isinstance(value, int | float | str), f"{name} is {value!r} in {record}"
    return float(value)
