"""Every family trains, samples and resumes on a GPU in bf16."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.config.load import load_run_file
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu
COLOURS = [(200, 40, 40), (40, 200, 40), (40, 40, 200)]
CASES = {
    "wan22": ("wan22-t2v", "wan22", {}),
    "wan22 with LoKr": ("wan22-t2v", "wan22", {"adapter": {"kind": "lokr", "rank": 2}}),
    "flux": ("flux", "flux", {}),
    "qwen_image": ("qwen-image", "qwen_image", {}),
}


@pytest.fixture
def image_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (32, 32), colour).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red ring")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_family_trains_samples_and_resumes_on_a_gpu(
    case, image_folder, miniature, recorder, tmp_path
):
    miniature_name, family, sections = CASES[case]
    settings = {
        "output_dir": str(tmp_path / "run"),
        "model": {"family": family, "path": str(miniature(miniature_name)), "dtype": "bfloat16"},
        "adapter": {"rank": 2},
        "datasets": [{"instance_data_dir": str(image_folder), "resolution": 32, "max_aspect": 1.0}],
        "train": {"max_train_steps": 2, "batch_size": 2, "checkpoint_every": 2},
        "logging": {"tensorboard": False, "every": 1},
        "validation": {"every": 2, "prompts": ["a red ring"], "sample_steps": 2, "holdout": 0.3},
        **sections,
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(settings))
    for steps in (2, 4):
        run = load_run_file(path, [f"train.max_train_steps={steps}"]).run
        assert run_training(run, sinks=[recorder]).status == "done"
    losses = [event.loss for event in recorder.events if type(event).__name__ == "StepDone"]
    assert len(losses) == 4
    assert all(np.isfinite(losses))
    assert (tmp_path / "run" / "validation" / "step-000004.png").is_file()
    assert torch.cuda.max_memory_allocated() > 0
