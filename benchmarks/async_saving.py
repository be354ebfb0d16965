"""Measure how much longer a full fine-tuning run takes if it saves a checkpoint every 100 steps.

The model is a Z-Image with fewer layers: 1.1 B parameters, random fp32 weights, computed in bf16
and trained with AdamW, so a checkpoint has 13 GB. It is a whole run of the trainer: run file,
encoded images, loop, checkpoints on disk. Two runs: one saves in the background, one lets steps
wait.

Within a run, windows of steps with and without a save alternate, so both are measured a few seconds
apart. The difference of their wall times is what a save adds. Judged: a background save adds at
most 1 % to 100 steps, and is complete within 100 steps.

Memory for the copies is pinned once, in the first window, which is not counted; its time is in the
results as well.

    PYTHONPATH=src:benchmarks python benchmarks/async_saving.py [--folder FOLDER] [--batch 4]
        [--out FOLDER] [--commit NAME] [--rehearse]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import large_families
import random_weights
import results
import torch
from wan_experts import PhaseClock

from gracetune.config.load import load_run_file
from gracetune.events.types import CheckpointSaved, Notice, RunStarted, StepDone
from gracetune.models import pipeline_folder
from gracetune.train.run import run_training

if TYPE_CHECKING:
    from gracetune.events.types import Event

NAME = "async_saving"
WINDOWS = {"background": 80, "waiting": 40}
"""Kind of run -> number of steps whose wall time is measured together."""
SMALL_WINDOW = 2
SAVES = {"background": 2, "waiting": 1}
"""Kind of run -> number of measured saves."""
EVERY = 100
"""Number of steps between saves for which the added time is judged."""
LAYERS = 2
"""Layers of the model; four more refine the latents and the text."""
BATCH = 4
LIMIT = 0.01
"""Largest accepted share of run time that a background save every 100 steps adds."""


class MeasuredError(Exception):
    """Ends a run after its last measured step, before it saves the last checkpoint."""


class WindowTimer:
    """An event sink that records when each window of steps ended, and every checkpoint."""

    def __init__(self, clock: PhaseClock, window: int, num_windows: int) -> None:
        self.ends: list[float] = []
        self.saved: list[CheckpointSaved] = []
        self.parameters = 0
        self.started_at = 0.0
        self._clock = clock
        self._window = window
        self._num_windows = num_windows

    def handle(self, event: Event) -> None:
        """Record an event; raise after the last window."""
        if isinstance(event, StepDone) and event.step % self._window == 0:
            self.ends.append(time.monotonic())
            self._clock.print(f"step {event.step}: {event.seconds:.3f} s, loss {event.loss:.4f}")
            if len(self.ends) == self._num_windows:
                raise MeasuredError
        elif isinstance(event, CheckpointSaved):
            self.saved.append(event)
            self._clock.print(
                f"checkpoint of step {event.step}: {event.nbytes / 1e9:.1f} GB in "
                f"{event.seconds:.1f} s, steps waited {event.stall_seconds:.3f} s"
            )
        elif isinstance(event, RunStarted):
            self.parameters = event.trainable_parameters
            self.started_at = time.monotonic()
        elif isinstance(event, Notice):
            self._clock.print(event.text)

    def close(self) -> None:
        """Do nothing."""


def main() -> int:
    """Train with both kinds of saving, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder for checkpoints; default: temporary")
    parser.add_argument("--batch", type=int, default=BATCH, help="samples in a step")
    arguments = results.parse_arguments(parser)
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse trains a miniature without one")
    clock = PhaseClock()
    figures: dict[str, Any] = {"batch": arguments.batch}
    for kind in SAVES:
        clock.print(f"{kind}:")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
            figures[kind] = measure(kind, Path(temporary), arguments, clock)
        results.write(NAME, dict(results.flatten(figures)), arguments.out, arguments.commit)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for name, value in results.flatten(figures):
        clock.print(f"{name}: {value}")
    return 0 if is_accepted(figures["background"]) or arguments.rehearse else 1


def measure(
    kind: str, folder: Path, arguments: argparse.Namespace, clock: PhaseClock
) -> dict[str, Any]:
    """Train, and return the seconds of the windows with and without a save.

    Window 0 warms up. Then windows without a save (odd ones) and with one (even ones) alternate.
    """
    window = SMALL_WINDOW if arguments.rehearse else WINDOWS[kind]
    num_windows = 1 + 2 * SAVES[kind]
    path = write_run(kind, folder, window, num_windows, arguments)
    timer = WindowTimer(clock, window, num_windows)
    try:
        with patch.object(pipeline_folder, "read_transformer", random_weights.random_transformer):
            run_training(load_run_file(path, environment={}).run, sinks=[timer])
    except MeasuredError:
        pass
    seconds = [end - start for start, end in zip(timer.ends, timer.ends[1:], strict=False)]
    without, with_save = seconds[::2], seconds[1::2]
    step_s = mean(without) / window
    added_s = mean(with_save) - mean(without)
    return {
        "parameters": timer.parameters,
        "checkpoint_gb": timer.saved[0].nbytes / 1e9,
        "step_s": step_s,
        "seconds_without": without,
        "seconds_with": with_save,
        "added_s": added_s,
        "added_share": added_s / (EVERY * step_s),
        "write_s": [event.seconds for event in timer.saved],
        "stall_s": [event.stall_seconds for event in timer.saved],
        "first_window_s": timer.ends[0] - timer.started_at,
    }


def write_run(
    kind: str, folder: Path, window: int, num_windows: int, arguments: argparse.Namespace
) -> Path:
    """Write the model without weights, the images and the run file."""
    total = window * num_windows
    given = argparse.Namespace(rehearse=arguments.rehearse, compile="never", steps=total)
    path = large_families.write_run("z_image", folder, given)
    config = folder / "model/transformer/config.json"
    layers = 2 if arguments.rehearse else LAYERS
    config.write_text(json.dumps(json.loads(config.read_text()) | {"n_layers": layers}))
    settings = json.loads(path.read_text())
    del settings["adapter"]
    settings["plan"] = "off"
    settings["model"]["dtype"] = "float32"
    settings["logging"]["every"] = min(10, window)
    settings["optimizer"]["lr"] = 1e-6
    settings["train"] |= {
        "batch_size": 1 if arguments.rehearse else arguments.batch,
        "max_train_steps": total + 1,  # no measured step is the last, which always saves
        "checkpoint_every": 2 * window,
        "keep_checkpoints": 1,
        "async_checkpoints": kind == "background",
        "check_gradients": False,
    }
    path.write_text(json.dumps(settings, indent=2))
    return path


def is_accepted(figures: dict[str, Any]) -> bool:
    """Return True if background saves are as cheap as promised, and fast enough."""
    is_in_time = max(figures["write_s"]) <= EVERY * figures["step_s"]
    return bool(figures["added_share"] <= LIMIT and is_in_time)


if __name__ == "__main__":
    raise SystemExit(main())
