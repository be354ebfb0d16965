"""Encoded entries in the shards of a folder."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self, TypeVar

from gracetune.cache.index import FORMAT, CacheIndex, EntryRow, ShardRow, unwritable_error
from gracetune.cache.keys import key_components
from gracetune.cache.shard_format import (
    TENSOR_ALIGNMENT,
    LARGE_ENTRY_NBYTES,
    OPEN_SUFFIX,
    SEALED_SUFFIX,
    TORCH_DTYPES,
    adopt_shard,
    align_up,
    entry_checksum,
    open_shard,
    find_record,
    header_cost,
    shard_length,
    map_file,
    create_shard,
    pack,
    read_record,
    padded_nbytes,
    read_data_offset,
    unpack,
)
from gracetune.cache.shard_reader import Bitset, MappedShards, ShardReader
from gracetune.cache.store import stack_entries
from gracetune.atomic_files import write_text
from gracetune.errors import CacheError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.shard_format import Bytes, ShardFile
    from gracetune.cache.store import TryAllocate, Entry, Allocate
    from gracetune.events.types import Event


MARKER = "gracetune-cache.json"
INDEX = "index.sqlite"
_CLOSED = -1
"""The process of a store that nobody has open."""

Kept = TypeVar("Kept")


def _nobody(_: Event) -> None:
    """Where nobody listens, damage shows as an entry that is missing."""


class ShardStore:
    """Entries in the shards of one folder, shared by any number of processes and threads.

    What is got are views of the files; what is loaded is read into memory that the caller has. What
    was put is durable when `put` returns. Reading never waits for writing.
    """

    _pid: int
    _in_use: IndexUseLock
    _index: CacheIndex
    _writer: ShardWriter | None
    _maps: MappedShards
    _files: ShardReader

    def __init__(
        self,
        folder: Path,
        emit: Callable[[Event], None] = _nobody,
        *,
        check: bool = True,
        max_maps: int = 1024,
        max_open: int = 64,
        max_cached_entries: int = 65536,
    ) -> None:
        """`check`: compare each entry with its checksum when it is first read. At most so many
        files are mapped or open for the next reader, and so many places and views kept ready
        (about 1 kB each)."""
        self.folder = folder
        _, self.shards, _ = cache_paths(folder)
        self._emit = emit
        self._told = False
        self._lossy: set[str] = set()
        """Files whose damage was told."""
        self._check = check
        self._max_maps = max_maps
        self._max_open = max_open
        self._max_ready = max_cached_entries
        self._lock, self._write_lock = threading.RLock(), threading.RLock()
        try:
            write_marker(folder)
            self.shards.mkdir(exist_ok=True)
            rebuild_missing_index(*cache_paths(folder), emit)
        except OSError as error:
            raise unwritable_error(folder, error.strerror or error) from error
        self._begin()

    def get(self, key: str) -> Entry | None:
        """The entry as views of its file; a damaged one is told, forgotten, and as good as none."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The same for a batch; the disk is asked for all of it before the first is looked at."""
        self._at_home()
        with self._lock:
            new = [key for key in keys if key not in self._ready]
            if not new:
                return [self._ready[key] for key in keys]
        return self._view(keys)

    def gather(self, keys: Sequence[str], name: str, room: Allocate) -> Tensor | None:
        """Copied from the page cache where it has them, else read to where they belong; entries of
        several tensors are read as a whole, and then copied."""
        self._at_home()
        found = self._rows(keys)
        rows = [found[key] for key in keys if key in found]
        if len(rows) < len(keys):
            return None
        places = rows[0].tensors
        alone = [place.name for place in places] == [name] and places[0].nbytes > 0
        if alone and all(row.tensors == places for row in rows) and not self._files.in_page_cache(rows):
            place = places[0]
            slab = room(len(rows) * place.nbytes)
            if all(self._read(rows, [*slab.numpy().reshape(len(rows), place.nbytes)])):
                return slab.view(TORCH_DTYPES[place.dtype]).view(len(rows), *place.shape)
        return stack_entries(self.get_many(keys), name, room)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:
        """Read into memory that is given; as views of the files where none is."""
        self._at_home()
        rows = self._rows(keys)
        rooms = {key: allocate(padded_nbytes(row.nbytes)) for key, row in rows.items()}
        given = {key: room for key, room in rooms.items() if room is not None}
        read = self._read([rows[key] for key in given], [room.numpy() for room in given.values()])
        entries: dict[str, Entry | None] = {}
        for (key, room), whole in zip(given.items(), read, strict=True):
            if whole is not None:
                entries[key] = unpack(room, 0, rows[key].tensors) if whole else None
        for key in rows.keys() - entries.keys():
            entries[key] = self._entry(rows[key])
        return [entries.get(key) for key in keys]

    def put(self, key: str, entry: Entry) -> None:
        """Keep one entry; `put_many` waits for the disk once a batch, not once an entry."""
        self.put_many({key: entry})

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Write what is not there yet, wait for the disk, then let the index know."""
        with self._writing() as writer:
            writer.put(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Ask the index, and the files only for their lengths; what a file has lost is told and
        forgotten."""
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
        """Every key; entries that come or go meanwhile may be among them or not."""
        last = 0
        while True:
            with self.index() as index:
                page = index.page_after(last)
            if not page:
                return
            yield from (key for _, key in page)
            last = page[-1][0]

    def delete(self, keys: Sequence[str]) -> int:
        """Forget entries, and how many there were; `collect.compact` gives their bytes back."""
        with self.index() as index:
            for key in keys:
                self._forget(key)
            return index.delete(keys)

    def move(self, rows: Sequence[EntryRow], entries: Sequence[Entry]) -> None:
        """Write entries again, elsewhere, for whoever empties a file that is held."""
        with self._writing() as writer:
            writer.move(rows, entries)

    def seal(self) -> None:
        """Let go of the file that is being written."""
        with self._writing() as writer:
            writer.finish()

    def rebuild_index(self) -> None:
        """Make the index anew from the files, for whoever found it damaged."""
        with self._write_lock, self._lock:
            if self._writer is not None:
                self._writer.release()  # sealing would ask the old one
            self.close()
            rebuild_index(*cache_paths(self.folder), self._emit)

    def will_need(self, keys: Sequence[str]) -> None:
        """Have the disk read ahead what is worth it; returns at once.

        What a fast disk can write to where it belongs is better left until it is needed: ahead, it
        would pass through the page cache, or be copied once more.
        """
        self._at_home()
        rows = self._rows(keys).values()
        eager = self._files.is_slow_disk or bool(self._files.direct_read_refusal)
        self._files.read_ahead([row for row in rows if eager or row.nbytes < LARGE_ENTRY_NBYTES])

    def close(self) -> None:
        """Seal the file that is being written, and let go of all; who asks again opens it again."""
        if self._pid != os.getpid():
            return
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        with self._lock:
            self._maps.clear()
            self._files.clear()
            self._ready.clear()
            self._known.clear()
            self._index.close()
            self._in_use.close()
            self._pid = _CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def index(self) -> Iterator[CacheIndex]:
        """The index; other threads of this process wait meanwhile."""
        self._at_home()
        with self._lock:
            yield self._index

    @contextmanager
    def _writing(self) -> Iterator[ShardWriter]:
        self._at_home()
        with self._write_lock:
            if self._writer is None:
                self._writer = ShardWriter(self.shards, self.folder / INDEX)
            try:
                yield self._writer
            except OSError as error:
                raise unwritable_error(self.folder, error.strerror or error) from error

    def _begin(self) -> None:
        """State of this process; a forked child has its own."""
        self._in_use = IndexUseLock(self.shards)
        try:
            self._index = CacheIndex(self.folder / INDEX)
        except BaseException:
            self._in_use.close()
            raise
        self._writer = None
        self._maps = MappedShards(self.shards, self._max_maps)
        self._files = ShardReader(self.shards, self._max_open)
        self._ready: dict[str, Entry] = {}
        self._known: dict[str, EntryRow] = {}
        self._checked = Bitset()
        self._pid = os.getpid()

    def _at_home(self) -> None:
        if os.getpid() == self._pid:
            return
        if self._pid != _CLOSED:
            # SQLite forbids a child to touch, even to close, what its parent opened.
            self._inherited = (self._index, self._writer)
            if self._writer is not None:
                self._writer.release()
            # Another thread of the parent may have held one when it forked.
            self._lock, self._write_lock = threading.RLock(), threading.RLock()
        with self._lock:
            if os.getpid() != self._pid:
                self._begin()

    def _rows(self, keys: Sequence[str]) -> dict[str, EntryRow]:
        """Where these are; asked once, because an entry stays where it is."""
        with self._lock:
            rows = {key: self._known[key] for key in keys if key in self._known}
            if len(rows) < len(keys):
                new = self._index.find_rows([key for key in keys if key not in rows])
                _remember(self._known, new, self._max_ready)
                rows |= new
        return rows

    def _view(self, keys: Sequence[str]) -> list[Entry | None]:
        rows = self._rows(keys)
        if len(keys) > 1:
            self._files.read_ahead([r for r in rows.values() if r.row_id not in self._checked])
        entries = {key: self._entry(row) for key, row in rows.items()}
        whole = {key: entry for key, entry in entries.items() if entry is not None}
        with self._lock:
            _remember(self._ready, whole, self._max_ready)
        return [entries.get(key) for key in keys]

    def _entry(self, row: EntryRow) -> Entry | None:
        with self._lock:
            data = self._maps.data(row)
        if data is None:
            return self._entry_elsewhere(row)
        whole = self._is_whole(row, data.numpy(), row.offset)
        return unpack(data, row.offset, row.tensors) if whole else None

    def _read(self, rows: Sequence[EntryRow], rooms: Sequence[Bytes]) -> list[bool | None]:
        """Whether each is there and what was put; none where it could not be read."""
        read = self._files.read(rows, rooms, lambda row, room: self._is_whole(row, room, 0))
        self._report_refusal()
        return read

    def _is_whole(self, row: EntryRow, data: Bytes, begin: int) -> bool:
        """Whether an entry's bytes are what was put; each process looks once."""
        if not self._check or row.row_id in self._checked:
            return True
        if entry_checksum(data, begin, row.tensors) != row.checksum:
            self._lose(row, "its bytes differ from their checksum")
            return False
        with self._lock:
            self._checked.add(row.row_id)
        return True

    def _entry_elsewhere(self, before: EntryRow) -> Entry | None:
        """The file is gone: another process moved the entry or deleted it, or it is lost."""
        self._forget(before.key)
        with self.index() as index:
            row = index.find_rows([before.key]).get(before.key)
        if row is None:
            return None
        if (row.shard, row.offset) == (before.shard, before.offset):
            self._lose(row, f"shard {row.shard} is gone or too short")
            return None
        return self._entry(row)

    def _is_lost(self, row: EntryRow) -> bool:
        """Whether a file ends before an entry that the index has there."""
        if row.end <= shard_length(self.shards, row.shard):
            return False
        return self._entry_elsewhere(row) is None

    def _lose(self, row: EntryRow, why: str) -> None:
        """Never in silence: whoever asked encodes it again. One entry of a file is named."""
        self._forget(row.key)
        with self.index() as index:
            index.delete_row(row)
            told = row.shard in self._lossy
            self._lossy.add(row.shard)
        if not told:
            text = f"cache entry {row.key} in {self.folder} is damaged ({why}): forgotten, like all"
            text += " that is found damaged in the same shard"
            self._emit(Notice(text, level="warning", fallback=True))

    def _report_refusal(self) -> None:
        """Said once; the files are read through the page cache, which keeps a second copy."""
        if self._files.direct_read_refusal and not self._told:
            self._told = True
            text = f"{self._files.direct_read_refusal}: entries pass through the page cache"
            self._emit(Notice(text, level="warning", fallback=True))

    def _forget(self, key: str) -> None:
        with self._lock:
            self._ready.pop(key, None)
            self._known.pop(key, None)


def _remember(kept: dict[str, Kept], new: Mapping[str, Kept], most: int) -> None:
    """The last ones; the oldest leave."""
    kept.update(new)
    while len(kept) > most:
        del kept[next(iter(kept))]


def cache_paths(folder: Path) -> tuple[Path, Path, Path]:
    """The index of a cache, its shards and its marker."""
    return folder / INDEX, folder / "shards", folder / MARKER


def write_marker(folder: Path) -> None:
    """Say that a folder is a cache of ours; nothing is ever deleted from one that does not."""
    if not is_cache(folder):
        write_text(folder / MARKER, json.dumps({"gracetune cache": FORMAT}) + "\n")


def is_cache(folder: Path) -> bool:
    """Whether a folder is a cache of ours."""
    return (folder / MARKER).is_file()


# ------------------------------------------------------------------------------------------
# Appending entries: bytes first, then the disk's word, then the index.


class ShardWriter:
    """The one file that this process appends to, until it is full; one thread at a time."""

    def __init__(self, shards: Path, index: Path) -> None:
        self._folder = shards
        # A connection of its own: readers do not wait while the disk is waited for.
        self._index = CacheIndex(index)
        self._file: ShardFile | None = None

    def put(self, entries: Mapping[str, Entry]) -> None:
        """Keep what is not there yet."""
        known = self._index.existing_keys([*entries])
        self._append([(_fresh(k, e), e) for k, e in entries.items() if k not in known], moved=False)

    def move(self, rows: Sequence[EntryRow], entries: Sequence[Entry]) -> None:
        """Write entries again, elsewhere; their rows follow."""
        self._append([*zip(rows, entries, strict=True)], moved=True)

    def finish(self) -> None:
        """Seal the file; one without an entry is removed."""
        if self._file is None:
            return
        file, self._file = self._file, None
        rows = self._index.rows_in_shard(file.row.name)
        if rows:
            file.seal(rows)
        elif self._index.delete_empty_shard(file.row.name):
            file.remove()

    def close(self) -> None:
        """Seal, and let go of the index."""
        self.finish()
        self._index.close()

    def release(self) -> None:
        """Let go of the file as it is: the next writer cuts its torn tail off and goes on."""
        if self._file is not None:
            self._file.release()
            self._file = None

    def _append(self, entries: Sequence[tuple[EntryRow, Entry]], *, moved: bool) -> None:
        """Into as many files as it takes; the rows of a file are committed together."""
        rows: list[EntryRow] = []
        try:
            for before, entry in entries:
                packed = pack(before.key, entry, before.about)
                cost = header_cost(before.key, packed.places)
                file = self._file
                if file is None or not file.fits_entry(cost):
                    self._commit(rows, moved)
                    rows = []
                    self.finish()
                    file = adopt_shard(self._folder, self._index, cost)
                    file = self._file = file or create_shard(self._folder, self._index, cost)
                rows.append(
                    before._replace(
                        shard=file.row.name,
                        offset=file.append(packed, cost),
                        nbytes=packed.nbytes,
                        tensors=packed.places,
                        checksum=packed.checksum,
                    )
                )
            self._commit(rows, moved)
        except BaseException:
            self.release()
            raise

    def _commit(self, rows: Sequence[EntryRow], moved: bool) -> None:
        if rows:
            assert self._file is not None, "rows without a file"
            self._file.sync()
            self._index.add(rows, self._file.row.name, self._file.end, moved)


def _fresh(key: str, entry: Entry) -> EntryRow:
    """A row that has no place yet."""
    assert entry is not None, f"{key} has nothing to keep"
    return EntryRow(0, str(key), "", 0, 0, (), b"", key_components(key))


# ------------------------------------------------------------------------------------------
# A lost or damaged index, made again from the records in the shards: nothing that is whole is
# encoded twice.
#
# Entries that were deleted since, but whose bytes are still there, come back: a key says what its
# entry was made of, so they are right, and `cache gc` takes them away again.


_TOGETHER = 1024
"""Rows committed at once."""


class IndexUseLock:
    """Held as long as a process has the index open; waits while it is made anew."""

    def __init__(self, shards: Path) -> None:
        self._descriptor: int | None = _open_folder(shards)
        with suppress(OSError):  # without locks, whoever makes it anew cannot know of us
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """The index may be made anew; a fork that closes its own changes nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = close


def rebuild_index(path: Path, shards: Path, marker: Path, emit: Callable[[Event], None]) -> None:
    """Make a damaged index anew, unless it is in use: what is put through the old one is lost."""
    descriptor = _open_folder(shards)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        rebuild_missing_index(path, shards, marker, emit)
    except BlockingIOError as error:
        raise CacheError(
            f"The index of {path.parent} is damaged, and another process has it open. End that, "
            "then repair."
        ) from error
    except OSError as error:
        raise unwritable_error(path.parent, error.strerror or error) from error
    finally:
        os.close(descriptor)


def rebuild_missing_index(
    path: Path, shards: Path, marker: Path, emit: Callable[[Event], None]
) -> int | None:
    """Make the index anew where it is gone and files are left; how many entries it has then.

    Whoever comes second waits for the first, by the marker's lock, and finds it there.
    """
    if path.exists() or not _files(shards):
        return None
    with _locked(marker):
        if path.exists():
            return None
        # What SQLite logged for the file that is gone must not be taken for the new one's.
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        made = path.with_name(f"{path.name}.new")
        made.unlink(missing_ok=True)
        index = CacheIndex(made)
        try:
            count = sum(_add_file(index, shards, name) for name in _files(shards))
        finally:
            index.close()
        os.replace(made, path)
    text = f"the index of {path.parent} was made again from its shards, {count} entries"
    emit(Notice(text, level="warning", fallback=True))
    return count


def _files(shards: Path) -> list[str]:
    """The names of files, whether they grow or are sealed."""
    return sorted({path.stem for path in shards.iterdir() if path.suffix in (OPEN_SUFFIX, SEALED_SUFFIX)})


def _add_file(index: CacheIndex, shards: Path, name: str) -> int:
    descriptor = open_shard(shards, name)
    if descriptor is None:
        return 0
    try:
        data = map_file(descriptor).numpy()
    finally:
        os.close(descriptor)
    room = read_data_offset(data)
    index.add_shard(ShardRow(name, room, room))
    rows, end = [*_rows(data, name, room)], room
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        end = max(end, some[-1].end)
        index.add(some, name, end)
    return len(rows)


def _rows(whole: Bytes, name: str, room: int) -> Iterator[EntryRow]:
    """Entries that are whole; a broken record costs its own entry alone."""
    at = find_record(whole, align_up(room))
    while at is not None:
        told = read_record(whole, at)
        if told is None:
            at = find_record(whole, at + TENSOR_ALIGNMENT)
            continue
        row = EntryRow(
            0, told.key, name, told.begin, told.nbytes, told.tensors, told.checksum, told.about
        )
        fits = row.end <= len(whole)
        if fits and entry_checksum(whole, row.offset, row.tensors) == row.checksum:
            yield row
        at = find_record(whole, align_up(row.end) if fits else row.offset)


def _open_folder(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
