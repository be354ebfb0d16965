"""Planned times of micro-batches: from traces of a few sizes, or from floating-point operations."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from cost_model_factory import build_candidate, build_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gracetune.events.run_control import RunControl
from gracetune.plan import planner
from gracetune.plan.bucket_seconds import (
    BucketSeconds,
    bucket_seconds,
    estimate_flops,
    interpolate,
    planned_seconds,
    sizes_to_trace,
    token_counts,
)
from gracetune.plan.device_benchmark import measure_device
from gracetune.plan.machines import NO_LAUNCH_COSTS
from gracetune.plan.memory import FixedMemory
from gracetune.plan.planner import PlannerInputs, plan_run
from gracetune.plan.search import predict
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.managed_overflow import NoManagedRun
from gracetune.train.run import SignalHandler


class FamilyWithTwoBlocks:
    """Latents have one position per 8 x 8 pixels and frame, and one token for each position."""

    def blocks(self):
        return [nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 16))] * 2

    def latent_shape(self, width, height, frames=1):
        return (4, frames, height // 8, width // 8)

    def num_tokens(self, latent_shape):
        return latent_shape[1] * latent_shape[2] * latent_shape[3]


SIZES = [(64, 64), (64, 64, 5), (64, 64, 9), (128, 64, 9)]


def test_without_a_plan_times_are_those_of_the_flops():
    seconds = bucket_seconds(FamilyWithTwoBlocks(), SIZES, 4, {})
    weights, tokens = 2 * (16 * 48 + 48 * 16 + 16 * 16), 64 * 5
    flops = 3 * (2 * weights * tokens + 2 * 4 * 16 * tokens**2)
    assert seconds((64, 64, 5), 1) == pytest.approx(flops / 1e14)
    assert seconds((64, 64, 5), 3) == pytest.approx(3 * seconds((64, 64, 5), 1))
    by_size = [seconds(size, 1) for size in SIZES]
    assert by_size == sorted(by_size)
    sent = BucketSeconds([(list(size), base, each) for size, base, each in seconds.rows])
    assert [sent(size, 2) for size in SIZES] == [seconds(size, 2) for size in SIZES]


def test_adapters_and_quantization_hardly_change_the_estimate():
    class Quantized(nn.Module):
        in_features, out_features = 16, 48

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)  # 4 bits each

    class Wrapped(nn.Module):
        in_features, out_features = 16, 48

        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(16, 48)

    plain = estimate_flops([nn.Sequential(nn.Linear(16, 48))], 100)
    assert estimate_flops([nn.Sequential(Quantized())], 100) == plain
    assert estimate_flops([nn.Sequential(Wrapped())], 100) == plain
    assert estimate_flops([nn.Conv2d(4, 8, 3)], 100) == 3 * 2 * 4 * 8 * 9 * 100


def test_three_sizes_are_traced_the_smallest_a_medium_and_the_largest():
    tokens = {(8, 8, frames): frames for frames in (1, 2, 3, 10, 45, 60, 100)} | {(16, 4, 40): 45}
    assert sizes_to_trace(tokens) == [(8, 8, 1), (8, 8, 45), (8, 8, 100)]
    assert sizes_to_trace({(8, 8): 4, (4, 16): 4}) == [(4, 16)]
    assert sizes_to_trace({(8, 8): 4, (8, 16): 8}) == [(8, 8), (8, 16)]


@given(
    st.lists(st.floats(0.001, 100), min_size=3, max_size=3),
    st.lists(st.integers(1, 10**5), min_size=3, max_size=3, unique=True),
    st.data(),
)
def test_interpolation_follows_a_quadratic_and_stays_between_its_neighbours(terms, counts, data):
    def seconds(tokens):
        return terms[0] + terms[1] * tokens + terms[2] * tokens**2 / 1e4

    tokens = data.draw(st.integers(min(counts), max(counts)))
    found = interpolate([(count, seconds(count)) for count in counts], tokens)
    assert found == pytest.approx(seconds(tokens), rel=1e-6)
    flat = [(count, 1.0 if count < max(counts) else 9.0) for count in counts]
    assert 1.0 <= interpolate(flat, tokens) <= 9.0
    if tokens <= sorted(counts)[1]:
        assert interpolate(flat, tokens) == 1.0


def test_planned_times_are_those_of_the_plan_without_the_optimizer():
    """Each of 8 blocks takes 1 s forward and 2 s backward for each sample."""
    model = build_model()
    fixed = FixedMemory(optimizer_nbytes=16_000, batches_ahead=0)

    def plan(streamed):
        return predict(model, build_candidate(model, streamed=streamed, batch=2), fixed, False)

    assert plan(0).seconds.step > 48.1, "with the optimizer's update"
    assert planned_seconds(model, plan(0)) == pytest.approx((24.0, 48.0), rel=0.01)
    slow_link = build_model(frozen_nbytes=1000)
    one, full = planned_seconds(slow_link, plan(8))
    assert one == pytest.approx(full, rel=0.1), "copying weights takes longer than computing"


def test_planned_times_of_other_sizes_are_interpolated():
    traced = {(64, 64): (1.0, 2.5), (64, 64, 5): (5.0, 17.0), (128, 64, 9): (18.0, 66.0)}
    seconds = bucket_seconds(FamilyWithTwoBlocks(), SIZES, 4, traced)
    for size, (one, full) in traced.items():
        assert seconds(size, 1) == pytest.approx(one)
        assert seconds(size, 4) == pytest.approx(full)
        assert seconds(size, 2) == pytest.approx(one + (full - one) / 3)
    assert 5.0 < seconds((64, 64, 9), 1) < 18.0
    single = bucket_seconds(
        FamilyWithTwoBlocks(), SIZES, 1, {s: (o, o) for s, (o, _) in traced.items()}
    )
    assert single((64, 64, 5), 1) == pytest.approx(5.0)


def test_a_planned_run_traces_the_sizes_that_ranks_share(tiny_run, tmp_path, recorder, monkeypatch):
    """The data have two sizes; the plan is rehearsed on the CPU."""

    def measure(*args):  # launching the kernels of so small a model takes longer than they do
        return replace(measure_device(*args), host=NO_LAUNCH_COSTS)

    monkeypatch.setattr(planner, "measure_device", measure)
    run = tiny_run(
        adapter={"rank": 4},
        plan={"device_memory": "1GB", "compile": "never"},
        train={"batch_size": 2},
    )
    data = run.datasets[0]
    small = data.model_copy(update={"id": "small", "resolution": 12})
    run = run.model_copy(update={"datasets": (data, small)})
    (tmp_path / "run").mkdir()
    session = build_session(
        run, start_accelerator(run), recorder, RunControl(tmp_path), SignalHandler()
    )
    try:
        family, pipeline = session.state.family, session.pipeline
        sizes = list(pipeline.order.draws_by_size())
        assert session.plan_controller.size_seconds == {}, "one rank shares nothing"
        traced = sizes_to_trace(token_counts(family, sizes))
        assert traced == [(12, 12), (24, 24)]
        assert [len(one) for one in pipeline.load_sizes(traced).values()] == [1, 1]
        session.plan_controller.close()
        inputs = PlannerInputs(
            load_largest=lambda: pipeline.load(pipeline.order.largest_draw()),
            batches_ahead=0,
            convert_to_fp8=lambda: None,
            managed=NoManagedRun(),
            load_sizes=partial(pipeline.load_sizes, traced),
        )
        controller = plan_run(
            run,
            family,
            inputs,
            session.state.stepper,
            session.batch_transfer.link,
            torch.device("cpu"),
            session.gc_freeze,
            recorder,
        )
        planned = controller.size_seconds
        controller.close()
    finally:
        pipeline.close()
        session.close()
    assert list(planned) == [(24, 24), (12, 12)]
    seconds = bucket_seconds(family, sizes, 2, planned)
    assert 0 < seconds((12, 12), 2) < seconds((24, 24), 2) <= controller.plan.seconds.step
