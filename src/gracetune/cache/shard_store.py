"""Encoded entries in the shards of a folder."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from gracetune.cache.index import FORMAT, CacheIndex, unwritable
from gracetune.cache.packing import LARGE, TORCH_DTYPES, checksum_at, room_for, unpack
from gracetune.cache.reading import Bits, MappedShards, OpenShards
from gracetune.cache.rebuild import IndexInUse, renew_index, restore_index
from gracetune.cache.shards import length_of
from gracetune.cache.store import stack_entries
from gracetune.cache.writing import ShardWriter
from gracetune.durable import write_text
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.index import EntryRow
    from gracetune.cache.packing import Bytes
    from gracetune.cache.store import Allocate, Entry, Room
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
    _in_use: IndexInUse
    _index: CacheIndex
    _writer: ShardWriter | None
    _maps: MappedShards
    _files: OpenShards

    def __init__(
        self,
        folder: Path,
        tell: Callable[[Event], None] = _nobody,
        *,
        check: bool = True,
        max_maps: int = 1024,
        max_open: int = 64,
        max_ready: int = 65536,
    ) -> None:
        """`check`: compare each entry with its checksum when it is first read. At most so many
        files are mapped or open for the next reader, and so many places and views kept ready
        (about 1 kB each)."""
        self.folder = folder
        _, self.shards, _ = places_in(folder)
        self._tell = tell
        self._told = False
        self._lossy: set[str] = set()
        """Files whose damage was told."""
        self._check = check
        self._max_maps = max_maps
        self._max_open = max_open
        self._max_ready = max_ready
        self._lock, self._write_lock = threading.RLock(), threading.RLock()
        try:
            mark_folder(folder)
            self.shards.mkdir(exist_ok=True)
            restore_index(*places_in(folder), tell)
        except OSError as error:
            raise unwritable(folder, error.strerror or error) from error
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

    def gather(self, keys: Sequence[str], name: str, room: Room) -> Tensor | None:
        """Copied from the page cache where it has them, else read to where they belong; entries of
        several tensors are read as a whole, and then copied."""
        self._at_home()
        found = self._rows(keys)
        rows = [found[key] for key in keys if key in found]
        if len(rows) < len(keys):
            return None
        places = rows[0].tensors
        alone = [place.name for place in places] == [name] and places[0].nbytes > 0
        if alone and all(row.tensors == places for row in rows) and not self._files.hold(rows):
            place = places[0]
            slab = room(len(rows) * place.nbytes)
            if all(self._read(rows, [*slab.numpy().reshape(len(rows), place.nbytes)])):
                return slab.view(TORCH_DTYPES[place.dtype]).view(len(rows), *place.shape)
        return stack_entries(self.get_many(keys), name, room)

    def load(self, keys: Sequence[str], allocate: Allocate) -> list[Entry | None]:
        """Read into memory that is given; as views of the files where none is."""
        self._at_home()
        rows = self._rows(keys)
        rooms = {key: allocate(room_for(row.nbytes)) for key, row in rows.items()}
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
            found = index.ends(keys)
        lengths = {
            name: length_of(self.shards, name) for name in {name for name, _ in found.values()}
        }
        short = [key for key, (name, end) in found.items() if end > lengths[name]]
        with self.index() as index:
            suspects = index.find(short)
        lost = {key for key in short if key not in suspects or self._is_lost(suspects[key])}
        return [key in found and key not in lost for key in keys]

    def keys(self) -> Iterator[str]:
        """Every key; entries that come or go meanwhile may be among them or not."""
        last = 0
        while True:
            with self.index() as index:
                page = index.page(last)
            if not page:
                return
            yield from (key for _, key in page)
            last = page[-1][0]

    def delete(self, keys: Sequence[str]) -> int:
        """Forget entries, and how many there were; `collect.compact` gives their bytes back."""
        with self.index() as index:
            for key in keys:
                self._forget(key)
            return index.drop(keys)

    def move(self, rows: Sequence[EntryRow], entries: Sequence[Entry]) -> None:
        """Write entries again, elsewhere, for whoever empties a file that is held."""
        with self._writing() as writer:
            writer.move(rows, entries)

    def seal(self) -> None:
        """Let go of the file that is being written."""
        with self._writing() as writer:
            writer.finish()

    def renew_index(self) -> None:
        """Make the index anew from the files, for whoever found it damaged."""
        with self._write_lock, self._lock:
            if self._writer is not None:
                self._writer.release()  # sealing would ask the old one
            self.close()
            renew_index(*places_in(self.folder), self._tell)

    def will_need(self, keys: Sequence[str]) -> None:
        """Have the disk read ahead what is worth it; returns at once.

        What a fast disk can write to where it belongs is better left until it is needed: ahead, it
        would pass through the page cache, or be copied once more.
        """
        self._at_home()
        rows = self._rows(keys).values()
        eager = self._files.is_slow or bool(self._files.no_direct)
        self._files.ask_disk([row for row in rows if eager or row.nbytes < LARGE])

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
                raise unwritable(self.folder, error.strerror or error) from error

    def _begin(self) -> None:
        """State of this process; a forked child has its own."""
        self._in_use = IndexInUse(self.shards)
        try:
            self._index = CacheIndex(self.folder / INDEX)
        except BaseException:
            self._in_use.close()
            raise
        self._writer = None
        self._maps = MappedShards(self.shards, self._max_maps)
        self._files = OpenShards(self.shards, self._max_open)
        self._ready: dict[str, Entry] = {}
        self._known: dict[str, EntryRow] = {}
        self._checked = Bits()
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
                new = self._index.find([key for key in keys if key not in rows])
                _remember(self._known, new, self._max_ready)
                rows |= new
        return rows

    def _view(self, keys: Sequence[str]) -> list[Entry | None]:
        rows = self._rows(keys)
        if len(keys) > 1:
            self._files.ask_disk([r for r in rows.values() if r.number not in self._checked])
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
        whole = self._is_whole(row, data.numpy(), row.begin)
        return unpack(data, row.begin, row.tensors) if whole else None

    def _read(self, rows: Sequence[EntryRow], rooms: Sequence[Bytes]) -> list[bool | None]:
        """Whether each is there and what was put; none where it could not be read."""
        read = self._files.read(rows, rooms, lambda row, room: self._is_whole(row, room, 0))
        self._tell_refusal()
        return read

    def _is_whole(self, row: EntryRow, data: Bytes, begin: int) -> bool:
        """Whether an entry's bytes are what was put; each process looks once."""
        if not self._check or row.number in self._checked:
            return True
        if checksum_at(data, begin, row.tensors) != row.checksum:
            self._lose(row, "its bytes differ from their checksum")
            return False
        with self._lock:
            self._checked.add(row.number)
        return True

    def _entry_elsewhere(self, before: EntryRow) -> Entry | None:
        """The file is gone: another process moved the entry or deleted it, or it is lost."""
        self._forget(before.key)
        with self.index() as index:
            row = index.find([before.key]).get(before.key)
        if row is None:
            return None
        if (row.shard, row.begin) == (before.shard, before.begin):
            self._lose(row, f"shard {row.shard} is gone or too short")
            return None
        return self._entry(row)

    def _is_lost(self, row: EntryRow) -> bool:
        """Whether a file ends before an entry that the index has there."""
        if row.end <= length_of(self.shards, row.shard):
            return False
        return self._entry_elsewhere(row) is None

    def _lose(self, row: EntryRow, why: str) -> None:
        """Never in silence: whoever asked encodes it again. One entry of a file is named."""
        self._forget(row.key)
        with self.index() as index:
            index.drop_row(row)
            told = row.shard in self._lossy
            self._lossy.add(row.shard)
        if not told:
            text = f"cache entry {row.key} in {self.folder} is damaged ({why}): forgotten, like all"
            text += " that is found damaged in the same shard"
            self._tell(Notice(text, level="warning", fallback=True))

    def _tell_refusal(self) -> None:
        """Said once; the files are read through the page cache, which keeps a second copy."""
        if self._files.no_direct and not self._told:
            self._told = True
            text = f"{self._files.no_direct}: entries pass through the page cache"
            self._tell(Notice(text, level="warning", fallback=True))

    def _forget(self, key: str) -> None:
        with self._lock:
            self._ready.pop(key, None)
            self._known.pop(key, None)


def _remember(kept: dict[str, Kept], new: Mapping[str, Kept], most: int) -> None:
    """The last ones; the oldest leave."""
    kept.update(new)
    while len(kept) > most:
        del kept[next(iter(kept))]


def places_in(folder: Path) -> tuple[Path, Path, Path]:
    """The index of a cache, its shards and its marker."""
    return folder / INDEX, folder / "shards", folder / MARKER


def mark_folder(folder: Path) -> None:
    """Say that a folder is a cache of ours; nothing is ever deleted from one that does not."""
    if not is_cache(folder):
        write_text(folder / MARKER, json.dumps({"gracetune cache": FORMAT}) + "\n")


def is_cache(folder: Path) -> bool:
    """Whether a folder is a cache of ours."""
    return (folder / MARKER).is_file()
