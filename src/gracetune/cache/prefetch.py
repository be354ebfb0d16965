"""Batches brought to the device before a step asks for them, by a thread and a stream of its own.

A batch travels with the state that follows it, so whoever saves a checkpoint saves the state of the
batch that was used, not of those that were brought ahead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from gracetune.cache.shard_format import PAGE, align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gracetune.cache.store import Entry, Allocate
    from gracetune.data.loader import LoaderState
    from gracetune.data.sample import Batch

    Filling = Callable[[Allocate], Tensor]
    """Puts a tensor in room that it asks for."""


Arrival = TypeVar("Arrival")

INITIAL_DEPTH = 2
"""One batch is used while the next is on its way."""


class TransferStream(Protocol[Arrival]):
    """Where batches travel beside the step."""

    def active(self) -> AbstractContextManager[None]:
        """What the thread does, it does inside this."""
        ...

    def record_arrival(self) -> Arrival:
        """The point after all that was sent so far."""
        ...

    def wait_for(self, batch: Batch, arrival: Arrival) -> None:
        """Called by the step's thread: nothing of it may touch the batch before it has arrived."""
        ...


class CudaTransferStream:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What was put on the device while the run was built must be there for this stream too.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Copies, allocations and live encoding happen on the stream; gradients are none of its."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def record_arrival(self) -> torch.cuda.Event:
        """An event behind the copies of a batch."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait_for(self, batch: Batch, arrival: torch.cuda.Event) -> None:
        """The step's stream waits, not the host; memory is used again only after the step."""
        step = torch.cuda.current_stream(self._device)
        step.wait_event(arrival)
        for tensor in batch.tensors():
            tensor.record_stream(step)


@dataclass(slots=True)
class PrefetchDepth:
    """How many batches are brought ahead: a number, or more each time a step has to wait."""

    batches: int
    max_nbytes: int | None
    """None: the number stays as it is."""

    def grow(self, batch_nbytes: int) -> None:
        """One more, where the budget has room for it."""
        if self.max_nbytes is not None and (self.batches + 1) * batch_nbytes <= self.max_nbytes:
            self.batches += 1


@dataclass(slots=True)
class PrefetchCounters:
    """What bringing batches has cost so far."""

    batches: int = 0
    waits: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0
    """How long the thread worked on the batches that were used."""

    @property
    def hidden_s(self) -> float:
        """Work that no step waited for."""
        return max(0.0, self.busy_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class _Sent(Generic[Arrival]):
    batch: Batch
    state: LoaderState
    arrival: Arrival
    seconds: float


class BatchIterator(Protocol):
    """An iterator of (batch, state) that counts, and may have something to end."""

    counts: PrefetchCounters
    depth: PrefetchDepth

    def __next__(self) -> tuple[Batch, LoaderState]: ...

    def close(self) -> None: ...


class InlineBatches:
    """Each batch when it is asked for: where nothing has to travel, ahead is no faster."""

    def __init__(self, batches: Iterator[tuple[Batch, LoaderState]]) -> None:
        self.counts = PrefetchCounters()
        self.depth = PrefetchDepth(0, None)
        self._batches = batches

    def __next__(self) -> tuple[Batch, LoaderState]:
        self.counts.batches += 1
        return next(self._batches)

    def close(self) -> None:
        """Nothing runs."""


class PrefetchedBatches(Generic[Arrival]):
    """An iterator of (batch, state) like the one it is made from, `depth` batches ahead of it."""

    def __init__(
        self,
        batches: Iterator[tuple[Batch, LoaderState]],
        lane: TransferStream[Arrival],
        depth: PrefetchDepth,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = depth
        self.counts = PrefetchCounters()
        self._batches = batches
        self._lane = lane
        self._clock = clock
        self._changed = threading.Condition()
        self._ready: deque[_Sent[Arrival]] = deque()
        self._ended = False
        self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="gracetune-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Batch, LoaderState]]:
        return self

    def __next__(self) -> tuple[Batch, LoaderState]:
        sent = self._next_sent()
        self._lane.wait_for(sent.batch, sent.arrival)
        return sent.batch, sent.state

    def close(self) -> None:
        """Bring no more; batches that nobody took are let go."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _next_sent(self) -> _Sent[Arrival]:
        began = self._clock()
        with self._changed:
            late = not self._ready
            self._changed.wait_for(lambda: self._ready or self._ended)
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            sent = self._ready.popleft()
            counts = self.counts
            counts.batches += 1
            counts.busy_s += sent.seconds
            if late:
                counts.waits += 1
                counts.waited_s += self._clock() - began
                if counts.batches > 1:  # nothing could have been brought before the first
                    self.depth.grow(batch_nbytes(sent.batch))
            self._changed.notify_all()
        return sent

    def _work(self) -> None:
        try:
            with self._lane.active():
                while self._may_go_on():
                    began = self._clock()
                    following = next(self._batches, None)
                    if following is None:
                        break
                    arrival = self._lane.record_arrival()
                    sent = _Sent(*following, arrival, self._clock() - began)
                    del following
                    with self._changed:
                        if not self._closed:
                            self._ready.append(sent)
                        self._changed.notify_all()
                    del sent  # a batch lives as long as a step needs it, not until the next one
        except Exception as error:  # noqa: BLE001  the step that asks for the batch raises it
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self.depth.batches)
            return not self._closed


def batch_nbytes(batch: Batch) -> int:
    """What a batch takes on the device."""
    return sum(tensor.nbytes for tensor in batch.tensors())


# ------------------------------------------------------------------------------------------
# Pinned slots that batches are gathered in, and texts that need not be gathered at all.


STAGING_SLOTS = 2
"""One is filled while the other is copied from."""
ALIGNMENT = 512
"""Of device allocations."""


class DeviceEvent(Protocol):
    """A point in what a device does."""

    def synchronize(self) -> None:
        """Wait until the device is past it."""
        ...


class PinnedStaging:
    """Slots of host memory in turn; one is written again only after the copy out of it is done."""

    def __init__(self, allocate: Callable[[int], Tensor], mark: Callable[[], DeviceEvent]) -> None:
        """`mark` is asked for after the copies of a slot were given to the device."""
        self._slots = [_PinnedSlot(allocate) for _ in range(STAGING_SLOTS)]
        self._mark = mark
        self._marks: list[DeviceEvent | None] = [None] * STAGING_SLOTS
        self._turn = 0
        self._lock = threading.Lock()
        self.nbytes_sent = 0

    def send(
        self, parts: Mapping[str, Filling], new_on_device: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Have each part put in a slot and copy it to the device, without waiting for the copy.

        A part that turns out to be on the device stays as it is.
        """
        moved = {}
        with self._lock:
            slot = self._next_slot()
            for name, fill in parts.items():
                staged = fill(slot.room)
                if staged.is_cuda:
                    moved[name] = staged
                    continue
                moved[name] = new_on_device(staged).copy_(staged, non_blocking=True)
                self.nbytes_sent += staged.nbytes
            self._marks[self._turn] = self._mark()
            self._turn = (self._turn + 1) % STAGING_SLOTS
        return moved

    def _next_slot(self) -> _PinnedSlot:
        mark = self._marks[self._turn]
        if mark is not None:
            mark.synchronize()
        slot = self._slots[self._turn]
        slot.empty()
        return slot


class _PinnedSlot:
    """Host memory that is handed out piece by piece, each beginning with a page, and begun anew."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[Tensor] = []
        self._used = 0

    def room(self, nbytes: int) -> Tensor:
        """The next piece; a slot that is too small is replaced by one that is not."""
        if self._used + nbytes > len(self._memory):
            # The device may still read what was handed out of it.
            self._outgrown.append(self._memory)
            self._memory = self._allocate(2 * self._used + align_up(nbytes, PAGE))
            self._used = 0
        start = self._used
        self._used += align_up(nbytes, PAGE)
        return self._memory[start : start + nbytes]

    def empty(self) -> None:
        """Nobody reads any of it."""
        self._outgrown.clear()
        self._used = 0


def copy_into(tensor: Tensor, room: Allocate) -> Tensor:
    """The tensor again, in memory that is asked for."""
    return room(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


class DeviceTextCache:
    """Embeddings that stay on the device: chosen once, so that a resumed run has the same ones."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self.found = 0

    def get_all(self, captions: Sequence[str]) -> list[Entry] | None:
        """Only where every one is there: a batch is put together on one side."""
        if not self._entries or any(caption not in self._entries for caption in captions):
            return None
        self.found += len(captions)
        return [self._entries[caption] for caption in captions]

    def __len__(self) -> int:
        return len(self._entries)


def cache_texts_on_device(
    captions: Sequence[str],
    texts: Callable[[Sequence[str]], Sequence[Entry]],
    device: torch.device,
    budget_nbytes: int,
) -> DeviceTextCache:
    """Bring the first captions of the row to the device, as many as the budget holds."""
    chosen = {}
    for caption, entry in _within(captions, texts, budget_nbytes):
        chosen[caption] = {name: t.to(device) for name, t in entry.items()}
    return DeviceTextCache(chosen)


def _within(
    captions: Sequence[str],
    texts: Callable[[Sequence[str]], Sequence[Entry]],
    budget_nbytes: int,
) -> Iterator[tuple[str, Entry]]:
    left = budget_nbytes
    for caption in captions:
        (entry,) = texts([caption])
        left -= sum(_aligned(t.nbytes) for t in entry.values())
        if left < 0:
            return
        yield caption, entry


def _aligned(nbytes: int) -> int:
    return align_up(nbytes, ALIGNMENT)
