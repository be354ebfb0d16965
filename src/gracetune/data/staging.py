"""Stage a dataset: read all its files once into host memory that all processes share.

The memory is an arena, a set of growing segments of shared memory (memory/shared_memory.py).
`StagedSource.stage` fills it with worker threads, within a memory budget, and appends an index of
the files (staging_index.py). Each worker takes a chunk of consecutive files:

- Local files that are not compressed are copied inside the kernel: by the compiled helper
  (bulk_copy.py), which copies a whole chunk in one call, or without it one large file at a time.
- Other files are read, compressed if that helps, and written to the arena in batches.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from blake3 import blake3

from gracetune.data.bulk_copy import FAILED, MissingBulkCopier, find_bulk_copier
from gracetune.data.prefetch import chunks, default_workers, ordered_map
from gracetune.data.source import (
    EstimatingSource,
    FileSource,
    StampedSource,
    check_not_truncated,
    open_for_reading,
)
from gracetune.data.staging_compression import (
    CODECS,
    CompressionPlan,
    compress_if_smaller,
    plan_compression,
)
from gracetune.data.staging_index import PLAIN, Columns, StagedFile, StagingIndex, write_index
from gracetune.errors import DataError
from gracetune.events.dispatcher import ProgressReporter
from gracetune.events.types import Notice
from gracetune.memory.platform import read_host
from gracetune.memory.shared_memory import Arena, ArenaFullError, ArenaWriter, share_arena
from gracetune.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.config.dataset_schema import InMemorySection
    from gracetune.data.bulk_copy import BulkCopier
    from gracetune.data.source import FileRange, Source
    from gracetune.events.dispatcher import Emit
    from gracetune.memory.shared_memory import ArenaHandle, SegmentWriter


RESERVE_NBYTES = 4 * GIB
RESERVE_SHARE = 0.1
"""Fraction of the host's memory, but at most RESERVE_NBYTES, that stays free when a dataset is
staged (read into host memory)."""
WATCH_NBYTES = 256 * MIB
"""The host's free memory is checked each time that this many bytes of a dataset have been read into
memory, because other processes may use memory as well."""


def staging_room(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int:
    """Return how many bytes of host memory a dataset that is read into memory may use now.

    It is the free memory less a reserve, and negative if less than the reserve is free.
    """
    host = read_host(proc, sys, os.sysconf("SC_PAGE_SIZE"))
    return host.usable_bytes() - min(RESERVE_NBYTES, int(RESERVE_SHARE * host.capacity_bytes()))


class StagingBudget:
    """Limits the host memory that a dataset which is read into memory may use.

    The limit is the smaller of the setting `memory_limit_gb` and the free memory.
    """

    def __init__(
        self,
        limit_gib: float | None,
        raw_nbytes: int,
        num_files: int,
        setting: str,
        room: Callable[[], int],
    ) -> None:
        """Limit the dataset to the smaller of `limit_gib` and `room()`.

        `raw_nbytes` and `num_files` are the estimated size of the whole dataset and its number of
        files; error messages use them. `room` returns the bytes of memory that may be used now.
        """
        self._limit_gib = limit_gib
        self._raw_total = raw_nbytes
        self._num_files = num_files
        self._setting = setting
        self._room = room
        self._lock = threading.Lock()
        self._raw = self._stored = self._watched = 0
        room_now = room()
        asked = None if limit_gib is None else int(limit_gib * GIB)
        self._is_user_limit = asked is not None and asked <= room_now
        self.nbytes = asked if asked is not None and self._is_user_limit else max(0, room_now)
        """Limit in bytes of the host memory for the files of the dataset."""

    def check(self, certain_nbytes: int) -> None:
        """Raise an error if the dataset needs more memory than the limit.

        `certain_nbytes` is a lower bound of its size in memory, known before any file is read.
        """
        if certain_nbytes > self.nbytes:
            raise self._exceeded(certain_nbytes)

    def take(self, raw: int, stored: int) -> None:
        """Add a file that takes `stored` bytes of memory; raise an error above the limit.

        `raw` is the file's size before staging compresses it; error messages use it. Several
        threads may call it at the same time.
        """
        with self._lock:
            self._raw += raw
            self._stored += stored
            if self._stored > self.nbytes:
                raise self._exceeded(max(self._stored, self._stored * self._raw_total // self._raw))
            if self._stored - self._watched < WATCH_NBYTES:
                return
            self._watched = self._stored
        if self._room() < 0:
            raise self.out_of_memory_error("other processes use the memory that must stay free")

    def out_of_memory_error(self, reason: str | None) -> DataError:
        """Return the error to raise if the host runs out of memory before the limit is reached."""
        return DataError(
            f"{self._setting}: the host ran out of memory after {format_bytes(self._stored)} of "
            f"the dataset were staged ({reason}). Stop other processes, or read from disk with "
            "type: local."
        )

    def arena_error(self, error: ArenaFullError) -> DataError:
        """Return the error to raise if writing files to shared memory failed, with its cause."""
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EFBIG:
            return self.out_of_memory_error(str(error))
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = "" if most == resource.RLIM_INFINITY else f" of {format_bytes(most)}"
        return DataError(
            f"{self._setting}: the file-size limit{limit} (ulimit -f) stopped staging after "
            f"{format_bytes(self._stored)} of the dataset; staged data is held in memory files "
            f"({error}). Raise the limit, or read from disk with type: local."
        )

    def _exceeded(self, need: int) -> DataError:
        fitting = min(self._num_files - 1, self._num_files * self.nbytes // need)
        limit = (
            f"{self._setting}.in_memory.memory_limit_gb is {self._limit_gib:g}"
            if self._is_user_limit
            else f"{self._setting}: this machine has {format_bytes(self.nbytes)} free for data"
        )
        remedy = "Raise the limit" if self._is_user_limit else "Free memory on this machine"
        return DataError(
            f"{limit}, but the dataset needs about {need / GIB:.3g} GiB; about {fitting:,} of its "
            f"{self._num_files:,} files would fit. {remedy}, set in_memory.compression: zstd "
            "if the files are not compressed already, or read from disk with type: local."
        )


class StagedSource:
    """A source whose files were read (staged) into host memory, which several processes can share.

    If a file could not be read at that time, reading it from this source raises the same error.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._index = StagingIndex(arena)
        # Functions instead of bound methods: a reference cycle would delay freeing the arena.
        self._data = partial(_data, arena, self._index)
        self.view = self._index.viewer(partial(_view, self._data))
        """Function that returns the bytes of a file by its key as a memoryview, without a copy
        unless the file is compressed."""

    @classmethod
    def stage(
        cls,
        source: Source,
        keys: Sequence[str],
        section: InMemorySection,
        emit: Emit,
        setting: str = "datasets",
        shared_folder: Path | None = None,
        room: Callable[[], int] = staging_room,
        find: Callable[[], BulkCopier | MissingBulkCopier] = find_bulk_copier,
    ) -> StagedSource:
        """Read the files with these keys into host memory, and return a source for them.

        Raises an error if they need more than `section.memory_limit_gb` or than `room()` returns.
        Processes on one machine that pass the same `shared_folder` share one copy: the first one
        reads the files, and the others wait and map its memory. `setting` is the dataset's name in
        messages, and `find` loads the compiled library that copies files.
        """
        keys = sorted(set(keys))
        gather = find()
        sizes = sizes_of(source, keys, section.num_workers or default_workers(), gather)

        def make() -> Arena:
            if isinstance(gather, MissingBulkCopier):
                emit(
                    Notice(f"files are staged one by one in Python: {gather.reason}", fallback=True)
                )
            return fill_arena(source, keys, sizes, section, emit, setting, room, gather)

        if shared_folder is None:
            return cls(make())
        what = source.describe()
        shared = share_arena(
            shared_folder,
            _identity(source, keys, sizes, section),
            make,
            lambda: emit(Notice(f"data: waiting for another process that is staging {what}")),
        )
        if shared.share_error is not None:
            emit(
                Notice(
                    f"{what} cannot be shared with other processes ({shared.share_error}); this "
                    "one keeps its own copy. Run all of them as one user",
                    level="warning",
                    fallback=True,
                )
            )
        staged = cls(shared.arena)
        if not shared.is_owner:
            emit(Notice(f"data: sharing {what} with process {shared.owner_pid}, which staged it"))
        return staged

    @classmethod
    def attach(cls, handle: ArenaHandle) -> StagedSource:
        """Map files that another process has staged; OSError if they are no longer in memory."""
        return cls(Arena.attach(handle))

    @property
    def handle(self) -> ArenaHandle:
        """Handle that another process can pass to `attach`; it can be pickled."""
        return self._arena.handle

    def __reduce__(self) -> tuple[Callable[[ArenaHandle], StagedSource], tuple[ArenaHandle]]:
        """Pickle only the handle, so that another process maps the memory instead of copying it."""
        return StagedSource.attach, (self.handle,)

    @property
    def stored_nbytes(self) -> int:
        """Size in bytes of all files as they are stored, after compression."""
        return self._index.stored_nbytes

    @property
    def index_nbytes(self) -> int:
        """Size in bytes of the index that finds files by their keys."""
        return self._index.nbytes

    @property
    def resident_nbytes(self) -> int:
        """Host memory in bytes that files and index use, all processes together."""
        return self._arena.resident_nbytes

    def keys(self) -> Sequence[str]:
        return self._index

    def read(self, key: str) -> bytes:
        data = self._data(key)
        return data if isinstance(data, bytes) else bytes(data)

    def nbytes(self, key: str) -> int:
        return _find(self._index, key).nbytes

    def describe(self) -> str:
        return _describe(self._index)


def _data(arena: Arena, index: StagingIndex, key: str) -> bytes | memoryview:
    row = _find(index, key)
    stored = arena.view(row.at, row.stored_nbytes)
    name = CODEC_NAMES[row.codec]
    return stored if name is None else CODECS[name].decompress(stored)


def _view(data: Callable[[str], bytes | memoryview], key: str) -> memoryview:
    return memoryview(data(key))


def _find(index: StagingIndex, key: str) -> StagedFile:
    row = index.find(key)
    if row is None:
        raise FileNotFoundError(f"{_describe(index)} has no {key!r}")
    if row.codec == UNREADABLE:
        raise OSError(cast("Mapping[str, str]", index.facts["unreadable"])[key])
    return row


def _describe(index: StagingIndex) -> str:
    return f"{index.facts['origin']}, staged in memory"


def _identity(
    source: Source, keys: Sequence[str], sizes: Sequence[int], section: InMemorySection
) -> str:
    """Return a digest of a dataset's location, files and compression.

    Processes with the same digest share one copy of the staged files.
    """
    stamp = source.stamp(keys) if isinstance(source, StampedSource) else ""
    digest = blake3()
    for part in (source.describe(), section.compression, list(keys), list(sizes), stamp):
        digest.update(json.dumps(part).encode() + b"\n")
    return digest.hexdigest(length=16)


# Filling an arena

UNREADABLE = 255
CODEC_NAMES = (None, *sorted(CODECS))
"""Names of the codecs; None for no compression. The index of staged files stores a codec as its
position in this tuple."""
WRITE_BATCH_NBYTES = 1024**2
"""Files that are read in Python are collected until they have this many bytes together, and then
written to shared memory in one call."""
TIMED_FILES = 16
"""Number of files whose `stat` is timed to guess whether they are on a local disk. On network
storage the lengths of files are read by several threads."""
LOCAL_STAT_S = 20e-6
"""If `stat` takes less than this many seconds per file, the files are assumed to be on a local
disk."""
SMALL_NBYTES = 16 * 1024
"""Files below this size in bytes are read and written in Python, because copying them inside the
kernel needs more system calls."""


def sizes_of(
    source: Source,
    keys: Sequence[str],
    num_workers: int,
    gather: BulkCopier | MissingBulkCopier,
    clock: Callable[[], float] = time.perf_counter,
) -> list[int]:
    """Return the length of each file in bytes; 0 if it cannot be determined.

    A source that can only estimate its total size gives the average length for each file.
    """
    if isinstance(source, EstimatingSource):
        return [source.estimate() // max(1, len(keys))] * len(keys)

    def ask(rows: range) -> list[int]:
        return [_size(source, keys[row]) for row in rows]

    def measure_rest(by: Callable[[range], list[int]]) -> list[int]:
        left = chunks([0] * (len(keys) - len(first)), num_workers, None)
        shifted = (range(rows.start + len(first), rows.stop + len(first)) for rows in left)
        return [size for piece in ordered_map(by, shifted, num_workers) for size in piece]

    began = clock()
    first = ask(range(min(TIMED_FILES, len(keys))))
    took = clock() - began
    if isinstance(source, FileSource) and not isinstance(gather, MissingBulkCopier):
        return first + measure_rest(partial(_sizes_together, source, keys, gather))
    # Threads hide network latency; on a local disk they only contend with each other.
    if took < LOCAL_STAT_S * len(first):
        return first + ask(range(len(first), len(keys)))
    return first + measure_rest(ask)


def fill_arena(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    section: InMemorySection,
    emit: Emit,
    setting: str,
    room: Callable[[], int],
    gather: BulkCopier | MissingBulkCopier,
) -> Arena:
    """Read the files with these keys, which must be sorted, into new shared memory (an arena).

    An index of the files is appended. `sizes` has the length of each file in bytes. Raises an error
    if the files need more than `section.memory_limit_gb` or than `room()` bytes.
    """
    num_workers = section.num_workers or default_workers()
    budget = StagingBudget(section.memory_limit_gb, sum(sizes), len(keys), setting, room)
    compression_plan = plan_compression(source, keys, sizes, section.compression, num_workers)
    budget.check(_certain_nbytes(keys, sizes, compression_plan))

    writer = ArenaWriter()
    columns = Columns.empty(len(keys))
    unreadable: dict[str, str] = {}
    progress = ProgressReporter("staging", len(keys), emit, total_nbytes=sum(sizes))
    filler = _Filler(source, keys, sizes, compression_plan, writer, budget, gather)
    raw = 0
    try:
        pieces = chunks(sizes, num_workers, section.chunk_size)
        for rows in ordered_map(filler.fill, pieces, num_workers):
            rows.copy_to(columns)
            unreadable.update(rows.unreadable)
            raw += sum(rows.nbytes)
            progress.advance(len(rows.at), sum(rows.nbytes))
        facts = {"origin": source.describe(), "unreadable": unreadable}
        write_index(writer, keys, columns, facts)
    except ArenaFullError as error:
        raise budget.arena_error(error) from error
    stored = int(columns.stored_nbytes.sum())
    emit(Notice(_summary(source, columns, compression_plan, raw, stored)))
    return writer.seal()


@dataclass(slots=True)
class _Rows:
    """Address, sizes and codec of some consecutive files in shared memory, one list for each."""

    first: int
    """Position of the first of these files among all files of the dataset, sorted by name."""
    at: list[int] = field(default_factory=list)
    """Address of each file in shared memory: segment number and offset, as one integer."""
    stored: list[int] = field(default_factory=list)
    """Size of each file in bytes as it is stored."""
    nbytes: list[int] = field(default_factory=list)
    """Size of each file in bytes without compression."""
    codec: list[int] = field(default_factory=list)
    """Position in CODEC_NAMES of the codec of each file; UNREADABLE if the file was not read."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Keys of files that could not be read, with the reason."""

    def add(self, at: int, stored: int, nbytes: int, codec: int) -> None:
        self.at.append(at)
        self.stored.append(stored)
        self.nbytes.append(nbytes)
        self.codec.append(codec)

    def set_all(self, at: list[int], nbytes: list[int]) -> _Rows:
        """Set the addresses and sizes of all files at once; all are stored uncompressed."""
        self.at, self.stored, self.nbytes = at, nbytes, nbytes
        self.codec = [PLAIN] * len(at)
        return self

    def copy_to(self, columns: Columns) -> None:
        rows = slice(self.first, self.first + len(self.at))
        columns.at[rows] = self.at
        columns.stored_nbytes[rows] = self.stored
        columns.nbytes[rows] = self.nbytes
        columns.codec[rows] = self.codec


class _WriteBatch:
    """Collects small files and writes them to shared memory in one call."""

    def __init__(self, segment: SegmentWriter, rows: _Rows) -> None:
        self._segment = segment
        self._rows = rows
        self._waiting: list[bytes] = []
        self._places: list[int] = []
        self._nbytes = 0

    def add(self, data: bytes, nbytes: int, codec: int) -> None:
        self._places.append(len(self._rows.at))
        self._rows.add(self._nbytes, len(data), nbytes, codec)
        self._waiting.append(data)
        self._nbytes += len(data)
        if self._nbytes >= WRITE_BATCH_NBYTES:
            self.flush()

    def flush(self) -> None:
        start = self._segment.write(b"".join(self._waiting))
        for place in self._places:
            self._rows.at[place] += start
        self._waiting, self._places, self._nbytes = [], [], 0


class _Filler:
    """Copies files of a dataset into shared memory; all worker threads share one instance."""

    def __init__(
        self,
        source: Source,
        keys: Sequence[str],
        sizes: Sequence[int],
        compression_plan: CompressionPlan,
        writer: ArenaWriter,
        budget: StagingBudget,
        gather: BulkCopier | MissingBulkCopier,
    ) -> None:
        self._source = source
        self._files = source if isinstance(source, FileSource) else None
        self._keys = keys
        self._sizes = sizes
        self._compression_plan = compression_plan
        self._writer = writer
        self._budget = budget
        self._gather = None if isinstance(gather, MissingBulkCopier) else gather

    def fill(self, numbers: range) -> _Rows:
        """Copy the files at these positions in `keys` to shared memory.

        Returns their addresses and sizes.
        """
        rows = _Rows(numbers.start)
        places = self._places(numbers)
        with self._writer.segment_writer() as segment:
            starts, lengths = self._copy_with_helper(numbers, places, segment)
            if FAILED not in lengths:
                return rows.set_all(starts, lengths)
            write_batch = _WriteBatch(segment, rows)
            for number, place, at, nbytes in zip(numbers, places, starts, lengths, strict=True):
                if nbytes != FAILED:
                    rows.add(at, nbytes, nbytes, PLAIN)
                    continue
                try:
                    if not self._copy_in_kernel(number, place, rows, segment):
                        self._read(self._keys[number], write_batch)
                except OSError as error:
                    rows.add(0, 0, 0, UNREADABLE)
                    rows.unreadable[self._keys[number]] = error.strerror or str(error)
            write_batch.flush()
        return rows

    def _places(self, numbers: range) -> Sequence[FileRange | None]:
        """Return where each file is on disk; None for files that the kernel cannot copy.

        These are files that may be compressed, were read already, or are not in a local file.
        """
        files, compression_plan = self._files, self._compression_plan
        if files is None:
            return [None] * len(numbers)
        keys = self._keys[numbers.start : numbers.stop]
        if not compression_plan.compresses and not compression_plan.sampled:
            return [_place(files, key) for key in keys]
        return [
            None
            if compression_plan.codec_of(key) or key in compression_plan.sampled
            else _place(files, key)
            for key in keys
        ]

    def _copy_with_helper(
        self, numbers: range, places: Sequence[FileRange | None], segment: SegmentWriter
    ) -> tuple[list[int], list[int]]:
        """Copy files to shared memory with the compiled library (`BulkCopier`), in one call.

        Returns two lists: the address of each copy, and its length in bytes, or FAILED if the file
        was not copied.
        """
        sizes = self._sizes[numbers.start : numbers.stop]
        starts, lengths = [0] * len(sizes), [FAILED] * len(sizes)
        pairs = enumerate(zip(places, sizes, strict=True))
        chosen = [(row, place, size) for row, (place, size) in pairs if place is not None and size]
        if self._gather is None or not chosen:
            return starts, lengths
        rows, wanted, known = zip(*chosen, strict=True)
        expected = sum(known)
        self._budget.take(expected, expected)
        for row, start, nbytes in zip(rows, *self._gather(segment, wanted, known), strict=True):
            starts[row], lengths[row] = start, nbytes
        missing = sum(nbytes for nbytes in lengths if nbytes != FAILED) - expected
        self._budget.take(missing, missing)
        return starts, lengths

    def _copy_in_kernel(
        self, number: int, place: FileRange | None, rows: _Rows, segment: SegmentWriter
    ) -> bool:
        """Copy one file to shared memory by a system call, and add its address and size to `rows`.

        Returns False, without copying, if the file is small or not in a local file, so that Python
        must read it.
        """
        size = self._sizes[number]
        if size < SMALL_NBYTES or place is None:
            return False
        path, offset, nbytes = place
        descriptor = open_for_reading(path)
        try:
            if nbytes is not None:
                check_not_truncated(place, os.fstat(descriptor).st_size)
            self._budget.take(size, size)
            # Ask for one byte more than its length: an unchanged file then needs only one call.
            at, done = segment.copy_from(
                descriptor, offset, size + (nbytes is None), expected_nbytes=size
            )
            if done != size:
                done += self._copy_growth(descriptor, size, done, segment)
        finally:
            os.close(descriptor)
        rows.add(at, done, done, PLAIN)
        return True

    def _copy_growth(self, descriptor: int, size: int, done: int, segment: SegmentWriter) -> int:
        """Copy the bytes that a file has gained since its size was read; count them in the budget.

        `size` is the size that was read, and `done` the number of bytes already copied. Returns the
        number of bytes copied now.
        """
        more = max(0, os.fstat(descriptor).st_size - done) if done > size else 0
        self._budget.take(done + more - size, done + more - size)
        return segment.copy_from(descriptor, done, more)[1]

    def _read(self, key: str, write_batch: _WriteBatch) -> None:
        codec = self._compression_plan.codec_of(key)
        sampled = self._compression_plan.sampled
        data = sampled[key] if key in sampled else self._source.read(key)
        packed = (
            compress_if_smaller(data, codec, self._compression_plan.min_saving)
            if codec is not None and data
            else None
        )
        stored = data if packed is None else packed
        self._budget.take(len(data), len(stored))
        write_batch.add(stored, len(data), PLAIN if packed is None else CODEC_NAMES.index(codec))


def _sizes_together(
    source: FileSource, keys: Sequence[str], gather: BulkCopier, rows: range
) -> list[int]:
    places = [_place(source, keys[row]) for row in rows]
    whole = [place.path for place in places if place is not None and place.nbytes is None]
    if len(whole) == len(places):
        return gather.sizes(whole)
    return [_size(source, keys[row]) for row in rows]


def _place(source: FileSource, key: str) -> FileRange | None:
    try:
        return source.place(key)
    except OSError:
        return None  # reading it raises the error


def _size(source: Source, key: str) -> int:
    try:
        return source.nbytes(key)
    except OSError:
        return 0  # reading it raises the error


def _certain_nbytes(
    keys: Sequence[str], sizes: Sequence[int], compression_plan: CompressionPlan
) -> int:
    """Return the total size in bytes of the files that will be stored uncompressed."""
    if not compression_plan.compresses:
        return sum(sizes)
    return sum(
        size
        for key, size in zip(keys, sizes, strict=True)
        if compression_plan.codec_of(key) is None
    )


def _summary(
    source: Source, columns: Columns, compression_plan: CompressionPlan, raw: int, stored: int
) -> str:
    readable = int(np.count_nonzero(columns.codec != UNREADABLE))
    text = f"staged {readable:,} files of {source.describe()} in {format_bytes(stored)}"
    if compression_plan.compresses:
        packed = readable - int(np.count_nonzero(columns.codec == PLAIN))
        text += f" ({packed:,} compressed, {format_bytes(raw - stored)} saved)"
    return f"{text}; {compression_plan.reason}"
