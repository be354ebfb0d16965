"""Managed pools: the real shim over a fake driver, with torch's part played by a few lines."""

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
from gracetune.memory.platform import NO_GPU, Link, Platform
from gracetune.memory.pool import (
    MAX_OPEN_S,
    PoolError,
    PoolSettings,
    PoolCloseResult,
    ManagedPool,
    PoolUnavailable,
    open_pool,
)
from gracetune.memory.shim import LIBRARY, AccessPattern, MissingShim, Shim, build_shim

if TYPE_CHECKING:
    from gracetune.events.types import Notice

MIB = 1024**2


class Segments:
    """A pool's part of the cache: memory taken through the slot's two functions."""

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


class Handle:
    """What a MemPool is to us: while it lives, nothing cached is given back."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def __del__(self) -> None:
        self.segments.release()


class Tensorlike:
    """Memory that goes to the cache, not to the driver, when dropped."""

    def __init__(self, segments: Segments, pointer: int) -> None:
        self.drop = lambda: segments.cached.append(pointer)


class FewLinesOfTorch:
    """Routes `allocate` to the innermost open pool; frees only what no handle keeps."""

    def __init__(self) -> None:
        self.made: list[PoolSettings] = []
        self.devices: list[int] = []
        self.open: list[Segments] = []
        self.in_capture = False
        self.waited = 0
        self.known: list[tuple[Segments, weakref.ref[Handle]]] = []

    def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
        self.made.append(settings)
        self.devices.append(device)
        handle = Handle(Segments(library, slot))
        self.known.append((handle.segments, weakref.ref(handle)))
        return handle

    @contextmanager
    def use_pool(self, pool: object, device: int) -> Iterator[None]:
        assert isinstance(pool, Handle)
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
        self.waited += 1

    def empty_cache(self) -> None:
        for segments, handle in self.known:
            if handle() is None:
                segments.release()

    def allocate(self, nbytes: int) -> Tensorlike:
        segments = self.open[-1]
        pointer = segments.alloc(nbytes, 0, None)
        if pointer is None:
            raise MemoryError(nbytes)
        return Tensorlike(segments, pointer)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(build_shim(tmp_path_factory.mktemp("shim") / LIBRARY))


@pytest.fixture
def torch() -> FewLinesOfTorch:
    return FewLinesOfTorch()


@pytest.fixture
def settings(fake_libcuda: Callable[..., Path]) -> PoolSettings:
    path = fake_libcuda()
    ctypes.CDLL(str(path)).fake_set_current(0)
    return PoolSettings(cap_bytes=8 * MIB, driver_library=str(path))


def platform(link: Link) -> Platform:
    return replace(NO_GPU, link=link, device=0, reasons={"link": f"a test of {link.value}"})


def opened(shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch) -> ManagedPool:
    pool = open_pool(platform(Link.MANAGED), shim, settings, torch, emit=lambda _: None)
    assert isinstance(pool, ManagedPool)
    return pool


def test_tensors_inside_the_block_are_managed_and_counted(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    with pool.allocating():
        tensor = torch.allocate(2 * MIB)
    assert torch.open == []
    assert pool.counters().live_bytes == 2 * MIB
    assert pool.counters().hints == 3
    tensor.drop()
    assert pool.close() == PoolCloseResult(freed_bytes=2 * MIB, held_bytes=0)


def test_settings_reach_torch_and_the_shim(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    wanted = replace(settings, no_split=True, pattern=AccessPattern.BALANCED)
    pool = opened(shim, wanted, torch)
    with pool.allocating():
        torch.allocate(MIB).drop()
    assert torch.made == [wanted]
    assert pool.counters().hints == 1
    assert pool.close()


def test_past_the_cap_torch_sees_out_of_memory(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
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


def test_closing_reports_what_living_tensors_hold_and_finishes_later(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
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


def test_a_closed_pool_refuses_every_use(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    pool.close()
    with pytest.raises(PoolError, match="closed"), pool.allocating():
        pass
    with pytest.raises(PoolError, match="closed"):
        pool.counters()
    with pytest.raises(PoolError, match="closed"):
        pool.set_cap(1)


def test_closing_drops_the_last_reference_to_torchs_pool(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    with pool.allocating():
        pass
    assert torch.known[0][1]() is not None
    pool.close()
    assert torch.known[0][1]() is None
    assert torch.waited == 1


def test_an_open_pool_cannot_be_closed(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    with pool.allocating():
        with pytest.raises(PoolError, match="open in 1 place"):
            pool.close()
        with pool.allocating(), pytest.raises(PoolError, match="open in 2 place"):
            pool.close()
    assert pool.close()


def test_an_error_inside_the_block_leaves_the_pool_usable(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    with pytest.raises(ZeroDivisionError), pool.allocating():
        raise ZeroDivisionError
    assert pool.close()


def test_a_graph_being_captured_is_refused(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    torch.in_capture = True
    with pytest.raises(PoolError, match="captured"), pool.allocating():
        pass
    assert pool.close()


def test_a_pool_open_for_long_is_told_once(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    told: list[Notice] = []
    times = iter([0, MAX_OPEN_S, 10, 11 + MAX_OPEN_S, 20, 40 + MAX_OPEN_S])
    pool = open_pool(
        platform(Link.COHERENT), shim, settings, torch, told.append, clock=lambda: next(times)
    )
    assert isinstance(pool, ManagedPool)
    for expected in (0, 1, 1):
        with pool.allocating():
            pass
        assert len(told) == expected
    assert told[0].level == "warning"
    assert "not a loop" in told[0].text
    assert pool.close()


def test_threads_open_the_same_pool_at_once(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    pool = opened(shim, settings, torch)
    together = threading.Barrier(4)

    def use() -> None:
        with pool.allocating():
            together.wait(10)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together.broken is False
    assert pool.close()


@pytest.mark.parametrize("link", [Link.NONE, Link.COPY, Link.INTEGRATED])
def test_a_platform_without_use_for_a_pool_says_why(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch, link: Link
) -> None:
    refused = open_pool(platform(link), shim, settings, torch, emit=lambda _: None)
    assert isinstance(refused, PoolUnavailable)
    assert f"a test of {link.value}" in refused.reason
    assert torch.made == []


def test_a_missing_shim_makes_pools_unsupported(
    settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    missing = MissingShim("no compiler")
    refused = open_pool(platform(Link.MANAGED), missing, settings, torch, emit=lambda _: None)
    assert refused == PoolUnavailable("no compiler")


def test_a_driver_that_cannot_be_opened_makes_pools_unsupported(
    shim: Shim, torch: FewLinesOfTorch
) -> None:
    settings = PoolSettings(cap_bytes=1, driver_library="libnowhere.so.1")
    refused = open_pool(platform(Link.MANAGED), shim, settings, torch, emit=lambda _: None)
    assert isinstance(refused, PoolUnavailable)
    assert "libnowhere.so.1" in refused.reason


def test_a_pool_that_torch_refuses_leaves_no_slot_behind(
    shim: Shim, settings: PoolSettings
) -> None:
    class Refusing(FewLinesOfTorch):
        def make(self, library: Path, slot: int, device: int, settings: PoolSettings) -> object:
            raise RuntimeError(f"slot {slot}")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="slot 0"):
            opened(shim, settings, Refusing())


def test_a_cap_of_nothing_is_the_users_error(
    shim: Shim, settings: PoolSettings, torch: FewLinesOfTorch
) -> None:
    with pytest.raises(ConfigError, match="cap is 0 bytes"):
        open_pool(
            platform(Link.MANAGED), shim, replace(settings, cap_bytes=0), torch, lambda _: None
        )
