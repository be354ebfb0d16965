import json
import resource
import signal

import pytest
import torch

from gracetune.errors import CheckpointError
from gracetune.train import checkpoint
from gracetune.train.checkpoint import Snapshot
from gracetune.train.step import TrainProgress


def snapshot(step=1, value=1.0, size=8):
    return Snapshot(
        TrainProgress(step, step * 2, step * 3),
        {"train.batch_size": 4},
        {"weights": {"w": torch.full((size,), value)}, "ema": {"w": torch.zeros(2)}},
    )


def test_a_loaded_checkpoint_equals_the_saved_one(tmp_path):
    saved = checkpoint.save_snapshot(tmp_path, snapshot(7, 3.5), keep=2)
    assert saved.path.name == "step-000007"
    back = checkpoint.load_snapshot(saved.path)
    assert back.progress == TrainProgress(7, 14, 21)
    assert back.identity == {"train.batch_size": 4}
    assert torch.equal(back.tensors["weights"]["w"], torch.full((8,), 3.5))


def test_the_newest_checkpoints_are_kept_by_number_not_by_name(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save_snapshot(tmp_path, snapshot(step), keep=2)
    assert [p.name for p in checkpoint.complete_checkpoints(tmp_path)] == [
        "step-999999",
        "step-1000000",
    ]


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    checkpoint.save_snapshot(tmp_path, snapshot(1), keep=3)
    torn = checkpoint.save_snapshot(tmp_path, snapshot(2), keep=3).path
    (torn / "manifest.json").unlink()
    found = checkpoint.find_snapshot(tmp_path, "auto", warn=pytest.fail)
    assert found is not None
    assert found.progress.step == 1


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "json", "format"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_used(tmp_path, harm):
    checkpoint.save_snapshot(tmp_path, snapshot(1), keep=3)
    path = checkpoint.save_snapshot(tmp_path, snapshot(2), keep=3).path
    weights, manifest = path / "weights.safetensors", path / "manifest.json"
    if harm == "flip":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif harm == "truncate":
        weights.write_bytes(weights.read_bytes()[:-4])
    elif harm == "remove":
        weights.unlink()
    elif harm == "json":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="step-000002"):
        checkpoint.load_snapshot(path)
    warnings = []
    found = checkpoint.find_snapshot(tmp_path, "auto", warnings.append)
    assert found is not None
    assert found.progress.step == 1
    assert "Resuming from the checkpoint before it" in warnings[0]


def test_resuming_by_path_and_none(tmp_path):
    path = checkpoint.save_snapshot(tmp_path, snapshot(4), keep=1).path
    assert checkpoint.find_snapshot(tmp_path, "none", pytest.fail) is None
    found = checkpoint.find_snapshot(tmp_path / "elsewhere", str(path), pytest.fail)
    assert found is not None
    assert found.progress.step == 4
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        checkpoint.find_snapshot(tmp_path, str(tmp_path), pytest.fail)


def test_a_failed_write_keeps_the_checkpoint_before_it(tmp_path):
    """A limit on the file size makes the kernel reject writes, as a full disk would."""
    checkpoint.save_snapshot(tmp_path, snapshot(1), keep=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        with pytest.raises(CheckpointError, match="step-000001"):
            checkpoint.save_snapshot(tmp_path, snapshot(2, size=100_000), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load_snapshot(tmp_path / "step-000001").progress.step == 1


def test_the_checkpoint_just_written_is_never_deleted(tmp_path):
    checkpoint.save_snapshot(tmp_path, snapshot(12), keep=1)
    saved = checkpoint.save_snapshot(tmp_path, snapshot(10), keep=1)
    assert checkpoint.complete_checkpoints(tmp_path) == [saved.path]


def test_newer_checkpoints_are_set_aside_intact(tmp_path):
    early = checkpoint.save_snapshot(tmp_path, snapshot(8), keep=9).path
    checkpoint.save_snapshot(tmp_path, snapshot(12, value=7.0), keep=9)
    (aside,) = checkpoint.set_aside_newer(tmp_path, 8)
    assert checkpoint.complete_checkpoints(tmp_path) == [early]
    assert checkpoint.load_snapshot(aside).tensors["weights"]["w"][0] == 7.0


def test_too_little_disk_space_is_found_before_writing(tmp_path, monkeypatch):
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"100 B are free\. There is no earlier checkpoint"):
        checkpoint.save_snapshot(tmp_path, snapshot(1), keep=1)
    assert list(tmp_path.iterdir()) == []
