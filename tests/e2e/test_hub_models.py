"""Runs whose model comes from a hub, started as a user does, against a local server."""

import json
import os
import subprocess
import sys

import pytest
from fakes.datasets import DATA, write_images
from fakes.hub_server import Repository, serve_hub, use_hub
from safetensors import safe_open

from gracetune.cli.main import main
from gracetune.models.registry import FAMILIES

NAME = FAMILIES["sd15"].default_model


@pytest.fixture
def hub(miniature):
    with serve_hub({NAME: Repository(miniature("sd15"))}) as server:
        yield server


@pytest.fixture
def run_file(tmp_path):
    """Return a run file without `model.path`."""
    write_images(tmp_path / "data")
    settings = {
        "output_dir": str(tmp_path / "run"),
        "model": {"family": "sd15"},
        "adapter": {"rank": 2},
        "datasets": [{"instance_data_dir": str(tmp_path / "data")} | DATA["image"]],
        "train": {"max_train_steps": 2, "batch_size": 2, "timestep_sampling": "uniform"},
        "logging": {"tensorboard": False},
        "validation": {"every": 0},
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    return tmp_path / "run.json"


def run_command(*words, **variables):
    """Run the command in an interpreter of its own: huggingface_hub reads variables at import."""
    return subprocess.run(
        [sys.executable, "-m", "gracetune", *map(str, words)],
        env=os.environ | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_without_a_path_trains_the_default_model(hub, run_file, tmp_path, monkeypatch):
    use_hub(monkeypatch, hub.endpoint, tmp_path / "cache")
    assert main(["train", str(run_file)]) == 0
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    texts = [event["text"] for event in events if event["event"] == "notice"]
    assert any(text.startswith(f"model: {NAME}, the default of sd15") for text in texts)
    (file,) = (tmp_path / "run" / "adapter").glob("*.safetensors")
    with safe_open(file, "pt") as adapter:
        assert NAME.partition("/")[2] in json.dumps(adapter.metadata())


@pytest.mark.slow
def test_a_gated_model_is_refused_then_trained_and_used_offline(hub, run_file, tmp_path):
    hub.repositories[NAME].gated = True
    hub.repositories[NAME].members.add("mine")
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
    refused = run_command("train", run_file, **variables)
    assert refused.returncode == 2, refused.stderr
    assert f"{NAME} is a gated model and you are not logged in.\n  1. Accept" in refused.stderr
    assert f"page: {hub.endpoint}/{NAME}\n" in refused.stderr
    assert "Traceback" not in refused.stderr

    trained = run_command("train", run_file, **variables, HF_TOKEN="mine")
    assert trained.returncode == 0, trained.stderr
    shown = trained.stdout + trained.stderr
    assert f"model      {NAME}, the default of sd15" in shown
    assert "model      downloading: " in shown

    sent = hub.sent()
    folder = f"output_dir={tmp_path / 'again'}"
    again = run_command("train", run_file, "--set", folder, **variables, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert hub.sent() == sent


@pytest.mark.slow
def test_two_ranks_download_once(hub, run_file, miniature, tmp_path):
    hub.delay_s = 0.002
    variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "gracetune", "train", str(run_file)],
        env=os.environ | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert hub.sent(weights) == (miniature("sd15") / weights).stat().st_size
    assert "downloading: " in done.stdout + done.stderr
