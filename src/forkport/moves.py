"""Functions and classes that upstream put elsewhere, and the fork's changes brought after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport.source_index import by_name, displaced, likeness, lines_of, reindent, units_named
from forkport.three_way import MergedText, joined, split_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import TreeEntry
    from forkport.source_index import Library, Unit, Upstream
    from forkport.three_way import Conflict, Labels

ALIKE = 0.5
"""A function of the same name is the same function if this share of its lines is: git's own
threshold for files."""


@dataclass(frozen=True, slots=True)
class Move:
    """A unit of the base, the fork's version of it, and where upstream has it."""

    name: str
    base: Unit
    theirs: Unit
    path: str
    ours: Unit

    def told(self, home: str) -> str:
        """For a person."""
        where = "within the file" if self.path == home else f"from {home}"
        name = "" if self.ours.name == self.name else f" as {self.ours.name}"
        return f"{self.name} was moved {where}{name}: check the names that it uses"


def find_moves(
    library: Library,
    upstream: Upstream,
    tree: dict[str, TreeEntry],
    home: str,
    sides: tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None],
) -> list[Move]:
    """Units that base and fork have in a file, and that are elsewhere in `tree`."""
    base, ours, theirs = sides
    assert base is not None
    assert theirs is not None
    seeker = _Seeker(
        library,
        upstream,
        tree,
        home,
        library.read(base),
        by_name(library.units(home, theirs)),
        {} if ours is None else by_name(library.units(home, ours)),
    )
    return seeker.among(library.units(home, base))


@dataclass(frozen=True)
class _Seeker:
    library: Library
    upstream: Upstream
    tree: dict[str, TreeEntry]
    home: str
    base_text: bytes
    theirs: dict[str, Unit]
    ours: dict[str, Unit]

    def among(self, units: Sequence[Unit]) -> list[Move]:
        """A class that moved is followed whole; in one that stayed, its methods are looked at."""
        moved_here = displaced(units, self.ours)
        moves: list[Move] = []
        for unit in units:
            fork = self.theirs.get(unit.name)
            if fork is None:
                continue
            if unit.name not in self.ours:
                found = self._elsewhere(unit)
                moves += [Move(unit.name, unit, fork, *found)] if found else []
            elif unit.name in moved_here:
                moves.append(Move(unit.name, unit, fork, self.home, self.ours[unit.name]))
            else:
                moves += self.among(unit.children)
        return moves

    def _elsewhere(self, unit: Unit) -> tuple[str, Unit] | None:
        """The most similar unit of that name that is new where it is; none where two are."""
        text = lines_of(unit, self.base_text)
        found = []
        for path, there in units_named(
            self.library, self.tree, self.upstream.rewritten, unit.last_name
        ):
            if there.name not in self._names_before(path):
                alike = likeness(text, lines_of(there, self.library.read(self.tree[path])))
                found.append((alike, path, there))
        found.sort(key=lambda one: one[0], reverse=True)
        if not found or found[0][0] < ALIKE:
            return None
        if len(found) > 1 and found[1][0] == found[0][0]:
            return None
        return found[0][1:]

    def _names_before(self, path: str) -> set[str]:
        before = self.upstream.origin(path)
        entry = self.upstream.base.get(before)
        return set() if entry is None else set(by_name(self.library.units(before, entry)))


def merge_moved(
    library: Library,
    tree: dict[str, TreeEntry],
    home: str,
    texts: tuple[bytes, bytes],
    moves: Sequence[Move],
    labels: Labels,
) -> dict[str, MergedText]:
    """Merge each moved unit where it is now, and what is left of the file where that is."""
    base, theirs = texts
    results: dict[str, MergedText] = {}
    for path in dict.fromkeys(move.path for move in moves):
        there = [move for move in moves if move.path == path]
        results[path] = _merge_units(library, library.read(tree[path]), texts, there, labels)
    base_rest = _without(base, [move.base for move in moves])
    theirs_rest = _without(theirs, [move.theirs for move in moves])
    if home in tree:
        before = results.get(home) or MergedText(library.read(tree[home]))
        rest = library.merge(base_rest, before.content, theirs_rest, labels)
        results[home] = MergedText(
            rest.content,
            (*before.conflicts, *rest.conflicts),
            (*before.neighbours, *rest.neighbours),
        )
    elif base_rest.split() != theirs_rest.split():
        results[home] = MergedText(theirs_rest)  # the fork changed more, and that has no home
    return results


def _merge_units(
    library: Library,
    content: bytes,
    texts: tuple[bytes, bytes],
    moves: Sequence[Move],
    labels: Labels,
) -> MergedText:
    """From the last to the first, so that line numbers above stay true."""
    lines = split_lines(content)
    conflicts: list[Conflict] = []
    neighbours: list[str] = []
    for move in sorted(moves, key=lambda move: move.ours.start, reverse=True):
        ours = lines[move.ours.start : move.ours.end]
        base, theirs = (
            reindent(lines_of(unit, text), ours)
            for unit, text in zip((move.base, move.theirs), texts, strict=True)
        )
        one = library.merge(b"".join(base), b"".join(ours), b"".join(theirs), labels)
        lines[move.ours.start : move.ours.end] = split_lines(one.content)
        conflicts += one.conflicts
        neighbours += one.neighbours
    return MergedText(joined(lines), tuple(conflicts), tuple(neighbours))


def _without(content: bytes, units: Sequence[Unit]) -> bytes:
    lines = split_lines(content)
    for unit in sorted(units, key=lambda unit: unit.start, reverse=True):
        del lines[unit.start : unit.end]
    return b"".join(lines)
