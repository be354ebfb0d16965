"""Break a run while it trains: it ends as documented, and nothing that was saved is lost."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from fork_process import run_python
from test_planted_faults import images, noise

from gracetune.data.pipeline import DataPipeline
from gracetune.data.source import FolderSource
from gracetune.errors import (
    CheckpointError,
    GracetuneError,
    InterruptedRunError,
    RunFailedError,
)
from gracetune.events.types import BatchSkipped, CheckpointSaved, HealthChanged, StepDone
from gracetune.train import checkpoint
from gracetune.train.run import run_training

EVERY_STEP = {"interval_s": 0.0}
LORA = {"rank": 4}


class At:
    """A sink that calls a function once a step is done."""

    def __init__(self, step, action):
        self._step, self._action = step, action

    def handle(self, event):
        if isinstance(event, StepDone) and event.step == self._step:
            self._action()

    def close(self):
        pass


def of_check(recorder, name):
    return [event for event in recorder.of(HealthChanged) if event.check == name]


def weights(folder, step):
    return checkpoint.load_snapshot(Path(folder, f"checkpoints/step-{step:06d}")).tensors["weights"]


def test_a_loader_that_hangs_ends_the_run_with_a_checkpoint(
    tiny_run, recorder, tmp_path, monkeypatch
):
    data = images(tmp_path / "data", 8, noise)
    data |= {"augmentations": [{"name": "flip"}], "augmentations_cache_mode": "disable_cache"}
    data |= {"timeout_s": 1.0}
    run = tiny_run(adapter=LORA, datasets=[data], train={"max_train_steps": 50})
    answers, read = threading.Event(), FolderSource.read
    answers.set()

    def read_or_hang(self, key):  # like a network disk that does not answer
        answers.wait(60)
        return read(self, key)

    monkeypatch.setattr(FolderSource, "read", read_or_hang)
    with pytest.raises(GracetuneError, match=r"\.png"):
        run_training(run, sinks=[recorder, At(3, answers.clear)], telemetry=EVERY_STEP)
    answers.set()
    (event,) = of_check(recorder, "loader_stalled")
    assert event.level == "stopping"
    saved = recorder.of(CheckpointSaved)[-1]
    assert (saved.step, saved.reason) == (recorder.of(StepDone)[-1].step, "the data failed")
    assert weights(tmp_path / "run", saved.step)


@pytest.fixture
def bad_batch(monkeypatch):
    """Let the latents of the samples with these captions be NaN."""
    load = DataPipeline.load

    def poison(*names):
        def loading(self, draws):
            batch = load(self, draws)
            for place, draw in enumerate(draws):
                if draw.sample.caption in names:
                    batch.latents[place] = torch.nan
            return batch

        monkeypatch.setattr(DataPipeline, "load", loading)

    yield poison
    monkeypatch.setattr(DataPipeline, "load", load)


def bad_run(tiny_run, tmp_path, steps, **train):
    data = {"id": "data", "type": "local", "instance_data_dir": str(tmp_path / "data")}
    sections = {"max_train_steps": steps, "batch_size": 2, "checkpoint_every": 2, **train}
    return tiny_run(
        adapter=LORA,
        datasets=[data | {"resolution": 24}],
        train=sections | {"keep_checkpoints": 9},
    )


def test_a_bad_batch_ends_the_run_and_earlier_checkpoints_are_kept(
    tiny_run, recorder, tmp_path, bad_batch
):
    images(tmp_path / "data", 8, noise)
    bad_batch("picture number 3")
    with pytest.raises(RunFailedError, match=r"diverged at step \d.*skip_bad_batches"):
        run_training(bad_run(tiny_run, tmp_path, 8), sinks=[recorder])
    (event,) = of_check(recorder, "not_finite")
    assert event.level == "stopping"
    assert "the latents of 003.png are not finite" in event.cause
    assert "learning rate" not in event.cause
    assert "optimizer.lr" not in event.advice
    for saved in recorder.of(CheckpointSaved):
        assert all(torch.isfinite(w).all() for w in weights(tmp_path / "run", saved.step).values())


def test_a_bad_batch_is_skipped_recorded_and_skipped_again(tiny_run, recorder, tmp_path, bad_batch):
    images(tmp_path / "data", 8, noise)
    bad_batch("picture number 3")
    run_training(bad_run(tiny_run, tmp_path, 8, skip_bad_batches=True), sinks=[recorder])
    skipped = recorder.of(BatchSkipped)
    steps = [event.step for event in skipped]
    assert len(steps) == 2  # once in each of two epochs
    assert all("003.png" in event.samples for event in skipped)
    snapshot = checkpoint.load_snapshot(tmp_path / "run/checkpoints/step-000008")
    assert snapshot.execution["skipped_steps"] == steps
    expected = weights(tmp_path / "run", 8)
    assert all(torch.isfinite(weight).all() for weight in expected.values())

    # Go back to before the first bad batch, whose fault was only a moment's.
    bad_batch()
    before = (steps[0] - 1) // 2 * 2
    if before == 0:
        before = 2
    run = bad_run(tiny_run, tmp_path, 8, skip_bad_batches=True)
    run_training(run, f"step-{before:06d}", sinks=[recorder])
    assert [event.step for event in recorder.of(BatchSkipped)[2:]] == [
        s for s in steps if s > before
    ]
    for name, weight in weights(tmp_path / "run", 8).items():
        assert torch.equal(weight, expected[name]), name


def test_a_new_run_forgets_the_skipped_steps_of_one_that_saved_nothing(
    tiny_run, recorder, tmp_path
):
    images(tmp_path / "data", 8, noise)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/skipped.json").write_text("[3]")  # then it was killed, without a checkpoint
    for steps in (2, 4):
        run_training(bad_run(tiny_run, tmp_path, steps, skip_bad_batches=True), sinks=[recorder])
    assert recorder.of(BatchSkipped) == []


def test_a_run_whose_folder_was_moved_saves_stops_and_can_be_resumed(tiny_run, recorder, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    run = tiny_run(adapter=LORA, train={"max_train_steps": 12, "checkpoint_every": 4})
    with pytest.raises(InterruptedRunError, match=r"run was moved or deleted.*is saved"):
        run_training(run, sinks=[recorder, At(5, lambda: folder.rename(moved))])
    assert [saved.step for saved in recorder.of(CheckpointSaved)] == [4, 8, 9]
    assert weights(moved, 4)
    assert run_training(run, sinks=[recorder]).status == "done"
    assert [event.step for event in recorder.of(StepDone)] == list(range(1, 13))
    assert (folder / "run.json").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a disk of 48 MiB, and a function that leaves so many bytes free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "gracetune-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root only")

    def fill(free):
        stat = os.statvfs(folder)
        (folder / "filler").write_bytes(b"x" * (stat.f_bavail * stat.f_bsize - free))

    yield folder, fill
    # Tensors of checkpoints that a test has read are still mapped, so detach it and clean up later.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_up_stops_the_run_while_a_checkpoint_fits(
    tiny_run, recorder, small_disk, shapes_folder
):
    disk, fill = small_disk
    run = tiny_run(adapter=LORA, output_dir=str(disk / "run"), train={"max_train_steps": 50})
    sinks = [recorder, At(3, lambda: fill(20 << 20))]
    with pytest.raises(InterruptedRunError, match=r"health check disk_space.*keep_checkpoints"):
        run_training(run, sinks=sinks, telemetry=EVERY_STEP)
    assert [e.level for e in of_check(recorder, "disk_space")] == ["notice", "stopping"]
    saved = recorder.of(CheckpointSaved)[-1]
    assert (saved.step, saved.reason) == (recorder.of(StepDone)[-1].step, "stopping")

    (disk / "filler").unlink()
    run = run.model_copy(update={"train": run.train.model_copy(update={"max_train_steps": 8})})
    assert run_training(run, sinks=[recorder]).status == "done"


def test_a_full_disk_ends_the_run_and_loses_no_checkpoint(tiny_run, recorder, small_disk):
    disk, fill = small_disk
    run = tiny_run(
        adapter=LORA,
        output_dir=str(disk / "run"),
        train={"max_train_steps": 50, "checkpoint_every": 4},
        health={"enabled": False},
    )
    with pytest.raises(CheckpointError, match=r"cannot be written.*Free some disk space"):
        run_training(run, sinks=[At(5, lambda: fill(200_000))])
    assert weights(disk / "run", 4)
    (disk / "filler").unlink()
    run = run.model_copy(update={"train": run.train.model_copy(update={"max_train_steps": 8})})
    run_training(run, sinks=[recorder])
    assert recorder.of(StepDone)[0].step == 5


def wait_for_start(process, log, number):
    """Wait until the process that starts the run for the n-th time has saved a checkpoint."""
    while True:
        _, *starts = (log.read_text() if log.exists() else "").split('"event": "run_started"')
        if len(starts) == number and '"event": "checkpoint_saved"' in starts[-1]:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_the_next_start_after_sigkill_says_what_was_last_seen(run_file, start, tmp_path):
    log = tmp_path / "run/events.jsonl"
    file = run_file(adapter=LORA, train={"max_train_steps": 100_000, "checkpoint_every": 1})
    process = start("train", file)
    wait_for_start(process, log, 1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for number in (2, 3):  # after an orderly stop there is nothing to explain
        process = start("train", file)
        wait_for_start(process, log, number)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
    events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    (event,) = [e for e in events if e["event"] == "health" and e["check"] == "previous_run"]
    assert "was killed (SIGKILL)" in event["cause"]
    assert "of host memory were left" in event["cause"]
    assert "resumes from the checkpoint of step" in event["action"]
    assert events[-1]["status"] == "interrupted"


CGROUP = Path("/sys/fs/cgroup/memory/gracetune-squeezed")

SQUEEZED = """
import os, subprocess, sys
from pathlib import Path
from gracetune.config.schema import RunFile
from gracetune.train.run import run_training

group, file = Path(sys.argv[1]), Path(sys.argv[2])
(group / "cgroup.procs").write_text(str(os.getpid()))
HOG = "import sys; kept = bytearray(int(sys.argv[1])); print(flush=True); sys.stdin.read()"

class Squeeze:
    hog = None
    def handle(self, event):
        if type(event).__name__ != "StepDone":
            return
        if event.step == 5:  # another process of the job takes almost all that is left
            used = int((group / "memory.usage_in_bytes").read_text())
            (group / "memory.limit_in_bytes").write_text(str(10 * used))
            words = [sys.executable, "-c", HOG, str(int(8.6 * used))]
            self.hog = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.hog.stdout.readline()
        elif event.step == 15:
            self.hog.communicate(b"")
    def close(self):
        pass

run = RunFile.model_validate_json(file.read_text())
run_training(run, sinks=[Squeeze()], telemetry={"interval_s": 0.0})
"""


@pytest.mark.slow
def test_host_memory_that_another_process_takes_degrades_the_run_until_it_is_back(
    tiny_run, tmp_path
):
    try:
        CGROUP.mkdir()
    except OSError:
        pytest.skip("memory cgroups cannot be created here")
    try:
        run = tiny_run(adapter=LORA, train={"max_train_steps": 30})
        (tmp_path / "run.json").write_text(run.model_dump_json())
        (tmp_path / "squeezed.py").write_text(SQUEEZED)
        done = run_python(tmp_path / "squeezed.py", CGROUP, tmp_path / "run.json")
        assert done.returncode == 0, done.stderr
    finally:
        CGROUP.rmdir()
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    found = [e for e in events if e["event"] == "health" and e["check"] == "host_memory"]
    assert [e["level"] for e in found] == ["notice", "degraded", "ok"]
    assert "the memory of the cgroup is almost full" in found[0]["cause"]
    assert "returned unused memory to the system" in found[1]["action"]
