"""What an entry is and why it has the key it has; how much a cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.cache.collect import disk_nbytes
from gracetune.cache.shard_store import ShardStore, is_cache
from gracetune.errors import CacheError

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.cache.index import EntryRow

MEANING = {
    "kind": "what was encoded",
    "sample": "digest of the file's bytes: another one once the file is edited",
    "caption": "the text itself",
    "geometry": "resize, crop, augmentation and bucket",
    "encoder": "digest of the encoder's weights, dtype and scaling",
    "schema": "version of this rule",
}
"""What each part of a key stands for."""


def caches_in(folder: Path) -> list[Path]:
    """The caches of a folder: itself, or those right below it."""
    found = [folder] if is_cache(folder) else []
    if not found and folder.is_dir():
        found = [path for path in sorted(folder.iterdir()) if is_cache(path)]
    if not found:
        raise CacheError(
            f"{folder} is no cache of gracetune's, nor has it one: there is no marker file. "
            "Name the cache_dir of a run, or a run file."
        )
    return found


def find(store: ShardStore, what: str, file: Path) -> list[EntryRow]:
    """Entries by the beginning of their key, by a sample's file, or by a caption's."""
    with store.index() as index:
        if not file.is_file():
            return index.beginning(what)
        data = file.read_bytes()
        rows = index.made_of("sample", blake3(data).hexdigest())
        if file.suffix == ".txt":
            rows += index.made_of("caption", data.decode(errors="replace").strip())
        return rows


def explain(row: EntryRow) -> dict[str, object]:
    """An entry in words and numbers."""
    return {
        "key": row.key,
        "made_of": dict(row.about),
        "tensors": {p.name: {"dtype": p.dtype, "shape": list(p.shape)} for p in row.tensors},
        "nbytes": row.nbytes,
        "shard": row.shard,
        "offset": row.begin,
        "checksum": row.checksum.hex(),
    }


def stats(store: ShardStore) -> dict[str, object]:
    """How much there is, of what, and how much of the disk is gaps."""
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
        "written_nbytes": sum(shard.length - shard.room for shard in shards),
        "shards": len(shards),
        "kinds": kinds,
    }
