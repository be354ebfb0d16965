"""The commands of a manifest: on upstream alone, on what the fork adds, on both together."""

from __future__ import annotations

import shlex
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forkport.patches import MANIFEST
from forkport.state import CommandRun, find_state, state_folder, write_state
from forkport.worktree import uncommitted
from gracetune.errors import PortError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

    from forkport.git import Git
    from forkport.patches import ValidationGroup, Manifest

WITH_CHANGES = " with uncommitted changes"
_NOT_FOUND = 127


def validate(
    git: Git,
    manifest: Manifest,
    upstream: str,
    groups: Sequence[ValidationGroup],
    now: Callable[[], datetime],
    on_finished: Callable[[CommandRun], None],
) -> list[CommandRun]:
    """Run every command, all of them even if one fails; a group without any is an error."""
    empty = [group for group in groups if not manifest.validation.commands(group)]
    if empty:
        raise PortError(
            f"validation.{empty[0]} in {MANIFEST} names no command, so nothing would be tested. "
            "Add commands there, or name the groups to run: gracetune port validate GROUP."
        )
    ran = []
    for group in groups:
        with _folder_under_test(git, group, upstream) as folder:
            commit = _tested_commit(git, group, upstream)
            for number, command in enumerate(manifest.validation.commands(group), start=1):
                log = state_folder(git) / "logs" / f"{group}-{number:02d}.log"
                one = _run(git, folder, log, (group, command, commit), now)
                ran.append(one)
                on_finished(one)
                _record(git, one)
    return ran


@contextmanager
def _folder_under_test(git: Git, group: ValidationGroup, upstream: str) -> Iterator[Path]:
    """Upstream's own commands see upstream alone, in a copy; the others see the working tree."""
    if group != "upstream":
        yield git.folder
        return
    copy = state_folder(git) / "upstream"
    if copy.exists():  # what a killed validation left behind
        git.run("worktree", "remove", "--force", str(copy))
    git.run("worktree", "add", "--quiet", "--detach", str(copy), git.resolve_commit(upstream))
    try:
        yield copy
    finally:
        git.run("worktree", "remove", "--force", str(copy))


def _tested_commit(git: Git, group: ValidationGroup, upstream: str) -> str:
    """The commit that commands prove something of; with changes beside it, it is not that one."""
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
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                shlex.split(command),
                cwd=folder,
                env=dict(git.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            code = done.returncode
        except OSError as error:
            output.write(f"{command}: {error.strerror}\n".encode())
            code = _NOT_FOUND
    return CommandRun(
        group=group,
        command=command,
        commit=commit,
        exit_code=code,
        seconds=round(time.monotonic() - began, 3),
        at=now().isoformat(timespec="seconds"),
        log=str(log),
    )


def _record(git: Git, one: CommandRun) -> None:
    """The newest run of each command counts."""
    state = find_state(git)
    if state is not None:
        same = (one.group, one.command)
        others = tuple(ran for ran in state.ran if (ran.group, ran.command) != same)
        write_state(git, state.model_copy(update={"ran": (*others, one)}))
