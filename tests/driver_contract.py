"""The contract of `Driver`, checked for the simulated driver and, in the GPU tests, for CUDA."""

from collections.abc import Callable

from gracetune.memory.driver import HOST, Advice, CudaCode, Driver, PointerKind, RangeState

MIB = 1024**2
NO_STATE = RangeState(preferred=None, last_prefetch=None, read_mostly=False, accessed_by=())

Check = Callable[[Driver], None]


def reports_memory(driver: Driver) -> None:
    free, total = driver.memory_info(0)
    assert 0 < free <= total


def reports_attributes_by_name(driver: Driver) -> None:
    assert driver.attribute("concurrent_managed_access", 0) == 1
    assert driver.attribute("managed_memory", 0) == 1
    assert driver.attribute("no_such_attribute", 0) is None


def distinguishes_kinds_of_memory(driver: Driver) -> None:
    code, managed = driver.allocate_managed(4 * MIB)
    assert (code, driver.pointer_kind(managed)) == (CudaCode.SUCCESS, PointerKind.MANAGED)
    assert driver.pointer_kind(managed + 4 * MIB - 1) is PointerKind.MANAGED
    code, pinned = driver.allocate_pinned(MIB)
    assert (code, driver.pointer_kind(pinned)) == (CudaCode.SUCCESS, PointerKind.HOST)
    assert driver.pointer_kind(4096) is PointerKind.UNKNOWN
    assert driver.free(managed) == driver.free(pinned) == CudaCode.SUCCESS


def refuses_an_allocation_of_zero_bytes(driver: Driver) -> None:
    assert driver.allocate_managed(0) == (CudaCode.INVALID_VALUE, 0)


def refuses_to_free_foreign_pointers(driver: Driver) -> None:
    assert driver.free(4096) == CudaCode.INVALID_VALUE


def stores_the_preferred_location(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    assert driver.range_state(pointer, 4 * MIB) == NO_STATE
    for location in (HOST, 0):
        advised = driver.advise(pointer, 4 * MIB, Advice.SET_PREFERRED_LOCATION, location)
        assert advised == CudaCode.SUCCESS
        assert driver.range_state(pointer, 4 * MIB).preferred == location
    assert driver.advise(pointer, 4 * MIB, Advice.UNSET_PREFERRED_LOCATION, 0) == CudaCode.SUCCESS
    assert driver.range_state(pointer, 4 * MIB) == NO_STATE
    driver.free(pointer)


def stores_accessed_by_and_read_mostly(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    assert driver.advise(pointer, 4 * MIB, Advice.SET_ACCESSED_BY, 0) == CudaCode.SUCCESS
    assert driver.advise(pointer, 4 * MIB, Advice.SET_READ_MOSTLY, 0) == CudaCode.SUCCESS
    state = driver.range_state(pointer, 4 * MIB)
    assert (state.accessed_by, state.read_mostly) == ((0,), True)
    assert driver.advise(pointer, 4 * MIB, Advice.UNSET_ACCESSED_BY, 0) == CudaCode.SUCCESS
    assert driver.advise(pointer, 4 * MIB, Advice.UNSET_READ_MOSTLY, 0) == CudaCode.SUCCESS
    assert driver.range_state(pointer, 4 * MIB) == NO_STATE
    driver.free(pointer)


def stores_the_last_prefetch(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    for location in (0, HOST):
        assert driver.prefetch(pointer, 4 * MIB, location, 0) == CudaCode.SUCCESS
        assert driver.range_state(pointer, 4 * MIB).last_prefetch == location
    driver.free(pointer)


def reports_nothing_for_a_range_with_different_states(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(8 * MIB)
    driver.advise(pointer, 4 * MIB, Advice.SET_PREFERRED_LOCATION, HOST)
    driver.prefetch(pointer, 4 * MIB, HOST, 0)
    assert driver.range_state(pointer, 4 * MIB).preferred == HOST
    assert driver.range_state(pointer + 4 * MIB, 4 * MIB) == NO_STATE
    assert driver.range_state(pointer, 8 * MIB) == NO_STATE
    driver.free(pointer)


def refuses_missing_devices(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(MIB)
    advised = driver.advise(pointer, MIB, Advice.SET_PREFERRED_LOCATION, 63)
    assert advised == driver.prefetch(pointer, MIB, 63, 0) == CudaCode.INVALID_DEVICE
    driver.free(pointer)


def refuses_hints_for_memory_that_is_not_managed(driver: Driver) -> None:
    _, pinned = driver.allocate_pinned(MIB)
    assert driver.advise(pinned, MIB, Advice.SET_READ_MOSTLY, 0) != CudaCode.SUCCESS
    assert driver.range_state(pinned, MIB) == NO_STATE
    driver.free(pinned)


def discards_or_returns_not_supported(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    driver.prefetch(pointer, 4 * MIB, 0, 0)
    assert driver.discard(pointer, 4 * MIB, 0) in (CudaCode.SUCCESS, CudaCode.NOT_SUPPORTED)
    assert driver.prefetch(pointer, 4 * MIB, 0, 0) == CudaCode.SUCCESS
    driver.free(pointer)


CHECKS: tuple[Check, ...] = (
    reports_memory,
    reports_attributes_by_name,
    distinguishes_kinds_of_memory,
    refuses_an_allocation_of_zero_bytes,
    refuses_to_free_foreign_pointers,
    stores_the_preferred_location,
    stores_accessed_by_and_read_mostly,
    stores_the_last_prefetch,
    reports_nothing_for_a_range_with_different_states,
    refuses_missing_devices,
    refuses_hints_for_memory_that_is_not_managed,
    discards_or_returns_not_supported,
)
