"""Keep cache entries in host memory up to a budget, in front of a backing store.

Entries are views of large slabs. If the budget is full, the least recently used entries are evicted
and read from the backing store when they are needed again. An entry's memory is reused only when no
tensor views it any more.

`gather` is the hot path of training: it stacks the latents of a batch. Looking up an entry misses
the CPU's caches, and a torch tensor is spread over five objects. So `GatherTable` keeps everything
that a copy needs in one tuple per tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from gracetune.cache.shard_format import PAGE, align_up, entry_alignment
from gracetune.cache.store import stack_entries, stack_into
from gracetune.data.bulk_copy import MissingBulkCopier, find_bulk_copier
from gracetune.data.prefetch import default_workers, ordered_map
from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from gracetune.cache.store import Allocate, Entry, Store, TryAllocate
    from gracetune.data.bulk_copy import BulkCopier
    from gracetune.events.types import Event


SLAB_NBYTES = 64 * 1024**2
"""Minimum size in bytes of a slab, a large block of host memory, if the budget allows.

Slabs are powers of two, because torch rounds pinned memory up to these.
"""
MIN_SLAB_NBYTES = 4096
WARM_CHUNK_SIZE = 64
"""Number of cache entries that a worker thread of `MemoryTier.warm` loads at a time."""
MAX_PENDING_USES = 4096
"""Maximum number of batches whose keys are kept to find the least recently used entries."""


class HostMemoryBudget:
    """A limit on the host memory of this machine that several cache stores share."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0
        self._lock = threading.RLock()  # a slab may be freed, and release bytes, during `reserve`

    def reserve(self, nbytes: int) -> bool:
        """Reserve bytes of the budget; return False if fewer are left."""
        with self._lock:
            if self.used + nbytes > self.nbytes:
                return False
            self.used += nbytes
            return True

    def take(self, nbytes: int) -> None:
        """Count bytes that another process of the machine has reserved for all of them."""
        with self._lock:
            self.used += nbytes

    def release(self, nbytes: int) -> None:
        """Give reserved bytes back to the budget."""
        with self._lock:
            self.used -= nbytes


@dataclass(slots=True)
class HitCounts:
    """Counts of cache entries found in host memory and of those read from a slower store."""

    hits: int = 0
    """Number of entries found in host memory."""
    reads: int = 0
    """Number of entries that were not in host memory and had to be read from a store of files."""


class MemoryTier:
    """A cache store that keeps entries in host memory, within a fixed budget.

    If the budget is full, the least recently used entries are dropped and read again from the
    backing store when they are needed.
    """

    def __init__(
        self,
        what: str,
        budget: HostMemoryBudget,
        backing: Store | None,
        emit: Callable[[Event], None],
        allocate: Callable[[int], Tensor],
        hit_counts: HitCounts,
        find: Callable[[], BulkCopier | MissingBulkCopier] = find_bulk_copier,
    ) -> None:
        """Keep entries in large blocks from `allocate`; `what` names the entries in messages.

        `backing` stores all entries; without it, all must fit into the budget. `find` loads the C
        helper that copies batches.
        """
        self._what = what
        self._backing = backing
        self._emit = emit
        self._slabs = SlabAllocator(budget, allocate)
        self._is_pageable = allocate is allocate_page_aligned
        self._budget = budget
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        """Entries in memory by key, least recently used first (after `_apply_uses`)."""
        self._table = GatherTable(find())
        self._uses: deque[Sequence[str]] = deque(maxlen=MAX_PENDING_USES)
        self._lock = threading.Lock()
        self._reported_full = False
        self._hit_counts = hit_counts

    @property
    def nbytes(self) -> int:
        """Host memory in bytes that is allocated for entries, whether used or free."""
        return self._slabs.nbytes

    def get(self, key: str) -> Entry | None:
        """Return an entry from memory, or from the backing store if it is not in memory."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return entries as views of this store's memory.

        Entries that are not in memory are read from the backing store.
        """
        with self._lock:
            self._uses.append(keys)
            here = [*map(self._entries.get, keys)]
            self._hit_counts.hits += len(here) - here.count(None)
        if None not in here:
            return here
        found = {key: entry for key, entry in zip(keys, here, strict=True) if entry is not None}
        missing = list(dict.fromkeys(key for key in keys if key not in found))
        if missing and self._backing is not None:
            read = self._load(self._backing, missing, evict=True)
            self._hit_counts.reads += len(read)
            found |= read
        return [found.get(key) for key in keys]

    def gather(self, keys: Sequence[str], name: str, allocate: Allocate) -> Tensor | None:
        """Stack one tensor of each entry; in a single C call if all entries are in memory."""
        with self._lock:
            rows = self._table.find(keys, name)
            if rows is not None:
                self._uses.append(keys)
                self._hit_counts.hits += len(keys)
        if rows is None:
            return stack_entries(self.get_many(keys), name, allocate)
        return self._table.stack(rows, allocate)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:  # noqa: ARG002
        """Return entries like `get_many`, as views of this store's memory, without `allocate`."""
        return self.get_many(keys)

    def will_need(self, keys: Sequence[str]) -> None:
        """Announce to the backing store which entries not in memory will be read soon."""
        if self._backing is not None:
            with self._lock:
                missing = [key for key in keys if key not in self._entries]
            if missing:
                self._backing.will_need(missing)

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry in the backing store and in memory."""
        self.put_many({key: entry})

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Store entries in the backing store and in memory.

        Raises an error if there is no backing store and the entries do not fit into the budget.
        """
        if self._backing is not None:
            self._backing.put_many(entries)
        for key, entry in entries.items():
            kept = self._copy_in(key, entry)
            if kept is None and self._backing is None:
                raise ConfigError(
                    f"cache_config.host_budget_gb leaves {format_bytes(self._budget.nbytes)} for "
                    f"{self._what}, but they need more. Raise it, or set "
                    "cache_config.persistent_cache: true to read the rest from files."
                )

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its entry is in memory or in the backing store."""
        with self._lock:
            existing = {key for key in keys if key in self._entries}
        missing = [key for key in keys if key not in existing]
        if missing and self._backing is not None:
            answers = zip(missing, self._backing.has(missing), strict=True)
            existing |= {key for key, answer in answers if answer}
        return [key in existing for key in keys]

    def warm(self, keys: Sequence[str], num_workers: int | None = None) -> list[str]:
        """Load entries from the backing store into memory until the budget is full.

        Returns the keys of entries that the backing store lacks.
        """
        if self._backing is None:
            return []
        with self._lock:
            missing = [key for key in dict.fromkeys(keys) if key not in self._entries]
        chunks = [missing[i : i + WARM_CHUNK_SIZE] for i in range(0, len(missing), WARM_CHUNK_SIZE)]
        backing, full = self._backing, threading.Event()

        def load(chunk: Sequence[str]) -> list[str]:
            if full.is_set():
                return []
            found = self._load(backing, chunk, evict=False)
            if not self._has_in_memory(found):
                full.set()
            return [key for key in chunk if key not in found]

        absent = ordered_map(load, chunks, num_workers or default_workers())
        return [key for chunk in absent for key in chunk]

    def trim(self) -> int:
        """Drop the less recently used half of the entries; return the bytes given back.

        Does nothing without a backing store, from which they could be read again, nor with pinned
        memory: the driver keeps its pages, and pinning others takes 0.4 s per GiB.
        """
        if self._backing is None or not self._is_pageable:
            return 0
        with self._lock:
            self._apply_uses()
            for _ in range(len(self._entries) // 2):
                self._table.remove(self._entries.popitem(last=False)[0])
            return self._slabs.release_free()

    def restore(self) -> None:
        """Use the memory again that `trim` has given back."""
        with self._lock:
            self._slabs.restore()

    def close(self) -> None:
        """Close the backing store; entries stay in memory."""
        if self._backing is not None:
            self._backing.close()

    def _load(self, backing: Store, keys: Sequence[str], *, evict: bool) -> dict[str, Entry]:
        """Read entries from `backing` into this store's memory and return all that exist.

        An entry for which there is no space is returned as `backing` has it, such as a view of a
        file. With `evict`, least recently used entries make space first.
        """
        addresses: set[int] = set()

        def allocate(nbytes: int) -> Tensor | None:
            buffer = self._allocate(nbytes, evict=evict)
            if buffer is None:
                self._report_full()
            else:
                addresses.add(buffer.data_ptr())
            return buffer

        found = {}
        for key, entry in zip(keys, backing.load(keys, allocate), strict=True):
            if entry is None:
                continue
            if all(t.untyped_storage().data_ptr() in addresses for t in entry.values() if t.nbytes):
                found[key] = entry
                self._add(key, entry)
            else:
                found[key] = self._copy_in(key, entry, evict=evict) or entry
        return found

    def _has_in_memory(self, keys: Iterable[str]) -> bool:
        with self._lock:
            return all(key in self._entries for key in keys)

    def _copy_in(self, key: str, entry: Entry, *, evict: bool = True) -> Entry | None:
        """Copy an entry into this store's memory and return the copy; None if there is no space.

        With `evict`, least recently used entries make space first.
        """
        layout, nbytes = _layout(entry)
        buffer = self._allocate(nbytes, evict=evict and self._backing is not None)
        if buffer is None:
            self._report_full()
            return None
        kept = {}
        for name, (start, tensor) in layout.items():
            view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            kept[name] = view.copy_(tensor)
        self._add(key, kept)
        return kept

    def _add(self, key: str, entry: Entry) -> None:
        with self._lock:
            self._entries[key] = entry
            self._table.add(key, entry)

    def _allocate(self, nbytes: int, *, evict: bool) -> Tensor | None:
        with self._lock:
            buffer = self._slabs.allocate(nbytes)
            if buffer is None and evict:
                self._apply_uses()
            while buffer is None and evict and self._entries:
                self._report_full()
                self._table.remove(self._entries.popitem(last=False)[0])
                buffer = self._slabs.allocate(nbytes)
            return buffer

    def _apply_uses(self) -> None:
        """Sort `_entries` by last use, according to the recorded keys of the batches read so far.

        Called only before an eviction, because reordering costs more than a lookup.
        """
        for key in chain.from_iterable(self._uses):
            if key in self._entries:
                self._entries.move_to_end(key)
        self._uses.clear()

    def _report_full(self) -> None:
        if not self._reported_full and self._backing is not None:
            self._reported_full = True
            text = (
                f"{self._what} do not fit into {format_bytes(self._budget.nbytes)} of host memory "
                "(cache_config.host_budget_gb): the least recently used are read from files"
            )
            self._emit(Notice(text, level="warning", fallback=True))


class SlabAllocator:
    """First-fit allocator over a few large blocks (slabs) of host memory.

    The caller must hold a lock. Unlike an arena (memory/shared_memory.py), its memory is private to
    the process and is freed entry by entry. The slabs themselves are kept as long as the allocator.
    """

    def __init__(self, budget: HostMemoryBudget, allocate: Callable[[int], Tensor]) -> None:
        self._budget = budget
        self._allocate_slab = allocate
        self._slabs: list[NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []
        """Free spans (start, length) of each slab, sorted by start."""
        self._returned: deque[tuple[int, int, int]] = deque()
        """Freed spans (slab, start, length) that are not yet merged into `_free`."""
        self._withheld: list[tuple[int, int, int]] = []
        """Free spans whose pages were given back to the kernel."""
        self.nbytes = 0

    def allocate(self, nbytes: int) -> Tensor | None:
        """Allocate memory as a uint8 tensor; None if all slabs are full and the budget is used up.

        The memory is free again when neither the tensor nor a view of it exists any more.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        alignment = entry_alignment(nbytes)
        length = align_up(nbytes, alignment)
        found = self._first_fit(length, alignment)
        if found is None:
            self._merge_returned()
            found = self._first_fit(length, alignment)
        if found is None and self._grow(length):
            found = self._first_fit(length, alignment)
        if found is None:
            return None
        slab, start = found
        # Each allocation is a numpy array of its own, which lives as long as any view of it. Its
        # finalizer runs in any thread and must not take the lock, so it only appends to a deque.
        array = self._slabs[slab][start : start + nbytes]
        weakref.finalize(array, self._returned.append, (slab, start, length)).atexit = False
        return torch.from_numpy(array)

    def release_free(self) -> int:
        """Give the pages of free spans back to the kernel; return their bytes.

        These spans are not used again until `restore`.
        """
        self._merge_returned()
        libc, released = ctypes.CDLL(None), 0
        for index, slab in enumerate(self._slabs):
            base = slab.ctypes.data
            for start, length in self._free[index]:
                first = align_up(base + start, PAGE)
                nbytes = (base + start + length - first) // PAGE * PAGE
                if nbytes > 0:
                    address, size = ctypes.c_void_p(first), ctypes.c_size_t(nbytes)
                    released += nbytes * (libc.madvise(address, size, mmap.MADV_DONTNEED) == 0)
                self._withheld.append((index, start, length))
            self._free[index] = []
        return released

    def restore(self) -> None:
        """Use the spans again whose pages `release_free` has given back."""
        self._returned.extend(self._withheld)
        self._withheld.clear()

    def _first_fit(self, length: int, alignment: int) -> tuple[int, int] | None:
        for slab, spans in enumerate(self._free):
            for i, (start, size) in enumerate(spans):
                begin = align_up(start, alignment)
                left = start + size - begin - length
                if left >= 0:
                    pieces = [(start, begin - start), (begin + length, left)]
                    spans[i : i + 1] = [piece for piece in pieces if piece[1]]
                    return slab, begin
        return None

    def _merge_returned(self) -> None:
        """Move freed spans to the free lists and merge them with free neighbours."""
        changed = set()
        while self._returned:
            slab, start, length = self._returned.popleft()
            self._free[slab].append((start, length))
            changed.add(slab)
        for slab in changed:
            self._free[slab] = list(_merged(sorted(self._free[slab])))

    def _grow(self, length: int) -> bool:
        """Add a slab about as large as all others together; return False if the budget is full."""
        size = max(
            SLAB_NBYTES, _next_power_of_two(length), _next_power_of_two(self.nbytes + 1) // 2
        )
        while not self._budget.reserve(size):
            size //= 2
            if size < max(MIN_SLAB_NBYTES, length):
                return False
        slab: NDArray[np.uint8] = self._allocate_slab(size).numpy()
        weakref.finalize(slab, self._budget.release, size).atexit = False
        self._slabs.append(slab)
        self._free.append([(0, size)])
        self.nbytes += size
        return True


def allocate_pageable(nbytes: int) -> Tensor:
    """Allocate ordinary, pageable host memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


def allocate_page_aligned(nbytes: int) -> Tensor:
    """Allocate page-aligned host memory, which direct reads (O_DIRECT) need."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def allocate_pinned(nbytes: int) -> Tensor:
    """Allocate pinned host memory, which a GPU's copy engine reads directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _layout(entry: Entry) -> tuple[dict[str, tuple[int, Tensor]], int]:
    """Return each tensor of an entry with its offset in the entry's memory, and the total bytes."""
    layout, end = {}, 0
    for name, tensor in entry.items():
        layout[name] = (end, tensor)
        end += align_up(tensor.nbytes)
    return layout, end


def _next_power_of_two(nbytes: int) -> int:
    return 1 << max(0, nbytes - 1).bit_length()


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join adjacent (start, length) spans."""
    start, length = spans[0]
    for following, more in spans[1:]:
        if following == start + length:
            length += more
        else:
            yield start, length
            start, length = following, more
    yield start, length


class TensorSpec(NamedTuple):
    """Dtype, shape and bytes of a tensor; tensors with equal specs can be stacked."""

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


class GatherRow(NamedTuple):
    """A row of `GatherTable`: a cached tensor, kept alive, and its address, dtype and shape."""

    spec: TensorSpec
    address: int
    tensor: Tensor


class GatherTable:
    """Table of all cached tensors in host memory (`GatherRow`), by tensor name and entry key.

    It finds what copying a batch needs with one lookup per tensor. The caller must hold a lock,
    except for `stack`.
    """

    def __init__(self, gather: BulkCopier | MissingBulkCopier) -> None:
        self._gather = None if isinstance(gather, MissingBulkCopier) else gather
        self._rows: dict[str, dict[str, GatherRow]] = {}
        self._specs: dict[TensorSpec, TensorSpec] = {}

    def add(self, key: str, entry: Entry) -> None:
        """Add the tensors of an entry; replaces an entry with the same key."""
        self.remove(key)
        for name, tensor in entry.items():
            assert tensor.is_contiguous(), f"{name} of {key} has strides {tensor.stride()}"
            spec = TensorSpec(tensor.dtype, tensor.shape, tensor.nbytes)
            row = GatherRow(self._specs.setdefault(spec, spec), tensor.data_ptr(), tensor)
            self._rows.setdefault(name, {})[key] = row

    def find(self, keys: Sequence[str], name: str) -> list[GatherRow] | None:
        """Return the table rows of the tensor `name` of each entry; None if an entry is missing."""
        try:
            return [*map(self._rows[name].__getitem__, keys)]
        except KeyError:
            return None

    def remove(self, key: str) -> None:
        """Remove an entry's tensors, which are freed once nothing else refers to them."""
        for rows in self._rows.values():
            rows.pop(key, None)

    def clear(self) -> None:
        """Remove all tensors."""
        self._rows.clear()

    def stack(self, rows: Sequence[GatherRow], allocate: Allocate) -> Tensor:
        """Stack the tensors of `rows` into newly allocated memory; needs no lock.

        Uses a C helper if torch runs on one thread; with several threads, torch itself is faster.
        Tensors with different shapes or dtypes also go to torch, which raises a helpful error.
        """
        specs, addresses, tensors = zip(*rows, strict=True)
        spec, count = specs[0], len(rows)
        if self._gather is None or specs.count(spec) < count or torch.get_num_threads() > 1:
            return stack_into(tensors, allocate)
        out = allocate(count * spec.nbytes).view(spec.dtype).view(count, *spec.shape)
        self._gather.join(out.data_ptr(), addresses, spec.nbytes)
        return out
