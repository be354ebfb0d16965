"""A user's mistake ends with exit code 2 and one clear message, never with a traceback."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from gracetune.cli.main import main


@pytest.fixture
def error_of(capsys, monkeypatch):
    """Return a function that runs a failing command in this process and returns its message."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # restored after the test

    def call(*words):
        code = main([str(word) for word in words])
        message = capsys.readouterr().err
        assert code == 2, message
        assert "Traceback" not in message
        return message

    return call


@pytest.fixture
def folder_run(run_file, tmp_path):
    """Return a run file for a folder of ten captioned images."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(10):
        Image.new("RGB", (24, 24), (index * 20, 0, 0)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture {index}")

    def write(**dataset):
        section = {"instance_data_dir": str(folder), "resolution": 24, "max_aspect": 1.0}
        return run_file(datasets=[section | dataset])

    return folder, write


def test_a_missing_folder_is_named(error_of, folder_run, tmp_path):
    message = error_of("train", folder_run[1](instance_data_dir=str(tmp_path / "nowhere")))
    assert "datasets[0].instance_data_dir" in message
    assert "nowhere" in message


def test_an_empty_folder_is_named(error_of, folder_run, tmp_path):
    (tmp_path / "void").mkdir()
    assert "void" in error_of("train", folder_run[1](instance_data_dir=str(tmp_path / "void")))


def test_a_missing_caption_is_named(error_of, folder_run):
    folder, write = folder_run
    (folder / "3.txt").unlink()
    assert "3.png" in error_of("train", write())


def test_too_many_unreadable_images_are_an_error(error_of, folder_run, tmp_path):
    folder, write = folder_run
    (folder / "4.png").write_bytes(b"not a picture")
    message = error_of("train", write())
    assert "4.png" in message
    assert "max_corruption_rate" in message
    report = tmp_path / "run" / "corruption.json"
    assert "4.png" in report.read_text()
    (folder / "4.png").unlink()
    assert main(["train", str(write())]) == 0
    assert not report.exists(), "the files are repaired"


@pytest.mark.parametrize("kind", ["local", "in_memory"])
@pytest.mark.parametrize("harm", ["garbage", "truncated"])
def test_a_few_unreadable_images_are_named_and_skipped(folder_run, capsys, kind, harm, tmp_path):
    folder, write = folder_run
    if harm == "garbage":
        (folder / "4.png").write_bytes(b"not a picture")
    else:
        noise = Image.effect_noise((24, 24), 90).convert("RGB")
        noise.save(folder / "4.png")
        data = (folder / "4.png").read_bytes()
        (folder / "4.png").write_bytes(data[: len(data) // 2])
    assert main(["train", str(write(type=kind, max_corruption_rate=0.1))]) == 0
    out = capsys.readouterr().out
    assert "4.png" in out
    assert "9 samples" in out
    assert "4.png" in (tmp_path / "run" / "corruption.json").read_text()


def test_an_unknown_key_is_an_error_with_a_suggestion(error_of, run_file):
    file = run_file()
    file.write_text(file.read_text().replace("max_train_steps", "max_train_stpes"))
    message = error_of("train", file)
    assert "max_train_stpes" in message
    assert "max_train_steps" in message
    assert str(file) in message


def test_wrong_types_and_ranges_are_errors(error_of, run_file):
    assert "train.batch_size" in error_of("train", run_file(), "--set", "train.batch_size=many")
    assert "train.batch_size" in error_of("train", run_file(), "--set", "train.batch_size=0")


def test_an_impossible_ramp_is_an_error(error_of, run_file):
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 64,
        "target_effective_batch_size": 8,
    }
    message = error_of("train", run_file(gh200_optimizations=ramp))
    assert "initial_effective_batch_size" in message


def test_an_output_folder_that_cannot_be_written_is_named(error_of, run_file, tmp_path):
    (tmp_path / "file").write_text("")
    message = error_of("train", run_file(output_dir=str(tmp_path / "file" / "run")))
    assert "output_dir" in message


def test_a_read_only_output_folder_is_named(error_of, run_file):
    # Nobody can write there, not even root.
    assert "output_dir" in error_of("train", run_file(output_dir="/sys/kernel/gracetune"))


def test_a_resolution_above_that_of_the_model_is_an_error(error_of, folder_run):
    assert "takes at most 64" in error_of("train", folder_run[1](resolution=512))


def test_a_missing_dataset_or_run_file_is_an_error(error_of, run_file, tmp_path):
    assert "datasets" in error_of("train", run_file(datasets=[]))
    assert "missing.json" in error_of("train", tmp_path / "missing.json")


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(run_file, tmp_path):
    """A real, small file system fills up while a checkpoint is written.

    Mounted in a namespace of its own, so that no rights on the machine are needed.
    """
    mount = tmp_path / "small"
    mount.mkdir()
    file = run_file(
        output_dir=str(mount / "run"),
        adapter={"rank": 64},
        train={"max_train_steps": 4, "checkpoint_every": 1, "keep_checkpoints": 9},
        health={"stop": False},  # otherwise the run stops before the disk is full
    )
    script = (
        f"mount -t tmpfs -o size=24m none {mount} && {sys.executable} -m gracetune train {file}"
    )
    check = f"; code=$?; ls -a {mount}/run/checkpoints; exit $code"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script + check],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "cannot be written" in done.stderr
    assert "The newest checkpoint is" in done.stderr
    assert "Traceback" not in done.stderr
    listing = done.stdout.split()
    assert "step-000001" in listing
    assert not [name for name in listing if name.endswith(".staging")]
