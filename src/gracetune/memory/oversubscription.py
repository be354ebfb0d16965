"""Decide when device memory is oversubscribed, and reclaim memory between steps.

A run with a managed pool is in one of two stages: in stage 1 everything is resident on the device;
in stage 2 device memory is oversubscribed, and managed pages move between host and device.
`advance` is a pure state machine: it takes a memory reading and returns the next state and an
action. It keeps no running count of memory, so an `empty_cache()` elsewhere cannot confuse it.
`Stages` holds the state of one run and performs the actions.

    free memory        < threshold               -> stage 2
    free memory        > threshold + hysteresis  -> stage 1
    in between                                   -> the stage stays as it is

In stage 2, a light reclamation trims what components have registered as `Trimmable`: caches, the
prefetcher, the weight ring and managed pages. If that did not help, a full reclamation empties
torch's allocator cache. What was trimmed comes back when there is space for it. Nothing of this
changes the results of training. Each decision is an event with its effect in bytes.

`GcFreeze` is here because a reclamation has to collect Python garbage as well.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from gracetune.errors import ConfigError
from gracetune.events.types import MemoryReclaimed, StageChanged
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.events.types import Event
    from gracetune.memory.driver import Driver


PCIE_CAP_PART = 4
"""Over PCIe, managed memory may be at most 1/PCIE_CAP_PART of the free device memory."""


class Stage(IntEnum):
    """State of device memory: it has space (stage 1) or is oversubscribed (stage 2).

    Memory statistics report the number as `uvm.stage`.
    """

    RESIDENT = 1
    OVERSUBSCRIBED = 2


class Action(StrEnum):
    """Kind of memory reclamation to perform now; `light` is cheaper than `hard`."""

    NONE = "none"
    LIGHT = "light"
    """Collect Python garbage, and trim caches, prefetched data and managed pages."""
    HARD = "hard"
    """Synchronize the device, then free the cached segments of torch's allocator."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Device and host memory in use at one moment, in bytes."""

    reserved: int
    """Device memory that torch's allocator holds, in use or cached."""
    allocated: int
    """Device memory that tensors use."""
    device_free: int
    device_total: int
    host_available: int
    managed: int = 0
    """CUDA managed memory that is allocated, on the device or on the host."""
    held: int = 0
    """CUDA managed memory that a role of the run was promised, and will allocate later."""


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """Thresholds for when device memory counts as full and is reclaimed.

    `uvm_*` are the corresponding keys of PYTORCH_CUDA_ALLOC_CONF.
    """

    threshold: float = 0.10
    """`uvm_stage1_threshold`: device memory is full (stage 2) if a smaller share is free."""
    hysteresis: float = 0.05
    """Share of device memory, besides `threshold`, that must be free for stage 1 (not full)."""
    min_free_bytes: int = 0
    """`uvm_stage1_min_bytes`: device memory is full (stage 2) if fewer bytes are free.

    The larger of this number and `threshold` counts.
    """
    oversubscription_ratio: float = 5.0
    """`uvm_oversubscription_ratio`: maximum managed bytes, as a multiple of device memory."""
    host_reserve_bytes: int = 4 * GIB
    """Host memory in bytes that managed memory must leave free."""
    interval: int = 100
    """Minimum number of memory readings between two reclamations of the same kind.

    The next steps refill reclaimed memory, so reclaiming it again at once gains nothing.
    """

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigError(
                f"uvm_stage1_threshold is {self.threshold}, but it is a share of device memory and "
                "must be above 0 and below 1. The default is 0.10."
            )
        if self.hysteresis <= 0 or self.threshold + self.hysteresis >= 1:
            raise ConfigError(
                f"The stage hysteresis is {self.hysteresis}. It must be above 0, and its sum with "
                f"uvm_stage1_threshold ({self.threshold}) must be below 1."
            )
        if self.oversubscription_ratio <= 1:
            raise ConfigError(
                f"uvm_oversubscription_ratio is {self.oversubscription_ratio}, but it must be "
                "above 1. The default is 5.0. To stay within device memory, leave out use_uvm."
            )
        if min(self.min_free_bytes, self.host_reserve_bytes) < 0 or self.interval < 1:
            raise ConfigError(
                f"uvm_stage1_min_bytes is {self.min_free_bytes}, the host reserve is "
                f"{self.host_reserve_bytes} and the reclamation interval is {self.interval}. "
                "Byte counts cannot be negative, and the interval must be at least 1."
            )

    def stage2_below(self, device_total: int) -> int:
        """Return the bytes of free device memory below which it is oversubscribed (stage 2)."""
        return max(int(self.threshold * device_total), self.min_free_bytes)

    def stage1_above(self, device_total: int) -> int:
        """Return the bytes of free device memory above which it counts as not full (stage 1)."""
        return self.stage2_below(device_total) + int(self.hysteresis * device_total)


@dataclass(frozen=True, slots=True)
class StageState:
    """State of device memory (the stage: full or not), with counts of changes and reclamations."""

    stage: Stage = Stage.RESIDENT
    transitions: int = 0
    light_reclamations: int = 0
    hard_reclamations: int = 0
    readings_since_light: int | None = None
    """Memory readings since the last light reclamation (garbage collection); None if never."""
    readings_since_hard: int | None = None
    """Memory readings since the last hard reclamation (torch's cache emptied); None if never."""


def managed_cap(
    policy: StagePolicy,
    device_total: int,
    host_available: int,
    *,
    chosen: int | None = None,
    free_over_pcie: int | None = None,
) -> int:
    """Return the maximum size of managed memory in bytes.

    It is the size `chosen` by the user, or else `oversubscription_ratio` times device memory. Over
    PCIe it is at most a quarter of the free device memory, `free_over_pcie`: managed memory is slow
    there, and must not crowd out what torch allocates. Host memory minus its reserve limits each:
    the driver may evict every managed page to the host, and the kernel kills a process that uses
    too much.
    """
    cap = chosen
    if cap is None:
        cap = int(policy.oversubscription_ratio * device_total)
        if free_over_pcie is not None:
            cap = min(cap, free_over_pcie // PCIE_CAP_PART)
    return min(cap, host_room(policy, host_available))


def host_room(policy: StagePolicy, host_available: int) -> int:
    """Return the bytes of host memory that managed pages may take."""
    return max(0, host_available - policy.host_reserve_bytes)


def advance(policy: StagePolicy, state: StageState, reading: Reading) -> tuple[StageState, Action]:
    """Return the next state, in which device memory is full or not, and how to reclaim memory."""
    stage = _next_stage(policy, state.stage, reading)
    entered = stage is Stage.OVERSUBSCRIBED and state.stage is Stage.RESIDENT
    following = replace(
        state,
        stage=stage,
        transitions=state.transitions + (stage is not state.stage),
        readings_since_light=_increment(state.readings_since_light),
        readings_since_hard=_increment(state.readings_since_hard),
    )
    action = _choose_action(policy, following, reading, entered=entered)
    if action is Action.LIGHT:
        count = following.light_reclamations + 1
        following = replace(following, light_reclamations=count, readings_since_light=0)
    elif action is Action.HARD:
        count = following.hard_reclamations + 1
        following = replace(following, hard_reclamations=count, readings_since_hard=0)
    return following, action


def _next_stage(policy: StagePolicy, stage: Stage, reading: Reading) -> Stage:
    if reading.device_free < policy.stage2_below(reading.device_total):
        return Stage.OVERSUBSCRIBED
    if reading.device_free > policy.stage1_above(reading.device_total):
        return Stage.RESIDENT
    return stage


def _choose_action(
    policy: StagePolicy, state: StageState, reading: Reading, *, entered: bool
) -> Action:
    """Choose how to reclaim memory: not at all unless device memory is full.

    First collect garbage (light). If that did not help by the next reading, empty torch's allocator
    cache (hard), provided that its size suffices. Each happens at most once in `interval` readings.
    """
    threshold = policy.stage2_below(reading.device_total)
    if reading.device_free >= threshold:
        return Action.NONE
    if _is_due(state.readings_since_light, policy.interval):
        return Action.LIGHT
    cached = reading.reserved - reading.allocated
    suffices = reading.device_free + cached >= threshold
    if not entered and suffices and _is_due(state.readings_since_hard, policy.interval):
        return Action.HARD
    return Action.NONE


def _increment(readings: int | None) -> int | None:
    return None if readings is None else readings + 1


def _is_due(readings_since: int | None, interval: int) -> bool:
    return readings_since is None or readings_since >= interval


def is_host_short(policy: StagePolicy, reading: Reading) -> bool:
    """Return True if host memory could not take all managed pages, which may be evicted to it."""
    return reading.host_available - policy.host_reserve_bytes < reading.managed


def may_restore(policy: StagePolicy, reading: Reading, trimmed: int) -> bool:
    """Return True if using `trimmed` bytes of device memory again would keep it in stage 1."""
    return reading.device_free - trimmed > policy.stage1_above(reading.device_total)


def bounded_cap(policy: StagePolicy, cap: int, reading: Reading, num_sharing: int = 1) -> int:
    """Return the maximum of managed memory now: at most `cap`, and what the host can still take.

    `num_sharing` processes share the host; each may take an equal part of what is left. It is never
    less than what is allocated and held: the next step needs that, and only batches and other roles
    can do with less.
    """
    room = host_room(policy, reading.host_available) // num_sharing
    return min(cap, reading.managed + max(reading.held, room))


class Trimmable(Protocol):
    """A component that can do without some of its memory. Results do not depend on it."""

    def trim(self) -> int:
        """Free memory, or let the next steps free it; return the bytes."""
        ...

    def restore(self) -> None:
        """Use as much memory again as before `trim`, as far as it is needed."""
        ...


class Trimmers:
    """The components that a light reclamation trims, by name, in the order of registration."""

    def __init__(self) -> None:
        self._on_device: dict[str, Trimmable] = {}
        self._on_host: dict[str, Trimmable] = {}
        self._trimmed: dict[str, int] = {}

    def register(self, name: str, component: Trimmable, *, on_host: bool = False) -> None:
        """Add a component, or replace the one with this name.

        With `on_host`, it frees host memory, and is trimmed only if managed pages need that.
        """
        (self._on_host if on_host else self._on_device)[name] = component

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that were trimmed and not yet restored."""
        return sum(self._trimmed.get(name, 0) for name in self._on_device)

    @property
    def has_trimmed(self) -> bool:
        """True if components were trimmed and not yet restored."""
        return bool(self._trimmed)

    def trim(self, *, with_host: bool) -> dict[str, int]:
        """Trim all components, and with `with_host` those in host memory; return bytes by name."""
        chosen = self._on_device | (self._on_host if with_host else {})
        freed = {name: component.trim() for name, component in chosen.items()}
        for name, nbytes in freed.items():
            self._trimmed[name] = self._trimmed.get(name, 0) + max(0, nbytes)
        return freed

    def restore(self) -> dict[str, int]:
        """Restore all components that were trimmed; return the bytes they had given back."""
        restored, self._trimmed = self._trimmed, {}
        components = self._on_device | self._on_host
        for name in restored:
            if name in components:
                components[name].restore()
        return restored


ALLOCATOR_CACHE = "allocator cache"
"""Name of the memory that a full reclamation frees, in its event."""


class Stages:
    """Tracks whether device memory is full, frees memory if so, and reports each decision."""

    def __init__(
        self,
        policy: StagePolicy,
        trimmers: Trimmers,
        empty_cache: Callable[[], int],
        emit: Callable[[Event], None],
    ) -> None:
        """`empty_cache` empties torch's allocator cache and returns the bytes freed."""
        self.policy = policy
        self.state = StageState()
        self.reclaimed: dict[Action, int] = {Action.LIGHT: 0, Action.HARD: 0}
        """Bytes freed so far, by kind of reclamation."""
        self._trimmers = trimmers
        self._empty_cache = empty_cache
        self._emit = emit

    @property
    def reclaimed_bytes(self) -> int:
        """Bytes freed so far by reclamations of both kinds."""
        return sum(self.reclaimed.values())

    def update(self, reading: Reading, step: int = 0) -> Stage:
        """Return whether device memory is full (the stage) by a memory reading; free nothing."""
        seen, _ = advance(self.policy, self.state, reading)
        return self._enter(
            replace(self.state, stage=seen.stage, transitions=seen.transitions), reading, step
        )

    def update_and_reclaim(self, reading: Reading, step: int = 0) -> Stage:
        """Return whether device memory is full (the stage), and free memory if it is.

        Called between steps; `step` is the number of the last one, for events.
        """
        state, action = advance(self.policy, self.state, reading)
        self._enter(state, reading, step)
        limit = format_bytes(self.policy.stage2_below(reading.device_total))
        short = f"{format_bytes(reading.device_free)} of device memory are free, below {limit}"
        if action is Action.LIGHT:
            with_host = is_host_short(self.policy, reading)
            freed = self._trimmers.trim(with_host=with_host)
            if with_host:
                short += "; host memory could not take all managed pages"
            self._report(action, "light", freed, reading, short, step)
        elif action is Action.HARD:
            freed = {ALLOCATOR_CACHE: self._empty_cache()}
            short += "; the light reclamation was not enough"
            self._report(action, "full", freed, reading, short, step)
        elif self._may_restore(reading):
            freed = self._trimmers.restore()
            reason = f"{format_bytes(reading.device_free)} of device memory are free again"
            self._report(action, "restored", freed, reading, reason, step)
        return self.state.stage

    def _may_restore(self, reading: Reading) -> bool:
        return (
            self._trimmers.has_trimmed
            and self.state.stage is Stage.RESIDENT
            and may_restore(self.policy, reading, self._trimmers.device_bytes)
        )

    def _report(
        self,
        action: Action,
        kind: Literal["light", "full", "restored"],
        freed: Mapping[str, int],
        reading: Reading,
        reason: str,
        step: int,
    ) -> None:
        nbytes = sum(freed.values())
        if action is not Action.NONE:
            self.reclaimed[action] += nbytes
        self._emit(
            MemoryReclaimed(
                *(step, kind, freed, nbytes, reading.device_free, reading.host_available, reason)
            )
        )

    def _enter(self, state: StageState, reading: Reading, step: int) -> Stage:
        if state.stage is not self.state.stage:
            total = reading.device_total
            is_full = state.stage is Stage.OVERSUBSCRIBED
            limit = self.policy.stage2_below(total) if is_full else self.policy.stage1_above(total)
            self._emit(
                StageChanged(
                    *(step, int(state.stage), reading.device_free, total, limit, reading.managed)
                )
            )
        self.state = state
        return state.stage


def cuda_is_in_use() -> bool:
    """Return True if torch has started CUDA in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def read_memory(driver: Driver, device: int, host_available: int) -> Reading:
    """Read the memory in use on a device; the caller passes the available host memory."""
    free, total = driver.memory_info(device)
    return Reading(
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        device_free=free,
        device_total=total,
        host_available=host_available,
    )


class Garbage:
    """Python objects in reference cycles, which may hold tensors, as a `Trimmable`."""

    def __init__(self, gc_freeze: GcFreeze, device: int) -> None:
        self._gc_freeze = gc_freeze
        self._device = device

    def trim(self) -> int:
        """Collect reference cycles and return the device bytes freed."""
        before = torch.cuda.memory_allocated(self._device)
        self._gc_freeze.collect()
        return before - torch.cuda.memory_allocated(self._device)

    def restore(self) -> None:
        """Do nothing: garbage is not needed again."""


def hard_reclamation(device: int, gc_freeze: GcFreeze) -> Callable[[], int]:
    """Return a function that empties torch's allocator cache and returns the bytes freed.

    The cached segments of a live `MemPool` remain: torch frees them only together with the pool.
    """

    def reclaim() -> int:
        gc_freeze.collect()
        if not cuda_is_in_use():
            return 0
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(device)

    return reclaim


class GcFreeze:
    """Excludes start-up objects from Python's garbage collections (`gc.freeze`).

    A full collection visits every object: half a million with torch and diffusers loaded, which
    takes as long as a short training step. Without this class, eager training triggers one every
    few dozen steps. After `freeze`, collections visit only objects created since.

    The garbage collector is global to the process. Objects that other code has frozen before stay
    frozen.
    """

    FROZEN_BY_PYTHON = 1000
    """Python 3.12 freezes about 400 objects itself. Other code freezes far more than this."""

    def __init__(self) -> None:
        self._is_frozen = False
        """True if `freeze` has frozen objects and `unfreeze` was not called since."""

    def freeze(self) -> None:
        """Collect garbage, then exclude all existing objects from later collections."""
        if gc.get_freeze_count() > self.FROZEN_BY_PYTHON and not self._is_frozen:
            return
        self.collect()
        gc.freeze()
        self._is_frozen = True

    def unfreeze(self) -> None:
        """Include the frozen objects in collections again."""
        if self._is_frozen:
            gc.unfreeze()
            self._is_frozen = False

    def collect(self) -> None:
        """Run a full collection, including frozen objects, since these may refer to tensors."""
        if self._is_frozen:
            gc.unfreeze()
        gc.collect()
        if self._is_frozen:
            gc.freeze()


def return_freed_memory() -> None:
    """Return freed host memory to the operating system. glibc keeps blocks of up to 32 MiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
    if trim is not None:
        trim(0)
