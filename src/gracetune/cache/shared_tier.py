"""Keep cache entries in host memory once per machine, for all ranks that run on it.

`warm` loads entries from the backing store into an arena (memory/shared_memory.py). The rank that
comes first fills it; the others wait and map the same memory. Entries beyond the budget, and
entries that were encoded later, are read from the backing store: its mapped files are in the
kernel's page cache, which the ranks of a machine share as well.

The arena is anonymous memory, so nothing is left if all ranks are killed. Its first segment has the
index (`_fill_arena`); the others have the tensors.
"""

from __future__ import annotations

import json
import threading
import weakref
from itertools import chain
from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.cache.index import TensorSlice
from gracetune.cache.memory_tier import (
    WARM_CHUNK_SIZE,
    GatherTable,
    allocate_page_aligned,
    allocate_pageable,
)
from gracetune.cache.shard_format import (
    DTYPES,
    LARGE_ENTRY_NBYTES,
    align_up,
    map_file,
    tensor_bytes,
    unpack,
)
from gracetune.cache.store import stack_entries
from gracetune.data.bulk_copy import find_bulk_copier
from gracetune.data.prefetch import default_workers, ordered_map
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.memory.shared_memory import (
    OFFSET_BITS,
    OFFSET_MASK,
    ArenaFullError,
    ArenaWriter,
    SharedArena,
    share_arena,
)
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from gracetune.cache.memory_tier import HitCounts, HostMemoryBudget
    from gracetune.cache.store import Allocate, Entry, Store, TryAllocate
    from gracetune.data.bulk_copy import BulkCopier, MissingBulkCopier
    from gracetune.events.types import Event
    from gracetune.memory.shared_memory import Arena, SegmentWriter


class SharedTier:
    """A cache store whose entries are in host memory once, however many ranks use them."""

    def __init__(
        self,
        what: str,
        budget: HostMemoryBudget,
        backing: Store,
        emit: Callable[[Event], None],
        folder: Path,
        hit_counts: HitCounts,
        find: Callable[[], BulkCopier | MissingBulkCopier] = find_bulk_copier,
    ) -> None:
        """Share entries of `backing`, up to a budget for the machine; `what` names them.

        The ranks of the machine meet in `folder`, which must be new for every start of a run.
        `find` loads the C helper that copies batches.
        """
        self._what = what
        self._budget = budget
        self._backing = backing
        self._emit = emit
        self._folder = folder
        self._hit_counts = hit_counts
        self._entries: dict[str, Entry] = {}
        self._table = GatherTable(find())
        self._lock = threading.Lock()
        self._arenas: list[Arena] = []
        """Kept while this rank starts: other ranks may still want to map an arena of this one."""
        self._filled: list[Arena] = []
        """Those of the arenas that this rank has filled."""

    def get(self, key: str) -> Entry | None:
        """Return an entry from shared memory, or from the backing store."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return entries as views of shared memory or of the backing store's files."""
        with self._lock:
            here = [self._entries.get(key) for key in keys]
        missing = [key for key, entry in zip(keys, here, strict=True) if entry is None]
        self._hit_counts.hits += len(keys) - len(missing)
        if not missing:
            return here
        found = dict(zip(missing, self._backing.get_many(missing), strict=True))
        self._hit_counts.reads += sum(entry is not None for entry in found.values())
        return [
            found[key] if entry is None else entry for key, entry in zip(keys, here, strict=True)
        ]

    def gather(self, keys: Sequence[str], name: str, allocate: Allocate) -> Tensor | None:
        """Stack one tensor of each entry; in a single C call if all entries are in memory."""
        with self._lock:
            rows = self._table.find(keys, name)
        if rows is None:
            return stack_entries(self.get_many(keys), name, allocate)
        self._hit_counts.hits += len(keys)
        return self._table.stack(rows, allocate)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:  # noqa: ARG002
        """Return entries like `get_many`, without `allocate`."""
        return self.get_many(keys)

    def will_need(self, keys: Sequence[str]) -> None:
        """Announce to the backing store which entries not in memory will be read soon."""
        with self._lock:
            missing = [key for key in keys if key not in self._entries]
        if missing:
            self._backing.will_need(missing)

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry in the backing store; `warm` loads it into memory."""
        self._backing.put(key, entry)

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Store entries in the backing store; `warm` loads them into memory."""
        self._backing.put_many(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its entry is in memory or in the backing store."""
        with self._lock:
            missing = [key for key in keys if key not in self._entries]
        found = dict(zip(missing, self._backing.has(missing), strict=True)) if missing else {}
        return [found.get(key, True) for key in keys]

    def warm(self, keys: Sequence[str], num_workers: int | None = None) -> list[str]:
        """Load entries into shared memory until the budget is full, or map what a rank has loaded.

        Returns the keys of entries that the backing store lacks. All ranks of the machine must call
        this with the same keys, in any order.
        """
        with self._lock:
            missing = [key for key in dict.fromkeys(keys) if key not in self._entries]
        if not missing:
            return []

        def build() -> Arena:
            return _fill_arena(self._backing, missing, self._budget, num_workers)

        name = blake3("\0".join((self._what, *missing)).encode()).hexdigest()
        shared = share_arena(
            self._folder,
            name,
            build,
            lambda: self._emit(Notice(f"cache: another rank loads {self._what} into memory")),
        )
        if shared.share_error is not None:
            text = f"{self._what} are in the memory of each rank, because they cannot be shared: "
            self._emit(Notice(text + shared.share_error, level="warning", fallback=True))
        return self._add_arena(shared)

    def trim(self) -> int:
        """Drop all entries of this rank, which then reads the backing store's files.

        The kernel frees the memory when the last rank of the machine has dropped it. Returns its
        bytes on the rank that has filled it, and 0 on others.
        """
        with self._lock:
            owned = sum(arena.resident_nbytes for arena in self._arenas if arena in self._filled)
            self._entries.clear()
            self._table.clear()
            self._arenas.clear()
            self._filled.clear()
        return owned

    def restore(self) -> None:
        """Do nothing: files are read through the page cache, which keeps what is used."""

    def close(self) -> None:
        """Close the backing store; entries stay in memory."""
        self._backing.close()

    @property
    def nbytes(self) -> int:
        """Host memory in bytes that the entries take on this machine."""
        return sum(arena.resident_nbytes for arena in self._arenas)

    def _add_arena(self, shared: SharedArena) -> list[str]:
        """Add the entries of an arena; return the keys that the backing store lacked."""
        arena, is_owner = shared.arena, shared.is_owner
        index = json.loads(bytes(arena.segments[0]))
        kinds = [[TensorSlice(*row) for row in kind] for kind in index["kinds"]]
        segments = [map_file(descriptor) for descriptor, *_ in arena.handle.segments]
        nbytes = index["nbytes"]
        if not is_owner:
            self._budget.take(nbytes)
        with self._lock:
            self._arenas.append(arena)
            if is_owner:
                self._filled.append(arena)
            for key, kind, address in index["entries"]:
                data = segments[address >> OFFSET_BITS]
                entry = unpack(data, address & OFFSET_MASK, kinds[kind])
                self._entries[key] = entry
                self._table.add(key, entry)
        weakref.finalize(arena, self._budget.release, nbytes).atexit = False
        if index["is_full"] and is_owner:
            text = (
                f"{self._what} do not fit into {format_bytes(self._budget.nbytes)} of host memory "
                "on this machine (cache_config.host_budget_gb): the others are read from files"
            )
            self._emit(Notice(text, level="warning", fallback=True))
        lost: list[str] = index["lost"]
        return lost


class _ArenaFiller:
    """Copies entries into an arena from several threads, until a budget is full."""

    def __init__(self, backing: Store, budget: HostMemoryBudget) -> None:
        self.entries: list[tuple[str, int, int]] = []
        """Key, kind (position in `kinds`) and address of each entry."""
        self.nbytes = 0
        self.writer = ArenaWriter()
        self._backing = backing
        self._budget = budget
        self._kinds: dict[tuple[TensorSlice, ...], int] = {}
        self._lock = threading.Lock()
        self._full = threading.Event()

    @property
    def is_full(self) -> bool:
        return self._full.is_set()

    @property
    def kinds(self) -> list[tuple[TensorSlice, ...]]:
        """The different layouts of entries: name, dtype, shape and offset of their tensors."""
        return list(self._kinds)

    def copy(self, keys: Sequence[str]) -> list[str]:
        """Copy entries from the backing store; return the keys that it lacks."""
        if self.is_full:
            found = self._backing.has(keys)
            return [key for key, exists in zip(keys, found, strict=True) if not exists]
        lost = []
        loaded = self._backing.load(keys, _allocate)
        with self.writer.segment_writer() as segment:
            for key, entry in zip(keys, loaded, strict=True):
                if entry is None:
                    lost.append(key)
                elif not self.is_full:
                    self._copy_entry(segment, key, entry)
        return lost

    def _copy_entry(self, segment: SegmentWriter, key: str, entry: Entry) -> None:
        kind, parts, nbytes = _layout(entry)
        if not self._budget.reserve(nbytes):
            self._full.set()
            return
        with self._lock:
            self.nbytes += nbytes
        try:
            address = segment.write(b"".join(parts))
        except ArenaFullError:  # less memory is free than the budget allows
            self._full.set()
            return
        with self._lock:
            self.entries.append((key, self._kinds.setdefault(kind, len(self._kinds)), address))


def _fill_arena(
    backing: Store, keys: Sequence[str], budget: HostMemoryBudget, num_workers: int | None
) -> Arena:
    """Copy entries into a new arena until the budget is full, and add an index of them."""
    filler = _ArenaFiller(backing, budget)
    chunks = [keys[i : i + WARM_CHUNK_SIZE] for i in range(0, len(keys), WARM_CHUNK_SIZE)]
    with filler.writer.segment_writer() as first:  # which no worker uses meanwhile
        copied = ordered_map(filler.copy, chunks, num_workers or default_workers())
        lost = list(chain.from_iterable(copied))
        index = {
            "lost": lost,
            "is_full": filler.is_full,
            "nbytes": filler.nbytes,
            "kinds": filler.kinds,
            "entries": filler.entries,
        }
        try:
            first.write(json.dumps(index).encode())
        except ArenaFullError as error:
            raise ConfigError(
                f"There is no memory left for the cache of this machine ({error}), although "
                f"cache_config.host_budget_gb allows {budget.nbytes / GIB:.1f}. Lower it."
            ) from error
    return filler.writer.seal()


def _allocate(nbytes: int) -> Tensor:
    """Allocate memory to read an entry into; large ones can be read directly from the disk."""
    is_large = nbytes >= LARGE_ENTRY_NBYTES
    return allocate_page_aligned(nbytes) if is_large else allocate_pageable(nbytes)


def _layout(entry: Entry) -> tuple[tuple[TensorSlice, ...], list[bytes | memoryview], int]:
    """Return the slices of an entry's tensors, their bytes with padding, and the total bytes.

    Padding makes the next entry of a segment start at a multiple of the tensors' alignment.
    """
    slices: list[TensorSlice] = []
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in entry.items():
        data = tensor_bytes(tensor)
        slices.append(
            TensorSlice(name, DTYPES[tensor.dtype], tuple(tensor.shape), end, data.nbytes)
        )
        padding = align_up(data.nbytes) - data.nbytes
        parts += [data.data, bytes(padding)]
        end += data.nbytes + padding
    return tuple(slices), parts, end
