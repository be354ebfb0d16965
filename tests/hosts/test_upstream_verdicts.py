"""The verdicts on runs of a host's tests, and which runs are repeated."""

import sys

import pytest
from run_upstream_suite import (
    MAX_TRIES,
    TIME_LIMIT_FACTOR,
    ResultStore,
    compare,
    main,
    report,
    run_missing,
)
from upstream_modules import FORK, FRESH, TIMED_OUT, ModuleRun


class ScriptedRunner:
    """Returns prepared runs, given as the passing tests by way and hooks.

    An empty string is a run that times out.
    """

    def __init__(self, **passed: list[str]) -> None:
        self.passed = {name: [*texts] for name, texts in passed.items()}
        self.started: list[str] = []
        self.limits: list[float] = []

    def run(self, module, hooks, way, limit_s) -> ModuleRun:
        self.limits.append(limit_s)
        name = f"{way}_{'with' if hooks else 'without'}"
        self.started.append(name)
        text = self.passed[name].pop(0)
        others = {each: "failed" for each in "abc" if each not in text}
        ended = "done" if text else TIMED_OUT
        return ModuleRun(module, hooks, way, ended, 1.0, tuple(text), others)


@pytest.fixture
def store(tmp_path):
    return ResultStore(tmp_path / "results.jsonl", "now")


def verdict(store, runner):
    run_missing("m", store, runner)
    return compare("m", store)


def test_a_module_that_passes_is_run_once_with_and_once_without_hooks(store):
    runner = ScriptedRunner(fork_without=["abc"], fork_with=["abc"])
    found = verdict(store, runner)
    assert (found.kind, found.num_passed) == ("passed", 3)
    assert runner.started == ["fork_without", "fork_with"]


def test_a_module_that_fails_without_hooks_is_tried_in_a_fresh_process(store):
    runner = ScriptedRunner(fork_without=["ab"], fork_with=["ab"], fresh_without=["ab"])
    found = verdict(store, runner)
    assert (found.kind, found.detail) == ("same", "1 failed")
    assert runner.started[-1] == f"{FRESH}_without"


def test_a_module_is_judged_in_the_way_in_which_more_tests_pass(store):
    runner = ScriptedRunner(
        fork_without=["a"], fork_with=["a"], fresh_without=["abc"] * 2, fresh_with=["ab"] * 2
    )
    found = verdict(store, runner)
    assert (found.kind, found.num_passed, found.detail) == ("worse", 3, "c")


def test_a_failure_that_does_not_repeat_is_unsteady(store):
    unlucky = ScriptedRunner(fork_without=["abc"] * 2, fork_with=["ab", "abc"])
    assert verdict(store, unlucky).kind == "unsteady"


def test_a_test_that_is_flaky_without_hooks_is_unsteady(store):
    unlucky = ScriptedRunner(fork_without=["abc", "ab"], fork_with=["ab", "ab"])
    assert verdict(store, unlucky).kind == "unsteady"


def test_a_failure_that_repeats_is_worse(store):
    found = verdict(store, ScriptedRunner(fork_without=["abc"] * 2, fork_with=["ab"] * 2))
    assert (found.kind, found.detail) == ("worse", "c")
    assert report([found])[-1].split()[0] == "1"


def test_results_are_reused_until_the_hooks_change(store):
    run_missing("m", store, ScriptedRunner(fork_without=["abc"], fork_with=["abc"]))
    same, other = ResultStore(store.path, "now"), ResultStore(store.path, "later")
    for each in (same, other):
        each.read()
    idle, again = ScriptedRunner(), ScriptedRunner(fork_with=["abc"])
    run_missing("m", same, idle)
    run_missing("m", other, again)
    assert (idle.started, again.started) == ([], [f"{FORK}_with"])


def test_a_module_that_hangs_is_tried_again_with_more_time(store):
    runner = ScriptedRunner(fork_without=["abc"], fork_with=["", "", "abc"])
    assert verdict(store, runner).kind == "passed"
    assert runner.limits == [300, 300, 600, 1200]
    assert [each.ended for each in store.runs] == ["done", "done"]


def test_a_module_that_only_hangs_with_hooks_is_worse(store):
    runner = ScriptedRunner(fork_without=["abc"] * 2, fork_with=[""] * 2 * MAX_TRIES)
    assert verdict(store, runner).kind == "worse"


def test_a_time_out_with_a_shorter_limit_is_not_reused(store):
    store.add(ModuleRun("m", False, FORK, TIMED_OUT, 1200.2))
    for least_s, num_reused in ((300, 1), (400, 0)):
        again = ResultStore(store.path, "now", least_s)
        again.read()
        assert len(again.runs) == num_reused


def test_the_time_limit_follows_the_fastest_run(store):
    assert store.limit_s("m") == 300
    for seconds in (200.0, 500.0):
        store.add(ModuleRun("m", False, FORK, "done", seconds))
    store.add(ModuleRun("m", True, FORK, "died (-9)", 1.0))
    store.add(ModuleRun("other", False, FORK, "done", 5000.0))
    assert store.limit_s("m") == TIME_LIMIT_FACTOR * 200


def test_a_module_that_the_suite_lacks_is_refused(tmp_path, monkeypatch, capsys):
    """Its run would fail with and without hooks, which counts as the same result."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["suite", str(tmp_path), "test_a", "test_b"])
    with pytest.raises(SystemExit):
        main()
    assert "has no test_b" in capsys.readouterr().err
