"""Inspect, save and switch the user's working tree without losing anything.

Untracked files stay where they are, ignored or not. Where a switch would overwrite one, it is saved
first. Saved work is an ordinary branch that anyone can inspect: its commit holds the files byte for
byte, without any filter, and its second parent holds the index.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport import ForkportError
from forkport.git import GITLINK, SYMLINK, TreeEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from forkport.git import Git
    from forkport.merge import FileResult

_OPERATION_FILES = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
"""Files in the git folder that exist while an operation of the user is in progress."""


def uncommitted(git: Git) -> list[str]:
    """List tracked files that differ from HEAD, in the index or on disk."""
    raw = git.run(
        *("status", "--porcelain=v1", "-z", "--untracked-files=no", "--no-renames"),
        "--ignore-submodules=dirty",
    )
    return [record[3:] for record in raw.decode(errors="surrogateescape").split("\0")[:-1]]


def untracked(git: Git) -> set[str]:
    """List every file on disk that git does not track, including ignored ones."""
    raw = git.run("ls-files", "--others", "-z").decode(errors="surrogateescape")
    return set(raw.split("\0")[:-1])


def unmerged(git: Git) -> set[str]:
    """List the paths with an unresolved conflict in the index."""
    raw = git.run("ls-files", "--unmerged", "-z").decode(errors="surrogateescape")
    return {record.partition("\t")[2] for record in raw.split("\0")[:-1]}


def check_no_operation_in_progress(git: Git) -> None:
    """Raise if the user is in the middle of a merge, rebase, cherry-pick or revert."""
    for name in _OPERATION_FILES:
        if (git.folder / git.text("rev-parse", "--git-path", name)).exists():
            raise ForkportError(
                f"{git.folder} is in the middle of a merge or rebase ({name}). Finish that first."
            )
    if conflicted := unmerged(git):
        raise ForkportError(f"{', '.join(sorted(conflicted))}: not merged yet. Resolve that first.")


def blocking_untracked(git: Git, targets: Sequence[str]) -> list[str]:
    """List untracked files that prevent checking out one of the commits `targets`.

    A file blocks if the commit has different contents or a folder at the file's path, or a file at
    the path of one of the file's parent folders.
    """
    others = sorted(untracked(git))
    found: set[str] = set()
    for tree in map(git.list_tree, targets):
        folders = {str(folder) for path in tree for folder in PurePosixPath(path).parents}
        for path in others:
            parents = map(str, PurePosixPath(path).parents)
            if path in tree:
                blocks = _disk_entry(git, path) != tree[path]
            else:
                blocks = path in folders or any(parent in tree for parent in parents)
            if blocks:
                found.add(path)
    return sorted(found)


def files_to_save(git: Git, targets: Sequence[str]) -> list[str]:
    """List files whose contents would be lost by checking out one of the commits `targets`.

    These are uncommitted changes, and untracked files that the checkout would overwrite.
    """
    return list(dict.fromkeys([*uncommitted(git), *blocking_untracked(git, ["HEAD", *targets])]))


def save_to_branch(git: Git, branch: str, paths: Sequence[str], subject: str) -> str:
    """Commit files as they are on disk, and the index, to a new branch; return the commit."""
    files = {path: _disk_entry(git, path) for path in paths}
    head = git.resolve_commit("HEAD")
    tree = git.write_changed_tree(head, files)
    index = tree if unmerged(git) else git.text("write-tree")
    staged = git.commit_tree(index, [head], f"{subject}: the index\n")
    commit = git.commit_tree(tree, [head, staged], f"{subject}\n\n" + "\n".join(paths) + "\n")
    git.run("update-ref", f"refs/heads/{branch}", commit, "")
    # The caller may delete the files next, so make sure that the branch has their last content.
    for path, entry in files.items():
        if entry is not None and git.read_blob(entry.blob) != _disk_content(git, path):
            raise ForkportError(
                f"{path} changed while it was saved to {branch}. Stop the program that writes it."
            )
    return commit


def restore_from_branch(git: Git, commit: str) -> list[str]:
    """Write saved files back to disk and restore the index; return the paths."""
    head = git.resolve_commit(f"{commit}^1")
    changes = git.diff_trees(head, commit, renames=False)
    # Delete first: a file may have the name of a folder that goes away.
    for change in changes:
        if change.new is None:
            assert change.old_path is not None
            (git.folder / change.old_path).unlink(missing_ok=True)
    for change in changes:
        if change.new_path is not None and change.new is not None:
            content = git.read_blob(change.new.blob)
            _write_file(git.folder / change.new_path, change.new, content)
    git.run("read-tree", f"{commit}^2")
    # Exit code 1 means that files differ from the index, which is normal for saved work.
    git.run("update-index", "-q", "--refresh", allow=(0, 1))
    return [str(change.new_path or change.old_path) for change in changes]


def discard_changes(git: Git, saved: Iterable[str]) -> None:
    """Reset the working tree to HEAD, and delete those files in `saved` that are untracked."""
    git.run("reset", "--hard", "--quiet")
    others = untracked(git)
    for path in saved:
        if path in others:
            (git.folder / path).unlink()


def move_and_checkout(git: Git, branch: str, commit: str) -> None:
    """Create a branch at a commit, or move it forward to the commit, and check it out.

    Raises if that would drop commits of the branch or overwrite an untracked file.
    """
    check_no_commits_dropped(git, branch, commit)
    git.run("checkout", "--quiet", "--no-overwrite-ignore", "--detach", commit, "--")
    git.run("update-ref", f"refs/heads/{branch}", commit)
    git.run("symbolic-ref", "HEAD", f"refs/heads/{branch}")


def check_no_commits_dropped(git: Git, branch: str, commit: str) -> None:
    """Raise if moving an existing branch to `commit` would drop commits of the branch."""
    ref = f"refs/heads/{branch}"
    if not git.succeeds("rev-parse", "--verify", "--quiet", ref):
        return
    if not git.succeeds("merge-base", "--is-ancestor", ref, commit):
        raise ForkportError(
            f"{branch} has commits that the port did not make, and continuing would drop them. "
            f"Save them with `git branch NAME {branch}`, then run `git checkout {branch}` and "
            f"`git reset --keep {commit[:10]}`; or undo the port with `gracetune port rollback`."
        )


def check_no_untracked_conflict(git: Git, commit: str, files: Sequence[FileResult]) -> None:
    """Raise if writing a merged patch to the working tree would overwrite untracked files."""
    tree = git.write_changed_tree(commit, {file.path: file.entry for file in files})
    if blocked := blocking_untracked(git, [tree]):
        raise ForkportError(
            f"{', '.join(blocked)} is not tracked, and the patch would overwrite it. Move it away "
            "and run `gracetune port apply --continue`."
        )


def write_conflicts(git: Git, files: Sequence[FileResult]) -> None:
    """Write a merged patch to the working tree and the index, as `git merge` does.

    Files without conflicts are staged; for others, the index has base, ours and theirs.
    """
    _update_index(git, ((file.path, 0, file.entry) for file in files))
    for file in files:
        if file.entry is None:
            (git.folder / file.path).unlink(missing_ok=True)
        else:
            git.run("checkout-index", "--force", "--quiet", "--", file.path)
    for file in files:
        if file.is_conflict:
            stages = ((file.path, 1 + i, entry) for i, entry in enumerate(file.stages))
            _update_index(git, ((file.path, 0, None), *(each for each in stages if each[2])))


def _update_index(git: Git, entries: Iterable[tuple[str, int, TreeEntry | None]]) -> None:
    records = b"".join(git.index_record(path, stage, entry) for path, stage, entry in entries)
    git.run("update-index", "-z", "--index-info", stdin=records)


def _disk_entry(git: Git, path: str) -> TreeEntry | None:
    """Store a file on disk as a blob and return its entry, or None if there is no file."""
    full = git.folder / path
    if full.is_symlink():
        return TreeEntry(SYMLINK, git.write_blob(_disk_content(git, path)))
    if full.is_dir():
        raise ForkportError(
            f"{path} is a changed submodule, or a folder where git expects a file. Commit or undo "
            "that first."
        )
    if not full.exists():
        return None
    mode = "100755" if os.access(full, os.X_OK) else "100644"
    return TreeEntry(mode, git.write_blob(_disk_content(git, path)))


def _disk_content(git: Git, path: str) -> bytes:
    full = git.folder / path
    return os.fsencode(os.readlink(full)) if full.is_symlink() else full.read_bytes()


def _write_file(path: Path, entry: TreeEntry, content: bytes) -> None:
    assert entry.mode != GITLINK, path
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        for folder, _, _ in os.walk(path, topdown=False):
            os.rmdir(folder)  # fails if a file is left in it
    path.unlink(missing_ok=True)
    if entry.mode == SYMLINK:
        path.symlink_to(os.fsdecode(content))
        return
    path.write_bytes(content)
    if entry.mode == "100755":
        path.chmod(path.stat().st_mode | 0o111)
