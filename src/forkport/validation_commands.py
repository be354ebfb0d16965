"""Run the manifest's validation commands: on upstream alone, on the fork's part, on both."""

from __future__ import annotations

import shlex
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forkport import ForkportError
from forkport.patches import MANIFEST
from forkport.port_state import CommandRun, find_state, state_folder, write_state
from forkport.worktree import uncommitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from forkport.git import Git
    from forkport.patches import Manifest, ValidationGroup

WITH_CHANGES = " with uncommitted changes"
"""Appended to the tested commit in state.json if the working tree had uncommitted changes."""
_NOT_FOUND = 127
"""The exit code that shells use for a command that cannot be started."""


def validate(
    git: Git,
    manifest: Manifest,
    upstream: str,
    groups: Sequence[ValidationGroup],
    now: Callable[[], datetime],
    on_finished: Callable[[CommandRun], None],
) -> list[CommandRun]:
    """Run the validation commands of some groups, all of them even if one fails.

    Raises if a group has no commands.
    """
    empty = [group for group in groups if not manifest.validation.commands(group)]
    if empty:
        raise ForkportError(
            f"validation.{empty[0]} in {MANIFEST} has no commands, so nothing would be tested. "
            "Add commands there, or name the groups to run: gracetune port validate GROUP."
        )
    runs = []
    for group in groups:
        with _folder_under_test(git, group, upstream) as folder:
            commit = _tested_commit(git, group, upstream)
            for number, command in enumerate(manifest.validation.commands(group), start=1):
                log = state_folder(git) / "logs" / f"{group}-{number:02d}.log"
                run = _run(git, folder, log, (group, command, commit), now)
                runs.append(run)
                on_finished(run)
                _record(git, run)
    return runs


@contextmanager
def _folder_under_test(git: Git, group: ValidationGroup, upstream: str) -> Iterator[Path]:
    """Yield the folder to run commands in: for `upstream`, a temporary checkout of it.

    For other groups, it is the working tree, with the result of the port.
    """
    if group != "upstream":
        yield git.folder
        return
    checkout = state_folder(git) / "upstream"
    if checkout.exists():  # left behind by a killed validation
        git.run("worktree", "remove", "--force", str(checkout))
    commit = git.resolve_commit(upstream)
    git.run("worktree", "add", "--quiet", "--detach", str(checkout), commit)
    try:
        yield checkout
    finally:
        git.run("worktree", "remove", "--force", str(checkout))


def _tested_commit(git: Git, group: ValidationGroup, upstream: str) -> str:
    """Return the commit that a group of validation commands tests.

    It is the upstream commit for the group `upstream`, and HEAD for the others, with a suffix if
    the working tree has uncommitted changes.
    """
    if group == "upstream":
        return git.resolve_commit(upstream)
    return git.resolve_commit("HEAD") + (WITH_CHANGES if uncommitted(git) else "")


def _run(
    git: Git,
    folder: Path,
    log: Path,
    what: tuple[ValidationGroup, str, str],
    now: Callable[[], datetime],
) -> CommandRun:
    group, command, commit = what
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.run(
                shlex.split(command),
                cwd=folder,
                env=dict(git.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            exit_code = process.returncode
        except OSError as error:
            output.write(f"{command}: {error.strerror}\n".encode())
            exit_code = _NOT_FOUND
    return CommandRun(
        group=group,
        command=command,
        commit=commit,
        exit_code=exit_code,
        seconds=round(time.monotonic() - start, 3),
        at=now().isoformat(timespec="seconds"),
        log=str(log),
    )


def _record(git: Git, run: CommandRun) -> None:
    """Store the result of a command in state.json, replacing an earlier result of that command."""
    state = find_state(git)
    if state is not None:
        key = (run.group, run.command)
        others = tuple(each for each in state.ran if (each.group, each.command) != key)
        write_state(git, state.model_copy(update={"ran": (*others, run)}))
