"""Edits of a dataset or a run file: each encodes again exactly what it must."""

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gracetune.cache.batch_transfer import build_batch_transfer
from gracetune.config.schema import RunFile
from gracetune.data.pipeline import DataPipeline
from gracetune.models.tiny import load

COUNT = 6
FLIP = [{"name": "flip", "probability": 1.0}]
ROTATE = [{"name": "rotate", "probability": 1.0}]


@dataclass
class Scenario:
    """A folder of images, a run over it, and encoders with a name."""

    folder: Path
    cache: Path
    dataset: dict
    seed: int = 0
    encoder: str = "vae 1 float32"
    text_encoder: str = "t5 1 float32"

    def fill(self, output, recorder):
        """Return how many images and captions a run encodes before it trains."""
        encoded = Counter()
        family = load(RunFile().model)

        class CountingFamily:
            def __getattr__(self, name):
                return getattr(family, name)

            def identity(inner):  # noqa: N805
                return {"latents": self.encoder, "text": self.text_encoder}

            def encode(inner, pixels):  # noqa: N805
                encoded["images"] += len(pixels)
                return family.encode(pixels)

            def encode_text(inner, captions):  # noqa: N805
                encoded["captions"] += len(captions)
                return family.encode_text(captions)

        run = RunFile.model_validate(
            {
                "output_dir": str(output),
                "seed": self.seed,
                "datasets": [
                    {
                        "id": "d",
                        "instance_data_dir": str(self.folder),
                        "resolution": 24,
                        "max_aspect": 2.0,
                        **self.dataset,
                    }
                ],
                "cache_config": {"persistent_cache": True, "cache_dir": str(self.cache)},
                "validation": {"every": 0},
            }
        )
        output.mkdir(exist_ok=True)
        transfer = build_batch_transfer(run.gh200_optimizations, torch.device("cpu"), recorder)
        DataPipeline(run, CountingFamily(), transfer, output, recorder)
        return encoded["images"], encoded["captions"]


def paint(path, seed, size=(40, 32)):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def scenario(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(COUNT):
        paint(folder / f"{number}.png", number)
        (folder / f"{number}.txt").write_text(f"caption {number}")
    return Scenario(folder, tmp_path / "cache", {})


def repaint(w):
    paint(w.folder / "2.png", 99)


def repaint_two(w):
    paint(w.folder / "2.png", 98)
    paint(w.folder / "3.png", 99)


def one_pixel(w):
    with Image.open(w.folder / "4.png") as image:
        changed = image.copy()
    changed.putpixel((0, 0), (1, 2, 3))
    changed.save(w.folder / "4.png")


def caption(w):
    (w.folder / "1.txt").write_text("another caption")


def caption_like_another(w):
    (w.folder / "1.txt").write_text("caption 0")


def touch(w):
    for file in w.folder.iterdir():
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)


def rename(w):
    for ending in ("png", "txt"):
        (w.folder / f"0.{ending}").rename(w.folder / f"zero.{ending}")


def reverse(w):
    """Rename the files so that they sort in reverse."""
    for number in range(COUNT):
        for ending in ("png", "txt"):
            name = f"{number}.{ending}"
            (w.folder / name).rename(w.folder / f"{9 - number} {name}".replace(" ", "-"))


def move(w):
    shutil.move(w.folder, w.folder.with_name("elsewhere"))
    return replace(w, folder=w.folder.with_name("elsewhere"))


def deeper(w):
    (w.folder / "deep").mkdir()
    for ending in ("png", "txt"):
        (w.folder / f"5.{ending}").rename(w.folder / "deep" / f"5.{ending}")


def add(w):
    paint(w.folder / "new.png", 77)
    (w.folder / "new.txt").write_text("a new caption")


def add_a_copy(w):
    shutil.copy(w.folder / "0.png", w.folder / "copy.png")
    (w.folder / "copy.txt").write_text("caption 3")


def remove(w):
    (w.folder / "5.png").unlink()
    (w.folder / "5.txt").unlink()


def other_shape(w):
    paint(w.folder / "0.png", 0, (32, 40))


def settings(**dataset):
    return lambda w: replace(w, dataset=dataset)


def encoder(**names):
    return lambda w: replace(w, **names)


EDITS = {
    "nothing": (lambda w: None, (0, 0)),
    "one image's content": (repaint, (1, 0)),
    "two images' content": (repaint_two, (2, 0)),
    "one pixel": (one_pixel, (1, 0)),
    "one caption": (caption, (0, 1)),
    "a caption that another sample has": (caption_like_another, (0, 0)),
    "every file rewritten": (touch, (0, 0)),
    "a renamed file": (rename, (0, 0)),
    "the order of files": (reverse, (0, 0)),
    "a moved folder": (move, (0, 0)),
    "a file in a deeper folder": (deeper, (0, 0)),
    "a new sample": (add, (1, 1)),
    "a copy of an image": (add_a_copy, (0, 0)),
    "a removed sample": (remove, (0, 0)),
    "an image of another shape": (other_shape, (1, 0)),
    "the resolution": (settings(resolution=32), (COUNT, 0)),
    "the crop": (settings(crop="top"), (COUNT, 0)),
    "an augmentation": (settings(augmentations=FLIP), (COUNT, 0)),
    "the encoder's weights": (encoder(encoder="vae 2 float32"), (COUNT, 0)),
    "the encoder's dtype": (encoder(encoder="vae 1 bfloat16"), (COUNT, 0)),
    "the text encoder": (encoder(text_encoder="t5 2 float32"), (0, COUNT + 1)),
    "the seed where nothing is random": (encoder(seed=1), (0, 0)),
    "dropout, repeats and weight": (settings(caption_dropout=0.5, repeats=3), (0, 0)),
}


def test_there_are_twenty_edits():
    assert len(EDITS) >= 20


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_encodes_exactly_what_it_must(scenario, edit, recorder, tmp_path):
    assert scenario.fill(tmp_path / "first", recorder) == (
        COUNT,
        COUNT + 1,
    )  # plus the empty caption
    change, expected = EDITS[edit]
    edited = change(scenario) or scenario
    assert edited.fill(tmp_path / "second", recorder) == expected
    assert edited.fill(tmp_path / "third", recorder) == (0, 0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"augmentations": FLIP}, {"augmentations": ROTATE}, COUNT),
        ({"augmentations": FLIP}, {"augmentations": FLIP + ROTATE}, COUNT),
        ({"augmentations": FLIP + ROTATE}, {"augmentations": ROTATE + FLIP}, COUNT),
        ({"augmentations": FLIP}, {}, COUNT),
        ({"augmentations": ROTATE}, {"augmentations": ROTATE, "variants": 3}, 2 * COUNT),
        ({"augmentations": ROTATE, "variants": 3}, {"augmentations": ROTATE}, 0),
        ({"crop": "random"}, {"crop": "random", "augmentations_cache_mode": "static"}, 0),
        (
            {"augmentations": ROTATE},
            {"augmentations": ROTATE, "augmentations_cache_mode": "refresh_each_epoch"},
            0,
        ),
        (
            {"augmentations": ROTATE},
            {"augmentations": ROTATE, "augmentations_cache_mode": "disable_cache"},
            0,
        ),
    ],
)
def test_transforms_are_part_of_the_key(scenario, before, after, expected, recorder, tmp_path):
    replace(scenario, dataset=before).fill(tmp_path / "first", recorder)
    assert replace(scenario, dataset=after).fill(tmp_path / "second", recorder) == (expected, 0)


def test_another_seed_augments_differently(scenario, recorder, tmp_path):
    one = replace(scenario, dataset={"augmentations": ROTATE})
    one.fill(tmp_path / "first", recorder)
    assert replace(one, seed=1).fill(tmp_path / "second", recorder) == (COUNT, 0)
    assert one.fill(tmp_path / "third", recorder) == (0, 0)


def test_undoing_an_edit_finds_the_old_entries(scenario, recorder, tmp_path):
    before = (scenario.folder / "2.png").read_bytes()
    scenario.fill(tmp_path / "first", recorder)
    repaint(scenario)
    scenario.fill(tmp_path / "second", recorder)
    (scenario.folder / "2.png").write_bytes(before)
    assert scenario.fill(tmp_path / "third", recorder) == (0, 0)
