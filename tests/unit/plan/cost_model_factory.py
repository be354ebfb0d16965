"""Cost models in round numbers, whose results can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

from gracetune.plan.cost import CostModel
from gracetune.plan.machines import EffectiveRates
from gracetune.plan.result import BlockPlan
from gracetune.plan.simulate import PlanCandidate
from gracetune.plan.trace_records import (
    BlockTraces,
    ModelTraces,
    Op,
    Trace,
    TracesByMode,
    plain_checkpointing_trace,
)

SPEEDS = EffectiveRates(
    gemm=100.0,
    fp8=200.0,
    attention_forward=50.0,
    attention_backward=50.0,
    compiled=1000.0,
    eager=500.0,
    memory=1000.0,
    gap_s=0.0,
    link_in=100.0,
    link_out=100.0,
    both_ways_share=1.0,
)
"""Per second: 100 FLOPs, 1000 bytes of device memory, or 100 bytes over the link."""


def build_trace(saved: int, again: float = 0.0) -> Trace:
    """Forward takes 1 s and backward 2 s plus `again`; peaks are 10 bytes above the saved bytes."""
    return Trace(
        forward=(Op("gemm", 100.0, 1.0, frozen=True),),
        backward=(
            Op("gemm", 100.0, 1.0, frozen=True, backward=True),
            Op("attention", 50.0, 1.0, backward=True),
            Op("elementwise", 0.0, 1000.0 * again, backward=True),
        ),
        saved_nbytes=saved,
        saves_input=True,
        forward_peak_nbytes=saved + 5,
        backward_peak_nbytes=saved + 10,
    )


def build_traces(saved: int) -> TracesByMode:
    """Lean blocks save 40 bytes; recomputed blocks save only their input."""
    keep = build_trace(saved)
    return TracesByMode(keep, build_trace(40, again=0.1), plain_checkpointing_trace(keep, 10))


def build_model(
    num_blocks: int = 8, frozen_nbytes: int = 100, speeds: EffectiveRates = SPEEDS
) -> CostModel:
    """Blocks of 100 bytes that save 80 bytes per sample, 40 if lean, or their input of 10."""

    block = BlockTraces(
        frozen_nbytes=frozen_nbytes,
        trained_nbytes=2,
        input_nbytes=10,
        eager=build_traces(120),
        compiled=build_traces(80),
    )
    outside = Trace((), (), 3, False, 6, 7)
    order = (0,) * num_blocks
    shapes = ModelTraces("made", 1, (block,), order, outside, 50, 0, batch_nbytes=4)
    return CostModel(shapes, speeds)


def build_candidate(
    model: CostModel,
    activations: str = "keep",
    streamed: int = 0,
    *,
    batch: int = 1,
    slots: int = 3,
    compiled: bool = True,
    accumulation: int = 1,
) -> PlanCandidate:
    """All blocks have the same plan; the first ones are streamed."""
    plan = BlockPlan("resident", activations)  # type: ignore[arg-type]
    blocks = tuple(
        replace(plan, weights="streamed") if index < streamed else plan
        for index in range(model.num_blocks)
    )
    return PlanCandidate(blocks, batch, accumulation, slots if streamed else 0, compiled)
