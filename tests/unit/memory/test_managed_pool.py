"""Managed pools: the real shim with a fake driver and a fake torch."""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gracetune.errors import ConfigError
from gracetune.memory.managed_pool import (
    MAX_OPEN_S,
    ManagedPool,
    PoolCloseResult,
    PoolError,
    PoolSettings,
    PoolUnavailable,
    open_pool,
)
from gracetune.memory.platform import NO_GPU, Link, Platform
from gracetune.memory.shim import LIBRARY, AccessPattern, MissingShim, Shim, build_shim

if TYPE_CHECKING:
    from gracetune.events.types import Notice

MIB = 1024**2


class Segments:
    """Memory of one pool, allocated through the two functions of its slot."""

    def __init__(self, library: Path, slot: int) -> None:
        functions = ctypes.CDLL(str(library))
        self.alloc = functions[f"gracetune_alloc_{slot}"]
        self.alloc.restype = ctypes.c_void_p
        self.alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self.free = functions[f"gracetune_free_{slot}"]
        self.free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.cached: list[int] = []

    def release(self) -> None:
        for pointer in self.cached:
            self.free(pointer, 0, 0, None)
        self.cached.clear()


class FakeMemPool:
    """A MemPool: while it exists, cached memory is not freed."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def __del__(self) -> None:
        self.segments.release()


class FakeTensor:
    """Memory that returns to the cache, not to the driver, when it is freed."""

    def __init__(self, segments: Segments, pointer: int) -> None:
        self.drop = lambda: segments.cached.append(pointer)


class FakeTorchPools:
    """Allocates from the innermost open pool; frees the memory of deleted pools only."""

    def __init__(self) -> None:
        self.created: list[PoolSettings] = []
        self.devices: list[int] = []
        self.open: list[Segments] = []
        self.in_capture = False
        self.synchronizations = 0
        self.pools: list[tuple[Segments, weakref.ref[FakeMemPool]]] = []

    def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
        self.created.append(settings)
        self.devices.append(device)
        handle = FakeMemPool(Segments(library, slot))
        self.pools.append((handle.segments, weakref.ref(handle)))
        return handle

    @contextmanager
    def use_pool(self, pool: object, device: int) -> Iterator[None]:
        assert isinstance(pool, FakeMemPool)
        assert device == self.devices[-1]
        self.open.append(pool.segments)
        try:
            yield
        finally:
            self.open.pop()

    def is_capturing(self) -> bool:
        return self.in_capture

    def synchronize(self, device: int) -> None:
        assert device == self.devices[-1]
        self.synchronizations += 1

    def empty_cache(self) -> None:
        for segments, handle in self.pools:
            if handle() is None:
                segments.release()

    def allocate(self, nbytes: int) -> FakeTensor:
        segments = self.open[-1]
        pointer = segments.alloc(nbytes, 0, None)
        if pointer is None:
            raise MemoryError(nbytes)
        return FakeTensor(segments, pointer)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(build_shim(tmp_path_factory.mktemp("shim") / LIBRARY))


@pytest.fixture
def torch() -> FakeTorchPools:
    return FakeTorchPools()


@pytest.fixture
def settings(fake_libcuda: Callable[..., Path]) -> PoolSettings:
    path = fake_libcuda()
    ctypes.CDLL(str(path)).fake_set_current(0)
    return PoolSettings(cap_bytes=8 * MIB, driver_library=str(path))


def platform(link: Link) -> Platform:
    return replace(NO_GPU, link=link, device=0, reasons={"link": f"a test of {link.value}"})


def open_managed_pool(shim: Shim, settings: PoolSettings, torch: FakeTorchPools) -> ManagedPool:
    pool = open_pool(platform(Link.MANAGED), shim, settings, torch, emit=lambda _: None)
    assert isinstance(pool, ManagedPool)
    return pool


def test_tensors_inside_the_block_are_managed_and_counted(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    with pool.allocating():
        tensor = torch.allocate(2 * MIB)
    assert torch.open == []
    assert pool.counters().live_bytes == 2 * MIB
    assert pool.counters().hints == 3
    tensor.drop()
    assert pool.close() == PoolCloseResult(freed_bytes=2 * MIB, held_bytes=0)


def test_settings_reach_torch_and_the_shim(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    options = replace(settings, no_split=True, pattern=AccessPattern.BALANCED)
    pool = open_managed_pool(shim, options, torch)
    with pool.allocating():
        torch.allocate(MIB).drop()
    assert torch.created == [options]
    assert pool.counters().hints == 1
    assert pool.close()


def test_beyond_the_cap_torch_gets_out_of_memory(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    with pool.allocating():
        first = torch.allocate(8 * MIB)
        with pytest.raises(MemoryError):
            torch.allocate(1)
    assert (pool.counters().denied, pool.counters().live_bytes) == (1, 8 * MIB)
    pool.set_cap(9 * MIB)
    with pool.allocating():
        torch.allocate(MIB).drop()
    first.drop()
    assert pool.close()


def test_closing_reports_live_tensors_and_can_be_completed_later(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    with pool.allocating():
        kept, dropped = torch.allocate(MIB), torch.allocate(2 * MIB)
    dropped.drop()
    released = pool.close()
    assert released == PoolCloseResult(freed_bytes=2 * MIB, held_bytes=MIB)
    assert not released
    assert pool.counters().live_bytes == MIB
    kept.drop()
    assert pool.close() == PoolCloseResult(freed_bytes=MIB, held_bytes=0)
    assert pool.close() == PoolCloseResult(0, 0)


def test_a_pool_that_is_given_up_frees_its_slot_with_its_last_tensor(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    """There are 16 slots, and each run of a process opens one."""
    for _ in range(20):
        pool = open_managed_pool(shim, settings, torch)
        with pool.allocating():
            tensor = torch.allocate(MIB)
        assert pool.close(final=True) == PoolCloseResult(freed_bytes=0, held_bytes=MIB)
        assert pool.close() == PoolCloseResult(0, 0)
        with pytest.raises(PoolError, match="closed"):
            pool.counters()
        tensor.drop()
        torch.empty_cache()


def test_a_slot_that_was_given_up_keeps_its_segments(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    first = open_managed_pool(shim, settings, torch)
    with first.allocating():
        tensor = torch.allocate(MIB)
    first.close(final=True)
    second = open_managed_pool(shim, settings, torch)
    with second.allocating():
        other = torch.allocate(2 * MIB)
    tensor.drop()
    torch.empty_cache()
    assert second.counters().live_bytes == 2 * MIB
    other.drop()
    assert second.close()


def test_a_closed_pool_refuses_every_use(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    pool.close()
    with pytest.raises(PoolError, match="closed"), pool.allocating():
        pass
    with pytest.raises(PoolError, match="closed"):
        pool.counters()
    with pytest.raises(PoolError, match="closed"):
        pool.set_cap(1)


def test_closing_drops_the_last_reference_to_torchs_pool(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    with pool.allocating():
        pass
    assert torch.pools[0][1]() is not None
    pool.close()
    assert torch.pools[0][1]() is None
    assert torch.synchronizations == 1


def test_an_open_pool_cannot_be_closed(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    with pool.allocating():
        with pytest.raises(PoolError, match="open in 1 place"):
            pool.close()
        with pool.allocating(), pytest.raises(PoolError, match="open in 2 place"):
            pool.close()
    assert pool.close()


def test_an_error_inside_the_block_leaves_the_pool_usable(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    with pytest.raises(ZeroDivisionError), pool.allocating():
        raise ZeroDivisionError
    assert pool.close()


def test_a_pool_cannot_be_opened_during_graph_capture(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    torch.in_capture = True
    with pytest.raises(PoolError, match="graph capture"), pool.allocating():
        pass
    assert pool.close()


def test_a_pool_that_stays_open_is_reported_once(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    notices: list[Notice] = []
    times = iter([0, MAX_OPEN_S, 10, 11 + MAX_OPEN_S, 20, 40 + MAX_OPEN_S])
    pool = open_pool(
        platform(Link.COHERENT), shim, settings, torch, notices.append, clock=lambda: next(times)
    )
    assert isinstance(pool, ManagedPool)
    for expected in (0, 1, 1):
        with pool.allocating():
            pass
        assert len(notices) == expected
    assert notices[0].level == "warning"
    assert "around allocations only" in notices[0].text
    assert pool.close()


def test_threads_open_the_same_pool_at_once(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    pool = open_managed_pool(shim, settings, torch)
    barrier = threading.Barrier(4)

    def use() -> None:
        with pool.allocating():
            barrier.wait(10)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert barrier.broken is False
    assert pool.close()


@pytest.mark.parametrize("link", [Link.NONE, Link.COPY, Link.INTEGRATED])
def test_unsuitable_platforms_have_a_reason(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools, link: Link
) -> None:
    refused = open_pool(platform(link), shim, settings, torch, emit=lambda _: None)
    assert isinstance(refused, PoolUnavailable)
    assert f"a test of {link.value}" in refused.reason
    assert torch.created == []


def test_without_the_shim_pools_are_unavailable(
    settings: PoolSettings, torch: FakeTorchPools
) -> None:
    missing = MissingShim("no compiler")
    refused = open_pool(platform(Link.MANAGED), missing, settings, torch, emit=lambda _: None)
    assert refused == PoolUnavailable("no compiler")


def test_without_a_driver_library_pools_are_unavailable(shim: Shim, torch: FakeTorchPools) -> None:
    settings = PoolSettings(cap_bytes=1, driver_library="libnowhere.so.1")
    refused = open_pool(platform(Link.MANAGED), shim, settings, torch, emit=lambda _: None)
    assert isinstance(refused, PoolUnavailable)
    assert "libnowhere.so.1" in refused.reason


def test_the_slot_is_released_if_torch_refuses(shim: Shim, settings: PoolSettings) -> None:
    class Refusing(FakeTorchPools):
        def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
            raise RuntimeError(f"slot {slot}")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="slot 0"):
            open_managed_pool(shim, settings, Refusing())


def test_a_cap_of_zero_is_a_config_error(
    shim: Shim, settings: PoolSettings, torch: FakeTorchPools
) -> None:
    with pytest.raises(ConfigError, match="is 0 bytes, but it must be above 0"):
        open_pool(
            platform(Link.MANAGED), shim, replace(settings, cap_bytes=0), torch, lambda _: None
        )
