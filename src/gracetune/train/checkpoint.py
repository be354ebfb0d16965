"""Write and read checkpoints: a folder of safetensors files with a JSON manifest.

    checkpoints/step-000123/
        weights.safetensors  optimizer.safetensors  ema.safetensors  generators-0.safetensors ...
        manifest.json        progress, the run's identity, and a digest of every file

Crash safety: the files are written to a staging folder, synced to disk, and renamed to their place
in one operation. A checkpoint therefore either exists completely or not at all. The manifest is
written last and removed first, and only folders with a manifest count as checkpoints. Every file is
compared with its digest when it is read.
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

from gracetune.atomic_files import atomic_folder, remove_stale_staging
from gracetune.errors import CheckpointError
from gracetune.train.step import TrainProgress
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

CHECKPOINT_FOLDER = "checkpoints"
"""Name of the folder with all checkpoints, inside the output folder."""
FORMAT = 1
MANIFEST = "manifest.json"
SET_ASIDE = "set-aside"
SPARE_BYTES = 1 << 20
"""Disk space for file headers and the manifest, in addition to the tensors."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a checkpoint."""

    progress: TrainProgress
    identity: Mapping[str, object]
    """Settings and digests that a resumed run must share; see `run_identity.py`."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Tensors by file name without suffix: `weights`, `optimizer`, `ema`, and the RNG states of
    each rank, `generators-0`, ..."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The path, size and writing time of a new checkpoint."""

    path: Path
    nbytes: int
    seconds: float
    """Seconds that writing took."""


def save_snapshot(folder: Path, snapshot: Snapshot, keep: int) -> SavedCheckpoint:
    """Write a checkpoint, then delete older ones so that `keep` are left."""
    started_at = time.monotonic()
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
            f"the checkpoint {path} cannot be written: {error}. {_newest_checkpoint(folder)} Free "
            "some disk space and run the same command again to continue."
        ) from error
    others = [old for old in complete_checkpoints(folder) if old != path]
    for old in others[: max(0, len(others) - keep + 1)]:
        (old / MANIFEST).unlink()  # first, so that a half-deleted folder is no checkpoint
        shutil.rmtree(old)
    return SavedCheckpoint(path, nbytes, time.monotonic() - started_at)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints, oldest first.

    Folders that are not named `step-<number>` are the user's own copies and are left out.
    """
    found = (manifest.parent for manifest in folder.glob(f"step-*/{MANIFEST}"))
    named = [path for path in found if path.name.removeprefix("step-").isdecimal()]
    return sorted(named, key=_step_of)


def load_snapshot(path: Path) -> Snapshot:
    """Read a checkpoint and compare each file with its digest in the manifest."""
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST}. Name a folder such as "
            f"<output_dir>/{CHECKPOINT_FOLDER}/step-000100."
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest['format']}, but this version of gracetune "
                f"reads format {FORMAT}. Use the version that wrote it."
            )
        tensors = {
            name.removesuffix(".safetensors"): _read_file(path / name, digest)
            for name, digest in manifest["files"].items()
        }
        return Snapshot(TrainProgress(**manifest["progress"]), manifest["identity"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}.") from error


def find_snapshot(folder: Path, resume: str, warn: Callable[[str], None]) -> Snapshot | None:
    """Load the checkpoint that `--resume auto|PATH|none` selects; None to start a new run.

    `auto` skips damaged checkpoints with a warning and loads the newest intact one. If all are
    damaged it raises instead of starting over, because a new run would replace the result.
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
                    f"{error} No other checkpoint in {folder} can be read. Restore one from a "
                    "backup, or choose another output_dir to start over."
                ) from error
            warn(f"{error} Resuming from the checkpoint before it.")
    return None


def set_aside_newer(folder: Path, step: int) -> list[Path]:
    """Move checkpoints of later steps to `set-aside/`, because the run resumes from `step`."""
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
        raise CheckpointError(f"{file} is damaged: its content does not match the manifest.")
    return load_file(file)


def _digest(file: Path) -> str:
    return blake3().update_mmap(file).hexdigest()


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE_BYTES:
        raise OSError(
            f"it needs {format_bytes(nbytes + SPARE_BYTES)}, but {format_bytes(free)} are free"
        )


def _newest_checkpoint(folder: Path) -> str:
    existing = complete_checkpoints(folder)
    if not existing:
        return "There is no earlier checkpoint."
    return f"The newest checkpoint is {existing[-1]}."
