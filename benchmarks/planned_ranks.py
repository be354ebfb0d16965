"""Train a Z-Image-shaped LoRA on one rank, and on two ranks that share the GPU, with equal samples.

Two processes exchange gradients over gloo, because NCCL refuses two ranks on one GPU. Each has half
the device memory of the single process and half its micro-batches in each step, so both runs train
with the same samples and noise. Weights are random bf16 of the published shape; blocks are not
compiled, so that both runs use the same kernels. Both are whole runs: run file, encoded images,
plan, loop, checkpoint.

Judged: losses and trained weights of both runs are equal up to rounding, the two ranks stream from
one copy of the weights, and the peak of device memory stays within the plan. The two ranks share
one GPU, so their speed says nothing about two GPUs.

    PYTHONPATH=src:benchmarks python benchmarks/planned_ranks.py [--memory 24] [--steps 8]
        [--out FOLDER] [--commit NAME] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import large_families
import random_weights
import results
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from shared_weights_rank import memory_mb
from wan_experts import PhaseClock, Watcher, limit_device_memory

from gracetune.config.load import load_run_file
from gracetune.models import pipeline_folder
from gracetune.train import loop
from gracetune.train.run import run_training
from gracetune.train.step import train_step

NAME = "planned_ranks"
WARM_STEPS = 2
"""First steps, which are not counted."""
MICRO_BATCHES = 4
"""Micro-batches of one image in a step, over all ranks."""
FIRST_LIMIT = 1e-5
"""Largest accepted difference of the first step's loss and gradient norm, relative to them."""
LOSS_LIMIT, WEIGHT_LIMIT = 1e-3, 1e-2
"""Largest accepted difference of a later step's loss, relative to it, and of the trained weights,
relative to their change during the run. Adam divides gradients by their size, so that a difference
in rounding grows where a gradient is close to zero."""


def main() -> int:
    """Train on one and on two ranks, compare the runs, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--memory", type=float, default=24, help="device memory in GB, of all ranks"
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = results.parse_arguments(parser)
    if arguments.rehearse:
        arguments.steps = 6
    if arguments.worker:
        train(arguments.worker, arguments)
        return 0
    clock = PhaseClock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = {}
        for count in (1, 2):
            clock.print(f"{count} rank(s)")
            run_file = prepare(folder, count, arguments)
            found[count] = start_ranks(run_file, count, arguments)
        figures = compare(folder, found)
    results.write(NAME, dict(results.flatten(figures)), arguments.out, arguments.commit)
    for name, value in results.flatten(figures):
        clock.print(f"{name}: {value}")
    return 0 if judge(figures) or arguments.rehearse else 1


def prepare(folder: Path, count: int, arguments: argparse.Namespace) -> Path:
    """Write model and data, once, and the run file for this number of ranks."""
    small = arguments.rehearse
    base = folder / "run.json"
    if not base.exists():
        given = argparse.Namespace(rehearse=small, compile="never", steps=arguments.steps)
        large_families.write_run("z_image", folder, given)
    settings = json.loads(base.read_text())
    settings["output_dir"] = str(folder / f"ranks-{count}")
    settings["train"]["effective_batch_size"] = MICRO_BATCHES
    settings["distributed"] = {"backend": "gloo"}
    # Both runs read the same latents: encoded in other batches, they would be rounded differently.
    settings["cache_config"] = {"cache_dir": str(folder / "cache"), "persistent_cache": True}
    if not small:
        settings["plan"]["device_memory"] = f"{arguments.memory / count}GB"
    path = folder / f"run-{count}.json"
    path.write_text(json.dumps(settings))
    return path


def start_ranks(path: Path, count: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a process for each rank, and return what each has measured."""
    words = [__file__, "--worker", str(path), "--steps", str(arguments.steps)]
    words += ["--memory", str(arguments.memory / count)]
    words += ["--rehearse"] * arguments.rehearse
    run_ranks(words, count, timeout_s=400)
    return [json.loads(measured_file(path, rank).read_text()) for rank in range(count)]


def measured_file(run_file: Path, rank: int) -> Path:
    """Return the file in which a rank writes its measurements."""
    return run_file.with_name(f"{run_file.stem}-rank-{rank}.measured")


def train(path: Path, arguments: argparse.Namespace) -> None:
    """Train as one rank; write losses, memory and the plan's notices to a file.

    The host memory is that of the first step, when the weights are in place.
    """
    if torch.cuda.is_available():
        limit_device_memory(arguments.memory)
    watcher = Watcher(PhaseClock(), WARM_STEPS, arguments.steps, print_every=1)
    host: list[dict[str, float]] = []

    def step(*given: Any) -> Any:
        if not host:
            host.append(memory_mb())
        return train_step(*given)

    with (
        patch.object(pipeline_folder, "read_transformer", random_weights.random_transformer),
        patch.object(loop, "train_step", step),
    ):
        run_training(load_run_file(path, environment={}).run, sinks=[watcher])
    steps = watcher.steps[WARM_STEPS:]
    measured = {
        "losses": [step.loss for step in watcher.steps],
        "norms": [step.grad_norm for step in watcher.steps],
        "samples_per_s": sum(s.samples for s in steps) / (sum(s.seconds for s in steps) or 1.0),
        "plan": [text for text in watcher.notices if text.startswith(("plan:", "measured:"))],
        "peak_gb": watcher.training.taken / 1e9,
        "memory_mb": host[0],
    }
    measured_file(path, int(os.environ["RANK"])).write_text(json.dumps(measured))


def compare(folder: Path, found: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the differences of the two runs, and the figures of each."""
    one, two = found[1][0], found[2][0]
    losses = zip(one["losses"], two["losses"], strict=True)
    weights = [
        load_file(next((folder / f"ranks-{count}").glob("checkpoints/*/weights.safetensors")))
        for count in (1, 2)
    ]
    names = [name for name in weights[0] if "lora_B" in name]  # zeros before training
    change = sum(float(weights[0][name].float().square().sum()) for name in names) ** 0.5
    apart = sum(
        float((weights[0][name].float() - weights[1][name].float()).square().sum())
        for name in names
    )
    return {
        "difference of the first loss": abs(one["losses"][0] / two["losses"][0] - 1),
        "difference of the first gradient norm": abs(one["norms"][0] / two["norms"][0] - 1),
        "largest difference of losses": max(abs(a - b) / abs(a) for a, b in losses),
        "difference of weights": apart**0.5 / change,
        "one rank": {key: one[key] for key in ("samples_per_s", "plan", "peak_gb", "memory_mb")},
        "two ranks": {
            "samples_per_s": two["samples_per_s"],
            "plan": two["plan"],
            "peak_gb": two["peak_gb"],
            "memory_mb": [rank["memory_mb"] for rank in found[2]],
        },
    }


def judge(figures: dict[str, Any]) -> bool:
    """Return whether two ranks computed what one did, and streamed weights."""
    return (
        figures["difference of the first loss"] <= FIRST_LIMIT
        and figures["difference of the first gradient norm"] <= FIRST_LIMIT
        and figures["largest difference of losses"] <= LOSS_LIMIT
        and figures["difference of weights"] <= WEIGHT_LIMIT
        and any("stream" in text for text in figures["two ranks"]["plan"])
    )


if __name__ == "__main__":
    sys.exit(main())
