"""`gracetune train RUN`: start or resume a training run."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from typing import TYPE_CHECKING

from gracetune import __version__
from gracetune.cli.main import add_run_file_arguments
from gracetune.config.checks import SHARDED_STRATEGIES, check_run
from gracetune.config.environment import (
    adopt_slurm_ranks,
    keep_compiled_graphs,
    prefer_expandable_segments,
    process_environment,
)
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError, InterruptedRunError
from gracetune.events.phase_timer import PhaseTimer
from gracetune.train.preflight import check_before_torch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gracetune.config.load import LoadedRun
    from gracetune.config.schema import RunFile

REHEARSAL = (
    "output_dir=runs/rehearsal",
    *(f"model.{key}=null" for key in ("path", "revision", "transformer_file")),
    *("model.family=tiny", "model.transformer_2_file=null", "model.quantize=none"),
    *("model.frozen_compute=bf16", "model.dtype=auto", "model.task=auto"),
    *("model.attention_mechanism=auto", "cache_config.vae_tiling=auto"),
    *("cache_config.cache_dir=null", "datasets.*.conditioning_data_dir=null"),
    *("datasets.*.resolution=32", "datasets.*.resolution_type=area", "datasets.*.bucket_step=null"),
    *("train.max_train_steps=20", "train.checkpoint_every=10", "train.experts=both"),
    *(
        "train.timestep_shift=1",
        "train.mixed_precision=auto",
        "optimizer.name=adamw",
        "optimizer.lr=1e-4",
    ),
    *("optimizer.warmup_steps=0", "logging.trackers=[]", "logging.webhooks=[]"),
    *(f"validation.{key}=64" for key in ("width", "height")),
    *(f"validation.prompts.*.{key}=64" for key in ("width", "height")),
    *(f"validation.{key}=null" for key in ("frames", "seconds", "images")),
    *(f"validation.prompts.*.{key}=null" for key in ("frames", "seconds", "images")),
)
"""Settings with which any run of images trains the model `tiny` for a few steps."""
REHEARSED_ASPECT = 3.0
"""Largest aspect ratio of a rehearsal: with a resolution of 32, its edges have up to 64 pixels."""
HELP = "train a model from a run file, or resume a run"
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that a process gets when its parent dies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune train`."""
    add_shared_arguments(parser)
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="train 20 steps of the small model `tiny` with the data and settings of the run, in "
        "runs/rehearsal; needs no model and no GPU",
    )


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `gracetune launch` has, too."""
    add_run_file_arguments(parser)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|latest|PATH|none",
        help="resume from the newest whole checkpoint (auto, the default, or latest), from PATH (a "
        "folder, or a name such as step-000100), or start a new run",
    )


def run(args: argparse.Namespace) -> int:
    """Load the run file and train."""
    load = load_rehearsal if args.rehearse else load_run_file
    return train_and_report(load(args.run_file, args.overrides), args.resume)


def load_rehearsal(path: str, overrides: Sequence[str]) -> LoadedRun:
    """Load a run file with the settings of a rehearsal, which `overrides` may change again."""
    run = load_run_file(path).run
    changes = [*REHEARSAL]
    if run.adapter is not None:
        # The module names in these two settings are those of another model.
        kept = run.adapter.model_dump_json(exclude={"targets", "overrides"})
        changes += ["adapter=null", f"adapter={kept}"]
    for index, dataset in enumerate(run.datasets):
        widest = min(dataset.max_aspect, REHEARSED_ASPECT)
        changes.append(f"datasets.{index}.max_aspect={widest}")
        if dataset.bucket_aspects is not None:
            aspects = [min(max(each, 1 / widest), widest) for each in dataset.bucket_aspects]
            changes.append(f"datasets.{index}.bucket_aspects={aspects}")
    loaded = load_run_file(path, [*changes, *overrides])
    for index, dataset in enumerate(loaded.run.datasets):
        if dataset.dataset_type != "image":
            raise ConfigError(
                f"datasets[{index}].dataset_type is {dataset.dataset_type}, but a rehearsal trains "
                f"`tiny`, which reads only images. `gracetune data check {path}` checks the data, "
                f"and `gracetune plan {path}` the memory, without the model."
            )
    return loaded


def train_and_report(loaded: LoadedRun, resume: str) -> int:
    """Train from a loaded run file, and show the progress on stdout."""
    timer = PhaseTimer()
    check_run(loaded.run)
    check_before_torch(loaded.run, resume)
    adopt_slurm_ranks()
    _end_with_launcher()
    prefer_expandable_segments()  # before the imports below load torch
    keep_compiled_graphs()
    # The imports make half a million objects that stay. To look for garbage among them again and
    # again would take a fifth of the time.
    gc.disable()
    from gracetune.events.console import console_sink
    from gracetune.train.run import run_training as train

    gc.freeze()
    gc.unfreeze()  # to the oldest generation, or the next collection would visit all of them
    gc.enable()

    console = console_sink(sys.stdout, sys.stdout.isatty(), title=_title(loaded.run))
    try:
        notices = (*loaded.notices, *_unsharded_notice(loaded.run))
        train(loaded.run, resume, [console], notices, timer=timer)
    except InterruptedRunError as error:
        if process_environment().get("RANK", "0") == "0":
            raise
        return error.exit_code  # the first rank reports it for all
    return 0


def _unsharded_notice(run: RunFile) -> list[str]:
    """Return a notice if a strategy that shards the model is set for a single process."""
    strategy = run.distributed.strategy
    if strategy not in SHARDED_STRATEGIES or process_environment().get("WORLD_SIZE", "1") != "1":
        return []
    return [
        f"distributed.strategy is {strategy}, but a single process has the whole model, so nothing "
        "is sharded. Start one process per GPU: gracetune launch RUN."
    ]


def _end_with_launcher() -> None:
    """Let the kernel send this process SIGTERM if the launcher that started it is killed.

    The run then saves a checkpoint and stops, and no process is left behind.
    """
    if "TORCHELASTIC_RUN_ID" in process_environment():  # set by torchrun and `gracetune launch`
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _title(run: RunFile) -> str:
    """Return the first line of the output: the version, the model and where the results go."""
    weights = "all weights"
    if run.adapter is not None:
        kind = run.adapter.kind
        weights = f"{kind} adapter" if kind == "full" else f"{kind} rank {run.adapter.rank}"
    steps = f"{run.train.max_train_steps:,} steps"
    return f"gracetune {__version__}   {run.model.family}, {weights}, {steps} -> {run.output_dir}"
