"""Measure the CPU time that telemetry and health checks take, as a share of a training process.

A small model trains with steps of about 0.2 s, as a real run does: with logging every 10 steps,
checkpoints, validations, all sinks of an ordinary run, and the threads that watch it. The functions
of the telemetry are timed with the CPU clock of their thread, so that other processes on the
machine do not matter. Writing the new events to the log and to TensorBoard is included.

    python benchmarks/telemetry_cost.py
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import results

from gracetune.config.schema import RunFile
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.types import (
    DeviceSensors,
    HealthChanged,
    HeldOutLoss,
    LossParts,
    MemoryRoles,
    RunDescribed,
    StepTimes,
    UnifiedMemory,
    WeightsMoved,
)
from gracetune.train.health import StallWatch
from gracetune.train.last_seen import LastSeen
from gracetune.train.run import run_training
from gracetune.train.step_recorder import StepRecorder
from gracetune.train.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable

NEW_EVENTS = (
    DeviceSensors,
    HealthChanged,
    HeldOutLoss,
    LossParts,
    MemoryRoles,
    RunDescribed,
    StepTimes,
    UnifiedMemory,
    WeightsMoved,
)
MAX_SHARE = 0.005


class CpuTimes:
    """CPU seconds by name; a call inside a timed call counts only once."""

    def __init__(self, undo: ExitStack) -> None:
        """`undo` removes the timers again."""
        self._undo = undo
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._depth = 0

    def wrap(self, cls: type, name: str, only: tuple[type, ...] | None = None) -> None:
        """Time a method of a class; with `only`, only calls with such an event."""
        method: Callable[..., Any] = getattr(cls, name)
        label = f"{cls.__name__}.{name}"

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth or (only is not None and not isinstance(args[1], only)):
                return method(*args, **kwargs)
            self._depth += 1
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                self.seconds[label] += time.thread_time() - began
                self.calls[label] += 1

        setattr(cls, name, timed)
        self._undo.callback(setattr, cls, name, method)


def main() -> None:
    """Train once with the timers in place, and write the figures."""
    arguments = results.parse_arguments(argparse.ArgumentParser(description=__doc__))
    steps = 12 if arguments.rehearse else 200
    with ExitStack() as stack:
        times, threads = CpuTimes(stack), CpuTimes(stack)
        for name in ("collect", "note", "add_held_out", "after_validation", "start"):
            times.wrap(Telemetry, name)
        for name in ("mark", "add_losses", "add_parts", "add_gradients"):
            times.wrap(StepRecorder, name)
        threads.wrap(StallWatch, "look")
        threads.wrap(LastSeen, "read_memory")
        times.wrap(EventDispatcher, "emit", NEW_EVENTS)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        began = time.process_time(), time.monotonic()
        run_training(run_file(Path(folder), steps, arguments.rehearse))
        cpu, wall = time.process_time() - began[0], time.monotonic() - began[1]
    seconds = {**times.seconds, **threads.seconds}
    total = sum(seconds.values())
    figures = {
        "steps": steps,
        "seconds_per_step": wall / steps,
        "cpu_s_per_step": cpu / steps,
        "process_cpu_s": cpu,
        "telemetry_cpu_s": total,
        "telemetry_share": total / cpu,
        "telemetry_us_per_step": 1e6 * total / steps,
        "cpu_s": dict(sorted(seconds.items(), key=lambda item: -item[1])),
        "calls": dict(times.calls + threads.calls),
    }
    print(f"telemetry: {total:.3f} s of {cpu:.1f} s CPU time, {total / cpu:.3%} of the process")
    print(results.write("telemetry_cost", figures, arguments.out, arguments.commit))
    if not arguments.rehearse:
        assert total / cpu < MAX_SHARE, f"{total / cpu:.2%} of the CPU time"


def run_file(folder: Path, steps: int, is_rehearsal: bool) -> RunFile:
    """Return a run with steps of about 0.2 s on one core."""
    return RunFile.model_validate(
        {
            "output_dir": str(folder / "run"),
            "datasets": [
                {
                    "id": "shapes",
                    "type": "shapes",
                    "instance_data_dir": str(folder / "shapes"),
                    "shapes": {"copies": 2},
                    "resolution": 32,
                }
            ],
            "adapter": {"rank": 16},
            "train": {
                "max_train_steps": steps,
                "batch_size": 2 if is_rehearsal else 32,
                "checkpoint_every": 100,
            },
            "validation": {
                "every": 100,
                "holdout": 0.1,
                "sample_steps": 2,
                "prompts": ["a red circle"],
            },
        }
    )


if __name__ == "__main__":
    main()
