"""Runs whose optimizer keeps its state in host memory train, resume and are planned as others."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gracetune.config.rules import check_trainable
from gracetune.errors import ConfigError
from gracetune.events.types import StepDone
from gracetune.train.run import run_training

RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 4,
    "target_effective_batch_size": 12,
    "batch_rampup_steps": 4,
}


def saved(run, kind):
    return load_file(Path(run.output_dir) / "checkpoints" / "step-000004" / f"{kind}.safetensors")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_may_change_where_its_state_lives(tiny_run, tmp_path, told, name):
    """Through a ramp, with clipping: one run goes on with what the other has saved, both ways."""
    ended = []
    for folder, parts in (
        ("device", [(4, "device")]),
        ("host", [(4, "host")]),
        ("out", [(2, "device"), (4, "host")]),
        ("back", [(2, "host"), (4, "auto")]),
    ):
        for steps, state in parts:
            run = tiny_run(
                output_dir=str(tmp_path / folder),
                optimizer={"name": name, "state": state},
                train={"max_train_steps": steps, "checkpoint_every": 2, "max_grad_norm": 0.1},
                gh200_optimizations=RAMP,
            )
            told.events.clear()
            run_training(run, sinks=[told])
            assert ("the optimizer's state lives in host memory" in told.texts()) == (
                state == "host"
            )
        ended.append({**saved(run, "weights"), **saved(run, "optimizer")})
    first, *others = ended
    for other in others:
        assert first.keys() == other.keys()
        for key, value in first.items():
            assert torch.equal(value, other[key]), key


def test_a_plan_says_so_and_does_so(tiny_run, tmp_path, told):
    losses = []
    for plan in ("off", {"device_memory": "4GB", "compile": "never"}):
        told.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / str(len(losses))), optimizer={"state": "host"}, plan=plan
        )
        run_training(run, sinks=[told])
        losses.append([event.loss for event in told.of(StepDone)])
    assert any("100% of the optimizer's state in host memory" in text for text in told.texts())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("name", ["prodigy", "schedule_free", "automagic", "adamw_8bit", "theirs"])
def test_optimizers_that_look_at_all_parameters_are_refused_by_name(tiny_run, name):
    run = tiny_run(optimizer={"name": name, "state": "host"})
    with pytest.raises(ConfigError, match=rf"optimizer.state is host.*but {name} .*Set it to dev"):
        check_trainable(run)
