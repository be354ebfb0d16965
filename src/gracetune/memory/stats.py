"""One dictionary that says what memory is doing: torch's own keys, and ours beside them.

Ours begin with `uvm.`, as the forks spelled them. A number that cannot be had is absent, and the
reason stands in its place: `uvm.faults_unavailable`, `uvm.pool_unavailable`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from gracetune.events.types import MemoryUsed
from gracetune.memory.hints import Verdict
from gracetune.memory.ledger import MemoryAccounting, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.memory.faults import FaultCounter
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
    ledger: MemoryAccounting,
    faults: FaultCounter | str,
    pool: ShimCounters | str,
) -> Stats:
    """Torch's dictionary (empty on a CPU) and ours; a text is why there is no such counter."""
    return {
        **torch_stats,
        "uvm.platform": platform.link.value,
        **_stage_stats(stages),
        **_ledger_stats(ledger),
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
        stats[f"uvm.bytes.{tier}.current"] = ledger.held(tier)
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
