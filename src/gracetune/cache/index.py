"""The index of a cache: an SQLite file with the location and checksum of each entry.

An entry's row is committed only after its bytes have been flushed to a shard, so every row belongs
to a complete entry. SQLite's write-ahead log lets any number of processes read while one commits.
Rows are read from the file by key, so memory use does not depend on the number of entries. SQLite
does not detect a flipped bit in a value, so each row has a digest of its values.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

from xxhash import xxh3_64_digest

from gracetune.errors import CacheError
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

FORMAT = 2
"""Version of the index tables and the shard files; caches with another version are refused.

It is in the index and in the marker file. If only one of them differs, the index is damaged.
"""
BUSY_TIMEOUT_S = 60.0
"""Seconds that a process waits while another process commits to the index."""
MAPPED_NBYTES = 1024**3
"""Size of SQLite's memory map of the index, in bytes. The kernel reads ahead in a mapping.

Opening the file once more to read it ahead is no alternative. SQLite uses POSIX file locks, and
closing any descriptor of a file releases all locks that the process has on it.
"""
_MAX_CACHED_LAYOUTS = 1024
"""Maximum number of tensor layouts (names, dtypes, shapes, offsets) kept in memory.

Most cache entries share one layout.
"""
_KEYS_PER_QUERY = 900
"""Number of keys per SQL query; SQLite allows 999 values."""
_PRIMARY_CODE_MASK = 0xFF
"""Bit mask that reduces SQLite's extended error codes to primary ones."""
_ENVIRONMENT_ERRORS = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
)
"""SQLite error codes caused by the disk or the folder, not by a damaged index."""
_SQLITE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of the `sqlite3` module. It cannot decode a message that quotes damaged text."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS shards (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, "
    "room INTEGER NOT NULL, length INTEGER NOT NULL)",
    # AUTOINCREMENT never reuses an id, so what a process remembers about an id stays true.
    "CREATE TABLE IF NOT EXISTS entries (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    "key TEXT NOT NULL UNIQUE, shard INTEGER NOT NULL REFERENCES shards, begin INTEGER NOT NULL, "
    "nbytes INTEGER NOT NULL, tensors TEXT NOT NULL, checksum BLOB NOT NULL, about TEXT NOT NULL, "
    "digest BLOB)",
    "CREATE INDEX IF NOT EXISTS entries_by_shard ON entries (shard, begin)",
)
_COLUMNS = {
    "shards": {"id", "name", "room", "length"},
    "entries": {"id", "key", "shard", "begin", "nbytes", "tensors", "checksum", "about", "digest"},
}
"""Columns of each table. Caches of older versions have no `digest`; `_prepare` adds it."""
_SELECT_ROW = (
    "SELECT e.id, e.key, s.name, e.begin, e.nbytes, e.tensors, e.checksum, e.about, e.digest "
    "FROM entries e LEFT JOIN shards s ON s.id = e.shard "
)

Params = ParamSpec("Params")
Result = TypeVar("Result")


class DamagedIndexError(CacheError):
    """Raised if a cache's SQLite index is damaged; it can be rebuilt from the cache's shards."""


class TensorSlice(NamedTuple):
    """Name, dtype and shape of one tensor, and its location within a cache entry."""

    name: str
    dtype: str
    """Name of the dtype as in safetensors files, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor from the start of the entry, in bytes."""
    nbytes: int


class EntryRow(NamedTuple):
    """A row of the index: location, checksum and key components of one cache entry."""

    row_id: int
    key: str
    shard: str
    offset: int
    nbytes: int
    tensors: tuple[TensorSlice, ...]
    checksum: bytes
    about: Mapping[str, str]
    """Components that the cache key is a hash of, such as sample, encoder and geometry."""

    @property
    def end(self) -> int:
        """Offset of the first byte after the entry, in the shard file."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A row of the index about one shard, a file that contains many cache entries."""

    name: str
    """File name of the shard without suffix."""
    data_offset: int
    """Offset of the first entry in bytes; the space before it is reserved for the header."""
    length: int
    """Committed length of the shard in bytes. Any bytes beyond it were left by a crash.

    Deleting an entry does not reduce the length: other processes may still read the bytes.
    """


def _translate_errors(
    method: Callable[Concatenate[CacheIndex, Params], Result],
) -> Callable[Concatenate[CacheIndex, Params], Result]:
    """Decorate a method to turn SQLite errors into `CacheError`s that tell the user what to do."""

    @wraps(method)
    def call(self: CacheIndex, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return method(self, *args, **kwargs)
        except sqlite3.ProgrammingError:
            raise  # a bug, not a damaged file: the index was closed
        except _SQLITE_ERRORS as error:
            raise _cache_error(self._path, error) from error

    return call


class CacheIndex:
    """A connection to the SQLite index of a cache; used by one thread at a time."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Open an index; `create` makes its tables if there are none yet."""
        self._path = path
        self._layouts: dict[str, tuple[TensorSlice, ...]] = {}
        try:
            self._db = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.DatabaseError as error:
            raise _cache_error(path, error) from error
        try:
            self._prepare(create)
        except _SQLITE_ERRORS as error:
            self.close()
            raise _cache_error(path, error) from error

    def close(self) -> None:
        """Close the connection to the index file."""
        self._db.close()

    @_translate_errors
    def find_rows(self, keys: Sequence[str]) -> dict[str, EntryRow]:
        """Return the rows of these keys, by key; keys without an entry are left out."""
        found: dict[str, EntryRow] = {}
        for chunk in _chunks(keys):
            query = f"{_SELECT_ROW} WHERE e.key IN ({_placeholders(chunk)})"
            found.update((row[1], self._row(row)) for row in self._db.execute(query, chunk))
        return found

    @_translate_errors
    def existing_keys(self, keys: Sequence[str]) -> set[str]:
        """Return the subset of `keys` that have an entry."""
        found: set[str] = set()
        for chunk in _chunks(keys):
            query = f"SELECT key FROM entries WHERE key IN ({_placeholders(chunk)})"
            found.update(key for (key,) in self._db.execute(query, chunk))
        return found

    @_translate_errors
    def entry_ends(self, keys: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Return the shard name and the end offset of each key's entry, if it exists."""
        found: dict[str, tuple[str, int]] = {}
        for chunk in _chunks(keys):
            query = (
                "SELECT e.key, s.name, e.begin + e.nbytes FROM entries e "
                f"LEFT JOIN shards s ON s.id = e.shard WHERE e.key IN ({_placeholders(chunk)})"
            )
            for key, name, end in self._db.execute(query, chunk):
                if not isinstance(name, str) or not isinstance(end, int):
                    raise sqlite3.DatabaseError(f"the row of {key} has no valid location")
                found[key] = name, end
        return found

    @_translate_errors
    def page_after(self, after: int) -> list[tuple[int, str]]:
        """Return row ids and keys of the next 10,000 entries whose row id is above `after`."""
        query = "SELECT id, key FROM entries WHERE id > ? ORDER BY id LIMIT 10000"
        return self._db.execute(query, (after,)).fetchall()

    @_translate_errors
    def rows_in_shard(self, name: str) -> list[EntryRow]:
        """Return the rows of all entries in a shard, ordered by offset."""
        query = f"{_SELECT_ROW} WHERE s.name = ? ORDER BY e.begin"
        return [self._row(row) for row in self._db.execute(query, (name,))]

    @_translate_errors
    def rows_with_component(self, part: str, value: str) -> list[EntryRow]:
        """Return the rows whose key component `part` (such as `caption`) has this value."""
        query = f"{_SELECT_ROW} WHERE json_extract(e.about, ?) = ? ORDER BY e.id"
        return [self._row(row) for row in self._db.execute(query, (f"$.{part}", value))]

    @_translate_errors
    def rows_with_prefix(self, prefix: str) -> list[EntryRow]:
        """Return up to 20 rows whose key starts with a prefix."""
        query = f"{_SELECT_ROW} WHERE e.key >= ? AND e.key < ? ORDER BY e.key LIMIT 20"
        return [self._row(row) for row in self._db.execute(query, (prefix, prefix + "\U0010ffff"))]

    @_translate_errors
    def shards(self) -> list[ShardRow]:
        """Return the rows of all shards."""
        query = "SELECT name, room, length FROM shards"
        return [_shard_row(row) for row in self._db.execute(query)]

    @_translate_errors
    def shard(self, name: str) -> ShardRow | None:
        """Return the row of a shard; None if the index has no shard with this name."""
        query = "SELECT name, room, length FROM shards WHERE name = ?"
        found = self._db.execute(query, (name,)).fetchone()
        return None if found is None else _shard_row(found)

    @_translate_errors
    def totals(self) -> list[tuple[str, str, int, int]]:
        """Return a tuple (kind, encoder, number of entries, bytes) for each kind and encoder."""
        return self._db.execute(
            "SELECT coalesce(json_extract(about, '$.kind'), '?'), "
            "coalesce(json_extract(about, '$.encoder'), '?'), count(*), sum(nbytes) "
            "FROM entries GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall()

    @_translate_errors
    def problems(self) -> list[str]:
        """Return the problems that SQLite's integrity check finds in the index file."""
        try:
            found = [str(text) for (text,) in self._db.execute("PRAGMA integrity_check(20)")]
            orphans = self._db.execute("PRAGMA foreign_key_check").fetchall()
            found += [f"row {row_id} of {table} has no shard" for table, row_id, *_ in orphans]
        except _SQLITE_ERRORS as error:
            if not isinstance(_cache_error(self._path, error), DamagedIndexError):
                raise
            return [str(error)]
        return [text for text in found if text != "ok"]

    def require_intact(self) -> None:
        """Raise an error if SQLite's integrity check finds problems.

        Required before a shard is deleted because the index has no entry of it: a damaged index may
        not find the entries.
        """
        problems = self.problems()
        if problems:
            raise _cache_error(self._path, sqlite3.DatabaseError(problems[0]))

    @_translate_errors
    def add_shard(self, shard: ShardRow) -> None:
        """Add the row of a new shard that has no entries yet."""
        self._db.execute(
            "INSERT INTO shards (name, room, length) VALUES (?, ?, ?)",
            (shard.name, shard.data_offset, shard.length),
        )

    @_translate_errors
    def add(self, rows: Sequence[EntryRow], shard: str, length: int, moved: bool = False) -> None:
        """Add the rows of new entries and set their shard's committed length, in one transaction.

        The entries' bytes must have been flushed to the shard before. An existing row with the same
        key is kept. With `moved`, the rows exist already and get their new location.
        """
        statement = (
            "UPDATE entries SET shard = :shard, begin = :begin, digest = :digest WHERE id = :number"
        )
        if not moved:
            statement = (
                "INSERT OR IGNORE INTO entries (key, shard, begin, nbytes, tensors, checksum, "
                "about, digest) VALUES (:key, :shard, :begin, :nbytes, :tensors, :checksum, "
                ":about, :digest)"
            )
        with self._transaction():
            ((shard_id,),) = self._db.execute("SELECT id FROM shards WHERE name = ?", (shard,))
            self._db.executemany(statement, [_values(row, shard, shard_id) for row in rows])
            self._db.execute("UPDATE shards SET length = ? WHERE id = ?", (length, shard_id))

    @_translate_errors
    def delete(self, keys: Sequence[str]) -> int:
        """Delete rows by key and return how many existed.

        The entries' bytes stay in the shards until these are compacted.
        """
        with self._transaction():
            return sum(
                self._db.execute(
                    f"DELETE FROM entries WHERE key IN ({_placeholders(chunk)})", chunk
                ).rowcount
                for chunk in _chunks(keys)
            )

    @_translate_errors
    def delete_row(self, row: EntryRow) -> None:
        """Delete a row by its id, so that a newer row with the same key is not affected."""
        self._db.execute("DELETE FROM entries WHERE id = ?", (row.row_id,))

    @_translate_errors
    def delete_lost_shards(self, names: Sequence[str]) -> None:
        """Delete the rows of shards whose files are gone, and of all entries without a shard."""
        with self._transaction():
            self._db.executemany("DELETE FROM shards WHERE name = ?", [(name,) for name in names])
            self._db.execute("DELETE FROM entries WHERE shard NOT IN (SELECT id FROM shards)")

    def readable_rows(self) -> Iterator[EntryRow]:
        """Yield the rows that can still be read from a damaged index and match their digest."""
        with suppress(*_SQLITE_ERRORS):
            for values in self._db.execute(f"{_SELECT_ROW} WHERE e.digest IS NOT NULL"):
                with suppress(*_SQLITE_ERRORS):
                    yield self._row(values)

    @_translate_errors
    def delete_empty_shard(self, name: str) -> bool:
        """Delete the row of a shard; return False if entries refer to the shard."""
        with self._transaction():
            done = self._db.execute(
                "DELETE FROM shards WHERE name = ? AND NOT EXISTS "
                "(SELECT 1 FROM entries WHERE entries.shard = shards.id)",
                (name,),
            )
            return done.rowcount == 1

    def _row(self, values: tuple[int, str, str, int, int, str, bytes, str, bytes]) -> EntryRow:
        row_id, key, shard, offset, nbytes, tensors, checksum, about, digest = values
        if shard is None or (digest is not None and digest != _digest(*values[1:8])):
            raise sqlite3.DatabaseError(f"the row of {key} differs from its digest")
        try:
            layout, components = self._parse_layout(tensors), json.loads(about)
        except (ValueError, TypeError) as error:
            raise sqlite3.DatabaseError(f"the row of {key} cannot be parsed") from error
        return EntryRow(row_id, key, shard, offset, nbytes, layout, checksum, components)

    def _parse_layout(self, tensors: str) -> tuple[TensorSlice, ...]:
        """Parse an entry's tensor layout (names, dtypes, shapes, offsets) from JSON.

        Equal layouts give the same object, so that comparing them is fast.
        """
        layout = self._layouts.get(tensors)
        if layout is None:
            if len(self._layouts) == _MAX_CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[tensors] = tuple(
                TensorSlice(name, dtype, tuple(shape), start, size)
                for name, dtype, shape, start, size in json.loads(tensors)
            )
        return layout

    def _prepare(self, create: bool) -> None:
        self._enable_wal()
        for setting in ("synchronous=NORMAL", "cache_size=-16384", f"mmap_size={MAPPED_NBYTES}"):
            self._db.execute(f"PRAGMA {setting}")
        ((version,),) = self._db.execute("PRAGMA user_version")
        if version == 0 and create:
            with self._transaction():
                for table in _TABLES:
                    self._db.execute(table)
                self._db.execute(f"PRAGMA user_version={FORMAT}")
        elif version != FORMAT:
            raise sqlite3.DatabaseError(f"its format is {version}, not {FORMAT}")
        for table, expected in _COLUMNS.items():
            columns = {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}
            if columns == expected - {"digest"} != expected:
                self._db.execute(f"ALTER TABLE {table} ADD COLUMN digest BLOB")
            elif columns != expected:
                raise sqlite3.DatabaseError(f"it has no valid table {table}")

    def _enable_wal(self) -> None:
        """Switch SQLite to write-ahead logging; retry while another process holds the lock.

        Several ranks may create the index at once, and SQLite itself does not wait for this lock.
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
        """Run the block in a transaction that has SQLite's write lock from the start.

        If two transactions read first and then asked for the lock, they would block each other.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:  # also Ctrl-C: the write lock must not outlive the block
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
    free = shutil.disk_usage(_existing(folder)).free
    return CacheError(
        f"The cache in {folder} cannot be written: {why}; {format_bytes(free)} are free on its "
        "disk. Free some space, or set cache_config.cache_dir to another folder. Then run the same "
        "command again: entries that are complete are kept."
    )


def _cache_error(path: Path, error: Exception) -> CacheError:
    """Return the `CacheError` for an SQLite error: folder unwritable, locked, or damaged index."""
    # Errors that Python raises for invalid text in a row have no SQLite code.
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & _PRIMARY_CODE_MASK
    if kind in _ENVIRONMENT_ERRORS:
        return unwritable_error(path.parent, error)
    problem = f"The cache index {path} cannot be used: {error}."
    if kind == sqlite3.SQLITE_BUSY:
        fix = "Another process has locked it: stop that process, or set another cache_dir."
        return CacheError(f"{problem} {fix}")
    fix = f"`gracetune cache verify {path.parent} --repair` rebuilds it from the shards."
    return DamagedIndexError(f"{problem} {fix}")


def _existing(folder: Path) -> Path:
    """Return the folder, or the innermost of its parents that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _is_read_only(folder: Path) -> bool:
    """Return True if the file system is read-only, or this user may not write to the folder."""
    existing = _existing(folder)
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        return True
    return not all(os.access(path, os.W_OK) for path in (existing, *existing.glob("*.sqlite*")))


def _values(row: EntryRow, shard: str, shard_id: int) -> dict[str, object]:
    tensors = json.dumps(row.tensors, separators=(",", ":"))
    about = json.dumps(dict(row.about), ensure_ascii=False)
    digest = _digest(row.key, shard, row.offset, row.nbytes, tensors, row.checksum, about)
    return {
        "number": row.row_id,
        "key": str(row.key),
        "shard": shard_id,
        "begin": row.offset,
        "nbytes": row.nbytes,
        "tensors": tensors,
        "checksum": row.checksum,
        "about": about,
        "digest": digest,
    }


def _digest(*values: str | int | bytes) -> bytes:
    """Return the digest of a row's values."""
    parts = (value if isinstance(value, bytes) else f"{value}".encode() for value in values)
    return xxh3_64_digest(b"\0".join(parts))


def _shard_row(values: tuple[str, int, int]) -> ShardRow:
    name, data_offset, length = values
    is_valid = isinstance(data_offset, int) and isinstance(length, int)
    if not is_valid or not isinstance(name, str) or not 0 < data_offset <= length:
        raise sqlite3.DatabaseError(f"the row of shard {name} is not valid")
    return ShardRow(name, data_offset, length)


def _placeholders(chunk: Sequence[str]) -> str:
    return ",".join("?" * len(chunk))


def _chunks(keys: Sequence[str]) -> Iterator[list[str]]:
    return (
        [*map(str, keys[i : i + _KEYS_PER_QUERY])] for i in range(0, len(keys), _KEYS_PER_QUERY)
    )
