"""Copy batches to the device, ahead of the steps that use them.

`PrefetchedBatches` runs the loader in a background thread. Each batch is gathered into a pinned
staging slot and copied on a CUDA stream of its own (T), while the step runs on stream C:

    host  gather batch k+1 into slot s   waits for `copied[s]`, recorded on T after the copy from s
    T     copy slot s -> device          then record `arrival[k+1]`
    C     step k+1                       waits for `arrival[k+1]`

Each batch comes with the loader state after it, so a checkpoint stores the state after the last
batch that was used, not after the last one that was prefetched.

Three modules prefetch: `data/prefetch.py` decodes files in worker threads or processes,
`cache/shard_reader.py` reads entries from disk with Linux AIO, and this one copies whole batches
from host memory to the device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import psutil
import torch

from gracetune.cache.memory_tier import allocate_page_aligned, allocate_pageable, allocate_pinned
from gracetune.cache.shard_format import PAGE, align_up
from gracetune.config.environment import environment_settings, process_environment
from gracetune.events.types import Notice
from gracetune.memory.managed_pool import ManagedPool
from gracetune.memory.oversubscription import cuda_is_in_use
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.platform import open_machine
from gracetune.memory.session import MemorySession, managed_memory_notice
from gracetune.memory.stats import (
    Tier,
    attach_to_torch_memory_stats,
    detach_from_torch_memory_stats,
    memory_event,
    memory_roles_event,
    unified_memory_event,
)
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gracetune.cache.store import Allocate, Entry
    from gracetune.config.schema import Gh200Section
    from gracetune.data.batch_order import LoaderState
    from gracetune.data.sample import Batch
    from gracetune.events.types import Event, MemoryRoles, MemoryUsed, UnifiedMemory
    from gracetune.memory.managed_roles import ManagedMemory, ManagedPlacement
    from gracetune.memory.oversubscription import GcFreeze, Trimmable
    from gracetune.memory.placement import PlacementTable
    from gracetune.memory.platform import Link
    from gracetune.memory.stats import Stats

    WriteInto = Callable[[Allocate], Tensor]
    """Writes a tensor into memory that it gets from an allocator, and returns it."""

Arrival = TypeVar("Arrival")

INITIAL_DEPTH = 2
"""Number of batches to prefetch at the start of a run: one is ready while another is copied."""
STAGING_SLOTS = 2
"""Number of pinned staging slots: one is written while the other is copied to the device."""
DEVICE_ALIGNMENT = 512
"""Granularity of device allocations, in bytes."""
BATCH_PLACEMENT = {"latents": "staged", "audio": "staged"}
"""Default placement of latents and audio: copied to the device before use (`staged`)."""
ROLE_SETTINGS = ("managed", "managed_access", "managed_memory")
"""Settings of `gh200_optimizations` for roles in managed memory."""
LATENTS = "latents of the batch"
"""Name of the latents among the tensors of a batch that are copied; no text tensor has it."""


class BatchTransfer:
    """Copies batches to the device, and reports how much memory the batches and caches use.

    If the run enables CUDA managed memory, the copies are allocated in it, and the driver gets
    hints about where to keep them.
    """

    def __init__(self, session: MemorySession, device: torch.device, table: PlacementTable) -> None:
        self.device = device
        self._session = session
        self._table = table
        pool = session.pool() if session.wants_pool else None
        self._pool = pool if isinstance(pool, ManagedPool) else None
        # Hints about memory that is not managed have no effect; `managed_memory_notice` says so.
        is_hinted = session.hints_enabled and self._pool is not None
        self._hints = session.hints if is_hinted else None
        self._tier = Tier.DEVICE if self.needs_copy else Tier.HOST
        self._tracked: dict[str, tuple[Tier, Callable[[], int]]] = {}
        self._stats: Stats = {}
        self._reported_full = False
        self._staging = PinnedStaging(self.allocate_host, _record_event)

    @property
    def session(self) -> MemorySession:
        """The memory objects of the run: managed memory, accounting and statistics."""
        return self._session

    @property
    def needs_copy(self) -> bool:
        """True if the device has its own memory, to which batches must be copied."""
        return self.device.type == "cuda"

    @property
    def link(self) -> Link:
        """Kind of connection between the device and host memory, such as PCIe or NVLink-C2C."""
        return self._session.machine.platform.link

    @property
    def device_nbytes(self) -> int:
        """Size of the device's own memory in bytes; 0 if it has none."""
        return self._session.machine.platform.device_bytes if self.needs_copy else 0

    @property
    def nbytes_copied(self) -> int:
        """Bytes copied to the device so far."""
        return self._staging.nbytes_sent

    def allocate_host(self, nbytes: int) -> Tensor:
        """Allocate host memory that the device can copy from at full speed."""
        return allocate_pinned(nbytes) if self.needs_copy else allocate_page_aligned(nbytes)

    def new_stream(self) -> CudaTransferStream:
        """Return a new CUDA stream for copies that run in parallel with the training step."""
        return CudaTransferStream(self.device)

    def to_device(
        self, latents: WriteInto, text: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Start copying a batch to the device; return the device tensors of its latents and text.

        `latents` is a function that writes the latents into pinned memory. Tensors that are on the
        device already (latents that were just encoded, cached texts) are returned as they are.
        """
        if not self.needs_copy:
            gathered, texts = latents(allocate_pageable), dict(text)
            self._place(gathered, texts)
            return gathered, texts
        staged: list[Tensor] = []

        def write(allocate: Allocate) -> Tensor:
            staged.append(latents(allocate))
            return staged[0]

        on_host = {name: tensor for name, tensor in text.items() if not tensor.is_cuda}
        parts = {name: partial(copy_into, tensor) for name, tensor in on_host.items()}
        sent = self._staging.send({**parts, LATENTS: write}, self._empty_on_device)
        gathered = sent.pop(LATENTS)
        self._place(None if gathered is staged[0] else gathered, sent)
        return gathered, {**text, **sent}

    def track_memory(self, role: str, nbytes: Callable[[], int], tier: Tier | None = None) -> None:
        """Include a component's memory, called `role`, in `memory_used`.

        `nbytes` returns the bytes that it uses at the moment. `tier` is the kind of memory, by
        default the memory in which batches are.
        """
        self._tracked[role] = tier or self._tier, nbytes

    def memory_used(self, step: int) -> MemoryUsed:
        """Return the event that reports the memory of this process, on the device and the host.

        Call it between steps, with the number of the last one.
        """
        for role, (tier, nbytes) in self._tracked.items():
            self._session.accounting.book(tier, role, nbytes())
        self._stats = self._session.stats()
        return memory_event(step, self._stats, psutil.Process().memory_info().rss)

    def observe(self, step: int) -> None:
        """Look at the memory in use after a step; reclaim some if managed memory is oversubscribed.

        Does nothing in a run without managed memory.
        """
        attach_to_torch_memory_stats(self._session)
        self._session.observe(reclaim=True, step=step)

    def end_observation(self) -> None:
        """Let `torch.cuda.memory_stats()` no longer report this run, because it is over."""
        detach_from_torch_memory_stats(self._session)

    def close(self) -> None:
        """Give up managed memory. Batches in it, and what else the run keeps there, stay valid."""
        self._session.close()

    def register_trimmer(self, name: str, component: Trimmable, *, on_host: bool = False) -> None:
        """Let a reclamation trim this component; see `Trimmers.register`."""
        self._session.trimmers.register(name, component, on_host=on_host)

    @property
    def alloc_retries(self) -> int:
        """Number of times that torch's allocator freed its cache and retried, when last read."""
        return int(self._stats.get("num_alloc_retries", 0))

    def memory_details(
        self, step: int, planned: Mapping[str, Mapping[str, int]]
    ) -> tuple[MemoryRoles, UnifiedMemory]:
        """Return events with the bytes by role and with the accounting of managed memory.

        They have the values that the last call of `memory_used` has read. `planned` is what the
        memory plan expects, by kind of memory and role.
        """
        return (
            memory_roles_event(step, self._stats, planned),
            unified_memory_event(step, self._stats, self._session.headroom()),
        )

    def _place(self, latents: Tensor | None, text: Mapping[str, Tensor]) -> None:
        """Tell the CUDA driver where to keep a batch's tensors, if memory hints are enabled."""
        if self._hints is not None:
            place_batch({"latents": latents, "text": text}, self._hints, self._table)

    def _empty_on_device(self, like: Tensor) -> Tensor:
        if self._pool is None:
            return torch.empty_like(like, device=self.device)
        try:
            with self._pool.allocating():
                return torch.empty_like(like, device=self.device)
        except torch.OutOfMemoryError:
            self._report_full_pool()
            return torch.empty_like(like, device=self.device)

    def _report_full_pool(self) -> None:
        if not self._reported_full:
            self._reported_full = True
            limit = format_bytes(self._session.managed_cap)
            text = f"managed memory is full (at most {limit}): some batches are in device memory"
            self._session.emit(Notice(text, level="warning", fallback=True))


def build_batch_transfer(
    section: Gh200Section,
    device: torch.device,
    emit: Callable[[Event], None],
    gc_freeze: GcFreeze | None = None,
    managed_cap: int | None = None,
    num_sharing_host: int = 1,
) -> BatchTransfer:
    """Build the `BatchTransfer` of a run, with at most `managed_cap` bytes of managed memory.

    `num_sharing_host` ranks share the memory of this host. Also reports how host memory and device
    are connected, and what managed memory is used for.
    """
    session = MemorySession(
        lambda: open_machine(device.index or 0),
        lambda: environment_settings(process_environment()),
        emit,
        gc_freeze,
    )
    session.hints_override = section.enable_uvm_hints
    session.use_uvm_override = section.use_uvm
    session.roles_off = "gh200_optimizations.managed is off" if section.managed == "off" else ""
    session.managed_cap_override = managed_cap
    session.num_sharing_host = num_sharing_host
    session.pool_role = "batches"
    platform = session.machine.platform
    hints = "on" if session.hints_enabled else "off"
    emit(Notice(f"memory link: {platform.link.value} ({platform.reasons['link']}); hints {hints}"))
    given = section.model_fields_set - ({"managed"} if session.roles_off else set())
    roles = [name for name in ROLE_SETTINGS if name in given]
    managed = managed_memory_notice(session, roles, section.managed_access)
    if managed is not None:
        emit(managed)
    return BatchTransfer(session, device, placement_table({**BATCH_PLACEMENT, **section.placement}))


# Pinned staging memory


class DeviceEvent(Protocol):
    """A point in the device's queue of work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has passed this point."""
        ...


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class PinnedStaging:
    """Pinned host buffers (slots) through which batches are copied to the device.

    A slot is written again only after the device has copied from it.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], record_event: Callable[[], DeviceEvent]
    ) -> None:
        """`allocate` allocates slots; `record_event` marks the end of the copies from a slot."""
        self._slots = [_StagingSlot(allocate) for _ in range(STAGING_SLOTS)]
        self._record_event = record_event
        self._copied: list[DeviceEvent | None] = [None] * STAGING_SLOTS
        self._turn = 0
        self._lock = threading.Lock()
        self.nbytes_sent = 0

    def send(
        self, parts: Mapping[str, WriteInto], empty_on_device: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Write tensors into a pinned buffer (slot) and start copying them to the device.

        Returns the device tensors without waiting for the copies. `parts` maps names to functions
        that write a tensor into the slot. `empty_on_device` allocates the target of a copy. A
        tensor that is already on the device is not copied.
        """
        sent = {}
        with self._lock:
            slot = self._next_slot()
            for name, write in parts.items():
                staged = write(slot.allocate)
                if staged.is_cuda:
                    sent[name] = staged
                    continue
                sent[name] = empty_on_device(staged).copy_(staged, non_blocking=True)
                self.nbytes_sent += staged.nbytes
            self._copied[self._turn] = self._record_event()
            self._turn = (self._turn + 1) % STAGING_SLOTS
        return sent

    def _next_slot(self) -> _StagingSlot:
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        slot = self._slots[self._turn]
        slot.clear()
        return slot


class _StagingSlot:
    """Host memory for one batch: a bump allocator whose memory is freed all at once.

    `SlabAllocator` (memory_tier.py) is the allocator for entries that are freed one by one.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[Tensor] = []
        self._used = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return the next `nbytes` of the slot, page-aligned; enlarge the slot if it is full."""
        if self._used + nbytes > len(self._memory):
            # The device may still copy from what was handed out before.
            self._outgrown.append(self._memory)
            self._memory = self._allocate(2 * self._used + align_up(nbytes, PAGE))
            self._used = 0
        start = self._used
        self._used += align_up(nbytes, PAGE)
        return self._memory[start : start + nbytes]

    def clear(self) -> None:
        """Free the whole slot for the next batch; all copies from it must be complete."""
        self._outgrown.clear()
        self._used = 0


def copy_into(tensor: Tensor, allocate: Allocate) -> Tensor:
    """Copy a tensor into memory that `allocate` returns, and return the copy."""
    return allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


# Prefetching


class BatchIterator(Protocol):
    """Iterates over batches, each with the loader state after it; counts how often steps waited.

    The batches of a step end with the first whose `state.batches_left` is 0.
    """

    counts: PrefetchCounters
    depth: PrefetchDepth

    def __next__(self) -> tuple[Batch, LoaderState]: ...

    def surplus_nbytes(self) -> int:
        """Return the bytes of the batches that are on the device, except the next one."""
        ...

    def close(self) -> None: ...


class PrefetchDepth:
    """Number of batches to prefetch: fixed, or raised whenever a step had to wait.

    While memory is short, it is 1.
    """

    def __init__(self, batches: int, max_nbytes: int | None) -> None:
        """Start with `batches`.

        `max_nbytes` is the maximum device memory for prefetched batches; None: their number is
        fixed.
        """
        self.max_nbytes = max_nbytes
        self._batches = batches
        self._shortened_by: set[str] = set()

    @property
    def batches(self) -> int:
        """Number of batches to prefetch now."""
        return min(1, self._batches) if self._shortened_by else self._batches

    def grow(self, batch_nbytes: int) -> None:
        """Prefetch one batch more from now on, if all prefetched batches fit into `max_nbytes`."""
        if self.max_nbytes is None or self._shortened_by:
            return
        if (self._batches + 1) * batch_nbytes <= self.max_nbytes:
            self._batches += 1

    def shorten(self, reason: str) -> int:
        """Prefetch one batch until `lengthen` is called for this reason; return how many fewer."""
        before = self.batches
        self._shortened_by.add(reason)
        return before - self.batches

    def lengthen(self, reason: str) -> int:
        """Prefetch as before `shorten`, unless there is another reason; return how many more."""
        before = self.batches
        self._shortened_by.discard(reason)
        return self.batches - before


@dataclass(slots=True)
class PrefetchCounters:
    """Counts batches and the time that steps waited for them."""

    batches: int = 0
    """Number of batches returned to steps."""
    waits: int = 0
    """Number of batches that were not ready when a step needed them."""
    waited_s: float = 0.0
    """Seconds that steps waited for batches."""
    busy_s: float = 0.0
    """Seconds that the background thread spent on loading these batches."""

    @property
    def hidden_s(self) -> float:
        """Seconds of loading that overlapped with steps: `busy_s` minus `waited_s`."""
        return max(0.0, self.busy_s - self.waited_s)


class InlineBatches:
    """Loads each batch when it is requested; for the CPU, to which nothing must be copied."""

    def __init__(self, batches: Iterator[tuple[Batch, LoaderState]]) -> None:
        self.counts = PrefetchCounters()
        self.depth = PrefetchDepth(0, None)
        self._batches = batches

    def __next__(self) -> tuple[Batch, LoaderState]:
        self.counts.batches += 1
        return next(self._batches)

    def surplus_nbytes(self) -> int:
        """Return 0: no batch is loaded in advance."""
        return 0

    def close(self) -> None:
        """Do nothing: there is no background thread."""


class TransferStream(Protocol[Arrival]):
    """A queue of copies to the device, which run in parallel with the training step."""

    def active(self) -> AbstractContextManager[None]:
        """Make this the current stream of the calling thread inside the `with` block."""
        ...

    def record_arrival(self) -> Arrival:
        """Return an event that marks the end of all copies queued so far."""
        ...

    def wait_for(self, batch: Batch, arrival: Arrival) -> None:
        """Make the current stream, which runs the step, wait until the batch has been copied."""
        ...


class CudaTransferStream:
    """A `TransferStream` on CUDA: a stream of its own for copies to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Tensors that were put on the device while the run was built must be ready here too.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make PyTorch run copies, allocations and encoding on this stream in the `with` block.

        No gradients are recorded in the block.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def record_arrival(self) -> torch.cuda.Event:
        """Record and return a CUDA event after all copies queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait_for(self, batch: Batch, arrival: torch.cuda.Event) -> None:
        """Make the current stream wait for the copies, without blocking the calling thread.

        `record_stream` keeps the batch's memory from being reused before the step is done.
        """
        step = torch.cuda.current_stream(self._device)
        step.wait_event(arrival)
        for tensor in batch.tensors():
            tensor.record_stream(step)


@dataclass(frozen=True, slots=True)
class _ReadyBatch(Generic[Arrival]):
    batch: Batch
    state: LoaderState
    arrival: Arrival
    seconds: float
    """Seconds that loading the batch took."""


class PrefetchedBatches(Generic[Arrival]):
    """Iterates over batches, loading `depth` of them ahead in a background thread.

    Each batch comes with the loader state after it, which a checkpoint needs.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Batch, LoaderState]],
        stream: TransferStream[Arrival],
        depth: PrefetchDepth,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = depth
        self.counts = PrefetchCounters()
        self._batches = batches
        self._stream = stream
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: deque[_ReadyBatch[Arrival]] = deque()
        self._ended = False
        self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="gracetune-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        ready = self._take()
        self._stream.wait_for(ready.batch, ready.arrival)
        return ready.batch, ready.state

    def surplus_nbytes(self) -> int:
        """Return the bytes of prefetched batches, except the next one."""
        with self._changed:
            return sum(batch_nbytes(ready.batch) for ready in list(self._ready)[1:])

    def close(self) -> None:
        """Stop the background thread and drop the prefetched batches that were not used."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _take(self) -> _ReadyBatch[Arrival]:
        began = self._clock()
        with self._changed:
            late = not self._ready
            self._changed.wait_for(lambda: self._ready or self._ended)
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            ready = self._ready.popleft()
            counts = self.counts
            counts.batches += 1
            counts.busy_s += ready.seconds
            if late:
                counts.waits += 1
                counts.waited_s += self._clock() - began
                if counts.batches > 1:  # the first one cannot have been prefetched
                    self.depth.grow(batch_nbytes(ready.batch))
            self._changed.notify_all()
        return ready

    def _work(self) -> None:
        try:
            with self._stream.active():
                while self._wait_for_room():
                    began = self._clock()
                    following = next(self._batches, None)
                    if following is None:
                        break
                    arrival = self._stream.record_arrival()
                    ready = _ReadyBatch(*following, arrival, self._clock() - began)
                    del following
                    with self._changed:
                        if not self._closed:
                            self._ready.append(ready)
                        self._changed.notify_all()
                    del ready  # or this thread would keep the batch alive until the next one
        except Exception as error:  # noqa: BLE001  the step that asks for the batch raises it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Block until fewer than `depth` batches are ready; return False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self.depth.batches)
            return not self._closed


def batch_nbytes(batch: Batch) -> int:
    """Return the total size of a batch's tensors, in bytes."""
    return sum(tensor.nbytes for tensor in batch.tensors())


# Texts that stay on the device


class DeviceTextCache:
    """Text embeddings that stay on the device, unless its memory is short.

    The prompts are chosen at the start and never replaced, so a resumed run keeps the same ones on
    the device. After `trim` and `restore`, each returns when it is read next.
    """

    def __init__(self, entries: Mapping[str, Entry], device: torch.device | None = None) -> None:
        self._entries: dict[str, Entry] = dict(entries)
        self._chosen = frozenset(entries)
        self._device = device
        self._is_trimmed = self._is_managed = False
        self._lock = threading.Lock()  # a thread loads batches while another one trims
        self.hits = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the embeddings that are on the device now."""
        with self._lock:
            return sum(t.nbytes for entry in self._entries.values() for t in entry.values())

    def get_all(self, names: Sequence[str]) -> list[Entry] | None:
        """Return the embeddings of these prompts; None if any of them is not on the device."""
        with self._lock:
            found = [self._entries.get(name) for name in names]
        entries = [entry for entry in found if entry is not None]
        if not self._chosen or len(entries) < len(names):
            return None
        for tensor in (tensor for entry in entries for tensor in entry.values()):
            if tensor.is_cuda:  # `trim` must not free it while this stream uses it
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self.hits += len(names)
        return entries

    def keep(self, names: Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
        """Put embeddings that were read from the host back on the device, if they belong there.

        Returns them, on the device as far as they are kept.
        """
        if self._device is None or self._is_trimmed or not self._chosen:
            return list(entries)
        kept = []
        for name, entry in zip(names, entries, strict=True):
            if name in self._chosen:
                moved = {part: tensor.to(self._device) for part, tensor in entry.items()}
                with self._lock:
                    kept.append(self._entries.setdefault(name, moved))
            else:
                kept.append(entry)
        return kept

    def trim(self) -> int:
        """Drop all embeddings from the device, which are then read from host memory.

        Returns their bytes.
        """
        if self._is_managed:  # their pages move to the host instead
            return 0
        nbytes = self.nbytes
        with self._lock:
            self._is_trimmed = True
            self._entries.clear()
        return nbytes

    def restore(self) -> None:
        """Keep each chosen prompt on the device again once it is read."""
        self._is_trimmed = False

    def move_to_managed(self, memory: ManagedMemory, placement: ManagedPlacement | None) -> None:
        """Move the embeddings to managed memory; raise OutOfMemoryError if the cap is too low."""
        with self._lock:  # or embeddings that the loader keeps meanwhile would be lost
            named = [(name, part) for name, entry in self._entries.items() for part in entry]
            tensors = [self._entries[name][part] for name, part in named]
            if not tensors:
                return
            made = memory.allocate_groups("caches", tensors, placement)
            copies = [copy for _, group in made for copy in group]
            moved: dict[str, dict[str, Tensor]] = {name: {} for name in self._entries}
            for (name, part), tensor, copy in zip(named, tensors, copies, strict=True):
                moved[name][part] = copy.copy_(tensor)
            if cuda_is_in_use():  # the loader reads the copies, and reuses memory, on its stream
                torch.cuda.current_stream().synchronize()
            self._entries, self._is_managed = {**moved}, True

    def __len__(self) -> int:
        return len(self._entries)


def cache_texts_on_device(
    names: Sequence[str],
    read_texts: Callable[[Sequence[str]], Sequence[Entry]],
    device: torch.device,
    budget_nbytes: int,
) -> DeviceTextCache:
    """Copy prompts' embeddings to the device, in the order of `names`, up to `budget_nbytes`."""
    chosen = {}
    left = budget_nbytes
    for name in names:
        (entry,) = read_texts([name])
        left -= sum(align_up(t.nbytes, DEVICE_ALIGNMENT) for t in entry.values())
        if left < 0:
            break
        chosen[name] = {part: tensor.to(device) for part, tensor in entry.items()}
    return DeviceTextCache(chosen, device)
