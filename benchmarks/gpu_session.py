"""Run the benchmarks of managed memory, planned runs and tuned loops, within a time limit.

Jobs run in order of their value, each in a process of its own with a time limit. A job is skipped
if it cannot finish in the time that is left, if `--skip` names it, or if its results already have
the current commit, in `--out` or in the committed files. So the same command can be repeated until
everything is measured. Jobs of the same model follow each other where their value is the same, and
models are kept for later jobs (see product_run.py). Nothing else runs while a job does.

The processes are forked from this one, which has imported torch and has not used the GPU: each
import would take 8 to 10 seconds.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_session.py [--minutes 9.5] [--skip NAME,...]
        [--only NAME,...] [--list] [--out FOLDER] [--commit NAME] [--rehearse]

`--list` prints the jobs with their estimated seconds, and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import allocator_setup  # noqa: F401  before torch, which reads the setting at import

# isort: split
import first_steps
import planner_runs
import product_run
import psutil
import results
import torch
import tuned_loop

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

SHARED_MEMORY, SHARED_NBYTES = Path("/dev/shm"), 50e9
"""Folder for models, unless it is smaller than this, or the environment variable of product_run.py
names another one."""
WRITTEN_NBYTES_PER_S = 1e9
"""Rough rate at which a model with random weights is made and written, in bytes per second."""
LIMIT_FACTOR, LIMIT_MORE_S = 1.5, 60
"""A job is stopped after its estimated seconds times this factor, and these seconds."""
STOP_S = 5
"""Seconds that a job may take to end when it is stopped, and that are left at the end."""
BUDGET_S = 30
"""Seconds for which a loop tries larger batch sizes."""
IMPORTS_S = 60
"""Most seconds that the imports count: the clock of a machine may have been set after its start."""
PRODUCT_STEPS = 25
"""Steps of a product run beside the loops. Speed is that of the last half: the plan is checked in
the first steps, and an epoch has 12 or 24."""


@dataclass(frozen=True)
class Job:
    """One measurement: a script with its arguments, and where its figures are."""

    name: str
    script: str
    arguments: tuple[str, ...]
    figures: str
    """Prefix of the figures in the script's result file."""
    seconds: float
    """Estimated seconds, if no earlier measurement has recorded them; without writing a model."""
    folder: str = ""
    """Folder of the model below the kept models; empty if the job builds its own."""
    nbytes: float = 0.0
    """Bytes of the model's weights."""
    counts: tuple[str, ...] = ("seconds", "images_s", "failed")
    """Figures of which a finished measurement has at least one."""
    parts: tuple[str, ...] = ()
    """Prefixes of the figures of measurements that the script makes one after the other, if it
    continues with those that are missing."""


def all_jobs() -> list[Job]:
    """Return all jobs, the most valuable ones first."""
    managed, managed_more = (
        Job(
            f"managed_training.{name}",
            "managed_training",
            ("--only", ",".join(ways)),
            ways[-1],
            len(ways) * WAY_S,
            counts=("step_s",),
            parts=ways,
        )
        for name, ways in zip(("first", "more"), MANAGED_WAYS, strict=True)
    )
    jobs = [managed]
    jobs += [
        Job(
            f"first_steps.{name}",
            "first_steps",
            ("--only", name),
            f"{name}.second",
            seconds,
            product_run.folder_name(name, case.layers),
            case.nbytes,
            ("images_s",),
        )
        for (name, case), seconds in zip(first_steps.CASES.items(), (180, 170), strict=True)
    ]
    planned = {name: _planned_job(name) for name in PLANNED_SECONDS}
    last = [planned.pop(name) for name in PLANNED_AGAIN]
    jobs += planned.values()
    slow = []
    for model in tuned_loop.MODELS:
        named = {job.name: job for job in _loop_jobs(model)}
        first = [f"{model}.96.compiled", f"{model}.96.product", f"{model}.96.eager_checkpointing"]
        first += [f"{model}.24.product", f"{model}.24.eager_checkpointing_offload"]
        jobs += [named.pop(f"tuned_loop.{name}") for name in first]
        slow += named.values()
    return [*jobs, managed_more, *last, *slow]


def _planned_job(name: str) -> Job:
    """Return the job of a run in planner_runs.py."""
    planned = planner_runs.RUNS[name]
    return Job(
        f"planner_runs.{name}",
        "planner_runs",
        ("--only", name),
        name,
        PLANNED_SECONDS[name],
        planned.folder,
        planned.nbytes,
        ("seconds",),
    )


MANAGED_WAYS = (
    (
        "device",
        "managed_in_place",
        "managed_prefetch",
        "streamed_state",
        "limited_without_uvm",
        "limited_overflow",
        "planned_device",
        "planned_auto",
        "planned_lora_device",
        "planned_lora_weights",
        "planned_lora_weights_in_place",
    ),
    (
        "device_again",
        "managed_state_in_place",
        "managed_state_prefetch",
        "managed_home_on_device",
        "managed_trained_in_place",
    ),
)
"""The ways in managed_training.py, in two jobs. The script itself skips those that are measured. It
is not imported here: it sets a variable for deterministic kernels, which would slow other jobs
down."""
WAY_S = 28
"""Estimated seconds of a way."""
PLANNED_SECONDS = {
    "eager_flux_768_12": 75,
    "fp8_flux_48": 120,
    "flux_768_16": 140,
    "eager_wan_16": 100,
    "fp8_wan_24": 140,
    "qwen_32": 210,
}
"""Names in `planner_runs.RUNS` -> estimated seconds."""
PLANNED_AGAIN = "flux_768_16", "qwen_32"
"""Names in `planner_runs.RUNS` of compiled bf16 runs. The product runs of tuned_loop.py, which come
first, are predicted and measured as well."""


def _loop_jobs(model_name: str) -> list[Job]:
    """Return the jobs of a model in tuned_loop.py: each loop and each product run is one."""
    model = tuned_loop.MODELS[model_name]
    jobs = []
    for memory_gb, loops in model.loops.items():
        for way in (*(loop.name for loop in loops), "product"):
            is_product = way == "product"
            chosen = ("--ways", "loops", "--only", way, "--budget", str(BUDGET_S))
            if is_product:
                chosen = ("--ways", "product", "--steps", str(PRODUCT_STEPS))
            figures = f"{model_name}.{memory_gb}.{way}"
            seconds = 110 if is_product else 35 + (45 if "compiled" in way else 0)
            if way == "compiled_checkpointing_offload":
                seconds = 170
            jobs.append(
                Job(
                    f"tuned_loop.{figures}",
                    "tuned_loop",
                    (model_name, "--memory", str(memory_gb), *chosen),
                    figures,
                    seconds,
                    model.folder if is_product else "",
                    model.nbytes if is_product else 0.0,
                )
            )
    return jobs


def main(began: float | None = None) -> int:
    """Run jobs until the time is over, and print a table; `began` is when the time began."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit of the session")
    parser.add_argument("--skip", default="", help="names of jobs to skip, or their beginnings")
    parser.add_argument("--only", default="", help="names of jobs to run, or their beginnings")
    parser.add_argument("--list", action="store_true", help="print the jobs and run nothing")
    began = began or time.time()
    arguments = results.parse_arguments(parser)
    jobs = all_jobs()
    if arguments.rehearse:
        jobs = [job for job in jobs if job.script == "first_steps"]
    else:
        os.environ.setdefault(product_run.KEEP, str(models_folder()))
    commit = arguments.commit or results.this_commit()
    rows, written = [], set()
    for job in jobs:
        left = 60 * arguments.minutes - (time.time() - began) - STOP_S
        estimate = estimated_seconds(job, arguments.out, commit, written)
        reason = reason_to_skip(job, arguments, commit)
        if not reason and estimate > left and not arguments.list:
            reason = f"needs {estimate:.0f} s of {left:.0f}"
        if not reason and not arguments.list:
            print(f"\n{job.name}: {estimate:.0f} s expected, {left:.0f} s left", flush=True)
            started = time.monotonic()
            limit_s = min(left, LIMIT_FACTOR * estimate + LIMIT_MORE_S)
            code = run_job(job, session_arguments(arguments, commit), limit_s)
            seconds = time.monotonic() - started
            reason = f"{'done' if code == 0 else f'exit code {code}'} after {seconds:.0f} s"
            print(reason, flush=True)
        rows.append((job.name, estimate, reason))
        if not reason:
            written.add(job.folder)  # by a job in this list
    print()
    for name, estimate, reason in rows:
        print(f"{name:<52}{estimate:>6.0f} s   {reason}")
    to_do = sum(estimate for _, estimate, reason in rows if not reason or "needs" in reason)
    print(f"{'left':<52}{to_do:>6.0f} s", flush=True)
    return 0


def process_began() -> float:
    """Return when this process began, so that the time limit includes its imports."""
    now = time.time()
    return min(now, max(now - IMPORTS_S, psutil.Process().create_time()))


def models_folder() -> Path:
    """Return the folder in which models are kept: in shared memory, or on the disk."""
    is_large = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).total >= SHARED_NBYTES
    return (SHARED_MEMORY if is_large else Path(tempfile.gettempdir())) / "gracetune-models"


def reason_to_skip(job: Job, arguments: argparse.Namespace, commit: str) -> str:
    """Return why a job is not to be run; empty if it is."""
    only, skipped = (
        [name for name in text.split(",") if name] for text in (arguments.only, arguments.skip)
    )
    if any(job.name.startswith(name) for name in skipped):
        return "skipped"
    if only and not any(job.name.startswith(name) for name in only):
        return "not chosen"
    if arguments.rehearse:
        return ""
    if is_measured(job.figures, job, arguments.out, commit):
        return f"measured with {commit}"
    return ""


def is_measured(prefix: str, job: Job, out: Path, commit: str) -> bool:
    """Return True if the results of a job have finished figures of this commit with a prefix."""
    for folder in (out, results.FOLDER):
        figures = results.read(job.script, folder)
        measured, now = (
            name.removesuffix("-dirty")
            for name in (str(figures.get(f"{prefix}.commit", "none")), commit)
        )
        is_same = now.startswith(measured) or measured.startswith(now)
        if is_same and any(f"{prefix}.{name}" in figures for name in job.counts):
            return True
    return False


def estimated_seconds(job: Job, out: Path, commit: str, written: Collection[str] = ()) -> float:
    """Return the seconds that a job will take, with those to write its model if that is missing.

    Earlier measurements have recorded how long they took. `written` has folders of models that will
    exist by then.
    """
    took = f"{job.figures}.took_s"
    figures = results.read(job.script, results.FOLDER) | results.read(job.script, out)
    seconds = float(figures.get(took, job.seconds))
    missing = [part for part in job.parts if not is_measured(part, job, out, commit)]
    if missing:
        seconds *= len(missing) / len(job.parts)
    if job.script == "first_steps" and took in figures:  # two starts, each recorded on its own
        seconds += float(figures.get(took.replace("second", "first"), seconds))
    folder = Path(os.environ.get(product_run.KEEP) or models_folder()) / job.folder
    is_written = job.folder in ("", *written) or (folder / "complete").exists()
    return seconds + (0.0 if is_written else job.nbytes / WRITTEN_NBYTES_PER_S)


def session_arguments(arguments: argparse.Namespace, commit: str) -> list[str]:
    """Return the arguments of a script that all jobs of a session have in common."""
    if arguments.rehearse:  # in a folder of its own: the result file names another script
        return ["--rehearse", "--out", str(arguments.out / "rehearsed")]
    return ["--out", str(arguments.out), "--commit", commit]


def run_job(job: Job, more: Sequence[str], limit_s: float) -> int:
    """Run a job in a forked process; return its exit code, negative if a signal has ended it."""
    process = results.start_forked(_run_script, job, more)
    try:
        process.join(limit_s)
        if process.is_alive():
            print(f"{job.name}: stopped after {limit_s:.0f} s", flush=True)
            process.terminate()
            process.join(STOP_S)
    finally:  # its own processes end with it
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run_script(job: Job, more: Sequence[str]) -> None:
    """Run a script in this process, which was started for it."""
    path = Path(__file__).with_name(f"{job.script}.py")
    sys.argv = [str(path), *job.arguments, *more]
    if "--rehearse" in more:  # a test may have used threads, which are not forked
        torch.set_num_threads(1)
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(process_began()))
