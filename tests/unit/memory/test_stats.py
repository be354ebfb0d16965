"""Memory statistics, with and without CUPTI's counters."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from fakes.platforms import simulated_machine

from gracetune.memory.hints import HintCounts
from gracetune.memory.oversubscription import Stage, StageState
from gracetune.memory.placement import place_batch
from gracetune.memory.platform import NO_GPU, Link
from gracetune.memory.shim import ShimCounters
from gracetune.memory.stats import (
    CUPTI_COUNTERS,
    FaultCounter,
    MemoryAccounting,
    Tier,
    attach_to_torch_memory_stats,
    extend_torch_memory_stats,
    import_cupti,
    memory_event,
    restore_torch_memory_stats,
    start_fault_counter,
    torch_memory_stats,
    unified_memory_event,
    uvm_stats,
)
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


POOL = ShimCounters(*range(1, 16))


def test_the_forks_keys_are_there_on_a_cpu() -> None:
    stats = uvm_stats(
        NO_GPU,
        HintCounts(),
        StageState(),
        MemoryAccounting(),
        "no CUPTI",
        "no pool",
    )
    assert stats["uvm.stage"] == 1
    for name in ("light_reclamations", "hard_reclamations", "stage_transitions"):
        assert stats[f"uvm.{name}"] == 0
    assert stats["uvm.platform"] == "none"
    assert stats["uvm.faults_unavailable"] == "no CUPTI"
    assert stats["uvm.pool_unavailable"] == "no pool"
    assert "uvm.gpu_page_faults" not in stats


def test_statistics_include_all_counters() -> None:
    machine = simulated_machine(Link.COHERENT)
    hints = machine.hints()
    place_batch({"latents": machine.tensor(MIB), "text": machine.tensor(2 * MIB)}, hints)
    hints.prefetch_to_device(torch.zeros(9))
    accounting = MemoryAccounting({Tier.MANAGED: GIB})
    assert accounting.reserve(Tier.MANAGED, "latents", 600 * MIB)
    assert not accounting.reserve(Tier.MANAGED, "latents", 600 * MIB)
    assert accounting.reserve(Tier.HOST, "text", MIB)
    stages = StageState(Stage.OVERSUBSCRIBED, 1, 4, 2)
    stats = {"allocated_bytes.all.current": 5} | uvm_stats(
        machine.platform,
        hints.counts(),
        stages,
        accounting,
        "",
        POOL,
    )
    expected = {
        "allocated_bytes.all.current": 5,
        "uvm.platform": "coherent",
        "uvm.stage": 2,
        "uvm.stage_transitions": 1,
        "uvm.light_reclamations": 4,
        "uvm.hard_reclamations": 2,
        "uvm.bytes.managed.current": 600 * MIB,
        "uvm.bytes.managed.cap": GIB,
        "uvm.bytes.managed.denied": 1,
        "uvm.bytes.managed.role.latents": 600 * MIB,
        "uvm.bytes.host.role.text": MIB,
        "uvm.hints.applied": 3,
        "uvm.hints.unsupported": 1,
        "uvm.hints.failed": 0,
        "uvm.hints.prefetch_to_device.unsupported": 1,
        "uvm.prefetched_to_device_bytes": 2 * MIB,
        "uvm.prefetched_to_host_bytes": 0,
        "uvm.discarded_bytes": 0,
        "uvm.pool.live_bytes": 1,
        "uvm.pool.denied": 7,
    }
    assert {key: stats[key] for key in expected} == expected
    event = memory_event(7, stats, host=11)
    assert (event.step, event.host, event.device, event.device_peak) == (7, 11, 5, 0)
    assert (event.managed, event.stage) == (600 * MIB, 2)


# Our numbers in torch's statistics


class Source:
    """A source of statistics with one number and one text."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def uvm_stats(self) -> dict[str, int | str]:
        return {"uvm.stage": self.stage, "uvm.platform": "none"}


@pytest.fixture
def extended() -> Iterator[Source]:
    restore_torch_memory_stats()  # another test of this process may have imported gracetune.gh200
    source = Source(1)
    extend_torch_memory_stats(source)
    yield source
    restore_torch_memory_stats()


def test_torchs_statistics_have_our_numbers_until_they_are_restored(extended: Source) -> None:
    assert torch.cuda.memory_stats()["uvm.stage"] == 1
    assert "uvm.platform" not in torch.cuda.memory_stats(), "torch's values are numbers"
    assert "uvm.stage" not in torch_memory_stats()
    kept = torch.cuda.memory_stats
    restore_torch_memory_stats()
    assert "uvm.stage" not in torch.cuda.memory_stats()
    assert torch.cuda.memory_stats is torch.cuda.memory.memory_stats
    assert "uvm.stage" not in kept(), "a reference to it adds nothing either"


def test_torchs_own_functions_are_not_affected(extended: Source) -> None:
    """Without a GPU the summary fails, in the same way as without gracetune."""
    assert not any("uvm" in str(key) for key in torch.cuda.memory_stats_as_nested_dict())
    assert torch.cuda.memory_allocated() == 0
    if torch.cuda.is_available():
        assert "uvm" not in torch.cuda.memory_summary()
    else:
        with pytest.raises(KeyError, match=r"allocated_bytes\.all\.current"):
            torch.cuda.memory_summary()


def test_a_run_replaces_the_source_as_long_as_it_exists(extended: Source) -> None:
    run = Source(2)
    attach_to_torch_memory_stats(run)
    extend_torch_memory_stats(Source(3))  # a second import changes nothing
    assert torch.cuda.memory_stats()["uvm.stage"] == 2
    del run
    assert torch.cuda.memory_stats()["uvm.stage"] == 1


def test_attaching_to_torchs_own_function_does_nothing() -> None:
    restore_torch_memory_stats()
    attach_to_torch_memory_stats(Source(2))
    assert "uvm.stage" not in torch.cuda.memory_stats()


# CUPTI


Counters = enum.IntEnum("Counters", ["UNKNOWN", *CUPTI_COUNTERS], start=0)
Causes = enum.IntEnum("Causes", ["UNKNOWN", "USER", "COHERENCE", "PREFETCH", "EVICTION"], start=0)
Kinds = enum.IntEnum("Kinds", ["MEMCPY", "UNIFIED_MEMORY_COUNTER"])
Scopes = enum.IntEnum("Scopes", ["UNKNOWN", "PROCESS_SINGLE_DEVICE"], start=0)


@dataclass
class Record:
    """A record as CUPTI delivers it."""

    counter_kind: int
    value: int
    flags_: int = 0
    kind: int = Kinds.UNIFIED_MEMORY_COUNTER


class Config:
    """CUPTI's array of counter settings."""

    ptr = 1234

    def __init__(self, count: int) -> None:
        self.entries = [Record(0, 0) for _ in range(count)]

    def __getitem__(self, index: int) -> Record:
        return self.entries[index]


class FakeCupti:
    """CUPTI's activity API, which needs a GPU in reality."""

    class cuptiError(Exception):  # noqa: N801
        pass

    ActivityKind = Kinds
    ActivityUnifiedMemoryCounterKind = Counters
    ActivityUnifiedMemoryCounterScope = Scopes
    ActivityUnifiedMemoryMigrationCause = Causes
    ActivityUnifiedMemoryCounterConfig = Config

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.enabled: set[int] = set()
        self.waiting: list[Record] = []

    def activity_register_callbacks(self, requested, completed) -> None:
        assert requested()[0] > 0
        self.completed = completed

    def activity_configure_unified_memory_counter(self, config: int, count: int) -> None:
        if self.refusal:
            raise self.cuptiError(self.refusal)
        assert (config, count) == (Config.ptr, len(CUPTI_COUNTERS))

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_flush_all(self, flag: int) -> None:
        self.completed(self.waiting)
        self.waiting = []


def test_cupti_records_are_summed_by_cause() -> None:
    cupti = FakeCupti()
    counter = start_fault_counter(cupti, 0)
    assert isinstance(counter, FaultCounter)
    assert cupti.enabled == {Kinds.UNIFIED_MEMORY_COUNTER}
    cupti.waiting = [
        Record(Counters.GPU_PAGE_FAULT, 3),
        Record(Counters.GPU_PAGE_FAULT, 4),
        Record(Counters.CPU_PAGE_FAULT_COUNT, 2),
        Record(Counters.BYTES_TRANSFER_HTOD, 100, Causes.COHERENCE),
        Record(Counters.BYTES_TRANSFER_DTOH, 50, Causes.COHERENCE),
        Record(Counters.BYTES_TRANSFER_HTOD, 1000, Causes.PREFETCH),
        Record(Counters.BYTES_TRANSFER_DTOH, 7, Causes.EVICTION),
        Record(Counters.GPU_PAGE_FAULT, 99, kind=Kinds.MEMCPY),
        Record(77, 99),
        Record(Counters.BYTES_TRANSFER_HTOD, 3, 77),
    ]
    stats = uvm_stats(NO_GPU, HintCounts(), StageState(), MemoryAccounting(), counter, "")
    assert stats["uvm.gpu_page_faults"] == 7
    assert stats["uvm.cpu_page_faults"] == 2
    assert stats["uvm.faulted_bytes"] == 150
    assert stats["uvm.evicted_bytes"] == 7
    assert stats["uvm.migrated_bytes"] == 1160
    assert "uvm.faults_unavailable" not in stats
    counter.close()
    assert cupti.enabled == set()


def test_a_missing_library_of_cupti_is_the_reason() -> None:
    class CuptiWithoutDriver(FakeCupti):
        def activity_enable(self, kind: int) -> None:
            raise RuntimeError("libcuda.so.1: cannot open shared object file")

    assert "libcuda.so.1" in str(start_fault_counter(CuptiWithoutDriver(), 0))


def test_a_refusal_of_cupti_is_the_reason() -> None:
    refused = start_fault_counter(FakeCupti("insufficient privileges"), 0)
    assert refused == "CUPTI refused to count unified memory: insufficient privileges"


def test_without_the_package_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    reason = import_cupti()
    assert isinstance(reason, str)
    assert "gracetune[cupti]" in reason


class Pool:
    """An allocator with a limit of its own, such as the pool of batches."""

    role = "batches"

    def __init__(self, nbytes=0, refused=0):
        self.nbytes = nbytes
        self.refused = refused
        self.limits = []

    def live_bytes(self):
        return self.nbytes

    def limit(self, nbytes):
        self.limits.append(nbytes)

    def denied(self):
        return self.refused


def test_a_pool_and_reservations_share_one_cap():
    accounting, pool = MemoryAccounting({Tier.MANAGED: 100}), Pool(30)
    accounting.share(Tier.MANAGED, pool)
    assert pool.limits == [100]
    assert accounting.reserve(Tier.MANAGED, "ema", 60)
    assert pool.limits[-1] == 40, "the pool may have what is left"
    assert not accounting.reserve(Tier.MANAGED, "ema", 20), "the pool has 30 of the 40"
    assert pool.limits[-2:] == [20, 40], "limited during the check, so that the pool cannot grow"
    pool.nbytes = 5
    assert accounting.reserve(Tier.MANAGED, "ema", 20), "read at the moment of the reservation"
    assert accounting.current(Tier.MANAGED) == 85
    assert accounting.peak(Tier.MANAGED) == 90
    assert accounting.by_role() == {(Tier.MANAGED, "ema"): 80, (Tier.MANAGED, "batches"): 5}
    accounting.set_cap(Tier.MANAGED, 90)
    assert pool.limits[-1] == 10
    accounting.release(Tier.MANAGED, "ema", 80)
    assert pool.limits[-1] == 90


def test_a_pool_cannot_take_what_is_held_for_a_role():
    accounting, pool = MemoryAccounting({Tier.MANAGED: 100}), Pool(5)
    accounting.share(Tier.MANAGED, pool)
    assert accounting.hold(Tier.MANAGED, "optimizer", 95)
    assert pool.limits[-1] == 5
    assert accounting.room(Tier.MANAGED, "optimizer") == 95
    assert not accounting.reserve(Tier.MANAGED, "ema", 1)
    accounting.set_cap(Tier.MANAGED, 90)
    assert pool.limits[-1] == 0
    accounting.set_cap(Tier.MANAGED, 100)
    assert accounting.reserve(Tier.MANAGED, "optimizer", 60)
    assert (accounting.held(Tier.MANAGED), pool.limits[-1]) == (35, 5), "35 are still held"
    assert accounting.hold(Tier.MANAGED, "optimizer", 0)
    assert pool.limits[-1] == 40
    assert not accounting.hold(Tier.MANAGED, "optimizer", 36), "the pool has 5 of the 40"
    assert (accounting.held(Tier.MANAGED), pool.limits[-1]) == (0, 40)


def test_refusals_of_a_pool_are_in_the_statistics_and_the_event():
    accounting = MemoryAccounting({Tier.MANAGED: 100})
    accounting.share(Tier.MANAGED, Pool(90, refused=7))
    assert not accounting.reserve(Tier.MANAGED, "ema", 20)
    stats = uvm_stats(NO_GPU, HintCounts(), StageState(), accounting, "", POOL)
    assert (stats["uvm.bytes.managed.denied"], stats["uvm.pool.denied"]) == (8, 7)
    assert unified_memory_event(1, stats, headroom=0).denied == 8


def test_memory_that_exists_is_booked_beyond_the_cap():
    accounting = MemoryAccounting({Tier.MANAGED: 10})
    for nbytes in (5, 20, 7):
        accounting.book(Tier.MANAGED, "batches", nbytes)
        assert accounting.current(Tier.MANAGED) == nbytes
    assert accounting.denied(Tier.MANAGED) == 0
