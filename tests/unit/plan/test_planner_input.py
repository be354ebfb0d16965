"""From a run file to a planning problem, and the measurement of kernels."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch
from problem_factory import build_problem

from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError
from gracetune.models.family import SampleShape
from gracetune.plan.compile_cache import CompileCache
from gracetune.plan.device_benchmark import (
    MAX_TIMED_NBYTES,
    MAX_TIMED_ROWS,
    REPEATS,
    KernelTimer,
    measure_device,
)
from gracetune.plan.machines import FITTED_CONSTANTS, MACHINES, effective_rates, machine_rates
from gracetune.plan.meta_models import build_meta_model
from gracetune.plan.planner_input import (
    CACHED_GRAPH_SECONDS,
    COMPILER_START_SECONDS,
    GRAPH_SECONDS,
    BatchShapes,
    TrainedSize,
    cached_sample_nbytes,
    constraints_of,
    fixed_memory_of,
    largest_sample,
    plan_settings,
)
from gracetune.plan.result import BlockPlan
from gracetune.plan.trace_records import Op, record_call
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

LORA = {"rank": 8}


def run_file(**sections: Any) -> RunFile:
    return RunFile.model_validate({"datasets": [{"resolution": 1024}], **sections})


def test_the_largest_sample_is_planned() -> None:
    video = {"dataset_type": "video", "resolution": 480, "frames": [33, 81]}
    assert largest_sample(run_file(datasets=[{"resolution": 512}, video])) == SampleShape(
        480, 480, 81
    )
    assert largest_sample(run_file()) == SampleShape(1024, 1024)
    edits = [{"resolution": 512, "conditioning_data_dir": ["a", "b"]}, {"resolution": 1024}]
    assert largest_sample(run_file(datasets=edits)) == SampleShape(1024, 1024, controls=2)
    wide = {"resolution": 512, "resolution_type": "edge", "max_aspect": 2.0}
    assert largest_sample(run_file(datasets=[wide])) == SampleShape(1024, 512)
    made = {"type": "shapes", "shapes": {"size": 24}}
    assert largest_sample(run_file(datasets=[made])) == SampleShape(24, 24)


def test_a_run_without_datasets_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="datasets is empty"):
        largest_sample(RunFile())


def test_constraints_follow_the_run_file() -> None:
    train = {"batch_size": 4, "gradient_accumulation_steps": 2}
    wishes = constraints_of(run_file(train=train, adapter=LORA))
    assert (wishes.samples, wishes.run_file_batch) == (8, 4)
    assert wishes.batch_sizes() == [8, 4, 2, 1]
    assert (wishes.compile, wishes.stream, wishes.offload) == ((True, False), True, True)
    plan = {"batch": "fixed", "compile": "never", "stream": False, "offload": False}
    fixed = constraints_of(run_file(train=train, adapter=LORA, plan=plan))
    assert fixed.batch_sizes() == [4]
    assert (fixed.compile, fixed.stream, fixed.offload) == ((False,), False, False)


def test_graphs_in_the_compile_cache_are_loaded_faster(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "markers", "torch 2.11, H200")
    problem = replace(build_problem(10**6, compiled=(True,)), compile_cache=cache)
    plan = problem.solve(problem.budget)
    mixed = replace(plan, blocks=(BlockPlan("streamed", "keep"), *plan.blocks[1:]))
    assert problem.compile_seconds(plan) == COMPILER_START_SECONDS + GRAPH_SECONDS
    problem.remember_graphs(plan)
    assert problem.compile_seconds(plan) == COMPILER_START_SECONDS + CACHED_GRAPH_SECONDS
    loaded_and_new = CACHED_GRAPH_SECONDS + GRAPH_SECONDS
    assert problem.compile_seconds(mixed) == COMPILER_START_SECONDS + loaded_and_new
    others = (
        {"compile_cache": replace(cache, environment="torch 2.12, H200")},
        {"compile_cache": CompileCache()},
        {"shapes": BatchShapes(sizes=2, batches=frozenset({1}))},
    )
    for change in others:
        other = replace(problem, **change)
        assert other.compile_seconds(plan) == COMPILER_START_SECONDS + GRAPH_SECONDS


def test_of_plans_about_as_fast_the_one_with_cached_graphs_is_chosen(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "markers")
    problem = replace(build_problem(10**6, compiled=(True,)), compile_cache=cache)
    first = problem.solve(problem.budget)
    assert {block.activations for block in first.blocks} == {"lean"}
    for mode, chosen in ("recompute", "lean"), ("keep", "keep"):  # recomputing takes longer
        blocks = tuple(replace(block, activations=mode) for block in first.blocks)
        problem.remember_graphs(replace(first, blocks=blocks))
        second = problem.solve(problem.budget)
        assert {block.activations for block in second.blocks} == {chosen}
    problem.remember_graphs(first)
    assert problem.solve(problem.budget) == first


def test_a_plan_counts_its_graphs_by_block_mode_placement_and_batch_size() -> None:
    problem = build_problem(10**6, compiled=(True,))
    plan = problem.solve(problem.budget)
    eager = replace(plan, compiled=False)
    assert {block.activations for block in plan.blocks} == {"lean"}
    assert (problem.num_graphs(plan), problem.num_graphs(eager)) == (1, 0)
    blocks = [BlockPlan("streamed", "offload"), BlockPlan("resident", "keep"), *plan.blocks[2:]]
    mixed = replace(plan, blocks=tuple(blocks))
    assert problem.num_graphs(mixed) == 3
    shapes = BatchShapes(sizes=14, longest_text=512, texts_vary=True, batches=frozenset({1, 3, 4}))
    varied = replace(problem, shapes=shapes)
    assert varied.num_graphs(mixed) == 6
    assert varied.compile_seconds(mixed) == COMPILER_START_SECONDS + 6 * GRAPH_SECONDS
    assert varied.compile_seconds(mixed, plan) == 4 * GRAPH_SECONDS
    assert varied.compile_seconds(plan, mixed) == varied.compile_seconds(eager) == 0
    text = "14 sizes, texts of up to 512 tokens, batches of 1, 3 and 4"
    assert shapes.describe() == text
    assert shapes.dynamic
    assert shapes.several_batches


def test_one_shape_needs_no_dynamic_graphs() -> None:
    shapes = BatchShapes(longest_text=77, batches=frozenset({4}))
    assert (shapes.dynamic, shapes.several_batches, shapes.graphs_per_block) == (False, False, 1)
    assert shapes.describe() == "1 size, texts of 77 tokens, batches of 4"
    assert not replace(shapes, batches=frozenset({1, 4})).several_batches
    assert replace(shapes, batches=frozenset({2, 4})).dynamic


def test_a_ramp_is_planned_at_its_target() -> None:
    ramp = {"enable_batch_size_rampup": True, "target_effective_batch_size": 9}
    assert constraints_of(run_file(train={"batch_size": 2}, gh200_optimizations=ramp)).samples == 8


def test_trained_weights_are_not_streamed() -> None:
    assert not constraints_of(run_file()).stream


def test_auto_and_off_have_the_defaults() -> None:
    assert (
        plan_settings(run_file(plan="off")) == plan_settings(run_file()) == plan_settings(RunFile())
    )


def test_fixed_memory_counts_experts_caches_and_averages() -> None:
    shape = build_meta_model(
        run_file(model={"family": "wan22"}).model, SampleShape(1024, 1024), {"num_layers": 1}
    )
    assert cached_sample_nbytes(shape) == (MIB // 2, 4 * MIB)
    run = run_file(train={"ema_decay": 0.9}, cache_config={"device_budget_gb": 0.5})
    fixed = fixed_memory_of(run, shape, TrainedSize(100, 600), samples=260, device_nbytes=96 * GIB)
    assert (fixed.num_transformers, fixed.optimizer_nbytes, fixed.averages_nbytes) == (2, 1200, 200)
    assert fixed.host_caches_nbytes == 260 * (MIB // 2 + 4 * MIB)
    assert fixed.device_caches_nbytes == GIB // 2
    few = fixed_memory_of(run_file(), shape, TrainedSize(1, 1), samples=2, device_nbytes=96 * GIB)
    assert few.device_caches_nbytes == 2 * 4 * MIB
    unknown = fixed_memory_of(
        run_file(), shape, TrainedSize(1, 1), samples=None, device_nbytes=64 * GIB
    )
    assert (unknown.host_caches_nbytes, unknown.device_caches_nbytes) == (0, GIB)
    assert unknown.for_budget(32 * GIB).device_caches_nbytes == GIB // 2
    assert few.for_budget(GIB).device_caches_nbytes == 8 * MIB
    assert fixed.for_budget(GIB) == fixed, "the run file has message how much"


def test_disk_caches_and_budgets_reduce_host_memory() -> None:
    shape = build_meta_model(
        run_file(model={"family": "wan22"}).model, SampleShape(1024, 1024), {"num_layers": 1}
    )
    cache = {"vae_cache_type": "disk", "text_cache_type": "memory"}
    run = run_file(cache_config=cache)
    assert fixed_memory_of(run, shape, TrainedSize(1, 1), 10, GIB).host_caches_nbytes == 40 * MIB
    tight = run_file(cache_config={**cache, "host_budget_gb": 0.01})
    assert fixed_memory_of(tight, shape, TrainedSize(1, 1), 10, GIB).host_caches_nbytes == int(
        0.01 * GIB
    )


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_known_machine_has_effective_rates(name: str) -> None:
    speeds = effective_rates(machine_rates(MACHINES[name]))
    assert 0 < speeds.attention_backward < speeds.attention_forward < speeds.gemm < speeds.fp8
    assert 0 < speeds.eager <= speeds.compiled <= speeds.memory
    assert 0 < speeds.both_ways_share <= 1


def test_every_fitted_constant_has_a_source() -> None:
    for figure in FITTED_CONSTANTS.values():
        assert figure.value > 0
        assert len(figure.source) > 8


def test_rates_are_measured_with_the_given_clock() -> None:
    ticks = count()
    waits = []
    basics = measure_device(
        torch.device("cpu"),
        lambda: waits.append(1),
        edge=16,
        copied_nbytes=1000,
        clock=lambda: float(next(ticks)),
    )
    assert basics.flops == 2 * 16**3 * REPEATS  # REPEATS matmuls between two ticks
    assert basics.memory == 2 * 1000 * REPEATS
    assert basics.link_in == basics.link_out == 1000 * REPEATS
    assert len(waits) == 8
    assert basics.both_ways_share == 1.0
    assert basics.timer is None  # a CPU needs no synchronization


def test_kernels_of_equal_sizes_are_timed_once() -> None:
    now, work = [0.0], []

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    watch = KernelTimer(torch.device("cpu"), lambda: work.append(1), tick)
    product = Op("gemm", 0.0, 0.0, dims=(8, 4, 4))
    one = watch.seconds(product, 1.0)
    assert one == 1 / REPEATS
    assert watch.seconds(replace(product, backward=True), 1.0) == one
    assert len(work) == 2
    more = watch.seconds(Op("gemm", 0.0, 0.0, dims=(2 * MAX_TIMED_ROWS, 1, 1)), 2.0)
    assert more == 4 / REPEATS  # timed for fewer rows
    attention = Op("attention", 0.0, 0.0, dims=(3, 2, 8, 4, 8))
    assert watch.seconds(attention, 1.0) == pytest.approx(3 / REPEATS)  # timed for one sample
    # By this clock, forward and backward take as long as forward alone.
    assert watch.seconds(replace(attention, backward=True), 1.0) == 0.0
    assert watch.seconds(replace(product, dims=()), 1.0) is None


def test_elementwise_kernels_are_replayed_and_timed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ticks = iter([0.0, 5.0, 10.0, 11.0])
    watch = KernelTimer(torch.device("cpu"), lambda: None, lambda: next(ticks))

    def op(size: int, nbytes: float = 1.0) -> Op:
        args = torch.ones(2, 3), torch.ones(size)
        recipe = record_call(torch.ops.aten.add.Tensor, args, {})
        return Op("elementwise", 0.0, nbytes, replay=recipe)

    rng_state = torch.get_rng_state()
    # Five seconds, including one second for an empty kernel; each kernel is timed once.
    times = [watch.seconds(op(3), scale) for scale in (1.0, 4.0, 0.5)]
    assert times == [pytest.approx(n / REPEATS) for n in (5, 1 + 4 * 4, 1 + 4 / 2)]
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert watch.seconds(op(3, nbytes=2.0 * MAX_TIMED_NBYTES), 1.0) is None
    # Kernels that fail are estimated by their bytes, and this is logged once.
    assert [watch.seconds(op(2), 1.0) for _ in range(2)] == [None, None]
    (message,) = caplog.messages
    assert "aten.add.Tensor" in message
    assert "size of tensor" in message


@pytest.mark.parametrize(
    "op",
    [
        Op("gemm", 0.0, 0.0, dims=(8, 4, 4)),
        Op("attention", 0.0, 0.0, dims=(3, 2, 8, 4, 8)),
        Op("attention", 0.0, 0.0, dims=(3, 2, 8, 4, 8), backward=True),
    ],
)
def test_kernels_that_do_not_fit_are_not_timed(
    op: Op, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for it")

    monkeypatch.setattr(KernelTimer, "_numbers", full)
    watch = KernelTimer(torch.device("cpu"), lambda: None, time.perf_counter)
    assert [watch.seconds(op, 1.0) for _ in range(2)] == [None, None]
    (message,) = caplog.messages
    assert "no room for it" in message
