"""Masks next to latents: averaged levels, what is rendered again, and loss weights."""

import io

import numpy as np
import pytest
import torch
from blake3 import blake3
from failing_source import fail_first_read
from fakes.stores import DictStore
from PIL import Image

from gracetune.cache.encode import SINGLE_RANK, EncodeItem
from gracetune.cache.loss_masks import MASK_TENSOR, fill_masks, mask_keys, mask_weights
from gracetune.data.augment import DEFAULT_TRANSFORM, AugmentationDraw, SampleTransform, Step
from gracetune.data.images import PILLOW
from gracetune.data.prefetch import Prefetch
from gracetune.data.sample import Companion, Sample
from gracetune.events.types import Notice

SIZE = (16, 8)
GRID = (2, 4)
INLINE = Prefetch()


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def stripe(first, last):
    """White from one column to another, black elsewhere."""
    pixels = np.zeros((8, 16))
    pixels[:, first:last] = 255
    return png(pixels)


class MaskSource:
    def __init__(self, **masks):
        self.masks = masks
        self.reads = []

    def read(self, key):
        self.reads.append(key)
        if key not in self.masks:
            raise FileNotFoundError(f"no {key}")
        return self.masks[key]


def item(source, key, transform=DEFAULT_TRANSFORM, digest=None, inverted=False):
    content = blake3(source.masks.get(key, b"")).hexdigest()
    mask = Companion("mask", key, digest or content, inverted)
    sample = Sample("d", f"{key}.png", "", f"image {key}", 16, 8, companions=(mask,))
    return EncodeItem(sample, SIZE, source, transform)


def fill(store, items, emit, grid=GRID):
    return fill_masks(store, items, lambda _: grid, emit, PILLOW, INLINE, SINGLE_RANK)


def levels(store, one):
    (key,) = mask_keys([one], lambda _: GRID)
    return store.get(key)[MASK_TENSOR].tolist()


def test_a_cell_has_the_average_of_its_pixels(recorder):
    store, source = DictStore(), MaskSource(half=stripe(0, 8), part=stripe(4, 10))
    half, part = item(source, "half"), item(source, "part")
    assert fill(store, [half, part], recorder) == []
    assert levels(store, half) == [[255, 255, 0, 0]] * 2
    assert levels(store, part) == [[0, 255, 128, 0]] * 2  # two of four columns: 127.5


def test_a_mask_is_augmented_like_its_sample(recorder):
    store, source = DictStore(), MaskSource(half=stripe(0, 8))
    flipped = item(source, "half", SampleTransform(draw=AugmentationDraw((Step("flip", {}),))))
    fill(store, [flipped], recorder)
    assert levels(store, flipped) == [[0, 0, 255, 255]] * 2


def test_an_inverted_mask_is_white_where_it_was_black_except_where_it_is_erased(recorder):
    store, source = DictStore(), MaskSource(half=stripe(0, 8))
    erase = Step("erase", {"left": 0.75, "top": 0.0, "width": 0.25, "height": 1.0})
    whole = item(source, "half", inverted=True)
    erased = item(source, "half", SampleTransform(draw=AugmentationDraw((erase,))), inverted=True)
    fill(store, [whole, erased], recorder)
    assert levels(store, whole) == [[0, 0, 255, 255]] * 2
    assert levels(store, erased) == [[0, 0, 255, 0]] * 2


def test_a_cached_mask_is_not_rendered_again_unless_its_bytes_change(recorder):
    store, source = DictStore(), MaskSource(half=stripe(0, 8))
    fill(store, [item(source, "half")], recorder)
    fill(store, [item(source, "half")], recorder)
    assert source.reads == ["half"]
    source.masks["half"] = stripe(8, 16)
    changed = item(source, "half")
    fill(store, [changed], recorder)
    assert levels(store, changed) == [[0, 0, 255, 255]] * 2


def test_samples_without_a_mask_are_skipped(recorder):
    store = DictStore()
    bare = EncodeItem(Sample("d", "x", "", "x", 16, 8), SIZE, MaskSource())
    assert fill(store, [bare], recorder) == []
    assert mask_keys([bare], lambda _: GRID) == []


def test_unreadable_masks_are_named_with_their_samples(recorder):
    source = MaskSource(broken=b"no image", half=stripe(0, 8))
    items = [item(source, key) for key in ("gone", "broken", "half")]
    found = fill(DictStore(), items, recorder)
    assert [(sample.key, reason) for sample, reason in found] == [
        ("gone.png", "its mask gone: no gone"),
        (
            "broken.png",
            "its mask broken: not an image in a known format "
            "(PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF, HEIC)",
        ),
    ]


def test_a_mask_with_one_unreadable_variant_is_unreadable(recorder):
    source = fail_first_read(MaskSource(half=stripe(0, 8)))
    variants = [item(source, "half", SampleTransform(crop=(share, 0.5))) for share in (0.0, 1.0)]
    ((sample, reason),) = fill(DictStore(), variants, recorder)
    assert sample.key == "half.png"
    assert reason == "its mask half: read error"


def test_black_masks_are_reported(recorder):
    source = MaskSource(black=stripe(0, 0), half=stripe(0, 8))
    fill(DictStore(), [item(source, "black"), item(source, "half")], recorder)
    (notice,) = recorder.of(Notice)
    assert notice.level == "warning"
    assert "1 of 2 masks are completely black, such as that of black.png" in notice.text


@pytest.mark.parametrize("count", [1, 32, 33, 70])
def test_any_number_of_masks_is_rendered_in_order(recorder, count):
    names = [f"m{n}" for n in range(count)]
    source = MaskSource(**{name: png(np.full((8, 16), n)) for n, name in enumerate(names)})
    store, items = DictStore(), [item(source, name) for name in names]
    fill(store, items, recorder)
    assert [levels(store, one)[0][0] for one in items] == list(range(count))


@pytest.mark.parametrize(
    ("background", "normalize", "expected"),
    [
        (0.0, False, [1.0, 0.0, 0.0, 0.0]),
        (0.0, True, [4.0, 0.0, 0.0, 0.0]),
        (0.2, False, [1.0, 0.2, 0.2, 0.2]),
        (0.2, True, [2.5, 0.5, 0.5, 0.5]),
        (1.0, True, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_background_and_normalization_set_the_weights(background, normalize, expected):
    found = mask_weights(torch.tensor([[255, 0, 0, 0]], dtype=torch.uint8), background, normalize)
    torch.testing.assert_close(found, torch.tensor([expected]))


@pytest.mark.parametrize("normalize", [True, False])
def test_white_weighs_exactly_one_and_black_zero(normalize):
    white = torch.full((3, 5), 255, dtype=torch.uint8)
    assert torch.equal(mask_weights(white, 0.0, normalize), torch.ones(3, 5))
    black = torch.zeros(3, 5, dtype=torch.uint8)
    assert torch.equal(mask_weights(black, 0.0, normalize), torch.zeros(3, 5))
