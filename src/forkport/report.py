"""Format plans, conflicts and the sign-off checklist for people, and plans as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from forkport.patches import VALIDATION_GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forkport.merge import FileResult
    from forkport.patches import Manifest, Patch
    from forkport.plan import PatchPlan
    from forkport.port_state import AppliedPatch, CommandRun, PortState

CHECKLIST = "GH200_REBASE_CHECKLIST.md"
_NO_REGRESSION = r"no regression beyond [0-9.]+ %( in [^;]*)?"
"""The last line of `gracetune baseline compare` that is a proof, for all metrics or those named."""
_MAX_SIDE_LINES = 40
"""Number of lines shown of each side of a conflict; the user finds the rest in the file."""
_GROUP_TITLES = {
    "upstream": "Upstream alone",
    "ours": "What the fork adds",
    "combined": "Both together",
}


def plan_lines(plans: Sequence[PatchPlan]) -> Iterator[str]:
    """Yield a paragraph for each patch and a count of verdicts."""
    for plan in plans:
        yield f"{plan.patch.name}: {plan.verdict} (risk {plan.patch.risk}: {plan.patch.why})"
        for file in plan.files:
            for note in file.notes:
                yield f"  {file.path}: {note}"
            if file.reason:
                yield f"  {file.path}: conflict: {file.reason}"
            for conflict in file.conflicts:
                yield f"  {file.path}:{conflict.line}: conflict: both sides changed these lines"
        for path in plan.already_upstream:
            yield f"  {path}: already upstream"
        if plan.commits:
            yield f"  {len(plan.commits)} upstream commits touched the same code:"
        for commit in plan.commits:
            yield f"    {commit.commit[:10]} {commit.subject} ({', '.join(commit.labels)})"
    verdicts = [plan.verdict for plan in plans]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    yield f"{len(plans)} patches: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def plan_json(plans: Sequence[PatchPlan]) -> list[dict[str, object]]:
    """Return the plans as JSON-compatible values. Scripts rely on the keys."""
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
            "already_upstream": list(plan.already_upstream),
            "commits": [
                {"commit": each.commit, "subject": each.subject, "touched": list(each.labels)}
                for each in plan.commits
            ],
        }
        for plan in plans
    ]


def conflict_lines(file: FileResult) -> Iterator[str]:
    """Yield every conflict of a file with the base and both sides."""
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
            yield from (f"    {line}" for line in lines[:_MAX_SIDE_LINES])
            if len(lines) > _MAX_SIDE_LINES:
                yield f"    ... {len(lines) - _MAX_SIDE_LINES} more lines in the file"


def checklist(manifest: Manifest, state: PortState | None, baseline: str | None) -> str:
    """Format the checklist for accepting a port: steps that are proven are ticked, with the proof.

    `baseline` is the last line of `gracetune baseline compare`, if it was run.
    """
    return "\n".join([*_checklist_lines(manifest, state, baseline)]) + "\n"


def _checklist_lines(
    manifest: Manifest, state: PortState | None, baseline: str | None
) -> Iterator[str]:
    yield "# Rebase checklist"
    yield ""
    yield (
        f"`{manifest.branch}` ({manifest.head[:10]}), based on {manifest.base[:10]}, onto "
        + (f"`{state.upstream}` ({state.tip[:10]})." if state else f"`{manifest.upstream}`.")
    )
    yield from ("", "## 1. Before", "")
    yield _item(True, f"{len(manifest.patches)} patches extracted, with a manifest")
    if state is None:
        yield _item(False, "backup branch")
    else:
        yield _item(True, f"backup branch `{state.backup}` at {state.head[:10]}")
        if state.kept:
            yield _item(True, f"uncommitted work saved in `{state.kept}`")
    yield from ("", "## 2. Patches", "")
    applied = {each.patch: each for each in state.done} if state else {}
    pending = state.stopped.patch if state and state.stopped else None
    for patch in manifest.patches:
        yield from _patch_lines(patch, applied.get(patch.name), patch.name == pending)
    yield from ("", "## 3. Validation", "")
    for group in VALIDATION_GROUPS:
        commands = manifest.validation.commands(group)
        runs = {each.command: each for each in (state.ran if state else ()) if each.group == group}
        yield f"{_GROUP_TITLES[group]}:"
        yield ""
        if not commands:
            yield _item(False, "no command in the manifest: nothing is tested")
        for command in commands:
            yield _command_line(command, runs.get(command), state, group)
        yield ""
    yield from ("## 4. Performance", "")
    yield _item(
        baseline is not None and _proves_no_regression(baseline),
        "baseline compared: " + (baseline or "not yet (`gracetune baseline compare`)"),
    )
    yield from ("", "## 5. Decision", "")
    yield _item(False, "a second person has read the conflicts resolved by hand")
    yield _item(False, "result accepted; or undone with `gracetune port rollback`")


def _proves_no_regression(line: str) -> bool:
    return re.fullmatch(_NO_REGRESSION, line) is not None and ", but " not in line


def _patch_lines(patch: Patch, applied: AppliedPatch | None, is_pending: bool) -> Iterator[str]:
    num_lines = sum(file.insertions + file.deletions for file in patch.files)
    head = f"{patch.name} ({len(patch.files)} files, {num_lines} lines, risk {patch.risk})"
    if applied is None:
        yield _item(False, f"{head}: " + ("**stopped at a conflict**" if is_pending else "to do"))
        return
    where = f"commit {applied.commit[:10]}" if applied.commit else "nothing left to commit"
    yield _item(True, f"{head}: {applied.verdict}, {where}")
    for path in applied.by_hand:
        yield f"  - resolved by hand: `{path}`"
    for note in applied.notes:
        yield f"  - {note}"


def _command_line(command: str, run: CommandRun | None, state: PortState | None, group: str) -> str:
    """Format one validation command as a checklist item, ticked if the command passed.

    A run on another commit than the newest one of the port does not count.
    """
    if run is None:
        return _item(False, f"`{command}`: not run")
    expected = state.tip if state and group == "upstream" else (state.at if state else run.commit)
    commit, *suffix = run.commit.split(" ", 1)
    tested = " ".join([commit[:10], *suffix])
    stale = "" if run.commit == expected else f", on {tested}, which is not the result"
    verdict = "passed" if run.exit_code == 0 else f"**failed, exit {run.exit_code}**"
    text = f"`{command}`: {verdict} in {run.seconds:.1f} s at {run.at}{stale}"
    return _item(run.exit_code == 0 and not stale, text)


def _item(is_done: bool, text: str) -> str:
    return f"- [{'x' if is_done else ' '}] {text}"
