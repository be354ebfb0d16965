"""A run on a machine whose host and device share one memory, rehearsed on the CPU."""

import pytest

from gracetune.memory.platform import Link
from gracetune.plan import planner
from gracetune.plan.search import PlanError
from gracetune.train.run import run_training


@pytest.fixture
def integrated(monkeypatch):
    """Plan for an integrated GPU, which shares the memory of the host."""
    plan_run = planner.plan_run

    def plan_with_one_memory(run, family, inputs, stepper, _link, *rest):
        return plan_run(run, family, inputs, stepper, Link.INTEGRATED, *rest)

    monkeypatch.setattr(planner, "plan_run", plan_with_one_memory)


@pytest.mark.usefixtures("integrated")
def test_with_one_memory_nothing_is_streamed_or_offloaded(tiny_run, tmp_path, recorder):
    def train(memory):
        run = tiny_run(
            output_dir=str(tmp_path / memory),
            adapter={"rank": 4},
            optimizer={"state": "host"},
            train={"max_train_steps": 1, "batch_size": 2},
            plan={"device_memory": memory, "compile": "never"},
        )
        run_training(run, sinks=[recorder])

    train("1GB")
    texts = recorder.texts()
    assert "host and device share one memory, so nothing is streamed or offloaded" in texts
    (plan,) = [text for text in texts if text.startswith("plan: batch")]
    assert "all weights resident" in plan
    assert "host memory" not in plan
    with pytest.raises(PlanError, match=r"of memory \(shared by host and device\) is too little"):
        train("60MB")
