"""SD 1.5 and SDXL are trained on their scheduler's timesteps, and sampled as by their pipelines."""

import json

import diffusers
import pytest
import torch
from adapter_examples import TABLES
from fakes.miniatures import write_miniature
from safetensors.torch import load_file, save_file

from gracetune.config.schema import ModelSection
from gracetune.errors import ModelError
from gracetune.models.family import SampleRequest, load_family
from gracetune.models.pipeline_folder import read_scheduler, without_progress_bars
from gracetune.train import objective

PROMPT = "a red ring on the box"
FAMILIES = {"sd15": "sd15", "sdxl": "sdxl", "sdxl-v": "sdxl"}
"""Miniature -> family that reads it."""


def load(name, folder, **section):
    return load_family(ModelSection(family=FAMILIES[name], path=str(folder), **section))


@pytest.mark.parametrize("name", FAMILIES)
def test_noise_and_target_of_every_timestep_are_the_schedulers(name, miniature):
    family = load(name, miniature(name))
    config = read_scheduler(miniature(name)).config
    table = diffusers.DDPMScheduler.from_config(config)
    numbers = torch.arange(1000)
    x0, noise = torch.randn(2, 1000, 1, generator=torch.Generator().manual_seed(0))
    noisy = objective.add_noise(x0, noise, family.noise_schedule, family.prediction)
    torch.testing.assert_close(noisy, table.add_noise(x0, noise, numbers), rtol=0, atol=2e-3)
    torch.testing.assert_close(noisy[:-1], table.add_noise(x0, noise, numbers)[:-1])
    target = objective.target(x0, noise, family.noise_schedule, family.prediction)
    expected = table.get_velocity(x0, noise, numbers) if name == "sdxl-v" else noise
    torch.testing.assert_close(target[:-1], expected[:-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_unet_gets_the_number_of_each_timestep(name, miniature):
    family = load(name, miniature(name))
    seen = []

    def record(**arguments):
        seen.append(arguments["timestep"])
        return (arguments["sample"],)

    text = family.stack_text(family.encode_text([""]) * 1000)
    family.predict(record, torch.zeros(1000, 4, 8, 8), family.noise_schedule, text)
    assert torch.equal(seen[0], torch.arange(1000.0))


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_with_guidance_are_those_of_the_pipeline(name, miniature):
    """SDXL takes zeros for classifier-free guidance, SD 1.5 the empty prompt."""
    family = load(name, miniature(name))
    text, empty = family.encode_text([PROMPT, ""])
    with torch.no_grad(), without_progress_bars():
        (ours,) = family.sample(SampleRequest([text], empty, (32, 48), 3, 3, 4.0))
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            miniature(name), local_files_only=True
        )
        pipeline.set_progress_bar_config(disable=True)
        theirs = pipeline(
            PROMPT,
            width=32,
            height=48,
            num_inference_steps=3,
            guidance_scale=4.0,
            generator=torch.Generator().manual_seed(3),
            output_type="pt",
        ).images[0]
    torch.testing.assert_close(ours.data, theirs * 2 - 1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_single_file_in_original_names_replaces_the_unet(name, prefix, miniature, tmp_path):
    other = write_miniature(name, tmp_path / "other", seed=5)
    state = load_file(other / "unet" / "diffusion_pytorch_model.safetensors")
    original = {
        f"{prefix}{theirs}.{kind}": state[f"{ours}.{kind}"]
        for theirs, ours in TABLES[name].rows
        for kind in ("weight", "bias")
        if f"{ours}.{kind}" in state
    }
    assert len(original) == len(state)
    if prefix:  # as in a file with the whole model
        original["first_stage_model.quant_conv.bias"] = torch.zeros(8)
    save_file(original, tmp_path / "model.safetensors")
    family = load(name, miniature(name), transformer_file=str(tmp_path / "model.safetensors"))
    assert family.weights_hasher()() == load(name, other).weights_hasher()()


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("scheduler/scheduler_config.json", {"prediction_type": "sample"}, "prediction_type 'samp"),
        ("unet/config.json", {"addition_embed_type": "text"}, "takes more conditions"),
        ("unet/config.json", {"time_cond_proj_dim": 8}, "an embedding of the guidance scale"),
        ("unet/config.json", {"_class_name": "UNet2DModel"}, "but the transformer of sd15 is a"),
        ("model_index.json", {"_class_name": "StableDiffusionXLPipeline"}, "sd15 reads StableDif"),
        (
            "model_index.json",
            {"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]},
            r"no table of discrete timesteps \(alphas_cumprod\)",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(file, changes, message, tmp_path):
    folder = write_miniature("sd15", tmp_path / "model")
    change_json(folder / file, **changes)
    if "scheduler" in changes:
        (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    with pytest.raises(ModelError, match=message):
        load("sd15", folder)
