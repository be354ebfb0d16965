"""Write and read checkpoints: a folder of safetensors files with a JSON manifest.

    checkpoints/step-000123/
        weights.safetensors  optimizer.safetensors  ema.safetensors  generators-0.safetensors ...
        adapter/             the adapter as the run exports it at its end, for other tools
        manifest.json        progress, the run's identity, digests of all files, and a checksum
    adapters/step-000123/    the files of the checkpoint's `adapter`, which outlive the checkpoint

If ranks have parts of the weights (FSDP2, HSDP), each writes its own files instead, such as
`weights-00001-of-00004.safetensors`; `distributed/shard_files.py` has their format. Any number of
ranks, in any layout, can resume from either kind. `checkpoint_writer.py` decides which rank writes
what, and when.

Crash safety: the files are written to a staging folder, synced to disk, and renamed to their place
in one operation. A checkpoint therefore either exists completely or not at all. The manifest is
written last and removed first, and only folders with a manifest count as checkpoints.

Damage: the manifest has a digest of every file and a checksum of its own contents. Both are checked
when a checkpoint is read, and a run resumes from the newest checkpoint that is whole.

Adapters: the files in `adapters` are hard links to those in the checkpoints, so they take no space
of their own. On a file system without hard links, the folder is moved there when its checkpoint is
deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file

from gracetune.adapters.files.checkpoint_weights import CHECKPOINT_ADAPTER
from gracetune.atomic_files import (
    atomic_folder,
    commit_staging,
    create_staging,
    remove_stale_staging,
)
from gracetune.distributed.ranks import SINGLE
from gracetune.distributed.shard_files import (
    ShardedTensors,
    is_whole,
    shard_file_name,
    shard_file_names,
    shards_header,
    write_tensors,
)
from gracetune.errors import CheckpointError
from gracetune.train import preflight
from gracetune.train.step import TrainProgress
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from torch import Tensor

    from gracetune.distributed.ranks import RankGroup
    from gracetune.distributed.sharding import TensorShard

CHECKPOINT_FOLDER = preflight.CHECKPOINT_FOLDER
"""Name of the folder with all checkpoints, inside the output folder."""
ADAPTERS_FOLDER = "adapters"
"""Name of the folder with the adapters of all checkpoints, inside the output folder."""
FORMAT = 2
"""Version of the manifest. Format 1 had no checksum; its checkpoints can still be read."""
SHARDED_FORMAT = 3
"""Version of the manifest of a checkpoint whose ranks have written parts of the weights."""
FORMAT_1_ENTRIES = {"format", "progress", "identity", "files"}
REQUIRED_KINDS = ("weights", "optimizer", "generators-0")
"""Kinds of files that every checkpoint has; see `Snapshot.tensors`."""
REQUIRED_COUNTERS = ("step", "micro_batches", "consumed")
"""Counters that every checkpoint has. Those for two experts were added later."""
MANIFEST = preflight.MANIFEST
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
    each rank, `generators-0`, ... (of a context group, only of its first rank)"""
    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Entries of a file's safetensors header, by file name without suffix."""
    execution: Mapping[str, Any] = field(default_factory=dict)
    """Device, versions and plan; see `execution_record.py`. Empty in checkpoints of format 1."""
    files: Mapping[Path, str] = field(default_factory=dict)
    """Files that the tensors were read from, with their digests; empty for a new snapshot."""
    shards: Mapping[str, Mapping[str, TensorShard]] = field(default_factory=dict)
    """In a new snapshot of a sharded run: which part of each tensor this rank has, by kind and
    name. `tensors` has only these parts. Tensors without an entry are the same on all ranks."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks with micro-batches of their own in the run that saved the checkpoint."""
        return sum(kind.startswith("generators-") for kind in self.tensors)

    def check_unchanged(self, ranks: RankGroup = SINGLE) -> None:
        """Raise if a file has changed since it was read; every rank checks some of the files.

        The tensors are mapped from their files, so a change would also change the tensors. Hours
        may pass between loading a checkpoint and copying it to the model, while data are encoded.
        """
        changed = ""
        for file in _share(self.files, ranks):
            try:
                is_same = _digest(file) == self.files[file]
            except OSError:
                is_same = False
            if not is_same:
                changed = str(file)
        for name in ranks.gather(changed):
            if name:
                raise CheckpointError(
                    f"{name} has been damaged or removed since the run was started. Run the same "
                    "command again: it uses the newest checkpoint that is whole."
                )


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The path, size and writing time of a new checkpoint."""

    path: Path
    nbytes: int
    seconds: float
    """Seconds that writing took."""


def save_snapshot(
    folder: Path,
    snapshot: Snapshot,
    keep: int,
    export: Callable[[Path], object] | None = None,
    keep_adapters: int | Literal["all"] = "all",
) -> SavedCheckpoint:
    """Write a checkpoint, then delete older ones so that `keep` are left.

    `export` writes the adapter, in a format for other tools, to a folder inside the checkpoint. The
    folder `adapters`, next to `folder`, keeps the newest `keep_adapters` of them.
    """
    started_at = time.monotonic()
    path = checkpoint_path(folder, snapshot)
    nbytes = snapshot_nbytes(snapshot, export is not None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_staging(folder)
        _check_space(folder, nbytes)
        with atomic_folder(path) as staging:
            files = {}
            for kind, tensors in snapshot.tensors.items():
                file = staging / f"{kind}.safetensors"
                files[file.name] = write_tensors(file, tensors, snapshot.headers.get(kind))
            exported = {} if export is None else _export(staging, export)
            _write_manifest(staging, snapshot, files, exported)
    except (OSError, SafetensorError) as error:
        raise write_error(folder, path, error) from error
    _delete_old(folder, path, keep, keep_adapters, has_adapter=export is not None)
    return SavedCheckpoint(path, nbytes, time.monotonic() - started_at)


def checkpoint_path(folder: Path, snapshot: Snapshot) -> Path:
    """Return the path of a snapshot's checkpoint."""
    return folder / f"step-{snapshot.progress.step:06d}"


def snapshot_nbytes(snapshot: Snapshot, is_exported: bool) -> int:
    """Return the bytes that a snapshot's tensors take on disk, with its adapter if exported."""
    sizes = {kind: sum(t.nbytes for t in ts.values()) for kind, ts in snapshot.tensors.items()}
    return sum(sizes.values()) + (sizes["weights"] if is_exported else 0)


def write_error(folder: Path, path: Path, error: Exception | str) -> CheckpointError:
    """Return the error that a checkpoint cannot be written."""
    return CheckpointError(
        f"the checkpoint {path} cannot be written: {error}. {_newest_checkpoint(folder)} Free "
        "some disk space and run the same command again to continue."
    )


# Checkpoints that several ranks write
#
# The main rank calls `begin_shards`; each rank with weights of its own calls `write_shard`; when
# all have done so, the main rank calls `complete_shards`. Such a run has no adapter.


def begin_shards(folder: Path, path: Path, nbytes: int) -> Path:
    """Create and return the staging folder of a checkpoint that takes `nbytes` in all."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale_staging(folder)
    _check_space(folder, nbytes)
    return create_staging(path)


def write_shard(staging: Path, snapshot: Snapshot, shard: int, count: int) -> dict[str, str]:
    """Write this rank's part of a checkpoint, as shard number `shard` of `count`.

    Shard 0 also has what is the same on all ranks, and the RNG states. Returns the digests of the
    files, by name.
    """
    files = {}
    for kind, tensors in snapshot.tensors.items():
        own = snapshot.shards.get(kind)
        if own is None:
            if shard == 0:
                name = f"{kind}.safetensors"
                files[name] = write_tensors(staging / name, tensors, snapshot.headers.get(kind))
            continue
        parts = {n: part for n, part in own.items() if part.length and not is_whole(part)}
        whole = {n for n in tensors if n not in own or is_whole(own[n])} if shard == 0 else set()
        name = shard_file_name(kind, shard, count)
        files[name] = write_tensors(
            staging / name,
            {n: tensors[n] for n in tensors if n in parts or n in whole},
            {**snapshot.headers.get(kind, {}), **shards_header(parts)},
        )
    return files


def complete_shards(
    folder: Path,
    staging: Path,
    snapshot: Snapshot,
    written: Sequence[Mapping[str, str]],
    keep: int,
) -> Path:
    """Write the manifest of a checkpoint whose ranks have all written their parts; rename it.

    Then older checkpoints are deleted, so that `keep` are left. `written` has the digests of each
    rank's files.
    """
    path = checkpoint_path(folder, snapshot)
    files = {name: digest for part in written for name, digest in part.items()}
    shards = dict.fromkeys(snapshot.shards, len(written))
    for kind, count in shards.items():
        # Raises if a row is missing.
        ShardedTensors([staging / name for name in shard_file_names(kind, count)])
    _write_manifest(staging, snapshot, files, {}, shards)
    commit_staging(staging, path)
    _delete_old(folder, path, keep, "all", has_adapter=False)
    return path


def _export(staging: Path, export: Callable[[Path], object]) -> dict[str, str]:
    """Write the adapter; return the digests of its files."""
    export(staging / CHECKPOINT_ADAPTER)
    files = sorted((staging / CHECKPOINT_ADAPTER).iterdir())
    return {str(file.relative_to(staging)): _digest(file) for file in files}


def _write_manifest(
    staging: Path,
    snapshot: Snapshot,
    files: Mapping[str, str],
    exported: Mapping[str, str],
    shards: Mapping[str, int] | None = None,
) -> None:
    manifest: dict[str, object] = {
        "format": FORMAT if shards is None else SHARDED_FORMAT,
        "progress": asdict(snapshot.progress),
        "identity": dict(snapshot.identity),
        "execution": dict(snapshot.execution),
        "files": dict(files),
        "exported": dict(exported),
    }
    if shards is not None:
        manifest["shards"] = dict(shards)
    manifest["checksum"] = manifest_checksum(manifest)
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _delete_old(
    folder: Path, path: Path, keep: int, keep_adapters: int | Literal["all"], *, has_adapter: bool
) -> None:
    """Delete checkpoints other than `path` so that `keep` are left; keep their adapters."""
    adapters = folder.with_name(ADAPTERS_FOLDER)
    if has_adapter:
        _link_adapter(path, adapters)
    others = [old for old in complete_checkpoints(folder) if old != path]
    for old in others[: max(0, len(others) - keep + 1)]:
        _keep_adapter(old, adapters)  # first: a crash must not leave it in a half-deleted folder
        (old / MANIFEST).unlink()  # second, so that a half-deleted folder is no checkpoint
        shutil.rmtree(old)
    if keep_adapters != "all" and has_adapter:
        written = {file.name for file in (path / CHECKPOINT_ADAPTER).iterdir()}
        _delete_old_adapters(adapters, keep_adapters, written)


# Adapters of checkpoints


def _link_adapter(checkpoint: Path, adapters: Path) -> None:
    """Make hard links to a checkpoint's adapter in `adapters`.

    If that fails, for example because the file system has no hard links, the adapter is in the
    checkpoint, and `_keep_adapter` moves it when the checkpoint is deleted.
    """
    with suppress(OSError):
        adapters.mkdir(exist_ok=True)
        remove_stale_staging(adapters)
        with atomic_folder(adapters / checkpoint.name) as staging:
            for file in (checkpoint / CHECKPOINT_ADAPTER).iterdir():
                os.link(file, staging / file.name)


def _keep_adapter(checkpoint: Path, adapters: Path) -> None:
    """Move the adapter of a checkpoint that will be deleted to `adapters`, if it is not there.

    Files that a user has put next to it, such as a converted adapter, are moved as well.
    """
    exported, kept = checkpoint / CHECKPOINT_ADAPTER, adapters / checkpoint.name
    if exported.is_dir() and not kept.exists():
        adapters.mkdir(exist_ok=True)
        exported.rename(kept)
    elif exported.is_dir():
        for file in exported.iterdir():
            if not (kept / file.name).exists():
                file.rename(kept / file.name)


def _delete_old_adapters(adapters: Path, keep: int, written: Container[str]) -> None:
    """Delete old adapters, whose files have the names `written`.

    A folder in which a user has put other files, such as a converted adapter, is kept.
    """
    for old in _step_folders(adapters)[:-keep]:
        if any(file.name not in written for file in old.iterdir()):
            continue
        # Renamed first, so that a half-deleted folder is not taken for an adapter.
        shutil.rmtree(old.rename(adapters / f".{old.name}.{os.getpid()}.staging"))


def saved_adapters(folder: Path) -> dict[int, Path]:
    """Return the folders with the adapters of a run's checkpoints, by step, oldest first.

    `folder` is the output folder. An adapter is in `adapters`, or else in its checkpoint.
    """
    found = {
        _step_of(path): path / CHECKPOINT_ADAPTER
        for path in complete_checkpoints(folder / CHECKPOINT_FOLDER)
        if (path / CHECKPOINT_ADAPTER).is_dir()
    }
    found |= {_step_of(path): path for path in _step_folders(folder / ADAPTERS_FOLDER)}
    return dict(sorted(found.items()))


# Reading


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints, oldest first.

    Folders that are not named `step-<number>` are the user's own copies and are left out.
    """
    return [path for path in _step_folders(folder) if (path / MANIFEST).is_file()]


def load_snapshot(path: Path, ranks: RankGroup = SINGLE) -> Snapshot:
    """Read a checkpoint; compare the manifest with its checksum and each file with its digest.

    Each rank compares some of the files. If one is damaged, all ranks raise an error.
    """
    snapshot, error = None, None
    try:
        snapshot = _load_snapshot(path, ranks)
    except CheckpointError as found:
        error = found
    problems = [text for text in ranks.gather("" if error is None else str(error)) if text]
    if problems:
        raise error or CheckpointError(problems[0])
    assert snapshot is not None
    return snapshot


def _load_snapshot(path: Path, ranks: RankGroup) -> Snapshot:
    preflight.require_checkpoint(path)
    try:
        manifest = _read_manifest(path / MANIFEST)
        progress = _parse_progress(manifest["progress"])
        if _is_step_folder(path) and _step_of(path) != progress.step:
            raise ValueError(f"{MANIFEST} is of step {progress.step}")
        digests = {path / name: digest for name, digest in manifest["files"].items()}
        for file in _share(digests, ranks):
            _check_digest(file, digests[file])
        kinds = _files_by_kind(path, manifest)
        return Snapshot(
            progress,
            manifest["identity"],
            {kind: _open_tensors(files) for kind, files in kinds.items()},
            execution=manifest.get("execution", {}),
            files=digests,
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {path} is damaged: {error}.") from error


def load_tensors(path: Path, kind: str) -> Mapping[str, Tensor]:
    """Read the tensors of one kind, such as `weights`, and compare their files with the digests.

    The result is empty if the checkpoint has no such files.
    """
    try:
        manifest = _read_manifest(path / MANIFEST)
        files = _files_by_kind(path, manifest).get(kind, [])
        for file in files:
            _check_digest(file, manifest["files"][file.name])
        return _open_tensors(files) if files else {}
    except (OSError, SafetensorError, ValueError) as error:
        if not (path / MANIFEST).exists():
            raise CheckpointError(
                f"the checkpoint {path} was deleted meanwhile. A run that trains keeps the newest "
                "ones only (train.keep_checkpoints): try again."
            ) from error
        raise CheckpointError(
            f"the checkpoint {path} is damaged: {error}. Use another step."
        ) from error


def _files_by_kind(path: Path, manifest: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Return the files of each kind of tensors: one, or one for each shard."""
    shards = manifest.get("shards", {})
    sharded = {kind: shard_file_names(kind, count) for kind, count in shards.items()}
    parts = {name for names in sharded.values() for name in names}
    whole = {Path(name).stem: [path / name] for name in manifest["files"] if name not in parts}
    return whole | {kind: [path / name for name in names] for kind, names in sharded.items()}


def _share(files: Mapping[Path, str], ranks: RankGroup) -> list[Path]:
    """Return the files that this rank checks; the ranks together check all."""
    return sorted(files)[ranks.rank :: ranks.world_size]


def _check_digest(file: Path, digest: str) -> None:
    try:
        if _digest(file) != digest:
            raise ValueError(f"{file.name} does not match its digest in {MANIFEST}")
    except OSError as error:
        raise ValueError(f"{file.name} cannot be read ({error})") from error


def _open_tensors(files: Sequence[Path]) -> Mapping[str, Tensor]:
    """Map the tensors of a file, or of the files of several ranks."""
    try:
        is_whole = len(files) == 1 and "-of-" not in files[0].name
        return load_file(files[0]) if is_whole else ShardedTensors(files)
    except OSError as error:
        raise ValueError(f"{files[0].name} cannot be read ({error})") from error


def find_snapshot(
    folder: Path, resume: str, warn: Callable[[str], None], ranks: RankGroup = SINGLE
) -> Snapshot | None:
    """Load the checkpoint that `--resume auto|PATH|none` selects; None to start a new run.

    `auto` skips damaged checkpoints with a warning and loads the newest intact one. If all are
    damaged it raises instead of starting over, because a new run would replace the result. PATH is
    a folder, or the name of one in `folder`; no other checkpoint is used in its place. All ranks
    call this, and get the same result.
    """
    if resume == "none":
        return None
    if resume != "auto":
        path = folder / resume if (folder / resume).is_dir() else Path(resume)
        try:
            return load_snapshot(path, ranks)
        except CheckpointError as error:
            complete = complete_checkpoints(folder)
            others = [each.name for each in complete if each.resolve() != path.resolve()]
            fix = "Restore it from a backup, or start over in another output_dir."
            if others:
                fix = f"Resume from another one: --resume {others[-1]} is the newest."
            raise CheckpointError(f"{error} {fix}") from error
    complete = complete_checkpoints(folder)
    # Checkpoints are deleted oldest first and lose their manifest first. An old folder without a
    # manifest is therefore the rest of a deleted checkpoint, and a new one is a damaged checkpoint.
    candidates = [
        path
        for path in _step_folders(folder)
        if path in complete or not complete or _step_of(path) > _step_of(complete[-1])
    ]
    listed = ranks.gather([path.name for path in candidates])
    if any(names != listed[0] for names in listed):
        raise _different_checkpoints(listed)
    errors: list[CheckpointError] = []
    for path in reversed(candidates):
        try:
            found = load_snapshot(path, ranks)
        except CheckpointError as error:
            errors.append(error)
            continue
        for skipped in errors:
            warn(f"{skipped} Resuming from {path.name} instead.")
        return found
    if errors:
        raise CheckpointError(
            f"{' '.join(map(str, errors))} No other checkpoint in {folder} can be read. Restore "
            "one from a backup, or choose another output_dir to start over."
        )
    return None


def _different_checkpoints(listed: Sequence[Sequence[str]]) -> CheckpointError:
    newest = ", ".join(names[-1] if names else "none" for names in listed)
    return CheckpointError(
        f"ranks find different checkpoints to resume from: {newest}. output_dir must be one folder "
        "that all ranks can read. Name a checkpoint that is whole for each of them with "
        "--resume PATH."
    )


def set_aside_newer(folder: Path, step: int) -> list[Path]:
    """Move checkpoints or adapters of later steps to `set-aside/` in `folder`.

    The run resumes from `step`, and will reach these steps with other weights.
    """
    moved = []
    for path in _step_folders(folder):
        if _step_of(path) > step:
            target = folder / SET_ASIDE / f"{path.name}-{time.time_ns()}"
            target.parent.mkdir(exist_ok=True)
            moved.append(path.rename(target))
    return moved


def manifest_checksum(manifest: Mapping[str, object]) -> str:
    """Return the digest of everything in a manifest but its own checksum."""
    contents = {key: value for key, value in manifest.items() if key != "checksum"}
    return blake3(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _step_folders(folder: Path) -> list[Path]:
    return sorted(filter(_is_step_folder, folder.glob("step-*")), key=_step_of)


def _is_step_folder(path: Path) -> bool:
    return path.name.removeprefix("step-").isdecimal() and path.is_dir()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _read_manifest(file: Path) -> dict[str, Any]:
    """Parse a manifest and check its checksum, its format and that no entry is missing."""
    manifest = _parse_json_object(file)
    if manifest.get("format") == 1:
        # Format 1 cannot be checked any further than this. It had no other entries, so a manifest
        # with more of them is a newer one whose format was damaged.
        unknown = sorted(manifest.keys() - FORMAT_1_ENTRIES)
        if unknown:
            raise ValueError(f"{MANIFEST} has format 1, which has no entry {unknown[0]!r}")
    elif manifest.get("checksum") != manifest_checksum(manifest):
        raise ValueError(f"{MANIFEST} does not match its checksum")
    elif manifest["format"] not in (FORMAT, SHARDED_FORMAT):
        raise CheckpointError(
            f"{file.parent} has checkpoint format {manifest['format']}, but this version of "
            f"gracetune reads formats 1 to {SHARDED_FORMAT}. Use the version that wrote it."
        )
    for entry in ("progress", "identity", "files"):
        if not isinstance(manifest.get(entry), dict):
            raise ValueError(f"{MANIFEST} has no entry {entry!r}")
    _check_listed_files(manifest)
    return manifest


def _check_listed_files(manifest: Mapping[str, Any]) -> None:
    """Raise if a manifest does not list all files that its checkpoint must have."""
    is_sharded = manifest["format"] == SHARDED_FORMAT
    shards = manifest.get("shards") if is_sharded else {}
    if not isinstance(shards, dict) or not all(type(n) is int and n > 0 for n in shards.values()):
        raise ValueError(f"{MANIFEST} has shards = {shards!r}")
    for kind in dict.fromkeys((*REQUIRED_KINDS, *shards)):
        names = shard_file_names(kind, shards[kind]) if kind in shards else [f"{kind}.safetensors"]
        for name in names:
            if name not in manifest["files"]:
                raise ValueError(f"{MANIFEST} has no entry files.{name}")


def _parse_json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return found


def _parse_progress(saved: Mapping[str, object]) -> TrainProgress:
    known = {each.name for each in fields(TrainProgress)}
    counters: dict[str, int] = {}
    for name in (*REQUIRED_COUNTERS, *saved):
        value = saved.get(name)
        if name not in known or type(value) is not int or value < 0:
            raise ValueError(f"{MANIFEST} has progress.{name} = {value!r}")
        counters[name] = value
    return TrainProgress(**counters)


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
