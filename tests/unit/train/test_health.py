import threading
from types import SimpleNamespace

import pytest

from gracetune.cache.batch_transfer import PrefetchDepth
from gracetune.config.schema import HEALTH_CHECKS, HealthSection, RunFile
from gracetune.events.types import HealthChanged
from gracetune.memory.oversubscription import GcFreeze
from gracetune.train.health import (
    RECOVERY_LOOKS,
    HealthMonitor,
    Remedies,
    StallWatch,
    build_checks,
    compare_timesteps,
    expected_train_section,
    timestep_shares,
)
from gracetune.train.health_checks import (
    FINE,
    UNKNOWN,
    Finding,
    Measurements,
    RunFacts,
    TimestepShift,
)

NOW = Measurements(7)


class Scripted:
    """A check that returns given results, one at each look."""

    def __init__(self, *results, name="host_memory"):
        self._results, self.name = list(results), name

    def look(self, measured):
        return self._results.pop(0)


def found(level, kind=""):
    return Finding("memory is low", "End other processes.", level, kind=kind)


def levels(results, name="host_memory", **settings):
    monitor = HealthMonitor([Scripted(*results, name=name)], HealthSection(**settings))
    return [[decision.level for decision in monitor.look(NOW)] for _ in results]


def test_only_changes_of_level_are_reported_and_a_problem_that_eases_is_not_over():
    results = [found("notice"), found("notice"), found("degraded"), found("notice"), UNKNOWN]
    assert levels(results) == [["notice"], [], ["degraded"], [], []]


def test_a_check_recovers_after_some_looks_without_a_problem():
    results = [found("notice"), *[FINE] * (RECOVERY_LOOKS - 1), found("notice"), *[FINE] * 4]
    expected = [["notice"], *[[]] * (RECOVERY_LOOKS - 1), [], [], [], ["ok"], []]
    assert levels(results) == expected


def test_degrading_and_stopping_can_be_turned_off():
    assert levels([found("stopping")], stop=False) == [["degraded"]]
    assert levels([found("stopping")], stop=False, degrade=False) == [["notice"]]


def test_only_memory_can_be_degraded():
    assert levels([found("stopping")], "disk_space", stop=False) == [["notice"]]


def test_another_cause_is_reported_once_at_the_same_level():
    results = [found("notice", kind) for kind in ("a", "a", "a, b", "a", "a, b")]
    assert levels(results, "dataset_dead") == [["notice"], [], ["notice"], [], []]
    again = [*results[:1], *[FINE] * RECOVERY_LOOKS, *results[:1]]
    assert levels(again, "dataset_dead")[-1] == ["notice"]


def test_checks_can_be_left_out_and_have_the_names_of_the_schema():
    names = [check.name for check in build_checks(RunFacts(10), HealthSection())]
    assert set(names) | {"loader_stalled", "step_stalled", "previous_run"} == set(HEALTH_CHECKS)
    ignored = HealthSection(ignore=("overfitting",))
    assert [c.name for c in build_checks(RunFacts(10), ignored)] == [
        name for name in names if name != "overfitting"
    ]
    with pytest.raises(ValueError, match="names of checks"):
        HealthSection(ignore=("typo",))


class Controller:
    def __init__(self, shrinks, reduces):
        self.calls, self._shrinks, self._reduces = [], shrinks, reduces

    def shrink_ring(self, reason):
        self.calls.append(reason)
        return self._shrinks

    def reduce_memory(self, reason):
        self.calls.append(reason)
        return self._reduces


def remedies(controller=None, depth=None, freed=0):
    pipeline = SimpleNamespace(trim=lambda: freed, restore=lambda: None)
    return Remedies(controller, lambda: depth or PrefetchDepth(0, None), pipeline, GcFreeze())


def test_a_full_device_prefetches_less_and_uses_a_smaller_plan():
    depth, controller = PrefetchDepth(4, 1000), Controller(shrinks=False, reduces=True)
    remedy = remedies(controller, depth)
    action = remedy.apply("device_memory", "it is full")
    assert action == "prefetches 1 batch instead of 4; changed to a plan that needs less memory"
    depth.grow(1)
    assert depth.batches == 1
    assert remedy.undo("device_memory") == "prefetches 4 batches again"
    assert (depth.batches, depth.max_nbytes) == (4, 1000)


def test_remedies_belong_to_their_check():
    depth = PrefetchDepth(4, 1000)
    remedy = remedies(depth=depth)
    assert remedy.apply("disk_space", "it is full") == ""
    assert depth.batches == 4
    remedy.apply("host_memory", "it is full")
    remedy.apply("device_memory", "it is full")
    for over in ("gradient_spikes", "device_memory"):
        assert remedy.undo(over) == ""
        assert depth.batches == 1
    assert remedy.undo("host_memory") == "prefetches 4 batches again"


def test_a_ring_is_shrunk_before_the_plan_changes():
    controller = Controller(shrinks=True, reduces=True)
    assert "weight ring" in remedies(controller).apply("device_memory", "it is full")
    assert len(controller.calls) == 1


def test_full_host_memory_drops_cached_samples():
    action = remedies(freed=3 * 2**20).apply("host_memory", "it is full")
    assert "dropped 3.0 MiB of cached samples" in action


def test_nothing_is_claimed_if_nothing_can_be_done():
    assert remedies().apply("device_memory", "it is full") == ""


def test_a_stall_is_reported_once_with_what_is_waited_for(recorder):
    clock, waiting = [100.0], SimpleNamespace(waiting_since=None)
    watch = StallWatch(recorder, 60.0, waiting, lambda: clock[0])
    watch.look()  # nothing has begun
    watch.step_done(3)
    clock[0], waiting.waiting_since = 150.0, 110.0
    watch.look()
    assert recorder.events == []
    clock[0] = 170.0
    watch.look()
    watch.look()
    (event,) = recorder.of(HealthChanged)
    assert (event.check, event.level, event.step) == ("loader_stalled", "notice", 3)
    assert "the data loader has stalled: step 4 has waited for a batch for 1m00s" in event.cause
    watch.step_done(4)
    assert [e.level for e in recorder.of(HealthChanged)] == ["notice", "ok"]


def test_a_step_that_computes_too_long_names_its_phase(recorder):
    clock = [0.0]
    busy = SimpleNamespace(waiting_since=None, phase="forward and backward")
    watch = StallWatch(recorder, 60.0, busy, lambda: clock[0])
    watch.step_done(0)
    clock[0] = 200.0  # the first step compiles
    watch.look()
    watch.step_done(1)
    clock[0] = 200.0 + 3 * 200 - 1  # another shape may be compiled
    watch.look()
    assert recorder.events == []
    clock[0] += 2
    watch.look()
    (event,) = recorder.of(HealthChanged)
    assert event.check == "step_stalled"
    assert "step 2 has not ended for 10m01s" in event.cause
    assert "forward and backward" in event.cause
    watch.step_done(2)
    assert [(e.check, e.level) for e in recorder.of(HealthChanged)][1:] == [("step_stalled", "ok")]


def test_a_first_step_that_never_ends_is_a_stall(recorder):
    clock = [0.0]
    busy = SimpleNamespace(waiting_since=None, phase="forward and backward")
    watch = StallWatch(recorder, 60.0, busy, lambda: clock[0])
    watch.step_done(0)
    clock[0] = 60.0 * StallWatch.FIRST_STEP
    watch.look()
    assert [event.check for event in recorder.of(HealthChanged)] == ["step_stalled"]


def test_validations_and_checkpoints_are_not_stalls(recorder):
    clock = [0.0]
    watch = StallWatch(recorder, 60.0, SimpleNamespace(waiting_since=None), lambda: clock[0])
    watch.step_done(1)
    watch.pause()
    clock[0] = 1000.0
    watch.look()
    assert recorder.events == []


def test_the_thread_of_a_watch_ends():
    before = threading.active_count()
    watch = StallWatch(lambda event: None, 60.0, SimpleNamespace(waiting_since=None))
    watch.start()
    watch.close()
    assert threading.active_count() == before


def family(name, prediction="flow"):
    return SimpleNamespace(name=name, prediction=prediction)


def test_the_expected_timesteps_are_those_of_the_family():
    run = RunFile.model_validate({"train": {"timestep_shift": 12.0}})
    expected = expected_train_section(run, family("sd3"))
    assert expected.timestep_shift == 3.0
    shares = timestep_shares(expected, 4096)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["t0.75-1.00"] == pytest.approx(0.5)  # sigmoid(z) > 0.5, shifted by 3
    assert expected_train_section(run, family("sdxl", "epsilon")) is None
    assert expected_train_section(run, family("of another package")) is None


@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_the_rule_of_a_shift_is_not_compared_beyond_the_lengths_that_it_is_known_for(tokens):
    """A VAE of scale 2 makes 16384 tokens of 512x512 pixels, where Flux's rule gives 25."""

    def findings(**section):
        run = RunFile.model_validate({"train": section})
        drawn = compare_timesteps(run.train, expected_train_section(run, family("flux")), tokens)
        return TimestepShift(RunFacts(1000, drawn_timesteps=drawn[0], expected_timesteps=drawn[1]))

    first = Measurements(1, [SimpleNamespace(step=1)])
    assert findings(timestep_shift=3.0).look(first) is FINE  # SimpleTuner's default
    assert findings(timestep_shift="flux").look(first) is FINE
    assert isinstance(findings(timestep_shift=12.0).look(first), Finding)


def test_ranges_outside_of_the_timestep_window_are_not_expected():
    run = RunFile.model_validate({"train": {"timestep_window": [0.5, 1.0]}})
    shares = timestep_shares(expected_train_section(run, family("tiny")), 36)
    assert shares["t0.00-0.25"] == shares["t0.25-0.50"] == 0
    assert sum(shares.values()) == pytest.approx(1)
