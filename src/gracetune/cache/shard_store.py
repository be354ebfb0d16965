"""Store encoded entries in the shards of a folder, with an SQLite index.

    FOLDER/gracetune-cache.json   marker: gracetune deletes nothing in folders without it
    FOLDER/index.sqlite           the location of each entry (cache/index.py)
    FOLDER/shards/                the entries (cache/shard_format.py)

Any number of processes and threads may read and write. A crash cannot leave an incomplete entry in
the index, because an entry is written in this order:

    append to the shard  ->  flush the disk  ->  commit the row to the index

shard_format.py shows what a crash leaves at each point. Each process compares an entry with its
checksum when it first reads it. A damaged entry is reported and removed from the index, and the
next run encodes it again. When a cache is opened, an index that is missing or unreadable is rebuilt
from the shards, and entries that it lacks are added to it. No shard is deleted before it was read.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Self, TypeVar

from gracetune.atomic_files import write_text
from gracetune.cache.index import (
    FORMAT,
    CacheIndex,
    DamagedIndexError,
    EntryRow,
    unwritable_error,
)
from gracetune.cache.keys import key_components
from gracetune.cache.shard_format import (
    LARGE_ENTRY_NBYTES,
    OPEN_SUFFIX,
    SEALED_SUFFIX,
    TORCH_DTYPES,
    add_unlisted_entries,
    adopt_shard,
    create_shard,
    entry_checksum,
    entry_header_nbytes,
    is_intact,
    lock_shard,
    map_file,
    open_shard,
    pack,
    padded_nbytes,
    shard_length,
    unpack,
)
from gracetune.cache.shard_reader import Bitset, MappedShards, ShardReader
from gracetune.cache.store import stack_entries
from gracetune.errors import CacheError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.shard_format import Bytes, ShardFile
    from gracetune.cache.store import Allocate, Entry, TryAllocate
    from gracetune.events.types import Event


MARKER = "gracetune-cache.json"
INDEX = "index.sqlite"
_CLOSED = -1
"""Value of `_pid` while a store is closed."""

Value = TypeVar("Value")


def _ignore(_: Event) -> None:
    """Ignore an event; the default for `emit`."""


class ShardStore:
    """A cache store in the files of one folder, for any number of processes and threads.

    `get` returns views of mapped files; `load` reads into memory of the caller. Once `put` returns,
    the entry survives a crash of the process. Reading never waits for writing.
    """

    _pid: int
    _use_lock: IndexUseLock
    _index: CacheIndex
    _writer: ShardWriter | None
    _maps: MappedShards
    _reader: ShardReader

    def __init__(
        self,
        folder: Path,
        emit: Callable[[Event], None] = _ignore,
        *,
        check: bool = True,
        recover: bool = True,
        max_maps: int = 1024,
        max_open: int = 64,
        max_cached_entries: int = 65536,
    ) -> None:
        """Open or create the cache in `folder`.

        `check`: compare each entry with its checksum when it is first read. `recover`: rebuild an
        unreadable index from the shards, and add entries that the index lacks; otherwise, an
        unreadable index raises `DamagedIndexError`. `max_maps` and
        `max_open` limit the mapped and the open files. `max_cached_entries` limits the index rows
        and the views that are kept in memory (about 1 kB each).
        """
        self.folder = folder
        _, self.shards, _ = cache_paths(folder)
        self._emit = emit
        self._reported_refusal = False
        self._damaged_shards: set[str] = set()
        """Names of shards for which a damaged entry was already reported."""
        self._check = check
        self._recover = recover
        self._max_maps = max_maps
        self._max_open = max_open
        self._max_cached_entries = max_cached_entries
        self._lock, self._write_lock = threading.RLock(), threading.RLock()
        try:
            write_marker(folder)
            self.shards.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable_error(folder, error.strerror or error) from error
        self._open()

    def get(self, key: str) -> Entry | None:
        """Return an entry as views of its file; None if it is missing or damaged."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return several entries as views of their files, in the order of the keys.

        The disk starts reading all of them before the first one is checked.
        """
        self._reopen_after_fork()
        with self._lock:
            new = [key for key in keys if key not in self._views]
            if not new:
                return [self._views[key] for key in keys]
        return self._view(keys)

    def gather(self, keys: Sequence[str], name: str, allocate: Allocate) -> Tensor | None:
        """Stack one tensor of each entry into newly allocated memory.

        Returns None if an entry is missing. If all entries are in the page cache, they are copied
        from the mapped files. Otherwise, entries that consist of this tensor alone are read
        straight into the result.
        """
        self._reopen_after_fork()
        found = self._find_rows(keys)
        rows = [found[key] for key in keys if key in found]
        if len(rows) < len(keys):
            return None
        tensors = rows[0].tensors
        is_single = [tensor.name for tensor in tensors] == [name] and tensors[0].nbytes > 0
        is_uniform = is_single and all(row.tensors == tensors for row in rows)
        if is_uniform and not self._reader.in_page_cache(rows):
            tensor = tensors[0]
            slab = allocate(len(rows) * tensor.nbytes)
            if all(self._read(rows, [*slab.numpy().reshape(len(rows), tensor.nbytes)])):
                return slab.view(TORCH_DTYPES[tensor.dtype]).view(len(rows), *tensor.shape)
        return stack_entries(self.get_many(keys), name, allocate)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:
        """Read entries into memory from `allocate`; where it returns None, use views of files."""
        self._reopen_after_fork()
        rows = self._find_rows(keys)
        allocated = {key: allocate(padded_nbytes(row.nbytes)) for key, row in rows.items()}
        buffers = {key: buffer for key, buffer in allocated.items() if buffer is not None}
        read = self._read(
            [rows[key] for key in buffers], [buffer.numpy() for buffer in buffers.values()]
        )
        entries: dict[str, Entry | None] = {}
        for (key, buffer), matches in zip(buffers.items(), read, strict=True):
            if matches is not None:
                entries[key] = unpack(buffer, 0, rows[key].tensors) if matches else None
        for key in rows.keys() - entries.keys():
            entries[key] = self._entry(rows[key])
        return [entries.get(key) for key in keys]

    def put(self, key: str, entry: Entry) -> None:
        """Store one entry. Prefer `put_many` for several: each call flushes the disk once."""
        self.put_many({key: entry})

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Write entries that do not exist yet, flush the disk, then commit them to the index."""
        with self._writing() as writer:
            writer.put(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its entry exists, without reading the entry.

        An entry that is in the index but beyond the end of its shard file does not exist; it is
        reported as damaged.
        """
        with self.index() as index:
            found = index.entry_ends(keys)
        lengths = {
            name: shard_length(self.shards, name) for name in {name for name, _ in found.values()}
        }
        short = [key for key, (name, end) in found.items() if end > lengths[name]]
        with self.index() as index:
            suspects = index.find_rows(short)
        lost = {key for key in short if key not in suspects or self._is_lost(suspects[key])}
        return [key in found and key not in lost for key in keys]

    def keys(self) -> Iterator[str]:
        """Yield every key; keys that are added or deleted meanwhile may or may not appear."""
        last = 0
        while True:
            with self.index() as index:
                page = index.page_after(last)
            if not page:
                return
            yield from (key for _, key in page)
            last = page[-1][0]

    def delete(self, keys: Sequence[str]) -> int:
        """Delete entries and return how many existed. `maintenance.compact` frees their bytes."""
        with self.index() as index:
            for key in keys:
                self._uncache(key)
            return index.delete(keys)

    def move(self, rows: Sequence[EntryRow], entries: Sequence[Entry]) -> None:
        """Copy entries to another shard and update their index rows.

        `rows` are their current rows. The caller has locked the old shard.
        """
        with self._writing() as writer:
            writer.move(rows, entries)

    def seal(self) -> None:
        """Seal the shard (cache file) being written: complete it to a safetensors file."""
        with self._writing() as writer:
            writer.finish()

    def rebuild_index(self) -> None:
        """Rebuild a damaged index from the shards."""
        with self._write_lock, self._lock:
            if self._writer is not None:
                self._writer.release()  # sealing would use the damaged index
            self.close()
            rebuild_index(self.folder, self._emit)

    def will_need(self, keys: Sequence[str]) -> None:
        """Start reading entries into the page cache in the background, if that helps.

        On a fast disk, large entries are not read ahead: reading them directly when they are needed
        avoids a second copy in the page cache.
        """
        self._reopen_after_fork()
        rows = self._find_rows(keys).values()
        read_all = self._reader.is_slow_disk or bool(self._reader.direct_read_refusal)
        self._reader.read_ahead(
            [row for row in rows if read_all or row.nbytes < LARGE_ENTRY_NBYTES]
        )

    def close(self) -> None:
        """Complete the shard (cache file) being written, and close all files.

        Later calls open them again.
        """
        if self._pid != os.getpid():
            return
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        with self._lock:
            self._maps.clear()
            self._reader.clear()
            self._views.clear()
            self._rows.clear()
            self._index.close()
            self._use_lock.close()
            self._pid = _CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def index(self) -> Iterator[CacheIndex]:
        """Yield the index, locked against other threads of this process."""
        self._reopen_after_fork()
        with self._lock:
            yield self._index

    @contextmanager
    def _writing(self) -> Iterator[ShardWriter]:
        self._reopen_after_fork()
        with self._write_lock:
            if self._writer is None:
                self._writer = ShardWriter(self.shards, self.folder / INDEX)
            try:
                yield self._writer
            except OSError as error:
                raise unwritable_error(self.folder, error.strerror or error) from error

    def _open(self) -> None:
        """Open the index and create file readers and caches, which belong to this process.

        A forked child calls it again, because it must not use its parent's.
        """
        self._use_lock, self._index = open_index(self.folder, self._emit, recover=self._recover)
        self._writer = None
        self._maps = MappedShards(self.shards, self._max_maps)
        self._reader = ShardReader(self.shards, self._max_open)
        self._views: dict[str, Entry] = {}
        self._rows: dict[str, EntryRow] = {}
        self._verified = Bitset()
        self._pid = os.getpid()

    def _reopen_after_fork(self) -> None:
        """Reopen all files if this process is a forked child, or if the store was closed."""
        if os.getpid() == self._pid:
            return
        if self._pid != _CLOSED:
            # SQLite forbids a child to use, or even to close, its parent's connection: keep it.
            self._parent_connections = (self._index, self._writer)
            if self._writer is not None:
                self._writer.release()
            # Another thread of the parent may have held the locks during the fork.
            self._lock, self._write_lock = threading.RLock(), threading.RLock()
        with self._lock:
            if os.getpid() != self._pid:
                self._open()

    def _find_rows(self, keys: Sequence[str]) -> dict[str, EntryRow]:
        """Return the index rows of these keys by key; rows that were read before are cached."""
        with self._lock:
            rows = {key: self._rows[key] for key in keys if key in self._rows}
            if len(rows) < len(keys):
                new = self._index.find_rows([key for key in keys if key not in rows])
                _add_bounded(self._rows, new, self._max_cached_entries)
                rows |= new
        return rows

    def _view(self, keys: Sequence[str]) -> list[Entry | None]:
        rows = self._find_rows(keys)
        if len(keys) > 1:
            self._reader.read_ahead([r for r in rows.values() if r.row_id not in self._verified])
        entries = {key: self._entry(row) for key, row in rows.items()}
        intact = {key: entry for key, entry in entries.items() if entry is not None}
        with self._lock:
            _add_bounded(self._views, intact, self._max_cached_entries)
        return [entries.get(key) for key in keys]

    def _entry(self, row: EntryRow) -> Entry | None:
        with self._lock:
            data = self._maps.data(row)
        if data is None:
            return self._find_moved_entry(row)
        is_intact = self._is_intact(row, data.numpy(), row.offset)
        return unpack(data, row.offset, row.tensors) if is_intact else None

    def _read(self, rows: Sequence[EntryRow], buffers: Sequence[Bytes]) -> list[bool | None]:
        """Read entries into buffers; True if intact, False if damaged, None if unreadable."""
        read = self._reader.read(rows, buffers, lambda row, data: self._is_intact(row, data, 0))
        self._report_direct_read_refusal()
        return read

    def _is_intact(self, row: EntryRow, data: Bytes, begin: int) -> bool:
        """Return True if an entry matches its checksum, which is computed once per process."""
        if not self._check or row.row_id in self._verified:
            return True
        if entry_checksum(data, begin, row.tensors) != row.checksum:
            self._drop_damaged(row, "its bytes differ from their checksum")
            return False
        with self._lock:
            self._verified.add(row.row_id)
        return True

    def _find_moved_entry(self, old: EntryRow) -> Entry | None:
        """Look up again an entry whose shard is gone; return it if it was moved, else None."""
        self._uncache(old.key)
        with self.index() as index:
            row = index.find_rows([old.key]).get(old.key)
        if row is None:
            return None
        if (row.shard, row.offset) == (old.shard, old.offset):
            self._drop_damaged(row, f"shard {row.shard} is gone or too short")
            return None
        return self._entry(row)

    def _is_lost(self, row: EntryRow) -> bool:
        """Return True if an entry is beyond the end of its shard and was not moved."""
        if row.end <= shard_length(self.shards, row.shard):
            return False
        return self._find_moved_entry(row) is None

    def _drop_damaged(self, row: EntryRow, why: str) -> None:
        """Remove a damaged entry from the index; report only the first one of each shard."""
        self._uncache(row.key)
        with self.index() as index:
            index.delete_row(row)
            was_reported = row.shard in self._damaged_shards
            self._damaged_shards.add(row.shard)
        if not was_reported:
            text = f"cache entry {row.key} in {self.folder} is damaged ({why}). It is encoded again"
            text += ", like other damaged entries of the same shard, which are not reported"
            self._emit(Notice(text, level="warning", fallback=True))

    def _report_direct_read_refusal(self) -> None:
        """Emit a warning, once, if direct reads do not work and the page cache is used instead."""
        if self._reader.direct_read_refusal and not self._reported_refusal:
            self._reported_refusal = True
            text = f"{self._reader.direct_read_refusal}: entries are read through the page cache"
            self._emit(Notice(text, level="warning", fallback=True))

    def _uncache(self, key: str) -> None:
        with self._lock:
            self._views.pop(key, None)
            self._rows.pop(key, None)


def _add_bounded(kept: dict[str, Value], new: Mapping[str, Value], max_items: int) -> None:
    """Add items to a dictionary; beyond `max_items`, drop those added first."""
    kept.update(new)
    while len(kept) > max_items:
        del kept[next(iter(kept))]


def cache_paths(folder: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a cache's index file, shard folder and marker file."""
    return folder / INDEX, folder / "shards", folder / MARKER


def write_marker(folder: Path) -> None:
    """Mark a folder as a gracetune cache with a file; unmarked folders are never cleaned up."""
    if not is_cache(folder):
        write_text(folder / MARKER, json.dumps({"gracetune cache": FORMAT}) + "\n")


def is_cache(folder: Path) -> bool:
    """Return True if a folder has the marker file of a gracetune cache."""
    return (folder / MARKER).is_file()


class ShardWriter:
    """Appends entries to one shard until it is full, then to another; used by one thread.

    It flushes an entry's bytes to the disk before it commits the entry's row to the index. This
    order makes writing crash-safe (see shard_format.py).
    """

    def __init__(self, shards: Path, index: Path) -> None:
        self._folder = shards
        # A connection of its own, so that readers do not wait while the disk is flushed.
        self._index = CacheIndex(index)
        self._file: ShardFile | None = None

    def put(self, entries: Mapping[str, Entry]) -> None:
        """Append the entries whose keys are not in the index yet, and commit them to the index."""
        existing = self._index.existing_keys([*entries])
        new = [(_new_row(key, entry), entry) for key, entry in entries.items()]
        self._append([(row, entry) for row, entry in new if row.key not in existing], moved=False)

    def move(self, rows: Sequence[EntryRow], entries: Sequence[Entry]) -> None:
        """Append existing entries to the current shard and update their location in the index."""
        self._append([*zip(rows, entries, strict=True)], moved=True)

    def copy_if_missing(self, row: EntryRow) -> bool:
        """Copy an entry by the row of another index, if this index lacks it and it is intact."""
        data = None if self._index.existing_keys([row.key]) else _map_shard(self._folder, row.shard)
        if data is None or not is_intact(row, data.numpy()):
            return False
        self._append([(row, unpack(data, row.offset, row.tensors))], moved=False)
        return True

    def finish(self) -> None:
        """Complete the current shard, so that it becomes a safetensors file; remove it if empty."""
        if self._file is None:
            return
        file, self._file = self._file, None
        rows = self._index.rows_in_shard(file.row.name)
        if rows:
            file.seal(rows)
            return
        try:
            self._index.require_intact()
        except CacheError:
            file.release()
            raise
        file.remove()
        self._index.delete_empty_shard(file.row.name)

    def close(self) -> None:
        """Complete the current shard, so that it is a safetensors file, and close the index."""
        self.finish()
        self._index.close()

    def release(self) -> None:
        """Unlock the current shard without completing it; another writer may append to it."""
        if self._file is not None:
            self._file.release()
            self._file = None

    def _append(self, entries: Sequence[tuple[EntryRow, Entry]], *, moved: bool) -> None:
        """Append entries to as many shards as needed; commit the rows of each shard together."""
        rows: list[EntryRow] = []
        try:
            for row, entry in entries:
                packed = pack(row.key, entry, row.about)
                header_nbytes = entry_header_nbytes(row.key, packed.tensors)
                file = self._file
                if file is None or not file.fits_entry(header_nbytes):
                    self._commit(rows, moved)
                    rows = []
                    self.finish()
                    file = adopt_shard(self._folder, self._index, header_nbytes)
                    file = file or create_shard(self._folder, self._index, header_nbytes)
                    self._file = file
                rows.append(
                    row._replace(
                        shard=file.row.name,
                        offset=file.append(packed, header_nbytes),
                        nbytes=packed.nbytes,
                        tensors=packed.tensors,
                        checksum=packed.checksum,
                    )
                )
            self._commit(rows, moved)
        except BaseException:  # also Ctrl-C: the shard may end with half an entry
            self.release()
            raise

    def _commit(self, rows: Sequence[EntryRow], moved: bool) -> None:
        if rows:
            assert self._file is not None, "rows without a shard"
            self._file.sync()
            self._index.add(rows, self._file.row.name, self._file.end, moved)


def _new_row(key: str, entry: Entry) -> EntryRow:
    """Return the index row of a new entry, before it is known in which shard it is stored."""
    assert entry is not None, f"there is no entry for {key}"
    return EntryRow(0, str(key), "", 0, 0, (), b"", key_components(key))


# Rebuilding the index from the records in the shards. Entries that were deleted but not yet
# compacted come back. They are valid, since a key identifies its content, and `cache gc` removes
# them again.


class IndexUseLock:
    """A shared lock that a process holds while it has the index open.

    Rebuilding the index takes the lock exclusively: it fails while another process has the index
    open, and processes that open the index wait until it is rebuilt.
    """

    def __init__(self, shards: Path) -> None:
        self._descriptor: int | None = _open_folder(shards)
        with suppress(OSError):  # file systems without locks: a rebuild cannot detect other users
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock. Closing it in a forked child does not release the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


def open_index(
    folder: Path, emit: Callable[[Event], None], *, recover: bool
) -> tuple[IndexUseLock, CacheIndex]:
    """Open the index of a cache, and lock it against being rebuilt by another process.

    `recover`: rebuild an unreadable index from the shards, and add entries that the index lacks.
    """
    marker = folder / MARKER
    _check_format(marker)
    # Only one process at a time opens the index, so that only one rebuilds it and others wait.
    with _exclusive(marker):
        try:
            return _lock_and_open(folder, emit, recover)
        except DamagedIndexError:
            if not recover:
                raise
            _rebuild_index(folder, emit)
            return _lock_and_open(folder, emit, recover)


def _lock_and_open(
    folder: Path, emit: Callable[[Event], None], recover: bool
) -> tuple[IndexUseLock, CacheIndex]:
    with ExitStack() as undo:
        use_lock = IndexUseLock(cache_paths(folder)[1])
        undo.callback(use_lock.close)
        index = _open_index(folder)
        undo.callback(index.close)
        if recover:
            _recover_entries(index, folder, emit)
        undo.pop_all()
        return use_lock, index


def _open_index(folder: Path) -> CacheIndex:
    path, shards, _ = cache_paths(folder)
    has_shards = bool(_shard_names(shards))
    # SQLite takes a missing or empty file for a new database.
    if has_shards and (not path.exists() or not path.stat().st_size):
        problem = "is empty" if path.exists() else "is missing"
        raise DamagedIndexError(
            f"The cache index {path} {problem}, but the cache has shards. "
            f"`gracetune cache verify {folder} --repair` rebuilds it from them."
        )
    return CacheIndex(path, create=not has_shards)


def _check_format(marker: Path) -> None:
    """Refuse a cache of another format; the marker names the format."""
    try:
        found = json.loads(marker.read_text())["gracetune cache"]
    except (ValueError, KeyError, TypeError):
        return  # damaged: the index has the format as well
    if found != FORMAT:
        raise CacheError(
            f"{marker.parent} has format {found}, but this version of gracetune reads format "
            f"{FORMAT}. Use the version that wrote it, or another cache_config.cache_dir."
        )


def _recover_entries(index: CacheIndex, folder: Path, emit: Callable[[Event], None]) -> None:
    """Add entries to the index that only the shards have: the index is older, or of another cache.

    Shards that another process is writing are skipped.
    """
    _, shards, _ = cache_paths(folder)
    listed = {shard.name: shard.length for shard in index.shards()}
    suspects = [
        path
        for path in shard_paths(shards)
        if shard_length(shards, path.stem) > listed.get(path.stem, -1)
    ]
    if not suspects:
        return
    # Rows of shards that are gone would hide the same entries in other shards.
    index.delete_lost_shards([name for name in listed if not shard_length(shards, name)])
    count = 0
    for path in suspects:
        shard = lock_shard(path, index)
        if shard is not None:
            # An entry at the end of a growing shard is what a killed writer did not commit.
            if path.suffix == SEALED_SUFFIX or path.stem not in listed:
                count += shard.num_recovered
            shard.release()
    if count:
        text = f"the shards of {folder} had {count} entries that its index lacked; they were added"
        emit(Notice(text, level="warning", fallback=True))


def rebuild_index(folder: Path, emit: Callable[[Event], None]) -> None:
    """Replace a damaged index by one rebuilt from the shards.

    Raises an error if another process has the index open, since its new entries would be lost.
    """
    with _exclusive(folder / MARKER):
        _rebuild_index(folder, emit)


def _rebuild_index(folder: Path, emit: Callable[[Event], None]) -> None:
    path, shards, _ = cache_paths(folder)
    new = path.with_name(f"{path.name}.new")
    descriptor = _open_folder(shards)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_database(new)
        count = _index_shards(new, shards) + _copy_unrecorded(path, new, shards)
        # SQLite must not apply the log of the damaged index to the new one.
        _remove_database(path)
        os.replace(new, path)
    except BlockingIOError as error:
        raise CacheError(
            f"The index of {folder} is damaged, but another process has it open. Stop that "
            "process, then repair the cache."
        ) from error
    except OSError as error:
        raise unwritable_error(folder, error.strerror or error) from error
    finally:
        os.close(descriptor)
    text = f"the index of {folder} was rebuilt from its shards: {count} entries"
    emit(Notice(text, level="warning", fallback=True))


def _index_shards(new: Path, shards: Path) -> int:
    """Create an index of all intact entries in the shards; return their number."""
    index = CacheIndex(new, create=True)
    try:
        return sum(
            add_unlisted_entries(index, name, data.numpy())
            for name in _shard_names(shards)
            if (data := _map_shard(shards, name)) is not None
        )
    finally:
        index.close()


def _copy_unrecorded(damaged: Path, new: Path, shards: Path) -> int:
    """Copy intact entries whose record is damaged, if the damaged index still has their rows.

    Returns their number.
    """
    if not damaged.exists():
        return 0
    try:
        index = CacheIndex(damaged)
    except CacheError:
        return 0
    writer = ShardWriter(shards, new)
    try:
        return sum(writer.copy_if_missing(row) for row in index.readable_rows())
    finally:
        index.close()
        writer.close()


def _map_shard(shards: Path, name: str) -> Tensor | None:
    descriptor = open_shard(shards, name)
    if descriptor is None:
        return None
    try:
        return map_file(descriptor)
    finally:
        os.close(descriptor)


def _remove_database(path: Path) -> None:
    for ending in ("-wal", "-shm", "-journal", ""):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def shard_paths(shards: Path) -> list[Path]:
    """Return the paths of all shard files in a folder."""
    files = shards.iterdir()
    return sorted(path for path in files if path.suffix in (OPEN_SUFFIX, SEALED_SUFFIX))


def _shard_names(shards: Path) -> list[str]:
    """Return the names, without suffix, of all shard files in a folder."""
    return sorted({path.stem for path in shard_paths(shards)})


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise unwritable_error(path.parent, error.strerror or error) from error
    try:
        with suppress(OSError):  # file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        # A process that was forked meanwhile has the descriptor too, and would keep the lock.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
