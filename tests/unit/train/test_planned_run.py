"""A run in little device memory, rehearsed on the CPU: planned, streamed, offloaded, as good."""

import pytest
import torch

from gracetune.config.schema import PlanSection, RunFile
from gracetune.errors import GracetuneError
from gracetune.events.types import StepDone
from gracetune.train.build import why_unplanned
from gracetune.train.run import run_training

LITTLE = {"device_memory": "63MB", "compile": "never"}
"""Less than the tiny model needs as it is."""
CPU = torch.device("cpu")


def test_a_run_that_must_stream_trains_as_one_that_need_not(tiny_run, tmp_path, told):
    def losses(name, plan):
        told.events.clear()
        folder = str(tmp_path / name)
        settings = {"max_train_steps": 4, "batch_size": 2, "gradient_checkpointing": True}
        run = tiny_run(output_dir=folder, adapter={"rank": 4}, train=settings, plan=plan)
        run_training(run, sinks=[told])
        return [event.loss for event in told.of(StepDone)]

    plain = losses("plain", "off")
    planned = losses("planned", LITTLE)
    texts = "\n".join(told.texts())
    assert "blocks streamed" in texts
    assert "predicted:" in texts
    assert "the plan says for each block what is kept" in texts
    assert planned == pytest.approx(plain, rel=1e-4)


def test_too_little_memory_is_named_with_the_least_that_would_do(tiny_run):
    run = tiny_run(adapter={"rank": 4}, plan=LITTLE | {"device_memory": "1MB"})
    with pytest.raises(GracetuneError, match=r"too few for tiny: the least is"):
        run_training(run)


@pytest.mark.parametrize(
    ("settings", "ranks", "reason"),
    [
        ({"plan": "off"}, 1, "off"),
        ({"model": {"quantize": "int8"}, "plan": LITTLE}, 1, "quantize"),
        ({"plan": LITTLE}, 2, "2 ranks"),
        ({}, 1, "no GPU"),
        ({"plan": PlanSection()}, 1, "no GPU"),
    ],
)
def test_where_no_plan_is_made_there_is_a_reason(settings, ranks, reason):
    assert reason in why_unplanned(RunFile(**settings), CPU, ranks)


def test_a_gpu_alone_is_planned_for():
    assert why_unplanned(RunFile(), torch.device("cuda", 0), 1) == ""
