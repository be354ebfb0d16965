"""`gracetune baseline`: measure repeated runs of a run file, and compare two measurements."""

from __future__ import annotations

import json
import math
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
from gracetune.atomic_files import write_text
from gracetune.cli.main import add_set_argument, read_run
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.performance_baseline import (
    BASELINE_FILE,
    METRICS,
    REPORT_FILE,
    Baseline,
    compare,
    comparison_lines,
    environment_differences,
    measure_run,
    measured_differently,
    overall_verdict,
    read_baseline,
    report_lines,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from gracetune.config.schema import RunFile
    from gracetune.events.performance_baseline import RunMeasurement

HELP = "Measure a run file several times, and compare the result with a later measurement."
SMI_LOG = "nvidia_smi.log"
_SMI = (
    "nvidia-smi",
    "--query-gpu=timestamp,index,name,utilization.gpu,memory.used,power.draw,temperature.gpu",
    "--format=csv",
    "--loop=1",
)
_MAX_WARMUP = 10
EXIT_CODES = {"none": 0, "regression": 1, "undecided": 3}
"""Exit codes of `compare` by verdict. 2 is a usage error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `capture` and `compare` and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    capture = actions.add_parser(
        "capture", help="train a run file several times and store its metrics"
    )
    capture.set_defaults(run_action=_capture)
    capture.add_argument("run_file", metavar="RUN", help="the run file to measure")
    capture.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="number of runs (default 3)"
    )
    capture.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help=f"first steps to leave out (default: a fifth of them, at most {_MAX_WARMUP})",
    )
    add_set_argument(capture)
    capture.add_argument(
        "--output", type=Path, default=Path("baseline"), metavar="FOLDER", help="default: baseline"
    )
    capture.add_argument("--replace", action="store_true", help="replace an existing baseline")
    comparison = actions.add_parser(
        "compare",
        help="compare two baselines; exit code 1 if the second is worse, 3 if that is undecided",
    )
    comparison.set_defaults(run_action=_compare)
    comparison.add_argument(
        "before", type=Path, metavar="BEFORE", help="a baseline's folder or file"
    )
    comparison.add_argument(
        "after", type=Path, metavar="AFTER", help="another baseline's folder or file"
    )
    comparison.add_argument(
        "--tolerance", type=float, default=5.0, metavar="PERCENT", help="default: 5 (percent)"
    )
    comparison.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the report to FILE"
    )
    comparison.add_argument("--json", action="store_true", help="print JSON instead of text")
    comparison.add_argument(
        "--metric",
        action="append",
        choices=[metric.name for metric in METRICS],
        metavar="NAME",
        dest="metrics",
        help="compare only this metric, such as samples_per_s; can be repeated (default: all)",
    )
    comparison.add_argument(
        "--allow-different",
        action="store_true",
        help="compare although the run files, measured steps or kinds of machine differ",
    )


def run(args: argparse.Namespace) -> int:
    """Run `gracetune baseline capture` or `gracetune baseline compare`."""
    action: Callable[[argparse.Namespace], int] = args.run_action
    return action(args)


def _capture(args: argparse.Namespace) -> int:
    scenario = read_run(args.run_file, args.overrides)
    steps = scenario.train.max_train_steps
    warmup = min(_MAX_WARMUP, steps // 5) if args.warmup is None else args.warmup
    if args.repeats < 1:
        raise ConfigError(f"--repeats is {args.repeats}, but must be 1 or more. Raise it.")
    if not 0 <= warmup < steps:
        raise ConfigError(
            f"--warmup is {warmup}, but must be less than train.max_train_steps ({steps}), so that "
            "some steps can be measured. Lower it."
        )
    output: Path = args.output
    if (output / BASELINE_FILE).exists() and not args.replace:
        raise ConfigError(
            f"{output / BASELINE_FILE} already exists. Add --replace, or choose another --output."
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
        scenario=_comparable_settings(scenario),
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
    print(f"Baseline written to {output}.")
    return 0


def _train(run_file: str, overrides: Sequence[str], output: Path, number: int) -> Path:
    """Train once in a separate process and folder; keep only the log and return its path."""
    # Not a name that a run of the user may have, which would be deleted.
    folder = output / f".baseline-run-{number:02d}"
    if folder.exists():  # left behind by a capture that was killed
        shutil.rmtree(folder)
    sets = [word for each in (*overrides, f"output_dir={folder}") for word in ("--set", each)]
    command = [sys.executable, "-m", "gracetune", "train", run_file, "--resume", "none", *sets]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        tail = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()[-15:]
        raise RunFailedError(
            f"run {number} failed with exit code {done.returncode}, so there is no baseline. Fix "
            "the run first. Its last lines:\n  " + "\n  ".join(tail)
        )
    log = output / f"events-{number:02d}.jsonl"
    (folder / "events.jsonl").replace(log)
    shutil.rmtree(folder)
    return log


def _comparable_settings(run: RunFile) -> dict[str, object]:
    """Return all settings of a run but the output folder.

    Two baselines (measurements of runs) can be compared if these settings are equal.
    """
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
    if measured.plan:
        facts["plan"] = measured.plan
    if shutil.which(_SMI[0]):
        listed = subprocess.run(
            [_SMI[0], "--list-gpus"], capture_output=True, text=True, check=False
        )
        facts["gpus"] = listed.stdout.strip() or listed.stderr.strip()
    return facts


@contextmanager
def _gpu_log(path: Path) -> Iterator[None]:
    """Log the GPU's state with nvidia-smi every second while the `with` block runs."""
    if shutil.which(_SMI[0]) is None:
        print(f"nvidia-smi is not installed: {SMI_LOG} is not written.")
        yield
        return
    with path.open("wb") as log, subprocess.Popen(_SMI, stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()


def _compare(args: argparse.Namespace) -> int:
    if not 0 <= args.tolerance < 100:
        raise ConfigError(
            f"--tolerance is {args.tolerance}, but must be a percentage from 0 to below 100."
        )
    before, after = read_baseline(args.before), read_baseline(args.after)
    changed = measured_differently(before, after)
    if changed and not args.allow_different:
        raise ConfigError(
            f"the two baselines differ in {', '.join(changed)}. Capture the same run file again in "
            "the same way, or add --allow-different."
        )
    tolerance = args.tolerance / 100
    metrics = [each for each in METRICS if args.metrics is None or each.name in args.metrics]
    deltas = compare(before, after, tolerance, metrics)
    verdict = overall_verdict(deltas)
    differences = [*environment_differences(before, after)]
    scope = "" if args.metrics is None else ", ".join(metric.label for metric in metrics)
    lines = [*differences, *comparison_lines(deltas, tolerance, changed, scope)]
    if args.output is not None:
        write_text(args.output, "\n".join(lines) + "\n")
    if args.json:
        records = [
            {
                "metric": delta.metric.name,
                "before": _json_number(delta.before),
                "after": _json_number(delta.after),
                "change": _json_number(delta.change),
                "noise": _json_number(delta.noise),
                "verdict": delta.verdict,
                "why": delta.why,
            }
            for delta in deltas
        ]
        report = {
            "verdict": verdict,
            "not_comparable": changed,
            "differences": differences,
            "deltas": records,
        }
        print(json.dumps(report, indent=2))
    else:
        print(*lines, sep="\n")
    return EXIT_CODES[verdict]


def _json_number(value: float | None) -> float | str | None:
    """Return a number that JSON can hold; infinity and NaN become text."""
    return value if value is None or math.isfinite(value) else str(value)
