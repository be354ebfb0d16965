"""Managed memory as a `torch.cuda.MemPool`: ordinary tensors, native caching, a cap that holds.

A pool is opened around the lines that allocate, never around a loop: while any pool is open torch
defers the frees of tensors that other streams have used, skips the retry before it reports out of
memory, and releases nothing. Only the opening thread allocates from it; backward runs on others.
What a library keeps for itself (the workspace of a first matrix product) stays in the pool it was
made in. Past its cap the pool refuses, and the user sees torch's own OutOfMemoryError.
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
"""A pool open for longer is around a loop, not around an allocation."""


class PoolError(GracetuneError):
    """A pool is used in a way that would hang, abort or mislead torch."""


@dataclass(frozen=True, slots=True)
class PoolUnavailable:
    """There is no managed pool here, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How a pool's segments are placed and bounded."""

    cap_bytes: int
    """Most managed bytes, whole segments counted; past it torch reports out of memory."""
    pattern: AccessPattern = AccessPattern.GPU_FIRST
    no_split: bool = False
    """One tensor a segment, so that a hint for one never reaches a neighbour."""
    use_on_oom: bool = False
    """Let allocations outside use what this pool has cached before they fail."""
    driver_library: str = DRIVER_LIBRARY


@dataclass(frozen=True, slots=True)
class PoolCloseResult:
    """What closing a pool gave back."""

    freed_bytes: int
    held_bytes: int
    """Bytes that living tensors, or another open pool, keep from being freed."""

    def __bool__(self) -> bool:
        """Whether everything is back."""
        return self.held_bytes == 0


class MemPoolApi(Protocol):
    """The part of torch that pools are made of; all differences between releases live behind it."""

    def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
        """A MemPool over a slot of the shim."""
        ...

    def use_pool(self, pool: object, device: int) -> AbstractContextManager[None]:
        """While it is open, this thread's allocations come from the pool."""
        ...

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on this thread's stream."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait for the device."""
        ...

    def empty_cache(self) -> None:
        """Give cached segments without an owner back to their allocators."""
        ...


class TorchMemPools:
    """torch 2.11 to 2.15."""

    def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
        """A MemPool on a device that is named, whose allocator is never collected."""
        import torch

        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(library), f"gracetune_alloc_{slot}", f"gracetune_free_{slot}"
        )
        handle = allocator.allocator()  # type: ignore[no-untyped-call]
        # Releases differ in whether a pool keeps its allocator alive, and tensors outlive pools:
        # a freed allocator is a crash at some later free. A few bytes a pool are the price.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        with torch.cuda.device(device):  # a pool belongs to the device that is current here
            return torch.cuda.MemPool(
                handle, use_on_oom=settings.use_on_oom, no_split=settings.no_split
            )

    def use_pool(self, pool: object, device: int) -> AbstractContextManager[None]:
        """torch's own context manager, on the pool's device."""
        import torch

        assert isinstance(pool, torch.cuda.MemPool)
        opened: AbstractContextManager[None] = torch.cuda.use_mem_pool(pool, device)
        return opened

    def is_capturing(self) -> bool:
        """Whether this thread's stream is being captured."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def synchronize(self, device: int) -> None:
        """All streams of the device."""
        import torch

        torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        """Of every pool that nobody holds any more."""
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
    """A managed pool on the platform's device, or why it cannot have one."""
    if settings.cap_bytes <= 0:
        raise ConfigError(
            f"a managed pool's cap is {settings.cap_bytes} bytes; it must be above 0. Raise "
            "uvm_oversubscription_ratio, or turn use_uvm off."
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
    with ExitStack() as undo:  # torch may refuse; the slot must not stay taken
        undo.callback(shim.close, slot)
        pool = ManagedPool(shim, slot, platform.device, settings, torch_pools, emit, clock)
        undo.pop_all()
    return pool


class ManagedPool:
    """Managed segments behind torch's caching allocator, for one device."""

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
        self._told_long = False
        self._lock = threading.RLock()  # a finaliser may ask for counters while we close
        self._num_open = 0
        self._pool: object | None = torch_pools.make(shim.path, slot, device, settings)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocate from this pool inside the block, on this thread; keep the block short."""
        if self._torch.is_capturing():
            raise PoolError(
                "a managed pool was opened while a CUDA graph is captured; its prefetches would "
                "break the capture. Allocate before capturing."
            )
        with self._lock:
            if self._pool is None:
                raise PoolError("this managed pool is closed; open another with open_pool().")
            pool = self._pool
            self._num_open += 1
        began = self._clock()
        try:
            with self._torch.use_pool(pool, self.device):
                yield
        finally:
            del pool  # a reference left here would keep a closed pool's segments
            with self._lock:
                self._num_open -= 1
            self._warn_once(self._clock() - began)

    def counters(self) -> ShimCounters:
        """What the pool took from the driver, gave back and was refused."""
        with self._lock:
            if self._slot is None:
                raise PoolError("this managed pool is closed; its counters went with it.")
            return self._shim.counters(self._slot)

    def set_cap(self, cap_bytes: int) -> None:
        """Move the cap; what is above a lower one stays until its tensors go."""
        with self._lock:
            if self._slot is None:
                raise PoolError("this managed pool is closed; it has no cap to move.")
            self._shim.set_cap(self._slot, cap_bytes)

    def close(self) -> PoolCloseResult:
        """Give every segment without a living tensor back; call again when the last is gone."""
        with self._lock:
            if self._num_open:
                raise PoolError(
                    f"this managed pool is open in {self._num_open} place(s); torch would abort. "
                    "Leave every `with pool.allocating():` first."
                )
            if self._slot is None:
                return PoolCloseResult(0, 0)
            before = self._shim.counters(self._slot).live_bytes
            self._torch.synchronize(self.device)  # kernels may still use what is freed next
            self._pool = None  # torch gives the pool's cached segments back here
            self._torch.empty_cache()
            held = self._shim.counters(self._slot).live_bytes
            if self._shim.close(self._slot):
                self._slot = None
            return PoolCloseResult(before - held, held)

    def _warn_once(self, seconds: float) -> None:
        if seconds <= MAX_OPEN_S or self._told_long:
            return
        self._told_long = True
        self._emit(
            Notice(
                f"a managed pool stayed open for {format_seconds(seconds)}: meanwhile torch frees "
                "less and gives up on memory sooner. Open it around allocations, not a loop.",
                level="warning",
            )
        )
