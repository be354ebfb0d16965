"""From names to places in an arena: a table of numbers that lies in the arena itself.

Every process that maps the arena has the index with it, at no cost of its own. The rows lie in the
order of their names' hashes, so that one number leads to the first row to look at.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload
from zlib import crc32

import numpy as np

from gracetune.memory.arena import OFFSET_BITS, OFFSETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from gracetune.memory.arena import Arena, ArenaWriter

    Find = Callable[[str], tuple[int, int, int, int] | None]
    View = Callable[[str], memoryview | None]

_ROW = np.dtype(
    [("name", "<u8"), ("at", "<u8"), ("stored", "<u8"), ("nbytes", "<u8"), ("length", "<u2"),
     ("codec", "u1")]
)  # fmt: skip
_ROW_NBYTES = _ROW.itemsize
_UNPACK = struct.Struct("<QQQQHB").unpack_from
_TRAILER = struct.Struct("<QQ8s")
"""Where the JSON head is, how long it is, and what all this is."""
_MAGIC = b"gtindex1"

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
    assert lengths.max(initial=0) <= LONGEST_NAME, f"a name of {lengths.max()} bytes"
    buckets = np.fromiter(map(crc32, names), np.uint32, len(names))
    num_buckets = 1 << max(0, len(names) - 1).bit_length()
    buckets &= np.uint32(num_buckets - 1)
    order = np.argsort(buckets, kind="stable")
    bounds = np.zeros(num_buckets + 1, np.uint32)
    np.cumsum(np.bincount(buckets, minlength=num_buckets), out=bounds[1:])
    rows = np.zeros(len(names), _ROW)
    rows["name"] = (np.cumsum(lengths) - lengths)[order]
    rows["length"] = lengths[order]
    rows["at"] = columns.at[order]
    rows["stored"] = columns.stored_nbytes[order]
    rows["nbytes"] = columns.nbytes[order]
    rows["codec"] = columns.codec[order]
    by_name = np.zeros(len(names), np.uint32)
    by_name[order] = np.arange(len(names), dtype=np.uint32)
    tables: dict[str, bytes | NDArray[Any]] = {
        "names": b"".join(names),
        "rows": rows,
        "bounds": bounds,
        "by_name": by_name,
    }
    places = {}
    with writer.hand() as hand:
        for name, table in tables.items():
            data = bytes(table)
            places[name] = (hand.write(data), len(data))
        head = json.dumps({"places": places, "facts": facts}).encode()
        hand.write(head + _TRAILER.pack(hand.write(b""), len(head), _MAGIC))


class Index(Sequence[str]):
    """The names of an arena in order, and the row of each."""

    def __init__(self, arena: Arena) -> None:
        trailers = (segment[-_TRAILER.size :] for segment in arena.segments)
        (trailer,) = (each for each in trailers if each[-len(_MAGIC) :] == _MAGIC)
        at, length, _ = _TRAILER.unpack(trailer)
        head = json.loads(bytes(arena.view(at, length)))
        self.facts: Mapping[str, object] = head["facts"]
        tables = {name: arena.view(*place) for name, place in head["places"].items()}
        self.nbytes: int = sum(map(len, tables.values())) + length + _TRAILER.size
        """What the index itself takes."""
        self._names = tables["names"]
        self._rows = tables["rows"]
        self._bounds = tables["bounds"].cast("I")
        self._by_name = tables["by_name"].cast("I")
        self.find = _finder(self._names, self._rows, self._bounds)
        """Place, stored bytes, bytes as read and codec of one name; none where there is none."""
        self.view = _viewer(self._names, self._rows, self._bounds, arena.segments)
        """The bytes of one name in place; none where it is not there, or not stored as it is."""

    def __len__(self) -> int:
        return len(self._by_name)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self._name(number) for number in range(*place.indices(len(self)))]
        return self._name(range(len(self))[place])

    def __iter__(self) -> Iterator[str]:
        return map(self._name, range(len(self)))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) is not None

    def totals(self) -> tuple[int, int]:
        """Stored bytes and bytes as read, of all files."""
        rows = np.frombuffer(self._rows, _ROW)
        return int(rows["stored"].sum()), int(rows["nbytes"].sum())

    def _name(self, number: int) -> str:
        name, _, _, _, length, _ = _UNPACK(self._rows, self._by_name[number] * _ROW_NBYTES)
        return str(self._names[name : name + length], "utf-8")


def _viewer(
    names: memoryview, rows: memoryview, bounds: memoryview, segments: Sequence[memoryview]
) -> View:
    """Finding and slicing in one: a read costs a microsecond, and each call is a tenth of it."""
    mask = len(bounds) - 2

    def view(key: str) -> memoryview | None:
        try:
            wanted = key.encode()
        except UnicodeEncodeError:
            return None
        bucket = crc32(wanted) & mask
        for row in range(bounds[bucket], bounds[bucket + 1]):
            name, at, stored, _, length, codec = _UNPACK(rows, row * _ROW_NBYTES)
            if codec == PLAIN and names[name : name + length] == wanted:
                offset = at & OFFSETS
                found: memoryview = segments[at >> OFFSET_BITS][offset : offset + stored]
                return found
        return None

    return view


def _finder(names: memoryview, rows: memoryview, bounds: memoryview) -> Find:
    """A function over tables that do not change."""
    mask = len(bounds) - 2

    def find(key: str) -> tuple[int, int, int, int] | None:
        try:
            wanted = key.encode()
        except UnicodeEncodeError:
            return None  # no name that we keep is such
        bucket = crc32(wanted) & mask
        for row in range(bounds[bucket], bounds[bucket + 1]):
            name, at, stored, nbytes, length, codec = _UNPACK(rows, row * _ROW_NBYTES)
            if names[name : name + length] == wanted:
                return at, stored, nbytes, codec
        return None

    return find
