"""From names to places in an arena: a table that lies in the arena itself.

Every process that maps the arena has the index with it, at no cost of its own. Records lie in the
order of their names' hashes. The hash leads to an offset, and what is there is unpacked with the
name in it: one call of `struct` finds a file and makes sure that it is the one.
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
"""The name follows. Offsets lead to `start`: what is before it is looked at second."""
_FIRST_NBYTES = 10
_FIRST = struct.Struct("<QBB").unpack_from
_SECOND = "<QQIH"
_NAME_AT = struct.calcsize(_SECOND)
_KIND = struct.Struct("<I").unpack_from
_KIND_AT = 16
_NOT_PLAIN = 1 << 31
"""`kind` is the length of the name; with this in it where the file is not stored as it is."""
_NOBODY = 2**32 - 1
_SPARSE = 4
"""Offsets for each file: the fewer share one, the fewer records are looked at in vain."""
_TRAILER = struct.Struct("<QQ8s")
"""Where the JSON head is, how long it is, and what all this is."""
_MAGIC = b"gtindex2"

PLAIN = 0
"""The codec of what is stored as it is."""
LONGEST_NAME = 2**16 - 1


class Columns(NamedTuple):
    """The rows of every file, in the order of their names."""

    at: NDArray[np.uint64]
    stored_nbytes: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    codec: NDArray[np.uint8]

    @classmethod
    def empty(cls, length: int) -> Columns:
        """Room for so many rows."""
        wide = [np.zeros(length, np.uint64) for _ in range(3)]
        return cls(wide[0], wide[1], wide[2], np.zeros(length, np.uint8))


def write_index(
    writer: ArenaWriter, keys: Sequence[str], columns: Columns, facts: Mapping[str, object]
) -> None:
    """Put the index behind the data; `facts` are whatever readers want to know of the whole."""
    assert len(keys) == len(columns.at), f"{len(keys)} names for {len(columns.at)} rows"
    names = [key.encode() for key in keys]
    lengths = np.fromiter(map(len, names), np.uint64, len(names))
    longest = int(lengths.max(initial=0))
    assert longest <= LONGEST_NAME, f"a name of {longest} bytes"
    num_buckets = _SPARSE << max(0, len(names) - 1).bit_length()
    buckets = np.fromiter(map(crc32, names), np.uint32, len(names)) & np.uint32(num_buckets - 1)
    order = np.argsort(buckets, kind="stable")
    buckets = buckets[order]
    sizes = lengths[order] + np.uint64(_RECORD.itemsize)
    # The record of nobody comes first: where a bucket without a file leads to.
    offsets = np.cumsum(sizes) - sizes + np.uint64(_RECORD.itemsize + _FIRST_NBYTES)
    wide = np.uint32 if sizes.sum() < _NOBODY - _RECORD.itemsize else np.uint64
    firsts = np.full(num_buckets, _FIRST_NBYTES, wide)
    firsts[buckets[::-1]] = offsets[::-1]  # of those that share a bucket the first stays
    by_name = np.zeros(len(names), wide)
    by_name[order] = offsets
    tables: dict[str, bytes | bytearray] = {
        "records": _records(names, lengths, columns, order, buckets) + bytes(longest),
        "firsts": firsts.tobytes(),
        "by_name": by_name.tobytes(),
    }
    places = {}
    with writer.segment_writer() as hand:
        for name, table in tables.items():
            places[name] = (hand.write(memoryview(table)), len(table))
        about = {
            "places": places,
            "lengths": np.unique(lengths).tolist(),
            "offset_nbytes": np.dtype(wide).itemsize,
            "totals": [int(columns.stored_nbytes.sum()), int(columns.nbytes.sum())],
            "facts": facts,
        }
        head = json.dumps(about).encode()
        hand.write(head + _TRAILER.pack(hand.write(b""), len(head), _MAGIC))


def _records(
    names: Sequence[bytes],
    lengths: NDArray[np.uint64],
    columns: Columns,
    order: NDArray[np.intp],
    buckets: NDArray[np.uint32],
) -> bytearray:
    """Nobody's record, then each file's with its name; `buckets` are in `order` already."""
    rows = np.zeros(len(names), _RECORD)
    at = columns.at[order]
    rows["nbytes"] = columns.nbytes[order]
    rows["codec"] = columns.codec[order]
    rows["last"] = np.append(buckets[1:] != buckets[:-1], [True])[: len(names)]
    rows["start"] = at & np.uint64(OFFSET_MASK)
    rows["stop"] = rows["start"] + columns.stored_nbytes[order]
    rows["segment"] = at >> np.uint64(OFFSET_BITS)
    rows["kind"] = lengths[order]
    rows["kind"][rows["codec"] != PLAIN] |= np.uint32(_NOT_PLAIN)
    nobody = np.zeros(1, _RECORD)
    nobody["kind"], nobody["last"] = _NOBODY, True
    fixed, size = memoryview(rows.tobytes()), _RECORD.itemsize
    made = bytearray(nobody.tobytes())  # one piece that grows: a million small ones are large
    for place, row in enumerate(order.tolist()):
        made += fixed[place * size : place * size + size]
        made += names[row]
    return made


class StagedFile(NamedTuple):
    """What the index knows of one file."""

    at: int
    stored_nbytes: int
    nbytes: int
    """As read."""
    codec: int


class StagingIndex(Sequence[str]):
    """The names of an arena in order, and the row of each."""

    def __init__(self, arena: Arena) -> None:
        trailers = (segment[-_TRAILER.size :] for segment in arena.segments)
        (trailer,) = (each for each in trailers if each[-len(_MAGIC) :] == _MAGIC)
        at, length, _ = _TRAILER.unpack(trailer)
        head = json.loads(bytes(arena.view(at, length)))
        self.facts: Mapping[str, object] = head["facts"]
        self.stored_nbytes: int
        self.raw_nbytes: int
        self.stored_nbytes, self.raw_nbytes = head["totals"]
        """Of all files: as they are stored, and as they are read."""
        tables = {name: arena.view(*place) for name, place in head["places"].items()}
        self.nbytes: int = sum(map(len, tables.values())) + length + _TRAILER.size
        """What the index itself takes."""
        wide: Literal["I", "Q"] = "I" if head["offset_nbytes"] == 4 else "Q"
        self._segments = arena.segments
        self._records = tables["records"]
        self._firsts = tables["firsts"].cast(wide)
        self._by_name = tables["by_name"].cast(wide)
        self._unpack = {n: struct.Struct(f"{_SECOND}{n}s").unpack_from for n in head["lengths"]}
        """By the length of a name; names of other lengths are not here."""

    def viewer(self, otherwise: View) -> View:
        """The bytes of one name in place; what is not there or not plain is `otherwise`'s.

        A closure over tables that do not change: a read costs less than a microsecond, and each
        name that is looked up is a part of that.
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
                return otherwise(key)
            if name == wanted and kind == length:
                found: memoryview = segments[segment][start:stop]
                return found
            return otherwise(key)  # another name of the same bucket, or stored in another way

        return view

    def find(self, key: str) -> StagedFile | None:
        """The row of one name; none where there is none."""
        try:
            wanted = key.encode()
        except UnicodeEncodeError:
            return None  # no name that we keep is such
        if len(wanted) not in self._unpack:
            return None
        offset = self._firsts[crc32(wanted) & (len(self._firsts) - 1)]
        while True:
            nbytes, codec, last = _FIRST(self._records, offset - _FIRST_NBYTES)
            start, stop, kind, segment, name = self._unpack[len(wanted)](self._records, offset)
            if kind & ~_NOT_PLAIN == len(wanted) and name == wanted:
                return StagedFile(segment << OFFSET_BITS | start, stop - start, nbytes, codec)
            if last:
                return None
            offset += _RECORD.itemsize + (kind & ~_NOT_PLAIN)

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
        length = _KIND(self._records, offset + _KIND_AT)[0] & ~_NOT_PLAIN
        return str(self._records[offset + _NAME_AT : offset + _NAME_AT + length], "utf-8")
