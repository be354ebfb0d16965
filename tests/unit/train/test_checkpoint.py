import contextlib
import errno
import json
import os
import resource
import shutil
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
        {
            "weights": {"w": torch.full((size,), value)},
            "optimizer": {"w|step:int": torch.tensor(step)},
            "ema": {"w": torch.zeros(2)},
            "generators-0": {"torch": torch.zeros(4, dtype=torch.uint8)},
        },
    )


def edit_manifest(path, change, seal=False):
    """Change the manifest's JSON in place; `seal` makes the checksum right again."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    if seal:
        manifest["checksum"] = checkpoint.manifest_checksum(manifest)
    file.write_text(json.dumps(manifest))


def as_format_1(path):
    """Turn a checkpoint into one of the first format, which had no checksum."""

    def change(manifest):
        manifest["format"] = 1
        for key in manifest.keys() - {"format", "progress", "identity", "files"}:
            del manifest[key]

    edit_manifest(path, change)


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


def rename(manifest, *keys):
    for key in keys[:-1]:
        manifest = manifest[key]
    manifest[f"{keys[-1]}_"] = manifest.pop(keys[-1])


DAMAGE = {
    "a weight": lambda path: flip_bit(path / "weights.safetensors", -1),
    "a safetensors header": lambda path: flip_bit(path / "optimizer.safetensors", 12),
    "an RNG state": lambda path: flip_bit(path / "generators-0.safetensors", -1),
    "a moving average": lambda path: flip_bit(path / "ema.safetensors", -1),
    "a truncated file": lambda path: os.truncate(path / "weights.safetensors", 40),
    "an empty file": lambda path: os.truncate(path / "ema.safetensors", 0),
    "bytes at the end of a file": lambda path: append(path / "weights.safetensors"),
    "a missing file": lambda path: (path / "generators-0.safetensors").unlink(),
    "a folder instead of a file": lambda path: to_folder(path / "ema.safetensors"),
    "a missing manifest": lambda path: (path / "manifest.json").unlink(),
    "an empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 200),
    "bytes at the end of the manifest": lambda path: append(path / "manifest.json"),
    "a manifest that is a list": lambda path: (path / "manifest.json").write_text("[]"),
    "a manifest of brackets": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "a counter": lambda path: edit_manifest(path, lambda m: m["progress"].update(consumed=7)),
    "a missing counter": lambda path: edit_manifest(path, lambda m: m["progress"].pop("consumed")),
    "no counters": lambda path: edit_manifest(path, lambda m: m.pop("progress")),
    "a renamed counter": lambda path: edit_manifest(path, lambda m: rename(m, "progress", "step")),
    "a setting": lambda path: edit_manifest(path, lambda m: rename(m, "identity", *m["identity"])),
    "a file's entry": lambda path: edit_manifest(path, lambda m: m["files"].popitem()),
    "a missing checksum": lambda path: edit_manifest(path, lambda m: m.pop("checksum")),
    "a renamed checksum": lambda path: edit_manifest(path, lambda m: rename(m, "checksum")),
    "the format": lambda path: edit_manifest(path, lambda m: m.update(format=99)),
    "the first format": lambda path: edit_manifest(path, lambda m: m.update(format=1)),
}


def flip_bit(file, index, bit=1):
    data = bytearray(file.read_bytes())
    data[index] ^= bit
    file.write_bytes(data)


def append(file):
    file.write_bytes(file.read_bytes() + b"x")


def to_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_found_and_the_one_before_it_used(tmp_path, damage):
    checkpoint.save_snapshot(tmp_path, snapshot(1), keep=3)
    path = checkpoint.save_snapshot(tmp_path, snapshot(2), keep=3).path
    DAMAGE[damage](path)
    with pytest.raises(CheckpointError, match="step-000002"):
        checkpoint.load_snapshot(path)
    warnings = []
    found = checkpoint.find_snapshot(tmp_path, "auto", warnings.append)
    assert found is not None
    assert found.progress.step == 1
    (warning,) = warnings
    assert "step-000002" in warning
    assert warning.endswith("Resuming from step-000001 instead.")
    with pytest.raises(CheckpointError, match="step-000002"):  # named, so nothing else is used
        checkpoint.find_snapshot(tmp_path, str(path), pytest.fail)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = checkpoint.save_snapshot(tmp_path, snapshot(12), keep=3).path
    manifest = path / "manifest.json"
    text, contents = manifest.read_bytes(), json.loads(manifest.read_text())
    for index in range(len(text)):
        flip_bit(manifest, index, 1 << index % 8)
        with contextlib.suppress(CheckpointError):
            checkpoint.load_snapshot(path)
            assert json.loads(manifest.read_text()) == contents, index
        manifest.write_bytes(text)


def test_a_file_that_is_damaged_while_the_data_are_prepared_is_found(tmp_path):
    path = checkpoint.save_snapshot(tmp_path, snapshot(2), keep=3).path
    found = checkpoint.load_snapshot(path)
    found.check_unchanged()
    flip_bit(path / "weights.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors .*since the run was started"):
        found.check_unchanged()


def test_if_no_checkpoint_is_whole_all_are_named(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save_snapshot(tmp_path, snapshot(step), keep=3)
    (tmp_path / "step-000001/optimizer.safetensors").unlink()
    flip_bit(tmp_path / "step-000002/weights.safetensors", -1)
    os.truncate(tmp_path / "step-000003/manifest.json", 0)
    with pytest.raises(CheckpointError, match=r"(?s)step-000003.*step-000002.*step-000001.*backup"):
        checkpoint.find_snapshot(tmp_path, "auto", pytest.fail)


def test_what_is_left_of_a_checkpoint_that_was_being_deleted_is_not_reported(tmp_path):
    for step in (1, 2):
        checkpoint.save_snapshot(tmp_path, snapshot(step), keep=3)
    (tmp_path / "step-000001/manifest.json").unlink()
    found = checkpoint.find_snapshot(tmp_path, "auto", pytest.fail)
    assert found is not None
    assert found.progress.step == 2


def test_a_checkpoint_without_checksum_of_an_earlier_version_still_loads(tmp_path):
    path = checkpoint.save_snapshot(tmp_path, snapshot(2), keep=3).path
    as_format_1(path)
    edit_manifest(path, lambda m: m["progress"].pop("high_steps"))  # added later, with a default
    found = checkpoint.find_snapshot(tmp_path, "auto", pytest.fail)
    assert found is not None
    assert found.progress == TrainProgress(2, 4, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["progress"].pop("consumed"), "progress.consumed"),
        (lambda m: m["progress"].update(consumed=-1), "progress.consumed"),
        (lambda m: m["progress"].update(consumed=1.5), "progress.consumed"),
        (lambda m: m["progress"].update(low_stepz=1), "progress.low_stepz"),
        (lambda m: m["progress"].update(step=3), "step 3"),
        (lambda m: m.update(progress=[]), "progress"),
        (lambda m: m.pop("identity"), "identity"),
        (lambda m: m["files"].pop("optimizer.safetensors"), "optimizer.safetensors"),
        (lambda m: m["files"].pop("generators-0.safetensors"), "generators-0.safetensors"),
        (lambda m: m.update(files=None), "files"),
    ],
)
@pytest.mark.parametrize("first_format", [True, False])
def test_a_manifest_entry_that_cannot_be_right_is_named(tmp_path, change, message, first_format):
    path = checkpoint.save_snapshot(tmp_path, snapshot(2), keep=3).path
    if first_format:
        as_format_1(path)
    edit_manifest(path, change, seal=not first_format)
    with pytest.raises(CheckpointError, match=f"step-000002 is damaged: .*{message}"):
        checkpoint.load_snapshot(path)


def test_resuming_by_path_and_none(tmp_path):
    path = checkpoint.save_snapshot(tmp_path, snapshot(4), keep=1).path
    assert checkpoint.find_snapshot(tmp_path, "none", pytest.fail) is None
    found = checkpoint.find_snapshot(tmp_path / "elsewhere", str(path), pytest.fail)
    assert found is not None
    assert found.progress.step == 4
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        checkpoint.find_snapshot(tmp_path, str(tmp_path), pytest.fail)
    found = checkpoint.find_snapshot(tmp_path, "step-000004", pytest.fail)  # the name is enough
    assert found is not None
    assert found.progress.step == 4


def test_an_error_about_a_named_checkpoint_says_which_other_one_there_is(tmp_path):
    first, second = (checkpoint.save_snapshot(tmp_path, snapshot(n), keep=3).path for n in (1, 2))
    edit_manifest(second, lambda m: m["progress"].update(consumed=-1))
    with pytest.raises(CheckpointError, match=r"is damaged: .* --resume step-000001 is the newest"):
        checkpoint.find_snapshot(tmp_path, "step-000002", pytest.fail)
    shutil.rmtree(first)
    with pytest.raises(CheckpointError, match=r"is damaged: .* or start over in another"):
        checkpoint.find_snapshot(tmp_path, str(second), pytest.fail)


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


# Adapters of checkpoints


def save_with_adapter(folder, step, keep=2, keep_adapters="all"):
    def export(path):
        path.mkdir()
        for expert in ("high", "low"):
            (path / f"{expert}_noise.safetensors").write_text(f"{expert} {step}")

    return checkpoint.save_snapshot(
        folder / "checkpoints", snapshot(step), keep, export, keep_adapters
    ).path


def contents(folders):
    return {
        step: [file.read_text() for file in sorted(path.iterdir())]
        for step, path in folders.items()
    }


def pairs(*steps):
    return {step: [f"high {step}", f"low {step}"] for step in steps}


def test_adapters_outlive_their_checkpoints_and_take_no_space_of_their_own(tmp_path):
    for step in (1, 2, 3):
        path = save_with_adapter(tmp_path, step)
        for file in (path / "adapter").iterdir():
            assert file.samefile(tmp_path / "adapters" / path.name / file.name)
    assert len(checkpoint.complete_checkpoints(tmp_path / "checkpoints")) == 2
    assert contents(checkpoint.saved_adapters(tmp_path)) == pairs(1, 2, 3)


def test_without_hard_links_an_adapter_is_moved_when_its_checkpoint_is_deleted(
    tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2, 3):
        save_with_adapter(tmp_path, step)
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["step-000001"]
    assert contents(checkpoint.saved_adapters(tmp_path)) == pairs(1, 2, 3)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_adapters_are_kept(tmp_path, keep):
    for step in (1, 2, 3, 4, 5):
        save_with_adapter(tmp_path, step, keep=1, keep_adapters=keep)
    names = sorted(path.name for path in (tmp_path / "adapters").iterdir())
    assert names == [f"step-{step:06d}" for step in range(6 - keep, 6)]


def test_a_checkpoint_that_was_deleted_is_not_called_damaged(tmp_path):
    path = checkpoint.save_snapshot(tmp_path, snapshot(1), keep=1).path
    checkpoint.save_snapshot(tmp_path, snapshot(2), keep=1)
    with pytest.raises(CheckpointError, match="step-000001 was deleted meanwhile"):
        checkpoint.load_tensors(path, "weights")


def test_files_of_a_user_next_to_an_adapter_are_kept(tmp_path):
    path = save_with_adapter(tmp_path, 1, keep=1, keep_adapters=1)
    (path / "adapter" / "converted.safetensors").write_text("mine")
    (path / "adapter" / "peft").mkdir()
    for step in (2, 3):
        save_with_adapter(tmp_path, step, keep=1, keep_adapters=1)
    kept = tmp_path / "adapters" / "step-000001"
    assert (kept / "converted.safetensors").read_text() == "mine"
    assert (kept / "peft").is_dir()
    names = sorted(folder.name for folder in (tmp_path / "adapters").iterdir())
    assert names == ["step-000001", "step-000003"]


@pytest.mark.parametrize("call", ["unlink", "rmtree"])
def test_a_crash_while_a_checkpoint_is_deleted_loses_no_adapter(tmp_path, call, monkeypatch):
    """The file system has no hard links, so the adapter is only in the checkpoint."""

    holder, name = (checkpoint.Path, "unlink") if call == "unlink" else (shutil, "rmtree")
    original = getattr(holder, name)

    def crash(path, *given, **options):
        if path.name in ("manifest.json", "step-000001"):
            raise KeyboardInterrupt
        original(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", lambda *_: os.stat(tmp_path / "missing"))
        save_with_adapter(tmp_path, 1)
        save_with_adapter(tmp_path, 2)
        patch.setattr(holder, name, crash)
        with pytest.raises(KeyboardInterrupt):
            save_with_adapter(tmp_path, 3)
    assert contents(checkpoint.saved_adapters(tmp_path)) == pairs(1, 2, 3)
    save_with_adapter(tmp_path, 4)
    assert contents(checkpoint.saved_adapters(tmp_path)) == pairs(1, 2, 3, 4)
    found = checkpoint.find_snapshot(tmp_path / "checkpoints", "auto", lambda _: None)
    assert found.progress.step == 4


def test_a_checkpoint_of_an_earlier_version_has_its_adapter_kept(tmp_path):
    save_with_adapter(tmp_path, 1)
    shutil.rmtree(tmp_path / "adapters")
    assert contents(checkpoint.saved_adapters(tmp_path)) == pairs(1)
    for step in (2, 3):
        save_with_adapter(tmp_path, step)
    assert contents(checkpoint.saved_adapters(tmp_path)) == pairs(1, 2, 3)
