"""Allocate torch tensors in CUDA managed memory, through a `torch.cuda.MemPool` with a byte cap.

Tensors from a pool are ordinary CUDA tensors, cached by torch's allocator. Beyond the cap, torch
raises its OutOfMemoryError.

Keep a pool open only around the lines that allocate, never around a loop. While a pool is open,
torch defers frees of tensors that other streams have used, does not retry before it reports out of
memory, and releases no cached memory. Only the thread that opened the pool allocates from it;
autograd's backward runs in other threads. Buffers that a library keeps (such as the workspace of
the first matmul) stay in the pool in which they were allocated.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gracetune.errors import ConfigError, GracetuneError
from gracetune.events.types import Notice
from gracetune.memory.platform import Link
from gracetune.memory.shim import DRIVER_LIBRARY, AccessPattern, MissingShim, ShimError
from gracetune.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from gracetune.memory.platform import Platform
    from gracetune.memory.shim import Shim, ShimCounters

MAX_OPEN_S = 5.0
"""Seconds after which a warning says that a pool was open too long, probably around a loop."""


class PoolError(GracetuneError):
    """Raised if a managed pool is used after it was closed, or in a way torch does not support."""


@dataclass(frozen=True, slots=True)
class PoolUnavailable:
    """The reason why this machine cannot have a pool of CUDA managed memory."""

    reason: str


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Options of a pool of CUDA managed memory."""

    cap_bytes: int
    """Maximum size of the pool in bytes, in whole segments of torch's allocator."""
    pattern: AccessPattern = AccessPattern.GPU_FIRST
    """Where the pool's memory should be: mainly on the device, mainly on the host, or either."""
    no_split: bool = False
    """Give each tensor an allocation (segment) of its own, so that hints affect no other tensor."""
    use_on_oom: bool = False
    """Let torch use the pool's cached memory for other tensors before it reports out of memory."""
    driver_library: str = DRIVER_LIBRARY


@dataclass(frozen=True, slots=True)
class PoolCloseResult:
    """Bytes that closing a pool freed and could not free; truthy if all were freed."""

    freed_bytes: int
    held_bytes: int
    """Bytes that could not be freed, because tensors are alive or another pool is open."""

    def __bool__(self) -> bool:
        return self.held_bytes == 0


class MemPoolApi(Protocol):
    """The torch functions that a managed pool needs; hides differences between torch releases."""

    def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
        """Create a `torch.cuda.MemPool` that allocates with the functions of a C library.

        `library` is that library (shim.c), and `slot` the number of its functions for this pool.
        """
        ...

    def use_pool(self, pool: object, device: int) -> AbstractContextManager[None]:
        """Return a context manager that makes this thread allocate from the pool."""
        ...

    def is_capturing(self) -> bool:
        """Return True if a CUDA graph is being captured on the current stream."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait for all streams of the device."""
        ...

    def empty_cache(self) -> None:
        """Free the cached segments of pools that no longer exist."""
        ...


class TorchMemPools:
    """`MemPoolApi` for torch 2.11 to 2.15."""

    def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
        """Create a `torch.cuda.MemPool` on the given device."""
        import torch

        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(library), f"gracetune_alloc_{slot}", f"gracetune_free_{slot}"
        )
        handle = allocator.allocator()  # type: ignore[no-untyped-call]
        # Tensors can outlive their pool, and some torch releases do not keep the allocator alive
        # with it: a later free would crash. So the allocator is never released (a few bytes).
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        with torch.cuda.device(device):  # a pool belongs to the current device
            return torch.cuda.MemPool(
                handle, use_on_oom=settings.use_on_oom, no_split=settings.no_split
            )

    def use_pool(self, pool: object, device: int) -> AbstractContextManager[None]:
        """Return `torch.cuda.use_mem_pool` for the pool and its device."""
        import torch

        assert isinstance(pool, torch.cuda.MemPool)
        opened: AbstractContextManager[None] = torch.cuda.use_mem_pool(pool, device)
        return opened

    def is_capturing(self) -> bool:
        """Return True if the current stream is being captured into a CUDA graph."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def synchronize(self, device: int) -> None:
        """Wait for all streams of the device."""
        import torch

        torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        """Call `torch.cuda.empty_cache`, which also frees the segments of deleted pools."""
        import torch

        torch.cuda.empty_cache()


def open_pool(
    platform: Platform,
    shim: Shim | MissingShim,
    settings: PoolSettings,
    torch_pools: MemPoolApi,
    emit: Callable[[Notice], None],
    clock: Callable[[], float] = time.monotonic,
) -> ManagedPool | PoolUnavailable:
    """Open a managed pool on the platform's device; return the reason if that is impossible."""
    if settings.cap_bytes <= 0:
        raise ConfigError(
            f"The cap of a managed pool is {settings.cap_bytes} bytes, but it must be above 0. "
            "Raise uvm_oversubscription_ratio, or turn use_uvm off."
        )
    if not platform.has_managed:
        return PoolUnavailable(f"no managed memory: {platform.reasons['link']}")
    if platform.link is Link.INTEGRATED:
        return PoolUnavailable(f"nothing to oversubscribe: {platform.reasons['link']}")
    if isinstance(shim, MissingShim):
        return PoolUnavailable(shim.reason)
    try:
        slot = shim.open(settings.pattern, settings.cap_bytes, settings.driver_library)
    except ShimError as error:
        return PoolUnavailable(str(error))
    with ExitStack() as undo:  # release the slot if torch refuses
        undo.callback(shim.close, slot)
        pool = ManagedPool(shim, slot, platform.device, settings, torch_pools, emit, clock)
        undo.pop_all()
    return pool


class ManagedPool:
    """A pool of managed memory for one device, used through torch's caching allocator."""

    def __init__(
        self,
        shim: Shim,
        slot: int,
        device: int,
        settings: PoolSettings,
        torch_pools: MemPoolApi,
        emit: Callable[[Notice], None],
        clock: Callable[[], float],
    ) -> None:
        self.device = device
        self.settings = settings
        self._shim = shim
        self._slot: int | None = slot
        self._torch = torch_pools
        self._emit = emit
        self._clock = clock
        self._warned = False
        self._lock = threading.RLock()  # a finalizer may read counters during close
        self._num_open = 0
        self._pool: object | None = torch_pools.make(shim.path, slot, device, settings)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Make torch allocate from this pool inside the `with` block, in this thread.

        Keep the block short: torch frees less memory while it is open.
        """
        if self._torch.is_capturing():
            raise PoolError(
                "A managed pool was opened during CUDA graph capture; its prefetches would break "
                "the capture. Allocate before capturing."
            )
        with self._lock:
            if self._pool is None:
                raise PoolError("This managed pool is closed. Open another one with open_pool().")
            pool = self._pool
            self._num_open += 1
        began = self._clock()
        try:
            with self._torch.use_pool(pool, self.device):
                yield
        finally:
            del pool  # this reference would keep a closed pool's segments alive
            with self._lock:
                self._num_open -= 1
            self._warn_once(self._clock() - began)

    def counters(self) -> ShimCounters:
        """Return the pool's allocation counters."""
        with self._lock:
            if self._slot is None:
                raise PoolError("This managed pool is closed and has no counters any more.")
            return self._shim.counters(self._slot)

    def set_cap(self, cap_bytes: int) -> None:
        """Change the maximum size of the pool. Lowering it frees no existing tensors."""
        with self._lock:
            if self._slot is None:
                raise PoolError("This managed pool is closed; its cap cannot be changed.")
            self._shim.set_cap(self._slot, cap_bytes)

    def close(self, *, final: bool = False) -> PoolCloseResult:
        """Free all memory of the pool that no tensor uses.

        If tensors are still alive, call it again once they are gone. With `final`, that is not
        needed: their memory is freed after them, when torch empties its cache.
        """
        with self._lock:
            if self._num_open:
                raise PoolError(
                    f"This managed pool is open in {self._num_open} place(s); torch would abort. "
                    "Leave every `with pool.allocating():` block first."
                )
            if self._slot is None:
                return PoolCloseResult(0, 0)
            before = self._shim.counters(self._slot).live_bytes
            self._torch.synchronize(self.device)  # kernels may still use memory that is freed next
            self._pool = None  # torch frees the pool's cached segments here
            self._torch.empty_cache()
            held = self._shim.counters(self._slot).live_bytes
            if final or not self._shim.counters(self._slot).live_segments:
                self._shim.close(self._slot)
                self._slot = None
            return PoolCloseResult(before - held, held)

    def _warn_once(self, seconds: float) -> None:
        if seconds <= MAX_OPEN_S or self._warned:
            return
        self._warned = True
        self._emit(
            Notice(
                f"a managed pool was open for {format_seconds(seconds)}; torch frees less memory "
                "meanwhile and reports out of memory sooner. Open it around allocations only.",
                level="warning",
            )
        )
