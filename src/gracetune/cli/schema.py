"""`gracetune schema`: what a run file may say, for editors and other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.config.load import json_schema

if TYPE_CHECKING:
    import argparse

HELP = "print what a run file may say, as JSON Schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none: there is one schema."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print it."""
    del args
    print(json_schema(), end="")
    return 0
