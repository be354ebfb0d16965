"""Golden runs still give the recorded losses and, on the recording machine, the same bits."""

import json

import pytest
from golden_runs import RECORDS, RUNS, machine, train

LOSS_TOLERANCE = 1e-6
LONG_RUNS = {"qwen_image_edit_dora"}
"""Runs that take over ten seconds; `make test-slow` has them."""


def test_every_record_belongs_to_a_run():
    assert sorted(file.stem for file in RECORDS.iterdir()) == sorted(RUNS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG_RUNS)) for n in RUNS]
)
def test_a_golden_run_reproduces_its_record(name, tmp_path):
    recorded = json.loads((RECORDS / f"{name}.json").read_text())
    found = train(name, tmp_path)
    assert found["steps"] == [
        step
        | {
            "loss": pytest.approx(step["loss"], rel=0, abs=LOSS_TOLERANCE),
            "lr": pytest.approx(step["lr"], rel=1e-6),
        }
        for step in recorded["steps"]
    ]
    assert found["validation"] == [
        {
            "step": validated["step"],
            "losses": pytest.approx(validated["losses"], rel=0, abs=LOSS_TOLERANCE),
        }
        for validated in recorded["validation"]
    ]
    assert found["digests"].keys() == recorded["digests"].keys()
    if machine() == recorded["machine"]:
        assert found["digests"] == recorded["digests"]
