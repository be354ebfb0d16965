"""Read the versions of a repository's files, and find the functions and classes in them.

`SourceReader` caches contents and parsed definitions by blob. `UpstreamChanges` knows where
upstream has moved files since its common ancestor with the fork.
"""

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
from forkport.three_way import MergedText, SideLabels, merge_lines, split_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from forkport.git import FileChange, Git, Hunk, TreeEntry


_BINARY_PROBE_NBYTES = 8000
"""A file with a zero byte in its first bytes is binary, by git's own rule."""
_LONE_RETURN = re.compile(rb"\r(?!\n)")


@dataclass
class SourceReader:
    """Reads files from git objects, and parses Python files; each blob only once."""

    git: Git
    _contents: dict[str, bytes] = field(default_factory=dict)
    _blobs: dict[bytes, str] = field(default_factory=dict)
    _hunks: dict[tuple[bytes, bytes], list[Hunk]] = field(default_factory=dict)
    _definitions: dict[tuple[str, str], tuple[Definition, ...]] = field(default_factory=dict)

    def read(self, entry: TreeEntry) -> bytes:
        """Return the content of a file."""
        if entry.blob not in self._contents:
            content = self.git.read_blob(entry.blob)
            self._contents[entry.blob] = content
            self._blobs[content] = entry.blob
        return self._contents[entry.blob]

    def hunks(self, old: bytes, new: bytes) -> list[Hunk]:
        """Return the changed line ranges between two texts."""
        if (old, new) not in self._hunks:
            for content in (old, new):
                if content not in self._blobs:
                    self._blobs[content] = self.git.write_blob(content)
            self._hunks[old, new] = self.git.diff_blobs(self._blobs[old], self._blobs[new])
        return self._hunks[old, new]

    def definitions(self, path: str, entry: TreeEntry) -> tuple[Definition, ...]:
        """Return the functions and classes of a Python file, and nothing for any other file."""
        if entry.mode in (GITLINK, SYMLINK):
            return ()
        key = (path.rpartition(".")[2], entry.blob)
        if key not in self._definitions:
            self._definitions[key] = parse_definitions(path, self.read(entry))
        return self._definitions[key]

    def is_text(self, entry: TreeEntry) -> bool:
        """Return True for a file whose lines can be merged."""
        if entry.mode in (GITLINK, SYMLINK):
            return False
        return b"\0" not in self.read(entry)[:_BINARY_PROBE_NBYTES]

    def merge_texts(
        self, base: bytes, ours: bytes, theirs: bytes, labels: SideLabels
    ) -> MergedText:
        """Merge two versions of a text, using git's diffs of each against the version `base`."""
        sides = [(split_lines(text), self.hunks(base, text)) for text in (ours, theirs)]
        return merge_lines(split_lines(base), sides[0], sides[1], labels)


@dataclass(frozen=True)
class UpstreamChanges:
    """The files of upstream at its common ancestor with the fork and now, and renames in between.

    `base` has the files of the common ancestor, `tip` those of the newest upstream commit.
    """

    base: dict[str, TreeEntry]
    tip: dict[str, TreeEntry]
    renames: dict[str, str]
    """Path in `tip` by path in `base`, for renamed files."""
    changed_paths: tuple[str, ...]
    """Files of `tip` that upstream added or changed; functions may have moved into them."""

    def current_path(self, path: str) -> str:
        """Return the path in `tip` of a file with this path in `base`."""
        return self.renames.get(path, path)

    def base_path(self, path: str) -> str:
        """Return the path in `base` of a file with this path in `tip`."""
        return next((old for old, new in self.renames.items() if new == path), path)

    def path_for_new_file(self, path: str) -> tuple[str, str]:
        """Return the path for a file that the fork adds: in the folder its neighbours moved to.

        The second value is the reason of a conflict, if they moved to different folders.
        """
        for folder in PurePosixPath(path).parents:
            prefix = "" if str(folder) == "." else f"{folder}/"
            if any(name.startswith(prefix) for name in self.tip):
                break
            new_prefixes = Counter(
                new.removesuffix(old[len(prefix) :])
                for old, new in self.renames.items()
                if old.startswith(prefix) and f"/{new}".endswith(f"/{old[len(prefix) :]}")
            ).most_common(2)
            if len(new_prefixes) == 2 and new_prefixes[0][1] == new_prefixes[1][1]:
                names = " and ".join(name or "the root" for name, _ in new_prefixes)
                return path, f"upstream moved the files of {folder} to {names}: choose one"
            if new_prefixes:
                return new_prefixes[0][0] + path[len(prefix) :], ""
        return path, ""


def compare_trees(
    git: Git, base: str, tip: str, final_path: Callable[[str], str] = str
) -> UpstreamChanges:
    """Compare the common ancestor of fork and upstream with an upstream commit, `tip`.

    `final_path` follows a path through upstream's commits. It finds files that upstream renamed and
    then rewrote.
    """
    changes = git.diff_trees(base, tip)
    base_tree, tip_tree = git.list_tree(base), git.list_tree(tip)
    renames = {
        change.old_path: change.new_path
        for change in changes
        if change.status == "R" and change.old_path and change.new_path
    }
    upstream = UpstreamChanges(
        base=base_tree,
        tip=tip_tree,
        renames=renames,
        changed_paths=tuple(change.new_path for change in changes if change.new_path),
    )
    for path in sorted(set(base_tree) - set(tip_tree) - set(renames)):
        followed, moved = final_path(path), upstream.path_for_new_file(path)[0]
        if followed in tip_tree and followed not in base_tree:
            renames[path] = followed
        elif tip_tree.get(moved) == base_tree[path] and moved not in base_tree:
            renames[path] = moved  # git does not match empty files, such as __init__.py
    return upstream


def change_paths(change: FileChange) -> tuple[str, ...]:
    """Return the old and new path of a change, once if they are equal."""
    return tuple(dict.fromkeys(path for path in (change.old_path, change.new_path) if path))


# Functions and classes as ranges of lines


@dataclass(frozen=True, slots=True)
class Definition:
    """The place of a function, or of a class with its methods, in a file, including decorators.

    It spans lines `start` to `end`, half-open and counted from 0.
    """

    name: str
    """The qualified name. A second definition of the same name is called `name#2`."""
    start: int
    end: int
    """Line after the definition's last line, counted from 0."""
    children: tuple[Definition, ...] = ()
    """The methods and nested classes of a class."""

    @property
    def last_name(self) -> str:
        """The name without its class and without `#2`."""
        return self.name.rpartition(".")[2].partition("#")[0]


def parse_definitions(path: str, content: bytes) -> tuple[Definition, ...]:
    """Return the top-level definitions of a file, or nothing if it is not readable Python."""
    # Python also ends lines at a lone carriage return or form feed. Git does not, and the line
    # numbers here must be git's.
    if not path.endswith((".py", ".pyi")) or _LONE_RETURN.search(content) or b"\f" in content:
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about upstream's code are none of our business
        try:
            tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError):
            return ()
    return tuple(_definitions_in(tree.body, "", {}))


def _definitions_in(
    body: Sequence[ast.stmt], prefix: str, counts: dict[str, int]
) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = prefix + node.name
            counts[name] = counts.get(name, 0) + 1
            name += f"#{counts[name]}" if counts[name] > 1 else ""
            children: tuple[Definition, ...] = ()
            if isinstance(node, ast.ClassDef):
                children = tuple(_definitions_in(node.body, f"{name}.", counts))
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            assert node.end_lineno is not None
            yield Definition(name, start, node.end_lineno, children)
        else:
            nested = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from _definitions_in(nested, prefix, counts)


def flatten(definitions: Sequence[Definition]) -> dict[str, Definition]:
    """Return the definitions at every depth by qualified name."""
    found = {}
    for definition in definitions:
        found[definition.name] = definition
        found |= flatten(definition.children)
    return found


def definitions_named(
    reader: SourceReader, tree: dict[str, TreeEntry], paths: tuple[str, ...], last_name: str
) -> Iterator[tuple[str, Definition]]:
    """Yield every definition with a given last name in some files, with its path."""
    name_bytes = last_name.encode()
    for path in paths:
        entry = tree.get(path)
        if entry is None or not path.endswith((".py", ".pyi")):
            continue
        # Looking for the bytes first saves parsing most files.
        if entry.mode in (GITLINK, SYMLINK) or name_bytes not in reader.read(entry):
            continue
        for definition in flatten(reader.definitions(path, entry)).values():
            if definition.last_name == last_name:
                yield path, definition


def innermost_definition(definitions: Sequence[Definition], line: int) -> Definition | None:
    """Return the smallest definition around a line."""
    for definition in definitions:
        if definition.start <= line < definition.end:
            return innermost_definition(definition.children, line) or definition
    return None


def is_touched(definition: Definition, start: int, end: int) -> bool:
    """Return True if changing lines `start` to `end`, or inserting there, changes a definition.

    A change inside a method counts for the method, not for its class.
    """
    children = definition.children
    if start == end:
        return definition.start < start < definition.end and not any(
            child.start < start < child.end for child in children
        )
    lines = range(max(start, definition.start), min(end, definition.end))
    return any(not any(c.start <= line < c.end for c in children) for line in lines)


def reordered(before: Sequence[Definition], after: Mapping[str, Definition]) -> set[str]:
    """Return the smallest set of definitions whose moves explain a new order within one scope.

    All definitions outside the longest increasing subsequence of new positions have moved.
    """
    names = [definition.name for definition in before if definition.name in after]
    tails: list[int] = []  # tails[k]: the smallest end of an increasing subsequence of length k + 1
    length_at: list[int] = []
    for position in (after[name].start for name in names):
        length = bisect.bisect_left(tails, position)
        tails[length : length + 1] = [position]
        length_at.append(length)
    next_length = len(tails) - 1
    moved = set()
    for name, length in zip(reversed(names), reversed(length_at), strict=True):
        if length == next_length:
            next_length -= 1
        else:
            moved.add(name)
    return moved


def similarity(one: Sequence[bytes], other: Sequence[bytes]) -> float:
    """Return the share of equal lines of two texts, from 0 to 1, ignoring indentation."""
    left, right = ([line.strip() for line in lines if line.strip()] for lines in (one, other))
    return difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()


def definition_lines(definition: Definition, content: bytes) -> list[bytes]:
    """Return the lines of a definition."""
    return split_lines(content)[definition.start : definition.end]


def reindent(lines: Sequence[bytes], model: Sequence[bytes]) -> list[bytes]:
    """Indent `lines` like `model`, for example because a method became a function."""
    old, new = _indentation(lines), _indentation(model)
    if old == new:
        return list(lines)
    return [
        new + line[len(old) :] if line.startswith(old) and line.strip() else line for line in lines
    ]


def _indentation(lines: Sequence[bytes]) -> bytes:
    first = lines[0]
    return first[: len(first) - len(first.lstrip(b" \t"))]
