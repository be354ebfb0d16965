"""Find functions and classes that upstream moved, and merge the fork's changes into them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkport.source_index import (
    definition_lines,
    definitions_named,
    flatten,
    reindent,
    reordered,
    similarity,
)
from forkport.three_way import MergedText, join_lines, split_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import TreeEntry
    from forkport.source_index import Definition, SourceReader, UpstreamChanges
    from forkport.three_way import Conflict, SideLabels

MIN_SIMILARITY = 0.5
"""The share of equal lines from which two functions of one name are the same function: the
threshold that git uses for renamed files."""


@dataclass(frozen=True, slots=True)
class Move:
    """A function or class that upstream moved, in three versions.

    `base` is the version of their common ancestor, `theirs` the fork's and `ours` upstream's.
    """

    name: str
    base: Definition
    theirs: Definition
    """The fork's version, which is still in the original file."""
    path: str
    """The file in which upstream has the definition now."""
    ours: Definition

    def describe(self, home: str) -> str:
        """Return a note about the move for the user; `home` is the original file."""
        where = "within the file" if self.path == home else f"from {home}"
        name = "" if self.ours.name == self.name else f" as {self.ours.name}"
        return f"{self.name} was moved {where}{name}: check the names that it uses"


def find_moves(
    reader: SourceReader,
    upstream: UpstreamChanges,
    tree: dict[str, TreeEntry],
    home: str,
    sides: tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None],
) -> list[Move]:
    """Find functions and classes that upstream moved out of file `home`, or within it.

    `sides` is the file in the common ancestor, in upstream's `tree` (None if deleted), and in the
    fork.
    """
    base, ours, theirs = sides
    assert base is not None
    assert theirs is not None
    finder = _MoveFinder(
        reader,
        upstream,
        tree,
        home,
        reader.read(base),
        flatten(reader.definitions(home, theirs)),
        {} if ours is None else flatten(reader.definitions(home, ours)),
    )
    return finder.find(reader.definitions(home, base))


def find_deleted_moves(
    reader: SourceReader,
    upstream: UpstreamChanges,
    tree: dict[str, TreeEntry],
    home: str,
    sides: tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None],
    kept: set[str],
) -> list[tuple[str, str]]:
    """Find functions that the fork deletes from `home` and upstream moved to another file.

    `sides` is as for `find_moves`, with None for a file that the fork deletes. `kept` are names
    that the fork defines anywhere. Returns names and the files in which upstream has them.
    """
    base = sides[0]
    assert base is not None
    names = [
        {} if entry is None else flatten(reader.definitions(home, entry)) for entry in sides[1:]
    ]
    finder = _MoveFinder(reader, upstream, tree, home, reader.read(base), names[1], names[0])
    return [
        (definition.name, found[0])
        for definition in reader.definitions(home, base)
        if not any(definition.name in each for each in names) and definition.last_name not in kept
        if (found := finder.find_elsewhere(definition)) is not None
    ]


@dataclass(frozen=True)
class _MoveFinder:
    reader: SourceReader
    upstream: UpstreamChanges
    tree: dict[str, TreeEntry]
    home: str
    base_text: bytes
    theirs: dict[str, Definition]
    ours: dict[str, Definition]

    def find(self, definitions: Sequence[Definition]) -> list[Move]:
        """Find which of these functions and classes upstream moved.

        A class that was not moved is searched for moved methods.
        """
        moved_within_file = reordered(definitions, self.ours)
        moves: list[Move] = []
        for definition in definitions:
            name = definition.name
            fork = self.theirs.get(name)
            if fork is None:
                continue
            if name not in self.ours:
                found = self.find_elsewhere(definition)
                moves += [Move(name, definition, fork, *found)] if found else []
            elif name in moved_within_file:
                moves.append(Move(name, definition, fork, self.home, self.ours[name]))
            else:
                moves += self.find(definition.children)
        return moves

    def find_elsewhere(self, definition: Definition) -> tuple[str, Definition] | None:
        """Find the file to which upstream moved a function or class, and its definition there.

        It is the most similar new definition of the same name. None if there is none, or if two
        are equally similar.
        """
        text = definition_lines(definition, self.base_text)
        candidates = []
        for path, candidate in definitions_named(
            self.reader, self.tree, self.upstream.changed_paths, definition.last_name
        ):
            if candidate.name not in self._base_names(path):
                content = self.reader.read(self.tree[path])
                score = similarity(text, definition_lines(candidate, content))
                candidates.append((score, path, candidate))
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        if not candidates or candidates[0][0] < MIN_SIMILARITY:
            return None
        if len(candidates) > 1 and candidates[1][0] == candidates[0][0]:
            return None
        return candidates[0][1:]

    def _base_names(self, path: str) -> set[str]:
        """Return the names that a file already defined in the common ancestor with the fork.

        Upstream cannot have moved these to the file.
        """
        base_path = self.upstream.base_path(path)
        entry = self.upstream.base.get(base_path)
        return set() if entry is None else set(flatten(self.reader.definitions(base_path, entry)))


def merge_moved_definitions(
    reader: SourceReader,
    tree: dict[str, TreeEntry],
    home: str,
    texts: tuple[bytes, bytes],
    moves: Sequence[Move],
    labels: SideLabels,
) -> dict[str, MergedText]:
    """Merge the fork's changes of moved functions where upstream has them now, the rest in `home`.

    `texts` is the file `home` in the common ancestor and in the fork. Returns the merged files by
    path.
    """
    base, theirs = texts
    results: dict[str, MergedText] = {}
    for path in dict.fromkeys(move.path for move in moves):
        moved_here = [move for move in moves if move.path == path]
        content = reader.read(tree[path])
        results[path] = _merge_definitions(reader, content, texts, moved_here, labels)
    base_rest = _without(base, [move.base for move in moves])
    theirs_rest = _without(theirs, [move.theirs for move in moves])
    if home in tree:
        before = results.get(home) or MergedText(reader.read(tree[home]))
        rest = reader.merge_texts(base_rest, before.content, theirs_rest, labels)
        results[home] = MergedText(
            rest.content,
            (*before.conflicts, *rest.conflicts),
            (*before.adjacent_changes, *rest.adjacent_changes),
        )
    elif base_rest.split() != theirs_rest.split():
        # Upstream deleted the file, and the fork changed more than the moved definitions.
        results[home] = MergedText(theirs_rest)
    return results


def _merge_definitions(
    reader: SourceReader,
    content: bytes,
    texts: tuple[bytes, bytes],
    moves: Sequence[Move],
    labels: SideLabels,
) -> MergedText:
    """Merge moved functions into the text of a file, the last first, so line numbers stay valid."""
    lines = split_lines(content)
    conflicts: list[Conflict] = []
    adjacent: list[str] = []
    for move in sorted(moves, key=lambda move: move.ours.start, reverse=True):
        ours = lines[move.ours.start : move.ours.end]
        base, theirs = (
            reindent(definition_lines(definition, text), ours)
            for definition, text in zip((move.base, move.theirs), texts, strict=True)
        )
        merged = reader.merge_texts(b"".join(base), b"".join(ours), b"".join(theirs), labels)
        lines[move.ours.start : move.ours.end] = split_lines(merged.content)
        conflicts += merged.conflicts
        adjacent += merged.adjacent_changes
    return MergedText(join_lines(lines), tuple(conflicts), tuple(adjacent))


def _without(content: bytes, definitions: Sequence[Definition]) -> bytes:
    lines = split_lines(content)
    for definition in sorted(definitions, key=lambda each: each.start, reverse=True):
        del lines[definition.start : definition.end]
    return b"".join(lines)
