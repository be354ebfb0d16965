"""Launch costs: measured with tiny models, and simulated beside compute."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, cycle, pairwise
from random import Random
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import pytest
import torch
from cost_model_factory import SPEEDS, build_candidate, build_model

from gracetune.models.family import PLANNABLE, planner_shapes
from gracetune.plan import launch_overhead
from gracetune.plan.cost import CostModel
from gracetune.plan.launch_overhead import (
    OFFLOAD_COSTS,
    PACK_COSTS,
    PROXY_FAMILY,
    REALISTIC_EDGE,
    REALISTIC_TOKENS,
    REPEATS,
    VIEW_COST,
    WARM_UP,
    HostSeconds,
    LaunchCosts,
    ProbeCalls,
    ProbeRound,
    _ProbeStep,
    build_probe_model,
    costs_per_call,
    equivalent_ops,
    measure_launch_costs,
)
from gracetune.plan.machines import NO_LAUNCH_COSTS
from gracetune.plan.simulate import (
    EVENTS_PER_COPY,
    LAUNCH_QUEUE_DEPTH,
    LAUNCHES_PER_EAGER_KERNEL,
    lower_bound_seconds,
    predict_seconds,
)
from gracetune.plan.trace import trace_model
from gracetune.plan.trace_records import HostCalls, plain_checkpointing_trace, recomputed_trace
from gracetune.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.plan.result import Seconds
    from gracetune.plan.trace_records import ModelTraces

CALLS = HostCalls(dispatched=10, kernels=6, views=5, custom_ops=2, saved_tensors=4)
HOST = LaunchCosts(
    forward_s=1.0,
    backward_s=2.0,
    custom_op_s=10.0,
    custom_op_backward_s=7.0,
    checkpoint_s=3.0,
    checkpoint_recompute_s=4.0,
    stream_s=33.0,
    stream_backward_s=30.0,
    send_s=20.0,
    send_backward_s=9.0,
)


def build_launch_model(
    num_blocks: int,
    host: LaunchCosts,
    forward: HostCalls,
    backward: HostCalls,
    num_trained: int = 0,
) -> CostModel:
    """A model whose blocks take 1 s in forward and 2 s in backward, with these host calls."""
    shapes = build_model(num_blocks)._shapes
    (kind,) = shapes.kinds
    keep = replace(kind.eager.keep, forward_calls=forward, backward_calls=backward)
    lean = replace(kind.eager.lean, forward_calls=forward, backward_calls=backward)
    ways = replace(kind.eager, keep=keep, lean=lean, recompute=recomputed_trace(keep, (), 10))
    kind = replace(kind, eager=ways, compiled=ways, num_trained=num_trained)
    return CostModel(replace(shapes, kinds=(kind,)), replace(SPEEDS, host=host))


def seconds_of(
    model: CostModel,
    *,
    batch: int = 1,
    activations: str = "keep",
    streamed: int = 0,
    compiled: bool = False,
) -> Seconds:
    choice = build_candidate(model, activations, streamed, batch=batch, compiled=compiled)
    found = predict_seconds(model.at(batch), choice, model.rates, 0)
    assert lower_bound_seconds(model.at(batch), choice, model.rates) <= found.step * (1 + 1e-9)
    return found


def test_each_kind_of_call_has_its_own_cost() -> None:
    keep = replace(build_model(1)._shapes.kinds[0].eager.keep, forward_calls=CALLS)
    keep = replace(keep, backward_calls=HostCalls(dispatched=3, kernels=3, custom_ops=1))
    assert HOST.forward_seconds(keep) == pytest.approx(6 + 5 * VIEW_COST + 2 * 10)
    assert HOST.backward_seconds(keep) == pytest.approx(3 * 2 + 7)


def test_checkpointing_costs_time_in_forward_and_when_recomputing() -> None:
    (kind,) = build_model(1)._shapes.kinds
    keep = replace(kind.eager.keep, forward_calls=CALLS, backward_calls=HostCalls(kernels=3))
    kept, plain = recomputed_trace(keep, (), 10), plain_checkpointing_trace(keep, 10)
    assert HOST.forward_seconds(plain) == HOST.forward_seconds(keep)
    assert HOST.forward_seconds(kept) == pytest.approx(HOST.forward_seconds(keep) + 10 * 3)
    assert HOST.backward_seconds(kept) - HOST.backward_seconds(plain) == pytest.approx(10 * 4)
    # The trace has one forward kernel, which is launched again to recompute.
    assert plain.recompute_calls.kernels == len(keep.forward)


def test_saved_results_launch_no_kernel_and_unneeded_ones_are_not_recomputed() -> None:
    (kind,) = build_model(1)._shapes.kinds
    first = kind.eager.keep.forward[0]
    keep = replace(kind.eager.keep, forward=(first, *[replace(first)] * 3), forward_calls=CALLS)
    assert recomputed_trace(keep, (), 10).recompute_calls.kernels == 4
    lean = recomputed_trace(keep, (first,), 10).recompute_calls
    assert (lean.kernels, lean.custom_ops, lean.checkpointed) == (3, CALLS.custom_ops, 10)
    early = recomputed_trace(replace(keep, num_needed=2), (), 10).recompute_calls
    assert (early.kernels, early.dispatched, early.checkpointed, early.views) == (2, 5, 5, 2.5)
    assert early.custom_ops == CALLS.custom_ops / 2


def test_the_device_waits_for_a_slow_host() -> None:
    host = LaunchCosts(forward_s=1.0, backward_s=1.0, optimizer_s=3.0)
    model = build_launch_model(2, host, HostCalls(kernels=10), HostCalls(kernels=30), num_trained=1)
    slow = seconds_of(model)
    assert slow.step == pytest.approx(2 * (10 + 30) + 2 * 3, rel=0.05)
    assert slow.wait_host == pytest.approx(slow.step - 2 * 3, rel=0.05)
    busy = seconds_of(model, batch=100)
    assert busy.step == pytest.approx(2 * 300, rel=0.01)
    assert busy.wait_host == 0


def test_a_lead_from_long_kernels_hides_slow_launches_of_short_ones() -> None:
    """Forward alone would be limited by the host: launches take a second longer per block."""
    ahead = LaunchCosts(forward_s=1.0, backward_s=1.0)
    model = build_launch_model(4, ahead, HostCalls(kernels=2), HostCalls(kernels=0.5))
    assert seconds_of(model).step == pytest.approx(4 * 3, rel=0.02)


def test_the_launch_queue_has_a_limited_depth() -> None:
    """With many blocks, kernels queued ahead do not last for the whole forward pass."""
    waited = []
    for lead in (1.5, 4.5):
        kernels = LAUNCH_QUEUE_DEPTH / LAUNCHES_PER_EAGER_KERNEL / lead
        host = LaunchCosts(forward_s=2.0 / kernels, backward_s=0.5 / kernels)
        found = seconds_of(
            build_launch_model(40, host, HostCalls(kernels=kernels), HostCalls(kernels=kernels))
        )
        assert found.step == pytest.approx(40 * 3 + found.wait_host, rel=0.02)
        waited.append(found.wait_host)
    # Each further pass that the queue can hold saves two seconds of waiting.
    assert waited[0] - waited[1] == pytest.approx(3 * 2, rel=0.2)
    assert waited[1] > 20


def test_memsets_take_places_in_the_launch_queue_of_an_eager_pass() -> None:
    kernels = LAUNCH_QUEUE_DEPTH / 6.5
    host = LaunchCosts(forward_s=2.0 / kernels, backward_s=0.5 / kernels)
    model = build_launch_model(40, host, HostCalls(kernels=kernels), HostCalls(kernels=kernels))
    eager, compiled = (seconds_of(model, compiled=way).wait_host for way in (False, True))
    passes = 6.5 - 6.5 / LAUNCHES_PER_EAGER_KERNEL  # that the queue holds less
    assert eager - compiled == pytest.approx(2 * passes, abs=2)


def test_events_of_copies_take_places_in_the_launch_queue() -> None:
    entries = 20
    kernels = entries / LAUNCHES_PER_EAGER_KERNEL
    host = LaunchCosts(forward_s=2.0 / kernels, backward_s=0.5 / kernels)
    model = build_launch_model(200, host, HostCalls(kernels=kernels), HostCalls(kernels=kernels))
    model = CostModel(model._shapes, replace(model.rates, link_in=1e9))  # so that nothing waits
    resident, streamed = (seconds_of(model, streamed=count).wait_host for count in (0, 200))
    passes = LAUNCH_QUEUE_DEPTH / entries - LAUNCH_QUEUE_DEPTH / (entries + EVENTS_PER_COPY)
    assert streamed - resident == pytest.approx(2 * passes, rel=0.1)


def test_the_lower_bound_includes_launch_time() -> None:
    host = LaunchCosts(forward_s=4.0 / 200, backward_s=5.0 / 200)
    model = build_launch_model(40, host, HostCalls(kernels=200), HostCalls(kernels=200))
    least = lower_bound_seconds(model.at(1), build_candidate(model, compiled=False), model.rates)
    assert least == pytest.approx(40 * 9)
    assert least <= seconds_of(model).step


def test_a_step_cannot_use_the_lead_of_the_previous_step_forever() -> None:
    """In the first step the device waits for the link and the host gets ahead; later it cannot."""
    host = LaunchCosts(forward_s=3.0 / 100, backward_s=3.0 / 100)
    shapes = build_launch_model(12, host, HostCalls(kernels=100), HostCalls(kernels=100))._shapes
    (kind,) = shapes.kinds
    slow = replace(shapes, kinds=(replace(kind, frozen_nbytes=350),))  # 3.5 seconds on the link
    found = seconds_of(CostModel(slow, replace(SPEEDS, host=host)), streamed=12)
    assert found.step == pytest.approx(12 * (3 + 3), rel=0.001)
    assert (
        0.7 < found.wait_host / found.wait_weights < 1.6
    )  # the second step does not wait for weights


def test_a_host_that_is_always_ahead_costs_nothing() -> None:
    quick = build_launch_model(
        4, LaunchCosts(forward_s=0.01, backward_s=0.01), HostCalls(kernels=9), HostCalls(kernels=9)
    )
    free = build_launch_model(4, NO_LAUNCH_COSTS, HostCalls(kernels=9), HostCalls(kernels=9))
    assert seconds_of(quick) == seconds_of(free)


def test_recomputing_costs_more_launch_time() -> None:
    host = LaunchCosts(forward_s=1.0, backward_s=1.0, checkpoint_s=2.0, checkpoint_recompute_s=3.0)
    model = build_launch_model(2, host, HostCalls(dispatched=9, kernels=9), HostCalls(kernels=9))
    kept, again = (seconds_of(model, activations=way).step for way in ("keep", "recompute"))
    assert again - kept == pytest.approx(2 * (9 * 2 + 9 * 3 + 1), rel=0.05)  # one kernel is traced


def test_ring_and_offload_hooks_cost_launch_time() -> None:
    there, back = HOST.hook_seconds(4, streamed=True, packed=True, sent=False)
    assert there == pytest.approx(4 * PACK_COSTS[0] + 33)
    assert back == pytest.approx(4 * PACK_COSTS[1] + 30)
    there, back = HOST.hook_seconds(4, streamed=False, packed=True, sent=True)
    assert (there, back) == (
        pytest.approx(4 * OFFLOAD_COSTS[0] + 20),
        pytest.approx(4 * OFFLOAD_COSTS[1] + 9),
    )
    assert HOST.hook_seconds(4, streamed=False, packed=False, sent=False) == (0, 0)
    calls = HostCalls(kernels=9, saved_tensors=5)
    slow = replace(HOST, stream_s=1100.0, stream_backward_s=1000.0)
    model = build_launch_model(2, slow, calls, HostCalls(kernels=9))
    resident, streamed = seconds_of(model).step, seconds_of(model, streamed=2).step
    each = 5 * sum(PACK_COSTS) + 1100 + 1000
    assert streamed - resident == pytest.approx(2 * each, rel=0.1)


def test_rescaling_compute_rescales_launch_costs() -> None:
    model = build_launch_model(1, HOST, CALLS, CALLS)
    way, paced = (m.at(1).blocks[0].eager.keep for m in (model, model.rescaled(2.0, 1.0)))
    assert paced.forward_host_s == pytest.approx(2 * way.forward_host_s)
    assert paced.backward_host_s == pytest.approx(2 * way.backward_host_s)


def test_calls_of_a_real_block_are_counted(fused_shapes: ModelTraces) -> None:
    """A Wan block has ten linear layers; layers that share an input are one call."""
    (kind,) = fused_shapes.kinds
    keep, lean = kind.eager.keep, kind.eager.lean
    assert keep.forward_calls.custom_ops == 8
    assert keep.forward_calls.kernels == len(keep.forward)
    assert keep.forward_calls.dispatched < keep.forward_calls.kernels + keep.forward_calls.views
    assert kind.num_trained == 20
    assert lean.forward_calls.checkpointed == keep.forward_calls.dispatched
    assert 7 < lean.recompute_calls.custom_ops < 8  # checkpointing stops early
    assert lean.recompute_calls.kernels < kind.eager.recompute.recompute_calls.kernels
    assert kind.compiled.keep.forward_calls.custom_ops == 8
    assert kind.compiled.keep.forward_calls.views == 0


def measure_costs(family: str, clock: Callable[[], float], waited: list[int]) -> LaunchCosts:
    small = partial(build_probe_model, family)
    return measure_launch_costs(torch.device("cpu"), lambda: waited.append(1), clock, small)


def test_launch_costs_are_measured_with_tiny_models() -> None:
    """The clock advances by one at each reading, so every measured part takes one tick."""
    ticks = count()
    waited: list[int] = []
    host = measure_costs("wan22", lambda: float(next(ticks)), waited)
    assert 0 < host.forward_s < 1 / 100
    assert 0 < host.backward_s < host.forward_s  # also one tick, but for more calls
    assert (host.checkpoint_s, host.checkpoint_recompute_s) == (
        0,
        0,
    )  # not negative
    assert host.optimizer_s == pytest.approx(1 / (12 * 20))  # ten linear layers per block
    assert host.cast_s == host.cast_backward_s == pytest.approx(1 / (12 * 20))
    assert len(waited) == 6 * (WARM_UP + REPEATS)


def test_the_time_of_a_pass_is_divided_by_its_calls() -> None:
    """The clock gives each pass a fixed cost: plain, with custom operators, checkpointed,
    streamed, with inputs in host memory, and casts alone."""
    costs = [
        (1.0, 2.0, 0.0),
        (3.0, 5.0, 8.0),
        (10.0, 20.0, 0.0),
        (22.0, 44.0, 0.0),
        (46.0, 56.0, 0.0),
    ]
    reads = [seconds for parts in costs for seconds in (0.0, *parts)]
    ticks = accumulate(cycle([*reads, 0.0, 2.4, 4.8]))
    host = measure_costs("wan22", lambda: next(ticks), [])
    (bare, bare_back), (there, back) = (
        _ProbeStep(partial(build_probe_model, "wan22", has), torch.device("cpu")).count()
        for has in (False, True)
    )
    assert host.forward_s * equivalent_ops(bare) == pytest.approx(1.0)
    assert host.backward_s * equivalent_ops(bare_back) == pytest.approx(2.0)
    assert host.forward_s * equivalent_ops(
        there
    ) + host.custom_op_s * there.custom_ops == pytest.approx(3.0)
    backward = host.backward_s * equivalent_ops(back) + host.custom_op_backward_s * back.custom_ops
    assert backward == pytest.approx(5.0)
    assert host.optimizer_s * 240 == pytest.approx(8.0)
    assert host.cast_s * 240 == pytest.approx(2.4)
    assert host.cast_backward_s * 240 == pytest.approx(4.8)
    assert host.checkpoint_s * there.checkpointed == pytest.approx(10.0 - 3.0)
    recomputed = 3.0 * there.checkpointed / there.dispatched  # what is outside of blocks is not
    assert host.checkpoint_recompute_s * there.checkpointed == pytest.approx(
        20.0 - 5.0 - recomputed
    )
    blocks = 12
    assert host.stream_s * blocks == pytest.approx(22.0 - 10.0)
    assert host.stream_backward_s * blocks == pytest.approx(44.0 - 20.0)
    assert host.send_s * blocks == pytest.approx(46.0 - 22.0)
    assert host.send_backward_s * blocks == pytest.approx(56.0 - 44.0)


def test_casts_of_lora_weights_are_no_operators_of_the_model() -> None:
    """They are cheaper, and were once subtracted from the cost of custom operators."""
    make = partial(build_probe_model, "wan22")
    bare, fused = (_ProbeStep(partial(make, has), torch.device("cpu")) for has in (False, True))
    assert len(fused.trained) == 240
    (forward, backward), (plain, plain_backward) = fused.count(), bare.count()
    assert forward.views - plain.views < 240, "no allocation for each of them"
    assert backward.views - plain_backward.views < 240


def test_casts_of_trained_weights_cost_launch_time() -> None:
    calls, host = HostCalls(kernels=9), LaunchCosts(forward_s=1.0, backward_s=1.0)
    shapes = build_launch_model(4, host, calls, calls, num_trained=10)._shapes
    (kind,) = shapes.kinds
    shapes = replace(shapes, kinds=(replace(kind, cast_copies_nbytes=1),))
    casting = replace(host, cast_s=0.2, cast_backward_s=0.3)
    free, cast = (
        seconds_of(CostModel(shapes, replace(SPEEDS, host=one))).step for one in (host, casting)
    )
    assert cast - free == pytest.approx(40 * (0.2 + 0.3), rel=0.05)
    (kind,) = shapes.kinds
    plain = replace(shapes, kinds=(replace(kind, cast_copies_nbytes=0),))
    assert seconds_of(CostModel(plain, replace(SPEEDS, host=casting))).step == pytest.approx(free)


TRUE_COSTS = ((14e-3, 11e-3), (23e-3, 13e-3), (25e-3, 39e-3), (31e-3, 45e-3), (36e-3, 48e-3))
"""Seconds of forward and backward of the five variants that run the model."""


def noisy_rounds(random: Random, count: int) -> list[ProbeRound]:
    """Times as on a shared host: the CPU's speed drifts by some 8 % from round to round, every
    pass deviates by 1 %, and one pass in five is interrupted, for 15 ms on average. Without pairs,
    `send_s` of a model with 12 blocks then varies as in three real runs: from 217 to 726 us."""
    speed, rounds = 0.0, []
    for _ in range(count):
        speed = 0.7 * speed + random.gauss(0.0, 0.06)
        now = accumulate(
            true * (1 + speed) * random.gauss(1.0, 0.01)
            + (random.random() < 0.2) * random.expovariate(1 / 15e-3)
            for variant in TRUE_COSTS
            for true in variant
        )
        ends = [0.0, *now]
        parts = [after - before for before, after in pairwise(ends)]
        steps = [HostSeconds(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        rounds.append(ProbeRound(*steps, HostSeconds(1e-3, 1e-3)))
    return rounds


def differences_of_trimmed_means(rounds: list[ProbeRound]) -> tuple[float, float]:
    """Seconds of streaming and of sending in forward, without pairing the variants of a round."""
    checkpointed, streamed, sent = (
        fmean(sorted(one[variant].forward for one in rounds)[:5])  # of six
        for variant in (2, 3, 4)
    )
    return streamed - checkpointed, sent - streamed


def test_noise_of_the_host_hardly_spreads_the_measured_costs() -> None:
    calls = HostCalls(dispatched=1000, kernels=1000, custom_ops=100, checkpointed=1000)
    counts = ProbeCalls((calls, calls), (calls, calls), num_blocks=1, num_trained=1)
    random = Random(0)
    paired, unpaired = [], []
    for _ in range(300):
        rounds = noisy_rounds(random, REPEATS)
        found = costs_per_call(rounds, counts)
        paired.append((found.stream_s, found.send_s))
        unpaired.append(differences_of_trimmed_means(rounds[:6]))
    for name, true in (("stream_s", 6e-3), ("send_s", 5e-3)):
        place = ("stream_s", "send_s").index(name)
        now, before = ([one[place] for one in found] for found in (paired, unpaired))
        assert stdev(now) < 0.5 * stdev(before), name
        assert fmean(now) == pytest.approx(true, rel=0.05), name


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "flux" else pytest.mark.slow) for f in PLANNABLE],
)
def test_measured_launch_costs_are_plausible(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_overhead, "REPEATS", 2)
    host = measure_costs(family, time.process_time, [])
    assert 1e-7 < host.forward_s < 1e-3
    assert 0 < host.checkpoint_s < 1e-3
    assert 0 < host.checkpoint_recompute_s < 1e-3
    assert 0 < host.optimizer_s < 1e-2


def test_a_probe_leaves_the_global_rng_unchanged() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    measure_costs("tiny", time.process_time, [])
    assert torch.equal(torch.rand(3), expected)


def test_an_unknown_family_is_probed_with_the_proxy_model() -> None:
    unknown, proxy = (build_probe_model(name, True) for name in ("unheard_of", PROXY_FAMILY))
    assert unknown.model.config == proxy.model.config
    assert unknown.encoded == proxy.encoded


def test_calls_are_counted_as_on_cuda() -> None:
    """CUDA has one kernel for what takes eight on a CPU; calls are counted on the meta device."""
    make = partial(build_probe_model, "wan22", True)
    (here, _), (there, back) = (
        _ProbeStep(make, torch.device(name)).count() for name in ("cpu", "meta")
    )
    assert there.kernels < here.kernels
    assert here.custom_ops == there.custom_ops == 12 * 8  # layers that share an input are one call
    assert back.custom_ops > there.custom_ops
    assert 0 < there.checkpointed < there.dispatched


def test_the_report_mentions_a_slow_host() -> None:
    from gracetune.plan.memory import FixedMemory
    from gracetune.plan.report import reasons
    from gracetune.plan.search import Constraints, PlanBudget, find_best_plan

    host = LaunchCosts(forward_s=1.0, backward_s=1.0)
    model = build_launch_model(2, host, HostCalls(kernels=10), HostCalls(kernels=30))
    budget = PlanBudget(10**6, 10**6)
    wishes = Constraints(samples=1, compile=(False,))
    planned = find_best_plan(model, FixedMemory(0), budget, wishes, simulated=True)
    assert any("CPU launches kernels more slowly" in reason for reason in reasons(planned, budget))
    quick = find_best_plan(
        build_launch_model(2, NO_LAUNCH_COSTS, HostCalls(), HostCalls()),
        FixedMemory(0),
        budget,
        wishes,
        simulated=True,
    )
    assert not any("host queues" in reason for reason in reasons(quick, budget))


@pytest.mark.parametrize(
    "family",
    ["wan22", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "qwen_image"))],
)
def test_realistic_and_tiny_probe_models_make_the_same_calls(family: str) -> None:
    """The host is timed with one model, and calls are counted with the other."""
    small, realistic = (
        trace_model(build_probe_model(family, True, is_realistic).trace_target(), 1)
        for is_realistic in (False, True)
    )
    for one, other in zip(small.kinds, realistic.kinds, strict=True):
        assert one.eager.keep.forward_calls == other.eager.keep.forward_calls
        assert one.eager.keep.backward_calls == other.eager.keep.backward_calls
    assert small.outside.forward_calls == realistic.outside.forward_calls
    assert realistic.kinds[0].input_nbytes > MIB > 100 * small.kinds[0].input_nbytes


def test_the_realistic_probe_of_z_image_has_a_position_for_every_token():
    """A GPU reports a position outside of the table as a device-side assert."""
    (text_positions, rows, columns) = planner_shapes("z_image").probe_config["axes_lens"]
    assert text_positions > REALISTIC_TOKENS + 33  # padding, and the image after the text
    assert min(rows, columns) >= REALISTIC_EDGE // 16
