"""Baselines: metrics of a log, and how changes are distinguished from noise."""

import json
import math
import statistics
from pathlib import Path

import pytest

from gracetune.errors import DataError
from gracetune.events.log import JsonlLog
from gracetune.events.performance_baseline import (
    Baseline,
    Measures,
    _welch,
    compare,
    comparison_lines,
    confidence_half_width,
    environment_differences,
    measure_run,
    overall_verdict,
    percentile,
    ratio_interval,
    read_baseline,
    report_lines,
)
from gracetune.events.types import BatchesFed, Event, MemoryUsed, RunStarted, StepDone


def step(number: int, seconds: float, loss: float = 1.0) -> StepDone:
    return StepDone(number, loss, 1e-4, 1.0, 8, 1, 0, seconds)


def log(path: Path, *events: Event) -> Path:
    sink = JsonlLog(path)
    for event in events:
        sink.handle(event)
    sink.close()
    return path


def measures(**changes: float | None) -> Measures:
    figures: dict[str, float | None] = {
        "samples_per_s": 100.0,
        "step_p50_s": 0.08,
        "step_p90_s": 0.09,
        "step_p99_s": 0.10,
        "device_peak_bytes": 10**9,
        "host_peak_bytes": 10**9,
        "wait_share": 0.001,
        "loss": 0.5,
    }
    return Measures.model_validate({**figures, **changes})


def baseline(*repeats: Measures, **changes: object) -> Baseline:
    facts: dict[str, object] = {
        "captured": "2030-01-01T00:00:00+00:00",
        "gracetune": "1",
        "scenario": {"seed": 0},
        "machine": {"host": "here"},
        "steps": 10,
        "warmup_steps": 2,
        "window_steps": 1,
        "repeats": [each.model_dump() for each in repeats],
    }
    return Baseline.model_validate({**facts, **changes})


def rates(*values: float) -> Baseline:
    return baseline(*(measures(samples_per_s=value) for value in values))


def verdict(before: Baseline, after: Baseline, name: str = "samples_per_s") -> str:
    return next(d.verdict for d in compare(before, after, 0.05) if d.metric.name == name)


def test_metrics_are_computed_from_a_log(tmp_path: Path) -> None:
    path = log(
        tmp_path / "events.jsonl",
        RunStarted("out", "tiny", 1, 6, 0, 64, "cuda:0", "bf16"),
        step(1, 9.0),
        MemoryUsed(1, 500, 100, 300),
        *(step(i, 0.1 * i, loss=float(i)) for i in range(2, 7)),
        MemoryUsed(6, 700, 100, 200),
        BatchesFed(6, 6, 0, 0, 0, 1, 0, 1.1, 0.0, 1),
    )
    found = measure_run(path, warmup_steps=1)
    assert (found.steps, found.device, found.precision) == (5, "cuda:0", "bf16")
    m = found.measures
    assert m.samples_per_s == pytest.approx(40 / 2.0)
    assert m.step_p50_s == pytest.approx(0.4)
    assert m.step_p90_s == pytest.approx(0.56)
    assert (m.device_peak_bytes, m.host_peak_bytes) == (300, 700)
    assert m.wait_share == pytest.approx(1.1 / 11.0)
    assert m.loss == 6.0, "the last quarter of five steps is one"


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    path = log(tmp_path / "e", step(1, 5.0), step(2, 5.0), step(2, 1.0, 3.0), step(3, 1.0, 3.0))
    found = measure_run(path, 1).measures
    assert (found.samples_per_s, found.wait_share, found.loss) == (8.0, None, 3.0)


def test_waiting_times_of_several_processes_are_added(tmp_path: Path) -> None:
    started = RunStarted("out", "tiny", 1, 6, 0, 64, "cuda:0", "bf16")
    fed = [BatchesFed(n, 6, 0, 0, 0, 1, 0, waited, 0.0, 1) for n, waited in ((1, 1.0), (2, 5.0))]
    path = log(
        tmp_path / "e",
        *(started, step(1, 5.0), fed[0], step(2, 5.0), fed[1]),
        *(started, step(3, 5.0), step(4, 5.0), fed[1]),
    )
    assert measure_run(path, 0).measures.wait_share == pytest.approx(10.0 / 20.0)


def test_a_log_with_only_warmup_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--warmup is 3, but .* has only 2 steps"):
        measure_run(log(tmp_path / "e", step(1, 1.0), step(2, 1.0)), 3)


def test_percentiles_are_interpolated() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert percentile([4.0], 0.99) == 4.0


def test_the_confidence_interval_is_that_of_welch() -> None:
    """Variances 1 and 4 over three runs each: t with int(2.94) = 2 degrees of freedom."""
    half = confidence_half_width([1, 2, 3], [10, 12, 14])
    assert half == pytest.approx(4.303 * (1 / 3 + 4 / 3) ** 0.5)
    assert confidence_half_width([5.0, 5.0], [6.0, 6.0]) == 0.0
    many = [float(i % 2) for i in range(200)]
    assert confidence_half_width(many, many) == pytest.approx(2.042 * (2 * 0.2512562 / 200) ** 0.5)


def test_the_interval_of_a_ratio_is_that_of_fieller() -> None:
    """At both ends, Welch's test of `mean(new) = r mean(old)` is exactly at its limit."""
    old, new = [100.0, 104.0, 96.0, 101.0], [80.0, 90.0, 85.0, 70.0]
    _, t = _welch(old, new)
    for change in ratio_interval(old, new):
        r = 1 + change
        error = (statistics.variance(new) / 4 + r**2 * statistics.variance(old) / 4) ** 0.5
        distance = abs(statistics.fmean(new) - r * statistics.fmean(old))
        assert distance == pytest.approx(t * error)
    assert ratio_interval([1.0, -0.9, 5.0], [1.0, 2.0]) == (-math.inf, math.inf)
    assert ratio_interval([4.0, 4.0], [5.0, 5.0]) == (0.25, 0.25)


def test_a_slower_run_is_a_regression() -> None:
    before, after = rates(100, 101, 99), rates(80, 81, 79)
    assert verdict(before, after) == "worse"
    assert verdict(after, before) == "better"
    lines = [*comparison_lines(compare(before, after, 0.05), 0.05)]
    assert lines[0].startswith("throughput            100 samples/s -> 80 samples/s  -20.00 %")
    assert lines[-1] == "regression beyond 5 %: throughput"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((100, 101, 99), (99, 100, 98), "same"),
        ((100, 101, 99), (96, 97, 95), "undecided"),  # 4 % slower, give or take 2 %
        ((100, 101, 99), (94, 95, 93), "undecided"),  # 6 % slower, give or take 2 %
        ((100, 101, 99), (90, 91, 89), "worse"),
        ((100, 101, 99), (103, 104, 102), "same"),  # an improvement needs no proof
        ((100, 130, 70), (300, 330, 270), "better"),
        ((100, 130, 70), (150, 180, 120), "undecided"),
        ((100, 130, 70), (80, 110, 50), "undecided"),
        ((100, 130, 70), (100, 130, 70), "undecided"),
        ((100, 100, 100, 80, 80, 80), (100, 100, 80, 80, 80, 80), "undecided"),  # two modes
        ((100, 101), (60, 61), "worse"),
        ((100, 103), (99, 102), "undecided"),  # two runs say little
        ((100,), (80,), "undecided"),
        ((100,), (100,), "undecided"),
        ((100, 101, 99), (100,), "undecided"),
        ((100, 100), (95, 95), "same"),  # no noise: exactly at the limit
        ((100, 100), (94.9, 94.9), "worse"),
    ],
)
def test_the_confidence_interval_decides(before, after, expected) -> None:
    assert verdict(rates(*before), rates(*after)) == expected


@pytest.mark.parametrize(
    ("better", "expected"),
    [("step_p50_s", "worse"), ("samples_per_s", "better"), ("loss", "changed")],
)
def test_the_direction_of_a_metric_counts(better: str, expected: str) -> None:
    one = baseline(*(measures(**{better: value}) for value in (1.0, 1.01, 0.99)))
    two = baseline(*(measures(**{better: value}) for value in (1.2, 1.21, 1.19)))
    assert verdict(one, two, better) == expected


def test_an_undecided_comparison_has_the_figures() -> None:
    before, after = rates(100, 104, 96), rates(98, 102, 94)
    delta = compare(before, after, 0.05)[0]
    assert delta.verdict == "undecided"
    assert delta.noise == pytest.approx(0.0896, abs=1e-3)
    assert delta.why == (
        "only a regression of 14.00 % or more would show; "
        "about 12 more repeats on each side would decide it"
    )
    enough = [100 + 4 * math.sqrt(15 / 16) * (-1) ** i for i in range(16)]
    assert verdict(rates(*enough), rates(*(value - 2 for value in enough))) == "same"
    lines = [*comparison_lines([delta], 0.05)]
    assert lines[-1] == (
        f"undecided, a regression beyond 5 % may be hidden: throughput: {delta.why}"
    )
    assert overall_verdict([delta]) == "undecided"
    assert overall_verdict([]) == "undecided"
    assert [*comparison_lines([], 0.05)] == ["undecided: no metric was compared"]


def test_a_regression_outweighs_an_undecided_metric() -> None:
    before = baseline(*(measures(samples_per_s=rate, loss=0.5) for rate in (100, 130, 70)))
    after = baseline(*(measures(samples_per_s=rate, loss=0.6) for rate in (100, 130, 70)))
    deltas = compare(before, after, 0.05)
    assert overall_verdict(deltas) == "regression"
    assert [*comparison_lines(deltas, 0.05)][-1] == "regression beyond 5 %: loss, last quarter"


def test_a_metric_of_one_baseline_only_is_undecided() -> None:
    before = baseline(*2 * [measures(wait_share=0.1)])
    after = baseline(*2 * [measures(wait_share=None)])
    [delta] = [d for d in compare(before, after, 0.05) if d.metric.name == "wait_share"]
    assert (delta.verdict, delta.why) == ("undecided", "only the first baseline has it")
    assert overall_verdict(compare(before, after, 0.05)) == "undecided"
    assert "wait_share" not in {d.metric.name for d in compare(after, after, 0.05)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_survive_the_file_and_are_judged(value, tmp_path) -> None:
    before, broken = baseline(*2 * [measures()]), baseline(*2 * [measures(loss=value)])
    (tmp_path / "baseline.json").write_text(broken.model_dump_json())
    broken = read_baseline(tmp_path)
    assert verdict(before, broken, "loss") == "changed"
    assert verdict(broken, before, "loss") == "undecided"
    assert any("not comparable" in line for line in comparison_lines(compare(before, broken, 1), 1))


def test_memory_without_noise_is_decided_by_two_runs() -> None:
    before, after = (baseline(*2 * [measures(host_peak_bytes=n)]) for n in (10**9, 1_051_000_000))
    assert verdict(before, after, "host_peak_bytes") == "worse"
    assert verdict(before, before, "host_peak_bytes") == "same"


def test_steps_without_time_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"took 0.0 seconds"):
        measure_run(log(tmp_path / "e", step(1, 0.0)), 0)


def test_more_memory_is_worse() -> None:
    before, after = (baseline(*2 * [measures(host_peak_bytes=n * 10**9)]) for n in (1, 2))
    assert verdict(before, after, "host_peak_bytes") == "worse"
    assert verdict(after, before, "host_peak_bytes") == "better"


def test_a_different_loss_is_a_regression_in_both_directions() -> None:
    for loss in (0.4, 0.6):
        before, after = (baseline(*2 * [measures(loss=each)]) for each in (0.5, loss))
        assert verdict(before, after, "loss") == "changed"


def test_waiting_is_compared_in_percentage_points() -> None:
    """Ten times a tiny share is still tiny; ten points more are a tenth of the time."""
    before, little, much = (
        baseline(*2 * [measures(wait_share=share)]) for share in (0.001, 0.01, 0.101)
    )
    assert verdict(before, little, "wait_share") == "same"
    assert verdict(before, much, "wait_share") == "worse"


def test_any_increase_from_zero_is_worse() -> None:
    zero, some = measures(device_peak_bytes=0), measures(device_peak_bytes=5)
    assert verdict(baseline(zero, zero), baseline(zero, zero), "device_peak_bytes") == "same"
    assert verdict(baseline(zero, zero), baseline(some, some), "device_peak_bytes") == "worse"
    assert verdict(baseline(zero, zero), baseline(zero, some), "device_peak_bytes") == "undecided"


def test_differences_of_machine_and_version_are_listed() -> None:
    other = baseline(measures(), machine={"host": "there", "gpus": "one"}, gracetune="2")
    assert [*environment_differences(baseline(measures()), other)] == [
        "machine: gpus was (none) and is now one",
        "machine: host was here and is now there",
        "gracetune was 1 and is now 2",
    ]


def test_the_report_lists_every_metric() -> None:
    text = "\n".join(report_lines(rates(100, 110)))
    assert "2 runs of 10 steps after 2 warm-up steps" in text
    assert "throughput            105 samples/s  (100 samples/s to 110 samples/s)" in text
    one = "\n".join(report_lines(baseline(measures(wait_share=None))))
    assert "waiting for batches   not measured" in one
    assert "capture with --repeats 3" in one


def test_a_baseline_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    written = rates(100)
    (tmp_path / "baseline.json").write_text(written.model_dump_json())
    assert read_baseline(tmp_path) == read_baseline(tmp_path / "baseline.json") == written
    with pytest.raises(DataError, match="gracetune baseline capture RUN"):
        read_baseline(tmp_path / "nowhere.json")
    (tmp_path / "baseline.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(DataError, match="captured: Field required"):
        read_baseline(tmp_path)
