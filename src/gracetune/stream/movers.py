"""How bytes get from the host slab into a slot: a copy stream on CUDA, a plain copy elsewhere.

The ring sees this protocol alone and is the same on every machine. A copy never starts before the
kernels that were queued when it was asked for, so that they have read what it overwrites.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Protocol, cast

import torch

from gracetune.errors import GracetuneError
from gracetune.memory.platform import Link
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

POISON = 0xFF
"""Of these bytes every floating point number is a NaN."""
LATE_S = 20e-6
"""Two events in a row are some microseconds apart even when nothing is waited for."""
HARVEST_EVERY = 512


class StreamError(GracetuneError):
    """Weights cannot be streamed as asked, or were moved while they are."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What computing waited for, as far as the device has got."""

    late: int
    """Copies asked for ahead of use that were not done in time."""
    seconds: float


class Arrival(Protocol):
    """A copy under way."""

    def wait(self, ahead: bool) -> None:
        """Let what is queued from here on see the copy; `ahead`: it was asked for before."""
        ...


class Mover(Protocol):
    """Memory on both sides, and copies from host to device."""

    @property
    def device(self) -> torch.device:
        """Where slots are."""
        ...

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes that the device copies from at full speed."""
        ...

    def device_memory(self, nbytes: int) -> Tensor:
        """Bytes of a slot."""
        ...

    def copy(self, target: Tensor, source: Tensor, poison: bool) -> Arrival:
        """Overwrite a slot once all work queued so far is done; `poison` it first."""
        ...

    def waits(self) -> Waits:
        """What was waited for; the only call here that waits for the device itself."""
        ...

    def release(self) -> None:
        """Wait for copies under way and let host memory go; nothing is copied after."""
        ...


def open_mover(device: torch.device, link: Link) -> Mover:
    """The one way to the device that fits the machine; nothing below asks about hardware."""
    if device.type == "cpu":
        return SynchronousMover()
    # Over C2C, or with one memory for both, the copy engine reads any page: pinning buys nothing.
    return CudaMover(device, pin=link not in (Link.COHERENT, Link.INTEGRATED))


class SynchronousMover:
    """Copies at once, and counts all their time as waited for."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._seconds = 0.0

    def host_memory(self, nbytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def device_memory(self, nbytes: int) -> Tensor:
        """Plain memory too."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, poison: bool) -> Arrival:
        """Done when it returns."""
        began = time.perf_counter()
        if poison:
            target.fill_(POISON)
        target[: len(source)].copy_(source)
        self._seconds += time.perf_counter() - began
        return _Arrived()

    def waits(self) -> Waits:
        """Nothing is late that is there at once."""
        return Waits(0, self._seconds)

    def release(self) -> None:
        """There is nothing to wait for."""


class _Arrived:
    def wait(self, ahead: bool) -> None:
        """It is there."""


class CudaMover:
    """One copy stream; events keep it and the computing stream from each other's slots."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._pin = pin
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._lent: list[weakref.finalize[[torch.cuda.Stream, Tensor, bool], CudaMover]] = []
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = deque()
        self._late = 0
        self._seconds = 0.0
        self._computing = torch.cuda.current_stream(self.device)

    def host_memory(self, nbytes: int) -> Tensor:
        """Pinned in place: torch's own pinned memory comes in powers of two."""
        pages_nbytes = -(-nbytes // PAGESIZE) * PAGESIZE
        room = torch.empty(pages_nbytes + PAGESIZE, dtype=torch.uint8)
        first = -room.data_ptr() % PAGESIZE  # a page cannot be pinned twice: none is shared
        pages = room[first : first + pages_nbytes]
        if self._pin:
            self._pin_down(pages)
        let_go = weakref.finalize(self, _let_go, self._stream, pages, self._pin)
        let_go.atexit = False  # the driver lets go by itself, and may be gone before us
        self._lent.append(let_go)
        return pages[:nbytes]

    def device_memory(self, nbytes: int) -> Tensor:
        """From torch's allocator, which must not give it out again under a running copy."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self._stream)
        return memory

    def copy(self, target: Tensor, source: Tensor, poison: bool) -> Arrival:
        """On the copy stream, behind everything that computing has queued."""
        freed = _event()
        freed.record(self._computing_stream())
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(freed)
            if poison:
                target.fill_(POISON)
            target[: len(source)].copy_(source, non_blocking=True)
            done = _event()
            done.record(self._stream)
        return _Arriving(self, done)

    def wait(self, done: torch.cuda.Event, ahead: bool) -> None:
        """Hold the computing stream, not the caller, until a copy is done; note when and since."""
        stream = self._computing_stream()
        asked = _event(timed=True)
        resumed = _event(timed=True)
        asked.record(stream)
        stream.wait_event(done)
        resumed.record(stream)
        self._waits.append((asked, resumed, ahead))
        if len(self._waits) % HARVEST_EVERY == 0:
            self._harvest()

    def waits(self) -> Waits:
        """Waits for the last copy that computing asked for."""
        if self._waits:
            self._waits[-1][1].synchronize()
        self._harvest()
        return Waits(self._late, self._seconds)

    def release(self) -> None:
        """Nothing reads the slab any more when this returns."""
        for let_go in self._lent:
            let_go()

    def _computing_stream(self) -> torch.cuda.Stream:
        """The stream of this thread; another than before waits, for that may still read slots."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._computing:
            stream.wait_stream(self._computing)
            self._computing = stream
        return stream

    def _pin_down(self, pages: Tensor) -> None:
        with torch.cuda.device(self.device):
            code = int(_runtime().cudaHostRegister(pages.data_ptr(), len(pages), 0))
        if code:
            raise StreamError(
                f"{format_bytes(len(pages))} of host memory for streamed weights cannot be pinned "
                f"(cudaHostRegister returned {code}). Stream fewer blocks, or raise the limits on "
                "locked memory (ulimit -l, the container's memory)."
            )

    def _harvest(self) -> None:
        while self._waits and self._waits[0][1].query():  # type: ignore[no-untyped-call]
            asked, resumed, ahead = self._waits.popleft()
            seconds = asked.elapsed_time(resumed) / 1e3
            if seconds > LATE_S:
                self._late += ahead
                self._seconds += seconds


class _Arriving:
    def __init__(self, mover: CudaMover, done: torch.cuda.Event) -> None:
        self._mover = mover
        self._done = done

    def wait(self, ahead: bool) -> None:
        """On the device's side."""
        self._mover.wait(self._done, ahead)


def _let_go(stream: torch.cuda.Stream, pages: Tensor, pinned: bool) -> None:
    stream.synchronize()  # a copy that nobody waited for may still be reading
    if pinned:
        code = int(_runtime().cudaHostUnregister(pages.data_ptr()))
        assert code == 0, f"cudaHostUnregister returned {code} for {pages.data_ptr():#x}"


def _event(timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _runtime() -> ModuleType:
    return cast("ModuleType", torch.cuda.cudart())  # type: ignore[no-untyped-call]
