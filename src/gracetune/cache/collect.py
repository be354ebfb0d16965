"""Giving bytes back: entries that nobody needs, and files that hold more gaps than entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.cache.shards import OPEN, SEALED, hold_shard

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from gracetune.cache.index import EntryRow
    from gracetune.cache.shard_store import ShardStore
    from gracetune.cache.store import Entry

WORTH_MOVING = 0.5
"""A file is written again when less than this share of it is entries."""
_TOGETHER = 256


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Entries that no named run needs."""

    keys: tuple[str, ...]
    nbytes: int
    kinds: dict[str, int]
    """How many, by what they are and which encoder made them."""


def find_leftovers(store: ShardStore, wanted: Collection[str]) -> Leftovers:
    """What may go; entries that come after this question are not among it."""
    keys = tuple(key for key in store.keys() if key not in wanted)  # noqa: SIM118  not a mapping
    nbytes, kinds = 0, dict[str, int]()
    for start in range(0, len(keys), _TOGETHER):
        with store.index() as index:
            rows = index.find(keys[start : start + _TOGETHER]).values()
        for row in rows:
            name = f"{row.about.get('kind', 'unexplained')} by {row.about.get('encoder', '?')}"
            kinds[name] = kinds.get(name, 0) + 1
            nbytes += row.nbytes
    return Leftovers(keys, nbytes, kinds)


def compact(store: ShardStore) -> int:
    """Move entries out of files that are mostly gaps, remove what is empty or unknown; bytes freed.

    A file that another process writes is left alone. Readers find moved entries by asking again.
    """
    store.seal()
    return sum(_compact_file(store, path) for path in sorted(store.shards.iterdir()))


def _compact_file(store: ShardStore, path: Path) -> int:
    if path.suffix not in (OPEN, SEALED) or not path.exists():
        return 0
    before = disk_nbytes(path)
    with store.index() as index:
        shard = hold_shard(path, index)
        if shard is None:
            return 0 if path.exists() else before
        rows = index.in_shard(shard.row.name)
    live = sum(row.nbytes for row in rows)
    if live >= WORTH_MOVING * (shard.row.length - shard.row.room) and rows:
        if path.suffix == OPEN:
            shard.seal(rows)
        else:
            shard.release()
        return 0
    _move(store, rows)
    with store.index() as index:
        empty = index.drop_shard(shard.row.name)
    if not empty:  # an entry came from nowhere: keep the file, the next call looks again
        shard.release()
        return 0
    shard.remove()
    return before - live


def _move(store: ShardStore, rows: list[EntryRow]) -> None:
    for start in range(0, len(rows), _TOGETHER):
        some = rows[start : start + _TOGETHER]
        entries = store.get_many([row.key for row in some])
        whole: list[tuple[EntryRow, Entry]] = [
            (row, entry) for row, entry in zip(some, entries, strict=True) if entry is not None
        ]
        store.move([row for row, _ in whole], [entry for _, entry in whole])
    store.seal()


def disk_nbytes(path: Path) -> int:
    """What a file takes on the disk: the room for its header is mostly a hole."""
    return path.stat().st_blocks * 512
