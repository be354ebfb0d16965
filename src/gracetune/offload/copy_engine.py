"""Copy bytes between host and device: CUDA copy streams, or a plain copy on the CPU.

The weight ring, the activation offload and the optimizer state use only the `CopyEngine` protocol
and are the same code on every machine. Ordering on compute stream C and copy stream H, where
`ready` and `done` are CUDA events and time runs to the right:

    C:  kernels queued so far | record ready | other kernels ------------ | wait done | next kernels
    H:                                         wait ready | copy | record done

- A copy starts after every kernel that was queued when it was requested. Those kernels have then
  read what the copy overwrites, and written what the copy reads.
- `PendingCopy.wait` makes the compute stream, not the host, wait for the copy.
- Copies of one stream run in the order of their requests. Streams are independent of each other.
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
from gracetune.offload.stall_timer import HostStallWindow, StallTimer, StallTotals
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from gracetune.offload.stall_timer import StallWindow

POISON = 0xFF
"""Byte with which memory is filled for debugging: floats of any dtype made of it are NaN."""
ALIGNMENT = 256
"""Alignment, in bytes, of tensors that are packed into one buffer. Kernels may expect the alignment
that memory from an allocator has."""


def aligned(nbytes: int) -> int:
    """Round a size up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class OffloadError(GracetuneError):
    """Raised if weights or activations cannot be offloaded, or were modified while offloaded."""


class CopyStream(Enum):
    """Purpose and direction of a copy. Each member has its own CUDA stream and stall timer."""

    WEIGHTS = "weights"
    """Frozen weights, host to device."""
    ACTIVATIONS_OUT = "activations out"
    ACTIVATIONS_IN = "activations back"
    STATE_IN = "optimizer state in"
    STATE_OUT = "optimizer state out"
    CHECKPOINT = "checkpoint"
    """Weights and optimizer state that a checkpoint is written from, device to host."""


class PendingCopy(Protocol):
    """A copy that was requested and may not have finished."""

    def wait(self, prefetched: bool) -> None:
        """Make kernels that are queued from now on run after the copy.

        `prefetched` is True if the copy was requested before it was needed. If compute has to wait
        for a prefetched copy, the copy counts as late.
        """
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the copy is complete."""
        ...


class CopyEngine(Protocol):
    """Allocate host and device memory, and copy between them."""

    @property
    def device(self) -> torch.device:
        """Device to copy to and from."""
        ...

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return host memory that the device reads at full speed."""
        ...

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return host memory that the device reads and writes at full speed."""
        ...

    @property
    def pinned_room(self) -> int | None:
        """Bytes that `allocate_pinned` may still return; None: as many as the host has."""
        ...

    def adopt_host(self, memory: Tensor) -> None:
        """Let the device read the caller's memory at full speed, as that of `allocate_host`.

        The memory starts at a page of its own. `free_host` and `close` end this.
        """
        ...

    def free_host(self, memory: Tensor) -> None:
        """Wait for running copies and free one allocation of host memory."""
        ...

    def allocate_device(self, nbytes: int) -> Tensor:
        """Return device memory that copies may write to."""
        ...

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, stream: CopyStream = CopyStream.WEIGHTS
    ) -> PendingCopy:
        """Copy bytes after all work queued so far; fill the target with NaN first if `poison`."""
        ...

    def stalls(self, stream: CopyStream = CopyStream.WEIGHTS) -> StallTotals:
        """Return how long compute has waited for copies of a stream since the engine was created.

        Blocks the host until the device has passed the last wait. No other method blocks, except
        those that free host memory.
        """
        ...

    def begin_stall_window(self, stream: CopyStream) -> StallWindow:
        """End the stream's current stall window and return a new one.

        A stall window measures how long compute waits for copies in a few training passes.
        """
        ...

    def close(self) -> None:
        """Wait for running copies and free all host memory. No copy may follow."""
        ...


def open_copy_engine(device: torch.device, link: Link) -> CopyEngine:
    """Return the copy engine for this machine: CUDA streams for a GPU, plain copies for a CPU."""
    if device.type == "cpu":
        return SynchronousCopyEngine()
    # Over NVLink-C2C, or if host and device share one memory, the GPU reads unpinned pages as fast.
    return CudaCopyEngine(device, pin=link not in (Link.COHERENT, Link.INTEGRATED))


class SynchronousCopyEngine:
    """Copy synchronously on the CPU. Compute waits for every copy, so all copy time is a stall."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pinned_room = None
        self._stalled_s = dict.fromkeys(CopyStream, 0.0)
        self._windows: dict[CopyStream, HostStallWindow] = {}

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return ordinary memory: nothing needs to be pinned."""
        return self.allocate_host(nbytes)

    def adopt_host(self, memory: Tensor) -> None:
        """Do nothing: nothing needs to be pinned."""

    def free_host(self, memory: Tensor) -> None:
        """Do nothing: the memory is freed with the last tensor that uses it."""

    def allocate_device(self, nbytes: int) -> Tensor:
        """Return ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, stream: CopyStream = CopyStream.WEIGHTS
    ) -> PendingCopy:
        """Copy before returning, and count the copy's duration as stall time.

        With `poison`, fill the target with NaN first, so that a read before the copy shows.
        """
        began = time.perf_counter()
        if poison:
            target.fill_(POISON)
        target[: len(source)].copy_(source)
        self._stalled_s[stream] += time.perf_counter() - began
        return _FinishedCopy()

    def stalls(self, stream: CopyStream = CopyStream.WEIGHTS) -> StallTotals:
        """Return the time spent on copies. No copy counts as late, because each ends at once."""
        return StallTotals(0, self._stalled_s[stream])

    def begin_stall_window(self, stream: CopyStream) -> StallWindow:
        """End the stream's current stall measurement and start one with the host's clock."""
        now, stalled_s = time.perf_counter(), self._stalled_s[stream]
        if stream in self._windows:
            self._windows[stream].end(now, stalled_s)
        self._windows[stream] = HostStallWindow(now, stalled_s)
        return self._windows[stream]

    def close(self) -> None:
        """Do nothing: no copy is pending."""


class _FinishedCopy:
    def wait(self, prefetched: bool) -> None:
        """Do nothing: a synchronous copy has finished when it returns."""

    def synchronize(self) -> None:
        """Do nothing: the copy is complete."""


class CudaCopyEngine:
    """Copy on one CUDA stream per `CopyStream`, ordered against the compute stream by events."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        """`pin`: whether `allocate_host` pins its memory (`allocate_pinned` always does)."""
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.pinned_room = None
        self._pin = pin
        self._streams: dict[CopyStream, torch.cuda.Stream] = {
            kind: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            for kind in CopyStream
        }
        self._timers = {kind: StallTimer() for kind in CopyStream}
        self._free_functions: dict[
            int, weakref.finalize[[_Streams, Tensor, bool], CudaCopyEngine]
        ] = {}
        """Address of each allocation of host memory -> the function that frees it."""
        self._compute = torch.cuda.current_stream(self.device)

    def allocate_host(self, nbytes: int) -> Tensor:
        """Return host memory in whole pages, pinned if this machine needs it.

        torch's own allocator of pinned memory would round the size up to a power of 2.
        """
        return self._allocate_host(nbytes, self._pin)

    def allocate_pinned(self, nbytes: int) -> Tensor:
        """Return pinned host memory on every machine: copies to unpinned memory may block."""
        return self._allocate_host(nbytes, pin=True)

    def adopt_host(self, memory: Tensor) -> None:
        """Pin the caller's memory if this machine needs it."""
        assert memory.data_ptr() % PAGESIZE == 0, "memory to pin starts within a page"
        self._adopt(memory, self._pin)

    def free_host(self, memory: Tensor) -> None:
        """Free an allocation after the last copy that uses it."""
        free = self._free_functions.pop(memory.data_ptr(), None)
        if free is not None:  # None after close()
            free()

    def allocate_device(self, nbytes: int) -> Tensor:
        """Return device memory that torch does not reuse while a copy still reads or writes it.

        Copies that no one waits for are left over if a step fails.
        """
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        for stream in self._streams.values():
            memory.record_stream(stream)
        return memory

    def copy(
        self, target: Tensor, source: Tensor, poison: bool, stream: CopyStream = CopyStream.WEIGHTS
    ) -> PendingCopy:
        """Queue a copy behind all work of the compute stream."""
        copy_stream = self._streams[stream]
        ready = _event()
        ready.record(self._compute_stream())
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_event(ready)
            if poison:
                target.fill_(POISON)
            target[: len(source)].copy_(source, non_blocking=True)
            done = _event()
            done.record(copy_stream)
        return _CudaPendingCopy(self, done, self._timers[stream])

    def wait(self, done: torch.cuda.Event, timer: StallTimer, prefetched: bool) -> None:
        """Make the compute stream wait for a copy's `done` event, and time the wait.

        The host does not block.
        """
        compute = self._compute_stream()
        asked = _event(timed=True)
        resumed = _event(timed=True)
        asked.record(compute)
        compute.wait_event(done)
        resumed.record(compute)
        timer.record(asked, resumed, prefetched)

    def stalls(self, stream: CopyStream = CopyStream.WEIGHTS) -> StallTotals:
        """Return the total time that compute has waited for copies of a stream.

        Blocks the host until the device has passed the last recorded wait.
        """
        self._timers[stream].synchronize()
        return self._timers[stream].collect()

    def begin_stall_window(self, stream: CopyStream) -> StallWindow:
        """End the stream's current stall measurement and start one with CUDA events."""
        return self._timers[stream].begin_window()

    def close(self) -> None:
        """Wait for the last copy and free all host memory."""
        while self._free_functions:
            self._free_functions.popitem()[1]()

    def _compute_stream(self) -> torch.cuda.Stream:
        """Return the current CUDA stream of this thread.

        If the model has changed streams, the new stream first waits for the old one, whose kernels
        may still read memory that the next copy overwrites.
        """
        stream = torch.cuda.current_stream(self.device)
        if stream != self._compute:
            stream.wait_stream(self._compute)
            self._compute = stream
        return stream

    def _allocate_host(self, nbytes: int, pin: bool) -> Tensor:
        pages_nbytes = -(-nbytes // PAGESIZE) * PAGESIZE
        unaligned = torch.empty(pages_nbytes + PAGESIZE, dtype=torch.uint8)
        start = -unaligned.data_ptr() % PAGESIZE  # whole pages, so that no page is pinned twice
        pages = unaligned[start : start + pages_nbytes]
        if pin:
            pages.zero_()  # torch's threads create the pages; the driver would one after the other
        self._adopt(pages, pin)
        return pages[:nbytes]

    def _adopt(self, pages: Tensor, pin: bool) -> None:
        """Pin memory if `pin` is set, and keep it alive until its last copy has ended."""
        if pin:
            self._register(pages)
        free = weakref.finalize(self, _free_host, tuple(self._streams.values()), pages, pin)
        free.atexit = False  # the driver unpins all memory when the process exits
        self._free_functions[pages.data_ptr()] = free

    def _register(self, pages: Tensor) -> None:
        with torch.cuda.device(self.device):
            code = int(_cudart().cudaHostRegister(pages.data_ptr(), len(pages), 0))
        if code:
            # CUDA keeps the error and would report it at the next kernel. Make this be that kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise OffloadError(
                f"{format_bytes(len(pages))} of host memory cannot be pinned for offloading "
                f"(cudaHostRegister returned {code}). Stream or offload fewer blocks, or raise the "
                "limits on locked memory (ulimit -l, the container's memory)."
            )


class _CudaPendingCopy:
    def __init__(self, engine: CudaCopyEngine, done: torch.cuda.Event, timer: StallTimer) -> None:
        self._engine = engine
        self._done = done
        self._timer = timer

    def wait(self, prefetched: bool) -> None:
        """Make the compute stream wait for the copy."""
        self._engine.wait(self._done, self._timer, prefetched)

    def synchronize(self) -> None:
        """Block the calling thread until the copy is complete; other threads run meanwhile."""
        self._done.synchronize()


_Streams = tuple[torch.cuda.Stream, ...]


def _free_host(streams: _Streams, pages: Tensor, pinned: bool) -> None:
    for stream in streams:
        stream.synchronize()  # a copy that no one waited for may still be running
    if pinned:
        code = int(_cudart().cudaHostUnregister(pages.data_ptr()))
        assert code == 0, f"cudaHostUnregister returned {code} for {pages.data_ptr():#x}"


def _event(timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _cudart() -> ModuleType:
    return cast("ModuleType", torch.cuda.cudart())  # type: ignore[no-untyped-call]
