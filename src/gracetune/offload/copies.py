"""How bytes get from host to device and back: copy streams on CUDA, a plain copy elsewhere.

The ring and the offload see this protocol alone and are the same on every machine. A copy never
starts before the kernels that were queued when it was asked for, so that they have read what it
overwrites and written what it reads. Copies of one lane are done in the order they were asked for;
lanes know nothing of each other.
"""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from enum import Enum
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Protocol, cast

import torch

from gracetune.errors import GracetuneError
from gracetune.memory.platform import Link
from gracetune.offload.stall_timer import PlainLap, StallTimer, Waits
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from gracetune.offload.stall_timer import Lap

POISON = 0xFF
"""Of these bytes every floating point number is a NaN."""


class StreamError(GracetuneError):
    """Weights or activations cannot be streamed as asked, or were changed while they are."""


class CopyStream(Enum):
    """What is copied, and which way: each has a stream and a stopwatch of its own."""

    WEIGHTS = "weights"
    """To the device."""
    OUT = "activations out"
    BACK = "activations back"
    STATE_IN = "optimizer state in"
    STATE_OUT = "optimizer state out"


class Arrival(Protocol):
    """A copy under way."""

    def wait(self, ahead: bool) -> None:
        """Let what is queued from here on see the copy; `ahead`: it was asked for before."""
        ...


class CopyEngine(Protocol):
    """Memory on both sides, and copies between them."""

    @property
    def device(self) -> torch.device:
        """Where slots are."""
        ...

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes that the device copies from at full speed."""
        ...

    def landing_memory(self, nbytes: int) -> Tensor:
        """Host bytes that are copied to as well."""
        ...

    def let_go(self, memory: Tensor) -> None:
        """Wait for copies under way and give one piece of host memory up."""
        ...

    def device_memory(self, nbytes: int) -> Tensor:
        """Bytes of a slot."""
        ...

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, lane: CopyStream = CopyStream.WEIGHTS
    ) -> Arrival:
        """Overwrite bytes once all work queued so far is done; `poison` them first."""
        ...

    def waits(self, lane: CopyStream = CopyStream.WEIGHTS) -> Waits:
        """What was waited for; this and giving up memory alone wait for the device itself."""
        ...

    def lap(self, lane: CopyStream) -> Lap:
        """Begin one with what is waited for next; the lane's lap before it has ended."""
        ...

    def release(self) -> None:
        """Wait for copies under way and let host memory go; nothing is copied after."""
        ...


def open_copy_engine(device: torch.device, link: Link) -> CopyEngine:
    """The one way to the device that fits the machine; nothing below asks about hardware."""
    if device.type == "cpu":
        return SynchronousCopyEngine()
    # Over C2C, or with one memory for both, the copy engine reads any page: pinning buys nothing.
    return CudaCopyEngine(device, pin=link not in (Link.COHERENT, Link.INTEGRATED))


class SynchronousCopyEngine:
    """Copies at once, and counts all their time as waited for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._seconds = dict.fromkeys(CopyStream, 0.0)
        self._laps: dict[CopyStream, PlainLap] = {}

    def host_memory(self, nbytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def landing_memory(self, nbytes: int) -> Tensor:
        """No different."""
        return self.host_memory(nbytes)

    def let_go(self, memory: Tensor) -> None:
        """It goes with its last owner."""

    def device_memory(self, nbytes: int) -> Tensor:
        """Plain memory too."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, lane: CopyStream = CopyStream.WEIGHTS
    ) -> Arrival:
        """Done when it returns."""
        began = time.perf_counter()
        if poison:
            target.fill_(POISON)
        target[: len(source)].copy_(source)
        self._seconds[lane] += time.perf_counter() - began
        return _Arrived()

    def waits(self, lane: CopyStream = CopyStream.WEIGHTS) -> Waits:
        """Nothing is late that is there at once."""
        return Waits(0, self._seconds[lane])

    def lap(self, lane: CopyStream) -> Lap:
        """By the host's clock."""
        now, seconds = time.perf_counter(), self._seconds[lane]
        if lane in self._laps:
            self._laps[lane].end(now, seconds)
        self._laps[lane] = PlainLap(now, seconds)
        return self._laps[lane]

    def release(self) -> None:
        """There is nothing to wait for."""


class _Arrived:
    def wait(self, ahead: bool) -> None:
        """It is there."""


class CudaCopyEngine:
    """A copy stream a lane; events keep them and the computing stream from each other's bytes."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._pin = pin
        self._streams: dict[CopyStream, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for lane in CopyStream
        }
        self._stream = self._streams[CopyStream.WEIGHTS]
        self._stopwatches = {lane: StallTimer() for lane in CopyStream}
        self._lent: dict[int, weakref.finalize[[_Streams, Tensor, bool], CudaCopyEngine]] = {}
        """How to give up what begins at an address."""
        self._computing = torch.cuda.current_stream(self.device)

    def host_memory(self, nbytes: int) -> Tensor:
        """Pinned in place: torch's own pinned memory comes in powers of two."""
        return self._host_memory(nbytes, self._pin)

    def landing_memory(self, nbytes: int) -> Tensor:
        """Pinned on every machine: a copy into memory that is not may hold its caller."""
        return self._host_memory(nbytes, pin=True)

    def let_go(self, memory: Tensor) -> None:
        """Nothing reads or writes it any more when this returns."""
        let_go = self._lent.pop(memory.data_ptr(), None)
        if let_go is not None:  # none where all was released before
            let_go()

    def device_memory(self, nbytes: int) -> Tensor:
        """From torch's allocator, which must not give it out again under a running copy."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self._stream)
        return memory

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, lane: CopyStream = CopyStream.WEIGHTS
    ) -> Arrival:
        """On the lane's stream, behind everything that computing has queued."""
        stream = self._streams[lane]
        ready = _event()
        ready.record(self._computing_stream())
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            if poison:
                target.fill_(POISON)
            target[: len(source)].copy_(source, non_blocking=True)
            done = _event()
            done.record(stream)
        return _Arriving(self, done, self._stopwatches[lane])

    def wait(self, done: torch.cuda.Event, stopwatch: StallTimer, ahead: bool) -> None:
        """Hold the computing stream, not the caller, until a copy is done; note when and since."""
        stream = self._computing_stream()
        asked = _event(timed=True)
        resumed = _event(timed=True)
        asked.record(stream)
        stream.wait_event(done)
        resumed.record(stream)
        stopwatch.note(asked, resumed, ahead)

    def waits(self, lane: CopyStream = CopyStream.WEIGHTS) -> Waits:
        """Waits for the last copy that computing asked for."""
        self._stopwatches[lane].catch_up()
        return self._stopwatches[lane].read()

    def lap(self, lane: CopyStream) -> Lap:
        """By events on the device."""
        return self._stopwatches[lane].begin_lap()

    def release(self) -> None:
        """Nothing reads or writes host memory any more when this returns."""
        while self._lent:
            self._lent.popitem()[1]()

    def _computing_stream(self) -> torch.cuda.Stream:
        """The stream of this thread; another than before waits, for that may still read slots."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._computing:
            stream.wait_stream(self._computing)
            self._computing = stream
        return stream

    def _host_memory(self, nbytes: int, pin: bool) -> Tensor:
        pages_nbytes = -(-nbytes // PAGESIZE) * PAGESIZE
        room = torch.empty(pages_nbytes + PAGESIZE, dtype=torch.uint8)
        first = -room.data_ptr() % PAGESIZE  # a page cannot be pinned twice: none is shared
        pages = room[first : first + pages_nbytes]
        if pin:
            self._pin_down(pages)
        let_go = weakref.finalize(self, _let_go, tuple(self._streams.values()), pages, pin)
        let_go.atexit = False  # the driver lets go by itself, and may be gone before us
        self._lent[pages.data_ptr()] = let_go
        return pages[:nbytes]

    def _pin_down(self, pages: Tensor) -> None:
        with torch.cuda.device(self.device):
            code = int(_runtime().cudaHostRegister(pages.data_ptr(), len(pages), 0))
        if code:
            # CUDA keeps the refusal, and the next kernel would be blamed for it: this one is.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise StreamError(
                f"{format_bytes(len(pages))} of host memory for what is streamed cannot be pinned "
                f"(cudaHostRegister returned {code}). Stream or offload fewer blocks, or raise the "
                "limits on locked memory (ulimit -l, the container's memory)."
            )


class _Arriving:
    def __init__(
        self, mover: CudaCopyEngine, done: torch.cuda.Event, stopwatch: StallTimer
    ) -> None:
        self._mover = mover
        self._done = done
        self._stopwatch = stopwatch

    def wait(self, ahead: bool) -> None:
        """On the device's side."""
        self._mover.wait(self._done, self._stopwatch, ahead)


_Streams = tuple[torch.cuda.Stream, ...]


def _let_go(streams: _Streams, pages: Tensor, pinned: bool) -> None:
    for stream in streams:
        stream.synchronize()  # a copy that nobody waited for may still be under way
    if pinned:
        code = int(_runtime().cudaHostUnregister(pages.data_ptr()))
        assert code == 0, f"cudaHostUnregister returned {code} for {pages.data_ptr():#x}"


def _event(timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _runtime() -> ModuleType:
    return cast("ModuleType", torch.cuda.cudart())  # type: ignore[no-untyped-call]
