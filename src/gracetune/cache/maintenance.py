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
    entry_checksum,
    lock_shard,
    map_file,
    open_shard,
)
from gracetune.cache.shard_store import ShardStore, is_cache
from gracetune.errors import CacheError
from gracetune.events.types import StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from gracetune.cache.index import EntryRow
    from gracetune.cache.store import Entry
    from gracetune.events.types import Event


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """A cache entry whose bytes are missing or do not match their checksum, and why."""

    row: EntryRow
    why: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify`: the size of a cache and everything that is damaged."""

    num_entries: int
    nbytes: int
    damaged: tuple[DamagedEntry, ...]
    bad_headers: tuple[str, ...]
    """Names of complete shards whose safetensors header is invalid.

    Only other tools read the header; gracetune finds entries through the index.
    """
    index_problems: tuple[str, ...]
    """Problems that SQLite finds in the index; if any, the other fields may be incomplete."""

    @property
    def is_clean(self) -> bool:
        """True if nothing in the cache is damaged."""
        return not (self.damaged or self.bad_headers or self.index_problems)


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
        tuple(found.headers),
        tuple(problems),
    )


def repair(store: ShardStore, report: VerifyReport) -> None:
    """Delete the damaged entries of a report and rewrite invalid shard headers.

    The next run encodes deleted entries again. A damaged index is rebuilt first, and the cache
    verified again, since the report relies on the index.
    """
    if report.index_problems:
        store.rebuild_index()
        report = verify(store, lambda _: None)
    store.delete([damage.row.key for damage in report.damaged])
    for name in report.bad_headers:
        path = store.shards / f"{name}{SEALED_SUFFIX}"
        with store.index() as index:
            shard = lock_shard(path, index)
            rows = index.rows_in_shard(name)
            if shard is not None and rows:
                shard.seal(rows)
            elif shard is not None:
                shard.release()
    compact(store)


@dataclass(slots=True)
class _Findings:
    """Problems that `verify` has found so far; kept even if reading the index fails half-way."""

    num_entries: int = 0
    nbytes: int = 0
    damaged: list[DamagedEntry] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


def _check_all(store: ShardStore, found: _Findings, emit: Callable[[Event], None]) -> None:
    with store.index() as index:
        shards = [shard.name for shard in index.shards()]
    for done, name in enumerate(shards, 1):
        with store.index() as index:
            rows = index.rows_in_shard(name)
        found.damaged += _check_shard(store, name, rows)
        if rows and not _header_is_good(store, name):
            found.headers.append(name)
        found.num_entries += len(rows)
        found.nbytes += sum(row.nbytes for row in rows)
        emit(StageProgress("verifying", done, len(shards), "shards"))


def _check_shard(store: ShardStore, name: str, rows: list[EntryRow]) -> list[DamagedEntry]:
    suspects: list[DamagedEntry] = []
    descriptor = open_shard(store.shards, name)
    if descriptor is None:
        suspects = [DamagedEntry(row, f"shard {name} is gone") for row in rows]
    else:
        try:
            data = map_file(descriptor)
        finally:
            os.close(descriptor)
        for row in rows:
            if row.end > len(data):
                suspects.append(DamagedEntry(row, f"shard {name} ends before it"))
            elif entry_checksum(data.numpy(), row.offset, row.tensors) != row.checksum:
                suspects.append(DamagedEntry(row, "its bytes differ from their checksum"))
    # Another process may have moved or deleted an entry since the rows were read.
    with store.index() as index:
        now = index.find_rows([damage.row.key for damage in suspects])
    return [damage for damage in suspects if now.get(damage.row.key) == damage.row]


def _header_is_good(store: ShardStore, name: str) -> bool:
    """Return False if a shard's safetensors header is invalid.

    A shard that is still being written has no header yet, which is not an error.
    """
    path = store.shards / f"{name}{SEALED_SUFFIX}"
    try:
        with safe_open(path, "pt"):
            return True
    except FileNotFoundError:
        return True
    except (SafetensorError, OSError):
        return not path.exists()  # a writer has reopened it meanwhile


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
    return sum(_compact_file(store, path) for path in sorted(store.shards.iterdir()))


def _compact_file(store: ShardStore, path: Path) -> int:
    if path.suffix not in (OPEN_SUFFIX, SEALED_SUFFIX) or not path.exists():
        return 0
    before = disk_nbytes(path)
    with store.index() as index:
        shard = lock_shard(path, index)
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
        empty = index.delete_empty_shard(shard.row.name)
    if not empty:  # some entry could not be moved: keep the shard, the next call tries again
        shard.release()
        return 0
    shard.remove()
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
