"""What a diagnosis needs to try memory out: a driver, a clock, copies and touches.

`torch_bench` is the real one; tests build theirs over the simulated driver.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.memory.driver import HOST, PointerKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.memory.driver import Driver
    from gracetune.memory.platform import Platform
    from gracetune.memory.pool import UnifiedPool


@dataclass(frozen=True, slots=True)
class Bench:
    """One device, ready to be timed."""

    driver: Driver
    platform: Platform
    clock: Callable[[], float]
    """Seconds."""
    synchronize: Callable[[], object]
    """Wait for all that the device was given."""
    copy: Callable[[int, int, int], None]
    """Copy so many bytes between pinned and device memory: (nbytes, source, target)."""
    touch: Callable[[int, int, int], None]
    """Let a kernel or the CPU go over every byte of a range: (pointer, nbytes, place)."""
    stream: int = 0

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for something, from idle to idle."""
        self.synchronize()
        start = self.clock()
        work()
        self.synchronize()
        return self.clock() - start


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A range of device-visible bytes, in the form that torch takes without a copy."""

    pointer: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class PoolTrial:
    """What became of a tensor made in a managed pool, and of the pool."""

    kind: PointerKind
    correct: bool
    """Whether the device read back what it wrote."""
    live_bytes: int
    """Managed bytes while the tensor lived."""
    held_bytes: int
    """Managed bytes still out after the pool was closed."""


def try_pool(pool: UnifiedPool, driver: Driver, nbytes: int) -> PoolTrial:
    """Make a tensor in the pool, use it, let it go and close the pool."""
    import torch

    with pool.allocating():
        tensor = torch.full((nbytes,), 7, dtype=torch.uint8, device=f"cuda:{pool.device}")
    kind = driver.pointer_kind(tensor.data_ptr())
    correct = int(tensor.sum(dtype=torch.int64)) == 7 * nbytes
    live_bytes = pool.counters().live_bytes
    del tensor
    return PoolTrial(kind, correct, live_bytes, pool.close().held_bytes)


def torch_bench(driver: Driver, platform: Platform, copy_bytes: int) -> Bench:
    """The bench of a real device; copies use one pair of buffers of `copy_bytes`, made here."""
    import torch

    device = torch.device("cuda", platform.device)
    pinned = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
    resident = torch.empty(copy_bytes, dtype=torch.uint8, device=device)

    def copy(nbytes: int, source: int, target: int) -> None:
        assert HOST in (source, target), f"a copy from {source} to {target} crosses no link"
        pair = (pinned, resident) if target == HOST else (resident, pinned)
        pair[0][:nbytes].copy_(pair[1][:nbytes], non_blocking=True)

    def touch(pointer: int, nbytes: int, place: int) -> None:
        if place == HOST:
            torch.cuda.synchronize(device)
            ctypes.memset(pointer, 1, nbytes)
        else:
            torch.as_tensor(DeviceBytes(pointer, nbytes), device=device).view(torch.int64).sum()

    return Bench(
        driver=driver,
        platform=platform,
        clock=time.perf_counter,
        synchronize=lambda: torch.cuda.synchronize(device),
        copy=copy,
        touch=touch,
        stream=torch.cuda.current_stream(device).cuda_stream,
    )
