"""`gracetune train RUN`: train as a run file says, or go on with what was begun."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gracetune.cli.main import add_run_file_arguments
from gracetune.config.checks import check_trainable
from gracetune.config.environment import prefer_growing_segments
from gracetune.config.load import load_run_file

if TYPE_CHECKING:
    import argparse

    from gracetune.config.load import LoadedRun

HELP = "train a model as a run file says, or resume it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run file, and what the command line may change of it."""
    add_run_file_arguments(parser)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|PATH|none",
        help="go on from the newest checkpoint (auto), from this one, or begin anew",
    )


def run(args: argparse.Namespace) -> int:
    """Read, check, train."""
    return run_training(load_run_file(args.run_file, args.overrides), args.resume)


def run_training(loaded: LoadedRun, resume: str) -> int:
    """Show a run on this terminal or pipe."""
    check_trainable(loaded.run)
    prefer_growing_segments()  # torch comes with what is imported here
    from gracetune.events.console import console_sink
    from gracetune.train.run import run_training as train

    console = console_sink(sys.stdout, sys.stdout.isatty())
    train(loaded.run, resume, [console], loaded.notices)
    return 0
