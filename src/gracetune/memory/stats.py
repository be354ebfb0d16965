"""Memory statistics: torch's dictionary plus `uvm.*` keys, accounting, and page fault counters.

If page fault or pool counters are unavailable, their keys are absent, and
`uvm.faults_unavailable` or `uvm.pool_unavailable` has the reason.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter, OrderedDict
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gracetune.events.types import MemoryRoles, MemoryUsed, UnifiedMemory
from gracetune.memory.hints import HintOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gracetune.memory.hints import HintCounts
    from gracetune.memory.oversubscription import StageState
    from gracetune.memory.platform import Platform
    from gracetune.memory.shim import ShimCounters

    TorchMemoryStats = Callable[..., Mapping[str, Any]]
    """The signature of `torch.cuda.memory_stats`."""

Stats = dict[str, int | str]


def uvm_stats(
    platform: Platform,
    hints: HintCounts,
    stages: StageState,
    accounting: MemoryAccounting,
    faults: FaultCounter | str,
    pool: ShimCounters | str,
) -> Stats:
    """Return the statistics of CUDA managed memory, whose keys start with `uvm.`.

    `faults` and `pool` are the reason as text if those counters are unavailable.
    """
    return {
        "uvm.platform": platform.link.value,
        **_stage_stats(stages),
        **_accounting_stats(accounting),
        **_hint_stats(hints),
        **_fault_stats(faults),
        **_pool_stats(pool),
    }


def _stage_stats(stages: StageState) -> Stats:
    return {
        "uvm.stage": int(stages.stage),
        "uvm.stage_transitions": stages.transitions,
        "uvm.light_reclamations": stages.light_reclamations,
        "uvm.hard_reclamations": stages.hard_reclamations,
    }


def _accounting_stats(accounting: MemoryAccounting) -> Stats:
    stats: Stats = {}
    for tier in Tier:
        stats[f"uvm.bytes.{tier}.current"] = accounting.current(tier)
        stats[f"uvm.bytes.{tier}.peak"] = accounting.peak(tier)
        if tier in accounting.caps:
            stats[f"uvm.bytes.{tier}.cap"] = accounting.caps[tier]
            stats[f"uvm.bytes.{tier}.denied"] = accounting.denied(tier)
    for (tier, role), nbytes in sorted(accounting.by_role().items()):
        stats[f"uvm.bytes.{tier}.role.{role}"] = nbytes
    return stats


def _hint_stats(hints: HintCounts) -> Stats:
    stats: Stats = {f"uvm.hints.{verdict}": 0 for verdict in HintOutcome}
    for (verb, verdict), calls in sorted(hints.verdicts.items()):
        stats[f"uvm.hints.{verdict}"] = int(stats[f"uvm.hints.{verdict}"]) + calls
        stats[f"uvm.hints.{verb}.{verdict}"] = calls
    for done in ("prefetched_to_device", "prefetched_to_host", "discarded"):
        stats[f"uvm.{done}_bytes"] = hints.nbytes[done]
    return stats


def _fault_stats(faults: FaultCounter | str) -> Stats:
    if isinstance(faults, str):
        return {"uvm.faults_unavailable": faults}
    return {f"uvm.{name}": value for name, value in faults.read().items()}


def _pool_stats(pool: ShimCounters | str) -> Stats:
    if isinstance(pool, str):
        return {"uvm.pool_unavailable": pool}
    return {f"uvm.pool.{each.name}": getattr(pool, each.name) for each in fields(pool)}


# torch.cuda.memory_stats() with gracetune's keys. The patched torch of the forks had them there.


class UvmSource(Protocol):
    """A source of `uvm.*` statistics, such as a `MemorySession`."""

    def uvm_stats(self) -> Stats: ...


class _Extension:
    """The sources of the keys that are added to `torch.cuda.memory_stats()`."""

    def __init__(self, default: UvmSource, torch_function: TorchMemoryStats) -> None:
        self.torch_function = torch_function
        self.is_active = True
        self._default = default
        self._newest: weakref.ref[UvmSource] | None = None

    def attach(self, source: UvmSource) -> None:
        """Use this source as long as it exists."""
        self._newest = weakref.ref(source)

    def detach(self) -> None:
        """Use the default source again."""
        self._newest = None

    @property
    def source(self) -> UvmSource:
        """The source that was attached last, or the default."""
        return (None if self._newest is None else self._newest()) or self._default

    def uvm_numbers(self) -> dict[str, int]:
        """Return the source's numbers; torch's dictionary has no texts."""
        stats = self.source.uvm_stats()
        return {key: value for key, value in stats.items() if isinstance(value, int)}


def extend_torch_memory_stats(source: UvmSource) -> None:
    """Add the numbers of `source` to the dictionaries that `torch.cuda.memory_stats()` returns.

    Only this function changes: torch's others, such as `memory_summary`, do not call it by this
    name. A second call does nothing. `restore_torch_memory_stats` restores torch's own.
    """
    if _extension() is not None:
        return
    torch_function: TorchMemoryStats = torch.cuda.memory_stats
    extension = _Extension(source, torch_function)

    @functools.wraps(torch_function)
    def memory_stats(device: object = None) -> OrderedDict[str, Any]:
        stats = torch_function(device)
        numbers = extension.uvm_numbers() if extension.is_active else {}
        return OrderedDict(sorted({**stats, **numbers}.items()))

    memory_stats.gracetune_extension = extension  # type: ignore[attr-defined]
    torch.cuda.memory_stats = memory_stats


def attach_to_torch_memory_stats(source: UvmSource) -> None:
    """Let `torch.cuda.memory_stats()` report this source, if it was extended, as long as it exists.

    A training run calls this, so that the numbers are those of the run.
    """
    extension = _extension()
    if extension is not None:
        extension.attach(source)


def detach_from_torch_memory_stats(source: UvmSource) -> None:
    """Let `torch.cuda.memory_stats()` report the default source again, if it reports this one."""
    extension = _extension()
    if extension is not None and extension.source is source:
        extension.detach()


def restore_torch_memory_stats() -> None:
    """Undo `extend_torch_memory_stats`."""
    extension = _extension()
    if extension is not None:
        extension.is_active = False  # another package may have wrapped the extended function
        torch.cuda.memory_stats = extension.torch_function  # type: ignore[assignment]


def torch_memory_stats() -> dict[str, Any]:
    """Return torch's own memory statistics, without gracetune's keys; empty without CUDA."""
    extension = _extension()
    function = torch.cuda.memory_stats if extension is None else extension.torch_function
    return dict(function())


def attached_source() -> UvmSource | None:
    """Return the source whose numbers `torch.cuda.memory_stats()` reports; None if none does."""
    extension = _extension()
    return None if extension is None else extension.source


def _extension() -> _Extension | None:
    found: _Extension | None = getattr(torch.cuda.memory_stats, "gracetune_extension", None)
    return found


def memory_event(step: int, stats: Mapping[str, int | str], host: int) -> MemoryUsed:
    """Build the event that reports the memory in use; `host` is the process's resident bytes."""
    return MemoryUsed(
        step=step,
        host=host,
        device=int(stats.get("allocated_bytes.all.current", 0)),
        device_peak=int(stats.get("allocated_bytes.all.peak", 0)),
        managed=int(stats[f"uvm.bytes.{Tier.MANAGED}.current"]),
        stage=int(stats["uvm.stage"]),
    )


def unified_memory_event(step: int, stats: Mapping[str, int | str], headroom: int) -> UnifiedMemory:
    """Build the event with the accounting of managed memory, from the keys of `memory_stats`.

    `headroom` is the free device memory above the threshold of stage 2.
    """

    def number(key: str) -> int:
        return int(stats.get(f"uvm.{key}", 0))

    managed = f"bytes.{Tier.MANAGED}"
    return UnifiedMemory(
        step=step,
        stage=number("stage"),
        transitions=number("stage_transitions"),
        headroom=headroom,
        current=number(f"{managed}.current"),
        peak=max(number(f"{managed}.peak"), number("pool.peak_bytes")),
        cap=number(f"{managed}.cap"),
        denied=number(f"{managed}.denied"),
        light_reclamations=number("light_reclamations"),
        full_reclamations=number("hard_reclamations"),
        reclaimed_bytes={"light": number("light_bytes"), "full": number("hard_bytes")},
        hints={verdict.value: number(f"hints.{verdict}") for verdict in HintOutcome},
        faults={name: number(name) for name in FAULT_COUNTERS if f"uvm.{name}" in stats},
        faults_unavailable=str(stats.get("uvm.faults_unavailable", "")),
    )


def memory_roles_event(
    step: int,
    stats: Mapping[str, int | str],
    planned: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> MemoryRoles:
    """Build the event with the bytes of each kind of memory and role, next to the plan's."""
    roles: dict[str, dict[str, int]] = {}
    for tier in Tier:
        prefix = f"uvm.bytes.{tier}.role."
        found = {k.removeprefix(prefix): int(v) for k, v in stats.items() if k.startswith(prefix)}
        if found:
            roles[tier.value] = found
    return MemoryRoles(step, roles, planned)


class Tier(StrEnum):
    """Kind of memory: device, host or managed."""

    DEVICE = "device"
    HOST = "host"
    MANAGED = "managed"
    """CUDA managed memory, whose pages the driver moves between host and device."""


class SharingAllocator(Protocol):
    """An allocator that shares a cap with what is reserved, such as the pool of batches."""

    @property
    def role(self) -> str:
        """Name of its memory in statistics."""
        ...

    def live_bytes(self) -> int:
        """Return the bytes that it has allocated now."""
        ...

    def limit(self, nbytes: int) -> None:
        """Set the largest number of bytes that it may have."""
        ...

    def denied(self) -> int:
        """Return how often its limit has refused memory."""
        ...


class MemoryAccounting:
    """Counts the bytes that gracetune itself allocates, by kind of memory and role; thread-safe.

    A role is what the memory is for, such as `weights`. Code calls `reserve` before it allocates
    and `release` after it has freed. `hold` keeps a part of the cap for a role that will allocate
    later: no other role, and no allocator that shares the cap, gets it. torch's own allocations are
    in torch's statistics, except those of an allocator that shares a cap.
    """

    def __init__(self, caps: Mapping[Tier, int] = MappingProxyType({})) -> None:
        """`caps` limits the bytes of a kind of memory; kinds without a cap are unlimited."""
        self._caps = dict(caps)
        self._sharing: dict[Tier, SharingAllocator] = {}
        self.caps = MappingProxyType(self._caps)
        self._lock = threading.RLock()  # a finalizer may release memory during a call
        self._reserved: Counter[tuple[Tier, str]] = Counter()
        self._held: Counter[tuple[Tier, str]] = Counter()
        """Bytes of the cap that are kept for later reservations."""
        self._total: Counter[Tier] = Counter()
        self._peak: Counter[Tier] = Counter()
        self._denied: Counter[Tier] = Counter()

    def share(self, tier: Tier, allocator: SharingAllocator) -> None:
        """Let an allocator with a limit of its own share the cap of a kind of memory."""
        with self._lock:
            self._sharing[tier] = allocator
            self._limit_sharing(tier)

    def set_cap(self, tier: Tier, nbytes: int) -> None:
        """Change the limit of a kind of memory; reservations that exceed it remain."""
        with self._lock:
            self._caps[tier] = nbytes
            self._limit_sharing(tier)

    def hold(self, tier: Tier, role: str, nbytes: int) -> bool:
        """Keep bytes of the cap for later reservations of a role, in place of those held before.

        If they exceed the cap, return False instead; what the role held before stays held.
        """
        assert nbytes >= 0, f"{role} holds {nbytes} bytes"
        with self._lock:
            if nbytes > self._held[tier, role] and not self._try_room(tier, role, nbytes):
                return False
            self._held[tier, role] = nbytes
            self._limit_sharing(tier)
            return True

    def reserve(self, tier: Tier, role: str, nbytes: int) -> bool:
        """Count bytes that will be allocated; if they exceed the cap, return False instead.

        They come out of what the role holds, as far as it holds any.
        """
        assert nbytes >= 0, f"{role} reserves {nbytes} bytes"
        with self._lock:
            if not self._try_room(tier, role, nbytes):
                return False
            self._held[tier, role] = max(0, self._held[tier, role] - nbytes)
            self._count(tier, role, nbytes, self._shared_bytes(tier))
            self._limit_sharing(tier)
            return True

    def release(self, tier: Tier, role: str, nbytes: int) -> None:
        """Subtract bytes that were counted by `reserve` and have been freed."""
        with self._lock:
            reserved = self._reserved[tier, role]
            assert 0 <= nbytes <= reserved, f"{role} releases {nbytes} of {reserved} in {tier}"
            self._count(tier, role, -nbytes, 0)
            self._limit_sharing(tier)

    def book(self, tier: Tier, role: str, nbytes: int) -> None:
        """Count memory that exists already, in place of what the role had; no cap refuses it."""
        with self._lock:
            self._count(tier, role, nbytes - self._reserved[tier, role], self._shared_bytes(tier))
            self._limit_sharing(tier)

    def current(self, tier: Tier) -> int:
        """Return the bytes of a kind of memory that are in use or reserved now."""
        with self._lock:
            total = self._total[tier] + self._shared_bytes(tier)
            self._peak[tier] = max(self._peak[tier], total)
            return total

    def peak(self, tier: Tier) -> int:
        """Return the maximum bytes of a kind of memory that were counted at the same time."""
        return self._peak[tier]

    def held(self, tier: Tier) -> int:
        """Return the bytes of the cap that are kept for later reservations of all roles."""
        with self._lock:
            return self._held_by_others(tier, "")

    def room(self, tier: Tier, role: str) -> int:
        """Return the bytes that a role may still reserve: what is free, and what it holds."""
        with self._lock:
            return max(0, self._room(tier, role))

    def deny(self, tier: Tier) -> None:
        """Count a refusal by the cap that was found without `reserve`."""
        with self._lock:
            self._denied[tier] += 1

    def denied(self, tier: Tier) -> int:
        """Return how often the cap of a kind of memory has refused memory.

        With the refusals of an allocator that shares the cap, as `current` has its bytes.
        """
        with self._lock:
            shared = self._sharing[tier].denied() if tier in self._sharing else 0
            return self._denied[tier] + shared

    def by_role(self) -> dict[tuple[Tier, str], int]:
        """Return the bytes by kind of memory and role (what they are for), if above 0."""
        with self._lock:
            found = {key: nbytes for key, nbytes in self._reserved.items() if nbytes}
            for tier, allocator in self._sharing.items():
                if nbytes := self._shared_bytes(tier):
                    found[tier, allocator.role] = nbytes
            return found

    def _count(self, tier: Tier, role: str, nbytes: int, shared: int) -> None:
        self._reserved[tier, role] += nbytes
        self._total[tier] += nbytes
        self._peak[tier] = max(self._peak[tier], self._total[tier] + shared)

    def _held_by_others(self, tier: Tier, role: str) -> int:
        return sum(n for (at, other), n in self._held.items() if at is tier and other != role)

    def _room(self, tier: Tier, role: str) -> int:
        used = self._total[tier] + self._shared_bytes(tier)
        return self.caps[tier] - used - self._held_by_others(tier, role)

    def _try_room(self, tier: Tier, role: str, nbytes: int) -> bool:
        """Return True if a role may have so many bytes more; else count the refusal."""
        if tier not in self.caps:
            return True
        # First, so that the allocator that shares the cap cannot take these bytes meanwhile.
        self._limit_sharing(tier, max(0, nbytes - self._held[tier, role]))
        if nbytes <= self._room(tier, role):
            return True
        self._denied[tier] += 1
        self._limit_sharing(tier)
        return False

    def _shared_bytes(self, tier: Tier) -> int:
        return self._sharing[tier].live_bytes() if tier in self._sharing else 0

    def _limit_sharing(self, tier: Tier, more: int = 0) -> None:
        """Leave to the allocator what is neither reserved nor held, less `more` bytes."""
        if tier in self._sharing and tier in self.caps:
            kept = self._total[tier] + self._held_by_others(tier, "") + more
            self._sharing[tier].limit(max(0, self.caps[tier] - kept))


# Page faults and migrations of managed memory. Only CUPTI reports them (package `cupti-python`, an
# extra). CUPTI serves one client per process, so this and torch's profiler exclude each other.

FAULT_COUNTERS = (
    "gpu_page_faults",
    "cpu_page_faults",
    "thrashing",
    "faulted_bytes",
    "evicted_bytes",
    "migrated_bytes",
)
"""Keys of the page fault counters in `memory_stats`, without the prefix `uvm.`."""
_BUFFER_BYTES = 1 << 20
_ANY_NUMBER_OF_RECORDS = 0
_FLUSH_NORMALLY = 0

CUPTI_COUNTERS = (
    "BYTES_TRANSFER_HTOD",
    "BYTES_TRANSFER_DTOH",
    "CPU_PAGE_FAULT_COUNT",
    "GPU_PAGE_FAULT",
    "THRASHING",
)
"""Names of the CUPTI unified memory counters that `start_fault_counter` enables."""


class FaultRecord(Protocol):
    """A record of a CUPTI unified memory counter."""

    kind: int
    counter_kind: int
    flags_: int
    """If the counter counts transferred bytes: CUPTI's number for the cause. Otherwise unused."""
    value: int


class _CuptiMember(Protocol):
    name: str

    def __int__(self) -> int: ...


class _CuptiEnum(Protocol):
    """An enumeration in CUPTI's Python bindings, which maps names to numbers."""

    def __getitem__(self, name: str) -> int: ...
    def __iter__(self) -> Iterator[_CuptiMember]: ...


class _Config(Protocol):
    ptr: int
    scope: int
    device_id: int
    enable: int

    def __getitem__(self, index: int) -> _ConfigEntry: ...


class _ConfigEntry(Protocol):
    kind: int


class Cupti(Protocol):
    """The functions of the package `cupti` that gracetune calls; tests pass their own."""

    cuptiError: type[Exception]  # noqa: N815  CUPTI's spelling
    ActivityKind: _CuptiEnum
    ActivityUnifiedMemoryCounterKind: _CuptiEnum
    ActivityUnifiedMemoryCounterScope: _CuptiEnum
    ActivityUnifiedMemoryMigrationCause: _CuptiEnum

    def ActivityUnifiedMemoryCounterConfig(self, count: int, /) -> _Config: ...  # noqa: N802
    def activity_configure_unified_memory_counter(self, config: int, count: int, /) -> object: ...
    def activity_enable(self, kind: int, /) -> object: ...
    def activity_disable(self, kind: int, /) -> object: ...
    def activity_flush_all(self, flag: int, /) -> object: ...
    def activity_register_callbacks(
        self,
        requested: Callable[[], tuple[int, int]],
        completed: Callable[[Sequence[FaultRecord]], None],
        /,
    ) -> object: ...


def import_cupti() -> Cupti | str:
    """Import the CUPTI bindings; return the reason if that fails."""
    try:
        from cupti import cupti
    except ImportError as error:
        return f"CUPTI's package cannot be imported (pip install 'gracetune[cupti]'): {error}"
    module: Cupti = cupti
    return module


def start_fault_counter(cupti: Cupti, device: int) -> FaultCounter | str:
    """Start counting page faults on one device; return the reason if CUPTI refuses."""
    counter = FaultCounter(cupti)
    kinds = [cupti.ActivityUnifiedMemoryCounterKind[name] for name in CUPTI_COUNTERS]
    config = cupti.ActivityUnifiedMemoryCounterConfig(len(kinds))
    config.scope = cupti.ActivityUnifiedMemoryCounterScope["PROCESS_SINGLE_DEVICE"]
    config.device_id = device
    config.enable = 1
    for index, kind in enumerate(kinds):
        config[index].kind = kind
    try:
        cupti.activity_register_callbacks(_offer_buffer, counter.add_records)
        cupti.activity_configure_unified_memory_counter(config.ptr, len(kinds))
        cupti.activity_enable(cupti.ActivityKind["UNIFIED_MEMORY_COUNTER"])
    except (
        cupti.cuptiError,
        RuntimeError,
    ) as error:  # RuntimeError: a library that CUPTI needs is missing
        return f"CUPTI refused to count unified memory: {error}"
    return counter


def _offer_buffer() -> tuple[int, int]:
    return _BUFFER_BYTES, _ANY_NUMBER_OF_RECORDS


class FaultCounter:
    """Sums up CUPTI's records of page faults and migrations; thread-safe."""

    def __init__(self, cupti: Cupti) -> None:
        self._cupti = cupti
        self._kind = cupti.ActivityKind["UNIFIED_MEMORY_COUNTER"]
        self._counters = _names(cupti.ActivityUnifiedMemoryCounterKind)
        self._causes = _names(cupti.ActivityUnifiedMemoryMigrationCause)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add_records(self, records: Sequence[FaultRecord]) -> None:
        """Add records to the totals; called by CUPTI on its own thread."""
        with self._lock:
            for record in records:
                if record.kind == self._kind:
                    self._counts[self._name(record)] += record.value

    def read(self) -> dict[str, int]:
        """Return the totals so far, by their key in `memory_stats` without the prefix `uvm.`."""
        self._cupti.activity_flush_all(_FLUSH_NORMALLY)
        with self._lock:
            counts = self._counts.copy()
        directions = ("htod", "dtoh")
        return {
            "gpu_page_faults": counts["gpu_page_fault"],
            "cpu_page_faults": counts["cpu_page_fault_count"],
            "thrashing": counts["thrashing"],
            "faulted_bytes": sum(counts[f"{way}.coherence"] for way in directions),
            "evicted_bytes": sum(counts[f"{way}.eviction"] for way in directions),
            "migrated_bytes": sum(
                nbytes for name, nbytes in counts.items() if name.startswith(directions)
            ),
        }

    def close(self) -> None:
        """Stop counting page faults."""
        self._cupti.activity_disable(self._kind)

    def _name(self, record: FaultRecord) -> str:
        name = self._counters.get(record.counter_kind, "unknown")
        if not name.startswith("bytes_transfer_"):
            return name
        cause = self._causes.get(record.flags_, "unknown")
        return f"{name.removeprefix('bytes_transfer_')}.{cause}"


def _names(members: _CuptiEnum) -> dict[int, str]:
    """Return the names of an enumeration's members, in lower case, by number."""
    return {int(member): member.name.lower() for member in members}
