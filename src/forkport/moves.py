"""Functions and classes that upstream put elsewhere, and the fork's changes brought after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport.source_index import flatten, reordered, similarity, definition_lines, reindent, definitions_named
from forkport.three_way import MergedText, join_lines, split_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import TreeEntry
    from forkport.source_index import SourceReader, Definition, UpstreamChanges
    from forkport.three_way import Conflict, SideLabels

MIN_SIMILARITY = 0.5
"""A function of the same name is the same function if this share of its lines is: git's own
threshold for files."""


@dataclass(frozen=True, slots=True)
class Move:
    """A unit of the base, the fork's version of it, and where upstream has it."""

    name: str
    base: Definition
    theirs: Definition
    path: str
    ours: Definition

    def describe(self, home: str) -> str:
        """For a person."""
        where = "within the file" if self.path == home else f"from {home}"
        name = "" if self.ours.name == self.name else f" as {self.ours.name}"
        return f"{self.name} was moved {where}{name}: check the names that it uses"


def find_moves(
    library: SourceReader,
    upstream: UpstreamChanges,
    tree: dict[str, TreeEntry],
    home: str,
    sides: tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None],
) -> list[Move]:
    """Units that base and fork have in a file, and that are elsewhere in `tree`."""
    base, ours, theirs = sides
    assert base is not None
    assert theirs is not None
    seeker = _MoveFinder(
        library,
        upstream,
        tree,
        home,
        library.read(base),
        flatten(library.definitions(home, theirs)),
        {} if ours is None else flatten(library.definitions(home, ours)),
    )
    return seeker.find(library.definitions(home, base))


@dataclass(frozen=True)
class _MoveFinder:
    library: SourceReader
    upstream: UpstreamChanges
    tree: dict[str, TreeEntry]
    home: str
    base_text: bytes
    theirs: dict[str, Definition]
    ours: dict[str, Definition]

    def find(self, units: Sequence[Definition]) -> list[Move]:
        """A class that moved is followed whole; in one that stayed, its methods are looked at."""
        moved_here = reordered(units, self.ours)
        moves: list[Move] = []
        for unit in units:
            fork = self.theirs.get(unit.name)
            if fork is None:
                continue
            if unit.name not in self.ours:
                found = self._find_elsewhere(unit)
                moves += [Move(unit.name, unit, fork, *found)] if found else []
            elif unit.name in moved_here:
                moves.append(Move(unit.name, unit, fork, self.home, self.ours[unit.name]))
            else:
                moves += self.find(unit.children)
        return moves

    def _find_elsewhere(self, unit: Definition) -> tuple[str, Definition] | None:
        """The most similar unit of that name that is new where it is; none where two are."""
        text = definition_lines(unit, self.base_text)
        found = []
        for path, there in definitions_named(
            self.library, self.tree, self.upstream.changed_paths, unit.last_name
        ):
            if there.name not in self._base_names(path):
                alike = similarity(text, definition_lines(there, self.library.read(self.tree[path])))
                found.append((alike, path, there))
        found.sort(key=lambda one: one[0], reverse=True)
        if not found or found[0][0] < MIN_SIMILARITY:
            return None
        if len(found) > 1 and found[1][0] == found[0][0]:
            return None
        return found[0][1:]

    def _base_names(self, path: str) -> set[str]:
        before = self.upstream.base_path(path)
        entry = self.upstream.base.get(before)
        return set() if entry is None else set(flatten(self.library.definitions(before, entry)))


def merge_moved_definitions(
    library: SourceReader,
    tree: dict[str, TreeEntry],
    home: str,
    texts: tuple[bytes, bytes],
    moves: Sequence[Move],
    labels: SideLabels,
) -> dict[str, MergedText]:
    """Merge each moved unit where it is now, and what is left of the file where that is."""
    base, theirs = texts
    results: dict[str, MergedText] = {}
    for path in dict.fromkeys(move.path for move in moves):
        there = [move for move in moves if move.path == path]
        results[path] = _merge_definitions(library, library.read(tree[path]), texts, there, labels)
    base_rest = _without(base, [move.base for move in moves])
    theirs_rest = _without(theirs, [move.theirs for move in moves])
    if home in tree:
        before = results.get(home) or MergedText(library.read(tree[home]))
        rest = library.merge_texts(base_rest, before.content, theirs_rest, labels)
        results[home] = MergedText(
            rest.content,
            (*before.conflicts, *rest.conflicts),
            (*before.adjacent_changes, *rest.adjacent_changes),
        )
    elif base_rest.split() != theirs_rest.split():
        results[home] = MergedText(theirs_rest)  # the fork changed more, and that has no home
    return results


def _merge_definitions(
    library: SourceReader,
    content: bytes,
    texts: tuple[bytes, bytes],
    moves: Sequence[Move],
    labels: SideLabels,
) -> MergedText:
    """From the last to the first, so that line numbers above stay true."""
    lines = split_lines(content)
    conflicts: list[Conflict] = []
    neighbours: list[str] = []
    for move in sorted(moves, key=lambda move: move.ours.start, reverse=True):
        ours = lines[move.ours.start : move.ours.end]
        base, theirs = (
            reindent(definition_lines(unit, text), ours)
            for unit, text in zip((move.base, move.theirs), texts, strict=True)
        )
        one = library.merge_texts(b"".join(base), b"".join(ours), b"".join(theirs), labels)
        lines[move.ours.start : move.ours.end] = split_lines(one.content)
        conflicts += one.conflicts
        neighbours += one.adjacent_changes
    return MergedText(join_lines(lines), tuple(conflicts), tuple(neighbours))


def _without(content: bytes, units: Sequence[Definition]) -> bytes:
    lines = split_lines(content)
    for unit in sorted(units, key=lambda unit: unit.start, reverse=True):
        del lines[unit.start : unit.end]
    return b"".join(lines)
