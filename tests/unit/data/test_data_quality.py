"""Enlarged images and duplicates are found, and photos that only resemble each other are not."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pytest
from blake3 import blake3
from media_files import image_bytes, photo
from PIL import Image

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data import buckets
from gracetune.data.batch_order import BucketGroup
from gracetune.data.data_quality import (
    enlarged,
    exact_duplicates,
    near_duplicates,
    quality_warnings,
    thumbnail,
    weight_warning,
)
from gracetune.data.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

PHOTOS = {f"photo-{seed:02}.png": image_bytes(photo(96, 64, seed)) for seed in range(24)}


def _samples(files: Mapping[str, bytes]) -> list[Sample]:
    sizes = {key: Image.open(io.BytesIO(data)).size for key, data in files.items()}
    return [Sample("d", key, "", blake3(files[key]).hexdigest(), *sizes[key]) for key in files]


def _near(files: Mapping[str, bytes]) -> list[tuple[str, ...]]:
    return near_duplicates(_samples(files), {key: thumbnail(files[key]) for key in files})


def test_files_with_equal_bytes_are_exact_duplicates() -> None:
    files = {**PHOTOS, "copy.png": PHOTOS["photo-03.png"]}
    assert exact_duplicates(_samples(files)) == [("photo-03.png", "copy.png")]
    assert _near(files) == []


def test_another_size_or_compression_is_a_near_duplicate() -> None:
    image = Image.open(io.BytesIO(PHOTOS["photo-05.png"]))
    half = np.asarray(image.resize((48, 32)))
    files = {
        **PHOTOS,
        "half.webp": image_bytes(half, "WEBP"),
        "jpeg.jpg": image_bytes(np.asarray(image), "JPEG", quality=60),
    }
    assert _near(files) == [("half.webp", "jpeg.jpg", "photo-05.png")]


def test_different_photos_and_details_are_no_duplicates() -> None:
    assert _near(PHOTOS) == []
    plain = np.full((64, 64, 3), 250, np.uint8)
    left, right = plain.copy(), plain.copy()
    left[20:30, 10:20], right[20:30, 40:50] = (200, 30, 30), (200, 30, 30)
    files = {"plain.png": plain, "left.png": left, "right.png": right}
    assert _near({name: image_bytes(pixels) for name, pixels in files.items()}) == []


def test_an_image_that_is_small_for_several_buckets_is_counted_once() -> None:
    small = Sample("d", "a", "", "a", 32, 32)
    plan = buckets.assign([small], DatasetSection(resolution=(64, 128)), 8)
    assert len(enlarged(plan)) == 2
    (line,) = quality_warnings("d", plan, [small], {})
    assert line.startswith("dataset 'd': 1 of 1 samples are smaller")


def test_dropped_samples_are_named_with_their_reason() -> None:
    samples = [Sample("d", "a", "", "a", 64, 64), Sample("d", "b", "", "b", 640, 64)]
    plan = buckets.assign(samples, DatasetSection(resolution=(32, 64)), 8)
    (line,) = quality_warnings("d", plan, samples, {})
    assert line == (
        "dataset 'd': 1 of 2 samples are dropped (the first is b: max_aspect is 3, its aspect "
        "ratio is 10.00); buckets-*.json in the output folder lists all"
    )


@pytest.mark.parametrize(
    ("lengths", "weight", "used"),
    [([10, 10], 0.5, ""), ([20], 0.05, ""), ([2, 1, 1, 1], 0.5, "4 samples instead of 2.5")],
)
def test_a_weight_that_small_buckets_change_is_reported(lengths, weight, used) -> None:
    sample = Sample("d", "a", "", "a", 8, 8)
    groups = [
        BucketGroup((sample,) * length, 1, 0, (8 * edge, 8), weight)
        for edge, length in enumerate(lengths, 1)
    ]
    line = weight_warning(groups)
    assert used in line
    assert bool(line) == bool(used)


def test_images_smaller_than_their_bucket_are_enlarged() -> None:
    samples = [
        Sample("d", key, "", key, *size)
        for key, size in {
            "a": (64, 64),
            "b": (32, 32),
            "c": (64, 48),
            "d": (128, 128),
            "e": (60, 60),  # 1.07 times, which does not matter
        }.items()
    ]
    plan = buckets.assign(samples, DatasetSection(resolution=64), 8)
    found = enlarged(plan)
    assert [(one.key, one.bucket, round(one.factor, 2)) for one in found] == [
        ("b", (64, 64), 2.0),
        ("c", (72, 56), 1.17),
    ]


def test_each_kind_is_one_line_with_the_worst_or_first_example() -> None:
    tiny = image_bytes(photo(24, 16, 77))
    files = {
        "a.png": PHOTOS["photo-01.png"],
        "b.png": PHOTOS["photo-01.png"],
        "c.jpg": image_bytes(photo(96, 64, 1), "JPEG"),
        "tiny.png": tiny,
    }
    samples = _samples(files)
    plan = buckets.assign(samples, DatasetSection(resolution=64), 8)
    lines = quality_warnings("d", plan, samples, {key: thumbnail(files[key]) for key in files})
    assert lines == [
        "dataset 'd': 1 of 4 samples are smaller than their bucket and are enlarged, up to 3.5 "
        "times (tiny.png, 24x16). Lower resolution, or leave them out with min_edge; `gracetune "
        "data check` lists all",
        "dataset 'd': 1 of 4 samples are exact copies of others, so they are trained more often "
        "(such as a.png and b.png); `gracetune data check` lists all",
        "dataset 'd': 1 of 4 samples look like others (such as a.png and c.jpg); `gracetune data "
        "check` lists all",
    ]
