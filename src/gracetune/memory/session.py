"""One process's or run's memory: hardware, hints, stages, books and statistics, put together.

The parts know nothing of each other; this is where they meet. The trainer has one, and so have the
free functions of `gracetune.gh200`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.memory.hints import Hints, legacy_stream, torch_stream
from gracetune.memory.platform import Link, read_this_host
from gracetune.memory.pool import (
    TorchMemPools,
    PoolError,
    PoolSettings,
    ManagedPool,
    PoolUnavailable,
    open_pool,
)
from gracetune.memory.shim import AccessPattern, find_shim
from gracetune.memory.stages import (
    ASIDE,
    Stage,
    StagePolicy,
    Stages,
    hard_reclamation,
    light_reclamation,
    managed_cap,
    read_memory,
)
from gracetune.memory.stats import MemoryAccounting, Tier, start_fault_counter, import_cupti, memory_stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.events.types import Notice
    from gracetune.memory.platform import Machine
    from gracetune.memory.shim import ShimCounters
    from gracetune.memory.stats import FaultCounter, Stats


class MemorySettings(Protocol):
    """What the environment may decide; none: it says nothing."""

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
    """Hardware, hints, stages and books of one process or run, each opened when first needed."""

    def __init__(
        self,
        open_machine: Callable[[], Machine],
        read_settings: Callable[[], MemorySettings],
        emit: Callable[[Notice], None],
    ) -> None:
        self.hints_override: bool | None = None
        self._open_machine = open_machine
        self._read_settings = read_settings
        self._emit = emit
        self._pool: ManagedPool | PoolUnavailable | None = None
        self.trimmers: list[Callable[[], int]] = [self._collect_garbage]

    @property
    def settings(self) -> MemorySettings:
        """Read anew each time: a script may set a variable after it imports us."""
        return self._read_settings()

    @cached_property
    def machine(self) -> Machine:
        """The hardware, looked at once."""
        return self._open_machine()

    @property
    def hints_enabled(self) -> bool:
        """The override, else the environment, else whether the GPU is coherent with the host."""
        if self.hints_override is not None:
            return self.hints_override
        wanted = self.settings.uvm_hints
        return self.machine.platform.link is Link.COHERENT if wanted is None else wanted

    @property
    def wants_pool(self) -> bool:
        """Whether a managed pool is wanted: by `use_uvm` where it is set, else where hints are."""
        wanted = self.settings.use_uvm
        return self.hints_enabled if wanted is None else wanted

    @property
    def hints(self) -> Hints:
        """The verbs, on or off as of now."""
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
    def managed_cap(self) -> int:
        """Most managed bytes: the ratio, bounded by the host."""
        platform = self.machine.platform
        return managed_cap(self.policy, platform.device_bytes, platform.host_bytes)

    @cached_property
    def accounting(self) -> MemoryAccounting:
        """The books of what this process holds, with the cap on managed bytes."""
        return MemoryAccounting({Tier.MANAGED: self.managed_cap})

    @cached_property
    def stages(self) -> Stages:
        """The stage machine; what owners of refillable memory add to `trimmers` is trimmed too."""
        device = self.machine.platform.device
        light = light_reclamation(self.trimmers)
        return Stages(self.policy, light, hard_reclamation(device), self._emit)

    @cached_property
    def faults(self) -> FaultCounter | str:
        """CUPTI's counters, started on first use."""
        if self.machine.driver is None:
            return f"no GPU: {self.machine.platform.reasons['link']}"
        cupti = import_cupti()
        return (
            cupti if isinstance(cupti, str) else start_fault_counter(cupti, self.machine.platform.device)
        )

    def pool(self) -> ManagedPool | PoolUnavailable:
        """The managed pool of this process, as the environment describes it."""
        if self._pool is None:
            platform = self.machine.platform
            if self.machine.driver is None:
                self._pool = PoolUnavailable(f"no managed memory: {platform.reasons['link']}")
                return self._pool
            pattern = AccessPattern(self.settings.access_pattern or AccessPattern.GPU_FIRST.value)
            self._pool = open_pool(
                platform, find_shim(), PoolSettings(self.managed_cap, pattern), TorchMemPools(), self._emit
            )
        return self._pool

    def observe(self, *, reclaim: bool) -> Stage:
        """Take a reading of the device, and reclaim if `act` and the stage calls for it.

        Stages are about managed memory: without a pool of it there is nothing to oversubscribe.
        """
        if not isinstance(self._pool, ManagedPool):
            return self.stages.state.stage
        device = self.machine.platform.device
        reading = read_memory(device, read_this_host().usable_bytes())
        return self.stages.update_and_reclaim(reading) if reclaim else self.stages.update(reading)

    def stats(self) -> Stats:
        """Torch's dictionary and ours."""
        self.observe(reclaim=False)
        return memory_stats(
            torch.cuda.memory_stats(),
            self.machine.platform,
            self._hints.counts(),
            self.stages.state,
            self.accounting,
            self.faults,
            self._pool_counters(),
        )

    def _collect_garbage(self) -> int:
        """Cycles of Python objects may still hold tensors that nobody can reach."""
        device = self.machine.platform.device
        before = torch.cuda.memory_allocated(device)
        ASIDE.collect()
        return before - torch.cuda.memory_allocated(device)

    def _pool_counters(self) -> ShimCounters | str:
        if isinstance(self._pool, ManagedPool):
            try:
                return self._pool.counters()
            except PoolError as error:
                return str(error)
        return "no pool was opened" if self._pool is None else self._pool.reason
