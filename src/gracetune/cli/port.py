"""`gracetune port`: move the changes of a git fork to a newer upstream release."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from forkport import ForkportError
from forkport.apply import PORT_BRANCH, continue_apply, roll_back, start_apply
from forkport.extract import extract
from forkport.git import open_repository
from forkport.patches import MANIFEST, VALIDATION_GROUPS, ValidationCommands, read_manifest
from forkport.plan import make_plan
from forkport.port_state import find_state, patches_folder
from forkport.report import CHECKLIST, checklist, conflict_lines, plan_json, plan_lines
from forkport.validation_commands import validate
from forkport.worktree import uncommitted
from gracetune.config.environment import process_environment
from gracetune.errors import PortError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from forkport.apply import ApplyOutcome
    from forkport.git import Git
    from forkport.patches import Manifest, ValidationGroup
    from forkport.port_state import CommandRun

HELP = (
    "Keep a fork alive: extract its changes as patches, plan and apply them to a newer upstream, "
    "validate the result, or roll back."
)
UPSTREAM = "origin/main"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all actions share, and one subparser per action."""
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

    def add_action(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run_action=run)
        return action

    extract_parser = add_action(
        "extract", _extract, "extract a branch's changes as numbered patches with a manifest"
    )
    extract_parser.add_argument(
        "branch", nargs="?", default="HEAD", help="the fork's branch (default: HEAD)"
    )
    extract_parser.add_argument(
        "--upstream", default=UPSTREAM, metavar="REF", help=f"default: {UPSTREAM}"
    )
    extract_parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=PATTERN",
        help="put the matching files into one patch; repeatable, in the order of the patches",
    )
    for group in VALIDATION_GROUPS:
        extract_parser.add_argument(
            f"--validate-{group}",
            action="append",
            metavar="COMMAND",
            help=f"a command for validation.{group}; repeatable",
        )
    plan_parser = add_action("plan", _plan, "predict how each patch would apply; changes nothing")
    apply_parser = add_action("apply", _apply, "apply the patches to a fresh branch of upstream")
    apply_parser.add_argument(
        "--branch", default=PORT_BRANCH, help=f"name of that branch (default: {PORT_BRANCH})"
    )
    apply_parser.add_argument(
        "--continue",
        action="store_true",
        dest="continue_port",
        help="continue after resolving a conflict",
    )
    for each in (plan_parser, apply_parser):
        each.add_argument("--upstream", metavar="REF", help="default: as in the manifest")
    validate_parser = add_action("validate", _validate, "run the manifest's validation commands")
    validate_parser.add_argument(
        "groups", nargs="*", metavar="upstream|ours|combined", help="default: all"
    )
    checklist_parser = add_action("checklist", _checklist, f"write {CHECKLIST}, filled in")
    checklist_parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"default: {CHECKLIST}"
    )
    checklist_parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="the output of `baseline compare --output`"
    )
    rollback_parser = add_action(
        "rollback", _rollback, "return to the fork as it was before the port"
    )
    for each in (apply_parser, rollback_parser):
        each.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    for each in (extract_parser, plan_parser):
        each.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; errors of forkport are raised as PortError."""
    action: Callable[[argparse.Namespace, Git, Path], int] = args.run_action
    try:
        git = open_repository(args.repo, process_environment())
        return action(args, git, args.patches or git.folder / "patches")
    except ForkportError as error:
        raise PortError(str(error)) from None


def _extract(args: argparse.Namespace, git: Git, folder: Path) -> int:
    groups = []
    for text in args.group:
        name, equals, pattern = text.partition("=")
        if not (name and equals and pattern):
            raise PortError(f"--group is {text!r}; write NAME=PATTERN, such as docs=documentation.")
        groups.append((name, pattern))
    commands = {group: vars(args)[f"validate_{group}"] for group in VALIDATION_GROUPS}
    validation = None
    if any(commands.values()):
        validation = ValidationCommands(
            **{group: tuple(lines or ()) for group, lines in commands.items()}
        )
    branch = args.branch if args.branch != "HEAD" else git.text("rev-parse", "--abbrev-ref", "HEAD")
    manifest = extract(git, branch, args.upstream, folder, groups, validation)
    if args.json:
        print(manifest.model_dump_json(indent=2))
        return 0
    for patch in manifest.patches:
        insertions = sum(file.insertions for file in patch.files)
        deletions = sum(file.deletions for file in patch.files)
        print(
            f"{patch.name}: {len(patch.files)} files, +{insertions} -{deletions}, risk {patch.risk}"
        )
        print(f"  {patch.why}")
    print(f"{len(manifest.patches)} patches of {branch} since {manifest.base[:10]} in {folder}.")
    dirty = uncommitted(git)
    if dirty and git.resolve_commit("HEAD") == manifest.head:
        print(f"Not included, because not committed: {', '.join(dirty)}.")
    return 0


def _plan(args: argparse.Namespace, git: Git, folder: Path) -> int:
    manifest = read_manifest(folder)
    plans = make_plan(git, manifest, folder, args.upstream or manifest.upstream)
    if args.json:
        print(json.dumps(plan_json(plans), indent=2))
    else:
        print(*plan_lines(plans), sep="\n")
    return 0


def _apply(args: argparse.Namespace, git: Git, folder: Path) -> int:
    if args.continue_port:
        return _report_outcome(continue_apply(git))
    confirm = _confirmation(args.yes)
    return _report_outcome(
        start_apply(git, folder, args.upstream, args.branch, _timestamp(), confirm)
    )


def _report_outcome(outcome: ApplyOutcome) -> int:
    state = outcome.state
    for applied in state.done:
        where = applied.commit[:10] if applied.commit else "nothing to commit"
        print(f"{applied.patch}: {applied.verdict}, {where}")
        for note in applied.notes:
            print(f"  {note}")
    print(f"Backup branch: {state.backup}")
    if state.kept:
        print(f"Uncommitted work: {state.kept}")
    if state.stopped is None:
        skipped = [each.patch for each in state.done if each.verdict == "already upstream"]
        if skipped:
            count = f"{len(state.done) - len(skipped)} of {len(state.done)} patches"
            print(f"{count} are on {state.port_branch}. Already upstream: {', '.join(skipped)}.")
        else:
            print(f"All {len(state.done)} patches are on {state.port_branch}.")
        return 0
    print(f"{state.stopped.patch}: stopped at a conflict.", file=sys.stderr)
    for file in outcome.conflicts:
        print(*conflict_lines(file), sep="\n", file=sys.stderr)
    print(
        "Resolve the files above, then run: gracetune port apply --continue. "
        "To undo everything: gracetune port rollback.",
        file=sys.stderr,
    )
    return 1


def _validate(args: argparse.Namespace, git: Git, folder: Path) -> int:
    unknown = [group for group in args.groups if group not in VALIDATION_GROUPS]
    if unknown:
        raise PortError(
            f"{unknown[0]!r} is not a validation group. Choose from {', '.join(VALIDATION_GROUPS)}."
        )
    groups: list[ValidationGroup] = [
        group for group in VALIDATION_GROUPS if group in args.groups or not args.groups
    ]
    state = find_state(git)
    manifest = _find_manifest(git, folder)
    upstream = manifest.upstream if state is None else state.tip
    runs = validate(git, manifest, upstream, groups, _now, _report_run)
    failed = [each for each in runs if each.exit_code]
    print(f"{len(runs) - len(failed)} of {len(runs)} commands passed.")
    return 1 if failed else 0


def _report_run(run: CommandRun) -> None:
    verdict = "passed" if run.exit_code == 0 else f"FAILED, exit {run.exit_code}"
    print(f"{run.group}: {run.command}: {verdict} in {run.seconds:.1f} s ({run.log})", flush=True)
    if run.exit_code:
        tail = Path(run.log).read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        print(*(f"  | {line}" for line in tail), sep="\n", flush=True)


def _checklist(args: argparse.Namespace, git: Git, folder: Path) -> int:
    baseline = None
    if args.baseline is not None:
        try:
            baseline = args.baseline.read_text(encoding="utf-8").strip().splitlines()[-1]
        except (OSError, IndexError) as error:
            raise PortError(f"--baseline {args.baseline} cannot be read: {error}.") from None
    output: Path = args.output or git.folder / CHECKLIST
    page = checklist(_find_manifest(git, folder), find_state(git), baseline)
    output.write_text(page, encoding="utf-8")
    print(f"The checklist is in {output}.")
    return 0


def _find_manifest(git: Git, folder: Path) -> Manifest:
    """Read manifest.json, which describes a fork's patch set, from `folder` or from a copy.

    The file in `folder` comes first, because the user may have edited it. The copy, which
    `gracetune port apply` made, is needed once the branch with `folder` is no longer checked out.
    """
    if find_state(git) is None or (folder / MANIFEST).exists():
        return read_manifest(folder)
    return read_manifest(patches_folder(git))


def _rollback(args: argparse.Namespace, git: Git, folder: Path) -> int:
    del folder  # not needed: the state of the port is in the .git folder
    result = roll_back(git, _timestamp(), _confirmation(args.yes))
    print(f"HEAD is on {result.branch} at {result.commit[:10]}, as before the port.")
    if result.restored:
        print(f"Restored uncommitted changes: {', '.join(result.restored)}.")
    if result.saved_branch:
        print(f"Saved in {result.saved_branch}: {', '.join(result.saved_paths)}.")
    branch = result.port_branch
    print(f"The branch {branch} still exists; `git branch -D {branch}` deletes it.")
    return 0


def _confirmation(yes: bool) -> Callable[[str], None]:
    """Return a function that asks the user to confirm a step, and raises PortError for a no.

    With `yes`, the function only prints the step.
    """

    def confirm(step: str) -> None:
        if yes:
            print(step)
            return
        if not sys.stdin.isatty():
            raise PortError(f"{step} There is no terminal to ask on; pass --yes to confirm.")
        if input(f"{step} Continue? [y/N] ").strip().lower() not in ("y", "yes"):
            raise PortError(
                "nothing was changed. To continue, start again and answer y, or pass --yes."
            )

    return confirm


def _timestamp() -> str:
    return _now().strftime("%Y%m%d_%H%M%S")


def _now() -> datetime:
    return datetime.now(UTC)
