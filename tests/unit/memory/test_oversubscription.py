"""Memory stages, accounting and `gc.freeze`."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.errors import ConfigError
from gracetune.events.types import MemoryReclaimed, StageChanged
from gracetune.memory.oversubscription import (
    ALLOCATOR_CACHE,
    Action,
    GcFreeze,
    Reading,
    Stage,
    StagePolicy,
    Stages,
    StageState,
    Trimmers,
    advance,
    bounded_cap,
    managed_cap,
)
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.events.types import Event


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


def test_stages_change_at_two_thresholds() -> None:
    stages, _ = run([50, 10, 9.9, 10.5, 14.9, 15, 15.1, 12, 9])
    assert stages == [1, 1, 2, 2, 2, 2, 1, 1, 2]


def test_the_larger_threshold_counts() -> None:
    policy = StagePolicy(min_free_bytes=20 * GIB)
    assert run([21, 19, 22, 25, 26], policy)[0] == [1, 2, 2, 2, 1]
    assert run([9.5], StagePolicy(min_free_bytes=GIB))[0] == [2]


def test_light_reclamations_keep_the_interval() -> None:
    policy = StagePolicy(interval=3)
    assert run([5, 5, 5, 5, 5], policy)[1] == ["light", "none", "none", "light", "none"]


def test_hard_reclamation_only_if_the_cache_suffices() -> None:
    policy = StagePolicy(interval=10)
    state, first = advance(policy, StageState(), reading(5, cached_gib=6))
    state, second = advance(policy, state, reading(5, cached_gib=4))
    state, third = advance(policy, state, reading(5, cached_gib=6))
    state, fourth = advance(policy, state, reading(5, cached_gib=6))
    assert [first, second, third, fourth] == [Action.LIGHT, Action.NONE, Action.HARD, Action.NONE]
    assert (state.light_reclamations, state.hard_reclamations) == (1, 1)


def test_nothing_is_reclaimed_between_the_thresholds() -> None:
    assert run([9, 12, 14, 11])[1] == ["light", "none", "none", "none"]


def test_an_unannounced_empty_cache_is_noticed() -> None:
    state, _ = advance(POLICY, StageState(), reading(5, cached_gib=60))
    assert state.stage is Stage.OVERSUBSCRIBED
    state, action = advance(POLICY, state, reading(65))
    assert (state.stage, action) == (Stage.RESIDENT, Action.NONE)
    assert state.transitions == 2


class Cache:
    """A component with some memory that a reclamation may free."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.trims = self.restores = 0

    def trim(self) -> int:
        self.trims += 1
        return self.nbytes

    def restore(self) -> None:
        self.restores += 1


def stages_with(
    events: list[Event], empty_cache: Callable[[], int] = lambda: 7 * GIB
) -> tuple[Stages, Cache, Cache]:
    trimmers, texts, latents = Trimmers(), Cache(3 * GIB), Cache(GIB)
    trimmers.register("texts", texts)
    trimmers.register("latents", latents, on_host=True)
    return Stages(POLICY, trimmers, empty_cache, events.append), texts, latents


def test_stages_reclaim_count_and_report() -> None:
    events: list[Event] = []
    stages, texts, latents = stages_with(events)
    assert stages.update_and_reclaim(reading(50), 1) is Stage.RESIDENT
    assert stages.update_and_reclaim(reading(5, 20), 2) is Stage.OVERSUBSCRIBED
    stages.update_and_reclaim(reading(5, 20), 3)
    assert stages.update_and_reclaim(reading(40), 4) is Stage.RESIDENT
    assert (texts.trims, latents.trims) == (1, 0)
    assert stages.reclaimed_bytes == 10 * GIB
    changed, light, full, back, restored = events
    assert changed == StageChanged(2, 2, 5 * GIB, TOTAL, 10 * GIB)
    assert (light.step, light.kind, light.freed, light.nbytes) == (
        *(2, "light", {"texts": 3 * GIB}, 3 * GIB),
    )
    assert light.reason == "5.0 GiB of device memory are free, below 10.0 GiB"
    assert (full.step, full.kind, full.freed) == (3, "full", {ALLOCATOR_CACHE: 7 * GIB})
    assert back == StageChanged(4, 1, 40 * GIB, TOTAL, 15 * GIB)
    assert (restored.step, restored.kind, restored.freed) == (4, "restored", {"texts": 3 * GIB})
    assert texts.restores == 1


def test_memory_comes_back_only_if_there_is_space_for_it() -> None:
    events: list[Event] = []
    stages, texts, _ = stages_with(events)
    for free, restores in ((5, 0), (14, 0), (16, 0), (17.9, 0), (18.1, 1), (19, 1)):
        stages.update_and_reclaim(reading(free))
        assert texts.restores == restores, free
    assert [event.kind for event in events if isinstance(event, MemoryReclaimed)] == [
        *("light", "restored"),
    ]


def test_host_memory_is_trimmed_if_it_could_not_take_the_managed_pages() -> None:
    events: list[Event] = []
    stages, texts, latents = stages_with(events)
    full = replace(reading(5), managed=200 * GIB, host_available=200 * GIB)
    stages.update_and_reclaim(full)
    assert (texts.trims, latents.trims) == (1, 1)
    (light,) = (event for event in events if isinstance(event, MemoryReclaimed))
    assert light.freed == {"texts": 3 * GIB, "latents": GIB}
    assert "host memory could not take all managed pages" in light.reason


def test_managed_memory_may_grow_by_what_the_host_can_take() -> None:
    now = replace(reading(50), managed=30 * GIB, host_available=24 * GIB)
    assert bounded_cap(POLICY, 500 * GIB, now) == 50 * GIB, "4 GiB stay free"
    assert bounded_cap(POLICY, 40 * GIB, now) == 40 * GIB
    assert bounded_cap(POLICY, 500 * GIB, replace(now, host_available=GIB)) == 30 * GIB


def test_update_changes_the_stage_without_reclaiming() -> None:
    def never() -> int:
        raise AssertionError("update reclaimed memory")

    events: list[Event] = []
    stages, texts, _ = stages_with(events, never)
    assert stages.update(reading(5, 20)) is Stage.OVERSUBSCRIBED
    assert stages.update(reading(12)) is Stage.OVERSUBSCRIBED
    assert stages.update(reading(50)) is Stage.RESIDENT
    assert stages.state == StageState(transitions=2)
    assert texts.trims == 0


def test_the_cap_is_the_ratio_or_the_host_memory() -> None:
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
        ({"interval": 0}, "interval is 0"),
    ],
)
def test_an_invalid_policy_is_refused(bad: dict[str, float], says: str) -> None:
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
def test_random_readings_never_oscillate_between_the_thresholds(
    policy: StagePolicy, seed: int
) -> None:
    random = Random(seed)
    low, high = policy.stage2_below(TOTAL), policy.stage1_above(TOTAL)
    state = StageState()
    lights = hards = changes = 0
    last = {Action.LIGHT: -policy.interval, Action.HARD: -policy.interval}
    for moment in range(TRACE):
        # Half of the readings are close to the thresholds, where oscillation would show.
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
def test_random_reservations_keep_to_the_cap(cap: int, seed: int) -> None:
    random = Random(seed)
    accounting = MemoryAccounting({Tier.MANAGED: cap})
    out: list[tuple[Tier, str, int]] = []
    denied = 0
    for _ in range(TRACE):
        if out and random.random() < 0.45:
            accounting.release(*out.pop(random.randrange(len(out))))
        else:
            entry = (
                random.choice(list(Tier)),
                random.choice(("latents", "text", "weights")),
                random.randint(0, 2 * GIB),
            )
            if accounting.reserve(*entry):
                out.append(entry)
            else:
                denied += 1
                assert entry[0] is Tier.MANAGED
                assert accounting.current(Tier.MANAGED) + entry[2] > cap
        assert accounting.current(Tier.MANAGED) <= accounting.peak(Tier.MANAGED) <= cap
    assert accounting.denied(Tier.MANAGED) == denied
    for tier in Tier:
        assert accounting.current(tier) == sum(entry[2] for entry in out if entry[0] is tier)
    for entry in out:
        accounting.release(*entry)
    assert [accounting.current(tier) for tier in Tier] == [0, 0, 0]
    assert accounting.by_role() == {}


def test_releasing_more_than_reserved_is_a_bug() -> None:
    accounting = MemoryAccounting()
    accounting.reserve(Tier.HOST, "latents", 10)
    with pytest.raises(AssertionError, match="releases 11 of 10"):
        accounting.release(Tier.HOST, "latents", 11)
    with pytest.raises(AssertionError, match="reserves -1"):
        accounting.reserve(Tier.HOST, "latents", -1)


class ReferenceCycle:
    """Refers to itself, so only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def gc_freeze() -> Iterator[GcFreeze]:
    """Disable automatic collections."""
    gc.disable()
    yield GcFreeze()
    gc.unfreeze()
    gc.enable()


def test_a_collection_skips_frozen_objects(gc_freeze: GcFreeze) -> None:
    alive = weakref.ref(cycle := ReferenceCycle())
    gc_freeze.freeze()
    del cycle
    gc.collect()
    assert alive() is not None
    gc_freeze.unfreeze()
    gc.collect()
    assert alive() is None


def test_objects_that_python_itself_freezes_do_not_count(
    gc_freeze: GcFreeze, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gc.get_freeze_count", lambda: 375)
    alive = weakref.ref(cycle := ReferenceCycle())
    gc_freeze.freeze()
    del cycle
    gc.collect()
    assert alive() is not None


def test_collect_includes_frozen_objects(gc_freeze: GcFreeze) -> None:
    alive = weakref.ref(cycle := ReferenceCycle())
    gc_freeze.freeze()
    del cycle
    gc_freeze.collect()
    assert alive() is None
    assert gc.get_freeze_count() > GcFreeze.FROZEN_BY_PYTHON, "everything else stays frozen"


def test_collect_does_not_freeze(gc_freeze: GcFreeze) -> None:
    gc_freeze.collect()
    assert gc.get_freeze_count() <= GcFreeze.FROZEN_BY_PYTHON


def test_freeze_collects_garbage_first(gc_freeze: GcFreeze) -> None:
    alive: weakref.ref[Any] = weakref.ref(ReferenceCycle())
    gc_freeze.freeze()
    assert alive() is None


def test_objects_frozen_by_others_stay_frozen(gc_freeze: GcFreeze) -> None:
    alive = weakref.ref(cycle := ReferenceCycle())
    gc.freeze()
    del cycle
    young = weakref.ref(ReferenceCycle())
    for touch in (gc_freeze.freeze, gc_freeze.collect, gc_freeze.unfreeze):
        touch()
        assert alive() is not None
        assert young() is None or touch == gc_freeze.freeze
    gc.unfreeze()
    gc.collect()
    assert alive() is None
