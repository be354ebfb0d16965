"""Create and connect the objects of `gracetune.memory` for one process or run.

Platform, hints, stages, accounting and statistics do not depend on each other; `MemorySession`
connects them and creates each on first use. A training run has one session, and the functions of
`gracetune.gh200` share another.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.memory.hints import Hints, legacy_stream, torch_stream
from gracetune.memory.managed_pool import (
    ManagedPool,
    PoolError,
    PoolSettings,
    PoolUnavailable,
    TorchMemPools,
    open_pool,
)
from gracetune.memory.oversubscription import (
    GcFreeze,
    Stage,
    StagePolicy,
    Stages,
    hard_reclamation,
    light_reclamation,
    managed_cap,
    read_memory,
)
from gracetune.memory.platform import Link, read_this_host
from gracetune.memory.shim import AccessPattern, find_shim
from gracetune.memory.stats import (
    MemoryAccounting,
    Tier,
    import_cupti,
    memory_stats,
    start_fault_counter,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Machine
    from gracetune.memory.shim import ShimCounters
    from gracetune.memory.stats import FaultCounter, Stats


class MemorySettings(Protocol):
    """Memory settings from environment variables; None if the variable is not set."""

    @property
    def uvm_hints(self) -> bool | None: ...
    @property
    def use_uvm(self) -> bool | None: ...
    @property
    def oversubscription_ratio(self) -> float | None: ...
    @property
    def access_pattern(self) -> str | None: ...
    @property
    def stage1_threshold(self) -> float | None: ...
    @property
    def stage1_min_bytes(self) -> int | None: ...


class MemorySession:
    """The objects that manage CUDA memory for one process or run, created on first use.

    These are hardware detection, memory hints, a managed pool, memory reclamation and statistics.
    """

    def __init__(
        self,
        open_machine: Callable[[], Machine],
        read_settings: Callable[[], MemorySettings],
        emit: Callable[[Notice], None],
        gc_freeze: GcFreeze | None = None,
    ) -> None:
        """Create a session; nothing is opened or detected yet.

        With the run's `gc_freeze`, reclaiming memory also collects objects that it has frozen.
        """
        self.hints_override: bool | None = None
        """Turns memory hints on or off; None leaves that to environment variables and platform."""
        self._open_machine = open_machine
        self._read_settings = read_settings
        self._emit = emit
        self._gc_freeze = gc_freeze or GcFreeze()
        self._pool: ManagedPool | PoolUnavailable | None = None
        self.trimmers: list[Callable[[], int]] = [self._collect_garbage]
        """Functions that free memory and return the bytes freed; called if the device is full."""

    @property
    def settings(self) -> MemorySettings:
        """Settings from environment variables, read on every access: scripts may change them."""
        return self._read_settings()

    @cached_property
    def machine(self) -> Machine:
        """The device's driver and platform, detected on first use."""
        return self._open_machine()

    @property
    def hints_enabled(self) -> bool:
        """True if the CUDA driver is given hints about where managed memory should be.

        `hints_override` decides, else an environment variable; by default, hints are on for
        coherent GPUs.
        """
        if self.hints_override is not None:
            return self.hints_override
        setting = self.settings.uvm_hints
        return self.machine.platform.link is Link.COHERENT if setting is None else setting

    @property
    def wants_pool(self) -> bool:
        """True if a pool of CUDA managed memory should be used.

        The environment setting `use_uvm` decides; if it is not set, `hints_enabled`.
        """
        setting = self.settings.use_uvm
        return self.hints_enabled if setting is None else setting

    @property
    def hints(self) -> Hints:
        """The object that gives memory hints, switched on or off by `hints_enabled`."""
        self._hints.enabled = self.hints_enabled
        return self._hints

    @cached_property
    def _hints(self) -> Hints:
        return Hints(
            self.machine.driver,
            self.machine.platform,
            current_stream=torch_stream if torch.cuda.is_available() else legacy_stream,
            emit=self._emit,
        )

    @cached_property
    def policy(self) -> StagePolicy:
        """Thresholds at which memory is reclaimed, from environment variables and defaults."""
        settings, default = self.settings, StagePolicy()
        return StagePolicy(
            threshold=settings.stage1_threshold or default.threshold,
            min_free_bytes=settings.stage1_min_bytes or default.min_free_bytes,
            oversubscription_ratio=(
                settings.oversubscription_ratio or default.oversubscription_ratio
            ),
        )

    @property
    def managed_cap(self) -> int:
        """Maximum managed memory in bytes: a multiple of device memory, limited by host memory."""
        platform = self.machine.platform
        return managed_cap(self.policy, platform.device_bytes, platform.host_bytes)

    @cached_property
    def accounting(self) -> MemoryAccounting:
        """Counts of the memory that gracetune allocates, with a cap on managed memory."""
        return MemoryAccounting({Tier.MANAGED: self.managed_cap})

    @cached_property
    def stages(self) -> Stages:
        """Tracks whether device memory is almost full, and frees memory if so."""
        device = self.machine.platform.device
        light = light_reclamation(self.trimmers)
        hard = hard_reclamation(device, self._gc_freeze)
        return Stages(self.policy, light, hard, self._emit)

    @cached_property
    def faults(self) -> FaultCounter | str:
        """The CUPTI page fault counter, started on first use; the reason if there is none."""
        if self.machine.driver is None:
            return f"no GPU: {self.machine.platform.reasons['link']}"
        cupti = import_cupti()
        if isinstance(cupti, str):
            return cupti
        return start_fault_counter(cupti, self.machine.platform.device)

    def pool(self) -> ManagedPool | PoolUnavailable:
        """Return the pool of managed memory, opened on the first call, or why there is none."""
        if self._pool is None:
            platform = self.machine.platform
            if self.machine.driver is None:
                self._pool = PoolUnavailable(f"no managed memory: {platform.reasons['link']}")
                return self._pool
            pattern = AccessPattern(self.settings.access_pattern or AccessPattern.GPU_FIRST.value)
            settings = PoolSettings(self.managed_cap, pattern)
            self._pool = open_pool(platform, find_shim(), settings, TorchMemPools(), self._emit)
        return self._pool

    def observe(self, *, reclaim: bool) -> Stage:
        """Read the memory in use and return whether device memory is oversubscribed (the stage).

        With `reclaim`, memory is freed if needed. Without a managed pool, memory is not read, since
        nothing can be oversubscribed.
        """
        if not isinstance(self._pool, ManagedPool):
            return self.stages.state.stage
        device = self.machine.platform.device
        reading = read_memory(device, read_this_host().usable_bytes())
        return self.stages.update_and_reclaim(reading) if reclaim else self.stages.update(reading)

    def stats(self) -> Stats:
        """Return torch's memory statistics, extended by gracetune's (`uvm.*`)."""
        self.observe(reclaim=False)
        stats = memory_stats(
            torch.cuda.memory_stats(),
            self.machine.platform,
            self._hints.counts(),
            self.stages.state,
            self.accounting,
            self.faults,
            self._pool_counters(),
        )
        for action, nbytes in self.stages.reclaimed.items():
            stats[f"uvm.{action}_bytes"] = nbytes
        return stats

    def headroom(self) -> int:
        """Return the free device memory above the threshold of stage 2, in bytes; 0 on a CPU."""
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info(self.machine.platform.device)
        return int(free - self.policy.stage2_below(total))

    def _collect_garbage(self) -> int:
        """Collect reference cycles, which may hold tensors, and return the device bytes freed."""
        device = self.machine.platform.device
        before = torch.cuda.memory_allocated(device)
        self._gc_freeze.collect()
        return before - torch.cuda.memory_allocated(device)

    def _pool_counters(self) -> ShimCounters | str:
        if isinstance(self._pool, ManagedPool):
            try:
                return self._pool.counters()
            except PoolError as error:
                return str(error)
        return "no pool was opened" if self._pool is None else self._pool.reason
