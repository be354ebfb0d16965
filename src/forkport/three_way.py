"""Merging two changes of one text: a conflict is where both changed the same lines, nothing else.

Git's own merge also stops where changes only touch. Here both are kept and the place is named, for
someone to look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import Hunk

Lines = list[bytes]
_BEFORE = b"||||||| before both\n"
_BETWEEN = b"=======\n"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Lines that both sides changed, each in its own way."""

    line: int
    """Where its first marker stands in the merged text, counted from 1."""
    base: bytes
    ours: bytes
    theirs: bytes


@dataclass(frozen=True, slots=True)
class MergedText:
    """A merged text, with markers where there are conflicts."""

    content: bytes
    conflicts: tuple[Conflict, ...] = ()
    adjacent_changes: tuple[str, ...] = ()
    """The line above each place where a change of one side touches one of the other."""


@dataclass(frozen=True, slots=True)
class SideLabels:
    """What the markers call the two sides."""

    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class _Edit:
    """A hunk with the side it belongs to."""

    start: int
    end: int
    new: tuple[bytes, ...]
    is_ours: bool


def split_lines(content: bytes) -> Lines:
    """Lines with their ends, as git counts them: only a line feed ends one."""
    pieces = content.split(b"\n")
    lines = [piece + b"\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


def join_lines(lines: Lines) -> bytes:
    """One text; a line that was the last of its file gets an end where others follow it now."""
    return b"".join([*_terminate(lines[:-1]), *lines[-1:]])


def merge_lines(
    base: Lines,
    ours: tuple[Lines, Sequence[Hunk]],
    theirs: tuple[Lines, Sequence[Hunk]],
    labels: SideLabels,
) -> MergedText:
    """Take each side's changes; each side comes with its hunks against the base."""
    edits = sorted(
        [*_edits(*ours, of_ours=True), *_edits(*theirs, of_ours=False)],
        key=lambda edit: (edit.start, edit.end),
    )
    out: Lines = []
    conflicts: list[Conflict] = []
    neighbours: list[str] = []
    done = 0
    last: _Edit | None = None
    for cluster in _group_overlapping(edits):
        start, end = cluster[0].start, max(edit.end for edit in cluster)
        out += base[done:start]
        if last is not None and last.end == start and last.is_ours != cluster[0].is_ours:
            neighbours.append(out[-1].decode(errors="replace").strip() if out else "the top")
        left, right = (
            _apply_edits(base, [e for e in cluster if e.is_ours is side], start, end)
            for side in (True, False)
        )
        if len({edit.is_ours for edit in cluster}) == 1:
            out += left if cluster[0].is_ours else right
        elif left == right:
            out += left
        else:
            conflicts.append(_write_conflict(out, base[start:end], left, right, labels))
        done, last = end, cluster[-1]
    return MergedText(join_lines(out + base[done:]), tuple(conflicts), tuple(neighbours))


def find_conflicts(content: bytes, labels: SideLabels) -> tuple[Conflict, ...]:
    """Read the markers back, wherever a text was put together from."""
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
        elif (len(parts), line) in ((1, _BEFORE), (2, _BETWEEN)):
            parts.append([])
        else:
            parts[-1].append(line)
    return tuple(found)


def find_markers(content: bytes, labels: SideLabels) -> list[int]:
    """Lines with a marker of ours, whatever ends lines on this disk; counted from 1."""
    marks = {f"<<<<<<< {labels.ours}".encode(), f">>>>>>> {labels.theirs}".encode(), _BEFORE[:-1]}
    lines = content.split(b"\n")
    return [number for number, line in enumerate(lines, start=1) if line.rstrip(b"\r") in marks]


def _edits(lines: Lines, hunks: Sequence[Hunk], of_ours: bool) -> list[_Edit]:
    return [
        _Edit(h.old_start, h.old_end, tuple(lines[h.new_start : h.new_end]), of_ours) for h in hunks
    ]


def _group_overlapping(edits: Sequence[_Edit]) -> list[list[_Edit]]:
    """Edits that share lines belong together; those that only touch do not."""
    clusters: list[list[_Edit]] = []
    end = -1
    for edit in edits:
        if clusters and (edit.start < end or _same_place(clusters[-1][-1], edit)):
            clusters[-1].append(edit)
            end = max(end, edit.end)
        else:
            clusters.append([edit])
            end = edit.end
    return clusters


def _same_place(one: _Edit, other: _Edit) -> bool:
    """Two insertions at one place have no order of their own."""
    return one.start == one.end == other.start == other.end


def _apply_edits(base: Lines, edits: Sequence[_Edit], start: int, end: int) -> Lines:
    out: Lines = []
    for edit in edits:
        out += [*base[start : edit.start], *edit.new]
        start = edit.end
    return out + base[start:end]


def _write_conflict(out: Lines, base: Lines, left: Lines, right: Lines, labels: SideLabels) -> Conflict:
    """Write a conflict with markers; lines that both sides agree on stay outside."""
    head = _common_prefix(left, right)
    out += left[:head]
    left, right = left[head:], right[head:]
    tail = _common_prefix(left[::-1], right[::-1])
    after = left[len(left) - tail :]
    left, right = left[: len(left) - tail], right[: len(right) - tail]
    conflict = Conflict(len(out) + 1, b"".join(base), b"".join(left), b"".join(right))
    out += [
        *(f"<<<<<<< {labels.ours}\n".encode(), *_terminate(left)),
        *(_BEFORE, *_terminate(base)),
        *(_BETWEEN, *_terminate(right)),
        *(f">>>>>>> {labels.theirs}\n".encode(), *after),
    ]
    return conflict


def _common_prefix(left: Lines, right: Lines) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _terminate(lines: Lines) -> Lines:
    """A file's last line may have no end; before anything else it needs one."""
    return [line if line.endswith(b"\n") else line + b"\n" for line in lines]
