"""Where a port stands: kept in the git folder, which no switch of branches touches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forkport.patches import read_manifest
from gracetune.atomic_files import atomic_folder, write_text
from gracetune.errors import PortError

if TYPE_CHECKING:
    from forkport.git import Git
    from forkport.patches import Manifest

_FILE = "state.json"


class _StatePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AppliedPatch(_StatePart):
    """A patch that is behind us."""

    patch: str
    verdict: str
    commit: str | None
    """None: upstream had all of it."""
    by_hand: tuple[str, ...] = ()
    """Files whose conflicts a person settled."""
    notes: tuple[str, ...] = ()


class PendingPatch(_StatePart):
    """The patch whose conflicts wait in the working tree."""

    patch: str
    marked: tuple[str, ...]
    """Files with markers."""
    unmarked: tuple[str, ...]
    """Files where one side must be chosen: deleted here, changed there."""
    notes: tuple[str, ...] = ()


class CommandRun(_StatePart):
    """One command of a validation."""

    group: str
    command: str
    commit: str
    exit_code: int
    seconds: float
    at: str
    log: str


class PortState(_StatePart):
    """A port, from its backup to its last validation."""

    version: Literal[1] = 1
    branch: str | None
    """Where the user was; none: on no branch."""
    head: str
    backup: str
    kept: str | None
    """The branch with what was uncommitted."""
    port_branch: str
    upstream: str
    tip: str
    at: str
    """The newest commit of the port."""
    done: tuple[AppliedPatch, ...] = ()
    stopped: PendingPatch | None = None
    finished: bool = False
    """Every patch is in, and the working tree shows it."""
    ran: tuple[CommandRun, ...] = ()


def state_folder(git: Git) -> Path:
    """The folder of ours in the git folder."""
    return Path(git.text("rev-parse", "--absolute-git-dir")) / "gracetune-port"


def find_state(git: Git) -> PortState | None:
    """The state of a port, if there is one."""
    path = state_folder(git) / _FILE
    try:
        return PortState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise PortError(
            f"{path} cannot be read ({error.error_count()} errors): remove it."
        ) from None


def read_state(git: Git) -> PortState:
    """The state of a port; without one there is nothing to go on with."""
    state = find_state(git)
    if state is None:
        raise PortError(
            f"no port is under way in {git.folder}; begin one with `gracetune port apply`."
        )
    return state


def write_state(git: Git, state: PortState) -> None:
    """Replace the state, whole or not at all."""
    write_text(state_folder(git) / _FILE, state.model_dump_json(indent=2) + "\n")


def archive_state(git: Git, stamp: str) -> Path:
    """End a port; what it was stays readable."""
    home = state_folder(git)
    past = home / f"ended-{stamp}.json"
    (home / _FILE).replace(past)
    return past


def copy_patches(git: Git, folder: Path) -> Manifest:
    """Copy a patch set to where a switch of branches cannot take it away."""
    manifest = read_manifest(folder)
    with atomic_folder(patches_folder(git)) as staging:
        shutil.copytree(folder, staging, dirs_exist_ok=True)
    return manifest


def patches_folder(git: Git) -> Path:
    """The copy of the patch set that the port under way uses."""
    return state_folder(git) / "patches"
