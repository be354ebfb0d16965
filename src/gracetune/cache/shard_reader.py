"""Read entries from shards: as views of memory-mapped files, or into buffers of the caller.

A mapped view costs nothing until it is touched, and then a page fault per page. Reading into a
buffer costs one call per entry and leaves the bytes in the CPU's cache, where computing their
checksum is almost free. Large entries that are not in the kernel's page cache bypass it: Linux AIO
with O_DIRECT lets the disk write straight into the buffer.
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

from gracetune.cache.shard_format import LARGE_ENTRY_NBYTES, PAGE, map_file, open_shard
from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.cache.index import EntryRow
    from gracetune.cache.shard_format import Bytes


SLOW_S, SLOW_RATE = 0.02, 200e6
"""A disk is slow if a read takes more than SLOW_S seconds at less than SLOW_RATE bytes/s.

Hard disks and network storage are slow in this sense; reading ahead pays off there."""


class FileDescriptor:
    """A file descriptor that is closed when the object is garbage-collected."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class ShardReader:
    """Reads entries of shards into buffers and keeps recently used files open; thread-safe."""

    def __init__(
        self, folder: Path, max_open: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._folder = folder
        self._max_open = max_open
        self._open_files: OrderedDict[tuple[str, bool], FileDescriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._residency = PageCacheResidency()
        self._queue = AioQueue()
        self._clock = clock
        self.is_slow_disk = False
        """True if the last direct read from the disk was slow (`SLOW_S`, `SLOW_RATE`)."""
        self.direct_read_refusal = ""
        """Why direct reads (O_DIRECT) do not work; empty if they work or were not tried yet."""

    def read(
        self,
        rows: Sequence[EntryRow],
        buffers: Sequence[Bytes],
        is_intact: Callable[[EntryRow, Bytes], bool],
    ) -> list[bool | None]:
        """Read entries into buffers; return the result of `is_intact` for each.

        The result is None for an entry that cannot be read. Page-aligned entries that are not in
        the page cache are read directly (O_DIRECT), all at once. That needs a third of the CPU time
        of a read through the page cache, which would also keep a copy. `is_intact` checks the first
        entries while later ones are still being read.
        """
        pairs = [*zip(rows, buffers, strict=True)]
        uncached = [i for i, row in enumerate(rows) if not self._is_cached(row)]
        direct = [i for i in uncached if _can_read_directly(*pairs[i])]
        start = self._clock()
        tickets = dict(zip(direct, self._submit([pairs[i] for i in direct]), strict=False))
        self.read_ahead([rows[i] for i in uncached if i not in tickets])
        found: list[bool | None] = []
        try:
            for i, (row, buffer) in enumerate(pairs):
                is_read = self._wait(tickets.pop(i, 0), row) or self._read_cached(row, buffer)
                found.append(is_intact(row, buffer) if is_read else None)
        finally:
            self._queue.drain(tickets.values())
        if direct:
            nbytes = sum(rows[i].nbytes for i in direct)
            self.is_slow_disk = self._clock() - start > max(SLOW_S, nbytes / SLOW_RATE)
        return found

    def in_page_cache(self, rows: Iterable[EntryRow]) -> bool:
        """Return True if all entries are in the kernel's page cache.

        If so, copying them from a mapped file takes half the time of reading them.
        """
        return all(self._is_cached(row) for row in rows)

    def read_ahead(self, rows: Iterable[EntryRow]) -> None:
        """Ask the kernel to read entries into the page cache in the background."""
        for shard, group in groupby(sorted(rows, key=_position), key=lambda row: row.shard):
            file = self._file(shard)
            if file is not None:
                for row in group:
                    os.posix_fadvise(file.number, row.offset, row.nbytes, os.POSIX_FADV_WILLNEED)

    def clear(self) -> None:
        """Close all files as soon as no thread reads them any more."""
        with self._lock:
            self._open_files.clear()
        self._queue.close()

    def _is_cached(self, row: EntryRow) -> bool:
        file = self._file(row.shard)
        return file is None or self._residency.holds(file.number, row.offset, row.nbytes)

    def _read_cached(self, row: EntryRow, buffer: Bytes) -> bool:
        """Read an entry through the page cache; return False if its shard is gone or too short."""
        file, done = self._file(row.shard), 0
        while file is not None and done < row.nbytes:
            count = os.preadv(file.number, [buffer[done : row.nbytes].data], row.offset + done)
            if count == 0:
                return False
            done += count
        return file is not None

    def _submit(self, pairs: Sequence[tuple[EntryRow, Bytes]]) -> list[int]:
        """Start direct reads and return a number (ticket) for each, which `_wait` takes.

        Returns an empty list if direct reads do not work.
        """
        files = [self._file(row.shard, direct=True) for row, _ in pairs]
        requests = [
            ReadRequest(file.number, row.offset, buffer)
            for file, (row, buffer) in zip(files, pairs, strict=True)
            if file is not None
        ]
        if len(requests) < len(pairs):  # refused, or a shard is gone: `_read_cached` will tell
            return []
        tickets = self._queue.submit(requests)
        if tickets is None:
            refusal = f"the kernel has no queue for direct reads ({self._queue.refusal})"
            self.direct_read_refusal = refusal
        return tickets or []

    def _wait(self, ticket: int, row: EntryRow) -> bool:
        """Wait for a direct read; return False if it failed or was not started (`ticket` is 0)."""
        try:
            return ticket > 0 and self._queue.wait(ticket) >= row.nbytes
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self.direct_read_refusal = "the disk cannot write to this memory directly"
            return False

    def _file(self, shard: str, direct: bool = False) -> FileDescriptor | None:
        if direct and self.direct_read_refusal:
            return None
        with self._lock:
            file = self._open_files.get((shard, direct))
            if file is None:
                number = self._open(shard, direct)
                if number is None:
                    return None
                file = self._open_files[shard, direct] = FileDescriptor(number)
                if len(self._open_files) > self._max_open:
                    self._open_files.popitem(last=False)
            self._open_files.move_to_end((shard, direct))
            return file

    def _open(self, shard: str, direct: bool) -> int | None:
        try:
            number = open_shard(self._folder, shard, os.O_DIRECT if direct else 0)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            refusal = f"{self._folder} is on a file system without direct reads"
            self.direct_read_refusal = refusal
            return None
        if number is not None and not direct:
            # Entries are read in random order: the kernel's own read-ahead would be wasted.
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
        return number


class MappedShards:
    """Memory maps of the most recently used shards; used by one thread at a time."""

    def __init__(self, folder: Path, max_maps: int) -> None:
        self._folder = folder
        self._max_maps = max_maps
        self._maps: OrderedDict[str, Tensor] = OrderedDict()

    def data(self, row: EntryRow) -> Tensor | None:
        """Return all bytes of an entry's shard, mapped; None if the shard is gone or too short."""
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
            if len(self._maps) > self._max_maps:
                self._maps.popitem(last=False)
        self._maps.move_to_end(row.shard)
        return data if len(data) >= row.end else None

    def clear(self) -> None:
        """Drop all memory maps; each is unmapped once no tensor views it."""
        self._maps.clear()


class Bitset:
    """A set of small integers, one bit each: a million row ids take 125 kB."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __contains__(self, number: int) -> bool:
        index = number >> 3
        return index < len(self._bytes) and bool(self._bytes[index] & 1 << (number & 7))

    def add(self, number: int) -> None:
        """Add a number to the set."""
        index = number >> 3
        if index >= len(self._bytes):
            self._bytes.extend(bytes(index + 1 - len(self._bytes)))
        self._bytes[index] |= 1 << (number & 7)


def _can_read_directly(row: EntryRow, buffer: Bytes) -> bool:
    """Return True if offset, size and buffer are page-aligned, as O_DIRECT needs."""
    if buffer.nbytes < LARGE_ENTRY_NBYTES or buffer.nbytes % PAGE:
        return False
    return row.offset % PAGE == 0 and buffer.ctypes.data % PAGE == 0


def _position(row: EntryRow) -> tuple[str, int]:
    return row.shard, row.offset


# Direct reads through Linux AIO: a disk needs many requests at once to reach its speed, and a
# thread per request costs more CPU time than the read. A batch takes one call to submit and one to
# wait.

QUEUE_DEPTH = 128
"""Maximum number of direct reads in flight; `submit` waits while there are more."""
_SYSCALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""System call numbers of io_setup, io_destroy, io_getevents and io_submit, by architecture."""
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
"""Layout of the kernel's `struct iocb`, an AIO request; unused fields are 0 for a plain read."""
_EVENT = np.dtype([("ticket", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
"""Layout of the kernel's `struct io_event`, the result of an AIO request."""


class ReadRequest(NamedTuple):
    """A direct read from a file into a buffer; offset, size and buffer are page-aligned."""

    descriptor: int
    offset: int
    buffer: Bytes


class AioQueue:
    """A Linux AIO queue for direct reads; thread-safe."""

    def __init__(self, machine: str = os.uname().machine) -> None:
        self._syscall_numbers = _SYSCALLS.get(machine)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._context = ctypes.c_ulong(0)
        self._tickets = count(1)
        self._in_flight: dict[int, Bytes] = {}
        """Buffers of unfinished reads by ticket (number), kept alive until they are filled."""
        self._results: dict[int, int] = {}
        """Results of finished reads by ticket (number): bytes read, or a negative error code."""
        self._state_lock, self._reap_lock = threading.Lock(), threading.Lock()
        self.refusal = "" if self._syscall_numbers else f"unknown for {machine}"
        """Why the kernel refused to create an AIO queue; empty if it did not refuse so far."""

    def submit(self, requests: Sequence[ReadRequest]) -> list[int] | None:
        """Start reads and return a number (ticket) for each, which `wait` takes.

        Returns None if the kernel refuses an AIO queue.
        """
        blocks = np.zeros(len(requests), _REQUEST)
        blocks["ticket"] = tickets = [next(self._tickets) for _ in requests]
        blocks["descriptor"] = [request.descriptor for request in requests]
        blocks["address"] = [request.buffer.ctypes.data for request in requests]
        blocks["nbytes"] = [request.buffer.nbytes for request in requests]
        blocks["offset"] = [request.offset for request in requests]
        size = _REQUEST.itemsize
        addresses = np.arange(len(requests), dtype=np.uint64) * size + blocks.ctypes.data
        submitted = 0
        try:
            while submitted < len(requests):
                with self._state_lock:
                    if not self._is_open():
                        return None
                    taken = self._io_submit(addresses[submitted:])
                    for i in range(submitted, submitted + taken):
                        self._in_flight[tickets[i]] = requests[i].buffer
                submitted += taken
                if not taken:
                    self._reap()
        except OSError:
            self.drain(tickets[:submitted])
            raise
        return tickets

    def wait(self, ticket: int) -> int:
        """Wait for the read with this number, and return how many bytes it read.

        Raises OSError if the read failed.
        """
        while ticket not in self._results:
            is_known = ticket in self._in_flight or ticket in self._results
            assert is_known, f"there is no read {ticket}"
            self._reap(ticket)
        result = self._results.pop(ticket)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def drain(self, tickets: Iterable[int]) -> None:
        """Wait until these reads are finished, and discard their results."""
        for ticket in tickets:
            while ticket in self._in_flight:
                self._reap(ticket)
            self._results.pop(ticket, None)

    def close(self) -> None:
        """Wait for all reads and destroy the AIO queue; `submit` creates a new one."""
        while self._in_flight:
            self._reap()
        with self._state_lock:
            if self._context.value and not self._in_flight:
                self._release()
                self._context = ctypes.c_ulong(0)

    def _is_open(self) -> bool:
        """Create the AIO queue on the first call; return False if the kernel refuses it."""
        if self._context.value or self._syscall_numbers is None or self.refusal:
            return bool(self._context.value)
        setup, destroy, *_ = self._syscall_numbers
        context = ctypes.c_ulong(0)
        if self._syscall(setup, QUEUE_DEPTH, ctypes.byref(context)):
            self.refusal = os.strerror(ctypes.get_errno())
            return False
        self._context = context
        self._release = weakref.finalize(
            self, _destroy_queue, self._syscall, destroy, context.value, os.getpid()
        )
        self._release.atexit = False
        return True

    def _io_submit(self, addresses: NDArray[np.uint64]) -> int:
        """Submit requests and return how many the kernel accepted; 0 if its queue is full."""
        assert self._syscall_numbers is not None
        submit, pointer = self._syscall_numbers[3], ctypes.c_void_p(addresses.ctypes.data)
        taken: int = self._syscall(submit, self._context, ctypes.c_long(len(addresses)), pointer)
        if taken < 0 and ctypes.get_errno() != errno.EAGAIN:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return max(0, taken)

    def _reap(self, ticket: int = 0) -> None:
        """Wait until at least one read finishes, and move all finished reads to `_results`.

        Returns at once if no read is in flight, or if the read `ticket` is finished already.
        """
        with self._reap_lock:
            if not self._in_flight or ticket in self._results:
                return
            assert self._syscall_numbers is not None
            get, events = self._syscall_numbers[2], np.zeros(QUEUE_DEPTH, _EVENT)
            pointer, most = ctypes.c_void_p(events.ctypes.data), ctypes.c_long(QUEUE_DEPTH)
            ended = self._syscall(get, self._context, ctypes.c_long(1), most, pointer, None)
            if ended < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            with self._state_lock:
                for event in events[: max(0, ended)].tolist():
                    self._results[event[0]] = event[2]
                    del self._in_flight[event[0]]


def _destroy_queue(syscall: Callable[..., int], number: int, context: int, process: int) -> None:
    """Destroy an AIO queue, except in a forked child: the queue belongs to the parent."""
    if os.getpid() == process:
        syscall(number, ctypes.c_ulong(context))


# Contents of the page cache, through the cachestat system call (Linux 6.5 and newer).

_CACHESTAT = 451
"""Number of the cachestat system call, the same on every architecture."""
_KERNEL_PAGE = os.sysconf("SC_PAGE_SIZE")
_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CachestatCounts(ctypes.Structure):
    """Result of the cachestat system call: numbers of pages."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class PageCacheResidency:
    """Asks the kernel whether bytes of a file are in the page cache (cachestat)."""

    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self.is_supported = True
        """False once the kernel has refused the cachestat system call."""

    def holds(self, descriptor: int, offset: int, nbytes: int) -> bool:
        """Return True if these bytes of a file are all in the page cache; False if unknown."""
        if not nbytes:
            return True
        if not self.is_supported:
            return False
        counts = _CachestatCounts()
        span = _CachestatRange(offset, nbytes)
        if self._syscall(_CACHESTAT, descriptor, ctypes.byref(span), ctypes.byref(counts), 0):
            code = ctypes.get_errno()
            if code not in _UNSUPPORTED:
                raise CacheError(f"The page cache cannot be queried: {os.strerror(code)}.")
            self.is_supported = False
            return False
        first, last = offset // _KERNEL_PAGE, (offset + nbytes - 1) // _KERNEL_PAGE
        return int(counts.cached) > last - first
