"""Which upstream commits touched what a patch touches: functions in Python, else ranges of lines.

The history is walked along first parents, oldest first, so that one line of versions leads from the
base to the tip: files are followed through renames, functions into the files they move to, ranges
as lines above them come and go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport.git import FileChange, Hunk, parse_raw_diff
from forkport.moves import MIN_SIMILARITY
from forkport.source_index import (
    change_paths,
    flatten,
    innermost_definition,
    is_touched,
    similarity,
    definition_lines,
    definitions_named,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forkport.git import Git
    from forkport.source_index import SourceReader, Definition


@dataclass(slots=True)
class TouchedRegion:
    """Something that a patch touches, followed from commit to commit."""

    patch: str
    label: str
    path: str
    name: str
    """A function or class; empty: lines outside of any, or of a file that is not Python."""
    start: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class TouchingCommit:
    """An upstream commit, and what of a patch's it touched."""

    commit: str
    subject: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _UpstreamCommit:
    commit: str
    subject: str
    changes: tuple[FileChange, ...]


def touched_regions(library: SourceReader, patch: str, changes: Sequence[FileChange]) -> list[TouchedRegion]:
    """What a patch touches of the base: each function once, and ranges of other lines."""
    spots: dict[tuple[str, str, int], TouchedRegion] = {}
    for change in changes:
        if change.old is None or change.old_path is None:
            continue
        path = change.old_path
        units = library.definitions(path, change.old)
        for start, end in _touched_ranges(library, change):
            for unit, first, last in _split(units, start, end):
                name = "" if unit is None else unit.name
                label = f"{path}: {name or _range(first, last)}"
                key = (path, name, 0 if name else first)
                spots.setdefault(key, TouchedRegion(patch, label, path, name, first, last))
    return [*spots.values()]


def _touched_ranges(library: SourceReader, change: FileChange) -> list[tuple[int, int]]:
    assert change.old is not None
    if change.new is not None and library.is_text(change.old) and library.is_text(change.new):
        hunks = library.git.diff_blobs(change.old.blob, change.new.blob)
        return [(hunk.old_start, hunk.old_end) for hunk in hunks]
    return [(0, max(1, library.read(change.old).count(b"\n")))] if change.new is None else []


def _split(units: Sequence[Definition], start: int, end: int) -> Iterator[tuple[Definition | None, int, int]]:
    """A range cut where it passes from one unit into another."""
    if start == end:
        unit = innermost_definition(units, start)
        inside = unit if unit is not None and unit.start < start else None
        yield inside, start, end
        return
    first = start
    for line in range(start, end):
        unit = innermost_definition(units, line)
        if line + 1 == end or innermost_definition(units, line + 1) != unit:
            yield unit, first, line + 1
            first = line + 1


def _range(start: int, end: int) -> str:
    if end <= start + 1:
        return f"line {start + 1}"
    return f"lines {start + 1}-{end}"


def commits_touching(
    library: SourceReader, base: str, tip: str, spots: Sequence[TouchedRegion]
) -> dict[str, list[TouchingCommit]]:
    """For each patch the upstream commits that touched its spots, oldest first."""
    touched: dict[str, list[TouchingCommit]] = {spot.patch: [] for spot in spots}
    live = list(spots)
    for step in _upstream_commits(library.git, base, tip):
        by_path = {change.old_path: change for change in step.changes if change.old_path}
        hit: dict[str, list[str]] = {}
        for spot in [spot for spot in live if spot.path in by_path]:
            change = by_path[spot.path]
            hunks = _hunks(library, change)
            if spot.name:
                was_touched, lives_on = _follow_name(library, spot, change, hunks, step.changes)
            else:
                was_touched, lives_on = _follow_range(spot, change, hunks)
            if was_touched:
                hit.setdefault(spot.patch, []).append(spot.label)
            if not lives_on:
                live.remove(spot)
        for patch, labels in hit.items():
            touched[patch].append(TouchingCommit(step.commit, step.subject, tuple(labels)))
    return touched


def _upstream_commits(git: Git, base: str, tip: str) -> Iterator[_UpstreamCommit]:
    raw = git.run(
        *("log", "--first-parent", "-m", "--reverse", "--raw", "-z", "-M", "--no-abbrev"),
        *("--no-show-signature", "--format=%x01%H%x02%s%x03", f"{base}..{tip}"),
    ).decode(errors="surrogateescape")
    for block in raw.split("\x01")[1:]:
        head, _, rest = block.partition("\x03")
        commit, _, subject = head.partition("\x02")
        records = [record for record in rest.lstrip("\0\n").split("\0") if record]
        yield _UpstreamCommit(commit, subject, tuple(parse_raw_diff(records)))


def _hunks(library: SourceReader, change: FileChange) -> list[Hunk]:
    if change.old is None or change.new is None:
        return []
    if not (library.is_text(change.old) and library.is_text(change.new)):
        return []
    return library.git.diff_blobs(change.old.blob, change.new.blob)


def _follow_name(
    library: SourceReader,
    spot: TouchedRegion,
    change: FileChange,
    hunks: Sequence[Hunk],
    changes: Sequence[FileChange],
) -> tuple[bool, bool]:
    """Whether a function was touched, and whether it is still to be found."""
    assert change.old is not None
    before = flatten(library.definitions(spot.path, change.old)).get(spot.name)
    if before is None:
        return False, False
    if change.new is not None and change.new_path is not None:
        after = flatten(library.definitions(change.new_path, change.new)).get(spot.name)
        if after is not None:
            spot.path = change.new_path
            return any(
                is_touched(before, h.old_start, h.old_end)
                or is_touched(after, h.new_start, h.new_end)
                for h in hunks
            ), True
    text = definition_lines(before, library.read(change.old))
    found = _moved_to(library, before, text, changes)
    if found is None:
        return True, False
    spot.path, spot.name = found
    return True, True


def _moved_to(
    library: SourceReader, unit: Definition, text: Sequence[bytes], changes: Sequence[FileChange]
) -> tuple[str, str] | None:
    """Where the same commit put a function that it took away."""
    tree = {each.new_path: each.new for each in changes if each.new_path and each.new}
    old = {each.new_path: each for each in changes}
    best: tuple[float, str, str] | None = None
    for path, found in definitions_named(library, tree, tuple(tree), unit.last_name):
        before = old[path]
        if before.old is not None and found.name in flatten(
            library.definitions(change_paths(before)[0], before.old)
        ):
            continue
        alike = similarity(text, definition_lines(found, library.read(tree[path])))
        if alike >= MIN_SIMILARITY and (best is None or alike > best[0]):
            best = (alike, path, found.name)
    return None if best is None else best[1:]


def _follow_range(spot: TouchedRegion, change: FileChange, hunks: Sequence[Hunk]) -> tuple[bool, bool]:
    """Whether lines were touched; the range then goes on where they are now."""
    if change.new_path is None:
        return True, False
    spot.path = change.new_path
    touched = False
    shift = growth = 0
    for hunk in hunks:
        grown = (hunk.new_end - hunk.new_start) - (hunk.old_end - hunk.old_start)
        if _overlaps(hunk, spot):
            touched = True
            growth += grown
        elif hunk.old_end <= spot.start:
            shift += grown
    length = max(spot.end - spot.start + growth, 0)
    spot.start += shift
    spot.end = spot.start + length
    return touched, True


def _overlaps(hunk: Hunk, spot: TouchedRegion) -> bool:
    """Lines in common, an insertion in the middle, or two insertions at one place."""
    if hunk.old_start == hunk.old_end == spot.start == spot.end:
        return True
    if hunk.old_start == hunk.old_end:
        return spot.start < hunk.old_start < spot.end
    if spot.start == spot.end:
        return hunk.old_start < spot.start < hunk.old_end
    return max(hunk.old_start, spot.start) < min(hunk.old_end, spot.end)
