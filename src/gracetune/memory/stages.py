"""The two stages of device memory: all resident, or oversubscribed, with hysteresis between them.

A pure machine: readings in, stage and action out. It trusts no memory of its own about how much is
free, so it is right after an `empty_cache()` that nobody told it about. `Stages` keeps the state of
one run and calls the reclamations that it is handed; taking readings is `reclaim`'s.
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
    """How full the device is; the numbers are those of `uvm.stage`."""

    RESIDENT = 1
    OVERSUBSCRIBED = 2


class Action(StrEnum):
    """What a reading calls for."""

    NONE = "none"
    LIGHT = "light"
    """Trim what we own and can refill."""
    HARD = "hard"
    """Synchronise, and give torch's cached segments back to the device."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Memory at one moment, in bytes."""

    reserved: int
    """What torch holds of the device, cached or in use."""
    allocated: int
    """What of it is in use."""
    device_free: int
    device_total: int
    host_available: int


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """When stages change and reclamations run; the keys are those of PYTORCH_CUDA_ALLOC_CONF."""

    threshold: float = 0.10
    """`uvm_stage1_threshold`: share of the device below which free memory means stage 2."""
    hysteresis: float = 0.05
    """Share above the threshold that must be free again before stage 1 returns."""
    min_free_bytes: int = 0
    """`uvm_stage1_min_bytes`: a threshold in bytes; the larger of the two counts."""
    oversubscription_ratio: float = 5.0
    """`uvm_oversubscription_ratio`: managed bytes may be this many times the device's memory."""
    host_reserve_bytes: int = 4 * GIB
    """Host memory that managed pages must leave to everyone else."""
    interval: int = 100
    """Readings between two reclamations of a kind: what refills must not be trimmed at once."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ConfigError(
                f"uvm_stage1_threshold is {self.threshold}; it is a share of device memory, "
                "above 0 and below 1 (default 0.10)."
            )
        if self.hysteresis <= 0 or self.threshold + self.hysteresis >= 1:
            raise ConfigError(
                f"the stage hysteresis is {self.hysteresis}; it must be above 0, and with "
                f"uvm_stage1_threshold ({self.threshold}) below 1."
            )
        if self.oversubscription_ratio <= 1:
            raise ConfigError(
                f"uvm_oversubscription_ratio is {self.oversubscription_ratio}; it must be above 1 "
                "(default 5.0). To stay within device memory, leave use_uvm out."
            )
        if min(self.min_free_bytes, self.host_reserve_bytes) < 0 or self.interval < 1:
            raise ConfigError(
                f"uvm_stage1_min_bytes is {self.min_free_bytes}, the host reserve "
                f"{self.host_reserve_bytes}, the interval {self.interval}; "
                "bytes cannot be negative, and the interval is at least 1."
            )

    def stage2_below(self, device_total: int) -> int:
        """Free bytes under which stage 2 begins."""
        return max(int(self.threshold * device_total), self.min_free_bytes)

    def stage1_above(self, device_total: int) -> int:
        """Free bytes over which stage 1 returns."""
        return self.stage2_below(device_total) + int(self.hysteresis * device_total)


@dataclass(frozen=True, slots=True)
class StageState:
    """Where the machine is, and what it has done so far."""

    stage: Stage = Stage.RESIDENT
    transitions: int = 0
    light_reclamations: int = 0
    hard_reclamations: int = 0
    readings_since_light: int | None = None
    """Readings since the last light reclamation; none: there was none."""
    readings_since_hard: int | None = None


def managed_cap(policy: StagePolicy, device_total: int, host_available: int) -> int:
    """Most managed bytes: the ratio's share, but never more than the host could take whole.

    Any managed page may be evicted to the host, so the host must have room for all of them, less
    what others need. The ratio alone would leave the limit to the kernel's out-of-memory killer.
    """
    by_ratio = int(policy.oversubscription_ratio * device_total)
    by_host = max(0, host_available - policy.host_reserve_bytes)
    return min(by_ratio, by_host)


def advance(policy: StagePolicy, state: StageState, reading: Reading) -> tuple[StageState, Action]:
    """The next state, and what to do now."""
    stage = _next_stage(policy, state.stage, reading)
    entered = stage is Stage.OVERSUBSCRIBED and state.stage is Stage.RESIDENT
    aged = replace(
        state,
        stage=stage,
        transitions=state.transitions + (stage is not state.stage),
        readings_since_light=_aged(state.readings_since_light),
        readings_since_hard=_aged(state.readings_since_hard),
    )
    action = _choose(policy, aged, reading, entered=entered)
    if action is Action.LIGHT:
        aged = replace(aged, light_reclamations=aged.light_reclamations + 1, readings_since_light=0)
    elif action is Action.HARD:
        aged = replace(aged, hard_reclamations=aged.hard_reclamations + 1, readings_since_hard=0)
    return aged, action


def _next_stage(policy: StagePolicy, stage: Stage, reading: Reading) -> Stage:
    if reading.device_free < policy.stage2_below(reading.device_total):
        return Stage.OVERSUBSCRIBED
    if reading.device_free > policy.stage1_above(reading.device_total):
        return Stage.RESIDENT
    return stage


def _choose(policy: StagePolicy, state: StageState, reading: Reading, *, entered: bool) -> Action:
    """Light first; hard only where giving back the cache would lift us over the threshold."""
    stage2_below = policy.stage2_below(reading.device_total)
    if reading.device_free >= stage2_below:
        return Action.NONE
    if _due(state.readings_since_light, policy.interval):
        return Action.LIGHT
    cached = reading.reserved - reading.allocated
    helps = reading.device_free + cached >= stage2_below
    if not entered and helps and _due(state.readings_since_hard, policy.interval):
        return Action.HARD
    return Action.NONE


def _aged(readings: int | None) -> int | None:
    return None if readings is None else readings + 1


def _due(since: int | None, interval: int) -> bool:
    return since is None or since >= interval


class Stages:
    """The machine of one run: takes readings, reclaims, and counts."""

    def __init__(
        self,
        policy: StagePolicy,
        light: Callable[[], int],
        hard: Callable[[], int],
        emit: Callable[[Notice], None],
    ) -> None:
        """`light` and `hard` reclaim and return the bytes they freed."""
        self.policy = policy
        self.state = StageState()
        self.reclaimed_bytes = 0
        self._light = light
        self._hard = hard
        self._emit = emit

    def update(self, reading: Reading) -> Stage:
        """Take one reading and reclaim nothing: for who only wants to know."""
        seen, _ = advance(self.policy, self.state, reading)
        return self._enter(
            replace(self.state, stage=seen.stage, transitions=seen.transitions), reading
        )

    def update_and_reclaim(self, reading: Reading) -> Stage:
        """Take one reading and act on it; call it between steps, never inside one."""
        state, action = advance(self.policy, self.state, reading)
        self._enter(state, reading)
        if action is Action.LIGHT:
            self.reclaimed_bytes += self._light()
        elif action is Action.HARD:
            self.reclaimed_bytes += self._hard()
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


# ------------------------------------------------------------------------------------------
# Readings of torch's and the machine's memory, and the two reclamations that stages call.


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


# ------------------------------------------------------------------------------------------
# Python's own garbage: what a run was made of is looked through once, and not again and again.
#
# A full collection looks at every object there is, half a million with torch and what a trainer
# loads
# beside it. It comes whenever steps have made a quarter as many that lived a little, which eager
# ones
# do in some dozens, and takes as long as a short step, in the middle of one.


class GcFreeze:
    """What this process has set aside. Whoever did so before us keeps it as it is."""

    def __init__(self) -> None:
        self._is_ours = False

    def freeze(self) -> None:
        """Collections look only at what is made from here on, until `take_back`."""
        if gc.get_freeze_count() and not self._is_ours:
            return
        self.collect()
        gc.freeze()
        self._is_ours = True

    def unfreeze(self) -> None:
        """They look at everything again."""
        if self._is_ours:
            gc.unfreeze()
            self._is_ours = False

    def collect(self) -> None:
        """One full collection, of what we have set aside too: it may hold tensors by now."""
        if self._is_ours:
            gc.unfreeze()
        gc.collect()
        if self._is_ours:
            gc.freeze()


ASIDE = GcFreeze()
"""The one of this process, as its collector is one."""
