"""The page that a person signs off: what is done is ticked, with its proof; the rest is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.hosts.port.patches import GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gracetune.hosts.port.patches import Manifest, Patch
    from gracetune.hosts.port.state import Done, Ran, State

CHECKLIST = "GH200_REBASE_CHECKLIST.md"
_ABOUT = {
    "upstream": "Upstream alone",
    "ours": "What the fork adds",
    "combined": "Both together",
}


def checklist(manifest: Manifest, state: State | None, baseline: str | None) -> str:
    """The page; `baseline` is the last line of a comparison, where there was one."""
    return "\n".join([*_lines(manifest, state, baseline)]) + "\n"


def _lines(manifest: Manifest, state: State | None, baseline: str | None) -> Iterator[str]:
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
    for group in GROUPS:
        commands = manifest.validation.of(group)
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


def _patch(patch: Patch, done: Done | None, is_stopped: bool) -> Iterator[str]:
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


def _command(command: str, ran: Ran | None, state: State | None, group: str) -> str:
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
