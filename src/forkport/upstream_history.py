"""Find the upstream commits that touched the same code as a patch.

A patch touches functions of Python files, and line ranges everywhere else. The history is walked
along first parents, oldest commit first, so that there is one sequence of versions from the base to
the tip. On the way, files are followed through renames, functions into the files they move to, and
line ranges as lines above them come and go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport.moved_code import MIN_SIMILARITY
from forkport.source_index import (
    change_paths,
    definition_lines,
    definitions_named,
    flatten,
    innermost_definition,
    is_touched,
    similarity,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forkport.git import CommitChanges, FileChange, Hunk
    from forkport.source_index import Definition, SourceReader


@dataclass(slots=True)
class TouchedRegion:
    """A function or line range that a patch changes, followed through the commits of upstream.

    `path`, `name`, `start` and `end` are its place after the last commit that was read.
    """

    patch: str
    label: str
    """The function or line range in the common ancestor of fork and upstream, for messages."""
    path: str
    name: str
    """Qualified name of the function or class; empty for the line range `start` to `end`."""
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class TouchingCommit:
    """An upstream commit, and the functions and line ranges of a patch that it also changed."""

    commit: str
    subject: str
    labels: tuple[str, ...]


def touched_regions(
    reader: SourceReader, patch: str, changes: Sequence[FileChange]
) -> list[TouchedRegion]:
    """List the code that a patch changes: functions, and ranges of lines outside of functions.

    Line numbers are those of the common ancestor of fork and upstream.
    """
    regions: dict[tuple[str, str, int], TouchedRegion] = {}
    for change in changes:
        if change.old is None or change.old_path is None:
            continue
        path = change.old_path
        definitions = reader.definitions(path, change.old)
        for start, end in _touched_ranges(reader, change):
            for definition, first, last in _split_by_definition(definitions, start, end):
                name = "" if definition is None else definition.name
                label = f"{path}: {name or _range_label(first, last)}"
                key = (path, name, 0 if name else first)
                regions.setdefault(key, TouchedRegion(patch, label, path, name, first, last))
    return [*regions.values()]


def _touched_ranges(reader: SourceReader, change: FileChange) -> list[tuple[int, int]]:
    assert change.old is not None
    if change.new is None:
        return [(0, max(1, reader.read(change.old).count(b"\n")))]
    return [(hunk.old_start, hunk.old_end) for hunk in _text_hunks(reader, change)]


def _split_by_definition(
    definitions: Sequence[Definition], start: int, end: int
) -> Iterator[tuple[Definition | None, int, int]]:
    """Cut a range of lines where one definition ends and another one begins."""
    if start == end:
        definition = innermost_definition(definitions, start)
        is_inside = definition is not None and definition.start < start
        yield definition if is_inside else None, start, end
        return
    first = start
    for line in range(start, end):
        definition = innermost_definition(definitions, line)
        if line + 1 == end or innermost_definition(definitions, line + 1) != definition:
            yield definition, first, line + 1
            first = line + 1


def _range_label(start: int, end: int) -> str:
    if end <= start + 1:
        return f"line {start + 1}"
    return f"lines {start + 1}-{end}"


def commits_touching(
    reader: SourceReader, history: Sequence[CommitChanges], regions: Sequence[TouchedRegion]
) -> dict[str, list[TouchingCommit]]:
    """Return, for each patch, the upstream commits that changed the same code, oldest first.

    `history` has the commits of upstream along first parents, oldest first.
    """
    commits: dict[str, list[TouchingCommit]] = {region.patch: [] for region in regions}
    followed = list(regions)
    for commit in history:
        by_path = {change.old_path: change for change in commit.changes if change.old_path}
        labels_by_patch: dict[str, list[str]] = {}
        for region in [region for region in followed if region.path in by_path]:
            change = by_path[region.path]
            hunks = _text_hunks(reader, change)
            if region.name:
                is_hit, still_exists = _follow_name(reader, region, change, hunks, commit.changes)
            else:
                is_hit, still_exists = _follow_range(region, change, hunks)
            if is_hit:
                labels_by_patch.setdefault(region.patch, []).append(region.label)
            if not still_exists:
                followed.remove(region)
        for patch, labels in labels_by_patch.items():
            commits[patch].append(TouchingCommit(commit.commit, commit.subject, tuple(labels)))
    return commits


def _text_hunks(reader: SourceReader, change: FileChange) -> list[Hunk]:
    if change.old is None or change.new is None:
        return []
    if not (reader.is_text(change.old) and reader.is_text(change.new)):
        return []
    return reader.hunks(reader.read(change.old), reader.read(change.new))


def _follow_name(
    reader: SourceReader,
    region: TouchedRegion,
    change: FileChange,
    hunks: Sequence[Hunk],
    changes: Sequence[FileChange],
) -> tuple[bool, bool]:
    """Follow a function through a commit. Returns (was touched, still exists)."""
    assert change.old is not None
    before = flatten(reader.definitions(region.path, change.old)).get(region.name)
    if before is None:
        return False, False
    if change.new is not None and change.new_path is not None:
        after = flatten(reader.definitions(change.new_path, change.new)).get(region.name)
        if after is not None:
            region.path = change.new_path
            return any(
                is_touched(before, h.old_start, h.old_end)
                or is_touched(after, h.new_start, h.new_end)
                for h in hunks
            ), True
    text = definition_lines(before, reader.read(change.old))
    found = _find_moved(reader, before, text, changes)
    if found is None:
        return True, False
    region.path, region.name = found
    return True, True


def _find_moved(
    reader: SourceReader,
    definition: Definition,
    text: Sequence[bytes],
    changes: Sequence[FileChange],
) -> tuple[str, str] | None:
    """Return the path and name where the same commit put a function that it removed."""
    tree = {each.new_path: each.new for each in changes if each.new_path and each.new}
    change_by_path = {each.new_path: each for each in changes}
    best: tuple[float, str, str] | None = None
    for path, candidate in definitions_named(reader, tree, tuple(tree), definition.last_name):
        change = change_by_path[path]
        if change.old is not None and candidate.name in flatten(
            reader.definitions(change_paths(change)[0], change.old)
        ):
            continue  # it was there before
        score = similarity(text, definition_lines(candidate, reader.read(tree[path])))
        if score >= MIN_SIMILARITY and (best is None or score > best[0]):
            best = (score, path, candidate.name)
    return None if best is None else best[1:]


def _follow_range(
    region: TouchedRegion, change: FileChange, hunks: Sequence[Hunk]
) -> tuple[bool, bool]:
    """Follow a line range through a commit. Returns (was touched, still exists)."""
    if change.new_path is None:
        return True, False
    region.path = change.new_path
    touched = False
    shift = growth = 0
    for hunk in hunks:
        added = (hunk.new_end - hunk.new_start) - (hunk.old_end - hunk.old_start)
        if _overlaps(hunk, region):
            touched = True
            growth += added
        elif hunk.old_end <= region.start:
            shift += added
    length = max(region.end - region.start + growth, 0)
    region.start += shift
    region.end = region.start + length
    return touched, True


def _overlaps(hunk: Hunk, region: TouchedRegion) -> bool:
    """Return True if a hunk changes lines of the region.

    An insertion counts strictly inside the other range. Two insertions count at the same line.
    """
    if hunk.old_start == hunk.old_end == region.start == region.end:
        return True
    if hunk.old_start == hunk.old_end:
        return region.start < hunk.old_start < region.end
    if region.start == region.end:
        return hunk.old_start < region.start < hunk.old_end
    return max(hunk.old_start, region.start) < min(hunk.old_end, region.end)
