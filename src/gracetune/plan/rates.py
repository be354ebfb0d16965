"""How fast kernels are: constants fitted to measurements, each with its source, and what they give.

The fit is on an H200; other machines get the same shares of their own figures in `machines`. A new
measurement changes this file and no other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gracetune.plan.host import Host
from gracetune.plan.machines import SourcedFigure
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.plan.machines import MachineSpec
    from gracetune.plan.shapes import Op

    Timer = Callable[[Op, float], float | None]
    """Seconds of a kernel by itself at so many times the traced batch; none: it cannot tell."""

_STEP = "8 blocks of Wan-14B, compiled, batch 2, by kernel time on an H200, torch 2.11, 2026-11-15"
_LONG = "40 blocks of Wan-14B on an H200: compiled and kept at batch 2, 0.985 s; eager, 0.654 s"
_FUSED = "8 blocks of Wan-14B with fused LoRA, compiled, kept, batch 2, on an H200: 728 TFLOP/s"
_RING = "ten blocks of Wan-14B, resident, eager and kept at batch 2, on an H200: 0.312 s"
_HOST = (
    "`probe` on two busy x86 cores, Python 3.11, torch 2.13, 2026-11-15; hosts differ by factors"
)
_KERNELS = "one kernel at a time on an H200, torch 2.11, 2026-11-15"

FITTED: Mapping[str, SourcedFigure] = {
    "gemm_share": SourcedFigure(0.89, "measured", f"{_LONG}; {_STEP} would give 0.97"),
    "fp8_share": SourcedFigure(
        1353 / 769 * 0.88 / 0.97,
        "inferred",
        f"{_KERNELS}: row-wise products with their quantisation; less what bf16 loses in a step",
    ),
    "attention_forward_share": SourcedFigure(0.76, "measured", f"{_STEP}: 10 ms; and {_LONG}"),
    "attention_backward_share": SourcedFigure(0.62, "measured", f"{_STEP}: 31 ms; and {_LONG}"),
    "compiled_share": SourcedFigure(
        0.75, "measured", f"{_FUSED}; 16.8 ms of fused and small kernels for what 11 ms would copy"
    ),
    "eager_share": SourcedFigure(0.75, "inferred", f"what products and attention leave of {_RING}"),
    "step_share": SourcedFigure(
        0.88, "inferred", f"{_FUSED} where products alone do 757 to 805 TFLOP/s; and {_LONG}"
    ),
    "gap_s": SourcedFigure(2e-6, "assumed", "between two kernels of one stream"),
    "forward_s": SourcedFigure(8e-6, "measured", f"an operator that a model calls: {_HOST}"),
    "backward_s": SourcedFigure(5e-6, "measured", f"one that autograd calls: {_HOST}"),
    "own_s": SourcedFigure(110e-6, "measured", f"one of ours, beside its kernels: {_HOST}"),
    "own_back_s": SourcedFigure(31e-6, "measured", f"one of ours that autograd calls: {_HOST}"),
    "policed_s": SourcedFigure(22e-6, "measured", f"what a policy adds to a call: {_HOST}"),
    "again_s": SourcedFigure(24e-6, "measured", f"and to one that is made again: {_HOST}"),
    "updated_s": SourcedFigure(11e-6, "measured", f"an update of one tensor: {_HOST}"),
    "fragmentation": SourcedFigure(
        0.03,
        "assumed",
        "of the peak: held by torch's allocator, unused. A clip planned for 96 GB left 1 % in "
        "segments that grow; those of fixed size may need more than there is",
    ),
    "context_nbytes": SourcedFigure(0.6 * GIB, "assumed", "the driver's own share of a device"),
    "library_nbytes": SourcedFigure(
        0.05 * GIB, "inferred", "workspaces of cuBLAS and cuDNN: what measured peaks leave for them"
    ),
}
"""Shares are of a machine's figures: of its large bf16 products, of its device memory's rate."""
FREE_HOST = Host()
"""Queueing takes no time: for reckoning by hand."""
USUAL_HOST = Host(**{field.name: FITTED[field.name].value for field in fields(Host)})
"""Of a machine that is only known by name; the one at hand is measured."""


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
    link_in: float
    link_out: float
    both_ways_share: float
    timer: Timer | None = None
    """What the machine itself says of a kernel; none: by the rates above."""
    step_share: float = 1.0
    """Of a product's speed by itself, what is left in the middle of a long compiled step."""
    host: Host = FREE_HOST


@dataclass(frozen=True, slots=True)
class Basics:
    """What is known of a machine: measured here, or published."""

    flops: float
    """Of large bf16 products."""
    memory: float
    """Bytes a second of a device copy, read and write together."""
    link_in: float
    link_out: float
    both_ways_share: float = 1.0
    """What is left of each direction while the other is busy."""
    timer: Timer | None = None
    """Times single kernels, where the machine is at hand."""
    host: Host = USUAL_HOST
    """What queueing costs: measured, or what is assumed of a host that nobody has measured."""


def basics_of(machine: MachineSpec) -> Basics:
    """The figures of a known machine."""
    rates = machine.rates()
    return Basics(
        flops=machine.bf16_flops.value,
        memory=rates.device,
        link_in=rates.copy_in,
        link_out=rates.copy_out,
        both_ways_share=rates.both_ways_share,
    )


def speeds_of(basics: Basics, fitted: Mapping[str, SourcedFigure] = FITTED) -> Speeds:
    """The basics, times the shares that a training step reaches of them."""
    share = {name: figure.value for name, figure in fitted.items()}
    return Speeds(
        gemm=basics.flops * share["gemm_share"],
        fp8=basics.flops * share["fp8_share"],
        attention_forward=basics.flops * share["attention_forward_share"],
        attention_backward=basics.flops * share["attention_backward_share"],
        compiled=basics.memory * share["compiled_share"],
        eager=basics.memory * share["eager_share"],
        memory=basics.memory,
        gap_s=share["gap_s"],
        link_in=basics.link_in,
        link_out=basics.link_out,
        both_ways_share=basics.both_ways_share,
        timer=basics.timer,
        step_share=share["step_share"],
        host=basics.host,
    )
