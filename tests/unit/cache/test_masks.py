"""Masks beside latents: levels of cells, what is rendered again, and what levels weigh."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tired import tired_at_first

from gracetune.cache.encode import SINGLE_RANK, EncodeItem
from gracetune.cache.keys import mask_key
from gracetune.cache.masks import MASK_TENSOR, fill_masks, mask_keys, mask_weights
from gracetune.cache.store import DictStore
from gracetune.data.augment import PLAIN, AugmentationDraw, SampleTransform, Step
from gracetune.data.images import PILLOW
from gracetune.data.prefetch import Prefetch
from gracetune.data.sample import Companion, Sample
from gracetune.events.types import Notice

SIZE = (16, 8)
CELLS = (2, 4)
NOW = Prefetch()


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def stripe(first, last):
    """White from one column to another, black elsewhere."""
    pixels = np.zeros((8, 16))
    pixels[:, first:last] = 255
    return png(pixels)


class Files:
    def __init__(self, **masks):
        self.masks = masks
        self.reads = []

    def read(self, key):
        self.reads.append(key)
        if key not in self.masks:
            raise FileNotFoundError(f"no {key}")
        return self.masks[key]


def picture(source, key, recipe=PLAIN, digest=None, inverted=False):
    mask = Companion("mask", key, digest or f"digest of {key}", inverted)
    sample = Sample("d", f"{key}.png", "", f"picture {key}", 16, 8, companions=(mask,))
    return EncodeItem(sample, SIZE, source, recipe)


def fill(store, pictures, emit, cells=CELLS):
    return fill_masks(store, pictures, lambda _: cells, emit, PILLOW, NOW, SINGLE_RANK)


def levels(store, picture):
    (key,) = mask_keys([picture], lambda _: CELLS)
    return store.get(key)[MASK_TENSOR].tolist()


def test_a_cell_has_the_average_of_its_pixels(told):
    store, source = DictStore(), Files(half=stripe(0, 8), part=stripe(4, 10))
    half, part = picture(source, "half"), picture(source, "part")
    assert fill(store, [half, part], told) == []
    assert levels(store, half) == [[255, 255, 0, 0]] * 2
    assert levels(store, part) == [[0, 255, 128, 0]] * 2  # two of four columns: 127.5


def test_a_mask_is_warped_as_its_sample_is(told):
    store, source = DictStore(), Files(half=stripe(0, 8))
    flipped = picture(source, "half", SampleTransform(draw=AugmentationDraw((Step("flip", {}),))))
    fill(store, [flipped], told)
    assert levels(store, flipped) == [[0, 0, 255, 255]] * 2


def test_an_inverted_mask_is_learnt_where_it_is_black_and_not_where_it_is_erased(told):
    store, source = DictStore(), Files(half=stripe(0, 8))
    erase = Step("erase", {"left": 0.75, "top": 0.0, "width": 0.25, "height": 1.0})
    whole = picture(source, "half", inverted=True)
    erased = picture(
        source, "half", SampleTransform(draw=AugmentationDraw((erase,))), inverted=True
    )
    fill(store, [whole, erased], told)
    assert levels(store, whole) == [[0, 0, 255, 255]] * 2
    assert levels(store, erased) == [[0, 0, 255, 0]] * 2


def test_what_is_there_is_not_rendered_again_and_other_bytes_are(told):
    store, source = DictStore(), Files(half=stripe(0, 8))
    fill(store, [picture(source, "half")], told)
    fill(store, [picture(source, "half")], told)
    assert source.reads == ["half"]
    source.masks["half"] = stripe(8, 16)
    changed = picture(source, "half", digest="of other bytes")
    fill(store, [changed], told)
    assert levels(store, changed) == [[0, 0, 255, 255]] * 2


def test_samples_without_a_mask_are_left_alone(told):
    store = DictStore()
    bare = EncodeItem(Sample("d", "x", "", "x", 16, 8), SIZE, Files())
    assert fill(store, [bare], told) == []
    assert mask_keys([bare], lambda _: CELLS) == []


def test_masks_that_cannot_be_read_are_named_with_every_sample_of_theirs(told):
    source = Files(broken=b"no picture", half=stripe(0, 8))
    pictures = [picture(source, key) for key in ("gone", "broken", "half")]
    found = fill(DictStore(), pictures, told)
    assert [(sample.key, reason) for sample, reason in found] == [
        ("gone.png", "its mask gone: no gone"),
        (
            "broken.png",
            "its mask broken: not an image in a known format "
            "(PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF)",
        ),
    ]


def test_a_mask_that_could_be_read_the_second_time_is_named_all_the_same(told):
    source = tired_at_first(Files(half=stripe(0, 8)))
    variants = [picture(source, "half", SampleTransform(crop=(share, 0.5))) for share in (0.0, 1.0)]
    ((sample, reason),) = fill(DictStore(), variants, told)
    assert sample.key == "half.png"
    assert reason == "its mask half: the disk is tired"


def test_masks_that_let_nothing_be_learnt_are_told(told):
    source = Files(black=stripe(0, 0), half=stripe(0, 8))
    fill(DictStore(), [picture(source, "black"), picture(source, "half")], told)
    (notice,) = told.of(Notice)
    assert notice.level == "warning"
    assert "1 of 2 masks are completely black, such as that of black.png" in notice.text


@pytest.mark.parametrize("count", [1, 32, 33, 70])
def test_any_number_is_rendered_in_order(told, count):
    names = [f"m{n}" for n in range(count)]
    source = Files(**{name: png(np.full((8, 16), n)) for n, name in enumerate(names)})
    store, pictures = DictStore(), [picture(source, name) for name in names]
    fill(store, pictures, told)
    assert [levels(store, one)[0][0] for one in pictures] == list(range(count))


def test_the_key_names_bytes_geometry_and_cells():
    mask = Companion("mask", "m", "digest")
    base = mask_key(mask, SIZE, CELLS, PLAIN)
    others = [
        mask_key(replace(mask, digest="another"), SIZE, CELLS, PLAIN),
        mask_key(replace(mask, inverted=True), SIZE, CELLS, PLAIN),
        mask_key(mask, (8, 16), CELLS, PLAIN),
        mask_key(mask, SIZE, (4, 8), PLAIN),
        mask_key(mask, SIZE, CELLS, SampleTransform(crop=(0.5, 0.0))),
    ]
    assert len({base, *others}) == 6
    assert base == mask_key(replace(mask, key="of another name"), SIZE, CELLS, PLAIN)
    assert base.components["kind"] == "mask"


@pytest.mark.parametrize(
    ("background", "normalize", "wanted"),
    [
        (0.0, False, [1.0, 0.0, 0.0, 0.0]),
        (0.0, True, [4.0, 0.0, 0.0, 0.0]),
        (0.2, False, [1.0, 0.2, 0.2, 0.2]),
        (0.2, True, [2.5, 0.5, 0.5, 0.5]),
        (1.0, True, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_levels_weigh_as_the_run_file_says(background, normalize, wanted):
    found = mask_weights(torch.tensor([[255, 0, 0, 0]], dtype=torch.uint8), background, normalize)
    torch.testing.assert_close(found, torch.tensor([wanted]))


@pytest.mark.parametrize("normalize", [True, False])
def test_white_weighs_exactly_one_and_black_nothing(normalize):
    white = torch.full((3, 5), 255, dtype=torch.uint8)
    assert torch.equal(mask_weights(white, 0.0, normalize), torch.ones(3, 5))
    black = torch.zeros(3, 5, dtype=torch.uint8)
    assert torch.equal(mask_weights(black, 0.0, normalize), torch.zeros(3, 5))
