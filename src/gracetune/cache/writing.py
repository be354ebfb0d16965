"""Appending entries: bytes first, then the disk's word, then the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.cache.index import CacheIndex, EntryRow
from gracetune.cache.keys import about
from gracetune.cache.packing import pack
from gracetune.cache.shards import adopt_shard, header_cost, new_shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.cache.shards import ShardFile
    from gracetune.cache.store import Entry


class ShardWriter:
    """The one file that this process appends to, until it is full; one thread at a time."""

    def __init__(self, shards: Path, index: Path) -> None:
        self._folder = shards
        # A connection of its own: readers do not wait while the disk is waited for.
        self._index = CacheIndex(index)
        self._file: ShardFile | None = None

    def put(self, entries: Mapping[str, Entry]) -> None:
        """Keep what is not there yet."""
        known = self._index.which([*entries])
        self._append([(_fresh(k, e), e) for k, e in entries.items() if k not in known], moved=False)

    def move(self, rows: Sequence[EntryRow], entries: Sequence[Entry]) -> None:
        """Write entries again, elsewhere; their rows follow."""
        self._append([*zip(rows, entries, strict=True)], moved=True)

    def finish(self) -> None:
        """Seal the file; one without an entry is removed."""
        if self._file is None:
            return
        file, self._file = self._file, None
        rows = self._index.in_shard(file.row.name)
        if rows:
            file.seal(rows)
        elif self._index.drop_shard(file.row.name):
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
                if file is None or not file.has_room(cost):
                    self._commit(rows, moved)
                    rows = []
                    self.finish()
                    file = adopt_shard(self._folder, self._index, cost)
                    file = self._file = file or new_shard(self._folder, self._index, cost)
                rows.append(
                    before._replace(
                        shard=file.row.name,
                        begin=file.append(packed, cost),
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
    return EntryRow(0, str(key), "", 0, 0, (), b"", about(key))
