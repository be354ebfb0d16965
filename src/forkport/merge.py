"""One patch against upstream: every file merged where it is now, moved functions where they went.

Nothing is written but objects: `plan` and `apply` do the same thing here, and agree by that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkport.git import TreeEntry
from forkport.moves import find_moves, merge_moved
from forkport.three_way import Conflict, find_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import FileChange
    from forkport.source_index import Library, Upstream
    from forkport.three_way import Labels, MergedText

Stages = tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None]
"""Base, ours and theirs, as an index keeps them for a conflict."""


@dataclass(frozen=True, slots=True)
class FileResult:
    """What becomes of one file."""

    path: str
    entry: TreeEntry | None
    """With markers where there are conflicts; none: the file goes."""
    conflicts: tuple[Conflict, ...] = ()
    why: str = ""
    """Why it conflicts where no lines can show it (deleted here, changed there)."""
    stages: Stages = (None, None, None)
    notes: tuple[str, ...] = ()
    moved: bool = False
    """Whether it, or a function of it, is somewhere else now."""

    @property
    def is_conflict(self) -> bool:
        """Whether someone must decide."""
        return bool(self.conflicts or self.why)


@dataclass
class Desk:
    """The state of upstream with the patches so far, while one more is merged."""

    library: Library
    upstream: Upstream
    tree: dict[str, TreeEntry]
    labels: Labels
    results: dict[str, FileResult] = field(default_factory=dict)

    def put(self, result: FileResult) -> None:
        """Keep a result; a file that two changes reach adds up."""
        before = self.results.get(result.path)
        if before is not None:
            result = replace(
                result,
                conflicts=before.conflicts + result.conflicts,
                why=before.why or result.why,
                stages=before.stages if before.is_conflict else result.stages,
                notes=(*before.notes, *result.notes),
                moved=before.moved or result.moved,
            )
        self.results[result.path] = result
        if result.entry is None:
            self.tree.pop(result.path, None)
        else:
            self.tree[result.path] = result.entry


def merge_patch(
    library: Library,
    upstream: Upstream,
    tree: dict[str, TreeEntry],
    changes: Sequence[FileChange],
    labels: Labels,
) -> list[FileResult]:
    """Merge each change of a patch; gives the files that differ from `tree`, and conflicts."""
    desk = Desk(library, upstream, dict(tree), labels)
    for change in changes:
        _merge_change(desk, change)
    return [
        result
        for path, result in sorted(desk.results.items())
        if result.is_conflict or result.entry != tree.get(path)
    ]


def _merge_change(desk: Desk, change: FileChange) -> None:
    if change.status == "A":
        _merge_added(desk, change)
    elif change.status == "D":
        _merge_deleted(desk, change)
    else:
        _merge_modified(desk, change)


def _merge_added(desk: Desk, change: FileChange) -> None:
    assert change.new_path is not None
    assert change.new is not None
    path = desk.upstream.home_of_new(change.new_path)
    notes = _renamed(change.new_path, path)
    ours = desk.tree.get(path)
    if ours is None:
        desk.put(FileResult(path, change.new, notes=notes, moved=bool(notes)))
    elif ours.blob != change.new.blob:
        _merge_content(desk, path, (None, ours, change.new), notes)


def _merge_deleted(desk: Desk, change: FileChange) -> None:
    assert change.old_path is not None
    path = desk.upstream.home(change.old_path)
    ours = desk.tree.get(path)
    notes = _renamed(change.old_path, path)
    if ours is None:
        return
    if change.old is not None and ours.blob == change.old.blob:
        desk.put(FileResult(path, None, notes=notes, moved=bool(notes)))
        return
    desk.put(
        FileResult(
            path,
            ours,
            why="the fork deletes it, upstream changed it",
            stages=(change.old, ours, None),
            notes=notes,
        )
    )


def _merge_modified(desk: Desk, change: FileChange) -> None:
    """Changed lines, a changed mode, or a new name that the fork gave."""
    assert change.old_path is not None
    assert change.new_path is not None
    path = desk.upstream.home(change.old_path)
    ours = desk.tree.get(path)
    notes = _renamed(change.old_path, path)
    if ours is None:
        _merge_homeless(desk, change, path)
        return
    target = path
    if change.status == "R":
        if path not in (change.old_path, change.new_path):
            notes += (
                f"the fork calls it {change.new_path}, upstream {path}: upstream's name stays",
            )
        elif change.new_path in desk.tree and change.new_path != path:
            _conflict_of_names(desk, change.old_path, change.new_path, change.new)
            return
        elif change.new_path != path:
            target = change.new_path
            desk.put(FileResult(path, None))
            desk.tree[target] = ours
    _merge_content(desk, target, (change.old, ours, change.new), notes)


def _conflict_of_names(desk: Desk, old_path: str, new_path: str, theirs: TreeEntry | None) -> None:
    there = desk.tree[new_path]
    why = f"the fork renames {old_path} to this name, and upstream has another file here"
    desk.put(FileResult(new_path, there, why=why, stages=(None, there, theirs)))


def _merge_content(desk: Desk, path: str, sides: Stages, notes: tuple[str, ...]) -> None:
    base, ours, theirs = sides
    assert ours is not None
    assert theirs is not None
    mode = theirs.mode if base is not None and theirs.mode != base.mode else ours.mode
    moved = bool(notes)
    if base is not None and ours.blob == base.blob:
        desk.put(FileResult(path, TreeEntry(mode, theirs.blob), notes=notes, moved=moved))
    elif theirs.blob == ours.blob or (base is not None and theirs.blob == base.blob):
        desk.put(FileResult(path, TreeEntry(mode, ours.blob), notes=notes, moved=moved))
    elif not all(desk.library.is_text(entry) for entry in sides if entry is not None):
        why = "both sides changed it, and it has no lines to merge"
        desk.put(FileResult(path, ours, why=why, stages=sides, notes=notes, moved=moved))
    else:
        _merge_text(desk, path, sides, mode, notes)


def _merge_text(desk: Desk, path: str, sides: Stages, mode: str, notes: tuple[str, ...]) -> None:
    """By lines first; where that conflicts, once more with the functions that upstream moved."""
    base, ours, theirs = (b"" if e is None else desk.library.read(e) for e in sides)
    merged = desk.library.merge(base, ours, theirs, desk.labels)
    if merged.conflicts and sides[0] is not None:
        moves = find_moves(desk.library, desk.upstream, desk.tree, path, sides)
        followed = merge_moved(desk.library, desk.tree, path, (base, theirs), moves, desk.labels)
        total = sum(len(each.conflicts) for each in followed.values())
        if moves and total <= len(merged.conflicts):  # as many: shown where the code is now
            for where, each in followed.items():
                told = tuple(move.told(path) for move in moves if move.path == where)
                place = (*notes, *told) if where == path else told
                _put_text(desk, where, each, sides if where == path else None, mode, place)
            return
    _put_text(desk, path, merged, sides, mode, notes)


def _put_text(
    desk: Desk,
    path: str,
    merged: MergedText,
    sides: Stages | None,
    mode: str,
    notes: tuple[str, ...],
) -> None:
    there = desk.tree.get(path)
    told = tuple(
        f"below {line!r} both sides changed neighbouring lines; both changes are kept"
        for line in merged.neighbours
    )
    entry = TreeEntry(
        mode if sides is not None or there is None else there.mode, _keep(desk, merged)
    )
    desk.put(
        FileResult(
            path,
            entry,
            conflicts=find_conflicts(merged.content, desk.labels),
            stages=sides or (there, there, entry),
            notes=(*notes, *told),
            moved=bool(notes),
        )
    )


def _merge_homeless(desk: Desk, change: FileChange, path: str) -> None:
    """Upstream took the file away: its functions may live on elsewhere."""
    assert change.old is not None
    assert change.new is not None
    if change.new.blob == change.old.blob:
        return
    sides: Stages = (change.old, None, change.new)
    moves = find_moves(desk.library, desk.upstream, desk.tree, path, sides)
    if moves:
        texts = (desk.library.read(change.old), desk.library.read(change.new))
        followed = merge_moved(desk.library, desk.tree, path, texts, moves, desk.labels)
        if path not in followed:
            for where, each in followed.items():
                told = tuple(move.told(path) for move in moves if move.path == where)
                _put_text(desk, where, each, None, change.new.mode, told)
            return
    why = "the fork changes it, upstream deleted it"
    desk.put(FileResult(path, change.new, why=why, stages=sides))


def _keep(desk: Desk, merged: MergedText) -> str:
    return desk.library.git.write(merged.content)


def _renamed(old: str, new: str) -> tuple[str, ...]:
    return () if old == new else (f"{old} is {new} upstream",)
