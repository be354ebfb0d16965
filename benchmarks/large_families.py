"""Train LoRAs of FLUX.2- and Z-Image-shaped models at 1024x1024 within 24 and 12 GB of a GPU.

Each model is a whole run as a user would start it: a run file, images and captions encoded into the
cache, the plan, the training loop and its checkpoint. The transformer has the published shape (32 B
and 6.2 B parameters) and random bf16 weights that are drawn straight into host memory
(`random_weights`). The VAE has the published shape, and captions have about 500 tokens of the
published width. torch's memory fraction enforces the limit of device memory.

Steps are counted after `--warm` steps; the run compares its plan with the first five. The first
step includes the comparison of a block's gradients with a plain block. The measured peak is that of
the counted steps, without the VAE, which is on the device before planning.

    PYTHONPATH=src:benchmarks python benchmarks/large_families.py [--only z_image,flux2]
        [--compile always|auto|never] [--steps 12] [--warm 6] [--out FOLDER] [--commit NAME]
        [--rehearse]

Results of models that are not measured are kept, each with its commit. Each model needs its weights
once in host memory; a process for each model leaves nothing behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections import Counter
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import random_weights
import results
import torch
from wan_experts import (
    PhaseClock,
    Watcher,
    limit_device_memory,
    make_images,
    peak_host_nbytes,
    plan_of,
    steps_per_second,
)

from gracetune.config.load import load_run_file
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.log import JsonlLog
from gracetune.events.run_control import RunControl
from gracetune.events.types import Notice, StageProgress, StepDone
from gracetune.models import pipeline_folder
from gracetune.plan.report import describe
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler
from gracetune.train.step import TrainProgress
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.events.types import Event
    from gracetune.plan.result import Plan
    from gracetune.train.build import Session

NAME = "large_families"
DEVICE_GB = {"z_image": 12, "flux2": 24}
"""Limit of device memory of each family, in GB; the quicker family comes first."""
NUM_IMAGES, EDGE = 4, 1024
SMALL_EDGE, SMALL_MEMORY = 64, "90MB"
"""Edge length of the images, and device memory, in a rehearsal."""
CAPTION_REPEATS = 33
"""A caption has 15 tokens; this many fill the 512 that the families read, but for a few."""
RANK = 16
MEMORY_TOLERANCE = 0.03
"""Largest accepted excess of the measured peak over the plan, as a share of the plan."""


def main() -> int:
    """Train every model, write the results after each, and print a table."""
    arguments = parse_arguments()
    figures = results.read(NAME, arguments.out)
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.only:
        clock = PhaseClock()
        clock.print(f"{name}: {arguments.steps} steps")
        with tempfile.TemporaryDirectory() as temporary:
            run_file = prepare(name, Path(temporary), arguments)
            clock.end_phase("prepare")
            found[name] = train(name, run_file, arguments, clock)
        found[name] |= {"commit": arguments.commit or results.this_commit()}
        figures = {k: v for k, v in figures.items() if not k.startswith(f"{name}.")}
        figures |= dict(results.flatten({name: found[name]}))
        results.write(NAME, figures, arguments.out, arguments.commit)
        gc.collect()  # frees the model before the next one is loaded
    return 0 if judge(found) or arguments.rehearse else 1


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(DEVICE_GB), help="families to train")
    parser.add_argument("--compile", choices=("always", "auto", "never"), default="never")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps")
    parser.add_argument("--warm", type=int, default=6, help="first steps, which are not counted")
    arguments = results.parse_arguments(parser)
    arguments.only = arguments.only.split(",")
    unknown = set(arguments.only) - DEVICE_GB.keys()
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(DEVICE_GB)}")
    if arguments.rehearse:
        arguments.steps, arguments.warm = 6, 5
    if not 0 < arguments.warm < arguments.steps:
        parser.error(f"--warm: {arguments.warm} must be from 1 to {arguments.steps - 1}")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs miniatures without one")
    return arguments


def prepare(name: str, folder: Path, arguments: argparse.Namespace) -> Path:
    """Limit the device memory, and write the model, the images and the run file."""
    if not arguments.rehearse:
        limit_device_memory(DEVICE_GB[name])
    return write_run(name, folder, arguments)


def write_run(name: str, folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the model without its transformer's weights, the images and the run file."""
    small = arguments.rehearse
    edge = SMALL_EDGE if small else EDGE
    random_weights.write_folder(name, folder / "model", small=small)
    make_images(folder / "images", NUM_IMAGES, edge)
    for caption in (folder / "images").glob("*.txt"):
        caption.write_text(" ".join([caption.read_text()] * CAPTION_REPEATS))
    settings = {
        "output_dir": str(folder / "run"),
        "model": {
            "family": name,
            "path": str(folder / "model"),
            "dtype": "bfloat16",
            "attention_mechanism": "sdpa",
        },
        "adapter": {"rank": 2 if small else RANK},
        "datasets": [{"instance_data_dir": str(folder / "images"), "resolution": edge}],
        "train": {
            "max_train_steps": arguments.steps,
            "batch_size": 1,
            "mixed_precision": "bf16",
            "checkpoint_every": 0,
            "checkpoint_minutes": 0,
        },
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "validation": {"every": 0},
        "logging": {"every": 1, "tensorboard": False},
        "plan": {
            "device_memory": SMALL_MEMORY if small else f"{DEVICE_GB[name]}GB",
            "compile": arguments.compile,
        },
    }
    path = folder / "run.json"
    path.write_text(json.dumps(settings, indent=2))
    return path


def train(
    name: str, path: Path, arguments: argparse.Namespace, clock: PhaseClock
) -> dict[str, Any]:
    """Run the training and return measured and planned figures."""
    run = load_run_file(path, environment={}).run
    watcher = Watcher(clock, arguments.warm, arguments.steps, print_every=1)
    output = Path(run.output_dir)
    output.mkdir()
    sinks = [watcher, PhaseSink(clock, arguments.steps), JsonlLog(output / "events.jsonl")]
    draw = ending_phase(clock, "weights", random_weights.random_transformer)
    with (
        EventDispatcher(sinks) as dispatcher,
        patch.object(pipeline_folder, "read_transformer", draw),
        closing(
            build_session(
                run,
                start_accelerator(run),
                dispatcher.emit,
                RunControl(output),
                SignalHandler(),
            )
        ) as session,
    ):
        clock.end_phase("pin")
        planned = plan_of(session)
        train_loop(session, TrainProgress())
        clock.end_phase("checkpoint")
        return {
            **plan_figures(planned, plan_of(session), watcher.notices),
            **memory_figures(session, planned, watcher, DEVICE_GB[name]),
            **speed_figures(planned, watcher.steps, arguments.warm),
            "took_s": clock.seconds,
        }


class PhaseSink:
    """An event sink that ends the phases of the clock: adapter, data, plan, first step, steps."""

    def __init__(self, clock: PhaseClock, last_step: int) -> None:
        self._clock = clock
        self._phases = {1: "first_step", last_step: "steps"}

    def handle(self, event: Event) -> None:
        """End the phase whose last event this is."""
        if isinstance(event, StepDone) and event.step in self._phases:
            self._clock.end_phase(self._phases[event.step])
        elif isinstance(event, StageProgress) and event.done == event.total:
            self._clock.end_phase("data")
        elif isinstance(event, Notice) and event.text.startswith("adapter: "):
            self._clock.end_phase("adapter")
        elif isinstance(event, Notice) and event.text.startswith("plan: expect"):
            self._clock.end_phase("plan")

    def close(self) -> None:
        """Do nothing."""


def ending_phase(clock: PhaseClock, phase: str, function: Callable[..., Any]) -> Any:
    """Return a function that calls `function` and then ends a phase."""

    @wraps(function)
    def call(*args: Any) -> Any:
        result = function(*args)
        clock.end_phase(phase)
        return result

    return call


def plan_figures(planned: Plan, last: Plan, notices: list[str]) -> dict[str, Any]:
    """Return the plan by blocks, and the notices about the plan and the gradients."""
    modes = Counter(block.activations for block in planned.blocks)
    checks = [text for text in notices if text.startswith("gradients: ") or "plain block" in text]
    return {
        "plan": describe(planned),
        "last_plan": describe(last),
        "blocks": {
            "all": len(planned.blocks),
            "streamed": len(planned.streamed),
            "kept": modes["keep"] + modes["lean"],
            "recomputed": modes["recompute"],
            "inputs_in_host_memory": sum(block.offload_input for block in planned.blocks),
            "offloaded": modes["offload"],
        },
        "gradient_check": "; ".join(checks),
        "check_passed": bool(checks) and all("checked in" in text for text in checks),
        "plan_check": "; ".join(text for text in notices if text.startswith("measured: ")),
    }


def memory_figures(
    session: Session, planned: Plan, watcher: Watcher, device_gb: float
) -> dict[str, Any]:
    """Return the parameters, and planned and measured memory."""
    frozen = [p for p in session.state.family.transformer.parameters() if not p.requires_grad]
    before = watcher.before_plan.now
    return {
        "frozen_parameters": sum(p.numel() for p in frozen),
        "trained_parameters": sum(p.numel() for p in session.state.parameters.values()),
        "device_gib": {
            "allowed": device_gb * 1e9 / GIB,
            "planned": planned.device.total / GIB,
            "measured": (watcher.training.taken - before) / GIB,
            "before_plan": before / GIB,
            "reserved": watcher.training.reserved / GIB,
            **{f"planned_{role}": n / GIB for role, n in planned.device.by_role().items()},
        },
        "host_gib": {
            "planned": planned.host.total / GIB,
            "planned_weights": planned.host.weights / GIB,
            "peak": peak_host_nbytes() / GIB,
        },
    }


def speed_figures(planned: Plan, steps: list[StepDone], warm: int) -> dict[str, Any]:
    """Return the speed of the counted steps, and the plan's prediction."""
    counted = [step for step in steps if step.step > warm]
    return {
        "counted_steps": len(counted),
        "images_s": planned.batch * steps_per_second(counted),
        "predicted_images_s": planned.samples_per_second,
        "step_s": [step.seconds for step in steps],
        "loss": {"first": steps[0].loss, "last": steps[-1].loss},
    }


def judge(found: dict[str, dict[str, Any]]) -> bool:
    """Print a table of all models; return True if each kept to its plan and passed its check."""
    passed = True
    for name, figures in found.items():
        device, blocks, took = figures["device_gib"], figures["blocks"], figures["took_s"]
        print(f"\n{name}: {figures['plan']}")
        print(f"  parameters      {figures['frozen_parameters'] / 1e9:.2f} B")
        print(f"  blocks          {', '.join(f'{k} {n}' for k, n in blocks.items())}")
        print(f"{'':18}{'planned':>9}{'measured':>10}")
        speeds = figures["predicted_images_s"], figures["images_s"]
        print("  images/s        {:>9.3f}{:>10.3f}".format(*speeds))
        print("  device peak GiB {planned:>9.2f}{measured:>10.2f}".format(**device))
        print(f"  phases in s     {', '.join(f'{k} {s:.1f}' for k, s in took.items())}")
        print(f"  {figures['gradient_check'] or 'no gradient check'}")
        verdicts = {
            f"{device['reserved']:.2f} GiB reserved, {device['allowed']:.2f} allowed": (
                device["reserved"] <= device["allowed"]
            ),
            "the peak is at most the planned one": (
                device["measured"] <= device["planned"] * (1 + MEMORY_TOLERANCE)
            ),
            "the first step's gradients are those of a plain block": figures["check_passed"],
        }
        for text, met in verdicts.items():
            print(f"  {'met   ' if met else 'MISSED'} {text}")
        passed &= all(verdicts.values())
    return passed


if __name__ == "__main__":
    sys.exit(main())
