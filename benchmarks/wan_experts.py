"""Train both experts of a Wan2.2-A14B-shaped model on 260 images of 1024x1024 within 96 GB (LoKr).

This is a whole run as a user would start it: a run file, data staged in memory, a VAE of the
published shape, the unified-memory cache, the plan, the training loop and the export. Weights are
random and the text encoder is narrow inside (`random_weights`). torch's memory fraction enforces
the 96 GB. Blocks are compiled, as `plan: auto` would do for a run of normal length.

The experts are trained in turns of 5 steps. The first `--warm` turns of each are not counted,
because they include compilation and the plan's calibration. A turn is as long as the logging
interval, so each line of the log times one expert. An image is sampled before the first and after
the last step; its device memory is measured separately. Caches and encoders that are on the device
before planning are not counted.

    PYTHONPATH=src:benchmarks python benchmarks/wan_experts.py [--out FOLDER] [--commit NAME]
        [--steps 40] [--batch 2] [--compile always|auto|never] [--rehearse]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import psutil
import random_weights
import results
import torch
from PIL import Image

from gracetune.config.load import load_run_file
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice, StageProgress, StepDone, Validated
from gracetune.models import pipeline_folder
from gracetune.plan.report import describe
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gracetune.events.types import Event
    from gracetune.plan.result import Plan
    from gracetune.train.build import Session

DEVICE_GB = 96
TURN = 5
"""Number of steps for which one expert is trained before the other takes over."""
NUM_IMAGES, EDGE = 260, 1024
FEW_IMAGES, SMALL_EDGE = 16, 64
"""Number and edge length of the images in a rehearsal."""


def main() -> int:
    """Prepare the data, train, compare with the plan, and write the results."""
    arguments = parse_arguments()
    clock = PhaseClock()
    if not arguments.rehearse:
        limit_device_memory(DEVICE_GB)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        random_weights.write_folder("wan22", folder / "model", small=arguments.rehearse)
        make_images(
            folder / "pictures",
            FEW_IMAGES if arguments.rehearse else NUM_IMAGES,
            SMALL_EDGE if arguments.rehearse else EDGE,
        )
        clock.end_phase("prepare")
        figures = train(run_file(folder, arguments), arguments, clock)
    results.write("wan_experts", figures, arguments.out, arguments.commit)
    return 0 if judge(figures) or arguments.rehearse else 1


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument(
        "--warm", type=int, default=2, help="turns of each expert that are not counted"
    )
    parser.add_argument("--batch", type=int, default=2, help="images per step")
    parser.add_argument("--compile", choices=("always", "auto", "never"), default="always")
    arguments = results.parse_arguments(parser)
    if arguments.rehearse:
        arguments.steps, arguments.warm = 2 * TURN, 0
    if arguments.steps < 2 * TURN * (arguments.warm + 1):
        parser.error(f"--steps: {2 * TURN * (arguments.warm + 1)} is the minimum with this --warm")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs a miniature without one")
    return arguments


def limit_device_memory(gigabytes: float) -> None:
    """Make torch refuse to allocate more device memory than this."""
    total = torch.cuda.mem_get_info(0)[1]
    torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total, 0)
    square = torch.ones(256, 256, device="cuda")
    (square @ square).sum().item()  # loads cuBLAS, whose host memory must not be counted


def make_images(folder: Path, count: int, edge: int) -> None:
    """Write images of smooth colours with grain, all different, each with a caption."""
    folder.mkdir()
    ramp = np.linspace(0, 2 * np.pi, edge, dtype=np.float32)
    grain = np.random.default_rng(count).integers(-12, 13, (edge, edge, 1)).astype(np.float32)

    def make(number: int) -> None:
        random = np.random.default_rng(number)
        rows, columns = (
            50 * np.sin(ramp[:, None] * random.uniform(0.5, 4, 3) + random.uniform(0, 7, 3))
            for _ in range(2)
        )
        soft = (128 + rows[:, None] + columns[None]).astype(np.float32)
        pixels = soft + np.roll(grain, 37 * number, axis=0)
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        picture.save(folder / f"{number:03}.jpg", quality=92)
        (folder / f"{number:03}.txt").write_text(f"the ring of number {number}, on a blue box")

    with ThreadPoolExecutor() as pool:
        list(pool.map(make, range(count)))


def run_file(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the run file of the benchmark and return its path."""
    small = arguments.rehearse
    settings = {
        "output_dir": str(folder / "run"),
        "model": {
            "family": "wan22",
            "path": str(folder / "model"),
            "dtype": "bfloat16",
        },
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
        "validation": {"every": arguments.steps, "prompts": ["a red ring"], "sample_steps": 2},
        "logging": {"every": TURN, "tensorboard": False},
        "plan": {
            "device_memory": "64MB" if small else f"{DEVICE_GB}GB",
            "batch": "fixed",
            "compile": arguments.compile,
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(settings, indent=2))
    return path


class PhaseClock:
    """Measures the wall time of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._since = time.monotonic()

    def print(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"{time.monotonic() - self._began:7.1f} {text}", flush=True)

    def end_phase(self, name: str) -> None:
        """Add the time since the last phase ended to the time of this one."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.print(f"{name} took {seconds:.1f} s; host memory {host_nbytes() / GIB:.1f} GiB")


class Watcher:
    """An event sink that prints notices and records the time and memory of steps."""

    def __init__(
        self, clock: PhaseClock, warm_steps: int, last_step: int, print_every: int = TURN
    ) -> None:
        self.steps: list[StepDone] = []
        self.notices: list[str] = []
        self.before_plan = self.training = self.sampling = DeviceMemory()
        self._clock = clock
        self._warm_steps, self._last_step = warm_steps, last_step
        self._print_every = print_every
        self._stage = ""

    def handle(self, event: Event) -> None:
        """Print notices and the name of each stage; record steps and memory."""
        if isinstance(event, StepDone):
            self.steps.append(event)
            if event.step % self._print_every == 0:
                line = " ".join(("step", str(event.step), event.expert)).strip()
                self._clock.print(f"{line}: {event.seconds:.3f} s, loss {event.loss:.4f}")
            if event.step in (self._warm_steps, self._last_step):
                self.training = device_memory()  # the second reading covers the counted steps alone
        elif isinstance(event, Validated):
            self.sampling = device_memory()
            self._clock.print(f"sampled in {event.seconds:.1f} s")
        elif isinstance(event, Notice):
            self.notices.append(event.text)
            self._clock.print(event.text)
            if event.text.startswith("plan: "):
                self.before_plan = device_memory()
        elif isinstance(event, StageProgress) and event.stage != self._stage:
            self._stage = event.stage
            self._clock.print(f"{event.stage}: {event.total} {event.unit}")

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of torch's allocator: allocated now, and the peaks since the last reading."""

    now: int = 0
    taken: int = 0
    reserved: int = 0


def device_memory() -> DeviceMemory:
    """Read the allocator and reset its peaks."""
    if not torch.cuda.is_available():
        return DeviceMemory()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    memory = DeviceMemory(torch.cuda.memory_allocated(), *peaks)
    torch.cuda.reset_peak_memory_stats()
    return memory


def train(path: Path, arguments: argparse.Namespace, clock: PhaseClock) -> dict[str, Any]:
    """Run the training and return measured and planned figures."""
    run = load_run_file(path, environment={}).run
    warm_steps = 2 * TURN * arguments.warm
    watcher = Watcher(clock, warm_steps, arguments.steps)
    before = host_nbytes()
    output = Path(run.output_dir)
    output.mkdir()
    with (
        EventDispatcher([watcher, JsonlLog(output / "events.jsonl")]) as dispatcher,
        patch.object(pipeline_folder, "read_transformer", random_weights.random_transformer),
    ):
        accelerator = start_accelerator(run)
        with closing(
            build_session(run, accelerator, dispatcher.emit, RunControl(output), SignalHandler())
        ) as session:
            clock.end_phase("build")
            planned = plan_of(session)
            train_loop(session, TrainProgress())
            clock.end_phase("steps")
            figures = {
                "first_plan": describe(planned),
                "first_planned_step_s": planned.seconds.step,
                **memory_figures(session, watcher, host_nbytes() - before),
                **speed_figures(session, watcher.steps, warm_steps),
            }
            exported = session.export().path
            clock.end_phase("export")
            figures["files"] = ", ".join(sorted(file.name for file in exported.iterdir()))
    return {**figures, "took_s": clock.seconds}


def plan_of(session: Session) -> Plan:
    """Return the plan in use."""
    assert session.plan_controller is not None, "the run was not planned"
    return session.plan_controller.plan


def memory_figures(session: Session, watcher: Watcher, host: int) -> dict[str, Any]:
    """Return planned and measured memory; `host` is the growth of this process in bytes."""
    plan, family = plan_of(session), session.state.family
    frozen = [p for p in family.transformer.parameters() if not p.requires_grad]
    inside = {p for block in family.blocks() for p in block.parameters()}
    streamed = sum(p.nbytes for p in frozen if p in inside and p.device.type == "cpu")
    return {
        "trained_parameters": sum(p.numel() for p in session.state.parameters.values()),
        "frozen_parameters": sum(p.numel() for p in frozen),
        "device_gib": {
            "allowed": DEVICE_GB * 1e9 / GIB,
            "planned": plan.device.total / GIB,
            "measured": (watcher.training.taken - watcher.before_plan.now) / GIB,
            "before_plan": watcher.before_plan.now / GIB,
            "reserved": watcher.training.reserved / GIB,
            "sampling": (watcher.sampling.taken - watcher.before_plan.now) / GIB,
            **{f"planned_{role}": n / GIB for role, n in plan.device.by_role().items()},
        },
        "host_gib": {
            "planned": plan.host.total / GIB,
            "planned_weights": plan.host.weights / GIB,
            "weights": streamed / GIB,
            "measured": host / GIB,
            "most": peak_host_nbytes() / GIB,
            "machine": psutil.virtual_memory().total / GIB,
        },
    }


def speed_figures(session: Session, steps: list[StepDone], warm_steps: int) -> dict[str, Any]:
    """Return the speed of the counted steps, by expert and overall."""
    plan = plan_of(session)
    counted = [step for step in steps if step.step > warm_steps]
    overall = steps_per_second(counted)
    return {
        "pictures": len(session.pipeline.train_samples),
        "steps": len(steps),
        "counted_steps": len(counted),
        "batch": plan.batch,
        "plan": describe(plan),
        "planned_step_s": plan.seconds.step,
        "loss": {"first": steps[0].loss, "last": steps[-1].loss},
        "high_steps_s": steps_per_second(step for step in counted if step.expert == "high"),
        "low_steps_s": steps_per_second(step for step in counted if step.expert == "low"),
        "steps_s": overall,
        "pictures_s": plan.batch * overall,
        "of_planned_speed": overall * plan.seconds.step,
    }


def steps_per_second(steps: Iterable[StepDone]) -> float:
    """Return the mean speed of some steps, in steps per second."""
    return 1 / mean(step.seconds for step in steps)


def host_nbytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_host_nbytes() -> int:
    """Return the peak resident memory of this process in bytes, including loading."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def judge(figures: dict[str, Any]) -> bool:
    """Print planned and measured figures; return True if every requirement is met."""
    device, host = figures["device_gib"], figures["host_gib"]
    print(f"plan: {figures['plan']}")
    print(f"{'GiB':<24}{'planned':>9}{'measured':>10}")
    print(f"{'device, training':<24}{device['planned']:>9.2f}{device['measured']:>10.2f}")
    print(f"{'device, sampling':<24}{'':>9}{device['sampling']:>10.2f}")
    print(f"{'host, streamed weights':<24}{host['planned_weights']:>9.2f}{host['weights']:>10.2f}")
    print(f"{'host, all of the run':<24}{host['planned']:>9.2f}{host['measured']:>10.2f}")
    print(f"{'host, most ever':<24}{'':>9}{host['most']:>10.2f} of {host['machine']:.1f}")
    for name in ("high_steps_s", "low_steps_s", "steps_s", "pictures_s", "of_planned_speed"):
        print(f"{name:<24}{figures[name]:>9.3f}")
    verdicts = {
        f"{device['reserved']:.1f} GiB reserved, {device['allowed']:.1f} allowed": (
            device["reserved"] <= device["allowed"]
        ),
        "sampling takes no more of the device than training": (
            device["sampling"] <= device["measured"]
        ),
        "host memory for weights is as planned": (
            abs(host["weights"] - host["planned_weights"]) <= 0.01 * host["planned_weights"]
        ),
    }
    for text, met in verdicts.items():
        print(f"{'met   ' if met else 'MISSED'} {text}")
    return all(verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
