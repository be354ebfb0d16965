"""The file format of cache shards: safetensors files that grow entry by entry.

    0             data_offset                                                     length
    | header space | record | tensors of entry 1 | record | tensors of entry 2 | ... |

A record precedes each entry and repeats the entry's row in the index, so that a lost index can be
rebuilt from the shards alone. Entries start at multiples of 64 bytes, large ones at multiples of a
page. The header space stays empty (a hole in the file) until the shard is sealed. Sealing writes a
safetensors header there, which lists all tensors. safetensors allows no gaps, so records and unused
space are listed as byte tensors named `gap/OFFSET`.

A growing shard is named `NAME.open`; sealing renames it to `NAME.safetensors`. A process changes a
shard only while it holds the shard's lock (flock), which the kernel releases if the process dies.

Crash safety. An entry exists only if the index has a row for it, and `ShardWriter` in
shard_store.py writes the row last. `length` is the length of the shard according to the index:

    before         | header | entry 1 |
                                      ^ length
    1. append      | header | entry 1 | entry 2 ..   the bytes may be incomplete; nobody reads them
                                      ^ length
    2. fdatasync   | header | entry 1 | entry 2 |    the bytes are on the disk
                                      ^ length
    3. commit      | header | entry 1 | entry 2 |    one SQLite transaction adds the row of entry 2
                                                ^ length             and sets the new length

If the process is killed

- before 3: the file has bytes beyond `length`, which nobody reads. The next process that locks the
  shard adds the complete entries among them to the index, and truncates the rest.
- after 3: the entry is complete.
- while it seals the shard: the file is still named `NAME.open`, and its rows are valid. The next
  writer appends to it or seals it.
- after it created a shard, but before the shard is in the index: the next writer finds no entry in
  the file and deletes it.

A shard with entries is deleted only after all of them were moved or deleted, and its file before
its row in the index. A file that the index does not list is therefore a sign of a damaged or older
index: its entries are read and added to the index.

A power failure may also undo SQLite's last commits (`synchronous=NORMAL`). The entries are then
missing, and are encoded again. Checksums keep damaged bytes from being used.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from xxhash import xxh3_64_digest, xxh3_128

from gracetune.atomic_files import fsync_path
from gracetune.cache.index import DamagedIndexError, EntryRow, ShardRow, TensorSlice
from gracetune.errors import CacheError
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.cache.index import CacheIndex

    Bytes = NDArray[np.uint8]


DEFAULT_DATA_OFFSET = MIB
"""Bytes reserved for the header of a new shard (cache file), unless its first entry needs more."""
MAX_SHARD_NBYTES = 256 * MIB
"""Size in bytes from which on a shard (cache file) gets no more entries."""
OPEN_SUFFIX, SEALED_SUFFIX = ".open", ".safetensors"
TENSOR_ALIGNMENT = 64
PAGE = 4096
LARGE_ENTRY_NBYTES = 64 * 1024
"""Size in bytes from which on entries are page-aligned, as direct reads (O_DIRECT) need."""
RECORD_MAGIC = b"gtentry1"
"""First bytes of a record, the JSON description in front of each cache entry.

The length and the checksum of the JSON text follow, then the text itself.
"""
_FIXED_HEADER_NBYTES = 256
"""Header bytes of a shard that do not belong to an entry: length, metadata and first gap."""
_RECORD_HEAD_NBYTES = 24
_MAX_RECORD_NBYTES = 16 * 1024**2
_SEARCH_NBYTES = 1024 * TENSOR_ALIGNMENT
"""Number of bytes that `find_record` reads at a time."""
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
"""Name of each torch dtype in safetensors files."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


# Shard files


class ShardFile:
    """A shard (a file of cache entries) that this process has locked, so that only it may write."""

    def __init__(self, path: Path, descriptor: int, row: ShardRow) -> None:
        self.path = path
        self.row = row
        self.end = row.length
        """Offset of the end of the last entry, where the next entry is appended."""
        self.header_nbytes = 0
        """Upper bound, in bytes, of the header that `seal` writes once the shard is complete."""
        self.num_recovered = 0
        """Number of entries that the index lacked and that `lock_shard` added to it."""
        self._descriptor = descriptor

    def fits_entry(self, header_nbytes: int) -> bool:
        """Return True if the shard and its header have space for one more entry.

        `header_nbytes` is the number of header bytes that the entry takes.
        """
        fits_header = self.header_nbytes + header_nbytes <= self.row.data_offset
        return self.end < MAX_SHARD_NBYTES and fits_header

    def append(self, packed: PackedEntry, header_nbytes: int) -> int:
        """Append an entry and return its offset.

        The caller then flushes the file (`sync`) and adds the entry's row to the index.
        """
        record = align_up(self.end)
        offset = align_up(record + len(packed.record), entry_alignment(packed.nbytes))
        padded = packed.record.ljust(offset - record, b"\0")
        _write_all(self._descriptor, memoryview(padded), record)
        for tensor, data in zip(packed.tensors, packed.data, strict=True):
            _write_all(self._descriptor, data.data, offset + tensor.offset)
        self.end = offset + packed.nbytes
        os.ftruncate(self._descriptor, self.end)  # the last tensors may be empty
        self.header_nbytes += header_nbytes
        return offset

    def sync(self) -> None:
        """Flush appended entries to the disk (fdatasync)."""
        os.fdatasync(self._descriptor)

    def seal(self, rows: Sequence[EntryRow]) -> None:
        """Seal the shard: write its header, rename it to .safetensors, and release its lock."""
        needed = header_nbytes(rows)
        if needed > self.row.data_offset:
            raise DamagedIndexError(
                f"The index of {self.path.parents[1]} says that shard {self.row.name} reserves "
                f"{self.row.data_offset} bytes for its header, which needs {needed}. `gracetune "
                f"cache verify {self.path.parents[1]} --repair` rebuilds the index."
            )
        os.ftruncate(self._descriptor, self.end)
        header = build_header(rows, self.row.data_offset, self.end)
        _write_all(self._descriptor, memoryview(header), 0)
        self.sync()
        sealed = self.path.with_suffix(SEALED_SUFFIX)
        with suppress(FileNotFoundError):  # the cache was deleted or moved: nothing is left to seal
            os.replace(self.path, sealed)
            fsync_path(sealed.parent)
            self.path = sealed
        self.release()

    def remove(self) -> None:
        """Delete the shard file and release its lock."""
        self.path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock on the shard."""
        os.close(self._descriptor)


def create_shard(folder: Path, index: CacheIndex, header_nbytes: int) -> ShardFile:
    """Create a shard (cache file), lock it and add it to the index.

    The space reserved for its header suffices for at least one entry that takes `header_nbytes`.
    """
    while True:
        path = folder / f"{secrets.token_hex(8)}{OPEN_SUFFIX}"
        path.touch()
        descriptor = _lock(path)
        if descriptor is None:
            continue  # another process has removed it as a leftover
        data_offset = align_up(max(DEFAULT_DATA_OFFSET, header_nbytes + _FIXED_HEADER_NBYTES))
        os.ftruncate(descriptor, data_offset)
        os.fsync(descriptor)
        fsync_path(folder)
        row = ShardRow(path.stem, data_offset, data_offset)
        index.add_shard(row)
        shard = ShardFile(path, descriptor, row)
        shard.header_nbytes = _FIXED_HEADER_NBYTES
        return shard


def adopt_shard(folder: Path, index: CacheIndex, header_nbytes: int) -> ShardFile | None:
    """Lock an existing shard that has space for another entry; None if there is none.

    `header_nbytes` is the number of header bytes that the entry takes.
    """
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


def lock_shard(path: Path, index: CacheIndex, *, remove_unlisted: bool = False) -> ShardFile | None:
    """Lock a shard for writing, and add intact entries that the index lacks to the index.

    Cuts off bytes that a killed process left incomplete. Returns None if another process has locked
    or removed the shard, or if the index does not list it and no entry in it is intact. Such a file
    is deleted if it was still growing, otherwise only with `remove_unlisted`.
    """
    descriptor = _lock(path)
    if descriptor is None:
        return None
    if path.suffix == OPEN_SUFFIX and path.with_suffix(SEALED_SUFFIX).exists():
        # A copy from a backup: sealing it would replace the other file of the same name.
        path = path.rename(path.with_stem(secrets.token_hex(8)))
    row, count = index.shard(path.stem), 0
    if row is None or row.length != os.fstat(descriptor).st_size:
        count = add_unlisted_entries(index, path.stem, map_file(descriptor).numpy())
        row = index.shard(path.stem)
    if row is None:
        if path.suffix == OPEN_SUFFIX or remove_unlisted:
            path.unlink()
        os.close(descriptor)
        return None
    if path.suffix == OPEN_SUFFIX:
        os.ftruncate(descriptor, row.length)
    shard = ShardFile(path, descriptor, row)
    shard.num_recovered = count
    return shard


def add_unlisted_entries(index: CacheIndex, name: str, data: Bytes) -> int:
    """Add the intact entries of a shard that the index lacks; return their number.

    Also sets the shard's length in the index. Entries before the length that the index has were
    deleted, and are not added.
    """
    shard, found = index.shard(name), unlisted_entries(index, name, data)
    if shard is None and not found:
        return 0
    if shard is None:
        # All entries are behind their first record, so the header may have the space before it.
        data_offset = next(offset for offset, _ in read_records(data, name))
        shard = ShardRow(name, data_offset, data_offset)
        index.add_shard(shard)
    ends = [row.end for row in (*index.rows_in_shard(name), *found) if row.end <= len(data)]
    index.add(found, name, max(shard.data_offset, *ends, 0))
    return len(found)


def unlisted_entries(index: CacheIndex, name: str, data: Bytes) -> list[EntryRow]:
    """Return the intact entries in a shard's bytes that are behind its length in the index."""
    shard = index.shard(name)
    start = 0 if shard is None else shard.length
    rows = [row for _, row in read_records(data, name) if row.offset >= start]
    return [row for row in rows if is_intact(row, data)]


@contextmanager
def locked_for_reading(path: Path) -> Iterator[Bytes | None]:
    """Lock a shard and yield its bytes, mapped; None if it is gone or locked by another process."""
    descriptor = _lock(path)
    if descriptor is None:
        yield None
        return
    try:
        yield map_file(descriptor).numpy()
    finally:
        os.close(descriptor)


def appendable_shards(folder: Path) -> Iterator[Path]:
    """Yield shards to append to: growing ones, then complete ones that are less than half full."""
    files = sorted(folder.iterdir())
    yield from (path for path in files if path.suffix == OPEN_SUFFIX)
    for path in files:
        if path.suffix == SEALED_SUFFIX and _size(path) < MAX_SHARD_NBYTES // 2:
            yield path


def open_shard(folder: Path, name: str, flags: int = 0) -> int | None:
    """Return a file descriptor for reading a shard, complete or growing; None if it is gone."""
    # Two rounds, because another process may rename it between two attempts.
    for suffix in (SEALED_SUFFIX, OPEN_SUFFIX, SEALED_SUFFIX, OPEN_SUFFIX):
        try:
            return os.open(folder / f"{name}{suffix}", os.O_RDONLY | os.O_CLOEXEC | flags)
        except FileNotFoundError:
            continue
    return None


def shard_length(folder: Path, name: str) -> int:
    """Return the file size of a shard in bytes; 0 if it is gone."""
    descriptor = open_shard(folder, name)
    if descriptor is None:
        return 0
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def map_file(descriptor: int) -> Tensor:
    """Memory-map a file as a uint8 tensor. Writes to the tensor do not change the file."""
    nbytes = os.fstat(descriptor).st_size
    # Unlike Python's mmap, torch's mapping keeps no descriptor open.
    return torch.from_file(
        f"/proc/self/fd/{descriptor}", shared=False, size=nbytes, dtype=torch.uint8
    )


def entry_header_nbytes(key: str, tensors: Iterable[TensorSlice]) -> int:
    """Return an upper bound of the bytes that an entry takes in a shard's safetensors header.

    The header lists the entry's tensors and the gaps between them.
    """
    return sum(
        260 + len(json.dumps(f"{key}/{tensor.name}")) + len(json.dumps(tensor.shape))
        for tensor in tensors
    )


def header_nbytes(rows: Sequence[EntryRow]) -> int:
    """Return an upper bound of the size of the header of a shard with these entries, in bytes."""
    entries_nbytes = sum(entry_header_nbytes(row.key, row.tensors) for row in rows)
    return align_up(_FIXED_HEADER_NBYTES + entries_nbytes)


def build_header(rows: Sequence[EntryRow], data_offset: int, length: int) -> bytes:
    """Build the safetensors header of a shard with these entries."""
    # Offsets count from the end of the header, whose length depends on their digits: so the header
    # is padded to its upper bound.
    size = header_nbytes(rows) - 8
    table: dict[str, object] = {"__metadata__": _metadata(data_offset)}
    position = 8 + size
    for row in rows:
        for tensor, (name, item) in zip(row.tensors, _header_items(row, 8 + size), strict=True):
            offset = row.offset + tensor.offset
            table |= _gap_item(position, offset, 8 + size)
            table[name] = item
            position = offset + tensor.nbytes
    table |= _gap_item(position, length, 8 + size)
    text = json.dumps(table, separators=(",", ":")).encode()
    assert len(text) <= size, f"the header has {len(text)} bytes; at most {size} were expected"
    return size.to_bytes(8, "little") + text.ljust(size)


def is_header_intact(
    data: Bytes, data_offset: int, rows: Iterable[EntryRow], records: Iterable[EntryRow]
) -> bool:
    """Return True if a sealed shard's header is what `build_header` wrote.

    It lists the entries `rows`, and may list deleted entries, which are among the `records`.
    """
    size = int.from_bytes(data[:8].tobytes(), "little")
    try:
        table = json.loads(data[8 : 8 + size].tobytes())
    except ValueError:
        return False
    if not isinstance(table, dict) or table.pop("__metadata__", None) != _metadata(data_offset):
        return False
    for row in rows:
        if any(table.pop(name, None) != item for name, item in _header_items(row, 8 + size)):
            return False
    rest = [pair for pair in table.items() if not _is_gap(*pair, 8 + size)]
    deleted = [pair for row in records for pair in _header_items(row, 8 + size)] if rest else []
    return all(pair in deleted for pair in rest)


def _metadata(data_offset: int) -> dict[str, str]:
    return {"format": "gracetune cache, 2", "room": f"{data_offset}"}


def _header_items(row: EntryRow, header_end: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield name and description of each tensor of an entry, as in a safetensors header."""
    for tensor in row.tensors:
        begin = row.offset + tensor.offset - header_end
        yield (
            f"{row.key}/{tensor.name}",
            {
                "dtype": tensor.dtype,
                "shape": [*tensor.shape],
                "data_offsets": [begin, begin + tensor.nbytes],
            },
        )


def _is_gap(name: str, item: object, header_end: int) -> bool:
    match item:
        case {"data_offsets": [int(begin), int(end)]}:
            return {name: item} == _gap_item(begin + header_end, end + header_end, header_end)
    return False


def _gap_item(begin: int, end: int, header_end: int) -> dict[str, object]:
    """Return the header item of the bytes between two tensors; empty if there are none."""
    if end <= begin:
        return {}
    return {
        f"gap/{begin}": {
            "dtype": "U8",
            "shape": [end - begin],
            "data_offsets": [begin - header_end, end - header_end],
        }
    }


def _lock(path: Path) -> int | None:
    """Open and lock a file; return its descriptor, or None if it is gone or already locked."""
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
    """An entry converted to the bytes that are written to a shard."""

    tensors: tuple[TensorSlice, ...]
    data: tuple[Bytes, ...]
    """Bytes of each tensor, without a copy where possible."""
    nbytes: int
    """Number of bytes from the start of the first to the end of the last tensor."""
    checksum: bytes
    record: bytes


def pack(key: str, entry: Mapping[str, Tensor], about: Mapping[str, str]) -> PackedEntry:
    """Convert an entry to the bytes of its aligned tensors and of its record.

    The record describes the entry (`about` is part of it) and is written in front of the tensors.
    """
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
    """Return the tensors of the entry at offset `begin`, as views of the bytes in `data`."""
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
    """Return the XXH3 checksum of an entry's bytes, in the order of its tensors.

    XXH3 detects damage by disks and crashes, and takes less time than fetching the bytes from
    memory. A cryptographic hash would add no security, because whoever can change a shard can also
    change its checksum in the index.
    """
    hasher = xxh3_128()
    for part in parts:
        hasher.update(part.data)
    return hasher.digest()


def entry_checksum(data: Bytes, begin: int, tensors: Iterable[TensorSlice]) -> bytes:
    """Compute the checksum of the entry at offset `begin` of `data`."""
    spans = ((begin + tensor.offset, tensor.nbytes) for tensor in tensors)
    return checksum(data[start : start + nbytes] for start, nbytes in spans)


def is_intact(row: EntryRow, data: Bytes) -> bool:
    """Return True if an entry is complete in its shard's bytes and matches its checksum."""
    is_complete = row.end <= len(data)
    return is_complete and entry_checksum(data, row.offset, row.tensors) == row.checksum


def align_up(offset: int, to: int = TENSOR_ALIGNMENT) -> int:
    """Round an offset up to a multiple of `to`."""
    return -(-offset // to) * to


def entry_alignment(nbytes: int) -> int:
    """Return the alignment of an entry of `nbytes` bytes: a page if it is large, else 64."""
    return PAGE if nbytes >= LARGE_ENTRY_NBYTES else TENSOR_ALIGNMENT


def padded_nbytes(nbytes: int) -> int:
    """Return the buffer size for reading an entry: whole pages if the entry is large."""
    return align_up(nbytes, PAGE) if nbytes >= LARGE_ENTRY_NBYTES else nbytes


def read_records(data: Bytes, shard: str) -> Iterator[tuple[int, EntryRow]]:
    """Yield each intact record in a shard's bytes: its offset, and the row of its entry.

    The entry itself may be damaged or incomplete. `shard` is the name of the shard.
    """
    # Searched from the start, because a damaged header does not tell where the entries begin.
    offset = find_record(data, 0)
    while offset is not None:
        row = read_record(data, offset, shard)
        if row is None:
            offset = find_record(data, offset + TENSOR_ALIGNMENT)
            continue
        yield offset, row
        offset = find_record(data, align_up(row.end) if row.end <= len(data) else row.offset)


def read_record(data: Bytes, offset: int, shard: str = "") -> EntryRow | None:
    """Parse the description of a cache entry (record) at `offset`; None if it is not intact.

    It repeats the entry's row in the index, so that a lost index can be rebuilt.
    """
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
    return EntryRow(0, record["key"], shard, begin, nbytes, tensors, digest, record["about"])


def find_record(data: Bytes, offset: int) -> int | None:
    """Return the offset of the first description of an entry (record) at or after `offset`.

    Only its first bytes are checked, so the record may be incomplete. None if there is none.
    """
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
