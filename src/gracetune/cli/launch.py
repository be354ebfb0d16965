"""`gracetune launch RUN`: train with one process per GPU, on one machine or several."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.cli import train
from gracetune.config.checks import check_run
from gracetune.config.environment import (
    prefer_expandable_segments,
    process_environment,
    set_for_children,
)
from gracetune.config.load import load_run_file
from gracetune.train.preflight import check_before_torch

if TYPE_CHECKING:
    import argparse

HELP = (
    "train with one process per GPU, on one machine or several; restart all processes from the "
    "last checkpoint if one fails"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune launch`: those of `train`, and the processes to start."""
    train.add_shared_arguments(parser)
    count = parser.add_mutually_exclusive_group()
    count.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs to use on this machine (default: all)"
    )
    count.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes to start on this machine; needed if it has no GPU",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="number of machines; start the same command on each (default: 1, or the nodes of "
        "`srun --ntasks-per-node=1`)",
    )
    parser.add_argument(
        "--node-rank", type=int, metavar="R", help="number of this machine, from 0 to N-1"
    )
    parser.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="address of machine 0 and a free port on it, at which the machines find each other",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often all processes are restarted after a failure (default: 3)",
    )


def run(args: argparse.Namespace) -> int:
    """Check the run file once, start the processes, and return the exit code of the run."""
    loaded = load_run_file(args.run_file, args.overrides)
    check_run(loaded.run)
    check_before_torch(loaded.run, args.resume)
    prefer_expandable_segments()
    # When a rank or machine is lost, the store's client prints stack traces as warnings. This
    # process and the ranks read the level when they import torch.
    set_for_children({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    # Imported here: it loads torch.
    from gracetune.distributed.launch import (
        Command,
        Options,
        count_gpus,
        launch_ranks,
        resolve_layout,
    )

    options = Options(
        gpus=args.gpus,
        processes=args.processes,
        nodes=args.nodes,
        node_rank=args.node_rank,
        master=args.master,
        max_restarts=args.max_restarts,
    )
    layout = resolve_layout(options, process_environment(), count_gpus())
    print(layout.describe(), flush=True)
    words = [sys.executable, "-m", "gracetune", "train", args.run_file]
    words += [word for text in args.overrides for word in ("--set", text)]
    command = Command(
        first=[*words, "--resume", args.resume],
        restarted=[*words, "--resume", "auto"],
        output_dir=Path(loaded.run.output_dir),
    )
    return launch_ranks(layout, command, sys.stderr)
