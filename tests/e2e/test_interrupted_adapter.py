"""The adapter of a run that was interrupted at a random step has the output of the trained model.

tests/hosts/test_comfyui.py loads it with ComfyUI's functions.
"""

import copy
from pathlib import Path

import pytest
from adapter_tools import MAX_ERROR, interruptible_run, predict, train_until_interrupted
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from gracetune.models.pipeline_folder import without_progress_bars
from gracetune.train.checkpoint import saved_adapters


@pytest.mark.parametrize(
    ("family", "model"),
    [("sd3", "sd35-medium"), pytest.param("flux", "flux", marks=pytest.mark.slow)],
)
def test_diffusers_loads_the_adapter_of_an_interrupted_run(
    family, model, miniature, tiny_run_in, tmp_path
):
    run = tiny_run_in(tmp_path, **interruptible_run(family, miniature(model), tmp_path))
    step, trained = train_until_interrupted(run)
    saved = saved_adapters(Path(run.output_dir))
    assert max(saved) == step
    checkpoint = Path(run.output_dir) / "checkpoints" / f"step-{step:06d}" / "adapter"

    with without_progress_bars():
        pipeline = DiffusionPipeline.from_pretrained(miniature(model), local_files_only=True)
    plain = predict(family, copy.deepcopy(pipeline.transformer))
    expected = predict(family, trained)
    effect = float((expected - plain).norm())
    assert effect > 1e-3 * float(plain.norm()), "training had no effect"
    (file,) = saved[step].glob("*.safetensors")
    assert load_file(file).keys() == load_file(next(checkpoint.iterdir())).keys()
    pipeline.load_lora_weights(saved[step])
    error = float((predict(family, pipeline.transformer) - expected).norm())
    assert error <= MAX_ERROR * effect, (step, error, effect)
