"""Back to where the fork was. No branch is moved or deleted, and no uncommitted byte is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.hosts.port import worktree
from gracetune.hosts.port.apply import KEPT
from gracetune.hosts.port.state import forget_state, read_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.hosts.port.git import Git


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What a rollback did."""

    branch: str
    """Where HEAD is now."""
    commit: str
    kept: str | None
    """The branch with what was uncommitted until now."""
    kept_paths: tuple[str, ...]
    restored: tuple[str, ...]
    """Files that had been uncommitted before the port, as they were then."""
    port_branch: str


def roll_back(git: Git, stamp: str, confirm: Callable[[str], None]) -> RolledBack:
    """Keep what is uncommitted, return to the fork, put back what it had uncommitted then."""
    state = read_state(git)
    target = _target(git, state.branch, state.head, state.backup)
    trees = [state.head] if state.kept is None else [state.head, state.kept]
    paths = worktree.at_stake(git, trees)
    confirm(
        f"Return to {target} ({state.head[:10]}), as it was before the port."
        + (f" {len(paths)} uncommitted files are kept in a branch first." if paths else "")
    )
    kept = None
    if paths:
        kept = f"{KEPT}-{stamp}-rollback"
        worktree.keep(git, kept, paths, "Uncommitted work, kept before a rollback")
        worktree.discard(git, paths)
    git.run("checkout", "--quiet", "--no-overwrite-ignore", target, "--")
    restored = worktree.restore(git, state.kept) if state.kept is not None else []
    forget_state(git, stamp)
    return RolledBack(target, state.head, kept, tuple(paths), tuple(restored), state.port_branch)


def _target(git: Git, branch: str | None, head: str, backup: str) -> str:
    """The branch the user was on, unless it has moved since: then the backup."""
    ref = f"refs/heads/{branch}"
    if branch is None or not git.succeeds("rev-parse", "--verify", "--quiet", ref):
        return backup
    return branch if git.commit(ref) == head else backup
