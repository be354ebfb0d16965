"""A model with two experts, from the command line to files that other programs load."""

import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from adapter_examples import TABLES
from diffusers import WanPipeline
from PIL import Image
from safetensors import safe_open

from gracetune.adapters.files.io import read_adapter, read_tensors
from gracetune.adapters.files.layers import delta
from gracetune.cli.main import main
from gracetune.config.load import load_run_file
from gracetune.events.run_control import RunControl
from gracetune.models.family import transformers_of
from gracetune.train import checkpoint
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.run import SignalHandler, run_training

STEPS, HALF = 6, 3
PROMPT, SEED, SIZE = "a red ring", 11, 32
FILES = {"high": "high_noise.safetensors", "low": "low_noise.safetensors"}


@pytest.fixture
def settings(miniature):
    def make(kind, **train):
        return {
            "model": {"family": "wan22", "path": str(miniature("wan22-t2v"))},
            "adapter": {"kind": kind, "rank": 2, "alpha": 1, "dropout": 0.1},
            "train": {
                "max_train_steps": STEPS,
                "checkpoint_every": HALF,
                "ema_decay": 0.0,
                "timestep_shift": 5.0,
                **train,
            },
            "optimizer": {"lr": 0.05},
            "validation": {
                "every": STEPS,
                "prompts": [PROMPT],
                "seed": SEED,
                "sample_steps": 4,
                "width": SIZE,
                "height": SIZE,
            },
        }

    return make


@pytest.fixture
def wan_file(run_file, shapes_folder):
    def write(sections):
        path = run_file(**sections)
        settings = json.loads(path.read_text())
        settings["datasets"][0] |= {"resolution": 16, "instance_data_dir": str(shapes_folder)}
        path.write_text(json.dumps(settings))
        return path

    return write


def manifest(folder, step):
    return json.loads((folder / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())


def events(folder, kind):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def generate_image(pipeline):
    picture = pipeline(
        prompt=PROMPT,
        negative_prompt="",
        width=SIZE,
        height=SIZE,
        num_frames=1,
        num_inference_steps=4,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(SEED),
        output_type="np",
    ).frames[0][0]
    return (picture * 255).round()


def predictions(*transformers):
    """Return the prediction of each transformer for the same noise."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 16, 1, 4, 4, generator=generator)
    text = torch.randn(1, 8, 32, generator=generator)
    with torch.no_grad():
        return [
            transformer.eval()(noise, torch.tensor([900.0]), text, return_dict=False)[0]
            for transformer in transformers
        ]


def live_transformer(file, folder):
    """Return the transformer with the weights of the run's last checkpoint."""
    run = load_run_file(file, [f"output_dir={folder}"]).run
    session = build_session(
        run, start_accelerator(run), lambda _: None, RunControl(folder), SignalHandler()
    )
    session.resume(checkpoint.find_snapshot(folder / "checkpoints", "auto", pytest.fail))
    return session.state.family.transformer


def load_into(pipeline, kind, folder):
    """Load adapter files into a pipeline; diffusers cannot read LoKr, so its delta is added."""
    for stage, transformer in (("high", pipeline.transformer), ("low", pipeline.transformer_2)):
        if kind == "lora":
            pipeline.load_lora_weights(
                str(folder), weight_name=FILES[stage], load_into_transformer_2=stage == "low"
            )
            loaded = [n for n, _ in transformer.named_modules() if n.endswith("lora_A")]
            assert len(loaded) == 20
            continue
        adapter = read_adapter(folder / FILES[stage], TABLES)
        assert len(adapter.layers) == 20
        for place, layer in adapter.layers.items():
            weight = transformer.get_submodule(place.module).weight
            weight.data += delta(layer, weight.shape)


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("loha", "lokr"))]
)
def test_exported_files_load_and_resuming_does_not_change_them(
    settings, wan_file, gracetune, tmp_path, kind, miniature
):
    file = wan_file(settings(kind))
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    run_training(load_run_file(file, [f"output_dir={whole}"]).run)
    half = [f"output_dir={torn}", f"train.max_train_steps={HALF}", "validation.every=0"]
    run_training(load_run_file(file, half).run)
    done = gracetune("train", file, "--set", f"output_dir={torn}")
    assert done.returncode == 0, done.stderr
    assert f"resume     from step {HALF} of" in done.stdout

    ours, theirs = manifest(torn, STEPS), manifest(whole, STEPS)
    assert ours["files"] == theirs["files"]
    assert ours["exported"] == theirs["exported"]
    assert list(ours["exported"]) == [f"adapter/{name}" for name in FILES.values()]
    assert ours["progress"] == theirs["progress"]
    assert (ours["progress"]["high_steps"], ours["progress"]["low_steps"]) == (3, 3)
    steps = events(torn, "step_done")
    assert [step["expert"] for step in steps] == ["high", "low"] * 3
    assert sorted(path.name for path in (torn / "adapter").iterdir()) == sorted(FILES.values())
    last = torn / "checkpoints" / f"step-{STEPS:06d}"
    for stage, name in FILES.items():
        about, tensors = read_tensors(torn / "adapter" / name)[::-1]
        exported = (torn / "adapter" / name).read_bytes()
        assert exported == (whole / "adapter" / name).read_bytes()
        assert exported == (last / "adapter" / name).read_bytes()
        assert about["gracetune.stage"] == stage
        assert about["gracetune.boundary"] == "0.875"
        assert about["gracetune.base_model"].startswith("wan22-t2v ")
        assert about["gracetune.run_digest"]
        assert all(key.startswith("diffusion_model.blocks.") for key in tensors)

    pipeline = WanPipeline.from_pretrained(miniature("wan22-t2v"), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    before = predictions(pipeline.transformer, pipeline.transformer_2)
    form = "comfyui" if kind == "loha" else "diffusers"
    words = ["adapter", "convert", last / "weights.safetensors", "--to", form]
    assert main([*map(str, words), "-o", str(tmp_path / "made" / "a.safetensors")]) == 0
    for name in FILES.values():
        (tmp_path / "made" / f"a_{name}").rename(tmp_path / "made" / name)
    load_into(pipeline, kind, tmp_path / "made")
    after = predictions(pipeline.transformer, pipeline.transformer_2)
    live = predictions(*transformers_of(live_transformer(file, torn)).values())
    for plain, loaded, trained in zip(before, after, live, strict=True):
        torch.testing.assert_close(loaded, trained, rtol=1e-4, atol=1e-5)
        assert (trained - plain).abs().max() > 0.01
    sampled = np.asarray(Image.open(torn / "validation" / f"step-{STEPS:06d}" / "000.png"), float)
    assert np.abs(generate_image(pipeline) - sampled).max() <= 1


def test_a_resting_expert_keeps_its_average(settings, wan_file, tmp_path):
    """Averages follow from the saved weights: each expert's own steps only, also after a resume."""
    train = {"ema_decay": 0.8, "switch_every": 2, "gradient_accumulation_steps": 2}
    file = wan_file(settings("lora", checkpoint_every=1, keep_checkpoints=99, **train))
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder, steps in ((whole, STEPS), (torn, HALF), (torn, STEPS)):
        changed = [f"output_dir={folder}", f"train.max_train_steps={steps}", "validation.every=0"]
        run_training(load_run_file(file, changed).run)
    assert manifest(torn, STEPS)["files"] == manifest(whole, STEPS)["files"]

    saved = [
        checkpoint.load_snapshot(whole / "checkpoints" / f"step-{step:06d}").tensors
        for step in range(1, STEPS + 1)
    ]
    experts = [step["expert"] for step in events(whole, "step_done")]
    assert experts == ["high", "high", "low", "low", "high", "high"]
    for number, (before, after) in enumerate(pairwise(saved), start=1):
        expert = experts[number]
        own = experts[:number].count(expert)
        decay = min(0.8, (1 + own) / (10 + own))
        for name, average in after["ema"].items():
            expected = before["ema"][name]
            if name.startswith(f"{expert}."):
                expected = expected.lerp(after["weights"][name], 1 - decay)
            assert torch.equal(average, expected), (number, name)


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_gradient_checkpointing_trains_the_same_adapter(settings, wan_file, tmp_path, kind):
    file = wan_file(settings(kind, max_train_steps=2))
    made = {}
    for recompute in ("false", "true"):
        folder = tmp_path / recompute
        said = [f"output_dir={folder}", f"train.gradient_checkpointing={recompute}"]
        run_training(load_run_file(file, [*said, "validation.every=0"]).run)
        made[recompute] = read_tensors(folder / "adapter" / FILES["low"])[0]
    for key, kept in made["false"].items():
        torch.testing.assert_close(made["true"][key], kept)
    assert any(t.abs().max() > 0 for key, t in up_weights(made["false"]))


def up_weights(tensors):
    """Return the up weights, which start at zero and change only if a gradient reaches them."""
    return [(k, t) for k, t in tensors.items() if k.endswith(("lora_B.weight", "w2_b", "lokr_w2"))]


@pytest.mark.slow
def test_two_ranks_train_the_same_expert_in_each_step(settings, wan_file, tmp_path):
    """In every step one expert has no gradient on any rank, and the ranks still synchronise."""
    file = wan_file(settings("lora", max_train_steps=4))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "gracetune", "train", str(file)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    steps = events(tmp_path / "run", "step_done")
    assert [step["expert"] for step in steps] == ["high", "low"] * 2
    assert {step["samples"] for step in steps} == {8}
    assert sorted(p.name for p in (tmp_path / "run" / "adapter").iterdir()) == sorted(
        FILES.values()
    )


@pytest.mark.parametrize("expert", ["high", "low"])
def test_training_one_expert_does_not_change_the_other(settings, wan_file, tmp_path, expert):
    file = wan_file(settings("lora", experts=expert, max_train_steps=2))
    run_training(load_run_file(file).run)
    folder = tmp_path / "run"
    assert [path.name for path in (folder / "adapter").iterdir()] == [FILES[expert]]
    assert {step["expert"] for step in events(folder, "step_done")} == {expert}
    with safe_open(folder / "checkpoints" / "step-000002" / "weights.safetensors", "pt") as saved:
        assert all(key.startswith(f"{expert}.") for key in saved.keys())  # noqa: SIM118


def test_full_training_of_both_experts_exports_a_pipeline(settings, wan_file, tmp_path, miniature):
    sections = settings("lora", max_train_steps=2) | {"adapter": None}
    run_training(load_run_file(wan_file(sections)).run)
    made = WanPipeline.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    before = WanPipeline.from_pretrained(miniature("wan22-t2v"), local_files_only=True)
    for name in ("transformer", "transformer_2"):
        pairs = zip(
            getattr(made, name).parameters(), getattr(before, name).parameters(), strict=True
        )
        assert any(not torch.equal(ours, theirs) for ours, theirs in pairs)
