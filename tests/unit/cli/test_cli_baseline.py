"""`gracetune baseline`: real runs of the smallest model, and comparisons of what they left."""

import json
from pathlib import Path

import pytest

from gracetune.cli.main import main

FIGURES = {
    "samples_per_s": 100.0,
    "step_p50_s": 0.08,
    "step_p90_s": 0.09,
    "step_p99_s": 0.10,
    "device_peak_bytes": 0,
    "host_peak_bytes": 10**9,
    "wait_share": None,
    "loss": 0.5,
}


@pytest.fixture
def run_file(tiny_run, tmp_path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tiny_run().model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture
def written(tmp_path):
    """A baseline on disk, with these rates."""

    def write(name: str, *rates: float, **changes) -> str:
        facts = {
            "captured": "2030-01-01T00:00:00+00:00",
            "gracetune": "1",
            "scenario": {"seed": 0, "model": {"family": "tiny"}},
            "machine": {"host": "here"},
            "steps": 10,
            "warmup_steps": 2,
            "window_steps": 1,
            "repeats": [FIGURES | {"samples_per_s": rate} for rate in rates],
        }
        folder = tmp_path / name
        folder.mkdir()
        (folder / "baseline.json").write_text(json.dumps(facts | changes))
        return str(folder)

    return write


def test_capture_runs_and_compare_reads_it(run_file, tmp_path, capsys, monkeypatch):
    """With an nvidia-smi that a script plays, so that its part runs too."""
    tools = tmp_path / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = --list-gpus ] && echo "GPU 0: made" && exit\necho busy\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    output = tmp_path / "base"
    words = ["baseline", "capture", str(run_file), "--output", str(output), "--repeats", "2"]
    assert main([*words, "--set", "train.max_train_steps=4"]) == 0
    assert "run 2 of 2: " in capsys.readouterr().out
    kept = json.loads((output / "baseline.json").read_text())
    assert (kept["steps"], kept["warmup_steps"], len(kept["repeats"])) == (4, 0, 2)
    assert kept["machine"]["device"] == "cpu"
    assert kept["machine"]["gpus"] == "GPU 0: made"
    first, second = kept["repeats"]
    assert first["loss"] == second["loss"], "the same run twice"
    assert first["samples_per_s"] > 0
    assert first["host_peak_bytes"] > 10**7
    assert "throughput" in (output / "baseline_report.txt").read_text()
    assert (output / "nvidia_smi.log").read_text() == "busy\n"
    assert sorted(path.name for path in output.iterdir() if "run-" in path.name) == []

    assert main(words) == 2, "a baseline is not replaced unasked"
    assert "give --replace" in capsys.readouterr().err
    assert main(["baseline", "compare", str(output), str(output)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("no regression beyond 5 %")


def test_a_scenario_that_fails_is_no_baseline(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "baseline/run-01").mkdir(parents=True)  # what a killed capture left
    words = ["baseline", "capture", str(run_file), "--set", "model.path=nowhere"]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "run 1 of the scenario ended with 2" in said
    assert "nowhere" in said
    assert not (tmp_path / "baseline/baseline.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--repeats", "0"], "--repeats is 0"),
        (["--warmup", "3"], "--warmup is 3 of 3 steps"),
        (["--warmup", "-1"], "--warmup is -1"),
    ],
)
def test_captures_that_would_measure_nothing(run_file, capsys, words, said):
    assert main(["baseline", "capture", str(run_file), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_regression_exits_with_1(written, capsys, tmp_path):
    before, after = written("before", 100, 101, 99), written("after", 80, 81, 79)
    report = tmp_path / "compare.txt"
    assert main(["baseline", "compare", before, after, "--output", str(report)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "regression beyond 5 %: throughput"
    assert report.read_text() == out
    assert main(["baseline", "compare", before, after, "--tolerance", "25"]) == 0


def test_noise_exits_with_0_and_asks_for_more(written, capsys):
    before, after = written("before", 100, 130, 70), written("after", 80, 110, 50)
    assert main(["baseline", "compare", before, after]) == 0
    assert "too noisy to tell, repeat more: throughput" in capsys.readouterr().out


def test_json(written, capsys):
    before, after = written("before", 100), written("after", 80, machine={"host": "there"})
    assert main(["baseline", "compare", before, after, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["differences"] == ["machine: host was here, is there"]
    assert told["deltas"][0]["verdict"] == "worse"
    assert told["deltas"][0]["change"] == pytest.approx(-0.2)


def test_other_scenarios_are_not_compared(written, capsys):
    before = written("before", 100)
    after = written("after", 100, scenario={"seed": 1, "model": {"family": "tiny"}})
    assert main(["baseline", "compare", before, after]) == 2
    assert "the scenarios differ in seed" in capsys.readouterr().err
    assert main(["baseline", "compare", before, after, "--allow-different"]) == 0


def test_a_tolerance_is_a_percentage(written, capsys):
    before = written("before", 100)
    assert main(["baseline", "compare", before, before, "--tolerance", "-1"]) == 2
    assert "--tolerance is -1.0" in capsys.readouterr().err
