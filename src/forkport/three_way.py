"""Merge two changed versions of a text line by line (three-way merge).

A conflict is reported only where both sides changed the same lines. Git's own merge also reports
one where the two sides changed adjacent lines. This merge keeps both changes and notes the place
for review.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import Hunk

Lines = list[bytes]
_BASE_MARKER = b"||||||| before both\n"
_MIDDLE_MARKER = b"=======\n"
_QUOTED = re.compile(rb"""("[^"\n]*"|'[^'\n]*')""")
_WORD = re.compile(rb"\w{2}")


@dataclass(frozen=True, slots=True)
class Conflict:
    """Lines that both sides changed in different ways."""

    line: int
    """The line of the first marker in the merged text, counted from 1."""
    base: bytes
    ours: bytes
    theirs: bytes
    base_start: int = field(default=-1, compare=False)
    """The first of the lines in the base, counted from 0; -1 if it is not known."""


@dataclass(frozen=True, slots=True)
class MergedText:
    """A merged text, with markers where there are conflicts."""

    content: bytes
    conflicts: tuple[Conflict, ...] = ()
    adjacent_changes: tuple[str, ...] = ()
    """The line above each place where a change of one side directly follows one of the other."""
    whitespace_changes: tuple[str, ...] = ()
    """The first line of each change that both sides made with different whitespace."""


@dataclass(frozen=True, slots=True)
class SideLabels:
    """The names of the two sides in conflict markers."""

    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class _Edit:
    """A hunk of one side: the base lines from `start` to `end` become `new`."""

    start: int
    end: int
    new: tuple[bytes, ...]
    is_ours: bool


def split_lines(content: bytes) -> Lines:
    """Split into lines with their endings as git does: only a line feed ends a line."""
    pieces = content.split(b"\n")
    lines = [piece + b"\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


def join_lines(lines: Lines) -> bytes:
    """Join lines, terminating a line without an ending that is no longer the last one."""
    return b"".join([*_terminate(lines[:-1]), *lines[-1:]])


def merge_lines(
    base: Lines,
    ours: tuple[Lines, Sequence[Hunk]],
    theirs: tuple[Lines, Sequence[Hunk]],
    labels: SideLabels,
) -> MergedText:
    """Merge two versions of `base`, each given as its lines and its hunks against the base."""
    edits = sorted(
        [*_edits(*ours, is_ours=True), *_edits(*theirs, is_ours=False)],
        key=lambda edit: (edit.start, edit.end),
    )
    out: Lines = []
    conflicts: list[Conflict] = []
    adjacent: list[str] = []
    whitespace: list[str] = []
    position = 0  # base lines before this are merged
    previous: _Edit | None = None
    for group in _group_overlapping(edits):
        start, end = group[0].start, max(edit.end for edit in group)
        out += base[position:start]
        if previous and previous.end == start and previous.is_ours != group[0].is_ours:
            adjacent.append(out[-1].decode(errors="replace").strip() if out else "the top")
        left, right = (
            _apply_edits(base, [edit for edit in group if edit.is_ours is side], start, end)
            for side in (True, False)
        )
        if len({edit.is_ours for edit in group}) == 1:
            out += left if group[0].is_ours else right
        elif left == right:
            out += left
        elif same_but_whitespace(left, right):
            out += left
            whitespace.append(b"".join(left).decode(errors="replace").strip().partition("\n")[0])
        elif (both := _longer_insertion(base[start:end], left, right)) is not None:
            out += both
        else:
            conflicts.append(_write_conflict(out, (base, start, end), left, right, labels))
        position, previous = end, group[-1]
    content = join_lines(out + base[position:])
    return MergedText(content, tuple(conflicts), tuple(adjacent), tuple(whitespace))


def same_but_whitespace(left: Sequence[bytes], right: Sequence[bytes]) -> bool:
    """Return True if two texts are equal but for blank lines and spaces outside of quotes.

    Their indentation must be equal, with tabs of any usual width, because it means something.
    """
    one, other = ([line for line in side if line.strip()] for side in (left, right))
    if not one or [*map(without_spaces, one)] != [*map(without_spaces, other)]:
        return False
    return any(
        [_depth(line, width) for line in one] == [_depth(line, width) for line in other]
        for width in (2, 4, 8)
    )


def _depth(line: bytes, tab_width: int) -> int:
    text = line.expandtabs(tab_width)
    return len(text) - len(text.lstrip())


def without_spaces(line: bytes) -> bytes:
    """Return a line without its whitespace, except in quotes."""
    parts = _QUOTED.split(line)
    return b"".join(part if i % 2 else b"".join(part.split()) for i, part in enumerate(parts))


def _longer_insertion(base: Lines, left: Lines, right: Lines) -> Lines | None:
    """Return the longer of two insertions if it begins or ends with all of the other one."""
    short, long = sorted((left, right), key=len)
    if base or not any(_WORD.search(line) for line in short):
        return None
    is_part = long[: len(short)] == short or long[len(long) - len(short) :] == short
    return long if is_part else None


def find_conflicts(content: bytes, labels: SideLabels) -> tuple[Conflict, ...]:
    """Parse the conflicts out of a text with markers."""
    first, last = (f"<<<<<<< {labels.ours}\n".encode(), f">>>>>>> {labels.theirs}\n".encode())
    found = []
    parts: list[Lines] | None = None
    for number, line in enumerate(split_lines(content), start=1):
        if line == first:
            begin, parts = number, [[]]
        elif parts is None:
            continue
        elif line == last:
            assert len(parts) == 3, (number, parts)
            left, base, right = (b"".join(part) for part in parts)
            found.append(Conflict(begin, base, left, right))
            parts = None
        elif (len(parts), line) in ((1, _BASE_MARKER), (2, _MIDDLE_MARKER)):
            parts.append([])
        else:
            parts[-1].append(line)
    return tuple(found)


def find_markers(content: bytes, labels: SideLabels) -> list[int]:
    """Return the numbers of the lines, from 1, that are still conflict markers with these labels.

    Lines may end in CRLF, because an editor or git may have converted the file.
    """
    markers = {
        f"<<<<<<< {labels.ours}".encode(),
        f">>>>>>> {labels.theirs}".encode(),
        _BASE_MARKER[:-1],
    }
    lines = content.split(b"\n")
    return [number for number, line in enumerate(lines, start=1) if line.rstrip(b"\r") in markers]


def _edits(lines: Lines, hunks: Sequence[Hunk], is_ours: bool) -> list[_Edit]:
    return [
        _Edit(h.old_start, h.old_end, tuple(lines[h.new_start : h.new_end]), is_ours) for h in hunks
    ]


def _group_overlapping(edits: Sequence[_Edit]) -> list[list[_Edit]]:
    """Group edits that change common lines. Edits of adjacent lines are not grouped."""
    groups: list[list[_Edit]] = []
    end = -1
    for edit in edits:
        if groups and (edit.start < end or _insert_at_same_place(groups[-1][-1], edit)):
            groups[-1].append(edit)
            end = max(end, edit.end)
        else:
            groups.append([edit])
            end = edit.end
    return groups


def _insert_at_same_place(one: _Edit, other: _Edit) -> bool:
    """Return True if both edits insert lines at the same place, so that their order is unknown."""
    return one.start == one.end == other.start == other.end


def _apply_edits(base: Lines, edits: Sequence[_Edit], start: int, end: int) -> Lines:
    out: Lines = []
    for edit in edits:
        out += [*base[start : edit.start], *edit.new]
        start = edit.end
    return out + base[start:end]


def _write_conflict(
    out: Lines, where: tuple[Lines, int, int], left: Lines, right: Lines, labels: SideLabels
) -> Conflict:
    """Append a conflict with markers; lines that are equal on both sides stay outside of them."""
    base, start, end = where
    base = base[start:end]
    head = _common_prefix(left, right)
    out += left[:head]
    left, right = left[head:], right[head:]
    tail = _common_prefix(left[::-1], right[::-1])
    after = left[len(left) - tail :]
    left, right = left[: len(left) - tail], right[: len(right) - tail]
    conflict = Conflict(len(out) + 1, b"".join(base), b"".join(left), b"".join(right), start)
    out += [
        *(f"<<<<<<< {labels.ours}\n".encode(), *_terminate(left)),
        *(_BASE_MARKER, *_terminate(base)),
        *(_MIDDLE_MARKER, *_terminate(right)),
        *(f">>>>>>> {labels.theirs}\n".encode(), *after),
    ]
    return conflict


def _common_prefix(left: Lines, right: Lines) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _terminate(lines: Lines) -> Lines:
    """Add a line feed where it is missing, as it may be after a file's last line."""
    return [line if line.endswith(b"\n") else line + b"\n" for line in lines]
