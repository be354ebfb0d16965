"""The files of a cache: many entries in one safetensors file, which grows while it is written.

A file begins with room for the header. Entries follow, each after its record and at a multiple of
64 bytes, large ones of a page. When the file is sealed, the header goes into the room; what is left
of the room, every record and every gap is a tensor of bytes, because safetensors allows no holes.
The file system keeps unwritten room as a hole.

While it grows, a file is `NAME.open`; sealing renames it to `NAME.safetensors`. Whoever changes a
file holds its lock (flock), which the kernel gives back when the process dies. A file that is
left open, or sealed when it was small, is taken up by the next writer; bytes past the length that
the index knows are a torn tail, and are cut off.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_digest, xxh3_128

from gracetune.cache.index import ShardRow, TensorSlice
from gracetune.atomic_files import fsync_path
from gracetune.errors import CacheError
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.cache.index import CacheIndex, EntryRow

    Bytes = NDArray[np.uint8]


DEFAULT_DATA_OFFSET = MIB
MAX_SHARD_NBYTES = 256 * MIB
"""A file this large is sealed for good."""
OPEN_SUFFIX, SEALED_SUFFIX = ".open", ".safetensors"
_ROOM_MARK = b"gtshard1"
"""What a file begins with until it has a header; the length of its room follows."""


class ShardFile:
    """One file, held by its lock: nobody else writes, renames or removes it meanwhile."""

    def __init__(self, path: Path, descriptor: int, row: ShardRow) -> None:
        self.path = path
        self.row = row
        self.end = row.length
        self.header_nbytes = 0
        self._descriptor = descriptor

    def fits_entry(self, cost: int) -> bool:
        """Whether one more entry fits, with a header of so many bytes."""
        return self.end < MAX_SHARD_NBYTES and self.header_nbytes + cost <= self.row.data_offset

    def append(self, packed: PackedEntry, cost: int) -> int:
        """Write an entry past the end; where it begins. Not durable yet, and in no index."""
        record = align_up(self.end)
        begin = align_up(record + len(packed.record), entry_alignment(packed.nbytes))
        padded = packed.record.ljust(begin - record, b"\0")
        _write_all(self._descriptor, memoryview(padded), record)
        for place, part in zip(packed.places, packed.parts, strict=True):
            _write_all(self._descriptor, part.data, begin + place.offset)
        self.end = begin + packed.nbytes
        self.header_nbytes += cost
        return begin

    def sync(self) -> None:
        """Wait until the disk has what was appended."""
        os.fdatasync(self._descriptor)

    def seal(self, rows: Sequence[EntryRow]) -> None:
        """Write the header and rename; the file is a safetensors file from now on."""
        # The last entry may end in empty tensors or in nothing at all: the header must agree.
        os.ftruncate(self._descriptor, self.end)
        _write_all(self._descriptor, memoryview(build_header(rows, self.row.data_offset, self.end)), 0)
        self.sync()
        sealed = self.path.with_suffix(SEALED_SUFFIX)
        os.replace(self.path, sealed)
        fsync_path(sealed.parent)
        self.path = sealed
        self.release()

    def remove(self) -> None:
        """Delete the file while holding it."""
        self.path.unlink()
        self.release()

    def release(self) -> None:
        """Let others have it."""
        os.close(self._descriptor)


def create_shard(folder: Path, index: CacheIndex, cost: int) -> ShardFile:
    """An empty file, held and known to the index; its room holds at least one header of `cost`."""
    while True:
        path = folder / f"{secrets.token_hex(8)}{OPEN_SUFFIX}"
        path.touch()
        descriptor = _lock(path)
        if descriptor is None:
            continue  # someone cleaning up was faster
        room = align_up(max(DEFAULT_DATA_OFFSET, cost + _FIXED_COST))
        os.ftruncate(descriptor, room)
        _write_all(descriptor, memoryview(_ROOM_MARK + room.to_bytes(8, "little")), 0)
        os.fsync(descriptor)
        fsync_path(folder)
        row = ShardRow(path.stem, room, room)
        index.add_shard(row)
        shard = ShardFile(path, descriptor, row)
        shard.header_nbytes = _FIXED_COST
        return shard


def adopt_shard(folder: Path, index: CacheIndex, cost: int) -> ShardFile | None:
    """Go on with a file that nobody writes: one left open, or one sealed when it was small."""
    for path in appendable_shards(folder):
        shard = lock_shard(path, index)
        if shard is None:
            continue
        rows = index.rows_in_shard(shard.row.name)
        shard.header_nbytes = _FIXED_COST + sum(header_cost(row.key, row.tensors) for row in rows)
        if not shard.fits_entry(cost):
            if path.suffix == OPEN_SUFFIX:
                shard.seal(rows)
            else:
                shard.release()
            continue
        if path.suffix == SEALED_SUFFIX:
            shard.path = path.with_suffix(OPEN_SUFFIX)
            os.replace(path, shard.path)
        return shard
    return None


def lock_shard(path: Path, index: CacheIndex) -> ShardFile | None:
    """Lock a file that is there and that the index knows; none where another process has it."""
    descriptor = _lock(path)
    if descriptor is None:
        return None
    row = index.shard(path.stem)
    if row is None:  # its maker died before the index knew of it
        path.unlink()
        os.close(descriptor)
        return None
    if path.suffix == OPEN_SUFFIX:
        os.ftruncate(descriptor, max(row.length, row.data_offset))
    return ShardFile(path, descriptor, row)


def appendable_shards(folder: Path) -> Iterator[Path]:
    """Files that a writer may go on with: open ones first, then sealed ones under half full."""
    files = sorted(folder.iterdir())
    yield from (path for path in files if path.suffix == OPEN_SUFFIX)
    for path in files:
        if path.suffix == SEALED_SUFFIX and _size(path) < MAX_SHARD_NBYTES // 2:
            yield path


def open_shard(folder: Path, name: str, flags: int = 0) -> int | None:
    """A descriptor of this file, open or sealed; it may be renamed while we look."""
    for suffix in (SEALED_SUFFIX, OPEN_SUFFIX, SEALED_SUFFIX, OPEN_SUFFIX):
        try:
            return os.open(folder / f"{name}{suffix}", os.O_RDONLY | os.O_CLOEXEC | flags)
        except FileNotFoundError:
            continue
    return None


def shard_length(folder: Path, name: str) -> int:
    """The bytes of this file; none where it is gone."""
    descriptor = open_shard(folder, name)
    if descriptor is None:
        return 0
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def map_file(descriptor: int) -> Tensor:
    """A file's bytes, read when touched. Private: who writes to them changes a copy."""
    nbytes = os.fstat(descriptor).st_size
    # Unlike a mapping of Python's own, torch's keeps no descriptor: views cost no open files.
    return torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=False, size=nbytes, dtype=torch.uint8
    )


def read_data_offset(data: Bytes) -> int:
    """Where the entries of a file begin, by its first bytes: the mark, or the header."""
    mark, length = data[:8].tobytes(), int.from_bytes(data[8:16].tobytes(), "little")
    if mark == _ROOM_MARK:
        return length
    try:
        told = json.loads(data[8 : 8 + int.from_bytes(mark, "little")].tobytes())
        return int(told["__metadata__"]["room"])
    except (ValueError, KeyError, TypeError):  # killed while the header was written
        return DEFAULT_DATA_OFFSET


_FIXED_COST = 256
"""Of the length, the note that says what this is, and the gap up to the first entry."""


def header_cost(key: str, places: Iterable[TensorSlice]) -> int:
    """An upper bound of what an entry takes in the header, with a gap before each tensor."""
    return sum(
        260 + len(json.dumps(f"{key}/{place.name}")) + len(json.dumps(place.shape))
        for place in places
    )


def build_header(rows: Sequence[EntryRow], room: int, length: int) -> bytes:
    """The head of a safetensors file whose entries begin at `room`."""
    # Offsets count from the header's end, and their digits change its length: pad to the bound.
    size = align_up(_FIXED_COST + sum(header_cost(row.key, row.tensors) for row in rows)) - 8
    assert 8 + size <= room, f"a header of {size} bytes in room for {room}"
    metadata = {"format": "gracetune cache, 2", "room": f"{room}"}
    table: dict[str, object] = {"__metadata__": metadata}
    at = 8 + size
    pieces = ((row, place, row.offset + place.offset) for row in rows for place in row.tensors)
    for row, place, begin in pieces:
        _add_gap(table, at, begin, 8 + size)
        at = begin + place.nbytes
        table[f"{row.key}/{place.name}"] = {
            "dtype": place.dtype,
            "shape": place.shape,
            "data_offsets": [begin - 8 - size, at - 8 - size],
        }
    _add_gap(table, at, length, 8 + size)
    text = json.dumps(table, separators=(",", ":")).encode()
    assert len(text) <= size, f"{len(text)} bytes of header; at most {size} were expected"
    return size.to_bytes(8, "little") + text.ljust(size)


def _add_gap(table: dict[str, object], begin: int, end: int, origin: int) -> None:
    if end > begin:
        table[f"gap/{begin}"] = {
            "dtype": "U8",
            "shape": [end - begin],
            "data_offsets": [begin - origin, end - origin],
        }


def _lock(path: Path) -> int | None:
    """A descriptor that holds the file; none where it is gone or held by another."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the two calls it may have been renamed or removed: then it is not ours.
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another process renamed it
        return MAX_SHARD_NBYTES


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


# ------------------------------------------------------------------------------------------
# An entry as bytes: its tensors side by side, and before them a record of what they are.
#
# The record repeats what the index knows of an entry, so that a lost index can be made again from
# the
# files alone.


TENSOR_ALIGNMENT = 64
PAGE = 4096
LARGE_ENTRY_NBYTES = 64 * 1024
"""Entries from this size on begin and end with a page, so that they can be read past the kernel's
page cache."""
RECORD_MAGIC = b"gtentry1"
"""What a record begins with; its length and the checksum of its text follow."""
_HEAD_NBYTES = 24
_MOST_RECORD_NBYTES = 16 * 1024**2
_LOOKED_AT = 1024 * TENSOR_ALIGNMENT
DTYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""By their names in safetensors."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """An entry as it is written: where each tensor lies, the bytes, and what they hash to."""

    places: tuple[TensorSlice, ...]
    parts: tuple[Bytes, ...]
    """One of bytes for each place, none of them copied."""
    nbytes: int
    checksum: bytes
    record: bytes


class EntryRecord(NamedTuple):
    """What a record says, and where its entry begins."""

    key: str
    begin: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    checksum: bytes
    about: Mapping[str, str]


def pack(key: str, entry: Mapping[str, Tensor], about: Mapping[str, str]) -> PackedEntry:
    """Lay the tensors of an entry out one after the other, each aligned."""
    places: list[TensorSlice] = []
    parts: list[Bytes] = []
    end = 0
    for name, tensor in entry.items():
        if tensor.dtype not in DTYPES:
            raise CacheError(
                f"Entry {key}: {name} is of {tensor.dtype}, which a cache cannot keep. "
                f"Known: {', '.join(sorted(DTYPES.values()))}."
            )
        begin, data = align_up(end), tensor_bytes(tensor)
        places.append(
            TensorSlice(name, DTYPES[tensor.dtype], tuple(tensor.shape), begin, data.nbytes)
        )
        parts.append(data)
        end = begin + data.nbytes
    summed = checksum(parts)
    told = {"key": str(key), "tensors": places, "checksum": summed.hex(), "about": dict(about)}
    return PackedEntry(tuple(places), tuple(parts), end, summed, _record(told))


def unpack(data: Tensor, begin: int, places: Iterable[TensorSlice]) -> dict[str, Tensor]:
    """The tensors of an entry that begins there, as views."""
    return {
        place.name: data[begin + place.offset : begin + place.offset + place.nbytes]
        .view(TORCH_DTYPES[place.dtype])
        .view(place.shape)
        for place in places
    }


def tensor_bytes(tensor: Tensor) -> Bytes:
    """The bytes of a tensor, copied only where it is not in one piece in host memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: Bytes = flat.view(torch.uint8).numpy()
    return data


def checksum(parts: Iterable[Bytes]) -> bytes:
    """What an entry's bytes must hash to, in the order of its tensors.

    XXH3 finds what disks and kills do to bytes, faster than memory gives them; who may write here
    may write the index too, so nothing is lost by its not being a cryptographic one.
    """
    hasher = xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.digest()


def entry_checksum(data: Bytes, begin: int, places: Iterable[TensorSlice]) -> bytes:
    """What the bytes of an entry that begins there hash to."""
    starts = ((begin + place.offset, place.nbytes) for place in places)
    return checksum(data[start : start + nbytes] for start, nbytes in starts)


def align_up(offset: int, to: int = TENSOR_ALIGNMENT) -> int:
    """Up to the next place where a tensor may begin."""
    return -(-offset // to) * to


def entry_alignment(nbytes: int) -> int:
    """Where an entry of this size may begin."""
    return PAGE if nbytes >= LARGE_ENTRY_NBYTES else TENSOR_ALIGNMENT


def padded_nbytes(nbytes: int) -> int:
    """What an entry of this size takes, in a file and in memory."""
    return align_up(nbytes, PAGE) if nbytes >= LARGE_ENTRY_NBYTES else nbytes


def read_record(data: Bytes, at: int) -> EntryRecord | None:
    """The record that begins there; none where no whole one does."""
    head = data[at : at + _HEAD_NBYTES].tobytes()
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != RECORD_MAGIC or length > _MOST_RECORD_NBYTES:
        return None
    text = data[at + _HEAD_NBYTES : at + _HEAD_NBYTES + length].tobytes()
    if len(text) < length or xxh3_64_digest(text) != head[16:]:
        return None
    told = json.loads(text)
    places = tuple(TensorSlice(n, d, tuple(s), b, size) for n, d, s, b, size in told["tensors"])
    end = max((place.offset + place.nbytes for place in places), default=0)
    begin = align_up(at + _HEAD_NBYTES + length, entry_alignment(end))
    return EntryRecord(told["key"], begin, end, places, bytes.fromhex(told["checksum"]), told["about"])


def find_record(data: Bytes, at: int) -> int | None:
    """Where the next record begins, there or later; what follows tells whether it is whole."""
    while at + _HEAD_NBYTES <= len(data):
        some = data[at : at + _LOOKED_AT]
        heads = some[: len(some) // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT].reshape(-1, TENSOR_ALIGNMENT)[:, :8]
        found = np.flatnonzero((heads == np.frombuffer(RECORD_MAGIC, np.uint8)).all(axis=1))
        if len(found):
            return at + int(found[0]) * TENSOR_ALIGNMENT
        at += _LOOKED_AT
    return None


def _record(told: Mapping[str, object]) -> bytes:
    text = json.dumps(told, separators=(",", ":")).encode()
    return RECORD_MAGIC + len(text).to_bytes(8, "little") + xxh3_64_digest(text) + text
