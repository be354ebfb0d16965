"""The machine this process runs on: its driver and its platform, opened together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.memory.cuda_driver import NoDriverError, open_cuda_driver
from gracetune.memory.platform import (
    detect,
    import_nvml,
    read_host,
    read_nvml,
    without_gpu,
)

if TYPE_CHECKING:
    from gracetune.memory.driver import Driver
    from gracetune.memory.platform import HostFacts, Platform


@dataclass(frozen=True, slots=True)
class Machine:
    """A platform, and the driver under it."""

    driver: Driver | None
    """None exactly where the platform has no GPU."""
    platform: Platform


def read_this_host() -> HostFacts:
    """Host memory as it is now."""
    return read_host(Path("/proc"), Path("/sys"), os.sysconf("SC_PAGE_SIZE"))


def open_machine(device: int = 0) -> Machine:
    """One device of this machine, or the machine without one and why."""
    host = read_this_host()
    try:
        driver = open_cuda_driver()
    except NoDriverError as error:
        return Machine(None, without_gpu(host, str(error)))
    nvml = read_nvml(import_nvml(), driver, device)
    return Machine(driver, detect(driver, device, host, nvml))
