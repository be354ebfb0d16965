"""A run where host and device are one memory, rehearsed on the CPU."""

import pytest

from gracetune.memory.platform import Link
from gracetune.plan import planner
from gracetune.plan.search import PlanError
from gracetune.train.run import run_training


@pytest.fixture
def integrated(monkeypatch):
    """The platform says so; everything else is as it is here."""
    settle = planner.plan_run

    def settle_there(run, family, feed, update, link, device, emit):
        return settle(run, family, feed, update, Link.INTEGRATED, device, emit)

    monkeypatch.setattr(planner, "settle", settle_there)


@pytest.mark.usefixtures("integrated")
def test_nothing_is_streamed_or_kept_elsewhere(tiny_run, tmp_path, told):
    def train(memory):
        run = tiny_run(
            output_dir=str(tmp_path / memory),
            adapter={"rank": 4},
            optimizer={"state": "host"},
            train={"max_train_steps": 1, "batch_size": 2},
            plan={"device_memory": memory, "compile": "never"},
        )
        run_training(run, sinks=[told])

    train("1GB")
    texts = told.texts()
    assert "host and device are one memory: nothing is streamed or offloaded" in texts
    (plan,) = [text for text in texts if text.startswith("plan:")]
    assert "all weights resident" in plan
    assert "host memory" not in plan
    with pytest.raises(PlanError, match="memory, which host and device share, are too few"):
        train("60MB")
