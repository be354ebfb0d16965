"""The two versions that patches meet, read once: the base that they were made on, and upstream."""

from __future__ import annotations

import ast
import bisect
import difflib
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport.git import GITLINK, SYMLINK
from forkport.three_way import SideLabels, MergedText, merge_lines, split_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from forkport.git import FileChange, Git, TreeEntry


_BINARY_PROBE = 8000
"""Bytes in which git looks for a zero."""


@dataclass
class SourceReader:
    """Contents by blob, so that a file is read and parsed once however often it is asked for."""

    git: Git
    _contents: dict[str, bytes] = field(default_factory=dict)
    _units: dict[tuple[str, str], tuple[Definition, ...]] = field(default_factory=dict)

    def read(self, entry: TreeEntry) -> bytes:
        """The bytes of a file."""
        if entry.blob not in self._contents:
            self._contents[entry.blob] = self.git.read_blob(entry.blob)
        return self._contents[entry.blob]

    def definitions(self, path: str, entry: TreeEntry) -> tuple[Definition, ...]:
        """What a file defines; nothing for links, submodules and what is not Python."""
        if entry.mode in (GITLINK, SYMLINK):
            return ()
        key = (path.rpartition(".")[2], entry.blob)
        if key not in self._units:
            self._units[key] = parse_definitions(path, self.read(entry))
        return self._units[key]

    def is_text(self, entry: TreeEntry) -> bool:
        """Whether lines of it can be merged."""
        if entry.mode in (GITLINK, SYMLINK):
            return False
        return b"\0" not in self.read(entry)[:_BINARY_PROBE]

    def merge_texts(self, base: bytes, ours: bytes, theirs: bytes, labels: SideLabels) -> MergedText:
        """Merge three texts."""
        ids = [self.git.write_blob(content) for content in (base, ours, theirs)]
        sides = [
            (split_lines(content), self.git.diff_blobs(ids[0], blob))
            for content, blob in zip((ours, theirs), ids[1:], strict=True)
        ]
        return merge_lines(split_lines(base), sides[0], sides[1], labels)


@dataclass(frozen=True)
class UpstreamChanges:
    """Where upstream put what the base had."""

    base: dict[str, TreeEntry]
    tip: dict[str, TreeEntry]
    renames: dict[str, str]
    """Old path to new path."""
    changed_paths: tuple[str, ...]
    """Files of the tip that the base does not have in this form: where functions may have gone."""

    def current_path(self, path: str) -> str:
        """Where a file of the base is now."""
        return self.renames.get(path, path)

    def base_path(self, path: str) -> str:
        """Where a file of the tip was in the base."""
        return next((old for old, new in self.renames.items() if new == path), path)

    def path_for_new_file(self, path: str) -> str:
        """Where a new file belongs: beside its neighbours, where upstream moved them all."""
        for folder in PurePosixPath(path).parents:
            prefix = "" if str(folder) == "." else f"{folder}/"
            if any(name.startswith(prefix) for name in self.tip):
                return path
            moved = Counter(
                new.removesuffix(old[len(prefix) :])
                for old, new in self.renames.items()
                if old.startswith(prefix) and new.endswith(f"/{old[len(prefix) :]}")
            )
            if moved:
                return moved.most_common(1)[0][0] + path[len(prefix) :]
        return path


def compare_trees(git: Git, base: str, tip: str) -> UpstreamChanges:
    """Compare base and upstream once, for all patches."""
    changes = git.diff_trees(base, tip)
    return UpstreamChanges(
        base=git.list_tree(base),
        tip=git.list_tree(tip),
        renames={
            change.old_path: change.new_path
            for change in changes
            if change.status == "R" and change.old_path and change.new_path
        },
        changed_paths=tuple(change.new_path for change in changes if change.new_path),
    )


def definitions_named(
    library: SourceReader, tree: dict[str, TreeEntry], paths: tuple[str, ...], last_name: str
) -> Iterator[tuple[str, Definition]]:
    """Every unit of this name, whatever class or file it is in."""
    wanted = last_name.encode()
    for path in paths:
        entry = tree.get(path)
        if entry is None or not path.endswith((".py", ".pyi")):
            continue
        if entry.mode in (GITLINK, SYMLINK) or wanted not in library.read(entry):
            continue
        for unit in flatten(library.definitions(path, entry)).values():
            if unit.last_name == last_name:
                yield path, unit


def change_paths(change: FileChange) -> tuple[str, ...]:
    """The paths of a change, one or two."""
    return tuple(dict.fromkeys(path for path in (change.old_path, change.new_path) if path))


# ------------------------------------------------------------------------------------------
# Functions and classes of a Python file, as ranges of lines; other files have none.


_LONE_RETURN = re.compile(rb"\r(?!\n)")


@dataclass(frozen=True, slots=True)
class Definition:
    """A function, or a class with its methods; decorators belong to it."""

    name: str
    """Dotted, as Python qualifies it; a second one of the same name is `name#2`."""
    start: int
    end: int
    """Half open, counted from 0."""
    children: tuple[Definition, ...] = ()

    @property
    def last_name(self) -> str:
        """Without the class it is in."""
        return self.name.rpartition(".")[2].partition("#")[0]


def parse_definitions(path: str, content: bytes) -> tuple[Definition, ...]:
    """What a file defines, top level first; nothing where it is no Python that can be read."""
    # Python ends lines at a lone carriage return too; git does not, and its line numbers count.
    if not path.endswith((".py", ".pyi")) or _LONE_RETURN.search(content) or b"\f" in content:
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the upstream's code, which is not ours to mend
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return ()
    return tuple(_units(tree.body, "", {}))


def _units(body: Sequence[ast.stmt], prefix: str, seen: dict[str, int]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = prefix + node.name
            seen[name] = seen.get(name, 0) + 1
            name += f"#{seen[name]}" if seen[name] > 1 else ""
            children: tuple[Definition, ...] = ()
            if isinstance(node, ast.ClassDef):
                children = tuple(_units(node.body, f"{name}.", seen))
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            assert node.end_lineno is not None
            yield Definition(name, start, node.end_lineno, children)
        else:
            nested = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from _units(nested, prefix, seen)


def flatten(units: Sequence[Definition]) -> dict[str, Definition]:
    """Every unit at any depth."""
    found = {}
    for unit in units:
        found[unit.name] = unit
        found |= flatten(unit.children)
    return found


def innermost_definition(units: Sequence[Definition], line: int) -> Definition | None:
    """The smallest unit around a line."""
    for unit in units:
        if unit.start <= line < unit.end:
            return innermost_definition(unit.children, line) or unit
    return None


def is_touched(unit: Definition, start: int, end: int) -> bool:
    """Whether lines, or the place of an insertion, lie in a unit and in none of its children."""
    if start == end:
        return unit.start < start < unit.end and not any(
            child.start < start < child.end for child in unit.children
        )
    lines = range(max(start, unit.start), min(end, unit.end))
    return any(not any(c.start <= line < c.end for c in unit.children) for line in lines)


def reordered(before: Sequence[Definition], after: Mapping[str, Definition]) -> set[str]:
    """Units of one scope that another version has, but in another order: the fewest that moved."""
    kept = [unit.name for unit in before if unit.name in after]
    places = [after[name].start for name in kept]
    # Longest increasing subsequence: what is not in it has moved.
    tails: list[int] = []
    length_at: list[int] = []
    for place in places:
        length = bisect.bisect_left(tails, place)
        tails[length : length + 1] = [place]
        length_at.append(length)
    wanted = len(tails) - 1
    moved = set()
    for name, length in zip(reversed(kept), reversed(length_at), strict=True):
        if length == wanted:
            wanted -= 1
        else:
            moved.add(name)
    return moved


def similarity(one: Sequence[bytes], other: Sequence[bytes]) -> float:
    """How much of two texts is the same, whatever their indentation: from 0 to 1."""
    left, right = ([line.strip() for line in lines if line.strip()] for lines in (one, other))
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()


def definition_lines(unit: Definition, content: bytes) -> list[bytes]:
    """The text of a unit."""
    return split_lines(content)[unit.start : unit.end]


def reindent(lines: Sequence[bytes], model: Sequence[bytes]) -> list[bytes]:
    """Give a unit the indentation of another, as when a method becomes a function."""
    old, new = _indentation(lines), _indentation(model)
    if old == new:
        return list(lines)
    return [
        new + line[len(old) :] if line.startswith(old) and line.strip() else line for line in lines
    ]


def _indentation(lines: Sequence[bytes]) -> bytes:
    first = lines[0]
    return first[: len(first) - len(first.lstrip(b" \t"))]
