"""Training from the cache is training with live encoding, bit for bit, in every mode."""

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
from gracetune.data.sample import Batch
from gracetune.events.run_control import RunControl
from gracetune.events.types import BatchesFed, StepDone
from gracetune.train.build import build_session, start_accelerator
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler, run_training
from gracetune.train.step import TrainProgress

STEPS = 7  # three epochs of two batches, and one batch more
PICTURES = 8
GENERATION = {
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
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(PICTURES):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, (40, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"picture {number}.png")
    return folder


@pytest.fixture
def made(pictures, tmp_path):
    def make(name, mode, cache, steps=STEPS, **train):
        dataset = {
            "id": "d",
            "instance_data_dir": str(pictures),
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


def losses(told):
    return {event.step: event.loss for event in told.of(StepDone)}


def weights(run):
    steps = sorted((Path(run.output_dir) / "checkpoints").glob("step-*"))
    return json.loads((steps[-1] / "manifest.json").read_text())["files"]


def entries_in(folder):
    with ShardStore(folder) as store:
        keys = list(store.keys())
        return {key: store.get(key)["latents"].tolist() for key in keys}


def trained(run, told):
    told.events.clear()
    run_training(run, sinks=[told])
    return losses(told)


def trained_live(run, mode, told):
    """The same loop, fed by the data layer and the encoder alone."""
    told.events.clear()
    folder = Path(run.output_dir)
    folder.mkdir()
    session = build_session(run, start_accelerator(run), told, RunControl(folder), SignalHandler())
    (section,) = run.datasets
    family, decoders = session.state.family, choose_decoders()

    def load(draws):
        pixels = []
        for draw in draws:
            recipe = sample_transform(
                section, draw.sample, run.seed, GENERATION[mode](draw.epoch), decoders.lanczos
            )
            data = (Path(section.instance_data_dir) / draw.sample.key).read_bytes()
            pixels.append(render(data, recipe, draw.size, decoders))
        text = family.stack_text(family.encode_text([draw.caption for draw in draws]))
        latents = family.encode(torch.stack(pixels))
        return Batch(latents, text, tuple(draw.sample for draw in draws))

    session.pipeline.load = load
    train_loop(session, TrainProgress())
    return losses(told)


@pytest.mark.parametrize("mode", MODES)
def test_cached_training_is_live_training(made, told, mode):
    expected = trained_live(made("live", mode, "memory"), mode, told)
    assert len(set(expected.values())) == STEPS
    assert trained(made("cached", mode, "memory"), told) == expected
    assert weights(made("cached", mode, "memory")) == weights(made("live", mode, "memory"))


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "memory"])
@pytest.mark.parametrize("mode", ["variants", "refresh_each_epoch"])
def test_where_the_cache_lives_changes_nothing(made, told, mode, cache):
    expected = trained(made("memory", mode, "memory"), told)
    assert trained(made(cache, mode, cache), told) == expected
    assert weights(made(cache, mode, cache)) == weights(made("memory", mode, "memory"))


@pytest.mark.parametrize(
    ("mode", "cache"),
    [*((mode, "memory") for mode in MODES), ("variants", "kept"), ("refresh_each_epoch", "kept")],
)
def test_resumed_is_uninterrupted(made, told, mode, cache):
    """Stopped in the middle of an epoch, while the next generation is being encoded."""
    whole = trained(made("whole", mode, cache), told)
    parts = trained(made("parts", mode, cache, steps=3), told)
    parts |= trained(made("parts", mode, cache, steps=4), told)  # an epoch's last batch
    parts |= trained(made("parts", mode, cache), told)
    assert parts == whole
    assert weights(made("parts", mode, cache)) == weights(made("whole", mode, cache))


def test_modes_show_other_pictures(made, told):
    found = {mode: trained(made(mode, mode, "memory"), told) for mode in MODES}
    assert found["refresh_each_epoch"] == found["disable_cache"]
    different = {tuple(found[mode].values()) for mode in MODES}
    assert len(different) == len(MODES) - 1
    first_epoch = {mode: [found[mode][step] for step in (1, 2)] for mode in MODES}
    assert first_epoch["static"] == first_epoch["variants"] == first_epoch["refresh_each_epoch"]


def test_old_generations_are_deleted_and_nothing_else_is(made, told, tmp_path):
    run = made("run", "refresh_each_epoch", "kept")
    own = tmp_path / "run" / "generations"
    trained(run, told)
    left = sorted(path.name for path in own.glob("generation-*"))
    assert left == ["generation-3", "generation-4"]
    (own / "notes").mkdir()
    neighbour = tmp_path / "run" / "cache" / "latents"
    before = entries_in(neighbour)
    assert len(before) == PICTURES
    trained(made("run", "refresh_each_epoch", "kept", steps=9), told)
    assert sorted(path.name for path in own.glob("generation-*")) == [
        "generation-4",
        "generation-5",
    ]
    assert (own / "notes").is_dir()
    assert entries_in(neighbour) == before


def test_what_feeding_cost_is_told(made, told):
    trained(made("run", "static", "memory"), told)
    fed = told.of(BatchesFed)[-1]
    assert (fed.step, fed.batches, fed.depth, fed.waits) == (STEPS, STEPS, 0, 0)
    assert (fed.hits, fed.reads) == (2 * 4 * STEPS, 0)
    trained(made("disk", "static", "disk"), told)
    fed = told.of(BatchesFed)[-1]
    assert (fed.hits, fed.reads) == (0, 2 * 4 * STEPS)
