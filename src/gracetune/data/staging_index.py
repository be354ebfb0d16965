"""Hash index that finds a staged file in a shared-memory arena by its name.

The index is stored in the arena itself, so every process that maps the arena has it at once. It has
one record per file. Records are sorted by a hash of the file name, and a table has the offset of
the first record for each hash bucket. A record is read with its name by one `struct` call, so a
lookup usually takes one call and one comparison.

Layout of a record:

    uncompressed size, codec, last in its bucket?                        read by `find` only
    start, stop, length of the name and compressed flag, segment, name   read by every lookup

The offset of a record is that of its field `start`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, overload
from zlib import crc32

import numpy as np

from gracetune.memory.shared_memory import OFFSET_BITS, OFFSET_MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from gracetune.memory.shared_memory import Arena, ArenaWriter

    View = Callable[[str], memoryview]

_RECORD = np.dtype(
    [("nbytes", "<u8"), ("codec", "u1"), ("last", "u1"),
     ("start", "<u8"), ("stop", "<u8"), ("kind", "<u4"), ("segment", "<u2")]
)  # fmt: skip
"""Fields of a record in the index, which describes one file; the file's name follows them."""
_SLOW_FIELDS_NBYTES = 10
_SLOW_FIELDS = struct.Struct("<QBB").unpack_from
_FAST_FIELDS = "<QQIH"
_NAME_AT = struct.calcsize(_FAST_FIELDS)
_KIND = struct.Struct("<I").unpack_from
_KIND_AT = 16
_COMPRESSED = 1 << 31
"""Bit in the field `kind` of an index record that is set if the file is stored compressed. The
other bits of the field are the length of the file's name in bytes."""
_DUMMY = 2**32 - 1
_BUCKETS_PER_FILE = 4
"""Smallest number of hash buckets per file; more buckets mean fewer collisions."""
_TRAILER = struct.Struct("<QQ8s")
"""Last bytes of the index: address and length of its JSON header, and the magic bytes by which the
index is recognised."""
_MAGIC = b"gtindex2"

PLAIN = 0
"""Codec number of files that are stored uncompressed."""
MAX_NAME_NBYTES = 2**16 - 1


class Columns(NamedTuple):
    """Location and size of all staged files in shared memory, as one array per property.

    The files are sorted by name.
    """

    at: NDArray[np.uint64]
    """Address of each file in shared memory: segment number and offset, as one integer."""
    stored_nbytes: NDArray[np.uint64]
    """Size of each file in bytes as it is stored."""
    nbytes: NDArray[np.uint64]
    """Size of each file in bytes without compression."""
    codec: NDArray[np.uint8]
    """Number of the codec of each file; PLAIN if it is not compressed."""

    @classmethod
    def empty(cls, length: int) -> Columns:
        """Return arrays for `length` files, filled with zeros."""
        at, stored_nbytes, nbytes = (np.zeros(length, np.uint64) for _ in range(3))
        return cls(at, stored_nbytes, nbytes, np.zeros(length, np.uint8))


def write_index(
    writer: ArenaWriter, keys: Sequence[str], columns: Columns, facts: Mapping[str, object]
) -> None:
    """Append an index of the files with these names to the shared memory that contains them.

    `facts` is JSON-serialisable metadata of the dataset, which `StagingIndex.facts` returns.
    """
    assert len(keys) == len(columns.at), f"{len(keys)} names for {len(columns.at)} rows"
    names = [key.encode() for key in keys]
    lengths = np.fromiter(map(len, names), np.uint64, len(names))
    longest = int(lengths.max(initial=0))
    assert longest <= MAX_NAME_NBYTES, f"a name of {longest} bytes"
    num_buckets = _BUCKETS_PER_FILE << max(0, len(names) - 1).bit_length()
    buckets = np.fromiter(map(crc32, names), np.uint32, len(names)) & np.uint32(num_buckets - 1)
    order = np.argsort(buckets, kind="stable")
    buckets = buckets[order]
    sizes = lengths[order] + np.uint64(_RECORD.itemsize)
    # The first record is a dummy that empty buckets point to.
    offsets = np.cumsum(sizes) - sizes + np.uint64(_RECORD.itemsize + _SLOW_FIELDS_NBYTES)
    offset_type = np.uint32 if sizes.sum() < _DUMMY - _RECORD.itemsize else np.uint64
    firsts = np.full(num_buckets, _SLOW_FIELDS_NBYTES, offset_type)
    firsts[buckets[::-1]] = offsets[::-1]  # reversed, so that the first record of each bucket wins
    by_name = np.zeros(len(names), offset_type)
    by_name[order] = offsets
    tables: dict[str, bytes | bytearray] = {
        "records": _records(names, lengths, columns, order, buckets) + bytes(longest),
        "firsts": firsts.tobytes(),
        "by_name": by_name.tobytes(),
    }
    places = {}
    with writer.segment_writer() as segment:
        for name, table in tables.items():
            places[name] = (segment.write(memoryview(table)), len(table))
        about = {
            "places": places,
            "lengths": np.unique(lengths).tolist(),
            "offset_nbytes": np.dtype(offset_type).itemsize,
            "totals": [int(columns.stored_nbytes.sum()), int(columns.nbytes.sum())],
            "facts": facts,
        }
        head = json.dumps(about).encode()
        segment.write(head + _TRAILER.pack(segment.write(b""), len(head), _MAGIC))


def _records(
    names: Sequence[bytes],
    lengths: NDArray[np.uint64],
    columns: Columns,
    order: NDArray[np.intp],
    buckets: NDArray[np.uint32],
) -> bytearray:
    """Return the index records of all files as bytes, sorted by hash bucket.

    The first record is a dummy that stands for "no file"; empty hash buckets point to it. `order`
    has the files sorted by hash bucket, and `buckets` the hash bucket of each in that order.
    """
    rows = np.zeros(len(names), _RECORD)
    at = columns.at[order]
    rows["nbytes"] = columns.nbytes[order]
    rows["codec"] = columns.codec[order]
    rows["last"] = np.append(buckets[1:] != buckets[:-1], [True])[: len(names)]
    rows["start"] = at & np.uint64(OFFSET_MASK)
    rows["stop"] = rows["start"] + columns.stored_nbytes[order]
    rows["segment"] = at >> np.uint64(OFFSET_BITS)
    rows["kind"] = lengths[order]
    rows["kind"][rows["codec"] != PLAIN] |= np.uint32(_COMPRESSED)
    dummy = np.zeros(1, _RECORD)
    dummy["kind"], dummy["last"] = _DUMMY, True
    fixed, size = memoryview(rows.tobytes()), _RECORD.itemsize
    # One growing buffer: a million small objects would need far more memory.
    made = bytearray(dummy.tobytes())
    for place, row in enumerate(order.tolist()):
        made += fixed[place * size : place * size + size]
        made += names[row]
    return made


class StagedFile(NamedTuple):
    """Location and size of one staged file."""

    at: int
    """Address of the file in shared memory: segment number and offset, as one integer."""
    stored_nbytes: int
    """Size of the file in bytes as it is stored, which may be compressed."""
    nbytes: int
    """Size of the file in bytes without compression."""
    codec: int
    """Number of the file's codec; PLAIN if it is not compressed."""


class StagingIndex(Sequence[str]):
    """The sorted names of all staged files, with a fast lookup of a file by its name."""

    def __init__(self, arena: Arena) -> None:
        trailers = (segment[-_TRAILER.size :] for segment in arena.segments)
        (trailer,) = (each for each in trailers if each[-len(_MAGIC) :] == _MAGIC)
        at, length, _ = _TRAILER.unpack(trailer)
        head = json.loads(bytes(arena.view(at, length)))
        self.facts: Mapping[str, object] = head["facts"]
        self.stored_nbytes: int
        self.raw_nbytes: int
        self.stored_nbytes, self.raw_nbytes = head["totals"]
        """Total size in bytes of all files, as they are stored and without compression."""
        tables = {name: arena.view(*place) for name, place in head["places"].items()}
        self.nbytes: int = sum(map(len, tables.values())) + length + _TRAILER.size
        """Size of the index itself in bytes."""
        offset_type: Literal["I", "Q"] = "I" if head["offset_nbytes"] == 4 else "Q"
        self._segments = arena.segments
        self._records = tables["records"]
        self._firsts = tables["firsts"].cast(offset_type)
        self._by_name = tables["by_name"].cast(offset_type)
        self._unpack = {
            n: struct.Struct(f"{_FAST_FIELDS}{n}s").unpack_from for n in head["lengths"]
        }
        """Functions that unpack a record of the index, by the length of the file name in the
        record. A name of another length is therefore not in the index."""

    def viewer(self, fallback: View) -> View:
        """Return a function that returns the bytes of a file by its name, without a copy.

        It calls `fallback(name)` for files that are missing, compressed, or not the first in their
        hash bucket. It is a closure over local variables, because a lookup takes less than a
        microsecond and attribute access would slow it down noticeably.
        """
        unpack, records, firsts = self._unpack, self._records, self._firsts
        segments, mask = self._segments, len(self._firsts) - 1

        def view(key: str) -> memoryview:
            try:
                wanted = key.encode()
                length = len(wanted)
                start, stop, kind, segment, name = unpack[length](
                    records, firsts[crc32(wanted) & mask]
                )
            except (UnicodeEncodeError, KeyError):
                return fallback(key)
            if name == wanted and kind == length:
                found: memoryview = segments[segment][start:stop]
                return found
            return fallback(key)  # another name in the same bucket, or a compressed file

        return view

    def find(self, key: str) -> StagedFile | None:
        """Return the location of the file with this name; None if it is not staged."""
        try:
            wanted = key.encode()
        except UnicodeEncodeError:
            return None  # staged names are valid UTF-8
        if len(wanted) not in self._unpack:
            return None
        offset = self._firsts[crc32(wanted) & (len(self._firsts) - 1)]
        while True:
            nbytes, codec, last = _SLOW_FIELDS(self._records, offset - _SLOW_FIELDS_NBYTES)
            start, stop, kind, segment, name = self._unpack[len(wanted)](self._records, offset)
            if kind & ~_COMPRESSED == len(wanted) and name == wanted:
                return StagedFile(segment << OFFSET_BITS | start, stop - start, nbytes, codec)
            if last:
                return None
            offset += _RECORD.itemsize + (kind & ~_COMPRESSED)

    def __len__(self) -> int:
        return len(self._by_name)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self._name(offset) for offset in self._by_name[place]]
        return self._name(self._by_name[place])

    def __iter__(self) -> Iterator[str]:
        return map(self._name, self._by_name)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) is not None

    def _name(self, offset: int) -> str:
        length = _KIND(self._records, offset + _KIND_AT)[0] & ~_COMPRESSED
        return str(self._records[offset + _NAME_AT : offset + _NAME_AT + length], "utf-8")
