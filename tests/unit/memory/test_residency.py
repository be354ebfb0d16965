"""Whatever a program does, used bytes are resident bytes, and they fit."""

from fakes.simulated_driver import SimulatedDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.memory.driver import HOST, Advice, CudaCode
from gracetune.memory.platform import DeviceSpec
from gracetune.plan.machines import MACHINES

PAGE = 4096


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
def test_no_trace_makes_or_loses_bytes(trace: list[tuple[str, int, int]]) -> None:
    """Two ranges of 24 pages on a device of 20: used bytes are resident bytes, and fit."""
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
