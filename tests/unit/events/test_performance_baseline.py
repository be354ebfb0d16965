"""Baselines: metrics of a log, and how changes are distinguished from noise."""

import json
from pathlib import Path

import pytest

from gracetune.errors import DataError
from gracetune.events.log import JsonlLog
from gracetune.events.performance_baseline import (
    Baseline,
    Measures,
    compare,
    comparison_lines,
    confidence_half_width,
    environment_differences,
    measure_run,
    percentile,
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
    assert confidence_half_width([1.0], [1.0, 2.0]) is None
    assert confidence_half_width([5.0, 5.0], [6.0, 6.0]) == 0.0
    many = [float(i % 2) for i in range(200)]
    assert confidence_half_width(many, many) == pytest.approx(2.042 * (2 * 0.2512562 / 200) ** 0.5)


def test_a_slower_run_is_a_regression() -> None:
    before, after = rates(100, 101, 99), rates(80, 81, 79)
    assert verdict(before, after) == "worse"
    assert verdict(after, before) == "better"
    lines = [*comparison_lines(compare(before, after, 0.05), 0.05)]
    assert lines[0].startswith("throughput            100 samples/s -> 80 samples/s  -20.00 %")
    assert lines[-1] == "regression beyond 5 %: throughput"


def test_within_the_tolerance_is_the_same() -> None:
    assert verdict(rates(100, 101, 99), rates(96, 97, 95)) == "same"


def test_a_change_within_the_noise_is_no_regression() -> None:
    """The means differ by 20 %, but runs of one side differ as much among themselves."""
    before, after = rates(100, 130, 70), rates(80, 110, 50)
    assert verdict(before, after) == "noise"
    lines = [*comparison_lines(compare(before, after, 0.05), 0.05)]
    assert lines[-1] == "no regression beyond 5 %; too noisy, use more repeats: throughput"


def test_noise_larger_than_the_tolerance_is_reported() -> None:
    lines = comparison_lines(compare(rates(100, 130, 70), rates(100, 120, 80), 0.05), 0.05)
    assert any("the noise is larger than the tolerance" in line for line in lines)


def test_a_single_run_is_judged_by_the_tolerance() -> None:
    deltas = compare(rates(100), rates(80), 0.05)
    assert deltas[0].verdict == "worse"
    assert "noise unknown: one run on a side" in next(iter(comparison_lines(deltas, 0.05)))


def test_more_memory_is_worse() -> None:
    before, after = baseline(measures()), baseline(measures(host_peak_bytes=2 * 10**9))
    assert verdict(before, after, "host_peak_bytes") == "worse"
    assert verdict(after, before, "host_peak_bytes") == "better"


def test_a_different_loss_is_a_regression_in_both_directions() -> None:
    for loss in (0.4, 0.6):
        assert verdict(baseline(measures()), baseline(measures(loss=loss)), "loss") == "changed"


def test_waiting_is_compared_in_percentage_points() -> None:
    """Ten times a tiny share is still tiny; ten points more are a tenth of the time."""
    before = baseline(measures(wait_share=0.001))
    assert verdict(before, baseline(measures(wait_share=0.01)), "wait_share") == "same"
    assert verdict(before, baseline(measures(wait_share=0.101)), "wait_share") == "worse"
    none = baseline(measures(wait_share=None))
    assert "wait_share" not in {delta.metric.name for delta in compare(before, none, 0.05)}


def test_any_increase_from_zero_is_worse() -> None:
    zero, some = measures(device_peak_bytes=0), measures(device_peak_bytes=5)
    assert verdict(baseline(zero, zero), baseline(zero, zero), "device_peak_bytes") == "same"
    assert verdict(baseline(zero, zero), baseline(some, some), "device_peak_bytes") == "worse"


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
