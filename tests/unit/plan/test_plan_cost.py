"""The time of a step, computed by hand on a model in round numbers."""

from dataclasses import replace

import pytest
from cost_model_factory import SPEEDS, build_candidate, build_model

from gracetune.plan.cost import CostModel, CostsByMode
from gracetune.plan.result import ActivationMode, BlockPlan
from gracetune.plan.simulate import lower_bound_seconds, predict_seconds
from gracetune.plan.trace_records import Op


def test_a_resident_step_takes_its_compute_time() -> None:
    model = build_model(8)
    seconds = predict_seconds(model.at(1), build_candidate(model), SPEEDS, optimizer_nbytes=0)
    assert seconds.step == pytest.approx(8 * 3 + seconds.overhead)
    assert (seconds.gemm, seconds.attention) == (pytest.approx(16), pytest.approx(8))
    assert seconds.recompute == seconds.wait_weights == seconds.link_in == 0


def test_recomputing_costs_one_forward_more() -> None:
    model = build_model(8)
    kept, again = (
        predict_seconds(model.at(1), build_candidate(model, way), SPEEDS, 0)
        for way in ("keep", "recompute")
    )
    assert again.step - kept.step == pytest.approx(8.0)
    assert again.recompute == pytest.approx(8.0)


def test_lean_blocks_recompute_only_cheap_work() -> None:
    model = build_model(8)
    kept, lean = (
        predict_seconds(model.at(1), build_candidate(model, way), SPEEDS, 0)
        for way in ("keep", "lean")
    )
    assert lean.step - kept.step == pytest.approx(8 * 0.1, abs=0.02)


def test_weights_that_arrive_in_time_cost_no_time() -> None:
    model = build_model(8, frozen_nbytes=50)  # 0.5 s on the link, 1 s of forward
    resident, streamed = (
        predict_seconds(model.at(1), build_candidate(model, streamed=count), SPEEDS, 0)
        for count in (0, 8)
    )
    assert streamed.step == pytest.approx(resident.step)
    assert streamed.wait_weights == 0
    assert streamed.link_in == pytest.approx((16 - 6) * 0.5)


def test_compute_waits_for_slow_weights() -> None:
    model = build_model(8, frozen_nbytes=200)  # two seconds each
    choice = build_candidate(model, streamed=8)
    seconds = predict_seconds(model.at(1), choice, SPEEDS, 0)
    assert seconds.wait_weights > 3
    parts = (
        seconds.gemm, seconds.attention, seconds.elementwise, seconds.recompute,
        seconds.overhead, seconds.wait_weights, seconds.wait_activations,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(seconds.step)
    assert seconds.step >= lower_bound_seconds(model.at(1), choice, SPEEDS)


def test_more_slots_never_slow_a_step() -> None:
    model = build_model(10, frozen_nbytes=180)
    steps = [
        predict_seconds(
            model.at(1), build_candidate(model, streamed=10, slots=slots), SPEEDS, 0
        ).step
        for slots in (2, 3, 4, 6)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_offloading_is_hidden_on_a_fast_link_only() -> None:
    model = build_model(8)
    choice = build_candidate(model, "offload")
    fast, slow = (
        predict_seconds(model.at(1), choice, replace(SPEEDS, link_in=rate, link_out=rate), 0)
        for rate in (1000.0, 20.0)
    )
    assert fast.wait_activations < 0.2
    assert slow.wait_activations > 5
    assert slow.link_out == pytest.approx(8 * 50 / 20)
    assert slow.step >= 8 * 50 / 20


def test_offloaded_inputs_are_fetched_for_recomputing() -> None:
    model = build_model(8)
    choice = build_candidate(model, "recompute")
    moved = replace(
        choice, blocks=tuple(replace(block, offload_input=True) for block in choice.blocks)
    )
    seconds = predict_seconds(model.at(1), moved, SPEEDS, 0)
    assert seconds.link_out == pytest.approx(8 * 0.1)
    assert seconds.link_in == pytest.approx(6 * 0.1)  # the last two stay on the device


def test_both_directions_slow_each_other_down() -> None:
    model = build_model(8, frozen_nbytes=100)
    choice = build_candidate(model, "offload", streamed=8)
    free, shared = (
        predict_seconds(model.at(1), choice, replace(SPEEDS, both_ways_share=share), 0).step
        for share in (1.0, 0.5)
    )
    assert shared > free * 1.05


def test_accumulated_micro_batches_share_the_update() -> None:
    model = build_model(2)
    once, often = (
        predict_seconds(
            model.at(1), build_candidate(model, accumulation=n), SPEEDS, optimizer_nbytes=8000
        )
        for n in (1, 4)
    )
    assert once.overhead == pytest.approx(4 * often.overhead)
    assert once.overhead == pytest.approx((3 * 4 + 2 * 8000) / SPEEDS.memory)


def test_a_single_streamed_block_stays_in_its_slot() -> None:
    model = build_model(4)
    seconds = predict_seconds(model.at(1), build_candidate(model, streamed=1, slots=2), SPEEDS, 0)
    assert seconds.link_in == 0
    assert seconds.wait_weights == 0


@pytest.mark.parametrize(
    ("activations", "eager_saves", "expected"),
    [
        ("keep", (100, 50, 5), "keep"),
        ("keep", (121, 50, 5), "lean"),
        ("keep", (121, 101, 5), "recompute"),
        ("lean", (121, 50, 5), "lean"),
        ("lean", (121, 54, 5), "recompute"),
        ("recompute", (121, 54, 9), "recompute"),
        ("offload", (121, 54, 5), "keep"),
    ],
)
def test_an_eager_stand_in_keeps_no_more_than_the_compiled_block(
    activations: ActivationMode, eager_saves: tuple[int, int, int], expected: str
) -> None:
    """An eager Qwen-Image block keeps 21 % more than a compiled one, and 8 to 11 % more if lean."""
    block = build_model(1).at(1).blocks[0]

    def modes(*saved: int) -> CostsByMode:
        return CostsByMode(*(replace(block.eager.keep, saved_nbytes=nbytes) for nbytes in saved))

    block = replace(block, eager=modes(*eager_saves), compiled=modes(100, 50, 5))
    plan = BlockPlan("resident", activations, offload_input=activations == "recompute")
    assert block.eager_mode(plan) == expected


def test_fp8_matmuls_have_a_rate_of_their_own() -> None:
    shapes = build_model(2)._shapes
    (kind,) = shapes.kinds
    keep = kind.compiled.keep
    rounded = replace(keep, forward=tuple(replace(op, fp8=True) for op in keep.forward))
    ways = replace(kind.compiled, keep=rounded)
    before, after = (
        CostModel(replace(shapes, kinds=(one,)), SPEEDS).at(1).blocks[0].compiled.keep
        for one in (kind, replace(kind, compiled=ways))
    )
    assert after.forward.gemm == pytest.approx(before.forward.gemm / 2)
    assert after.backward == before.backward


def test_a_transposed_weight_does_not_grow_with_the_batch() -> None:
    shapes = build_model(1)._shapes
    (kind,) = shapes.kinds
    keep = replace(kind.eager.keep, backward_peak_nbytes=100, transposed_nbytes=60)
    eager = replace(kind.eager, keep=keep)
    model = CostModel(replace(shapes, kinds=(replace(kind, eager=eager),)), SPEEDS)
    scale = 8 / shapes.batch
    peak = model.at(8).blocks[0].eager.keep.backward_peak_nbytes
    assert peak == pytest.approx(60 + 40 * scale)


def test_dequantizing_does_not_grow_with_the_batch() -> None:
    shapes = build_model(1)._shapes
    asked = []

    def timer(op: Op, scale: float) -> float | None:
        asked.append(scale)
        return None

    dequantize = Op("elementwise", 0.0, 600.0, weights_nbytes=600.0, frozen=True)
    keep = replace(shapes.kinds[0].eager.keep, forward=(dequantize,))
    eager = replace(shapes.kinds[0].eager, keep=keep)
    kind = replace(shapes.kinds[0], eager=eager, dequantized_nbytes=400)
    model = CostModel(replace(shapes, kinds=(kind,)), replace(SPEEDS, timer=timer))
    one, many = (model.at(batch).blocks[0].eager.keep for batch in (1, 8))
    assert many.forward.elementwise == one.forward.elementwise > 0
    assert asked.count(1.0) >= 2
    plain = build_model(1).at(8).blocks[0].eager.keep
    assert many.forward_peak_nbytes == plain.forward_peak_nbytes + 400
    assert many.backward_peak_nbytes == plain.backward_peak_nbytes + 400


def test_timed_kernels_replace_rates() -> None:
    asked = []

    def timer(op: Op, scale: float) -> float | None:
        asked.append((op.kind, scale))
        return 3.0 if op.dims or op.kind == "elementwise" else None

    speeds = replace(SPEEDS, timer=timer, step_share=0.5, gap_s=7.0)
    timed, other = Op("gemm", 100.0, 1.0, frozen=True, dims=(10, 2, 5)), Op("gemm", 100.0, 1.0)
    (kind,) = build_model(1)._shapes.kinds
    forward = (timed, other, Op("elementwise", 0.0, 1e9))
    keep = replace(kind.compiled.keep, forward=forward)
    ways = replace(kind.compiled, keep=keep)
    shapes = replace(build_model(1)._shapes, kinds=(replace(kind, eager=ways, compiled=ways),))
    block = CostModel(shapes, speeds).at(4).blocks[0]
    assert ("gemm", 4.0) in asked
    compiled, eager = block.compiled.keep.forward, block.eager.keep.forward
    assert compiled.gemm == 3.0 / 0.5 + 4 * 100.0 / 100.0  # the other matmul was not timed
    assert eager.gemm == compiled.gemm
    assert eager.elementwise == 3.0
    assert eager.gaps == 7.0  # timed kernels include their gaps


def build_unequal_model(first: int, last: int, small: int, large: int) -> CostModel:
    """A model of two kinds of blocks; the first ones have larger weights."""
    shapes = build_model(1)._shapes
    (kind,) = shapes.kinds
    kinds = tuple(replace(kind, frozen_nbytes=nbytes) for nbytes in (large, small))
    return CostModel(replace(shapes, kinds=kinds, order=(0,) * first + (1,) * last), SPEEDS)


@pytest.mark.parametrize("link", [3.0, 30.0, 300.0])
@pytest.mark.parametrize("streamed", [0, 4, 12])
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_simulation_beats_the_lower_bound(
    link: float, streamed: int, activations: str, compiled: bool
) -> None:
    """The search skips candidates by this bound: blocks of two sizes, slow and fast links."""
    model = build_unequal_model(4, 8, small=100, large=700)
    speeds = replace(SPEEDS, link_in=link, link_out=link)
    for slots in (2, 3, 6):
        choice = build_candidate(model, activations, streamed, slots=slots, compiled=compiled)
        found = predict_seconds(model.at(1), choice, speeds, 0)
        least = lower_bound_seconds(model.at(1), choice, speeds)
        assert least <= found.step * (1 + 1e-9)
        assert least >= 0.3 * found.step  # the bound is tight enough to be useful
