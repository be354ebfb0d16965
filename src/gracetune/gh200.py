"""The forks' names: a script written for them changes one import and goes on.

Free functions need something to act on, so this is the one place that keeps a process-wide object,
made when it is first asked for. New code takes a `Hints`, a `Ledger` and `Stages` as arguments
instead; nothing in the package imports this module.
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
    from gracetune.memory.pool import ManagedPool, PoolUnavailable
    from gracetune.memory.stages import Stage
    from gracetune.memory.stats import Stats

_CLASSES = {
    "GH200GradientRamp": ("gracetune.train.ramp", "AccumulationRamp"),
    "GH200InMemoryBackend": ("gracetune.data.staging", "StagedSource"),
}
"""The forks' classes, found when asked for: hints need no codecs."""

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

# The one piece of work done at import: a script written for the forks imports these names and then
# uses torch, which refuses to start CUDA on the forks' allocator keys.
claim_process_alloc_conf()


def log_notice(notice: Notice) -> None:
    """Notices of the free functions go to the log: there is no run to tell them to."""
    log.log(logging.WARNING if notice.level == "warning" else logging.INFO, "%s", notice.text)


_process = MemorySession(
    open_machine, lambda: environment_settings(process_environment()), log_notice
)


def gh200_uvm_enabled() -> bool:
    """Whether hints are wanted: by the override, else the environment, else coherent hardware."""
    return _process.hints_enabled


def set_uvm_hint_override(value: bool | None) -> None:
    """Turn hints on or off whatever the environment says; none: let it decide again."""
    _process.hints_override = value


def prefer_cpu_residency(tensor: Tensor) -> Hint:
    """Make host memory the tensor's home."""
    return _process.hints.prefer_cpu_residency(tensor)


def prefer_gpu_residency(tensor: Tensor) -> Hint:
    """Make device memory the tensor's home."""
    return _process.hints.prefer_gpu_residency(tensor)


def prefetch_to_device(
    tensor: Tensor, device: Location = None, stream: torch.cuda.Stream | int | None = None
) -> Hint:
    """Move the tensor before it is needed."""
    return _process.hints.prefetch_to_device(tensor, device, stream)


def discard(tensor: Tensor, stream: torch.cuda.Stream | int | None = None) -> Hint:
    """Drop the tensor's contents without writing them back."""
    return _process.hints.discard(tensor, stream)


def residency(tensor: Tensor) -> Residency:
    """Where the tensor lives."""
    return _process.hints.residency(tensor)


def optimize_batch_for_gh200(batch: object, table: PlacementTable = DEFAULT_TABLE) -> BatchReport:
    """Give each tensor of a batch the home of its role; the report says what became of each."""
    return place_batch(batch, _process.hints, table)


def unified_pool() -> ManagedPool | PoolUnavailable:
    """The process's managed pool, to allocate in with `pool.allocating()`; or why there is none."""
    return _process.pool()


def manage_memory() -> Stage:
    """Take a reading, reclaim if the stage calls for it; call it between steps."""
    return _process.observe(reclaim=True)


def memory_stats() -> Stats:
    """`torch.cuda.memory_stats()` with the `uvm.` keys beside torch's own; works on a CPU too."""
    return _process.stats()


def __getattr__(name: str) -> object:
    if name not in _CLASSES:
        raise AttributeError(f"module 'gracetune.gh200' has no attribute {name!r}")
    module, attribute = _CLASSES[name]
    return getattr(import_module(module), attribute)
