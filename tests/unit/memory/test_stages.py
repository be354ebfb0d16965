"""Stages change at two different marks, reclaim in measure, and keep to their cap."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.errors import ConfigError
from gracetune.memory.stages import (
    Action,
    Reading,
    Stage,
    StagePolicy,
    Stages,
    StageState,
    advance,
    managed_cap,
)
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.units import GIB

TOTAL = 100 * GIB
POLICY = StagePolicy()


def reading(free_gib: float, cached_gib: float = 0.0) -> Reading:
    free = int(free_gib * GIB)
    reserved = TOTAL - free
    return Reading(reserved, reserved - int(cached_gib * GIB), free, TOTAL, 400 * GIB)


def run(frees: list[float], policy: StagePolicy = POLICY) -> tuple[list[int], list[str]]:
    state, stages, actions = StageState(), [], []
    for free in frees:
        state, action = advance(policy, state, reading(free))
        stages.append(int(state.stage))
        actions.append(str(action))
    return stages, actions


def test_two_marks_not_one() -> None:
    stages, _ = run([50, 10, 9.9, 10.5, 14.9, 15, 15.1, 12, 9])
    assert stages == [1, 1, 2, 2, 2, 2, 1, 1, 2]


def test_a_threshold_in_bytes_counts_where_it_is_larger() -> None:
    policy = StagePolicy(min_free_bytes=20 * GIB)
    assert run([21, 19, 22, 25, 26], policy)[0] == [1, 2, 2, 2, 1]
    assert run([9.5], StagePolicy(min_free_bytes=GIB))[0] == [2]


def test_light_comes_first_and_not_again_at_once() -> None:
    policy = StagePolicy(interval=3)
    assert run([5, 5, 5, 5, 5], policy)[1] == ["light", "none", "none", "light", "none"]


def test_hard_only_where_the_cache_would_lift_us_out() -> None:
    policy = StagePolicy(interval=10)
    state, first = advance(policy, StageState(), reading(5, cached_gib=6))
    state, second = advance(policy, state, reading(5, cached_gib=4))
    state, third = advance(policy, state, reading(5, cached_gib=6))
    state, fourth = advance(policy, state, reading(5, cached_gib=6))
    assert [first, second, third, fourth] == [Action.LIGHT, Action.NONE, Action.HARD, Action.NONE]
    assert (state.light_reclamations, state.hard_reclamations) == (1, 1)


def test_nothing_is_reclaimed_inside_the_band() -> None:
    assert run([9, 12, 14, 11])[1] == ["light", "none", "none", "none"]


def test_right_after_an_empty_cache_that_nobody_announced() -> None:
    state, _ = advance(POLICY, StageState(), reading(5, cached_gib=60))
    assert state.stage is Stage.OVERSUBSCRIBED
    state, action = advance(POLICY, state, reading(65))
    assert (state.stage, action) == (Stage.RESIDENT, Action.NONE)
    assert state.transitions == 2


def test_the_machine_of_a_run_acts_counts_and_tells() -> None:
    freed, notices = Counter(), []

    def light() -> int:
        freed["light"] += 1
        return 3 * GIB

    def hard() -> int:
        freed["hard"] += 1
        return 7 * GIB

    stages = Stages(POLICY, light, hard, notices.append)
    assert stages.update_and_reclaim(reading(50)) is Stage.RESIDENT
    assert stages.update_and_reclaim(reading(5, 20)) is Stage.OVERSUBSCRIBED
    stages.update_and_reclaim(reading(5, 20))
    assert stages.update_and_reclaim(reading(40)) is Stage.RESIDENT
    assert freed == {"light": 1, "hard": 1}
    assert stages.reclaimed_bytes == 10 * GIB
    assert [notice.text for notice in notices] == [
        "memory stage 2 (oversubscribed): 5.0 GiB of 100.0 GiB device memory free",
        "memory stage 1 (resident): 40.0 GiB of 100.0 GiB device memory free",
    ]


def test_looking_enters_stages_but_reclaims_nothing() -> None:
    def never() -> int:
        raise AssertionError("a look reclaimed")

    stages = Stages(POLICY, never, never, lambda notice: None)
    assert stages.update(reading(5, 20)) is Stage.OVERSUBSCRIBED
    assert stages.update(reading(12)) is Stage.OVERSUBSCRIBED
    assert stages.update(reading(50)) is Stage.RESIDENT
    assert stages.state == StageState(transitions=2)


def test_the_cap_is_the_ratio_or_what_the_host_can_take() -> None:
    policy = StagePolicy(oversubscription_ratio=3.0, host_reserve_bytes=10 * GIB)
    assert managed_cap(policy, 100 * GIB, 1000 * GIB) == 300 * GIB
    assert managed_cap(policy, 100 * GIB, 200 * GIB) == 190 * GIB
    assert managed_cap(policy, 100 * GIB, 5 * GIB) == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"threshold": 0}, "uvm_stage1_threshold is 0"),
        ({"threshold": 1.0}, "uvm_stage1_threshold is 1.0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"threshold": 0.97}, "hysteresis is 0.05"),
        ({"oversubscription_ratio": 1.0}, "uvm_oversubscription_ratio is 1.0"),
        ({"min_free_bytes": -1}, "uvm_stage1_min_bytes is -1"),
        ({"interval": 0}, "the interval 0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(bad: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StagePolicy(**bad)


TRACE = 10_000
policies = st.builds(
    StagePolicy,
    threshold=st.floats(0.01, 0.5),
    hysteresis=st.floats(0.01, 0.4),
    min_free_bytes=st.integers(0, 30 * GIB),
    interval=st.integers(1, 300),
)
seeds = st.integers(0, 2**32)
few = settings(max_examples=15, deadline=None, database=None)


@few
@given(policies, seeds)
def test_a_long_random_trace_never_oscillates_in_the_band(policy: StagePolicy, seed: int) -> None:
    random = Random(seed)
    low, high = policy.stage2_below(TOTAL), policy.stage1_above(TOTAL)
    state = StageState()
    lights = hards = changes = 0
    last = {Action.LIGHT: -policy.interval, Action.HARD: -policy.interval}
    for moment in range(TRACE):
        # Half the time close to the marks: that is where a machine without hysteresis flutters.
        free = random.randint(0, TOTAL) if random.random() < 0.5 else random.randint(
            max(0, low - GIB), min(TOTAL, high + GIB)
        )  # fmt: skip
        reserved = TOTAL - free
        seen = Reading(reserved, random.randint(0, reserved), free, TOTAL, 400 * GIB)
        before = state
        state, action = advance(policy, state, seen)
        if low <= free <= high:
            assert state.stage is before.stage
        assert state.stage is not Stage.RESIDENT or free >= low
        assert state.stage is not Stage.OVERSUBSCRIBED or free <= high
        if action is not Action.NONE:
            assert free < low
            assert moment - last[action] >= policy.interval
            last[action] = moment
        lights += action is Action.LIGHT
        hards += action is Action.HARD
        changes += state.stage is not before.stage
    assert state.light_reclamations == lights
    assert state.hard_reclamations == hards
    assert state.transitions == changes


@few
@given(st.integers(1, 50 * GIB), seeds)
def test_a_long_random_trace_of_allocations_keeps_to_the_cap(cap: int, seed: int) -> None:
    random = Random(seed)
    ledger = MemoryAccounting({Tier.MANAGED: cap})
    out: list[tuple[Tier, str, int]] = []
    denied = 0
    for _ in range(TRACE):
        if out and random.random() < 0.45:
            ledger.release(*out.pop(random.randrange(len(out))))
        else:
            entry = (
                random.choice(list(Tier)),
                random.choice(("latents", "text", "weights")),
                random.randint(0, 2 * GIB),
            )
            if ledger.reserve(*entry):
                out.append(entry)
            else:
                denied += 1
                assert entry[0] is Tier.MANAGED
                assert ledger.current(Tier.MANAGED) + entry[2] > cap
        assert ledger.current(Tier.MANAGED) <= ledger.peak(Tier.MANAGED) <= cap
    assert ledger.denied(Tier.MANAGED) == denied
    for tier in Tier:
        assert ledger.current(tier) == sum(entry[2] for entry in out if entry[0] is tier)
    for entry in out:
        ledger.release(*entry)
    assert [ledger.current(tier) for tier in Tier] == [0, 0, 0]
    assert ledger.by_role() == {}


def test_giving_back_more_than_was_taken_is_our_error() -> None:
    ledger = MemoryAccounting()
    ledger.reserve(Tier.HOST, "latents", 10)
    with pytest.raises(AssertionError, match="gives back 11 of 10"):
        ledger.release(Tier.HOST, "latents", 11)
    with pytest.raises(AssertionError, match="takes -1"):
        ledger.reserve(Tier.HOST, "latents", -1)
