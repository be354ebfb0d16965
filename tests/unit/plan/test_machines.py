"""Known machines are complete, have sources, and are detected as what they are."""

from dataclasses import fields

import pytest
from fakes.simulated_driver import SimulatedDriver

from gracetune.errors import ConfigError
from gracetune.memory.driver import HOST
from gracetune.memory.platform import HostFacts, Link, Platform, Rates, detect_platform
from gracetune.plan.machines import MACHINES, find_machine
from gracetune.units import GIB

NAMES = sorted(MACHINES)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_value_and_a_source(name: str) -> None:
    known = MACHINES[name]
    assert set(known.figures) == {field.name for field in fields(Rates)}
    for figure in (
        known.device_memory,
        known.host_memory,
        known.bf16_flops,
        *known.figures.values(),
    ):
        assert figure.value > 0
        assert len(figure.source) > 8


@pytest.mark.parametrize("name", NAMES)
def test_detection_agrees_with_the_machines_link(name: str) -> None:
    known = MACHINES[name]
    driver = SimulatedDriver([known.device()], known.host_bytes, known.page_bytes)
    host = HostFacts(known.host_bytes, known.host_bytes, known.page_bytes)
    found = detect_platform(driver, 0, host)
    published = known.platform()
    assert found.link is published.link is known.link
    assert found.device_bytes == published.device_bytes
    assert found.page_bytes == published.page_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_platform_of_a_known_machine_names_its_source(name: str) -> None:
    platform = MACHINES[name].platform()
    assert set(platform.reasons) == {field.name for field in fields(Platform)} - {"reasons"}
    assert all("not this machine" in reason for reason in platform.reasons.values())
    assert platform.rates == MACHINES[name].rates()


@pytest.mark.parametrize("name", [n for n in NAMES if MACHINES[n].link is not Link.INTEGRATED])
def test_copies_are_faster_than_page_faults_on_every_link(name: str) -> None:
    rates = MACHINES[name].rates()
    assert rates.fault * 5 < rates.prefetch_in <= rates.copy_in < rates.device


def test_c2c_is_several_times_faster_than_pcie() -> None:
    assert MACHINES["gh200-96"].rates().copy_in > 6 * MACHINES["h200-pcie"].rates().copy_in


def test_an_unknown_machine_lists_the_known_ones() -> None:
    assert find_machine("gb10") is MACHINES["gb10"]
    with pytest.raises(
        ConfigError, match=r"--machine gh300 is unknown\. Known machines: b200-pcie, gb10"
    ):
        find_machine("gh300")


def test_the_simulated_h200_reproduces_measured_rates() -> None:
    """2 GiB: 5 GB/s by faults, 49 to 50 by prefetch, and a first touch then costs nothing."""
    known = MACHINES["h200-pcie"]
    driver = SimulatedDriver([known.device()], known.host_bytes, known.page_bytes)
    _, pointer = driver.allocate_managed(2 * GIB)

    def timed(on_device: bool) -> float:
        driver.touch(pointer, 2 * GIB, HOST, write=True)
        began = driver.synchronize()
        if on_device:
            driver.prefetch(pointer, 2 * GIB, 0, stream=1)
        else:
            driver.touch(pointer, 2 * GIB, 0, stream=1)
        return 2 * GIB / (driver.synchronize() - began)

    assert timed(on_device=False) == pytest.approx(5.0e9, rel=0.02)
    assert timed(on_device=True) == pytest.approx(49.5e9, rel=0.02)
    began = driver.synchronize()
    driver.touch(pointer, 2 * GIB, 0)
    assert 2 * GIB / (driver.synchronize() - began) > 4e12
