"""Where encoded entries are kept: in memory, or in the shards of a folder."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

from gracetune.cache.index import FORMAT, Index
from gracetune.cache.reading import Bits, MappedShards, ask_disk
from gracetune.cache.shards import row_checksum, unpack
from gracetune.cache.writing import ShardWriter
from gracetune.durable import write_text
from gracetune.errors import CacheError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.index import Row
    from gracetune.events.types import Event

    Entry = Mapping[str, Tensor]

MARKER = "gracetune-cache.json"
INDEX = "index.sqlite"


class Store(Protocol):
    """Named tensors by key. Entries are read only: some are views of files."""

    def get(self, key: str) -> Entry | None:
        """What was put under this key, if it is there and whole."""
        ...

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The same for a batch, in the order of the keys: one question instead of many."""
        ...

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry; the same key always means the same content."""
        ...

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Keep a batch, for the price of one."""
        ...

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which of these are there, without reading them."""
        ...


class MemoryStore:
    """Entries that live as long as the run."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """Look it up."""
        return self._entries.get(key)

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Look them up."""
        return [self._entries.get(key) for key in keys]

    def put(self, key: str, entry: Entry) -> None:
        """Take it as it is."""
        self._entries[key] = entry

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Take them as they are."""
        self._entries.update(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which are there."""
        return [key in self._entries for key in keys]


def _nobody(_: Event) -> None:
    """Where nobody listens, damage shows as an entry that is missing."""


class ShardStore:
    """Entries in the shards of one folder, shared by any number of processes and threads.

    What is got are views of the files: nothing is copied until someone gathers a batch. What was
    put is durable when `put` returns. Reading never waits for writing.
    """

    _writer: ShardWriter | None
    _maps: MappedShards

    def __init__(
        self,
        folder: Path,
        tell: Callable[[Event], None] = _nobody,
        *,
        check: bool = True,
        max_maps: int = 1024,
        max_ready: int = 65536,
    ) -> None:
        """`check`: compare each entry with its checksum when it is first read. At most so many
        files are mapped for the next reader, and so many views kept ready (about 1 kB each)."""
        self.folder = folder
        self.shards = folder / "shards"
        self._tell = tell
        self._check = check
        self._max_maps = max_maps
        self._max_ready = max_ready
        mark_folder(folder)
        self.shards.mkdir(exist_ok=True)
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
        return self._read(keys)

    def put(self, key: str, entry: Entry) -> None:
        """Keep one entry; `put_many` waits for the disk once a batch, not once an entry."""
        self.put_many({key: entry})

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Write what is not there yet, wait for the disk, then let the index know."""
        with self._writing() as writer:
            writer.put(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Ask the index alone."""
        with self.index() as index:
            found = index.which(keys)
        return [key in found for key in keys]

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
                self._ready.pop(key, None)
            return index.drop(keys)

    def move(self, rows: Sequence[Row], entries: Sequence[Entry]) -> None:
        """Write entries again, elsewhere, for whoever empties a file that is held."""
        with self._writing() as writer:
            writer.move(rows, entries)

    def seal(self) -> None:
        """Let go of the file that is being written."""
        with self._writing() as writer:
            writer.finish()

    def will_need(self, keys: Sequence[str]) -> None:
        """Have the disk read these ahead; returns at once."""
        with self.index() as index:
            rows = index.find([key for key in keys if key not in self._ready])
        ask_disk(self.shards, rows.values())

    def close(self) -> None:
        """Seal the file that is being written. Views that were got stay good."""
        self._at_home()
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        with self._lock:
            self._maps.clear()
            self._ready.clear()
            self._index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def index(self) -> Iterator[Index]:
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
                raise CacheError(
                    f"The cache in {self.folder} cannot be written: {error.strerror or error}. "
                    "Make room there, or name another cache_config.cache_dir."
                ) from error

    def _begin(self) -> None:
        """State of this process; a forked child has its own."""
        self._pid = os.getpid()
        self._lock, self._write_lock = threading.RLock(), threading.RLock()
        self._index = Index(self.folder / INDEX)
        self._writer = None
        self._maps = MappedShards(self.shards, self._max_maps)
        self._ready: dict[str, Entry] = {}
        self._checked = Bits()

    def _at_home(self) -> None:
        if os.getpid() != self._pid:
            # SQLite forbids a child to touch, even to close, what its parent opened.
            self._inherited = (self._index, self._writer)
            if self._writer is not None:
                self._writer.release()
            self._begin()

    def _read(self, keys: Sequence[str]) -> list[Entry | None]:
        with self.index() as index:
            rows = index.find(keys)
        if len(keys) > 1:
            ask_disk(self.shards, [r for r in rows.values() if r.number not in self._checked])
        entries = {key: self._entry(row) for key, row in rows.items()}
        with self._lock:
            self._ready |= {key: entry for key, entry in entries.items() if entry is not None}
            while len(self._ready) > self._max_ready:
                del self._ready[next(iter(self._ready))]
        return [entries.get(key) for key in keys]

    def _entry(self, row: Row) -> Entry | None:
        with self._lock:
            data = self._maps.data(row)
        if data is None:
            return self._entry_elsewhere(row)
        if self._check and row.number not in self._checked:
            if row_checksum(data, row) != row.checksum:
                self._lose(row, "its bytes differ from their checksum")
                return None
            with self._lock:
                self._checked.add(row.number)
        return unpack(data, row)

    def _entry_elsewhere(self, before: Row) -> Entry | None:
        """The file is gone: another process moved the entry or deleted it, or it is lost."""
        with self.index() as index:
            row = index.find([before.key]).get(before.key)
        if row is None:
            return None
        if (row.shard, row.begin) == (before.shard, before.begin):
            self._lose(row, f"shard {row.shard} is gone or too short")
            return None
        return self._entry(row)

    def _lose(self, row: Row, why: str) -> None:
        """Never in silence: whoever asked encodes it again."""
        with self.index() as index:
            index.drop_row(row)
        text = f"cache entry {row.key} in {self.folder} is damaged ({why}): forgotten"
        self._tell(Notice(text, level="warning", fallback=True))


def mark_folder(folder: Path) -> None:
    """Say that a folder is a cache of ours; nothing is ever deleted from one that does not."""
    if not is_cache(folder):
        write_text(folder / MARKER, json.dumps({"gracetune cache": FORMAT}) + "\n")


def is_cache(folder: Path) -> bool:
    """Whether a folder is a cache of ours."""
    return (folder / MARKER).is_file()
