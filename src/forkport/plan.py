"""Predict what becomes of each patch on a given upstream, without changing the working tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forkport.merge import merge_patch, open_merge_context, patch_changes
from forkport.upstream_history import commits_touching, touched_regions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forkport.git import Git
    from forkport.merge import FileResult
    from forkport.patches import Manifest, Patch
    from forkport.upstream_history import TouchingCommit


Verdict = Literal["applies", "moved", "conflicts", "upstream has it"]


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """The result of merging one patch on trial, without changing the working tree."""

    patch: Patch
    verdict: Verdict
    files: tuple[FileResult, ...]
    commits: tuple[TouchingCommit, ...]
    """Upstream commits that changed the same code as the patch."""


def make_plan(git: Git, manifest: Manifest, folder: Path, upstream: str) -> list[PatchPlan]:
    """Merge every patch into upstream, each on top of the previous ones, to predict conflicts.

    This writes git objects, but no branch and no file of the working tree.
    """
    tip = git.resolve_commit(upstream)
    context = open_merge_context(git, manifest, tip)
    tree = dict(context.upstream.tip)
    merged: list[tuple[Patch, list[FileResult]]] = []
    regions = []
    for patch in manifest.patches:
        changes = patch_changes(git, manifest, folder, patch)
        regions += touched_regions(context.reader, patch.name, changes)
        files = merge_patch(context, tree, patch, changes)
        merged.append((patch, files))
        for file in files:
            if file.entry is not None:
                tree[file.path] = file.entry
            else:
                tree.pop(file.path, None)
    commits = commits_touching(context.reader, manifest.base, tip, regions)
    return [
        PatchPlan(patch, patch_verdict(files), tuple(files), tuple(commits.get(patch.name, ())))
        for patch, files in merged
    ]


def patch_verdict(files: Sequence[FileResult]) -> Verdict:
    """Return the verdict on a patch: applies, moved, conflicts, or already upstream."""
    if any(file.is_conflict for file in files):
        return "conflicts"
    if not files:
        return "upstream has it"
    return "moved" if any(file.moved for file in files) else "applies"
