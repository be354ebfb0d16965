"""`gracetune train --rehearse` trains any run of images without its model."""

import json

import pytest
from PIL import Image

from gracetune.cli.main import main
from gracetune.cli.train import load_rehearsal

PAIR = {"prompt": "a dog", "width": 896, "height": 1152, "images": "data/0.png"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a run file next to a folder `data` with images, and return its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for index in range(4):
        noise = Image.effect_noise((96, 80), 60 + index).convert("RGB")
        noise.save(tmp_path / "data" / f"{index}.png")
        (tmp_path / "data" / f"{index}.txt").write_text(f"noise {index}")

    def call(**sections):
        (tmp_path / "run.json").write_text(json.dumps({"output_dir": "runs/mine"} | sections))
        return "run.json"

    return call


def test_a_rehearsal_needs_nothing_that_the_run_needs(write, tmp_path, capsys):
    """Its model, packages, sizes, module names, trackers and tiles are those of another machine."""
    folders = {"instance_data_dir": "data", "conditioning_data_dir": "data"}
    name = write(
        model={"family": "qwen_image", "quantize": "nf4", "transformer_file": "x.safetensors"},
        adapter={"rank": 4, "targets": ["to_k"], "overrides": {"transformer_blocks.0.*": {}}},
        cache_config={"vae_tiling": True, "persistent_cache": True, "cache_dir": "cache"},
        datasets=[folders | {"resolution": 1024, "resolution_type": "edge", "max_aspect": 6}],
        train={"max_train_steps": 3000, "batch_size": 2, "timestep_shift": "qwen_image"},
        optimizer={"name": "prodigy", "schedule": "cosine", "warmup_steps": 100},
        logging={"trackers": ["wandb"], "webhooks": ["https://example.com/hook"]},
        validation={"prompts": ["a cat", PAIR], "width": 1024, "height": 1024, "sample_steps": 2},
    )
    assert main(["train", name, "--rehearse", "--set", "train.max_train_steps=2"]) == 0
    run = json.loads((tmp_path / "runs/rehearsal/run.json").read_text())
    assert run["train"]["max_train_steps"] == 2, "--set has the last word"
    assert (run["train"]["batch_size"], run["adapter"]["rank"]) == (2, 4)
    assert "runs/rehearsal" in capsys.readouterr().out
    assert not (tmp_path / "runs/mine").exists()
    assert not (tmp_path / "cache").exists(), "the cache is in the folder of the rehearsal"
    assert run["cache_config"]["persistent_cache"] is True


def test_a_rehearsal_keeps_aspect_ratios_unless_they_are_too_wide_for_its_model(write):
    name = write(
        datasets=[
            {"instance_data_dir": "data", "bucket_aspects": [0.2, 1.0, 5.0], "max_aspect": 5},
            {"instance_data_dir": "data", "id": "narrow", "max_aspect": 1.5},
            {"instance_data_dir": "data", "id": "square", "bucket_aspects": [1.0]},
        ]
    )
    wide, narrow, square = load_rehearsal(name, []).run.datasets
    assert (wide.max_aspect, narrow.max_aspect) == (3.0, 1.5)
    assert wide.bucket_aspects == pytest.approx((1 / 3, 1.0, 3.0))
    assert (square.bucket_aspects, narrow.bucket_aspects) == ((1.0,), None)


def test_a_rehearsal_of_videos_says_what_can_be_checked(write, capsys):
    name = write(
        model={"family": "wan22"}, datasets=[{"dataset_type": "video", "instance_data_dir": "x"}]
    )
    assert main(["train", name, "--rehearse"]) == 2
    assert "`gracetune data check run.json` checks the data" in capsys.readouterr().err
