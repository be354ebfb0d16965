"""The driver contract, for a simulation of every published machine."""

import pytest
from driver_contract import CHECKS, Check
from fakes.simulated_driver import SimulatedDriver

from gracetune.memory.driver import Driver
from gracetune.plan.machines import MACHINES


@pytest.fixture(params=sorted(MACHINES))
def driver(request: pytest.FixtureRequest) -> Driver:
    machine = MACHINES[request.param]
    return SimulatedDriver([machine.device()], machine.host_bytes, machine.page_bytes)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_published_machine_fulfils_the_driver_contract(driver: Driver, check: Check) -> None:
    check(driver)
