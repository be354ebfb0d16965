"""Patches onto a fresh branch of upstream, a commit each; a conflict stops, and is gone on from.

Commits are made from objects alone. The working tree is touched twice: when a conflict is laid out,
and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport import worktree
from forkport.patches import read_manifest
from forkport.plan import patch_changes, patch_verdict, merge_one, open_merge_context
from forkport.state import (
    AppliedPatch,
    PortState,
    PendingPatch,
    copy_patches,
    find_state,
    archive_state,
    patches_folder,
    read_state,
    write_state,
)
from forkport.three_way import find_markers
from gracetune.errors import PortError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from forkport.git import Git
    from forkport.merge import FileResult
    from forkport.patches import Manifest, Patch


PORT_BRANCH = "gh200-reintegration"
BACKUP_PREFIX = "gh200-backup"
SAVED_PREFIX = "gh200-kept"


@dataclass(frozen=True, slots=True)
class ApplyOutcome:
    """Where an apply ended."""

    state: PortState
    conflicts: tuple[FileResult, ...] = ()


def start_apply(
    git: Git,
    folder: Path,
    upstream: str | None,
    port_branch: str,
    stamp: str,
    confirm: Callable[[str], None],
) -> ApplyOutcome:
    """Back up, branch off upstream, and apply until the end or a conflict."""
    state = find_state(git)
    if state is not None and not state.finished:
        raise PortError(
            f"a port onto {state.upstream} is under way in {git.folder}. Go on with "
            "`gracetune port apply --continue`, or undo it with `gracetune port rollback`."
        )
    worktree.check_no_operation_in_progress(git)
    manifest = read_manifest(folder)
    name = upstream or manifest.upstream
    tip = git.resolve_commit(name)
    git.resolve_commit(manifest.base)
    if git.succeeds("rev-parse", "--verify", "--quiet", f"refs/heads/{port_branch}"):
        raise PortError(
            f"the branch {port_branch} is there already: name another with --branch, or delete it "
            f"with `git branch -D {port_branch}`."
        )
    dirty = worktree.files_to_save(git, ())
    if dirty:
        confirm(
            f"{len(dirty)} files have uncommitted changes ({', '.join(dirty[:3])}...). They are "
            "kept in a branch, taken out of the working tree, and put back by a rollback."
        )
    copy_patches(git, folder)
    state = _back_up(git, name, tip, port_branch, stamp, dirty)
    return _apply_remaining(git, manifest, state)


def continue_apply(git: Git) -> ApplyOutcome:
    """Commit what was settled, and apply what is left."""
    state = read_state(git)
    if state.finished:
        raise PortError(
            f"every patch is on {state.port_branch} already; `gracetune port validate` is next."
        )
    manifest = read_manifest(patches_folder(git))
    if state.stopped is not None:
        state = _commit_resolution(git, manifest, state, state.stopped)
    else:
        _check_untouched(git, state)
    return _apply_remaining(git, manifest, state)


def _check_untouched(git: Git, state: PortState) -> None:
    """Where no patch waits for a person, what a person has changed is not the port's to take."""
    worktree.check_branch_contained(git, state.port_branch, state.at)
    if dirty := worktree.uncommitted(git):
        raise PortError(
            f"{', '.join(dirty)}: uncommitted, and going on would write over it. Put it away with "
            "`git stash`; or undo the port with `gracetune port rollback`, which keeps it."
        )


def _back_up(
    git: Git, upstream: str, tip: str, port_branch: str, stamp: str, dirty: Sequence[str]
) -> PortState:
    head = git.resolve_commit("HEAD")
    backup, kept = f"{BACKUP_PREFIX}-{stamp}", f"{SAVED_PREFIX}-{stamp}" if dirty else None
    git.run("update-ref", f"refs/heads/{backup}", head, "")
    if kept is not None:
        worktree.save_to_branch(git, kept, dirty, "Uncommitted work, kept before a port")
    state = PortState(
        branch=current_branch(git),
        head=head,
        backup=backup,
        kept=kept,
        port_branch=port_branch,
        upstream=upstream,
        tip=tip,
        at=tip,
    )
    write_state(git, state)  # from here on a rollback knows the way
    if kept is not None:
        worktree.discard_changes(git, dirty)
    return state


def current_branch(git: Git) -> str | None:
    """The branch that HEAD is on."""
    return git.text("branch", "--show-current") or None


def _apply_remaining(git: Git, manifest: Manifest, state: PortState) -> ApplyOutcome:
    ground = open_merge_context(git, manifest, state.tip)
    for patch in manifest.patches[len(state.done) :]:
        changes = patch_changes(git, manifest, patches_folder(git), patch)
        files = merge_one(ground, git.list_tree(state.at), patch, changes)
        notes = tuple(f"{file.path}: {note}" for file in files for note in file.notes)
        if any(file.is_conflict for file in files):
            return _stop_at_conflict(git, state, patch, files, notes)
        commit = None
        if files:
            tree = git.write_tree_with(state.at, {file.path: file.entry for file in files})
            commit = git.commit_tree(tree, [state.at], commit_message(patch, state, notes))
        done = AppliedPatch(patch=patch.name, verdict=patch_verdict(files), commit=commit, notes=notes)
        state = _updated(git, state, at=commit or state.at, done=(*state.done, done))
    worktree.switch_branch(git, state.port_branch, state.at)
    return ApplyOutcome(_updated(git, state, finished=True))


def _stop_at_conflict(
    git: Git, state: PortState, patch: Patch, files: Sequence[FileResult], notes: tuple[str, ...]
) -> ApplyOutcome:
    """Lay the conflicts out, and only then say that they wait: they would count as settled."""
    worktree.check_no_untracked_conflict(git, state.at, files)
    worktree.switch_branch(git, state.port_branch, state.at)
    worktree.write_conflicts(git, files)
    conflicts = tuple(file for file in files if file.is_conflict)
    stopped = PendingPatch(
        patch=patch.name,
        marked=tuple(file.path for file in conflicts if file.conflicts),
        unmarked=tuple(file.path for file in conflicts if not file.conflicts),
        notes=notes,
    )
    return ApplyOutcome(_updated(git, state, stopped=stopped), conflicts)


def _commit_resolution(git: Git, manifest: Manifest, state: PortState, stopped: PendingPatch) -> PortState:
    """Take a person's answer: the files as they are now, or a commit of theirs."""
    if current_branch(git) != state.port_branch:
        raise PortError(
            f"HEAD is not on {state.port_branch}, where patch {stopped.patch} waits; "
            f"`git checkout {state.port_branch}` first."
        )
    patch = next(each for each in manifest.patches if each.name == stopped.patch)
    head = git.resolve_commit("HEAD")
    if head != state.at:
        if worktree.uncommitted(git) or not git.succeeds(
            "merge-base", "--is-ancestor", state.at, head
        ):
            raise PortError(
                f"{state.port_branch} is at {head[:10]}, not at {state.at[:10]}, and has "
                "uncommitted changes or other ancestors; commit them, or roll back."
            )
        commit: str | None = head
    else:
        _check_resolved(git, manifest, state, stopped)
        git.run("add", "--update", ":/")
        tree = git.text("write-tree")
        commit = None
        if tree != git.text("rev-parse", "HEAD^{tree}"):
            text = commit_message(patch, state, stopped.notes, (*stopped.marked, *stopped.unmarked))
            commit = git.commit_tree(tree, [head], text)
            git.run("update-ref", f"refs/heads/{state.port_branch}", commit, head)
    done = AppliedPatch(
        patch=patch.name,
        verdict="conflicts",
        commit=commit,
        by_hand=(*stopped.marked, *stopped.unmarked),
        notes=stopped.notes,
    )
    return _updated(git, state, at=commit or state.at, stopped=None, done=(*state.done, done))


def _check_resolved(git: Git, manifest: Manifest, state: PortState, stopped: PendingPatch) -> None:
    ground = open_merge_context(git, manifest, state.tip)
    patch = next(each for each in manifest.patches if each.name == stopped.patch)
    labels = ground.labels(patch)
    left = []
    for path in stopped.marked:
        file = git.folder / path
        if file.is_file():
            found = find_markers(file.read_bytes(), labels)
            left += [f"{path}:{line} is a conflict marker" for line in found]
    waiting = worktree.unmerged(git)
    left += [
        f"{path}: choose with `git add {path}` or `git rm {path}`"
        for path in stopped.unmarked
        if path in waiting
    ]
    if left:
        raise PortError("not settled yet:\n  " + "\n  ".join(left))
    present = [path for path in stopped.marked if path in waiting]
    if present:
        git.run("add", "--all", "--", *(f":(literal,top){path}" for path in present))


def commit_message(patch: Patch, state: PortState, notes: Sequence[str], by_hand: Sequence[str] = ()) -> str:
    """What a patch's commit says."""
    lines = [f"Reapply {patch.name}: {patch.title}", ""]
    lines += [f"Onto {state.upstream} at {state.tip[:10]}, from {state.head[:10]}."]
    lines += [f"Settled by hand: {', '.join(by_hand)}."] if by_hand else []
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _updated(git: Git, state: PortState, **changes: object) -> PortState:
    new = PortState.model_validate({**state.model_dump(), **changes})
    write_state(git, new)
    return new


# ------------------------------------------------------------------------------------------
# Back to where the fork was. No branch is moved or deleted, and no uncommitted byte is lost.


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """What a rollback did."""

    branch: str
    """Where HEAD is now."""
    commit: str
    saved_branch: str | None
    """The branch with what was uncommitted until now."""
    saved_paths: tuple[str, ...]
    restored: tuple[str, ...]
    """Files that had been uncommitted before the port, as they were then."""
    port_branch: str


def roll_back(git: Git, stamp: str, confirm: Callable[[str], None]) -> RollbackResult:
    """Keep what is uncommitted, return to the fork, put back what it had uncommitted then."""
    state = read_state(git)
    target = _rollback_target(git, state.branch, state.head, state.backup)
    trees = [state.head] if state.kept is None else [state.head, state.kept]
    paths = worktree.files_to_save(git, trees)
    confirm(
        f"Return to {target} ({state.head[:10]}), as it was before the port."
        + (f" {len(paths)} uncommitted files are kept in a branch first." if paths else "")
    )
    kept = None
    if paths:
        kept = f"{SAVED_PREFIX}-{stamp}-rollback"
        worktree.save_to_branch(git, kept, paths, "Uncommitted work, kept before a rollback")
        worktree.discard_changes(git, paths)
    git.run("checkout", "--quiet", "--no-overwrite-ignore", target, "--")
    restored = worktree.restore_from_branch(git, state.kept) if state.kept is not None else []
    archive_state(git, stamp)
    return RollbackResult(target, state.head, kept, tuple(paths), tuple(restored), state.port_branch)


def _rollback_target(git: Git, branch: str | None, head: str, backup: str) -> str:
    """The branch the user was on, unless it has moved since: then the backup."""
    ref = f"refs/heads/{branch}"
    if branch is None or not git.succeeds("rev-parse", "--verify", "--quiet", ref):
        return backup
    return branch if git.resolve_commit(ref) == head else backup
