"""Create and connect the objects of `gracetune.memory` for one process or run.

Platform, hints, stages, accounting and statistics do not depend on each other; `MemorySession`
connects them and creates each on first use. A training run has one session, and the functions of
`gracetune.gh200` share another.
"""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.events.types import MemoryReclaimed, Notice
from gracetune.memory.driver import CudaCode
from gracetune.memory.hints import Hints, legacy_stream, torch_stream
from gracetune.memory.managed_pool import (
    ManagedPool,
    PoolError,
    PoolSettings,
    PoolUnavailable,
    TorchMemPools,
    open_pool,
)
from gracetune.memory.managed_roles import ManagedMemory, ManagedPages, PrefetchThread
from gracetune.memory.oversubscription import (
    PCIE_CAP_PART,
    Garbage,
    GcFreeze,
    Reading,
    Stage,
    StagePolicy,
    Stages,
    Trimmers,
    bounded_cap,
    cuda_is_in_use,
    hard_reclamation,
    host_room,
    managed_cap,
    read_memory,
)
from gracetune.memory.platform import Link, read_this_host
from gracetune.memory.shim import AccessPattern, find_shim
from gracetune.memory.stats import (
    MemoryAccounting,
    Tier,
    import_cupti,
    start_fault_counter,
    torch_memory_stats,
    uvm_stats,
)
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.events.types import Event
    from gracetune.memory.driver import Driver
    from gracetune.memory.platform import HostFacts, Machine
    from gracetune.memory.shim import ShimCounters
    from gracetune.memory.stats import FaultCounter, Stats


OVERFLOW_OFF = (
    "managed overflow is off; gh200_optimizations.use_uvm: true in the run file, or use_uvm:True "
    "in PYTORCH_CUDA_ALLOC_CONF, turns it on"
)
"""Why a run has no managed memory for its roles if `use_uvm` is not set."""


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


def stage_policy(settings: MemorySettings) -> StagePolicy:
    """Return the thresholds of the stages: from environment variables, and defaults."""
    default = StagePolicy()
    return StagePolicy(
        threshold=settings.stage1_threshold or default.threshold,
        min_free_bytes=settings.stage1_min_bytes or default.min_free_bytes,
        oversubscription_ratio=settings.oversubscription_ratio or default.oversubscription_ratio,
    )


class HostReader:
    """Reads the memory sizes of this machine, which takes a millisecond, at most once a second."""

    INTERVAL_S = 1.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = -self.INTERVAL_S
        self._facts: HostFacts | None = None

    def __call__(self) -> HostFacts:
        """Return the sizes, as they were at most a second ago."""
        now = self._clock()
        if self._facts is None or now - self._read_at >= self.INTERVAL_S:
            self._facts, self._read_at = read_this_host(), now
        return self._facts


@dataclass(frozen=True, slots=True)
class _PoolShare:
    """The pool of managed memory, as an allocator that shares a cap with the roles of a run."""

    pool: ManagedPool
    role: str

    def live_bytes(self) -> int:
        """Return the bytes that torch holds for the pool; 0 once it is closed."""
        try:
            return self.pool.counters().live_bytes
        except PoolError:
            return 0

    def limit(self, nbytes: int) -> None:
        """Set the largest size of the pool."""
        with suppress(PoolError):  # it is closed
            self.pool.set_cap(nbytes)

    def denied(self) -> int:
        """Return how often the pool's limit has refused memory; 0 once it is closed."""
        try:
            return self.pool.counters().denied
        except PoolError:
            return 0


class MemorySession:
    """The objects that manage CUDA memory for one process or run, created on first use.

    These are hardware detection, memory hints, a managed pool, memory reclamation and statistics.
    """

    def __init__(
        self,
        open_machine: Callable[[], Machine],
        read_settings: Callable[[], MemorySettings],
        emit: Callable[[Event], None],
        gc_freeze: GcFreeze | None = None,
        read_host: Callable[[], HostFacts] | None = None,
    ) -> None:
        """Create a session; nothing is opened or detected yet.

        With the run's `gc_freeze`, reclaiming memory also collects objects that it has frozen.
        `read_host` reads the memory sizes of the host; by default at most once a second.
        """
        self.hints_override: bool | None = None
        """Turns memory hints on or off; None leaves that to environment variables and platform."""
        self.use_uvm_override: bool | None = None
        """Turns managed memory on or off; None leaves that to environment variables."""
        self.roles_off = ""
        """Setting that keeps the roles of a run out of managed memory; empty: none does."""
        self.managed_cap_override: int | None = None
        """Maximum managed memory in bytes; None: the default of `managed_cap`."""
        self.num_sharing_host = 1
        """Number of processes of the run on this host, which share its memory."""
        self.pool_role = "pool"
        """Name of the memory of the pool in statistics."""
        self._open_machine = open_machine
        self._read_settings = read_settings
        self.emit = emit
        """Receives the events of the session."""
        self._gc_freeze = gc_freeze or GcFreeze()
        self._read_host = read_host or HostReader()
        self._pool: ManagedPool | PoolUnavailable | None = None
        self._cap_is_lowered = False
        self._is_governed = False
        """True once memory was reclaimed as needed between steps; then only that changes stages."""
        self.trimmers = Trimmers()
        """Components that give memory back if the device is full."""

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
    def are_hints_default(self) -> bool:
        """True if neither `hints_override` nor an environment variable is set."""
        return self.hints_override is None and self.settings.uvm_hints is None

    @property
    def wants_pool(self) -> bool:
        """True if a pool of CUDA managed memory should be used.

        The setting `use_uvm` decides; if it is not set, `hints_enabled`.
        """
        setting = self.use_uvm
        return self.hints_enabled if setting is None else setting

    @property
    def use_uvm(self) -> bool | None:
        """The setting `use_uvm` of the run file, or else of the environment; None: not set.

        True lets what a run keeps (optimizer state, gradients, ...) overflow to managed memory.
        """
        if self.use_uvm_override is not None:
            return self.use_uvm_override
        return self.settings.use_uvm

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
            emit=self.emit,
        )

    @cached_property
    def policy(self) -> StagePolicy:
        """Thresholds at which memory is reclaimed, from environment variables and defaults."""
        return stage_policy(self.settings)

    @property
    def pattern(self) -> AccessPattern | None:
        """The setting `uvm_access_pattern`: where managed memory should be; None: not set."""
        name = self.settings.access_pattern
        return None if name is None else AccessPattern(name)

    @cached_property
    def managed_cap(self) -> int:
        """Maximum managed memory of the process in bytes; `managed_cap_override` sets it.

        By default, on a coherent machine, a multiple of device memory. Over PCIe, a quarter of the
        device memory that is free at the first use: managed memory is slow there, and must not
        crowd out the memory that torch allocates. This process's share of host memory limits each.
        """
        platform, driver, free_over_pcie = self.machine.platform, self.machine.driver, None
        if platform.link is Link.MANAGED and driver is not None:
            free_over_pcie = driver.memory_info(platform.device)[0]
        return managed_cap(
            *(self.policy, platform.device_bytes, self._host_share),
            chosen=self.managed_cap_override,
            free_over_pcie=free_over_pcie,
        )

    @property
    def _host_share(self) -> int:
        return self.machine.platform.host_bytes // self.num_sharing_host

    @property
    def cap_reason(self) -> str:
        """Reason for the value of `managed_cap`, in words."""
        policy, platform, cap = self.policy, self.machine.platform, self.managed_cap
        if cap == self.managed_cap_override:
            return "gh200_optimizations.managed_memory"
        if cap == host_room(policy, self._host_share):
            sharing = self.num_sharing_host
            return "host memory" if sharing == 1 else f"host memory, shared by {sharing} ranks"
        if cap < int(policy.oversubscription_ratio * platform.device_bytes):
            return f"1/{PCIE_CAP_PART} of the free device memory"
        return f"uvm_oversubscription_ratio {policy.oversubscription_ratio:g}"

    @cached_property
    def accounting(self) -> MemoryAccounting:
        """Counts of the memory that gracetune allocates, with a cap on managed memory."""
        return MemoryAccounting({Tier.MANAGED: self.managed_cap})

    @cached_property
    def stages(self) -> Stages:
        """Tracks whether device memory is almost full, and frees memory if so."""
        device = self.machine.platform.device
        self.trimmers.register("garbage", Garbage(self._gc_freeze, device))
        pages = ManagedPages(lambda: self._opened_roles, self.policy.stage1_above)
        self.trimmers.register("managed pages", pages)
        empty_cache = hard_reclamation(device, self._gc_freeze)
        return Stages(self.policy, self.trimmers, empty_cache, self.emit)

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
            settings = PoolSettings(self.managed_cap, self.pattern or AccessPattern.GPU_FIRST)
            refused = self._refused(self.machine.driver)
            if refused is not None:
                self._pool = refused
                return self._pool
            self._pool = open_pool(platform, find_shim(), settings, TorchMemPools(), self.emit)
            if isinstance(self._pool, ManagedPool):
                sharing = _PoolShare(self._pool, self.pool_role)
                self.accounting.share(Tier.MANAGED, sharing)
                # If the run could not be built, nobody closes the session.
                weakref.finalize(self, self._pool.close, final=True).atexit = False
        return self._pool

    def _refused(self, driver: Driver) -> PoolUnavailable | None:
        """Return why no managed memory can be allocated, also by a trial; None if some can."""
        platform = self.machine.platform
        if not platform.has_managed:
            return None
        if self.managed_cap <= 0:
            return PoolUnavailable(f"the limit of managed memory is 0 bytes ({self.cap_reason})")
        code, pointer = driver.allocate_managed(platform.page_bytes)
        if code != CudaCode.SUCCESS:
            return PoolUnavailable(f"the driver refuses managed memory (code {code})")
        driver.free(pointer)
        return None

    @cached_property
    def managed(self) -> ManagedMemory | PoolUnavailable:
        """Managed memory for the roles of a run (optimizer state, EMA, ...), or why there is none.

        It is there if `use_uvm` is set and the machine has managed memory to move.
        """
        platform, driver = self.machine.platform, self.machine.driver
        if not self.use_uvm:
            return PoolUnavailable(OVERFLOW_OFF)
        if self.roles_off:
            return PoolUnavailable(f"{self.roles_off}; auto lets a run continue in managed memory")
        if driver is None or not platform.has_managed:
            return PoolUnavailable(f"no managed memory: {platform.reasons['link']}")
        if platform.link is Link.INTEGRATED:
            return PoolUnavailable(f"nothing to oversubscribe: {platform.reasons['link']}")
        refused = self._refused(driver)
        if refused is not None:
            return refused
        # What an earlier run of this process has left in reference cycles.
        self._gc_freeze.collect()
        prefetcher = PrefetchThread(driver, platform.device, self.emit)
        return ManagedMemory(
            *(driver, platform.device, self.accounting, prefetcher, self.emit),
            pattern=self.pattern,
            enough=self.policy.stage1_above,
        )

    def close(self) -> None:
        """Give up managed memory: what is not in use is freed at once, the rest when it is unused.

        The tensors in it stay valid.
        """
        if self._opened_roles is not None:
            self._opened_roles.close()
        if self._opened_pool is not None:
            self._opened_pool.close(final=True)

    def observe(self, *, reclaim: bool, step: int = 0) -> Stage:
        """Read the memory in use and return whether device memory is oversubscribed (the stage).

        With `reclaim`, memory is freed if needed; `step` is the last training step, for events.
        Without managed memory in use, nothing is read, since nothing can be oversubscribed.
        """
        roles, pool = self._opened_roles, self._opened_pool
        if pool is None and (roles is None or not roles.slabs):
            return self.stages.state.stage
        reading = self._reading()
        if reading is None:
            return self.stages.state.stage
        if not reclaim:
            return self.stages.update(reading, step)
        self._is_governed = True
        self._bound_cap(reading, step)
        return self.stages.update_and_reclaim(reading, step)

    @property
    def _opened_roles(self) -> ManagedMemory | None:
        """Managed memory for roles, if it was used; unlike `managed`, this does not open it."""
        roles = self.__dict__.get("managed")
        return roles if isinstance(roles, ManagedMemory) else None

    @property
    def _opened_pool(self) -> ManagedPool | None:
        return self._pool if isinstance(self._pool, ManagedPool) else None

    def stats(self) -> Stats:
        """Return torch's memory statistics, extended by gracetune's (`uvm.*`)."""
        return {**torch_memory_stats(), **self._uvm_stats(self.faults)}

    def uvm_stats(self) -> Stats:
        """Return gracetune's memory statistics (`uvm.*`).

        Unlike `stats`, this does not start to count page faults, which takes CUPTI from a profiler.
        """
        return self._uvm_stats(self.__dict__.get("faults", "nothing counts page faults yet"))

    def _uvm_stats(self, faults: FaultCounter | str) -> Stats:
        if not self._is_governed:
            self.observe(reclaim=False)
        stats = uvm_stats(
            self.machine.platform,
            self._hints.counts(),
            self.stages.state,
            self.accounting,
            faults,
            self._pool_counters(),
        )
        stats["uvm.headroom"] = self.headroom()
        for action, nbytes in self.stages.reclaimed.items():
            stats[f"uvm.{action}_bytes"] = nbytes
        return stats

    def headroom(self) -> int:
        """Return the free device memory above the threshold of stage 2, in bytes.

        It is 0 on a CPU, and before CUDA is used.
        """
        reading = self._reading()
        if reading is None:
            return 0
        return reading.device_free - self.policy.stage2_below(reading.device_total)

    def _reading(self) -> Reading | None:
        """Read the memory in use; None without a GPU, and before CUDA is used."""
        platform, driver = self.machine.platform, self.machine.driver
        if driver is None or (torch.cuda.is_available() and not cuda_is_in_use()):
            return None
        host = self._read_host().usable_bytes(platform.device_node)
        reading = read_memory(driver, platform.device, host)
        managed, held = self.accounting.current(Tier.MANAGED), self.accounting.held(Tier.MANAGED)
        return replace(reading, managed=managed, held=held)

    def _bound_cap(self, reading: Reading, step: int) -> None:
        """Lower the cap of managed memory while the host has less memory than it assumes.

        The roles of the run and the pool share one cap. What is held for a role stays within it.
        """
        cap = bounded_cap(self.policy, self.managed_cap, reading, self.num_sharing_host)
        self.accounting.set_cap(Tier.MANAGED, cap)
        is_lowered = cap < self.managed_cap
        if is_lowered is not self._cap_is_lowered:
            self._cap_is_lowered = is_lowered
            reason = (
                "the host has too little memory to take more managed pages"
                if is_lowered
                else "the host can take managed pages again"
            )
            memory = reading.device_free, reading.host_available
            self.emit(MemoryReclaimed(step, "cap", {"cap": cap}, cap, *memory, reason))

    def _pool_counters(self) -> ShimCounters | str:
        if isinstance(self._pool, ManagedPool):
            try:
                return self._pool.counters()
            except PoolError as error:
                return str(error)
        return "no pool was opened" if self._pool is None else self._pool.reason


# What a run says about managed memory

BATCH_EFFECTS = {
    AccessPattern.GPU_FIRST: "batches prefer the device",
    AccessPattern.BALANCED: "batches stay where they were used last",
    AccessPattern.CPU_FIRST: "batches prefer the host, where kernels read them",
}
"""Effect of each access pattern on the pool of batches."""
ROLE_EFFECTS = {
    AccessPattern.GPU_FIRST: "what overflows is at home on the device while that has headroom, and "
    "returns to it after a reclamation; else kernels use it in host memory",
    AccessPattern.BALANCED: "what overflows stays where it was used last",
    AccessPattern.CPU_FIRST: "what overflows is at home in host memory, where kernels use it",
}
"""Effect of each access pattern on the roles of a run, unless the run file places them."""


def managed_memory_notice(
    session: MemorySession, role_settings: Sequence[str] = (), access: str = "auto"
) -> Notice | None:
    """Return the one line about managed memory: what is in it and why, or what is not in use.

    `access` is the setting `gh200_optimizations.managed_access`. The line names the effect of each
    `uvm_*` setting, and which of the given `role_settings` have none; it is a warning if one that
    was given has none. None if neither managed memory nor such a setting was asked for.
    """
    roles_given = [f"gh200_optimizations.{name}" for name in role_settings]
    given = [*_given_settings(session.settings), *roles_given]
    idle = f"; no effect: {', '.join(given)}" if given else ""
    if not session.wants_pool:
        off = "managed memory is off (use_uvm)"
        if session.hints_enabled:
            off += ", so hints have no effect"
            if not idle and session.are_hints_default:
                return Notice(f"memory: {off}")
        elif not idle:
            return None
        return Notice(f"{off}{idle}", level="warning")
    pool = session.pool()
    roles = session.managed if session.use_uvm else None
    has_pool, has_roles = isinstance(pool, ManagedPool), isinstance(roles, ManagedMemory)
    if not has_pool and not has_roles:
        reason = pool.reason if isinstance(pool, PoolUnavailable) else ""
        reason = reason.removeprefix("no managed memory: ").rstrip(".")
        text = "managed memory is not in use, although it is asked for"
        if session.use_uvm is None and session.are_hints_default:  # it is the machine's default
            text = "batches are not in managed memory"
        unused = [name for name in given if name not in reason]
        idle = f"; no effect: {', '.join(unused)}" if unused else ""
        text = f"{text}: {reason}. Ordinary memory is used{idle}"
        return Notice(text, level="warning", fallback=True)
    overflow = "what the device has no space for"
    if isinstance(pool, PoolUnavailable):
        reason = pool.reason.rstrip(".")
        text = f"batches are not in managed memory: {reason}; in it is only {overflow}"
    else:
        text = (
            f"managed memory: batches, and {overflow}" if has_roles else "managed memory: batches"
        )
    limit = f"at most {format_bytes(session.managed_cap)} ({session.cap_reason})"
    settings = _setting_effects(session, given)
    pattern = _pattern_effects(session, access, has_pool=has_pool, has_roles=has_roles)
    effects = "; ".join([text + f", {limit}", *pattern, *settings])
    if not has_roles:
        # The limit is also that of batches.
        unused = [name for name in roles_given if not name.endswith(".managed_memory")]
        why = session.roles_off or "use_uvm is not set"
        effects += f"; no effect: {', '.join(unused)}, because {why}" if unused else ""
    if not has_pool or "no effect: " in effects:
        return Notice(effects, level="warning", fallback=not has_pool)
    return Notice(f"memory: {effects}")


def _given_settings(settings: MemorySettings) -> list[str]:
    values = {
        "uvm_oversubscription_ratio": settings.oversubscription_ratio,
        "uvm_access_pattern": settings.access_pattern,
        "uvm_stage1_threshold": settings.stage1_threshold,
        "uvm_stage1_min_bytes": settings.stage1_min_bytes,
    }
    return [name for name, value in values.items() if value is not None]


def _pattern_effects(
    session: MemorySession, access: str, *, has_pool: bool, has_roles: bool
) -> list[str]:
    """Return what `uvm_access_pattern` governs, in words; nothing if it was not given."""
    pattern = session.pattern
    if pattern is None:
        return []
    effects = [BATCH_EFFECTS[pattern]] if has_pool else []
    if has_roles and access == "auto":
        over = (
            session.machine.platform.link is Link.MANAGED and pattern is not AccessPattern.BALANCED
        )
        effects.append(ROLE_EFFECTS[pattern] + (" over PCIe, which is slow" if over else ""))
    elif has_roles:
        effects.append(f"what overflows is placed by gh200_optimizations.managed_access: {access}")
    return [f"uvm_access_pattern: {', and '.join(effects)}"]


def _setting_effects(session: MemorySession, given: Sequence[str]) -> list[str]:
    """Return what each `uvm_*` setting that was given governs, in words."""
    effects = []
    if {"uvm_stage1_threshold", "uvm_stage1_min_bytes"} & {*given}:
        below = session.policy.stage2_below(session.machine.platform.device_bytes)
        effects.append(f"memory is reclaimed if less than {format_bytes(below)} are free")
    if "uvm_oversubscription_ratio" in given and "ratio" not in session.cap_reason:
        effects.append("no effect: uvm_oversubscription_ratio, because it allows more")
    return effects
