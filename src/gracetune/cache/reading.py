"""Shards as readers see them: views of mapped files, or bytes read into memory that is given.

A mapped view costs nothing until it is touched, and then a page at a time. Reading into memory
costs one call an entry, whatever the page tables hold, and leaves the bytes in the CPU's cache,
where their checksum is nearly free.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from itertools import groupby
from typing import TYPE_CHECKING

from gracetune.cache.direct import DirectQueue, Wanted
from gracetune.cache.packing import LARGE, PAGE
from gracetune.cache.resident import PageCacheResidency
from gracetune.cache.shards import find_file, map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.index import EntryRow
    from gracetune.cache.packing import Bytes

SLOW_S, SLOW_RATE = 0.02, 200e6
"""A batch that takes longer, at fewer bytes a second, comes from a disk that seeks or a network:
worth asking in advance."""


class Descriptor:
    """An open file, closed when its last user is gone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class OpenShards:
    """The most recently used files of a folder, open for reading; any thread."""

    def __init__(
        self, folder: Path, most: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._folder = folder
        self._most = most
        self._open: OrderedDict[tuple[str, bool], Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._residency = PageCacheResidency()
        self._queue = DirectQueue()
        self._clock = clock
        self.is_slow = False
        """Whether the last entries that had to come from the disk took their time."""
        self.no_direct = ""
        """Why files are not read past the page cache; empty where they are, or were not yet."""

    def read(
        self,
        rows: Sequence[EntryRow],
        rooms: Sequence[Bytes],
        is_whole: Callable[[EntryRow, Bytes], bool],
    ) -> list[bool | None]:
        """Have these entries in their rooms, and whether each is whole; none where a file is gone
        or too short.

        What has to come from the disk is written by it to where it belongs, as far as that is whole
        pages: the kernel then keeps no copy of it and makes none, at a third of the CPU's time.
        Those that came are looked at while others are on their way.
        """
        pairs = [*zip(rows, rooms, strict=True)]
        late = [place for place, row in enumerate(rows) if not self._is_cached(row)]
        direct = [place for place in late if _is_pages(*pairs[place])]
        began = self._clock()
        coming = dict(zip(direct, self._begin([pairs[place] for place in direct]), strict=False))
        self.ask_disk([rows[place] for place in late if place not in coming])
        found: list[bool | None] = []
        try:
            for place, (row, room) in enumerate(pairs):
                came = self._came(coming.pop(place, 0), row) or self._read_through(row, room)
                found.append(is_whole(row, room) if came else None)
        finally:
            self._queue.settle(coming.values())
        if direct:
            nbytes = sum(rows[place].nbytes for place in direct)
            self.is_slow = self._clock() - began > max(SLOW_S, nbytes / SLOW_RATE)
        return found

    def hold(self, rows: Iterable[EntryRow]) -> bool:
        """Whether all of these are in the page cache: copying them from a mapped file takes half
        the time of reading them."""
        return all(self._is_cached(row) for row in rows)

    def ask_disk(self, rows: Iterable[EntryRow]) -> None:
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
        self._queue.close()

    def _is_cached(self, row: EntryRow) -> bool:
        file = self._file(row.shard)
        return file is None or self._residency.holds(file.number, row.begin, row.nbytes)

    def _read_through(self, row: EntryRow, room: Bytes) -> bool:
        """By way of the page cache."""
        file, done = self._file(row.shard), 0
        while file is not None and done < row.nbytes:
            count = os.preadv(file.number, [room[done : row.nbytes].data], row.begin + done)
            if count == 0:
                return False
            done += count
        return file is not None

    def _begin(self, pairs: Sequence[tuple[EntryRow, Bytes]]) -> list[int]:
        """Ask the disk for all of them at once; a ticket for each, no tickets where it cannot be
        asked so."""
        files = [self._file(row.shard, direct=True) for row, _ in pairs]
        wanted = [
            Wanted(file.number, row.begin, room)
            for file, (row, room) in zip(files, pairs, strict=True)
            if file is not None
        ]
        if len(wanted) < len(pairs):  # refused; or one is gone, which shows when it is read
            return []
        tickets = self._queue.begin(wanted)
        if tickets is None:
            self.no_direct = f"the kernel has no queue for direct reads ({self._queue.refusal})"
        return tickets or []

    def _came(self, ticket: int, row: EntryRow) -> bool:
        """Whether an entry that was asked for is there."""
        try:
            return ticket > 0 and self._queue.wait(ticket) >= row.nbytes
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self.no_direct = "a disk cannot write to the memory that is given"
            return False

    def _file(self, shard: str, direct: bool = False) -> Descriptor | None:
        if direct and self.no_direct:
            return None
        with self._lock:
            file = self._open.get((shard, direct))
            if file is None:
                number = self._opened(shard, direct)
                if number is None:
                    return None
                file = self._open[shard, direct] = Descriptor(number)
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end((shard, direct))
            return file

    def _opened(self, shard: str, direct: bool) -> int | None:
        try:
            number = find_file(self._folder, shard, os.O_DIRECT if direct else 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.no_direct = f"{self._folder} is on a file system that takes no direct reads"
            return None
        if number is not None and not direct:
            # Entries are read in any order: what lies beside one is not wanted next.
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
        return number


class MappedShards:
    """The most recently used files of a folder, mapped; one thread at a time."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._maps: OrderedDict[str, Tensor] = OrderedDict()

    def data(self, row: EntryRow) -> Tensor | None:
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


def _is_pages(row: EntryRow, room: Bytes) -> bool:
    """Whether a disk can write an entry to its room by itself."""
    if room.nbytes < LARGE or room.nbytes % PAGE:
        return False
    return row.begin % PAGE == 0 and room.ctypes.data % PAGE == 0


def _place(row: EntryRow) -> tuple[str, int]:
    return row.shard, row.begin
