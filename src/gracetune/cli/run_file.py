"""The words that name a run file and change it, the same for every verb that reads one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """`RUN`, and `--set`."""
    parser.add_argument("run_file", metavar="RUN", help="a run file: JSON, YAML or TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="a.b=c",
        dest="overrides",
        help="change one setting; may be given often",
    )
