"""Damaged files of one run concern that run only, and the page says so."""

import json
import os
import threading

import pytest
from fakes.served_dashboard import read_until, serving
from fakes.synthetic_run import write_run

from gracetune.dashboard import live_runs, log_tail
from gracetune.dashboard.live_runs import LiveRun, LiveRuns
from gracetune.events.run_control import RunControl

LISTENER = {"pid": "1\0", "host": "x", "birth": 1, "verbs": ["save"]}
DAMAGE = {
    "events.jsonl": [
        {"event": "notice", "time": 1e300, "text": "x"},
        {"event": "notice", "time": -1e300, "text": "x"},
        {"event": "run_started", "time": 1.0, "total_steps": "1e999"},
        {"event": "run_ended", "time": 9e9, "seconds": [], "step": {}, "status": 7},
        {"event": "validated", "time": 1.0, "step": 2**64 - 1, "grid": "", "losses": {"a": 1}},
        {"event": "step_done", "time": 1.0, "step": 2**63, "loss": 1},
        {"event": "stage_progress", "time": 1.0, "stage": {}},
    ],
    "last_seen.json": [{"step": "Infinity", "time": "1e999", "rss": "1e999"}, {"pid": 1e300}, []],
    "now/listening.json": [LISTENER, [], LISTENER | {"pid": 10**30, "host": [], "verbs": 3}],
    "validation/step-000003/samples.json": [{"samples": [{"number": "NaN", "seed": "1e999"}]}],
    ".lock": [[10**30, {}], "x", {}],
}


def damage(folder, name, content):
    """Write a damaged file; the texts of odd numbers become numbers."""
    text = json.dumps(content)
    for number in ("1e999", "Infinity", "NaN"):
        text = text.replace(f'"{number}"', number)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a" if path.suffix == ".jsonl" else "w") as file:
        file.write(text + "\n")


CASES = [(name, content) for name, contents in DAMAGE.items() for content in contents]


@pytest.mark.parametrize(("name", "content"), CASES)
def test_a_damaged_file_is_no_reason_to_stop_reading(tmp_path, name, content):
    folder = write_run(tmp_path / "run", steps=3, total_steps=9, samples_every=3, ended=False)
    damage(folder, name, content)
    run = LiveRun("r0", folder, "run")
    run.poll()
    run.refresh_status()
    assert run.status.state in ("killed", "quiet", "done", "failed")
    assert run.problem == ""
    live_runs.dump_json(run.snapshot(100))


def test_an_event_that_is_nested_too_deeply_is_shown_without_its_contents(tmp_path):
    folder = write_run(tmp_path / "run", steps=3, total_steps=9)
    text = "[" * 950 + "]" * 950
    with (folder / "events.jsonl").open("a") as log:
        log.write('{"event": "notice", "time": 2.0, "text": ' + text + "}\n")
    run = LiveRun("r0", folder, "run")
    run.poll()
    assert len(json.loads(live_runs.dump_json(run.snapshot(100)))["records"]["notice"]) > 1


def fails(error, folder):
    """Return a replacement of `run_status` that fails for one folder."""
    found = live_runs.run_status

    def call(asked, *rest):
        if asked == folder:
            raise error
        return found(asked, *rest)

    return call


def test_a_run_that_cannot_be_read_is_unreadable_until_it_can(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=3, total_steps=3)
    run = LiveRun("r0", folder, "run")
    run.poll()
    with monkeypatch.context() as patch:
        patch.setattr(live_runs, "run_status", fails(OverflowError("too large"), folder))
        assert run.refresh_status()
        assert (run.status.state, run.status.step) == ("unreadable", 0)
        assert "OverflowError: too large" in run.status.text
    run.refresh_status()
    assert run.status.state == "done"
    monkeypatch.setattr(run.tail, "read", lambda: {}[1])
    assert run.poll() is None
    run.refresh_status()
    assert run.status.state == "unreadable"


@pytest.mark.timeout(60)
def test_other_runs_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(live_runs, "STATUS_EVERY_S", 0.1)
    bad = write_run(tmp_path / "bad", steps=5, total_steps=9, ended=False)
    good = write_run(tmp_path / "good", steps=5, total_steps=9, ended=False)
    monkeypatch.setattr(live_runs, "run_status", fails(ValueError("odd"), bad))
    control = RunControl(good)
    control.open(os.getpid())
    with serving(bad, good) as served, served.open_stream() as stream:
        while served.runs.runs["r1"].status.state != "running":
            threading.Event().wait(0.02)
        assert served.runs.runs["r0"].status.state == "unreadable"
        control.close()  # as if it was killed
        read_until(stream, b'"state":"killed"')


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_reported(tmp_path, monkeypatch):
    runs = LiveRuns([write_run(tmp_path / "run", steps=3, total_steps=3)])
    sent, died = [], threading.Event()
    runs.publish_to(lambda text: (sent.append(text), died.set()))

    def fail():
        raise AssertionError("a bug")

    monkeypatch.setattr(runs, "_follow_until_stopped", fail)
    runs.start()
    assert died.wait(20)
    assert "the dashboard has failed" in sent[0]
    assert runs.runs["r0"].status.state == "unreadable"
    runs.stop()


def test_samples_are_sent_although_the_log_is_read_in_parts(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=4, total_steps=9, samples_every=2, ended=False)
    run = LiveRun("r0", folder, "run")
    run.poll()
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    (added,) = [line for line in lines if '"validated"' in line and '"step": 4' in line]
    monkeypatch.setattr(log_tail, "CHUNK_NBYTES", len(added))
    with log.open("a") as file:
        file.write(added + '{"event": "notice", "time": 1.0, "text": "later"}\n')
    assert run.poll() is None
    assert [one["step"] for one in run.poll()["samples"]][-2:] == [2, 4]
