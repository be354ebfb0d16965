"""`gracetune now`: ask a running training run to validate, save a checkpoint or stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.events.run_control import VERBS, send_request

if TYPE_CHECKING:
    import argparse

HELP = (
    "Ask the run in a folder to validate, to save a checkpoint, or to save a checkpoint and stop. "
    "It reacts after its current optimizer step."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gracetune now`."""
    parser.add_argument("request", choices=VERBS, help="the request")
    parser.add_argument("run_folder", type=Path, help="the run's output_dir")


def run(args: argparse.Namespace) -> int:
    """Write the request to the output folder of a run; print which process will carry it out."""
    listener = send_request(args.run_folder, args.request)
    where = "" if listener.is_local() else f" on {listener.host} (not checked from here)"
    print(f"asked process {listener.pid}{where} to {args.request}, after its current step.")
    return 0
