"""How fast kernels are: constants fitted to measurements, each with its source, and what they give.

The fit is on an H200; other machines get the same shares of their own figures in `machines`. A new
measurement changes this file and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.plan.machines import Figure, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.plan.machines import Machine

_STEP = (
    "8 blocks of Wan-14B at batch 2, compiled, by kernel time on an H200, torch 2.11, 2026-11-15"
)
_RING = "benchmarks/results/ring.json, resident.kept.batch_2"
_KERNELS = "one kernel at a time on an H200, torch 2.11, 2026-11-15"


def _figure(value: float, kind: Kind, source: str) -> Figure:
    return Figure(value, kind, source)


FITTED: Mapping[str, Figure] = {
    "gemm_share": _figure(0.97, "measured", f"{_STEP}: 118 ms, with the thin ones bound by memory"),
    "fp8_share": _figure(
        1353 / 769, "measured", f"{_KERNELS}: row-wise products with their quantisation"
    ),
    "attention_forward_share": _figure(0.80, "measured", f"{_STEP}: 10 ms"),
    "attention_backward_share": _figure(0.65, "measured", f"{_STEP}: 31 ms"),
    "compiled_share": _figure(1.0, "measured", f"{_STEP}: 20.4 ms of fused kernels"),
    "eager_share": _figure(0.75, "measured", _RING),
    "gap_s": _figure(2e-6, "measured", f"{_STEP}: what no kernel accounts for"),
    "issue_s": _figure(8e-6, "assumed", "what queueing one operation costs a host's thread"),
    "fragmentation": _figure(0.03, "assumed", "of the peak: held by torch's allocator, unused"),
    "context_nbytes": _figure(0.6 * 2**30, "assumed", "the driver's own share of a device"),
    "library_nbytes": _figure(0.1 * 2**30, "assumed", "workspaces of cuBLAS and cuDNN"),
}
"""Shares are of a machine's figures: of its large bf16 products, of its device memory's rate."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a machine does a second, for the planner's kinds of work."""

    gemm: float
    fp8: float
    attention_forward: float
    attention_backward: float
    compiled: float
    """Bytes that fused elementwise kernels move."""
    eager: float
    """Bytes that elementwise kernels move one operation at a time."""
    memory: float
    """Bytes that anything can move at best: thin products are bound by it."""
    gap_s: float
    issue_s: float
    link_in: float
    link_out: float
    both_ways_share: float


def speeds_of(machine: Machine, fitted: Mapping[str, Figure] = FITTED) -> Speeds:
    """The machine's figures, times the shares that a training step reaches of them."""
    share = {name: figure.value for name, figure in fitted.items()}
    flops, rates = machine.bf16_flops.value, machine.rates()
    return Speeds(
        gemm=flops * share["gemm_share"],
        fp8=flops * share["fp8_share"],
        attention_forward=flops * share["attention_forward_share"],
        attention_backward=flops * share["attention_backward_share"],
        compiled=rates.device * share["compiled_share"],
        eager=rates.device * share["eager_share"],
        memory=rates.device,
        gap_s=share["gap_s"],
        issue_s=share["issue_s"],
        link_in=rates.copy_in,
        link_out=rates.copy_out,
        both_ways_share=rates.both_ways_share,
    )
