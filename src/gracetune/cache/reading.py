"""Shards as readers see them: views of mapped files, or bytes read into memory that is given.

A mapped view costs nothing until it is touched, and then a page at a time. Reading into memory
costs one call an entry, whatever the page tables hold, and leaves the bytes in the CPU's cache,
where their checksum is nearly free.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from itertools import groupby
from typing import TYPE_CHECKING

from gracetune.cache.shards import find_file, map_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.index import Row
    from gracetune.cache.packing import Bytes


class Descriptor:
    """An open file, closed when its last user is gone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class OpenShards:
    """The most recently used files of a folder, open for reading; any thread."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, rows: Sequence[Row], rooms: Sequence[Bytes]) -> list[bool]:
        """All bytes of these entries; false where a file is gone or too short.

        What is in the page cache is read first, while the disk is at the rest, all of it at once.
        """
        files = [self._file(row.shard) for row in rows]
        done = [
            0 if file is None else _read_cached(file.number, room, row.begin)
            for row, room, file in zip(rows, rooms, files, strict=True)
        ]
        late = [
            row for row, room, count in zip(rows, rooms, done, strict=True) if count < len(room)
        ]
        if len(late) > 1:
            self.ask_disk(late)
        return [
            count == len(room)
            or (file is not None and _read_rest(file.number, room[count:], row.begin + count))
            for row, room, file, count in zip(rows, rooms, files, done, strict=True)
        ]

    def ask_disk(self, rows: Iterable[Row]) -> None:
        """Start reading these rows, all at once, instead of a page at a time when touched."""
        for shard, alike in groupby(sorted(rows, key=_place), key=lambda row: row.shard):
            file = self._file(shard)
            if file is not None:
                for row in alike:
                    os.posix_fadvise(file.number, row.begin, row.nbytes, os.POSIX_FADV_WILLNEED)

    def clear(self) -> None:
        """Close what nobody reads."""
        with self._lock:
            self._open.clear()

    def _file(self, shard: str) -> Descriptor | None:
        with self._lock:
            file = self._open.get(shard)
            if file is None:
                number = find_file(self._folder, shard)
                if number is None:
                    return None
                # Entries are read in any order: what lies beside one is not wanted next.
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
                file = self._open[shard] = Descriptor(number)
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end(shard)
            return file


class MappedShards:
    """The most recently used files of a folder, mapped; one thread at a time."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._maps: OrderedDict[str, Tensor] = OrderedDict()

    def data(self, row: Row) -> Tensor | None:
        """The bytes of the file that has this row; none where it is gone or too short."""
        data = self._maps.get(row.shard)
        if data is None or len(data) < row.end:
            descriptor = find_file(self._folder, row.shard)
            if descriptor is None:
                return None
            try:
                data = map_file(descriptor)
            finally:
                os.close(descriptor)
            self._maps[row.shard] = data
            if len(self._maps) > self._most:
                self._maps.popitem(last=False)
        self._maps.move_to_end(row.shard)
        return data if len(data) >= row.end else None

    def clear(self) -> None:
        """Unmap what no view needs."""
        self._maps.clear()


class Bits:
    """One bit a number: a million checked entries take 125 kB."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bytes) and bool(self._bytes[place] & 1 << (number & 7))

    def add(self, number: int) -> None:
        """Remember it."""
        place = number >> 3
        if place >= len(self._bytes):
            self._bytes.extend(bytes(place + 1 - len(self._bytes)))
        self._bytes[place] |= 1 << (number & 7)


def _read_cached(descriptor: int, room: Bytes, offset: int) -> int:
    """As many bytes as the page cache has, without waiting for the disk."""
    try:
        return os.preadv(descriptor, [room.data], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:  # a file system that always waits
            raise
        return 0


def _read_rest(descriptor: int, room: Bytes, offset: int) -> bool:
    while len(room):
        count = os.preadv(descriptor, [room.data], offset)
        if count == 0:
            return False
        room, offset = room[count:], offset + count
    return True


def _place(row: Row) -> tuple[str, int]:
    return row.shard, row.begin
