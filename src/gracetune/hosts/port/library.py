"""The two versions that patches meet, read once: the base that they were made on, and upstream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from gracetune.hosts.port.git import GITLINK, SYMLINK
from gracetune.hosts.port.symbols import by_name, units_of
from gracetune.hosts.port.three_way import Labels, MergedText, merge_lines, split_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.hosts.port.git import FileChange, Git, TreeEntry
    from gracetune.hosts.port.symbols import Unit

_BINARY_PROBE = 8000
"""Bytes in which git looks for a zero."""


@dataclass
class Library:
    """Contents by blob, so that a file is read and parsed once however often it is asked for."""

    git: Git
    _contents: dict[str, bytes] = field(default_factory=dict)
    _units: dict[tuple[str, str], tuple[Unit, ...]] = field(default_factory=dict)

    def read(self, entry: TreeEntry) -> bytes:
        """The bytes of a file."""
        if entry.blob not in self._contents:
            self._contents[entry.blob] = self.git.read(entry.blob)
        return self._contents[entry.blob]

    def units(self, path: str, entry: TreeEntry) -> tuple[Unit, ...]:
        """What a file defines; nothing for links, submodules and what is not Python."""
        if entry.mode in (GITLINK, SYMLINK):
            return ()
        key = (path.rpartition(".")[2], entry.blob)
        if key not in self._units:
            self._units[key] = units_of(path, self.read(entry))
        return self._units[key]

    def is_text(self, entry: TreeEntry) -> bool:
        """Whether lines of it can be merged."""
        if entry.mode in (GITLINK, SYMLINK):
            return False
        return b"\0" not in self.read(entry)[:_BINARY_PROBE]

    def merge(self, base: bytes, ours: bytes, theirs: bytes, labels: Labels) -> MergedText:
        """Merge three texts."""
        ids = [self.git.write(content) for content in (base, ours, theirs)]
        sides = [
            (split_lines(content), self.git.hunks(ids[0], blob))
            for content, blob in zip((ours, theirs), ids[1:], strict=True)
        ]
        return merge_lines(split_lines(base), sides[0], sides[1], labels)


@dataclass(frozen=True)
class Upstream:
    """Where upstream put what the base had."""

    base: dict[str, TreeEntry]
    tip: dict[str, TreeEntry]
    renamed: dict[str, str]
    """Old path to new path."""
    rewritten: tuple[str, ...]
    """Files of the tip that the base does not have in this form: where functions may have gone."""

    def home(self, path: str) -> str:
        """Where a file of the base is now."""
        return self.renamed.get(path, path)

    def origin(self, path: str) -> str:
        """Where a file of the tip was in the base."""
        return next((old for old, new in self.renamed.items() if new == path), path)

    def home_of_new(self, path: str) -> str:
        """Where a new file belongs: beside its neighbours, where upstream moved them all."""
        for folder in PurePosixPath(path).parents:
            prefix = "" if str(folder) == "." else f"{folder}/"
            if any(name.startswith(prefix) for name in self.tip):
                return path
            moved = Counter(
                new.removesuffix(old[len(prefix) :])
                for old, new in self.renamed.items()
                if old.startswith(prefix) and new.endswith(f"/{old[len(prefix) :]}")
            )
            if moved:
                return moved.most_common(1)[0][0] + path[len(prefix) :]
        return path


def survey(git: Git, base: str, tip: str) -> Upstream:
    """Compare base and upstream once, for all patches."""
    changes = git.changes(base, tip)
    return Upstream(
        base=git.tree(base),
        tip=git.tree(tip),
        renamed={
            change.old_path: change.new_path
            for change in changes
            if change.status == "R" and change.old_path and change.new_path
        },
        rewritten=tuple(change.new_path for change in changes if change.new_path),
    )


def units_named(
    library: Library, tree: dict[str, TreeEntry], paths: tuple[str, ...], last_name: str
) -> Iterator[tuple[str, Unit]]:
    """Every unit of this name, whatever class or file it is in."""
    wanted = last_name.encode()
    for path in paths:
        entry = tree.get(path)
        if entry is None or not path.endswith((".py", ".pyi")):
            continue
        if entry.mode in (GITLINK, SYMLINK) or wanted not in library.read(entry):
            continue
        for unit in by_name(library.units(path, entry)).values():
            if unit.last_name == last_name:
                yield path, unit


def both_paths(change: FileChange) -> tuple[str, ...]:
    """The paths of a change, one or two."""
    return tuple(dict.fromkeys(path for path in (change.old_path, change.new_path) if path))
