"""A calibrated cost model predicts what was measured."""

from dataclasses import replace

import pytest
from problem_factory import build_problem

from gracetune.plan.controller import StepMeasurement, calibrate, plan_is_inaccurate
from gracetune.plan.memory import FixedMemory
from gracetune.plan.search import predict
from gracetune.plan.simulate import candidate_of

ROOMY, TIGHT = 2000, 500


def planned(device_nbytes, **made):
    problem = build_problem(device_nbytes, **made)
    return problem, problem.solve(problem.budget)


def predicted_again(problem, plan, measured):
    model, fixed = calibrate(problem.model, problem.fixed, plan, measured)
    return predict(model, candidate_of(plan), fixed, simulated=False)


def as_planned(plan, **differing):
    seconds = plan.seconds
    waits = seconds.wait_weights + seconds.wait_activations
    return replace(StepMeasurement(seconds.step, waits, plan.device.total), **differing)


def test_small_deviations_are_tolerated():
    _, plan = planned(TIGHT)
    assert not plan_is_inaccurate(plan, as_planned(plan))
    assert not plan_is_inaccurate(plan, as_planned(plan, seconds=1.09 * plan.seconds.step))
    assert not plan_is_inaccurate(plan, as_planned(plan, peak_nbytes=int(0.98 * plan.device.total)))
    assert not plan_is_inaccurate(plan, StepMeasurement(None, 0.0, None))


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.2, 3.0])
def test_unpredicted_memory_is_added_to_every_plan(factor):
    problem, plan = planned(TIGHT)
    peak = int(factor * plan.device.total)
    measured = as_planned(plan, peak_nbytes=peak)
    assert plan_is_inaccurate(plan, measured)
    again = predicted_again(problem, plan, measured)
    assert again.device.total == peak
    assert again.seconds == plan.seconds, "time was as predicted"


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.5, 4.0])
@pytest.mark.parametrize("device_nbytes", [ROOMY, TIGHT])
def test_calibration_scales_compute(factor, device_nbytes):
    problem, plan = planned(device_nbytes)
    waits = plan.seconds.wait_weights
    seconds = factor * (plan.seconds.step - waits) + waits
    again = predicted_again(problem, plan, as_planned(plan, seconds=seconds))
    assert again.seconds.step == pytest.approx(seconds, rel=0.02)
    assert again.device == plan.device


@pytest.mark.parametrize("slower", [1.5, 2.5])
def test_calibration_finds_a_slower_link(slower):
    """Blocks of 900 bytes take 9 s to copy and 3 s to compute: the link limits the step."""
    problem, plan = planned(2400, frozen_nbytes=900)
    assert plan.seconds.wait_weights > 0.3 * plan.seconds.step
    seconds = plan.seconds.step + (slower - 1) * plan.seconds.link_in
    computed = plan.seconds.step - plan.seconds.wait_weights
    measured = as_planned(plan, seconds=seconds, stalled_s=seconds - computed)
    model, fixed = calibrate(problem.model, problem.fixed, plan, measured)
    assert model.rates.link_in == pytest.approx(problem.model.rates.link_in / slower, rel=0.05)
    again = predict(model, candidate_of(plan), fixed, simulated=False)
    assert again.seconds.step == pytest.approx(seconds, rel=0.02)
    assert again.seconds.gemm == pytest.approx(plan.seconds.gemm)


def test_a_step_of_stalls_does_not_change_the_compute_rate():
    problem, plan = planned(TIGHT)
    model, _ = calibrate(
        problem.model, FixedMemory(16), plan, as_planned(plan, seconds=100.0, stalled_s=100.0)
    )
    assert model.at(1).blocks[0].eager.keep.forward.total == pytest.approx(1.0)


def test_compute_time_is_not_blamed_on_the_link():
    """The step was slow without stalls, so the rate of the link stays nearly the same."""
    problem, plan = planned(TIGHT)
    measured = as_planned(plan, seconds=2 * plan.seconds.step, stalled_s=0.0)
    model, _ = calibrate(problem.model, problem.fixed, plan, measured)
    assert model.rates.link_in == pytest.approx(problem.model.rates.link_in, rel=0.3)
