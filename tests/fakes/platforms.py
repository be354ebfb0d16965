"""Simulated machines for each kind of link, and tensors at simulated addresses."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from fakes.simulated_driver import SimulatedDriver
from gracetune.memory.hints import Hints
from gracetune.memory.platform import (
    NO_GPU,
    DeviceSpec,
    HostFacts,
    Link,
    Platform,
    Rates,
    detect_platform,
)
from gracetune.units import GIB

RATES = Rates(
    copy_in=50e9,
    copy_out=50e9,
    prefetch_in=45e9,
    prefetch_out=10e9,
    fault=5e9,
    read_in_place=30e9,
    device=2000e9,
    host=50e9,
)
ATTRIBUTES = {
    Link.COPY: {"managed_memory": 1},
    Link.MANAGED: {"managed_memory": 1, "concurrent_managed_access": 1},
    Link.COHERENT: {
        "managed_memory": 1,
        "concurrent_managed_access": 1,
        "pageable_memory_access": 1,
        "pageable_memory_access_uses_host_page_tables": 1,
    },
    Link.INTEGRATED: {"managed_memory": 1, "concurrent_managed_access": 1, "integrated": 1},
}
GPU_LINKS = tuple(ATTRIBUTES)


@dataclass(frozen=True)
class SimulatedMachine:
    """A platform and its simulated driver, which is None without a GPU."""

    platform: Platform
    driver: SimulatedDriver | None

    @property
    def gpu(self) -> SimulatedDriver:
        assert self.driver is not None
        return self.driver

    def hints(self, **options) -> Hints:
        return Hints(self.driver, self.platform, **options)

    def tensor(self, nbytes: int, kind: str = "managed") -> torch.Tensor:
        """Return a tensor at simulated addresses. It can be sliced and viewed, but not read."""
        if kind == "managed":
            code, pointer = self.gpu.allocate_managed(nbytes)
        elif kind == "pinned":
            code, pointer = self.gpu.allocate_pinned(nbytes)
        else:
            code, pointer = self.gpu.allocate_device(nbytes, 0)
        assert code == 0
        return tensor_at(pointer, nbytes)


def tensor_at(pointer: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype=torch.uint8)


def simulated_machine(
    link: Link, page_bytes: int = 4096, failing: dict[str, int] | None = None
) -> SimulatedMachine:
    if link is Link.NONE:
        return SimulatedMachine(NO_GPU, None)
    spec = DeviceSpec(nbytes=8 * GIB, attributes=ATTRIBUTES[link], rates=RATES)
    driver = SimulatedDriver([spec], 32 * GIB, page_bytes, failing)
    platform = detect_platform(driver, 0, HostFacts(64 * GIB, 32 * GIB, page_bytes), rates=RATES)
    assert platform.link is link
    return SimulatedMachine(platform, driver)
