"""The search stays within the budget, and explains why nothing fits."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from cost_model_factory import SPEEDS, build_model
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.plan.memory import FixedMemory
from gracetune.plan.result import Bytes, Plan
from gracetune.plan.search import (
    Constraints,
    PlanBudget,
    PlanError,
    SearchResult,
    candidates,
    evenly_spaced,
    find_best_plan,
    keep_run_file_batch,
    smallest_candidate,
)
from gracetune.units import parse_bytes

FIXED = FixedMemory(optimizer_nbytes=16, batches_ahead=0)
PLENTY = 10**6
MODEL = build_model(8)


def planned(device: int, host: int = PLENTY, **constraints: object):
    return find_best_plan(
        MODEL, FIXED, PlanBudget(device, host), Constraints(**constraints), simulated=True
    )


def test_with_plenty_of_memory_nothing_is_moved_or_recomputed() -> None:
    best = planned(PLENTY).best
    assert {(b.weights, b.activations) for b in best.blocks} == {("resident", "keep")}
    assert (best.slots, best.compiled, best.simulated) == (0, True, True)


@settings(max_examples=15, deadline=None)
@given(st.integers(300, 3000), st.integers(0, 2000), st.sampled_from([1, 2, 4]))
def test_a_plan_never_exceeds_its_budget(device: int, host: int, samples: int) -> None:
    budget = PlanBudget(device, host, fragmentation=0.05)
    constraints = Constraints(samples=samples)
    if next(candidates(MODEL, FIXED, budget, constraints), None) is None:
        with pytest.raises(PlanError, match="too little"):
            find_best_plan(MODEL, FIXED, budget, constraints, simulated=True)
        return
    found = find_best_plan(MODEL, FIXED, budget, constraints, simulated=True)
    for plan in (found.best, *found.others):
        assert plan.device.total * 1.05 <= device
        assert plan.host.total <= host
        assert plan.batch * plan.accumulation == samples


@settings(max_examples=12, deadline=None)
@given(
    device=st.integers(300, 1500),
    host=st.integers(500, 5000),
    samples=st.sampled_from([1, 2]),
    link=st.sampled_from([20.0, 100.0, 1000.0]),
    compile=st.sampled_from([(True, False), (True,), (False,)]),
    host_state=st.sampled_from([(0.0,), (0.0, 0.5, 1.0)]),
)
def test_the_best_plan_is_found_without_its_alternatives(
    device: int, host: int, link: float, **choices: object
) -> None:
    model = build_model(4, speeds=replace(SPEEDS, link_in=link, link_out=link))
    inputs = model, FIXED, PlanBudget(device, host), Constraints(**choices)
    if next(candidates(*inputs), None) is None:
        return
    whole = find_best_plan(*inputs, simulated=True)
    quick = find_best_plan(*inputs, simulated=True, only_best=True)
    assert quick.best == whole.best
    assert quick.num_tried <= whole.num_tried


def test_the_search_for_the_best_plan_alone_ends_at_once_if_nothing_is_faster() -> None:
    inputs = MODEL, FIXED, PlanBudget(PLENTY, PLENTY), Constraints(samples=4)
    whole = find_best_plan(*inputs, simulated=True)
    quick = find_best_plan(*inputs, simulated=True, only_best=True)
    assert quick.best == whole.best
    assert quick.num_tried < whole.num_tried / 2


def test_more_memory_is_never_slower() -> None:
    speeds = [
        planned(device, samples=2).best.samples_per_second for device in range(450, 2000, 200)
    ]
    assert all(b >= a * 0.994 for a, b in pairwise(speeds)), speeds
    assert speeds[-1] > speeds[0]


def test_the_error_names_the_smallest_device_budget() -> None:
    with pytest.raises(
        PlanError, match=r"100 B of device memory is too little.*at least (\d+) B"
    ) as e:
        planned(100)
    least = int(str(e.value).partition("at least ")[2].split()[0])
    assert planned(least + 1).best.device.total <= least + 1
    with pytest.raises(PlanError):
        planned(least - 1)


def test_the_error_names_the_smallest_host_budget() -> None:
    with pytest.raises(PlanError, match=r"^10 B of host memory is too little") as caught:
        planned(650, host=10)
    least = parse_bytes(smallest_budget_in(caught.value))
    assert planned(650, host=least).best.host.total <= least


def test_shared_weights_count_once_and_the_rest_for_each_rank() -> None:
    host = Bytes(weights=100, optimizer=20, activations=7, caches=3)
    assert PlanBudget(1, 1).machine_host_nbytes(host) == 130
    assert PlanBudget(1, 1, ranks=4).machine_host_nbytes(host) == 100 + 4 * 30
    assert PlanBudget(1, 1, ranks=4, shares_weights=False).machine_host_nbytes(host) == 4 * 130


@pytest.mark.parametrize("shares_weights", [True, False])
def test_a_plan_leaves_host_memory_for_every_rank(shares_weights: bool) -> None:
    def plan(host: int, ranks: int):
        budget = PlanBudget(650, host, ranks=ranks, shares_weights=shares_weights)
        return find_best_plan(MODEL, FIXED, budget, Constraints(), simulated=True).best

    with pytest.raises(PlanError, match=r"on each of 3 ranks: .* run fewer ranks") as caught:
        plan(10, ranks=3)
    least = parse_bytes(smallest_budget_in(caught.value))
    found = plan(least, ranks=3)
    assert found.streamed
    budget = PlanBudget(650, least, ranks=3, shares_weights=shares_weights)
    assert budget.machine_host_nbytes(found.host) <= least
    assert plan(10**6, ranks=3).host == plan(10**6, ranks=1).host


def smallest_budget_in(error: PlanError) -> str:
    return re.search(r"at least ([0-9.]+ \w+)[ .]", str(error))[1]


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 10**7), st.sampled_from([0.0, 0.03]), st.sampled_from([0, 2, 64]))
def test_the_named_budget_works_as_printed(nbytes: int, fragmentation: float, part: int) -> None:
    """Both for the device, where cached text takes a part of any budget, and for the host."""
    model = build_model(4, frozen_nbytes=nbytes)
    fixed = FixedMemory(optimizer_nbytes=16, text_nbytes=10**9, text_part=part)
    constraints = Constraints(samples=2, compile=(True,), slots=(2,))

    def plan(device: int, host: int):
        budget = PlanBudget(device, host, fragmentation)
        return find_best_plan(model, fixed.for_budget(device), budget, constraints, simulated=True)

    with pytest.raises(PlanError, match="of device memory is too little") as caught:
        plan(0, 10**12)
    device = parse_bytes(smallest_budget_in(caught.value))
    assert plan(device, 10**12).best.device.total <= device
    with pytest.raises(PlanError, match="of host memory is too little") as caught:
        plan(device, 0)
    host = parse_bytes(smallest_budget_in(caught.value))
    assert plan(device, host).best.host.total <= host


def test_the_smallest_candidate_is_the_minimum_of_all() -> None:
    """Streaming one block takes two slots, and accumulation keeps gradients: both need more."""
    one = build_model(1, frozen_nbytes=1000)
    budget = PlanBudget(0, PLENTY)
    assert not smallest_candidate(one, FIXED, budget, Constraints()).streamed
    with pytest.raises(PlanError, match=r"no weights streamed") as caught:
        find_best_plan(one, FIXED, budget, Constraints(), simulated=True)
    least = parse_bytes(smallest_budget_in(caught.value))
    assert (
        find_best_plan(
            one, FIXED, PlanBudget(least, 0), Constraints(), simulated=True
        ).best.host.total
        == 0
    )
    constraints = Constraints(samples=2, host_state=(0.0, 1.0))
    slots = replace(FIXED, state_slots_nbytes=100)
    assert smallest_candidate(MODEL, slots, budget, constraints).host_state == 0.0
    assert smallest_candidate(MODEL, FIXED, budget, constraints).host_state == 1.0


def test_a_batch_that_does_not_divide_the_step_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"3 samples cannot be split into micro-batches of 2\."):
        planned(PLENTY, samples=3, batches=(2,))


def test_with_one_memory_candidates_move_nothing() -> None:
    """Host caches count towards the same budget."""
    caches = replace(FIXED, host_caches_nbytes=300)
    constraints = Constraints(samples=2, host_state=(0.0, 1.0))
    apart, one = PlanBudget(700, PLENTY), PlanBudget(1500, PLENTY, one_memory=True)
    moved = find_best_plan(MODEL, caches, apart, constraints, simulated=True).best
    assert moved.host.total > 300
    found = find_best_plan(MODEL, caches, one, constraints, simulated=True)
    for plan in (found.best, *found.others):
        assert not plan.streamed
        assert plan.host_state == 0.0
        assert plan.host.total == plan.host.caches == 300
        assert plan.device.total + plan.host.total <= 1500
    with pytest.raises(PlanError, match=r"shared by host and device\) is too little") as caught:
        find_best_plan(MODEL, caches, replace(one, device_nbytes=700), constraints, simulated=True)
    least = parse_bytes(smallest_budget_in(caught.value))
    enough = replace(one, device_nbytes=least)
    assert (
        find_best_plan(MODEL, caches, enough, constraints, simulated=True).best.device.total
        <= least - 300
    )


def test_the_run_files_batch_is_kept() -> None:
    def keep(device: int, batch: int):
        budget, constraints = (
            PlanBudget(device, PLENTY),
            Constraints(samples=4, run_file_batch=batch),
        )
        found = find_best_plan(MODEL, FIXED, budget, constraints, simulated=True)
        return found, keep_run_file_batch(found, MODEL, FIXED, budget, constraints)

    found, same = keep(1200, planned(1200, samples=4).best.batch)
    assert same == found
    assert found.best.batch != 4
    _, kept = keep(1200, 4)
    own = planned(1200, samples=4, batches=(4,))
    assert (kept.best, kept.others) == (own.best, own.others)
    assert kept.faster == found.best
    few, unfit = keep(460, 4)
    assert (unfit.best, unfit.unfit_batch) == (few.best, 4)
    assert "too little" in unfit.why_unfit


def test_a_batch_size_that_is_as_fast_is_not_suggested() -> None:
    budget = PlanBudget(1200, PLENTY)
    own = planned(1200, samples=4, batches=(4,)).best

    def faster(gain: float) -> Plan | None:
        seconds = replace(own.seconds, step=own.seconds.step / 2 / (1 + gain))
        found = SearchResult(replace(own, batch=2, seconds=seconds), (), 1)
        constraints = Constraints(4, run_file_batch=4)
        return keep_run_file_batch(found, MODEL, FIXED, budget, constraints).faster

    assert faster(gain=0.004) is None
    assert faster(gain=0.006) is not None


def test_constraints_are_respected() -> None:
    best = planned(1500, stream=False, offload=False, compile=(False,)).best
    assert not best.streamed
    assert not best.compiled
    assert {b.activations for b in best.blocks} <= {"keep", "lean", "recompute"}


def test_a_fixed_batch_is_not_changed() -> None:
    found = planned(PLENTY, samples=4, batches=(2,))
    assert {plan.batch for plan in (found.best, *found.others)} == {2}
    assert found.best.accumulation == 2


def test_alternatives_are_of_other_kinds_and_not_faster() -> None:
    found = planned(900, samples=2)
    assert found.others
    assert len({(p.batch, p.compiled, p.blocks, p.slots) for p in found.others}) == len(
        found.others
    )
    top = found.best.samples_per_second
    assert all(other.samples_per_second <= top * 1.006 for other in found.others)


def test_only_necessary_blocks_are_streamed() -> None:
    best = planned(1400, offload=False, batches=(1,)).best
    assert 0 < len(best.streamed) < 8


def test_streamed_blocks_are_spread_evenly() -> None:
    assert evenly_spaced(4, 8) == (0, 2, 4, 6)
    assert evenly_spaced(3, 10) == (0, 3, 6)
    assert evenly_spaced(8, 8) == tuple(range(8))
    assert SPEEDS.link_in == 100.0
