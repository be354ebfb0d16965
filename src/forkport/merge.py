"""One patch against upstream: every file merged where it is now, moved functions where they went.

Nothing is written but objects: `plan` and `apply` do the same thing here, and agree by that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkport.git import TreeEntry
from forkport.moves import find_moves, merge_moved_definitions
from forkport.three_way import Conflict, find_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkport.git import FileChange
    from forkport.source_index import SourceReader, UpstreamChanges
    from forkport.three_way import SideLabels, MergedText

Stages = tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None]
"""Base, ours and theirs, as an index keeps them for a conflict."""


@dataclass(frozen=True, slots=True)
class FileResult:
    """What becomes of one file."""

    path: str
    entry: TreeEntry | None
    """With markers where there are conflicts; none: the file goes."""
    conflicts: tuple[Conflict, ...] = ()
    reason: str = ""
    """Why it conflicts where no lines can show it (deleted here, changed there)."""
    stages: Stages = (None, None, None)
    notes: tuple[str, ...] = ()
    moved: bool = False
    """Whether it, or a function of it, is somewhere else now."""

    @property
    def is_conflict(self) -> bool:
        """Whether someone must decide."""
        return bool(self.conflicts or self.reason)


@dataclass
class MergeState:
    """The state of upstream with the patches so far, while one more is merged."""

    library: SourceReader
    upstream: UpstreamChanges
    tree: dict[str, TreeEntry]
    labels: SideLabels
    results: dict[str, FileResult] = field(default_factory=dict)

    def add(self, result: FileResult) -> None:
        """Keep a result; a file that two changes reach adds up."""
        before = self.results.get(result.path)
        if before is not None:
            result = replace(
                result,
                conflicts=before.conflicts + result.conflicts,
                reason=before.reason or result.reason,
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
    library: SourceReader,
    upstream: UpstreamChanges,
    tree: dict[str, TreeEntry],
    changes: Sequence[FileChange],
    labels: SideLabels,
) -> list[FileResult]:
    """Merge each change of a patch; gives the files that differ from `tree`, and conflicts."""
    desk = MergeState(library, upstream, dict(tree), labels)
    for change in changes:
        _merge_change(desk, change)
    return [
        result
        for path, result in sorted(desk.results.items())
        if result.is_conflict or result.entry != tree.get(path)
    ]


def _merge_change(desk: MergeState, change: FileChange) -> None:
    if change.status == "A":
        _merge_added(desk, change)
    elif change.status == "D":
        _merge_deleted(desk, change)
    else:
        _merge_modified(desk, change)


def _merge_added(desk: MergeState, change: FileChange) -> None:
    assert change.new_path is not None
    assert change.new is not None
    path = desk.upstream.path_for_new_file(change.new_path)
    notes = _rename_note(change.new_path, path)
    ours = desk.tree.get(path)
    if ours is None:
        desk.add(FileResult(path, change.new, notes=notes, moved=bool(notes)))
    elif ours.blob != change.new.blob:
        _merge_content(desk, path, (None, ours, change.new), notes)


def _merge_deleted(desk: MergeState, change: FileChange) -> None:
    assert change.old_path is not None
    path = desk.upstream.current_path(change.old_path)
    ours = desk.tree.get(path)
    notes = _rename_note(change.old_path, path)
    if ours is None:
        return
    if change.old is not None and ours.blob == change.old.blob:
        desk.add(FileResult(path, None, notes=notes, moved=bool(notes)))
        return
    desk.add(
        FileResult(
            path,
            ours,
            reason="the fork deletes it, upstream changed it",
            stages=(change.old, ours, None),
            notes=notes,
        )
    )


def _merge_modified(desk: MergeState, change: FileChange) -> None:
    """Changed lines, a changed mode, or a new name that the fork gave."""
    assert change.old_path is not None
    assert change.new_path is not None
    path = desk.upstream.current_path(change.old_path)
    ours = desk.tree.get(path)
    notes = _rename_note(change.old_path, path)
    if ours is None:
        _merge_into_deleted(desk, change, path)
        return
    target = path
    if change.status == "R":
        if path not in (change.old_path, change.new_path):
            notes += (
                f"the fork calls it {change.new_path}, upstream {path}: upstream's name stays",
            )
        elif change.new_path in desk.tree and change.new_path != path:
            _conflict_on_name(desk, change.old_path, change.new_path, change.new)
            return
        elif change.new_path != path:
            target = change.new_path
            desk.add(FileResult(path, None))
            desk.tree[target] = ours
    _merge_content(desk, target, (change.old, ours, change.new), notes)


def _conflict_on_name(desk: MergeState, old_path: str, new_path: str, theirs: TreeEntry | None) -> None:
    there = desk.tree[new_path]
    why = f"the fork renames {old_path} to this name, and upstream has another file here"
    desk.add(FileResult(new_path, there, reason=why, stages=(None, there, theirs)))


def _merge_content(desk: MergeState, path: str, sides: Stages, notes: tuple[str, ...]) -> None:
    base, ours, theirs = sides
    assert ours is not None
    assert theirs is not None
    mode = theirs.mode if base is not None and theirs.mode != base.mode else ours.mode
    moved = bool(notes)
    if base is not None and ours.blob == base.blob:
        desk.add(FileResult(path, TreeEntry(mode, theirs.blob), notes=notes, moved=moved))
    elif theirs.blob == ours.blob or (base is not None and theirs.blob == base.blob):
        desk.add(FileResult(path, TreeEntry(mode, ours.blob), notes=notes, moved=moved))
    elif not all(desk.library.is_text(entry) for entry in sides if entry is not None):
        why = "both sides changed it, and it has no lines to merge"
        desk.add(FileResult(path, ours, reason=why, stages=sides, notes=notes, moved=moved))
    else:
        _merge_text(desk, path, sides, mode, notes)


def _merge_text(desk: MergeState, path: str, sides: Stages, mode: str, notes: tuple[str, ...]) -> None:
    """By lines first; where that conflicts, once more with the functions that upstream moved."""
    base, ours, theirs = (b"" if e is None else desk.library.read(e) for e in sides)
    merged = desk.library.merge_texts(base, ours, theirs, desk.labels)
    if merged.conflicts and sides[0] is not None:
        moves = find_moves(desk.library, desk.upstream, desk.tree, path, sides)
        followed = merge_moved_definitions(desk.library, desk.tree, path, (base, theirs), moves, desk.labels)
        total = sum(len(each.conflicts) for each in followed.values())
        if moves and total <= len(merged.conflicts):  # as many: shown where the code is now
            for where, each in followed.items():
                told = tuple(move.describe(path) for move in moves if move.path == where)
                place = (*notes, *told) if where == path else told
                _put_text(desk, where, each, sides if where == path else None, mode, place)
            return
    _put_text(desk, path, merged, sides, mode, notes)


def _put_text(
    desk: MergeState,
    path: str,
    merged: MergedText,
    sides: Stages | None,
    mode: str,
    notes: tuple[str, ...],
) -> None:
    there = desk.tree.get(path)
    told = tuple(
        f"below {line!r} both sides changed neighbouring lines; both changes are kept"
        for line in merged.adjacent_changes
    )
    entry = TreeEntry(
        mode if sides is not None or there is None else there.mode, _keep(desk, merged)
    )
    desk.add(
        FileResult(
            path,
            entry,
            conflicts=find_conflicts(merged.content, desk.labels),
            stages=sides or (there, there, entry),
            notes=(*notes, *told),
            moved=bool(notes),
        )
    )


def _merge_into_deleted(desk: MergeState, change: FileChange, path: str) -> None:
    """Upstream took the file away: its functions may live on elsewhere."""
    assert change.old is not None
    assert change.new is not None
    if change.new.blob == change.old.blob:
        return
    sides: Stages = (change.old, None, change.new)
    moves = find_moves(desk.library, desk.upstream, desk.tree, path, sides)
    if moves:
        texts = (desk.library.read(change.old), desk.library.read(change.new))
        followed = merge_moved_definitions(desk.library, desk.tree, path, texts, moves, desk.labels)
        if path not in followed:
            for where, each in followed.items():
                told = tuple(move.describe(path) for move in moves if move.path == where)
                _put_text(desk, where, each, None, change.new.mode, told)
            return
    why = "the fork changes it, upstream deleted it"
    desk.add(FileResult(path, change.new, reason=why, stages=sides))


def _keep(desk: MergeState, merged: MergedText) -> str:
    return desk.library.git.write_blob(merged.content)


def _rename_note(old: str, new: str) -> tuple[str, ...]:
    return () if old == new else (f"{old} is {new} upstream",)
