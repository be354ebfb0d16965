"""`gracetune baseline`: measure a run file several times, and compare two such measurements."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune import __version__
from gracetune.config.load import load_run_file
from gracetune.atomic_files import write_text
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.baseline import (
    BASELINE_FILE,
    REPORT_FILE,
    Baseline,
    compare,
    comparison_lines,
    environment_differences,
    measure_run,
    read_baseline,
    report_lines,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.config.schema import RunFile
    from gracetune.events.baseline import RunMeasurement

HELP = "Measure a run file, repeatedly, and tell whether a later measurement differs from it."
SMI_LOG = "nvidia_smi.log"
_SMI = (
    "nvidia-smi",
    "--query-gpu=timestamp,index,name,utilization.gpu,memory.used,power.draw,temperature.gpu",
    "--format=csv",
    "--loop=1",
)
_MOST_WARMUP = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One verb, two actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    take = actions.add_parser("capture", help="run a scenario and keep its figures")
    take.set_defaults(run_action=_capture)
    take.add_argument("run_file", metavar="RUN", help="the scenario: a run file")
    take.add_argument("--repeats", type=int, default=3, metavar="N", help="runs (default 3)")
    take.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help=f"steps left out of each run (default: a fifth, at most {_MOST_WARMUP})",
    )
    take.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="as in train"
    )
    take.add_argument(
        "--output", type=Path, default=Path("baseline"), metavar="FOLDER", help="default: baseline"
    )
    take.add_argument("--replace", action="store_true", help="replace a baseline that is there")
    held = actions.add_parser("compare", help="the figures of two baselines; exit 1 if worse")
    held.set_defaults(run_action=_compare)
    held.add_argument("before", type=Path, metavar="BEFORE", help="a baseline's folder or file")
    held.add_argument("after", type=Path, metavar="AFTER")
    held.add_argument(
        "--tolerance", type=float, default=5.0, metavar="PERCENT", help="default: 5 (percent)"
    )
    held.add_argument("--output", type=Path, metavar="FILE", help="write the lines there too")
    held.add_argument("--json", action="store_true", help="print JSON instead of lines")
    held.add_argument(
        "--allow-different", action="store_true", help="compare though the scenarios differ"
    )


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    act: Callable[[argparse.Namespace], int] = args.run_action
    return act(args)


def _capture(args: argparse.Namespace) -> int:
    scenario = load_run_file(args.run_file, args.overrides).run
    steps = scenario.train.max_train_steps
    warmup = min(_MOST_WARMUP, steps // 5) if args.warmup is None else args.warmup
    if args.repeats < 1:
        raise ConfigError(f"--repeats is {args.repeats}; it must be 1 or more.")
    if not 0 <= warmup < steps:
        raise ConfigError(
            f"--warmup is {warmup} of {steps} steps (train.max_train_steps); some must be left to "
            "measure."
        )
    output: Path = args.output
    if (output / BASELINE_FILE).exists() and not args.replace:
        raise ConfigError(
            f"{output / BASELINE_FILE} is there already; give --replace, or another --output."
        )
    output.mkdir(parents=True, exist_ok=True)
    measured = []
    with _gpu_log(output / SMI_LOG):
        for number in range(1, args.repeats + 1):
            log = _train(args.run_file, args.overrides, output, number)
            measured.append(measure_run(log, warmup))
            rate = measured[-1].measures.samples_per_s
            print(f"run {number} of {args.repeats}: {rate:.4g} samples/s", flush=True)
    baseline = Baseline(
        captured=datetime.now(UTC).isoformat(timespec="seconds"),
        gracetune=__version__,
        scenario=_scenario(scenario),
        machine=_machine(measured[0]),
        steps=measured[0].steps,
        warmup_steps=warmup,
        window_steps=scenario.logging.every,
        repeats=tuple(one.measures for one in measured),
    )
    lines = [*report_lines(baseline)]
    write_text(output / BASELINE_FILE, baseline.model_dump_json(indent=2) + "\n")
    write_text(output / REPORT_FILE, "\n".join(lines) + "\n")
    print(*lines, sep="\n")
    print(f"The baseline is in {output}.")
    return 0


def _train(run_file: str, overrides: Sequence[str], output: Path, number: int) -> Path:
    """One run in a process and a folder of its own; only its log is kept."""
    folder = output / f"run-{number:02d}"
    if folder.exists():  # what a capture that was killed left behind
        shutil.rmtree(folder)
    sets = [word for each in (*overrides, f"output_dir={folder}") for word in ("--set", each)]
    command = [sys.executable, "-m", "gracetune", "train", run_file, "--resume", "none", *sets]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()[-15:]
        raise RunFailedError(
            f"run {number} of the scenario ended with {done.returncode}, so there is no baseline. "
            "Its last lines:\n  " + "\n  ".join(tail)
        )
    log = output / f"events-{number:02d}.jsonl"
    (folder / "events.jsonl").replace(log)
    shutil.rmtree(folder)
    return log


def _scenario(run: RunFile) -> dict[str, object]:
    """What makes two captures comparable: everything but where a run is written."""
    settings: dict[str, object] = run.model_dump(mode="json")
    del settings["output_dir"]
    return settings


def _machine(measured: RunMeasurement) -> dict[str, str]:
    facts = {
        "host": platform.node(),
        "architecture": platform.machine(),
        "cpus": str(os.cpu_count()),
        "torch": version("torch"),
        "device": measured.device,
        "precision": measured.precision,
    }
    if shutil.which(_SMI[0]):
        listed = subprocess.run(
            [_SMI[0], "--list-gpus"], capture_output=True, text=True, check=False
        )
        facts["gpus"] = listed.stdout.strip() or listed.stderr.strip()
    return facts


@contextmanager
def _gpu_log(path: Path) -> Iterator[None]:
    """Let nvidia-smi write beside the runs, where it is."""
    if shutil.which(_SMI[0]) is None:
        print(f"nvidia-smi is not here: no {SMI_LOG} is written.")
        yield
        return
    with path.open("wb") as log, subprocess.Popen(_SMI, stdout=log, stderr=log) as watching:
        try:
            yield
        finally:
            watching.terminate()


def _compare(args: argparse.Namespace) -> int:
    if not 0 <= args.tolerance < 100:
        raise ConfigError(f"--tolerance is {args.tolerance}; it is a percentage, such as 5.")
    before, after = read_baseline(args.before), read_baseline(args.after)
    changed = [key for key in before.scenario if before.scenario[key] != after.scenario.get(key)]
    if changed and not args.allow_different:
        raise ConfigError(
            f"the scenarios differ in {', '.join(changed)}, so their figures are no measure of "
            "the same thing. Capture the same run file again, or give --allow-different."
        )
    tolerance = args.tolerance / 100
    deltas = compare(before, after, tolerance)
    lines = [*environment_differences(before, after), *comparison_lines(deltas, tolerance)]
    if args.output is not None:
        write_text(args.output, "\n".join(lines) + "\n")
    if args.json:
        told = [
            {
                "metric": delta.metric.name,
                "before": delta.before,
                "after": delta.after,
                "change": delta.change,
                "noise": delta.noise,
                "verdict": delta.verdict,
            }
            for delta in deltas
        ]
        print(json.dumps({"differences": [*environment_differences(before, after)], "deltas": told}, indent=2))
    else:
        print(*lines, sep="\n")
    return 1 if any(delta.fails for delta in deltas) else 0
