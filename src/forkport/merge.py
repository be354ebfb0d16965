"""Merge one patch with upstream.

Each file is merged where upstream has it now, and functions that upstream moved are merged where
they went. Only git objects are written. `plan` and `apply` both call `merge_patch`, so a plan
predicts exactly what apply does.

Sides are named as in a git merge: "ours" is upstream with the patches so far, "theirs" is the fork.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkport.git import TreeEntry
from forkport.moved_code import find_moves, merge_moved_definitions
from forkport.patches import read_patch
from forkport.source_index import SourceReader, compare_trees
from forkport.three_way import Conflict, SideLabels, find_conflicts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forkport.git import FileChange, Git
    from forkport.moved_code import Move
    from forkport.patches import Manifest, Patch
    from forkport.source_index import UpstreamChanges
    from forkport.three_way import MergedText

Stages = tuple[TreeEntry | None, TreeEntry | None, TreeEntry | None]
"""Base, ours and theirs: the three index stages of a conflict."""


@dataclass(frozen=True, slots=True)
class FileResult:
    """The merge result of one file."""

    path: str
    entry: TreeEntry | None
    """The merged file, with markers where there are conflicts; None deletes the file."""
    conflicts: tuple[Conflict, ...] = ()
    reason: str = ""
    """Reason for a conflict without markers: for example, upstream deleted a file that the fork
    changed."""
    stages: Stages = (None, None, None)
    notes: tuple[str, ...] = ()
    """Remarks for the user's review."""
    moved: bool = False
    """True if upstream moved the file or one of its functions."""

    @property
    def is_conflict(self) -> bool:
        """True if the user must resolve this file."""
        return bool(self.conflicts or self.reason)


@dataclass(frozen=True)
class MergeContext:
    """Data that is read once and used to merge every patch."""

    reader: SourceReader
    upstream: UpstreamChanges
    tip: str
    """The upstream commit."""

    def labels(self, patch: Patch) -> SideLabels:
        """Return the names of the two sides in conflict markers."""
        return SideLabels(f"upstream {self.tip[:10]}", f"fork: {patch.name}")


@dataclass
class MergeState:
    """The files of upstream while one patch is merged into them, and the results so far."""

    reader: SourceReader
    upstream: UpstreamChanges
    tree: dict[str, TreeEntry]
    labels: SideLabels
    results: dict[str, FileResult] = field(default_factory=dict)

    def add(self, result: FileResult) -> None:
        """Record a result. Two results for one file, from two changes, are combined."""
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


def open_merge_context(git: Git, manifest: Manifest, tip: str) -> MergeContext:
    """Find what upstream has changed up to `tip` since its common ancestor with the fork."""
    base = git.resolve_commit(manifest.base)
    return MergeContext(SourceReader(git), compare_trees(git, base, tip), tip)


def patch_changes(git: Git, manifest: Manifest, folder: Path, patch: Patch) -> list[FileChange]:
    """Return the changes of a patch to the files of the common ancestor of fork and upstream."""
    content = read_patch(folder, patch)
    return git.diff_trees(manifest.base, git.write_patched_tree(manifest.base, content))


def merge_patch(
    context: MergeContext,
    tree: dict[str, TreeEntry],
    patch: Patch,
    changes: Sequence[FileChange],
) -> list[FileResult]:
    """Merge the changes of a patch into `tree`; return the files that differ or conflict."""
    state = MergeState(context.reader, context.upstream, dict(tree), context.labels(patch))
    for change in changes:
        if change.status == "A":
            _merge_added(state, change)
        elif change.status == "D":
            _merge_deleted(state, change)
        else:
            _merge_modified(state, change)
    return [
        result
        for path, result in sorted(state.results.items())
        if result.is_conflict or result.entry != tree.get(path)
    ]


def _merge_added(state: MergeState, change: FileChange) -> None:
    assert change.new_path is not None
    assert change.new is not None
    path = state.upstream.path_for_new_file(change.new_path)
    notes = _rename_note(change.new_path, path)
    ours = state.tree.get(path)
    if ours is None:
        state.add(FileResult(path, change.new, notes=notes, moved=bool(notes)))
    elif ours.blob != change.new.blob:
        _merge_content(state, path, (None, ours, change.new), notes)


def _merge_deleted(state: MergeState, change: FileChange) -> None:
    assert change.old_path is not None
    path = state.upstream.current_path(change.old_path)
    ours = state.tree.get(path)
    notes = _rename_note(change.old_path, path)
    if ours is None:
        return
    if change.old is not None and ours.blob == change.old.blob:
        state.add(FileResult(path, None, notes=notes, moved=bool(notes)))
        return
    state.add(
        FileResult(
            path,
            ours,
            reason="the fork deletes it, upstream changed it",
            stages=(change.old, ours, None),
            notes=notes,
        )
    )


def _merge_modified(state: MergeState, change: FileChange) -> None:
    """Merge changed lines, a changed mode, or a rename by the fork."""
    assert change.old_path is not None
    assert change.new_path is not None
    path = state.upstream.current_path(change.old_path)
    ours = state.tree.get(path)
    notes = _rename_note(change.old_path, path)
    if ours is None:
        _merge_into_deleted(state, change, path)
        return
    target = path
    if change.status == "R":
        if path not in (change.old_path, change.new_path):
            notes += (
                f"the fork calls it {change.new_path}, upstream {path}: upstream's name stays",
            )
        elif change.new_path in state.tree and change.new_path != path:
            _conflict_on_name(state, change.old_path, change.new_path, change.new)
            return
        elif change.new_path != path:
            target = change.new_path
            state.add(FileResult(path, None))
            state.tree[target] = ours
    _merge_content(state, target, (change.old, ours, change.new), notes)


def _conflict_on_name(
    state: MergeState, old_path: str, new_path: str, theirs: TreeEntry | None
) -> None:
    existing = state.tree[new_path]
    reason = f"the fork renames {old_path} to this name, and upstream has another file here"
    state.add(FileResult(new_path, existing, reason=reason, stages=(None, existing, theirs)))


def _merge_content(state: MergeState, path: str, sides: Stages, notes: tuple[str, ...]) -> None:
    base, ours, theirs = sides
    assert ours is not None
    assert theirs is not None
    mode = theirs.mode if base is not None and theirs.mode != base.mode else ours.mode
    moved = bool(notes)
    if base is not None and ours.blob == base.blob:
        state.add(FileResult(path, TreeEntry(mode, theirs.blob), notes=notes, moved=moved))
    elif theirs.blob == ours.blob or (base is not None and theirs.blob == base.blob):
        state.add(FileResult(path, TreeEntry(mode, ours.blob), notes=notes, moved=moved))
    elif not all(state.reader.is_text(entry) for entry in sides if entry is not None):
        reason = "both sides changed it, and it has no lines to merge"
        state.add(FileResult(path, ours, reason=reason, stages=sides, notes=notes, moved=moved))
    else:
        _merge_text(state, path, sides, mode, notes)


def _merge_text(
    state: MergeState, path: str, sides: Stages, mode: str, notes: tuple[str, ...]
) -> None:
    """Merge by lines; if that conflicts, try again following the functions that upstream moved."""
    base, ours, theirs = (b"" if e is None else state.reader.read(e) for e in sides)
    merged = state.reader.merge_texts(base, ours, theirs, state.labels)
    if merged.conflicts and sides[0] is not None:
        moves = find_moves(state.reader, state.upstream, state.tree, path, sides)
        followed = merge_moved_definitions(
            state.reader, state.tree, path, (base, theirs), moves, state.labels
        )
        num_conflicts = sum(len(each.conflicts) for each in followed.values())
        # If both have as many conflicts, prefer to show them where upstream has the code now.
        if moves and num_conflicts <= len(merged.conflicts):
            for where, text in followed.items():
                move_notes = _move_notes(moves, path, where)
                if where == path:
                    _add_text(state, where, text, sides, mode, (*notes, *move_notes))
                else:
                    _add_text(state, where, text, None, mode, move_notes)
            return
    _add_text(state, path, merged, sides, mode, notes)


def _merge_into_deleted(state: MergeState, change: FileChange, path: str) -> None:
    """Merge a change of a file that upstream deleted; its functions may now be in other files."""
    assert change.old is not None
    assert change.new is not None
    if change.new.blob == change.old.blob:
        return
    sides: Stages = (change.old, None, change.new)
    moves = find_moves(state.reader, state.upstream, state.tree, path, sides)
    if moves:
        texts = (state.reader.read(change.old), state.reader.read(change.new))
        followed = merge_moved_definitions(
            state.reader, state.tree, path, texts, moves, state.labels
        )
        if path not in followed:
            for where, text in followed.items():
                notes = _move_notes(moves, path, where)
                _add_text(state, where, text, None, change.new.mode, notes)
            return
    reason = "the fork changes it, upstream deleted it"
    state.add(FileResult(path, change.new, reason=reason, stages=sides))


def _add_text(
    state: MergeState,
    path: str,
    merged: MergedText,
    sides: Stages | None,
    mode: str,
    notes: tuple[str, ...],
) -> None:
    """Record a merged text; `sides` is None for a file that only received moved functions."""
    existing = state.tree.get(path)
    adjacent_notes = tuple(
        f"below {line!r} both sides changed neighbouring lines; both changes are kept"
        for line in merged.adjacent_changes
    )
    blob = state.reader.git.write_blob(merged.content)
    entry = TreeEntry(mode if sides is not None or existing is None else existing.mode, blob)
    state.add(
        FileResult(
            path,
            entry,
            conflicts=find_conflicts(merged.content, state.labels),
            stages=sides or (existing, existing, entry),
            notes=(*notes, *adjacent_notes),
            moved=bool(notes),
        )
    )


def _move_notes(moves: Sequence[Move], home: str, where: str) -> tuple[str, ...]:
    return tuple(move.describe(home) for move in moves if move.path == where)


def _rename_note(old: str, new: str) -> tuple[str, ...]:
    return () if old == new else (f"{old} is {new} upstream",)
