"""`gracetune baseline`: real runs of the smallest model, and comparisons of their metrics."""

import json
from pathlib import Path

import pytest
from git_history import Repo

from gracetune.cli.main import main

METRICS = {
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
def write_baseline(tmp_path):
    """Write a baseline with the given samples per second."""

    def write(name: str, *rates: float, **changes) -> str:
        facts = {
            "captured": "2030-01-01T00:00:00+00:00",
            "gracetune": "1",
            "scenario": {"seed": 0, "model": {"family": "tiny"}},
            "machine": {"host": "here"},
            "steps": 10,
            "warmup_steps": 2,
            "window_steps": 1,
            "repeats": [METRICS | {"samples_per_s": rate} for rate in rates],
        }
        folder = tmp_path / name
        folder.mkdir()
        (folder / "baseline.json").write_text(json.dumps(facts | changes))
        return str(folder)

    return write


def test_capture_runs_and_compare_reads_it(run_file, tmp_path, capsys, monkeypatch):
    """A script takes the place of nvidia-smi, so that its log is tested too."""
    tools = tmp_path / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = --list-gpus ] && echo "GPU 0: made" && exit\necho busy\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    output = tmp_path / "base"
    for name in (".baseline-run-01", "run-01"):  # of a killed capture, and of the user
        (output / name / "checkpoints").mkdir(parents=True)
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
    assert sorted(path.name for path in output.iterdir() if "run-" in path.name) == ["run-01"]
    assert (output / "run-01/checkpoints").is_dir()

    assert main(words) == 2, "an existing baseline was replaced"
    assert "Add --replace" in capsys.readouterr().err
    compare = ["baseline", "compare", str(output), str(output)]
    assert main([*compare, "--metric", "loss"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "no regression beyond 5 % in loss, last quarter"
    )


@pytest.mark.slow
def test_a_failing_run_file_gives_no_baseline(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["baseline", "capture", str(run_file), "--set", "model.path=nowhere"]
    assert main(words) == 1
    shown = capsys.readouterr().err
    assert "run 1 failed with exit code 2" in shown
    assert "nowhere" in shown
    assert not (tmp_path / "baseline/baseline.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats is 0"),
        (["--warmup", "3"], "--warmup is 3, but must be less than train.max_train_steps (3)"),
        (["--warmup", "-1"], "--warmup is -1"),
    ],
)
def test_a_capture_without_measured_steps_is_rejected(run_file, capsys, words, message):
    assert main(["baseline", "capture", str(run_file), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_regression_exits_with_1(write_baseline, capsys, tmp_path):
    before, after = write_baseline("before", 100, 101, 99), write_baseline("after", 80, 81, 79)
    report = tmp_path / "compare.txt"
    assert main(["baseline", "compare", before, after, "--output", str(report)]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "regression beyond 5 %: throughput"
    assert report.read_text() == out
    assert main(["baseline", "compare", before, after, "--tolerance", "25"]) == 0


NOISY = (100, 116, 84, 108, 92)


def test_a_regression_that_the_noise_hides_exits_with_3(write_baseline, capsys, tmp_path):
    """The rate falls by 6 %, and single runs differ by 16 %."""
    before = write_baseline("before", *NOISY)
    after = write_baseline("after", *(0.94 * rate for rate in NOISY))
    report = tmp_path / "compare.txt"
    assert main(["baseline", "compare", before, after, "--output", str(report)]) == 3
    last = report.read_text().splitlines()[-1]
    assert last.startswith("undecided, a regression beyond 5 % may be hidden: throughput: only a")
    assert "regression of 23.03 % or more would show" in last
    assert "no practical number of repeats would decide it" in last
    assert "no regression" not in capsys.readouterr().out
    # The checklist of a port does not accept it.
    fork = Repo(tmp_path / "clone")
    fork.commits("main", [("base", {"a.py": "a = 1\n"})])
    fork.commits("fork", [("fork", {"a.py": "a = 2\n"})], parent="main")
    fork.run("checkout", "--quiet", "fork")
    port = ["port", "--repo", str(fork.folder)]
    assert main([*port, "extract", "--upstream", "main"]) == 0
    assert main([*port, "checklist", "--baseline", str(report)]) == 0
    page = (fork.folder / "GH200_REBASE_CHECKLIST.md").read_text()
    assert "- [ ] baseline compared: undecided" in page


def test_a_comparison_can_be_printed_as_json(write_baseline, capsys):
    before, after = (
        write_baseline("before", 100, 100),
        write_baseline("after", 80, 80, machine={"host": "there"}),
    )
    assert main(["baseline", "compare", before, after, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "regression"
    assert report["differences"] == ["machine: host was here and is now there"]
    assert report["deltas"][0]["verdict"] == "worse"
    assert report["deltas"][0]["change"] == pytest.approx(-0.2)


def test_baselines_of_different_run_files_are_not_compared(write_baseline, capsys):
    before = write_baseline("before", 100, 100)
    after = write_baseline("after", 100, 100, scenario={"seed": 1, "model": {"family": "tiny"}})
    assert main(["baseline", "compare", before, after]) == 2
    assert "the two baselines differ in seed" in capsys.readouterr().err
    assert main(["baseline", "compare", before, after, "--allow-different"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "no regression beyond 5 %, but the baselines differ in seed"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": {"seed": 0, "model": {"family": "tiny"}, "new": 1}}, "new"),
        ({"warmup_steps": 0}, "warmup_steps"),
        ({"machine": {"host": "here", "device": "cuda:0"}}, "device (none and cuda:0)"),
        ({"machine": {"host": "here", "gpus": "GPU 0: A (UUID: 1)"}}, "gpus (none and GPU 0: A)"),
    ],
)
def test_baselines_measured_differently_are_not_compared(write_baseline, capsys, change, message):
    before, after = write_baseline("before", 100, 100), write_baseline("after", 100, 100, **change)
    assert main(["baseline", "compare", before, after]) == 2
    assert f"the two baselines differ in {message}." in capsys.readouterr().err


def test_another_host_with_the_same_hardware_is_only_mentioned(write_baseline, capsys):
    machines = ({"host": name, "gpus": f"GPU 0: A (UUID: {name})"} for name in ("one", "two"))
    before, after = (
        write_baseline(f"of {machine['host']}", 100, 100, machine=machine) for machine in machines
    )
    assert main(["baseline", "compare", before, after]) == 0
    assert "machine: host was one and is now two" in capsys.readouterr().out


def test_a_diverged_run_is_a_regression(write_baseline, capsys):
    before, after = write_baseline("before", 100, 100), write_baseline("after", 100, 100)
    path = Path(after) / "baseline.json"
    path.write_text(path.read_text().replace('"loss": 0.5', '"loss": NaN'))
    assert main(["baseline", "compare", before, after, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    [loss] = [each for each in report["deltas"] if each["metric"] == "loss"]
    assert (loss["after"], loss["verdict"]) == ("nan", "changed")
    assert main(["baseline", "compare", after, before]) == 3


def test_a_tolerance_is_a_percentage(write_baseline, capsys):
    before = write_baseline("before", 100)
    assert main(["baseline", "compare", before, before, "--tolerance", "-1"]) == 2
    assert "--tolerance is -1.0" in capsys.readouterr().err
