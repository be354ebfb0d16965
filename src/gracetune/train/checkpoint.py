"""Checkpoints: safetensors and JSON, whole or absent, checked when they are read.

A checkpoint is a folder `step-000123` with one safetensors file a kind of state and a manifest that
is written last. The newest K stay.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gracetune.atomic_files import remove_stale_staging, atomic_folder
from gracetune.errors import CheckpointError
from gracetune.train.state import TrainProgress
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

FORMAT = 1
MANIFEST = "manifest.json"
SET_ASIDE = "set-aside"
SPARE_BYTES = 1 << 20
"""What a checkpoint may need beside its tensors."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a checkpoint holds."""

    progress: TrainProgress
    identity: Mapping[str, object]
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By kind: `weights`, `optimizer`, `ema`, `generators-0`, ..."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is on disk."""

    path: Path
    nbytes: int
    seconds: float


def save_snapshot(folder: Path, snapshot: Snapshot, keep: int) -> SavedCheckpoint:
    """Write a checkpoint, then drop all but the newest `keep`."""
    started = time.monotonic()
    path = folder / f"step-{snapshot.progress.step:06d}"
    nbytes = sum(t.nbytes for kind in snapshot.tensors.values() for t in kind.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_staging(folder)
        _check_space(folder, nbytes)
        with atomic_folder(path) as staging:
            _write(staging, snapshot)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be written: {error}. {_survivor(folder)}"
        ) from error
    others = [old for old in complete_checkpoints(folder) if old != path]
    for old in others[: max(0, len(others) - keep + 1)]:
        (old / MANIFEST).unlink()
        shutil.rmtree(old)
    return SavedCheckpoint(path, nbytes, time.monotonic() - started)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Every checkpoint that has its manifest, oldest first; other names are the user's copies."""
    found = (manifest.parent for manifest in folder.glob(f"step-*/{MANIFEST}"))
    named = [path for path in found if path.name.removeprefix("step-").isdecimal()]
    return sorted(named, key=_step_of)


def load_snapshot(path: Path) -> Snapshot:
    """Read a checkpoint, checking each file against the manifest."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}.")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}; this version reads {FORMAT}."
            )
        tensors = {
            name.removesuffix(".safetensors"): _read_file(path / name, digest)
            for name, digest in manifest["files"].items()
        }
        return Snapshot(TrainProgress(**manifest["progress"]), manifest["identity"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}") from error


def find_snapshot(folder: Path, resume: str, warn: Callable[[str], None]) -> Snapshot | None:
    """The snapshot that `--resume auto|PATH|none` asks for.

    `auto` passes over a damaged checkpoint for the one before it, and says so. Where all are
    damaged it does not begin anew, since the end of that would replace the result.
    """
    if resume == "none":
        return None
    if resume != "auto":
        return load_snapshot(Path(resume))
    existing = complete_checkpoints(folder)
    for path in reversed(existing):
        try:
            return load_snapshot(path)
        except CheckpointError as error:
            if path == existing[0]:
                raise CheckpointError(
                    f"{error} No other checkpoint in {folder} can be read. Bring one back, or "
                    "choose another output_dir to begin anew."
                ) from error
            warn(f"{error} Going back to the checkpoint before it.")
    return None


def set_aside_newer(folder: Path, step: int) -> list[Path]:
    """Move checkpoints past `step` out of the way: they belong to a branch that is left."""
    moved = []
    for path in complete_checkpoints(folder):
        if _step_of(path) > step:
            target = folder / SET_ASIDE / f"{path.name}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            moved.append(path.rename(target))
    return moved


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write(staging: Path, snapshot: Snapshot) -> None:
    files = {}
    for kind, tensors in snapshot.tensors.items():
        file = staging / f"{kind}.safetensors"
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, file)
        files[file.name] = _digest(file)
    manifest = {
        "format": FORMAT,
        "progress": asdict(snapshot.progress),
        "identity": dict(snapshot.identity),
        "files": files,
    }
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _read_file(file: Path, digest: str) -> dict[str, Tensor]:
    if _digest(file) != digest:
        raise CheckpointError(f"{file} is damaged: its content is not what the manifest says.")
    return load_file(file)


def _digest(file: Path) -> str:
    return blake3().update_mmap(file).hexdigest()


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise OSError(
            f"it needs {format_bytes(nbytes + SPARE_BYTES)}, {format_bytes(free)} are free"
        )


def _survivor(folder: Path) -> str:
    before = complete_checkpoints(folder)
    return f"The one before it is whole: {before[-1]}." if before else "There is none before it."
