"""Every family trains on its kind of data, generates samples and exports a readable file."""

import json

import numpy as np
import pytest
from adapter_examples import TABLES
from fakes.datasets import DATA, WRITE, write_images, write_masks
from PIL import Image

from gracetune.adapters.files.io import read_adapter
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError
from gracetune.train.run import run_training

OUTPUT_FILES = {
    "image": ["000.png"],
    "video": ["000.mp4", "000.png"],
    "audio": ["000.wav", "000.png"],
}


@pytest.fixture
def build_run(tmp_path, miniature):
    def make(small, family, kind, **sections):
        data = tmp_path / "data"
        WRITE[kind](data)
        settings = {
            "output_dir": str(tmp_path / "run"),
            "model": {"family": family, "path": str(miniature(small))} | sections.pop("model", {}),
            "adapter": {"rank": 2},
            "datasets": [
                {"dataset_type": kind, "instance_data_dir": str(data), "caption_dropout": 0.3}
                | DATA[kind]
                | sections.pop("dataset", {})
            ],
            "train": {"max_train_steps": 2, "batch_size": 2} | sections.pop("train", {}),
            "optimizer": {"lr": 0.01},
            "logging": {"tensorboard": False, "every": 1},
            "validation": {"every": 2, "prompts": ["a red ring"], "sample_steps": 2, "holdout": 0.3}
            | sections.pop("validation", {}),
            **sections,
        }
        path = tmp_path / "run.json"
        path.write_text(json.dumps(settings))
        return load_run_file(path).run

    return make


CASES = {
    "wan22 on pictures": ("wan22-t2v", "wan22", "image", {}),
    "wan22 on videos": ("wan22-t2v", "wan22", "video", {}),
    "wan22 from a first frame": ("wan22-i2v", "wan22", "video", {}),
    "wan22 5B": ("wan22-5b", "wan22", "video", {}),
    "wan22 5B from a first frame": ("wan22-5b", "wan22", "video", {"model": {"task": "image"}}),
    "flux": ("flux", "flux", "image", {}),
    "flux with masks": ("flux", "flux", "image", {}),
    "wan22 5B on videos with masks": ("wan22-5b", "wan22", "video", {}),
    "qwen_image": ("qwen-image", "qwen_image", "image", {}),
    "qwen_image edits": ("qwen-image-edit", "qwen_image", "image", {}),
    "stable_audio": ("stable-audio", "stable_audio", "audio", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_family_trains_samples_and_exports(case, build_run, recorder, tmp_path):
    model, family, kind, sections = CASES[case]
    if "first frame" in case:
        Image.new("RGB", (40, 30), (90, 90, 90)).save(tmp_path / "start.png")
        sections = sections | {"validation": {"images": [str(tmp_path / "start.png")]}}
    if "edits" in case:
        write_images(tmp_path / "before")
        Image.new("RGB", (32, 32), (90, 90, 90)).save(tmp_path / "start.png")
        sections = {
            "dataset": {"conditioning_data_dir": str(tmp_path / "before")},
            "validation": {
                "images": [str(tmp_path / "start.png")],
                "guidance": 1.0,
                "sample_steps": 1,
                "every": 2,
            },
        }
    if "masks" in case:
        write_masks(tmp_path / "masks")
        sections = {"dataset": {"mask_data_dir": str(tmp_path / "masks")}}
    run = build_run(model, family, kind, **sections)
    ended = run_training(run, sinks=[recorder])
    assert ended.status == "done"
    losses = [event.loss for event in recorder.events if type(event).__name__ == "StepDone"]
    assert len(losses) == 2
    assert all(np.isfinite(losses))
    (*_, validated) = [e for e in recorder.events if type(e).__name__ == "Validated"]
    assert all(np.isfinite(list(validated.losses.values())))
    folder = tmp_path / "run" / "validation" / "step-000002"
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted([*OUTPUT_FILES[kind], "prompts.json"])
    files = sorted((tmp_path / "run" / "adapter").glob("*.safetensors"))
    assert len(files) == (2 if model in ("wan22-t2v", "wan22-i2v") else 1)
    for file in files:
        assert read_adapter(file, TABLES).layers


@pytest.mark.parametrize(
    ("case", "sections", "message"),
    [
        ("stable_audio", {"dataset": {"sample_rate": 44100}}, r"sample_rate is 44100, .* 16000"),
        ("stable_audio", {"dataset": {"channels": 1}}, r"channels is 1, .* works with 2"),
        ("stable_audio", {"dataset": {"seconds": 9.0}}, r"seconds is 9, .* at most 0\.32"),
        ("stable_audio", {"dataset": {"mask_data_dir": "x"}}, r"mask_data_dir is 'x', but masks"),
        ("stable_audio", {"validation": {"seconds": 5}}, r"validation\.seconds is 5, but"),
        ("wan22 on videos", {"validation": {"frames": 6}}, r"validation\.frames is 6"),
        ("wan22 on videos", {"validation": {"width": 40}}, r"but wan22 needs multiples of"),
        ("wan22 on videos", {"validation": {"images": ["x.png"]}}, r"uses prompts only"),
        ("wan22 from a first frame", {}, r"validation\.images has 0 files for 1 prompts"),
        (
            "wan22 from a first frame",
            {"validation": {"images": ["missing.png"]}},
            r"'missing\.png' cannot be read",
        ),
        ("qwen_image edits", {}, r"conditioning_data_dir is missing, but this qwen_image edits"),
        ("flux", {"dataset": {"conditioning_data_dir": "x"}}, r"conditioning_data_dir is 'x', but"),
        ("flux", {"train": {"experts": "high"}}, r"train\.experts is 'high'"),
        ("flux", {"model": {"quantize": "int8"}, "adapter": None}, r"without an adapter"),
    ],
)
def test_settings_that_a_family_does_not_support_are_rejected_by_name(
    case, sections, message, build_run
):
    model, family, kind, _ = CASES[case]
    with pytest.raises(ConfigError, match=message):
        run_training(build_run(model, family, kind, **sections))
