"""Managed memory of a simulated driver, whose slabs are ordinary tensors that can be computed with.

Slabs have simulated addresses for the driver, and memory of the CPU for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fakes.simulated_driver import SimulatedDriver
from gracetune.memory.driver import CudaCode
from gracetune.memory.managed_roles import ManagedMemory
from gracetune.memory.platform import Machine
from gracetune.plan.machines import find_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest
    from torch import Tensor

    from gracetune.events.types import Notice
    from gracetune.memory.driver import Driver
    from gracetune.memory.managed_roles import PendingPrefetch
    from gracetune.memory.stats import MemoryAccounting


class DirectPrefetcher:
    """Prefetches in the calling thread, on the legacy stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def start(
        self,
        ranges: Sequence[tuple[int, int]],
        location: int,
        after: PendingPrefetch | None = None,
    ) -> PendingPrefetch:
        """Prefetch before returning."""
        for pointer, nbytes in ranges:
            code = self._driver.prefetch(pointer, nbytes, location, 0)
            assert code == CudaCode.SUCCESS, f"prefetch returned {code}"
        return _Finished()

    def drain(self) -> None:
        """Do nothing: each prefetch has finished."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


class _Finished:
    def wait(self) -> None:
        """Do nothing: the prefetch has finished."""


def managed_memory(
    driver: SimulatedDriver,
    accounting: MemoryAccounting,
    emit: Callable[[Notice], None] = lambda notice: None,
) -> ManagedMemory:
    """Return managed memory on device 0 of a simulated driver."""
    return ManagedMemory(driver, 0, accounting, DirectPrefetcher(driver), emit, _cpu_tensor)


def _cpu_tensor(pointer: int, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class SimulatedMachines:
    """What runs on a simulated machine have created: drivers, and managed memory."""

    def __init__(self) -> None:
        self.drivers: list[SimulatedDriver] = []
        self.memories: list[ManagedMemory] = []


def simulate_machine(monkeypatch: pytest.MonkeyPatch, name: str = "h200-pcie") -> SimulatedMachines:
    """Let runs on the CPU find a known machine's managed memory, with a simulated driver."""
    from gracetune.cache import batch_transfer
    from gracetune.memory import managed_roles, session

    spec, made = find_machine(name), SimulatedMachines()

    def open_machine(device: int) -> Machine:
        assert device == 0
        made.drivers.append(SimulatedDriver([spec.device()], spec.host_bytes, spec.page_bytes))
        return Machine(made.drivers[-1], spec.platform())

    original = managed_roles.ManagedMemory.__init__

    def create(memory: ManagedMemory, *arguments: Any, **options: Any) -> None:
        original(memory, *arguments, **options)
        made.memories.append(memory)

    monkeypatch.setattr(batch_transfer, "open_machine", open_machine)
    monkeypatch.setattr(session, "PrefetchThread", lambda driver, *_: DirectPrefetcher(driver))
    monkeypatch.setattr(managed_roles, "cuda_tensor_at", lambda at, size, _: _cpu_tensor(at, size))
    monkeypatch.setattr(managed_roles.ManagedMemory, "__init__", create)
    return made
