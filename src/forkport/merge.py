"""Merge one patch with upstream.

Each file is merged where upstream has it now, and functions that upstream moved are merged where
they went. Only git objects are written. `plan` and `apply` both call `merge_patch`, so a plan
predicts exactly what apply does.

Sides are named as in a git merge: "ours" is upstream with the patches so far, "theirs" is the fork.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport.git import SYMLINK, TreeEntry
from forkport.import_check import ModuleTree, broken_imports
from forkport.moved_code import (
    MIN_SIMILARITY,
    find_deleted_moves,
    find_moves,
    merge_moved_definitions,
)
from forkport.patches import read_patch
from forkport.source_index import (
    SourceReader,
    change_paths,
    compare_trees,
    flatten,
    similarity,
)
from forkport.taken_changes import CommitHistory, merge_texts
from forkport.three_way import Conflict, SideLabels, find_conflicts, split_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class PatchResult:
    """The merge result of one patch."""

    files: tuple[FileResult, ...]
    """The files that differ from upstream or conflict."""
    already_upstream: tuple[str, ...] = ()
    """Files of the patch that upstream already has as the fork has them."""

    @property
    def is_conflict(self) -> bool:
        """True if the user must resolve a file."""
        return any(file.is_conflict for file in self.files)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user's review, with the files they are about."""
        notes = [f"{file.path}: {note}" for file in self.files for note in file.notes]
        return (*notes, *(f"already upstream: {path}" for path in self.already_upstream))

    @property
    def entries(self) -> dict[str, TreeEntry | None]:
        """The merged files by path; None for a deleted file."""
        return {file.path: file.entry for file in self.files}


@dataclass(frozen=True)
class MergeContext:
    """Data that is read once and used to merge every patch."""

    reader: SourceReader
    upstream: UpstreamChanges
    upstream_history: CommitHistory
    fork_changes: tuple[FileChange, ...]
    """The changes of all patches to the common ancestor of fork and upstream."""
    fork_history: CommitHistory | None
    """The commits of the fork, or None if this clone does not have them."""
    head: str
    """The fork's commit that the patches were extracted from."""
    tip: str
    """The upstream commit."""


@dataclass
class MergeState:
    """The files of upstream while one patch is merged into them, and the results so far."""

    context: MergeContext
    tree: dict[str, TreeEntry]
    labels: SideLabels
    results: dict[str, FileResult] = field(default_factory=dict)
    upstream_names: dict[str, str] = field(default_factory=dict)
    """For new files of the fork that upstream has under another name, that name."""

    @property
    def reader(self) -> SourceReader:
        """The reader of file contents."""
        return self.context.reader

    @property
    def upstream(self) -> UpstreamChanges:
        """The changes that upstream made since its common ancestor with the fork."""
        return self.context.upstream

    def conflicts(self) -> set[str]:
        """Return the files in conflict so far."""
        return {path for path, result in self.results.items() if result.is_conflict}

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


def side_labels(tip: str, patch: Patch) -> SideLabels:
    """Return the names of the two sides in conflict markers; `tip` is the upstream commit."""
    return SideLabels(f"upstream {tip[:10]}", f"fork: {patch.name}")


def open_merge_context(git: Git, manifest: Manifest, folder: Path, tip: str) -> MergeContext:
    """Find what both sides have changed since their common ancestor, upstream up to `tip`."""
    base = git.resolve_commit(manifest.base)
    history = CommitHistory(git.list_commits(base, tip, "--first-parent", "-m"))
    fork_history = None
    if git.succeeds("cat-file", "-e", f"{manifest.head}^{{commit}}"):
        fork_commits = git.list_commits(base, manifest.head, "--topo-order", "--no-merges")
        fork_history = CommitHistory(fork_commits)
    return MergeContext(
        reader=SourceReader(git),
        upstream=compare_trees(git, base, tip, history.final_path),
        upstream_history=history,
        fork_changes=tuple(
            change
            for patch in manifest.patches
            for change in patch_changes(git, manifest, folder, patch)
        ),
        fork_history=fork_history,
        head=manifest.head,
        tip=tip,
    )


def patch_changes(git: Git, manifest: Manifest, folder: Path, patch: Patch) -> list[FileChange]:
    """Return the changes of a patch to the files of the common ancestor of fork and upstream."""
    content = read_patch(folder, patch)
    return git.diff_trees(manifest.base, git.write_patched_tree(manifest.base, content))


def merge_patch(
    context: MergeContext,
    tree: Mapping[str, TreeEntry],
    patch: Patch,
    changes: Sequence[FileChange],
) -> PatchResult:
    """Merge the changes of a patch into `tree`; return the files that differ or conflict."""
    state = MergeState(context, dict(tree), side_labels(context.tip, patch))
    unchanged = []
    for change in changes:
        before = dict(state.tree), state.conflicts()
        if change.status == "A":
            _merge_added(state, change)
        elif change.status == "D":
            _merge_deleted(state, change)
        else:
            _merge_modified(state, change)
        if before == (state.tree, state.conflicts()):
            path = change_paths(change)[-1]
            name = state.upstream_names.get(path)
            unchanged.append(path if name is None else f"{path} (as {name})")
    files = tuple(
        result
        for path, result in sorted(state.results.items())
        if result.is_conflict or result.entry != tree.get(path)
    )
    return PatchResult(files, tuple(unchanged))


def check_result(
    context: MergeContext, tree: Mapping[str, TreeEntry], last: PatchResult
) -> PatchResult:
    """Add conflicts to the last patch where the finished `tree` does not fit together.

    These are imports that no longer find their module, and files that upstream added to a folder
    that the fork renamed. No single patch shows them.
    """
    fork_tree = dict(context.upstream.base)
    for change in context.fork_changes:
        if change.old_path is not None and change.status in "RD":
            fork_tree.pop(change.old_path, None)
    fork_tree |= {c.new_path: c.new for c in context.fork_changes if c.new_path and c.new}
    reasons = _left_behind(context, fork_tree, tree)
    broken = broken_imports(
        ModuleTree(context.reader, tree),
        ModuleTree(context.reader, context.upstream.tip),
        ModuleTree(context.reader, fork_tree),
        context.tip,
        [change.new_path for change in context.fork_changes if change.new_path],
    )
    reasons |= {
        path: f"imports {what}, which the result does not have" for path, what in broken.items()
    }
    files = {file.path: file for file in last.files}
    for path, reason in reasons.items():
        entry = tree[path]
        file = files.get(path, FileResult(path, entry))
        if not file.is_conflict:
            stages = (context.upstream.tip.get(path), entry, entry)
            files[path] = replace(file, reason=reason, stages=stages)
    return replace(last, files=tuple(files[path] for path in sorted(files)))


def _left_behind(
    context: MergeContext, fork_tree: Mapping[str, TreeEntry], tree: Mapping[str, TreeEntry]
) -> dict[str, str]:
    """Find files of upstream that are alone in a folder that the fork renamed."""
    new_folders: dict[str, set[str]] = defaultdict(set)
    for change in context.fork_changes:
        if change.status == "R" and change.old_path and change.new_path:
            old, new = PurePosixPath(change.old_path), PurePosixPath(change.new_path)
            if old.name == new.name:
                new_folders[str(old.parent)].add(str(new.parent))
    for path in fork_tree:
        new_folders.pop(str(PurePosixPath(path).parent), None)
    return {
        path: f"upstream adds it to {folder}, which the fork renames to {', '.join(sorted(names))}"
        for path in tree
        for folder in [str(PurePosixPath(path).parent)]
        if (names := new_folders.get(folder)) and path not in context.upstream.base
    }


def _merge_added(state: MergeState, change: FileChange) -> None:
    assert change.new_path is not None
    assert change.new is not None
    path, reason = state.upstream.path_for_new_file(change.new_path)
    taken = _taken_elsewhere(state, change, path)
    path = taken or path
    notes = _rename_note(change.new_path, path)
    ours = state.tree.get(path)
    if ours is not None:
        _merge_content(state, path, (None, ours, change.new), notes, change.new_path)
        return
    similar = _similar_new_file(state, change)
    if not reason and similar is not None:
        reason = f"upstream adds a similar file, {similar}: keep one of them"
    stages: Stages = (None, None, change.new)
    state.add(
        FileResult(path, change.new, reason=reason, stages=stages, notes=notes, moved=bool(notes))
    )


def _taken_elsewhere(state: MergeState, change: FileChange, path: str) -> str | None:
    """Return the path to which upstream moved a new file of the fork after it took it."""
    assert change.new_path is not None
    assert change.new is not None
    if path in state.tree:
        return None
    moved = state.context.upstream_history.final_path(change.new_path)
    if moved not in state.tree or moved in state.upstream.base:
        # Upstream may have taken and moved the file in a single commit.
        name = PurePosixPath(change.new_path).name
        moved = next(
            (
                each
                for each in state.upstream.changed_paths
                if each not in state.upstream.base
                and PurePosixPath(each).name == name != "__init__.py"
                and state.tree.get(each) == change.new
                and len(state.reader.read(change.new).split()) > 1
            ),
            "",
        )
    if moved:
        state.upstream_names[change.new_path] = moved
    return moved or None


def _similar_new_file(state: MergeState, change: FileChange) -> str | None:
    """Return a file of upstream with the name and most lines of a file that the fork adds."""
    assert change.new_path is not None
    assert change.new is not None
    name = PurePosixPath(change.new_path).name
    if name == "__init__.py" or not state.reader.is_text(change.new):
        return None
    lines = split_lines(state.reader.read(change.new))
    for path in state.upstream.changed_paths:
        entry = state.tree.get(path)
        if path in state.upstream.base or PurePosixPath(path).name != name or entry is None:
            continue
        if path in state.upstream.renames.values() or not state.reader.is_text(entry):
            continue
        if similarity(lines, split_lines(state.reader.read(entry))) >= MIN_SIMILARITY:
            return path
    return None


def _merge_deleted(state: MergeState, change: FileChange) -> None:
    assert change.old_path is not None
    assert change.old is not None
    path = state.upstream.current_path(change.old_path)
    ours = state.tree.get(path)
    notes = _rename_note(change.old_path, path)
    if ours is None:
        _check_deleted_moves(state, change.old_path, (change.old, None, None))
    elif ours.blob == change.old.blob or ours.blob in _fork_blobs(state, change.old_path):
        state.add(FileResult(path, None, notes=notes, moved=bool(notes)))
    else:
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
    target, reason = path, ""
    if change.status == "R":
        target, reason = _renamed_path(state, change, path)
        if target != path and target in state.tree:
            _conflict_on_name(state, change.old_path, target, change.new)
            return
        if target != path:
            state.add(FileResult(path, None))
            state.tree[target] = ours
            notes = _rename_note(change.new_path, target)
    sides: Stages = (change.old, ours, change.new)
    _merge_content(state, target, sides, notes, change.new_path)
    _check_deleted_moves(state, path, sides)
    if reason:
        merged = state.results[target]
        state.results[target] = replace(merged, reason=reason, stages=sides)


def _renamed_path(state: MergeState, change: FileChange, path: str) -> tuple[str, str]:
    """Return where a file goes that the fork renames and upstream has at `path`.

    The second value is the reason of a conflict: both sides renamed the file, and neither took over
    the other one's name.
    """
    assert change.old_path is not None
    assert change.new_path is not None
    target, reason = state.upstream.path_for_new_file(change.new_path)
    if path in (change.new_path, target):
        return path, ""
    if path == change.old_path:
        return target, reason
    if change.new_path in state.context.upstream_history.versions(path).paths:
        return path, ""  # upstream took the new name and renamed the file once more
    history = state.context.fork_history
    if history is not None and path in history.versions(change.new_path).paths:
        return target, reason
    return path, (
        f"the fork renames {change.old_path} to {change.new_path}, upstream to {path}: keep one "
        "name, and import it by that name"
    )


def _conflict_on_name(
    state: MergeState, old_path: str, new_path: str, theirs: TreeEntry | None
) -> None:
    existing = state.tree[new_path]
    reason = f"the fork renames {old_path} to this name, and upstream has another file here"
    state.add(FileResult(new_path, existing, reason=reason, stages=(None, existing, theirs)))


def _merge_content(
    state: MergeState,
    path: str,
    sides: Stages,
    notes: tuple[str, ...],
    fork_path: str | None = None,
) -> None:
    """Merge the contents and modes of a file; `fork_path` is its path in the fork if it differs."""
    base, ours, theirs = sides
    assert ours is not None
    assert theirs is not None
    fork_blobs = _fork_blobs(state, fork_path or path)
    mode = theirs.mode if base is not None and theirs.mode != base.mode else ours.mode
    moved = bool(notes)
    reason, blob = "", ours.blob
    if ours.mode != theirs.mode and (base is None or base.mode not in (ours.mode, theirs.mode)):
        reason, mode = f"its mode is {ours.mode} upstream and {theirs.mode} in the fork", ours.mode
    elif mode != ours.mode and SYMLINK in (mode, ours.mode) and theirs.blob == ours.blob:
        reason, mode = "one side made it a link", ours.mode
    elif (base is not None and ours.blob == base.blob) or ours.blob in fork_blobs:
        blob = theirs.blob
    elif theirs.blob == ours.blob or (base is not None and theirs.blob == base.blob):
        pass
    elif all(state.reader.is_text(entry) for entry in sides if entry is not None):
        _merge_text(state, path, sides, mode, notes, fork_blobs)
        return
    elif not _took_blob(state, path, theirs.blob, None if base is None else base.blob):
        reason = "both sides changed it, and it has no lines to merge"
    stages: Stages = sides if reason else (None, None, None)
    entry = TreeEntry(mode, blob)
    state.add(FileResult(path, entry, reason=reason, stages=stages, notes=notes, moved=moved))


def _fork_blobs(state: MergeState, path: str) -> list[str]:
    """Return the versions of a file in the fork's commits, newest first."""
    history = state.context.fork_history
    return [] if history is None else history.versions(path).blobs


def _took_blob(state: MergeState, path: str, blob: str, base: str | None) -> bool:
    """Return True if upstream once had this version of a file, and not the base version since."""
    for each in state.context.upstream_history.versions(path).blobs:
        if each in (blob, base):
            return each == blob
    return False


def _merge_text(
    state: MergeState,
    path: str,
    sides: Stages,
    mode: str,
    notes: tuple[str, ...],
    fork_blobs: Sequence[str],
) -> None:
    """Merge by lines; if that conflicts, try again following the functions that upstream moved."""
    reader = state.reader
    base, ours, theirs = (b"" if e is None else reader.read(e) for e in sides)
    fork_versions, upstream_versions = (
        [reader.read(TreeEntry(mode, blob)) for blob in blobs]
        for blobs in (fork_blobs, state.context.upstream_history.versions(path).blobs)
    )
    merged = merge_texts(
        reader, (base, ours, theirs), fork_versions, upstream_versions, state.labels
    )
    if merged.conflicts and sides[0] is not None:
        moves = find_moves(reader, state.upstream, state.tree, path, sides)
        followed = merge_moved_definitions(
            reader, state.tree, path, (base, theirs), moves, state.labels
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
    if merged.conflicts and state.context.fork_history is None:
        notes += (
            f"the fork's commit {state.context.head[:10]} is not in this clone, so changes that "
            "upstream took from the fork may conflict: fetch the fork's branch to recognise them",
        )
    _add_text(state, path, merged, sides, mode, notes)


def _check_deleted_moves(state: MergeState, path: str, sides: Stages) -> None:
    """Report functions that the fork deletes from a file and upstream moved to another file."""
    base = sides[0]
    if base is None:
        return
    kept = {
        definition.last_name
        for change in state.context.fork_changes
        if change.new is not None and change.new_path is not None
        for definition in flatten(state.reader.definitions(change.new_path, change.new)).values()
    }
    moves = find_deleted_moves(state.reader, state.upstream, state.tree, path, sides, kept)
    for name, where in moves:
        reason = f"the fork deletes `{name}`, upstream moved it to {where}"
        entry = state.tree[where]
        state.add(FileResult(where, entry, reason=reason, stages=(base, entry, None)))


def _merge_into_deleted(state: MergeState, change: FileChange, path: str) -> None:
    """Merge a change of a file that upstream deleted; its functions may now be in other files."""
    assert change.old is not None
    assert change.new is not None
    sides: Stages = (change.old, None, change.new)
    if change.status == "R":
        assert change.new_path is not None
        target = state.upstream.path_for_new_file(change.new_path)[0]
        reason = f"the fork renames {change.old_path} to this name, upstream deleted it"
        if target in state.tree:
            _conflict_on_name(state, path, target, change.new)
        else:
            state.add(FileResult(target, change.new, reason=reason, stages=sides))
        return
    moves = find_moves(state.reader, state.upstream, state.tree, path, sides)
    if moves and change.new.blob != change.old.blob:
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
    text_notes = [
        f"below {line!r} both sides changed neighbouring lines; both changes are kept"
        for line in merged.adjacent_changes
    ]
    text_notes += [
        f"at {line!r} both sides made the same change but for whitespace; upstream's is kept"
        for line in merged.whitespace_changes
    ]
    blob = state.reader.git.write_blob(merged.content)
    entry = TreeEntry(mode if sides is not None or existing is None else existing.mode, blob)
    conflicts = find_conflicts(merged.content, state.labels)
    twice = [] if conflicts else _defined_twice(state, path, entry, (existing, sides))
    reason = f"`{twice[0]}` is defined twice: both sides added it" if twice else ""
    state.add(
        FileResult(
            path,
            entry,
            conflicts=conflicts,
            reason=reason,
            stages=sides or (existing, existing, entry),
            notes=(*notes, *text_notes),
            moved=bool(notes),
        )
    )


def _defined_twice(
    state: MergeState,
    path: str,
    entry: TreeEntry,
    before: tuple[TreeEntry | None, Stages | None],
) -> list[str]:
    """Return the functions that a merged file defines twice and neither side does."""
    existing, sides = before
    names = {
        name
        for each in (existing, *(sides or ()))
        if each is not None
        for name in flatten(state.reader.definitions(path, each))
    }
    merged = flatten(state.reader.definitions(path, entry))
    return [name.partition("#")[0] for name in merged if "#" in name and name not in names]


def _move_notes(moves: Sequence[Move], home: str, where: str) -> tuple[str, ...]:
    return tuple(move.describe(home) for move in moves if move.path == where)


def _rename_note(old: str, new: str) -> tuple[str, ...]:
    return () if old == new else (f"{old} is {new} upstream",)
