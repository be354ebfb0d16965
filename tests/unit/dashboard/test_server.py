"""The server sends runs as JSON, what is new in them, their samples, and requests to them."""

import json
import os
import subprocess
import sys
import threading

import pytest
from fakes.served_dashboard import read_until, serving
from fakes.synthetic_run import step_done, write_run
from PIL import Image
from starlette.testclient import TestClient

from gracetune.dashboard import server as server_module
from gracetune.dashboard.guard import Credentials
from gracetune.dashboard.live_runs import LiveRuns, PlannedRun
from gracetune.dashboard.server import DashboardServer, parse_range
from gracetune.events.run_control import RunControl


def client_of(*folders, plans=()):
    runs = LiveRuns(folders, plans)
    runs.read_all()
    credentials = Credentials()
    app = DashboardServer(runs, credentials).build_app(["testserver"])
    headers = {"authorization": f"Bearer {credentials.token}", "origin": "http://testserver"}
    return TestClient(app, headers=headers)


def append(folder, *records):
    with (folder / "events.jsonl").open("a") as log:
        log.writelines(json.dumps(record) + "\n" for record in records)


def test_a_run_has_everything_that_the_page_shows(synthetic_run):
    run = client_of(synthetic_run).get("/api/runs/r0").json()
    assert run["name"] == "lora"
    assert run["status"]["state"] == "done"
    assert run["tables"]["step_done"]["steps"] == list(range(1, 121))
    assert {"step_times", "loss_parts", "weights_moved", "unified_memory"} <= run["tables"].keys()
    assert run["records"]["health"][0]["check"] == "loader_stalled"
    assert run["run_file"]["model"]["family"] == "flux"
    assert [one["step"] for one in run["samples"]] == [0, 60, 120]
    assert run["damaged"] == 0


def test_points_are_reduced_and_a_window_is_not(tmp_path):
    folder = write_run(tmp_path / "long", steps=3000, total_steps=3000, every=3000, picture_size=8)
    client = client_of(folder)
    assert len(client.get("/api/runs/r0?points=300").json()["tables"]["step_done"]["steps"]) < 400
    window = client.get("/api/runs/r0?points=300&low=1000&high=1100").json()
    assert window["tables"]["step_done"]["steps"] == list(range(999, 1102))
    for query in ("points=-1", "points=x", "low=1e9", "points=99999999999999999999"):
        assert client.get(f"/api/runs/r0?{query}").status_code == 200


def test_samples_and_thumbnails_are_served(synthetic_run):
    client = client_of(synthetic_run)
    sample = client.get("/samples/r0/step-000120/000.png")
    assert sample.headers["content-type"] == "image/png"
    path = synthetic_run / "validation" / "step-000120" / "000.png"
    assert sample.content == path.read_bytes()
    for _ in range(2):
        assert client.get("/thumbnails/r0/step-000120/000.png").headers["content-type"] == (
            "image/webp"
        )
    assert client.get("/thumbnails/r0/step-000120/099.png").status_code == 404


def test_clips_and_sounds_are_served_with_their_types(tmp_path):
    folder = write_run(tmp_path / "run", steps=1, total_steps=1, samples_every=1, picture_size=8)
    samples = folder / "validation" / "step-000001"
    (samples / "000.mp4").write_bytes(b"clip" * 100)
    (samples / "001.wav").write_bytes(b"sound")
    client = client_of(folder)
    first, second, *_ = client.get("/api/runs/r0").json()["samples"][-1]["items"]
    assert (first["image"], first["video"], first["audio"]) == ("000.png", "000.mp4", None)
    assert (second["video"], second["audio"]) == (None, "001.wav")
    assert first["settings"]["steps"] == 28
    clip = client.get("/samples/r0/step-000001/000.mp4", headers={"range": "bytes=0-3"})
    assert (clip.status_code, clip.headers["content-type"], clip.content) == (
        206,
        "video/mp4",
        b"clip",
    )
    sound = client.get("/samples/r0/step-000001/001.wav")
    assert (sound.headers["content-type"], sound.content) == ("audio/wav", b"sound")


def test_a_broken_or_huge_image_has_no_thumbnail(tmp_path):
    folder = write_run(tmp_path / "run", steps=1, total_steps=1, samples_every=1)
    (folder / "validation" / "step-000001" / "000.png").write_bytes(b"not an image")
    Image.new("1", (4_100, 4_100)).save(folder / "validation" / "step-000001" / "001.png")
    client = client_of(folder)
    assert client.get("/thumbnails/r0/step-000001/000.png").status_code == 404
    assert client.get("/thumbnails/r0/step-000001/001.png").status_code == 404
    assert client.get("/thumbnails/r0/step-000001/002.png").status_code == 200


PEAK = """
import os, resource, sys
from gracetune.dashboard.thumbnails import make_thumbnail
make_thumbnail(os.open(sys.argv[1], os.O_RDONLY))  # loads libraries
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert make_thumbnail(os.open(sys.argv[2], os.O_RDONLY))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(("mode", "limit_mib"), [("RGB", 80), ("RGBA", 145)])
def test_the_largest_image_needs_little_memory(tmp_path, mode, limit_mib):
    """The server is to stay below 200 MB."""
    for name, edge in (("small", 300), ("large", 4096)):
        Image.new(mode, (edge, edge)).save(tmp_path / name, "PNG", compress_level=1)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < limit_mib * 1024


def test_a_plan_is_shown_like_a_run():
    plan = PlannedRun("p0", "flux-lora", {"plan": {"batch": 2}}, {"seed": 0})
    client = client_of(plans=[plan])
    [head] = client.get("/api/runs").json()["runs"]
    assert head["status"]["state"] == "planned"
    assert client.get("/api/runs/p0").json()["plan"] == {"plan": {"batch": 2}}
    assert client.get("/api/runs/p1").status_code == 404


def test_requests_reach_the_run(tmp_path):
    folder = write_run(tmp_path / "run", steps=3, total_steps=9, ended=False)
    control = RunControl(folder)
    control.open(os.getpid())
    client = client_of(folder)
    answer = client.post("/api/runs/r0/requests", json={"request": "save"})
    assert answer.json()["pid"] == os.getpid()
    [request] = control.take_requests()
    assert (request.verb, request.id) == ("save", answer.json()["id"])
    assert request.source == "dashboard"
    client.post("/api/runs/r0/requests", json={"request": "validate", "prompts": ["a fox"]})
    client.post("/api/runs/r0/requests", json={"request": "log", "every": 5})
    found = [(one.verb, one.arguments) for one in control.take_requests()]
    assert found == [("validate", {"prompts": ["a fox"]}), ("log", {"every": 5})]
    wrong = client.post("/api/runs/r0/requests", json={"request": "explode"})
    assert (wrong.status_code, "not a request" in wrong.json()["error"]) == (409, True)
    control.close()
    refused = client.post("/api/runs/r0/requests", json={"request": "save"})
    assert (refused.status_code, "no run accepts" in refused.json()["error"]) == (409, True)


@pytest.mark.parametrize(
    "body",
    [
        {"request": "validate", "prompts": "one"},
        {"request": "validate", "prompts": [""]},
        {"request": "validate", "prompts": ["x" * 5000]},
        {"request": "validate", "prompts": ["x"] * 33},
        {"request": "validate", "prompts": [7]},
        {"request": "save", "path": "/etc"},
        {"request": "save", "every": 5},
        {"request": "log", "every": 0},
        {"request": "log", "every": "5"},
        {"request": "log", "every": True},
    ],
)
def test_arguments_of_requests_are_checked(synthetic_run, body):
    assert client_of(synthetic_run).post("/api/runs/r0/requests", json=body).status_code == 400


@pytest.mark.parametrize("place", ["now", "now/requests"])
def test_a_folder_of_requests_outside_the_run_is_not_written_to(tmp_path, place):
    folder = write_run(tmp_path / "run", steps=3, total_steps=9, ended=False)
    (tmp_path / "other").mkdir()
    for one in (folder, tmp_path / "other"):
        RunControl(one).open(os.getpid())
    (folder / place).rename(folder / "old")
    (folder / place).symlink_to(tmp_path / "other" / place)
    answer = client_of(folder).post("/api/runs/r0/requests", json={"request": "stop"})
    assert answer.status_code == 409
    assert not list((tmp_path / "other" / "now" / "requests").iterdir())


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=0-99", (0, 10)),
        ("bytes=10-", None),
        ("bytes=3-2", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("", None),
    ],
)
def test_ranges(header, found):
    assert parse_range(header, 10) == found


# Live


def events_of(data):
    """Return (kind, content) of server-sent events in received bytes."""
    found = []
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = dict(part.split(b": ", 1) for part in block.split(b"\n") if b": " in part)
        if b"event" in lines and b"data" in lines:
            found.append((lines[b"event"].decode(), lines[b"data"]))
    return found


@pytest.mark.timeout(60)
def test_new_events_reach_all_pages(tmp_path):
    folder = write_run(tmp_path / "run", steps=5, total_steps=9, ended=False)
    with serving(folder) as served:
        while served.runs.runs["r0"].reading < 1.0 or not served.runs.runs["r0"].state.num_events:
            threading.Event().wait(0.02)
        streams = [served.open_stream() for _ in range(5)]
        import random

        append(folder, step_done(6, 9, random.Random(0)))
        for stream in streams:
            data = read_until(stream, b'"steps":[6]')
            deltas = [
                json.loads(text) for kind, text in events_of(data + b"\n\n") if kind == "delta"
            ]
            assert deltas or b'"steps":[6]' in data
            stream.close()


@pytest.mark.timeout(60)
def test_a_new_run_and_a_new_status_are_announced(tmp_path, monkeypatch):
    monkeypatch.setattr("gracetune.dashboard.live_runs.RESCAN_EVERY_S", 0.1)
    monkeypatch.setattr("gracetune.dashboard.live_runs.STATUS_EVERY_S", 0.1)
    folder = write_run(tmp_path / "runs" / "one", steps=5, total_steps=9, ended=False)
    with serving(tmp_path / "runs") as served, served.open_stream() as stream:
        write_run(tmp_path / "runs" / "two", steps=1, total_steps=9)
        read_until(stream, b"event: runs")
        control = RunControl(folder)
        control.open(os.getpid())
        read_until(stream, b'"state":"running"')
        control.close()
        read_until(stream, b'"state":"killed"')


@pytest.mark.timeout(60)
def test_a_page_that_falls_behind_is_cut_off(synthetic_run, monkeypatch):
    monkeypatch.setattr(server_module, "QUEUE_LENGTH", 2)
    with serving(synthetic_run) as served, served.open_stream() as stream:
        # Not read for a while: more changes than the queue holds.
        for number in range(300):
            served.runs._send("delta", {"text": "x" * 40_000, "number": number})
        read_until(stream, b"\r\n0\r\n\r\n")  # the stream ends in order
