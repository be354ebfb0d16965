"""Apply patches to a fresh branch of upstream, one commit each, and roll back.

A conflict stops the port; `continue_apply` resumes it after the user has resolved the conflict.
Commits are made from git objects. The working tree is touched only to show a conflict and to check
out the finished branch.

A rollback moves or deletes no branch and loses no uncommitted byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport import ForkportError, worktree
from forkport.merge import (
    PatchResult,
    check_result,
    merge_patch,
    open_merge_context,
    patch_changes,
    side_labels,
)
from forkport.patches import read_manifest
from forkport.plan import patch_verdict
from forkport.port_state import (
    AppliedPatch,
    PendingPatch,
    PortState,
    archive_state,
    copy_patches,
    find_state,
    patches_folder,
    read_state,
    write_state,
)
from forkport.three_way import find_markers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from forkport.git import Git
    from forkport.merge import FileResult, MergeContext
    from forkport.patches import Manifest, Patch


PORT_BRANCH = "gh200-reintegration"
BACKUP_PREFIX = "gh200-backup"
SAVED_PREFIX = "gh200-kept"


@dataclass(frozen=True, slots=True)
class ApplyOutcome:
    """The state of the port after applying patches, and the conflicts that stopped it, if any."""

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
    """Create a backup branch, then apply the patches on top of upstream, as branch `port_branch`.

    A conflict stops this, for the user to resolve. Uncommitted changes are saved in a third branch
    and removed from the working tree. Before that, `confirm` is called with a description; it
    raises to refuse.
    """
    state = find_state(git)
    if state is not None and not state.finished:
        raise ForkportError(
            f"a port onto {state.upstream} is in progress in {git.folder}. Continue with "
            "`gracetune port apply --continue`, or undo it with `gracetune port rollback`."
        )
    worktree.check_no_operation_in_progress(git)
    manifest = read_manifest(folder)
    name = upstream or manifest.upstream
    tip = git.resolve_commit(name)
    git.resolve_commit(manifest.base)
    if git.succeeds("rev-parse", "--verify", "--quiet", f"refs/heads/{port_branch}"):
        raise ForkportError(
            f"the branch {port_branch} already exists. Name another with --branch, or delete it "
            f"with `git branch -D {port_branch}`."
        )
    dirty = worktree.files_to_save(git, ())
    if dirty:
        confirm(
            f"{len(dirty)} files have uncommitted changes ({', '.join(dirty[:3])}...). They are "
            "saved in a branch, removed from the working tree, and restored by a rollback."
        )
    copy_patches(git, folder)
    state = _back_up(git, name, tip, port_branch, stamp, dirty)
    return _apply_remaining(git, manifest, state)


def continue_apply(git: Git) -> ApplyOutcome:
    """Commit the user's conflict resolution and apply the remaining patches."""
    state = read_state(git)
    if state.finished:
        raise ForkportError(
            f"every patch is already on {state.port_branch}; `gracetune port validate` is next."
        )
    manifest = read_manifest(patches_folder(git))
    if state.stopped is None:
        _check_untouched(git, state)
        return _apply_remaining(git, manifest, state)
    outcome = _commit_resolution(git, manifest, state, state.stopped)
    return outcome if outcome.conflicts else _apply_remaining(git, manifest, outcome.state)


def _check_untouched(git: Git, state: PortState) -> None:
    """Refuse to continue if that would overwrite commits or uncommitted changes of the user."""
    worktree.check_no_commits_dropped(git, state.port_branch, state.at)
    if dirty := worktree.uncommitted(git):
        raise ForkportError(
            f"{', '.join(dirty)}: uncommitted, and continuing would overwrite it. Put it away with "
            "`git stash`; or undo the port with `gracetune port rollback`, which saves it."
        )


def _back_up(
    git: Git, upstream: str, tip: str, port_branch: str, stamp: str, dirty: Sequence[str]
) -> PortState:
    head = git.resolve_commit("HEAD")
    backup, saved = f"{BACKUP_PREFIX}-{stamp}", f"{SAVED_PREFIX}-{stamp}" if dirty else None
    git.run("update-ref", f"refs/heads/{backup}", head, "")
    if saved is not None:
        worktree.save_to_branch(git, saved, dirty, "Uncommitted work, saved before a port")
    state = PortState(
        branch=current_branch(git),
        head=head,
        backup=backup,
        kept=saved,
        port_branch=port_branch,
        upstream=upstream,
        tip=tip,
        at=tip,
    )
    # From here on a rollback is possible. Only now may files be removed.
    write_state(git, state)
    if saved is not None:
        worktree.discard_changes(git, dirty)
    return state


def current_branch(git: Git) -> str | None:
    """Return the branch that HEAD is on, or None for a detached HEAD."""
    return git.text("branch", "--show-current") or None


def _apply_remaining(git: Git, manifest: Manifest, state: PortState) -> ApplyOutcome:
    if len(state.done) < len(manifest.patches):
        context = open_merge_context(git, manifest, patches_folder(git), state.tip)
    for patch in manifest.patches[len(state.done) :]:
        changes = patch_changes(git, manifest, patches_folder(git), patch)
        result = merge_patch(context, git.list_tree(state.at), patch, changes)
        tree = git.write_changed_tree(state.at, result.entries)
        if patch is manifest.patches[-1] and not result.is_conflict:
            result = check_result(context, git.list_tree(tree), result)
        if result.is_conflict:
            return _stop_at_conflict(git, state, patch, result)
        commit = None
        if result.files:
            commit = git.commit_tree(tree, [state.at], commit_message(patch, state, result.notes))
        applied = AppliedPatch(
            patch=patch.name, verdict=patch_verdict(result), commit=commit, notes=result.notes
        )
        state = _updated(git, state, at=commit or state.at, done=(*state.done, applied))
    worktree.move_and_checkout(git, state.port_branch, state.at)
    return ApplyOutcome(_updated(git, state, finished=True))


def _stop_at_conflict(
    git: Git, state: PortState, patch: Patch, result: PatchResult
) -> ApplyOutcome:
    """Write the conflicts to the working tree, then record that the patch is pending.

    In the other order, a crash in between would make untouched files look like a resolution.
    """
    worktree.check_no_untracked_conflict(git, state.at, result.files)
    worktree.move_and_checkout(git, state.port_branch, state.at)
    worktree.write_conflicts(git, result.files)
    conflicts = tuple(file for file in result.files if file.is_conflict)
    pending = PendingPatch(
        patch=patch.name,
        marked=tuple(file.path for file in conflicts if file.conflicts),
        unmarked=tuple(file.path for file in conflicts if file.reason),
        notes=result.notes,
    )
    return ApplyOutcome(_updated(git, state, stopped=pending), conflicts)


def _commit_resolution(
    git: Git, manifest: Manifest, state: PortState, pending: PendingPatch
) -> ApplyOutcome:
    """Commit the files as the user resolved them, or accept the commits that the user made."""
    if current_branch(git) != state.port_branch:
        raise ForkportError(
            f"HEAD is not on {state.port_branch}, where patch {pending.patch} waits. Run "
            f"`git checkout {state.port_branch}` first."
        )
    patch = next(each for each in manifest.patches if each.name == pending.patch)
    head = git.resolve_commit("HEAD")
    if head != state.at:
        if worktree.uncommitted(git) or not git.succeeds(
            "merge-base", "--is-ancestor", state.at, head
        ):
            raise ForkportError(
                f"{state.port_branch} is at {head[:10]}, not at {state.at[:10]}, and has "
                "uncommitted changes or other ancestors. Commit the changes, or roll back."
            )
        tree = head
    else:
        _check_resolved(git, state, patch, pending)
        git.run("add", "--update", ":/")
        tree = git.text("write-tree")
    if patch is manifest.patches[-1]:
        context = open_merge_context(git, manifest, patches_folder(git), state.tip)
        if (stopped := _check_resolution(git, context, state, pending, tree)) is not None:
            return stopped
    by_hand = tuple(dict.fromkeys((*pending.marked, *pending.unmarked)))
    commit = head if head != state.at else None
    if commit is None and tree != git.text("rev-parse", "HEAD^{tree}"):
        message = commit_message(patch, state, pending.notes, by_hand)
        commit = git.commit_tree(tree, [head], message)
        git.run("update-ref", f"refs/heads/{state.port_branch}", commit, head)
    applied = AppliedPatch(
        patch=patch.name,
        verdict="conflicts",
        commit=commit,
        by_hand=by_hand,
        notes=pending.notes,
    )
    done = (*state.done, applied)
    return ApplyOutcome(_updated(git, state, at=commit or state.at, stopped=None, done=done))


def _check_resolution(
    git: Git, context: MergeContext, state: PortState, pending: PendingPatch, tree: str
) -> ApplyOutcome | None:
    """Check the last patch once more, as the user resolved it; return the conflicts that are new.

    A file that was shown as a conflict before is the user's decision.
    """
    result = check_result(context, git.list_tree(tree), PatchResult(()))
    new = tuple(file for file in result.files if file.path not in pending.unmarked)
    if not new:
        return None
    worktree.write_conflicts(git, new)
    paths = (*pending.unmarked, *(file.path for file in new))
    stopped = pending.model_copy(update={"unmarked": paths})
    return ApplyOutcome(_updated(git, state, stopped=stopped), new)


def _check_resolved(git: Git, state: PortState, patch: Patch, pending: PendingPatch) -> None:
    labels = side_labels(state.tip, patch)
    unresolved = []
    for path in pending.marked:
        file = git.folder / path
        if file.is_file():
            lines = find_markers(file.read_bytes(), labels)
            unresolved += [f"{path}:{line} is a conflict marker" for line in lines]
    unmerged = worktree.unmerged(git)
    unresolved += [
        f"{path}: choose with `git add {path}` or `git rm {path}`"
        for path in pending.unmarked
        if path in unmerged
    ]
    if unresolved:
        raise ForkportError("not resolved yet:\n  " + "\n  ".join(unresolved))
    present = [path for path in pending.marked if path in unmerged]
    if present:
        git.run("add", "--all", "--", *(f":(literal,top){path}" for path in present))


def commit_message(
    patch: Patch, state: PortState, notes: Sequence[str], by_hand: Sequence[str] = ()
) -> str:
    """Return the message of the commit that applies a patch."""
    lines = [f"Reapply {patch.name}: {patch.title}", ""]
    lines += [f"Onto {state.upstream} at {state.tip[:10]}, from {state.head[:10]}."]
    lines += [f"Resolved by hand: {', '.join(by_hand)}."] if by_hand else []
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _updated(git: Git, state: PortState, **changes: object) -> PortState:
    new = PortState.model_validate({**state.model_dump(), **changes})
    write_state(git, new)
    return new


# Rollback


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """The outcome of a rollback."""

    branch: str
    """The branch that HEAD is on now."""
    commit: str
    saved_branch: str | None
    """The branch with the changes that were uncommitted before the rollback, if any."""
    saved_paths: tuple[str, ...]
    restored: tuple[str, ...]
    """Files with uncommitted changes before the port, which are now restored."""
    port_branch: str


def roll_back(git: Git, stamp: str, confirm: Callable[[str], None]) -> RollbackResult:
    """Check out the branch that was checked out before the port, with its uncommitted changes.

    Changes that are uncommitted now are first saved in a new branch.
    """
    state = read_state(git)
    target = _rollback_target(git, state)
    trees = [state.head] if state.kept is None else [state.head, state.kept]
    paths = worktree.files_to_save(git, trees)
    confirm(
        f"Return to {target} ({state.head[:10]}), as it was before the port."
        + (f" {len(paths)} uncommitted files are saved in a branch first." if paths else "")
    )
    saved = None
    if paths:
        saved = f"{SAVED_PREFIX}-{stamp}-rollback"
        worktree.save_to_branch(git, saved, paths, "Uncommitted work, saved before a rollback")
        worktree.discard_changes(git, paths)
    git.run("checkout", "--quiet", "--no-overwrite-ignore", target, "--")
    restored = worktree.restore_from_branch(git, state.kept) if state.kept is not None else []
    archive_state(git, stamp)
    return RollbackResult(
        target, state.head, saved, tuple(paths), tuple(restored), state.port_branch
    )


def _rollback_target(git: Git, state: PortState) -> str:
    """Return the branch to roll back to: the one that was checked out before the port.

    If HEAD was detached then, or that branch has moved since, this is the backup branch.
    """
    ref = f"refs/heads/{state.branch}"
    if state.branch is None or not git.succeeds("rev-parse", "--verify", "--quiet", ref):
        return state.backup
    return state.branch if git.resolve_commit(ref) == state.head else state.backup
