"""Read and write a patch set: numbered patch files and the manifest that describes them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from forkport import ForkportError

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = "manifest.json"
MANIFEST_PAGE = "GH200_PATCH_MANIFEST.md"
Risk = Literal["low", "medium", "high"]
ValidationGroup = Literal["upstream", "ours", "combined"]
VALIDATION_GROUPS: tuple[ValidationGroup, ...] = ("upstream", "ours", "combined")


class _ManifestPart(BaseModel):
    """Base class of the parts of manifest.json: frozen, and unknown keys are errors.

    Field names are the keys of the file and must not change.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class PatchFile(_ManifestPart):
    """One file that a patch changes."""

    path: str
    status: str
    """Git's letter for the change: A, D, M, R or T."""
    insertions: int
    deletions: int
    churn: int
    """Number of upstream commits that changed this file since the common ancestor with the fork."""
    churn_lines: int
    """Number of lines of this file that upstream changed since the common ancestor."""


class Patch(_ManifestPart):
    """One numbered patch of a fork, and its risk of conflicts with upstream."""

    name: str
    """Number and slug, such as `01-trainer`. The file is called `01-trainer.patch`."""
    title: str
    files: tuple[PatchFile, ...]
    risk: Risk
    why: str
    """The reason for the risk of conflicts, such as many upstream commits to a file."""
    sha256: str
    """Digest of the patch file."""

    @property
    def file_name(self) -> str:
        """The name of the patch file in the patch folder."""
        return f"{self.name}.patch"


class ValidationCommands(_ManifestPart):
    """The commands that validate a port. Each is split into words; no shell expands it."""

    upstream: tuple[str, ...] = ()
    """Commands for a clean checkout of upstream, without the fork."""
    ours: tuple[str, ...] = ()
    """Commands for the result of the port that test what the fork adds."""
    combined: tuple[str, ...] = ()
    """Commands for the result of the port that test upstream and fork together."""

    def commands(self, group: ValidationGroup) -> tuple[str, ...]:
        """Return the commands of one group."""
        return {"upstream": self.upstream, "ours": self.ours, "combined": self.combined}[group]


class Manifest(_ManifestPart):
    """The contents of manifest.json: the patches of a fork, and the commits they come from."""

    version: Literal[1] = 1
    branch: str
    """The branch of the fork that the patches were extracted from."""
    head: str
    """The commit of the fork that the patches were extracted from."""
    upstream: str
    """The upstream ref as it was given, such as `origin/main`."""
    base: str
    """The common ancestor of fork and upstream. The patches apply to it exactly."""
    patches: tuple[Patch, ...]
    validation: ValidationCommands = ValidationCommands()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a patch folder and verify every patch file that it lists."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ForkportError(
            f"{folder} has no {MANIFEST}. Create the patches first: gracetune port extract."
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ForkportError(
            f"{path}: {where}: {first['msg']}. Fix it, or extract the patches again."
        ) from None
    for patch in manifest.patches:
        read_patch(folder, patch)
    return manifest


def read_patch(folder: Path, patch: Patch) -> bytes:
    """Return the content of a patch file, which must have the digest in the manifest."""
    path = folder / patch.file_name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ForkportError(
            f"{path} cannot be read: {error.strerror}. Extract the patches again."
        ) from None
    if hashlib.sha256(content).hexdigest() != patch.sha256:
        raise ForkportError(
            f"{path} was edited after it was extracted, so {MANIFEST} no longer describes it. "
            "Change the fork's branch instead, and extract the patches again."
        )
    return content


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest as JSON and as a Markdown page."""
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    write_text(folder / MANIFEST_PAGE, manifest_page(manifest))


def manifest_page(manifest: Manifest) -> str:
    """Format the manifest as a Markdown page."""
    lines = [
        "# Patch manifest",
        "",
        f"Changes of `{manifest.branch}` ({manifest.head[:10]}) relative to `{manifest.upstream}`, "
        f"since their common commit {manifest.base[:10]}. Written by `gracetune port extract`.",
        "",
        "| patch | files | insertions | deletions | risk | because |",
        "|---|---|---|---|---|---|",
    ]
    for patch in manifest.patches:
        insertions = sum(file.insertions for file in patch.files)
        deletions = sum(file.deletions for file in patch.files)
        size = f"{len(patch.files)} | {insertions} | {deletions}"
        lines.append(f"| {patch.name} | {size} | {patch.risk} | {patch.why} |")
    lines += ["", "| file | patch | status | insertions | deletions | upstream commits | lines |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| `{f.path}` | {patch.name} | {f.status} | {f.insertions} | {f.deletions} | {f.churn} "
        f"| {f.churn_lines} |"
        for patch in manifest.patches
        for f in patch.files
    ]
    return "\n".join(lines) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash it has either the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.staging")
    with staging.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield an empty staging folder that takes the place of `path` if the block succeeds.

    The old folder steps aside before the new one moves in, because a rename cannot replace a folder
    that has files. A patch file cut short by a crash is noticed later, by its digest.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        staging, old = Path(scratch, "new"), Path(scratch, "old")
        staging.mkdir()
        yield staging
        if path.exists():
            path.replace(old)
        try:
            staging.replace(path)
        except OSError:
            if old.exists():
                old.replace(path)
            raise
