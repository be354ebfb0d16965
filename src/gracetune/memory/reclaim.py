"""Readings of torch's and the machine's memory, and the two reclamations that stages call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gracetune.memory.garbage import ASIDE
from gracetune.memory.stages import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def read_memory(device: int, host_available: int) -> Reading:
    """Memory of a CUDA device now; `host_available` is the platform's figure."""
    free, total = torch.cuda.mem_get_info(device)
    return Reading(
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        device_free=free,
        device_total=total,
        host_available=host_available,
    )


def light_reclamation(trimmers: Sequence[Callable[[], int]]) -> Callable[[], int]:
    """Let every owner of refillable memory trim itself; each returns the bytes it let go."""

    def reclaim() -> int:
        return sum(trim() for trim in trimmers)

    return reclaim


def hard_reclamation(device: int) -> Callable[[], int]:
    """Wait for the device, then give torch's cached segments back to it.

    Segments of a pool that is still alive stay: torch returns those only when the pool goes.
    """

    def reclaim() -> int:
        ASIDE.collect()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(device)

    return reclaim
