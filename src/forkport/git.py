"""Run git without a shell, without prompts and independent of the user's git configuration.

Everything here reads and writes objects and refs only. worktree.py changes the working tree.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkport import ForkportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

GITLINK = "160000"
"""File mode of a submodule."""
SYMLINK = "120000"
"""File mode of a symbolic link."""
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
"""Environment variables that git must not see: they would point it to another repository."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """The mode and blob of one path in a tree."""

    mode: str
    blob: str


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of one file between two trees.

    The old path and entry are None for an added file, the new ones for a deleted file.
    """

    status: str
    """A added, D deleted, M modified, T type changed, R renamed."""
    old_path: str | None
    new_path: str | None
    old: TreeEntry | None
    new: TreeEntry | None


@dataclass(frozen=True, slots=True)
class CommitChanges:
    """A commit and the files that it changed."""

    commit: str
    subject: str
    changes: tuple[FileChange, ...]


@dataclass(frozen=True, slots=True)
class Hunk:
    """A changed range of lines in the old and the new text: half-open, counted from 0."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


@dataclass(frozen=True, slots=True)
class Git:
    """One repository, and the git commands used on it."""

    folder: Path
    """The root of the working tree."""
    environment: Mapping[str, str] = field(repr=False)
    null_id: str = "0" * 40
    """The all-zero object id, in the length of this repository's hash."""

    def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        allow: Sequence[int] = (0,),
        variables: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return git's output. An exit code outside `allow` raises an error with git's message."""
        process = self._spawn(arguments, stdin, variables or {})
        if process.returncode not in allow:
            message = process.stderr.decode(errors="replace").strip()
            message = message or f"exit {process.returncode}"
            raise ForkportError(
                f"`git {' '.join(arguments[:4])}` failed in {self.folder}: {message}"
            )
        return process.stdout

    def text(self, *arguments: str) -> str:
        """Return git's output as stripped text."""
        return self.run(*arguments).decode(errors="surrogateescape").strip()

    def succeeds(self, *arguments: str) -> bool:
        """Return True if git exits with 0, for commands that answer by their exit code."""
        return self._spawn(arguments, b"", {}).returncode == 0

    def _spawn(
        self, arguments: Sequence[str], stdin: bytes, variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        inherited = {k: v for k, v in self.environment.items() if k not in _REPOSITORY_VARIABLES}
        fixed = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": ":", "GIT_PAGER": "cat"}
        try:
            return subprocess.run(
                ["git", "--no-replace-objects", "-c", "core.quotePath=false", *arguments],
                cwd=self.folder,
                env={**inherited, **fixed, **variables},
                input=stdin,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise ForkportError("`git` is not installed or not on PATH. Install it.") from None

    def resolve_commit(self, name: str) -> str:
        """Return the full commit id of a branch, tag or abbreviated commit."""
        process = self._spawn(["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], b"", {})
        if process.returncode != 0:
            raise ForkportError(
                f"{name!r} is not a commit in {self.folder}. Name an existing branch, tag or "
                "commit; branches of a remote exist after `git fetch`."
            )
        return process.stdout.decode().strip()

    def merge_base(self, first: str, second: str) -> str:
        """Return the newest common ancestor of two commits."""
        if not self.succeeds("merge-base", first, second):
            raise ForkportError(
                f"{first[:10]} and {second[:10]} have no commit in common in {self.folder}. "
                "In a shallow clone, run: git fetch --unshallow."
            )
        return self.text("merge-base", first, second)

    def list_tree(self, name: str) -> dict[str, TreeEntry]:
        """Return every file of a commit or tree by path."""
        entries = {}
        for record in _split_records(self.run("ls-tree", "-r", "-z", "--full-tree", name)):
            head, _, path = record.partition("\t")
            mode, _, blob = head.split(" ")
            entries[path] = TreeEntry(mode, blob)
        return entries

    def diff_trees(self, old: str, new: str, *, renames: bool = True) -> list[FileChange]:
        """Return the changed files between two commits or trees."""
        rename_options = ("-M", "-l0") if renames else ("--no-renames",)
        raw = self.run("diff-tree", "-r", "-z", "--no-abbrev", *rename_options, old, new)
        return parse_raw_diff(_split_records(raw))

    def list_commits(self, base: str, tip: str, *options: str) -> list[CommitChanges]:
        """Return the commits from `base` to `tip` with their changes, oldest first."""
        raw = self.run(
            *("log", *options, "--reverse", "--raw", "-z", "-M", "--no-abbrev"),
            *("--no-show-signature", "--format=%x01%H%x02%s%x03", f"{base}..{tip}"),
        ).decode(errors="surrogateescape")
        commits = []
        for block in raw.split("\x01")[1:]:
            head, _, rest = block.partition("\x03")
            commit, _, subject = head.partition("\x02")
            records = [record for record in rest.lstrip("\0\n").split("\0") if record]
            commits.append(CommitChanges(commit, subject, tuple(parse_raw_diff(records))))
        return commits

    def diff_blobs(self, old: str, new: str) -> list[Hunk]:
        """Return the changed line ranges between two blobs."""
        if old == new:
            return []
        diff = self.run(
            *("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--text", "-U0"),
            *("--inter-hunk-context=0", "--diff-algorithm=histogram", old, new),
        )
        return [_parse_hunk(*match.groups()) for match in _HUNK.finditer(diff)]

    def read_blob(self, blob: str) -> bytes:
        """Return the content of a blob."""
        return self.run("cat-file", "blob", blob)

    def write_blob(self, content: bytes) -> str:
        """Store bytes without any filter and return the blob id."""
        return self.run("hash-object", "-w", "--no-filters", "--stdin", stdin=content).decode()[:-1]

    def write_changed_tree(self, base: str, files: Mapping[str, TreeEntry | None]) -> str:
        """Write a tree: `base` with some files replaced, or removed where the entry is None.

        Returns the id of the new tree.
        """
        records = b"".join(self.index_record(path, 0, entry) for path, entry in files.items())
        return self._write_tree(base, records, "update-index", "-z", "--index-info")

    def write_patched_tree(self, base: str, patch: bytes) -> str:
        """Write a tree: `base` with a patch applied exactly, without fuzz. Return the tree's id."""
        return self._write_tree(base, patch, "apply", "--cached", "--whitespace=nowarn", "-")

    def _write_tree(self, base: str, stdin: bytes, *arguments: str) -> str:
        """Write a tree: `base` as changed by a git command. Return the tree's id.

        The command works on a temporary index; the user's index is not touched.
        """
        git_folder = Path(self.text("rev-parse", "--absolute-git-dir"))
        index = git_folder / f"gracetune-port.{os.getpid()}.index"
        variables = {"GIT_INDEX_FILE": str(index)}
        try:
            self.run("read-tree", base, variables=variables)
            self.run(*arguments, stdin=stdin, variables=variables)
            return self.run("write-tree", variables=variables).decode().strip()
        finally:
            index.unlink(missing_ok=True)

    def index_record(self, path: str, stage: int, entry: TreeEntry | None) -> bytes:
        """Format one line of `update-index -z --index-info`; None as the entry removes the path."""
        written = entry or TreeEntry("0", self.null_id)
        head = f"{written.mode} {written.blob} {stage}\t"
        return head.encode() + path.encode(errors="surrogateescape") + b"\0"

    def commit_tree(self, tree: str, parents: Sequence[str], message: str) -> str:
        """Create a commit with git plumbing, which runs no hooks and needs no signing key."""
        parent_options = [word for parent in parents for word in ("-p", parent)]
        return (
            self.run("commit-tree", tree, *parent_options, stdin=message.encode()).decode().strip()
        )


def open_repository(folder: Path, environment: Mapping[str, str]) -> Git:
    """Open the repository that contains a folder. Paths are relative to the repository's root."""
    if not folder.is_dir():
        raise ForkportError(f"{folder} is not a folder. Name the clone of the fork.")
    inside = Git(folder, environment)
    if not inside.succeeds("rev-parse", "--show-toplevel"):
        raise ForkportError(f"{folder} is not in a git working tree. Name the clone of the fork.")
    root = Path(inside.text("rev-parse", "--show-toplevel"))
    num_digits = 64 if inside.text("rev-parse", "--show-object-format") == "sha256" else 40
    return Git(root, environment, "0" * num_digits)


def parse_raw_diff(records: Iterable[str]) -> list[FileChange]:
    """Parse the records of git's `--raw -z` output, including submodules."""
    changes = []
    remaining = iter(records)
    for head in remaining:
        old_mode, new_mode, old_blob, new_blob, status = head[1:].split(" ")
        first = next(remaining)
        second = next(remaining) if status[0] in "RC" else first
        old = TreeEntry(old_mode, old_blob) if status[0] != "A" else None
        new = TreeEntry(new_mode, new_blob) if status[0] != "D" else None
        changes.append(
            FileChange(status[0], first if old else None, second if new else None, old, new)
        )
    return changes


def _split_records(raw: bytes) -> list[str]:
    return raw.decode(errors="surrogateescape").split("\0")[:-1]


def _parse_hunk(old: bytes, old_len: bytes | None, new: bytes, new_len: bytes | None) -> Hunk:
    """Convert a hunk header: `-5,2` covers lines 5 and 6, `-5,0` is the gap after line 5."""
    num_old, num_new = int(old_len or 1), int(new_len or 1)
    old_start = int(old) - (num_old > 0)
    new_start = int(new) - (num_new > 0)
    return Hunk(old_start, old_start + num_old, new_start, new_start + num_new)
