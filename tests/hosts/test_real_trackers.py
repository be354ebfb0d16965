"""Weights & Biases, trackio and MLflow themselves, offline: what they store is what the run logged.

`make test-trackers` runs this in an environment of its own.
"""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import pytest
from PIL import Image

from gracetune.events.trackers.tracker import NO_STEP, SampleFile, TrackerOptions
from gracetune.events.types import HealthChanged

TRACKIO_DIR = Path(os.environ.setdefault("TRACKIO_DIR", tempfile.mkdtemp()))
"""trackio reads it when it is imported."""
wandb = pytest.importorskip("wandb", reason="make test-trackers installs it")
trackio = pytest.importorskip("trackio", reason="make test-trackers installs it")
mlflow = pytest.importorskip("mlflow", reason="make test-trackers installs it")

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]
FIXTURE = Path(__file__).parents[1] / "data" / "formats"
PROMPT = "a red ring"
BLOCK = 32768
"""Bytes of a block in LevelDB's log format, which W&B's files have after 7 bytes."""


# Reading back


def wandb_records(file):
    """Yield the records of an offline file of W&B, decoded with its own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little for a header: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += 7
        parts.append(data[at : at + length])
        at += length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def wandb_files(folder):
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def wandb_history(folder):
    """Return the rows of all processes as `(step, values)`."""
    rows = []
    for file in wandb_files(folder):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = row.get("_step", record.history.step.num)
                rows.append((int(step), row))
    return rows


def trackio_rows(project, name):
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(project, name)


def mlflow_client(folder):
    return mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")


def state(folder, name):
    return json.loads((folder / "trackers" / f"{name}.json").read_text())


# A run that is resumed two steps before its end


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train 4 steps, lose the last checkpoint, and train to step 6: steps 3 and 4 are repeated."""
    folder = tmp_path_factory.mktemp("trackers")
    for name in ("model", "data"):
        shutil.copytree(FIXTURE / name, folder / name)
    settings = json.loads((FIXTURE / "run.json").read_text())
    settings["logging"] |= {
        "trackers": ["wandb", "trackio", "mlflow"],
        "tracker_offline": True,
        "tracker_project": "rings",
    }
    settings["validation"] = {"every": 2, "prompts": [PROMPT], "sample_steps": 1, "holdout": 0.2}
    (folder / "run.json").write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "WANDB_CONFIG_DIR": str(folder / "home"),
        "WANDB_CACHE_DIR": str(folder / "home"),
    }
    for steps in (4, 6):
        command = [sys.executable, "-m", "gracetune", "train", "run.json"]
        command += ["--set", f"train.max_train_steps={steps}"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        if steps == 4:
            shutil.rmtree(folder / "run" / "checkpoints" / "step-000004")
    return folder / "run"


@pytest.fixture(scope="module")
def events(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def losses(events):
    return {line["step"]: line["loss"] for line in events if line["event"] == "step_done"}


@pytest.fixture
def trackio_here(run):
    return state(run, "trackio")["name"]


def test_the_run_repeated_steps_and_lost_nothing(events, losses):
    steps = [line["step"] for line in events if line["event"] == "step_done"]
    assert steps == [1, 2, 3, 4, 3, 4, 5, 6]
    assert not [line for line in events if line.get("fallback") and "records are" in line["text"]]
    assert [line["status"] for line in events if line["event"] == "run_ended"] == ["done"] * 2


def test_wandb_has_each_step_once_with_the_losses_of_the_log(run, losses):
    rows = [(step, row) for step, row in wandb_history(run) if "train/loss" in row]
    assert [step for step, _ in rows] == sorted(losses)
    assert {step: row["train/loss"] for step, row in rows} == losses
    assert len(wandb_files(run)) == 2
    ids = {record.run.run_id for f in wandb_files(run) for record in wandb_records(f)} - {""}
    assert ids == {state(run, "wandb")["id"]}


def test_wandb_has_settings_plan_memory_and_samples(run):
    config = {}
    for file in wandb_files(run):
        for record in wandb_records(file):
            for update in record.config.update:
                config[update.key or update.nested_key[0]] = json.loads(update.value_json)
    assert config["settings"]["seed"] == 7
    assert "cpus" in config["machine"]
    assert "torch" in config["versions"]
    row = {
        key: value for step, row in wandb_history(run) if step == 4 for key, value in row.items()
    }
    assert row["memory/host_gib"] > 0
    assert row["validation/held_out"] > 0
    media = [key for _, row in wandb_history(run) for key in row if key.startswith("samples/")]
    assert any(key.startswith("samples/images") for key in media)
    stored = sorted(run.glob("wandb/offline-run-*/files/media/images/samples/images_*.png"))
    samples = [(run / f"validation/step-{step:06d}/000.png") for step in (0, 2, 4, 6)]
    assert {pixels(file) for file in stored} == {pixels(file) for file in samples}


def pixels(file):
    with Image.open(file) as image:
        return image.convert("RGB").tobytes()


def test_trackio_has_each_step_once_with_the_losses_of_the_log(run, losses, trackio_here):
    rows = [row for row in trackio_rows("rings", trackio_here) if "train/loss" in row]
    assert [row["step"] for row in rows] == sorted(losses)
    assert {row["step"]: row["train/loss"] for row in rows} == losses


def test_trackio_has_settings_and_samples(run, trackio_here):
    (found,) = [one for one in trackio.Api().runs("rings") if one.name == trackio_here]
    assert found.config["settings"]["seed"] == 7
    assert "cpus" in found.config["machine"]
    samples = {
        row["step"]: row["samples/000"]
        for row in trackio_rows("rings", trackio_here)
        if "samples/000" in row
    }
    assert sorted(samples) == [0, 2, 4, 6]
    assert samples[4]["caption"] == PROMPT
    stored = list((TRACKIO_DIR / "media").rglob("*.png"))
    assert pixels(run / "validation/step-000004/000.png") in {pixels(file) for file in stored}


def test_mlflow_has_each_step_once_with_the_losses_of_the_log(run, losses):
    client, run_id = mlflow_client(run), state(run, "mlflow")["run_id"]
    history = client.get_metric_history(run_id, "train/loss")
    assert sorted(metric.step for metric in history) == sorted(losses)
    assert {metric.step: metric.value for metric in history} == losses
    memory = client.get_metric_history(run_id, "memory/host_gib")
    assert memory
    assert all(metric.value > 0 for metric in memory)


def test_mlflow_has_settings_samples_and_status(run):
    client, run_id = mlflow_client(run), state(run, "mlflow")["run_id"]
    found = client.get_run(run_id)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["seed"] == "7"
    assert found.data.params["datasets.0.id"] == "blocks"
    names = {one.path for one in client.list_artifacts(run_id)}
    assert {"settings.json", "machine.json", "versions.json", "data.json"} <= names
    stored = run / "mlflow" / "artifacts" / run_id / "artifacts" / "samples" / "step-000006"
    assert pixels(stored / "000.png") == pixels(run / "validation/step-000006/000.png")
    assert json.loads((stored / "prompts.json").read_text()) == {"000.png": PROMPT}


# Clips, sounds, health and histograms, which the run above does not have


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Write an image, a clip and a sound, as validations do."""
    import av
    import numpy as np

    folder = tmp_path_factory.mktemp("media")
    grid = folder / "step-000005.png"
    Image.new("RGB", (8, 8), "red").save(grid)
    shutil.copy(grid, folder / "000.png")
    with av.open(str(folder / "001.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for shade in (0, 120, 250):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), shade, np.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with wave.open(str(folder / "002.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1600))
    kinds = {"000.png": "image", "001.mp4": "video", "002.wav": "audio"}
    samples = [
        SampleFile(number, folder / name, kind, f"prompt {number}")
        for number, (name, kind) in enumerate(kinds.items())
    ]
    return grid, samples


HEALTH = HealthChanged(5, "overfitting", "notice", "it rises")


def fill(tracker, media):
    grid, samples = media
    tracker.describe({"settings": {"a": 1}, "plan": {"batch": 4}})
    tracker.log_histogram(5, "train/rates", (1e-6, 1e-5, 1e-4), (3, 1))
    tracker.log_samples(5, grid, samples)
    tracker.log_health(HEALTH, "notice: it rises")
    tracker.log_scalars(5, {"train/loss": math.nan, "moved/blocks.0": 0.5})
    tracker.finish("interrupted")


def options(folder):
    return TrackerOptions(folder, "clips", "mine", {"a": 1}, offline=True)


def test_wandb_stores_clips_sounds_health_and_histograms(tmp_path, media):
    from gracetune.events.trackers.wandb import WandbTracker

    tracker = WandbTracker(options(tmp_path))
    assert tracker.last_step == NO_STEP
    fill(tracker, media)
    files = list(tmp_path.glob("wandb/offline-run-*/files/media/**/*.*"))
    assert {file.suffix for file in files} >= {".png", ".mp4", ".wav"}
    (clip,) = [file for file in files if file.suffix == ".mp4"]
    assert clip.read_bytes() == media[1][1].path.read_bytes()
    wandb.teardown()  # its process writes the rest of the file
    kinds = [r.WhichOneof("record_type") for f in wandb_files(tmp_path) for r in wandb_records(f)]
    assert "alert" in kinds
    row = {key: value for _, row in wandb_history(tmp_path) for key, value in row.items()}
    assert row.get("train/rates", {}).get("values", row.get("train/rates/values")) == [3, 1]
    assert WandbTracker(options(tmp_path)).last_step == 5


def test_trackio_stores_clips_sounds_health_and_histograms(tmp_path, media):
    from gracetune.events.trackers.trackio import TrackioTracker

    fill(TrackioTracker(options(tmp_path)), media)
    name = state(tmp_path, "trackio")["name"]
    row = {k: v for row in trackio_rows("clips", name) for k, v in row.items()}
    assert row["moved/blocks.0"] == 0.5
    assert row["train/rates"]["values"] == [3, 1]
    assert [row[f"samples/{n:03d}"]["caption"] for n in range(3)] == [
        "prompt 0",
        "prompt 1",
        "prompt 2",
    ]
    (alert,) = trackio.Api().alerts("clips", run=name)
    assert (alert["title"], alert["text"], alert["step"]) == ("overfitting", "notice: it rises", 5)
    assert TrackioTracker(options(tmp_path)).last_step == 5


def test_trackio_refuses_to_send_an_offline_run_away(tmp_path):
    from gracetune.events.trackers.trackio import TrackioTracker

    remote = TrackerOptions(
        tmp_path, "clips", "mine", {}, offline=True, environment={"TRACKIO_SPACE_ID": "me/mine"}
    )
    with pytest.raises(Exception, match="TRACKIO_SPACE_ID is set"):
        TrackioTracker(remote)


def test_mlflow_stores_clips_sounds_health_and_histograms(tmp_path, media):
    from gracetune.events.trackers.mlflow import MlflowTracker

    fill(MlflowTracker(options(tmp_path)), media)
    client, run_id = mlflow_client(tmp_path), state(tmp_path, "mlflow")["run_id"]
    found = client.get_run(run_id)
    assert found.info.status == "KILLED"
    assert found.data.tags["health.overfitting"] == "step 5: notice: it rises"
    stored = tmp_path / "mlflow" / "artifacts" / run_id / "artifacts"
    for sample in media[1]:
        copied = stored / "samples" / "step-000005" / sample.path.name
        assert copied.read_bytes() == sample.path.read_bytes()
    assert json.loads((stored / "histograms/train/rates/step-000005.json").read_text()) == {
        "step": 5,
        "edges": [1e-6, 1e-5, 1e-4],
        "counts": [3, 1],
    }
    assert MlflowTracker(options(tmp_path)).last_step == 5


def test_wandb_without_a_key_does_not_ask(tmp_path, monkeypatch):
    from gracetune.errors import RunFailedError
    from gracetune.events.trackers.wandb import WandbTracker

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    online = TrackerOptions(tmp_path, "clips", "mine", {})
    with pytest.raises(RunFailedError, match="no W&B API key"):
        WandbTracker(online)
