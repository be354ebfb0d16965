"""Optimizer state in host memory: its bytes, its time, and when it is chosen."""

import re
from dataclasses import replace

import pytest
from cost_model_factory import SPEEDS, build_candidate, build_model

from gracetune.config.schema import RunFile
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.planner_input import STATE_SHARES, constraints_of
from gracetune.plan.report import ReportHeading, describe, reasons, report_json, report_lines
from gracetune.plan.search import Constraints, PlanBudget, PlanError, find_best_plan
from gracetune.plan.simulate import predict_seconds

STATE = 2000
FIXED = FixedMemory(STATE, batches_ahead=0, state_slots_nbytes=60)
ROOMY = 10_000


def choice(share, **settings):
    return replace(build_candidate(build_model(), **settings), host_state=share)


def chosen(device_nbytes, shares, host_nbytes=ROOMY, **wishes):
    return find_best_plan(
        build_model(),
        FIXED,
        PlanBudget(device_nbytes, host_nbytes),
        Constraints(host_state=shares, **wishes),
        simulated=True,
    )


@pytest.mark.parametrize(
    ("share", "device", "host"), [(0, 2000, 0), (0.25, 1560, 500), (1, 60, 2000)]
)
def test_state_in_host_memory_passes_through_device_slots(share, device, host):
    costs = build_model().at(1)
    assert device_bytes(costs, choice(share), FIXED).optimizer == device
    assert host_bytes(costs, choice(share), FIXED).optimizer == host


def test_an_update_waits_for_its_state():
    """Half of 2000 bytes is copied in and out at 100 bytes per second, both at the same time."""
    here, there = (predict_seconds(build_model().at(1), choice(s), SPEEDS, STATE) for s in (0, 0.5))
    update = (3 * 16 + 2 * STATE) / SPEEDS.memory
    assert (here.wait_state, there.wait_state) == (0, pytest.approx(10 - update))
    assert there.step - here.step == pytest.approx(there.wait_state)
    assert (there.link_in, there.link_out) == (10, 10)
    assert there.overhead == pytest.approx(here.overhead)


def test_state_traffic_is_bidirectional_and_shared_by_micro_batches():
    costs = build_model().at(1)
    slow = replace(SPEEDS, both_ways_share=0.5)
    alone, both = (predict_seconds(costs, choice(1.0), s, STATE) for s in (SPEEDS, slow))
    assert both.wait_state == pytest.approx(alone.wait_state + 20)
    often = predict_seconds(costs, choice(1.0, accumulation=4), SPEEDS, STATE)
    assert often.wait_state == pytest.approx(alone.wait_state / 4)


def test_a_step_of_two_experts_moves_the_state_of_one():
    plan = find_best_plan(
        build_model(),
        replace(FIXED, optimizer_nbytes=2 * STATE, num_transformers=2),
        PlanBudget(ROOMY, ROOMY),
        Constraints(host_state=(1.0,)),
        simulated=True,
    ).best
    assert plan.host.optimizer == 2 * STATE
    assert plan.seconds.wait_state < STATE / SPEEDS.link_in


def test_state_stays_on_the_device_if_it_fits():
    best = chosen(ROOMY, STATE_SHARES).best
    assert best.host_state == 0
    assert best.host.optimizer == 0


def test_only_as_much_state_leaves_as_necessary():
    """The blocks need 800 bytes, and the rest of the model 50."""
    found = {nbytes: chosen(nbytes, STATE_SHARES, stream=False).best for nbytes in (2400, 1300)}
    shares = [plan.host_state for plan in found.values()]
    assert 0 < shares[0] < shares[1] <= 1
    for nbytes, plan in found.items():
        assert plan.device.total <= nbytes
        assert plan.host.optimizer == int(plan.host_state * STATE)
    with pytest.raises(PlanError, match="too little"):
        chosen(1300, (0.0,), stream=False)


def test_the_error_names_the_required_host_memory():
    with pytest.raises(PlanError, match=r"100 B of host memory is too little.*at least"):
        chosen(1300, STATE_SHARES, host_nbytes=100, stream=False)


def test_the_report_describes_state_in_host_memory():
    planned = chosen(1300, (1.0,), stream=False, offload=False)
    assert "100% of the optimizer state in host memory" in describe(planned.best)
    budget = PlanBudget(1300, ROOMY)
    (reason,) = [text for text in reasons(planned, budget) if "optimizer" in text]
    assert re.search(r"every update moves [\d.]+ \w+ to the device and back", reason)
    assert not any("offloading" in text for text in reasons(planned, budget))
    text = "\n".join(report_lines(planned, ReportHeading("m", "s", "x", budget)))
    assert "waiting for state" in text
    plan = report_json(planned, ReportHeading("m", "s", "x", budget))["plan"]
    assert plan["host_state"] == 1.0
    assert plan["seconds"]["wait_state"] > 0


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({}, STATE_SHARES),
        ({"adapter": {"kind": "full"}}, STATE_SHARES),
        ({"adapter": {"kind": "lora"}}, (0.0,)),
        ({"adapter": {"kind": "lora"}, "optimizer": {"state": "host"}}, (1.0,)),
        ({"optimizer": {"state": "device"}}, (0.0,)),
        ({"optimizer": {"name": "prodigy"}}, (0.0,)),
        ({"optimizer": {"name": "theirs"}}, (0.0,)),
    ],
)
def test_state_shares_of_run_files(settings, shares):
    assert constraints_of(RunFile.model_validate(settings)).host_state == shares
