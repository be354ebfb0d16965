"""A scenario measured several times, and whether a later measurement differs from it.

The statistics, plainly. A figure's change is the difference of the two means over repeated runs.
Its noise is the 95 % confidence interval of that difference (Welch's t: the two sides may vary by
different amounts). A change counts only if it is beyond the tolerance and larger than its noise;
beyond the tolerance but within the noise it is called noise, and more repeats are asked for. With
one run on a side there is no noise to be known: the tolerance alone decides, and that is said.
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
"""Student's t for a two-sided 95 %, by degrees of freedom from 1; beyond 30 nearly the normal's."""
_T_MANY = 2.042


class Baseline(BaseModel):
    """What `capture` writes and `compare` reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    captured: str
    gracetune: str
    scenario: dict[str, object]
    """The run file as it was resolved, without its output folder."""
    machine: dict[str, str]
    steps: int
    warmup_steps: int
    window_steps: int
    """Step times are means over so many steps: the run's `logging.every`."""
    repeats: tuple[Measures, ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure: its name, which way is good, and how it is shown."""

    name: str
    label: str
    better: Better
    show: Callable[[float], str]
    in_points: bool = False
    """Compared by difference, not by ratio: shares of time, which may be next to nothing."""

    def values(self, baseline: Baseline) -> list[float]:
        """One value a repeat; none where a run did not tell it."""
        told = (repeat.model_dump()[self.name] for repeat in baseline.repeats)
        return [float(value) for value in told if value is not None]


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
    """One figure, before and after."""

    metric: Metric
    before: float
    after: float
    change: float
    noise: float | None
    """Half the width of the interval, in the unit of `change`; none: it cannot be known."""
    verdict: Verdict

    @property
    def fails(self) -> bool:
        """Whether this is a reason to stop: worse, or another loss."""
        return self.verdict in ("worse", "changed")


def read_baseline(path: Path) -> Baseline:
    """A baseline by its file, or by the folder it is in."""
    file = path / BASELINE_FILE if path.is_dir() else path
    try:
        return Baseline.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}. Make one: gracetune baseline capture RUN."
        ) from None
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise DataError(f"{file} is no baseline: {where}: {found['msg']}.") from None


def compare(before: Baseline, after: Baseline, tolerance: float) -> list[Delta]:
    """Every figure that both have."""
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
    if unit == 0:  # nothing before: any amount is a change of which no share can be told
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
    """Half of Welch's 95 % interval for the difference of two means; none with a single run."""
    if len(old) < 2 or len(new) < 2:
        return None
    parts = [statistics.variance(side) / len(side) for side in (old, new)]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (old, new), strict=True)
    )
    # Rounded down: an interval that is a little too wide errs towards asking for more runs.
    t = T_975[int(freedom) - 1] if freedom < len(T_975) + 1 else _T_MANY
    return t * math.sqrt(total)


def comparison_lines(deltas: Sequence[Delta], tolerance: float) -> Iterator[str]:
    """A line a figure, and the verdict as the last one."""
    for delta in deltas:
        show = delta.metric.show
        noise = "one run on a side: noise unknown"
        if delta.noise is not None:
            noise = f"noise +-{_amount(delta, delta.noise)}"
        yield (
            f"{delta.metric.label:<20}  {show(delta.before)} -> {show(delta.after)}  "
            f"{_signed(delta)} ({noise}): {delta.verdict}"
        )
        if delta.verdict == "same" and delta.noise and abs(delta.change) + delta.noise > tolerance:
            yield f"{'':<20}  the noise is wider than the tolerance; more repeats would tell"
    failed = [delta.metric.label for delta in deltas if delta.fails]
    unclear = [delta.metric.label for delta in deltas if delta.verdict == "noise"]
    if failed:
        yield f"regression beyond {tolerance * 100:.3g} %: {', '.join(failed)}"
    else:
        told = f"; too noisy to tell, repeat more: {', '.join(unclear)}" if unclear else ""
        yield f"no regression beyond {tolerance * 100:.3g} %{told}"


def _signed(delta: Delta) -> str:
    return ("+" if delta.change >= 0 else "-") + _amount(delta, abs(delta.change))


def _amount(delta: Delta, value: float) -> str:
    unit = "points" if delta.metric.in_points else "%"
    return f"{value * 100:.2f} {unit}"


def environment_differences(before: Baseline, after: Baseline) -> Iterator[str]:
    """What the two were not alike in, beside their figures."""
    for name in sorted({*before.machine, *after.machine}):
        old, new = before.machine.get(name, "(none)"), after.machine.get(name, "(none)")
        if old != new:
            yield f"machine: {name} was {old}, is {new}"
    if before.gracetune != after.gracetune:
        yield f"gracetune was {before.gracetune}, is {after.gracetune}"


def report_lines(baseline: Baseline) -> Iterator[str]:
    """What `baseline_report.txt` says."""
    count = len(baseline.repeats)
    yield f"captured {baseline.captured} by gracetune {baseline.gracetune}"
    yield "machine: " + ", ".join(f"{name} {text}" for name, text in baseline.machine.items())
    yield (
        f"{count} runs of {baseline.steps} steps, after {baseline.warmup_steps} of warm-up; "
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
            yield f"{metric.label:<20}  not told by these runs"
    if count < 2:
        yield "one run: no noise can be told from change; capture with --repeats 3 or more"


# ------------------------------------------------------------------------------------------
# A run in a few figures, read from its log: what a baseline keeps of it.


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


def measure_run(log: Path, warmup_steps: int) -> RunMeasurement:
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
