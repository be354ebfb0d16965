"""Where each entry of a cache lies: one SQLite file beside the shards.

A row appears only after its bytes are durable, so a row can be believed. Write-ahead logging lets
any number of processes read while one of them commits. Memory stays bounded however many entries
there are: rows are found by their key, never held.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

from gracetune.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

FORMAT = 2
"""Of the tables below and of the shards; another one is refused."""
BUSY_TIMEOUT_S = 60.0
"""How long one process waits for another's commit."""
MAPPED_NBYTES = 1024**3
"""As much of the file is mapped: the kernel then reads around a row, and rows are found all over.
Reading ahead by a descriptor of our own would take SQLite's locks away when it is closed."""
_MOST_FORMS = 1024
"""Forms of entries that are parsed once; most have the form of many others."""
_AT_ONCE = 900
"""Keys in one question: SQLite takes 999 values."""
_PRIMARY = 0xFF
"""The part of SQLite's error codes that says what kind it is."""
_NOT_THE_FILE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
)
"""Errors that a good index has too, by the disk or the folder that it lies in."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, "
    "room INTEGER NOT NULL, length INTEGER NOT NULL)",
    # Numbers are never used twice: what is remembered of a number stays true.
    "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    "key TEXT NOT NULL UNIQUE, shard INTEGER NOT NULL REFERENCES shards, begin INTEGER NOT NULL, "
    "nbytes INTEGER NOT NULL, tensors TEXT NOT NULL, checksum BLOB NOT NULL, about TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS entries_by_shard ON entries (shard, begin)",
)
_ROW = (
    "SELECT e.id, e.key, s.name, e.begin, e.nbytes, e.tensors, e.checksum, e.about "
    "FROM entries e JOIN shards s ON s.id = e.shard "
)

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class DamagedIndexError(CacheError):
    """The file itself is damaged, and can be made again from the shards."""


class TensorSlice(NamedTuple):
    """One tensor of an entry; `begin` counts from the entry's own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class EntryRow(NamedTuple):
    """One entry: where its bytes are, what they must hash to, and what it was made of."""

    row_id: int
    key: str
    shard: str
    offset: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    checksum: bytes
    about: Mapping[str, str]

    @property
    def end(self) -> int:
        """Where the next entry may begin."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One file: its name without suffix, the room for its header, and how far it is filled."""

    name: str
    data_offset: int
    length: int
    """Bytes past this were never committed. Deleting an entry does not lower it: someone may still
    look at the bytes."""


def _told(
    method: Callable[Concatenate[CacheIndex, Given], Answer],
) -> Callable[Concatenate[CacheIndex, Given], Answer]:
    """What SQLite says while the index is used, as an error that has a way out."""

    @wraps(method)
    def call(self: CacheIndex, /, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        try:
            return method(self, *args, **kwargs)
        except sqlite3.ProgrammingError:
            raise  # ours, not the file's: an index that was closed
        except sqlite3.DatabaseError as error:
            raise _refused(self._path, error) from error

    return call


class CacheIndex:
    """The table of entries and that of shards; one connection, used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forms: dict[str, tuple[TensorSlice, ...]] = {}
        try:
            self._db = sqlite3.connect(path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        except sqlite3.DatabaseError as error:
            raise _refused(path, error) from error
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self.close()
            raise _refused(path, error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @_told
    def find_rows(self, keys: Sequence[str]) -> dict[str, EntryRow]:
        """The rows of those keys that have one."""
        found: dict[str, EntryRow] = {}
        for chunk in _chunks(keys):
            question = f"{_ROW} WHERE e.key IN ({_marks(chunk)})"
            found.update((row[1], self._row(row)) for row in self._db.execute(question, chunk))
        return found

    @_told
    def existing_keys(self, keys: Sequence[str]) -> set[str]:
        """Those of these keys that have a row."""
        found: set[str] = set()
        for chunk in _chunks(keys):
            question = f"SELECT key FROM entries WHERE key IN ({_marks(chunk)})"
            found.update(key for (key,) in self._db.execute(question, chunk))
        return found

    @_told
    def entry_ends(self, keys: Sequence[str]) -> dict[str, tuple[str, int]]:
        """The file of each of these keys that has a row, and where its entry ends there."""
        found: dict[str, tuple[str, int]] = {}
        for chunk in _chunks(keys):
            question = (
                "SELECT e.key, s.name, e.begin + e.nbytes FROM entries e "
                f"JOIN shards s ON s.id = e.shard WHERE e.key IN ({_marks(chunk)})"
            )
            found.update((key, (name, end)) for key, name, end in self._db.execute(question, chunk))
        return found

    @_told
    def page_after(self, after: int) -> list[tuple[int, str]]:
        """Numbers and keys of the next entries past a number; nothing is locked between pages."""
        question = "SELECT id, key FROM entries WHERE id > ? ORDER BY id LIMIT 10000"
        return self._db.execute(question, (after,)).fetchall()

    @_told
    def rows_in_shard(self, name: str) -> list[EntryRow]:
        """What one file holds, in its order."""
        question = f"{_ROW} WHERE s.name = ? ORDER BY e.begin"
        return [self._row(row) for row in self._db.execute(question, (name,))]

    @_told
    def rows_made_of(self, part: str, value: str) -> list[EntryRow]:
        """Entries whose explanation has this value."""
        question = f"{_ROW} WHERE json_extract(e.about, ?) = ? ORDER BY e.id"
        return [self._row(row) for row in self._db.execute(question, (f"$.{part}", value))]

    @_told
    def rows_with_prefix(self, prefix: str) -> list[EntryRow]:
        """Entries whose key begins so."""
        question = f"{_ROW} WHERE e.key >= ? AND e.key < ? ORDER BY e.key LIMIT 20"
        return [
            self._row(row) for row in self._db.execute(question, (prefix, prefix + "\U0010ffff"))
        ]

    @_told
    def shards(self) -> list[ShardRow]:
        """Every file that the index knows."""
        return [ShardRow(*row) for row in self._db.execute("SELECT name, room, length FROM shards")]

    @_told
    def shard(self, name: str) -> ShardRow | None:
        """One file, if the index knows it."""
        question = "SELECT name, room, length FROM shards WHERE name = ?"
        found = self._db.execute(question, (name,)).fetchone()
        return None if found is None else ShardRow(*found)

    @_told
    def totals(self) -> list[tuple[str, str, int, int]]:
        """Kind, encoder, number of entries and their bytes."""
        return self._db.execute(
            "SELECT coalesce(json_extract(about, '$.kind'), '?'), "
            "coalesce(json_extract(about, '$.encoder'), '?'), count(*), sum(nbytes) "
            "FROM entries GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()

    @_told
    def problems(self) -> list[str]:
        """What SQLite finds wrong with the file; nothing where all is well."""
        try:
            told = [str(text) for (text,) in self._db.execute("PRAGMA quick_check(20)")]
        except sqlite3.DatabaseError as error:
            if not isinstance(_refused(self._path, error), DamagedIndexError):
                raise
            return [str(error)]
        return [text for text in told if text != "ok"]

    @_told
    def add_shard(self, shard: ShardRow) -> None:
        """A new file, empty so far."""
        self._db.execute(
            "INSERT INTO shards (name, room, length) VALUES (?, ?, ?)",
            (shard.name, shard.data_offset, shard.length),
        )

    @_told
    def add(self, rows: Sequence[EntryRow], shard: str, length: int, moved: bool = False) -> None:
        """Entries whose bytes are durable, all or none. A key that has a row keeps it, unless its
        entry was moved here."""
        verb = "UPDATE entries SET shard = :shard, begin = :begin WHERE id = :number"
        if not moved:
            verb = (
                "INSERT OR IGNORE INTO entries (key, shard, begin, nbytes, tensors, checksum, "
                "about) VALUES (:key, :shard, :begin, :nbytes, :tensors, :checksum, :about)"
            )
        with self._transaction():
            ((number,),) = self._db.execute("SELECT id FROM shards WHERE name = ?", (shard,))
            self._db.executemany(verb, [_values(row, number) for row in rows])
            self._db.execute("UPDATE shards SET length = ? WHERE id = ?", (length, number))

    @_told
    def delete(self, keys: Sequence[str]) -> int:
        """Forget entries; how many there were. Their bytes stay until the shard is compacted."""
        with self._transaction():
            return sum(
                self._db.execute(
                    f"DELETE FROM entries WHERE key IN ({_marks(chunk)})", chunk
                ).rowcount
                for chunk in _chunks(keys)
            )

    @_told
    def delete_row(self, row: EntryRow) -> None:
        """Forget this entry, but not another one that took its key since."""
        self._db.execute("DELETE FROM entries WHERE id = ?", (row.row_id,))

    @_told
    def delete_empty_shard(self, name: str) -> bool:
        """Forget a file that no entry is in; whether that is so."""
        with self._transaction():
            done = self._db.execute(
                "DELETE FROM shards WHERE name = ? AND NOT EXISTS "
                "(SELECT 1 FROM entries WHERE entries.shard = shards.id)",
                (name,),
            )
            return done.rowcount == 1

    def _row(self, values: tuple[int, str, str, int, int, str, bytes, str]) -> EntryRow:
        number, key, shard, begin, nbytes, tensors, checksum, about = values
        try:
            places, parts = self._form(tensors), json.loads(about)
        except (ValueError, TypeError) as error:
            raise sqlite3.DatabaseError(f"the row of {key} is no row of ours") from error
        return EntryRow(number, key, shard, begin, nbytes, places, checksum, parts)

    def _form(self, tensors: str) -> tuple[TensorSlice, ...]:
        """The same object for entries of one form, which makes them cheap to compare too."""
        places = self._forms.get(tensors)
        if places is None:
            if len(self._forms) == _MOST_FORMS:
                self._forms.clear()
            places = self._forms[tensors] = tuple(
                TensorSlice(name, dtype, tuple(shape), start, size)
                for name, dtype, shape, start, size in json.loads(tensors)
            )
        return places

    def _prepare(self) -> None:
        self._log_ahead()
        for setting in ("synchronous=NORMAL", "cache_size=-16384", f"mmap_size={MAPPED_NBYTES}"):
            self._db.execute(f"PRAGMA {setting}")
        ((version,),) = self._db.execute("PRAGMA user_version")
        if version not in (0, FORMAT):
            raise CacheError(
                f"{self._path} has format {version}; this version of gracetune reads {FORMAT}. "
                "Use the version that wrote it, or name another cache_dir."
            )
        if version == 0:
            with self._transaction():
                for table in _TABLES:
                    self._db.execute(table)
                self._db.execute(f"PRAGMA user_version={FORMAT}")

    def _log_ahead(self) -> None:
        """Ranks open a new index at the same moment, and for this one lock SQLite never waits."""
        until = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)
            else:
                return

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; takes the write lock at once, so that two writers cannot wait for each
        other."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite ends it by itself where the file is damaged
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def unwritable_error(folder: Path, why: object) -> CacheError:
    """The error where nothing can be written to a cache's folder; reading a cache takes that too,
    for SQLite's locks and for what turns out to be damaged."""
    if _is_read_only(folder):
        return CacheError(
            f"The cache in {folder} is read-only, and a run writes there even where all is encoded "
            "(locks, and what it finds damaged). Make it writable, or name another "
            "cache_config.cache_dir: a copy of this one will do."
        )
    return CacheError(
        f"The cache in {folder} cannot be written: {why}. "
        "Make room there, or name another cache_config.cache_dir."
    )


def _refused(path: Path, error: sqlite3.DatabaseError) -> CacheError:
    """What to do depends on whose fault it is: the file's own, or that of where it lies."""
    # What Python finds in a row, text that is none, has no code of SQLite.
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & _PRIMARY
    if kind in _NOT_THE_FILE:
        return unwritable_error(path.parent, error)
    what = f"The cache index {path} cannot be used: {error}."
    if kind == sqlite3.SQLITE_BUSY:
        way_out = "Another process holds it: end that, or name another cache_config.cache_dir."
        return CacheError(f"{what} {way_out}")
    way_out = f"`gracetune cache verify {path.parent} --repair` makes it again from the shards."
    return DamagedIndexError(f"{what} {way_out}")


def _is_read_only(folder: Path) -> bool:
    """Whether its disk takes no writes, or this user may not write there."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return True
    return not all(os.access(path, os.W_OK) for path in (there, *there.glob("*.sqlite*")))


def _values(row: EntryRow, shard: int) -> dict[str, object]:
    return {
        "number": row.row_id,
        "key": str(row.key),
        "shard": shard,
        "begin": row.offset,
        "nbytes": row.nbytes,
        "tensors": json.dumps(row.tensors, separators=(",", ":")),
        "checksum": row.checksum,
        "about": json.dumps(dict(row.about), ensure_ascii=False),
    }


def _marks(chunk: Sequence[str]) -> str:
    return ",".join("?" * len(chunk))


def _chunks(keys: Sequence[str]) -> Iterator[list[str]]:
    return ([*map(str, keys[i : i + _AT_ONCE])] for i in range(0, len(keys), _AT_ONCE))
