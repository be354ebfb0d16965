"""Both experts of a Wan2.2-A14B-shaped model on 260 pictures of 1024x1024, LoKr, within 96 GB.

A whole run as a user would start it: a run file, data staged in memory, a VAE of the published
shape that encodes them into the unified-memory cache, the plan, the loop, the result. Weights are
random (`wan_random`), the text encoder has one layer. The device's 96 GB are enforced by torch's
memory fraction. Blocks are compiled, as `plan: auto` would do for a run of a usual length.

Counted are the steps after both experts have had `--warm` turns; what compiling and the plan's own
correction take is in what comes before. Turns and lines of the log are equally long, so that each
line times one expert.

    PYTHONPATH=src:benchmarks python benchmarks/wan_experts.py [--out FOLDER] [--commit NAME]
        [--steps 40] [--batch 2] [--compile always|auto|never] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import results
import torch
import wan_random
from PIL import Image

from gracetune.config.load import load_run_file
from gracetune.events.fan import Fan
from gracetune.events.log import JsonlLog
from gracetune.events.requests import Requests
from gracetune.events.types import Notice, StageProgress, StepDone
from gracetune.plan.report import describe
from gracetune.train.build import build, start_accelerator
from gracetune.train.interrupt import Interrupt
from gracetune.train.loop import train_loop
from gracetune.train.state import Progress
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gracetune.events.types import Event
    from gracetune.plan.result import Bytes
    from gracetune.train.build import Built

DEVICE_GB = 96
TURN = 5
"""Steps of one expert before the other has its turn."""
PICTURES, EDGE = 260, 1024
FEW, SMALL_EDGE = 16, 64


def main() -> int:
    """Prepare, run, compare with the plan, write."""
    arguments = parsed()
    if not arguments.rehearse:
        narrow_the_device()
    clock = Clock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wan_random.install(folder / "site")
        wan_random.write_folder(folder / "model", small=arguments.rehearse)
        make_pictures(
            folder / "pictures",
            FEW if arguments.rehearse else PICTURES,
            SMALL_EDGE if arguments.rehearse else EDGE,
        )
        clock.lap("prepare")
        figures = train(run_file(folder, arguments), arguments, clock)
    results.write("wan_experts", figures, arguments.out, arguments.commit)
    return 0 if judge(figures) else 1


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="the folder to write to")
    parser.add_argument("--commit", default="", help="where there is no git to ask")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--warm", type=int, default=2, help="turns of each expert not counted")
    parser.add_argument("--batch", type=int, default=2, help="pictures of a step")
    parser.add_argument("--compile", choices=("always", "auto", "never"), default="always")
    parser.add_argument("--rehearse", action="store_true", help="a miniature of all, on the CPU")
    arguments = parser.parse_args()
    if arguments.steps < 2 * TURN * (arguments.warm + 1):
        parser.error(f"--steps: {2 * TURN * (arguments.warm + 1)} are the least with this --warm")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs a miniature without one")
    return arguments


def narrow_the_device() -> None:
    """From here on torch refuses to take more, whatever the device has."""
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(DEVICE_GB * 1e9 / total, 0)


def make_pictures(folder: Path, count: int, edge: int) -> None:
    """Soft colours under a fine grain, no two alike, each with a caption of its own."""
    folder.mkdir()
    random = np.random.default_rng(0)
    grain = random.integers(-12, 13, (edge, edge, 1))
    ramp = np.linspace(0, 2 * np.pi, edge)
    for number in range(count):
        waves = random.uniform(0.5, 4, (2, 3)), random.uniform(0, 7, (2, 3))
        rows, columns = (
            np.sin(ramp[:, None] * speed + start) for speed, start in zip(*waves, strict=True)
        )
        pixels = 128 + 50 * (rows[:, None] + columns[None]) + np.roll(grain, 37 * number, axis=0)
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        picture.save(folder / f"{number:03}.jpg", quality=92)
        (folder / f"{number:03}.txt").write_text(f"the ring of number {number}, on a blue box")


def run_file(folder: Path, arguments: argparse.Namespace) -> Path:
    """What a user would write, for the small model as for the large one."""
    small = arguments.rehearse
    settings = {
        "output_dir": str(folder / "run"),
        "model": {"family": wan_random.NAME, "path": str(folder / "model"), "dtype": "bfloat16"},
        "adapter": {"kind": "lokr", "rank": 2 if small else 16, "factor": 4 if small else 8},
        "datasets": [
            {
                "id": "pictures",
                "type": "in_memory",
                "instance_data_dir": str(folder / "pictures"),
                "resolution": SMALL_EDGE if small else EDGE,
                "caption_dropout": 0.1,
            }
        ],
        "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
        "train": {
            "max_train_steps": arguments.steps,
            "batch_size": arguments.batch,
            "mixed_precision": "bf16",
            "timestep_shift": 5.0,
            "experts": "both",
            "switch_every": TURN,
            "checkpoint_every": 0,
            "checkpoint_minutes": 0,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "validation": {"every": 0},
        "logging": {"every": TURN, "tensorboard": False},
        "plan": {
            "device_memory": "64MB" if small else f"{DEVICE_GB}GB",
            "batch": "fixed",
            "compile": "never" if small else arguments.compile,
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(settings, indent=2))
    return path


class Clock:
    """Wall time by what it went to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """All since the last lap."""
        now = time.monotonic()
        self.seconds[name] = now - self._since
        self._since = now
        print(
            f"    {name}: {self.seconds[name]:.1f} s, {host_now()} GiB of host memory", flush=True
        )


class Watcher:
    """A sink: prints what a run tells, and keeps the time of every step."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self._told = ""

    def handle(self, event: Event) -> None:
        """Everything that is said in words, and each stage once."""
        if isinstance(event, StepDone):
            self.steps.append(event)
            if event.step % TURN == 0:
                print(
                    f"  step {event.step} ({event.expert}): {event.seconds:.3f} s, loss "
                    f"{event.loss:.4f}",
                    flush=True,
                )
        elif isinstance(event, Notice):
            print("   ", event.text, flush=True)
        elif isinstance(event, StageProgress) and event.stage != self._told:
            self._told = event.stage
            print("   ", event.stage, event.total, event.unit, flush=True)

    def close(self) -> None:
        """Nothing to flush."""


def train(path: Path, arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """The run itself, and what it took beside what was planned."""
    run = load_run_file(path, environment={}).run
    watcher = Watcher()
    before = host_nbytes()
    output = Path(run.output_dir)
    output.mkdir()
    with Fan([watcher, JsonlLog(output / "events.jsonl")]) as fan:
        accelerator = start_accelerator(run)
        with closing(build(run, accelerator, fan.tell, Requests(output), Interrupt())) as built:
            clock.lap("build")
            peaks = Peaks(before)
            train_loop(built.session, Progress())
            clock.lap("steps")
            peaks.read()
            figures = compared(built, peaks, watcher.steps, arguments)
            exported = built.export()
            clock.lap("export")
            figures["files"] = ", ".join(sorted(file.name for file in exported.iterdir()))
    return {**figures, "took_s": clock.seconds}


class Peaks:
    """Memory over the steps; `before`: of the host, with nothing loaded."""

    def __init__(self, before: int) -> None:
        self._before = before
        self.device = self.reserved = self.host = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> None:
        """The most there was; of the host, what there is now beyond `before`."""
        self.host = host_nbytes() - self._before
        if torch.cuda.is_available():
            self.device = torch.cuda.max_memory_allocated()
            self.reserved = torch.cuda.max_memory_reserved()


def compared(
    built: Built, peaks: Peaks, steps: list[StepDone], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Planned and measured, side by side."""
    settled = built.session.settled
    assert settled is not None, "the run was not planned"
    plan = settled.plan
    counted = [step for step in steps if step.step > 2 * TURN * arguments.warm]
    figures: dict[str, Any] = {
        "pictures": len(built.session.feed.trained),
        "steps": len(steps),
        "counted_steps": len(counted),
        "batch": plan.batch,
        "plan": describe(plan),
        "planned_step_s": plan.seconds.step,
        "device_gib": {
            "allowed": DEVICE_GB * 1e9 / GIB,
            "planned": plan.device.total / GIB,
            "measured": peaks.device / GIB,
            "reserved": peaks.reserved / GIB,
            **by_role(plan.device),
        },
        "host_gib": {
            "planned": plan.host.total / GIB,
            "measured": peaks.host / GIB,
            "most": most_host_nbytes() / GIB,
            "machine": psutil.virtual_memory().total / GIB,
        },
        "trained_parameters": sum(p.numel() for p in built.session.trainee.parameters.values()),
        "frozen_parameters": sum(
            p.numel()
            for p in built.session.trainee.family.transformer.parameters()
            if not p.requires_grad
        ),
        "loss": {"first": steps[0].loss, "last": steps[-1].loss},
    }
    for expert in ("high", "low"):
        figures[f"{expert}_steps_s"] = pace(s for s in counted if s.expert == expert)
    figures["steps_s"] = pace(counted)
    figures["pictures_s"] = plan.batch * figures["steps_s"]
    figures["of_planned_speed"] = figures["steps_s"] * plan.seconds.step
    return figures


def pace(steps: Iterable[StepDone]) -> float:
    """Steps a second."""
    return 1 / mean(step.seconds for step in steps)


def by_role(planned: Bytes) -> dict[str, float]:
    """What the plan's device memory is for."""
    return {f"planned_{role}": nbytes / GIB for role, nbytes in planned.by_role().items()}


def host_nbytes() -> int:
    """Of this process, what is in memory now."""
    return int(psutil.Process().memory_info().rss)


def host_now() -> str:
    """The same in words."""
    return f"{host_nbytes() / GIB:.1f}"


def most_host_nbytes() -> int:
    """The most there ever was, loading included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def judge(figures: dict[str, Any]) -> bool:
    """Print the table; whether the run stayed within what it was allowed."""
    device, host = figures["device_gib"], figures["host_gib"]
    print(f"plan: {figures['plan']}")
    for name, tier in (("device", device), ("host", host)):
        planned, measured = (format_bytes(int(tier[key] * GIB)) for key in ("planned", "measured"))
        print(f"{name:<8}planned {planned:>10}   measured {measured:>10}")
    print(f"host, at most while loading: {host['most']:.1f} of {host['machine']:.1f} GiB")
    for name in ("high_steps_s", "low_steps_s", "steps_s", "pictures_s", "of_planned_speed"):
        print(f"{name:<18}{figures[name]:>8.3f}")
    within = device["reserved"] <= device["allowed"]
    print(f"{'met   ' if within else 'MISSED'} within {DEVICE_GB} GB: {device['reserved']:.1f} GiB")
    return within


if __name__ == "__main__":
    sys.exit(main())
