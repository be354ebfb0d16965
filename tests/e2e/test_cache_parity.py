"""Training from the cache equals training with live encoding, bit for bit, in every mode."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.cache.shard_store import ShardStore
from gracetune.config.schema import RunFile
from gracetune.data.augment import render, sample_transform
from gracetune.data.images import choose_decoders
from gracetune.data.pipeline import SOME_TEXTS
from gracetune.data.sample import Batch
from gracetune.events.run_control import RunControl
from gracetune.events.types import BatchesFed, StepDone
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler, run_training
from gracetune.train.step import TrainProgress

STEPS = 7  # three epochs of two batches each, plus one batch
PICTURES = 8
AUGMENTATION_EPOCH = {
    "plain": lambda epoch: 0,
    "static": lambda epoch: 0,
    "variants": lambda epoch: epoch % 2,
    "refresh_each_epoch": lambda epoch: epoch,
    "disable_cache": lambda epoch: epoch,
}
RANDOM = {
    "crop": "random",
    "augmentations": [{"name": "flip"}, {"name": "rotate"}, {"name": "brightness"}],
}
MODES = {
    "plain": {},
    "static": RANDOM,
    "variants": {**RANDOM, "augmentations_cache_mode": "static", "variants": 2},
    "refresh_each_epoch": {**RANDOM, "augmentations_cache_mode": "refresh_each_epoch"},
    "disable_cache": {**RANDOM, "augmentations_cache_mode": "disable_cache"},
}
CACHES = {
    "memory": {},
    "unified": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
    "kept": {"persistent_cache": True},
    "disk": {"vae_cache_type": "disk", "text_cache_type": "disk"},
    "spilling": {"persistent_cache": True, "host_budget_gb": 24 * 1024 / 2**30},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(PICTURES):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, (40, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"picture {number}.png")
    return folder


@pytest.fixture
def build_run(images, tmp_path):
    def make(name, mode, cache, steps=STEPS, **train):
        dataset = {
            "id": "d",
            "instance_data_dir": str(images),
            "caption_strategy": "filename",
            "resolution": 24,
            "max_aspect": 2.0,
            "caption_dropout": 0.3,
            **MODES[mode],
        }
        return RunFile.model_validate(
            {
                "output_dir": str(tmp_path / name),
                "seed": 5,
                "datasets": [dataset],
                "cache_config": CACHES[cache],
                "train": {
                    "max_train_steps": steps,
                    "batch_size": 4,
                    "checkpoint_every": 0,
                    **train,
                },
                "optimizer": {"lr": 1e-3},
                "logging": {"tensorboard": False, "every": 1},
                "validation": {"every": 0},
            }
        )

    return make


def losses(recorder):
    return {event.step: event.loss for event in recorder.of(StepDone)}


def weights(run):
    steps = sorted((Path(run.output_dir) / "checkpoints").glob("step-*"))
    return json.loads((steps[-1] / "manifest.json").read_text())["files"]


def entries_in(folder):
    with ShardStore(folder) as store:
        keys = list(store.keys())
        return {key: store.get(key)["latents"].tolist() for key in keys}


def train(run, recorder):
    recorder.events.clear()
    run_training(run, sinks=[recorder])
    return losses(recorder)


def train_live(run, mode, recorder):
    """Train with batches that are read and encoded without the cache."""
    recorder.events.clear()
    folder = Path(run.output_dir)
    folder.mkdir()
    session = build_session(
        run, start_accelerator(run), recorder, RunControl(folder), SignalHandler()
    )
    (section,) = run.datasets
    family, decoders = session.state.family, choose_decoders()

    def load(draws):
        pixels = []
        for draw in draws:
            recipe = sample_transform(
                section,
                draw.sample,
                run.seed,
                AUGMENTATION_EPOCH[mode](draw.epoch),
                decoders.lanczos,
            )
            data = (Path(section.instance_data_dir) / draw.sample.key).read_bytes()
            pixels.append(render(data, recipe, draw.size, decoders))
        text = family.stack_text(family.encode_text([draw.caption for draw in draws]))
        latents = family.encode(torch.stack(pixels))
        return Batch(latents, text, tuple(draw.sample for draw in draws))

    session.pipeline.load = load
    train_loop(session, TrainProgress())
    return losses(recorder)


@pytest.mark.parametrize("mode", MODES)
def test_cached_training_equals_live_training(build_run, recorder, mode):
    expected = train_live(build_run("live", mode, "memory"), mode, recorder)
    assert len(set(expected.values())) == STEPS
    assert train(build_run("cached", mode, "memory"), recorder) == expected
    assert weights(build_run("cached", mode, "memory")) == weights(
        build_run("live", mode, "memory")
    )


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "memory"])
@pytest.mark.parametrize("mode", ["variants", "refresh_each_epoch"])
def test_the_location_of_the_cache_does_not_change_training(build_run, recorder, mode, cache):
    expected = train(build_run("memory", mode, "memory"), recorder)
    assert train(build_run(cache, mode, cache), recorder) == expected
    assert weights(build_run(cache, mode, cache)) == weights(build_run("memory", mode, "memory"))


@pytest.mark.parametrize(
    ("mode", "cache"),
    [*((mode, "memory") for mode in MODES), ("variants", "kept"), ("refresh_each_epoch", "kept")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(build_run, recorder, mode, cache):
    """The run stops in the middle of an epoch, while the next augmentation epoch is encoded."""
    whole = train(build_run("whole", mode, cache), recorder)
    parts = train(build_run("parts", mode, cache, steps=3), recorder)
    parts |= train(build_run("parts", mode, cache, steps=4), recorder)  # the last batch of an epoch
    parts |= train(build_run("parts", mode, cache), recorder)
    assert parts == whole
    assert weights(build_run("parts", mode, cache)) == weights(build_run("whole", mode, cache))


def test_augmentation_modes_train_on_different_images(build_run, recorder):
    found = {mode: train(build_run(mode, mode, "memory"), recorder) for mode in MODES}
    assert found["refresh_each_epoch"] == found["disable_cache"]
    different = {tuple(found[mode].values()) for mode in MODES}
    assert len(different) == len(MODES) - 1
    first_epoch = {mode: [found[mode][step] for step in (1, 2)] for mode in MODES}
    assert first_epoch["static"] == first_epoch["variants"] == first_epoch["refresh_each_epoch"]


def test_only_old_augmentation_epochs_are_deleted(build_run, recorder, tmp_path):
    run = build_run("run", "refresh_each_epoch", "kept")
    own = tmp_path / "run" / "generations"
    train(run, recorder)
    left = sorted(path.name for path in own.glob("generation-*"))
    assert left == ["generation-3", "generation-4"]
    (own / "notes").mkdir()
    neighbour = tmp_path / "run" / "cache" / "latents"
    before = entries_in(neighbour)
    assert len(before) == PICTURES
    train(build_run("run", "refresh_each_epoch", "kept", steps=9), recorder)
    assert sorted(path.name for path in own.glob("generation-*")) == [
        "generation-4",
        "generation-5",
    ]
    assert (own / "notes").is_dir()
    assert entries_in(neighbour) == before


def test_batch_statistics_are_emitted(build_run, recorder):
    train(build_run("run", "static", "memory"), recorder)
    fed = recorder.of(BatchesFed)[-1]
    assert (fed.step, fed.batches, fed.depth, fed.waits) == (STEPS, STEPS, 0, 0)
    looked_at = 2 * SOME_TEXTS  # captions, by the health checks
    assert (fed.hits, fed.reads) == (2 * 4 * STEPS + looked_at, 0)
    train(build_run("disk", "static", "disk"), recorder)
    fed = recorder.of(BatchesFed)[-1]
    assert (fed.hits, fed.reads) == (0, 2 * 4 * STEPS + looked_at)
