"""Compare the training quality of fp8 and the fused LoRA with bf16 and peft's LoRA.

A Wan-shaped transformer with 210 M parameters is trained on the demo's shapes from scratch.
Adapters are then trained on stars in two settings: `few` is typical, with few images, small batches
and a constant learning rate; `many` has four times the images, eight times the batch size and a
decaying rate, so that seeds hardly differ. Each is run with three seeds and the same initial
weights, batches, sigmas and noise, in three precisions:

    bf16    gracetune: fp32 LoRA weights, fused matmuls in bf16
    fp8     the same with `model.frozen_compute: fp8`, calibrated with the last training images
    plain   peft's own fp32 LoRA under bf16 autocast

Pass criteria, fixed before anything was measured (`few` was added when two seeds of `many` were
known to end 0.1 % apart):

    curves      The mean final held-out loss of three seeds in fp8 lies between the smallest and the
                largest of three in bf16; the same for bf16 among three plain ones; in both
                settings. Each model is validated as it was trained. An adapter from fp8 is also
                evaluated with bf16 weights, as it would be used.
    gradients   For one batch and for every block, the gradient of the adapter (as one vector) and
                that of the block's input have a cosine of at least 0.98 between fp8 and bf16, with
                an untrained and with a trained adapter. The same for eight blocks of Wan 14B's
                shape with random weights. Cosines of bf16 with fp32 are recorded for comparison.
    demo        The `curves` criterion for `examples/demo-lora.json`.

    PYTHONPATH=src:benchmarks python benchmarks/lora_quality.py [--demo FOLDER] [--out FOLDER]
        [--commit NAME] [--only adapters,random_blocks,demo] [--rehearse]

`--demo` is the model that `make demo` trains (runs/demo/model). `--rehearse` runs every part with a
small model, also on a CPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import results
import torch
from gradient_cosine import compare_gradients
from lora_quality_training import (
    TRAIN,
    GradientStep,
    Images,
    Precision,
    Shape,
    TrainSettings,
    build_variant,
    copy_adapter,
    draw_images,
    held_out_inputs,
    held_out_loss,
    load_adapter,
    make_inputs,
    make_model,
    reset_adapter,
    train,
)

from gracetune.config.schema import OptimizerSection
from gracetune.train.timesteps import sample_timesteps
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_quality_training import ModelInputs
    from torch import Tensor, nn

SEEDS = (0, 1, 2)
MIN_COSINE = 0.98
DRAWS_PER_IMAGE = 4
"""Number of sigmas at which each held-out image is evaluated."""
GRADIENT_BATCH = 64
CALIBRATION_IMAGES = 64
"""Number of images for the calibration of fp8: as many as in a run."""
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8", "plain", "fp32")
DEMO_STEPS = 500
PARTS = ("adapters", "random_blocks", "demo")


@dataclass(frozen=True)
class AdapterTask:
    """The training of an adapter on stars."""

    copies: int
    """Number of training images of each combination of colour and background."""
    settings: TrainSettings


@dataclass(frozen=True)
class Experiment:
    """Sizes and settings of the whole benchmark."""

    shape: Shape
    random: Shape
    """Shape of the blocks with random weights."""
    cells: int
    """Height and width of the latents for the blocks with random weights."""
    text_length: int
    pixels: int
    copies: int
    """Number of training images of each combination of colour, shape and background."""
    held_copies: int
    pretraining: TrainSettings
    tasks: Mapping[str, AdapterTask]
    rank: int
    demo_steps: int


FULL = Experiment(
    shape=Shape(layers=12, heads=8, ffn=4096, channels=48, text=64),
    random=Shape(layers=8, heads=40, ffn=13824, channels=16, text=4096),
    cells=128,
    text_length=512,
    pixels=64,
    copies=48,
    held_copies=8,
    pretraining=TrainSettings(
        steps=1500,
        batch=96,
        every=500,
        optimizer=OptimizerSection(lr=3e-4, betas=(0.9, 0.99), schedule="cosine", warmup_steps=100),
    ),
    tasks={
        "few": AdapterTask(
            12, TrainSettings(300, 8, 50, OptimizerSection(lr=3e-4, warmup_steps=20))
        ),
        "many": AdapterTask(
            48,
            TrainSettings(
                steps=300,
                batch=64,
                every=50,
                optimizer=OptimizerSection(
                    lr=5e-4, betas=(0.9, 0.99), schedule="cosine", warmup_steps=20
                ),
            ),
        ),
    },
    rank=16,
    demo_steps=DEMO_STEPS,
)
REHEARSAL = Experiment(
    shape=Shape(layers=2, heads=1, ffn=256, channels=48, text=64),
    random=Shape(layers=2, heads=1, ffn=256, channels=16, text=64),
    cells=8,
    text_length=16,
    pixels=16,
    copies=1,
    held_copies=1,
    pretraining=TrainSettings(4, 8, 2, OptimizerSection(lr=3e-4)),
    tasks={"few": AdapterTask(1, TrainSettings(4, 8, 2, OptimizerSection(lr=3e-4)))},
    rank=4,
    demo_steps=25,
)


def main() -> int:
    """Run the selected parts; the results are written after each part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", type=Path, help="folder of the demo's model")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run (default: all)")
    arguments = results.parse_arguments(parser)
    parts = set(arguments.only.split(","))
    if arguments.demo is None:
        parts.discard("demo")
        print("the part demo is skipped: it needs --demo")
    if not parts or parts - set(PARTS):
        parser.error(f"--only takes some of {', '.join(PARTS)}, and the demo needs --demo")
    if not torch.cuda.is_available() and not arguments.rehearse:
        print("a GPU with fp8 support is needed, or --rehearse")
        return 2
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    size = REHEARSAL if arguments.rehearse else FULL
    figures = results.read(
        "lora_quality", arguments.out
    )  # keeps the figures of parts that do not run now
    start = time.perf_counter()

    def done(part: str) -> None:
        figures[f"{part}_done_at_s"] = time.perf_counter() - start
        figures[f"{part}_commit"] = arguments.commit or results.this_commit()
        results.write("lora_quality", figures, arguments.out, arguments.commit)
        print(f"[{time.perf_counter() - start:.0f} s] {part}", flush=True)

    demos = start_demos(arguments.demo, size.demo_steps) if "demo" in parts else {}
    tasks = size.tasks if "adapters" in parts else {}
    if tasks:
        weights = pretrain(figures, size, device)
        done("scratch")
        for name, task in tasks.items():
            compare_precisions(figures, size, build_variants(size, weights), name, task)
            done(f"adapters.{name}")
        del weights
    if "random_blocks" in parts:
        random_blocks(figures, size, device)
        done("random_blocks")
    if demos:
        collect_demos(figures, demos)
        done("demo")
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    met = check_rules(figures, tasks)
    done("rules")
    return 0 if met or arguments.rehearse else 1


def pretrain(
    figures: dict[str, object], size: Experiment, device: torch.device
) -> dict[str, Tensor]:
    """Train the model from scratch and return its weights."""
    images = draw_images(None, size.pixels, range(size.copies), device)
    last = range(size.copies, size.copies + size.held_copies)
    held = held_out_inputs(draw_images(None, size.pixels, last, device), 1)
    model = make_model(size.shape, device)
    figures["parameters"] = sum(p.numel() for p in model.parameters())
    backward = GradientStep(model, images, size.pretraining.batch, autocast=True)
    curve = train(backward, lambda: held_out_loss(model, held, True), size.pretraining, seed=0)
    figures["scratch_held_out"] = json.dumps(curve)
    print("from scratch:", curve, flush=True)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def build_variants(size: Experiment, weights: Mapping[str, Tensor]) -> dict[Precision, nn.Module]:
    """Build the model in each precision.

    The models are built again for each setting, because a model cannot be captured twice as a CUDA
    graph. The calibration images are the same in both settings.
    """
    device = next(iter(weights.values())).device
    fewest = min(task.copies for task in size.tasks.values())
    stars = draw_images("star", size.pixels, range(fewest), device)
    last = stars.at(slice(-CALIBRATION_IMAGES, None))
    generator = torch.Generator(device).manual_seed(1)
    sigmas = sample_timesteps(TRAIN, len(last.latents), generator)
    noise = torch.randn(last.latents.shape, generator=generator, device=device)
    calibration = make_inputs(last, sigmas, noise)
    return {
        precision: build_variant(size.shape, weights, precision, size.rank, calibration)
        for precision in PRECISIONS
    }


def compare_precisions(
    figures: dict[str, object],
    size: Experiment,
    models_by_precision: Mapping[Precision, nn.Module],
    name: str,
    task: AdapterTask,
) -> None:
    """Record held-out losses of all precisions and seeds, then the gradient cosines."""
    device = next(models_by_precision["bf16"].parameters()).device
    stars = draw_images("star", size.pixels, range(task.copies), device)
    last = range(task.copies, task.copies + size.held_copies)
    held = held_out_inputs(draw_images("star", size.pixels, last, device), DRAWS_PER_IMAGE)

    def train_seeds(precision: Precision) -> dict[int, dict[str, Tensor]]:
        return train_adapters(
            figures, name, precision, models_by_precision[precision], stars, held, task.settings
        )

    trained = train_seeds("bf16")
    for seed, adapter in train_seeds("fp8").items():
        load_adapter(models_by_precision["bf16"], adapter)
        figures[f"{name}.used_in_bf16.fp8.{seed}"] = held_out_loss(
            models_by_precision["bf16"], held, autocast=False
        )
    train_seeds("plain")
    inputs = gradient_inputs(stars, min(GRADIENT_BATCH, len(stars.latents)))
    models = {precision: models_by_precision[precision] for precision in ("bf16", "fp8", "fp32")}
    for model in models.values():
        reset_adapter(model, SEEDS[0])
    compare_gradients(figures, f"{name}.cosine.fresh", models, inputs)
    for model in models.values():
        load_adapter(model, trained[SEEDS[0]])
    compare_gradients(figures, f"{name}.cosine.trained", models, inputs)


def train_adapters(
    figures: dict[str, object],
    name: str,
    precision: Precision,
    model: nn.Module,
    stars: Images,
    held: ModelInputs,
    settings: TrainSettings,
) -> dict[int, dict[str, Tensor]]:
    """Train an adapter for each seed, record its held-out losses, and return the adapters."""
    start = time.perf_counter()
    autocast = precision == "plain"
    backward = GradientStep(model, stars, settings.batch, autocast)
    made = {}
    for seed in SEEDS:
        reset_adapter(model, seed)
        curve = train(backward, lambda: held_out_loss(model, held, autocast), settings, seed)
        made[seed] = copy_adapter(model)
        figures[f"{name}.held_out.{precision}.{seed}"] = json.dumps(curve)
        figures[f"{name}.final.{precision}.{seed}"] = curve[settings.steps]
        print(
            f"{name}, {precision}, seed {seed}: {curve[0]:.5f} -> {curve[settings.steps]:.6f}",
            flush=True,
        )
    figures[f"{name}.took_s.{precision}"] = time.perf_counter() - start
    return made


def gradient_inputs(images: Images, count: int) -> ModelInputs:
    """Return the batch for comparing gradients: evenly spread sigmas, noise from a fixed seed."""
    chosen = images.at(slice(None, count))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(chosen.latents.shape, generator=generator).to(chosen.latents)
    sigmas = (torch.randperm(count, generator=generator) + 0.5) / count
    return make_inputs(chosen, sigmas.to(noise), noise)


def random_blocks(figures: dict[str, object], size: Experiment, device: torch.device) -> None:
    """Compare gradients of blocks of Wan 14B's shape with random weights and a nonzero adapter."""
    shape, rank = size.random, 2 * size.rank
    weights = {n: t.detach() for n, t in make_model(shape, device).state_dict().items()}
    generator = torch.Generator(device).manual_seed(0)

    def noise(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator, device=device)

    images = Images(
        noise(1, shape.channels, 1, size.cells, size.cells), noise(1, size.text_length, shape.text)
    )
    half = torch.full((1,), 0.5, device=device)
    inputs = make_inputs(images, half, noise(*images.latents.shape))
    calibration = make_inputs(images, half, noise(*images.latents.shape))
    models = {
        precision: build_variant(shape, weights, precision, rank, calibration)
        for precision in ("bf16", "fp8", "fp32")
    }
    with torch.no_grad():
        for model in models.values():
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
    compare_gradients(figures, "random_14b.cosine", models, inputs)


def start_demos(model: Path, steps: int) -> dict[tuple[str, int], subprocess.Popen[str]]:
    """Start a demo_curve.py process for each precision and seed; such small models share a GPU."""
    command = [sys.executable, Path(__file__).with_name("demo_curve.py"), model]
    return {
        (compute, seed): subprocess.Popen(
            results.dying_with_parent(
                [*command, "--seed", f"{seed}", "--compute", compute, "--steps", f"{steps}"]
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for compute in ("bf16", "fp8")
        for seed in SEEDS
    }


def collect_demos(
    figures: dict[str, object], demos: Mapping[tuple[str, int], subprocess.Popen[str]]
) -> None:
    """Record the demos' held-out losses and fp8 notices, or the last error line of a failure."""
    for (compute, seed), process in demos.items():
        out, err = process.communicate()
        if process.returncode:
            figures[f"demo_failed.{compute}.{seed}"] = err.strip().splitlines()[-1]
            print(f"demo, {compute}, seed {seed}: {err.strip()[-2000:]}", flush=True)
            continue
        made = json.loads(out.splitlines()[-1])
        curve = {int(step): loss for step, loss in made["curve"].items()}
        figures[f"demo_held_out.{compute}.{seed}"] = json.dumps(curve)
        figures[f"demo_final.{compute}.{seed}"] = curve[max(curve)]
        figures[f"demo_told.{compute}"] = " | ".join(made["told"])
        print(f"demo, {compute}, seed {seed}: {curve[0]:.5f} -> {curve[max(curve)]:.6f}")


def check_rules(figures: dict[str, object], tasks: Iterable[str]) -> bool:
    """Print each criterion with its result; return True if all are met."""
    met = []
    for name in tasks:
        final = f"{name}.final"
        met.append(
            check_mean_in_range(figures, f"{name}: fp8 among bf16", f"{final}.fp8", f"{final}.bf16")
        )
        met.append(
            check_mean_in_range(
                figures, f"{name}: ours among plain", f"{final}.bf16", f"{final}.plain"
            )
        )
    if any(name.startswith("demo_") for name in figures):
        met.append(check_mean_in_range(figures, "demo", "demo_final.fp8", "demo_final.bf16"))
    for name in [name for name in figures if name.endswith("fp8_bf16_least")]:
        value = figures[name]
        met.append(isinstance(value, float) and value >= MIN_COSINE)
        print_rule(met[-1], f"{name}: {value:.5f} (at least {MIN_COSINE})")
    return all(met)


def check_mean_in_range(figures: dict[str, object], rule: str, one: str, other: str) -> bool:
    """Return True if the mean final loss of one precision lies in the range of another's seeds."""
    names = [f"{precision}.{seed}" for precision in (one, other) for seed in SEEDS]
    values = {name: figures[name] for name in names if isinstance(figures.get(name), float)}
    if len(values) < len(names):
        print_rule(False, f"{rule}: not measured")
        return False
    tested, reference = (
        [values[f"{precision}.{seed}"] for seed in SEEDS] for precision in (one, other)
    )
    holds = min(reference) <= mean(tested) <= max(reference)
    figures[f"rule.{rule}"] = holds
    print_rule(
        holds, f"{rule}: {mean(tested):.6f} within {min(reference):.6f} to {max(reference):.6f}"
    )
    return holds


def print_rule(holds: bool, text: str) -> None:
    """Print one criterion."""
    print(f"{'met   ' if holds else 'MISSED'} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
