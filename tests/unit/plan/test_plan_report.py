"""What is printed of a plan."""

import json
from dataclasses import replace

from made_shapes import made_model

from gracetune.plan.candidates import Budget, Wishes
from gracetune.plan.choose import Planned, choose
from gracetune.plan.peak import Fixed
from gracetune.plan.report import Heading, as_json, describe, lines, reasons
from gracetune.plan.result import ROLES


def planned(device: int, **wishes: object) -> tuple[Planned, Heading]:
    budget = Budget(device, 10**6, fragmentation=0.03)
    found = choose(made_model(8), Fixed(16), budget, Wishes(**wishes), simulated=True)
    return found, Heading("made (by hand)", "8x8", "a machine", budget, ("a remark",))


def test_the_report_has_the_plan_its_memory_its_seconds_and_why() -> None:
    found, heading = planned(900, samples=2)
    text = "\n".join(lines(found, heading))
    assert "made (by hand), 8x8 a sample, on a machine, simulated from published figures" in text
    assert "note: a remark" in text
    assert f"plan: {describe(found.best)}" in text
    for role in ROLES:
        assert f"\n{role}" in text
    assert "waiting for weights" in text
    assert f"next best, of {found.num_tried} that were predicted:" in text
    assert all(describe(other) in text for other in found.others)


def test_a_plan_for_this_machine_is_not_called_simulated() -> None:
    found, heading = planned(10**6)
    measured = choose(made_model(8), Fixed(16), heading.budget, Wishes(), simulated=False)
    assert "simulated" not in "\n".join(lines(measured, heading))
    assert "simulated" in "\n".join(lines(found, heading))


def test_reasons_follow_the_choice() -> None:
    roomy, heading = planned(10**6)
    assert reasons(roomy, heading.budget)[:2] == [
        "all weights fit beside the activations, so none are streamed",
        "all activations fit, so no product is done twice",
    ]
    tight, heading = planned(650, offload=False)
    streaming, activations = reasons(tight, heading.budget)[:2]
    assert "of weights in host memory" in streaming
    assert "recomputing takes" in activations
    moved, heading = planned(500)
    assert any("out and back" in reason for reason in reasons(moved, heading.budget))


def test_a_plan_that_is_taken_before_a_faster_one_says_why() -> None:
    found, heading = planned(1200, samples=4)
    (slow, fast), batch = found.others[:2], found.best.batch
    second = replace(found.best.seconds, step=found.best.seconds.step * 0.998)
    faster = replace(found.best, batch=batch + 1, seconds=second)
    slower = replace(faster, seconds=found.best.seconds)
    told = Planned(found.best, (faster, slower, slow, fast), 9)
    text = "\n".join(lines(told, heading))
    assert "less machinery is taken before one that is up to 0.5% faster" in text
    gain = faster.samples_per_second / found.best.samples_per_second - 1
    assert f"batch {batch + 1} at its best would be {gain:.1%} faster" in text
    assert "less machinery" not in "\n".join(lines(Planned(found.best, (slow, fast), 9), heading))


def test_other_batches_are_compared() -> None:
    found, heading = planned(1200, samples=4)
    others = {other.batch for other in found.others} - {found.best.batch}
    told = [reason for reason in reasons(found, heading.budget) if reason.startswith("batch ")]
    assert others
    assert len(told) == len(others)


def test_json_has_every_number_of_the_plan() -> None:
    found, heading = planned(900, samples=2)
    told = json.loads(json.dumps(as_json(found, heading)))
    assert told["plan"]["device_total"] == found.best.device.total
    assert told["plan"]["blocks"][0]["weights"] == found.best.blocks[0].weights
    assert told["plan"]["simulated"] is True
    assert told["budget"]["device_nbytes"] == 900
    assert len(told["others"]) == len(found.others)
