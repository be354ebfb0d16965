"""What would become of each patch on this upstream, and who there touched the same code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forkport.history import commits_touching, touched_regions
from forkport.merge import merge_patch
from forkport.patches import VALIDATION_GROUPS, read_patch
from forkport.source_index import SourceReader, compare_trees
from forkport.three_way import SideLabels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from forkport.git import FileChange, Git, TreeEntry
    from forkport.history import TouchingCommit
    from forkport.merge import FileResult
    from forkport.patches import Manifest, Patch
    from forkport.source_index import UpstreamChanges
    from forkport.state import AppliedPatch, CommandRun, PortState


Verdict = Literal["applies", "moved", "conflicts", "upstream has it"]


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """One patch, merged for trial."""

    patch: Patch
    verdict: Verdict
    files: tuple[FileResult, ...]
    commits: tuple[TouchingCommit, ...]


@dataclass(frozen=True)
class MergeContext:
    """Everything that merging patches needs, read once."""

    library: SourceReader
    upstream: UpstreamChanges
    tip: str

    def labels(self, patch: Patch) -> SideLabels:
        """The names of the sides in markers."""
        return SideLabels(f"upstream {self.tip[:10]}", f"fork: {patch.name}")


def open_merge_context(git: Git, manifest: Manifest, tip: str) -> MergeContext:
    """Compare base and upstream; the base must be there."""
    return MergeContext(SourceReader(git), compare_trees(git, git.resolve_commit(manifest.base), tip), tip)


def patch_changes(git: Git, manifest: Manifest, folder: Path, patch: Patch) -> list[FileChange]:
    """A patch as changes of the base's files."""
    content = read_patch(folder, patch)
    return git.diff_trees(manifest.base, git.write_patched_tree(manifest.base, content))


def merge_one(
    ground: MergeContext, tree: dict[str, TreeEntry], patch: Patch, changes: Sequence[FileChange]
) -> list[FileResult]:
    """Merge one patch onto a tree."""
    return merge_patch(ground.library, ground.upstream, tree, changes, ground.labels(patch))


def patch_verdict(files: Sequence[FileResult]) -> Verdict:
    """One word for a patch."""
    if any(file.is_conflict for file in files):
        return "conflicts"
    if not files:
        return "upstream has it"
    return "moved" if any(file.moved for file in files) else "applies"


def make_plan(git: Git, manifest: Manifest, folder: Path, upstream: str) -> list[PatchPlan]:
    """Merge every patch on top of those before it; nothing but objects is written."""
    tip = git.resolve_commit(upstream)
    ground = open_merge_context(git, manifest, tip)
    tree = dict(ground.upstream.tip)
    merged: list[tuple[Patch, list[FileResult]]] = []
    spots = []
    for patch in manifest.patches:
        changes = patch_changes(git, manifest, folder, patch)
        spots += touched_regions(ground.library, patch.name, changes)
        files = merge_one(ground, tree, patch, changes)
        merged.append((patch, files))
        for file in files:
            if file.entry is not None:
                tree[file.path] = file.entry
            else:
                tree.pop(file.path, None)
    commits = commits_touching(ground.library, manifest.base, tip, spots)
    return [
        PatchPlan(patch, patch_verdict(files), tuple(files), tuple(commits.get(patch.name, ())))
        for patch, files in merged
    ]


# ------------------------------------------------------------------------------------------
# Plans and conflicts as lines for people, and as JSON.


_MOST_LINES = 40
"""Lines of one side that are shown; the rest is in the file."""


def plan_lines(plans: Sequence[PatchPlan]) -> Iterator[str]:
    """A paragraph a patch, and a count of verdicts."""
    for plan in plans:
        yield f"{plan.patch.name}: {plan.verdict} (risk {plan.patch.risk}: {plan.patch.why})"
        for file in plan.files:
            for note in file.notes:
                yield f"  {file.path}: {note}"
            if file.reason:
                yield f"  {file.path}: conflict: {file.reason}"
            for conflict in file.conflicts:
                yield f"  {file.path}:{conflict.line}: conflict: both sides changed these lines"
        if plan.commits:
            yield f"  {len(plan.commits)} upstream commits touched the same code:"
        for touch in plan.commits:
            yield f"    {touch.commit[:10]} {touch.subject} ({', '.join(touch.labels)})"
    verdicts = [plan.verdict for plan in plans]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    yield f"{len(plans)} patches: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def plan_json(plans: Sequence[PatchPlan]) -> list[dict[str, object]]:
    """The same for machines."""
    return [
        {
            "patch": plan.patch.name,
            "verdict": plan.verdict,
            "risk": plan.patch.risk,
            "files": [
                {
                    "path": file.path,
                    "moved": file.moved,
                    "why": file.reason,
                    "conflict_lines": [conflict.line for conflict in file.conflicts],
                    "notes": list(file.notes),
                }
                for file in plan.files
            ],
            "commits": [
                {"commit": t.commit, "subject": t.subject, "touched": list(t.labels)}
                for t in plan.commits
            ],
        }
        for plan in plans
    ]


def conflict_lines(file: FileResult) -> Iterator[str]:
    """Both sides of every conflict of a file."""
    for note in file.notes:
        yield f"{file.path}: {note}"
    if file.reason:
        yield f"{file.path}: {file.reason}"
    for conflict in file.conflicts:
        yield f"{file.path}:{conflict.line}: both sides changed these lines"
        sides = (("before", conflict.base), ("upstream", conflict.ours), ("fork", conflict.theirs))
        for name, content in sides:
            yield f"  {name}:"
            lines = content.decode(errors="replace").splitlines() or ["(nothing)"]
            yield from (f"    {line}" for line in lines[:_MOST_LINES])
            if len(lines) > _MOST_LINES:
                yield f"    ... {len(lines) - _MOST_LINES} more lines in the file"


# ------------------------------------------------------------------------------------------
# The page that a person signs off: what is done is ticked, with its proof; the rest is not.


CHECKLIST = "GH200_REBASE_CHECKLIST.md"
_ABOUT = {
    "upstream": "Upstream alone",
    "ours": "What the fork adds",
    "combined": "Both together",
}


def checklist(manifest: Manifest, state: PortState | None, baseline: str | None) -> str:
    """The page; `baseline` is the last line of a comparison, where there was one."""
    return "\n".join([*_lines(manifest, state, baseline)]) + "\n"


def _lines(manifest: Manifest, state: PortState | None, baseline: str | None) -> Iterator[str]:
    yield "# Rebase checklist"
    yield ""
    yield (
        f"`{manifest.branch}` ({manifest.head[:10]}), which grew from {manifest.base[:10]}, onto "
        + (f"`{state.upstream}` ({state.tip[:10]})." if state else f"`{manifest.upstream}`.")
    )
    yield from ("", "## 1. Before", "")
    yield _item(True, f"{len(manifest.patches)} patches extracted, with a manifest")
    if state is None:
        yield _item(False, "backup branch")
    else:
        yield _item(True, f"backup branch `{state.backup}` at {state.head[:10]}")
        if state.kept:
            yield _item(True, f"uncommitted work kept in `{state.kept}`")
    yield from ("", "## 2. Patches", "")
    done = {each.patch: each for each in state.done} if state else {}
    stopped = state.stopped.patch if state and state.stopped else None
    for patch in manifest.patches:
        yield from _patch(patch, done.get(patch.name), patch.name == stopped)
    yield from ("", "## 3. Validation", "")
    for group in VALIDATION_GROUPS:
        commands = manifest.validation.commands(group)
        ran = {each.command: each for each in (state.ran if state else ()) if each.group == group}
        yield f"{_ABOUT[group]}:"
        yield ""
        if not commands:
            yield _item(False, "no command in the manifest: nothing is tested")
        for command in commands:
            yield _command(command, ran.get(command), state, group)
        yield ""
    yield from ("## 4. Performance", "")
    yield _item(
        baseline is not None and baseline.startswith("no regression"),
        "baseline compared: " + (baseline or "not yet (`gracetune baseline compare`)"),
    )
    yield from ("", "## 5. Decision", "")
    yield _item(False, "conflicts settled by hand were read by a second person")
    yield _item(False, "result accepted; or undone with `gracetune port rollback`")


def _patch(patch: Patch, done: AppliedPatch | None, is_stopped: bool) -> Iterator[str]:
    size = sum(file.insertions + file.deletions for file in patch.files)
    head = f"{patch.name} ({len(patch.files)} files, {size} lines, risk {patch.risk})"
    if done is None:
        yield _item(False, f"{head}: " + ("**stopped at a conflict**" if is_stopped else "to do"))
        return
    where = f"commit {done.commit[:10]}" if done.commit else "nothing left to commit"
    yield _item(True, f"{head}: {done.verdict}, {where}")
    for path in done.by_hand:
        yield f"  - settled by hand: `{path}`"
    for note in done.notes:
        yield f"  - {note}"


def _command(command: str, ran: CommandRun | None, state: PortState | None, group: str) -> str:
    if ran is None:
        return _item(False, f"`{command}`: not run")
    wanted = state.tip if state and group == "upstream" else (state.at if state else ran.commit)
    commit, *changed = ran.commit.split(" ", 1)
    seen = " ".join([commit[:10], *changed])
    stale = "" if ran.commit == wanted else f", on {seen}, which is not the result"
    verdict = "passed" if ran.exit_code == 0 else f"**failed, exit {ran.exit_code}**"
    told = f"`{command}`: {verdict} in {ran.seconds:.1f} s at {ran.at}{stale}"
    return _item(ran.exit_code == 0 and not stale, told)


def _item(is_done: bool, text: str) -> str:
    return f"- [{'x' if is_done else ' '}] {text}"
