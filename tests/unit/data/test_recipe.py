from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from made_media import grey_frames, photo, picture_bytes, sound_bytes, video_bytes

from gracetune.config.schema import DatasetSection
from gracetune.data.audio import probe_audio
from gracetune.data.augment import (
    DEFAULT_TRANSFORM,
    SampleTransform,
    check_augmentable,
    render,
    render_audio,
    render_control,
    render_mask,
    render_video,
    sample_transform,
)
from gracetune.data.buckets import assign
from gracetune.data.images import PILLOW, choose_decoders, decode, fit
from gracetune.data.sample import Sample
from gracetune.data.video import probe_video
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.data.images import Decoders

SAMPLE = Sample("cats", "a.png", "a cat", "abc", 64, 48)
OTHER = Sample("cats", "b.png", "a cat", "abd", 64, 48)


def _section(**settings: object) -> DatasetSection:
    return DatasetSection.model_validate({"id": "cats", **settings})


def test_the_plain_recipe_has_the_name_it_always_had() -> None:
    assert sample_transform(_section(), SAMPLE, 0) == DEFAULT_TRANSFORM
    assert DEFAULT_TRANSFORM.name == "cover-lanczos-centre"


def test_whatever_changes_pixels_changes_the_name() -> None:
    flip = [{"name": "flip", "probability": 1}]
    turn = [{"name": "rotate", "probability": 1}]
    recipes = [
        sample_transform(_section(), SAMPLE, 0),
        sample_transform(_section(crop="top"), SAMPLE, 0),
        sample_transform(_section(crop="random"), SAMPLE, 0),
        sample_transform(_section(crop="random"), OTHER, 0),
        sample_transform(_section(crop="random"), SAMPLE, 1),
        sample_transform(_section(crop="random"), SAMPLE, 0, generation=1),
        sample_transform(_section(decode="fast"), SAMPLE, 0),
        sample_transform(_section(augmentations=flip), SAMPLE, 0),
        sample_transform(_section(augmentations=turn), SAMPLE, 0),
        sample_transform(_section(augmentations=turn), SAMPLE, 0, generation=1),
        sample_transform(_section(augmentations=flip, decode="fast"), SAMPLE, 0),
        sample_transform(_section(), SAMPLE, 0, lanczos="torch"),
    ]
    assert len({recipe.name for recipe in recipes}) == len(recipes)


def test_a_draw_that_changes_nothing_shares_the_plain_entry() -> None:
    never = _section(augmentations=[{"name": "flip", "probability": 0}])
    assert sample_transform(never, SAMPLE, 0).name == DEFAULT_TRANSFORM.name


def test_random_crops_lie_anywhere_and_names_are_exact() -> None:
    section = _section(crop="random")
    places = [
        sample_transform(section, Sample("cats", "a", "", str(n), 9, 9), 0).crop for n in range(300)
    ]
    for axis in (0, 1):
        values = [place[axis] for place in places]
        assert min(values) < 0.03
        assert max(values) > 0.97
        assert sum(values) / len(values) == pytest.approx(0.5, abs=0.05)
        assert all(0 <= value <= 1 and value * 1024 == int(value * 1024) for value in values)
    assert SampleTransform(crop=(1 / 1024, 1.0)).name == "cover-lanczos-0.0009765625,1"


def test_crops_take_the_part_they_name() -> None:
    data = picture_bytes(photo(64, 96))
    whole = decode(data)
    top = render(data, sample_transform(_section(crop="top"), SAMPLE, 0), (64, 64))
    assert top.equal(fit(whole.crop((0, 0, 64, 64)), 64, 64))
    assert render(data, DEFAULT_TRANSFORM, (64, 64)).equal(fit(whole.crop((0, 16, 64, 80)), 64, 64))
    bottom = render(data, SampleTransform(crop=(0.5, 1.0)), (64, 64))
    assert bottom.equal(fit(whole.crop((0, 32, 64, 96)), 64, 64))


@pytest.mark.parametrize("decoders", [PILLOW, choose_decoders()])
def test_fast_is_near_and_exact_is_exact(decoders: object) -> None:
    data = picture_bytes(photo(800, 600), "JPEG", quality=95)
    exact = render(data, DEFAULT_TRANSFORM, (96, 64), decoders)
    assert exact.equal(render(data, DEFAULT_TRANSFORM, (96, 64)))
    fast = render(data, SampleTransform(fast=True), (96, 64), decoders)
    assert not fast.equal(exact)
    assert float((fast - exact).abs().mean()) < 0.05


def test_fast_waits_where_augmentations_need_the_whole_picture() -> None:
    data = picture_bytes(photo(800, 600), "JPEG", quality=95)
    section = _section(augmentations=[{"name": "crop", "probability": 1, "amount": 0.9}])
    exact = sample_transform(section, SAMPLE, 0)
    fast = sample_transform(section.model_copy(update={"decode": "fast"}), SAMPLE, 0)
    assert fast.fast
    assert render(data, fast, (96, 64)).equal(render(data, exact, (96, 64)))


@pytest.mark.parametrize("draw", [[], [{"name": "flip", "probability": 1}]])
def test_torchs_lanczos_is_pillows_to_the_eye(draw: list[object]) -> None:
    data = picture_bytes(photo(160, 120), "JPEG")
    section = _section(augmentations=draw)
    ours, theirs = (
        render(data, sample_transform(section, SAMPLE, 0, lanczos=who), (64, 48), choose_decoders())
        for who in ("torch", "pillow")
    )
    assert not ours.equal(theirs)
    assert float((ours - theirs).abs().max()) <= 2.01 / 127.5


def test_masks_and_controls_follow_either_lanczos() -> None:
    pixels = photo(150, 60)
    control, mask = picture_bytes(pixels), picture_bytes(pixels[..., 0])
    for who in ("torch", "pillow"):
        recipe = SampleTransform(crop=(0.2, 0.5), lanczos=who)
        image = render(control, recipe, (32, 32))
        assert render_control(control, recipe, (32, 32)).equal(image)
        grey = render_mask(mask, recipe, (32, 32))
        assert float((grey * 2 - 1 - image[:1]).abs().max()) <= 2.01 / 127.5


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("decoders", [PILLOW, choose_decoders()], ids=["pillow", "fastest"])
def test_a_mask_drawn_white_on_nothing_is_black_elsewhere(
    channels: int, decoders: Decoders
) -> None:
    drawn = np.zeros((64, 64, channels), np.uint8)
    drawn[16:48, 16:48] = 255
    data = picture_bytes(drawn)
    mask = render_mask(data, DEFAULT_TRANSFORM, (64, 64), decoders)
    assert (float(mask.mean()), float(mask[0, 32, 32])) == (0.25, 1.0)
    assert render_mask(data, DEFAULT_TRANSFORM, (64, 64), decoders, inverted=True).equal(1 - mask)


def test_videos_are_rendered_as_the_run_file_says() -> None:
    data = video_bytes(grey_frames(60))
    facts = probe_video(data)
    film = Sample("cats", "a.mp4", "", "abc", 64, 48, "video", facts.seconds, facts.fps)
    names = set()
    for clip, first in (("start", 0), ("center", 25), ("random", None)):
        section = _section(dataset_type="video", frames=5, fps=12, clip=clip, resolution=32)
        recipe = sample_transform(section, film, 1)
        (shape,) = assign([film], section, 16).buckets
        pixels = render_video(data, recipe, shape)
        assert tuple(pixels.shape) == (3, 5, shape[1], shape[0])
        levels = [round(float(v + 1) * 127.5 / 4) for v in pixels[0, :, 4, 4]]
        assert [b - a for a, b in itertools.pairwise(levels)] == [2, 2, 2, 2]
        assert first is None or abs(levels[0] - first) <= 1
        names.add(recipe.name)
    names.add(sample_transform(_section(dataset_type="video"), film, 1).name)
    assert len(names) == 4


def test_sounds_are_rendered_as_the_run_file_says() -> None:
    ramp = np.linspace(-1, 1, 4001, dtype=np.float32)[:, None]
    data = sound_bytes(ramp, 1000, subtype="FLOAT")
    sound = Sample("cats", "a.wav", "", "abc", 0, 0, "audio", probe_audio(data).seconds)
    settings = {"dataset_type": "audio", "seconds": 0.001, "channels": 1, "sample_rate": 1000}
    starts = {}
    for clip in ("start", "center", "random"):
        section = _section(**settings, clip=clip)
        (shape,) = assign([sound], section, 16).buckets
        starts[clip] = render_audio(data, sample_transform(section, sound, 1), shape).item()
    assert starts["start"] == -1
    assert starts["center"] == pytest.approx(0, abs=0.01)
    assert starts["random"] not in (starts["start"], starts["center"])


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_only_pictures_are_augmented(kind: str) -> None:
    section = _section(
        dataset_type=kind, augmentations=[{"name": "flip"}], augmentations_cache_mode="static"
    )
    with pytest.raises(ConfigError, match=rf"dataset_type '{kind}' cannot be augmented"):
        check_augmentable(section, 0)
