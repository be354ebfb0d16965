"""What rounding costs: adapters trained beside frozen products in bf16 and fp8, and plainly.

A Wan-shaped transformer of 210 M parameters learns the demo's shapes from nothing; adapters are
then taught stars in two courses. `few` is how adapters usually are taught: few pictures, small
batches, a constant rate. `many` has four times the pictures, eight times the batch and a rate that
falls, which leaves seeds hardly a difference. Three seeds each way, with equal beginnings, batches,
levels and noise:

    bf16    ours: fp32 LoRA weights as masters, products in bf16, fused
    fp8     the same with `model.frozen_compute: fp8`: frozen products rounded, forward and back,
            main directions of their inputs found by the last pictures that are trained on
    plain   peft's own fp32 LoRA under bf16 autocast

Rules, fixed before anything was measured; `few` was added when two seeds of `many` were known to
end 0.1 % apart:

    curves      The mean final held-out loss of three seeds in fp8 lies between the least and the
                greatest of three in bf16; the same for bf16 (ours) among three plain ones. In both
                courses. Each is validated as it was trained. An adapter from fp8 is also looked at
                beside weights in bf16, as it would be used.
    gradients   Of one batch, in whole steps through all blocks, with a fresh adapter and with a
                trained one: for every block, the adapter's gradients (as one vector) and the
                gradient that leaves the block for the one before it have a cosine of at least 0.98
                between fp8 and bf16. The same for eight blocks of Wan 14B's shape with random
                weights. How far bf16 itself is from fp32 is given beside it.
    demo        The curves' rule for `examples/demo-lora.json` with another seed and fp8.

    PYTHONPATH=src:benchmarks python benchmarks/lora_quality.py [--demo FOLDER] [--out FOLDER]
        [--commit NAME] [--only adapters,random_blocks,demo] [--rehearse]

`--demo` names the model that `make demo` has trained (runs/demo/model). `--rehearse` takes every
path with a small model, on a CPU too; its figures mean nothing.
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
from shapes_wan import (
    TRAIN,
    Backward,
    Course,
    Pictures,
    Shape,
    Way,
    adapter_of,
    ask,
    draw_pictures,
    give_adapter,
    held_out_loss,
    held_out_question,
    make_arm,
    make_model,
    restart,
    train,
)

from gracetune.config.schema import OptimizerSection
from gracetune.train.timesteps import sample_timesteps
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shapes_wan import Asked
    from torch import Tensor, nn

SEEDS = (0, 1, 2)
LEAST_COSINE = 0.98
DRAWS = 4
"""Levels at which each held-out picture is measured."""
GRADIENT_BATCH = 64
SHOWN = 64
"""Pictures by which main directions are found: as many as a run takes."""
WAYS: tuple[Way, ...] = ("bf16", "fp8", "plain", "fp32")
DEMO_STEPS = 500
PARTS = ("adapters", "random_blocks", "demo")


@dataclass(frozen=True)
class Lesson:
    """How adapters are taught."""

    copies: int
    """Of each combination of colour and background, all of them stars."""
    course: Course


@dataclass(frozen=True)
class Size:
    """Everything that a rehearsal makes smaller."""

    shape: Shape
    random: Shape
    """The blocks with random weights."""
    cells: int
    """Edge of what those look at."""
    text_length: int
    pixels: int
    copies: int
    """Of each combination of colour, shape and background."""
    held_copies: int
    scratch: Course
    lessons: Mapping[str, Lesson]
    rank: int
    demo_steps: int


WHOLE = Size(
    shape=Shape(layers=12, heads=8, ffn=4096, channels=48, text=64),
    random=Shape(layers=8, heads=40, ffn=13824, channels=16, text=4096),
    cells=128,
    text_length=512,
    pixels=64,
    copies=48,
    held_copies=8,
    scratch=Course(
        steps=1500,
        batch=96,
        every=500,
        optimizer=OptimizerSection(lr=3e-4, betas=(0.9, 0.99), schedule="cosine", warmup_steps=100),
    ),
    lessons={
        "few": Lesson(12, Course(300, 8, 50, OptimizerSection(lr=3e-4, warmup_steps=20))),
        "many": Lesson(
            48,
            Course(
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
SMALL = Size(
    shape=Shape(layers=2, heads=1, ffn=256, channels=48, text=64),
    random=Shape(layers=2, heads=1, ffn=256, channels=16, text=64),
    cells=8,
    text_length=16,
    pixels=16,
    copies=1,
    held_copies=1,
    scratch=Course(4, 8, 2, OptimizerSection(lr=3e-4)),
    lessons={"few": Lesson(1, Course(4, 8, 2, OptimizerSection(lr=3e-4)))},
    rank=4,
    demo_steps=25,
)


def main() -> int:
    """Measure, print, write; what is done is written even where the rest fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", type=Path, help="the folder of the demo's model")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--only", default=",".join(PARTS), help="the parts to run, of all of these")
    parser.add_argument("--rehearse", action="store_true", help="every path, small")
    arguments = parser.parse_args()
    parts = set(arguments.only.split(","))
    if arguments.demo is None:
        parts.discard("demo")
    if not parts or parts - set(PARTS):
        parser.error(f"--only takes some of {', '.join(PARTS)}, and the demo needs --demo")
    if not torch.cuda.is_available() and not arguments.rehearse:
        print("a GPU with fp8 products is needed, or --rehearse")
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SMALL if arguments.rehearse else WHOLE
    figures = results.read("lora_quality", arguments.out)  # of parts that do not run now
    began = time.perf_counter()

    def done(part: str) -> None:
        figures[f"{part}_done_at_s"] = time.perf_counter() - began
        figures[f"{part}_commit"] = arguments.commit or results.this_commit()
        results.write("lora_quality", figures, arguments.out, arguments.commit)
        print(f"[{time.perf_counter() - began:.0f} s] {part}", flush=True)

    demos = start_demos(arguments.demo, size.demo_steps) if "demo" in parts else {}
    lessons = size.lessons if "adapters" in parts else {}
    if lessons:
        weights = learn_shapes(figures, size, device)
        done("scratch")
        for name, lesson in lessons.items():
            compare_ways(figures, size, make_arms(size, weights), name, lesson)
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
    met = judge(figures, lessons)
    done("rules")
    return 0 if met else 1


def learn_shapes(figures: dict[str, object], size: Size, device: torch.device) -> dict[str, Tensor]:
    """The model's weights after training from nothing."""
    pictures = draw_pictures(None, size.pixels, range(size.copies), device)
    last = range(size.copies, size.copies + size.held_copies)
    held = held_out_question(draw_pictures(None, size.pixels, last, device), 1)
    model = make_model(size.shape, device)
    figures["parameters"] = sum(p.numel() for p in model.parameters())
    backward = Backward(model, pictures, size.scratch.batch, autocast=True)
    curve = train(backward, lambda: held_out_loss(model, held, True), size.scratch, seed=0)
    figures["scratch_held_out"] = json.dumps(curve)
    print("from scratch:", curve, flush=True)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def make_arms(size: Size, weights: Mapping[str, Tensor]) -> dict[Way, nn.Module]:
    """The model in every way, new for each course: a recorded step leaves things in a model that
    no second recording takes. Both courses begin with the same.
    """
    device = next(iter(weights.values())).device
    fewest = min(lesson.copies for lesson in size.lessons.values())
    stars = draw_pictures("star", size.pixels, range(fewest), device)
    last = stars.at(slice(-SHOWN, None))
    generator = torch.Generator(device).manual_seed(1)
    levels = sample_timesteps(TRAIN, len(last.latents), generator)
    noise = torch.randn(last.latents.shape, generator=generator, device=device)
    shown = ask(last, levels, noise)
    return {way: make_arm(size.shape, weights, way, size.rank, shown) for way in WAYS}


def compare_ways(
    figures: dict[str, object],
    size: Size,
    arms: Mapping[Way, nn.Module],
    name: str,
    lesson: Lesson,
) -> None:
    """Curves of every way and seed, then gradients with a fresh and with a trained adapter."""
    device = next(arms["bf16"].parameters()).device
    stars = draw_pictures("star", size.pixels, range(lesson.copies), device)
    last = range(lesson.copies, lesson.copies + size.held_copies)
    held = held_out_question(draw_pictures("star", size.pixels, last, device), DRAWS)

    def taught(way: Way) -> dict[int, dict[str, Tensor]]:
        return adapt(figures, name, way, arms[way], stars, held, lesson.course)

    trained = taught("bf16")
    for seed, adapter in taught("fp8").items():
        give_adapter(arms["bf16"], adapter)
        figures[f"{name}.used_in_bf16.fp8.{seed}"] = held_out_loss(
            arms["bf16"], held, autocast=False
        )
    taught("plain")
    asked = one_question(stars, min(GRADIENT_BATCH, len(stars.latents)))
    models = {way: arms[way] for way in ("bf16", "fp8", "fp32")}
    for model in models.values():
        restart(model, SEEDS[0])
    compare_gradients(figures, f"{name}.cosine.fresh", models, asked)
    for model in models.values():
        give_adapter(model, trained[SEEDS[0]])
    compare_gradients(figures, f"{name}.cosine.trained", models, asked)


def adapt(
    figures: dict[str, object],
    name: str,
    way: Way,
    model: nn.Module,
    stars: Pictures,
    held: Asked,
    course: Course,
) -> dict[int, dict[str, Tensor]]:
    """One training a seed; gives the adapters."""
    began = time.perf_counter()
    autocast = way == "plain"
    backward = Backward(model, stars, course.batch, autocast)
    made = {}
    for seed in SEEDS:
        restart(model, seed)
        curve = train(backward, lambda: held_out_loss(model, held, autocast), course, seed)
        made[seed] = adapter_of(model)
        figures[f"{name}.held_out.{way}.{seed}"] = json.dumps(curve)
        figures[f"{name}.final.{way}.{seed}"] = curve[course.steps]
        print(
            f"{name}, {way}, seed {seed}: {curve[0]:.5f} -> {curve[course.steps]:.6f}", flush=True
        )
    figures[f"{name}.took_s.{way}"] = time.perf_counter() - began
    return made


def one_question(pictures: Pictures, count: int) -> Asked:
    """The batch whose gradients are compared: evenly spread levels, noise from a seed."""
    chosen = pictures.at(slice(None, count))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(chosen.latents.shape, generator=generator).to(chosen.latents)
    levels = (torch.randperm(count, generator=generator) + 0.5) / count
    return ask(chosen, levels.to(noise), noise)


def random_blocks(figures: dict[str, object], size: Size, device: torch.device) -> None:
    """Gradients of blocks of Wan 14B's shape, with an adapter that is not zero."""
    shape, rank = size.random, 2 * size.rank
    weights = {n: t.detach() for n, t in make_model(shape, device).state_dict().items()}
    generator = torch.Generator(device).manual_seed(0)

    def noise(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator, device=device)

    pictures = Pictures(
        noise(1, shape.channels, 1, size.cells, size.cells), noise(1, size.text_length, shape.text)
    )
    half = torch.full((1,), 0.5, device=device)
    asked = ask(pictures, half, noise(*pictures.latents.shape))
    shown = ask(pictures, half, noise(*pictures.latents.shape))
    models = {way: make_arm(shape, weights, way, rank, shown) for way in ("bf16", "fp8", "fp32")}
    with torch.no_grad():
        for model in models.values():
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02)
    compare_gradients(figures, "random_14b.cosine", models, asked)


def start_demos(model: Path, steps: int) -> dict[tuple[str, int], subprocess.Popen[str]]:
    """A process each: a model this small leaves a GPU idle, and a few can share it."""
    command = [sys.executable, Path(__file__).with_name("demo_curve.py"), model]
    return {
        (compute, seed): subprocess.Popen(
            [*command, "--seed", f"{seed}", "--compute", compute, "--steps", f"{steps}"],
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
    """Their curves, and what was told of fp8; a process that failed leaves its last line."""
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


def judge(figures: dict[str, object], lessons: Iterable[str]) -> bool:
    """Print each rule and whether it holds."""
    met = []
    for name in lessons:
        final = f"{name}.final"
        met.append(within(figures, f"{name}: fp8 among bf16", f"{final}.fp8", f"{final}.bf16"))
        met.append(within(figures, f"{name}: ours among plain", f"{final}.bf16", f"{final}.plain"))
    if any(name.startswith("demo_") for name in figures):
        met.append(within(figures, "demo", "demo_final.fp8", "demo_final.bf16"))
    for name in [name for name in figures if name.endswith("fp8_bf16_least")]:
        value = figures[name]
        met.append(isinstance(value, float) and value >= LEAST_COSINE)
        say(met[-1], f"{name}: {value:.5f} (at least {LEAST_COSINE})")
    return all(met)


def within(figures: dict[str, object], rule: str, one: str, other: str) -> bool:
    """Whether the mean of one way is between the least and the greatest of another."""
    wanted = [f"{way}.{seed}" for way in (one, other) for seed in SEEDS]
    values = {name: figures[name] for name in wanted if isinstance(figures.get(name), float)}
    if len(values) < len(wanted):
        say(False, f"{rule}: not measured")
        return False
    mine, theirs = ([values[f"{way}.{seed}"] for seed in SEEDS] for way in (one, other))
    holds = min(theirs) <= mean(mine) <= max(theirs)
    figures[f"rule.{rule}"] = holds
    say(holds, f"{rule}: {mean(mine):.6f} within {min(theirs):.6f} to {max(theirs):.6f}")
    return holds


def say(holds: bool, text: str) -> None:
    """One line a rule."""
    print(f"{'met   ' if holds else 'MISSED'} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
