"""A plan is corrected once if it is worth it, and shrinks if memory runs out."""

from dataclasses import dataclass, replace

import pytest
import torch
from problem_factory import build_problem

from gracetune.data.sample import Batch
from gracetune.events.types import Notice
from gracetune.offload.copy_engine import OffloadError
from gracetune.offload.ring import RingCounters
from gracetune.plan import controller
from gracetune.plan.controller import PlanController
from gracetune.plan.planner_input import PlanProblem
from gracetune.plan.search import PlanError
from gracetune.units import format_bytes

ROOMY, TIGHT = 2000, 500
NUMEL = 16
LEFT = 1000


class FakeMeter:
    def __init__(self):
        self.peak = None
        self.cleared = 0

    def restart(self):
        pass

    def peak_nbytes(self):
        return self.peak

    def clear(self):
        self.cleared += 1


class FakeRing:
    def counters(self):
        return RingCounters(7, 700, 5, 2, 1, 0, 3.0, 4, 0, 100, 800)


class FakeCompiler:
    graphs, seconds, failure, reason = 3, 40.0, "", "RuntimeError"


class FakePlacedModel:
    """The part of a placed model that PlanController uses; records the calls."""

    def __init__(self, plan, calls, added):
        self.plan = plan
        self.calls = calls
        self.ring = FakeRing() if plan.streamed else None
        self.compiler = None
        self.closed = False
        self.waited = 0.0
        self._added = added

    def allow_ring_growth(self, nbytes):
        self.calls.append(("may grow", nbytes))

    def shrink_ring(self):
        given, self._added = self._added, False
        return given

    def stall_seconds(self):
        return self.waited

    def close(self):
        if not self.closed:
            self.calls.append(("close", self.plan))
        self.closed, self.ring = True, None


@dataclass
class Case:
    controller: PlanController
    problem: object
    meter: FakeMeter
    calls: list
    recorder: object
    placed: list
    spares: list
    """The spare bytes that were given for each placed plan."""

    @property
    def plan(self):
        return self.controller.plan

    def check(self, seconds, peak=None, batches=3, numel=NUMEL, left=LEFT):
        self.meter.peak = peak
        self.controller.start_measuring()
        for _ in range(batches):
            self.controller.count_batch(batch(numel))
        return self.controller.check(seconds, left)


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def with_managed(problem, *choices):
    budget = replace(problem.budget, managed_nbytes=10**6)
    constraints = replace(problem.constraints, managed=choices)
    return replace(problem, budget=budget, constraints=constraints)


def no_plan(*_):
    raise PlanError("nothing fits")


def batch(numel=NUMEL):
    return Batch(torch.zeros(1, numel), {}, (None,))


@pytest.fixture
def case(recorder):
    def make(device_nbytes, added=False, full_at=(), failure=FULL, managed=((),), **asked):
        problem = with_managed(build_problem(device_nbytes, **asked), *managed)
        calls, placed, spares = [], [], []

        def place(plan, spare_nbytes):
            if len(placed) in full_at:
                placed.append(None)
                raise failure
            placed.append(FakePlacedModel(plan, calls, added))
            spares.append(spare_nbytes)
            return placed[-1]

        meter = FakeMeter()
        plan = problem.solve(problem.budget)
        controller = PlanController(problem, plan, place, meter, NUMEL, recorder)
        return Case(controller, problem, meter, calls, recorder, placed, spares)

    return make


def test_a_correct_plan_stays_and_the_ring_may_grow(case):
    one = case(TIGHT)
    plan = one.plan
    assert not one.check(plan.seconds.step, peak=plan.device.total - 1)
    assert one.plan is plan
    assert one.calls == [("may grow", one.problem.spare_nbytes(plan) + 1)]
    assert one.problem.spare_nbytes(plan) <= TIGHT - plan.device.total
    (text,) = one.recorder.texts()
    expected = f"{plan.samples_per_second:.3f}"
    assert text.startswith(f"measured: {expected} samples/s (expected {expected}), ")
    assert text.endswith(f"of device memory (expected {format_bytes(plan.device.total)})")


def test_unexpectedly_free_memory_is_used_by_a_correction_once(case):
    one = case(TIGHT)
    before = one.plan
    assert any(block.activations == "recompute" for block in before.blocks)
    assert one.check(before.seconds.step, peak=before.device.total - 200)
    after = one.plan
    assert after.seconds.step < 0.97 * before.seconds.step
    assert after.device.total <= TIGHT
    assert one.calls == [("close", before)]
    assert one.meter.cleared == 1
    text = one.recorder.texts()[-1]
    assert text.startswith("plan corrected after the first steps")
    assert f"{after.seconds.step:.3f} s per micro-batch" in text
    assert f"the first plan would give {before.samples_per_second:.3f} samples/s" in text
    assert not one.check(after.seconds.step / 2, peak=10), "never a second time"
    assert one.plan is after


def test_a_plan_over_budget_is_replaced_even_by_a_slower_one(case):
    one = case(1500)
    before = one.plan
    assert one.check(before.seconds.step, peak=1600)
    assert one.plan.seconds.step >= before.seconds.step
    more = 1600 - before.device.total
    assert one.plan.device.total <= 1500
    assert one.problem.solve(one.problem.budget).device.total + more > 1500


def test_a_different_speed_alone_does_not_change_the_plan(case):
    one = case(ROOMY)
    before = one.plan
    assert not one.check(2 * before.seconds.step, peak=before.device.total)
    assert one.plan.blocks == before.blocks
    assert one.plan.seconds.step == pytest.approx(2 * before.seconds.step, rel=0.01), (
        "but it is known now"
    )
    assert one.calls[0][0] == "may grow"


def test_smaller_batches_do_not_correct_the_plan(case):
    one = case(TIGHT)
    before = one.plan
    assert not one.check(before.seconds.step / 4, peak=before.device.total // 2, numel=NUMEL - 1)
    assert one.plan is before
    assert "3 of 3 micro-batches were smaller" in one.recorder.texts()[0]
    assert one.calls == [("may grow", one.problem.spare_nbytes(before))]


def test_one_full_batch_corrects_memory_but_not_time(case):
    one = case(TIGHT)
    before = one.plan
    one.meter.peak = before.device.total - 200
    one.controller.start_measuring()
    for numel in (NUMEL, 1, 1):
        one.controller.count_batch(batch(numel))
    assert one.controller.check(before.seconds.step / 10, LEFT)
    assert one.plan.seconds.gemm == pytest.approx(before.seconds.gemm)
    assert one.plan.device.total > before.device.total - 200


def test_a_partial_batch_does_not_count_as_full(case):
    one = case(TIGHT)
    one.controller.start_measuring()
    one.controller.count_batch(Batch(torch.zeros(0, NUMEL), {}, ()))
    assert not one.controller.check(one.plan.seconds.step / 10, LEFT)


def test_a_change_must_pay_for_its_compilation(case):
    free = 450  # enough to keep weights resident, which needs another graph
    one = case(TIGHT, compiled=(True,))
    before = one.plan
    assert not one.check(before.seconds.step, peak=before.device.total - free, left=1)
    assert one.plan.blocks == before.blocks
    two = case(TIGHT, compiled=(True,))
    assert two.check(before.seconds.step, peak=before.device.total - free, left=LEFT)


def test_a_change_must_pay_for_moving_weights(case, monkeypatch):
    one = case(TIGHT)
    before = one.plan
    assert before.streamed
    peak = before.device.total - 200
    monkeypatch.setattr(controller, "PIN_NBYTES_PER_S", before.host.weights / 50.0)
    assert not one.check(before.seconds.step, peak=peak, left=5), (
        "fifty seconds cost more than five steps gain"
    )
    assert case(TIGHT).check(before.seconds.step, peak=peak, left=100)


@pytest.mark.parametrize("failure", [FULL, OffloadError("8 GiB cannot be pinned")], ids=str)
def test_a_corrected_plan_that_does_not_fit_is_undone(case, failure):
    one = case(TIGHT, full_at=(1,), failure=failure)
    before = one.plan
    assert one.check(before.seconds.step, peak=before.device.total - 200)
    assert one.plan.blocks == before.blocks
    assert one.plan.device.total == before.device.total - 200
    assert one.placed[-1].plan.blocks == before.blocks
    assert one.controller.streaming_stats(9).fetches == 14, "of two rings, none of them twice"
    (notice,) = [event for event in one.recorder.of(Notice) if event.fallback]
    assert "Returning to the first plan" in notice.text


def test_added_slots_are_released_before_the_plan_shrinks(case):
    one = case(900, added=True)
    before = one.plan
    assert one.controller.reduce_memory("full.")
    assert one.plan is before
    assert one.calls == []
    assert one.recorder.texts() == [
        "full. Continuing without the slots that were added to the weight ring."
    ]
    assert one.controller.reduce_memory("full.")
    assert one.plan.device.total < before.device.total
    assert one.calls == [("close", before)]
    assert not one.check(before.seconds.step / 10, peak=10), "a full device is not filled again"
    assert one.spares[-1] < before.device.total - one.plan.device.total, "nor counted as free"


@pytest.mark.parametrize("change", ["correction", "smaller", "eager"])
def test_what_is_in_managed_memory_stays_there(case, change):
    """A plan with it on the device would be faster or simpler, but nothing moves back."""
    one = case(900, managed=(("trained",),))
    one.controller._problem = with_managed(one.problem, (), ("trained",), ("trained", "gradients"))
    assert one.controller._problem.solve(one.problem.budget).managed == ()
    before = one.plan
    if change == "correction":
        assert one.check(before.seconds.step, peak=before.device.total - 500)
    elif change == "smaller":
        assert one.controller.reduce_memory("full.")
    else:
        one.placed[-1].compiler = FakeCompiler()
        one.placed[-1].compiler.failure = "it failed"
        assert one.controller.replan_without_compilation()
    assert len(one.placed) == 2
    assert "trained" in one.plan.managed


def test_plans_shrink_until_one_fits(case):
    one = case(900, full_at=(1, 2))
    before = one.plan
    assert one.controller.reduce_memory("full.")
    first, second, third = one.recorder.texts()
    assert first.startswith("full. Continuing with a smaller plan: ")
    assert second.startswith(f"{FULL} Continuing with a smaller plan: ")
    assert third.startswith(f"{FULL} Continuing with a smaller plan: ")
    assert one.plan is one.placed[-1].plan
    assert one.plan.device.total < 0.85**2 * before.device.total
    assert one.calls == [("close", before)]


def test_reduce_memory_fails_if_no_smaller_plan_can_be_applied(case):
    assert not case(900, full_at=range(1, 20)).controller.reduce_memory("full.")


def test_compilation_during_a_measurement_is_noticed(case):
    one = case(ROOMY)
    assert not one.controller.has_compiled()
    one.placed[-1].compiler = FakeCompiler()
    one.controller.start_measuring()
    assert not one.controller.has_compiled()
    one.placed[-1].compiler.graphs += 1
    assert one.controller.has_compiled()
    one.controller.start_measuring()
    assert not one.controller.has_compiled()


def test_a_run_that_cannot_compile_gets_smaller_plans_without_compilation(case):
    one = case(900, compiled=(True,))
    one.placed[-1].compiler = FakeCompiler()
    one.placed[-1].compiler.failure = "it failed"
    assert one.plan.compiled
    assert one.controller.reduce_memory("full.")
    assert not one.plan.compiled


def test_a_run_that_cannot_compile_is_planned_again_without_compilation(case):
    one = case(ROOMY, compiled=(True,))
    one.placed[-1].compiler = FakeCompiler()
    assert one.plan.compiled
    assert not one.controller.has_failed_to_compile()
    one.placed[-1].compiler.failure = "it failed"
    assert one.controller.has_failed_to_compile()
    assert one.controller.replan_without_compilation()
    assert one.placed[-1].plan is one.plan
    assert not one.plan.compiled
    assert one.problem.fits(one.plan)
    (notice,) = [event for event in one.recorder.of(Notice) if event.fallback]
    assert notice.text.startswith("the run is planned again without compilation: batch ")
    assert not one.controller.has_failed_to_compile(), "only once"
    assert one.controller.reduce_memory("full.")
    assert not one.plan.compiled, "no later plan is compiled either"
    saved = one.controller.record()
    assert not saved["compiled"]
    assert saved["compile_failure"] == {
        "reason": "RuntimeError",
        "compile": (True,),
        "torch": torch.__version__,
    }


@pytest.mark.parametrize("gave_up", [False, True])
def test_compiled_graphs_are_remembered_after_the_first_steps(case, monkeypatch, gave_up):
    one = case(ROOMY, compiled=(True,))
    one.placed[-1].compiler = FakeCompiler()
    one.placed[-1].compiler.failure = "it failed" if gave_up else ""
    remembered = []
    monkeypatch.setattr(PlanProblem, "remember_graphs", lambda _, plan: remembered.append(plan))
    plan = one.plan
    one.check(plan.seconds.step)
    assert remembered == ([] if gave_up else [plan])


def test_blocks_stay_eager_if_no_eager_plan_fits(case, monkeypatch):
    one = case(ROOMY, compiled=(True,))
    one.placed[-1].compiler = FakeCompiler()
    one.placed[-1].compiler.failure = "it failed"
    monkeypatch.setattr(PlanProblem, "solve", no_plan)
    before = one.plan
    assert one.controller.has_failed_to_compile()
    assert not one.controller.replan_without_compilation()
    assert one.plan is before
    assert not one.controller.has_failed_to_compile(), "the search is not repeated in every step"


def test_reduce_memory_fails_if_no_smaller_plan_exists(case):
    one = case(900)
    downs = 0
    while one.controller.reduce_memory("full."):
        downs += 1
    assert 0 < downs < 20


def test_the_smallest_plan_is_not_corrected_after_memory_has_run_out(case, monkeypatch):
    """The rest has overflowed to managed memory, and the device is fuller than the plan knows."""
    one = case(TIGHT)
    before = one.plan
    with monkeypatch.context() as patched:
        patched.setattr(PlanProblem, "solve", no_plan)
        assert not one.controller.reduce_memory("full.")
    assert not one.check(3 * before.seconds.step, peak=before.device.total - 200)
    assert one.plan is before


def test_streaming_stats_include_earlier_plans(case):
    one = case(TIGHT)
    before = one.plan
    assert one.check(before.seconds.step, peak=before.device.total - 200)
    assert one.plan.streamed
    event = one.controller.streaming_stats(9)
    assert (event.fetches, event.nbytes, event.late, event.on_demand) == (14, 1400, 4, 2)
    assert event.slots == 4, "those of now"
    assert event.waited_s == 6.0
    assert event.hidden_s == pytest.approx(1400 / 100 - 6.0)


def test_streaming_stats_remain_after_a_plan_without_streaming(case):
    one = case(TIGHT)
    assert one.check(one.plan.seconds.step, peak=one.plan.device.total - ROOMY)
    assert not one.plan.streamed
    event = one.controller.streaming_stats(9)
    assert (event.slots, event.fetches) == (0, 7)


def test_streaming_stats_contain_slots_stalls_and_hidden_time(case):
    assert case(ROOMY).controller.streaming_stats(3) is None
    assert case(ROOMY).controller.slots_nbytes == 0
    assert case(TIGHT).controller.slots_nbytes == 4 * 100
    event = case(TIGHT).controller.streaming_stats(3)
    assert (event.step, event.slots, event.late, event.on_demand) == (3, 4, 2, 1)
    assert event.waited_s == 3.0
    assert event.hidden_s == pytest.approx(700 / 100 - 3.0), "seven seconds of link, less waits"
