"""Memory functions with the names that the forks SimpleTuner-GH200 and ai-toolkit-GH200 use.

gracetune replaces these forks. A script that was written for one of them only has to change its
import.

These functions share one process-wide `MemorySession`, which opens the GPU driver on first use. No
other module has such a global object: new code passes a `MemorySession`, or its `Hints` and
`Stages`, as an argument. Nothing in the package imports this module.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gracetune.config.environment import (
    claim_process_alloc_conf,
    environment_settings,
    process_environment,
)
from gracetune.events.types import Notice
from gracetune.memory.placement import DEFAULT_TABLE, BatchReport, PlacementTable, place_batch
from gracetune.memory.platform import open_machine
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import (
    attached_source,
    extend_torch_memory_stats,
    restore_torch_memory_stats,
)
from gracetune.train.batch_size_ramp import AccumulationRamp

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gracetune.events.types import Event
    from gracetune.memory.hints import Hint, Location, Residency
    from gracetune.memory.managed_pool import ManagedPool, PoolUnavailable
    from gracetune.memory.oversubscription import Stage
    from gracetune.memory.stats import Stats

__all__ = [
    "GH200GradientRamp",
    "GH200InMemoryBackend",  # noqa: F822  imported on first use, by __getattr__
    "discard",
    "gh200_uvm_enabled",
    "manage_memory",
    "memory_stats",
    "optimize_batch_for_gh200",
    "prefer_cpu_residency",
    "prefer_gpu_residency",
    "prefetch_to_device",
    "residency",
    "restore_torch_memory_stats",
    "set_uvm_hint_override",
    "unified_pool",
]

log = logging.getLogger("gracetune.memory")

# Work at import, for scripts that were written for the forks. They import this module and then use
# torch, which refuses to start CUDA while PYTORCH_CUDA_ALLOC_CONF contains the forks' keys.
claim_process_alloc_conf()


def log_event(event: Event) -> None:
    """Write an event to Python's logging, because these functions belong to no run."""
    if isinstance(event, Notice):
        log.log(logging.WARNING if event.level == "warning" else logging.INFO, "%s", event.text)
    else:
        log.info("%s", event)


_process = MemorySession(
    open_machine, lambda: environment_settings(process_environment()), log_event
)
# Such scripts also read `torch.cuda.memory_stats()["uvm.stage"]`, as in the forks' patched torch.
# This is the only part of torch that gracetune changes; `restore_torch_memory_stats` undoes it.
extend_torch_memory_stats(_process)


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
    """Return `torch.cuda.memory_stats()` with additional `uvm.*` keys. Works without a GPU.

    During a training run in this process, the numbers are those of the run.
    """
    source = attached_source()
    return (source if isinstance(source, MemorySession) else _process).stats()


class GH200GradientRamp:
    """The number of micro-batches to accumulate, which grows during training.

    It has the arguments of the fork's class. The fork changed the number in the middle of an
    optimizer step, which gave its micro-batches wrong weights; here it changes between steps.
    """

    def __init__(
        self,
        *,
        train_batch_size: int,
        base_ga: int = 1,
        initial_effective: int | None = None,
        target_effective: int | None = None,
        total_steps: int = 0,
    ) -> None:
        """Grow from `initial_effective` to `target_effective` samples in an optimizer step.

        Both are `train_batch_size * base_ga` by default. `total_steps` is the number of
        micro-batches until the target is reached; with 0, it is reached at once. All micro-batches
        have `train_batch_size` samples, so sizes are rounded up to a multiple of it; for the first
        one, a warning says so.
        """
        samples = train_batch_size * base_ga
        target = target_effective or samples
        initial = (initial_effective or samples) if total_steps else target
        self._ramp = AccumulationRamp(
            initial, target, max(1, total_steps), "quadratic", train_batch_size
        )
        self._done = self._left = 0
        self._current = self.initial_ga
        first = self.initial_ga * train_batch_size
        if total_steps and first != initial:
            log.warning(
                "initial_effective is %s, but the ramp starts with %s samples: micro-batches "
                "always have train_batch_size samples (%s). Lower it to start smaller",
                *(initial, first, train_batch_size),
            )
        self.train_batch_size = train_batch_size
        self.total_steps = total_steps

    @property
    def initial_ga(self) -> int:
        """Micro-batches in the first optimizer step."""
        return self._ramp.accumulation(0)

    @property
    def target_ga(self) -> int:
        """Micro-batches in an optimizer step at the end of the ramp."""
        return self._ramp.accumulation(self._ramp.length)

    def advance(self) -> int:
        """Begin a micro-batch; return how many the optimizer step has that it belongs to."""
        if self._left == 0:
            self._current = self._left = self._ramp.accumulation(self._done)
        self._done += 1
        self._left -= 1
        return self._current


def __getattr__(name: str) -> object:
    if name != "GH200InMemoryBackend":
        raise AttributeError(f"module 'gracetune.gh200' has no attribute {name!r}")
    from gracetune.hosts.fork_modules import GH200InMemoryBackend

    return GH200InMemoryBackend
