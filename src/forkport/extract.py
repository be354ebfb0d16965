"""Extract a fork's changes as numbered patches, each with its risk of conflicts with upstream."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport import ForkportError
from forkport.patches import (
    MANIFEST,
    Manifest,
    Patch,
    PatchFile,
    ValidationCommands,
    read_manifest,
    replace_folder,
    write_manifest,
)
from forkport.source_index import change_paths

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forkport.git import FileChange, Git
    from forkport.patches import Risk

HIGH_RISK_COMMITS, HIGH_RISK_LINES = 10, 200
"""If upstream changed a file in this many commits, or this many of its lines, since the common
ancestor with the fork, the patch of that file has a high risk of conflicts."""


@dataclass(frozen=True, slots=True)
class Churn:
    """Counts of upstream's commits and changed lines per file, since its ancestor with the fork.

    Keys are the paths of the files in that common ancestor.
    """

    commits: Counter[str]
    lines: Counter[str]


def extract(
    git: Git,
    branch: str,
    upstream: str,
    folder: Path,
    groups: Sequence[tuple[str, str]] = (),
    validation: ValidationCommands | None = None,
) -> Manifest:
    """Write the patch set to `folder`, replacing an older one but keeping its validation commands.

    `groups` are (name, pattern) pairs; each name becomes one patch of the files that match.
    """
    existing_validation = _read_validation(folder)
    head, tip = git.resolve_commit(branch), git.resolve_commit(upstream)
    base = git.merge_base(tip, head)
    changes = [c for c in git.diff_trees(base, head) if not _is_in_folder(git, folder, c)]
    if not changes:
        raise ForkportError(
            f"{branch} has no changes that {upstream} does not have. Name the fork's branch, and "
            "the upstream branch that it started from."
        )
    churn = count_churn(git, base, tip)
    sizes = _count_lines(git, base, head)
    with replace_folder(folder) as staging:
        patches = []
        for number, (title, members) in enumerate(group_changes(changes, groups).items(), start=1):
            name = f"{number:02d}-{_slug(title)}"
            content = patch_text(git, base, head, members)
            (staging / f"{name}.patch").write_bytes(content)
            files = tuple(_patch_file(member, sizes, churn) for member in members)
            risk, why = assess_risk(files)
            digest = hashlib.sha256(content).hexdigest()
            patches.append(
                Patch(name=name, title=title, files=files, risk=risk, why=why, sha256=digest)
            )
        manifest = Manifest(
            branch=branch,
            head=head,
            upstream=upstream,
            base=base,
            patches=tuple(patches),
            validation=validation or existing_validation,
        )
        write_manifest(staging, manifest)
    return manifest


def _read_validation(folder: Path) -> ValidationCommands:
    """Return the validation commands of the patch set in `folder`; none if it is empty or missing.

    Raises if the folder has other files but no patch set.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return ValidationCommands()
    if not (folder / MANIFEST).exists():
        raise ForkportError(
            f"{folder} exists and is not a patch set. Name another folder with --patches."
        )
    return read_manifest(folder).validation


def _is_in_folder(git: Git, folder: Path, change: FileChange) -> bool:
    """Return True for files of the patch set itself, which may be committed in the fork."""
    root, inside = git.folder.resolve(), folder.resolve()
    if not inside.is_relative_to(root):
        return False
    prefix = inside.relative_to(root).as_posix() + "/"
    return all(path.startswith(prefix) for path in change_paths(change))


def group_changes(
    changes: Sequence[FileChange], groups: Sequence[tuple[str, str]]
) -> dict[str, list[FileChange]]:
    """Group changes by the user's patterns, and the rest by folder. Keys are patch titles.

    Folders with changes of upstream's files come before folders with new files only.
    """
    named: dict[str, list[FileChange]] = {name: [] for name, _ in groups}
    folders: dict[str, list[FileChange]] = defaultdict(list)
    for change in changes:
        path = change_paths(change)[-1]
        for name, pattern in groups:
            if fnmatchcase(path, pattern) or path.startswith(f"{pattern.rstrip('/')}/"):
                named[name].append(change)
                break
        else:
            folders[str(PurePosixPath(path).parent)].append(change)
    empty = [name for name, members in named.items() if not members]
    if empty:
        raise ForkportError(
            f"--group {empty[0]} matches no changed file. The fork changes: "
            f"{', '.join(change_paths(change)[-1] for change in changes)}."
        )
    only_new = {f for f, members in folders.items() if all(c.status == "A" for c in members)}
    order = sorted(folders, key=lambda folder: (folder in only_new, folder))
    return named | {_title(f, folders[f]): folders[f] for f in order}


def _title(folder: str, members: Sequence[FileChange]) -> str:
    """Return the title of a patch: the path of its only file, or the folder of its files."""
    if len(members) == 1:
        return change_paths(members[0])[-1]
    return "root" if folder == "." else folder


def count_churn(git: Git, base: str, tip: str) -> Churn:
    """Count upstream's commits and changed lines for each file from `base` to `tip`.

    A renamed file is counted under its path in `base`.
    """
    raw = git.run(
        *("log", "--no-merges", "--reverse", "--topo-order", "--no-show-signature"),
        *("--no-ext-diff", "-M", "--numstat", "-z"),
        *("--format=%x01%H", f"{base}..{tip}"),
    ).decode(errors="surrogateescape")
    commits: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    base_paths: dict[str, str] = {}
    for block in raw.split("\x01")[1:]:
        fields = iter(block.split("\0")[1:])
        for field in fields:
            match = re.match(r"\n?(\d+|-)\t(\d+|-)\t(.*)", field, re.DOTALL)
            if match is None:
                continue
            insertions, deletions, path = match.groups()
            if not path:  # a rename: the old and the new path follow
                old, path = next(fields), next(fields)
                base_paths[path] = base_paths.get(old, old)
            base_path = base_paths.get(path, path)
            commits[base_path] += 1
            lines[base_path] += sum(int(n) for n in (insertions, deletions) if n != "-")
    return Churn(commits, lines)


def assess_risk(files: Sequence[PatchFile]) -> tuple[Risk, str]:
    """Return the risk that a patch conflicts with upstream, and the reason.

    It is high if upstream has changed one of the files a lot since the common ancestor.
    """
    worst = max(files, key=lambda file: (_is_high_churn(file), file.churn_lines, file.churn))
    if not worst.churn:
        is_new = all(file.status == "A" for file in files)
        return "low", "only new files" if is_new else "upstream left these files alone"
    why = f"{worst.path}: {worst.churn} upstream commits, {worst.churn_lines} lines"
    return "high" if _is_high_churn(worst) else "medium", why


def _is_high_churn(file: PatchFile) -> bool:
    return file.churn >= HIGH_RISK_COMMITS or file.churn_lines >= HIGH_RISK_LINES


def patch_text(git: Git, base: str, head: str, members: Sequence[FileChange]) -> bytes:
    """Return the patch of some files, including binary ones."""
    paths = [f":(literal,top){path}" for member in members for path in change_paths(member)]
    return git.run(
        *("diff-tree", "-r", "-p", "-M", "-l0", "--binary", "--full-index", "--no-color"),
        *("--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"),
        *(base, head, "--", *paths),
    )


def _count_lines(git: Git, base: str, head: str) -> dict[str, tuple[int, int]]:
    """Return (insertions, deletions) by new path. Binary files count as (0, 0)."""
    raw = git.run("diff-tree", "-r", "-M", "-l0", "--numstat", "-z", base, head)
    fields = iter(raw.decode(errors="surrogateescape").split("\0")[:-1])
    sizes = {}
    for field in fields:
        insertions, deletions, path = field.split("\t", 2)
        if not path:  # a rename: the old and the new path follow
            _, path = next(fields), next(fields)
        sizes[path] = (0, 0) if insertions == "-" else (int(insertions), int(deletions))
    return sizes


def _patch_file(change: FileChange, sizes: dict[str, tuple[int, int]], churn: Churn) -> PatchFile:
    paths = change_paths(change)
    insertions, deletions = sizes[paths[-1]]
    return PatchFile(
        path=paths[-1],
        status=change.status,
        insertions=insertions,
        deletions=deletions,
        churn=churn.commits[paths[0]],
        churn_lines=churn.lines[paths[0]],
    )


def _slug(title: str) -> str:
    stem = PurePosixPath(title).name.removesuffix(".py")
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "patch"
