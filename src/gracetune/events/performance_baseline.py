"""Measure the speed and memory of a run, and compare two sets of repeated measurements.

The change of a metric is the ratio of the means over repeated runs, minus 1. Its 95 % confidence
interval is Fieller's: every ratio r that Welch's t-test, which allows the two sides to vary by
different amounts, does not reject:

    |mean2 - r mean1| <= t(0.975, df) * sqrt(s2^2 / n2 + r^2 s1^2 / n1)

The interval decides. If all of it is a worsening beyond the tolerance, the verdict is a regression;
if none of it is, there is no regression; otherwise the runs cannot tell, and the verdict is
`undecided`. It is also `undecided` with a single run on one side, because the noise is unknown.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gracetune.errors import DataError
from gracetune.events.log import read_events
from gracetune.events.types import KINDS, BatchesFed, MemoryUsed, Notice, RunStarted, StepDone
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


BASELINE_FILE = "baseline.json"
REPORT_FILE = "baseline_report.txt"
Better = Literal["higher", "lower", "neither"]
Verdict = Literal["same", "better", "worse", "changed", "undecided"]

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantiles of Student's t for 1, 2, ... 30 degrees of freedom."""
_T_MANY = 2.042
"""The quantile that is used for more than 30 degrees of freedom; slightly too large."""
_HARDWARE = ("architecture", "cpus", "device", "gpus", "precision")
"""Facts about the machine that must be equal for a comparison."""
MIN_REPEATS = 3
"""The number of runs from which a usable estimate of the noise can be expected."""
MAX_REPEATS = 1000
"""Larger numbers of runs are not suggested."""
LOSS_TAIL_DIVISOR = 4
"""The loss of a run is the mean over the last 1/4 of its steps; single steps vary too much."""


class Measures(BaseModel):
    """The metrics of one run without its warm-up steps. Field names are keys of `baseline.json`."""

    # A run that diverged has a loss of NaN, which must survive the file.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

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
    plan: str
    """The plan that the run printed; empty if it ran without one."""


class Baseline(BaseModel):
    """The contents of `baseline.json`: the measurements of repeated runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

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
    repeats: tuple[Measures, ...] = Field(min_length=1)


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
    why: str = ""
    """The reason of an undecided comparison, with the figures."""

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
    plan = ""
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
        elif kind == KINDS[Notice] and str(record["text"]).startswith("plan: "):
            plan = plan or str(record["text"]).removeprefix("plan: ")
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
    if not sum(seconds_each) > 0:
        raise DataError(f"the steps in {log} took {sum(seconds_each)} seconds. Train it again.")
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
        plan=plan,
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


def compare(
    before: Baseline, after: Baseline, tolerance: float, metrics: Sequence[Metric] = METRICS
) -> list[Delta]:
    """Compare every metric that a baseline has; `tolerance` is a share, not a percentage."""
    deltas = []
    for metric in metrics:
        old, new = metric.values(before), metric.values(after)
        if old or new:
            deltas.append(_delta(metric, old, new, tolerance))
    return deltas


def _delta(metric: Metric, old: Sequence[float], new: Sequence[float], tolerance: float) -> Delta:
    mean_old, mean_new = (statistics.fmean(side) if side else math.nan for side in (old, new))
    if not old or not new:
        why = f"only the {'first' if old else 'second'} baseline has it"
        return Delta(metric, mean_old, mean_new, math.nan, None, "undecided", why)
    if not math.isfinite(mean_old):
        why = f"the first baseline has the value {mean_old}; capture it again"
        return Delta(metric, mean_old, mean_new, math.nan, None, "undecided", why)
    if not math.isfinite(mean_new):
        verdict: Verdict = "changed" if metric.better == "neither" else "worse"
        return Delta(metric, mean_old, mean_new, math.nan, None, verdict)
    unit = 1.0 if metric.in_points else abs(mean_old)
    difference = mean_new - mean_old
    if unit == 0:  # relative to 0, every change is infinite
        change = 0.0 if difference == 0 else math.copysign(math.inf, difference)
    else:
        change = difference / unit
    if min(len(old), len(new)) < 2:
        why = f"one run on a side, so the noise is unknown; capture {MIN_REPEATS} runs or more"
        return Delta(metric, mean_old, mean_new, change, None, "undecided", why)
    if metric.in_points or unit == 0:
        low, high = _difference_interval(old, new, unit)
    else:
        low, high = ratio_interval(old, new)
    verdict = _judge(metric.better, low, high, tolerance)
    noise = 0.0 if low == high else (high - low) / 2
    delta = Delta(metric, mean_old, mean_new, change, noise, verdict)
    if verdict != "undecided":
        return delta
    scale = 1.0 if metric.in_points or unit == 0 else mean_new / mean_old
    needed = _repeats_needed(
        [scale * each for each in old], new, abs(abs(change) - tolerance) * unit
    )
    repeats = "no practical number of repeats would decide it"
    if needed is not None:
        more = max(1, needed - min(len(old), len(new)))
        repeats = f"about {more} more repeats on each side would decide it"
    shows = "no regression would show"
    if math.isfinite(noise):
        shows = f"only a regression of {_amount(delta, tolerance + noise)} or more would show"
    return replace(delta, why=f"{shows}; {repeats}")


def _difference_interval(
    old: Sequence[float], new: Sequence[float], unit: float
) -> tuple[float, float]:
    """Return the interval of the change in multiples of `unit`; infinite if the unit is 0."""
    difference = statistics.fmean(new) - statistics.fmean(old)
    width = confidence_half_width(old, new)
    ends = (difference - width, difference + width)
    if unit:
        return ends[0] / unit, ends[1] / unit
    low, high = (0.0 if end == 0 else math.copysign(math.inf, end) for end in ends)
    return low, high


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    """Return Fieller's 95 % confidence interval of `mean(new) / mean(old) - 1`.

    It is infinite if the mean of `old` may be 0.
    """
    mean_old, mean_new = statistics.fmean(old), statistics.fmean(new)
    change = (mean_new - mean_old) / abs(mean_old)
    parts, t = _welch(old, new)
    if sum(parts) == 0:
        return change, change
    a = mean_old**2 - t**2 * parts[0]
    half = mean_old * mean_new
    root = half**2 - a * (mean_new**2 - t**2 * parts[1])
    if a <= 0 or root < 0:
        return -math.inf, math.inf
    return (half - math.sqrt(root)) / a - 1, (half + math.sqrt(root)) / a - 1


def _judge(better: Better, low: float, high: float, tolerance: float) -> Verdict:
    """Judge a metric by the confidence interval of its change."""
    if better == "neither":
        if low > tolerance or high < -tolerance:
            return "changed"
        return "same" if low >= -tolerance and high <= tolerance else "undecided"
    least, most = (low, high) if better == "lower" else (-high, -low)
    if least > tolerance:
        return "worse"
    if most > tolerance:
        return "undecided"
    return "better" if most < -tolerance else "same"


def _repeats_needed(old: Sequence[float], new: Sequence[float], gap: float) -> int | None:
    """Return the number of runs per side for which the interval's half width is at most `gap`.

    This assumes that the variances stay as they are. Returns None for more than `MAX_REPEATS`.
    """
    parts = [statistics.variance(side) for side in (old, new)]
    total = sum(parts)
    balance = total**2 / sum(part**2 for part in parts)
    for count in range(2, MAX_REPEATS + 1):
        if _t_quantile(balance * (count - 1)) * math.sqrt(total / count) <= gap:
            return count
    return None


def confidence_half_width(old: Sequence[float], new: Sequence[float]) -> float:
    """Return half the width of Welch's 95 % confidence interval for a difference of means."""
    parts, t = _welch(old, new)
    return t * math.sqrt(sum(parts))


def _welch(old: Sequence[float], new: Sequence[float]) -> tuple[list[float], float]:
    """Return the squared standard errors of both means, and the t quantile of Welch's test."""
    parts = [statistics.variance(side) / len(side) for side in (old, new)]
    if sum(parts) == 0:
        return parts, 0.0
    degrees = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (old, new), strict=True)
    )
    return parts, _t_quantile(degrees)


def _t_quantile(degrees: float) -> float:
    # Degrees of freedom are rounded down: a slightly wide interval asks for more runs.
    return T_975[max(int(degrees), 1) - 1] if degrees < len(T_975) + 1 else _T_MANY


def comparison_lines(
    deltas: Sequence[Delta], tolerance: float, differences: Sequence[str] = (), scope: str = ""
) -> Iterator[str]:
    """Yield a line for each compared metric, and the overall verdict as the last line.

    The verdict also names the `differences` that make the baselines incomparable, and the `scope`
    of the comparison if only some metrics were compared.
    """
    for delta in deltas:
        show = delta.metric.show
        noise = "noise unknown" if delta.noise is None else f"noise +-{_amount(delta, delta.noise)}"
        yield (
            f"{delta.metric.label:<20}  {show(delta.before)} -> {show(delta.after)}  "
            f"{_signed(delta)} ({noise}): {delta.verdict}"
        )
        if delta.why:
            yield f"{'':<20}  {delta.why}"
    failed = [delta.metric.label for delta in deltas if delta.fails]
    unclear = [delta for delta in deltas if delta.verdict == "undecided"]
    limit = f"{tolerance * 100:.3g} %"
    remark = f", but the baselines differ in {', '.join(differences)}" if differences else ""
    if failed:
        yield f"regression beyond {limit}: {', '.join(failed)}{remark}"
    elif unclear:
        reasons = "; ".join(f"{delta.metric.label}: {delta.why}" for delta in unclear)
        yield f"undecided, a regression beyond {limit} may be hidden: {reasons}{remark}"
    elif deltas:
        yield f"no regression beyond {limit}{f' in {scope}' if scope else ''}{remark}"
    else:
        yield "undecided: no metric was compared"


def overall_verdict(deltas: Sequence[Delta]) -> Literal["none", "regression", "undecided"]:
    """Return the verdict on all metrics: one regression outweighs any undecided metric."""
    if any(delta.fails for delta in deltas):
        return "regression"
    if not deltas or any(delta.verdict == "undecided" for delta in deltas):
        return "undecided"
    return "none"


def _signed(delta: Delta) -> str:
    if math.isnan(delta.change):
        return "not comparable"
    return ("+" if delta.change >= 0 else "-") + _amount(delta, abs(delta.change))


def _amount(delta: Delta, value: float) -> str:
    unit = "points" if delta.metric.in_points else "%"
    return f"{value * 100:.2f} {unit}"


def measured_differently(before: Baseline, after: Baseline) -> list[str]:
    """List what makes two baselines incomparable: settings, measured steps, kind of machine."""
    settings = {*before.scenario, *after.scenario}
    different = [name for name in settings if before.scenario.get(name) != after.scenario.get(name)]
    counts = ("steps", "warmup_steps", "window_steps")
    different += [name for name in counts if getattr(before, name) != getattr(after, name)]
    for name in _HARDWARE:
        old, new = (_without_ids(each.machine.get(name, "")) for each in (before, after))
        different += [f"{name} ({old or 'none'} and {new or 'none'})"] if old != new else []
    return sorted(different)


def _without_ids(gpus: str) -> str:
    """Remove the serial numbers from the output of `nvidia-smi --list-gpus`."""
    return re.sub(r" \(UUID: [^)]*\)", "", gpus)


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
        yield (f"one run: its noise is unknown; capture with --repeats {MIN_REPEATS} or more")
