"""Git by plain arguments: no shell, no prompt, and no setting of the user's that changes an answer.

Everything here reads and writes objects and refs. What touches a working tree is `worktree`.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.errors import PortError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

GITLINK = "160000"
SYMLINK = "120000"
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """What a tree has at a path."""

    mode: str
    blob: str


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file between two trees; a path or an entry is none where the file is not there."""

    status: str
    """A added, D deleted, M modified, T another type, R renamed."""
    old_path: str | None
    new_path: str | None
    old: TreeEntry | None
    new: TreeEntry | None


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that differ, as half-open ranges counted from 0."""

    old_start: int
    old_end: int
    new_start: int
    new_end: int


@dataclass(frozen=True, slots=True)
class Git:
    """One repository."""

    folder: Path
    environment: Mapping[str, str] = field(repr=False)
    null_id: str = "0" * 40
    """How this repository writes the name of no object."""

    def run(
        self,
        *words: str,
        stdin: bytes = b"",
        allow: Sequence[int] = (0,),
        variables: Mapping[str, str] | None = None,
    ) -> bytes:
        """What git prints; a failure is told in git's own words."""
        done = self._spawn(words, stdin, variables or {})
        if done.returncode not in allow:
            said = done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
            raise PortError(f"`git {' '.join(words[:4])}` failed in {self.folder}: {said}")
        return done.stdout

    def text(self, *words: str) -> str:
        """The same, as one stripped line of text."""
        return self.run(*words).decode(errors="surrogateescape").strip()

    def succeeds(self, *words: str) -> bool:
        """Whether git exits with 0: for questions that it answers by its exit code."""
        return self._spawn(words, b"", {}).returncode == 0

    def _spawn(
        self, words: Sequence[str], stdin: bytes, variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        kept = {k: v for k, v in self.environment.items() if k not in _REPOSITORY_VARIABLES}
        fixed = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": ":", "GIT_PAGER": "cat"}
        try:
            return subprocess.run(
                ["git", "--no-replace-objects", "-c", "core.quotePath=false", *words],
                cwd=self.folder,
                env={**kept, **fixed, **variables},
                input=stdin,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise PortError("`git` is not installed, or not on PATH; install it.") from None

    def resolve_commit(self, name: str) -> str:
        """The commit that a name stands for."""
        done = self._spawn(["rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], b"", {})
        if done.returncode != 0:
            raise PortError(
                f"{name!r} is no commit of {self.folder}; name a branch, a tag or a commit that is "
                "there (a remote's are there after `git fetch`)."
            )
        return done.stdout.decode().strip()

    def merge_base(self, one: str, other: str) -> str:
        """The newest commit that two commits both grew from."""
        if not self.succeeds("merge-base", one, other):
            raise PortError(
                f"{one[:10]} and {other[:10]} have no commit in common in {self.folder}. "
                "In a shallow clone: git fetch --unshallow."
            )
        return self.text("merge-base", one, other)

    def list_tree(self, name: str) -> dict[str, TreeEntry]:
        """Every file of a commit or tree, by path."""
        entries = {}
        for record in _records(self.run("ls-tree", "-r", "-z", "--full-tree", name)):
            head, _, path = record.partition("\t")
            mode, _, blob = head.split(" ")
            entries[path] = TreeEntry(mode, blob)
        return entries

    def diff_trees(self, old: str, new: str, *, renames: bool = True) -> list[FileChange]:
        """What differs between two commits or trees."""
        follow = ("-M", "-l0") if renames else ("--no-renames",)
        raw = self.run("diff-tree", "-r", "-z", "--no-abbrev", *follow, old, new)
        return parse_raw_diff(_records(raw))

    def read_blob(self, blob: str) -> bytes:
        """The bytes of a file."""
        return self.run("cat-file", "blob", blob)

    def write_blob(self, content: bytes) -> str:
        """Keep bytes as they are; gives the blob."""
        return self.run("hash-object", "-w", "--no-filters", "--stdin", stdin=content).decode()[:-1]

    def diff_blobs(self, old: str, new: str) -> list[Hunk]:
        """Which lines differ between two blobs."""
        if old == new:
            return []
        said = self.run(
            *("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--text", "-U0"),
            *("--inter-hunk-context=0", "--diff-algorithm=histogram", old, new),
        )
        return [_parse_hunk(*match.groups()) for match in _HUNK.finditer(said)]

    def write_tree_with(self, base: str, files: Mapping[str, TreeEntry | None]) -> str:
        """A tree with some files replaced; none takes one away."""
        lines = b"".join(self.index_record(path, 0, entry) for path, entry in files.items())
        return self._write_tree(base, lines, "update-index", "-z", "--index-info")

    def write_patched_tree(self, base: str, patch: bytes) -> str:
        """A tree with a patch applied, exactly where it says."""
        return self._write_tree(base, patch, "apply", "--cached", "--whitespace=nowarn", "-")

    def _write_tree(self, base: str, stdin: bytes, *words: str) -> str:
        """Change a tree in an index of our own: the user's stays as it is."""
        index = (
            Path(self.text("rev-parse", "--absolute-git-dir"))
            / f"gracetune-port.{os.getpid()}.index"
        )
        variables = {"GIT_INDEX_FILE": str(index)}
        try:
            self.run("read-tree", base, variables=variables)
            self.run(*words, stdin=stdin, variables=variables)
            return self.run("write-tree", variables=variables).decode().strip()
        finally:
            index.unlink(missing_ok=True)

    def index_record(self, path: str, stage: int, entry: TreeEntry | None) -> bytes:
        """What `update-index -z --index-info` reads; without an entry the path goes."""
        kept = entry or TreeEntry("0", self.null_id)
        head = f"{kept.mode} {kept.blob} {stage}\t"
        return head.encode() + path.encode(errors="surrogateescape") + b"\0"

    def commit_tree(self, tree: str, parents: Sequence[str], message: str) -> str:
        """A commit by plumbing: no hook runs, nothing asks for a key."""
        given = [word for parent in parents for word in ("-p", parent)]
        return self.run("commit-tree", tree, *given, stdin=message.encode()).decode().strip()


def open_repository(folder: Path, environment: Mapping[str, str]) -> Git:
    """The repository that a folder is in; paths count from its root."""
    if not folder.is_dir():
        raise PortError(f"{folder} is no folder; name the clone of the fork.")
    inside = Git(folder, environment)
    if not inside.succeeds("rev-parse", "--show-toplevel"):
        raise PortError(f"{folder} is not in a git working tree; name the clone of the fork.")
    root = Path(inside.text("rev-parse", "--show-toplevel"))
    digits = 64 if inside.text("rev-parse", "--show-object-format") == "sha256" else 40
    return Git(root, environment, "0" * digits)


def parse_raw_diff(records: Iterable[str]) -> list[FileChange]:
    """Git's `--raw -z` records, submodules among them."""
    changes = []
    left = iter(records)
    for head in left:
        old_mode, new_mode, old_blob, new_blob, status = head[1:].split(" ")
        first = next(left)
        second = next(left) if status[0] in "RC" else first
        old = TreeEntry(old_mode, old_blob) if status[0] != "A" else None
        new = TreeEntry(new_mode, new_blob) if status[0] != "D" else None
        changes.append(
            FileChange(status[0], first if old else None, second if new else None, old, new)
        )
    return changes


def _records(raw: bytes) -> list[str]:
    return raw.decode(errors="surrogateescape").split("\0")[:-1]


def _parse_hunk(old: bytes, old_len: bytes | None, new: bytes, new_len: bytes | None) -> Hunk:
    """`-5,0` is the place after line 5; `-5,2` are the lines 5 and 6."""
    num_old, num_new = int(old_len or 1), int(new_len or 1)
    old_start = int(old) - (num_old > 0)
    new_start = int(new) - (num_new > 0)
    return Hunk(old_start, old_start + num_old, new_start, new_start + num_new)
