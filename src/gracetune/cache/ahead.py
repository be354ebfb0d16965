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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from gracetune.data.loader import LoaderState
    from gracetune.data.sample import Batch

Arrival = TypeVar("Arrival")

FIRST_DEPTH = 2
"""One batch is used while the next is on its way."""


class TransferStream(Protocol[Arrival]):
    """Where batches travel beside the step."""

    def working(self) -> AbstractContextManager[None]:
        """What the thread does, it does inside this."""
        ...

    def sent(self) -> Arrival:
        """The point after all that was sent so far."""
        ...

    def receive(self, batch: Batch, arrival: Arrival) -> None:
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
    def working(self) -> Iterator[None]:
        """Copies, allocations and live encoding happen on the stream; gradients are none of its."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def sent(self) -> torch.cuda.Event:
        """An event behind the copies of a batch."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def receive(self, batch: Batch, arrival: torch.cuda.Event) -> None:
        """The step's stream waits, not the host; memory is used again only after the step."""
        step = torch.cuda.current_stream(self._device)
        step.wait_event(arrival)
        for tensor in batch.tensors():
            tensor.record_stream(step)


@dataclass(slots=True)
class Depth:
    """How many batches are brought ahead: a number, or more each time a step has to wait."""

    batches: int
    most_nbytes: int | None
    """None: the number stays as it is."""

    def deepen(self, batch_nbytes: int) -> None:
        """One more, where the budget has room for it."""
        if self.most_nbytes is not None and (self.batches + 1) * batch_nbytes <= self.most_nbytes:
            self.batches += 1


@dataclass(slots=True)
class Counts:
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


class Batches(Protocol):
    """An iterator of (batch, state) that counts, and may have something to end."""

    counts: Counts
    depth: Depth

    def __next__(self) -> tuple[Batch, LoaderState]: ...

    def close(self) -> None: ...


class InlineBatches:
    """Each batch when it is asked for: where nothing has to travel, ahead is no faster."""

    def __init__(self, batches: Iterator[tuple[Batch, LoaderState]]) -> None:
        self.counts = Counts()
        self.depth = Depth(0, None)
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
        depth: Depth,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = depth
        self.counts = Counts()
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
        self._lane.receive(sent.batch, sent.arrival)
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
                    self.depth.deepen(nbytes_of(sent.batch))
            self._changed.notify_all()
        return sent

    def _work(self) -> None:
        try:
            with self._lane.working():
                while self._may_go_on():
                    began = self._clock()
                    following = next(self._batches, None)
                    if following is None:
                        break
                    arrival = self._lane.sent()
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


def nbytes_of(batch: Batch) -> int:
    """What a batch takes on the device."""
    return sum(tensor.nbytes for tensor in batch.tensors())
