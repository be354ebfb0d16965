"""The forks' names: a script written for them changes one import and goes on.

Free functions need something to act on, so this is the one place that keeps a process-wide object,
made when it is first asked for. New code takes a `Hints`, a `Ledger` and `Stages` as arguments
instead; nothing in the package imports this module.
"""

from __future__ import annotations

import logging
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from gracetune.config.environment import environment_settings, process_environment
from gracetune.memory.faults import count_faults, import_cupti
from gracetune.memory.hints import Hint, Hints, Place, Whereabouts, legacy_stream, torch_stream
from gracetune.memory.ledger import Ledger, Tier
from gracetune.memory.machine import Machine, open_machine, read_this_host
from gracetune.memory.placement import DEFAULT_TABLE, BatchReport, PlacementTable, place_batch
from gracetune.memory.platform import Link
from gracetune.memory.pool import (
    CudaPools,
    PoolError,
    PoolSettings,
    UnifiedPool,
    Unsupported,
    open_pool,
)
from gracetune.memory.reclaim import hard_reclamation, light_reclamation, read_memory
from gracetune.memory.shim import AccessPattern, find_shim
from gracetune.memory.stages import Stage, StagePolicy, Stages, managed_cap
from gracetune.memory.stats import Stats
from gracetune.memory.stats import memory_stats as collect_stats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gracetune.config.environment import EnvironmentSettings
    from gracetune.events.types import Notice
    from gracetune.memory.faults import FaultCounter
    from gracetune.memory.shim import ShimCounters

_CLASSES = {
    "GH200GradientRamp": ("gracetune.train.ramp", "Ramp"),
    "GH200InMemoryBackend": ("gracetune.data.staged", "StagedSource"),
}
"""The forks' classes, found when asked for: hints need no codecs."""

__all__ = [  # noqa: PLE0604  the names are strings, resolved lazily
    *_CLASSES,
    "ProcessMemory",
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


def log_notice(notice: Notice) -> None:
    """Notices of the free functions go to the log: there is no run to tell them to."""
    log.log(logging.WARNING if notice.level == "warning" else logging.INFO, "%s", notice.text)


class ProcessMemory:
    """What the free functions act on; nothing is opened before it is needed."""

    def __init__(
        self,
        open_machine: Callable[[], Machine],
        environment: Callable[[], Mapping[str, str]],
        tell: Callable[[Notice], None],
    ) -> None:
        self.override: bool | None = None
        self._open_machine = open_machine
        self._environment = environment
        self._tell = tell
        self._pool: UnifiedPool | Unsupported | None = None

    @property
    def settings(self) -> EnvironmentSettings:
        """Read anew each time: a script may set a variable after it imports us."""
        return environment_settings(self._environment())

    @cached_property
    def machine(self) -> Machine:
        """The hardware, looked at once."""
        return self._open_machine()

    @property
    def enabled(self) -> bool:
        """The override, else the environment, else whether the GPU is coherent with the host."""
        if self.override is not None:
            return self.override
        wanted = self.settings.uvm_hints
        return self.machine.platform.link is Link.COHERENT if wanted is None else wanted

    @property
    def hints(self) -> Hints:
        """The verbs, on or off as of now."""
        self._hints.enabled = self.enabled
        return self._hints

    @cached_property
    def _hints(self) -> Hints:
        return Hints(
            self.machine.driver,
            self.machine.platform,
            current_stream=torch_stream if torch.cuda.is_available() else legacy_stream,
            tell=self._tell,
        )

    @cached_property
    def policy(self) -> StagePolicy:
        """The stage policy that the environment describes."""
        settings, default = self.settings, StagePolicy()
        return StagePolicy(
            threshold=settings.stage1_threshold or default.threshold,
            min_free_bytes=settings.stage1_min_bytes or default.min_free_bytes,
            oversubscription_ratio=(
                settings.oversubscription_ratio or default.oversubscription_ratio
            ),
        )

    @property
    def cap(self) -> int:
        """Most managed bytes: the ratio, bounded by the host."""
        platform = self.machine.platform
        return managed_cap(self.policy, platform.device_bytes, platform.host_bytes)

    @cached_property
    def ledger(self) -> Ledger:
        """The books of what this process holds, with the cap on managed bytes."""
        return Ledger({Tier.MANAGED: self.cap})

    @cached_property
    def stages(self) -> Stages:
        """The stage machine; nothing here is refillable, so light reclamation trims nothing."""
        device = self.machine.platform.device
        return Stages(self.policy, light_reclamation(()), hard_reclamation(device), self._tell)

    @cached_property
    def faults(self) -> FaultCounter | str:
        """CUPTI's counters, started on first use."""
        if self.machine.driver is None:
            return f"no GPU: {self.machine.platform.why['link']}"
        cupti = import_cupti()
        return (
            cupti if isinstance(cupti, str) else count_faults(cupti, self.machine.platform.device)
        )

    def pool(self) -> UnifiedPool | Unsupported:
        """The managed pool of this process, as the environment describes it."""
        if self._pool is None:
            platform = self.machine.platform
            if self.machine.driver is None:
                self._pool = Unsupported(f"no managed memory: {platform.why['link']}")
                return self._pool
            pattern = AccessPattern(self.settings.access_pattern or AccessPattern.GPU_FIRST.value)
            self._pool = open_pool(
                platform, find_shim(), PoolSettings(self.cap, pattern), CudaPools(), self._tell
            )
        return self._pool

    def observe(self, *, act: bool) -> Stage:
        """Take a reading of the device, and reclaim if `act` and the stage calls for it."""
        if not torch.cuda.is_available():
            return self.stages.state.stage
        device = self.machine.platform.device
        reading = read_memory(device, read_this_host().available_bytes)
        return self.stages.observe(reading) if act else self.stages.look(reading)

    def stats(self) -> Stats:
        """Torch's dictionary and ours."""
        self.observe(act=False)
        return collect_stats(
            torch.cuda.memory_stats(),
            self.machine.platform,
            self._hints.counts(),
            self.stages.state,
            self.ledger,
            self.faults,
            self._pool_counters(),
        )

    def _pool_counters(self) -> ShimCounters | str:
        if isinstance(self._pool, UnifiedPool):
            try:
                return self._pool.counters()
            except PoolError as error:
                return str(error)
        return "no pool was opened" if self._pool is None else self._pool.reason


_process = ProcessMemory(open_machine, process_environment, log_notice)


def gh200_uvm_enabled() -> bool:
    """Whether hints are wanted: by the override, else the environment, else coherent hardware."""
    return _process.enabled


def set_uvm_hint_override(value: bool | None) -> None:
    """Turn hints on or off whatever the environment says; none: let it decide again."""
    _process.override = value


def prefer_cpu_residency(tensor: Tensor) -> Hint:
    """Make host memory the tensor's home."""
    return _process.hints.prefer_cpu_residency(tensor)


def prefer_gpu_residency(tensor: Tensor) -> Hint:
    """Make device memory the tensor's home."""
    return _process.hints.prefer_gpu_residency(tensor)


def prefetch_to_device(
    tensor: Tensor, device: Place = None, stream: torch.cuda.Stream | int | None = None
) -> Hint:
    """Move the tensor before it is needed."""
    return _process.hints.prefetch_to_device(tensor, device, stream)


def discard(tensor: Tensor, stream: torch.cuda.Stream | int | None = None) -> Hint:
    """Drop the tensor's contents without writing them back."""
    return _process.hints.discard(tensor, stream)


def residency(tensor: Tensor) -> Whereabouts:
    """Where the tensor lives."""
    return _process.hints.residency(tensor)


def optimize_batch_for_gh200(batch: object, table: PlacementTable = DEFAULT_TABLE) -> BatchReport:
    """Give each tensor of a batch the home of its role; the report says what became of each."""
    return place_batch(batch, _process.hints, table)


def unified_pool() -> UnifiedPool | Unsupported:
    """The process's managed pool, to allocate in with `pool.allocating()`; or why there is none."""
    return _process.pool()


def manage_memory() -> Stage:
    """Take a reading, reclaim if the stage calls for it; call it between steps."""
    return _process.observe(act=True)


def memory_stats() -> Stats:
    """`torch.cuda.memory_stats()` with the `uvm.` keys beside torch's own; works on a CPU too."""
    return _process.stats()


def __getattr__(name: str) -> object:
    if name not in _CLASSES:
        raise AttributeError(f"module 'gracetune.gh200' has no attribute {name!r}")
    module, attribute = _CLASSES[name]
    return getattr(import_module(module), attribute)
