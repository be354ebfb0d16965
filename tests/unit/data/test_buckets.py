from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.buckets import as_json, assign, bucket_sizes, cropped_fraction, report
from gracetune.data.sample import Sample
from gracetune.errors import ConfigError, DataError


def _sample(width: int, height: int, key: str = "") -> Sample:
    return Sample("cats", key or f"{width}x{height}.png", "a cat", "0", width, height)


def _section(**section: object) -> DatasetSection:
    return DatasetSection.model_validate({"id": "cats", **section})


def test_bucket_sizes_at_a_resolution_of_24() -> None:
    assert bucket_sizes(24, 8, 3.0) == [(16, 32), (24, 24), (32, 16)]
    assert bucket_sizes(24, 4, 1.0) == [(24, 24)]


@given(
    step=st.sampled_from([1, 4, 8, 16, 64]),
    steps=st.integers(1, 32),
    odd=st.integers(0, 15),
    max_aspect=st.floats(1, 4),
)
def test_bucket_sizes_respect_step_aspect_and_area(
    step: int, steps: int, odd: int, max_aspect: float
) -> None:
    resolution = step * steps + odd % step
    sizes = bucket_sizes(resolution, step, max_aspect)
    square = step * max(1, math.ceil(resolution / step - 0.5))
    assert (square, square) in sizes
    assert len(set(sizes)) == len(sizes)
    for width, height in sizes:
        assert (height, width) in sizes
        assert width % step == height % step == 0
        assert max(width, height) / min(width, height) <= max_aspect
        # Off by no more than half a step of the long edge, or of both for the square.
        assert abs(width * height - resolution**2) <= step * max(min(width, height), resolution)


def test_a_resolution_below_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="resolution is 8; bucket edges are multiples of 16"):
        bucket_sizes(8, 16, 3.0)


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=30),
    st.sampled_from([8, 32, 64]),
)
def test_each_sample_is_in_the_bucket_that_crops_least(
    shapes: list[tuple[int, int]], step: int
) -> None:
    samples = [_sample(*shape, key=str(number)) for number, shape in enumerate(shapes)]
    section = _section(resolution=256, max_aspect=2.5)
    sizes = bucket_sizes(256, step, 2.5)
    try:
        plan = assign(samples, section, step)
    except DataError:
        assert all(max(shape) / min(shape) > 2.5 for shape in shapes)
        return
    placed = [sample for group in plan.buckets.values() for sample in group]
    dropped = [item.sample for item in plan.dropped]
    assert sorted([*placed, *dropped], key=lambda sample: sample.key) == sorted(
        samples, key=lambda sample: sample.key
    )
    for size, group in plan.buckets.items():
        for sample in group:
            least = min(cropped_fraction(other, [sample]) for other in sizes)
            assert cropped_fraction(size, [sample]) <= least + 1e-9


def test_dropped_samples_name_the_setting_that_dropped_them() -> None:
    section = _section(resolution=64, max_aspect=2.0, min_edge=50)
    samples = [_sample(64, 64), _sample(300, 100), _sample(49, 60), _sample(50, 100)]
    plan = assign(samples, section, 8)
    assert [(item.sample.key, item.reason) for item in plan.dropped] == [
        ("300x100.png", "max_aspect is 2, its aspect ratio is 3.00"),
        ("49x60.png", "min_edge is 50, its shorter edge is 49"),
    ]
    assert sum(map(len, plan.buckets.values())) == 2


def test_dropping_every_sample_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"'cats': all 1 samples are dropped.*max_aspect is 3.*Raise max_aspect"
    ):
        assign([_sample(10, 100)], _section(resolution=64), 8)
    assert assign([], _section(resolution=64), 8).buckets == {}


def test_bucket_step_must_be_a_multiple_of_the_models_step() -> None:
    section = _section(resolution=128, bucket_step=64, max_aspect=4.0)
    assert set(assign([_sample(100, 300)], section, 16).buckets) == {(64, 256)}
    with pytest.raises(ConfigError, match="bucket_step is 24; the model needs"):
        assign([_sample(1, 1)], _section(resolution=128, bucket_step=24), 16)


def test_the_report_lists_buckets_crops_and_dropped_samples() -> None:
    section = _section(resolution=64, max_aspect=2.0)
    samples = [_sample(100, 100, f"{number}.png") for number in range(3)]
    tall = [_sample(10, 50 + number, f"tall{number}.png") for number in range(7)]
    plan = assign([*samples, _sample(80, 64, "wide.png"), *tall], section, 32)
    lines = report(plan).splitlines()
    assert lines[0].split() == ["bucket", "samples", "cropped"]
    assert lines[1].split() == ["64x64", "4", "2.9%"]
    assert lines[2].startswith("dropped by max_aspect: 7 (tall0.png: max_aspect is 2, its aspect")
    assert lines[2].endswith("; ...)")
    assert "tall5.png" not in report(plan)


def test_the_json_report_names_every_dropped_sample() -> None:
    plan = assign([_sample(64, 64), _sample(10, 99)], _section(resolution=64), 32)
    assert json.loads(json.dumps(as_json(plan))) == {
        "buckets": [{"width": 64, "height": 64, "samples": 1, "cropped_share": 0.0}],
        "dropped": [
            {
                "dataset": "cats",
                "key": "10x99.png",
                "reason": "max_aspect is 3, its aspect ratio is 9.90",
            }
        ],
    }


def _video(seconds: float, fps: float, width: int = 64, height: int = 64) -> Sample:
    key = f"{seconds}s{fps}.mp4"
    return Sample("cats", key, "", "0", width, height, "video", seconds, fps)


def _audio(seconds: float) -> Sample:
    return Sample("cats", f"{seconds}s.wav", "", "0", 0, 0, "audio", seconds)


def test_with_resolution_type_edge_buckets_have_the_same_shorter_edge() -> None:
    sizes = bucket_sizes(64, 32, 2.0, "edge")
    assert sizes == [(64, 128), (64, 96), (64, 64), (96, 64), (128, 64)]
    section = _section(resolution=64, resolution_type="edge", max_aspect=2.0)
    plan = assign([_sample(100, 100), _sample(160, 100), _sample(100, 195)], section, 32)
    assert set(plan.buckets) == {(64, 64), (96, 64), (64, 128)}


@given(
    step=st.sampled_from([1, 8, 16]),
    steps=st.integers(1, 20),
    max_aspect=st.floats(1, 4),
)
def test_with_resolution_type_edge_buckets_respect_aspect_and_step(
    step: int, steps: int, max_aspect: float
) -> None:
    edge = step * steps
    sizes = bucket_sizes(edge, step, max_aspect, "edge")
    assert sizes == sorted(set(sizes), key=lambda size: size[0] / size[1])
    for width, height in sizes:
        assert min(width, height) == edge
        assert max(width, height) % step == 0
        assert max(width, height) <= edge * max_aspect
    assert len(sizes) == 1 + 2 * int((edge * max_aspect - edge) // step)


def test_each_video_gets_the_longest_clip_that_fits() -> None:
    section = _section(resolution=64, dataset_type="video", frames=[81, 17, 49])
    videos = [_video(81 / 24, 24), _video(80 / 24, 24), _video(1.0, 24), _video(16 / 24, 24)]
    wide = _video(5.0, 24, 128, 32)
    plan = assign([*videos, wide], _section_like(section, max_aspect=5.0), 32)
    assert {shape: [video.key for video in group] for shape, group in plan.buckets.items()} == {
        (64, 64, 17): [videos[2].key],
        (64, 64, 49): [videos[1].key],
        (64, 64, 81): [videos[0].key],
        (128, 32, 81): [wide.key],
    }
    assert [item.reason for item in plan.dropped] == ["frames is 17, it has 16"]
    assert next(iter(plan.buckets)) == (64, 64, 17)
    assert "128x32x81" in report(plan)
    first = as_json(plan)["buckets"][0]  # type: ignore[index]
    assert first == {
        "width": 64,
        "height": 64,
        "frames": 17,
        "samples": 1,
        "cropped_share": 0.0,
    }


def _section_like(section: DatasetSection, **changes: object) -> DatasetSection:
    return section.model_copy(update=changes)


@pytest.mark.parametrize(("fps", "frames"), [(None, 49), (12.0, 25), (48.0, 97)])
def test_the_fps_setting_determines_the_number_of_frames(fps: float | None, frames: int) -> None:
    section = _section(resolution=64, dataset_type="video", frames=[25, 49, 97], fps=fps)
    (shape,) = assign([_video(97 / 48, 25)], section, 32).buckets
    assert shape == (64, 64, frames)


def test_a_duration_rounded_to_milliseconds_loses_no_frame() -> None:
    section = _section(resolution=64, dataset_type="video", frames=29)
    assert assign([_video(1.208, 24)], section, 32).buckets  # 29 frames last 1.20833 s


@pytest.mark.parametrize(
    ("frames", "message"),
    [(80, "frames is 80; video models take 4n.1 frames. Set 77 or 81"), ([], "frames is an empty")],
)
def test_frame_counts_that_no_video_model_supports_are_refused(
    frames: object, message: str
) -> None:
    section = _section(resolution=64, dataset_type="video", frames=frames)
    with pytest.raises(ConfigError, match=message):
        assign([_video(9, 24)], section, 32)


def test_each_audio_file_gets_the_longest_clip_that_fits() -> None:
    section = _section(dataset_type="audio", sample_rate=100, channels=1, seconds=[2, 0.5])
    plan = assign([_audio(2.0), _audio(1.99), _audio(0.4)], section, 32)
    assert {shape: len(group) for shape, group in plan.buckets.items()} == {(1, 50): 1, (1, 200): 1}
    assert [item.reason for item in plan.dropped] == ["seconds is 0.5, it has 0.4"]
    assert as_json(plan)["buckets"][0] == {  # type: ignore[index]
        "channels": 1,
        "length": 200,
        "samples": 1,
        "cropped_share": 0.0,
    }


def test_errors_for_short_videos_and_audio_name_the_fix() -> None:
    with pytest.raises(DataError, match=r"frames is 81, it has 24\. Raise .* set fewer frames"):
        assign([_video(1, 24)], _section(resolution=64, dataset_type="video"), 32)
    with pytest.raises(DataError, match=r"seconds is 10, it has 1\. .* fewer seconds"):
        assign([_audio(1)], _section(dataset_type="audio"), 32)


def test_several_resolutions_put_each_sample_into_a_bucket_of_each() -> None:
    section = _section(resolution=(64, 32))
    plan = assign([_sample(100, 100), _sample(90, 60), _sample(100, 10)], section, 8)
    shapes = {size: [sample.key for sample in found] for size, found in plan.buckets.items()}
    assert section.resolutions == (32, 64)
    assert shapes == {
        (32, 32): ["100x100.png"],
        (64, 64): ["100x100.png"],
        (40, 24): ["90x60.png"],
        (72, 56): ["90x60.png"],
    }
    assert [item.sample.key for item in plan.dropped] == ["100x10.png"], "reported once"


def test_resolutions_that_round_to_one_size_use_a_sample_once() -> None:
    plan = assign([_sample(64, 64)], _section(resolution=(64, 66)), 16)
    assert plan.buckets == {(64, 64): (_sample(64, 64),)}


def test_bucket_aspects_crop_every_sample_to_the_nearest_aspect_ratio() -> None:
    samples = [_sample(200, 100), _sample(100, 100), _sample(100, 290)]
    squares = assign(samples, _section(resolution=64, bucket_aspects=(1.0,)), 16)
    assert {size: len(found) for size, found in squares.buckets.items()} == {(64, 64): 3}
    two = assign(samples, _section(resolution=64, bucket_aspects=(1.0, 0.5)), 16)
    assert {size: len(found) for size, found in two.buckets.items()} == {(48, 80): 1, (64, 64): 2}


def test_min_resolution_drops_by_area() -> None:
    section = _section(resolution=64, min_resolution=100)
    plan = assign([_sample(125, 80), _sample(124, 80)], section, 16)
    assert [item.sample.width for item in plan.dropped] == [124]
    assert plan.dropped[0].reason == "min_resolution is 100, its area is 100x100"
