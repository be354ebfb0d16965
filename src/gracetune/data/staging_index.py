"""Hash index from file names to locations in an arena, stored in the arena itself.

Every process that maps the arena gets the index without building its own. Records are sorted by the
hash of their name; a bucket table maps a hash to the offset of the first record in its bucket. One
`struct` unpack reads a record together with its name, so a lookup is one call and one comparison.

Record layout: original size, codec, last-in-bucket flag | start, stop, name length and flag,
segment, name. Offsets point at `start`; the fields before it are needed on the slow path only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, overload
from zlib import crc32

import numpy as np

from gracetune.memory.shared_arena import OFFSET_BITS, OFFSET_MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from gracetune.memory.shared_arena import Arena, ArenaWriter

    View = Callable[[str], memoryview]

_RECORD = np.dtype(
    [("nbytes", "<u8"), ("codec", "u1"), ("last", "u1"),
     ("start", "<u8"), ("stop", "<u8"), ("kind", "<u4"), ("segment", "<u2")]
)  # fmt: skip
"""Fixed part of a record; the name follows."""
_SLOW_FIELDS_NBYTES = 10
_SLOW_FIELDS = struct.Struct("<QBB").unpack_from
_FAST_FIELDS = "<QQIH"
_NAME_AT = struct.calcsize(_FAST_FIELDS)
_KIND = struct.Struct("<I").unpack_from
_KIND_AT = 16
_COMPRESSED = 1 << 31
"""Flag in `kind`, which fallback is the length of the name: the file is stored compressed."""
_DUMMY = 2**32 - 1
_BUCKETS_PER_FILE = 4
"""Buckets per file; more buckets mean fewer collisions."""
_TRAILER = struct.Struct("<QQ8s")
"""Offset and length of the JSON header, and the magic bytes."""
_MAGIC = b"gtindex2"

PLAIN = 0
"""Codec number of uncompressed files."""
MAX_NAME_NBYTES = 2**16 - 1


class Columns(NamedTuple):
    """Index columns of all files, in the order of their names."""

    at: NDArray[np.uint64]
    stored_nbytes: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    codec: NDArray[np.uint8]

    @classmethod
    def empty(cls, length: int) -> Columns:
        """Allocate columns for `length` files."""
        offset_type = [np.zeros(length, np.uint64) for _ in range(3)]
        return cls(offset_type[0], offset_type[1], offset_type[2], np.zeros(length, np.uint8))


def write_index(
    writer: ArenaWriter, keys: Sequence[str], columns: Columns, facts: Mapping[str, object]
) -> None:
    """Append the index to the arena; `facts` is JSON metadata of the whole dataset."""
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
    """Return the dummy record followed by all records; `buckets` is already sorted by `order`."""
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
    made = bytearray(
        dummy.tobytes()
    )  # one growing buffer: a million small objects would need far more memory
    for place, row in enumerate(order.tolist()):
        made += fixed[place * size : place * size + size]
        made += names[row]
    return made


class StagedFile(NamedTuple):
    """Location and size of one staged file."""

    at: int
    stored_nbytes: int
    nbytes: int
    """Uncompressed size."""
    codec: int


class StagingIndex(Sequence[str]):
    """Sorted sequence of the staged names, with lookup by name."""

    def __init__(self, arena: Arena) -> None:
        trailers = (segment[-_TRAILER.size :] for segment in arena.segments)
        (trailer,) = (each for each in trailers if each[-len(_MAGIC) :] == _MAGIC)
        at, length, _ = _TRAILER.unpack(trailer)
        head = json.loads(bytes(arena.view(at, length)))
        self.facts: Mapping[str, object] = head["facts"]
        self.stored_nbytes: int
        self.raw_nbytes: int
        self.stored_nbytes, self.raw_nbytes = head["totals"]
        """Total bytes of all files, stored and uncompressed."""
        tables = {name: arena.view(*place) for name, place in head["places"].items()}
        self.nbytes: int = sum(map(len, tables.values())) + length + _TRAILER.size
        """Size of the index itself."""
        offset_type: Literal["I", "Q"] = "I" if head["offset_nbytes"] == 4 else "Q"
        self._segments = arena.segments
        self._records = tables["records"]
        self._firsts = tables["firsts"].cast(offset_type)
        self._by_name = tables["by_name"].cast(offset_type)
        self._unpack = {
            n: struct.Struct(f"{_FAST_FIELDS}{n}s").unpack_from for n in head["lengths"]
        }
        """Record readers by name length; no staged name has another length."""

    def viewer(self, fallback: View) -> View:
        """Return a function from a name to its bytes; missing or compressed files go to `fallback`.

        A closure over local variables on purpose: a lookup takes less than a microsecond, of which
        attribute lookups would be a noticeable part.
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
        """Return the location of a name, or None."""
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
