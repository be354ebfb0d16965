"""`gracetune prove`: what its report leaves out, and a whole proof on a small model (slow)."""

import argparse
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
    Part,
    Privacy,
    clean_error,
    loss_plot,
    public_settings,
    write_html,
)
from gracetune.cli.prove import NO_GPU, UNKNOWN_GPU, Proof, add_arguments
from gracetune.config.load import load_run_file
from gracetune.errors import ConfigError
from gracetune.models.attention_backends import (
    CANDIDATES,
    current_backend,
    dispatched_processors,
)
from gracetune.models.family import load_family
from gracetune.train import tuned_loop
from gracetune.train.tuned_loop import time_tuned_loop, why_unsupported

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


def test_the_tuned_loop_measures_attention(run_file, folder, miniature):
    device = torch.device("cpu")
    section = {"family": "flux", "path": str(miniature("flux")), "dtype": "bfloat16"}
    run = run_file.model_copy(update={"model": type(run_file.model).model_validate(section)})
    family = load_family(run.model, lambda event: None)
    batches = tuned_loop._load_batches(run, family, folder / "loop", device, lambda event: None)
    tuned_loop._choose_attention(family, family.transformer, batches, device)
    processors = dispatched_processors(family.transformer)
    assert processors
    assert all(one._attention_backend is not None for one in processors)
    assert current_backend(family.transformer) in CANDIDATES


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


def test_the_tuned_loop_says_that_a_model_does_not_fit(run_file, folder, monkeypatch):
    def step(batch):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(tuned_loop, "_make_step", lambda *_: step)
    result = time_tuned_loop(
        run_file,
        folder / "loop",
        lambda event: None,
        steps=1,
        checkpointing=False,
        device=torch.device("cpu"),
        compiles=False,
    )
    assert result["fits"] is False
    assert "samples_per_s" not in result


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [("adapter", {"kind": "lokr"}, "lokr"), ("model", {"quantize": "int8"}, "int8")],
)
def test_the_tuned_loop_names_what_it_cannot_train(run_file, section, values, reason):
    changed = getattr(run_file, section).model_copy(update=values)
    assert why_unsupported(run_file) == ""
    assert reason in why_unsupported(run_file.model_copy(update={section: changed}))


@pytest.fixture
def proof(run_file, monkeypatch):
    """Return a function that makes a proof whose processes print the given texts.

    A part without a text fails. The words of all commands are in `proof.commands`.
    """

    def make(outputs, *words):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        made = Proof(parser.parse_args(["run.json", *words]), run_file)
        made.commands = []

        def call(part, words, accepted=(0,)):
            made.commands.append(words)
            name = "machine" if words[-1] == "machine" else part.name
            if name not in outputs:
                part.status, part.summary = "failed", f"{name} has failed"
                return None
            return json.dumps(outputs[name])

        monkeypatch.setattr(made, "_call", call)
        return made

    return make


GPU = {"host": "node", "gpus": [{"name": "H200", "memory": 1 << 37}]}
CPU = {"host": "node", "gpus": []}


def result_of(made, name):
    made._machine()
    part = made._parts[name]
    getattr(made, f"_{name}")(part)
    return part.status, part.summary


def test_a_model_that_does_not_fit_the_tuned_loop_is_a_result(proof):
    made = proof({"machine": GPU, "tuned_loop": {"fits": False}})
    status, summary = result_of(made, "tuned_loop")
    assert (status, "does not fit" in summary) == ("measured", True)
    made._parts["training"].details = {"samples_per_s": 2.0}
    made._comparison(made._parts["comparison"])
    comparison = made._parts["comparison"]
    assert comparison.status == "measured"
    assert comparison.summary == "gracetune trains 2 samples/s; the tuned loop does not fit"


def test_a_run_that_the_tuned_loop_cannot_train_is_skipped(proof):
    made = proof({"machine": GPU, "tuned_loop": {"unsupported": "adapter.kind: lokr"}})
    assert result_of(made, "tuned_loop") == ("skipped", "adapter.kind: lokr")
    assert sum("tuned_loop" in words for words in made.commands) == 1


def test_a_tuned_loop_that_breaks_has_failed(proof):
    assert result_of(proof({"machine": GPU}), "tuned_loop") == ("failed", "tuned_loop has failed")


def test_an_unknown_machine_is_not_one_without_a_gpu(proof):
    made = proof({"diagnose": {"summary": {"fail": 1}, "checks": []}})
    assert result_of(made, "tuned_loop") == ("skipped", UNKNOWN_GPU)
    assert result_of(made, "diagnose")[0] == "failed"
    assert result_of(proof({"machine": CPU}, "-o", "other"), "tuned_loop") == ("skipped", NO_GPU)


def test_no_compared_block_is_a_failure(proof):
    made = proof({"gradients": {"passed": False, "blocks": []}})
    assert result_of(made, "gradients") == ("failed", "no block was compared")


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [("", "", "passed"), ("", "noise", "failed"), ("noise", "noise", "passed")],
)
def test_a_training_fails_if_its_samples_turn_into_noise(proof, before, after, status):
    made = proof({"training": ""}, "--steps", "10")
    run = made._output
    for step, problem in ((0, before), (10, after)):
        folder = run / "validation" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        record = {"samples": [{"number": 0, "problem": problem}]}
        (folder / "samples.json").write_text(json.dumps(record))
    step = {"event": "step_done", "loss": 1.0, "seconds": 0.5, "samples": 2}
    events = [{"event": "run_described", "versions": {}}, *([step] * 10)]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    part = made._parts["training"]
    made._training(part)
    assert part.status == status
    assert part.details["samples_per_s"] == 4.0
    assert ("as before training" in part.summary) == (before == "noise")


def test_every_process_gets_the_users_settings(proof):
    made = proof({"machine": GPU}, "--set", "adapter.rank=8")
    for name in ("gradients", "tuned_loop", "training"):
        getattr(made, f"_{name}")(Part(name, name))
    made._machine()
    assert all("adapter.rank=8" in words for words in made.commands)
    assert made.commands[-1][-2:] == ["--part", "machine"]


def prove(*words):
    return run_python("-m", "gracetune", "prove", "run.json", *words)


@pytest.mark.slow
def test_a_proof_without_a_gpu_skips_what_needs_one(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    done = prove("--steps", "10", "-o", "proof")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(Path("proof/proof.json").read_text())
    assert document["format"] == FORMAT
    parts = {part["name"]: part for part in document["parts"]}
    status = {name: part["status"] for name, part in parts.items()}
    # The fixture's model is too small for images: its samples are noise before training, too.
    assert parts["training"]["details"]["sample_problems"] == ["noise"]
    assert parts["training"]["details"]["new_sample_problems"] == 0
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
