"""Recognise what upstream already took from the fork, so that it is not merged a second time.

A three-way merge compares both sides with their common ancestor, the base. If upstream took a
commit of the fork and one side then changed the same lines again, that comparison shows a conflict:

    base A      upstream A -> B (taken)           fork A -> B -> C

Here B is the better base. `merge_texts` searches the fork's own versions of the file for the newest
text that upstream has, or once had, at the place of a conflict, and merges again with that text in
the base. If upstream has reverted the change since, the conflict stays.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport.git import Hunk
from forkport.three_way import (
    MergedText,
    SideLabels,
    join_lines,
    merge_lines,
    same_but_whitespace,
    split_lines,
    without_spaces,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forkport.git import CommitChanges, TreeEntry
    from forkport.source_index import SourceReader
    from forkport.three_way import Conflict, Lines

_NO_LABELS = SideLabels("", "")


@dataclass(frozen=True, slots=True)
class FileHistory:
    """The earlier versions of one file, newest first, and the paths that it had."""

    paths: tuple[str, ...]
    entries: tuple[TreeEntry, ...]

    @property
    def blobs(self) -> list[str]:
        """The contents of the versions, newest first."""
        return [entry.blob for entry in self.entries]


@dataclass(frozen=True)
class CommitHistory:
    """The commits of one side since the common ancestor, oldest first."""

    commits: Sequence[CommitChanges]

    def versions(self, path: str) -> FileHistory:
        """Follow the file with this path at the end of the history back through its renames.

        A deletion ends this: a file that was deleted and added again is another file.
        """
        paths: list[str] = [path]
        entries: list[TreeEntry] = []
        for commit in reversed(self.commits):
            for change in commit.changes:
                if change.status == "D" and change.old_path == paths[-1]:
                    return FileHistory(tuple(paths), tuple(entries))
                if change.new_path != paths[-1] or change.new is None:
                    continue
                entries.append(change.new)
                if change.status == "R" and change.old_path is not None:
                    paths.append(change.old_path)
                break
        return FileHistory(tuple(paths), tuple(entries))

    def final_path(self, path: str) -> str:
        """Follow a path through the renames of the history; return the last one."""
        for commit in self.commits:
            for change in commit.changes:
                if change.status == "R" and change.old_path == path:
                    assert change.new_path is not None
                    path = change.new_path
                    break
        return path


@dataclass(frozen=True, slots=True)
class _Versions:
    """Finds the lines of a base text in other versions of it."""

    reader: SourceReader
    base: bytes

    def widen(self, start: int, end: int, texts: Sequence[bytes]) -> tuple[int, int]:
        """Extend a range of base lines until no change of the texts crosses its ends."""
        hunks = [hunk for text in texts for hunk in self.reader.hunks(self.base, text)]
        while True:
            crossing = [h for h in hunks if h.old_start < end and start < h.old_end]
            wider = (
                min([start, *(h.old_start for h in crossing)]),
                max([end, *(h.old_end for h in crossing)]),
            )
            if wider == (start, end):
                return wider
            start, end = wider

    def at(self, text: bytes, start: int, end: int) -> Lines:
        """Return the lines of a text that stand for the base lines from `start` to `end`.

        Insertions at both ends belong to them.
        """
        before = inside = 0
        for hunk in self.reader.hunks(self.base, text):
            growth = (hunk.new_end - hunk.new_start) - (hunk.old_end - hunk.old_start)
            if hunk.old_end <= start and not hunk.old_start == hunk.old_end == start:
                before += growth
            elif hunk.old_end <= end:
                inside += growth
        return split_lines(text)[start + before : end + before + inside]


def merge_texts(
    reader: SourceReader,
    sides: tuple[bytes, bytes, bytes],
    fork_versions: Sequence[bytes],
    upstream_versions: Sequence[bytes],
    labels: SideLabels,
) -> MergedText:
    """Merge base, ours and theirs, using earlier versions of both sides, newest first."""
    base, ours, theirs = sides
    merged = reader.merge_texts(base, ours, theirs, labels)
    candidates = list(dict.fromkeys([theirs, *fork_versions]))
    while merged.conflicts:
        versions = _Versions(reader, base)
        for new_base in _better_bases(
            versions, (ours, theirs), merged.conflicts, candidates, upstream_versions
        ):
            again = reader.merge_texts(new_base, ours, theirs, labels)
            if len(again.conflicts) < len(merged.conflicts):
                base, merged = new_base, again
                break
        else:
            break
    return merged


def _better_bases(
    versions: _Versions,
    sides: tuple[bytes, bytes],
    conflicts: Sequence[Conflict],
    candidates: Sequence[bytes],
    upstream_versions: Sequence[bytes],
) -> Iterator[bytes]:
    """Yield the base with the lines of one conflict replaced by a version that upstream took."""
    lines = split_lines(versions.base)
    for conflict in conflicts:
        first = conflict.base_start
        last = first + len(split_lines(conflict.base))
        for candidate in candidates:
            start, end = versions.widen(first, last, (*sides, candidate))
            taken = versions.at(candidate, start, end)
            if taken != lines[start:end] and _has_taken(
                versions, sides[0], candidate, (start, end), upstream_versions
            ):
                yield join_lines([*lines[:start], *taken, *lines[end:]])


def _has_taken(
    versions: _Versions,
    ours: bytes,
    candidate: bytes,
    where: tuple[int, int],
    upstream_versions: Sequence[bytes],
) -> bool:
    """Return True if upstream took a version of the fork at some lines, and did not revert it."""
    base = split_lines(versions.base)[slice(*where)]
    taken, now = versions.at(candidate, *where), versions.at(ours, *where)
    if _is_reverted(base, taken, now):
        return False
    if _contains(base, now, taken):
        return True
    for version in upstream_versions:
        wider = versions.widen(*where, (version, candidate))
        then = versions.at(version, *wider)
        if _is_equal(then, versions.at(candidate, *wider)):
            return True
        if _is_equal(then, split_lines(versions.base)[slice(*wider)]):
            return False  # taken before, perhaps, and reverted here
    return False


def _is_equal(one: Lines, other: Lines) -> bool:
    return one == other or same_but_whitespace(one, other)


def _contains(base: Lines, now: Lines, taken: Lines) -> bool:
    """Return True if `now` has every change from `base` to `taken`."""
    merged = merge_lines(
        base, (now, _diff_lines(base, now)), (taken, _diff_lines(base, taken)), _NO_LABELS
    )
    return not merged.conflicts and merged.content == join_lines(now)


def _is_reverted(base: Lines, taken: Lines, now: Lines) -> bool:
    """Return True if a part of the change from `base` to `taken` is undone in `now`.

    That is, lines that the fork added are gone without a successor, or ones that it removed are
    back.
    """
    base, taken, now = ([*filter(None, map(without_spaces, text))] for text in (base, taken, now))
    added, removed = set(taken) - set(base), set(base) - set(taken)
    for hunk in _diff_lines(taken, now):
        gone, new = taken[hunk.old_start : hunk.old_end], now[hunk.new_start : hunk.new_end]
        if removed.intersection(new) or (added.intersection(gone) and not new):
            return True
    return False


def _diff_lines(old: Lines, new: Lines) -> list[Hunk]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [Hunk(i, j, k, m) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]
