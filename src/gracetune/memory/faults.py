"""Page faults and migrations of managed memory, counted by CUPTI where its package is installed.

The driver keeps these numbers to itself otherwise. The package is `cupti-python`, an extra; CUPTI
serves one listener a process, so this and torch's profiler exclude each other.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BUFFER_BYTES = 1 << 20
_ANY_NUMBER_OF_RECORDS = 0
_FLUSH_NORMALLY = 0

COUNTED = (
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


def count_faults(cupti: Cupti, device: int) -> FaultCounter | str:
    """Start counting on one device, or say why CUPTI would not."""
    counter = FaultCounter(cupti)
    kinds = [cupti.ActivityUnifiedMemoryCounterKind[name] for name in COUNTED]
    config = cupti.ActivityUnifiedMemoryCounterConfig(len(kinds))
    config.scope = cupti.ActivityUnifiedMemoryCounterScope["PROCESS_SINGLE_DEVICE"]
    config.device_id = device
    config.enable = 1
    for index, kind in enumerate(kinds):
        config[index].kind = kind
    try:
        cupti.activity_register_callbacks(_offer_buffer, counter.take)
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

    def take(self, records: Sequence[FaultRecord]) -> None:
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
