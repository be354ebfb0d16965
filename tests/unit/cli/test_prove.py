"""`gracetune prove`: what its report leaves out, and a whole proof on a small model (slow)."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from fork_process import run_python

from gracetune.cli.proof_report import (
    FORMAT,
    Privacy,
    clean_error,
    loss_plot,
    public_settings,
    write_html,
)
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError
from gracetune.train.tuned_loop import time_tuned_loop

FIXTURE = Path(__file__).parents[2] / "data" / "formats"
PROMPT = "sks person in the garden"
SECRET = "hf_abcdefghijklmnop"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run file with a private prompt, trigger word and webhook."""
    for name in ("model", "data"):
        shutil.copytree(FIXTURE / name, tmp_path / name)
    settings = json.loads((FIXTURE / "run.json").read_text())
    settings["logging"]["webhooks"] = [f"https://hooks.example/{SECRET}"]
    settings["datasets"][0]["trigger_word"] = "ohwx7"
    settings["validation"] = {"prompts": [PROMPT], "sample_steps": 1}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_file(folder):
    return load_run_file("run.json").run


def test_private_texts_are_replaced_wherever_they_are(run_file, folder, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.lab.example")
    variables = {"HF_TOKEN": SECRET, "USER": "jane", "EDITOR": "nano"}
    privacy = Privacy(run_file, variables, host=False, captions=False)
    document = {
        "a": [f"{folder}/data/image is empty", f"token {SECRET}", PROMPT],
        "b": {"c": "on node17 by jane, ohwx7; nano stays", "d": 3},
    }
    text = json.dumps(privacy.clean(document))
    for private in (str(folder), SECRET, PROMPT, "node17", "jane", "ohwx7"):
        assert private not in text
    assert "nano stays" in text
    assert '"d": 3' in text


def test_what_the_user_allows_stays(run_file, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    privacy = Privacy(run_file, {}, host=True, captions=True)
    assert privacy.clean(f"{PROMPT} on node17") == f"{PROMPT} on node17"


@pytest.mark.parametrize(
    "text",
    [
        "datasets[0]: /srv/photos/anna/1.png cannot be read",
        "photo of anna.png is broken",
        "~/anna/set is missing",
        "../anna/data is missing",
    ],
)
def test_errors_have_no_paths_and_no_file_names(run_file, text):
    privacy = Privacy(run_file, {}, host=False, captions=False)
    assert "anna" not in clean_error(text, privacy)


def test_only_listed_settings_are_in_the_report(run_file):
    settings = public_settings(run_file)
    assert settings["adapter"]["rank"] == 2
    text = json.dumps(settings)
    for private in ("data/image", "ohwx7", PROMPT, "hooks.example", "blocks"):
        assert private not in text


def test_the_page_has_no_script_and_escapes_texts():
    part = {"title": "<b>", "status": "failed", "summary": "<script>", "seconds": 1.0}
    document = {
        "gracetune": "0",
        "date": "today",
        "settings": {"model": {"family": "tiny"}},
        "parts": [{**part, "details": {"x": [1], "y": 0.5}}],
        "contents": ["numbers"],
    }
    page = write_html(document, [("one", b"webp")])
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert page.count("<img ") == 1


def test_a_curve_is_drawn_from_low_to_high():
    assert loss_plot([1.0, 2.0, 3.0]) == "▁▅█"
    assert loss_plot([2.0, 2.0]) == "▁▁"
    assert loss_plot([]) == ""


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tuned_loop_trains_the_runs_own_batches(run_file, folder, checkpointing):
    result = time_tuned_loop(
        run_file,
        folder / "loop",
        lambda event: None,
        steps=3,
        checkpointing=checkpointing,
        device=torch.device("cpu"),
        compiles=False,
    )
    assert result["steps"] == 3
    assert result["samples_per_s"] > 0
    assert 0 < result["last_loss"] < 10
    assert result["gradient_checkpointing"] is checkpointing


def test_the_tuned_loop_refuses_what_it_cannot_compare(run_file, folder):
    whole = run_file.model_copy(update={"adapter": None})
    with pytest.raises(ConfigError, match=r"adapter\.kind: lora"):
        time_tuned_loop(
            whole,
            folder,
            lambda event: None,
            steps=1,
            checkpointing=False,
            device=torch.device("cpu"),
        )


def prove(*words):
    return run_python("-m", "gracetune", "prove", "run.json", *words)


@pytest.mark.slow
def test_a_proof_without_a_gpu_skips_what_needs_one(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    done = prove("--steps", "10", "-o", "proof")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(Path("proof/proof.json").read_text())
    assert document["format"] == FORMAT
    status = {part["name"]: part["status"] for part in document["parts"]}
    assert status["training"] == "passed"
    for name in ("diagnose", "gradients", "tuned_loop", "plan", "comparison"):
        assert status[name] == "skipped", name
    page = Path("proof/proof.html").read_text()
    assert page.count("<img ") == 1
    for private in (str(folder), SECRET, PROMPT, "ohwx7", "hooks.example"):
        assert private not in page + Path("proof/proof.json").read_text()
    assert prove("-o", "proof").returncode == 2, "an earlier proof is not overwritten"


@pytest.mark.slow
def test_a_part_that_fails_does_not_stop_the_others(folder):
    shutil.rmtree("model")
    done = prove("--steps", "10", "-o", "proof")
    assert done.returncode == 1
    document = json.loads(Path("proof/proof.json").read_text())
    parts = {part["name"]: part for part in document["parts"]}
    assert parts["gradients"]["status"] == parts["training"]["status"] == "failed"
    assert parts["diagnose"]["status"] == "skipped"
    assert re.search(r"exit code \d", parts["training"]["summary"])
    assert str(folder) not in json.dumps(document)
