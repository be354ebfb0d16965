"""The command lines of the fork's guides, and training with more than one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fork_process import run_python, run_ranks
from safetensors.torch import load_file

from gracetune.config.dataset_schema import ShapesSection
from gracetune.data.demo_dataset import ShapesSource

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def call(command, folder):
    """Run a command in `folder`, which relative paths of run files refer to."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_of_the_guide_works_with_plain_python(tmp_path):
    config = ROOT / "config/examples/minimal.json"
    out = call(
        [
            *(sys.executable, ROOT / "train.py", "--config", config),
            *("--enable_manual_validation", "--max_train_steps", 3),
        ],
        tmp_path,
    )
    assert "done       3 steps" in out


def test_the_guides_attention_line_trains_and_names_the_fallback(tmp_path):
    """Nothing here installs the backend, and the demo model does not dispatch attention."""
    config = ROOT / "config/examples/minimal.json"
    out = call(
        [
            *(sys.executable, ROOT / "train.py", "--config", config),
            *("--attention_mechanism", "flash_attn_3", "--max_train_steps", 10),
        ],
        tmp_path,
    )
    assert "done       10 steps" in out
    (line,) = [line for line in out.splitlines() if "'flash_attn_3', but" in line]
    assert line.endswith("sdpa is used instead")
    (record,) = tmp_path.rglob("run.json")
    assert json.loads(record.read_text())["model"]["attention_mechanism"] == "flash_attn_3"


@pytest.mark.parametrize(
    ("script", "name", "samples"),
    [
        ("train.py", "gh200_config.json", [4, 8]),  # train_batch_size is 32
        ("simpletuner/train.py", "gh200_in_memory_example.json", [4, 5]),
    ],
)
def test_the_run_files_of_the_guides_train_on_a_folder(
    tmp_path, script, name, samples, shapes_folder
):
    source = ShapesSource(shapes_folder, ShapesSection(copies=1), lambda event: None)
    assert source.keys()
    done = run_python(
        *(ROOT / script, "--config", ROOT / "config" / name),
        *("--max_train_steps", 2, "--datasets.0.instance_data_dir", shapes_folder),
        *("--validation.every", 0),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GH200 gradient accumulation ramp enabled" in done.stdout
    assert "done       2 steps" in done.stdout
    (log,) = tmp_path.glob("runs/*/events.jsonl")
    events = map(json.loads, log.read_text().splitlines())
    assert [event["samples"] for event in events if event["event"] == "step_done"] == samples


@pytest.mark.parametrize(
    "script", ["train.py", pytest.param("simpletuner/train.py", marks=pytest.mark.slow)]
)
def test_the_commands_of_the_guides_work_under_accelerate(tmp_path, run_file, script):
    out = call(
        [
            *(*LAUNCH, "--config_file", ROOT / "config/accelerate_config_gh200.yaml"),
            *(ROOT / script, "--config", run_file(), "--max_train_steps", 2),
        ],
        tmp_path,
    )
    assert "done       2 steps" in out


def launch_ranks(file, folder):
    """Start two ranks with `gracetune launch` and return their output."""
    out = call([sys.executable, "-m", "gracetune", "launch", file, "--processes", 2], folder)
    assert out.startswith("launch     2 processes on the CPU\n")
    return out


def accelerate_ranks(file, folder):
    """Start two ranks with accelerate, which needs no GPU for that, and return their output."""
    config = ROOT / "accelerate_config_gh200.yaml"
    words = ("--multi_gpu", "--num_processes", 2, "--config_file", config)
    return call([*LAUNCH, *words, ROOT / "train.py", "--config", file], folder)


@pytest.mark.slow
def test_the_fsdp_config_of_accelerate_shards_the_model(tmp_path, run_file):
    config = ROOT / "config/accelerate_config_gh200_fsdp.yaml"
    words = ("--num_processes", 2, "--config_file", config, ROOT / "train.py")
    out = call([*LAUNCH, *words, "--config", run_file(), "--max_train_steps", 2], tmp_path)
    assert "FSDP2: weights in 2 shards" in out
    assert "done       2 steps" in out


def test_fsdp_with_one_process_says_that_nothing_is_sharded(tmp_path, run_file):
    words = ("--config", run_file(), "--max_train_steps", 1, "--fsdp_config.fsdp_version", 2)
    done = run_python(ROOT / "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = (tmp_path / "run/events.jsonl").read_text()
    assert "distributed.strategy is fsdp2, but a single process has the whole model" in events


def fork_ranks(file, folder):
    """Start two ranks without a launcher and return their output."""
    done = run_ranks("-m", "gracetune", "train", file, cwd=folder)
    assert [rank.returncode for rank in done] == [0, 0], done
    return "".join(rank.stdout for rank in done)


@pytest.mark.parametrize(
    ("adapter", "start_ranks"),
    [
        (None, launch_ranks),
        ({"rank": 2}, fork_ranks),
        pytest.param(None, accelerate_ranks, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_one_model_and_share_the_ramp(tmp_path, run_file, adapter, start_ranks):
    file = run_file(
        adapter=adapter,
        train={"max_train_steps": 3, "batch_size": 2},
        gh200_optimizations={
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 4,
            "target_effective_batch_size": 8,
            "batch_rampup_steps": 2,
        },
    )
    out = start_ranks(file, tmp_path)
    assert out.count("done       3 steps") == 1  # only the main rank prints
    assert out.count("\nplan  ") == 1
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step_done"]
    assert [step["samples"] for step in steps] == [4, 8, 8]
    state = tmp_path / "run/checkpoints/step-000003"
    manifest = json.loads((state / "manifest.json").read_text())
    assert manifest["progress"] == {
        "step": 3,
        "micro_batches": 10,
        "consumed": 10,
        "high_steps": 0,
        "low_steps": 0,
    }
    assert {"generators-0.safetensors", "generators-1.safetensors"} <= set(manifest["files"])
    weights = load_file(state / "weights.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_a_mistake_in_the_run_file_is_reported_once_and_starts_no_rank(run_file, tmp_path):
    done = run_python(
        *("-m", "gracetune", "launch", run_file(), "--processes", 2),
        *("--set", "model.family=flix"),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("model.family") == 1
    assert not (tmp_path / "run").exists()
