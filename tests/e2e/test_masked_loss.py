"""Training with masks: the loss is weighted by the mask, in every cache mode."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.cache.shard_store import ShardStore
from gracetune.config.schema import RunFile
from gracetune.data.augment import render_mask, sample_transform
from gracetune.data.images import choose_decoders
from gracetune.data.pipeline import latent_grid, required_keys
from gracetune.errors import CheckpointError, ConfigError
from gracetune.events.run_control import RunControl
from gracetune.events.types import StepDone, Validated
from gracetune.models.tiny import load
from gracetune.train.accelerator import start_accelerator
from gracetune.train.build import build_session
from gracetune.train.loop import train_loop
from gracetune.train.run import SignalHandler, run_training
from gracetune.train.step import TrainProgress, batch_losses

STEPS = 5
PICTURES = 8
CELL = 4
RANDOM = {
    "crop": "random",
    "augmentations": [{"name": "flip"}, {"name": "rotate"}, {"name": "erase"}],
}
MODES = {
    "plain": {},
    "variants": {**RANDOM, "augmentations_cache_mode": "static", "variants": 2},
    "refresh_each_epoch": {**RANDOM, "augmentations_cache_mode": "refresh_each_epoch"},
    "disable_cache": {**RANDOM, "augmentations_cache_mode": "disable_cache"},
}
AUGMENTATION_EPOCH = {
    "plain": lambda epoch: 0,
    "variants": lambda epoch: epoch % 2,
    "refresh_each_epoch": lambda epoch: epoch,
    "disable_cache": lambda epoch: epoch,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of images, of masks that are white on the left, and of all-white masks."""
    root = tmp_path_factory.mktemp("masked")
    for name in ("pictures", "others", "masks", "white"):
        (root / name).mkdir()
    for number in range(PICTURES):
        random = np.random.default_rng(number)
        for name in ("pictures", "others"):
            pixels = random.integers(0, 256, (40, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
        mask = np.zeros((80, 64), np.uint8)  # another size with the same aspect ratio
        mask[:, : 10 + 6 * number] = 255
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
        Image.fromarray(np.full((40, 32), 255, np.uint8)).save(root / "white" / f"{number}.png")
    return root


@pytest.fixture
def build_run(folders, tmp_path):
    def make(name, *, mask="masks", steps=STEPS, beside=None, cache=None, **settings):
        dataset = {
            "id": "masked",
            "instance_data_dir": str(folders / "pictures"),
            "caption_strategy": "filename",
            "resolution": 24,
            "max_aspect": 2.0,
            **({"mask_data_dir": str(folders / mask)} if mask else {}),
            **settings,
        }
        return RunFile.model_validate(
            {
                "output_dir": str(tmp_path / name),
                "seed": 5,
                "datasets": [dataset, *([beside] if beside else [])],
                "cache_config": cache or {},
                "train": {"max_train_steps": steps, "batch_size": 4, "checkpoint_every": 0},
                "optimizer": {"lr": 1e-3},
                "logging": {"tensorboard": False, "every": 1},
                "validation": {"every": 0},
            }
        )

    return make


@pytest.fixture
def build(recorder):
    def make(run):
        folder = Path(run.output_dir)
        folder.mkdir(exist_ok=True)
        return build_session(
            run, start_accelerator(run), recorder, RunControl(folder), SignalHandler()
        )

    return make


def losses(recorder):
    return {event.step: event.loss for event in recorder.of(StepDone)}


def train(run, recorder):
    recorder.events.clear()
    run_training(run, sinks=[recorder])
    return losses(recorder)


def weights(run):
    steps = sorted((Path(run.output_dir) / "checkpoints").glob("step-*"))
    return json.loads((steps[-1] / "manifest.json").read_text())["files"]


def expected_weights(run, draw, augmentation_epoch):
    """Compute the loss weights of one draw from the mask file and the run file."""
    section = next(d for d in run.datasets if d.id == draw.sample.dataset)
    width, height = draw.size
    if section.mask_data_dir is None:
        return torch.ones(height // CELL, width // CELL)
    decoders = choose_decoders()
    recipe = sample_transform(section, draw.sample, run.seed, augmentation_epoch, decoders.lanczos)
    data = (Path(section.mask_data_dir) / draw.sample.key).read_bytes()
    pixels = render_mask(data, recipe, draw.size, decoders)[0]
    if section.mask_invert:
        pixels = 1 - pixels
    cells = pixels.reshape(height // CELL, CELL, width // CELL, CELL).mean((1, 3))
    levels = (cells * 255).round() / 255
    found = section.mask_background + (1 - section.mask_background) * levels
    return found / found.mean() if section.mask_normalize and found.any() else found


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_with_the_weights_of_its_masks(build_run, build, recorder, mode):
    """Compare the weights of each batch with weights computed here."""
    session = build(build_run("expected", **MODES[mode]))
    run, load_batch = session.state.run, session.pipeline.load
    recorder.events.clear()

    def load(draws):
        expected = [
            expected_weights(run, draw, AUGMENTATION_EPOCH[mode](draw.epoch)) for draw in draws
        ]
        batch = load_batch(draws)
        # An average between two grey values may be rounded up or down: one of 255, over the mean.
        torch.testing.assert_close(batch.weights, torch.stack(expected), rtol=0, atol=0.2)
        return batch

    session.pipeline.load = load
    train_loop(session, TrainProgress())
    expected = losses(recorder)
    assert len(set(expected.values())) == STEPS
    assert train(build_run("fed", **MODES[mode]), recorder) == expected
    without = train(build_run("without", mask=None, **MODES[mode]), recorder)
    assert not set(without.values()) & set(expected.values())


def test_white_masks_do_not_change_training(build_run, recorder):
    expected = train(build_run("without", mask=None), recorder)
    assert train(build_run("white", mask="white"), recorder) == expected
    assert weights(build_run("white", mask="white")) == weights(build_run("without", mask=None))


def test_black_cells_give_no_gradient(build_run, build):
    """The prediction in a masked cell must not matter."""
    session = build(build_run("run", mask_normalize=False))
    t, draws = session.state, session.pipeline.order.batch_at(0)
    batch = session.pipeline.load(draws)
    said = []
    real = t.family.predict

    def predict(*arguments):
        said.append(real(*arguments))
        said[0].retain_grad()
        return said[0]

    family = replace(t.family)
    object.__setattr__(family, "predict", predict)
    batch_losses(replace(t, family=family), batch).sum().backward()
    silent = said[0].grad.abs().sum(1) == 0
    assert torch.equal(silent, batch.weights == 0)
    assert 0 < silent.float().mean() < 1


def test_samples_without_a_mask_have_full_weight(build_run, build, folders, recorder):
    beside = {
        "id": "plain",
        "instance_data_dir": str(folders / "others"),
        "caption_strategy": "filename",
        "resolution": 24,
        "max_aspect": 2.0,
    }
    session = build(build_run("run", beside=beside, mask_background=0.25))
    run, order = session.state.run, session.pipeline.order
    mixed = 0
    for index in range(order.epoch_length):
        draws = order.batch_at(index)
        batch = session.pipeline.load(draws)
        kinds = {draw.sample.dataset for draw in draws}
        mixed += len(kinds) == 2
        if kinds == {"plain"}:
            assert batch.weights is None
            continue
        for draw, found in zip(draws, batch.weights, strict=True):
            torch.testing.assert_close(found, expected_weights(run, draw, 0), rtol=0, atol=0.01)
            if draw.sample.dataset == "plain":
                assert torch.equal(found, torch.ones_like(found))
    assert mixed
    train(build_run("trained", beside=beside, mask_background=0.25), recorder)
    assert all(np.isfinite(list(losses(recorder).values())))


def test_inverted_masks_reach_the_loss(build_run, build):
    session = build(build_run("run", mask_invert=True, mask_normalize=False))
    run, draws = session.state.run, session.pipeline.order.batch_at(0)
    expected = torch.stack([expected_weights(run, draw, 0) for draw in draws])
    found = session.pipeline.load(draws).weights
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    assert (found[:, :, -1] > 0.9).any()


@pytest.mark.parametrize("cache", [{"persistent_cache": True}, {"vae_cache_type": "disk"}])
def test_masks_are_cached_with_the_latents(build_run, recorder, cache, tmp_path):
    expected = train(build_run("memory"), recorder)
    run = build_run("kept", cache=cache)
    assert train(run, recorder) == expected
    with ShardStore(tmp_path / "kept" / "cache" / "latents") as store:
        names = sorted(name for key in store.keys() for name in store.get(key))  # noqa: SIM118
        assert names == ["latents"] * PICTURES + ["mask"] * PICTURES
        assert set(store.keys()) <= required_keys(run, load(run.model), recorder)
    # A second run uses the cache: no mask is rendered, and the losses are the same.
    again = run.model_copy(update={"output_dir": str(tmp_path / "again")})
    cached = run.cache_config.model_copy(update={"cache_dir": str(tmp_path / "kept" / "cache")})
    assert train(again.model_copy(update={"cache_config": cached}), recorder) == expected
    stages = {event.stage for event in recorder.events if type(event).__name__ == "StageProgress"}
    assert "rendering masks" not in stages


def test_the_held_out_loss_is_masked_too(build_run, recorder):
    found = {}
    for name, mask in (("without", None), ("masked", "masks")):
        run = build_run(name, mask=mask, steps=1)
        section = run.validation.model_copy(update={"every": 1, "holdout": 0.5})
        train(run.model_copy(update={"validation": section}), recorder)
        event = recorder.of(Validated)[-1]
        found[name] = tuple(event.losses.values())
    assert found["without"] != found["masked"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mask": "white"}, "training samples"),
        ({"mask_background": 0.5}, "mask_background"),
        ({"mask_invert": True}, "mask_invert"),
    ],
)
def test_resuming_with_other_masks_is_rejected(build_run, recorder, change, named):
    train(build_run("run", steps=2), recorder)
    with pytest.raises(CheckpointError, match=named):
        train(build_run("run", **change), recorder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": None, "mask_background": 0.5}, r"datasets\[0\]\.mask_background is 0\.5, but"),
        ({"mask": None, "mask_invert": True}, r"datasets\[0\]\.mask_invert is True, but"),
        ({"mask": None, "mask_normalize": False}, r"datasets\[0\]\.mask_normalize is False, but"),
    ],
)
def test_mask_settings_without_masks_are_rejected(build_run, recorder, settings, message):
    with pytest.raises(ConfigError, match=message):
        train(build_run("run", **settings), recorder)


def test_a_latent_grid_is_the_last_two_dimensions(build_run):
    assert latent_grid(load(build_run("run").model), (24, 32)) == (8, 6)
