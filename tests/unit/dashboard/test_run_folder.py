"""The state of a run is told from its folder, and no path leads out of it."""

import fcntl
import json
import os
import socket

import pytest

from gracetune.dashboard.run_folder import (
    SampleIndex,
    find_run_folders,
    is_locked,
    open_inside,
    read_json,
    read_settings,
    run_status,
)
from gracetune.dashboard.run_state import RunState
from gracetune.events.run_control import RunControl, process_start_time

GIB = 1024**3


def state_of(*records):
    state = RunState()
    started = {"event": "run_started", "time": 1.0, "total_steps": 50, "start_step": 0}
    step = {"event": "step_done", "time": 2.0, "step": 7, "loss": 1.0}
    memory = {"event": "memory_used", "time": 2.5, "step": 7, "host": 3 * GIB, "device": 0}
    for record in (started, step, memory, *records):
        state.apply(record)
    return state


def listen(folder, pid, birth, host=None):
    (folder / "now").mkdir(exist_ok=True)
    listener = {"pid": pid, "host": host or socket.gethostname(), "birth": birth, "verbs": ["save"]}
    (folder / "now" / "listening.json").write_text(json.dumps(listener))


def test_a_run_whose_process_lives_is_running(tmp_path):
    control = RunControl(tmp_path)
    control.open(os.getpid())
    status = run_status(tmp_path, state_of())
    assert (status.state, status.step, status.total_steps) == ("running", 7, 50)
    assert "stop" in status.verbs
    control.close()
    assert run_status(tmp_path, state_of()).state == "killed"


def test_a_killed_run_is_not_shown_as_running(tmp_path):
    """The out-of-memory killer leaves everything as it is, also the file of the listener."""
    listen(tmp_path, os.getpid(), birth=process_start_time(os.getpid()) + 1)
    status = run_status(tmp_path, state_of())
    assert status.state == "killed"
    assert "step 7 of 50" in status.text
    assert "3.00 GiB" in status.text or "3.0 GiB" in status.text
    assert status.verbs == ()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"cgroup_used": 63.9 * GIB, "cgroup_limit": 64 * GIB}, "container"),
        ({"memory_available": GIB, "memory_total": 128 * GIB}, "machine had only 1"),
    ],
)
def test_a_kill_for_lack_of_memory_is_named(tmp_path, host, words):
    listen(tmp_path, 2**22 + 1, birth=1)
    sensors = {"event": "device_sensors", "time": 3.0, "step": 7, "gpus": [], "host": host}
    text = run_status(tmp_path, state_of(sensors)).text
    assert words in text
    assert "killed for lack of memory" in text


def test_the_record_of_a_run_is_newer_than_its_log(tmp_path):
    listen(tmp_path, 2**22 + 1, birth=1)
    record = {"step": 9, "phase": "validating", "rss": 5 * GIB, "time": 5.0}
    record |= {"cgroup_used": 63 * GIB, "cgroup_limit": 64 * GIB}
    (tmp_path / "last_seen.json").write_text(json.dumps(record))
    text = run_status(tmp_path, state_of()).text
    assert "step 9 of 50, validating, 5.0 GiB of host memory" in text.replace("5.00", "5.0")
    assert "killed for lack of memory" in text


def test_a_process_in_the_record_may_still_prepare(tmp_path):
    birth = process_start_time(os.getpid())
    record = {"pid": os.getpid(), "birth": birth, "host": socket.gethostname()}
    (tmp_path / "last_seen.json").write_text(json.dumps(record))
    assert run_status(tmp_path, state_of()).state == "starting"
    (tmp_path / "last_seen.json").write_text(json.dumps(record | {"birth": birth + 1}))
    assert run_status(tmp_path, state_of()).state == "killed"


def test_a_run_on_another_machine_is_judged_by_its_log(tmp_path):
    listen(tmp_path, 1, birth=1, host="elsewhere")
    assert run_status(tmp_path, state_of(), now=3.0).state == "running"
    status = run_status(tmp_path, state_of(), now=1000.0)
    assert status.state == "quiet"
    assert "elsewhere" in status.text


@pytest.mark.parametrize("state", ["done", "interrupted", "failed"])
def test_the_last_event_tells_how_a_run_ended(tmp_path, state):
    end = {"event": "run_ended", "time": 9.0, "step": 8, "status": state, "seconds": 5.0}
    status = run_status(tmp_path, state_of(end | {"message": "no space is left"}))
    assert status.state == state
    assert "8" in status.text
    assert state == "done" or "no space is left" in status.text


def test_a_run_that_prepares_its_data_holds_the_lock(tmp_path):
    state = RunState()
    state.apply({"event": "notice", "time": 1.0, "text": "plan: none"})
    lock = tmp_path / ".lock"
    lock.write_text(json.dumps([os.getpid(), socket.gethostname()]))
    with (tmp_path / "other").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not is_locked(tmp_path), "the process holds a lock of another file"
    assert run_status(tmp_path, state).state == "killed"
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(tmp_path)
        assert run_status(tmp_path, state).state == "starting"


def test_a_folder_without_a_log_is_waited_for(tmp_path):
    assert run_status(tmp_path, RunState()).state == "waiting"


def test_folders_with_runs_are_found(tmp_path):
    for name in ("b", "a", "empty"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("b", "a"):
        (tmp_path / "runs" / name / "events.jsonl").touch()
    runs = tmp_path / "runs"
    assert find_run_folders([runs, runs / "a"]) == [runs / "a", runs / "b"]
    assert find_run_folders([runs / "empty"]) == [runs / "empty"]


# Paths


@pytest.fixture
def run(tmp_path):
    """A run with two samples, next to a file that it must not show."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "run"
    samples = folder / "validation" / "step-000010"
    samples.mkdir(parents=True)
    for number in range(2):
        (samples / f"{number:03d}.png").write_bytes(b"image")
    settings = {"number": 0, "file": "000.png", "seed": 3, "negative_prompt": ""}
    (samples / "samples.json").write_text(json.dumps({"step": 10, "samples": [settings, 7]}))
    (samples / "notes.txt").write_text("not a sample")
    return folder


def validated(step, prompts=("one", "two"), grid=None):
    return {
        "event": "validated",
        "time": 1.0,
        "step": step,
        "grid": grid or f"/elsewhere/validation/step-{step:06d}.png",
        "prompts": list(prompts),
    }


def read_all(descriptor):
    with open(descriptor, "rb") as file:
        return file.read()


def test_samples_of_a_validation_are_indexed(run):
    index = SampleIndex(run)
    found = index.add(validated(10))
    assert [(item.prompt, item.image) for item in found.items] == [
        ("one", "000.png"),
        ("two", "001.png"),
    ]
    assert found.items[0].settings == {"seed": 3}
    assert read_all(index.open("step-000010", "000.png")) == b"image"


def test_samples_of_a_request_have_a_folder_of_their_own(run):
    samples = run / "validation" / "requested" / "step-000010-00017-ab"
    samples.mkdir(parents=True)
    (samples / "000.png").write_bytes(b"asked")
    index = SampleIndex(run)
    index.add(validated(10))
    grid = "/x/validation/requested/step-000010-00017-ab.png"
    found = index.add(validated(10, ["mine"], grid) | {"request": "00017-ab"})
    assert found.requested
    assert read_all(index.open(found.name, "000.png")) == b"asked"
    assert read_all(index.open("step-000010", "000.png")) == b"image"
    assert len(index.sets) == 2


@pytest.mark.parametrize(
    "names",
    [
        ("step-000010", "notes.txt"),
        ("step-000010", "002.png"),
        ("step-000010", "../../secret.png"),
        ("..", "secret.png"),
        ("step-000010", "/etc/passwd"),
        ("step-000010", "000.png\0"),
        ("step-000020", "000.png"),
        ("", ""),
    ],
)
def test_only_indexed_files_are_opened(run, names):
    index = SampleIndex(run)
    index.add(validated(10))
    assert index.open(*names) is None


def test_links_do_not_lead_out_of_the_run(run):
    samples = run / "validation" / "step-000010"
    (samples / "002.png").symlink_to(run.parent / "secret.png")
    index = SampleIndex(run)
    assert len(index.add(validated(10)).items) == 2
    # A file that was indexed and became a link later is not served either.
    (samples / "000.png").unlink()
    (samples / "000.png").symlink_to(run.parent / "secret.png")
    assert index.open("step-000010", "000.png") is None
    (run / "validation" / "step-000030").symlink_to(run.parent)
    assert index.add(validated(30)) is None


@pytest.mark.parametrize("grid", ["../../../etc/passwd", "..", "a b.png", "x" * 300, None, 7])
def test_validations_with_odd_names_are_ignored(run, grid):
    record = validated(10) | {"grid": grid}
    assert SampleIndex(run).add(record) is None


def test_links_inside_the_run_are_not_followed_either(run):
    """Then no part of a path can become a link between a check and its use."""
    (run / "inside").symlink_to(run / "validation")
    assert open_inside(run, "validation", "step-000010", "000.png") is not None
    assert open_inside(run, "inside", "step-000010", "000.png") is None
    assert open_inside(run, "validation/step-000010", "000.png") is None


def test_pipes_and_folders_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert open_inside(tmp_path, "pipe") is None
    assert open_inside(tmp_path, ".") is None
    assert open_inside(tmp_path, "..", "x") is None


def test_credentials_in_settings_are_not_shown(tmp_path):
    settings = {
        "datasets": [
            {
                "instance_data_dir": "s3://user:password@bucket/data",
                "remote": {"options": {"secret": "abc", "endpoint": "x"}},
                "caption_keep_tokens": 3,
            }
        ]
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    [dataset] = read_settings(tmp_path)["datasets"]
    assert "password" not in json.dumps(dataset)
    assert dataset["remote"]["options"] == {"secret": "***", "endpoint": "x"}
    assert dataset["caption_keep_tokens"] == 3


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in ("hf_token", "HF_TOKEN", "wandb_api_key", "secret", "password")),
        *((name, True) for name in ("aws_secret_access_key", "hubToken", "webhook_url")),
        *((name, False) for name in ("text_encoder", "tokenizer", "sigmas", "path")),
    ],
)
def test_credentials_are_not_shown_wherever_they_are(tmp_path, name, is_secret):
    """A `run.json` may be the user's own, with settings of other programs."""
    (tmp_path / "run.json").write_text(json.dumps({name: "abc", "a": [{name: "abc", "b": 1}]}))
    found = read_settings(tmp_path)
    shown = "***" if is_secret else "abc"
    assert found == {name: shown, "a": [{name: shown, "b": 1}]}


def test_the_path_of_a_webhook_is_a_secret(tmp_path):
    hooks = ["https://hooks.example.org/services/T1/B2/xyz"]
    (tmp_path / "run.json").write_text(json.dumps({"logging": {"webhooks": hooks}}))
    assert read_settings(tmp_path)["logging"]["webhooks"] == ["https://hooks.example.org/***"]


def test_settings_that_are_nested_too_deeply_are_not_shown(tmp_path):
    (tmp_path / "run.json").write_text("[" * 1000 + "]" * 1000)
    assert read_settings(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\udc80", "[NaN]", '{"step": Infinity}'])
def test_damaged_json_is_no_json(tmp_path, text):
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogatepass"))
    assert read_json(tmp_path, "run.json") is None
