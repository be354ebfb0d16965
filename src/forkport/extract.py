"""A branch's delta against upstream as a numbered patch set, each patch with its risk."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from forkport.patches import (
    MANIFEST,
    Manifest,
    Patch,
    PatchFile,
    ValidationCommands,
    read_manifest,
    write_manifest,
)
from forkport.source_index import change_paths
from gracetune.atomic_files import atomic_folder
from gracetune.errors import PortError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forkport.git import FileChange, Git
    from forkport.patches import Risk

HIGH_COMMITS, HIGH_LINES = 10, 200
"""From here on upstream works on a file all the time, or has rewritten it."""


@dataclass(frozen=True, slots=True)
class Churn:
    """What upstream did to the files of the base, by the path they had there."""

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
    """Write the patch set; what a manifest already there says of validation is kept."""
    kept = _validation_of(folder)
    head, tip = git.resolve_commit(branch), git.resolve_commit(upstream)
    base = git.merge_base(tip, head)
    changes = [c for c in git.diff_trees(base, head) if not _is_in_folder(git, folder, c)]
    if not changes:
        raise PortError(
            f"{branch} has nothing that {upstream} does not have; name the fork's branch and the "
            "upstream that it grew from."
        )
    churn = count_churn(git, base, tip)
    sizes = _count_lines(git, base, head)
    grouped = group_changes(changes, groups)
    with atomic_folder(folder) as staging:
        patches = []
        for number, (title, members) in enumerate(grouped.items(), start=1):
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
            validation=validation or kept,
        )
        write_manifest(staging, manifest)
    return manifest


def _validation_of(folder: Path) -> ValidationCommands:
    """A folder is replaced only if it is a patch set; its commands were written by hand."""
    if not folder.exists() or not any(folder.iterdir()):
        return ValidationCommands()
    if not (folder / MANIFEST).exists():
        raise PortError(
            f"{folder} is there and is no patch set; name another folder with --patches."
        )
    return read_manifest(folder).validation


def _is_in_folder(git: Git, folder: Path, change: FileChange) -> bool:
    """The patch set itself is no part of the delta, even where it was committed."""
    root, inside = git.folder.resolve(), folder.resolve()
    if not inside.is_relative_to(root):
        return False
    prefix = inside.relative_to(root).as_posix() + "/"
    return all(path.startswith(prefix) for path in change_paths(change))


def group_changes(
    changes: Sequence[FileChange], groups: Sequence[tuple[str, str]]
) -> dict[str, list[FileChange]]:
    """By the user's patterns first; else one patch a folder, those that change upstream first."""
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
        raise PortError(
            f"--group {empty[0]} matches no changed file. The fork changes: "
            f"{', '.join(change_paths(change)[-1] for change in changes)}."
        )
    only_new = {f for f, members in folders.items() if all(c.status == "A" for c in members)}
    order = sorted(folders, key=lambda folder: (folder in only_new, folder))
    return named | {_title(f, folders[f]): folders[f] for f in order}


def _title(folder: str, members: Sequence[FileChange]) -> str:
    """A lone file's name, or its folder's."""
    if len(members) == 1:
        return change_paths(members[0])[-1]
    return "root" if folder == "." else folder


def count_churn(git: Git, base: str, tip: str) -> Churn:
    """Commits and lines for each file that upstream changed since, followed through renames."""
    raw = git.run(
        *("log", "--no-merges", "--reverse", "--topo-order", "--no-show-signature"),
        *("--no-ext-diff", "-M", "--numstat", "-z"),
        *("--format=%x01%H", f"{base}..{tip}"),
    ).decode(errors="surrogateescape")
    commits: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    origin: dict[str, str] = {}
    for block in raw.split("\x01")[1:]:
        fields = iter(block.split("\0")[1:])
        for field in fields:
            match = re.match(r"\n?(\d+|-)\t(\d+|-)\t(.*)", field, re.DOTALL)
            if match is None:
                continue
            added, taken, path = match.groups()
            if not path:  # a rename: the old and the new path follow
                old, path = next(fields), next(fields)
                origin[path] = origin.get(old, old)
            first = origin.get(path, path)
            commits[first] += 1
            lines[first] += sum(int(number) for number in (added, taken) if number != "-")
    return Churn(commits, lines)


def assess_risk(files: Sequence[PatchFile]) -> tuple[Risk, str]:
    """Risk from what upstream did to the same files; the worst of them counts."""
    worst = max(files, key=lambda file: (_is_high_churn(file), file.churn_lines, file.churn))
    if not worst.churn:
        is_new = all(file.status == "A" for file in files)
        return "low", "only new files" if is_new else "upstream left these files alone"
    why = f"{worst.path}: {worst.churn} upstream commits, {worst.churn_lines} lines"
    return "high" if _is_high_churn(worst) else "medium", why


def _is_high_churn(file: PatchFile) -> bool:
    return file.churn >= HIGH_COMMITS or file.churn_lines >= HIGH_LINES


def patch_text(git: Git, base: str, head: str, members: Sequence[FileChange]) -> bytes:
    """The patch of some files, binary ones too."""
    paths = [f":(literal,top){path}" for member in members for path in change_paths(member)]
    return git.run(
        *("diff-tree", "-r", "-p", "-M", "-l0", "--binary", "--full-index", "--no-color"),
        *("--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/"),
        *(base, head, "--", *paths),
    )


def _count_lines(git: Git, base: str, head: str) -> dict[str, tuple[int, int]]:
    """Insertions and deletions by the new path; a binary file has none."""
    raw = git.run("diff-tree", "-r", "-M", "-l0", "--numstat", "-z", base, head)
    fields = iter(raw.decode(errors="surrogateescape").split("\0")[:-1])
    sizes = {}
    for field in fields:
        added, taken, path = field.split("\t", 2)
        if not path:
            _, path = next(fields), next(fields)
        sizes[path] = (0, 0) if added == "-" else (int(added), int(taken))
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
