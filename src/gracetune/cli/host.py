"""`gracetune host`: use gracetune inside an unmodified SimpleTuner or ai-toolkit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.config.environment import claim_alloc_conf, process_environment
from gracetune.errors import HostError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

HELP = "Use gracetune inside another trainer, which stays as it was installed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subparser per host program (SimpleTuner, ai-toolkit), with its subcommands."""
    hosts = parser.add_subparsers(dest="host", required=True, metavar="HOST")
    simpletuner = hosts.add_parser("simpletuner", help="SimpleTuner, as pip installs it")
    actions = simpletuner.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check that the installed version can be hooked")
    check.set_defaults(run_action=_check)
    start = actions.add_parser(
        "run", help="check, then start it: run -- train --env NAME, or run -- server"
    )
    start.set_defaults(run_action=_run)
    start.add_argument("words", nargs="*", metavar="-- ARGUMENT", help="for simpletuner itself")
    _add_ai_toolkit(hosts.add_parser("ai-toolkit", help="a git clone of ai-toolkit"))


def _add_ai_toolkit(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run_action, text in (
        ("check", _check_clone, "check that a clone can be hooked"),
        ("install", _install_clone, "check, then write one small file to its extensions folder"),
        ("uninstall", _uninstall_clone, "remove the file again"),
        ("run", _run_clone, "check, then start it: run PATH -- config.yaml"),
    ):
        action = actions.add_parser(name, help=text)
        action.set_defaults(run_action=run_action)
        action.add_argument("path", type=Path, metavar="PATH", help="the folder of the clone")
        if name == "run":
            action.add_argument("words", nargs="*", metavar="-- ARGUMENT", help="for its run.py")


def run(args: argparse.Namespace) -> int:
    """Run the chosen subcommand of `gracetune host`."""
    action: Callable[[argparse.Namespace], int] = args.run_action
    return action(args)


def _check(args: argparse.Namespace) -> int:
    del args
    from gracetune.hosts.simpletuner.__main__ import check
    from gracetune.hosts.simpletuner.hooks import REQUIRED_SYMBOLS, WEBUI_REQUIRED_SYMBOLS

    try:
        print(*check((*REQUIRED_SYMBOLS, *WEBUI_REQUIRED_SYMBOLS)), sep="\n")
    except HostError as error:
        print(error)
        return 1
    return 0


def _run(args: argparse.Namespace) -> int:
    """Replace this process (exec) by SimpleTuner, which then starts training with our hooks."""
    from gracetune.hosts.simpletuner.__main__ import check, hook_command

    print(check()[-1], flush=True)
    simpletuner = Path(sys.executable).with_name("simpletuner")
    if not simpletuner.exists():
        raise HostError(
            f"{simpletuner} does not exist. Start gracetune from SimpleTuner's environment."
        )
    environment = dict(process_environment())
    command = [str(simpletuner), *hook_command(args.words or ["train"], environment)]
    claim_alloc_conf(environment)
    # SimpleTuner looks for `accelerate` on PATH, where it is missing if the environment is not
    # activated.
    environment["PATH"] = os.pathsep.join(
        filter(None, [str(simpletuner.parent), environment.get("PATH")])
    )
    if command[1] == "server":
        command = [sys.executable, "-m", "gracetune.hosts.simpletuner.webui", *command]
    os.execve(command[0], command, environment)


def _check_clone(args: argparse.Namespace) -> int:
    from gracetune.hosts.ai_toolkit.clone import check

    try:
        print(*check(args.path), sep="\n")
    except HostError as error:
        print(error)
        return 1
    return 0


def _install_clone(args: argparse.Namespace) -> int:
    from gracetune.hosts.ai_toolkit.clone import install

    print(f"{install(args.path)} is installed; ai-toolkit loads it when a job starts.")
    return 0


def _uninstall_clone(args: argparse.Namespace) -> int:
    from gracetune.hosts.ai_toolkit.clone import uninstall

    if uninstall(args.path):
        print(f"gracetune is removed from {args.path}.")
    else:
        print(f"gracetune was not installed in {args.path}.")
    return 0


def _run_clone(args: argparse.Namespace) -> int:
    """Replace this process (exec) by ai-toolkit's run.py, started in the folder of the clone."""
    from gracetune.hosts.ai_toolkit.clone import check, extension_path

    print(check(args.path)[-1], flush=True)
    root = args.path.resolve()
    if not extension_path(root).exists():
        raise HostError(
            f"gracetune is not installed in {root}. Run `gracetune host ai-toolkit install {root}`."
        )
    # Paths of files are relative to the current folder, which changes now.
    words = [str(Path(each).resolve()) if Path(each).is_file() else each for each in args.words]
    environment = dict(process_environment())
    claim_alloc_conf(environment)
    os.chdir(root)
    os.execve(sys.executable, [sys.executable, "run.py", *words], environment)
