"""A planning problem in round numbers, whose results can be computed by hand."""

from gracetune.plan.cost import CostModel
from gracetune.plan.machines import EffectiveRates
from gracetune.plan.memory import FixedMemory
from gracetune.plan.planner_input import PlanProblem
from gracetune.plan.search import Constraints, PlanBudget
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
    eager=1000.0,
    memory=1000.0,
    gap_s=0.0,
    link_in=100.0,
    link_out=100.0,
    both_ways_share=1.0,
)


def trace(saved):
    """Forward takes 1 s, backward 2 s."""
    return Trace(
        forward=(Op("gemm", 100.0, 1.0, frozen=True),),
        backward=(Op("gemm", 200.0, 1.0, frozen=True, backward=True),),
        saved_nbytes=saved,
        saves_input=True,
        forward_peak_nbytes=saved + 5,
        backward_peak_nbytes=saved + 10,
    )


def build_model(num_blocks=8, frozen_nbytes=100):
    """Blocks of 100 bytes that save 80 bytes per sample, 40 if lean, or their input of 10."""
    ways = TracesByMode(trace(80), trace(40), plain_checkpointing_trace(trace(80), 10))
    block = BlockTraces(
        frozen_nbytes=frozen_nbytes, trained_nbytes=2, input_nbytes=10, eager=ways, compiled=ways
    )
    outside = Trace((), (), 3, False, 6, 7)
    shapes = ModelTraces("made", 1, (block,), (0,) * num_blocks, outside, 50, 0, batch_nbytes=4)
    return CostModel(shapes, SPEEDS)


def build_problem(device_nbytes, micro_batches=1000, frozen_nbytes=100, compiled=(False,)):
    return PlanProblem(
        model=build_model(frozen_nbytes=frozen_nbytes),
        fixed=FixedMemory(optimizer_nbytes=16, batches_ahead=0),
        budget=PlanBudget(device_nbytes, 10**6),
        constraints=Constraints(compile=compiled, offload=False),
        micro_batches=micro_batches,
    )
