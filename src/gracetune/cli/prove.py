"""`gracetune prove RUN`: check a machine and a run file, and write one report to send back.

Each part is a process of its own, so that the others continue if one fails, hangs or is killed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gracetune import __version__
from gracetune.atomic_files import write_text
from gracetune.cli.main import add_run_file_arguments, read_run
from gracetune.cli.proof_report import (
    FORMAT,
    Part,
    Privacy,
    clean_error,
    loss_plot,
    public_settings,
    write_html,
    write_json,
)
from gracetune.config.checks import check_run
from gracetune.config.environment import process_environment
from gracetune.errors import ConfigError
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import RunFile

HELP = (
    "Check this machine and a run file: diagnose, gradients, plan against measured, a tuned loop "
    "against gracetune, and a short training. Writes one HTML and one JSON report to send back."
)
PARTS = {
    "machine": "The machine",
    "diagnose": "gracetune diagnose",
    "gradients": "Gradients and updates against plain blocks",
    "tuned_loop": "A tuned loop of diffusers and peft",
    "training": "A short training",
    "plan": "Planned against measured",
    "comparison": "gracetune against the tuned loop",
}
CHOICES = ("diagnose", "gradients", "tuned_loop", "training")
"""Parts that `--only` selects; the others are computed from them."""
NO_GPU = "there is no GPU that torch can use"
UNKNOWN_GPU = "the machine could not be described, so it is not known whether it has a GPU"
WARM_UP = 0.4
"""Share of the first steps that are left out of speeds: they compile, and the plan corrects
itself."""
LOG_EVERY = 5
ERROR_LINES = 6
THUMBNAIL_EDGE = 288
MAX_SAMPLES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: run file, output folder, steps, parts and what the report may have."""
    add_run_file_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("proof"),
        metavar="FOLDER",
        help="folder for proof.html, proof.json and the parts' files (default: proof)",
    )
    parser.add_argument(
        "--steps", type=int, default=40, metavar="N", help="steps of the training (default 40)"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=4,
        metavar="N",
        help="blocks whose gradients are compared (default 4)",
    )
    parser.add_argument(
        "--only", action="append", choices=CHOICES, metavar="PART", help="run only this part"
    )
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="MINUTES", help="for each part (default 60)"
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        choices=("captions", "host"),
        help="allow prompts, or the host's name, in the report",
    )
    parser.add_argument(
        "--no-samples", action="store_true", help="leave generated samples out of the report"
    )
    # The next two are for the processes that this command starts.
    parser.add_argument("--part", choices=("machine", "tuned_loop"), help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the parts and write the reports; the exit code is 1 if a part failed."""
    if args.steps < 2 * LOG_EVERY:
        raise ConfigError(
            f"--steps is {args.steps}, but must be {2 * LOG_EVERY} or more, so that some steps are "
            "left after the first ones. Raise it."
        )
    run_file = read_run(args.run_file, args.overrides)
    check_run(run_file)
    if args.part:
        return _run_part(args, run_file)
    proof = Proof(args, run_file)
    proof.run_parts()
    return proof.write()


class Proof:
    """Runs the parts one after the other and collects their results."""

    def __init__(self, args: argparse.Namespace, run_file: RunFile) -> None:
        self._args = args
        self._run_file = run_file
        include = set(args.include)
        self._privacy = Privacy(
            run_file,
            process_environment(),
            host="host" in include,
            captions="captions" in include,
        )
        self._folder = Path(args.output)
        self._work = self._folder / "work"
        self._output = self._work / "run"
        if (self._output / "checkpoints").exists():
            raise ConfigError(
                f"--output is {self._folder}, which has a proof already. Choose another folder, or "
                "remove that one."
            )
        self._work.mkdir(parents=True, exist_ok=True)
        self._parts = {name: Part(name, title) for name, title in PARTS.items()}
        self._has_gpu: bool | None = None
        """None until the machine is described, and if that fails."""

    def run_parts(self) -> None:
        """Run every part; a part that fails does not stop the others."""
        self._machine()
        runners = {
            "diagnose": self._diagnose,
            "gradients": self._gradients,
            "tuned_loop": self._tuned_loop,
            "training": self._training,
        }
        for name, run_part in runners.items():
            part = self._parts[name]
            if self._args.only and name not in self._args.only:
                part.summary = "not selected with --only"
                continue
            print(f"{part.title} ...", file=sys.stderr, flush=True)
            run_part(part)
            print(f"  {part.status}: {part.summary}", file=sys.stderr, flush=True)
        self._plan(self._parts["plan"])
        self._comparison(self._parts["comparison"])

    def write(self) -> int:
        """Write both reports and say what is in them; return the exit code."""
        samples = [] if self._args.no_samples else self._samples()
        settings = public_settings(self._run_file)
        contents = self._contents(len(samples))
        document = {
            "format": FORMAT,
            "gracetune": __version__,
            "date": datetime.now(UTC).date().isoformat(),
            "settings": settings,
            "parts": [asdict(part) for part in self._parts.values()],
            "contents": contents,
        }
        document = self._privacy.clean(document)
        write_text(self._folder / "proof.json", write_json(document))
        write_text(self._folder / "proof.html", write_html(document, samples))
        for part in self._parts.values():
            print(f"{part.status:<9} {part.title}: {part.summary}")
        print(f"report     {self._folder / 'proof.html'} and {self._folder / 'proof.json'}")
        print("They contain:", *(f"  {line}" for line in contents), sep="\n")
        print(f"Send these two files only: {self._work} has your data and paths.")
        return 1 if any(part.status == "failed" for part in self._parts.values()) else 0

    # The parts

    def _machine(self) -> None:
        part = self._parts["machine"]
        output = self._call(part, ["prove", *self._run_words(), "--part", "machine"])
        if output is None:
            return
        part.details = json.loads(output)
        if "host" not in self._args.include:
            part.details.pop("host")
        gpus = part.details["gpus"]
        self._has_gpu = bool(gpus)
        names = ", ".join(f"{gpu['name']} ({format_bytes(gpu['memory'])})" for gpu in gpus)
        part.status, part.summary = "measured", names or NO_GPU

    def _diagnose(self, part: Part) -> None:
        report = self._work / "diagnose.json"
        words = ["diagnose", "--json", "--allow-cpu", "--output", str(report)]
        output = self._call(part, words, accepted=(0, 1))
        if output is None:
            return
        document = json.loads(output)
        counts = document["summary"]
        part.details = {one["name"]: f"{one['status']}: {one['text']}" for one in _checks(output)}
        part.summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        part.status = "failed" if counts.get("fail") else "passed"
        if self._has_gpu is False:
            part.status = "skipped"
            part.summary = f"{NO_GPU}; checks of the host: {part.summary}"

    def _gradients(self, part: Part) -> None:
        words = ["check", "gradients", *self._run_words(), "--json"]
        output = self._call(part, [*words, "--blocks", str(self._args.blocks)], accepted=(0, 1))
        if output is None:
            return
        document = json.loads(output)
        if not document["blocks"]:
            part.status, part.summary = "failed", "no block was compared"
            return
        part.details = {
            "blocks": [
                {
                    kind: value if not isinstance(value, dict) else _error(value)
                    for kind, value in block.items()
                }
                for block in document["blocks"]
            ]
        }
        failed = [block for block in document["blocks"] if not block["passed"]]
        part.status = "passed" if document["passed"] else "failed"
        part.summary = f"{len(failed)} of {len(document['blocks'])} blocks differ from plain blocks"

    def _tuned_loop(self, part: Part) -> None:
        if not self._has_gpu:
            part.summary = NO_GPU if self._has_gpu is False else UNKNOWN_GPU
            return
        errors = []
        for mode in ("without", "with"):
            one = Part(part.name, part.title)
            words = ["prove", *self._run_words(), "--part", "tuned_loop"]
            words += ["--steps", str(self._args.steps)]
            if mode == "with":
                words.append("--checkpointing")
            output = self._call(one, words)
            part.seconds += one.seconds
            found = {"error": one.summary} if output is None else json.loads(output)
            if "unsupported" in found:
                part.summary = found["unsupported"]
                return
            errors += [found["error"]] if "error" in found else []
            part.details[f"{mode} gradient checkpointing"] = found
        if speeds := [one["samples_per_s"] for one in self._timed_loops()]:
            part.status, part.summary = "measured", f"{max(speeds):.4g} samples/s"
        elif errors:
            part.status, part.summary = "failed", errors[0]
        else:
            part.status = "measured"
            part.summary = "does not fit the GPU, with or without gradient checkpointing"

    def _timed_loops(self) -> list[dict[str, Any]]:
        """Return the tuned loops that have run to their end."""
        return [one for one in self._parts["tuned_loop"].details.values() if "samples_per_s" in one]

    def _training(self, part: Part) -> None:
        words = ["train", *self._run_words(), "--resume", "none"]
        if self._call(part, words) is None:
            return
        events = self._events()
        steps = [line for line in events if line["event"] == "step_done"]
        losses = [line["loss"] for line in steps]
        described = next(line for line in events if line["event"] == "run_described")
        peaks = [line["device_peak"] for line in events if line["event"] == "memory_used"]
        health = [line for line in events if line["event"] == "health"]
        samples = self._sample_records()
        problems = {one["number"]: one["problem"] for one in samples if one["problem"]}
        # A model with random weights, or with a broken VAE, shows nothing before training either.
        earlier = [one["number"] for one in self._sample_records(step=0) if one["problem"]]
        new_problems = problems.keys() - set(earlier)
        measured = _speed(steps)
        part.details = {
            "steps": len(steps),
            "losses": losses,
            "curve": loss_plot([loss for loss in losses if isinstance(loss, float)]),
            "seconds_per_step": measured["seconds_per_step"],
            "samples_per_s": measured["samples_per_s"],
            "device_peak_bytes": max(peaks, default=0),
            "versions": described["versions"],
            "seconds_by_phase": _last(events, "step_times").get("seconds", {}),
            "unified_memory": {
                name: value
                for name, value in _last(events, "unified_memory").items()
                if name not in ("event", "time", "step")
            },
            "health": [{"check": one["check"], "level": one["level"]} for one in health],
            "fallbacks": sum(bool(line.get("fallback")) for line in events),
            "samples": len(samples),
            "sample_problems": list(problems.values()),
            "new_sample_problems": len(new_problems),
        }
        is_finite = all(isinstance(loss, float) and math.isfinite(loss) for loss in losses)
        is_good = is_finite and not new_problems and len(steps) == self._args.steps
        part.status = "passed" if is_good else "failed"
        part.summary = (
            f"{len(steps)} steps, {measured['samples_per_s']:.4g} samples/s, "
            f"{_count(len(samples), 'sample')}"
        )
        if problems:
            kinds = ", ".join(sorted(set(problems.values())))
            when = "not before training" if new_problems else "as before training"
            part.summary += f", {len(problems)} of them without an image ({kinds}; {when})"

    def _plan(self, part: Part) -> None:
        training = self._parts["training"]
        if not training.details:
            part.summary = "there is no training to compare with"
            return
        plan = _last(self._events(), "run_described").get("plan")
        if plan is None:
            part.summary = NO_GPU if self._has_gpu is False else "the run has no memory plan"
            return
        accumulation = plan["accumulation"]
        seconds = plan["seconds"]["step"] * accumulation
        device = sum(plan["device"].values())
        measured_s = training.details["seconds_per_step"]
        measured_device = training.details["device_peak_bytes"]
        part.details = {
            "planned_seconds_per_step": seconds,
            "measured_seconds_per_step": measured_s,
            "planned_device_bytes": device,
            "measured_device_bytes": measured_device,
            "compiled": plan["compiled"],
            "blocks": len(plan["blocks"]),
            "streamed_blocks": sum(one["weights"] != "resident" for one in plan["blocks"]),
        }
        if not self._has_gpu:
            reason = NO_GPU if self._has_gpu is False else UNKNOWN_GPU
            part.summary = f"{reason}: times without one would mean nothing"
            return
        part.status = "measured"
        part.summary = (
            f"{format_seconds(seconds)} planned and {format_seconds(measured_s)} measured per "
            f"step; {format_bytes(device)} planned and {format_bytes(measured_device)} measured"
        )

    def _comparison(self, part: Part) -> None:
        training, tuned = self._parts["training"], self._parts["tuned_loop"]
        if tuned.status != "measured" or not training.details:
            part.summary = NO_GPU if self._has_gpu is False else "one of the two was not measured"
            return
        part.status = "measured"
        speed = training.details["samples_per_s"]
        loops = self._timed_loops()
        if not loops:
            part.summary = f"gracetune trains {speed:.4g} samples/s; the tuned loop does not fit"
            return
        best = max(loops, key=lambda one: one["samples_per_s"])
        ratio = speed / best["samples_per_s"]
        part.details = {"ours_to_tuned_loop": ratio, "best_tuned_loop": best}
        part.summary = f"gracetune trains {ratio:.2f} times as many samples per second"

    # Processes and files

    def _run_words(self) -> list[str]:
        """Return the run file and the settings that make it short and quiet."""
        steps = self._args.steps
        settings = [
            *self._args.overrides,
            f"output_dir={self._output}",
            f"train.max_train_steps={steps}",
            f"train.checkpoint_every={steps}",
            f"validation.every={steps}",
            "optimizer.schedule=constant",
            "optimizer.warmup_steps=0",
            f"logging.every={LOG_EVERY}",
            "logging.tensorboard=false",
            "logging.trackers=[]",
            "logging.webhooks=[]",
            "logging.prometheus_port=null",
        ]
        return [self._args.run_file, *(word for one in settings for word in ("--set", one))]

    def _call(self, part: Part, words: Sequence[str], accepted: Sequence[int] = (0,)) -> str | None:
        """Run a command of gracetune; return its output, or None if the part has failed."""
        limit = self._args.timeout * 60
        log = self._work / f"{part.name}.log"
        started_at = time.monotonic()
        with log.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "gracetune", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                part.status, part.summary = "failed", f"not done after {format_seconds(limit)}"
                return None
            except BaseException:  # Ctrl-C: the part is in a session of its own
                os.killpg(process.pid, signal.SIGTERM)
                process.communicate()
                raise
            finally:
                part.seconds = time.monotonic() - started_at
        text = output.decode(errors="replace")
        if process.returncode in accepted and (text.strip() or "--json" not in words):
            return text
        part.status = "failed"
        tail = log.read_text(errors="replace").strip().splitlines()[-ERROR_LINES:]
        reason = next((line for line in reversed(tail) if line.startswith("gracetune: ")), "")
        reason = reason.removeprefix("gracetune: ") or (tail[-1] if tail else "no message")
        part.summary = f"exit code {process.returncode}: {clean_error(reason, self._privacy)}"
        return None

    def _events(self) -> list[dict[str, Any]]:
        from gracetune.events.log import read_events

        return list(read_events(self._output / "events.jsonl"))

    def _sample_folder(self, step: int | None = None) -> Path:
        """Return the folder of the samples of a step; None is the last step."""
        step = self._args.steps if step is None else step
        return self._output / "validation" / f"step-{step:06d}"

    def _sample_records(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the records of a validation's samples; empty if there was none at that step."""
        file = self._sample_folder(step) / "samples.json"
        if not file.exists():
            return []
        text = file.read_text(encoding="utf-8")
        records: list[dict[str, Any]] = json.loads(text)["samples"]
        return records

    def _samples(self) -> list[tuple[str, bytes]]:
        """Return the last samples as small images, with their prompts if those are allowed."""
        from gracetune.dashboard.thumbnails import make_thumbnail

        found = []
        for one in self._sample_records()[:MAX_SAMPLES]:
            file = self._sample_folder() / one["image"]
            image = make_thumbnail(os.open(file, os.O_RDONLY), THUMBNAIL_EDGE)
            title = (
                one["prompt"] if self._privacy.allows_captions else f"prompt {one['number'] + 1}"
            )
            if image is not None:
                found.append((title, image))
        return found

    def _contents(self, num_samples: int) -> list[str]:
        include = self._args.include
        lines = [
            "versions, GPUs, CPU count and memory of the machine, and the findings of diagnose",
            "errors of gradients by block, losses, speeds and memory of the short training",
            "numbers and names of settings, such as the family, rank and batch size",
        ]
        if num_samples:
            lines.append(f"{_count(num_samples, 'generated sample')}, small")
        if "captions" in include:
            lines.append("the prompts of the samples")
        if "host" in include:
            lines.append("the host's name")
        left_out = ["paths", "tokens", "training data"]
        left_out += [] if "captions" in include else ["prompts and captions"]
        left_out += [] if "host" in include else ["the host's name"]
        return [*lines, f"not: {', '.join(left_out)}"]


def _run_part(args: argparse.Namespace, run_file: RunFile) -> int:
    """Run one part in this process, and print its result as JSON."""
    import torch

    if args.part == "machine":
        print(json.dumps(_describe_machine()))
        return 0
    from gracetune.events.console import console_sink
    from gracetune.train.tuned_loop import time_tuned_loop, why_unsupported

    if reason := why_unsupported(run_file):
        print(json.dumps({"unsupported": reason}))
        return 0
    result = time_tuned_loop(
        run_file,
        Path(run_file.output_dir),
        console_sink(sys.stderr, is_terminal=False).handle,
        steps=args.steps,
        checkpointing=args.checkpointing,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        compiles=torch.cuda.is_available(),
    )
    print(json.dumps(result))
    return 0


def _describe_machine() -> dict[str, Any]:
    import platform
    import socket

    import psutil
    import torch

    from gracetune.memory.platform import open_machine

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "memory": properties.total_memory})
    return {
        "host": socket.gethostname(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "link": open_machine().platform.link.value,
        "gpus": gpus,
    }


def _checks(report: str) -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = json.loads(report)["checks"]
    return checks


def _error(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one kind of gradient, without names of tensors."""
    return {name: result[name] for name in ("error", "plain_error", "limit", "passed")}


def _speed(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean time of a step and samples per second, after the first steps."""
    kept = steps[int(len(steps) * WARM_UP) :]
    seconds = sum(line["seconds"] for line in kept)
    return {
        "seconds_per_step": fmean(line["seconds"] for line in kept),
        "samples_per_s": sum(line["samples"] for line in kept) / seconds,
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _last(events: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next((line for line in reversed(events) if line["event"] == kind), {})
