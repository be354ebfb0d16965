"""Roles in managed memory: their bytes, their time, and when the planner chooses them."""

from dataclasses import replace

import pytest
from cost_model_factory import SPEEDS, build_candidate, build_model
from problem_factory import build_problem

from gracetune.config.schema import RunFile
from gracetune.plan.controller import StepMeasurement, calibrate
from gracetune.plan.managed import (
    describe_places,
    managed_choices,
    managed_nbytes,
    managed_seconds,
)
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.report import ReportHeading, _places, describe, report_json, report_lines
from gracetune.plan.search import (
    Constraints,
    PlanBudget,
    PlanError,
    find_best_plan,
    fits,
    predict,
)

STATE, AVERAGES, ROOMY = 2000, 400, 10_000
FIXED = FixedMemory(STATE, batches_ahead=0, averages_nbytes=AVERAGES)
SLOW = replace(SPEEDS, in_place=50.0, prefetch=20.0)
CHOICES = ((), ("ema",), ("ema", "optimizer"), ("ema", "optimizer", "gradients"))


def candidate(*managed, **settings):
    return replace(build_candidate(build_model(), **settings), managed=managed)


def search(device_nbytes, managed=CHOICES, managed_cap=ROOMY, host=ROOMY, shares=(0.0,)):
    model = build_model()
    model.rates = SLOW
    return find_best_plan(
        model,
        FIXED,
        PlanBudget(device_nbytes, host, managed_nbytes=managed_cap),
        Constraints(managed=managed, host_state=shares),
        simulated=True,
    )


def smallest_device(managed):
    """Return the smallest device memory, in bytes, in which these roles let the model fit."""
    low, high = 0, ROOMY
    while low < high:
        middle = (low + high) // 2
        try:
            search(middle, (managed,))
            high = middle
        except PlanError:
            low = middle + 1
    return high


@pytest.mark.parametrize("role", ["ema", "optimizer", "trained", "weights"])
def test_a_managed_role_moves_from_the_device_to_the_host(role):
    costs = build_model().at(1)
    nbytes = managed_nbytes(costs, candidate(), FIXED)[role]
    assert nbytes > 0
    before, after = (device_bytes(costs, candidate(*m), FIXED).total for m in ((), (role,)))
    assert before - after == nbytes
    home, moved = (host_bytes(costs, candidate(*m), FIXED).total for m in ((), (role,)))
    assert moved - home == nbytes


def test_managed_gradients_leave_the_device_one_block_at_a_time():
    costs = build_model().at(1)
    managed = candidate("gradients", accumulation=2)
    largest = max(block.gradients_nbytes for block in costs.blocks)
    assert device_bytes(costs, managed, FIXED).gradients <= largest
    assert host_bytes(costs, managed, FIXED).gradients == costs.trained_nbytes


def test_offloaded_activations_count_against_the_cap():
    model = build_model()
    offloading = candidate("activations", activations="offload")
    nbytes = managed_nbytes(model.at(1), offloading, FIXED)["activations"]
    assert nbytes == host_bytes(model.at(1), offloading, FIXED).activations > 0
    for cap, is_possible in ((nbytes, True), (nbytes - 1, False)):
        budget = PlanBudget(ROOMY, ROOMY, managed_nbytes=cap)
        assert fits(model, offloading, FIXED, budget) is is_possible
    plan = predict(model, offloading, FIXED, simulated=True)
    assert (plan.managed_total, plan.seconds.wait_managed) == (nbytes, 0)
    rows = [line.split("  ")[0] for line in _places(plan, ReportHeading("m", "s", "gh", budget))]
    assert rows.count("activations") == 1


def test_roles_cost_their_bytes_over_the_link():
    costs, rates = build_model().at(1), replace(SLOW, both_ways_share=0.5)
    seconds = managed_seconds(costs, candidate(accumulation=4), FIXED, rates)
    assert seconds["optimizer"] == pytest.approx(STATE / (50 * 0.5) / 4)
    assert seconds["ema"] == pytest.approx(AVERAGES / (50 * 0.5) / 4)
    trained = costs.trained_nbytes
    expected = trained * (3 / 50 + 4 / (50 * 0.5)) / 4  # three more backward passes add to them
    assert seconds["gradients"] == pytest.approx(expected)


def test_weights_cost_their_way_to_the_device_and_back():
    costs = build_model().at(1)
    again = candidate(accumulation=4, activations="recompute")
    nbytes = managed_nbytes(costs, again, FIXED)["weights"]
    seconds = managed_seconds(costs, again, FIXED, SLOW)
    assert seconds["weights"] == pytest.approx(2 * nbytes / 20)  # forward and backward
    trained = costs.trained_nbytes
    assert seconds["trained"] == pytest.approx(2 * trained / 20 + trained * (1 / 50 + 1 / 50) / 4)
    cast = replace(costs, cast_copies_nbytes=trained // 2)
    in_place = managed_seconds(cast, again, FIXED, SLOW)["trained"]
    assert in_place == pytest.approx(trained * (3 / 50 + (1 / 50 + 1 / 50) / 4))


def test_auto_leaves_managed_memory_alone_if_everything_fits():
    best = search(ROOMY).best
    assert best.managed == ()
    assert best.seconds.wait_managed == 0


@pytest.mark.parametrize("number", [1, 2])
def test_auto_takes_as_few_roles_as_fit(number):
    fits = smallest_device(CHOICES[number])
    assert fits < smallest_device(CHOICES[number - 1])
    best = search(fits).best
    assert best.managed == CHOICES[number]
    assert best.seconds.wait_managed == pytest.approx(
        sum(best.managed_seconds[role] for role in best.managed)
    )
    assert "in managed memory (ema" in describe(best)


def test_a_faster_link_makes_streaming_lose():
    """In place, state takes 2000 / 50 s; streamed it takes 2000 / 100 s, until the rate is 500."""
    tight = smallest_device(("ema", "optimizer"))
    options = ((), ("ema",), ("ema", "optimizer"))
    slow = search(tight, options, shares=(0.0, 1.0)).best
    assert slow.host_state == 1.0
    assert "optimizer" not in slow.managed


def test_the_cap_limits_the_plan():
    fits = smallest_device(CHOICES[2])
    with pytest.raises(PlanError, match=r"too little|gh200_optimizations\.managed_memory"):
        search(fits, managed_cap=STATE)


def test_without_managed_memory_the_error_names_the_setting():
    fits = smallest_device(CHOICES[2])
    with pytest.raises(PlanError, match=r"gh200_optimizations\.use_uvm: true"):
        search(fits, managed_cap=0)


def test_forced_roles_are_managed_although_everything_fits():
    assert search(ROOMY, (("gradients",),)).best.managed == ("gradients",)


def test_the_report_has_the_place_and_the_cost_of_each_role():
    result = search(smallest_device(CHOICES[1]))
    places = describe_places(RunFile(), trained_are_fp32=True)
    budget = PlanBudget(ROOMY, ROOMY, managed_nbytes=ROOMY)
    heading = ReportHeading("m", "s", "gh", budget, managed_places=places)
    lines = list(report_lines(result, heading))
    rows = {line.split("  ")[0]: line for line in lines}
    assert "managed, used in place" in rows["moving average"]
    assert " device " in rows["optimizer"]
    assert {"gradients", "trained weights", "activations"} <= rows.keys()
    assert any("using or moving it over the link" in line for line in lines)
    assert report_json(result, heading)["plan"]["managed"] == ("ema",)


@pytest.mark.parametrize(
    ("access", "conf", "weights", "trained", "ema"),
    [
        ("auto", "", "prefetched", "used in place", "used in place"),
        ("in_place", "", *["used in place"] * 3),
        ("prefetch", "", *["prefetched"] * 3),
        ("device", "", *["on the device if it fits"] * 3),
        ("auto", "uvm_access_pattern:gpu_first", *["on the device if it fits"] * 3),
        ("auto", "uvm_access_pattern:cpu_first", *["used in place"] * 3),
        ("auto", "uvm_access_pattern:balanced", *["where it was used last"] * 3),
    ],
)
def test_the_report_says_how_a_role_is_used(monkeypatch, access, conf, weights, trained, ema):
    monkeypatch.setenv("GRACETUNE_ALLOC_CONF", conf)
    run = RunFile.model_validate({"gh200_optimizations": {"managed_access": access}})
    places = describe_places(run, trained_are_fp32=True)
    found = [places[role] for role in ("weights", "trained", "ema")]
    assert found == [f"managed, {words}" for words in (weights, trained, ema)]


def test_trained_weights_that_are_not_cast_are_prefetched():
    lora = RunFile.model_validate({"adapter": {}})
    assert describe_places(lora, trained_are_fp32=False)["trained"] == "managed, used in place"
    whole = RunFile.model_validate({"adapter": None})
    assert describe_places(whole, trained_are_fp32=False)["trained"] == "managed, prefetched"
    uncast = RunFile.model_validate({"adapter": None, "train": {"mixed_precision": "no"}})
    assert describe_places(uncast, trained_are_fp32=True)["trained"] == "managed, prefetched"


def test_choices_of_run_files():
    def run(**settings):
        return RunFile.model_validate(settings)

    whole = managed_choices(run(train={"ema_decay": 0.9}))
    assert whole[:3] == ((), ("ema",), ("ema", "gradients"))
    assert ("ema", "optimizer", "gradients", "trained") in whole
    assert managed_choices(run(adapter={})) == ((), ("weights",))
    assert managed_choices(run(gh200_optimizations={"managed": "off"})) == ((),)
    forced = run(gh200_optimizations={"managed": ["optimizer"]})
    assert managed_choices(forced) == (("optimizer",),)
    on_host = managed_choices(run(optimizer={"state": "host"}))
    assert not any("optimizer" in roles for roles in on_host)


@pytest.mark.parametrize("slower", [0.5, 2.5])
def test_a_wrong_prediction_of_managed_memory_is_not_blamed_on_compute(slower):
    """Pages that are prefetched over PCIe take 2.5 times as long as those used in place."""
    model = build_model()
    model.rates = SLOW
    one = candidate("optimizer", streamed=2)
    plan = predict(model, one, FIXED, simulated=False)
    waits = plan.seconds.wait_weights + plan.seconds.wait_activations
    assert plan.seconds.wait_managed > 0.3 * plan.seconds.step
    seconds = plan.seconds.step + (slower - 1) * plan.seconds.wait_managed
    measured = StepMeasurement(seconds, waits, plan.device.total)
    calibrated, fixed = calibrate(model, FIXED, plan, measured)
    again = predict(calibrated, one, fixed, simulated=False).seconds
    assert again.wait_managed == pytest.approx(slower * plan.seconds.wait_managed)
    assert again.step == pytest.approx(seconds)
    assert again.gemm == pytest.approx(plan.seconds.gemm)
    assert calibrated.rates.link_in == model.rates.link_in


def test_time_that_managed_memory_does_not_explain_is_that_of_compute():
    model = build_model()
    model.rates = SLOW
    plan = predict(model, candidate("ema"), FIXED, simulated=False)
    computed = plan.seconds.step - plan.seconds.wait_managed
    measured = StepMeasurement(0.5 * computed, 0.0, plan.device.total)
    calibrated, fixed = calibrate(model, FIXED, plan, measured)
    again = predict(calibrated, candidate("ema"), fixed, simulated=False).seconds
    assert again.gemm == pytest.approx(0.5 * plan.seconds.gemm)
    assert again.wait_managed == pytest.approx(plan.seconds.wait_managed / 4), "the least"


def test_the_report_has_roles_in_two_places():
    candidate_ = replace(candidate("weights"), slots=2)
    blocks = (replace(candidate_.blocks[0], weights="streamed"), *candidate_.blocks[1:])
    plan = predict(build_model(), replace(candidate_, blocks=blocks), FIXED, simulated=True)
    budget = PlanBudget(ROOMY, ROOMY, managed_nbytes=ROOMY)
    heading = ReportHeading("m", "s", "gh", budget)
    (row,) = [line for line in _places(plan, heading) if line.startswith("weights")]
    assert "1 blocks streamed, rest managed" in row


def test_memory_for_managed_pages_is_left_if_a_plan_fits_without_it():
    problem = build_problem(ROOMY)
    assert problem.with_device_nbytes(ROOMY - 100).budget.device_nbytes == ROOMY - 100
    assert problem.with_device_nbytes(10) is problem
