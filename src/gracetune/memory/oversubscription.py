"""Decide when device memory is oversubscribed, and reclaim memory between steps.

A run with a managed pool is in one of two stages: in stage 1 everything is resident on the device;
in stage 2 device memory is oversubscribed, and managed pages move between host and device.
`advance` is a pure state machine: it takes a memory reading and returns the next state and an
action. It keeps no running count of memory, so an `empty_cache()` elsewhere cannot confuse it.
`Stages` holds the state of one run and performs the actions.

    free memory        < threshold               -> stage 2
    free memory        > threshold + hysteresis  -> stage 1
    in between                                   -> the stage stays as it is

`GcFreeze` is here because a reclamation has to collect Python garbage as well.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import torch

from gracetune.errors import ConfigError
from gracetune.events.types import Notice
from gracetune.units import GIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    """Collect Python garbage and call other registered functions that free memory."""
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


def managed_cap(policy: StagePolicy, device_total: int, host_available: int) -> int:
    """Return the maximum size of managed memory in bytes.

    It is `oversubscription_ratio` times device memory, or host memory minus its reserve if that is
    less: the driver may evict every managed page to the host, and the kernel kills a process that
    uses too much.
    """
    by_ratio = int(policy.oversubscription_ratio * device_total)
    by_host = max(0, host_available - policy.host_reserve_bytes)
    return min(by_ratio, by_host)


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


class Stages:
    """Tracks whether device memory is full, frees memory if so, and counts the bytes freed."""

    def __init__(
        self,
        policy: StagePolicy,
        light: Callable[[], int],
        hard: Callable[[], int],
        emit: Callable[[Notice], None],
    ) -> None:
        """`light` collects garbage, `hard` empties torch's cache; both return the bytes freed."""
        self.policy = policy
        self.state = StageState()
        self.reclaimed: dict[Action, int] = {Action.LIGHT: 0, Action.HARD: 0}
        """Bytes freed so far, by kind of reclamation."""
        self._light = light
        self._hard = hard
        self._emit = emit

    @property
    def reclaimed_bytes(self) -> int:
        """Bytes freed so far by reclamations of both kinds."""
        return sum(self.reclaimed.values())

    def update(self, reading: Reading) -> Stage:
        """Return whether device memory is full (the stage) by a memory reading; free nothing."""
        seen, _ = advance(self.policy, self.state, reading)
        return self._enter(
            replace(self.state, stage=seen.stage, transitions=seen.transitions), reading
        )

    def update_and_reclaim(self, reading: Reading) -> Stage:
        """Return whether device memory is full (the stage), and free memory if it is.

        Called between steps.
        """
        state, action = advance(self.policy, self.state, reading)
        self._enter(state, reading)
        if action is Action.LIGHT:
            self.reclaimed[action] += self._light()
        elif action is Action.HARD:
            self.reclaimed[action] += self._hard()
        return self.state.stage

    def _enter(self, state: StageState, reading: Reading) -> Stage:
        if state.stage is not self.state.stage:
            self._emit(Notice(_describe(state.stage, reading)))
        self.state = state
        return state.stage


def _describe(stage: Stage, reading: Reading) -> str:
    return (
        f"memory stage {int(stage)} ({stage.name.lower()}): "
        f"{format_bytes(reading.device_free)} of {format_bytes(reading.device_total)} "
        "device memory free"
    )


def read_memory(device: int, host_available: int) -> Reading:
    """Read the memory in use on a CUDA device; the caller passes the available host memory."""
    free, total = torch.cuda.mem_get_info(device)
    return Reading(
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        device_free=free,
        device_total=total,
        host_available=host_available,
    )


def light_reclamation(trimmers: Sequence[Callable[[], int]]) -> Callable[[], int]:
    """Return a function that calls the `trimmers`, which free memory, and sums the bytes freed."""

    def reclaim() -> int:
        return sum(trim() for trim in trimmers)

    return reclaim


def hard_reclamation(device: int, gc_freeze: GcFreeze) -> Callable[[], int]:
    """Return a function that empties torch's allocator cache and returns the bytes freed.

    The cached segments of a live `MemPool` remain: torch frees them only together with the pool.
    """

    def reclaim() -> int:
        gc_freeze.collect()
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

    def __init__(self) -> None:
        self._is_frozen = False
        """True if `freeze` has frozen objects and `unfreeze` was not called since."""

    def freeze(self) -> None:
        """Collect garbage, then exclude all existing objects from later collections."""
        if gc.get_freeze_count() and not self._is_frozen:
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
