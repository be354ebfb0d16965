"""Plans and conflicts as lines for people, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.hosts.port.merge import FileResult
    from gracetune.hosts.port.plan import PatchPlan

_MOST_LINES = 40
"""Lines of one side that are shown; the rest is in the file."""


def plan_lines(plans: Sequence[PatchPlan]) -> Iterator[str]:
    """A paragraph a patch, and a count of verdicts."""
    for plan in plans:
        yield f"{plan.patch.name}: {plan.verdict} (risk {plan.patch.risk}: {plan.patch.why})"
        for file in plan.files:
            for note in file.notes:
                yield f"  {file.path}: {note}"
            if file.why:
                yield f"  {file.path}: conflict: {file.why}"
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
                    "why": file.why,
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
    if file.why:
        yield f"{file.path}: {file.why}"
    for conflict in file.conflicts:
        yield f"{file.path}:{conflict.line}: both sides changed these lines"
        sides = (("before", conflict.base), ("upstream", conflict.ours), ("fork", conflict.theirs))
        for name, content in sides:
            yield f"  {name}:"
            lines = content.decode(errors="replace").splitlines() or ["(nothing)"]
            yield from (f"    {line}" for line in lines[:_MOST_LINES])
            if len(lines) > _MOST_LINES:
                yield f"    ... {len(lines) - _MOST_LINES} more lines in the file"
