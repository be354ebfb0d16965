"""What would become of each patch on this upstream, and who there touched the same code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.hosts.port.history import commits_touching, spots_of
from gracetune.hosts.port.library import Library, survey
from gracetune.hosts.port.merge import merge_patch
from gracetune.hosts.port.patches import read_patch
from gracetune.hosts.port.three_way import Labels

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gracetune.hosts.port.git import FileChange, Git, TreeEntry
    from gracetune.hosts.port.history import Touch
    from gracetune.hosts.port.library import Upstream
    from gracetune.hosts.port.merge import FileResult
    from gracetune.hosts.port.patches import Manifest, Patch

Verdict = Literal["applies", "moved", "conflicts", "upstream has it"]


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """One patch, merged for trial."""

    patch: Patch
    verdict: Verdict
    files: tuple[FileResult, ...]
    commits: tuple[Touch, ...]


@dataclass(frozen=True)
class Ground:
    """Everything that merging patches needs, read once."""

    library: Library
    upstream: Upstream
    tip: str

    def labels(self, patch: Patch) -> Labels:
        """The names of the sides in markers."""
        return Labels(f"upstream {self.tip[:10]}", f"fork: {patch.name}")


def survey_ground(git: Git, manifest: Manifest, tip: str) -> Ground:
    """Compare base and upstream; the base must be there."""
    return Ground(Library(git), survey(git, git.commit(manifest.base), tip), tip)


def changes_of(git: Git, manifest: Manifest, folder: Path, patch: Patch) -> list[FileChange]:
    """A patch as changes of the base's files."""
    content = read_patch(folder, patch)
    return git.changes(manifest.base, git.patched(manifest.base, content))


def merge_one(
    ground: Ground, tree: dict[str, TreeEntry], patch: Patch, changes: Sequence[FileChange]
) -> list[FileResult]:
    """Merge one patch onto a tree."""
    return merge_patch(ground.library, ground.upstream, tree, changes, ground.labels(patch))


def judge_files(files: Sequence[FileResult]) -> Verdict:
    """One word for a patch."""
    if any(file.is_conflict for file in files):
        return "conflicts"
    if not files:
        return "upstream has it"
    return "moved" if any(file.moved for file in files) else "applies"


def make_plan(git: Git, manifest: Manifest, folder: Path, upstream: str) -> list[PatchPlan]:
    """Merge every patch on top of those before it; nothing but objects is written."""
    tip = git.commit(upstream)
    ground = survey_ground(git, manifest, tip)
    tree = dict(ground.upstream.tip)
    merged: list[tuple[Patch, list[FileResult]]] = []
    spots = []
    for patch in manifest.patches:
        changes = changes_of(git, manifest, folder, patch)
        spots += spots_of(ground.library, patch.name, changes)
        files = merge_one(ground, tree, patch, changes)
        merged.append((patch, files))
        for file in files:
            if file.entry is not None:
                tree[file.path] = file.entry
            else:
                tree.pop(file.path, None)
    commits = commits_touching(ground.library, manifest.base, tip, spots)
    return [
        PatchPlan(patch, judge_files(files), tuple(files), tuple(commits.get(patch.name, ())))
        for patch, files in merged
    ]
