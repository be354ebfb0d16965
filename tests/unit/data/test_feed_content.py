"""What a data set says of its pictures reaches the encoder; what cannot is refused by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.config.schema import RunFile
from gracetune.data.augment import recipe_of, render
from gracetune.data.images import choose_decoders
from gracetune.data.pipeline import DataPipeline
from gracetune.errors import ConfigError
from gracetune.models.tiny import load


@pytest.fixture
def folder(tmp_path):
    """Six pictures that no crop, flip or colour leaves alike."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(6):
        random = np.random.default_rng(number)
        pixels = random.integers(0, 256, (40, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"picture {number}.png")
    return pictures


@pytest.fixture
def made(folder, told, tmp_path):
    """A function from settings of the data set to its run, its family and its feed."""

    def make(**settings):
        dataset = {
            "id": "d",
            "instance_data_dir": str(folder),
            "caption_strategy": "filename",
            "resolution": 24,
            "max_aspect": 2.0,
            **settings,
        }
        output = tmp_path / "run"
        output.mkdir(exist_ok=True)
        run = RunFile.model_validate({"output_dir": str(output), "datasets": [dataset], "seed": 3})
        family = load(run.model)
        mover = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), told)
        return run, family, DataPipeline(run, family, mover, Path(output), told)

    return make


STATIC = {"augmentations_cache_mode": "static"}
FLIP = {"augmentations": [{"name": "flip", "probability": 1}], **STATIC}
MIXED = {
    "augmentations": [{"name": "flip"}, {"name": "rotate"}, {"name": "brightness"}],
    **STATIC,
}


@pytest.mark.parametrize("settings", [{}, {"crop": "random"}, {"crop": "top"}, FLIP, MIXED])
def test_batches_hold_the_latents_of_the_drawn_pixels(made, folder, settings):
    run, family, feed = made(**settings)
    decoders = choose_decoders()
    for index in range(feed.order.epoch_length):
        draws = feed.order.batch_at(index)
        for draw, latents in zip(draws, feed.load(draws).latents, strict=True):
            recipe = recipe_of(run.datasets[0], draw.sample, run.seed, lanczos=decoders.lanczos)
            data = (folder / draw.sample.key).read_bytes()
            wanted = family.encode(render(data, recipe, draw.size, decoders)[None])[0]
            assert torch.allclose(latents, wanted, atol=1e-5)


def test_augmented_latents_differ_from_plain_ones_and_are_drawn_once(made):
    def latents(**settings):
        _, _, feed = made(**settings)
        draws = sorted(
            (draw for at in range(feed.order.epoch_length) for draw in feed.order.batch_at(at)),
            key=lambda draw: draw.sample.key,
        )
        return feed.load(draws).latents

    plain, flipped = latents(), latents(**FLIP)
    assert not torch.allclose(plain, flipped, atol=1e-3)
    assert torch.equal(flipped, latents(**FLIP))


def test_an_epoch_follows_the_weight(made):
    _, _, feed = made(weight=0.5)
    assert feed.order.samples_per_epoch == 3
    _, _, feed = made(weight=1.5, repeats=2)
    assert feed.order.samples_per_epoch == 18


def test_the_decoders_are_told(made, told):
    made()
    assert choose_decoders().description in told.texts()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_type": "video"}, r"datasets\[0\]\.dataset_type is 'video'; tiny encodes images"),
        ({"dataset_type": "audio"}, r"datasets\[0\]\.dataset_type is 'audio'; tiny encodes images"),
        (
            {"mask_background": 0.1},
            r"datasets\[0\]\.mask_background is 0\.1, but there are no masks",
        ),
        ({"conditioning_data_dir": "x"}, r"datasets\[0\]\.conditioning_data_dir is 'x'"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(made, settings, message):
    with pytest.raises(ConfigError, match=message):
        made(**settings)
