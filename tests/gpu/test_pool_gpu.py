"""The driver contract and managed pools on a GPU, with less than a gigabyte."""

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from driver_contract import CHECKS, Check

from gracetune.memory.driver import HOST, CudaCode, CudaDriver, PointerKind, open_cuda_driver
from gracetune.memory.managed_pool import (
    ManagedPool,
    PoolCloseResult,
    PoolError,
    PoolSettings,
    TorchMemPools,
    open_pool,
)
from gracetune.memory.platform import Platform, open_machine
from gracetune.memory.shim import LIBRARY, AccessPattern, Shim, build_shim

pytestmark = pytest.mark.gpu
MIB = 1024**2

PoolOpener = Callable[..., ManagedPool]


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    return open_cuda_driver()


@pytest.fixture(scope="module")
def platform() -> Platform:
    torch.zeros(1, device="cuda")
    return open_machine().platform


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(build_shim(tmp_path_factory.mktemp("shim") / LIBRARY))


@pytest.fixture
def open_managed_pool(platform: Platform, shim: Shim) -> Iterator[PoolOpener]:
    pools: list[ManagedPool] = []

    def make(
        cap_mib: int = 512,
        pattern: AccessPattern = AccessPattern.GPU_FIRST,
        no_split: bool = False,
    ) -> ManagedPool:
        settings = PoolSettings(cap_mib * MIB, pattern, no_split)
        pool = open_pool(platform, shim, settings, TorchMemPools(), emit=lambda _: None)
        assert isinstance(pool, ManagedPool), pool.reason
        pools.append(pool)
        return pool

    yield make
    gc.collect()
    for pool in pools:
        assert pool.close(), "a tensor outlived its test"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_driver_contract_holds_over_cuda(driver: CudaDriver, check: Check) -> None:
    check(driver)


def test_a_thread_that_never_used_cuda_can_use_the_driver(driver: CudaDriver) -> None:
    codes: list[int] = []

    def use() -> None:
        code, pointer = driver.allocate_managed(MIB)
        codes.extend((code, driver.prefetch(pointer, MIB, 0, 0), driver.free(pointer)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert codes == [CudaCode.SUCCESS] * 3


def test_the_platform_is_detected_with_reasons(platform: Platform) -> None:
    assert platform.device_bytes == torch.cuda.mem_get_info(0)[1]
    assert platform.has_managed
    assert all(platform.reasons.values())


@pytest.mark.parametrize("pattern", list(AccessPattern))
def test_tensors_of_a_pool_are_managed_and_placed(
    open_managed_pool: PoolOpener, driver: CudaDriver, pattern: AccessPattern
) -> None:
    pool = open_managed_pool(pattern=pattern)
    with pool.allocating():
        tensor = torch.full((32 * MIB,), 3, dtype=torch.uint8, device="cuda")
    outside = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    assert driver.pointer_kind(tensor.data_ptr()) is PointerKind.MANAGED
    assert driver.pointer_kind(outside.data_ptr()) is PointerKind.DEVICE
    assert int(tensor.sum(dtype=torch.int64)) == 3 * 32 * MIB
    state = driver.range_state(tensor.data_ptr(), 32 * MIB)
    expected = {AccessPattern.GPU_FIRST: 0, AccessPattern.CPU_FIRST: HOST}.get(pattern)
    assert state.preferred == expected
    assert state.accessed_by == (0,)
    counters = pool.counters()
    assert (counters.live_bytes, counters.failed_hints) == (32 * MIB, 0)
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] >= 32 * MIB


def test_exceeding_the_cap_raises_torchs_out_of_memory_error(open_managed_pool: PoolOpener) -> None:
    pool = open_managed_pool(cap_mib=64)
    with pool.allocating():
        first = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert pool.counters().denied >= 1
    assert pool.counters().live_bytes == 64 * MIB
    del first
    with pool.allocating():
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.counters().peak_bytes == 64 * MIB


def test_close_frees_everything_once_no_tensor_is_alive(open_managed_pool: PoolOpener) -> None:
    pool = open_managed_pool()
    with pool.allocating():
        kept = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
        dropped = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    del dropped
    released = pool.close()
    assert released.held_bytes == 32 * MIB
    assert released.freed_bytes == 64 * MIB
    assert int(kept.sum(dtype=torch.int64)) == 32 * MIB
    with pytest.raises(PoolError, match="closed"), pool.allocating():
        pass
    del kept
    assert pool.close() == PoolCloseResult(freed_bytes=32 * MIB, held_bytes=0)


def test_nested_pools_keep_their_own_tensors(open_managed_pool: PoolOpener) -> None:
    outer, inner = open_managed_pool(), open_managed_pool(pattern=AccessPattern.CPU_FIRST)
    with outer.allocating():
        first = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        with inner.allocating():
            nested = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        second = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert outer.counters().live_bytes == 64 * MIB
    assert inner.counters().live_bytes == 64 * MIB
    del first, nested, second


def test_threads_allocate_from_their_own_pools(open_managed_pool: PoolOpener) -> None:
    pools = [open_managed_pool() for _ in range(4)]
    tensors: list[torch.Tensor] = []
    barrier = threading.Barrier(4)

    def use(pool: ManagedPool) -> None:
        barrier.wait(30)
        with pool.allocating():
            tensors.append(torch.ones(32 * MIB, dtype=torch.uint8, device="cuda"))

    threads = [threading.Thread(target=use, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [pool.counters().live_bytes for pool in pools] == [32 * MIB] * 4
    assert all(int(tensor.sum(dtype=torch.int64)) == 32 * MIB for tensor in tensors)
    tensors.clear()


def test_with_no_split_each_tensor_has_its_own_segment(open_managed_pool: PoolOpener) -> None:
    pool = open_managed_pool(no_split=True)
    with pool.allocating():
        small = [torch.empty(128 * 1024, dtype=torch.uint8, device="cuda") for _ in range(3)]
    assert pool.counters().live_segments == 3
    del small


def test_a_pool_is_refused_while_a_graph_is_captured(open_managed_pool: PoolOpener) -> None:
    pool = open_managed_pool()
    static = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.add_(1)
        with pytest.raises(PoolError, match="graph capture"), pool.allocating():
            pass
    graph.replay()
    torch.cuda.synchronize()
    assert static.tolist() == [1.0] * 16


def test_training_in_a_pool_gives_the_same_losses(open_managed_pool: PoolOpener) -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(64, 256, device="cuda")
        losses_by_step = []
        for _ in range(5):
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses_by_step.append(loss.item())
        return losses_by_step

    native = losses()
    pool = open_managed_pool()
    with torch.autograd.set_multithreading_enabled(False), pool.allocating():
        managed = losses()
    assert managed == native
    assert pool.counters().peak_bytes > 0
    gc.collect()
