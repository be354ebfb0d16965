"""The plug-in in a real clone of ai-toolkit, run by `make test-ai-toolkit`.

Trainer, datasets, Wan 2.2 with two experts, network and saving are ai-toolkit's own. Three things
are replaced: its other models are not imported, because some need a GPU or another diffusers; the
tokenizer is a small one that its loader cannot read; and the VAE is the miniature's, where
ai-toolkit would download one.
"""

import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("albumentations", reason="make test-ai-toolkit runs it in its environment")

import numpy as np
import torch
from fakes.miniatures import write_miniature
from PIL import Image
from safetensors.torch import load_file

from gracetune.hosts.ai_toolkit.clone import check, install, uninstall

CLONE = Path(
    os.environ.get("AI_TOOLKIT", Path(__file__).parents[2] / ".hosts" / "ai-toolkit")
).resolve()
pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not (CLONE / "toolkit" / "extension.py").is_file(),
        reason=f"there is no clone of ai-toolkit in {CLONE.name}",
    ),
]
FLIP = {"method": "HorizontalFlip", "params": {"p": 0.5}}
LIGHT = {"method": "RandomBrightnessContrast", "params": {"p": 1.0}}
BOUNDS = {
    "high_noise_lr_bump": 1e-6,
    "low_noise_lr_bump": 5e-7,
    "high_noise_max_lr": 1e-3,
    "low_noise_max_lr": 5e-4,
}


def status():
    words = ["git", "-C", str(CLONE), "status", "--porcelain", "--ignored"]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [line for line in output.splitlines() if "__pycache__" not in line]


@pytest.fixture(scope="module")
def run_job():
    """Return a function that runs a job as ai-toolkit does, with our extension installed."""
    before = status()
    install(CLONE)
    sys.path.insert(0, str(CLONE))
    models = ModuleType("extensions_built_in.diffusion_models")
    models.__path__ = [str(CLONE / "extensions_built_in" / "diffusion_models")]
    sys.modules[models.__name__] = models
    from extensions_built_in.diffusion_models.wan22.wan22_14b_model import Wan2214bModel
    from toolkit.models.wan21 import wan21
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

    def get_umt5_encoder(model_path, tokenizer_subfolder, encoder_subfolder, torch_dtype, **_):
        return (
            PreTrainedTokenizerFast.from_pretrained(model_path, subfolder=tokenizer_subfolder),
            UMT5EncoderModel.from_pretrained(
                model_path, subfolder=encoder_subfolder, torch_dtype=torch_dtype
            ),
        )

    wan21.get_umt5_encoder = get_umt5_encoder
    Wan2214bModel._wan_vae_path = None
    models.AI_TOOLKIT_MODELS = [Wan2214bModel]
    from toolkit.job import get_job

    def run(config):
        job = get_job(config)
        job.run()
        return job.process[0]

    yield run
    uninstall(CLONE)
    assert status() == before


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_miniature("wan22-t2v", tmp_path_factory.mktemp("model"))


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("a red ring")
    return folder


def config(model, images, output, *, dataset=None, train=None, **process):
    given = {
        "type": "sd_trainer",
        "training_folder": str(output),
        "training_seed": 7,
        "device": "cpu",
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "save": {"dtype": "float32", "save_every": 100, "max_step_saves_to_keep": 2},
        "datasets": [
            {
                "folder_path": str(images),
                "caption_ext": "txt",
                "resolution": [64],
                "cache_latents_to_disk": True,
                "num_workers": 0,
                **(dataset or {}),
            }
        ],
        "train": {
            "steps": 4,
            "batch_size": 1,
            "optimizer": "adamw",
            "lr": 1e-4,
            "dtype": "float32",
            "noise_scheduler": "flowmatch",
            "timestep_type": "sigmoid",
            "switch_boundary_every": 1,
            "disable_sampling": True,
            "cache_text_embeddings": True,
            "gradient_checkpointing": False,
            **(train or {}),
        },
        "model": {"name_or_path": str(model), "arch": "wan22_14b", "quantize": False},
        "sample": {"sample_every": 1000, "prompts": []},
        **process,
    }
    inner = OrderedDict(name="tiny", process=[OrderedDict(given)])
    return OrderedDict(job="extension", config=inner)


def adapters(output):
    return {
        part: load_file(output / "tiny" / f"tiny_{part}_noise.safetensors")
        for part in ("high", "low")
    }


def test_every_symbol_fits():
    assert "symbols fit" in check(CLONE)[-1]


def test_disabled_it_trains_the_same_weights_as_stock(run_job, model, images, tmp_path):
    # Encoding and training share a random generator, so each run must encode its own latents.
    twin = shutil.copytree(images, tmp_path / "twin")
    run_job(config(model, twin, tmp_path / "stock"))
    off = {"stage_timesteps": False, "check_saves": False}
    ours = run_job(config(model, images, tmp_path / "ours", gracetune=off))
    assert ours.gracetune_blocks is not None
    before, after = adapters(tmp_path / "stock"), adapters(tmp_path / "ours")
    for part, tensors in before.items():
        assert len(tensors) == 40
        for key, value in tensors.items():
            assert torch.equal(value, after[part][key]), (part, key)


def test_all_features_train_save_and_resume(run_job, model, images, tmp_path, capfd, monkeypatch):
    from toolkit.data_loader import AiToolkitDataset

    timesteps, reads = [], []
    original = AiToolkitDataset._get_single_item

    def read(self, index):
        found = original(self, index)
        reads.append((found.path, found.get_latent().clone()))
        return found

    monkeypatch.setattr(AiToolkitDataset, "_get_single_item", read)

    def run_watched(given):
        from extensions_built_in.sd_trainer.SDTrainer import SDTrainer

        inner = SDTrainer.process_general_training_batch

        def draw(self, batch):
            processed = inner(self, batch)
            timesteps.append((self.current_boundary_index, float(processed[2].max())))
            return processed

        with monkeypatch.context() as patch:
            patch.setattr(SDTrainer, "process_general_training_batch", draw)
            return run_job(given)

    dataset = {
        "in_memory": {"compression": "none"},
        "augmentations_cache_mode": "refresh_each_epoch",
        "augmentations": [FLIP, LIGHT],
    }
    block = {
        "cache_config": {"host_budget_gb": 1},
        "gh200_optimizations": {"enable_uvm_hints": True},
    }
    train = {"optimizer": "automagic", "lr": 1e-5, "optimizer_params": BOUNDS, "steps": 8}
    given = config(model, images, tmp_path / "out", dataset=dataset, train=train, gracetune=block)
    process = run_watched(given)
    output = capfd.readouterr().out
    assert "staged 6 files" in output
    assert "prefer_cpu_residency is unsupported" in output or torch.cuda.is_available()
    assert output.count("holds 20 modules. diffusers: 20 of 20 modules") == 2
    high, low = process.optimizer.param_groups
    assert (high["stage"], high["max_lr"], high["lr_bump"]) == ("high", 1e-3, 1e-6)
    assert (low["stage"], low["max_lr"], low["lr_bump"]) == ("low", 5e-4, 5e-7)
    assert {stage for stage, _ in timesteps} == {0, 1}
    assert all((at > 875) == (stage == 0) for stage, at in timesteps), timesteps
    # After two epochs the first latents are deleted; the second may still be read.
    assert len(list((images / "_latent_cache").iterdir())) == 6
    latents = [latent for path, latent in reads if path.endswith("0.png")]
    assert len(latents) > 1
    assert any(not torch.equal(latents[0], other) for other in latents[1:])

    # Persistent workers must follow the augmentation epochs of this process.
    given["config"]["process"][0]["datasets"][0]["num_workers"] = 1
    given["config"]["process"][0]["train"]["steps"] = 14
    again = run_watched(given)
    output = capfd.readouterr().out
    assert "RESUMING FROM" in output
    assert "Failed to load optimizer" not in output
    assert again.start_step == 8
    counts = [int(state["step"]) for state in again.optimizer.state.values()]
    assert sum(counts) == 14 * 20 * 2, "two matrices per module, stepped with their own expert"


def test_an_unknown_key_stops_the_job(run_job, model, images, tmp_path):
    from gracetune.errors import ConfigError

    with pytest.raises(ConfigError, match="Did you mean check_saves"):
        run_job(config(model, images, tmp_path / "out", gracetune={"chek_saves": True}))
