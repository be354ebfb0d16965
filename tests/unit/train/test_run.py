import errno
import gc
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate import DistributedType
from fork_process import run_python

from gracetune.config.schema import RunFile
from gracetune.data.pipeline import DataPipeline
from gracetune.errors import CheckpointError, ConfigError, InterruptedRunError, RunFailedError
from gracetune.events.run_control import STOP_SIGNALS, RunControl, reserve_folder
from gracetune.events.types import (
    CheckpointSaved,
    MemoryUsed,
    Notice,
    RampChanged,
    RunEnded,
    RunStarted,
    StartTimed,
    StepDone,
    Validated,
)
from gracetune.memory.oversubscription import GcFreeze
from gracetune.models.family import load_family
from gracetune.plan.controller import PlanController
from gracetune.train import checkpoint, validate
from gracetune.train.accelerator import resolve_precision, start_accelerator
from gracetune.train.loop import GC_FREEZE_STEPS
from gracetune.train.preflight import check_before_torch
from gracetune.train.run import (
    SignalHandler,
    TerminalSink,
    naming_lost_ranks,
    run_training,
)


def test_full_training_exports_a_model_that_can_be_loaded(tiny_run, recorder, tmp_path):
    ended = run_training(tiny_run(), sinks=[recorder])
    assert ended.status == "done"
    started = recorder.of(RunStarted)[0]
    assert (started.start_step, started.num_samples) == (0, 64)
    assert [e.step for e in recorder.of(StepDone)] == [1, 2, 3]
    assert recorder.of(RunEnded) == [ended]

    section = RunFile.model_validate({"model": {"path": ended.outputs["result"]}}).model
    averages = checkpoint.load_snapshot(tmp_path / "run/checkpoints/step-000003").tensors["ema"]
    weights = dict(load_family(section).transformer.named_parameters())
    assert all(torch.equal(weights[name], averages[name]) for name in averages)


def test_the_resolved_run_file_is_written_to_the_output_folder(tiny_run, tmp_path):
    run = tiny_run()
    run_training(run)
    assert RunFile.model_validate_json((tmp_path / "run/run.json").read_text()) == run


def test_training_lowers_the_loss(tiny_run, recorder):
    run_training(tiny_run(train={"max_train_steps": 60, "batch_size": 8}), sinks=[recorder])
    losses = [event.loss for event in recorder.of(StepDone)]
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_the_first_step_is_logged_at_once_and_later_ones_together(tiny_run, recorder):
    run_training(tiny_run(logging={"every": 10}, train={"max_train_steps": 4}), sinks=[recorder])
    logged = [e.step for e in recorder.events if isinstance(e, StepDone | MemoryUsed)]
    assert logged == [1, 1, 2, 3, 4, 4], "the use of memory is logged after the steps"


def test_long_lived_objects_are_frozen_while_a_run_trains(tiny_run, recorder, monkeypatch):
    frozen = {}

    def handle(event):
        if isinstance(event, StepDone):
            frozen[event.step] = gc.get_freeze_count() > GcFreeze.FROZEN_BY_PYTHON

    monkeypatch.setattr(recorder, "handle", handle)
    run_training(tiny_run(train={"max_train_steps": GC_FREEZE_STEPS + 1}), sinks=[recorder])
    assert [step for step, is_frozen in frozen.items() if is_frozen] == [GC_FREEZE_STEPS + 1]
    assert gc.get_freeze_count() <= GcFreeze.FROZEN_BY_PYTHON


def test_the_phases_of_the_start_are_timed(tiny_run, recorder):
    run = tiny_run(adapter={"rank": 2}, plan={"device_memory": "1GB", "compile": "never"})
    run_training(run, sinks=[recorder])
    (timed,) = recorder.of(StartTimed)
    phases = "imports loading hashing model encoding measuring tracing searching placing other"
    assert timed.seconds.keys() == {*phases.split(), "attention"}
    assert timed.total == pytest.approx(sum(timed.seconds.values()))
    assert recorder.events.index(timed) < recorder.events.index(recorder.of(RunStarted)[0])


def test_bf16_training_lowers_the_loss(tiny_run, recorder):
    run_training(
        tiny_run(train={"max_train_steps": 30, "mixed_precision": "bf16"}), sinks=[recorder]
    )
    losses = [event.loss for event in recorder.of(StepDone)]
    assert recorder.of(RunStarted)[0].precision == "bf16"
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_run_validates_at_step_0_every_n_steps_and_at_the_end(tiny_run, recorder):
    section = {"every": 2, "sample_steps": 1, "prompts": ["one"]}
    run_training(tiny_run(validation=section), sinks=[recorder])
    assert [e.step for e in recorder.of(Validated)] == [0, 2, 3]


def test_the_validation_before_the_first_step_can_be_left_out(tiny_run, recorder):
    section = {"every": 2, "sample_steps": 1, "prompts": ["one"], "at_start": False}
    run_training(tiny_run(validation=section), sinks=[recorder])
    assert [e.step for e in recorder.of(Validated)] == [2, 3]


@pytest.fixture
def sampling(monkeypatch):
    """Let given calls of sampling fail; call 0 belongs to step 0."""

    def fails(failure, *at):
        calls, sample = itertools.count(), validate.generate_samples

        def failing(*given):
            if next(calls) in at:
                raise failure
            return sample(*given)

        monkeypatch.setattr(validate, "generate_samples", failing)

    return fails


ONE_SAMPLE = {"every": 1, "sample_steps": 1, "prompts": ["one"]}
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_training_continues_if_sampling_runs_out_of_memory(tiny_run, recorder, sampling):
    sampling(FULL, 1, 3)
    ended = run_training(tiny_run(validation=ONE_SAMPLE), sinks=[recorder])
    assert ended.status == "done"
    assert [e.step for e in recorder.of(Validated)] == [0, 2]
    texts = [event.text for event in recorder.of(Notice) if event.fallback]
    assert [text.partition(" Lower ")[0] for text in texts] == [
        f"no samples of step {step}: {FULL} Training continues." for step in (1, 3)
    ]


def test_sampling_is_repeated_after_shrinking_the_ring(tiny_run, recorder, sampling, monkeypatch):
    sampling(FULL, 1)
    monkeypatch.setattr(PlanController, "shrink_ring", lambda *_: True)
    plan = {"device_memory": "1GB", "compile": "never"}
    run_training(tiny_run(validation=ONE_SAMPLE, adapter={"rank": 4}, plan=plan), sinks=[recorder])
    assert [e.step for e in recorder.of(Validated)] == [0, 1, 2, 3]


def test_a_failed_validation_loses_no_step_and_is_repeated_on_resume(
    tiny_run, recorder, sampling, tmp_path
):
    run = tiny_run(validation=ONE_SAMPLE | {"every": 2}, train={"checkpoint_every": 2})
    sampling(RuntimeError("no such kernel"), 1, 3)
    for at in (2, 3):
        with pytest.raises(RuntimeError, match="no such kernel"):
            run_training(run, sinks=[recorder])
        assert recorder.of(CheckpointSaved)[-1].step == at
        assert not (tmp_path / f"run/validation/step-00000{at}.png").exists()
    run_training(run, sinks=[recorder])
    assert [e.step for e in recorder.of(StepDone)] == [1, 2, 3], "a step was lost or repeated"
    assert [e.step for e in recorder.of(Validated)] == [0, 2, 3]
    recorder.events.clear()
    run_training(run, sinks=[recorder])
    assert recorder.of(Validated) == [], "validated twice"


def test_a_stop_request_skips_the_scheduled_validation(tiny_run, recorder, tmp_path, monkeypatch):
    run = tiny_run(validation=ONE_SAMPLE)
    handle = recorder.handle

    def stop_at_once(event):
        handle(event)
        if isinstance(event, RunStarted):
            (tmp_path / "run/now/stop").touch()

    monkeypatch.setattr(recorder, "handle", stop_at_once)
    with pytest.raises(InterruptedRunError):
        run_training(run, sinks=[recorder])
    assert [e.step for e in recorder.of(Validated)] == [0]
    monkeypatch.setattr(recorder, "handle", handle)
    run_training(run, sinks=[recorder])
    assert [e.step for e in recorder.of(Validated)] == [0, 1, 2, 3]


def test_checkpoints_are_saved_every_n_steps_and_at_the_end(tiny_run, recorder, tmp_path):
    train = {"checkpoint_every": 2, "max_train_steps": 5, "keep_checkpoints": 2}
    run_training(tiny_run(train=train), sinks=[recorder])
    assert [e.step for e in recorder.of(CheckpointSaved)] == [2, 4, 5]
    kept = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-000004", "step-000005"]


def test_checkpoints_are_saved_every_n_minutes(tiny_run, recorder):
    run_training(tiny_run(train={"checkpoint_minutes": 1e-9}), sinks=[recorder])
    assert [e.step for e in recorder.of(CheckpointSaved)] == [1, 2, 3]


@pytest.mark.parametrize(
    "sections",
    [
        {"adapter": {"rank": 2}},
        {
            "optimizer": {"name": "schedule_free"},
            "validation": {"every": 1, "prompts": ["a star"], "sample_steps": 1, "width": 16},
        },
        {"optimizer": {"state": "host"}},
    ],
    ids=["adapter", "averages", "state in host memory"],
)
def test_a_background_checkpoint_has_the_bits_of_one_that_training_waits_for(
    tiny_run, tmp_path, sections
):
    """Steps, and validations with averaged weights, change the state while it is written."""
    written = []
    for in_background in (True, False):
        folder = tmp_path / f"background-{in_background}"
        train = {"checkpoint_every": 1, "max_train_steps": 3, "keep_checkpoints": 9}
        train |= {"async_checkpoints": in_background, "ema_decay": 0.0}
        run_training(tiny_run(output_dir=str(folder), **{"train": train} | sections))
        paths = checkpoint.complete_checkpoints(folder / "checkpoints")
        manifests = [json.loads((path / "manifest.json").read_text()) for path in paths]
        written.append([(each["progress"], each["files"], each["exported"]) for each in manifests])
    assert len(written[0]) == 3
    assert written[0] == written[1]
    assert bool(written[0][0][2]) == ("adapter" in sections)


def test_a_ramp_changes_between_steps_and_emits_events(tiny_run, recorder):
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 4,
        "target_effective_batch_size": 12,
        "batch_rampup_steps": 4,
        "rampup_shape": "linear",
    }
    run_training(tiny_run(train={"max_train_steps": 4}, gh200_optimizations=ramp), sinks=[recorder])
    assert [e.accumulation for e in recorder.of(StepDone)] == [1, 2, 3, 3]
    assert [e.samples for e in recorder.of(StepDone)] == [4, 8, 12, 12]
    assert [(e.step, e.accumulation) for e in recorder.of(RampChanged)] == [(1, 2), (2, 3)]


def test_a_ramp_below_one_micro_batch_starts_with_smaller_micro_batches(tiny_run, recorder):
    """The first guide's ramp, divided by 4: batches of 8, of which the first steps have 1, 2, 4."""
    ramp = {
        "enable_batch_size_rampup": True,
        "initial_effective_batch_size": 1,
        "target_effective_batch_size": 16,
        "batch_rampup_steps": 12,
    }
    train = {"max_train_steps": 12, "batch_size": 8}
    run_training(tiny_run(train=train, gh200_optimizations=ramp), sinks=[recorder])
    steps = recorder.of(StepDone)
    # Batches of 8 are cut into pieces of 1, 2, 2, 2, 1 (the rest) and 4, 4 and so on.
    assert [e.samples for e in steps] == [1, 2, 2, 2, 1, 4, 4, 8, 8, 16, 16, 16]
    assert [e.accumulation for e in steps] == [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    changes = [(e.step, e.accumulation, e.batch_size) for e in recorder.of(RampChanged)]
    assert changes == [(1, 1, 2), (4, 1, 4), (6, 1, 8), (9, 2, 8)]


def test_a_diverging_loss_fails_the_run_and_keeps_intact_checkpoints(tiny_run, recorder, tmp_path):
    train = {"max_train_steps": 50, "checkpoint_every": 1, "max_grad_norm": 0}
    with pytest.raises(RunFailedError, match="the gradient norm is"):
        run_training(tiny_run(train=train, optimizer={"lr": 1e30}), sinks=[recorder])
    assert recorder.of(RunEnded)[0].status == "failed"
    for path in checkpoint.complete_checkpoints(tmp_path / "run/checkpoints"):
        checkpoint.load_snapshot(path)


def test_a_users_copy_of_a_checkpoint_is_not_deleted(tiny_run, recorder, tmp_path):
    train = {"checkpoint_every": 1, "max_train_steps": 2, "keep_checkpoints": 1}
    run_training(tiny_run(train=train))
    checkpoints = tmp_path / "run/checkpoints"
    shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000002.bak")
    run_training(tiny_run(train=train | {"max_train_steps": 3}), sinks=[recorder])
    assert recorder.of(RunStarted)[0].start_step == 2
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-000002.bak", "step-000003"]


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tiny_run, recorder, tmp_path):
    run = tiny_run(train={"checkpoint_every": 1, "max_train_steps": 2})
    run_training(run)
    for file in (tmp_path / "run/checkpoints").glob("*/weights.safetensors"):
        file.write_bytes(b"x")
    result = (tmp_path / "run/model/transformer/config.json").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"step-000001.*No other checkpoint.*can be read"):
        run_training(run, sinks=[recorder])
    assert (tmp_path / "run/model/transformer/config.json").stat().st_mtime_ns == result
    assert recorder.events == []


@pytest.mark.parametrize("adapter", [None, {"rank": 2}])
def test_a_new_run_does_not_replace_the_result_of_another(tiny_run, tmp_path, adapter):
    theirs = tmp_path / "run" / ("model" if adapter is None else "adapter") / "precious.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(ConfigError, match=r"would replace the result of another one"):
        run_training(tiny_run(adapter=adapter))
    assert theirs.read_text() == "mine"


def test_a_handwritten_run_file_in_the_output_folder_is_kept(tiny_run, recorder, tmp_path):
    theirs = tmp_path / "run/run.json"
    theirs.parent.mkdir()
    theirs.write_text("// by hand\n{}")
    run_training(tiny_run(), sinks=[recorder])
    assert theirs.read_text() == "// by hand\n{}"
    assert any("run.json was not written by a run and is kept" in text for text in recorder.texts())
    written = (tmp_path / "run/run.resolved.json").read_text()
    assert RunFile.model_validate_json(written) == tiny_run()


def test_credentials_are_written_nowhere_and_can_be_rotated(tiny_run, recorder, tmp_path):
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)

    def with_key(secret, steps):
        options = {"key": secret, "client_kwargs": {"aws_secret_access_key": f"{secret}-2"}}
        return tiny_run(
            datasets=[dataset | {"remote": {"options": options, "retries": steps}}],
            train={"max_train_steps": steps, "checkpoint_every": 1},
        )

    run_training(with_key("hunter2", 1))
    record = tmp_path / "run/run.json"
    assert "***" in record.read_text()
    record.write_text(record.read_text().replace("***", "hunter2"))  # as earlier versions wrote it
    run_training(with_key("hunter3", 2), notices=["see ftp://me:hunter4@host"], sinks=[recorder])
    assert recorder.of(RunStarted)[0].start_step == 1
    with pytest.raises(CheckpointError, match=r"datasets\[0\]\.repeats") as caught:
        run_training(
            tiny_run(datasets=[dataset | {"repeats": 2, "remote": {"options": {"a": "hunter5"}}}])
        )
    assert "hunter" not in str(caught.value)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert b"hunter" not in path.read_bytes(), path
    assert "hunter" not in str(recorder.events)
    assert not (tmp_path / "run/run.resolved.json").exists()


@pytest.mark.parametrize(
    ("switch", "name"),
    [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM")],
)
def test_unsupported_engines_are_rejected_with_their_successor(tiny_run, monkeypatch, switch, name):
    monkeypatch.setenv(switch, "true")
    with pytest.raises(
        ConfigError, match=rf"configured for {name} \({switch}=true\).*strategy: fsdp2.*FSDP"
    ):
        check_before_torch(tiny_run(), "auto")


def test_accelerate_does_not_shard_the_model_itself(tiny_run, monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    accelerator = start_accelerator(tiny_run())
    assert accelerator.distributed_type == DistributedType.NO
    assert accelerator.parallelism_config is None
    assert not [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_"))]


def test_an_output_folder_inside_a_dataset_is_rejected(tiny_run, shapes_folder):
    inside = tiny_run(output_dir=str(shapes_folder / "deeper/run"))
    with pytest.raises(ConfigError, match=r"inside datasets\.0\.instance_data_dir"):
        run_training(inside)
    assert not (shapes_folder / "deeper").exists()


def test_a_damaged_checkpoint_is_skipped_and_reported(tiny_run, recorder, tmp_path):
    run_training(tiny_run(train={"checkpoint_every": 1, "max_train_steps": 2}))
    file = tmp_path / "run/checkpoints/step-000002/weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    run_training(tiny_run(train={"checkpoint_every": 1, "max_train_steps": 3}), sinks=[recorder])
    assert recorder.of(RunStarted)[0].start_step == 1
    assert any("step-000002" in n.text and n.fallback for n in recorder.of(Notice))


@pytest.mark.parametrize("damage", ["progress", "removed while the data are prepared"])
def test_a_damaged_checkpoint_does_not_change_the_weights(
    tiny_run, recorder, finished_run, tmp_path, monkeypatch, damage
):
    run_training(tiny_run(train={"checkpoint_every": 1, "max_train_steps": 2}))
    folder = tmp_path / "run/checkpoints/step-000002"
    if damage == "progress":
        manifest = folder / "manifest.json"
        text = manifest.read_text()
        manifest.write_text(text.replace('"consumed": 2', '"consumed": 3'))
        assert manifest.read_text() != text
    else:
        prepare = DataPipeline.__init__

        def damage_then_prepare(*args, **kwargs):
            monkeypatch.undo()
            (folder / "weights.safetensors").unlink()
            prepare(*args, **kwargs)

        monkeypatch.setattr(DataPipeline, "__init__", damage_then_prepare)
        with pytest.raises(CheckpointError, match=r"weights\.safetensors .*Run the same command"):
            run_training(tiny_run())
    run_training(tiny_run(), sinks=[recorder])
    (warning,) = (n for n in recorder.of(Notice) if "step-000002 is damaged" in n.text)
    assert warning.text.endswith("Resuming from step-000001 instead.")
    assert (warning.level, warning.fallback) == ("warning", True)
    expected, found = (
        checkpoint.load_snapshot(Path(folder, "checkpoints/step-000003")).tensors["weights"]
        for folder in (finished_run.output_dir, tmp_path / "run")
    )
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name


def test_a_folder_in_use_by_another_run_is_rejected(tiny_run, tmp_path):
    control = RunControl(tmp_path / "run")
    control.open(1)  # process 1 is always alive
    with pytest.raises(ConfigError, match="in use by process 1"):
        run_training(tiny_run())
    assert not (tmp_path / "run/events.jsonl").exists()
    assert json.loads((tmp_path / "run/now/listening.json").read_text())["pid"] == 1


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_folder_that_another_process_has_reserved_is_rejected(tiny_run, tmp_path, resume):
    (tmp_path / "run").mkdir()
    with (
        reserve_folder(tmp_path / "run", pytest.fail),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "),
    ):
        run_training(tiny_run(), resume_from=resume)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_fewer_steps_than_done_are_rejected_with_both_numbers(tiny_run):
    run_training(tiny_run())
    with pytest.raises(
        CheckpointError, match="max_train_steps is 2, but the run has already done 3"
    ):
        run_training(tiny_run(train={"max_train_steps": 2}))


def test_a_rejected_resume_does_not_change_the_output_folder(tiny_run, tmp_path, shapes_folder):
    run_training(tiny_run())
    before = (tmp_path / "run/run.json").read_text()
    dataset = tiny_run().datasets[0].model_dump(mode="json", exclude_unset=True)
    other = dataset | {"instance_data_dir": f"{shapes_folder}-other", "shapes": {"seed": 9}}
    with pytest.raises(CheckpointError, match="the training samples and captions"):
        run_training(tiny_run(datasets=[other], train={"max_train_steps": 9}))
    assert (tmp_path / "run/run.json").read_text() == before


def test_an_internal_error_is_logged(tiny_run, recorder, tmp_path, monkeypatch):
    monkeypatch.setattr("gracetune.train.run.train_loop", lambda session, progress, observer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_training(tiny_run(), sinks=[recorder])
    assert (recorder.of(RunEnded)[0].status, recorder.of(RunEnded)[0].message) == (
        "failed",
        "division by zero",
    )
    assert not (tmp_path / "run/now/listening.json").exists()


def test_a_checkpoint_of_an_earlier_version_is_resumed(tiny_run, recorder, tmp_path):
    """It has no checksum, lacks a setting, and has one that was removed and one not compared."""
    run_training(tiny_run(train={"max_train_steps": 2}))
    file = tmp_path / "run/checkpoints/step-000002/manifest.json"
    manifest = json.loads(file.read_text())
    identity = manifest["identity"]
    del identity["identity version"], identity["train.min_snr_in_flow"]
    identity |= {"train.obsolete": 7, "datasets[0].remote.retries": 9}
    kept = {key: manifest[key] for key in ("progress", "identity", "files")}
    file.write_text(json.dumps({"format": 1, **kept}))
    run_training(tiny_run(), resume_from="latest", sinks=[recorder])  # the same as auto
    assert recorder.of(RunStarted)[0].start_step == 2
    (warning,) = (n for n in recorder.of(Notice) if n.level == "warning")
    assert "no longer has, and ignores: train.obsolete." in warning.text
    assert warning.fallback


def test_resuming_from_an_old_checkpoint_sets_newer_ones_aside(tiny_run, recorder, tmp_path):
    train = {"checkpoint_every": 1, "max_train_steps": 3, "keep_checkpoints": 9}
    run_training(tiny_run(train=train))
    folder = tmp_path / "run/checkpoints"
    early = str(folder / "step-000001")
    with pytest.raises(CheckpointError, match=r"train\.batch_size"):
        run_training(tiny_run(train=train | {"batch_size": 2}), resume_from=early)
    assert not (folder / "set-aside").exists()

    run_training(
        tiny_run(train=train | {"max_train_steps": 2}), resume_from=early, sinks=[recorder]
    )
    assert recorder.of(RunStarted)[0].start_step == 1
    kept = list((folder / "set-aside").iterdir())
    assert len(kept) == 2
    assert all(any(str(path) in text for text in recorder.texts()) for path in kept)
    assert [p.name for p in checkpoint.complete_checkpoints(folder)] == [
        "step-000001",
        "step-000002",
    ]


def test_a_file_in_place_of_the_validation_folder_is_named(tiny_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/validation").write_text("")
    section = {"every": 1, "sample_steps": 1, "prompts": ["one"]}
    with pytest.raises(CheckpointError, match=r"step-000000\.png cannot be written"):
        run_training(tiny_run(validation=section))


def test_a_full_disk_loses_the_samples_but_no_step(tiny_run, recorder, tmp_path, monkeypatch):
    write, calls = validate.write_sample, itertools.count()

    def writing(*arguments):
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(validate, "write_sample", writing)
    train = {"max_train_steps": 6, "checkpoint_every": 0}
    section = {"every": 2, "sample_steps": 1, "prompts": ["one"]}
    run_training(tiny_run(train=train, validation=section), sinks=[recorder])
    (text,) = [text for text in recorder.texts() if "No space left" in text]
    assert "step-000002.png" in text
    assert text.endswith("Training continues.")
    assert [event.step for event in recorder.of(Validated)] == [0, 4, 6]
    assert [p.name for p in checkpoint.complete_checkpoints(tmp_path / "run/checkpoints")] == [
        "step-000006"
    ]


def test_accumulation_in_the_environment_does_not_scale_gradients(
    tiny_run, recorder, monkeypatch, tmp_path
):
    norms = []
    for accumulation in ("1", "4"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", accumulation)
        run_training(tiny_run(output_dir=str(tmp_path / accumulation)), sinks=[recorder])
        norms.append([event.grad_norm for event in recorder.of(StepDone)])
        recorder.events.clear()
    assert norms[0] == norms[1]


def test_video_samples_of_an_image_model_are_rejected(tiny_run):
    section = {"every": 1, "frames": 9, "prompts": ["one"]}
    with pytest.raises(ConfigError, match=r"validation\.frames is 9, but tiny generates no videos"):
        run_training(tiny_run(validation=section))


def test_manual_validation_generates_no_samples_by_itself(tiny_run, recorder):
    section = {"every": 0, "enable_manual_validation": True, "prompts": ["one"]}
    run_training(tiny_run(validation=section), sinks=[recorder])
    assert recorder.of(Validated) == []


def test_resuming_with_another_adapter_rank_is_rejected(tiny_run):
    run_training(tiny_run(adapter={"rank": 4}))
    with pytest.raises(CheckpointError, match=r"adapter\.rank was 4 and is now 8"):
        run_training(tiny_run(adapter={"rank": 8}))


@pytest.mark.parametrize(
    ("setting", "used"), [("auto", "no"), ("no", "no"), ("bf16", "bf16"), ("fp16", "bf16")]
)
def test_mixed_precision_is_resolved_on_a_cpu(setting, used):
    run = RunFile.model_validate({"train": {"mixed_precision": setting}})
    assert resolve_precision(run) == used


def test_use_gh200_trainer_false_disables_the_optimizations(tiny_run, recorder):
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 8}
    run = tiny_run(use_gh200_trainer=False, gh200_optimizations=ramp)
    run_training(run, sinks=[recorder])
    assert {e.accumulation for e in recorder.of(StepDone)} == {1}
    assert any("use_gh200_trainer is false" in text for text in recorder.texts())


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_while_training_is_only_noted(number, capsys):
    before = signal.getsignal(number)
    with SignalHandler() as signals, signals.deferred():
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    assert signal.getsignal(number) is before
    assert "finishing the step" in capsys.readouterr().err


def test_slurm_and_terminals_may_end_a_run():
    assert {*STOP_SIGNALS} == {
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    }


def handle_signals(*numbers: signal.Signals):
    """Send signals to a process that is saving a checkpoint."""
    script = (
        "import os, signal\n"
        "from gracetune.train.run import SignalHandler\n"
        "with SignalHandler() as signals:\n"
        "    with signals.deferred():\n"
        f"        for number in {[int(each) for each in numbers]}:\n"
        "            os.kill(os.getpid(), number)\n"
        "    print('saved after', signals.received)\n"
    )
    return run_python("-c", script)


def test_a_second_ctrl_c_ends_the_process_at_once():
    done = handle_signals(signal.SIGINT, signal.SIGINT)
    assert done.returncode == 130
    assert "saved" not in done.stdout
    assert "Press Ctrl-C again to quit at once" in done.stderr


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGTERM),
        *(
            pytest.param(numbers, marks=pytest.mark.slow)
            for numbers in (
                (signal.SIGTERM, signal.SIGTERM),
                (signal.SIGTERM, signal.SIGINT),
                (signal.SIGUSR1, signal.SIGTERM),
                (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM),
                (signal.SIGUSR2, signal.SIGUSR1),
            )
        ),
    ],
)
def test_signals_that_a_launcher_repeats_do_not_abort_the_save(numbers):
    done = handle_signals(*numbers)
    assert (done.returncode, done.stdout) == (0, f"saved after {numbers[0].name}\n"), done.stderr
    assert done.stderr.count("finishing the step") == 1


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_before_the_first_step_raises_keyboard_interrupt(number):
    with pytest.raises(KeyboardInterrupt, match=number.name), SignalHandler():
        os.kill(os.getpid(), number)
        signal.pause()


def test_a_repeated_signal_does_not_disturb_the_clean_up():
    with pytest.raises(KeyboardInterrupt), SignalHandler():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_after_the_run_was_saved_does_nothing():
    with SignalHandler() as signals:
        with signals.deferred():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """`nohup` ignores SIGHUP; a shell ignores SIGINT for its background jobs."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with SignalHandler() as signals, signals.deferred():
            os.kill(os.getpid(), number)
            assert signals.received is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


class ClosedTerminal:
    """A sink whose terminal is gone."""

    def handle(self, event):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    close = handle


def test_a_closed_terminal_does_not_keep_a_stopping_run_from_saving():
    signals = SignalHandler()
    sink = TerminalSink(ClosedTerminal(), signals)
    with pytest.raises(OSError, match="Input/output error"):
        sink.handle(Notice("hello"))
    signals.received = "SIGHUP"
    sink.handle(Notice("hello"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
            "[10.0.0.7]:4711"
        ),
        RuntimeError("NCCL communicator was aborted on rank 0."),
        torch.distributed.DistBackendError("NCCL error: remote process exited"),
        torch.distributed.DistStoreError("wait timeout after 1800000ms, keys: /default_pg/0//1"),
        torch.distributed.DistNetworkError("Connection reset by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_a_lost_rank_is_named(tiny_run, monkeypatch, error):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    lost = pytest.raises(RunFailedError, match="contact to another rank")
    with lost as caught, naming_lost_ranks(tiny_run()):
        raise error
    message = str(caught.value)
    assert str(error) in message
    assert "starts over: there is no checkpoint" in message
    assert ("at 10.0.0.7" in message) == ("10.0.0.7" in str(error))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.OutOfMemoryError("nccl: CUDA out of memory"),
        ValueError("nccl"),
    ],
)
def test_other_errors_are_not_taken_for_a_lost_rank(tiny_run, monkeypatch, error):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(type(error)) as caught, naming_lost_ranks(tiny_run()):
        raise error
    assert caught.value is error
