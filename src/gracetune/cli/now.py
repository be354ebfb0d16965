"""`gracetune now`: ask a running run to validate, save a checkpoint or stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.events.run_control import VERBS, send_request

if TYPE_CHECKING:
    import argparse

HELP = (
    "Ask the run in a folder to validate, to save a checkpoint, or to save one and stop. "
    "It answers after the optimizer step it is at."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("request", choices=VERBS, help="what to ask for")
    parser.add_argument("run_folder", type=Path, help="the run's output_dir")


def run(args: argparse.Namespace) -> int:
    """Leave the request where the run will find it, and say who will answer."""
    listener = send_request(args.run_folder, args.request)
    where = (
        "" if listener.is_local() else f" on {listener.host}, which cannot be looked up from here"
    )
    print(f"asked process {listener.pid}{where} to {args.request}, after its current step.")
    return 0
