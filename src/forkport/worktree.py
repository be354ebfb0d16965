"""The user's working tree: what is uncommitted, kept exactly, and switching without overwriting.

What git does not track stays where it is, ignored or not; where a switch would write over it, it
is kept first. Kept work is a branch that anyone can look at: the files as they were, byte for byte,
past every filter, and the index as its second parent.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport.git import GITLINK, SYMLINK, TreeEntry
from gracetune.errors import PortError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from forkport.git import Git
    from forkport.merge import FileResult

_OPERATION_FILES = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")


def uncommitted(git: Git) -> list[str]:
    """Tracked files that differ from the last commit, in the index or on disk."""
    raw = git.run(
        *("status", "--porcelain=v1", "-z", "--untracked-files=no", "--no-renames"),
        "--ignore-submodules=dirty",
    )
    return [record[3:] for record in raw.decode(errors="surrogateescape").split("\0")[:-1]]


def untracked(git: Git) -> set[str]:
    """Everything on disk that git does not track, ignored files too."""
    raw = git.run("ls-files", "--others", "-z").decode(errors="surrogateescape")
    return set(raw.split("\0")[:-1])


def unmerged(git: Git) -> set[str]:
    """Paths whose conflict nobody has settled in the index."""
    raw = git.run("ls-files", "--unmerged", "-z").decode(errors="surrogateescape")
    return {record.partition("\t")[2] for record in raw.split("\0")[:-1]}


def check_no_operation_in_progress(git: Git) -> None:
    """A merge or rebase of the user's own comes first."""
    for name in _OPERATION_FILES:
        if (git.folder / git.text("rev-parse", "--git-path", name)).exists():
            raise PortError(f"{git.folder} is in the middle of a merge ({name}): end that first.")
    if left := unmerged(git):
        raise PortError(f"{', '.join(sorted(left))}: not merged yet; settle that first.")


def blocking_untracked(git: Git, targets: Sequence[str]) -> list[str]:
    """Untracked files that going to one of these commits would write over with something else."""
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
    """What leaving HEAD for one of these commits would cost, unless it is kept first."""
    return list(dict.fromkeys([*uncommitted(git), *blocking_untracked(git, ["HEAD", *targets])]))


def save_to_branch(git: Git, branch: str, paths: Sequence[str], why: str) -> str:
    """Put files as they are into a branch of their own; gives its commit."""
    files = {path: _disk_entry(git, path) for path in paths}
    head = git.resolve_commit("HEAD")
    tree = git.write_tree_with(head, files)
    index = tree if unmerged(git) else git.text("write-tree")
    staged = git.commit_tree(index, [head], f"{why}: the index\n")
    commit = git.commit_tree(tree, [head, staged], f"{why}\n\n" + "\n".join(paths) + "\n")
    git.run("update-ref", f"refs/heads/{branch}", commit, "")
    for path, entry in files.items():  # what follows may delete them: be sure that it is kept
        if entry is not None and git.read_blob(entry.blob) != _disk_content(git, path):
            raise PortError(f"{path} changed while it was kept in {branch}; stop what writes it.")
    return commit


def restore_from_branch(git: Git, commit: str) -> list[str]:
    """Write kept files where they were, and the index as it was; gives their paths."""
    head = git.resolve_commit(f"{commit}^1")
    changes = git.diff_trees(head, commit, renames=False)
    for change in changes:  # first: a file may have the name of a folder that goes
        if change.new is None:
            assert change.old_path is not None
            (git.folder / change.old_path).unlink(missing_ok=True)
    for change in changes:
        if change.new_path is not None and change.new is not None:
            _write_file(git.folder / change.new_path, change.new, git.read_blob(change.new.blob))
    git.run("read-tree", f"{commit}^2")
    git.run("update-index", "-q", "--refresh", allow=(0, 1))  # 1: files differ, as they should
    return [str(change.new_path or change.old_path) for change in changes]


def discard_changes(git: Git, kept: Iterable[str]) -> None:
    """Make the tree equal to its commit. Only for what was kept before."""
    git.run("reset", "--hard", "--quiet")
    others = untracked(git)
    for path in kept:
        if path in others:
            (git.folder / path).unlink()


def switch_branch(git: Git, branch: str, commit: str) -> None:
    """Stand on a branch at a commit; git refuses where that would overwrite something."""
    check_branch_contained(git, branch, commit)
    git.run("checkout", "--quiet", "--no-overwrite-ignore", "--detach", commit, "--")
    git.run("update-ref", f"refs/heads/{branch}", commit)
    git.run("symbolic-ref", "HEAD", f"refs/heads/{branch}")


def check_branch_contained(git: Git, branch: str, commit: str) -> None:
    """No commit of a user's is dropped: a branch that is there moves only to what grew from it."""
    ref = f"refs/heads/{branch}"
    if not git.succeeds("rev-parse", "--verify", "--quiet", ref):
        return
    if not git.succeeds("merge-base", "--is-ancestor", ref, commit):
        raise PortError(
            f"{branch} has commits that are not the port's, and going on would drop them. Keep "
            f"them with `git branch NAME {branch}`, then run `git checkout {branch}` and "
            f"`git reset --keep {commit[:10]}`; or undo the port with `gracetune port rollback`."
        )


def check_no_untracked_conflict(git: Git, commit: str, files: Sequence[FileResult]) -> None:
    """What is not tracked stays: a patch on a commit is laid out only where nothing is."""
    tree = git.write_tree_with(commit, {file.path: file.entry for file in files})
    if blocked := blocking_untracked(git, [tree]):
        raise PortError(
            f"{', '.join(blocked)} is not tracked, and the patch would write over it; move it away "
            "and run `gracetune port apply --continue`."
        )


def write_conflicts(git: Git, files: Sequence[FileResult]) -> None:
    """Write a half-merged patch: clean files staged, conflicts with markers and three stages."""
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
    lines = b"".join(git.index_record(path, stage, entry) for path, stage, entry in entries)
    git.run("update-index", "-z", "--index-info", stdin=lines)


def _disk_entry(git: Git, path: str) -> TreeEntry | None:
    """A file on disk as an entry, its bytes kept; none where there is none."""
    full = git.folder / path
    if full.is_symlink():
        return TreeEntry(SYMLINK, git.write_blob(_disk_content(git, path)))
    if full.is_dir():
        raise PortError(
            f"{path} is a submodule with changes, or a folder in the place of a file; commit or "
            "undo that first."
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
            os.rmdir(folder)  # fails where a file is left
    path.unlink(missing_ok=True)
    if entry.mode == SYMLINK:
        path.symlink_to(os.fsdecode(content))
        return
    path.write_bytes(content)
    if entry.mode == "100755":
        path.chmod(path.stat().st_mode | 0o111)
