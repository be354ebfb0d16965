"""What was learnt predicts what was measured."""

from dataclasses import replace

import pytest
from problem_factory import made_question

from gracetune.plan.controller import StepMeasurement, calibrate, is_off
from gracetune.plan.memory import FixedMemory
from gracetune.plan.search import predict
from gracetune.plan.simulate import candidate_of

ROOMY, TIGHT = 2000, 500


def planned(device_nbytes, **made):
    ask = made_question(device_nbytes, **made)
    return ask, ask.solve(ask.budget)


def predicted_again(ask, plan, measured):
    model, fixed = calibrate(ask.model, ask.fixed, plan, measured)
    return predict(model, candidate_of(plan), fixed, simulated=False)


def as_planned(plan, **differing):
    seconds = plan.seconds
    waits = seconds.wait_weights + seconds.wait_activations
    return replace(StepMeasurement(seconds.step, waits, plan.device.total), **differing)


def test_a_plan_that_came_true_was_not_wrong():
    _, plan = planned(TIGHT)
    assert not is_off(plan, as_planned(plan))
    assert not is_off(plan, as_planned(plan, seconds=1.09 * plan.seconds.step))
    assert not is_off(plan, as_planned(plan, peak_nbytes=int(0.98 * plan.device.total)))
    assert not is_off(plan, StepMeasurement(None, 0.0, None))


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.2, 3.0])
def test_bytes_that_nobody_foresaw_are_there_whatever_is_chosen(factor):
    ask, plan = planned(TIGHT)
    peak = int(factor * plan.device.total)
    measured = as_planned(plan, peak_nbytes=peak)
    assert is_off(plan, measured)
    again = predicted_again(ask, plan, measured)
    assert again.device.total == peak
    assert again.seconds == plan.seconds, "time was as predicted"


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.5, 4.0])
@pytest.mark.parametrize("device_nbytes", [ROOMY, TIGHT])
def test_a_machine_that_computes_at_another_pace(factor, device_nbytes):
    ask, plan = planned(device_nbytes)
    waits = plan.seconds.wait_weights
    seconds = factor * (plan.seconds.step - waits) + waits
    again = predicted_again(ask, plan, as_planned(plan, seconds=seconds))
    assert again.seconds.step == pytest.approx(seconds, rel=0.02)
    assert again.device == plan.device


@pytest.mark.parametrize("slower", [1.5, 2.5])
def test_a_link_that_is_slower_than_it_was_measured_alone(slower):
    """Blocks of 900 bytes come in nine seconds and are computed in three: the link is all."""
    ask, plan = planned(2400, frozen_nbytes=900)
    assert plan.seconds.wait_weights > 0.3 * plan.seconds.step
    seconds = plan.seconds.step + (slower - 1) * plan.seconds.link_in
    computed = plan.seconds.step - plan.seconds.wait_weights
    measured = as_planned(plan, seconds=seconds, stalled_s=seconds - computed)
    model, fixed = calibrate(ask.model, ask.fixed, plan, measured)
    assert model.rates.link_in == pytest.approx(ask.model.rates.link_in / slower, rel=0.05)
    again = predict(model, candidate_of(plan), fixed, simulated=False)
    assert again.seconds.step == pytest.approx(seconds, rel=0.02)
    assert again.seconds.gemm == pytest.approx(plan.seconds.gemm)


def test_a_step_that_only_waited_says_nothing_of_computing():
    ask, plan = planned(TIGHT)
    model, _ = calibrate(
        ask.model, FixedMemory(16), plan, as_planned(plan, seconds=100.0, stalled_s=100.0)
    )
    assert model.at(1).blocks[0].eager.keep.forward.total == pytest.approx(1.0)


def test_what_a_link_cannot_explain_is_not_laid_at_its_door():
    """Computing took as long as it did, nothing was waited for: the link stays as it was."""
    ask, plan = planned(TIGHT)
    measured = as_planned(plan, seconds=2 * plan.seconds.step, stalled_s=0.0)
    model, _ = calibrate(ask.model, ask.fixed, plan, measured)
    assert model.rates.link_in == pytest.approx(ask.model.rates.link_in, rel=0.3)
