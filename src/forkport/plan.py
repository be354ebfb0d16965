"""Predict what becomes of each patch on a given upstream, without changing the working tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forkport.merge import check_result, merge_patch, open_merge_context, patch_changes
from forkport.upstream_history import commits_touching, touched_regions

if TYPE_CHECKING:
    from pathlib import Path

    from forkport.git import Git
    from forkport.merge import FileResult, PatchResult
    from forkport.patches import Manifest, Patch
    from forkport.upstream_history import TouchingCommit


Verdict = Literal["applies", "moved", "conflicts", "already upstream"]


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """The result of merging one patch on trial, without changing the working tree."""

    patch: Patch
    verdict: Verdict
    files: tuple[FileResult, ...]
    already_upstream: tuple[str, ...]
    """Files of the patch that upstream already has as the fork has them."""
    commits: tuple[TouchingCommit, ...]
    """Upstream commits that changed the same code as the patch."""


def make_plan(git: Git, manifest: Manifest, folder: Path, upstream: str) -> list[PatchPlan]:
    """Merge every patch into upstream, each on top of the previous ones, to predict conflicts.

    This writes git objects, but no branch and no file of the working tree.
    """
    tip = git.resolve_commit(upstream)
    context = open_merge_context(git, manifest, folder, tip)
    tree = dict(context.upstream.tip)
    merged: list[tuple[Patch, PatchResult]] = []
    regions = []
    for patch in manifest.patches:
        changes = patch_changes(git, manifest, folder, patch)
        regions += touched_regions(context.reader, patch.name, changes)
        result = merge_patch(context, tree, patch, changes)
        for path, entry in result.entries.items():
            if entry is not None:
                tree[path] = entry
            else:
                tree.pop(path, None)
        if patch is manifest.patches[-1]:
            result = check_result(context, tree, result)
        merged.append((patch, result))
    commits = commits_touching(context.reader, context.upstream_history.commits, regions)
    return [
        PatchPlan(
            patch,
            patch_verdict(result),
            result.files,
            result.already_upstream,
            tuple(commits.get(patch.name, ())),
        )
        for patch, result in merged
    ]


def patch_verdict(result: PatchResult) -> Verdict:
    """Return the verdict on a patch: applies, moved, conflicts, or already upstream."""
    if result.is_conflict:
        return "conflicts"
    if not result.files:
        return "already upstream"
    return "moved" if any(file.moved for file in result.files) else "applies"
