"""Train a model of published shape with `gracetune train`, and read figures from the run's log.

A run is what a user would start: a model folder (random weights), a folder of images or videos with
captions in several aspect ratios, and a run file with `plan: auto` and a limit of device memory.
The run file asks for thousands of steps, because the planner compiles blocks only in a run that is
long enough; the run is stopped with Ctrl-C (SIGINT) after the steps that are needed here.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allocator_setup  # noqa: F401  before torch, which reads the settings at import

# isort: split
import numpy as np
import random_weights
import results
from PIL import Image

import gracetune.train.run  # noqa: F401  so that forked processes need not import it
from gracetune.cli.main import main as run_command
from gracetune.memory.platform import read_this_host
from gracetune.units import GIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SIZES = ((1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768))
"""Width and height of the images: six buckets of about the same area."""
VIDEO_SIZES = ((832, 480), (480, 832), (800, 496), (752, 528), (528, 752), (688, 576))
"""Width and height of videos: six buckets of about 632x632 pixels, none larger than the first."""
VIDEO_RESOLUTION = 632
SMALL_SIZES = ((64, 64), (64, 48), (48, 64), (80, 48), (48, 80))
SMALL_FRAMES = 5
PER_SIZE = 8
"""Samples of each size, or as many more as full batches need."""
CAPTION = ("the", "ring", "of")
"""Words that are one token each in the tokenizers of the model folders."""
LONG_RUN = 3000
"""Steps that the run file asks for."""
LOG_EVERY = 5
"""Steps between two entries of the log, each with the mean time of its steps."""
POLL_S = 0.5
KEEP = "GRACETUNE_BENCHMARK_MODELS"
"""Environment variable with the folder in which models are kept."""
START_S, STEPS_S, EXIT_S = 300, 180, 90
"""Seconds that a run may take until its first step, for the steps after it, and to save its
checkpoint and end."""
MEASURED = re.compile(r"measured: ([\d.]+) samples/s .*?, ([\d.]+ [KMGT]?i?B) of device memory")
CORRECTED = re.compile(
    r"plan corrected .* Expect .*?, ([\d.]+) s per micro-batch, ([\d.]+ [KMGT]?i?B) of device"
)


@dataclass(frozen=True)
class ProductRun:
    """The settings of a training run that differ between benchmarks."""

    family: str
    memory_gb: float
    """Limit of device memory."""
    batch: int
    steps: int
    """Steps after which the run is stopped."""
    counted: int
    """The last steps of these, whose speed is reported."""
    compile: str = "auto"
    frozen_compute: str = "bf16"
    sizes: Sequence[tuple[int, int]] = SIZES
    resolution: int = 1024
    frames: int = 1
    """Frames of a video; 1: images."""
    caption_tokens: int = 12
    """Tokens of a caption, at least. Some models do not pad captions to a fixed length."""
    small_memory: str = "90MB"
    """Limit of device memory in a rehearsal."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings, by section of the run file."""


def folder_name(name: str, config: Mapping[str, Any] | None) -> str:
    """Return the name of a kept model's folder; `config` has settings of its transformer."""
    return name + "".join(f"-{key}-{value}" for key, value in sorted((config or {}).items()))


@contextmanager
def model_folder(
    name: str, nbytes: int, *, small: bool, config: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Write a model of published shape with random weights; delete it at the end.

    It is written to shared memory if there is room for its `nbytes`: reading weights from a slow
    disk is not part of these benchmarks. If the environment variable `KEEP` names a folder, the
    model is written there and kept for later scripts.
    """
    if os.environ.get(KEEP) and not small:
        folder = Path(os.environ[KEEP]) / folder_name(name, config)
        if not (folder / "complete").exists():
            began = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make_room(folder, nbytes)
            _write_alone(name, folder, config)
            (folder / "complete").touch()
            print(f"{folder.name}: written in {time.monotonic() - began:.0f} s", flush=True)
        yield folder
        return
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * nbytes
    with tempfile.TemporaryDirectory(dir=shared if has_room else None) as temporary:
        if small:
            _write_model(name, Path(temporary), small, config)
        else:
            _write_alone(name, Path(temporary), config)
        yield Path(temporary)


def make_room(folder: Path, nbytes: int) -> None:
    """Delete kept models, but not `folder`, until another one of `nbytes` fits.

    In shared memory, a run must also have memory to load the model.
    """
    others = sorted(other for other in folder.parent.glob("*") if other != folder)
    while others and nbytes > _free_nbytes(folder, nbytes):
        other = others.pop(0)
        used = sum(file.stat().st_size for file in other.rglob("*") if file.is_file())
        print(f"{other.name} is deleted ({format_bytes(used)}): {folder.name} needs the space")
        shutil.rmtree(other)


def _free_nbytes(folder: Path, loaded_nbytes: int) -> int:
    free = shutil.disk_usage(folder).free
    if not folder.is_relative_to("/dev/shm"):
        return free
    return min(free, read_this_host().usable_bytes() - loaded_nbytes)


def _write_alone(name: str, folder: Path, config: Mapping[str, Any] | None) -> None:
    """Write a model in a process of its own, because weights are drawn on the GPU."""
    process = results.start_forked(_write_model, name, folder, False, config)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the model {name} could not be written: exit code {process.exitcode}")


def _write_model(name: str, folder: Path, small: bool, config: Mapping[str, Any] | None) -> None:
    random_weights.write_folder(name, folder, small=small, config=config)
    for transformer in sorted(folder.glob("transformer*")):
        random_weights.write_weights(folder, transformer.name)


def write_samples(
    folder: Path,
    sizes: Sequence[tuple[int, int]],
    per_size: int,
    frames: int = 1,
    caption_tokens: int = 12,
) -> None:
    """Write different images of smooth colours with grain, or videos of them, with captions."""
    folder.mkdir()

    def write(number: int) -> None:
        width, height = sizes[number // per_size]
        if frames > 1:
            wide = make_pixels(number, width + 2 * frames, height)
            (folder / f"{number:03}.mp4").write_bytes(make_video(wide, width, frames))
        else:
            image = Image.fromarray(make_pixels(number, width, height))
            image.save(folder / f"{number:03}.jpg", quality=92)
        repeats = -(-caption_tokens // len(CAPTION))
        (folder / f"{number:03}.txt").write_text(f"{number} {' '.join(CAPTION * repeats)}")

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(len(sizes) * per_size)))


def make_pixels(number: int, width: int, height: int) -> np.ndarray:
    """Return an image, which differs for each number."""
    random = np.random.default_rng(number)
    columns, rows = (
        50 * np.sin(np.linspace(0, 6, edge)[:, None] * random.uniform(0.5, 4, 3) + number)
        for edge in (width, height)
    )
    grain = random.integers(-12, 13, (height, width, 1))
    return (128 + rows[:, None] + columns[None] + grain).clip(0, 255).astype(np.uint8)


def make_video(wide: np.ndarray, width: int, frames: int) -> bytes:
    """Return an MP4 file (H.264, 16 frames per second) that pans over an image."""
    import av  # not on every machine with a GPU

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=Fraction(16))
        stream.width, stream.height, stream.pix_fmt = width, wide.shape[0], "yuv420p"
        for number in range(frames):
            part = np.ascontiguousarray(wide[:, 2 * number : 2 * number + width])
            output.mux(stream.encode(av.VideoFrame.from_ndarray(part, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def train(run: ProductRun, model: Path, *, small: bool) -> dict[str, Any]:
    """Run `gracetune train` until enough steps are done, and return its figures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        per_size = -(-PER_SIZE // run.batch) * run.batch
        sizes, frames = run.sizes, run.frames
        if small:
            sizes, per_size, frames = SMALL_SIZES, 2, min(frames, SMALL_FRAMES)
        write_samples(folder / "samples", sizes, per_size, frames, run.caption_tokens)
        path = write_run_file(run, model, folder, small=small)
        began = time.time()
        if small:  # a process of its own would import torch again, for seconds
            code = run_command(["train", str(path)])
        else:
            code = train_in_process(path, folder / "run" / "events.jsonl", run.steps)
        events = read_events(folder / "run" / "events.jsonl")
        return {"exit_code": code, **figures_of(run, events, began)}


def write_run_file(run: ProductRun, model: Path, folder: Path, *, small: bool) -> Path:
    """Write the run file and return its path."""
    dataset: dict[str, Any] = {
        "instance_data_dir": str(folder / "samples"),
        "resolution": 64 if small else run.resolution,
    }
    if run.frames > 1:
        dataset |= {"dataset_type": "video", "frames": SMALL_FRAMES if small else run.frames}
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {
            "family": run.family,
            "path": str(model),
            "dtype": "bfloat16",
            "frozen_compute": "bf16" if small else run.frozen_compute,
        },
        "adapter": {"rank": 2 if small else 16},
        "datasets": [dataset],
        "train": {
            "max_train_steps": run.steps if small else LONG_RUN,
            "batch_size": run.batch,
            "mixed_precision": "bf16",
            "checkpoint_every": 0,
            "checkpoint_minutes": 0,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "validation": {"every": 0},
        "logging": {"every": 1 if small else LOG_EVERY, "tensorboard": False},
        "plan": {
            "device_memory": run.small_memory if small else f"{run.memory_gb:g}GB",
            "compile": "never" if small else run.compile,
        },
    }
    for section, values in run.settings.items():
        settings[section] = settings.get(section, {}) | values
    path = folder / "run.json"
    path.write_text(json.dumps(settings, indent=2))
    return path


def train_in_process(path: Path, log: Path, steps: int) -> int:
    """Start `gracetune train`, stop it after `steps` steps, and return its exit code.

    It is also stopped `START_S` seconds after its start if it has made no step, and `STEPS_S`
    seconds after its first step. A run that does not end is killed, which its exit code -9 shows.
    Its log can still be read. It is also killed if this process ends.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = results.start_forked(train_alone, path)
    ends_at, has_stepped = time.monotonic() + START_S, False
    try:
        while process.is_alive() and time.monotonic() < ends_at:
            time.sleep(POLL_S)
            done = [event["step"] for event in step_events(log)]
            if done and done[-1] >= steps:
                break
            if done and not has_stepped:
                ends_at, has_stepped = time.monotonic() + STEPS_S, True
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
        process.join(EXIT_S)
    finally:
        process.kill()
        process.join()
        signal.signal(signal.SIGTERM, before)
    return process.exitcode


def train_alone(path: Path) -> None:
    """Run `gracetune train` in this process, which has been started for it, and end it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ctrl-C is for the process that started this one
    sys.exit(run_command(["train", str(path)]))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run's log; an incomplete last line is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def step_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of finished steps."""
    return [event for event in read_events(path) if event["event"] == "step_done"]


def figures_of(run: ProductRun, events: list[dict[str, Any]], began: float) -> dict[str, Any]:
    """Return predicted and measured speed and memory, and the times of the start."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    steps = by_kind.get("step_done", [])
    notices = [event["text"] for event in by_kind.get("notice", [])]
    figures: dict[str, Any] = {
        "batch": run.batch,
        "steps": len(steps),
        "plan": "; ".join(text for text in notices if text.startswith("plan")),
        "shapes": "; ".join(text for text in notices if text.startswith("shapes")),
        "check": "; ".join(text for text in notices if text.startswith("measured: ")),
        "warnings": "; ".join(e["text"] for e in by_kind.get("notice", []) if e["level"] != "info"),
    }
    described = by_kind.get("run_described", [])
    if described:
        figures |= _predicted(described[0])
    figures |= _checked(run, notices)
    if len(steps) > 1:
        counted = steps[1:][-run.counted :]  # fewer if the run was stopped early
        seconds = sum(step["seconds"] for step in counted)
        figures |= {
            "seconds": seconds / len(counted),
            "images_s": sum(step["samples"] for step in counted) / seconds,
            "stopped_early": len(counted) < run.counted,
            "first_step_after_s": steps[0]["time"] - began,
            "step_s": [round(step["seconds"], 4) for step in steps],
        }
    if "images_s" in figures and "mean_pixels_of_largest" in figures:
        figures["largest_images_s"] = figures["images_s"] * figures["mean_pixels_of_largest"]
    used = by_kind.get("memory_used", [])
    if used:
        figures["allocated_peak_gib"] = used[-1]["device_peak"] / GIB
    streamed = by_kind.get("weights_streamed", [])
    if streamed:
        figures["streamed"] = {k: v for k, v in streamed[-1].items() if k not in ("event", "time")}
    if by_kind.get("start_timed"):
        figures["start_phases_s"] = by_kind["start_timed"][-1]["seconds"]
    for kind, name in (("step_times", "phases_s"), ("device_sensors", "gpu")):
        if by_kind.get(kind):
            last = by_kind[kind][-1]
            figures[name] = last["seconds"] if kind == "step_times" else last["gpus"]
    return figures


def _checked(run: ProductRun, notices: Sequence[str]) -> dict[str, Any]:
    """Return what the run's own checks have measured, and the prediction of a corrected plan.

    The first check measures the first plan, the last check the plan with which the run continues.
    """
    checks = [match for text in notices if (match := MEASURED.search(text))]
    figures: dict[str, Any] = {
        "plan_corrected": any(t.startswith("plan corrected") for t in notices)
    }
    if checks:
        figures["checked_seconds"] = run.batch / float(checks[0][1])
        figures["checked_peak_gib"] = _gib(checks[0][2])
        figures["peak_gib"] = _gib(checks[-1][2])
    corrected = [match for text in notices if (match := CORRECTED.search(text))]
    if corrected:
        figures["corrected_seconds"] = float(corrected[-1][1])
        figures["corrected_peak_gib"] = _gib(corrected[-1][2])
    return figures


def _gib(text: str) -> float:
    return parse_bytes(text.replace(" ", "")) / GIB


def _predicted(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's prediction, made before the first step, and the number of buckets."""
    plan, buckets = described["plan"], described["data"]["buckets"]
    sizes = [(tuple(map(int, one["size"].split("x"))), one["samples"]) for one in buckets]
    pixels = [width * height for (width, height, *_), _ in sizes]
    mean = sum(p * n for p, (_, n) in zip(pixels, sizes, strict=True)) / sum(n for _, n in sizes)
    return {
        "buckets": len(buckets),
        "mean_pixels_of_largest": mean / max(pixels),
        "compiled": plan["compiled"],
        "streamed_blocks": sum(block["weights"] == "streamed" for block in plan["blocks"]),
        "blocks": len(plan["blocks"]),
        "predicted_seconds": plan["seconds"]["step"],
        "predicted_images_s": plan["batch"] / plan["seconds"]["step"],
        "predicted_peak_gib": sum(plan["device"].values()) / GIB,
        "predicted_waits_s": {k: v for k, v in plan["seconds"].items() if k.startswith("wait")},
        "launch_costs_us": {name: 1e6 * s for name, s in plan["launch_costs_s"].items()},
    }
