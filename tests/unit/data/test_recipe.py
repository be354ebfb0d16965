from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from media_files import audio_bytes, grey_frames, image_bytes, photo, video_bytes
from PIL import Image

from gracetune.config.dataset_schema import DatasetSection
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


def test_the_name_of_the_default_transform_does_not_change() -> None:
    assert sample_transform(_section(), SAMPLE, 0) == DEFAULT_TRANSFORM
    assert DEFAULT_TRANSFORM.name == "cover-lanczos-centre"


def test_every_setting_that_changes_pixels_changes_the_name() -> None:
    flip = [{"name": "flip", "probability": 1}]
    turn = [{"name": "rotate", "probability": 1}]
    transforms = [
        sample_transform(_section(), SAMPLE, 0),
        sample_transform(_section(crop="top"), SAMPLE, 0),
        sample_transform(_section(crop="random"), SAMPLE, 0),
        sample_transform(_section(crop="random"), OTHER, 0),
        sample_transform(_section(crop="random"), SAMPLE, 1),
        sample_transform(_section(crop="random"), SAMPLE, 0, epoch=1),
        sample_transform(_section(decode="fast"), SAMPLE, 0),
        sample_transform(_section(augmentations=flip), SAMPLE, 0),
        sample_transform(_section(augmentations=turn), SAMPLE, 0),
        sample_transform(_section(augmentations=turn), SAMPLE, 0, epoch=1),
        sample_transform(_section(augmentations=flip, decode="fast"), SAMPLE, 0),
        sample_transform(_section(), SAMPLE, 0, lanczos="torch"),
    ]
    assert len({transform.name for transform in transforms}) == len(transforms)


def test_a_draw_without_effect_has_the_name_of_the_default_transform() -> None:
    never = _section(augmentations=[{"name": "flip", "probability": 0}])
    assert sample_transform(never, SAMPLE, 0).name == DEFAULT_TRANSFORM.name


def test_random_crops_are_uniform_and_have_exact_names() -> None:
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


def test_the_crop_setting_selects_its_part_of_the_image() -> None:
    data = image_bytes(photo(64, 96))
    whole = decode(data)
    top = render(data, sample_transform(_section(crop="top"), SAMPLE, 0), (64, 64))
    assert top.equal(fit(whole.crop((0, 0, 64, 64)), 64, 64))
    assert render(data, DEFAULT_TRANSFORM, (64, 64)).equal(fit(whole.crop((0, 16, 64, 80)), 64, 64))
    bottom = render(data, SampleTransform(crop=(0.5, 1.0)), (64, 64))
    assert bottom.equal(fit(whole.crop((0, 32, 64, 96)), 64, 64))


@pytest.mark.parametrize("decoders", [PILLOW, choose_decoders()])
def test_fast_decoding_is_close_to_exact_decoding(decoders: object) -> None:
    data = image_bytes(photo(800, 600), "JPEG", quality=95)
    exact = render(data, DEFAULT_TRANSFORM, (96, 64), decoders)
    assert exact.equal(render(data, DEFAULT_TRANSFORM, (96, 64)))
    fast = render(data, SampleTransform(fast=True), (96, 64), decoders)
    assert not fast.equal(exact)
    assert float((fast - exact).abs().mean()) < 0.05


def test_augmentations_disable_fast_decoding() -> None:
    data = image_bytes(photo(800, 600), "JPEG", quality=95)
    section = _section(augmentations=[{"name": "crop", "probability": 1, "amount": 0.9}])
    exact = sample_transform(section, SAMPLE, 0)
    fast = sample_transform(section.model_copy(update={"decode": "fast"}), SAMPLE, 0)
    assert fast.fast
    assert render(data, fast, (96, 64)).equal(render(data, exact, (96, 64)))


@pytest.mark.parametrize("draw", [[], [{"name": "flip", "probability": 1}]])
def test_torchs_lanczos_is_close_to_pillows(draw: list[object]) -> None:
    data = image_bytes(photo(160, 120), "JPEG")
    section = _section(augmentations=draw)
    by_torch, by_pillow = (
        render(data, sample_transform(section, SAMPLE, 0, lanczos=who), (64, 48), choose_decoders())
        for who in ("torch", "pillow")
    )
    assert not by_torch.equal(by_pillow)
    assert float((by_torch - by_pillow).abs().max()) <= 2.01 / 127.5


def test_a_control_image_is_resized_to_its_own_size_in_one_step() -> None:
    data = image_bytes(photo(150, 60))
    control = render_control(data, SampleTransform(crop=(0.5, 0.5)), (32, 16), (96, 64))
    cropped = decode(data).crop((15, 0, 135, 60))
    expected = np.asarray(cropped.resize((96, 64), Image.Resampling.LANCZOS), np.float32)
    assert np.array_equal(control.permute(1, 2, 0).add(1).mul(127.5).round().numpy(), expected)


def test_masks_and_controls_match_the_image_with_either_lanczos() -> None:
    pixels = photo(150, 60)
    control, mask = image_bytes(pixels), image_bytes(pixels[..., 0])
    for who in ("torch", "pillow"):
        transform = SampleTransform(crop=(0.2, 0.5), lanczos=who)
        image = render(control, transform, (32, 32))
        same_size = render_control(control, transform, (32, 32), (32, 32))
        # At the edges of the crop, Pillow's filter sees no pixels outside of it.
        assert float((same_size - image)[:, :, 3:-3].abs().max()) <= 2.01 / 127.5
        grey = render_mask(mask, transform, (32, 32))
        assert float((grey * 2 - 1 - image[:1]).abs().max()) <= 2.01 / 127.5


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("decoders", [PILLOW, choose_decoders()], ids=["pillow", "fastest"])
def test_transparent_parts_of_a_mask_are_black(channels: int, decoders: Decoders) -> None:
    drawn = np.zeros((64, 64, channels), np.uint8)
    drawn[16:48, 16:48] = 255
    data = image_bytes(drawn)
    mask = render_mask(data, DEFAULT_TRANSFORM, (64, 64), decoders)
    assert (float(mask.mean()), float(mask[0, 32, 32])) == (0.25, 1.0)
    assert render_mask(data, DEFAULT_TRANSFORM, (64, 64), decoders, inverted=True).equal(1 - mask)


def test_videos_follow_the_clip_and_fps_settings() -> None:
    data = video_bytes(grey_frames(60))
    facts = probe_video(data)
    video = Sample("cats", "a.mp4", "", "abc", 64, 48, "video", facts.seconds, facts.fps)
    names = set()
    for clip, first in (("start", 0), ("center", 25), ("random", None)):
        section = _section(dataset_type="video", frames=5, fps=12, clip=clip, resolution=32)
        transform = sample_transform(section, video, 1)
        (shape,) = assign([video], section, 16).buckets
        pixels = render_video(data, transform, shape)
        assert tuple(pixels.shape) == (3, 5, shape[1], shape[0])
        levels = [round(float(v + 1) * 127.5 / 4) for v in pixels[0, :, 4, 4]]
        assert [b - a for a, b in itertools.pairwise(levels)] == [2, 2, 2, 2]
        assert first is None or abs(levels[0] - first) <= 1
        names.add(transform.name)
    names.add(sample_transform(_section(dataset_type="video"), video, 1).name)
    assert len(names) == 4


def test_audio_follows_the_clip_setting() -> None:
    ramp = np.linspace(-1, 1, 4001, dtype=np.float32)[:, None]
    data = audio_bytes(ramp, 1000, subtype="FLOAT")
    audio = Sample("cats", "a.wav", "", "abc", 0, 0, "audio", probe_audio(data).seconds)
    settings = {"dataset_type": "audio", "seconds": 0.001, "channels": 1, "sample_rate": 1000}
    starts = {}
    for clip in ("start", "center", "random"):
        section = _section(**settings, clip=clip)
        (shape,) = assign([audio], section, 16).buckets
        starts[clip] = render_audio(data, sample_transform(section, audio, 1), shape).item()
    assert starts["start"] == -1
    assert starts["center"] == pytest.approx(0, abs=0.01)
    assert starts["random"] not in (starts["start"], starts["center"])


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_only_images_can_be_augmented(kind: str) -> None:
    section = _section(
        dataset_type=kind, augmentations=[{"name": "flip"}], augmentations_cache_mode="static"
    )
    with pytest.raises(ConfigError, match=rf"dataset_type '{kind}' cannot be augmented"):
        check_augmentable(section, 0)
