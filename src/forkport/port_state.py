"""Keep the progress of a port in `.git/gracetune-port`, out of the reach of branch switches."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forkport import ForkportError
from forkport.patches import read_manifest, replace_folder, write_text

if TYPE_CHECKING:
    from forkport.git import Git
    from forkport.patches import Manifest

_FILE = "state.json"


class _StatePart(BaseModel):
    """Base class of the parts of state.json. Field names are its keys and must not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class AppliedPatch(_StatePart):
    """A patch that has been applied."""

    patch: str
    """The name of the patch."""
    verdict: str
    commit: str | None
    """The commit that applies it, or None if upstream already had all of it."""
    by_hand: tuple[str, ...] = ()
    """Files whose conflicts the user resolved."""
    notes: tuple[str, ...] = ()
    """Remarks for the user's review, such as renamed files."""


class PendingPatch(_StatePart):
    """A patch with conflicts that the user has to resolve in the working tree."""

    patch: str
    """The name of the patch."""
    marked: tuple[str, ...]
    """Files with conflict markers."""
    unmarked: tuple[str, ...]
    """Files in conflict without markers, such as one that upstream deleted and the fork changed."""
    notes: tuple[str, ...] = ()


class CommandRun(_StatePart):
    """The result of one validation command."""

    group: str
    command: str
    commit: str
    """The tested commit, followed by " with uncommitted changes" if there were any."""
    exit_code: int
    seconds: float
    at: str
    """Time at which the command ended, in ISO format."""
    log: str
    """Path of the file with the command's output."""


class PortState(_StatePart):
    """The progress of a port, from its backup branch to its last validation."""

    version: Literal[1] = 1
    branch: str | None
    """The branch that was checked out before the port; None for a detached HEAD."""
    head: str
    """The commit that was checked out before the port."""
    backup: str
    """Name of the backup branch, which is at commit `head`."""
    kept: str | None
    """The branch that saves the changes that were uncommitted before the port; None without any."""
    port_branch: str
    upstream: str
    """The upstream ref as it was given."""
    tip: str
    """The upstream commit that the port is based on."""
    at: str
    """The newest commit that the port has made."""
    done: tuple[AppliedPatch, ...] = ()
    stopped: PendingPatch | None = None
    """The patch that waits for the user to resolve conflicts, if any."""
    finished: bool = False
    """True once every patch is applied and the port's branch is checked out."""
    ran: tuple[CommandRun, ...] = ()
    """The latest run of each validation command."""


def state_folder(git: Git) -> Path:
    """Return the folder inside `.git` in which forkport keeps the state of a port."""
    return Path(git.text("rev-parse", "--absolute-git-dir")) / "gracetune-port"


def find_state(git: Git) -> PortState | None:
    """Read the state of the current port, or return None if there is no port."""
    path = state_folder(git) / _FILE
    try:
        return PortState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ForkportError(
            f"{path} cannot be read ({error.error_count()} errors). Delete it to start over."
        ) from None


def read_state(git: Git) -> PortState:
    """Read the state of the current port, which must exist."""
    state = find_state(git)
    if state is None:
        raise ForkportError(
            f"no port is in progress in {git.folder}. Start one with `gracetune port apply`."
        )
    return state


def write_state(git: Git, state: PortState) -> None:
    """Write the state of the current port to its file, atomically."""
    write_text(state_folder(git) / _FILE, state.model_dump_json(indent=2) + "\n")


def archive_state(git: Git, stamp: str) -> Path:
    """End the port by renaming its state to `ended-STAMP.json`, and return the new path."""
    folder = state_folder(git)
    archive = folder / f"ended-{stamp}.json"
    (folder / _FILE).replace(archive)
    return archive


def copy_patches(git: Git, folder: Path) -> Manifest:
    """Copy a patch set into the state folder, so that switching branches cannot remove it."""
    manifest = read_manifest(folder)
    with replace_folder(patches_folder(git)) as staging:
        shutil.copytree(folder, staging, dirs_exist_ok=True)
    return manifest


def patches_folder(git: Git) -> Path:
    """Return the copy of the patch set that the current port uses."""
    return state_folder(git) / "patches"
