"""The simulated driver: residency, traffic, error codes and time."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from fakes.simulated_driver import PageState, PageTable, SimulatedDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.errors import RunFailedError
from gracetune.memory.driver import HOST, Advice, CudaCode, PointerKind, RangeState
from gracetune.memory.platform import DeviceSpec, Rates
from gracetune.plan.machines import MACHINES

PAGE = 4096
MIB = 1024**2
GB = 1e9
RATES = Rates(
    copy_in=50 * GB,
    copy_out=40 * GB,
    prefetch_in=45 * GB,
    prefetch_out=10 * GB,
    fault=5 * GB,
    read_in_place=36 * GB,
    device=4000 * GB,
    host=100 * GB,
    both_ways_share=0.5,
    copy_call_s=6e-6,
    prefetch_call_s=18e-6,
    prefetch_blocking_share=0.7,
)
MANAGED = {"managed_memory": 1, "concurrent_managed_access": 1, "async_engine_count": 3}


def simulated(
    device_mib: int = 64,
    host_mib: int = 256,
    attributes: Mapping[str, int] = MANAGED,
    devices: int = 1,
    failing: Mapping[str, int] | None = None,
) -> SimulatedDriver:
    spec = DeviceSpec(device_mib * MIB, attributes, RATES)
    return SimulatedDriver([spec] * devices, host_mib * MIB, PAGE, failing)


def managed(driver: SimulatedDriver, nbytes: int, at: int | None = HOST) -> int:
    code, pointer = driver.allocate_managed(nbytes)
    assert code == CudaCode.SUCCESS
    if at is not None:
        driver.touch(pointer, nbytes, at, write=True)
    return pointer


# Residency.


def test_pages_appear_where_they_are_first_touched() -> None:
    driver = simulated()
    pointer = managed(driver, 8 * MIB, at=None)
    assert driver.residency(pointer, 8 * MIB) == {}
    assert driver.memory_info(0) == (64 * MIB, 64 * MIB)
    driver.touch(pointer, 2 * MIB, 0)
    driver.touch(pointer + 2 * MIB, MIB, HOST)
    assert driver.residency(pointer, 8 * MIB) == {0: 2 * MIB, HOST: MIB}
    assert driver.memory_info(0) == (62 * MIB, 64 * MIB)
    assert driver.traffic.faulted_pages == 0


def test_a_prefetch_moves_pages_and_counts_only_those_it_moved() -> None:
    driver = simulated()
    pointer = managed(driver, 8 * MIB)
    assert driver.prefetch(pointer, 4 * MIB, 0, 0) == CudaCode.SUCCESS
    assert driver.residency(pointer, 8 * MIB) == {0: 4 * MIB, HOST: 4 * MIB}
    driver.prefetch(pointer, 8 * MIB, 0, 0)
    assert driver.traffic.prefetched.to_device == 8 * MIB
    driver.prefetch(pointer, MIB, HOST, 0)
    assert driver.traffic.prefetched.to_host == MIB
    assert driver.traffic.faulted_pages == 0


def test_the_driver_rounds_outwards_to_pages() -> None:
    driver = simulated()
    pointer = managed(driver, 8 * PAGE)
    driver.prefetch(pointer + PAGE + 1, PAGE, 0, 0)
    assert driver.residency(pointer, 8 * PAGE) == {0: 2 * PAGE, HOST: 6 * PAGE}


def test_a_kernel_that_touches_host_pages_faults_them_in() -> None:
    driver = simulated()
    pointer = managed(driver, 8 * MIB)
    driver.touch(pointer, 8 * MIB, 0)
    assert driver.traffic.faulted.to_device == 8 * MIB
    assert driver.traffic.faulted_pages == 8 * MIB // PAGE
    driver.touch(pointer, 8 * MIB, HOST)
    assert driver.traffic.faulted.to_host == 8 * MIB


def test_preferred_on_the_host_and_accessed_by_the_device_is_read_in_place() -> None:
    driver = simulated()
    pointer = managed(driver, 8 * MIB)
    driver.advise(pointer, 8 * MIB, Advice.SET_PREFERRED_LOCATION, HOST)
    driver.advise(pointer, 8 * MIB, Advice.SET_ACCESSED_BY, 0)
    driver.touch(pointer, 8 * MIB, 0)
    assert driver.residency(pointer, 8 * MIB) == {HOST: 8 * MIB}
    assert (driver.traffic.read_in_place, driver.traffic.faulted_pages) == (8 * MIB, 0)


def test_a_host_with_direct_access_reads_device_pages_in_place() -> None:
    driver = simulated(attributes={**MANAGED, "direct_managed_mem_access_from_host": 1})
    pointer = managed(driver, 8 * MIB, at=0)
    driver.touch(pointer, 8 * MIB, HOST)
    assert driver.residency(pointer, 8 * MIB) == {0: 8 * MIB}
    assert driver.traffic.read_in_place == 8 * MIB


def test_read_mostly_pages_have_copies_until_someone_writes() -> None:
    driver = simulated()
    pointer = managed(driver, 8 * MIB)
    driver.advise(pointer, 8 * MIB, Advice.SET_READ_MOSTLY, 0)
    driver.touch(pointer, 8 * MIB, 0)
    assert driver.residency(pointer, 8 * MIB) == {0: 8 * MIB, HOST: 8 * MIB}
    driver.touch(pointer, MIB, HOST, write=True)
    assert driver.residency(pointer, 8 * MIB) == {0: 7 * MIB, HOST: 8 * MIB}
    driver.advise(pointer, 8 * MIB, Advice.UNSET_READ_MOSTLY, 0)
    assert driver.residency(pointer, 8 * MIB) == {0: 7 * MIB, HOST: MIB}


def test_copies_of_read_mostly_pages_are_dropped_where_they_are_not_preferred() -> None:
    """Without a transfer to the host, whose copy has stayed valid."""
    driver = simulated()
    pointer = managed(driver, 8 * MIB)
    driver.advise(pointer, 8 * MIB, Advice.SET_PREFERRED_LOCATION, HOST)
    driver.advise(pointer, 8 * MIB, Advice.SET_ACCESSED_BY, 0)
    driver.advise(pointer, 4 * MIB, Advice.SET_READ_MOSTLY, 0)
    driver.prefetch(pointer, 2 * MIB, 0, 0)
    driver.touch(pointer, 8 * MIB, 0)
    assert driver.residency(pointer, 8 * MIB) == {0: 4 * MIB, HOST: 8 * MIB}
    assert driver.traffic.faulted.to_device == 2 * MIB, "it was not prefetched"
    assert driver.traffic.read_in_place == 4 * MIB, "it is not read-mostly"
    driver.advise(pointer, 4 * MIB, Advice.UNSET_READ_MOSTLY, 0)
    assert driver.residency(pointer, 8 * MIB) == {HOST: 8 * MIB}
    assert driver.traffic.prefetched.to_host == driver.traffic.evicted == 0
    driver.touch(pointer, 8 * MIB, 0)
    assert driver.traffic.read_in_place == 12 * MIB


def test_pages_go_from_one_device_to_another() -> None:
    driver = simulated(devices=2)
    pointer = managed(driver, 8 * MIB, at=0)
    driver.prefetch(pointer, 8 * MIB, 1, 0)
    assert driver.residency(pointer, 8 * MIB) == {1: 8 * MIB}
    assert driver.memory_info(0)[0] == 64 * MIB


# Pressure.


def test_the_longest_unused_pages_are_evicted_first() -> None:
    driver = simulated(device_mib=16)
    old, young = managed(driver, 8 * MIB), managed(driver, 8 * MIB)
    driver.prefetch(young, 8 * MIB, 0, 0)
    driver.prefetch(old, 8 * MIB, 0, 0)
    driver.touch(young, 8 * MIB, 0)
    third = managed(driver, 4 * MIB)
    driver.prefetch(third, 4 * MIB, 0, 0)
    assert driver.residency(old, 8 * MIB) == {0: 4 * MIB, HOST: 4 * MIB}
    assert driver.residency(young, 8 * MIB) == {0: 8 * MIB}
    assert driver.traffic.evicted == 4 * MIB
    assert driver.memory_info(0)[0] == 0


def test_discarded_pages_are_neither_evicted_nor_faulted() -> None:
    driver = simulated(device_mib=16)
    dead = managed(driver, 16 * MIB, at=0)
    assert driver.discard(dead, 16 * MIB, 0) == CudaCode.SUCCESS
    assert driver.traffic.discarded == 16 * MIB
    assert driver.memory_info(0)[0] == 16 * MIB
    managed(driver, 16 * MIB, at=0)
    driver.touch(dead, 16 * MIB, HOST)
    assert (driver.traffic.evicted, driver.traffic.faulted_pages) == (0, 0)


def test_a_discard_spares_pages_it_covers_in_part() -> None:
    driver = simulated()
    pointer = managed(driver, 4 * PAGE)
    driver.discard(pointer + 1, 3 * PAGE, 0)
    assert driver.residency(pointer, 4 * PAGE) == {HOST: 2 * PAGE}


def test_cycling_through_more_than_the_device_evicts_every_time() -> None:
    driver = simulated(device_mib=16)
    pointer = managed(driver, 24 * MIB)
    for _ in range(3):
        driver.touch(pointer, 24 * MIB, 0)
    assert driver.traffic.faulted.to_device == 3 * 24 * MIB
    assert driver.residency(pointer, 24 * MIB) == {0: 16 * MIB, HOST: 8 * MIB}


def test_a_prefetch_of_more_than_the_device_moves_what_fits() -> None:
    driver = simulated(device_mib=16)
    pointer = managed(driver, 24 * MIB)
    assert driver.prefetch(pointer, 24 * MIB, 0, 0) == CudaCode.SUCCESS
    assert driver.residency(pointer, 24 * MIB) == {0: 16 * MIB, HOST: 8 * MIB}
    assert (driver.traffic.prefetched.to_device, driver.traffic.evicted) == (16 * MIB, 0)


def test_device_memory_takes_the_place_of_managed_pages() -> None:
    driver = simulated(device_mib=16)
    pointer = managed(driver, 16 * MIB, at=0)
    code, fixed = driver.allocate_device(12 * MIB, 0)
    assert code == CudaCode.SUCCESS
    assert driver.pointer_kind(fixed) is PointerKind.DEVICE
    assert driver.residency(pointer, 16 * MIB) == {0: 4 * MIB, HOST: 12 * MIB}
    assert driver.allocate_device(5 * MIB, 0) == (CudaCode.OUT_OF_MEMORY, 0)
    assert driver.free(fixed) == CudaCode.SUCCESS


def test_where_device_memory_is_full_a_kernel_reads_the_host() -> None:
    driver = simulated(device_mib=16)
    driver.allocate_device(16 * MIB, 0)
    there, fresh = managed(driver, MIB), managed(driver, MIB, at=None)
    driver.touch(there, MIB, 0)
    driver.touch(fresh, MIB, 0)
    assert driver.residency(there, MIB) == driver.residency(fresh, MIB) == {HOST: MIB}
    assert driver.traffic.read_in_place == 2 * MIB


def test_a_full_host_ends_the_simulation_with_the_numbers() -> None:
    driver = simulated(device_mib=16, host_mib=16)
    driver.allocate_pinned(8 * MIB)
    managed(driver, 16 * MIB, at=0)
    with pytest.raises(RunFailedError, match=r"more are needed, 0 B of 16\.0 MiB are free"):
        driver.allocate_device(16 * MIB, 0)


def test_managed_memory_is_limited_to_host_and_device() -> None:
    driver = simulated(device_mib=16, host_mib=16)
    assert driver.allocate_managed(33 * MIB) == (CudaCode.OUT_OF_MEMORY, 0)
    assert driver.allocate_managed(32 * MIB)[0] == CudaCode.SUCCESS
    assert driver.allocate_managed(1) == (CudaCode.OUT_OF_MEMORY, 0)
    assert driver.allocate_pinned(17 * MIB) == (CudaCode.OUT_OF_MEMORY, 0)


def test_freeing_everything_returns_all_memory() -> None:
    driver = simulated()
    pointers = [managed(driver, MIB, at) for at in (HOST, 0, None)]
    pointers.append(driver.allocate_pinned(MIB)[1])
    pointers.append(driver.allocate_device(MIB, 0)[1])
    assert [driver.free(pointer) for pointer in pointers] == [CudaCode.SUCCESS] * 5
    assert driver.memory_info(0) == (64 * MIB, 64 * MIB)
    assert driver.allocate_pinned(256 * MIB)[0] == CudaCode.SUCCESS
    assert driver.free(pointers[0]) == CudaCode.INVALID_VALUE
    assert driver.pointer_kind(pointers[0]) is PointerKind.UNKNOWN


# Codes.


def test_without_concurrent_access_hints_are_refused_as_cuda_refuses_them() -> None:
    driver = simulated(attributes={"managed_memory": 1, "concurrent_managed_access": 0})
    _, pointer = driver.allocate_managed(MIB)
    assert driver.prefetch(pointer, MIB, 0, 0) == CudaCode.INVALID_DEVICE
    assert driver.prefetch(pointer, MIB, HOST, 0) == CudaCode.INVALID_DEVICE
    assert driver.advise(pointer, MIB, Advice.SET_READ_MOSTLY, 0) == CudaCode.INVALID_DEVICE
    assert driver.discard(pointer, MIB, 0) == CudaCode.INVALID_DEVICE


def test_devices_without_managed_memory_cannot_allocate_it() -> None:
    assert simulated(attributes={}).allocate_managed(MIB) == (CudaCode.NOT_SUPPORTED, 0)


def test_ranges_beyond_their_allocation_are_refused() -> None:
    driver = simulated()
    pointer = managed(driver, MIB)
    assert driver.prefetch(pointer, MIB + 1, 0, 0) == CudaCode.INVALID_VALUE
    assert driver.prefetch(pointer, 0, 0, 0) == CudaCode.INVALID_VALUE
    assert driver.prefetch(pointer - 1, 2, 0, 0) == CudaCode.INVALID_VALUE
    assert driver.discard(pointer, 2 * MIB, 0) == CudaCode.INVALID_VALUE
    assert driver.free(pointer + PAGE) == CudaCode.INVALID_VALUE
    assert driver.range_state(pointer, 2 * MIB) == RangeState(None, None, False, ())


@pytest.mark.parametrize(
    "verb", ["allocate_managed", "allocate_pinned", "free", "advise", "prefetch", "discard"]
)
def test_any_call_can_be_made_to_fail(verb: str) -> None:
    failing: dict[str, int] = {}
    driver = simulated(failing=failing)
    pointer = managed(driver, MIB)
    failing[verb] = 999
    calls = {
        "allocate_managed": lambda: driver.allocate_managed(MIB)[0],
        "allocate_pinned": lambda: driver.allocate_pinned(MIB)[0],
        "free": lambda: driver.free(pointer),
        "advise": lambda: driver.advise(pointer, MIB, Advice.SET_READ_MOSTLY, 0),
        "prefetch": lambda: driver.prefetch(pointer, MIB, 0, 0),
        "discard": lambda: driver.discard(pointer, MIB, 0),
    }
    assert calls.pop(verb)() == 999
    assert driver.residency(pointer, MIB) == {HOST: MIB}
    assert all(call() == CudaCode.SUCCESS for name, call in calls.items() if name != "free")


# One memory for both.


def test_on_an_integrated_device_nothing_moves() -> None:
    driver = simulated(attributes={**MANAGED, "integrated": 1})
    pointer = managed(driver, 8 * MIB)
    driver.prefetch(pointer, 8 * MIB, 0, 0)
    driver.touch(pointer, 8 * MIB, 0)
    assert driver.residency(pointer, 8 * MIB) == {HOST: 8 * MIB}
    assert driver.traffic.prefetched.to_device == driver.traffic.faulted.to_device == 0
    assert driver.range_state(pointer, 8 * MIB).last_prefetch == 0
    assert driver.memory_info(0) == (248 * MIB, 256 * MIB)
    assert driver.allocate_device(249 * MIB, 0) == (CudaCode.OUT_OF_MEMORY, 0)


# The clock.


def test_a_prefetch_blocks_its_caller_for_part_of_the_transfer() -> None:
    driver = simulated()
    pointer = managed(driver, 45 * MIB)
    began, seconds = driver.time.now_s, 45 * MIB / (45 * GB)
    driver.prefetch(pointer, 45 * MIB, 0, stream=1)
    assert driver.time.now_s - began == pytest.approx(18e-6 + 0.7 * seconds)
    assert driver.synchronize(1) - began == pytest.approx(18e-6 + seconds)


def test_copies_overlap_with_kernels_of_another_stream() -> None:
    driver = simulated()
    driver.copy(50_000_000, HOST, 0, stream=1)
    driver.compute(1e-3, 0, stream=2)
    assert driver.synchronize() == pytest.approx(1e-3 + 6e-6)
    assert driver.traffic.copied.to_device == 50_000_000


def test_one_stream_does_one_thing_at_a_time_and_events_order_two() -> None:
    driver = simulated()
    driver.copy(50_000_000, HOST, 0, stream=1)
    driver.compute(1e-3, 0, stream=1)
    assert driver.synchronize() == pytest.approx(2e-3 + 6e-6)
    driver = simulated()
    driver.copy(50_000_000, HOST, 0, stream=1)
    driver.wait(2, 1)
    driver.compute(1e-3, 0, stream=2)
    assert driver.synchronize() == pytest.approx(2e-3 + 6e-6)


def test_two_copies_in_one_direction_queue_up() -> None:
    driver = simulated()
    driver.copy(50_000_000, HOST, 0, stream=1)
    driver.copy(50_000_000, HOST, 0, stream=2)
    assert driver.synchronize() == pytest.approx(2e-3 + 6e-6)


def test_both_directions_at_once_slow_each_other() -> None:
    driver = simulated()
    driver.copy(50_000_000, HOST, 0, stream=1)
    driver.copy(20_000_000, 0, HOST, stream=2)
    # 0.5 ms of work at half speed: done just as the first copy ends.
    assert driver.synchronize(2) == pytest.approx(1e-3 + 12e-6, rel=1e-2)
    assert driver.traffic.copied.to_host == 20_000_000


def test_a_transfer_is_slowed_only_while_the_other_direction_is_busy() -> None:
    driver = simulated()
    driver.copy(5_000_000, HOST, 0, stream=1)
    driver.copy(40_000_000, 0, HOST, stream=2)
    # 0.1 ms at half speed does 0.05 of 1 ms.
    assert driver.synchronize(2) == pytest.approx(1.05e-3, rel=2e-2)


def test_a_single_copy_engine_does_one_direction_at_a_time() -> None:
    driver = simulated(attributes={**MANAGED, "async_engine_count": 1})
    driver.copy(50_000_000, HOST, 0, stream=1)
    driver.copy(40_000_000, 0, HOST, stream=2)
    assert driver.synchronize() == pytest.approx(2e-3, rel=1e-2)


def test_eviction_uses_the_outgoing_copy_engine() -> None:
    driver = simulated(device_mib=16)
    managed(driver, 16 * MIB, at=0)
    began = driver.synchronize()
    driver.allocate_device(16 * MIB, 0)
    assert driver.synchronize() - began == pytest.approx(16 * MIB / (10 * GB))


def test_the_cpu_waits_for_its_stream_before_it_reads() -> None:
    driver = simulated()
    pointer = managed(driver, MIB, at=None)
    driver.compute(1.0, 0, stream=3)
    driver.touch(pointer, MIB, HOST, stream=3)
    assert driver.time.now_s == pytest.approx(1.0 + MIB / (100 * GB))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["in", "out", "read", "write", "cpu", "mostly", "drop", "fixed"]),
            st.integers(0, 23),
            st.integers(1, 24),
        ),
        max_size=40,
    )
)
def test_random_operations_neither_create_nor_lose_bytes(trace: list[tuple[str, int, int]]) -> None:
    """Two ranges of 24 pages on a device of 20 pages: used bytes equal resident bytes, and fit."""
    machine = MACHINES["h200-pcie"]
    spec = DeviceSpec(20 * PAGE, machine.attributes, machine.rates())
    driver = SimulatedDriver([spec], 200 * PAGE, PAGE)
    bases = [driver.allocate_managed(24 * PAGE)[1] for _ in range(2)]
    fixed: list[int] = []
    for number, (verb, page, count) in enumerate(trace):
        start = bases[number % 2] + page * PAGE
        nbytes = min(count, 24 - page) * PAGE
        if verb == "in":
            driver.prefetch(start, nbytes, 0, 1)
        elif verb == "out":
            driver.prefetch(start, nbytes, HOST, 1)
        elif verb in ("read", "write"):
            driver.touch(start, nbytes, 0, 1, write=verb == "write")
        elif verb == "cpu":
            driver.touch(start, nbytes, HOST, 1, write=True)
        elif verb == "mostly":
            advice = Advice.SET_READ_MOSTLY if count % 2 else Advice.UNSET_READ_MOSTLY
            driver.advise(start, nbytes, advice, 0)
        elif verb == "drop":
            driver.discard(start, nbytes, 1)
        elif fixed:
            driver.free(fixed.pop())
        else:
            code, pointer = driver.allocate_device(5 * PAGE, 0)
            assert code == CudaCode.SUCCESS
            fixed.append(pointer)
        resident = sum(driver.residency(base, 24 * PAGE).get(0, 0) for base in bases)
        free, total = driver.memory_info(0)
        assert total - free == resident + len(fixed) * 5 * PAGE
        assert 0 <= free <= total
    for pointer in [*bases, *fixed]:
        assert driver.free(pointer) == CudaCode.SUCCESS
    assert driver.memory_info(0) == (20 * PAGE, 20 * PAGE)
    assert driver.allocate_pinned(200 * PAGE)[0] == CudaCode.SUCCESS


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 2)), max_size=30))
def test_runs_of_pages_behave_like_a_list_of_pages(changes: list[tuple[int, int, int]]) -> None:
    table, plain = PageTable(40), [PageState()] * 40
    for first, last, place in changes:
        state = PageState(locations=frozenset({place}))
        table.update(first, last, lambda _, state=state: state)
        plain[first:last] = [state] * len(plain[first:last])
        runs = list(table.runs())
        assert [run.state for run in runs for _ in range(run.first, run.last)] == plain
        assert all(one.state != two.state for one, two in pairwise(runs))
        cut = list(table.runs(first, last))
        assert [run.state for run in cut for _ in range(run.first, run.last)] == plain[first:last]
