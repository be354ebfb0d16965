"""The index of a cache: an SQLite file with the location and checksum of each entry.

A row is committed only after its bytes are durable in a shard, so every row can be trusted. The
write-ahead log of SQLite lets any number of processes read while one commits. Rows are looked up by
key and never held, so memory use does not depend on the number of entries.
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
"""Version of the tables below and of the shards; other versions are refused."""
BUSY_TIMEOUT_S = 60.0
"""Seconds that a process waits for another one's commit."""
MAPPED_NBYTES = 1024**3
"""Size of SQLite's memory map. Rows are scattered, and the kernel reads ahead in a mapping.

Reading ahead through a descriptor of our own is impossible: closing it releases SQLite's locks."""
_MAX_CACHED_LAYOUTS = 1024
"""Tensor layouts that are kept parsed; most entries share the layout of many others."""
_KEYS_PER_QUERY = 900
"""Keys per query; SQLite allows 999 values."""
_PRIMARY_CODE_MASK = 0xFF
"""Mask for the primary part of SQLite's error codes."""
_ENVIRONMENT_ERRORS = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
)
"""Errors caused by the disk or the folder, not by a damaged index."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, "
    "room INTEGER NOT NULL, length INTEGER NOT NULL)",
    # AUTOINCREMENT never reuses an id, so what a process remembers about an id stays true.
    "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    "key TEXT NOT NULL UNIQUE, shard INTEGER NOT NULL REFERENCES shards, begin INTEGER NOT NULL, "
    "nbytes INTEGER NOT NULL, tensors TEXT NOT NULL, checksum BLOB NOT NULL, about TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS entries_by_shard ON entries (shard, begin)",
)
_SELECT_ROW = (
    "SELECT e.id, e.key, s.name, e.begin, e.nbytes, e.tensors, e.checksum, e.about "
    "FROM entries e JOIN shards s ON s.id = e.shard "
)

Params = ParamSpec("Params")
Result = TypeVar("Result")


class DamagedIndexError(CacheError):
    """The index file is damaged. It can be rebuilt from the shards."""


class TensorSlice(NamedTuple):
    """Location of one tensor within its entry."""

    name: str
    dtype: str
    """Name of the dtype in safetensors files."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the entry."""
    nbytes: int


class EntryRow(NamedTuple):
    """Location, checksum and origin of one entry."""

    row_id: int
    key: str
    shard: str
    offset: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    checksum: bytes
    about: Mapping[str, str]
    """Components of the key: sample, encoder, geometry (see cache/keys.py)."""

    @property
    def end(self) -> int:
        """Offset of the first byte behind the entry."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard."""

    name: str
    """File name without suffix."""
    data_offset: int
    """Offset of the first entry; the space before is for the header."""
    length: int
    """Committed length. Bytes beyond it are left over from a crash.

    Deleting an entry does not reduce it, because other processes may still read the bytes.
    """


def _translate_errors(
    method: Callable[Concatenate[CacheIndex, Params], Result],
) -> Callable[Concatenate[CacheIndex, Params], Result]:
    """Turn SQLite's errors into cache errors that say what to do."""

    @wraps(method)
    def call(self: CacheIndex, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except sqlite3.ProgrammingError:
            raise  # a bug, not a damaged file: the index was closed
        except sqlite3.DatabaseError as error:
            raise _cache_error(self._path, error) from error

    return call


class CacheIndex:
    """The tables of entries and shards; one connection, used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._layouts: dict[str, tuple[TensorSlice, ...]] = {}
        try:
            self._db = sqlite3.connect(
                path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.DatabaseError as error:
            raise _cache_error(path, error) from error
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self.close()
            raise _cache_error(path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @_translate_errors
    def find_rows(self, keys: Sequence[str]) -> dict[str, EntryRow]:
        """Return the rows of those keys that exist."""
        found: dict[str, EntryRow] = {}
        for chunk in _chunks(keys):
            query = f"{_SELECT_ROW} WHERE e.key IN ({_placeholders(chunk)})"
            found.update((row[1], self._row(row)) for row in self._db.execute(query, chunk))
        return found

    @_translate_errors
    def existing_keys(self, keys: Sequence[str]) -> set[str]:
        """Return those of the keys that exist."""
        found: set[str] = set()
        for chunk in _chunks(keys):
            query = f"SELECT key FROM entries WHERE key IN ({_placeholders(chunk)})"
            found.update(key for (key,) in self._db.execute(query, chunk))
        return found

    @_translate_errors
    def entry_ends(self, keys: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Return shard and end offset of each key that exists."""
        found: dict[str, tuple[str, int]] = {}
        for chunk in _chunks(keys):
            query = (
                "SELECT e.key, s.name, e.begin + e.nbytes FROM entries e "
                f"JOIN shards s ON s.id = e.shard WHERE e.key IN ({_placeholders(chunk)})"
            )
            found.update((key, (name, end)) for key, name, end in self._db.execute(query, chunk))
        return found

    @_translate_errors
    def page_after(self, after: int) -> list[tuple[int, str]]:
        """Return ids and keys of the next 10,000 entries after an id."""
        query = "SELECT id, key FROM entries WHERE id > ? ORDER BY id LIMIT 10000"
        return self._db.execute(query, (after,)).fetchall()

    @_translate_errors
    def rows_in_shard(self, name: str) -> list[EntryRow]:
        """Return the rows of a shard, by offset."""
        query = f"{_SELECT_ROW} WHERE s.name = ? ORDER BY e.begin"
        return [self._row(row) for row in self._db.execute(query, (name,))]

    @_translate_errors
    def rows_made_of(self, part: str, value: str) -> list[EntryRow]:
        """Return the entries whose key has this value as a component."""
        query = f"{_SELECT_ROW} WHERE json_extract(e.about, ?) = ? ORDER BY e.id"
        return [self._row(row) for row in self._db.execute(query, (f"$.{part}", value))]

    @_translate_errors
    def rows_with_prefix(self, prefix: str) -> list[EntryRow]:
        """Return up to 20 entries whose key starts with a prefix."""
        query = f"{_SELECT_ROW} WHERE e.key >= ? AND e.key < ? ORDER BY e.key LIMIT 20"
        return [self._row(row) for row in self._db.execute(query, (prefix, prefix + "\U0010ffff"))]

    @_translate_errors
    def shards(self) -> list[ShardRow]:
        """Return all shards."""
        return [ShardRow(*row) for row in self._db.execute("SELECT name, room, length FROM shards")]

    @_translate_errors
    def shard(self, name: str) -> ShardRow | None:
        """Return a shard by name; None if it is unknown."""
        query = "SELECT name, room, length FROM shards WHERE name = ?"
        found = self._db.execute(query, (name,)).fetchone()
        return None if found is None else ShardRow(*found)

    @_translate_errors
    def totals(self) -> list[tuple[str, str, int, int]]:
        """Return kind, encoder, number of entries and total bytes, per kind and encoder."""
        return self._db.execute(
            "SELECT coalesce(json_extract(about, '$.kind'), '?'), "
            "coalesce(json_extract(about, '$.encoder'), '?'), count(*), sum(nbytes) "
            "FROM entries GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()

    @_translate_errors
    def problems(self) -> list[str]:
        """Return what SQLite's integrity check finds wrong with the file."""
        try:
            found = [str(text) for (text,) in self._db.execute("PRAGMA quick_check(20)")]
        except sqlite3.DatabaseError as error:
            if not isinstance(_cache_error(self._path, error), DamagedIndexError):
                raise
            return [str(error)]
        return [text for text in found if text != "ok"]

    @_translate_errors
    def add_shard(self, shard: ShardRow) -> None:
        """Add an empty shard."""
        self._db.execute(
            "INSERT INTO shards (name, room, length) VALUES (?, ?, ?)",
            (shard.name, shard.data_offset, shard.length),
        )

    @_translate_errors
    def add(self, rows: Sequence[EntryRow], shard: str, length: int, moved: bool = False) -> None:
        """Add rows of entries whose bytes are durable, in one transaction.

        An existing row of the same key is kept. With `moved`, existing rows get the new location.
        """
        statement = "UPDATE entries SET shard = :shard, begin = :begin WHERE id = :number"
        if not moved:
            statement = (
                "INSERT OR IGNORE INTO entries (key, shard, begin, nbytes, tensors, checksum, "
                "about) VALUES (:key, :shard, :begin, :nbytes, :tensors, :checksum, :about)"
            )
        with self._transaction():
            ((shard_id,),) = self._db.execute("SELECT id FROM shards WHERE name = ?", (shard,))
            self._db.executemany(statement, [_values(row, shard_id) for row in rows])
            self._db.execute("UPDATE shards SET length = ? WHERE id = ?", (length, shard_id))

    @_translate_errors
    def delete(self, keys: Sequence[str]) -> int:
        """Delete rows and return how many existed. Their bytes stay until the next compaction."""
        with self._transaction():
            return sum(
                self._db.execute(
                    f"DELETE FROM entries WHERE key IN ({_placeholders(chunk)})", chunk
                ).rowcount
                for chunk in _chunks(keys)
            )

    @_translate_errors
    def delete_row(self, row: EntryRow) -> None:
        """Delete this row, but not a newer row of the same key."""
        self._db.execute("DELETE FROM entries WHERE id = ?", (row.row_id,))

    @_translate_errors
    def delete_empty_shard(self, name: str) -> bool:
        """Delete a shard that has no entries; return False if it has some."""
        with self._transaction():
            done = self._db.execute(
                "DELETE FROM shards WHERE name = ? AND NOT EXISTS "
                "(SELECT 1 FROM entries WHERE entries.shard = shards.id)",
                (name,),
            )
            return done.rowcount == 1

    def _row(self, values: tuple[int, str, str, int, int, str, bytes, str]) -> EntryRow:
        row_id, key, shard, offset, nbytes, tensors, checksum, about = values
        try:
            layout, components = self._parse_layout(tensors), json.loads(about)
        except (ValueError, TypeError) as error:
            raise sqlite3.DatabaseError(f"the row of {key} cannot be parsed") from error
        return EntryRow(row_id, key, shard, offset, nbytes, layout, checksum, components)

    def _parse_layout(self, tensors: str) -> tuple[TensorSlice, ...]:
        """Parse a tensor layout; equal layouts give the same object, which compares fast."""
        layout = self._layouts.get(tensors)
        if layout is None:
            if len(self._layouts) == _MAX_CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[tensors] = tuple(
                TensorSlice(name, dtype, tuple(shape), start, size)
                for name, dtype, shape, start, size in json.loads(tensors)
            )
        return layout

    def _prepare(self) -> None:
        self._enable_wal()
        for setting in ("synchronous=NORMAL", "cache_size=-16384", f"mmap_size={MAPPED_NBYTES}"):
            self._db.execute(f"PRAGMA {setting}")
        ((version,),) = self._db.execute("PRAGMA user_version")
        if version not in (0, FORMAT):
            raise CacheError(
                f"{self._path} has format {version}, but this version of gracetune reads format "
                f"{FORMAT}. Use the version that wrote it, or another cache_config.cache_dir."
            )
        if version == 0:
            with self._transaction():
                for table in _TABLES:
                    self._db.execute(table)
                self._db.execute(f"PRAGMA user_version={FORMAT}")

    def _enable_wal(self) -> None:
        """Switch to write-ahead logging; retries, because SQLite does not wait for this lock.

        Several ranks may create the index at the same time.
        """
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
        """Run the block in a transaction; taking the write lock first prevents deadlocks."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite has already ended it if the file is damaged
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def unwritable_error(folder: Path, why: object) -> CacheError:
    """Return the error for a cache folder that cannot be written.

    Reading a cache needs write access as well: for SQLite's locks, and to drop damaged entries.
    """
    if _is_read_only(folder):
        return CacheError(
            f"The cache in {folder} is read-only, but a run writes to it even if everything is "
            "encoded (locks, damaged entries). Make it writable, or set cache_config.cache_dir "
            "to a writable copy."
        )
    return CacheError(
        f"The cache in {folder} cannot be written: {why}. "
        "Free some space, or set cache_config.cache_dir to another folder."
    )


def _cache_error(path: Path, error: sqlite3.DatabaseError) -> CacheError:
    """Turn an SQLite error into a cache error, by whether the file or its folder is at fault."""
    # Errors that Python raises for invalid text in a row have no SQLite code.
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & _PRIMARY_CODE_MASK
    if kind in _ENVIRONMENT_ERRORS:
        return unwritable_error(path.parent, error)
    problem = f"The cache index {path} cannot be used: {error}."
    if kind == sqlite3.SQLITE_BUSY:
        fix = "Another process has locked it: stop it, or use another cache_config.cache_dir."
        return CacheError(f"{problem} {fix}")
    fix = f"`gracetune cache verify {path.parent} --repair` rebuilds it from the shards."
    return DamagedIndexError(f"{problem} {fix}")


def _is_read_only(folder: Path) -> bool:
    """Return True if the file system is read-only, or this user may not write to the folder."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return True
    return not all(os.access(path, os.W_OK) for path in (existing, *existing.glob("*.sqlite*")))


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


def _placeholders(chunk: Sequence[str]) -> str:
    return ",".join("?" * len(chunk))


def _chunks(keys: Sequence[str]) -> Iterator[list[str]]:
    return (
        [*map(str, keys[i : i + _KEYS_PER_QUERY])] for i in range(0, len(keys), _KEYS_PER_QUERY)
    )
