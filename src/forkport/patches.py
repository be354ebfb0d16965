"""A patch set: numbered files, and a manifest of what they are and how they are validated."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gracetune.atomic_files import write_text
from gracetune.errors import PortError

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
MANIFEST_PAGE = "GH200_PATCH_MANIFEST.md"
Risk = Literal["low", "medium", "high"]
ValidationGroup = Literal["upstream", "ours", "combined"]
VALIDATION_GROUPS: tuple[ValidationGroup, ...] = ("upstream", "ours", "combined")


class _ManifestPart(BaseModel):
    """A part of the manifest: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PatchFile(_ManifestPart):
    """One file that a patch changes."""

    path: str
    status: str
    insertions: int
    deletions: int
    churn: int
    """Upstream commits since the base that changed this file."""
    churn_lines: int
    """Lines that they added and took away."""


class Patch(_ManifestPart):
    """One numbered patch."""

    name: str
    """Number and name, such as `01-trainer`; the file is this with `.patch`."""
    title: str
    files: tuple[PatchFile, ...]
    risk: Risk
    why: str
    """What the risk was concluded from."""
    sha256: str

    @property
    def file_name(self) -> str:
        """Its file in the folder."""
        return f"{self.name}.patch"


class ValidationCommands(_ManifestPart):
    """Commands, each one line of words; nothing expands them but the program that they name."""

    upstream: tuple[str, ...] = ()
    """Run on a clean copy of upstream, without the fork."""
    ours: tuple[str, ...] = ()
    """Run on the result: what the fork adds."""
    combined: tuple[str, ...] = ()
    """Run on the result: both at once."""

    def commands(self, group: ValidationGroup) -> tuple[str, ...]:
        """The commands of one group."""
        return {"upstream": self.upstream, "ours": self.ours, "combined": self.combined}[group]


class Manifest(_ManifestPart):
    """What was extracted, from where."""

    version: Literal[1] = 1
    branch: str
    head: str
    """The fork's commit."""
    upstream: str
    """The name that upstream had."""
    base: str
    """The commit that both have: patches apply to it exactly."""
    patches: tuple[Patch, ...]
    validation: ValidationCommands = ValidationCommands()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, with every patch that it names there and unchanged."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise PortError(
            f"{folder} has no {MANIFEST}; make the patches first: gracetune port extract."
        ) from None
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(map(str, found["loc"])) or "the file"
        raise PortError(f"{path}: {where}: {found['msg']}. Mend it, or extract again.") from None
    for patch in manifest.patches:
        read_patch(folder, patch)
    return manifest


def read_patch(folder: Path, patch: Patch) -> bytes:
    """The bytes of a patch, as they were when its line in the manifest was written."""
    path = folder / patch.file_name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PortError(f"{path} cannot be read: {error.strerror}; extract again.") from None
    if hashlib.sha256(content).hexdigest() != patch.sha256:
        raise PortError(
            f"{path} was changed after it was extracted, and its line in {MANIFEST} no longer says "
            "what it does. Change the fork's branch instead and extract again."
        )
    return content


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The manifest for machines, and the same for people."""
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    write_text(folder / MANIFEST_PAGE, manifest_page(manifest))


def manifest_page(manifest: Manifest) -> str:
    """The manifest as a page."""
    lines = [
        "# Patch manifest",
        "",
        f"The delta of `{manifest.branch}` ({manifest.head[:10]}) against `{manifest.upstream}`, "
        f"from their common commit {manifest.base[:10]}. Written by `gracetune port extract`.",
        "",
        "| patch | files | insertions | deletions | risk | because |",
        "|---|---|---|---|---|---|",
    ]
    for patch in manifest.patches:
        added = sum(file.insertions for file in patch.files)
        taken = sum(file.deletions for file in patch.files)
        size = f"{len(patch.files)} | {added} | {taken}"
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
