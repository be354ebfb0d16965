"""Files and folders that are whole or absent, whatever happens while they are written.

Everything is made under a hidden name beside its destination, flushed to the disk, and moved there
by one `os.replace`.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A staging folder that becomes `path` when the block ends well, and vanishes when it does not.

    A folder that is already there is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for file in sorted(staging.rglob("*")):
            fsync_path(file)
        fsync_path(staging)
        _swap_in(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync_path(path.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """The same for one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.staging")
    try:
        yield staging
        fsync_path(staging)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a small text file."""
    with atomic_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def fsync_path(path: Path) -> None:
    """Wait until the disk has it; an error here fails the write."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_stale_staging(folder: Path) -> None:
    """Remove what killed processes left behind; a folder that had stepped aside comes back."""
    for old in folder.glob(".*.old.staging"):
        name = old.name.removeprefix(".").removesuffix(".old.staging").rpartition(".")[0]
        if not (folder / name).exists():
            os.replace(old, folder / name)
    for leftover in folder.glob(".*.staging"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _swap_in(staging: Path, path: Path) -> None:
    """os.replace cannot put a folder over a full one: the old one steps aside first."""
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
