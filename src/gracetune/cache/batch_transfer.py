"""Copy batches to the device, ahead of the steps that use them.

`PrefetchedBatches` runs the loader in a background thread. Each batch is gathered into a pinned
staging slot and copied on a CUDA stream of its own (T), while the step runs on stream C:

    host  gather batch k+1 into slot s   waits for `copied[s]`, recorded on T after the copy from s
    T     copy slot s -> device          then record `arrival[k+1]`
    C     step k+1                       waits for `arrival[k+1]`

A batch travels together with the loader state that follows it, so a checkpoint stores the state of
the last batch that was used, not of the last one that was prefetched.

Three modules work ahead of the step, each on another part of the way: `data/prefetch.py` decodes
files in worker threads or processes, `cache/shard_reader.py` reads entries from disk with Linux
AIO, and this one moves whole batches from host memory to the device.
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
from gracetune.memory.placement import place_batch, placement_table
from gracetune.memory.platform import open_machine
from gracetune.memory.pool import ManagedPool
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import Tier, memory_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gracetune.cache.store import Allocate, Entry
    from gracetune.config.schema import Gh200Section
    from gracetune.data.loader import LoaderState
    from gracetune.data.sample import Batch
    from gracetune.events.types import Event, MemoryUsed
    from gracetune.memory.placement import PlacementTable
    from gracetune.memory.platform import Link
    from gracetune.memory.stages import GcFreeze

    WriteInto = Callable[[Allocate], Tensor]
    """Writes a tensor into memory that it gets from an allocator, and returns it."""

Arrival = TypeVar("Arrival")

INITIAL_DEPTH = 2
"""Batches to prefetch at first: one is in use while the next one is copied."""
STAGING_SLOTS = 2
"""Pinned slots: one is written while the other is copied from."""
DEVICE_ALIGNMENT = 512
"""Granularity of device allocations, in bytes."""
BATCH_PLACEMENT = {"latents": "staged", "audio": "staged"}
"""Placement of a batch's tensors: copied to the device before use, not read over the link."""
LATENTS = "latents of the batch"
"""Name of the latents among the staged tensors; no text tensor has this name."""


class BatchTransfer:
    """Copies batches to the device and reports the memory in use.

    If the run asks for managed memory, the copies go there and get placement hints.
    """

    def __init__(self, session: MemorySession, device: torch.device, table: PlacementTable) -> None:
        self.device = device
        self._session = session
        self._table = table
        self._hints = session.hints if session.hints_enabled else None
        pool = session.pool() if session.wants_pool else None
        self._pool = pool if isinstance(pool, ManagedPool) else None
        self._tier = Tier.DEVICE if self.needs_copy else Tier.HOST
        self._tracked: dict[str, tuple[Tier, Callable[[], int]]] = {}
        self._reserved: dict[str, int] = {}
        self._staging = PinnedStaging(self.allocate_host, _record_event)

    @property
    def needs_copy(self) -> bool:
        """True if the device has its own memory, to which batches must be copied."""
        return self.device.type == "cuda"

    @property
    def link(self) -> Link:
        """The kind of link between the device and host memory."""
        return self._session.machine.platform.link

    @property
    def device_nbytes(self) -> int:
        """Size of the device's own memory; 0 if it has none."""
        return self._session.machine.platform.device_bytes if self.needs_copy else 0

    @property
    def nbytes_copied(self) -> int:
        """Bytes copied to the device so far."""
        return self._staging.nbytes_sent

    def allocate_host(self, nbytes: int) -> Tensor:
        """Allocate host memory that the device can copy from at full speed."""
        return allocate_pinned(nbytes) if self.needs_copy else allocate_page_aligned(nbytes)

    def new_stream(self) -> CudaTransferStream:
        """Return a stream for copies that run in parallel to the step."""
        return CudaTransferStream(self.device)

    def to_device(
        self, latents: WriteInto, text: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Start copying a batch to the device; return its latents and text tensors there.

        `latents` writes the latents into staging memory. Tensors that are on the device already
        (latents that were just encoded, cached texts) stay as they are.
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
        """Include a role in `memory_used`; `nbytes` returns its current size.

        `tier` is where the memory is, by default the device.
        """
        self._tracked[role] = tier or self._tier, nbytes

    def memory_used(self, step: int) -> MemoryUsed:
        """Return the memory in use. Called between steps, since it may also reclaim memory."""
        self._session.observe(reclaim=True)
        for role, (tier, nbytes) in self._tracked.items():
            self._session.accounting.release(tier, role, self._reserved.get(role, 0))
            now = nbytes()
            # Memory beyond a tier's cap exists all the same; the accounting counts it as denied.
            self._reserved[role] = now if self._session.accounting.reserve(tier, role, now) else 0
        return memory_event(step, self._session.stats(), psutil.Process().memory_info().rss)

    def _place(self, latents: Tensor | None, text: Mapping[str, Tensor]) -> None:
        """Apply the placement hints of each tensor's role; a failure is reported once."""
        if self._hints is not None:
            place_batch({"latents": latents, "text": text}, self._hints, self._table)

    def _empty_on_device(self, like: Tensor) -> Tensor:
        if self._pool is None:
            return torch.empty_like(like, device=self.device)
        with self._pool.allocating():
            return torch.empty_like(like, device=self.device)


def build_batch_transfer(
    section: Gh200Section,
    device: torch.device,
    emit: Callable[[Event], None],
    gc_freeze: GcFreeze | None = None,
) -> BatchTransfer:
    """Detect how the device reaches host memory, and report what was found and decided."""
    session = MemorySession(
        lambda: open_machine(device.index or 0),
        lambda: environment_settings(process_environment()),
        emit,
        gc_freeze,
    )
    session.hints_override = section.enable_uvm_hints
    platform = session.machine.platform
    hints = "on" if session.hints_enabled else "off"
    emit(Notice(f"memory link: {platform.link.value} ({platform.reasons['link']}); hints {hints}"))
    if session.wants_pool:
        pool = session.pool()
        if not isinstance(pool, ManagedPool):
            text = f"batches are not in managed memory, although it is enabled: {pool.reason}"
            emit(Notice(text, level="warning", fallback=True))
    return BatchTransfer(session, device, placement_table({**BATCH_PLACEMENT, **section.placement}))


# Pinned staging memory


class DeviceEvent(Protocol):
    """A point in a device's queue of work."""

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""
        ...


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class PinnedStaging:
    """Pinned slots that batches pass through on their way to the device.

    A slot is written again only after the device has copied from it.
    """

    def __init__(
        self, allocate: Callable[[int], Tensor], record_event: Callable[[], DeviceEvent]
    ) -> None:
        """`record_event` is called after the copies from a slot were queued."""
        self._slots = [_StagingSlot(allocate) for _ in range(STAGING_SLOTS)]
        self._record_event = record_event
        self._copied: list[DeviceEvent | None] = [None] * STAGING_SLOTS
        self._turn = 0
        self._lock = threading.Lock()
        self.nbytes_sent = 0

    def send(
        self, parts: Mapping[str, WriteInto], empty_on_device: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Write the parts into a slot and start copying them to the device; do not wait.

        `empty_on_device` allocates the target of a copy. A part that is on the device already is
        returned as it is.
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
    """Host memory for one batch, handed out front to back and cleared as a whole.

    The memory tier's `SlabAllocator` is the counterpart for entries that come and go one by one.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[Tensor] = []
        self._used = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return the next `nbytes`, page-aligned; replace the slot's memory if it is too small."""
        if self._used + nbytes > len(self._memory):
            # The device may still copy from what was handed out before.
            self._outgrown.append(self._memory)
            self._memory = self._allocate(2 * self._used + align_up(nbytes, PAGE))
            self._used = 0
        start = self._used
        self._used += align_up(nbytes, PAGE)
        return self._memory[start : start + nbytes]

    def clear(self) -> None:
        """Reuse the memory from the front; the device must have copied everything from it."""
        self._outgrown.clear()
        self._used = 0


def copy_into(tensor: Tensor, allocate: Allocate) -> Tensor:
    """Copy a tensor into memory from `allocate`."""
    return allocate(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


# Prefetching


class BatchIterator(Protocol):
    """An iterator of `(batch, state)` with counters."""

    counts: PrefetchCounters
    depth: PrefetchDepth

    def __next__(self) -> tuple[Batch, LoaderState]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class PrefetchDepth:
    """Number of batches to prefetch: fixed, or growing while steps have to wait."""

    batches: int
    max_nbytes: int | None
    """Device memory that prefetched batches may take; None keeps the number fixed."""

    def grow(self, batch_nbytes: int) -> None:
        """Prefetch one more batch if the budget allows it."""
        if self.max_nbytes is not None and (self.batches + 1) * batch_nbytes <= self.max_nbytes:
            self.batches += 1


@dataclass(slots=True)
class PrefetchCounters:
    """Counts batches and the time that steps waited for them."""

    batches: int = 0
    """Batches handed out."""
    waits: int = 0
    """Batches that were not ready when a step asked for them."""
    waited_s: float = 0.0
    """Seconds that steps waited."""
    busy_s: float = 0.0
    """Seconds that the background thread worked on the batches handed out."""

    @property
    def hidden_s(self) -> float:
        """Seconds of work that ran while steps did."""
        return max(0.0, self.busy_s - self.waited_s)


class InlineBatches:
    """Loads each batch when it is requested, for devices that use host memory."""

    def __init__(self, batches: Iterator[tuple[Batch, LoaderState]]) -> None:
        self.counts = PrefetchCounters()
        self.depth = PrefetchDepth(0, None)
        self._batches = batches

    def __next__(self) -> tuple[Batch, LoaderState]:
        self.counts.batches += 1
        return next(self._batches)

    def close(self) -> None:
        """Do nothing; there is no thread."""


class TransferStream(Protocol[Arrival]):
    """A queue of copies that runs in parallel to the step."""

    def active(self) -> AbstractContextManager[None]:
        """Make this stream the current one of the background thread."""
        ...

    def record_arrival(self) -> Arrival:
        """Return a marker for the end of all copies queued so far."""
        ...

    def wait_for(self, batch: Batch, arrival: Arrival) -> None:
        """Make the step's stream wait for the batch; called by the step's thread."""
        ...


class CudaTransferStream:
    """A CUDA stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Tensors that were put on the device while the run was built must be ready here too.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Queue copies, allocations and live encoding on this stream, without gradients."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def record_arrival(self) -> torch.cuda.Event:
        """Record an event after the copies of a batch."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait_for(self, batch: Batch, arrival: torch.cuda.Event) -> None:
        """Make the step's stream wait, not the host; keep the memory until the step is done."""
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
    """Time that loading it took."""


class PrefetchedBatches(Generic[Arrival]):
    """Iterates over `(batch, state)` like the iterator it wraps, `depth` batches ahead."""

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

    def close(self) -> None:
        """Stop the thread and drop the batches that were not taken."""
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
        """Wait until fewer than `depth` batches are ready; return False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self.depth.batches)
            return not self._closed


def batch_nbytes(batch: Batch) -> int:
    """Return the device memory that a batch takes."""
    return sum(tensor.nbytes for tensor in batch.tensors())


# Texts that stay on the device


class DeviceTextCache:
    """Text embeddings that stay on the device; chosen once, so that a resumed run has the same."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self.hits = 0

    def get_all(self, names: Sequence[str]) -> list[Entry] | None:
        """Return the embeddings of all prompts, or None unless all are on the device."""
        if not self._entries or any(name not in self._entries for name in names):
            return None
        self.hits += len(names)
        return [self._entries[name] for name in names]

    def __len__(self) -> int:
        return len(self._entries)


def cache_texts_on_device(
    names: Sequence[str],
    read_texts: Callable[[Sequence[str]], Sequence[Entry]],
    device: torch.device,
    budget_nbytes: int,
) -> DeviceTextCache:
    """Copy the first prompts of a list to the device, as many as fit into the budget."""
    chosen = {}
    left = budget_nbytes
    for name in names:
        (entry,) = read_texts([name])
        left -= sum(align_up(t.nbytes, DEVICE_ALIGNMENT) for t in entry.values())
        if left < 0:
            break
        chosen[name] = {part: tensor.to(device) for part, tensor in entry.items()}
    return DeviceTextCache(chosen)
