from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.schema import DatasetSection
from gracetune.data.buckets import as_json, assign, bucket_sizes, cropped_share, report
from gracetune.data.sample import Sample
from gracetune.errors import ConfigError, DataError


def _sample(width: int, height: int, key: str = "") -> Sample:
    return Sample("cats", key or f"{width}x{height}.png", "a cat", "0", width, height)


def _section(**section: object) -> DatasetSection:
    return DatasetSection.model_validate({"id": "cats", **section})


def test_the_known_sizes_of_a_small_model() -> None:
    assert bucket_sizes(24, 8, 3.0) == [(16, 32), (24, 24), (32, 16)]
    assert bucket_sizes(24, 4, 1.0) == [(24, 24)]


@given(
    step=st.sampled_from([1, 4, 8, 16, 64]),
    steps=st.integers(1, 32),
    odd=st.integers(0, 15),
    max_aspect=st.floats(1, 4),
)
def test_sizes_keep_step_aspect_and_area(
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
def test_every_sample_has_one_place_and_no_other_bucket_crops_less(
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
            least = min(cropped_share(other, [sample]) for other in sizes)
            assert cropped_share(size, [sample]) <= least + 1e-9


def test_what_is_dropped_says_by_which_setting() -> None:
    section = _section(resolution=64, max_aspect=2.0, min_edge=50)
    samples = [_sample(64, 64), _sample(300, 100), _sample(49, 60), _sample(50, 100)]
    plan = assign(samples, section, 8)
    assert [(item.sample.key, item.reason) for item in plan.dropped] == [
        ("300x100.png", "max_aspect is 2, its aspect 3.00"),
        ("49x60.png", "min_edge is 50, its shorter edge 49"),
    ]
    assert sum(map(len, plan.buckets.values())) == 2


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match=r"'cats': every one of its 1.*max_aspect is 3.*Loosen"):
        assign([_sample(10, 100)], _section(resolution=64), 8)
    assert assign([], _section(resolution=64), 8).buckets == {}


def test_the_run_file_may_ask_for_a_coarser_step() -> None:
    section = _section(resolution=128, bucket_step=64, max_aspect=4.0)
    assert set(assign([_sample(100, 300)], section, 16).buckets) == {(64, 256)}
    with pytest.raises(ConfigError, match="bucket_step is 24; the model needs"):
        assign([_sample(1, 1)], _section(resolution=128, bucket_step=24), 16)


def test_the_report_shows_buckets_crops_and_drops() -> None:
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


def test_json_names_every_dropped_sample() -> None:
    plan = assign([_sample(64, 64), _sample(10, 99)], _section(resolution=64), 32)
    assert json.loads(json.dumps(as_json(plan))) == {
        "buckets": [{"width": 64, "height": 64, "samples": 1, "cropped_share": 0.0}],
        "dropped": [
            {"dataset": "cats", "key": "10x99.png", "reason": "max_aspect is 3, its aspect 9.90"}
        ],
    }
