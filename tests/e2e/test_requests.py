"""Requests to a running run: taken once, between steps, with their arguments and an answer."""

import json

import pytest
from fork_process import run_ranks

from gracetune.errors import InterruptedRunError
from gracetune.events.run_control import send_request
from gracetune.events.types import CheckpointSaved, RequestTaken, StepDone, Validated
from gracetune.train.run import run_training


class Recorder:
    """A sink that keeps every event."""

    def __init__(self):
        self._events = []

    def handle(self, event):
        self._events.append(event)

    def close(self):
        pass

    def of(self, kind):
        return [event for event in self._events if isinstance(event, kind)]


class Sender:
    """A sink that sends requests when a step is done."""

    def __init__(self, folder, requests):
        self._folder, self._requests = folder, requests

    def handle(self, event):
        if isinstance(event, StepDone):
            for number, (verb, arguments) in enumerate(self._requests.pop(event.step, ())):
                name = f"{event.step}-{number}"
                send_request(self._folder, verb, arguments, "test", request_id=name)

    def close(self):
        pass


@pytest.fixture(scope="module")
def requested(tmp_path_factory, tiny_run_in):
    """Return the events of one run that gets requests of every kind, and its folder."""
    folder = tmp_path_factory.mktemp("requested")
    section = {"enable_manual_validation": True, "prompts": ["own"], "sample_steps": 1}
    steps = {"max_train_steps": 100}
    run = tiny_run_in(folder, adapter={"rank": 2}, train=steps, validation=section)
    prompts = ["a red circle", {"prompt": "a blue box", "seed": 9}]
    requests = {
        2: [("validate", {"prompts": prompts}), ("save", {}), ("validate", {"prompts": "one"})],
        3: [
            ("validate", {"prompts": [{"prompt": "x", "width": 7}]}),
            ("validate", {"prompts": [3]}),
            ("validate", {"prompts": ["caf\udce9"]}),  # typed in a terminal that is not UTF-8
            ("validate", {"prompts": [{"prompt": "x", "seed": 2**64}]}),
        ],
        4: [("log", {"every": 2}), ("log", {"every": 0}), ("validate", {})],
        8: [("stop", {})],
    }
    recorder = Recorder()
    with pytest.raises(InterruptedRunError, match="stopped after step"):
        run_training(run, sinks=[recorder, Sender(folder / "run", requests)])
    return recorder, folder / "run"


LAST = ["4-0", "4-1", "4-2", "8-0"]


def answers(requested):
    return {event.id: event for event in requested[0].of(RequestTaken)}


def test_every_request_has_one_answer(requested):
    ids = [event.id for event in requested[0].of(RequestTaken)]
    assert sorted(ids) == sorted(["2-0", "2-1", "2-2", *(f"3-{n}" for n in range(4)), *LAST])
    assert {event.source for event in requested[0].of(RequestTaken)} == {"test"}
    assert not (requested[1] / "now" / "listening.json").exists()


def test_prompts_of_a_request_are_validated_in_a_folder_of_their_own(requested):
    recorder, folder = requested
    answer = answers(requested)["2-0"]
    assert answer.accepted
    assert "2 prompts encoded" in answer.reason
    events = {event.request: event for event in recorder.of(Validated) if event.request}
    assert events["2-0"].prompts == ("a red circle", "a blue box")
    assert events["2-2"].prompts == ("one",)
    path = folder / "validation/requested" / f"step-{answer.step:06d}-2-0"
    assert events["2-0"].grid == f"{path}.png"
    record = json.loads((path / "samples.json").read_text())
    assert [one["seed"] for one in record["samples"]] == [0, 9]
    assert [event.prompts for event in recorder.of(Validated) if not event.request][-1] == ("own",)


def test_prompts_that_cannot_be_used_are_refused_with_the_reason(requested):
    found = answers(requested)
    reasons = ["multiples of 4", "", "prompts.0 is text with a lone surrogate", "prompts.0.seed is"]
    for number, reason in enumerate(reasons):
        assert not found[f"3-{number}"].accepted
        assert reason in found[f"3-{number}"].reason


def test_logging_changes(requested):
    assert answers(requested)["4-0"].reason == "logs every 2 steps instead of every 1"
    refused = answers(requested)["4-1"]
    assert not refused.accepted
    assert "`every` is 0" in refused.reason


def test_save_and_stop_save_checkpoints(requested):
    recorder, _ = requested
    reasons = {event.reason: event.step for event in recorder.of(CheckpointSaved)}
    assert reasons["asked for"] == answers(requested)["2-1"].step
    assert reasons["stopping"] == answers(requested)["8-0"].step


@pytest.mark.parametrize("error", [ValueError("too long"), RuntimeError()])
def test_a_request_that_fails_does_not_end_the_run(tiny_run, tmp_path, monkeypatch, error):
    """Neither does a folder in place of a request's file."""

    def fail(*_):
        (tmp_path / "run" / "now" / "save").mkdir()
        raise error

    monkeypatch.setattr("gracetune.train.requests.requested_validation", fail)
    section = {"enable_manual_validation": True, "prompts": ["own"], "sample_steps": 1}
    run = tiny_run(adapter={"rank": 2}, train={"max_train_steps": 5}, validation=section)
    recorder = Recorder()
    sender = Sender(tmp_path / "run", {2: [("validate", {"prompts": ["one"]})]})
    run_training(run, sinks=[recorder, sender])
    validate, save = recorder.of(RequestTaken)
    assert (validate.accepted, validate.reason) == (False, str(error) or "RuntimeError")
    assert (save.request, save.accepted) == ("save", False)
    assert recorder.of(StepDone)[-1].step == 5


TWO_RANKS = """
import os, sys
from pathlib import Path
from gracetune.config.schema import RunFile
from gracetune.errors import InterruptedRunError
from gracetune.events.run_control import send_request
from gracetune.train.run import run_training

run = RunFile.model_validate_json(Path(sys.argv[1]).read_text())

class Sender:
    def handle(self, event):
        if type(event).__name__ != "StepDone" or os.environ["RANK"] != "0":
            return
        for step, verb, arguments in (
            (2, "validate", {"prompts": ["one", "two", "three"]}),
            (2, "log", {"every": 2}),
            (8, "stop", {}),
        ):
            if event.step == step:
                send_request(Path(run.output_dir), verb, arguments)
    def close(self):
        pass

try:
    run_training(run, sinks=[Sender()], telemetry={"interval_s": 0.0})
except InterruptedRunError as error:
    print(error)
"""


@pytest.mark.distributed
def test_all_ranks_carry_out_a_request_together(tiny_run, tmp_path):
    section = {"enable_manual_validation": True, "prompts": ["own"], "sample_steps": 1}
    steps = {"max_train_steps": 100, "batch_size": 2}
    run = tiny_run(adapter={"rank": 2}, train=steps, validation=section | {"holdout": 0.1})
    (tmp_path / "run.json").write_text(run.model_dump_json())
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    for done in run_ranks(tmp_path / "ranks.py", tmp_path / "run.json"):
        assert done.returncode == 0, done.stderr
        assert "stopped after step" in done.stdout
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    taken = [event for event in events if event["event"] == "request_taken"]
    assert [(one["request"], one["accepted"]) for one in taken] == [
        ("log", True),
        ("validate", True),
        ("stop", True),
    ]
    (validated,) = [event for event in events if event["event"] == "validated" and event["request"]]
    assert validated["prompts"] == ["one", "two", "three"]
    assert validated["losses"]["held_out"] > 0
    assert [event["reason"] for event in events if event["event"] == "checkpoint_saved"] == [
        "stopping"
    ]
    parts = [event["by_dataset"]["shapes"] for event in events if event["event"] == "loss_parts"]
    assert parts[0]["samples"] == 4  # of both ranks
    steps = [event["step"] for event in events if event["event"] == "loss_parts"]
    assert all(step % 2 == 0 for step in steps[3:])
