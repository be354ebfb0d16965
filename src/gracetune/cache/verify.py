"""Every entry against its checksum, the index against the files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from gracetune.cache.collect import compact
from gracetune.cache.index import DamagedIndexError
from gracetune.cache.packing import checksum_at
from gracetune.cache.shards import SEALED, find_file, hold_shard, map_file
from gracetune.events.types import StageProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.cache.index import EntryRow
    from gracetune.cache.shard_store import ShardStore
    from gracetune.events.types import Event


@dataclass(frozen=True, slots=True)
class Damage:
    """An entry whose bytes are not what was put."""

    row: EntryRow
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """What verifying a cache found."""

    num_entries: int
    nbytes: int
    damaged: tuple[Damage, ...]
    headers: tuple[str, ...]
    """Sealed files that other tools cannot read; their entries are judged on their own."""
    index: tuple[str, ...]
    """What SQLite finds wrong with its own file; the rest is then what it could still tell."""

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.damaged or self.headers or self.index)


def verify(store: ShardStore, tell: Callable[[Event], None]) -> Report:
    """Read everything; changes nothing, and may run while others write."""
    with store.index() as index:
        problems = index.problems()
    found = _Found()
    try:
        _look_through(store, found, tell)
    except DamagedIndexError as error:
        problems = problems or [str(error)]
    return Report(
        found.num_entries,
        found.nbytes,
        tuple(found.damaged),
        tuple(found.headers),
        tuple(problems),
    )


def repair(store: ShardStore, report: Report) -> None:
    """Forget what is damaged, so that the next build encodes it again; write headers again.

    A damaged index is made anew first: what it said of entries may be as wrong.
    """
    if report.index:
        store.renew_index()
        report = verify(store, lambda _: None)
    store.delete([damage.row.key for damage in report.damaged])
    for name in report.headers:
        path = store.shards / f"{name}{SEALED}"
        with store.index() as index:
            shard = hold_shard(path, index)
            rows = index.in_shard(name)
            if shard is not None and rows:
                shard.seal(rows)
            elif shard is not None:
                shard.release()
    compact(store)


@dataclass(slots=True)
class _Found:
    """What was found so far: an index may fail in the middle."""

    num_entries: int = 0
    nbytes: int = 0
    damaged: list[Damage] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


def _look_through(store: ShardStore, found: _Found, tell: Callable[[Event], None]) -> None:
    with store.index() as index:
        shards = [shard.name for shard in index.shards()]
    for done, name in enumerate(shards, 1):
        with store.index() as index:
            rows = index.in_shard(name)
        found.damaged += _check_shard(store, name, rows)
        if rows and not _header_is_good(store, name):
            found.headers.append(name)
        found.num_entries += len(rows)
        found.nbytes += sum(row.nbytes for row in rows)
        tell(StageProgress("verifying", done, len(shards), "shards"))


def _check_shard(store: ShardStore, name: str, rows: list[EntryRow]) -> list[Damage]:
    suspects: list[Damage] = []
    descriptor = find_file(store.shards, name)
    if descriptor is None:
        suspects = [Damage(row, f"shard {name} is gone") for row in rows]
    else:
        try:
            data = map_file(descriptor)
        finally:
            os.close(descriptor)
        for row in rows:
            if row.end > len(data):
                suspects.append(Damage(row, f"shard {name} ends before it"))
            elif checksum_at(data.numpy(), row.begin, row.tensors) != row.checksum:
                suspects.append(Damage(row, "its bytes differ from their checksum"))
    # Another process may have moved or deleted an entry since the rows were read.
    with store.index() as index:
        now = index.find([damage.row.key for damage in suspects])
    return [damage for damage in suspects if now.get(damage.row.key) == damage.row]


def _header_is_good(store: ShardStore, name: str) -> bool:
    """Only of a sealed file; one that grows has none yet."""
    path = store.shards / f"{name}{SEALED}"
    try:
        with safe_open(path, "pt"):
            return True
    except FileNotFoundError:
        return True
    except (SafetensorError, OSError):
        return not path.exists()  # taken up by a writer while we looked
