"""A run that is killed, interrupted or stopped continues bit for bit."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fork_process import rank_environments, run_ranks
from safetensors.torch import load_file

from gracetune.config.load import load_run_file
from gracetune.events.log import loss_by_step
from gracetune.train.run import run_training

STEPS = 40


def settings(**train):
    """Return settings that need every part of a checkpoint: dropout, a ramp, EMA, decay."""
    return {
        "adapter": {"rank": 4, "dropout": 0.1},
        "train": {"max_train_steps": STEPS, "checkpoint_every": 20, **train},
        "optimizer": {"schedule": "cosine", "warmup_steps": 5},
        "gh200_optimizations": {
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 4,
            "target_effective_batch_size": 12,
            "batch_rampup_steps": 50,
        },
    }


def wait_for_step(process, folder: Path, step: int):
    log, deadline = folder / "events.jsonl", time.monotonic() + 120
    while not (log.exists() and max(loss_by_step(log), default=0) >= step):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run is too slow"
        time.sleep(0.02)


def manifest(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())


def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(run_file, start, gracetune, tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    file = run_file(**settings())
    run_training(load_run_file(file, [f"output_dir={whole}"]).run)

    process = start("train", file, "--set", f"output_dir={torn}")
    wait_for_step(process, torn, 25)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [p.name for p in (torn / "checkpoints").glob("step-*")] == ["step-000020"]

    done = gracetune("train", file, "--set", f"output_dir={torn}")
    assert done.returncode == 0, done.stderr
    assert "resume     from step 20 of" in done.stdout
    ours, theirs = manifest(torn, STEPS), manifest(whole, STEPS)
    assert set(ours["files"]) == {
        "weights.safetensors",
        "optimizer.safetensors",
        "ema.safetensors",
        "generators-0.safetensors",
    }
    assert ours["files"] == theirs["files"]  # digests of every tensor file
    assert ours["progress"] == theirs["progress"]
    losses = loss_by_step(torn / "events.jsonl")
    assert losses == loss_by_step(whole / "events.jsonl")
    assert sorted(losses) == list(range(1, STEPS + 1))
    adapters = [load_file(f / "adapter/pytorch_lora_weights.safetensors") for f in (torn, whole)]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


SMALL_RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 1,
    "target_effective_batch_size": 4,
    "batch_rampup_steps": 12,
    "rampup_shape": "linear",
}
"""Cuts batches of 4 into pieces of 1, 2, 1 and 2, 2; a run of 4 steps ends between pieces."""


@pytest.mark.parametrize("ramp", [{}, SMALL_RAMP], ids=["constant", "small-ramp"])
def test_a_resumed_run_continues_with_the_next_batch(run_file, tmp_path, ramp):
    """6 steps at once have the same losses as 3 + 1 + 2 steps with resumes between them."""
    file = run_file(train={"checkpoint_every": 1}, gh200_optimizations=ramp)
    whole = load_run_file(file, [f"output_dir={tmp_path / 'whole'}", "train.max_train_steps=6"])
    run_training(whole.run)
    for steps in (3, 4, 6):
        part = load_run_file(
            file, [f"output_dir={tmp_path / 'parts'}", f"train.max_train_steps={steps}"]
        )
        run_training(part.run)
    logs = [loss_by_step(tmp_path / name / "events.jsonl") for name in ("whole", "parts")]
    assert logs[0] == logs[1]
    assert len(logs[0]) == 6


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGINT,
        # `test_a_closed_terminal_saves_the_run` sends it, too.
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_saves_and_exits_with_130(run_file, start, number, tmp_path):
    file = run_file(train={"max_train_steps": 100_000})
    folder = tmp_path / "run"
    process = start("train", file)
    wait_for_step(process, folder, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "finishing the step" in err
    assert "a checkpoint is saved" in err
    steps = max(loss_by_step(folder / "events.jsonl"))
    assert manifest(folder, steps)["progress"]["step"] == steps
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("run_ended", "interrupted")
    assert not (folder / "now" / "listening.json").exists()


def last_event(folder: Path) -> dict:
    return json.loads((folder / "events.jsonl").read_text().splitlines()[-1])


def test_signals_during_validation_save_the_step_that_was_trained(run_file, start, tmp_path):
    """Signals come in the middle of a validation that no checkpoint precedes, and twice."""
    file = run_file(
        train={"max_train_steps": 100_000, "checkpoint_every": 0},
        validation={"every": 2, "sample_steps": 2, "prompts": ["a red star"]},
        logging={"every": 1},
    )
    folder = tmp_path / "run"
    process = start("train", file)
    wait_for_step(process, folder, 2)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    steps = max(loss_by_step(folder / "events.jsonl"))
    assert manifest(folder, steps)["progress"]["step"] == steps
    assert last_event(folder)["status"] == "interrupted"


def test_a_closed_terminal_saves_the_run(run_file, tmp_path):
    """The kernel sends SIGHUP, and every write to the terminal fails from then on."""
    file = run_file(train={"max_train_steps": 100_000}, logging={"every": 1})
    folder = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "gracetune", "train", str(file)])
    output = b""
    while not re.search(rb"loss +\d", output):
        output += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130, output.decode()
    steps = max(loss_by_step(folder / "events.jsonl"))
    assert manifest(folder, steps)["progress"]["step"] == steps
    assert last_event(folder)["status"] == "interrupted"


@pytest.mark.distributed
def test_torchrun_repeating_a_signal_does_not_lose_the_run(run_file, tmp_path):
    """torchrun passes a signal on to the process groups of its ranks, and repeats SIGTERM."""
    file = run_file(train={"max_train_steps": 100_000, "batch_size": 2}, logging={"every": 1})
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", "2", "-m", "gracetune", "train", str(file)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(process, folder, 2)
    process.send_signal(signal.SIGTERM)
    line = ""
    while "finishing the step" not in line:
        line = process.stderr.readline()
        assert line, "torchrun has ended"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    steps = max(loss_by_step(folder / "events.jsonl"))
    assert manifest(folder, steps)["progress"]["step"] == steps
    assert last_event(folder)["status"] == "interrupted"


@pytest.fixture
def start_ranks(start):
    """Return a function that starts two ranks; a launcher would end one when the other fails."""

    def call(file):
        return [start("train", file, env=env) for env in rank_environments(os.environ)]

    return call


def test_a_lost_rank_is_named_by_the_others(run_file, start_ranks, tmp_path):
    file = run_file(
        train={"max_train_steps": 100_000, "batch_size": 2, "checkpoint_every": 2},
        logging={"every": 1},
    )
    folder = tmp_path / "run"
    ranks = start_ranks(file)
    wait_for_step(ranks[0], folder, 3)
    ranks[1].kill()
    out, err = ranks[0].communicate(timeout=120)
    assert ranks[0].returncode == 1, (out, err)
    assert "Traceback" not in err
    assert "bug in gracetune" not in err
    assert f"rank 1 on {socket.gethostname()} (process {ranks[1].pid}," in err
    assert "has died without a message" in err
    newest = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert f"resumes from {newest}" in err
    assert last_event(folder)["status"] == "failed"
    assert "has died without a message" in last_event(folder)["message"]


@pytest.mark.distributed
def test_a_stalled_rank_is_named_and_killed_by_the_others(run_file, start_ranks, tmp_path):
    file = run_file(
        train={"max_train_steps": 100_000, "batch_size": 2},
        distributed={"heartbeat_s": 0.5, "stall_timeout_s": 4},
    )
    folder = tmp_path / "run"
    ranks = start_ranks(file)
    wait_for_step(ranks[0], folder, 3)
    ranks[1].send_signal(signal.SIGSTOP)
    _, err = ranks[0].communicate(timeout=120)
    assert ranks[0].returncode == 1, err
    name = f"rank 1 on {socket.gethostname()} (process {ranks[1].pid})"
    assert f"gracetune: {name} has sent no heartbeat for" in err
    assert last_event(folder)["status"] == "failed"
    assert name in last_event(folder)["message"]
    assert ranks[1].wait(timeout=20) == -signal.SIGKILL


FAIL_ON_RANK_1 = """
import os, sys
from gracetune.cli.main import main
from gracetune.events.dispatcher import EventDispatcher
emit = EventDispatcher.emit
def fail(self, event):
    if type(event).__name__ == "StepDone" and os.environ["RANK"] == "1" and event.step == 3:
        raise ValueError("a bad sample")
    emit(self, event)
EventDispatcher.emit = fail
sys.exit(main(["train", sys.argv[1]]))
"""


def test_the_error_of_one_rank_is_named_by_the_others(run_file, tmp_path):
    file = run_file(train={"max_train_steps": 100_000, "batch_size": 2})
    first, second = run_ranks("-c", FAIL_ON_RANK_1, file)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "ValueError: a bad sample" in second.stderr
    assert "bug in gracetune" in second.stderr
    assert f"rank 1 on {socket.gethostname()} (process" in first.stderr
    assert "has failed: ValueError: a bad sample. So rank 0" in first.stderr
    assert "Traceback" not in first.stderr
    assert "a bad sample" in last_event(tmp_path / "run")["message"]


@pytest.mark.distributed
def test_ranks_that_get_a_signal_at_different_times_stop_at_one_step(
    run_file, start_ranks, tmp_path
):
    """One rank is asked to stop; the other is asked only when it has already stopped training."""
    file = run_file(train={"max_train_steps": 100_000, "batch_size": 2}, logging={"every": 1})
    folder = tmp_path / "run"
    ranks = start_ranks(file)
    wait_for_step(ranks[0], folder, 2)
    ranks[1].send_signal(signal.SIGUSR1)
    while not list((folder / "checkpoints").glob("step-*")):
        assert ranks[0].poll() is None, ranks[0].communicate()
    for process in ranks:
        process.send_signal(signal.SIGTERM)
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [130, 130], errors
    steps = max(loss_by_step(folder / "events.jsonl"))
    assert manifest(folder, steps)["progress"]["step"] == steps


def test_a_run_takes_requests_of_gracetune_now(run_file, start, gracetune, tmp_path):
    file = run_file(
        train={"max_train_steps": 100_000},
        validation={
            "every": 50_000,
            "sample_steps": 2,
            "prompts": ["a red star"],
            "enable_manual_validation": True,
        },
    )
    folder = tmp_path / "run"
    process = start("train", file)
    wait_for_step(process, folder, 1)
    assert gracetune("now", "validate", folder).returncode == 0
    assert gracetune("now", "save", folder).returncode == 0
    deadline = time.monotonic() + 60
    while len(list((folder / "validation").glob("*.png"))) < 2 or not list(
        (folder / "checkpoints").glob("step-*/manifest.json")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gracetune("now", "stop", folder).returncode == 0
    assert process.wait(timeout=60) == 130


def test_resuming_another_run_names_the_setting(finished_run_file, gracetune):
    refused = gracetune("train", finished_run_file, "--set", "train.batch_size=2")
    assert refused.returncode == 2
    assert "train.batch_size was 4 and is now 2" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_resume_none_does_not_overwrite_a_run(finished_run_file, gracetune):
    refused = gracetune("train", finished_run_file, "--resume", "none")
    assert refused.returncode == 2
    assert "starting over would overwrite" in refused.stderr


def test_a_finished_run_does_nothing_when_started_again(finished_run, finished_run_file, gracetune):
    folder = Path(finished_run.output_dir)
    before = manifest(folder, 3)
    again = gracetune("train", finished_run_file)
    assert again.returncode == 0
    assert "finished   all 3 steps are done, and nothing is left to do." in again.stdout
    assert "--set train.max_train_steps=6" in again.stdout
    assert "           log        " in again.stdout
    assert "steps in" not in again.stdout
    assert manifest(folder, 3) == before
