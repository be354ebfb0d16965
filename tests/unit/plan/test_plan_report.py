"""The report of a plan, as text and as JSON."""

import json
from dataclasses import replace

from cost_model_factory import build_model

from gracetune.plan.memory import FixedMemory
from gracetune.plan.report import (
    ReportHeading,
    describe,
    describe_speed,
    reasons,
    report_json,
    report_lines,
)
from gracetune.plan.result import ROLES
from gracetune.plan.search import (
    Constraints,
    PlanBudget,
    SearchResult,
    find_best_plan,
    keep_run_file_batch,
)


def planned(device: int, **wishes: object) -> tuple[SearchResult, ReportHeading]:
    budget = PlanBudget(device, 10**6, fragmentation=0.03)
    found = find_best_plan(
        build_model(8), FixedMemory(16), budget, Constraints(**wishes), simulated=True
    )
    return found, ReportHeading("made (by hand)", "8x8", "a machine", budget, ("a remark",))


def test_the_report_contains_plan_memory_time_and_reasons() -> None:
    found, heading = planned(900, samples=2)
    text = "\n".join(report_lines(found, heading))
    assert "made (by hand), 8x8 a sample, on a machine, simulated from published figures" in text
    assert "note: a remark" in text
    assert f"plan: {describe(found.best)}" in text
    for role in ROLES:
        assert (f"\n{role}" in text) == (role != "gathered")  # nothing is sharded
    assert "waiting for weights" in text
    assert f"next best of {found.num_tried} candidates:" in text
    assert all(describe(other) in text for other in found.others)


def test_the_report_adds_up_the_host_memory_of_all_gpus() -> None:
    found, heading = planned(650)
    budget = replace(heading.budget, ranks=4)
    text = "\n".join(report_lines(found, replace(heading, budget=budget)))
    assert "of host memory for 4 GPUs\n" in text
    assert "\n4 GPUs together " in text
    assert "of weights in host memory, once for all GPUs of the machine;" in text
    assert "GPUs" not in "\n".join(report_lines(found, heading))


def test_full_training_lists_trained_weights() -> None:
    found, heading = planned(10**6)
    assert "\nadapters " in "\n".join(report_lines(found, heading))
    all_trained = replace(
        found,
        best=replace(found.best, device=replace(found.best.device, weights=0)),
    )
    text = "\n".join(report_lines(all_trained, heading))
    assert "\ntrained weights " in text
    assert "\nadapters " not in text


def test_a_plan_for_this_machine_is_not_called_simulated() -> None:
    found, heading = planned(10**6)
    measured = find_best_plan(
        build_model(8), FixedMemory(16), heading.budget, Constraints(), simulated=False
    )
    assert "simulated" not in "\n".join(report_lines(measured, heading))
    assert "simulated" in "\n".join(report_lines(found, heading))


def test_reasons_match_the_plan() -> None:
    roomy, heading = planned(10**6)
    assert reasons(roomy, heading.budget)[:2] == [
        "all weights fit on the device beside the activations, so none are streamed",
        "all activations fit, so nothing is recomputed",
    ]
    tight, heading = planned(650, offload=False)
    streaming, activations = reasons(tight, heading.budget)[:2]
    assert "of weights in host memory" in streaming
    assert "recomputing takes" in activations
    moved, heading = planned(500)
    assert any("to the host and back" in reason for reason in reasons(moved, heading.budget))


def test_the_times_are_aligned() -> None:
    found, heading = planned(10**6)
    lines = "\n".join(report_lines(found, heading)).split("\n")
    first = next(n for n, line in enumerate(lines) if line.startswith("one micro-batch"))
    parts = lines[first + 1 : lines.index("", first)]
    assert len(parts) >= 9
    assert {line.rindex("s ") + 1 for line in parts} == {len(lines[first])}


def test_times_are_never_below_zero() -> None:
    found, heading = planned(10**6)
    seconds = replace(found.best.seconds, recompute=-1e-4 * found.best.seconds.step)
    small = replace(found, best=replace(found.best, seconds=seconds))
    text = "\n".join(report_lines(small, heading))
    assert "recomputing takes 0% of the step" in text
    assert " -" not in text.partition("one micro-batch")[2].partition("why:")[0]


def test_the_report_explains_a_slightly_faster_alternative() -> None:
    found, heading = planned(1200, samples=4)
    (slow, fast), batch = found.others[:2], found.best.batch
    second = replace(found.best.seconds, step=found.best.seconds.step * 0.998)
    faster = replace(found.best, batch=batch + 1, seconds=second)
    slower = replace(faster, seconds=found.best.seconds)
    report = SearchResult(found.best, (faster, slower, slow, fast), 9)
    text = "\n".join(report_lines(report, heading))
    assert "a simpler plan is preferred to one that is up to 0.5% faster" in text
    gain = faster.samples_per_second / found.best.samples_per_second - 1
    assert f"the best plan with batch {batch + 1} would be {gain:.1%} faster" in text
    assert "a simpler plan" not in "\n".join(
        report_lines(SearchResult(found.best, (slow, fast), 9), heading)
    )


def test_other_batches_are_compared() -> None:
    found, heading = planned(1200, samples=4)
    others = {other.batch for other in found.others} - {found.best.batch}
    report = [
        reason
        for reason in reasons(found, heading.budget)
        if reason.startswith("the best plan with batch ")
    ]
    assert others
    assert len(report) == len(others)


def test_the_report_shows_the_run_files_batch_and_suggests_a_faster_one() -> None:
    found, heading = planned(1200, samples=4)
    wishes = Constraints(samples=4, run_file_batch=4)
    report = keep_run_file_batch(found, build_model(8), FixedMemory(16), heading.budget, wishes)
    lines = list(report_lines(report, heading))
    best = found.best
    assert report.best.batch == 4 != best.batch
    at = lines.index(f"plan: {describe(report.best)}")
    accumulated = f" and train.gradient_accumulation_steps to {best.accumulation}"
    assert lines[at + 1 : at + 5] == [
        f"      {describe_speed(report.best)}",
        f"faster: {describe(best)}",
        f"      {describe_speed(best)}",
        f"      to train with it, set train.batch_size to {best.batch}{accumulated}; "
        "a step has the same number of samples",
    ]
    ramped = replace(heading, has_ramp=True)
    assert accumulated not in "\n".join(report_lines(report, ramped))
    faster = json.loads(json.dumps(report_json(report, heading)))["faster"]
    assert faster["plan"]["batch"] == best.batch
    assert faster["set"] == {
        "train.batch_size": best.batch,
        "train.gradient_accumulation_steps": best.accumulation,
    }
    assert report_json(found, heading)["faster"] is None
    assert "faster:" not in "\n".join(report_lines(found, heading))


def test_the_report_says_that_the_run_files_batch_does_not_fit() -> None:
    found, heading = planned(1200, samples=4)
    report = replace(found, unfit_batch=4, why_unfit="too little.")
    text = "\n".join(report_lines(report, heading))
    assert "train.batch_size 4 does not fit: too little." in text.partition("plan: ")[0]
    assert f"to train with this plan, set train.batch_size to {found.best.batch}" in text
    unfit = json.loads(json.dumps(report_json(report, heading)))["does_not_fit"]
    assert (unfit["batch"], unfit["why"]) == (4, "too little.")
    assert unfit["set"]["train.batch_size"] == found.best.batch
    assert report_json(found, heading)["does_not_fit"] is None


def test_the_report_for_one_memory() -> None:
    budget = PlanBudget(1500, 10**6, one_memory=True)
    fixed = FixedMemory(16, host_caches_nbytes=300)
    found = find_best_plan(build_model(8), fixed, budget, Constraints(), simulated=True)
    heading = ReportHeading("made (by hand)", "8x8", "a machine", budget)
    first, *_, last = reasons(found, budget)
    assert first.startswith("host and device share one memory: nothing is streamed or offloaded")
    assert last == f"{1500 - found.best.device.total - 300} B of the memory budget remains free"
    text = "\n".join(report_lines(found, heading))
    assert "within 1.5 KiB of memory shared by host and device" in text
    assert "both together" in text


def test_json_contains_every_number_of_the_plan() -> None:
    found, heading = planned(900, samples=2)
    report = json.loads(json.dumps(report_json(found, heading)))
    assert report["plan"]["device_total"] == found.best.device.total
    assert report["plan"]["blocks"][0]["weights"] == found.best.blocks[0].weights
    assert report["plan"]["simulated"] is True
    assert report["budget"]["device_nbytes"] == 900
    assert len(report["others"]) == len(found.others)
