"""`gracetune port`: keep a fork alive on top of an upstream that moves."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from forkport.apply import PORT_BRANCH, start_apply, continue_apply, roll_back
from forkport.extract import extract
from forkport.git import open_repository
from forkport.patches import VALIDATION_GROUPS, MANIFEST, ValidationCommands, read_manifest
from forkport.plan import CHECKLIST, checklist, conflict_lines, make_plan, plan_json, plan_lines
from forkport.state import find_state, patches_folder
from forkport.validate import validate
from forkport.worktree import uncommitted
from gracetune.config.environment import process_environment
from gracetune.errors import PortError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from forkport.apply import ApplyOutcome
    from forkport.git import Git
    from forkport.patches import ValidationGroup, Manifest
    from forkport.state import CommandRun

HELP = (
    "Keep a fork alive: take its delta out as patches, plan and put them onto a newer upstream, "
    "validate the result, or go back."
)
UPSTREAM = "origin/main"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One verb, several actions."""
    parser.add_argument(
        "--repo", type=Path, default=Path(), metavar="PATH", help="the fork's clone (default: here)"
    )
    parser.add_argument(
        "--patches",
        type=Path,
        metavar="PATH",
        help="the folder of the patch set (default: `patches` in the clone)",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.set_defaults(run_action=run)
        return made

    take = action("extract", _extract, "a branch's delta as numbered patches with a manifest")
    take.add_argument("branch", nargs="?", default="HEAD", help="the fork's branch (default: HEAD)")
    take.add_argument("--upstream", default=UPSTREAM, metavar="REF", help=f"default: {UPSTREAM}")
    take.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=PATTERN",
        help="files that make one patch; may be given often, and numbers them in this order",
    )
    for group in VALIDATION_GROUPS:
        take.add_argument(
            f"--validate-{group}",
            action="append",
            metavar="COMMAND",
            help=f"a command for validation.{group}; may be given often",
        )
    plan = action("plan", _plan, "what would become of each patch; changes nothing")
    put = action("apply", _apply, "put the patches onto a fresh branch of upstream")
    put.add_argument("--branch", default=PORT_BRANCH, help=f"its name (default: {PORT_BRANCH})")
    put.add_argument(
        "--continue", action="store_true", dest="go_on", help="go on after a conflict is settled"
    )
    for made in (plan, put):
        made.add_argument("--upstream", metavar="REF", help="default: the manifest's")
    check = action("validate", _validate, "run the manifest's commands")
    check.add_argument("groups", nargs="*", metavar="upstream|ours|combined", help="default: all")
    page = action("checklist", _checklist, f"write {CHECKLIST}, filled")
    page.add_argument("--output", type=Path, metavar="FILE", help=f"default: {CHECKLIST}")
    page.add_argument(
        "--baseline", type=Path, metavar="FILE", help="what `baseline compare --output` wrote"
    )
    back = action("rollback", _rollback, "return to the fork as it was before the port")
    for made in (put, back):
        made.add_argument("--yes", action="store_true", help="do not ask")
    for made in (take, plan):
        made.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    git = open_repository(args.repo, process_environment())
    folder: Path = args.patches or git.folder / "patches"
    act: Callable[[argparse.Namespace, Git, Path], int] = args.run_action
    return act(args, git, folder)


def _extract(args: argparse.Namespace, git: Git, folder: Path) -> int:
    groups = []
    for text in args.group:
        name, equals, pattern = text.partition("=")
        if not (name and equals and pattern):
            raise PortError(f"--group is {text!r}; write NAME=PATTERN, such as docs=documentation.")
        groups.append((name, pattern))
    given = {group: vars(args)[f"validate_{group}"] for group in VALIDATION_GROUPS}
    validation = None
    if any(given.values()):
        validation = ValidationCommands(
            **{group: tuple(lines or ()) for group, lines in given.items()}
        )
    branch = args.branch if args.branch != "HEAD" else git.text("rev-parse", "--abbrev-ref", "HEAD")
    manifest = extract(git, branch, args.upstream, folder, groups, validation)
    if args.json:
        print(manifest.model_dump_json(indent=2))
        return 0
    for patch in manifest.patches:
        added = sum(file.insertions for file in patch.files)
        taken = sum(file.deletions for file in patch.files)
        print(f"{patch.name}: {len(patch.files)} files, +{added} -{taken}, risk {patch.risk}")
        print(f"  {patch.why}")
    print(f"{len(manifest.patches)} patches of {branch} since {manifest.base[:10]} in {folder}.")
    dirty = uncommitted(git)
    if dirty and git.resolve_commit("HEAD") == manifest.head:
        print(f"Not in them, because it is not committed: {', '.join(dirty)}.")
    return 0


def _plan(args: argparse.Namespace, git: Git, folder: Path) -> int:
    manifest = read_manifest(folder)
    upstream = args.upstream or manifest.upstream
    plans = make_plan(git, manifest, folder, upstream)
    if args.json:
        print(json.dumps(plan_json(plans), indent=2))
    else:
        print(*plan_lines(plans), sep="\n")
    return 0


def _apply(args: argparse.Namespace, git: Git, folder: Path) -> int:
    if args.go_on:
        return _report_outcome(continue_apply(git))
    stamp = _stamp()
    return _report_outcome(
        start_apply(git, folder, args.upstream, args.branch, stamp, _confirm(args.yes, "--yes"))
    )


def _report_outcome(outcome: ApplyOutcome) -> int:
    state = outcome.state
    for done in state.done:
        where = done.commit[:10] if done.commit else "nothing to commit"
        print(f"{done.patch}: {done.verdict}, {where}")
        for note in done.notes:
            print(f"  {note}")
    print(f"Backup branch: {state.backup}")
    if state.kept:
        print(f"Uncommitted work: {state.kept}")
    if state.stopped is None:
        print(f"All {len(state.done)} patches are on {state.port_branch}.")
        return 0
    print(f"{state.stopped.patch}: stopped at a conflict.", file=sys.stderr)
    for file in outcome.conflicts:
        print(*conflict_lines(file), sep="\n", file=sys.stderr)
    print(
        "Settle the files above, then: gracetune port apply --continue. "
        "Or undo all of it: gracetune port rollback.",
        file=sys.stderr,
    )
    return 1


def _validate(args: argparse.Namespace, git: Git, folder: Path) -> int:
    unknown = [group for group in args.groups if group not in VALIDATION_GROUPS]
    if unknown:
        raise PortError(f"{unknown[0]!r} is no group; known: {', '.join(VALIDATION_GROUPS)}.")
    groups: list[ValidationGroup] = [group for group in VALIDATION_GROUPS if group in args.groups or not args.groups]
    state = find_state(git)
    manifest = _manifest(git, folder)
    upstream = manifest.upstream if state is None else state.tip
    ran = validate(git, manifest, upstream, groups, _now, _report_ran)
    failed = [one for one in ran if one.exit_code]
    print(f"{len(ran) - len(failed)} of {len(ran)} commands passed.")
    return 1 if failed else 0


def _report_ran(one: CommandRun) -> None:
    verdict = "passed" if one.exit_code == 0 else f"FAILED, exit {one.exit_code}"
    print(f"{one.group}: {one.command}: {verdict} in {one.seconds:.1f} s ({one.log})", flush=True)
    if one.exit_code:
        tail = Path(one.log).read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        print(*(f"  | {line}" for line in tail), sep="\n", flush=True)


def _checklist(args: argparse.Namespace, git: Git, folder: Path) -> int:
    baseline = None
    if args.baseline is not None:
        try:
            baseline = args.baseline.read_text(encoding="utf-8").strip().splitlines()[-1]
        except (OSError, IndexError) as error:
            raise PortError(f"--baseline {args.baseline} cannot be read: {error}.") from None
    output: Path = args.output or git.folder / CHECKLIST
    output.write_text(
        checklist(_manifest(git, folder), find_state(git), baseline), encoding="utf-8"
    )
    print(f"The checklist is in {output}.")
    return 0


def _manifest(git: Git, folder: Path) -> Manifest:
    """The user's copy, where commands may have been added, unless a switch took it away."""
    if find_state(git) is None or (folder / MANIFEST).exists():
        return read_manifest(folder)
    return read_manifest(patches_folder(git))


def _rollback(args: argparse.Namespace, git: Git, folder: Path) -> int:
    del folder  # the way back is in the git folder
    done = roll_back(git, _stamp(), _confirm(args.yes, "--yes"))
    print(f"HEAD is on {done.branch} at {done.commit[:10]}, as before the port.")
    if done.restored:
        print(f"Uncommitted then, and so again: {', '.join(done.restored)}.")
    if done.saved_branch:
        print(f"Uncommitted until now, and kept in {done.saved_branch}: {', '.join(done.saved_paths)}.")
    print(f"The branch {done.port_branch} stays; `git branch -D {done.port_branch}` deletes it.")
    return 0


def _confirm(yes: bool, flag: str) -> Callable[[str], None]:
    def confirm(what: str) -> None:
        if yes:
            print(what)
            return
        if not sys.stdin.isatty():
            raise PortError(f"{what} There is no terminal to ask on; give {flag} to do it.")
        if input(f"{what} Go on? [y/N] ").strip().lower() not in ("y", "yes"):
            raise PortError("nothing was changed.")

    return confirm


def _stamp() -> str:
    return _now().strftime("%Y%m%d_%H%M%S")


def _now() -> datetime:
    return datetime.now(UTC)
