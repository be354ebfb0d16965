"""Optimizers in a whole run: resuming, learning-rate histograms and averaged weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gracetune.events.log import read_events
from gracetune.events.types import RatesSpread, StepDone
from gracetune.train.run import run_training


def weights(run):
    (file,) = Path(run.output_dir).glob("checkpoints/step-000004/weights.safetensors")
    return load_file(file)


@pytest.mark.parametrize("name", ["automagic", "muon", "schedule_free"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tiny_run, tmp_path, name):
    ended = []
    for folder, parts in (("whole", [4]), ("parts", [2, 4])):
        for steps in parts:
            run = tiny_run(
                output_dir=str(tmp_path / folder),
                optimizer={"name": name, "warmup_steps": 2},
                train={"max_train_steps": steps, "checkpoint_every": 2, "ema_decay": 0},
            )
            run_training(run)
        ended.append(weights(run))
    assert ended[0].keys() == ended[1].keys()
    for key, value in ended[0].items():
        assert torch.equal(value, ended[1][key]), key


def test_automagic_logs_a_histogram_and_the_mean_learning_rate(tiny_run, recorder):
    run = tiny_run(
        optimizer={"name": "automagic", "lr": 1e-5, "lr_bump": 1e-6},
        gh200_optimizations={
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 4,
            "target_effective_batch_size": 12,
            "batch_rampup_steps": 4,
        },
    )
    run_training(run, sinks=[recorder])
    histograms, steps = recorder.of(RatesSpread), recorder.of(StepDone)
    assert (
        [histogram.step for histogram in histograms] == [step.step for step in steps] == [1, 2, 3]
    )
    assert len({step.accumulation for step in steps}) > 1, "the ramp did not move"
    total = sum(histograms[0].counts)
    assert all(sum(histogram.counts) == total for histogram in histograms)
    assert len(histograms[0].limits) == len(histograms[0].counts) + 1
    lowest = histograms[0].limits[next(i for i, n in enumerate(histograms[0].counts) if n)]
    assert lowest == pytest.approx(1e-5, rel=0.5)
    assert steps[0].lr == pytest.approx(1e-5)
    assert steps[2].lr != steps[0].lr
    logged = list(read_events(Path(run.output_dir) / "events.jsonl"))
    assert sum(event["event"] == "rates_spread" for event in logged) == 3


def test_schedule_free_validates_and_exports_its_average(tiny_run, tmp_path):
    run = tiny_run(
        optimizer={"name": "schedule_free", "lr": 0.01},
        train={"ema_decay": 0, "max_train_steps": 4, "checkpoint_every": 2},
        validation={"every": 2, "prompts": ["a red circle"], "sample_steps": 2, "holdout": 0.1},
    )
    run_training(run)
    (file,) = Path(run.output_dir).glob("model/transformer/*.safetensors")
    exported, trained = load_file(file), weights(run)
    assert any(not torch.equal(exported[key], trained[key]) for key in trained)
    unvalidated = run.model_copy(
        update={
            "output_dir": str(tmp_path / "unvalidated"),
            "validation": run.validation.model_copy(update={"every": 4}),
        }
    )
    run_training(unvalidated)
    for key, value in weights(unvalidated).items():
        assert torch.equal(value, trained[key]), "validating changed the run"


def test_automagic_trains_two_experts_and_keeps_every_learning_rate(tiny_run, miniature, recorder):
    """The run is resumed before the low-noise expert is trained for the first time."""
    sections = {
        "model": {"family": "wan22", "path": str(miniature("wan22-t2v"))},
        "adapter": {"kind": "lora", "rank": 2},
        "optimizer": {
            "name": "automagic",
            "lr": 1e-6,
            "high_noise_lr_bump": 1e-6,
            "low_noise_lr_bump": 5e-7,
            "high_noise_max_lr": 1e-3,
            "low_noise_max_lr": 5e-4,
        },
    }
    for steps in (2, 4):
        train = {"max_train_steps": steps, "checkpoint_every": 2, "ema_decay": 0, "switch_every": 2}
        run = tiny_run(**sections, train=train)
        run_training(run, sinks=[recorder])
    folder = Path(run.output_dir) / "checkpoints"
    first, last = (
        dict(load_file(folder / name / "optimizer.safetensors").items())
        for name in ("step-000002", "step-000004")
    )
    rates = {key for key in last if key.endswith("|rate")}
    high = {key for key in rates if key.startswith("high.")}
    assert {key for key in first if key.endswith("|rate")} == high
    assert high < rates
    for key in high:  # not trained in the second part
        assert torch.equal(first[key], last[key])
    assert {histogram.expert for histogram in recorder.of(RatesSpread)} == {"high", "low"}
