from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
from media_files import photo
from PIL import Image, ImageFilter

from gracetune.config.dataset_schema import AugmentationSection, DatasetSection
from gracetune.data.augment import (
    AUGMENTATIONS,
    NO_AUGMENTATIONS,
    AugmentationDraw,
    Step,
    apply,
    draw_augmentations,
)
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.data.augment import Role

NAMES = get_args(AugmentationSection.model_fields["name"].annotation)
WARPS = {"flip", "vertical_flip", "crop", "rotate"}
IMAGE = Image.fromarray(photo(64, 48))


def _section(*augmentations: dict[str, object]) -> DatasetSection:
    return DatasetSection.model_validate({"id": "cats", "augmentations": augmentations})


def _always(name: str, **settings: object) -> DatasetSection:
    return _section({"name": name, "probability": 1, **settings})


def test_every_augmentation_of_the_schema_is_implemented() -> None:
    assert set(NAMES) == set(AUGMENTATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_each_augmentation_changes_the_image_and_only_warps_change_controls(name: str) -> None:
    settings = {"amount": 0.05} if name == "blur" else {}
    draw = draw_augmentations(_always(name, **settings), 0, "abc", 0)
    assert [step.name for step in draw.steps] == [name]
    assert np.asarray(apply(draw, IMAGE)).tobytes() != np.asarray(IMAGE).tobytes()
    for kind, image in (("control", IMAGE), ("mask", IMAGE.convert("L"))):
        changed = apply(draw, image, kind)
        same = changed.size == image.size and changed.tobytes() == image.tobytes()
        assert same == (name not in WARPS and (name, kind) != ("erase", "mask"))


@pytest.mark.parametrize("name", NAMES)
def test_augmented_images_keep_their_mode_and_are_not_empty(name: str) -> None:
    for number in range(5):
        draw = draw_augmentations(_always(name, probability=1), number, "abc", 0)
        changed = apply(draw, IMAGE)
        assert changed.mode == "RGB"
        assert min(changed.size) >= 1
        tiny = apply(draw, Image.new("RGB", (1, 1), (9, 9, 9)))
        assert tiny.size == (1, 1)


def test_draws_depend_only_on_seed_sample_and_generation() -> None:
    section = _always("rotate")
    draws = {
        draw_augmentations(section, seed, digest, generation).name
        for seed in (0, 1)
        for digest in ("a", "b")
        for generation in (0, 1)
    }
    assert len(draws) == 8
    again = draw_augmentations(section, 1, "b", 1)
    assert again == draw_augmentations(section, 1, "b", 1)
    assert again.name in draws


def test_draws_do_not_change_between_releases() -> None:
    section = _section({"name": "flip"}, {"name": "crop"}, {"name": "erase", "probability": 1})
    draw = draw_augmentations(section, 7, "abc", 0)
    assert draw.as_json() == PINNED
    assert draw.name == "augmented baa1cacfc1c835319b96c355"


PINNED = [
    {"name": "crop", "cut": 0.014643, "left": 0.217266, "top": 0.881596},
    {"name": "erase", "left": 0.783395, "top": 0.589664, "width": 0.134505, "height": 0.178015},
]


def test_augmentations_are_drawn_with_their_probability() -> None:
    section = _section({"name": "flip", "probability": 0.25})
    hits = sum(bool(draw_augmentations(section, 0, str(n), 0).steps) for n in range(2000))
    assert 430 < hits < 570
    assert draw_augmentations(_always("flip", probability=0), 0, "a", 0) == NO_AUGMENTATIONS


def test_a_draw_without_augmentations_equals_no_augmentations() -> None:
    assert NO_AUGMENTATIONS.name == "as it is"
    assert draw_augmentations(_section(), 0, "abc", 0) == NO_AUGMENTATIONS
    assert apply(NO_AUGMENTATIONS, IMAGE) is IMAGE


def test_controls_of_another_size_are_warped_like_the_image() -> None:
    section = _section(
        {"name": "flip", "probability": 1},
        {"name": "crop", "probability": 1, "amount": 0.5},
        {"name": "rotate", "probability": 1, "amount": 20},
    )
    draw = draw_augmentations(section, 3, "abc", 0)
    large = Image.fromarray(photo(256, 192)).filter(ImageFilter.GaussianBlur(12))
    warped = apply(draw, large.resize((128, 96), Image.Resampling.BOX))
    alike = apply(draw, large, "control").resize(warped.size, Image.Resampling.BOX)
    difference = np.abs(np.asarray(alike).astype(int) - np.asarray(warped))
    assert difference.mean() < 1
    unlike = apply(draw_augmentations(section, 4, "abc", 0), large, "control")
    other = np.asarray(unlike.resize(warped.size, Image.Resampling.BOX)).astype(int)
    assert np.abs(other - np.asarray(warped)).mean() > 3 * difference.mean()


@pytest.mark.parametrize("degrees", [-45.0, -7.0, 3.0, 45.0])
@pytest.mark.parametrize("size", [(64, 48), (30, 90)])
def test_rotation_leaves_no_empty_corners(degrees: float, size: tuple[int, int]) -> None:
    white = Image.new("RGB", size, "white")
    rotated = apply(AugmentationDraw((Step("rotate", {"degrees": degrees}),)), white)
    assert rotated.size == size
    assert np.asarray(rotated).min() == 255


def test_positive_angles_rotate_counterclockwise() -> None:
    """A dot to the right of the centre moves up."""
    dark = np.zeros((101, 101, 3), np.uint8)
    dark[48:53, 78:83] = 255
    draw = AugmentationDraw((Step("rotate", {"degrees": 30.0}),))
    bright = np.argwhere(np.asarray(apply(draw, Image.fromarray(dark)))[..., 0] > 128)
    assert bright[:, 0].mean() < 40


def test_a_rotated_binary_mask_stays_binary() -> None:
    mask = Image.fromarray((photo(64, 48)[..., 0] > 120).astype(np.uint8) * 255)
    draw = draw_augmentations(_always("rotate", amount=30), 0, "abc", 0)
    assert set(np.unique(np.asarray(apply(draw, mask, "mask")))) == {0, 255}


def test_erased_areas_are_grey_in_images_and_black_in_masks() -> None:
    numbers = {"left": 0.25, "top": 0.5, "width": 0.5, "height": 0.25}
    draw = AugmentationDraw((Step("erase", numbers),))
    erased = np.asarray(apply(draw, Image.new("RGB", (40, 40), "white")))
    assert (erased[20:30, 10:30] == 127).all()
    assert (erased == 127).sum() == 10 * 20 * 3
    mask = np.asarray(apply(draw, Image.new("L", (80, 80), 255), "mask"))
    assert (mask == 0).sum() == 20 * 40


@pytest.mark.parametrize(("role", "kind"), [("image", "RGB"), ("control", "RGB"), ("mask", "L")])
def test_flips_mirror_images_controls_and_masks(role: Role, kind: str) -> None:
    image = IMAGE.convert(kind)
    across = apply(AugmentationDraw((Step("flip", {}),)), image, role)
    assert np.array_equal(np.asarray(across), np.asarray(image)[:, ::-1])
    down = apply(AugmentationDraw((Step("vertical_flip", {}),)), image, role)
    assert np.array_equal(np.asarray(down), np.asarray(image)[::-1])


def test_a_hue_shift_of_120_degrees_turns_red_into_green() -> None:
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    draw = AugmentationDraw((Step("hue", {"degrees": 120.0}),))
    rotated = np.asarray(apply(draw, red))[0, 0].astype(int)
    assert rotated[1] > 240
    assert rotated[0] < 15


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (
            {"name": "crop", "amount": 0.95},
            r"augmentations\[0\]\.amount is 0\.95; the largest value for crop",
        ),
        ({"name": "flip", "amount": 0.5}, r"amount is 0\.5, but flip has no strength"),
    ],
)
def test_invalid_amounts_are_refused(one: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_augmentations(_section(one), 0, "abc", 0)
