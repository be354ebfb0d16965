"""One dictionary that says what memory is doing: torch's own keys, and ours beside them.

Ours begin with `uvm.`, as the forks spelled them. A number that cannot be had is absent, and the
reason stands in its place: `uvm.faults_unavailable`, `uvm.pool_unavailable`.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from gracetune.events.types import MemoryUsed
from gracetune.memory.hints import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gracetune.memory.hints import HintCounts
    from gracetune.memory.platform import Platform
    from gracetune.memory.shim import ShimCounters
    from gracetune.memory.stages import StageState


Stats = dict[str, int | str]


def memory_stats(
    torch_stats: Mapping[str, int],
    platform: Platform,
    hints: HintCounts,
    stages: StageState,
    accounting: MemoryAccounting,
    faults: FaultCounter | str,
    pool: ShimCounters | str,
) -> Stats:
    """Torch's dictionary (empty on a CPU) and ours; a text is why there is no such counter."""
    return {
        **torch_stats,
        "uvm.platform": platform.link.value,
        **_stage_stats(stages),
        **_ledger_stats(accounting),
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


def _ledger_stats(ledger: MemoryAccounting) -> Stats:
    stats: Stats = {}
    for tier in Tier:
        stats[f"uvm.bytes.{tier}.current"] = ledger.current(tier)
        stats[f"uvm.bytes.{tier}.peak"] = ledger.peak(tier)
        if tier in ledger.caps:
            stats[f"uvm.bytes.{tier}.cap"] = ledger.caps[tier]
            stats[f"uvm.bytes.{tier}.denied"] = ledger.denied(tier)
    for (tier, role), nbytes in sorted(ledger.by_role().items()):
        stats[f"uvm.bytes.{tier}.role.{role}"] = nbytes
    return stats


def _hint_stats(hints: HintCounts) -> Stats:
    stats: Stats = {f"uvm.hints.{verdict}": 0 for verdict in Verdict}
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


def memory_event(step: int, stats: Mapping[str, int | str], host: int) -> MemoryUsed:
    """The periodic event of a run, from its statistics and the process's resident host bytes."""
    return MemoryUsed(
        step=step,
        host=host,
        device=int(stats.get("allocated_bytes.all.current", 0)),
        device_peak=int(stats.get("allocated_bytes.all.peak", 0)),
        managed=max(
            int(stats[f"uvm.bytes.{Tier.MANAGED}.current"]),
            int(stats.get("uvm.pool.live_bytes", 0)),  # what torch holds for a pool's tensors
        ),
        stage=int(stats["uvm.stage"]),
    )


# ------------------------------------------------------------------------------------------
# Who holds how many bytes, by tier and role, and no more than the tier's cap.
#
# The books of what gracetune itself allocates: a cache, an arena or a pool takes bytes here
# before it
# allocates and gives them back after. Torch's own allocations are in torch's statistics.


class Tier(StrEnum):
    """Where bytes are."""

    DEVICE = "device"
    HOST = "host"
    MANAGED = "managed"
    """On either side, wherever the driver has moved them."""


class MemoryAccounting:
    """Bytes by tier and role; safe to use from several threads."""

    def __init__(self, caps: Mapping[Tier, int] = MappingProxyType({})) -> None:
        """`caps` are the most bytes of a tier; a tier without one is not limited here."""
        self.caps = MappingProxyType(dict(caps))
        self._lock = threading.Lock()
        self._held: Counter[tuple[Tier, str]] = Counter()
        self._total: Counter[Tier] = Counter()
        self._peak: Counter[Tier] = Counter()
        self._denied: Counter[Tier] = Counter()

    def reserve(self, tier: Tier, role: str, nbytes: int) -> bool:
        """Book bytes before allocating them; false, and nothing booked, past the cap."""
        assert nbytes >= 0, f"{role} takes {nbytes} bytes"
        with self._lock:
            total = self._total[tier] + nbytes
            if tier in self.caps and total > self.caps[tier]:
                self._denied[tier] += 1
                return False
            self._held[tier, role] += nbytes
            self._total[tier] = total
            self._peak[tier] = max(self._peak[tier], total)
            return True

    def release(self, tier: Tier, role: str, nbytes: int) -> None:
        """Unbook bytes after freeing them."""
        with self._lock:
            held = self._held[tier, role]
            assert 0 <= nbytes <= held, f"{role} gives back {nbytes} of {held} bytes in {tier}"
            self._held[tier, role] -= nbytes
            self._total[tier] -= nbytes

    def current(self, tier: Tier) -> int:
        """Bytes of a tier that are out now."""
        return self._total[tier]

    def peak(self, tier: Tier) -> int:
        """The most that were ever out at once."""
        return self._peak[tier]

    def denied(self, tier: Tier) -> int:
        """How often the cap said no."""
        return self._denied[tier]

    def by_role(self) -> dict[tuple[Tier, str], int]:
        """Bytes out now, by tier and role; roles that gave all back are not listed."""
        with self._lock:
            return {key: nbytes for key, nbytes in self._held.items() if nbytes}


# ------------------------------------------------------------------------------------------
# Page faults and migrations of managed memory, counted by CUPTI where its package is installed.
#
# The driver keeps these numbers to itself otherwise. The package is `cupti-python`, an extra; CUPTI
# serves one listener a process, so this and torch's profiler exclude each other.


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
"""CUPTI's counters that we ask for."""


class FaultRecord(Protocol):
    """One record of CUPTI's unified-memory counter."""

    kind: int
    counter_kind: int
    flags_: int
    """The cause of a migration."""
    value: int


class _Member(Protocol):
    name: str

    def __int__(self) -> int: ...


class _Named(Protocol):
    """An enumeration of CUPTI's: numbers by name, and members one by one."""

    def __getitem__(self, name: str) -> int: ...
    def __iter__(self) -> Iterator[_Member]: ...


class _Config(Protocol):
    ptr: int
    scope: int
    device_id: int
    enable: int

    def __getitem__(self, index: int) -> _ConfigEntry: ...


class _ConfigEntry(Protocol):
    kind: int


class Cupti(Protocol):
    """The part of `cupti.cupti` that is used; a test hands in its own."""

    cuptiError: type[Exception]  # noqa: N815  CUPTI's spelling
    ActivityKind: _Named
    ActivityUnifiedMemoryCounterKind: _Named
    ActivityUnifiedMemoryCounterScope: _Named
    ActivityUnifiedMemoryMigrationCause: _Named

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
    """The installed bindings, or why there are none."""
    try:
        from cupti import cupti
    except ImportError as error:
        return f"CUPTI's package cannot be imported (pip install 'gracetune[cupti]'): {error}"
    module: Cupti = cupti
    return module


def start_fault_counter(cupti: Cupti, device: int) -> FaultCounter | str:
    """Start counting on one device, or say why CUPTI would not."""
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
    except (cupti.cuptiError, RuntimeError) as error:  # the second: a library it needs is missing
        return f"CUPTI refused to count unified memory: {error}"
    return counter


def _offer_buffer() -> tuple[int, int]:
    return _BUFFER_BYTES, _ANY_NUMBER_OF_RECORDS


class FaultCounter:
    """Adds up CUPTI's records; they come on a thread of CUPTI's."""

    def __init__(self, cupti: Cupti) -> None:
        self._cupti = cupti
        self._kind = cupti.ActivityKind["UNIFIED_MEMORY_COUNTER"]
        self._counters = _names(cupti.ActivityUnifiedMemoryCounterKind)
        self._causes = _names(cupti.ActivityUnifiedMemoryMigrationCause)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add_records(self, records: Sequence[FaultRecord]) -> None:
        """Add a buffer of records."""
        with self._lock:
            for record in records:
                if record.kind == self._kind:
                    self._counts[self._name(record)] += record.value

    def read(self) -> dict[str, int]:
        """The sums so far, under the names they have in `memory_stats()`."""
        self._cupti.activity_flush_all(_FLUSH_NORMALLY)
        with self._lock:
            counts = self._counts.copy()
        moved = ("htod", "dtoh")
        return {
            "gpu_page_faults": counts["gpu_page_fault"],
            "cpu_page_faults": counts["cpu_page_fault_count"],
            "thrashing": counts["thrashing"],
            "faulted_bytes": sum(counts[f"{way}.coherence"] for way in moved),
            "evicted_bytes": sum(counts[f"{way}.eviction"] for way in moved),
            "migrated_bytes": sum(
                nbytes for name, nbytes in counts.items() if name.startswith(moved)
            ),
        }

    def close(self) -> None:
        """Stop counting."""
        self._cupti.activity_disable(self._kind)

    def _name(self, record: FaultRecord) -> str:
        name = self._counters.get(record.counter_kind, "unknown")
        if not name.startswith("bytes_transfer_"):
            return name
        cause = self._causes.get(record.flags_, "unknown")
        return f"{name.removeprefix('bytes_transfer_')}.{cause}"


def _names(members: _Named) -> dict[int, str]:
    """Names by number; a newer CUPTI may count what these bindings do not name."""
    return {int(member): member.name.lower() for member in members}
