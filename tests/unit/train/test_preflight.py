"""Common mistakes are answered before torch is imported, and leave no folder behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gracetune
from gracetune.config.load import load_run_text
from gracetune.errors import CheckpointError, ConfigError, DataError
from gracetune.train.preflight import CHECKPOINT_FOLDER, MANIFEST, check_before_torch
from gracetune.train.run_identity import IDENTITY_VERSION, VERSION_KEY, identity_settings

if TYPE_CHECKING:
    from gracetune.config.schema import RunFile

CALLS = """
import json, sys, time
from gracetune.cli.main import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    assert "torch" not in sys.modules, f"{words} imported torch"
    print(json.dumps([code, round(time.process_time(), 2)]))
"""


def settings(tmp_path: Path, **changes: object) -> dict[str, object]:
    (tmp_path / "images").mkdir(exist_ok=True)
    base = {
        "output_dir": str(tmp_path / "run"),
        "model": {"family": "tiny"},
        "adapter": {"kind": "lora", "rank": 8},
        "datasets": [{"instance_data_dir": str(tmp_path / "images")}],
    }
    return base | changes


def load(tmp_path: Path, **changes: object) -> RunFile:
    return load_run_text(json.dumps(settings(tmp_path, **changes)), "json", "run").run


def save_manifest(run: RunFile, step: int, precision: str = "bf16") -> None:
    """Write the part of a checkpoint that is read before torch is imported."""
    folder = Path(run.output_dir) / CHECKPOINT_FOLDER / f"step-{step:06d}"
    folder.mkdir(parents=True)
    identity = {VERSION_KEY: IDENTITY_VERSION, **identity_settings(run, precision)}
    (folder / MANIFEST).write_text(json.dumps({"identity": identity}))


def test_mistakes_are_answered_before_torch_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(settings(tmp_path)))
    other = str(tmp_path / "other")
    save_manifest(load(tmp_path, output_dir=other), 10)
    before = sorted(path.name for path in tmp_path.iterdir())
    train = ["train", str(file)]
    mistakes = {
        "model.family: family 'tinny' is not known; did you mean 'tiny'?": [
            *train,
            *("--set", "model.family=tinny"),
        ],
        "datasets[0].instance_data_dir is 'no/such': the folder does not exist.": [
            *train,
            *("--set", "datasets.0.instance_data_dir=no/such"),
        ],
        "adapter.rank was 8 and is now 16": [
            *train,
            *("--set", f"output_dir={other}", "--set", "adapter.rank=16"),
        ],
        'train.batch_size is "many"; it must be a whole number.': [
            *train,
            "--set",
            "train.batch_size=many",
        ],
        "optimizer.name: optimizer 'adamm' is not known": [*train, "--set", "optimizer.name=adamm"],
        "no/step is not a checkpoint": [*train, "--resume", "no/step"],
        "datasets[0].type: source 'tape' is not known": [*train, "--set", "datasets.0.type=tape"],
        "train.batch_sise is not a known key; did you mean train.batch_size?": [
            *train,
            *("--set", "train.batch_sise=2"),
        ],
        "model.family: family 'flx' is not known": [
            "plan",
            *train[1:],
            "--set",
            "model.family=flx",
        ],
    }
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(list(mistakes.values()))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(gracetune.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in answers] == [2] * len(mistakes), done.stderr
    for message in mistakes:
        assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    sys.stdout.write(f"{len(mistakes)} commands took {answers[-1][1]} s of CPU time\n")


@pytest.mark.parametrize("resume", ["auto", "latest", "step-000020", "none"])
def test_the_settings_of_the_selected_checkpoint_are_compared(tmp_path: Path, resume: str) -> None:
    save_manifest(load(tmp_path, adapter={"kind": "lora", "rank": 4}), 9)
    save_manifest(load(tmp_path), 20)
    check_before_torch(load(tmp_path), resume)
    changed = load(tmp_path, adapter={"kind": "lora", "rank": 4})
    if resume == "none":
        check_before_torch(changed, resume)
        return
    with pytest.raises(CheckpointError, match=r"adapter.rank was 8 and is now 4.*output_dir"):
        check_before_torch(changed, resume)
    check_before_torch(changed, "step-000009")


def test_the_precision_of_a_checkpoint_is_left_to_the_device(tmp_path: Path) -> None:
    save_manifest(load(tmp_path), 5, precision="no")
    check_before_torch(load(tmp_path, train={"mixed_precision": "auto"}), "auto")


def test_a_section_that_is_turned_off_is_compared_as_absent(tmp_path: Path) -> None:
    save_manifest(load(tmp_path), 5)
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 1}
    run = load(tmp_path, gh200_optimizations=ramp, use_gh200_trainer=False)
    check_before_torch(run, "auto")
    with pytest.raises(CheckpointError, match="enable_batch_size_rampup"):
        check_before_torch(load(tmp_path, gh200_optimizations=ramp), "auto")


@pytest.mark.parametrize("text", ["{", "[]", '{"identity": 3}', "{}"])
def test_a_damaged_manifest_is_left_to_the_reader_of_checkpoints(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(text)
    check_before_torch(load(tmp_path), "auto")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"instance_data_dir": "no/such.tar"}, "such.tar': the file does not exist"),
        ({"mask_data_dir": "no/masks"}, r"datasets\[0\].mask_data_dir is 'no/masks'"),
        ({"conditioning_data_dir": ["no/one"]}, r"datasets\[0\].conditioning_data_dir is 'no/one'"),
        ({"instance_data_dir": "s3://bucket/images"}, None),
        ({"instance_data_dir": "shards/*.tar"}, None),
        ({"type": "shapes", "instance_data_dir": "not/drawn/yet"}, None),
    ],
)
def test_local_folders_must_exist(
    tmp_path: Path, dataset: dict[str, object], message: str | None
) -> None:
    run = load(tmp_path, datasets=[{"instance_data_dir": str(tmp_path / "images")} | dataset])
    if message is None:
        check_before_torch(run, "auto")
    else:
        with pytest.raises(DataError, match=message):
            check_before_torch(run, "auto")


def test_an_output_folder_inside_a_dataset_is_an_error(tmp_path: Path) -> None:
    run = load(tmp_path, output_dir=str(tmp_path / "images" / "run"))
    with pytest.raises(ConfigError, match=r"output_dir is .* inside datasets.0.instance_data_dir"):
        check_before_torch(run, "auto")
    assert not (tmp_path / "images" / "run").exists()
