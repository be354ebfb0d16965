"""Memory functions with the names that the forks SimpleTuner-GH200 and ai-toolkit-GH200 use.

gracetune replaces these forks. A script that was written for one of them only has to change its
import.

These functions share one process-wide `MemorySession`, which opens the GPU driver on first use. No
other module has such a global object: new code passes a `MemorySession`, or its `Hints` and
`Stages`, as an argument. Nothing in the package imports this module.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from gracetune.config.environment import (
    claim_process_alloc_conf,
    environment_settings,
    process_environment,
)
from gracetune.memory.placement import DEFAULT_TABLE, BatchReport, PlacementTable, place_batch
from gracetune.memory.platform import open_machine
from gracetune.memory.session import MemorySession

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gracetune.events.types import Notice
    from gracetune.memory.hints import Hint, Location, Residency
    from gracetune.memory.managed_pool import ManagedPool, PoolUnavailable
    from gracetune.memory.oversubscription import Stage
    from gracetune.memory.stats import Stats

_CLASSES = {
    "GH200GradientRamp": ("gracetune.train.batch_size_ramp", "AccumulationRamp"),
    "GH200InMemoryBackend": ("gracetune.data.staging", "StagedSource"),
}
"""Class name in the forks -> our module and class, imported on first use."""

__all__ = [  # noqa: PLE0604  the names are strings, resolved lazily
    *_CLASSES,
    "discard",
    "gh200_uvm_enabled",
    "manage_memory",
    "memory_stats",
    "optimize_batch_for_gh200",
    "prefer_cpu_residency",
    "prefer_gpu_residency",
    "prefetch_to_device",
    "residency",
    "set_uvm_hint_override",
    "unified_pool",
]

log = logging.getLogger("gracetune.memory")

# The only work at import: a script written for the forks imports this module and then uses torch,
# which refuses to start CUDA while PYTORCH_CUDA_ALLOC_CONF contains the forks' keys.
claim_process_alloc_conf()


def log_notice(notice: Notice) -> None:
    """Write a notice to Python's logging, because these functions belong to no run."""
    log.log(logging.WARNING if notice.level == "warning" else logging.INFO, "%s", notice.text)


_process = MemorySession(
    open_machine, lambda: environment_settings(process_environment()), log_notice
)


def gh200_uvm_enabled() -> bool:
    """Return True if hints tell the driver where to keep managed memory (cudaMemAdvise).

    `set_uvm_hint_override` decides if it was called, else environment variables; without either,
    hints are on if GPU and CPU are cache-coherent.
    """
    return _process.hints_enabled


def set_uvm_hint_override(value: bool | None) -> None:
    """Turn hints for managed memory on or off, in place of environment variables.

    None lets the environment variables decide again.
    """
    _process.hints_override = value


def prefer_cpu_residency(tensor: Tensor) -> Hint:
    """Ask the driver to keep a tensor of managed memory in host memory."""
    return _process.hints.prefer_cpu_residency(tensor)


def prefer_gpu_residency(tensor: Tensor) -> Hint:
    """Ask the driver to keep a tensor of managed memory in device memory."""
    return _process.hints.prefer_gpu_residency(tensor)


def prefetch_to_device(
    tensor: Tensor, device: Location = None, stream: torch.cuda.Stream | int | None = None
) -> Hint:
    """Move the pages of a tensor to a device before they are needed, in stream order."""
    return _process.hints.prefetch_to_device(tensor, device, stream)


def discard(tensor: Tensor, stream: torch.cuda.Stream | int | None = None) -> Hint:
    """Discard the contents of a tensor, so that evicting its pages copies nothing."""
    return _process.hints.discard(tensor, stream)


def residency(tensor: Tensor) -> Residency:
    """Return the memory that a tensor is in: the host's, or that of a device."""
    return _process.hints.residency(tensor)


def optimize_batch_for_gh200(batch: object, table: PlacementTable = DEFAULT_TABLE) -> BatchReport:
    """Tell the driver where to keep each tensor of a batch in managed memory: host or device.

    `table` maps tensor names to a place. The report says which hints the driver accepted.
    """
    return place_batch(batch, _process.hints, table)


def unified_pool() -> ManagedPool | PoolUnavailable:
    """Return this process's pool of managed memory, or an object with the reason for having none.

    Allocate inside `with pool.allocating():`.
    """
    return _process.pool()


def manage_memory() -> Stage:
    """Measure device memory and free some if it is short. Call this between steps."""
    return _process.observe(reclaim=True)


def memory_stats() -> Stats:
    """Return `torch.cuda.memory_stats()` with additional `uvm.*` keys. Works without a GPU."""
    return _process.stats()


def __getattr__(name: str) -> object:
    if name not in _CLASSES:
        raise AttributeError(f"module 'gracetune.gh200' has no attribute {name!r}")
    module, attribute = _CLASSES[name]
    return getattr(import_module(module), attribute)
