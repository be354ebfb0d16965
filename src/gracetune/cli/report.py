"""`gracetune report`: write runs into one HTML file, with plots, samples and settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.atomic_files import write_text
from gracetune.errors import ConfigError
from gracetune.units import format_bytes

if TYPE_CHECKING:
    import argparse

HELP = (
    "Write runs into one HTML file, to keep or to send: plots, samples, settings, the machine, and "
    "the differences between runs. It needs no server and no network."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: runs and the file to write."""
    parser.add_argument(
        "run_folders",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="the output_dir of a run, or a folder with several",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        help="the file to write; an earlier report is replaced, any other file is kept",
    )


def run(args: argparse.Namespace) -> int:
    """Read the runs, write the report and print its size."""
    from gracetune.dashboard.live_runs import LiveRuns
    from gracetune.dashboard.report import check_replaceable, write_report
    from gracetune.dashboard.run_folder import LOG_NAME, find_run_folders

    for folder in find_run_folders(args.run_folders):
        if not (folder / LOG_NAME).is_file():
            raise ConfigError(
                f"{folder} has no {LOG_NAME}, so that there is nothing to report. Name the "
                "output_dir of a run that has started."
            )
    check_replaceable(args.output)
    runs = LiveRuns(args.run_folders)
    runs.read_all()
    text = write_report(list(runs.runs.values()))
    write_text(args.output, text)
    print(f"report     {args.output} ({format_bytes(len(text.encode()))})")
    return 0
