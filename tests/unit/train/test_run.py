import errno
import gc
import itertools
import json
import shutil

import pytest
import torch

from gracetune.config.schema import RunFile
from gracetune.errors import CheckpointError, ConfigError, InterruptedRunError, RunFailedError
from gracetune.events.run_control import RunControl
from gracetune.events.types import (
    CheckpointSaved,
    Notice,
    RampChanged,
    RunEnded,
    RunStarted,
    StepDone,
    Validated,
)
from gracetune.models.family import load_family
from gracetune.plan.controller import Settled
from gracetune.train import checkpoint, validate
from gracetune.train import validate as media
from gracetune.train.build import resolve_precision
from gracetune.train.loop import MADE
from gracetune.train.run import run_training


def test_a_full_training_leaves_a_model_that_can_be_trained_on(tiny_run, told, tmp_path):
    ended = run_training(tiny_run(), sinks=[told])
    assert ended.status == "done"
    started = told.of(RunStarted)[0]
    assert (started.start_step, started.num_samples) == (0, 64)
    assert [e.step for e in told.of(StepDone)] == [1, 2, 3]
    assert told.of(RunEnded) == [ended]

    section = RunFile.model_validate({"model": {"path": ended.outputs["result"]}}).model
    averages = checkpoint.load_snapshot(tmp_path / "run/checkpoints/step-000003").tensors["ema"]
    weights = dict(load_family(section).transformer.named_parameters())
    assert all(torch.equal(weights[name], averages[name]) for name in averages)


def test_the_resolved_run_file_is_in_the_run_folder(tiny_run, tmp_path):
    run = tiny_run()
    run_training(run)
    assert RunFile.model_validate_json((tmp_path / "run/run.json").read_text()) == run


def test_training_lowers_the_loss(tiny_run, told):
    run_training(tiny_run(train={"max_train_steps": 60, "batch_size": 8}), sinks=[told])
    losses = [event.loss for event in told.of(StepDone)]
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_what_stays_is_set_aside_for_the_length_of_a_run(tiny_run, told, monkeypatch):
    aside = {}

    def handle(event):
        if isinstance(event, StepDone):
            aside[event.step] = gc.get_freeze_count() > 0

    monkeypatch.setattr(told, "handle", handle)
    run_training(tiny_run(train={"max_train_steps": MADE + 1}), sinks=[told])
    assert [step for step, is_aside in aside.items() if is_aside] == [MADE + 1]
    assert gc.get_freeze_count() == 0


def test_bf16_trains_too(tiny_run, told):
    run_training(tiny_run(train={"max_train_steps": 30, "mixed_precision": "bf16"}), sinks=[told])
    losses = [event.loss for event in told.of(StepDone)]
    assert told.of(RunStarted)[0].precision == "bf16"
    assert sum(losses[-5:]) < sum(losses[:5])


def test_validation_at_zero_every_n_and_the_end(tiny_run, told):
    section = {"every": 2, "sample_steps": 1, "prompts": ["one"]}
    run_training(tiny_run(validation=section), sinks=[told])
    assert [e.step for e in told.of(Validated)] == [0, 2, 3]


@pytest.fixture
def sampling(monkeypatch):
    """Sampling fails at these calls, of which the first is that of step 0."""

    def fails(failure, *at):
        calls, sample = itertools.count(), validate.sample

        def failing(*given):
            if next(calls) in at:
                raise failure
            return sample(*given)

        monkeypatch.setattr(validate, "sample", failing)

    return fails


ONE_SAMPLE = {"every": 1, "sample_steps": 1, "prompts": ["one"]}
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_samples_that_find_no_room_cost_no_training(tiny_run, told, sampling):
    sampling(FULL, 1, 3)
    ended = run_training(tiny_run(validation=ONE_SAMPLE), sinks=[told])
    assert ended.status == "done"
    assert [e.step for e in told.of(Validated)] == [0, 2]
    texts = [event.text for event in told.of(Notice) if event.fallback]
    assert [text.partition(" Lower ")[0] for text in texts] == [
        f"{FULL} There are no samples of step {step}; training goes on." for step in (1, 3)
    ]


def test_samples_that_find_no_room_get_that_of_added_slots(tiny_run, told, sampling, monkeypatch):
    sampling(FULL, 1)
    monkeypatch.setattr(Settled, "give_back", lambda *_: True)
    plan = {"device_memory": "1GB", "compile": "never"}
    run_training(tiny_run(validation=ONE_SAMPLE, adapter={"rank": 4}, plan=plan), sinks=[told])
    assert [e.step for e in told.of(Validated)] == [0, 1, 2, 3]


def test_whatever_comes_of_samples_the_step_is_saved_and_they_are_made_later(
    tiny_run, told, sampling, tmp_path
):
    run = tiny_run(validation=ONE_SAMPLE | {"every": 2}, train={"checkpoint_every": 2})
    sampling(RuntimeError("no such kernel"), 1, 3)
    for at in (2, 3):
        with pytest.raises(RuntimeError, match="no such kernel"):
            run_training(run, sinks=[told])
        assert told.of(CheckpointSaved)[-1].step == at
        assert not (tmp_path / f"run/validation/step-00000{at}.png").exists()
    run_training(run, sinks=[told])
    assert [e.step for e in told.of(StepDone)] == [1, 2, 3], "none was lost"
    assert [e.step for e in told.of(Validated)] == [0, 2, 3]
    told.events.clear()
    run_training(run, sinks=[told])
    assert told.of(Validated) == [], "once is enough"


def test_who_asks_to_stop_waits_for_no_samples(tiny_run, told, tmp_path, monkeypatch):
    run = tiny_run(validation=ONE_SAMPLE)
    handle = told.handle

    def stop_at_once(event):
        handle(event)
        if isinstance(event, RunStarted):
            (tmp_path / "run/now/stop").touch()

    monkeypatch.setattr(told, "handle", stop_at_once)
    with pytest.raises(InterruptedRunError):
        run_training(run, sinks=[told])
    assert [e.step for e in told.of(Validated)] == [0]
    monkeypatch.setattr(told, "handle", handle)
    run_training(run, sinks=[told])
    assert [e.step for e in told.of(Validated)] == [0, 1, 2, 3]


def test_checkpoints_every_n_steps_and_at_the_end(tiny_run, told, tmp_path):
    train = {"checkpoint_every": 2, "max_train_steps": 5, "keep_checkpoints": 2}
    run_training(tiny_run(train=train), sinks=[told])
    assert [e.step for e in told.of(CheckpointSaved)] == [2, 4, 5]
    kept = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005"]


def test_checkpoints_by_time(tiny_run, told):
    run_training(tiny_run(train={"checkpoint_minutes": 1e-9}), sinks=[told])
    assert [e.step for e in told.of(CheckpointSaved)] == [1, 2, 3]


def test_the_ramp_changes_between_steps_and_is_told(tiny_run, told):
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 12,
        "batch_rampup_steps": 4,
        "rampup_shape": "linear",
    }
    run_training(tiny_run(train={"max_train_steps": 4}, gh200_optimizations=ramp), sinks=[told])
    assert [e.accumulation for e in told.of(StepDone)] == [1, 2, 3, 3]
    assert [e.samples for e in told.of(StepDone)] == [4, 8, 12, 12]
    assert [(e.step, e.accumulation) for e in told.of(RampChanged)] == [(1, 2), (2, 3)]


def test_a_loss_that_explodes_fails_the_run_and_keeps_what_was_good(tiny_run, told, tmp_path):
    train = {"max_train_steps": 50, "checkpoint_every": 1, "max_grad_norm": 0}
    with pytest.raises(RunFailedError, match="the gradient's norm is"):
        run_training(tiny_run(train=train, optimizer={"lr": 1e30}), sinks=[told])
    assert told.of(RunEnded)[0].status == "failed"
    for path in checkpoint.complete_checkpoints(tmp_path / "run/checkpoints"):
        checkpoint.load_snapshot(path)


def test_a_users_copy_of_a_checkpoint_is_left_alone(tiny_run, told, tmp_path):
    train = {"checkpoint_every": 1, "max_train_steps": 2, "keep_checkpoints": 1}
    run_training(tiny_run(train=train))
    checkpoints = tmp_path / "run/checkpoints"
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000002.bak")
    run_training(tiny_run(train=train | {"max_train_steps": 3}), sinks=[told])
    assert told.of(RunStarted)[0].start_step == 2
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000002.bak", "step-000003"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tiny_run, told, tmp_path):
    run = tiny_run(train={"checkpoint_every": 1, "max_train_steps": 2})
    run_training(run)
    for file in (tmp_path / "run/checkpoints").glob("*/weights.safetensors"):
        file.write_bytes(b"x")
    result = (tmp_path / "run/model/transformer/config.json").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"step-000001.*No other checkpoint.*can be read"):
        run_training(run, sinks=[told])
    assert (tmp_path / "run/model/transformer/config.json").stat().st_mtime_ns == result
    assert told.events == []


@pytest.mark.parametrize("adapter", [None, {"rank": 2}])
def test_a_new_run_replaces_nobodys_folder(tiny_run, tmp_path, adapter):
    theirs = tmp_path / "run" / ("model" if adapter is None else "adapter") / "precious.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(ConfigError, match=r"it is another's; the result would replace it"):
        run_training(tiny_run(adapter=adapter))
    assert theirs.read_text() == "mine"


def test_a_run_file_in_the_runs_folder_stays_as_it_was_written(tiny_run, told, tmp_path):
    theirs = tmp_path / "run/run.json"
    theirs.parent.mkdir()
    theirs.write_text("// by hand\n{}")
    run_training(tiny_run(), sinks=[told])
    assert theirs.read_text() == "// by hand\n{}"
    assert any("run.json is not as a run writes it, and stays" in text for text in told.texts())
    written = (tmp_path / "run/run.resolved.json").read_text()
    assert RunFile.model_validate_json(written) == tiny_run()


@pytest.mark.parametrize(
    ("switch", "name"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_engines_that_are_none_of_ours_are_refused_by_name(tiny_run, monkeypatch, switch, name):
    monkeypatch.setenv(switch, "true")
    with pytest.raises(ConfigError, match=f"Accelerate was set up for {name}; .*accelerate launch"):
        run_training(tiny_run())


def test_a_run_does_not_write_among_its_samples(tiny_run, shapes_folder):
    inside = tiny_run(output_dir=str(shapes_folder / "deeper/run"))
    with pytest.raises(ConfigError, match=r"lies in datasets\.0\.instance_data_dir"):
        run_training(inside)
    assert not (shapes_folder / "deeper").exists()


def test_a_damaged_checkpoint_is_passed_over_and_named(tiny_run, told, tmp_path):
    run_training(tiny_run(train={"checkpoint_every": 1, "max_train_steps": 2}))
    file = tmp_path / "run/checkpoints/step-000002/weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    run_training(tiny_run(train={"checkpoint_every": 1, "max_train_steps": 3}), sinks=[told])
    assert told.of(RunStarted)[0].start_step == 1
    assert any("step-000002" in n.text and n.fallback for n in told.of(Notice))


def test_a_folder_in_use_is_refused_and_the_other_run_is_left_alone(tiny_run, tmp_path):
    requests = RunControl(tmp_path / "run")
    requests.open(1)  # the first process, which lives as long as the machine
    with pytest.raises(ConfigError, match="in use by process 1"):
        run_training(tiny_run())
    assert not (tmp_path / "run/events.jsonl").exists()
    assert json.loads((tmp_path / "run/now/listening.json").read_text())["pid"] == 1


def test_fewer_steps_than_are_done_are_refused_with_both_numbers(tiny_run):
    run_training(tiny_run())
    with pytest.raises(CheckpointError, match="max_train_steps is 2, but the run has done 3"):
        run_training(tiny_run(train={"max_train_steps": 2}))


def test_a_refused_resume_leaves_the_run_folder_as_it_was(tiny_run, tmp_path, shapes_folder):
    run_training(tiny_run())
    before = (tmp_path / "run/run.json").read_text()
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    other = dataset | {"instance_data_dir": f"{shapes_folder}-other", "shapes": {"seed": 9}}
    with pytest.raises(CheckpointError, match="the training samples and captions"):
        run_training(tiny_run(datasets=[other], train={"max_train_steps": 9}))
    assert (tmp_path / "run/run.json").read_text() == before


def test_an_error_of_ours_is_in_the_log_too(tiny_run, told, tmp_path, monkeypatch):
    monkeypatch.setattr("gracetune.train.run.train_loop", lambda session, progress: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_training(tiny_run(), sinks=[told])
    assert (told.of(RunEnded)[0].status, told.of(RunEnded)[0].message) == (
        "failed",
        "division by zero",
    )
    assert not (tmp_path / "run/now/listening.json").exists()


def test_resuming_before_newer_checkpoints_sets_them_aside_unless_it_is_refused(
    tiny_run, told, tmp_path
):
    train = {"checkpoint_every": 1, "max_train_steps": 3, "keep_checkpoints": 9}
    run_training(tiny_run(train=train))
    folder = tmp_path / "run/checkpoints"
    early = str(folder / "step-000001")
    with pytest.raises(CheckpointError, match=r"train\.batch_size"):
        run_training(tiny_run(train=train | {"batch_size": 2}), resume_from=early)
    assert not (folder / "set-aside").exists()

    run_training(tiny_run(train=train | {"max_train_steps": 2}), resume_from=early, sinks=[told])
    assert told.of(RunStarted)[0].start_step == 1
    kept = list((folder / "set-aside").iterdir())
    assert len(kept) == 2
    assert all(any(str(path) in text for text in told.texts()) for path in kept)
    assert [p.name for p in checkpoint.complete_checkpoints(folder)] == ["step-000001", "step-000002"]


def test_a_file_in_the_way_of_the_pictures_is_named(tiny_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/validation").write_text("")
    section = {"every": 1, "sample_steps": 1, "prompts": ["one"]}
    with pytest.raises(CheckpointError, match=r"step-000000\.png cannot be written"):
        run_training(tiny_run(validation=section))


def test_a_full_disk_costs_the_pictures_and_no_step(tiny_run, told, tmp_path, monkeypatch):
    write, calls = media.write_sample, itertools.count()

    def writing(*arguments):
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(media, "write", writing)
    train = {"max_train_steps": 6, "checkpoint_every": 0}
    section = {"every": 2, "sample_steps": 1, "prompts": ["one"]}
    run_training(tiny_run(train=train, validation=section), sinks=[told])
    (text,) = [text for text in told.texts() if "No space left" in text]
    assert "step-000002.png" in text
    assert text.endswith("Training goes on.")
    assert [event.step for event in told.of(Validated)] == [0, 4, 6]
    assert [p.name for p in checkpoint.complete_checkpoints(tmp_path / "run/checkpoints")] == ["step-000006"]


def test_the_launchers_accumulation_does_not_weigh_gradients(tiny_run, told, monkeypatch, tmp_path):
    norms = []
    for said in ("1", "4"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", said)
        run_training(tiny_run(output_dir=str(tmp_path / said)), sinks=[told])
        norms.append([event.grad_norm for event in told.of(StepDone)])
        told.events.clear()
    assert norms[0] == norms[1]


def test_videos_of_a_family_of_pictures_are_refused_at_once(tiny_run):
    section = {"every": 1, "frames": 9, "prompts": ["one"]}
    with pytest.raises(ConfigError, match=r"validation\.frames is 9; tiny makes no videos"):
        run_training(tiny_run(validation=section))


def test_pictures_only_when_asked(tiny_run, told):
    section = {"every": 0, "enable_manual_validation": True, "prompts": ["one"]}
    run_training(tiny_run(validation=section), sinks=[told])
    assert told.of(Validated) == []


def test_an_adapter_of_another_shape_is_refused(tiny_run):
    run_training(tiny_run(adapter={"rank": 4}))
    with pytest.raises(CheckpointError, match=r"adapter\.rank was 4, is 8"):
        run_training(tiny_run(adapter={"rank": 8}))


@pytest.mark.parametrize(
    ("asked", "used"), [("auto", "no"), ("no", "no"), ("bf16", "bf16"), ("fp16", "bf16")]
)
def test_precision_on_a_cpu(asked, used):
    run = RunFile.model_validate({"train": {"mixed_precision": asked}})
    assert resolve_precision(run) == used


def test_use_gh200_trainer_false_leaves_the_optimizations_out_and_says_so(tiny_run, told):
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 8}
    run = tiny_run(use_gh200_trainer=False, gh200_optimizations=ramp)
    run_training(run, sinks=[told])
    assert {e.accumulation for e in told.of(StepDone)} == {1}
    assert any("use_gh200_trainer is false" in text for text in told.texts())
