"""Write files and folders atomically: after a crash they are complete or absent.

Each function writes to a hidden staging path next to the target, calls fsync, renames it with one
`os.replace`, and calls fsync on the parent folder. `remove_stale_staging` removes the staging files
of killed processes.

Permissions follow the umask, also for files of libraries that write private temporary files, such
as safetensors.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError, DiskFullError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a staging folder that becomes `path` if the `with` block succeeds.

    An existing folder is replaced. If the block fails, the staging folder is removed.
    """
    staging = create_staging(path)
    try:
        with full_disk_named(path):
            yield staging
        commit_staging(staging, path)
    except BaseException:  # also Ctrl-C: nobody else removes the folder
        shutil.rmtree(staging, ignore_errors=True)
        raise


def create_staging(path: Path) -> Path:
    """Create and return an empty staging folder for `path`.

    Several processes may write to it; then one of them calls `commit_staging`.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}.staging")
    with full_disk_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    return staging


def commit_staging(staging: Path, path: Path) -> None:
    """Flush a staging folder to the disk and rename it to `path`; replace an existing folder."""
    with full_disk_named(path):
        permissions = staging.stat().st_mode & 0o777  # of a new folder: what the umask allows
        for file in sorted(staging.rglob("*")):
            _set_permissions(file, permissions)
            fsync_path(file)
        fsync_path(staging)
        _swap_in(staging, path)
        fsync_path(path.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a staging file that becomes `path` if the `with` block succeeds."""
    # Threads, and processes of other machines, may have the same ID and write the same file.
    staging = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.staging")
    with full_disk_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            staging.touch()
            permissions = staging.stat().st_mode & 0o777
            staging.unlink(missing_ok=True)  # a block that writes nothing must fail
            yield staging
            _set_permissions(staging, permissions)
            fsync_path(staging)
            os.replace(staging, path)
        except BaseException:  # also Ctrl-C: nobody else removes the file
            staging.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Raise `DiskFullError` with the path if the disk is full; the system's error names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(folder for folder in path.absolute().parents if folder.exists())
        raise DiskFullError(
            f"{path} cannot be written: {error.strerror}; {shutil.disk_usage(existing).free:,} "
            "bytes are free on its disk. Free some space, then run the same command again to "
            "continue."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file atomically."""
    with atomic_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def check_writable(folder: Path, setting: str = "output_dir") -> None:
    """Create an output folder and check that files can be written there, before work begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{setting} is {str(folder)!r}, which cannot be written: {error.strerror or error}. "
            "Choose a folder that you may write to."
        ) from error


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link to a file, or copy it if the file system cannot."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def fsync_path(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_stale_staging(folder: Path, target: str | None = None) -> None:
    """Remove the temporary files and folders that killed writers left in `folder`.

    With `target`, only those for the file or folder of this name. If a writer was killed while it
    replaced a folder, the old folder is restored.
    """
    for leftover in sorted(folder.glob(".*.staging")):
        stem = leftover.name.removeprefix(".").removesuffix(".staging")
        name = stem.removesuffix(".old").rpartition(".")[0]
        if target not in (None, name):
            continue
        if stem.endswith(".old") and not (folder / name).exists():
            os.replace(leftover, folder / name)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _set_permissions(path: Path, allowed: int) -> None:
    """Give a file or folder the allowed permissions; only folders and programs are executable.

    Links are left alone, because a change would also apply to the file they share.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink > 1):
        return
    executable = stat.S_ISDIR(status.st_mode) or status.st_mode & stat.S_IXUSR
    special = stat.S_IMODE(status.st_mode) & ~0o777  # for example a folder's set-group-ID bit
    path.chmod(special | (allowed if executable else allowed & 0o666))


def _swap_in(staging: Path, path: Path) -> None:
    """Rename the staging folder to `path`.

    `os.replace` cannot replace a folder that is not empty, so the old one is renamed first.
    """
    if not path.exists():
        os.replace(staging, path)
        return
    old = path.with_name(f".{path.name}.{os.getpid()}.old.staging")
    os.replace(path, old)
    try:
        os.replace(staging, path)
    except OSError:
        os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)
