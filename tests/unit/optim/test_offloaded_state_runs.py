"""Runs with optimizer state in host memory train, resume and are planned like others."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gracetune.config.checks import check_run
from gracetune.errors import ConfigError
from gracetune.events.types import StepDone
from gracetune.train.run import run_training

RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 4,
    "target_effective_batch_size": 12,
    "batch_rampup_steps": 4,
}


def load_checkpoint(run, kind):
    return load_file(Path(run.output_dir) / "checkpoints" / "step-000004" / f"{kind}.safetensors")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_may_change_where_its_state_lives(tiny_run, tmp_path, recorder, name):
    """Resume with the state elsewhere, in both directions, with a batch ramp and clipping."""
    results = []
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
            recorder.events.clear()
            run_training(run, sinks=[recorder])
            assert ("the optimizer state is kept in host memory" in recorder.texts()) == (
                state == "host"
            )
        results.append({**load_checkpoint(run, "weights"), **load_checkpoint(run, "optimizer")})
    first, *others = results
    for other in others:
        assert first.keys() == other.keys()
        for key, value in first.items():
            assert torch.equal(value, other[key]), key


@pytest.fixture
def bf16_run(tiny_run, miniature, tmp_path):
    """Build runs that train all weights of a tiny Qwen-Image in bf16, two micro-batches a step."""

    def make(folder, steps=2, state="host", plan="off"):
        run = tiny_run(
            output_dir=str(tmp_path / folder),
            model={
                "family": "qwen_image",
                "path": str(miniature("qwen-image")),
                "dtype": "bfloat16",
            },
            optimizer={"state": state},
            train={
                "max_train_steps": steps,
                "checkpoint_every": 2,
                "batch_size": 1,
                "gradient_accumulation_steps": 2,
                "ema_decay": 0,
            },
            plan=plan,
        )
        data = run.datasets[0].model_copy(update={"resolution": 32})
        return run.model_copy(update={"datasets": (data,)})

    return make


def test_full_training_in_bf16_saves_master_weights(bf16_run, recorder):
    """In one run and in two, the second with its state on the device: results are equal."""
    results = []
    for folder, parts in (("whole", [(4, "host")]), ("parts", [(2, "host"), (4, "device")])):
        for steps, state in parts:
            run = bf16_run(folder, steps, state)
            run_training(run, sinks=[recorder])
        results.append((load_checkpoint(run, "weights"), load_checkpoint(run, "optimizer")))
    assert any("and their gradients stay in bf16" in text for text in recorder.texts())
    (weights, state), (other_weights, other_state) = results
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    masters = {key: value for key, value in state.items() if key.endswith("|master")}
    trained = {key.partition("|")[0] for key in state if key.endswith("|exp_avg")}
    assert masters.keys() == {f"{name}|master" for name in trained}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    for first, second in ((weights, other_weights), (state, other_state)):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]), key


def test_a_plan_puts_state_in_host_memory(bf16_run, recorder):
    losses = []
    for plan in ("off", {"device_memory": "8GB", "compile": "never"}):
        recorder.events.clear()
        run_training(bf16_run(str(len(losses)), plan=plan), sinks=[recorder])
        losses.append([event.loss for event in recorder.of(StepDone)])
    assert any("100% of the optimizer state in host memory" in text for text in recorder.texts())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("name", ["prodigy", "schedule_free", "automagic", "adamw_8bit", "theirs"])
def test_optimizers_that_need_all_parameters_are_refused(tiny_run, name):
    run = tiny_run(optimizer={"name": name, "state": "host"})
    with pytest.raises(ConfigError, match=rf"optimizer.state is host.*but {name} .*state: device"):
        check_run(run)
