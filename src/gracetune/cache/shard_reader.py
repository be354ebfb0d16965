"""Shards as readers see them: views of mapped files, or bytes read into memory that is given.

A mapped view costs nothing until it is touched, and then a page at a time. Reading into memory
costs one call an entry, whatever the page tables hold, and leaves the bytes in the CPU's cache,
where their checksum is nearly free.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
import weakref
from collections import OrderedDict
from itertools import count, groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gracetune.cache.shard_format import LARGE_ENTRY_NBYTES, PAGE, open_shard, map_file
from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.cache.index import EntryRow
    from gracetune.cache.shard_format import Bytes


SLOW_S, SLOW_RATE = 0.02, 200e6
"""A batch that takes longer, at fewer bytes a second, comes from a disk that seeks or a network:
worth asking in advance."""


class FileDescriptor:
    """An open file, closed when its last user is gone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class ShardReader:
    """The most recently used files of a folder, open for reading; any thread."""

    def __init__(
        self, folder: Path, most: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._folder = folder
        self._most = most
        self._open: OrderedDict[tuple[str, bool], FileDescriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._residency = PageCacheResidency()
        self._queue = AioQueue()
        self._clock = clock
        self.is_slow_disk = False
        """Whether the last entries that had to come from the disk took their time."""
        self.direct_read_refusal = ""
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
        self.read_ahead([rows[place] for place in late if place not in coming])
        found: list[bool | None] = []
        try:
            for place, (row, room) in enumerate(pairs):
                came = self._came(coming.pop(place, 0), row) or self._read_through(row, room)
                found.append(is_whole(row, room) if came else None)
        finally:
            self._queue.drain(coming.values())
        if direct:
            nbytes = sum(rows[place].nbytes for place in direct)
            self.is_slow_disk = self._clock() - began > max(SLOW_S, nbytes / SLOW_RATE)
        return found

    def in_page_cache(self, rows: Iterable[EntryRow]) -> bool:
        """Whether all of these are in the page cache: copying them from a mapped file takes half
        the time of reading them."""
        return all(self._is_cached(row) for row in rows)

    def read_ahead(self, rows: Iterable[EntryRow]) -> None:
        """Start reading these rows, all at once, instead of a page at a time when touched."""
        for shard, alike in groupby(sorted(rows, key=_place), key=lambda row: row.shard):
            file = self._file(shard)
            if file is not None:
                for row in alike:
                    os.posix_fadvise(file.number, row.offset, row.nbytes, os.POSIX_FADV_WILLNEED)

    def clear(self) -> None:
        """Close what nobody reads."""
        with self._lock:
            self._open.clear()
        self._queue.close()

    def _is_cached(self, row: EntryRow) -> bool:
        file = self._file(row.shard)
        return file is None or self._residency.holds(file.number, row.offset, row.nbytes)

    def _read_through(self, row: EntryRow, room: Bytes) -> bool:
        """By way of the page cache."""
        file, done = self._file(row.shard), 0
        while file is not None and done < row.nbytes:
            count = os.preadv(file.number, [room[done : row.nbytes].data], row.offset + done)
            if count == 0:
                return False
            done += count
        return file is not None

    def _begin(self, pairs: Sequence[tuple[EntryRow, Bytes]]) -> list[int]:
        """Ask the disk for all of them at once; a ticket for each, no tickets where it cannot be
        asked so."""
        files = [self._file(row.shard, direct=True) for row, _ in pairs]
        wanted = [
            ReadRequest(file.number, row.offset, room)
            for file, (row, room) in zip(files, pairs, strict=True)
            if file is not None
        ]
        if len(wanted) < len(pairs):  # refused; or one is gone, which shows when it is read
            return []
        tickets = self._queue.submit(wanted)
        if tickets is None:
            self.direct_read_refusal = f"the kernel has no queue for direct reads ({self._queue.refusal})"
        return tickets or []

    def _came(self, ticket: int, row: EntryRow) -> bool:
        """Whether an entry that was asked for is there."""
        try:
            return ticket > 0 and self._queue.wait(ticket) >= row.nbytes
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self.direct_read_refusal = "a disk cannot write to the memory that is given"
            return False

    def _file(self, shard: str, direct: bool = False) -> FileDescriptor | None:
        if direct and self.direct_read_refusal:
            return None
        with self._lock:
            file = self._open.get((shard, direct))
            if file is None:
                number = self._opened(shard, direct)
                if number is None:
                    return None
                file = self._open[shard, direct] = FileDescriptor(number)
                if len(self._open) > self._most:
                    self._open.popitem(last=False)
            self._open.move_to_end((shard, direct))
            return file

    def _opened(self, shard: str, direct: bool) -> int | None:
        try:
            number = open_shard(self._folder, shard, os.O_DIRECT if direct else 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.direct_read_refusal = f"{self._folder} is on a file system that takes no direct reads"
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
            descriptor = open_shard(self._folder, row.shard)
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


class Bitset:
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
    if room.nbytes < LARGE_ENTRY_NBYTES or room.nbytes % PAGE:
        return False
    return row.offset % PAGE == 0 and room.ctypes.data % PAGE == 0


def _place(row: EntryRow) -> tuple[str, int]:
    return row.shard, row.offset


# ------------------------------------------------------------------------------------------
# Reads past the page cache, many at once and without threads: the kernel's queue (Linux AIO).
#
# A disk is as fast as its queue is long, and a thread that waits for each read takes more of the
# CPU's time than the read does. Here a batch is one call to ask for it and one to wait.


DEPTH = 128
"""Reads that the kernel has at once; more wait here."""
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""The numbers of io_setup, io_destroy, io_getevents and io_submit."""
_REQUEST = np.dtype(
    [
        ("ticket", "u8"),
        ("key_and_flags", "u8"),
        ("opcode_and_priority", "u4"),
        ("descriptor", "u4"),
        ("address", "u8"),
        ("nbytes", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags_and_event", "u8"),
    ]
)
"""`struct iocb`; all that is left at zero asks for a plain read."""
_EVENT = np.dtype([("ticket", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
"""`struct io_event`."""


class ReadRequest(NamedTuple):
    """So many bytes of an open file, for this memory: both and the offset in whole pages."""

    descriptor: int
    offset: int
    room: Bytes


class AioQueue:
    """Reads that were begun, and what became of them; any thread."""

    def __init__(self, machine: str = os.uname().machine) -> None:
        self._numbers = _CALLS.get(machine)
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(0)
        self._tickets = count(1)
        self._begun: dict[int, Bytes] = {}
        """Memory that the disk writes to lives until it has."""
        self._done: dict[int, int] = {}
        self._state, self._reaping = threading.Lock(), threading.Lock()
        self.refusal = "" if self._numbers else f"none is known for {machine}"
        """Why the kernel has no queue for us; empty where it has, or was not asked."""

    def submit(self, wanted: Sequence[ReadRequest]) -> list[int] | None:
        """Ask for all; a ticket for each. None where the kernel has no queue for us."""
        requests = np.zeros(len(wanted), _REQUEST)
        requests["ticket"] = tickets = [next(self._tickets) for _ in wanted]
        requests["descriptor"] = [one.descriptor for one in wanted]
        requests["address"] = [one.room.ctypes.data for one in wanted]
        requests["nbytes"] = [one.room.nbytes for one in wanted]
        requests["offset"] = [one.offset for one in wanted]
        size = _REQUEST.itemsize
        places = np.arange(len(wanted), dtype=np.uint64) * size + requests.ctypes.data
        asked = 0
        try:
            while asked < len(wanted):
                with self._state:
                    if not self._is_open():
                        return None
                    taken = self._submit(places[asked:])
                    for place in range(asked, asked + taken):
                        self._begun[tickets[place]] = wanted[place].room
                asked += taken
                if not taken:
                    self._reap()
        except OSError:
            self.drain(tickets[:asked])
            raise
        return tickets

    def wait(self, ticket: int) -> int:
        """How many bytes came, once all that will come have."""
        while ticket not in self._done:
            assert ticket in self._begun or ticket in self._done, f"no read {ticket}"
            self._reap(ticket)
        result = self._done.pop(ticket)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def drain(self, tickets: Iterable[int]) -> None:
        """Wait until the disk writes nothing more for these, whatever became of them."""
        for ticket in tickets:
            while ticket in self._begun:
                self._reap(ticket)
            self._done.pop(ticket, None)

    def close(self) -> None:
        """Give the queue back when everything has come; who asks again gets another."""
        while self._begun:
            self._reap()
        with self._state:
            if self._context.value and not self._begun:
                self._release()
                self._context = ctypes.c_ulong(0)

    def _is_open(self) -> bool:
        """Whether there is a queue, and one is made where it was not asked for yet."""
        if self._context.value or self._numbers is None or self.refusal:
            return bool(self._context.value)
        setup, destroy, *_ = self._numbers
        context = ctypes.c_ulong(0)
        if self._call(setup, DEPTH, ctypes.byref(context)):
            self.refusal = os.strerror(ctypes.get_errno())
            return False
        self._context = context
        self._release = weakref.finalize(
            self, _destroy, self._call, destroy, context.value, os.getpid()
        )
        self._release.atexit = False
        return True

    def _submit(self, places: NDArray[np.uint64]) -> int:
        """How many the kernel took: none while it has as many as it may have."""
        assert self._numbers is not None
        submit, pointer = self._numbers[3], ctypes.c_void_p(places.ctypes.data)
        taken: int = self._call(submit, self._context, ctypes.c_long(len(places)), pointer)
        if taken < 0 and ctypes.get_errno() != errno.EAGAIN:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return max(0, taken)

    def _reap(self, ticket: int = 0) -> None:
        """Wait until something has come, unless nothing is on its way or this one is there."""
        with self._reaping:
            if not self._begun or ticket in self._done:
                return
            assert self._numbers is not None
            get, events = self._numbers[2], np.zeros(DEPTH, _EVENT)
            pointer, most = ctypes.c_void_p(events.ctypes.data), ctypes.c_long(DEPTH)
            came = self._call(get, self._context, ctypes.c_long(1), most, pointer, None)
            if came < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with self._state:
                for event in events[: max(0, came)].tolist():
                    self._done[event[0]] = event[2]
                    del self._begun[event[0]]


def _destroy(call: Callable[..., int], number: int, context: int, process: int) -> None:
    """A forked child may have a queue of its own by the same name."""
    if os.getpid() == process:
        call(number, ctypes.c_ulong(context))


# ------------------------------------------------------------------------------------------
# How much of a file the kernel's page cache holds, without having it read anything.


_CACHESTAT = 451
"""The number of this system call on every architecture; Linux has it from 6.5 on."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """In pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class PageCacheResidency:
    """Asks the kernel; one that has no answer is not asked again."""

    def __init__(self) -> None:
        self._ask = ctypes.CDLL(None, use_errno=True).syscall
        self.is_known = True

    def holds(self, descriptor: int, offset: int, nbytes: int) -> bool:
        """Whether all of these bytes are in memory; no where the kernel cannot tell."""
        if not nbytes:
            return True
        if not self.is_known:
            return False
        counts = _Counts()
        asked = _Range(offset, nbytes)
        if self._ask(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(counts), 0):
            code = ctypes.get_errno()
            if code not in _UNKNOWN:
                raise CacheError(f"The page cache cannot be asked: {os.strerror(code)}.")
            self.is_known = False
            return False
        first, last = offset // _PAGE, (offset + nbytes - 1) // _PAGE
        return int(counts.cached) > last - first
