"""Cache entries in one budget of host memory: views of slabs, the least recently used leave first.

What does not fit is read from the store behind, where there is one. An entry's room is used again
only when its last reader is gone: a view keeps it, however it was derived.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.cache.shard_format import align_up, entry_alignment
from gracetune.cache.store import stack_entries, stack_into
from gracetune.data.gather import MissingGather, find_gather
from gracetune.data.prefetch import default_workers, ordered_map
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.cache.store import TryAllocate, Entry, Allocate, Store
    from gracetune.data.gather import Gather
    from gracetune.events.types import Event


SLAB_NBYTES = 64 * 1024**2
"""A power of two: pinned memory is handed out in powers of two, whatever is asked for."""
MIN_SLAB_NBYTES = 4096
WARM_CHUNK_SIZE = 64
MAX_PENDING_USES = 4096
"""Batches whose use is still to be counted; what was used before them counts as not used since."""


class HostMemoryBudget:
    """Bytes that several stores share; what one gives back another may take."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0
        self._lock = threading.RLock()  # a slab may die, and give back, while another is taken

    def reserve(self, nbytes: int) -> bool:
        """Whether there was as much left; then it is taken."""
        with self._lock:
            if self.used + nbytes > self.nbytes:
                return False
            self.used += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Somebody else may have it."""
        with self._lock:
            self.used -= nbytes


@dataclass(slots=True)
class HitCounts:
    """Where entries were found."""

    hits: int = 0
    """In memory."""
    reads: int = 0
    """In files."""


class MemoryTier:
    """Entries of one kind, within a budget that is never exceeded."""

    def __init__(
        self,
        what: str,
        budget: HostMemoryBudget,
        backing: Store | None,
        emit: Callable[[Event], None],
        allocate: Callable[[int], Tensor],
        hit_counts: HitCounts,
        find: Callable[[], Gather | MissingGather] = find_gather,
    ) -> None:
        """`what` is for messages; `allocate` gives so many bytes of host memory; `find` looks for
        the helper that copies batches."""
        self._what = what
        self._behind = backing
        self._emit = emit
        self._slabs = SlabAllocator(budget, allocate)
        self._budget = budget
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._rows = GatherTable(find())
        self._used: deque[Sequence[str]] = deque(maxlen=MAX_PENDING_USES)
        self._lock = threading.Lock()
        self._told = False
        self._tally = hit_counts

    @property
    def nbytes(self) -> int:
        """Host memory that it holds, entries and room for more."""
        return self._slabs.nbytes

    def get(self, key: str) -> Entry | None:
        """From memory, else from behind."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Those in memory as views; the others are read together, and kept where they fit."""
        with self._lock:
            self._used.append(keys)
            here = [*map(self._entries.get, keys)]
            self._tally.hits += len(here) - here.count(None)
        if None not in here:
            return here
        found = {key: entry for key, entry in zip(keys, here, strict=True) if entry is not None}
        lacking = list(dict.fromkeys(key for key in keys if key not in found))
        if lacking and self._behind is not None:
            read = self._brought(self._behind, lacking, evict=True)
            self._tally.reads += len(read)
            found |= read
        return [found.get(key) for key in keys]

    def gather(self, keys: Sequence[str], name: str, room: Allocate) -> Tensor | None:
        """Copy them side by side; all at once where all are here, which is the usual case."""
        with self._lock:
            rows = self._rows.find(keys, name)
            if rows is not None:
                self._used.append(keys)
                self._tally.hits += len(keys)
        if rows is None:
            return stack_entries(self.get_many(keys), name, room)
        return self._rows.joined(rows, room)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:  # noqa: ARG002
        """Views of memory here; what has to be read is kept here, where it fits."""
        return self.get_many(keys)

    def will_need(self, keys: Sequence[str]) -> None:
        """Have those that are not here read ahead."""
        if self._behind is not None:
            with self._lock:
                lacking = [key for key in keys if key not in self._entries]
            if lacking:
                self._behind.will_need(lacking)

    def put(self, key: str, entry: Entry) -> None:
        """Write it behind, then keep it."""
        self.put_many({key: entry})

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Write them behind, then keep them; without a store behind they must fit."""
        if self._behind is not None:
            self._behind.put_many(entries)
        for key, entry in entries.items():
            kept = self._keep(key, entry)
            if kept is None and self._behind is None:
                raise ConfigError(
                    f"cache_config.host_budget_gb leaves {format_bytes(self._budget.nbytes)} for "
                    f"{self._what}, and they need more. Raise it, or set "
                    "cache_config.persistent_cache: true, so that the rest is read from files."
                )

    def has(self, keys: Sequence[str]) -> list[bool]:
        """In memory or behind."""
        with self._lock:
            there = {key for key in keys if key in self._entries}
        lacking = [key for key in keys if key not in there]
        if lacking and self._behind is not None:
            answers = zip(lacking, self._behind.has(lacking), strict=True)
            there |= {key for key, answer in answers if answer}
        return [key in there for key in keys]

    def warm(self, keys: Sequence[str], num_workers: int | None = None) -> list[str]:
        """Bring entries into memory by several readers, until the budget is spent; those that
        turned out not to be there."""
        if self._behind is None:
            return []
        with self._lock:
            lacking = [key for key in dict.fromkeys(keys) if key not in self._entries]
        chunks = [lacking[i : i + WARM_CHUNK_SIZE] for i in range(0, len(lacking), WARM_CHUNK_SIZE)]
        backing, full = self._behind, threading.Event()

        def bring(chunk: Sequence[str]) -> list[str]:
            if full.is_set():
                return []
            found = self._brought(backing, chunk, evict=False)
            if not self._here(found):
                full.set()
            return [key for key in chunk if key not in found]

        absent = ordered_map(bring, chunks, num_workers or default_workers())
        return [key for some in absent for key in some]

    def close(self) -> None:
        """Let go of the files behind; entries stay in memory."""
        if self._behind is not None:
            self._behind.close()

    def _brought(self, backing: Store, keys: Sequence[str], *, evict: bool) -> dict[str, Entry]:
        """What lies behind, read into room of ours; where there is none, as it lies there."""
        rooms: set[int] = set()

        def allocate(nbytes: int) -> Tensor | None:
            room = self._room(nbytes, evict=evict)
            if room is None:
                self._emit_once()
            else:
                rooms.add(room.data_ptr())
            return room

        found = {}
        for key, entry in zip(keys, backing.load(keys, allocate), strict=True):
            if entry is None:
                continue
            if all(t.untyped_storage().data_ptr() in rooms for t in entry.values() if t.nbytes):
                found[key] = entry
                self._enter(key, entry)
            else:
                found[key] = self._keep(key, entry, evict=evict) or entry
        return found

    def _here(self, keys: Iterable[str]) -> bool:
        with self._lock:
            return all(key in self._entries for key in keys)

    def _keep(self, key: str, entry: Entry, *, evict: bool = True) -> Entry | None:
        """A copy in a slab; none where there is no room for it, even without all others."""
        places, nbytes = _layout(entry)
        room = self._room(nbytes, evict=evict and self._behind is not None)
        if room is None:
            self._emit_once()
            return None
        kept = {}
        for name, (start, tensor) in places.items():
            view = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            kept[name] = view.copy_(tensor)
        self._enter(key, kept)
        return kept

    def _enter(self, key: str, entry: Entry) -> None:
        with self._lock:
            self._entries[key] = entry
            self._rows.add(key, entry)

    def _room(self, nbytes: int, *, evict: bool) -> Tensor | None:
        with self._lock:
            room = self._slabs.take(nbytes)
            if room is None and evict:
                self._count_uses()
            while room is None and evict and self._entries:
                self._emit_once()
                self._rows.forget(self._entries.popitem(last=False)[0])
                room = self._slabs.take(nbytes)
            return room

    def _count_uses(self) -> None:
        """Put what was used last last; only before something has to leave, because it costs more
        than finding an entry does."""
        for key in chain.from_iterable(self._used):
            if key in self._entries:
                self._entries.move_to_end(key)
        self._used.clear()

    def _emit_once(self) -> None:
        if not self._told and self._behind is not None:
            self._told = True
            text = (
                f"{self._what} do not fit {format_bytes(self._budget.nbytes)} of host memory "
                "(cache_config.host_budget_gb): the least recently used are read from files"
            )
            self._emit(Notice(text, level="warning", fallback=True))


class SlabAllocator:
    """Room in a few large pieces of host memory. Whoever calls holds a lock."""

    def __init__(self, budget: HostMemoryBudget, allocate: Callable[[int], Tensor]) -> None:
        self._budget = budget
        self._allocate = allocate
        self._slabs: list[NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []
        self._returned: deque[tuple[int, int, int]] = deque()
        self.nbytes = 0

    def take(self, nbytes: int) -> Tensor | None:
        """So many bytes; they come back by themselves when the last view of them is gone."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        to = entry_alignment(nbytes)
        length = align_up(nbytes, to)
        found = self._first_fit(length, to)
        if found is None:
            self._collect()
            found = self._first_fit(length, to)
        if found is None and self._grow(length):
            found = self._first_fit(length, to)
        if found is None:
            return None
        slab, start = found
        # An array of its own for each room: its storage lives as long as any view of it does.
        array = self._slabs[slab][start : start + nbytes]
        weakref.finalize(array, self._returned.append, (slab, start, length)).atexit = False
        return torch.from_numpy(array)

    def _first_fit(self, length: int, to: int) -> tuple[int, int] | None:
        for slab, spans in enumerate(self._free):
            for at, (start, size) in enumerate(spans):
                begin = align_up(start, to)
                left = start + size - begin - length
                if left >= 0:
                    pieces = [(start, begin - start), (begin + length, left)]
                    spans[at : at + 1] = [piece for piece in pieces if piece[1]]
                    return slab, begin
        return None

    def _collect(self) -> None:
        """Merge what came back with its free neighbours."""
        changed = set()
        while self._returned:
            slab, start, length = self._returned.popleft()
            self._free[slab].append((start, length))
            changed.add(slab)
        for slab in changed:
            self._free[slab] = list(_merged(sorted(self._free[slab])))

    def _grow(self, length: int) -> bool:
        """Another slab, as large as all so far: few are looked through, however much there is."""
        size = max(SLAB_NBYTES, _power_up(length), _power_up(self.nbytes + 1) // 2)
        while not self._budget.reserve(size):
            size //= 2
            if size < max(MIN_SLAB_NBYTES, length):
                return False
        slab: NDArray[np.uint8] = self._allocate(size).numpy()
        weakref.finalize(slab, self._budget.release, size).atexit = False
        self._slabs.append(slab)
        self._free.append([(0, size)])
        self.nbytes += size
        return True


def allocate_pageable(nbytes: int) -> Tensor:
    """Plain host memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


def allocate_page_aligned(nbytes: int) -> Tensor:
    """Plain host memory that begins with a page: a disk can write to it directly."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def allocate_pinned(nbytes: int) -> Tensor:
    """Host memory that a GPU's copy engine reads directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _layout(entry: Entry) -> tuple[dict[str, tuple[int, Tensor]], int]:
    """Where each tensor of an entry lies in its room, and how much that needs."""
    places, end = {}, 0
    for name, tensor in entry.items():
        places[name] = (end, tensor)
        end += align_up(tensor.nbytes)
    return places, end


def _power_up(nbytes: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(0, nbytes - 1).bit_length()


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start, length = spans[0]
    for following, more in spans[1:]:
        if following == start + length:
            length += more
        else:
            yield start, length
            start, length = following, more
    yield start, length


# ------------------------------------------------------------------------------------------
# Where the tensors of entries lie in memory, so that a batch of them is copied by one call.
#
# What is looked at to find an entry has left the processor's caches since it was looked at last. A
# tensor is spread over five objects, and all that a copy needs of it is in one row.


class TensorSpec(NamedTuple):
    """What tensors of one batch have in common; one object for all of them."""

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


class GatherRow(NamedTuple):
    """Where a tensor begins; whoever has the row has the memory too."""

    form: TensorSpec
    address: int
    tensor: Tensor


class GatherTable:
    """Rows by name and key. Whoever calls holds a lock."""

    def __init__(self, gather: Gather | MissingGather) -> None:
        self._gather = None if isinstance(gather, MissingGather) else gather
        self._rows: dict[str, dict[str, GatherRow]] = {}
        self._forms: dict[TensorSpec, TensorSpec] = {}

    def add(self, key: str, entry: Entry) -> None:
        """Of an entry that is new, or takes the place of another."""
        self.forget(key)
        for name, tensor in entry.items():
            assert tensor.is_contiguous(), f"{name} of {key} has strides {tensor.stride()}"
            form = TensorSpec(tensor.dtype, tensor.shape, tensor.nbytes)
            row = GatherRow(self._forms.setdefault(form, form), tensor.data_ptr(), tensor)
            self._rows.setdefault(name, {})[key] = row

    def find(self, keys: Sequence[str], name: str) -> list[GatherRow] | None:
        """Those of a batch; none where one is missing."""
        try:
            return [*map(self._rows[name].__getitem__, keys)]
        except KeyError:
            return None

    def forget(self, key: str) -> None:
        """Its entry leaves: its memory is free as soon as nobody copies from it."""
        for rows in self._rows.values():
            rows.pop(key, None)

    def joined(self, rows: Sequence[GatherRow], room: Allocate) -> Tensor:
        """Copy them side by side into memory that is asked for; needs no lock.

        With several threads, torch shares a batch out among them; for one, the helper is faster.
        What is not of one form is refused by torch, which says why.
        """
        forms, addresses, tensors = zip(*rows, strict=True)
        form, count = forms[0], len(rows)
        if self._gather is None or forms.count(form) < count or torch.get_num_threads() > 1:
            return stack_into(tensors, room)
        out = room(count * form.nbytes).view(form.dtype).view(count, *form.shape)
        self._gather.join(out.data_ptr(), addresses, form.nbytes)
        return out
