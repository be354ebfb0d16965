"""What every driver must do, whichever stands behind it; run over one by `check_driver`.

The GPU tests run the same list over CUDA, so nothing here asks for more than CUDA promises.
"""

from collections.abc import Callable

from gracetune.memory.driver import HOST, Advice, CudaCode, Driver, PointerKind, RangeState

MIB = 1024**2
NOTHING = RangeState(preferred=None, last_prefetch=None, read_mostly=False, accessed_by=())

Check = Callable[[Driver], None]


def knows_its_memory(driver: Driver) -> None:
    free, total = driver.memory_info(0)
    assert 0 < free <= total


def knows_attributes_by_name(driver: Driver) -> None:
    assert driver.attribute("concurrent_managed_access", 0) == 1
    assert driver.attribute("managed_memory", 0) == 1
    assert driver.attribute("no_such_attribute", 0) is None


def tells_kinds_of_memory_apart(driver: Driver) -> None:
    code, managed = driver.allocate_managed(4 * MIB)
    assert (code, driver.pointer_kind(managed)) == (CudaCode.SUCCESS, PointerKind.MANAGED)
    assert driver.pointer_kind(managed + 4 * MIB - 1) is PointerKind.MANAGED
    code, pinned = driver.allocate_pinned(MIB)
    assert (code, driver.pointer_kind(pinned)) == (CudaCode.SUCCESS, PointerKind.HOST)
    assert driver.pointer_kind(4096) is PointerKind.UNKNOWN
    assert driver.free(managed) == driver.free(pinned) == CudaCode.SUCCESS


def refuses_an_allocation_of_nothing(driver: Driver) -> None:
    assert driver.allocate_managed(0) == (CudaCode.INVALID_VALUE, 0)


def refuses_to_free_what_it_never_gave(driver: Driver) -> None:
    assert driver.free(4096) == CudaCode.INVALID_VALUE


def remembers_where_a_range_likes_to_be(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    assert driver.range_state(pointer, 4 * MIB) == NOTHING
    for place in (HOST, 0):
        advised = driver.advise(pointer, 4 * MIB, Advice.SET_PREFERRED_LOCATION, place)
        assert advised == CudaCode.SUCCESS
        assert driver.range_state(pointer, 4 * MIB).preferred == place
    assert driver.advise(pointer, 4 * MIB, Advice.UNSET_PREFERRED_LOCATION, 0) == CudaCode.SUCCESS
    assert driver.range_state(pointer, 4 * MIB) == NOTHING
    driver.free(pointer)


def remembers_who_reads_a_range(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    assert driver.advise(pointer, 4 * MIB, Advice.SET_ACCESSED_BY, 0) == CudaCode.SUCCESS
    assert driver.advise(pointer, 4 * MIB, Advice.SET_READ_MOSTLY, 0) == CudaCode.SUCCESS
    state = driver.range_state(pointer, 4 * MIB)
    assert (state.accessed_by, state.read_mostly) == ((0,), True)
    assert driver.advise(pointer, 4 * MIB, Advice.UNSET_ACCESSED_BY, 0) == CudaCode.SUCCESS
    assert driver.advise(pointer, 4 * MIB, Advice.UNSET_READ_MOSTLY, 0) == CudaCode.SUCCESS
    assert driver.range_state(pointer, 4 * MIB) == NOTHING
    driver.free(pointer)


def remembers_where_a_range_was_brought(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    for place in (0, HOST):
        assert driver.prefetch(pointer, 4 * MIB, place, 0) == CudaCode.SUCCESS
        assert driver.range_state(pointer, 4 * MIB).last_prefetch == place
    driver.free(pointer)


def answers_nothing_for_a_range_of_two_minds(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(8 * MIB)
    driver.advise(pointer, 4 * MIB, Advice.SET_PREFERRED_LOCATION, HOST)
    driver.prefetch(pointer, 4 * MIB, HOST, 0)
    assert driver.range_state(pointer, 4 * MIB).preferred == HOST
    assert driver.range_state(pointer + 4 * MIB, 4 * MIB) == NOTHING
    assert driver.range_state(pointer, 8 * MIB) == NOTHING
    driver.free(pointer)


def refuses_places_that_are_not_there(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(MIB)
    advised = driver.advise(pointer, MIB, Advice.SET_PREFERRED_LOCATION, 63)
    assert advised == driver.prefetch(pointer, MIB, 63, 0) == CudaCode.INVALID_DEVICE
    driver.free(pointer)


def refuses_hints_for_memory_that_is_not_managed(driver: Driver) -> None:
    _, pinned = driver.allocate_pinned(MIB)
    assert driver.advise(pinned, MIB, Advice.SET_READ_MOSTLY, 0) != CudaCode.SUCCESS
    assert driver.range_state(pinned, MIB) == NOTHING
    driver.free(pinned)


def discards_or_says_it_cannot(driver: Driver) -> None:
    _, pointer = driver.allocate_managed(4 * MIB)
    driver.prefetch(pointer, 4 * MIB, 0, 0)
    assert driver.discard(pointer, 4 * MIB, 0) in (CudaCode.SUCCESS, CudaCode.NOT_SUPPORTED)
    assert driver.prefetch(pointer, 4 * MIB, 0, 0) == CudaCode.SUCCESS
    driver.free(pointer)


CHECKS: tuple[Check, ...] = (
    knows_its_memory,
    knows_attributes_by_name,
    tells_kinds_of_memory_apart,
    refuses_an_allocation_of_nothing,
    refuses_to_free_what_it_never_gave,
    remembers_where_a_range_likes_to_be,
    remembers_who_reads_a_range,
    remembers_where_a_range_was_brought,
    answers_nothing_for_a_range_of_two_minds,
    refuses_places_that_are_not_there,
    refuses_hints_for_memory_that_is_not_managed,
    discards_or_says_it_cannot,
)
