"""`gracetune host`: check and start another trainer with gracetune inside."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.environment import process_environment
from gracetune.errors import HostError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

HELP = "Use gracetune inside another trainer, which stays as it was installed."
ENTRY = "-m gracetune.hosts.simpletuner"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One verb a host, with its actions."""
    hosts = parser.add_subparsers(dest="host", required=True, metavar="HOST")
    simpletuner = hosts.add_parser("simpletuner", help="SimpleTuner, as pip installs it")
    actions = simpletuner.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="whether the installed version can be hooked")
    check.set_defaults(run_action=_check)
    start = actions.add_parser("run", help="check, then start it: run -- train --env NAME")
    start.set_defaults(run_action=_run)
    start.add_argument("words", nargs="*", metavar="-- ARGUMENT", help="for simpletuner itself")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    act: Callable[[argparse.Namespace], int] = args.run_action
    return act(args)


def _check(args: argparse.Namespace) -> int:
    del args
    from gracetune.hosts.simpletuner.__main__ import check

    try:
        print(*check(), sep="\n")
    except HostError as error:
        print(error)
        return 1
    return 0


def _run(args: argparse.Namespace) -> int:
    """Become SimpleTuner's own command; the entry checks again, in the process that is hooked."""
    from gracetune.hosts.simpletuner.__main__ import check

    print(check()[-1], flush=True)
    command = Path(sys.executable).with_name("simpletuner")
    if not command.exists():
        raise HostError(f"{command} is not there; start gracetune from SimpleTuner's environment.")
    environment = dict(process_environment())
    given = environment.get("ACCELERATE_EXTRA_ARGS", "")
    environment["ACCELERATE_EXTRA_ARGS"] = f"{given} {ENTRY}".strip()
    os.execve(command, [str(command), *(args.words or ["train"])], environment)
