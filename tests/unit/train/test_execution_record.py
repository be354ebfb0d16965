"""A resumed run uses the plan of its checkpoint again, and reports what it cannot use."""

import json
import re
import shutil

import pytest
import torch

from gracetune.events.types import Notice, RunStarted, StepDone
from gracetune.plan.attention_autotune import _is_installed
from gracetune.train import execution_record as module
from gracetune.train.checkpoint import load_snapshot, manifest_checksum
from gracetune.train.execution_record import execution_changes
from gracetune.train.run import run_training

PLAN = {"device_memory": "63MB", "compile": "never"}
"""Less than the tiny model needs without streaming."""
EAGER = {"blocks": [{"weights": "resident", "activations": "keep"}], "compiled": False}
RECORD = {
    "device": "NVIDIA H200",
    "torch": "2.8.0",
    "diffusers": "0.35.1",
    "attention": "sdpa",
    "dropout": "positional",
    "plan": EAGER,
}


def compiled(activations):
    block = {"weights": "streamed", "activations": activations}
    return {"blocks": [block], "compiled": True}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"device": "NVIDIA GH200"}, "the device was NVIDIA H200 and is now NVIDIA GH200"),
        ({"torch": "2.9.0"}, "torch was 2.8.0 and is now 2.9.0"),
        ({"attention": "flash"}, "the attention backend was sdpa and is now flash"),
        ({"plan": compiled("keep")}, "blocks were eager with a plan and are now compiled"),
        ({"plan": None}, "blocks were eager with a plan and are now computed without a plan"),
    ],
)
def test_a_difference_that_may_round_differently_is_named(change, text):
    assert execution_changes(RECORD, RECORD | change) == [text]


def test_what_compiled_blocks_recompute_changes_their_rounding():
    saved = RECORD | {"plan": compiled("lean")}
    assert execution_changes(saved, RECORD | {"plan": compiled("offload")}) == []
    (text,) = execution_changes(saved, RECORD | {"plan": compiled("recompute")})
    assert "other activations are recomputed" in text


def test_the_placement_of_eager_blocks_changes_nothing():
    streamed = {"blocks": [{"weights": "streamed", "activations": "recompute"}], "compiled": False}
    assert execution_changes(RECORD, RECORD | {"plan": streamed}) == []


def test_a_checkpoint_of_an_earlier_version_has_nothing_to_compare():
    assert execution_changes({}, RECORD) == []


@pytest.fixture(scope="module")
def small_run(tiny_run_in):
    """Return a function of folder, plan and number of steps that returns a run file."""

    def build(folder, plan, steps):
        train = {"max_train_steps": steps, "batch_size": 2, "checkpoint_every": 2}
        return tiny_run_in(folder, adapter={"rank": 4, "dropout": 0.2}, train=train, plan=plan)

    return build


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, small_run):
    """Return a folder with a planned run of two steps, which streams weights."""
    folder = tmp_path_factory.mktemp("stopped")
    run_training(small_run(folder, PLAN, 2))
    return folder


@pytest.fixture
def resume(stopped, tmp_path, small_run, recorder):
    """Return a function that resumes a copy of the run with another plan for two more steps.

    `edit` changes the manifest of the checkpoint first. Returns the losses.
    """

    def train(plan, edit=None):
        shutil.copytree(stopped / "run", tmp_path / "run")
        manifest = tmp_path / "run/checkpoints/step-000002/manifest.json"
        if edit is not None:
            contents = json.loads(manifest.read_text())
            edit(contents)
            contents["checksum"] = manifest_checksum(contents)
            manifest.write_text(json.dumps(contents))
        run_training(small_run(tmp_path, plan, 4), sinks=[recorder])
        assert recorder.of(RunStarted)[0].start_step == 2
        return [event.loss for event in recorder.of(StepDone)]

    return train


def saved_plan(tmp_path, step):
    return load_snapshot(tmp_path / f"run/checkpoints/step-{step:06d}").execution["plan"]


def warnings(recorder):
    return [n.text for n in recorder.of(Notice) if n.fallback]


def test_the_plan_of_the_checkpoint_is_used_again(resume, tmp_path, recorder):
    """With more memory, a new plan would stream nothing."""
    resume(PLAN | {"device_memory": "1GB"})
    assert "plan: the plan of the checkpoint is used again" in recorder.texts()
    assert saved_plan(tmp_path, 4) == saved_plan(tmp_path, 2)
    assert any(block["weights"] == "streamed" for block in saved_plan(tmp_path, 4)["blocks"])
    assert warnings(recorder) == []


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ({"device_memory": "1GB", "stream": False}, "it streams weights"),
        ({"device_memory": "61MB"}, "it needs .* of device and"),
    ],
)
def test_a_plan_that_cannot_be_used_again_is_replaced_with_a_reason(resume, recorder, then, reason):
    resume(PLAN | then)
    (text,) = (t for t in recorder.texts() if "cannot be used again" in t)
    assert re.search(reason, text), text
    assert warnings(recorder) == [], "eager blocks round alike, wherever they are"


def test_without_a_plan_one_warning_names_all_differences(resume, recorder):
    """Dropout is the same with and without a plan, so the losses differ by rounding only."""
    found = resume("off", lambda manifest: manifest["execution"].update(torch="2.0.1"))
    (warning,) = warnings(recorder)
    assert warning == (
        "the result may differ in rounding from that of an uninterrupted run: torch was 2.0.1 and "
        f"is now {torch.__version__}; blocks were eager with a plan and are now computed without a "
        "plan"
    )
    assert len(found) == 2


def test_dropout_is_the_same_with_and_without_a_plan(stopped, tmp_path, small_run, recorder):
    torch.rand(7)  # masks do not depend on earlier draws
    run_training(small_run(tmp_path, "off", 2), sinks=[recorder])
    found, expected = (
        load_snapshot(folder / "run/checkpoints/step-000002").tensors["weights"]
        for folder in (tmp_path, stopped)
    )
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-6)


def test_a_checkpoint_of_an_earlier_version_keeps_its_dropout(resume, recorder, monkeypatch):
    """Its masks come from torch's global generator, whose state is in the checkpoint."""
    monkeypatch.setattr("gracetune.train.build.DropoutSeeds", pytest.fail)
    resume("off", lambda manifest: manifest.pop("execution"))
    assert warnings(recorder) == []


def test_a_run_of_an_earlier_version_keeps_whole_micro_batches(tiny_run, recorder, tmp_path):
    """Earlier versions rounded a ramp up to one micro-batch, and counted those."""
    ramp = {"enable_batch_size_rampup": True, "initial_effective_batch_size": 1}
    ramp |= {"target_effective_batch_size": 8, "batch_rampup_steps": 100}

    def train(steps):
        sections = {"gh200_optimizations": ramp, "train": {"max_train_steps": steps}}
        run_training(tiny_run(**sections), sinks=[recorder])
        return recorder.of(StepDone)[-1].samples

    assert train(1) == 1
    manifest = tmp_path / "run/checkpoints/step-000001/manifest.json"
    contents = json.loads(manifest.read_text())
    del contents["execution"]["batches"]
    contents["checksum"] = manifest_checksum(contents)
    manifest.write_text(json.dumps(contents))
    assert train(2) == 4
    assert train(3) == 4, "the run stays as it is"


def test_a_saved_attention_backend_that_is_not_installed_is_not_used():
    assert _is_installed("sdpa")
    assert not _is_installed("")
    assert not _is_installed("a_backend_of_another_version")


def test_cpu_names_distinguish_instruction_sets_and_threads(monkeypatch):
    name = module._device_name(torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert module._device_name(torch.device("cpu")) != name
