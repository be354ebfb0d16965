"""Measure the speed and memory of a run, and compare two sets of repeated measurements.

The change of a metric is the difference of the means over repeated runs, relative to the first
mean. Its noise is the 95 % confidence interval of that difference by Welch's t-test, which allows
the two sides to vary by different amounts:

    half width = t(0.975, df) * sqrt(s1^2 / n1 + s2^2 / n2)

A change counts if it is larger than both the tolerance and the noise. If it is larger than the
tolerance only, the verdict is `noise`, and more repeats are needed. With a single run on one side
the noise is unknown and the tolerance alone decides.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.errors import DataError
from gracetune.events.log import read_events
from gracetune.events.types import KINDS, BatchesFed, MemoryUsed, RunStarted, StepDone
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


BASELINE_FILE = "baseline.json"
REPORT_FILE = "baseline_report.txt"
Better = Literal["higher", "lower", "neither"]
Verdict = Literal["same", "better", "worse", "changed", "noise"]

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantiles of Student's t for 1, 2, ... 30 degrees of freedom."""
_T_MANY = 2.042
"""The quantile that is used for more than 30 degrees of freedom; slightly too large."""
LOSS_TAIL_DIVISOR = 4
"""The loss of a run is the mean over the last 1/4 of its steps; single steps vary too much."""


class Measures(BaseModel):
    """The metrics of one run without its warm-up steps. Field names are keys of `baseline.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples_per_s: float
    step_p50_s: float
    step_p90_s: float
    step_p99_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    wait_share: float | None
    """The share of step time that was spent waiting for batches; None if it was not logged."""
    loss: float


class RunMeasurement(BaseModel):
    """The metrics of a run, with its device and precision."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    measures: Measures
    steps: int
    """Number of measured steps, without warm-up."""
    device: str
    precision: str


class Baseline(BaseModel):
    """The contents of `baseline.json`: the measurements of repeated runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    captured: str
    gracetune: str
    scenario: dict[str, object]
    """All settings of the run, with defaults filled in, except the output folder."""
    machine: dict[str, str]
    steps: int
    warmup_steps: int
    window_steps: int
    """Number of steps that each step time is a mean of: the run's `logging.every`."""
    repeats: tuple[Measures, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A measured quantity: its name, which direction is better, and how to format it."""

    name: str
    label: str
    better: Better
    show: Callable[[float], str]
    in_points: bool = False
    """True to compare differences in percentage points, for shares that may be close to 0."""

    def values(self, baseline: Baseline) -> list[float]:
        """Return the values of this metric in a baseline, one for each run that has it."""
        values = (repeat.model_dump()[self.name] for repeat in baseline.repeats)
        return [float(value) for value in values if value is not None]


METRICS = (
    Metric("samples_per_s", "throughput", "higher", lambda x: f"{x:.4g} samples/s"),
    Metric("step_p50_s", "step time, median", "lower", lambda x: f"{x * 1000:.4g} ms"),
    Metric("step_p90_s", "step time, 90 %", "lower", lambda x: f"{x * 1000:.4g} ms"),
    Metric("step_p99_s", "step time, 99 %", "lower", lambda x: f"{x * 1000:.4g} ms"),
    Metric("device_peak_bytes", "device memory, peak", "lower", format_bytes),
    Metric("host_peak_bytes", "host memory, peak", "lower", format_bytes),
    Metric("wait_share", "waiting for batches", "lower", lambda x: f"{x:.2%} of the time", True),
    Metric("loss", "loss, last quarter", "neither", lambda x: f"{x:.6g}"),
)


@dataclass(frozen=True, slots=True)
class Delta:
    """The comparison of one metric between two baselines."""

    metric: Metric
    before: float
    after: float
    change: float
    noise: float | None
    """Half the width of the confidence interval, in the unit of `change`; None if unknown."""
    verdict: Verdict

    @property
    def fails(self) -> bool:
        """Return True for a regression: a worse metric, or a different loss."""
        return self.verdict in ("worse", "changed")


# Measuring one run


def measure_run(log: Path, warmup_steps: int) -> RunMeasurement:
    """Compute the metrics of a run from its log.

    If a resumed run repeated a step, the later line counts.
    """
    steps: dict[int, tuple[float, float, float]] = {}
    device_peak = host_peak = 0
    waited: list[float] = []  # one total for each process, which counts from its own start
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
            f"--warmup is {warmup_steps}, but {log} has only {len(steps)} steps, so nothing is "
            "left to measure. Train for more steps, or lower --warmup."
        )
    seconds_each = sorted(seconds for _, seconds, _ in counted)
    losses = [loss for _, _, loss in counted][-max(1, len(counted) // LOSS_TAIL_DIVISOR) :]
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
    """Return the value below which `share` of the ordered values lie, interpolated linearly."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _number(record: dict[str, object], name: str) -> float:
    value = record[name]
    assert isinstance(value, int | float | str), f"{name} is {value!r} in {record}"
    return float(value)


# Comparing two baselines


def read_baseline(path: Path) -> Baseline:
    """Read a baseline from its file or its folder."""
    file = path / BASELINE_FILE if path.is_dir() else path
    try:
        return Baseline.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}. Create it: gracetune baseline capture RUN."
        ) from None
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise DataError(
            f"{file} is not a baseline: {where}: {found['msg']}. Capture it again."
        ) from None


def compare(before: Baseline, after: Baseline, tolerance: float) -> list[Delta]:
    """Compare every metric that both baselines have; `tolerance` is a share, not a percentage."""
    deltas = []
    for metric in METRICS:
        old, new = metric.values(before), metric.values(after)
        if old and new:
            deltas.append(_delta(metric, old, new, tolerance))
    return deltas


def _delta(metric: Metric, old: Sequence[float], new: Sequence[float], tolerance: float) -> Delta:
    mean_old, mean_new = statistics.fmean(old), statistics.fmean(new)
    unit = 1.0 if metric.in_points else abs(mean_old)
    difference = mean_new - mean_old
    interval = confidence_half_width(old, new)
    if unit == 0:  # relative to 0, every change is infinite
        change = 0.0 if difference == 0 else math.copysign(math.inf, difference)
        noise = None if interval is None else (math.inf if abs(difference) < interval else 0.0)
    else:
        change, noise = difference / unit, None if interval is None else interval / unit
    verdict = _judge(metric.better, change, noise, tolerance)
    return Delta(metric, mean_old, mean_new, change, noise, verdict)


def _judge(better: Better, change: float, noise: float | None, tolerance: float) -> Verdict:
    if abs(change) <= tolerance:
        return "same"
    if noise is not None and abs(change) <= noise:
        return "noise"
    if better == "neither":
        return "changed"
    return "better" if (change > 0) == (better == "higher") else "worse"


def confidence_half_width(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Return half the width of Welch's 95 % confidence interval for a difference of means.

    Returns None if either side has a single run.
    """
    if len(old) < 2 or len(new) < 2:
        return None
    parts = [statistics.variance(side) / len(side) for side in (old, new)]
    total = sum(parts)
    if total == 0:
        return 0.0
    degrees = total**2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (old, new), strict=True)
    )
    # Degrees of freedom are rounded down: a slightly wide interval asks for more runs.
    t = T_975[int(degrees) - 1] if degrees < len(T_975) + 1 else _T_MANY
    return t * math.sqrt(total)


def comparison_lines(deltas: Sequence[Delta], tolerance: float) -> Iterator[str]:
    """Yield a line for each compared metric, and the overall verdict as the last line."""
    for delta in deltas:
        show = delta.metric.show
        noise = "noise unknown: one run on a side"
        if delta.noise is not None:
            noise = f"noise +-{_amount(delta, delta.noise)}"
        yield (
            f"{delta.metric.label:<20}  {show(delta.before)} -> {show(delta.after)}  "
            f"{_signed(delta)} ({noise}): {delta.verdict}"
        )
        if delta.verdict == "same" and delta.noise and abs(delta.change) + delta.noise > tolerance:
            yield f"{'':<20}  the noise is larger than the tolerance: use more repeats"
    failed = [delta.metric.label for delta in deltas if delta.fails]
    unclear = [delta.metric.label for delta in deltas if delta.verdict == "noise"]
    if failed:
        yield f"regression beyond {tolerance * 100:.3g} %: {', '.join(failed)}"
    else:
        note = f"; too noisy, use more repeats: {', '.join(unclear)}" if unclear else ""
        yield f"no regression beyond {tolerance * 100:.3g} %{note}"


def _signed(delta: Delta) -> str:
    return ("+" if delta.change >= 0 else "-") + _amount(delta, abs(delta.change))


def _amount(delta: Delta, value: float) -> str:
    unit = "points" if delta.metric.in_points else "%"
    return f"{value * 100:.2f} {unit}"


def environment_differences(before: Baseline, after: Baseline) -> Iterator[str]:
    """Yield the differences in machine and software version between two baselines."""
    for name in sorted({*before.machine, *after.machine}):
        old, new = before.machine.get(name, "(none)"), after.machine.get(name, "(none)")
        if old != new:
            yield f"machine: {name} was {old} and is now {new}"
    if before.gracetune != after.gracetune:
        yield f"gracetune was {before.gracetune} and is now {after.gracetune}"


def report_lines(baseline: Baseline) -> Iterator[str]:
    """Yield the lines of `baseline_report.txt`, which lists the metrics of a baseline."""
    count = len(baseline.repeats)
    yield f"captured {baseline.captured} by gracetune {baseline.gracetune}"
    yield "machine: " + ", ".join(f"{name} {text}" for name, text in baseline.machine.items())
    yield (
        f"{count} runs of {baseline.steps} steps after {baseline.warmup_steps} warm-up steps; "
        f"step times are means over {baseline.window_steps} steps"
    )
    yield ""
    for metric in METRICS:
        values = metric.values(baseline)
        if values:
            mean = statistics.fmean(values)
            spread = f"{metric.show(min(values))} to {metric.show(max(values))}"
            yield f"{metric.label:<20}  {metric.show(mean)}  ({spread})"
        else:
            yield f"{metric.label:<20}  not measured"
    if count < 2:
        yield "one run: its noise is unknown; capture with --repeats 3 or more"
