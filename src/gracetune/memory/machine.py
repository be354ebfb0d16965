"""The machine this process runs on: its driver and its platform, opened together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gracetune.errors import ConfigError
from gracetune.memory.cuda_driver import NoDriverError, open_cuda_driver
from gracetune.memory.driver import Driver
from gracetune.memory.platform import (
    detect,
    import_nvml,
    read_host,
    read_nvml,
    without_gpu,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.memory.platform import HostFacts, Platform


@dataclass(frozen=True, slots=True)
class Machine:
    """A platform, and the driver under it."""

    driver: Driver | None
    """None exactly where the platform has no GPU."""
    platform: Platform


class CountedDriver(Driver, Protocol):
    """A driver that knows how many devices it drives."""

    device_count: int


def read_this_host() -> HostFacts:
    """Host memory as it is now."""
    return read_host(Path("/proc"), Path("/sys"), os.sysconf("SC_PAGE_SIZE"))


def open_machine(
    device: int = 0, open_driver: Callable[[], CountedDriver] = open_cuda_driver
) -> Machine:
    """One device of this machine, or the machine without one and why."""
    host = read_this_host()
    try:
        driver = open_driver()
    except NoDriverError as error:
        return Machine(None, without_gpu(host, str(error)))
    if not 0 <= device < driver.device_count:
        raise ConfigError(
            f"device is {device}; this machine shows {driver.device_count} GPU(s), counted from 0. "
            "CUDA_VISIBLE_DEVICES may hide others."
        )
    nvml = read_nvml(import_nvml(), driver, device)
    return Machine(driver, detect(driver, device, host, nvml))
