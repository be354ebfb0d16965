"""Measure how soon a run trains at full speed: many image sizes, many lengths of captions.

Each case writes a model of the published shape with random weights and a data set to a folder, and
starts `gracetune train` on it twice, each time in a process of its own: first with an empty compile
cache, then with the cache that the first start has filled. The processes are forked from this one,
so the time to import torch, 8 to 10 seconds, is not included.

flux        FLUX.1 (12 B), 512x512 in 14 buckets, batch 1, compiled, within 48 GB
qwen_image  Qwen-Image with 20 of its 60 layers, 512x512 in 3 buckets, captions of 40 lengths,
            batches of 2 and of 1 (the last of a bucket), compiled, within 48 GB

    PYTHONPATH=src:benchmarks python benchmarks/first_steps.py [--only flux,qwen_image] [--starts 2]
        [--layers N] [--steps 84] [--log-every 10] [--folder FOLDER] [--timeout 240] [--out FOLDER]
        [--commit NAME] [--rehearse]

Times are read from the run's log. "Started" is the event `run_started`: the model is loaded, the
data are encoded and the plan is applied. The full speed is the median of the last half of the
steps; it is reached at the first of 8 steps in a row that take at most 1/0.95 of its time together.
The first step is logged at once, later ones together. With `--log-every 1` each step waits for the
GPU, which makes steps that are bound by the CPU slower: measure with the default. Results are
written after each start.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import product_run
import results
from PIL import Image

from gracetune.data.buckets import bucket_sizes
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "first_steps"
WINDOW, SPEED_SHARE = 8, 0.95
"""Steps in a row, and the share of the full speed that they must reach together."""
SHOWN = ("plan", "shapes", "adapter", "attention", "gradients", "measured", "compile")
SHOWN += ("memory link", "data:", "texts")
"""First words of the notices that are kept, which divide the start of the run into phases."""
MEASURED_PEAK = 2
"""The run measures its peak before the plan is applied, then in the first steps, which also choose
attention and check gradients, and from then on."""
PIXEL_STEP = 16
"""Edges of buckets are multiples of this."""


@dataclass(frozen=True)
class Case:
    """A model and a data set."""

    buckets: int
    images_per_bucket: int
    batch: int
    caption_lengths: int
    nbytes: float
    """Bytes of the weights."""
    layers: Mapping[str, int] = field(default_factory=dict)
    """Settings of the transformer that differ from the published model."""


CASES = {
    "flux": Case(buckets=14, images_per_bucket=3, batch=1, caption_lengths=1, nbytes=23.8e9),
    "qwen_image": Case(
        buckets=3,
        images_per_bucket=15,
        batch=2,
        caption_lengths=40,
        nbytes=14e9,
        layers={"num_layers": 20},
    ),
}


def main() -> int:
    """Start every case twice, write the results after each start, and print a table."""
    arguments = parse_arguments()
    figures = results.previous(NAME, arguments)
    failed = False
    for name in arguments.only:
        figures = {k: v for k, v in figures.items() if not k.startswith(f"{name}.")}
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
            began, layers = time.monotonic(), layers_of(name, arguments)
            model = stack.enter_context(
                product_run.model_folder(
                    name, int(CASES[name].nbytes), small=arguments.rehearse, config=layers
                )
            )
            write_case(name, folder, model, arguments)
            print(f"{name}: model and data in {time.monotonic() - began:.1f} s", flush=True)
            began = time.monotonic()
            for start in ("first", "second")[: arguments.starts]:
                found = start_run(folder, start, arguments)
                found |= {"log_every": arguments.log_every}
                found["commit"] = arguments.commit or results.this_commit()
                found["took_s"] = time.monotonic() - began
                began = time.monotonic()
                failed |= "error" in found
                figures |= dict(results.flatten({name: {start: found}}))
                results.write(NAME, figures, arguments.out, arguments.commit)
                print_start(name, start, found)
    return int(failed)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help="cases to measure")
    parser.add_argument("--starts", type=int, default=2, help="1: only with an empty cache")
    parser.add_argument("--steps", type=int, default=84, help="optimizer steps of each start")
    parser.add_argument("--layers", type=int, default=0, help="blocks of each kind; 0: the case's")
    parser.add_argument("--log-every", type=int, default=10, help="logging.every of the runs")
    parser.add_argument("--memory", default="48GB", help="limit of device memory")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=None, help="folder for models and data")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each start")
    arguments = results.parse_arguments(parser)
    arguments.only = arguments.only.split(",")
    if arguments.rehearse:  # one start in this process
        arguments.steps, arguments.starts, arguments.log_every = 4, 1, 1
        arguments.resolution, arguments.memory = 64, "90MB"
    return arguments


# The model, the data and the run file


def layers_of(name: str, arguments: argparse.Namespace) -> dict[str, int]:
    """Return the settings of the transformer that differ from the published model."""
    if not arguments.layers:
        return dict(CASES[name].layers)
    layers = {"num_layers": arguments.layers}
    return layers | ({"num_single_layers": arguments.layers} if name == "flux" else {})


def write_case(name: str, folder: Path, model: Path, arguments: argparse.Namespace) -> None:
    """Write the images with their captions, and the run file."""
    case = CASES[name]
    if arguments.rehearse:
        case = replace(case, buckets=2, images_per_bucket=2)
    write_images(case, folder / "images", arguments.resolution)
    settings = run_settings(name, folder, model, arguments)
    (folder / "run.json").write_text(json.dumps(settings, indent=2))


def write_images(case: Case, folder: Path, resolution: int) -> None:
    """Write images of some aspect ratios, with captions of some lengths."""
    folder.mkdir()
    sizes = bucket_sizes(resolution, PIXEL_STEP, 3.0)
    chosen = [sizes[i * len(sizes) // case.buckets] for i in range(case.buckets)]
    count = len(chosen) * case.images_per_bucket

    def write(number: int) -> None:
        width, height = chosen[number % len(chosen)]
        colour = tuple(37 * number * k % 256 for k in (1, 3, 7))
        image = Image.radial_gradient("L").resize((width, height))
        Image.merge("RGB", [image.point([(v + c) % 256 for v in range(256)]) for c in colour]).save(
            folder / f"{number:03}.jpg", quality=92
        )
        repeats = 1 + 3 * (number % case.caption_lengths)  # at most 490 tokens with the template
        (folder / f"{number:03}.txt").write_text(" ".join(["the", "ring", "of"] * repeats))

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))


def run_settings(
    name: str, folder: Path, model: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the settings of the run."""
    return {
        "output_dir": str(folder / "run"),
        "model": {"family": name, "path": str(model), "dtype": "bfloat16"},
        "adapter": {"rank": 2 if arguments.rehearse else 16},
        "datasets": [
            {
                "instance_data_dir": str(folder / "images"),
                "resolution": arguments.resolution,
                "bucket_step": PIXEL_STEP,
            }
        ],
        "train": {
            "max_train_steps": arguments.steps,
            "batch_size": CASES[name].batch,
            "mixed_precision": "bf16",
            "checkpoint_every": 0,
            "checkpoint_minutes": 0,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "validation": {"every": 0},
        "logging": {"every": arguments.log_every, "tensorboard": False},
        "plan": {
            "device_memory": arguments.memory,
            "compile": "never" if arguments.rehearse else "always",
        },
    }


# One start of a run


def start_run(folder: Path, start: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in a process of its own, and return the figures of its log."""
    output, report = folder / "run", folder / f"{start}.json"
    shutil.rmtree(output, ignore_errors=True)
    began = time.time()
    if arguments.rehearse:
        error = "it failed" if train(folder / "run.json", report) else ""
    else:
        error = train_in_process(folder, report, arguments.timeout)
    events = []
    if (output / "events.jsonl").exists():
        lines = (output / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
    figures = figures_of(events, began)
    if report.exists():
        figures |= json.loads(report.read_text())
    return figures | ({"error": error} if error else {})


def train_in_process(folder: Path, report: Path, timeout_s: float) -> str:
    """Call `train` in a process of its own; return why it failed, or an empty string."""
    process = results.start_forked(train_alone, folder, report)
    try:
        process.join(timeout_s)
        if process.is_alive():
            return f"not done after {timeout_s:.0f} s"
    finally:
        process.kill()
        process.join()
    return f"exit code {process.exitcode}" if process.exitcode else ""


def train_alone(folder: Path, report: Path) -> None:
    """Call `train` in this process, with the compile cache of the case, and end it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    sys.exit(train(folder / "run.json", report))


def train(run_file: Path, report: Path) -> int:
    """Run `gracetune train`, then write its peaks of memory and the compiler's phases."""
    from torch._dynamo.utils import compilation_time_metrics, counters

    from gracetune.cli.main import main as gracetune
    from gracetune.plan.controller import CudaMemoryMeter

    peaks: list[int] = []
    meters: list[CudaMemoryMeter] = []
    restart = CudaMemoryMeter.restart

    def record(meter: CudaMemoryMeter) -> None:
        meters.append(meter)
        peaks.append(meter.peak_nbytes())
        restart(meter)

    with patch.object(CudaMemoryMeter, "restart", record):
        code = gracetune(["train", str(run_file)])
    if meters:
        peaks.append(meters[-1].peak_nbytes())

    phases = {name: [round(sum(s), 2), len(s)] for name, s in compilation_time_metrics.items()}
    slow = {name: v for name, v in phases.items() if v[0] >= 0.1}
    cached = {
        f"{group}.{name}": count
        for group in ("inductor", "aot_autograd")
        for name, count in counters[group].items()
        if "cache" in name
    }
    memory = {}
    if len(peaks) > MEASURED_PEAK:
        memory["first_steps_peak_gib"] = peaks[MEASURED_PEAK - 1] / GIB
        memory["peak_gib"] = max(peaks[MEASURED_PEAK:]) / GIB
    report.write_text(json.dumps(memory | {"compiler_s": slow, "cache": cached}))
    return code


def figures_of(events: list[dict[str, Any]], began: float) -> dict[str, Any]:
    """Return times, speed and memory from the log of a run; `began` is when it was started."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    steps, started = by_kind.get("step_done", []), by_kind.get("run_started", [])
    notices = by_kind.get("notice", [])
    figures: dict[str, Any] = {
        "timeline": [
            f"{e['time'] - began:.1f} {e['text'][:150]}"
            for e in notices
            if e["text"].startswith(SHOWN) or e["level"] == "warning"
        ],
    }
    if not started:
        return figures
    start = started[0]["time"]
    phases = by_kind.get("step_times", [])
    timed = by_kind.get("start_timed", [])
    figures |= {
        "start_phases_s": {} if not timed else timed[0]["seconds"],
        "phases_s": {} if not phases else phases[-1]["seconds"],
        "to_started_s": start - began,
        "buckets": len(by_kind["run_described"][0]["data"]["buckets"]),
        "steps": len(steps),
    }
    if steps:
        figures |= speed_figures(steps, start)
    planned = (by_kind["run_described"][0]["plan"] or {}).get("device", {})
    if planned:
        figures["planned_gib"] = sum(planned.values()) / GIB
    compiled = [e for e in notices if e["text"].startswith("compile: graph ")]
    second_epoch = next((step["time"] for step in steps if step["epoch"] > 0), float("inf"))
    return figures | {
        "graphs": len(compiled),
        "graphs_after_first_epoch": sum(e["time"] > second_epoch for e in compiled),
    }


def speed_figures(steps: list[dict[str, Any]], start: float) -> dict[str, Any]:
    """Return when the run made its first step, and when it reached its full speed."""
    seconds = [step["seconds"] / step["samples"] for step in steps]
    full = median(seconds[len(seconds) // 2 :])
    begins = [start]  # steps that are logged together have the same mean time
    for step in steps:
        begins.append(begins[-1] + step["seconds"])
    reached = next(
        (
            begins[i] - start
            for i in range(len(seconds) - WINDOW + 1)
            if sum(seconds[i : i + WINDOW]) <= WINDOW * full / SPEED_SHARE
        ),
        None,
    )
    return {
        "first_step_s": steps[0]["time"] - start,
        "full_speed_after_s": reached,
        "images_s": 1 / full,
        "slowest_steps_s": sorted((round(step["seconds"], 2) for step in steps), reverse=True)[:8],
    }


def print_start(name: str, start: str, found: Mapping[str, Any]) -> None:
    """Print the figures of a start."""
    print(f"\n{name}, {start} start")
    for key, value in found.items():
        if key == "timeline":
            print("\n".join(f"  {line}" for line in value))
        else:
            print(f"  {key:26} {value:.2f}" if isinstance(value, float) else f"  {key:26} {value}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
