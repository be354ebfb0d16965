"""Filling an arena from a source: every file is read once, by threads, and none is held twice.

A worker takes a run of files. Those that lie in plain files and stay as they are it copies inside
the kernel: all by one call where the compiled helper is there, else the large ones one by one. The
others are gathered, compressed where that helps, and written together.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gracetune.data.budget import Budget
from gracetune.data.codecs import CODECS, pack
from gracetune.data.gather import ODD, MissingGather
from gracetune.data.index import PLAIN, Columns, write_index
from gracetune.data.packing import Packing, choose_packing
from gracetune.data.parallel import chunks, default_workers, ordered_map
from gracetune.data.progress import Progress
from gracetune.data.source import EstimatingSource, FileSource, demand_whole
from gracetune.events.types import Notice
from gracetune.memory.arena import ArenaFullError, ArenaWriter
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.config.schema import InMemorySection
    from gracetune.data.gather import Gather
    from gracetune.data.progress import Tell
    from gracetune.data.source import Place, Source
    from gracetune.memory.arena import Arena, Hand

UNREADABLE = 255
CODEC_NAMES = (None, *sorted(CODECS))
"""The number of a codec in the index is its place here."""
GATHERED_NBYTES = 1024**2
"""Small files are written to the arena in pieces of this size."""
TIMED_FILES = 16
QUICK_S = 20e-6
"""A file whose length is asked for in less than this is on a disk of this machine."""
SMALL_NBYTES = 16 * 1024
"""Below this a copy inside the kernel costs more calls than it saves."""


def sizes_of(
    source: Source,
    keys: Sequence[str],
    num_workers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[int]:
    """The length of each file before it is read; 0 for one that cannot be asked."""
    if isinstance(source, EstimatingSource):
        return [source.estimate() // max(1, len(keys))] * len(keys)

    def ask(rows: range) -> list[int]:
        return [_size(source, keys[row]) for row in rows]

    began = clock()
    first = ask(range(min(TIMED_FILES, len(keys))))
    # Threads hide what a network takes; where nothing is to hide they only get in each other's way.
    if clock() - began < QUICK_S * len(first):
        return first + ask(range(len(first), len(keys)))
    left = chunks([0] * (len(keys) - len(first)), num_workers, None)
    shifted = (range(rows.start + len(first), rows.stop + len(first)) for rows in left)
    return first + [size for piece in ordered_map(ask, shifted, num_workers) for size in piece]


def fill_arena(
    source: Source,
    keys: Sequence[str],
    sizes: Sequence[int],
    section: InMemorySection,
    tell: Tell,
    setting: str,
    room: Callable[[], int],
    gather: Gather | MissingGather,
) -> Arena:
    """Read `keys`, which are sorted, into a new arena, never past the limits."""
    num_workers = section.num_workers or default_workers()
    budget = Budget(section.memory_limit_gb, sum(sizes), len(keys), setting, room)
    packing = choose_packing(source, keys, sizes, section.compression, num_workers)
    budget.check(_sure(keys, sizes, packing))

    writer = ArenaWriter()
    columns = Columns.empty(len(keys))
    unreadable: dict[str, str] = {}
    progress = Progress("staging", len(keys), tell, total_nbytes=sum(sizes))
    filler = _Filler(source, keys, sizes, packing, writer, budget, gather)
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
        raise budget.out_of_memory(str(error)) from error
    stored = int(columns.stored_nbytes.sum())
    tell(Notice(_summary(source, columns, packing, raw, stored)))
    return writer.seal()


@dataclass(slots=True)
class _Rows:
    """What became of one run of files."""

    first: int
    at: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    codec: list[int] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    def add(self, at: int, stored: int, nbytes: int, codec: int) -> None:
        self.at.append(at)
        self.stored.append(stored)
        self.nbytes.append(nbytes)
        self.codec.append(codec)

    def copy_to(self, columns: Columns) -> None:
        rows = slice(self.first, self.first + len(self.at))
        columns.at[rows] = self.at
        columns.stored_nbytes[rows] = self.stored
        columns.nbytes[rows] = self.nbytes
        columns.codec[rows] = self.codec


class _Gathered:
    """Small files on their way into the arena, written together."""

    def __init__(self, hand: Hand, rows: _Rows) -> None:
        self._hand = hand
        self._rows = rows
        self._waiting: list[bytes] = []
        self._places: list[int] = []
        self._nbytes = 0

    def add(self, data: bytes, nbytes: int, codec: int) -> None:
        self._places.append(len(self._rows.at))
        self._rows.add(self._nbytes, len(data), nbytes, codec)
        self._waiting.append(data)
        self._nbytes += len(data)
        if self._nbytes >= GATHERED_NBYTES:
            self.flush()

    def flush(self) -> None:
        start = self._hand.write(b"".join(self._waiting))
        for place in self._places:
            self._rows.at[place] += start
        self._waiting, self._places, self._nbytes = [], [], 0


class _Filler:
    """What workers share: the source, how to pack, and where to."""

    def __init__(
        self,
        source: Source,
        keys: Sequence[str],
        sizes: Sequence[int],
        packing: Packing,
        writer: ArenaWriter,
        budget: Budget,
        gather: Gather | MissingGather,
    ) -> None:
        self._source = source
        self._files = source if isinstance(source, FileSource) else None
        self._keys = keys
        self._sizes = sizes
        self._packing = packing
        self._writer = writer
        self._budget = budget
        self._gather = None if isinstance(gather, MissingGather) else gather

    def fill(self, numbers: range) -> _Rows:
        """Bring one run of files into the arena."""
        rows = _Rows(numbers.start)
        places = self._places(numbers)
        with self._writer.hand() as hand:
            brought = self._brought(places, hand)
            gathered = _Gathered(hand, rows)
            for number in numbers:
                if number in brought:
                    at, nbytes = brought[number]
                    rows.add(at, nbytes, nbytes, PLAIN)
                    continue
                try:
                    if not self._copied(number, places.get(number), rows, hand):
                        self._read(self._keys[number], gathered)
                except OSError as error:
                    rows.add(0, 0, 0, UNREADABLE)
                    rows.unreadable[self._keys[number]] = error.strerror or str(error)
            gathered.flush()
        return rows

    def _places(self, numbers: range) -> dict[int, Place]:
        """Where those lie that the kernel can copy: plain files, or parts of them, stored as they
        are."""
        if self._files is None:
            return {}
        found: dict[int, Place] = {}
        for number in numbers:
            key = self._keys[number]
            if self._packing.codec_of(key) is None and key not in self._packing.sampled:
                place = _place(self._files, key)
                if place is not None:
                    found[number] = place
        return found

    def _brought(self, places: dict[int, Place], hand: Hand) -> dict[int, tuple[int, int]]:
        """Place and length of what came by one call; whatever is odd about a file is not here."""
        numbers = [number for number in places if self._sizes[number]]
        if self._gather is None or not numbers:
            return {}
        sizes = [self._sizes[number] for number in numbers]
        expected = sum(sizes)
        self._budget.take(expected, expected)
        starts, lengths = self._gather(hand, [places[number] for number in numbers], sizes)
        rows = zip(numbers, starts, lengths, strict=True)
        brought = {number: (start, nbytes) for number, start, nbytes in rows if nbytes != ODD}
        missing = sum(nbytes for _, nbytes in brought.values()) - expected
        self._budget.take(missing, missing)
        return brought

    def _copied(self, number: int, place: Place | None, rows: _Rows, hand: Hand) -> bool:
        """Whether the kernel could copy it as it is."""
        size = self._sizes[number]
        if size < SMALL_NBYTES or place is None:
            return False
        path, offset, nbytes = place
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if nbytes is not None:
                demand_whole(place, os.fstat(descriptor).st_size)
            self._budget.take(size, size)
            # One byte more than it had: a file that has not changed comes by one call, unasked.
            at, done = hand.copy_from(descriptor, offset, size + (nbytes is None), likely=size)
            if done != size:
                done += self._rest(descriptor, size, done, hand)
        finally:
            os.close(descriptor)
        rows.add(at, done, done, PLAIN)
        return True

    def _rest(self, descriptor: int, size: int, done: int, hand: Hand) -> int:
        """What a file has gained since it was sized; the budget learns of both directions."""
        more = max(0, os.fstat(descriptor).st_size - done) if done > size else 0
        self._budget.take(done + more - size, done + more - size)
        return hand.copy_from(descriptor, done, more)[1]

    def _read(self, key: str, gathered: _Gathered) -> None:
        codec = self._packing.codec_of(key)
        sampled = self._packing.sampled
        data = sampled[key] if key in sampled else self._source.read(key)
        packed = pack(data, codec, self._packing.keep) if codec is not None and data else None
        stored = data if packed is None else packed
        self._budget.take(len(data), len(stored))
        gathered.add(stored, len(data), PLAIN if packed is None else CODEC_NAMES.index(codec))


def _place(source: FileSource, key: str) -> Place | None:
    try:
        return source.place(key)
    except OSError:
        return None  # reading it will say why


def _size(source: Source, key: str) -> int:
    try:
        return source.nbytes(key)
    except OSError:
        return 0  # reading it will say why


def _sure(keys: Sequence[str], sizes: Sequence[int], packing: Packing) -> int:
    """Bytes that will be stored however well the codecs do."""
    if not packing.compresses:
        return sum(sizes)
    return sum(size for key, size in zip(keys, sizes, strict=True) if packing.codec_of(key) is None)


def _summary(source: Source, columns: Columns, packing: Packing, raw: int, stored: int) -> str:
    readable = int(np.count_nonzero(columns.codec != UNREADABLE))
    text = f"staged {readable:,} files of {source.describe()} in {format_bytes(stored)}"
    if packing.compresses:
        packed = readable - int(np.count_nonzero(columns.codec == PLAIN))
        text += f" ({packed:,} compressed, {format_bytes(raw - stored)} saved)"
    return f"{text}; {packing.why}"
