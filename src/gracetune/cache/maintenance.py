"""Verify, repair, compact and describe caches (`gracetune cache`).

Other processes may use the cache meanwhile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blake3 import blake3
from safetensors import SafetensorError, safe_open

from gracetune.cache.index import DamagedIndexError
from gracetune.cache.shard_format import (
    OPEN_SUFFIX,
    SEALED_SUFFIX,
    header_nbytes,
    is_header_intact,
    is_intact,
    lock_shard,
    locked_for_reading,
    map_file,
    open_shard,
    read_records,
    shard_length,
    unlisted_entries,
)
from gracetune.cache.shard_store import ShardStore, is_cache, shard_paths
from gracetune.errors import CacheError
from gracetune.events.types import StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from gracetune.cache.index import EntryRow, ShardRow
    from gracetune.cache.shard_format import Bytes
    from gracetune.cache.store import Entry
    from gracetune.events.types import Event


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """A cache entry whose bytes or record in the shard are damaged or missing, and why."""

    row: EntryRow
    why: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify`: the size of a cache and everything that is damaged."""

    num_entries: int
    nbytes: int
    damaged: tuple[DamagedEntry, ...] = ()
    """Entries whose bytes are missing or do not match their checksum."""
    bad_records: tuple[DamagedEntry, ...] = ()
    """Intact entries whose record (the copy of their row, in the shard) is damaged.

    Without its record, an entry is lost when the index is rebuilt.
    """
    bad_headers: tuple[str, ...] = ()
    """Names of complete shards whose safetensors header is damaged.

    Only other tools read the header; gracetune finds entries through the index.
    """
    unlisted_shards: tuple[str, ...] = ()
    """Names of complete shards that are not in the index and have no intact entry."""
    index_problems: tuple[str, ...] = ()
    """Problems in the index; if any, the other fields may be incomplete."""

    @property
    def damage(self) -> dict[str, str]:
        """Everything that is damaged, and why."""
        found = {f"entry {one.row.key}": one.why for one in (*self.damaged, *self.bad_records)}
        found |= {f"shard {name}": "its header is damaged" for name in self.bad_headers}
        found |= {f"shard {name}": "no entry in it is intact" for name in self.unlisted_shards}
        return found | {f"index {place}": text for place, text in enumerate(self.index_problems)}

    @property
    def is_clean(self) -> bool:
        """True if nothing in the cache is damaged."""
        return not self.damage


def verify_folder(
    folder: Path, emit: Callable[[Event], None], *, fix: bool
) -> tuple[VerifyReport, VerifyReport]:
    """Verify the cache in a folder; with `fix`, repair it and verify it again.

    Returns the report before and the one after the repair.
    """
    try:
        with ShardStore(folder, emit, recover=False) as store:
            before = verify(store, emit)
            return before, repair(store, before, emit) if fix else before
    except DamagedIndexError as error:
        before = VerifyReport(0, 0, index_problems=(str(error),))
    if not fix:
        return before, before
    with ShardStore(folder, emit) as store:  # rebuilds the index
        return before, repair(store, verify(store, emit), emit)


def verify(store: ShardStore, emit: Callable[[Event], None]) -> VerifyReport:
    """Check all cache entries against their checksums; also check the index and shard headers.

    Changes nothing in the cache.
    """
    with store.index() as index:
        problems = index.problems()
    found = _Findings()
    try:
        _check_all(store, found, emit)
    except DamagedIndexError as error:
        problems = problems or [str(error)]
    return VerifyReport(
        found.num_entries,
        found.nbytes,
        tuple(found.damaged),
        tuple(found.records),
        tuple(found.headers),
        tuple(found.unlisted),
        (*problems, *found.problems),
    )


def repair(store: ShardStore, report: VerifyReport, emit: Callable[[Event], None]) -> VerifyReport:
    """Repair everything that a report names, and return the report of another `verify`.

    Damaged entries are deleted, and the next run encodes them again. Entries with a damaged record
    are copied to another shard, and invalid headers are written again. A damaged index is rebuilt
    first, and the cache verified again, since the report relies on the index.
    """
    if report.is_clean:
        return report
    if report.index_problems:
        store.rebuild_index()
        report = verify(store, emit)
    store.delete([damage.row.key for damage in report.damaged])
    _move(store, [damage.row for damage in report.bad_records])
    moved_from = (damage.row.shard for damage in report.bad_records)
    for name in dict.fromkeys((*report.bad_headers, *moved_from)):
        path = store.shards / f"{name}{SEALED_SUFFIX}"
        with store.index() as index:
            shard = lock_shard(path, index)
            rows = index.rows_in_shard(name)
            if shard is not None and rows:
                shard.seal(rows)
            elif shard is not None:
                shard.release()
    compact(store)
    return verify(store, emit)


@dataclass(slots=True)
class _Findings:
    """Problems that `verify` has found so far; kept even if reading the index fails half-way."""

    num_entries: int = 0
    nbytes: int = 0
    damaged: list[DamagedEntry] = field(default_factory=list)
    records: list[DamagedEntry] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _check_all(store: ShardStore, found: _Findings, emit: Callable[[Event], None]) -> None:
    with store.index() as index:
        shards = index.shards()
    for done, shard in enumerate(shards, 1):
        _check_shard(store, shard, found)
        emit(StageProgress("verifying", done, len(shards), "shards"))
    lengths = {shard.name: shard.length for shard in shards}
    for path in shard_paths(store.shards):
        if shard_length(store.shards, path.stem) > lengths.get(path.stem, -1):
            _check_unlisted(store, path, found)


def _check_shard(store: ShardStore, shard: ShardRow, found: _Findings) -> None:
    """Compare the rows of a shard with its bytes, its records and its header."""
    name = shard.name
    with store.index() as index:
        rows = index.rows_in_shard(name)
    found.num_entries += len(rows)
    found.nbytes += sum(row.nbytes for row in rows)
    descriptor = open_shard(store.shards, name)
    if descriptor is None:
        suspects = [DamagedEntry(row, f"shard {name} is gone") for row in rows]
        found.damaged += _still_listed(store, suspects)
        return
    try:
        data = map_file(descriptor).numpy()
    finally:
        os.close(descriptor)
    records = dict(read_records(data, name))
    first = min(records, default=shard.data_offset)
    if not header_nbytes(rows) <= shard.data_offset <= first:
        found.problems.append(f"shard {name} does not begin at byte {shard.data_offset}")
    is_sealed = (store.shards / f"{name}{SEALED_SUFFIX}").exists()
    if is_sealed and shard.length > max([len(data), *(row.end for row in rows)]):
        found.problems.append(f"shard {name} is shorter than {shard.length} bytes")
    _check_rows(store, name, rows, [*records.values()], data, found)
    if rows and not _header_is_good(store, shard, data, rows, [*records.values()]):
        found.headers.append(name)


def _check_rows(
    store: ShardStore,
    name: str,
    rows: Sequence[EntryRow],
    records: Sequence[EntryRow],
    data: Bytes,
    found: _Findings,
) -> None:
    """Compare the rows of a shard with the entries in its bytes, and with their records."""
    by_offset = {row.offset: row for row in records}
    damaged, bad_records, differing = [], [], []
    for row in rows:
        record = by_offset.get(row.offset)
        if record is not None and record._replace(row_id=row.row_id) != row:
            differing.append(DamagedEntry(row, ""))
        elif row.end > len(data):
            damaged.append(DamagedEntry(row, f"shard {name} ends before it"))
        elif not is_intact(row, data):
            damaged.append(DamagedEntry(row, "its bytes differ from their checksum"))
        elif record is None:
            why = f"its record in shard {name} is damaged, its tensors are intact"
            bad_records.append(DamagedEntry(row, why))
    # A row that points to the wrong place is damage of the index, if its entry is intact.
    if damaged:
        intact = {row.key for row in records if is_intact(row, data)}
        differing += [damage for damage in damaged if damage.row.key in intact]
        damaged = [damage for damage in damaged if damage.row.key not in intact]
    found.damaged += _still_listed(store, damaged)
    found.records += _still_listed(store, bad_records)
    found.problems += [
        f"the row of {damage.row.key} differs from the entry in shard {name}"
        for damage in _still_listed(store, differing)
    ]


def _still_listed(store: ShardStore, suspects: Sequence[DamagedEntry]) -> list[DamagedEntry]:
    """Leave out entries that another process has moved or deleted since their rows were read."""
    with store.index() as index:
        now = index.find_rows([damage.row.key for damage in suspects])
    return [damage for damage in suspects if now.get(damage.row.key) == damage.row]


def _check_unlisted(store: ShardStore, path: Path, found: _Findings) -> None:
    """Look for intact entries in a shard that the index lacks, unless it is being written."""
    with locked_for_reading(path) as data, store.index() as index:
        if data is None:
            return
        count = len(unlisted_entries(index, path.stem, data))
        if count:
            found.problems.append(f"it lacks {count} entries of shard {path.stem}")
        elif index.shard(path.stem) is None and path.suffix == SEALED_SUFFIX:
            found.unlisted.append(path.stem)


def _header_is_good(
    store: ShardStore,
    shard: ShardRow,
    data: Bytes,
    rows: Sequence[EntryRow],
    records: Sequence[EntryRow],
) -> bool:
    """Return False if a shard's safetensors header is damaged.

    A shard that is still being written has no header yet, which is not an error.
    """
    path = store.shards / f"{shard.name}{SEALED_SUFFIX}"
    try:
        with safe_open(path, "pt"):
            is_good = is_header_intact(data, shard.data_offset, rows, records)
    except FileNotFoundError:
        return True
    except (SafetensorError, OSError):
        is_good = False
    return is_good or not path.exists()  # a writer may have reopened it meanwhile


MIN_LIVE_SHARE = 0.5
"""`compact` rewrites a shard if entries take less than this share of its bytes."""
_CHUNK_SIZE = 256
"""Number of entries that are looked up or moved at a time."""


@dataclass(frozen=True, slots=True)
class UnusedEntries:
    """Keys, total size and kinds of the cache entries that none of the given runs needs."""

    keys: tuple[str, ...]
    nbytes: int
    kinds: dict[str, int]
    """Number of entries by kind and encoder, such as `text by e1`."""


def find_unused(store: ShardStore, required: Collection[str]) -> UnusedEntries:
    """Find the cache entries whose keys are not in `required`."""
    keys = tuple(key for key in store.keys() if key not in required)  # noqa: SIM118  not a mapping
    nbytes, kinds = 0, dict[str, int]()
    for start in range(0, len(keys), _CHUNK_SIZE):
        with store.index() as index:
            rows = index.find_rows(keys[start : start + _CHUNK_SIZE]).values()
        for row in rows:
            name = f"{row.about.get('kind', 'unexplained')} by {row.about.get('encoder', '?')}"
            kinds[name] = kinds.get(name, 0) + 1
            nbytes += row.nbytes
    return UnusedEntries(keys, nbytes, kinds)


def compact(store: ShardStore) -> int:
    """Free the space of deleted entries: rewrite shards that are mostly gaps, remove empty ones.

    Returns the bytes freed. Shards that another process is writing are skipped. A reader that finds
    a shard gone looks the entry up in the index again, which has its new location.
    """
    store.seal()
    with store.index() as index:
        index.require_intact()
    freed = sum(_compact_file(store, path) for path in shard_paths(store.shards))
    with store.index() as index:
        for shard in index.shards():  # a process was killed after it had deleted the file
            if not shard_length(store.shards, shard.name):
                index.delete_empty_shard(shard.name)
    return freed


def _compact_file(store: ShardStore, path: Path) -> int:
    if not path.exists():
        return 0
    before = disk_nbytes(path)
    with store.index() as index:
        shard = lock_shard(path, index, remove_unlisted=True)
        if shard is None:
            return 0 if path.exists() else before
        rows = index.rows_in_shard(shard.row.name)
    live = sum(row.nbytes for row in rows)
    if live >= MIN_LIVE_SHARE * (shard.row.length - shard.row.data_offset) and rows:
        if path.suffix == OPEN_SUFFIX:
            shard.seal(rows)
        else:
            shard.release()
        return 0
    _move(store, rows)
    with store.index() as index:
        if index.rows_in_shard(shard.row.name):
            shard.release()  # some entry could not be moved: the next call tries again
            return 0
        shard.remove()
        index.delete_empty_shard(shard.row.name)
    return before - live


def _move(store: ShardStore, rows: list[EntryRow]) -> None:
    for start in range(0, len(rows), _CHUNK_SIZE):
        chunk = rows[start : start + _CHUNK_SIZE]
        entries = store.get_many([row.key for row in chunk])
        intact: list[tuple[EntryRow, Entry]] = [
            (row, entry) for row, entry in zip(chunk, entries, strict=True) if entry is not None
        ]
        store.move([row for row, _ in intact], [entry for _, entry in intact])
    store.seal()


def disk_nbytes(path: Path) -> int:
    """Return the disk space of a shard in bytes.

    It is less than the file size, because the space reserved for the header is a hole in the file.
    """
    return path.stat().st_blocks * 512


KEY_PARTS = {
    "kind": "what was encoded",
    "sample": "digest of the file's bytes, which changes when the file is edited",
    "caption": "the text itself",
    "geometry": "resize, crop, augmentation and bucket",
    "encoder": "digest of the encoder's weights, dtype and scaling",
    "schema": "version of the key's definition",
}
"""Meaning of each component of a cache key, for `gracetune cache inspect`."""


def find_caches(folder: Path) -> list[Path]:
    """Return `folder` if it is a cache, otherwise the caches directly below it."""
    found = [folder] if is_cache(folder) else []
    if not found and folder.is_dir():
        found = [path for path in sorted(folder.iterdir()) if is_cache(path)]
    if not found:
        raise CacheError(
            f"{folder} is not a gracetune cache and contains none: there is no marker file. "
            "Give the cache_dir of a run, or a run file."
        )
    return found


def find_entries(store: ShardStore, what: str, file: Path) -> list[EntryRow]:
    """Find the cache entries that were encoded from `file`, a sample or a caption file.

    If `file` does not exist, return the entries whose cache key begins with `what`.
    """
    with store.index() as index:
        if not file.is_file():
            return index.rows_with_prefix(what)
        data = file.read_bytes()
        rows = index.rows_with_component("sample", blake3(data).hexdigest())
        if file.suffix == ".txt":
            rows += index.rows_with_component("caption", data.decode(errors="replace").strip())
        return rows


def explain_entry(row: EntryRow) -> dict[str, object]:
    """Return the description of a cache entry that `gracetune cache inspect` prints."""
    return {
        "key": row.key,
        "made_of": dict(row.about),
        "tensors": {p.name: {"dtype": p.dtype, "shape": list(p.shape)} for p in row.tensors},
        "nbytes": row.nbytes,
        "shard": row.shard,
        "offset": row.offset,
        "checksum": row.checksum.hex(),
    }


def cache_stats(store: ShardStore) -> dict[str, object]:
    """Return the numbers of entries and the sizes of a cache, for `gracetune cache stats`."""
    with store.index() as index:
        kinds = [
            {"kind": kind, "encoder": encoder, "entries": count, "nbytes": nbytes}
            for kind, encoder, count, nbytes in index.totals()
        ]
        shards = index.shards()
    files = [*store.shards.iterdir()]
    return {
        "folder": str(store.folder),
        "entries": sum(int(str(kind["entries"])) for kind in kinds),
        "nbytes": sum(int(str(kind["nbytes"])) for kind in kinds),
        "disk_nbytes": sum(disk_nbytes(path) for path in files),
        "written_nbytes": sum(shard.length - shard.data_offset for shard in shards),
        "shards": len(shards),
        "kinds": kinds,
    }
