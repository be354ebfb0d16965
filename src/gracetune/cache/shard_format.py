"""The file format of cache shards: safetensors files that grow entry by entry.

    0             data_offset                                                     length
    | header space | record | tensors of entry 1 | record | tensors of entry 2 | ... |

Each entry follows a record, which repeats what the index knows of it: a lost index can be rebuilt
from the shards alone. Entries start at multiples of 64 bytes, large ones at multiples of a page.
The header space stays empty (a hole in the file) until the shard is sealed. Then it gets a
safetensors header that lists all tensors. safetensors allows no gaps, so records and unused space
are listed as byte tensors named `gap/OFFSET`.

A growing shard is named `NAME.open`; sealing renames it to `NAME.safetensors`. A process changes a
shard only while it holds the shard's lock (flock), which the kernel releases if the process dies.

Crash safety: `ShardWriter` in shard_store.py orders the writes of an entry.

    1. append record and tensors behind `length`
    2. fdatasync the shard
    3. commit the rows and the new `length` to the index, in one SQLite transaction

    killed before 3: the shard has bytes beyond the `length` in the index. Nobody reads them, and
                     the next writer that opens the shard truncates it to `length`.
    killed after 3:  the entry is complete.
    killed in seal:  the file is still `NAME.open`, and its index rows are valid. The next writer
                     continues or seals it.
    killed between creating a shard and adding it to the index: the next writer removes the file.
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

from gracetune.atomic_files import fsync_path
from gracetune.cache.index import ShardRow, TensorSlice
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
"""Header space of a new shard, unless its first entry needs more."""
MAX_SHARD_NBYTES = 256 * MIB
"""A shard of this size gets no more entries."""
OPEN_SUFFIX, SEALED_SUFFIX = ".open", ".safetensors"
TENSOR_ALIGNMENT = 64
PAGE = 4096
LARGE_ENTRY_NBYTES = 64 * 1024
"""Entries from this size on start and end at page boundaries, as direct reads (O_DIRECT) need."""
RECORD_MAGIC = b"gtentry1"
"""First bytes of a record; the length and the checksum of its JSON text follow."""
_OPEN_MAGIC = b"gtshard1"
"""First bytes of a shard without a header; its data offset follows."""
_FIXED_HEADER_NBYTES = 256
"""Header bytes for its length, the metadata and the gap before the first entry."""
_RECORD_HEAD_NBYTES = 24
_MAX_RECORD_NBYTES = 16 * 1024**2
_SEARCH_NBYTES = 1024 * TENSOR_ALIGNMENT
"""Bytes that `find_record` searches at a time."""
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
"""Names of dtypes in safetensors files."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


# Shard files


class ShardFile:
    """A locked shard: no other process writes, renames or removes it."""

    def __init__(self, path: Path, descriptor: int, row: ShardRow) -> None:
        self.path = path
        self.row = row
        self.end = row.length
        """Offset at which the next record may start."""
        self.header_nbytes = 0
        """Upper bound of the header that sealing will write."""
        self._descriptor = descriptor

    def fits_entry(self, header_nbytes: int) -> bool:
        """Return True if one more entry fits, given its share of the header."""
        fits_header = self.header_nbytes + header_nbytes <= self.row.data_offset
        return self.end < MAX_SHARD_NBYTES and fits_header

    def append(self, packed: PackedEntry, header_nbytes: int) -> int:
        """Write an entry behind the end and return its offset. It is not yet durable or indexed."""
        record = align_up(self.end)
        offset = align_up(record + len(packed.record), entry_alignment(packed.nbytes))
        padded = packed.record.ljust(offset - record, b"\0")
        _write_all(self._descriptor, memoryview(padded), record)
        for tensor, data in zip(packed.tensors, packed.data, strict=True):
            _write_all(self._descriptor, data.data, offset + tensor.offset)
        self.end = offset + packed.nbytes
        self.header_nbytes += header_nbytes
        return offset

    def sync(self) -> None:
        """Flush appended entries to the disk."""
        os.fdatasync(self._descriptor)

    def seal(self, rows: Sequence[EntryRow]) -> None:
        """Write the header and rename the shard, which makes it a safetensors file; unlock it."""
        # The last entry may end in empty tensors, or be empty: set the length that the header has.
        os.ftruncate(self._descriptor, self.end)
        header = build_header(rows, self.row.data_offset, self.end)
        _write_all(self._descriptor, memoryview(header), 0)
        self.sync()
        sealed = self.path.with_suffix(SEALED_SUFFIX)
        os.replace(self.path, sealed)
        fsync_path(sealed.parent)
        self.path = sealed
        self.release()

    def remove(self) -> None:
        """Delete the shard and release its lock."""
        self.path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def create_shard(folder: Path, index: CacheIndex, header_nbytes: int) -> ShardFile:
    """Create a shard, lock it and add it to the index.

    Its header space is large enough for at least one entry that needs `header_nbytes` of it.
    """
    while True:
        path = folder / f"{secrets.token_hex(8)}{OPEN_SUFFIX}"
        path.touch()
        descriptor = _lock(path)
        if descriptor is None:
            continue  # another process has removed it as a leftover
        data_offset = align_up(max(DEFAULT_DATA_OFFSET, header_nbytes + _FIXED_HEADER_NBYTES))
        os.ftruncate(descriptor, data_offset)
        _write_all(descriptor, memoryview(_OPEN_MAGIC + data_offset.to_bytes(8, "little")), 0)
        os.fsync(descriptor)
        fsync_path(folder)
        row = ShardRow(path.stem, data_offset, data_offset)
        index.add_shard(row)
        shard = ShardFile(path, descriptor, row)
        shard.header_nbytes = _FIXED_HEADER_NBYTES
        return shard


def adopt_shard(folder: Path, index: CacheIndex, header_nbytes: int) -> ShardFile | None:
    """Lock an existing shard to append to; None if there is none with space."""
    for path in appendable_shards(folder):
        shard = lock_shard(path, index)
        if shard is None:
            continue
        rows = index.rows_in_shard(shard.row.name)
        entries_nbytes = sum(entry_header_nbytes(row.key, row.tensors) for row in rows)
        shard.header_nbytes = _FIXED_HEADER_NBYTES + entries_nbytes
        if not shard.fits_entry(header_nbytes):
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
    """Lock a shard; None if it is gone, unknown to the index or locked by another process."""
    descriptor = _lock(path)
    if descriptor is None:
        return None
    row = index.shard(path.stem)
    if row is None:  # its creator died before it added the shard to the index
        path.unlink()
        os.close(descriptor)
        return None
    if path.suffix == OPEN_SUFFIX:
        # Cut off what a killed writer appended without committing it.
        os.ftruncate(descriptor, max(row.length, row.data_offset))
    return ShardFile(path, descriptor, row)


def appendable_shards(folder: Path) -> Iterator[Path]:
    """Yield shards that a writer may continue: open ones, then sealed ones under half full."""
    files = sorted(folder.iterdir())
    yield from (path for path in files if path.suffix == OPEN_SUFFIX)
    for path in files:
        if path.suffix == SEALED_SUFFIX and _size(path) < MAX_SHARD_NBYTES // 2:
            yield path


def open_shard(folder: Path, name: str, flags: int = 0) -> int | None:
    """Open a shard for reading, whether it is open or sealed; None if it is gone."""
    # Two rounds, because another process may rename it between two attempts.
    for suffix in (SEALED_SUFFIX, OPEN_SUFFIX, SEALED_SUFFIX, OPEN_SUFFIX):
        try:
            return os.open(folder / f"{name}{suffix}", os.O_RDONLY | os.O_CLOEXEC | flags)
        except FileNotFoundError:
            continue
    return None


def shard_length(folder: Path, name: str) -> int:
    """Return the file size of a shard; 0 if it is gone."""
    descriptor = open_shard(folder, name)
    if descriptor is None:
        return 0
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def map_file(descriptor: int) -> Tensor:
    """Map a file as a uint8 tensor. The mapping is private: writes do not reach the file."""
    nbytes = os.fstat(descriptor).st_size
    # Unlike Python's mmap, torch's mapping keeps no descriptor open.
    return torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=False, size=nbytes, dtype=torch.uint8
    )


def read_data_offset(data: Bytes) -> int:
    """Return the offset of the first entry, from the first bytes of a shard."""
    magic, length = data[:8].tobytes(), int.from_bytes(data[8:16].tobytes(), "little")
    if magic == _OPEN_MAGIC:
        return length
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(magic, "little")].tobytes())
        return int(header["__metadata__"]["room"])
    except (ValueError, KeyError, TypeError):  # killed while the header was written
        return DEFAULT_DATA_OFFSET


def entry_header_nbytes(key: str, tensors: Iterable[TensorSlice]) -> int:
    """Return an upper bound of an entry's share of the header, with a gap before each tensor."""
    return sum(
        260 + len(json.dumps(f"{key}/{tensor.name}")) + len(json.dumps(tensor.shape))
        for tensor in tensors
    )


def build_header(rows: Sequence[EntryRow], data_offset: int, length: int) -> bytes:
    """Build the safetensors header of a shard with these entries."""
    # Offsets count from the end of the header, whose length depends on their digits: so the header
    # is padded to its upper bound.
    entries_nbytes = sum(entry_header_nbytes(row.key, row.tensors) for row in rows)
    size = align_up(_FIXED_HEADER_NBYTES + entries_nbytes) - 8
    assert 8 + size <= data_offset, f"a header of {size} bytes in {data_offset} bytes"
    metadata = {"format": "gracetune cache, 2", "room": f"{data_offset}"}
    table: dict[str, object] = {"__metadata__": metadata}
    position = 8 + size
    slices = ((row, tensor, row.offset + tensor.offset) for row in rows for tensor in row.tensors)
    for row, tensor, offset in slices:
        _add_gap(table, position, offset, 8 + size)
        position = offset + tensor.nbytes
        table[f"{row.key}/{tensor.name}"] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset - 8 - size, position - 8 - size],
        }
    _add_gap(table, position, length, 8 + size)
    text = json.dumps(table, separators=(",", ":")).encode()
    assert len(text) <= size, f"the header has {len(text)} bytes; at most {size} were expected"
    return size.to_bytes(8, "little") + text.ljust(size)


def _add_gap(table: dict[str, object], begin: int, end: int, header_end: int) -> None:
    if end > begin:
        table[f"gap/{begin}"] = {
            "dtype": "U8",
            "shape": [end - begin],
            "data_offsets": [begin - header_end, end - header_end],
        }


def _lock(path: Path) -> int | None:
    """Open and lock a file; None if it is gone or locked by another process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock it may have been renamed or removed: then `path` is another file.
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


# Entries as bytes


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """An entry as it is written to a shard."""

    tensors: tuple[TensorSlice, ...]
    data: tuple[Bytes, ...]
    """Bytes of each tensor, not copied."""
    nbytes: int
    """Bytes from the start of the first to the end of the last tensor."""
    checksum: bytes
    record: bytes


class EntryRecord(NamedTuple):
    """The contents of a record, and the offset of its entry."""

    key: str
    offset: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    checksum: bytes
    about: Mapping[str, str]


def pack(key: str, entry: Mapping[str, Tensor], about: Mapping[str, str]) -> PackedEntry:
    """Lay out the tensors of an entry one after the other, each aligned."""
    tensors: list[TensorSlice] = []
    parts: list[Bytes] = []
    end = 0
    for name, tensor in entry.items():
        if tensor.dtype not in DTYPES:
            raise CacheError(
                f"Entry {key}: {name} has the dtype {tensor.dtype}, which a cache cannot store. "
                f"Supported: {', '.join(sorted(DTYPES.values()))}."
            )
        offset, data = align_up(end), tensor_bytes(tensor)
        tensors.append(
            TensorSlice(name, DTYPES[tensor.dtype], tuple(tensor.shape), offset, data.nbytes)
        )
        parts.append(data)
        end = offset + data.nbytes
    digest = checksum(parts)
    record = {"key": str(key), "tensors": tensors, "checksum": digest.hex(), "about": dict(about)}
    return PackedEntry(tuple(tensors), tuple(parts), end, digest, _encode_record(record))


def unpack(data: Tensor, begin: int, tensors: Iterable[TensorSlice]) -> dict[str, Tensor]:
    """Return the tensors of the entry at `begin`, as views of `data`."""
    return {
        tensor.name: data[begin + tensor.offset : begin + tensor.offset + tensor.nbytes]
        .view(TORCH_DTYPES[tensor.dtype])
        .view(tensor.shape)
        for tensor in tensors
    }


def tensor_bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor, copied only if it is not contiguous in host memory."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: Bytes = flat.view(torch.uint8).numpy()
    return data


def checksum(parts: Iterable[Bytes]) -> bytes:
    """Return the checksum of an entry's bytes, in the order of its tensors.

    XXH3 detects what disks and crashes do to bytes, and is faster than memory. A cryptographic hash
    would add no security, because whoever can change a shard can change the index as well.
    """
    hasher = xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.digest()


def entry_checksum(data: Bytes, begin: int, tensors: Iterable[TensorSlice]) -> bytes:
    """Return the checksum of the entry at `begin`."""
    spans = ((begin + tensor.offset, tensor.nbytes) for tensor in tensors)
    return checksum(data[start : start + nbytes] for start, nbytes in spans)


def align_up(offset: int, to: int = TENSOR_ALIGNMENT) -> int:
    """Round up to a multiple of `to`."""
    return -(-offset // to) * to


def entry_alignment(nbytes: int) -> int:
    """Return the alignment of an entry of this size."""
    return PAGE if nbytes >= LARGE_ENTRY_NBYTES else TENSOR_ALIGNMENT


def padded_nbytes(nbytes: int) -> int:
    """Return the bytes that an entry of this size takes in a shard and in memory."""
    return align_up(nbytes, PAGE) if nbytes >= LARGE_ENTRY_NBYTES else nbytes


def read_record(data: Bytes, offset: int) -> EntryRecord | None:
    """Parse the record at `offset`; None if there is no complete one."""
    head = data[offset : offset + _RECORD_HEAD_NBYTES].tobytes()
    length = int.from_bytes(head[8:16], "little")
    if head[:8] != RECORD_MAGIC or length > _MAX_RECORD_NBYTES:
        return None
    start = offset + _RECORD_HEAD_NBYTES
    text = data[start : start + length].tobytes()
    if len(text) < length or xxh3_64_digest(text) != head[16:]:
        return None
    record = json.loads(text)
    tensors = tuple(TensorSlice(n, d, tuple(s), b, size) for n, d, s, b, size in record["tensors"])
    nbytes = max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
    begin = align_up(start + length, entry_alignment(nbytes))
    digest = bytes.fromhex(record["checksum"])
    return EntryRecord(record["key"], begin, nbytes, tensors, digest, record["about"])


def find_record(data: Bytes, offset: int) -> int | None:
    """Return the offset of the next record at or behind `offset`. It may be incomplete."""
    while offset + _RECORD_HEAD_NBYTES <= len(data):
        chunk = data[offset : offset + _SEARCH_NBYTES]
        rows = len(chunk) // TENSOR_ALIGNMENT
        heads = chunk[: rows * TENSOR_ALIGNMENT].reshape(-1, TENSOR_ALIGNMENT)[:, :8]
        found = np.flatnonzero((heads == np.frombuffer(RECORD_MAGIC, np.uint8)).all(axis=1))
        if len(found):
            return offset + int(found[0]) * TENSOR_ALIGNMENT
        offset += _SEARCH_NBYTES
    return None


def _encode_record(record: Mapping[str, object]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return RECORD_MAGIC + len(text).to_bytes(8, "little") + xxh3_64_digest(text) + text
