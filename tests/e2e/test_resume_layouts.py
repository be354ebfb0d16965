"""A run resumes on another number of ranks, and if they divide the weights in another way."""

import json
import os
import random
import shutil
import time
from collections import namedtuple
from itertools import product
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from fakes.family_sessions import family_run
from fork_process import PythonProcess, rank_environments, run_python, run_ranks
from safetensors.torch import load_file

from gracetune.train.checkpoint import find_snapshot, load_snapshot, load_tensors

Layout = namedtuple("Layout", "ranks strategy shard_size", defaults=("auto", None))
LAYOUTS = {
    "one": Layout(1),
    "replicate": Layout(2, "replicate"),
    "fsdp2": Layout(2, "fsdp2"),
    "fsdp2-4": Layout(4, "fsdp2"),
    "fsdp2-3": Layout(3, "fsdp2"),
    "hsdp": Layout(4, "hsdp", 2),
}
PAIRS = [("one", "fsdp2"), ("fsdp2", "one"), ("fsdp2", "replicate")]
"""Layouts that save and resume in every test run; `make test-distributed` has all pairs."""
STEPS, SAVED_AT = 4, 2
TRAIN = {
    "max_train_steps": STEPS,
    "checkpoint_every": SAVED_AT,
    "batch_size": 1,
    "effective_batch_size": 12,
    "ema_decay": 0.9,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains the same run in a layout, once, and returns its folder."""
    folder = tmp_path_factory.mktemp("layouts")
    run = family_run(folder, "tiny", adapter=None, plan="off", train=TRAIN)
    file = folder / "run.json"
    file.write_text(run.model_dump_json(exclude_unset=True))

    def call(layout):
        output = folder / layout
        if not output.exists():
            train(file, output, LAYOUTS[layout])
        return output

    call.file = file
    return call


def train(file, output, layout, *settings):
    settings = [f"output_dir={output}", f"distributed.strategy={layout.strategy}", *settings]
    if layout.shard_size is not None:
        settings.append(f"distributed.shard_size={layout.shard_size}")
    words = ["-m", "gracetune", "train", file]
    words += [word for setting in settings for word in ("--set", setting)]
    one = layout.ranks == 1
    for done in [run_python(*words)] if one else run_ranks(*words, count=layout.ranks):
        assert done.returncode == 0, done.stdout + done.stderr


def resume(trained, saved_by, resumed_by, output):
    """Copy the first half of a run that one layout has trained, and train the rest in another."""
    shutil.copytree(trained(saved_by), output)
    shutil.rmtree(output / "checkpoints" / f"step-{STEPS:06d}")
    shutil.rmtree(output / "model")
    train(trained.file, output, LAYOUTS[resumed_by])


def events(output, kind):
    lines = map(json.loads, (output / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def losses(output):
    return [event["loss"] for event in events(output, "step_done")]


ALL_PAIRS = [
    pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.distributed)
    for pair in product(LAYOUTS, LAYOUTS)
]


@pytest.mark.parametrize(("saved_by", "resumed_by"), ALL_PAIRS)
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(trained, saved_by, resumed_by, tmp_path):
    output = tmp_path / "run"
    resume(trained, saved_by, resumed_by, output)
    whole = losses(trained("one"))
    assert losses(trained(saved_by)) == pytest.approx(whole, rel=1e-6)
    assert losses(output)[STEPS:] == pytest.approx(whole[SAVED_AT:], rel=1e-6)
    texts = [event["text"] for event in events(output, "notice")]
    assert any("saved with another layout" in text for text in texts) == (
        saved_by != resumed_by and {saved_by, resumed_by} != {"one", "replicate"}
    )
    last = load_snapshot(output / f"checkpoints/step-{STEPS:06d}")
    assert last.num_ranks == LAYOUTS[resumed_by].ranks


def test_a_background_save_of_all_ranks_is_complete(trained):
    saved = events(trained("fsdp2"), "checkpoint_saved")
    assert [event["step"] for event in saved] == [SAVED_AT, STEPS]
    assert saved[0]["stall_seconds"] < saved[0]["seconds"]
    folder = trained("fsdp2") / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000004"]
    assert (folder / "step-000002/weights-00002-of-00002.safetensors").is_file()


def test_the_exported_model_has_the_averages_of_all_ranks(trained):
    one, divided = (trained(name) / "model/transformer" for name in ("one", "fsdp2"))
    assert (divided / "config.json").read_text() == (one / "config.json").read_text()
    found = load_file(divided / "diffusion_pytorch_model.safetensors")
    assert found.keys() == load_file(one / "diffusion_pytorch_model.safetensors").keys()
    averages = load_tensors(trained("fsdp2") / f"checkpoints/step-{STEPS:06d}", "ema")
    assert averages.keys() <= found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in averages.items())
    assert SD3Transformer2DModel.from_pretrained(divided).num_parameters() > 0


def test_ranks_agree_on_a_damaged_checkpoint(trained, tmp_path):
    """Each rank checks other files. The damaged one is among those of the second rank."""
    output = tmp_path / "run"
    shutil.copytree(trained("fsdp2"), output)
    newest = output / f"checkpoints/step-{STEPS:06d}"
    names = sorted(path.name for path in newest.glob("*.safetensors"))
    assert names[-1].startswith("weights-00002")
    assert len(names) % 2 == 0, "the second rank checks the last file"
    data = bytearray((newest / names[-1]).read_bytes())
    data[-1] ^= 1
    (newest / names[-1]).write_bytes(data)
    train(trained.file, output, LAYOUTS["fsdp2"])
    (text,) = [e["text"] for e in events(output, "notice") if "is damaged" in e["text"]]
    assert text.endswith("Resuming from step-000002 instead.")
    assert losses(output)[STEPS:] == losses(trained("fsdp2"))[SAVED_AT:]
    assert Path(output, "checkpoints/set-aside").is_dir()


LIMITED_DISK = """
import os, resource, signal, sys
from gracetune.cli.main import main
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_all_ranks_report_that_one_cannot_write_its_part(trained, tmp_path):
    """A limit on the file size makes the kernel reject writes, as a full disk would."""
    words = [f"output_dir={tmp_path / 'run'}", "distributed.strategy=fsdp2"]
    words = [word for setting in words for word in ("--set", setting)]
    for done in run_ranks("-c", LIMITED_DISK, trained.file, *words):
        assert done.returncode == 2
        assert "step-000002 cannot be written" in done.stderr
        assert "File too large" in done.stderr
        assert "Traceback" not in done.stderr
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


@pytest.mark.distributed
def test_ranks_that_are_killed_while_they_write_leave_a_whole_checkpoint(trained, tmp_path):
    generator = random.Random(0)
    output = tmp_path / "run"
    settings = ["train.max_train_steps=100000", "train.checkpoint_every=1"]
    settings += [f"output_dir={output}", "distributed.strategy=fsdp2", "train.keep_checkpoints=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    newest = 0
    for _ in range(4):
        environments = rank_environments(os.environ)
        ranks = [
            PythonProcess("-m", "gracetune", "train", trained.file, *words, env=env)
            for env in environments
        ]
        deadline = time.monotonic() + 120
        while newest_step(output) <= newest + 1:
            assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
        found = find_snapshot(output / "checkpoints", "auto", pytest.fail)
        assert found is not None
        assert found.progress.step > newest
        newest = found.progress.step


def newest_step(output):
    found = output.glob("checkpoints/step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)
