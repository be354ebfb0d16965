"""Several ranks compute what one process computes with the same samples in each step."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from fakes.family_sessions import family_run
from fork_process import run_python, run_ranks
from PIL import Image
from safetensors.torch import load_file

from gracetune.config.load import load_run_file
from gracetune.train.run import run_training

SCRIPT = Path(__file__).with_name("rank_cases.py")
TOLERANCE = 1e-6
"""Largest difference of gradients, relative to the norm of the gradient of the step."""
RAMP = {
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 8,
    "target_effective_batch_size": 16,
    "batch_rampup_steps": 6,
}
CASES = {
    "eager": {"train": {"effective_batch_size": 8, "ema_decay": 0.9}},
    "streamed": {"adapter": {"rank": 2, "dropout": 0.2}},
    "offloaded": {},
    "recomputed": {},
    "compiled": {},
    "compiled-broken": {"adapter": {"rank": 2, "dropout": 0.2}},
    "compiled-refused": {"plan": {"compile": "auto"}},
    "streamed-full": {},
    "eager-ramp": {"gh200_optimizations": RAMP, "train": {"effective_batch_size": None}},
    "eager-small": {
        "gh200_optimizations": RAMP
        | {"initial_effective_batch_size": 4, "target_effective_batch_size": 32},
        "train": {"batch_size": 8, "effective_batch_size": None},
    },
    "eager-masks": {},
    "eager-uneven": {"train": {"effective_batch_size": 10}},
    "eager-experts": {"train": {"batch_size": 1, "effective_batch_size": 4, "switch_every": 1}},
}
"""Name of a case -> sections of its run file."""


def write_cases(folder):
    """Write the run files of all cases, of which one trains both experts of Wan 2.2."""
    masks = folder / "masks"
    for name, sections in CASES.items():
        family = "wan22-t2v" if name == "eager-experts" else "tiny"
        train = {"batch_size": 2, "effective_batch_size": 8, "max_train_steps": 3}
        train |= {"checkpoint_every": 0} | sections.get("train", {})
        (folder / family).mkdir(exist_ok=True)
        run = family_run(folder / family, family, **{**sections, "train": train})
        settings = json.loads(run.model_dump_json(exclude_unset=True))
        settings["output_dir"] = str(folder / "runs" / name)
        if name == "eager-small":
            settings["datasets"][0]["repeats"] = 8  # buckets with more than one batch
        if name == "eager-masks":
            write_masks(Path(settings["datasets"][0]["instance_data_dir"]), masks)
            settings["datasets"][0]["mask_data_dir"] = str(masks)
        (folder / f"{name}.json").write_text(json.dumps(settings))


def write_masks(images, masks):
    masks.mkdir()
    for number, image in enumerate(sorted(images.glob("*.png"))):
        with Image.open(image) as picture:
            mask = np.zeros(picture.size[::-1], np.uint8)
        mask[:, : 4 + number] = 255
        Image.fromarray(mask).save(masks / image.name)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.distributed)])
def results(request, tmp_path_factory):
    """Train all cases in one process and on several ranks; return the results of a case."""
    folder = tmp_path_factory.mktemp("ranks")
    write_cases(folder)
    alone = run_python(SCRIPT, folder, "alone", env=os.environ)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    for done in run_ranks(SCRIPT, folder, "ranks", count=request.param, timeout=600):
        assert done.returncode == 0, done.stdout + done.stderr

    def read(case, name):
        file = folder / f"{case}-{name}"
        return json.loads(file.with_suffix(".result").read_text()), load_file(
            file.with_suffix(".safetensors")
        )

    return read


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_gradients_of_one_process(results, case):
    (alone, expected), (ranks, tensors) = results(case, "alone"), results(case, "ranks")
    assert ranks["samples"] == alone["samples"]
    assert ranks["micro_batches"] == alone["micro_batches"]
    assert ranks["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert tensors.keys() == expected.keys()
    # Matmuls over the parts of a micro-batch round differently from those over all of it.
    tolerance = 4 * TOLERANCE if case == "eager-small" else TOLERANCE
    for step in range(3):
        names = [name for name in expected if name.startswith(f"{step} ")]
        assert names
        norm = math.sqrt(sum(float(expected[name].square().sum()) for name in names))
        for name in names:
            difference = float((tensors[name] - expected[name]).norm())
            assert difference <= tolerance * norm, (name, difference / norm)


def test_a_ramp_has_the_same_steps_on_all_ranks(results):
    found, _ = results("eager-ramp", "ranks")
    assert found["micro_batches"] == [4, 6, 8]


def test_ranks_share_a_micro_batch_if_a_ramp_starts_below_one_for_each(results):
    found, _ = results("eager-small", "ranks")
    assert found["micro_batches"] == [1, 1, 1]
    assert found["samples"] == [4, 4, 8], "the pieces of a batch, and a whole one"


def test_a_last_batch_may_be_smaller_than_the_others(results):
    found, _ = results("eager-uneven", "ranks")
    assert found["micro_batches"] == [5, 5, 5], "of which one rank has one more"
    assert all(samples < 10 for samples in found["samples"])


def test_all_ranks_repeat_a_step_for_which_one_has_too_little_memory(results):
    found, _ = results("streamed-full", "ranks")
    (text,) = [text for text in found["texts"] if "out of memory" in text]
    assert text.startswith("rank 1 on ")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("compiled-broken", "a compiled block failed, so blocks run eagerly from now on"),
        ("compiled-refused", "compilation failed, so blocks run eagerly from now on"),
    ],
)
def test_all_ranks_run_eagerly_if_a_compiled_block_fails_on_one(results, case, reason):
    found, _ = results(case, "ranks")
    failed, planned = [text for text in found["texts"] if "slower" in text or "again" in text]
    assert failed.startswith("rank 1 on ")
    assert reason in failed
    assert planned.startswith("the run is planned again without compilation")


def losses_of(folder):
    lines = (folder / "events.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step_done"]
    return [event["loss"] for event in steps]


def test_a_run_resumes_on_another_number_of_ranks_with_the_same_samples(tmp_path):
    """Two ranks continue a run of one process, and one process continues a run of two ranks."""
    train = {"batch_size": 2, "effective_batch_size": 8, "checkpoint_every": 2}
    file = tmp_path / "run.json"
    file.write_text(family_run(tmp_path, "tiny", train=train).model_dump_json(exclude_unset=True))

    def train(name, steps, run_it):
        settings = [f"output_dir={tmp_path / name}", f"train.max_train_steps={steps}"]
        run_it(settings)

    def alone(settings):
        run_training(load_run_file(file, settings).run)

    def on_ranks(settings):
        words = [word for setting in settings for word in ("--set", setting)]
        for done in run_ranks("-m", "gracetune", "train", file, *words):
            assert done.returncode == 0, done.stdout + done.stderr

    train("whole", 4, alone)
    for name, first, second in (("grown", alone, on_ranks), ("shrunk", on_ranks, alone)):
        train(name, 2, first)
        train(name, 4, second)
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-6)
        text = (tmp_path / name / "events.jsonl").read_text()
        assert "each optimizer step has the same samples as before" in text
