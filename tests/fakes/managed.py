"""Managed memory of a simulated driver, whose slabs are ordinary tensors that can be computed with.

Slabs have simulated addresses for the driver, and memory of the CPU for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
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
    from gracetune.memory.managed_roles import ManagedArray, PendingPrefetch
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
    return ManagedMemory(driver, 0, accounting, DirectPrefetcher(driver), emit, cpu_tensor_of)


class _Backing(np.ndarray):
    """Memory of the CPU that keeps a managed array alive, as torch's CUDA tensors do."""

    array: ManagedArray


def cpu_tensor_of(array: ManagedArray, backed_nbytes: int | None = None) -> Tensor:
    """Return a tensor of the CPU for a managed array.

    With `backed_nbytes`, it has no more memory than that, and its values must not be used.
    """
    backed = array.nbytes if backed_nbytes is None else backed_nbytes
    memory = np.empty(backed, np.uint8).view(_Backing)
    memory.array = array
    return torch.from_numpy(memory).expand(array.nbytes)


def unbacked_tensor_of(array: ManagedArray) -> Tensor:
    """Return a tensor with the memory of one byte: only its size and address are used."""
    return cpu_tensor_of(array, 1)


class SimulatedMachines:
    """What runs on a simulated machine have created: drivers, and managed memory."""

    def __init__(self) -> None:
        self.drivers: list[SimulatedDriver] = []
        self.memories: list[ManagedMemory] = []
        self.roles_at_end: list[dict[str, int]] = []
        """Bytes of each role when a run gave up its managed memory."""
        self.bytes_at_end: list[int] = []
        """Bytes that the driver had allocated then."""


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

    original_close = managed_roles.ManagedMemory.close

    def close(memory: ManagedMemory) -> None:
        made.roles_at_end.append(memory.by_role())
        made.bytes_at_end.append(made.drivers[-1]._memory.promised_bytes())
        original_close(memory)

    monkeypatch.setattr(batch_transfer, "open_machine", open_machine)
    monkeypatch.setattr(session, "PrefetchThread", lambda driver, *_: DirectPrefetcher(driver))
    monkeypatch.setattr(managed_roles, "cuda_tensor_of", lambda array, _: cpu_tensor_of(array))
    monkeypatch.setattr(managed_roles.ManagedMemory, "__init__", create)
    monkeypatch.setattr(managed_roles.ManagedMemory, "close", close)
    return made
