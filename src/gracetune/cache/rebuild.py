"""A lost or damaged index, made again from the records in the shards: nothing that is whole is
encoded twice.

Entries that were deleted since, but whose bytes are still there, come back: a key says what its
entry was made of, so they are right, and `cache gc` takes them away again.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from gracetune.cache.index import CacheIndex, EntryRow, ShardRow, unwritable
from gracetune.cache.packing import ALIGN, aligned, checksum_at, find_record, read_record
from gracetune.cache.shards import OPEN, SEALED, find_file, map_file, room_of
from gracetune.errors import CacheError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gracetune.cache.packing import Bytes
    from gracetune.events.types import Event

_TOGETHER = 1024
"""Rows committed at once."""


class IndexInUse:
    """Held as long as a process has the index open; waits while it is made anew."""

    def __init__(self, shards: Path) -> None:
        self._descriptor: int | None = _open_folder(shards)
        with suppress(OSError):  # without locks, whoever makes it anew cannot know of us
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """The index may be made anew; a fork that closes its own changes nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


def renew_index(path: Path, shards: Path, marker: Path, tell: Callable[[Event], None]) -> None:
    """Make a damaged index anew, unless it is in use: what is put through the old one is lost."""
    descriptor = _open_folder(shards)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        restore_index(path, shards, marker, tell)
    except BlockingIOError as error:
        raise CacheError(
            f"The index of {path.parent} is damaged, and another process has it open. End that, "
            "then repair."
        ) from error
    except OSError as error:
        raise unwritable(path.parent, error.strerror or error) from error
    finally:
        os.close(descriptor)


def restore_index(
    path: Path, shards: Path, marker: Path, tell: Callable[[Event], None]
) -> int | None:
    """Make the index anew where it is gone and files are left; how many entries it has then.

    Whoever comes second waits for the first, by the marker's lock, and finds it there.
    """
    if path.exists() or not _files(shards):
        return None
    with _locked(marker):
        if path.exists():
            return None
        # What SQLite logged for the file that is gone must not be taken for the new one's.
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        made = path.with_name(f"{path.name}.new")
        made.unlink(missing_ok=True)
        index = CacheIndex(made)
        try:
            count = sum(_add_file(index, shards, name) for name in _files(shards))
        finally:
            index.close()
        os.replace(made, path)
    text = f"the index of {path.parent} was made again from its shards, {count} entries"
    tell(Notice(text, level="warning", fallback=True))
    return count


def _files(shards: Path) -> list[str]:
    """The names of files, whether they grow or are sealed."""
    return sorted({path.stem for path in shards.iterdir() if path.suffix in (OPEN, SEALED)})


def _add_file(index: CacheIndex, shards: Path, name: str) -> int:
    descriptor = find_file(shards, name)
    if descriptor is None:
        return 0
    try:
        data = map_file(descriptor).numpy()
    finally:
        os.close(descriptor)
    room = room_of(data)
    index.add_shard(ShardRow(name, room, room))
    rows, end = [*_rows(data, name, room)], room
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        end = max(end, some[-1].end)
        index.add(some, name, end)
    return len(rows)


def _rows(whole: Bytes, name: str, room: int) -> Iterator[EntryRow]:
    """Entries that are whole; a broken record costs its own entry alone."""
    at = find_record(whole, aligned(room))
    while at is not None:
        told = read_record(whole, at)
        if told is None:
            at = find_record(whole, at + ALIGN)
            continue
        row = EntryRow(
            0, told.key, name, told.begin, told.nbytes, told.tensors, told.checksum, told.about
        )
        fits = row.end <= len(whole)
        if fits and checksum_at(whole, row.begin, row.tensors) == row.checksum:
            yield row
        at = find_record(whole, aligned(row.end) if fits else row.begin)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
