"""`gracetune schema`: print the JSON Schema of run files, for editors and other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.config.load import json_schema

if TYPE_CHECKING:
    import argparse

HELP = "print the JSON Schema of run files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Do nothing: the verb has no arguments."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print the JSON Schema of run files."""
    del args
    print(json_schema(), end="")
    return 0
