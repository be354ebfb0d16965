"""Trace one step of `gracetune train` on the GPU, and compare its parts with the plan.

The planner predicts a step as a sum of kernels and waits. When a prediction is wrong, this script
shows which part is: it trains a model of published shape with random weights, records the kernels
and copies of one steady step with torch's profiler, and writes their time beside the plan's:

    compute    kernels by kind (matmuls, attention, elementwise)
    gaps       time without a kernel: where in the step, and if the CPU had launched the next one
    copies     bytes, time and rate of copies in each direction, and the time both ran together
    kernels    the kernels with the most time, with their number of calls
    host       launch costs that the planner has measured, and the CPU's time in each block

    PYTHONPATH=src:benchmarks python benchmarks/step_trace.py --name flux_eager_24
        [--family flux] [--memory 24] [--batch 2] [--compile never] [--frozen-compute bf16]
        [--layers 19,38] [--steps 16] [--raw FILE] [--out FOLDER] [--rehearse]

`--raw` also writes every kernel and copy: start and duration in microseconds, stream, bytes, name.
Results under other names are kept. The figures of the run are written before its trace is read,
which takes a while.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import product_run
import results
import torch
from product_run import ProductRun
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile
from wan14b_step import COPIES, kind_of

from gracetune.cli.main import main as gracetune
from gracetune.train import loop

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "step_trace"
TRACED_STEPS = 1
TOP_KERNELS, LONGEST_CALLS = 40, 12
SHORT_GAP_US = 3
"""Gaps between kernels that are always there."""
LAYER_SETTINGS = {
    "flux": ("num_layers", "num_single_layers"),
    "qwen_image": ("num_layers",),
    "wan21": ("num_layers",),
}
"""Settings of each model's numbers of blocks."""


def main() -> int:
    """Train, trace a step, and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="rehearsal", help="name of the results")
    parser.add_argument("--family", default="flux", choices=LAYER_SETTINGS)
    parser.add_argument("--memory", type=float, default=24, help="limit of device memory in GB")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--compile", default="never", choices=("auto", "always", "never"))
    parser.add_argument("--frozen-compute", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--layers", default="", help="number of blocks of each kind; default: all")
    parser.add_argument("--steps", type=int, default=16, help="the step before the last is traced")
    parser.add_argument("--raw", type=Path, default=None, help="file for all kernels, .json.gz")
    arguments = results.parse_arguments(parser)
    if arguments.rehearse:
        arguments.steps = 6
    figures = results.previous(NAME, arguments)
    figures = {k: v for k, v in figures.items() if not k.startswith(f"{arguments.name}.")}
    found: dict[str, Any] = {"commit": arguments.commit or results.this_commit()}
    for more in trace(arguments):
        found |= more
        merged = figures | dict(results.flatten({arguments.name: found}))
        results.write(NAME, merged, arguments.out, arguments.commit)
    show(found)
    return 0


def trace(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train with a profiler around one step; yield the run's figures, then those of the trace."""
    small = arguments.rehearse
    numbers = [int(number) for number in arguments.layers.split(",") if number]
    config = dict(zip(LAYER_SETTINGS[arguments.family], numbers, strict=False))
    run = ProductRun(
        "wan22" if arguments.family == "wan21" else arguments.family,
        arguments.memory,
        arguments.batch,
        arguments.steps,
        arguments.steps // 2,
        compile=arguments.compile,
        frozen_compute=arguments.frozen_compute,
        sizes=product_run.SIZES[:1],
        settings={"train": {"max_train_steps": arguments.steps}},
    )
    profiler = StepProfiler(arguments.steps - 1)
    with ExitStack() as stack:
        nbytes = 0 if small else 30 * 10**9
        model = stack.enter_context(
            product_run.model_folder(arguments.family, nbytes, small=small, config=config)
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sizes = product_run.SMALL_SIZES[:1] if small else run.sizes
        product_run.write_samples(folder / "samples", sizes, product_run.PER_SIZE)
        path = product_run.write_run_file(run, model, folder, small=small)
        stack.enter_context(patch.object(loop, "train_step", profiler.wrap(loop.train_step)))
        code = gracetune(["train", str(path)])
        events = product_run.read_events(folder / "run" / "events.jsonl")
        described = [event for event in events if event["event"] == "run_described"]
        yield {
            "exit_code": code,
            **product_run.figures_of(run, events, events[0]["time"]),
            "host_ms": profiler.host_ms,
            "planned_s": described[0]["plan"]["seconds"] if described else {},
        }
        records = profiler.records(folder / "trace.json")
    if arguments.raw is not None:
        with gzip.open(arguments.raw, "wt") as file:
            json.dump(records, file)
    longest = profiler.call_s.most_common(LONGEST_CALLS)
    yield {**summary(records), "cuda_calls_s": dict(longest)}


class BlockClock:
    """Measures the CPU's time in the forward of each kind of block, while it is open.

    With a busy device this is the time to launch the block, or to wait for room in the queue.
    """

    def __init__(self) -> None:
        self._began: dict[nn.Module, float] = {}
        self._seconds: dict[str, list[float]] = {}

    def __enter__(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end),
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def median_ms(self) -> dict[str, float]:
        """The median by class of the block."""
        return {name: 1e3 * median(seconds) for name, seconds in self._seconds.items()}

    def _begin(self, module: nn.Module, _: object) -> None:
        if type(module).__name__.endswith("TransformerBlock"):
            self._began[module] = time.perf_counter()

    def _end(self, module: nn.Module, _: object, __: object) -> None:
        began = self._began.pop(module, None)
        if began is not None:
            seconds = self._seconds.setdefault(type(module).__name__, [])
            seconds.append(time.perf_counter() - began)


class StepProfiler:
    """Records the kernels of one call of a function."""

    def __init__(self, number: int) -> None:
        """`number` of the call to trace, from 1."""
        self._number = number
        self._calls = 0
        self._clock = BlockClock()
        self.call_s: Counter[str] = Counter()
        """Seconds of the traced step in each function of CUDA, as seen by the CPU."""
        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])

    def wrap(self, function: Any) -> Any:
        """Return a function that calls `function`, and traces one of the calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls == self._number - 1:  # without the profiler, which slows launches down
                with self._clock:
                    return function(*args, **kwargs)
            if self._calls != self._number:
                return function(*args, **kwargs)
            results.synchronize(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            with self._profile:
                result = function(*args, **kwargs)
                results.synchronize(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            return result

        return call

    @property
    def host_ms(self) -> dict[str, float]:
        """The CPU's median time in the forward of a block, in the step before the traced one."""
        return self._clock.median_ms

    def records(self, path: Path) -> list[dict[str, Any]]:
        """Return the traced kernels and copies; `path` is for a temporary file."""
        self._profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
        launched = {
            one["args"]["correlation"]: one["ts"] + one["dur"]
            for one in calls
            if "correlation" in one["args"]
        }
        for one in calls:
            self.call_s[one["name"]] += one["dur"] / 1e6
        on_device = ("kernel", "gpu_memcpy", "gpu_memset")
        kinds = on_device if torch.cuda.is_available() else ("cpu_op",)
        return [
            {
                "start": event["ts"],
                "us": event["dur"],
                "stream": event["tid"],
                "nbytes": event.get("args", {}).get("bytes", 0),
                "name": event["name"],
                "launched": launched.get(event.get("args", {}).get("correlation"), event["ts"]),
            }
            for event in sorted(events, key=lambda one: one.get("ts", 0))
            if event.get("cat") in kinds and "dur" in event
        ]


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the step's seconds by kind of kernel, its copies and its gaps."""
    copies = [one for one in records if kind_of(one["name"]) == COPIES]
    kernels = [one for one in records if kind_of(one["name"]) != COPIES]
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for one in kernels:
        kinds[kind_of(one["name"])] += one["us"] / 1e6
        names[one["name"]] += one["us"] / 1e6
        calls[one["name"]] += 1
    span = (records[-1]["start"] + records[-1]["us"] - records[0]["start"]) / 1e6 if records else 0
    found: dict[str, Any] = {
        "traced_s": span,
        "traced_kinds_s": dict(kinds),
        "traced_idle_s": span - busy_seconds(kernels),
        "gaps": gaps(kernels),
        "kernels": len(kernels),
        "top_kernels": [
            f"{s:.5f} s, {calls[n]}x {n[:120]}" for n, s in names.most_common(TOP_KERNELS)
        ],
    }
    for way, label in (("htod", "in"), ("dtoh", "out")):
        those = [one for one in copies if way in one["name"].lower()]
        seconds = sum(one["us"] for one in those) / 1e6
        nbytes = sum(one["nbytes"] for one in those)
        found[f"copies_{label}"] = {
            "number": len(those),
            "nbytes": nbytes,
            "seconds": seconds,
            "gb_s": nbytes / seconds / 1e9 if seconds else 0.0,
        }
    return found


def gaps(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return where the device was idle between kernels, and what it waited for.

    A kernel that was launched after the last one had ended is late because of the CPU. One that was
    launched before waited for another stream, or for the device to start it.
    """
    found: dict[str, Any] = {"late_launch_s": 0.0, "launched_before_s": 0.0, "short_s": 0.0}
    if not kernels:
        return found
    begin, span = kernels[0]["start"], kernels[-1]["start"] - kernels[0]["start"]
    by_tenth = [0.0] * 10
    longest = []
    last, end = kernels[0], kernels[0]["start"] + kernels[0]["us"]
    for one in kernels[1:]:
        gap = one["start"] - end
        if gap > 0:
            late = one["launched"] > end
            kind = "late_launch_s" if late else "launched_before_s"
            found["short_s" if gap < SHORT_GAP_US else kind] += gap / 1e6
            by_tenth[min(9, int(10 * (end - begin) / span))] += gap / 1e6
            place = f"{gap / 1e3:.2f} ms at {(end - begin) / 1e3:.0f} ms"
            names = f"{last['name'][:60]} -> {one['name'][:60]}"
            longest.append((gap, f"{place}, {'late' if late else 'launched before'}: {names}"))
        if one["start"] + one["us"] > end:
            last, end = one, one["start"] + one["us"]
    longest.sort(reverse=True)
    return found | {"by_tenth_s": by_tenth, "longest": [text for _, text in longest[:TOP_KERNELS]]}


def busy_seconds(records: list[dict[str, Any]]) -> float:
    """Return the seconds in which at least one of the records runs."""
    busy = end = 0.0
    for one in records:
        begin, finish = one["start"], one["start"] + one["us"]
        busy += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return busy / 1e6


def show(found: dict[str, Any]) -> None:
    """Print the plan's parts beside the traced ones."""
    for key in ("plan", "check", "predicted_seconds", "seconds", "predicted_peak_gib", "peak_gib"):
        print(f"{key:<22}{found.get(key)}")
    parts = ("planned_s", "traced_kinds_s", "copies_in", "copies_out", "phases_s")
    for key in (*parts, "launch_costs_us", "host_ms", "cuda_calls_s"):
        values = {name: round(value, 4) for name, value in found.get(key, {}).items()}
        print(f"{key:<22}{values}")
    print(f"{'traced, idle':<22}{found['traced_s']:.4f} s, {found['traced_idle_s']:.4f} s")
    for name in ("late_launch_s", "launched_before_s", "short_s", "by_tenth_s"):
        print(f"{'gaps, ' + name:<22} {found['gaps'].get(name)}")
    for line in [*found["top_kernels"][:20], *found["gaps"].get("longest", ())[:20]]:
        print(f"    {line}")


if __name__ == "__main__":
    sys.exit(main())
