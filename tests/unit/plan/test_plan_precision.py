"""A planned transformer in bf16 runs without autocast."""

import json

import pytest
import torch
from PIL import Image
from torch import nn

from gracetune.config.load import load_run_file
from gracetune.train.run import run_training

PLANNED = {"device_memory": "300MB", "compile": "never"}


@pytest.fixture
def norm_calls(monkeypatch):
    """Input dtype, output dtype and autocast state of every call of a norm without weights."""
    calls = []

    def forward(self, x, *rest):
        result = original_forward(self, x, *rest)
        if not self.elementwise_affine:
            calls.append((x.dtype, result.dtype, torch.is_autocast_enabled("cpu")))
        return result

    original_forward = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", forward)
    return calls


@pytest.fixture
def run_of(miniature, tmp_path):
    def make(family, small, plan, **sections):
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for number in range(3):
            picture = Image.new("RGB", (32, 32), (200, 40 * number, 40))
            picture.save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text("a red ring")
        path = tmp_path / "run.json"
        path.write_text(
            json.dumps(
                {
                    "output_dir": str(tmp_path / "run"),
                    "model": {
                        "family": family,
                        "path": str(miniature(small)),
                        "dtype": "bfloat16",
                    },
                    "adapter": {"rank": 2},
                    "datasets": [
                        {"instance_data_dir": str(folder), "resolution": 32, "max_aspect": 1.0}
                    ],
                    "train": {
                        "max_train_steps": 2,
                        "batch_size": 2,
                        "checkpoint_every": 2,
                        "mixed_precision": "bf16",
                        "check_gradients": False,  # it also computes a block in fp32
                    },
                    "validation": {"every": 2, "prompts": ["a red ring"], "sample_steps": 2},
                    "logging": {"tensorboard": False, "every": 1},
                    "plan": plan,
                }
                | sections
            )
        )
        return load_run_file(path).run

    return make


@pytest.mark.parametrize(("family", "small"), [("flux", "flux"), ("qwen_image", "qwen-image")])
def test_a_planned_bf16_model_runs_without_autocast(family, small, run_of, recorder, norm_calls):
    assert run_training(run_of(family, small, PLANNED), sinks=[recorder]).status == "done"
    assert set(norm_calls) == {(torch.bfloat16, torch.bfloat16, False)}


def test_an_unplanned_model_runs_under_autocast(run_of, recorder, norm_calls):
    assert run_training(run_of("flux", "flux", "off"), sinks=[recorder]).status == "done"
    assert {autocast for _, _, autocast in norm_calls} == {True}


def test_an_adapter_without_cast_copies_runs_under_autocast(run_of, recorder, norm_calls):
    adapter = {"kind": "dora", "rank": 2}
    run = run_of("flux", "flux", PLANNED, adapter=adapter)
    assert run_training(run, sinks=[recorder]).status == "done"
    assert True in {autocast for _, _, autocast in norm_calls}
