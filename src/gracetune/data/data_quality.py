"""Find samples that deserve a look: dropped and enlarged ones, and exact and near duplicates.

Exact duplicates are files with equal bytes. Near duplicates are images that show the same picture
in another size, format or compression. They are found by comparing thumbnails of 8x8 pixels;
other crops and mirrored copies are not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from gracetune.data.images import PILLOW, decode
from gracetune.data.source import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gracetune.data.batch_order import BucketGroup
    from gracetune.data.buckets import BucketPlan
    from gracetune.data.sample import Sample, Size

MIN_FACTOR = 1.1
"""Factor from which enlarging an image makes it visibly softer. Images of the usual sizes are a few
percent smaller than their bucket, which does not matter."""
MAX_COMPARED_AT_START = 2000
"""Number of images of a dataset up to which a run looks for near duplicates when it starts.
Thumbnails take about as long as reading the files; `gracetune data check` has no limit."""
THUMBNAIL = (8, 8)
"""Width and height of the thumbnails that are compared."""
MAX_WEIGHT_ERROR = 0.1
"""Error of `weight` by rounding that is not worth a warning, as a fraction."""
MAX_MEAN_DIFFERENCE = 4
MAX_CELL_DIFFERENCE = 16
"""Near duplicates differ by at most this, of 255 levels: on average over the thumbnail (and in each
colour's mean), and in any value. Compressing a photo again changes it by about 1."""


@dataclass(frozen=True, slots=True)
class Enlarged:
    """An image or video that is smaller than its bucket."""

    key: str
    size: Size
    bucket: Size
    factor: float
    """Factor by which its edges are enlarged, at least `MIN_FACTOR`."""


def thumbnail(data: bytes) -> bytes:
    """Return a small RGB version of an image file, as bytes."""
    image = decode(data, PILLOW, min_size=(THUMBNAIL[0] * 8, THUMBNAIL[1] * 8))
    return image.resize(THUMBNAIL, Image.Resampling.BOX).tobytes()


def enlarged(plan: BucketPlan) -> list[Enlarged]:
    """Return the samples that are clearly smaller than their bucket, the most enlarged first."""
    found = [
        Enlarged(sample.key, (sample.width, sample.height), (size[0], size[1]), factor)
        for size, samples in plan.buckets.items()
        for sample in samples
        if sample.kind != "audio"
        for factor in (max(size[0] / sample.width, size[1] / sample.height),)
        if factor >= MIN_FACTOR
    ]
    return sorted(found, key=lambda one: (-one.factor, one.key))


def exact_duplicates(samples: Iterable[Sample]) -> list[tuple[str, ...]]:
    """Return the keys of samples with equal bytes, in groups of two or more."""
    groups: dict[str, list[str]] = {}
    for sample in samples:
        groups.setdefault(sample.digest, []).append(sample.key)
    return [tuple(keys) for keys in groups.values() if len(keys) > 1]


def near_duplicates(
    samples: Sequence[Sample], thumbnails: Mapping[str, bytes]
) -> list[tuple[str, ...]]:
    """Return the keys of images that show the same picture, in groups of two or more.

    Of files with equal bytes, only the first is compared. Images without a thumbnail are left out.
    """
    first = {sample.digest: sample.key for sample in reversed(samples) if sample.key in thumbnails}
    keys = sorted(first.values())
    leaders = {key: key for key in keys}

    def leader(key: str) -> str:
        while leaders[key] != key:
            key = leaders[key]
        return key

    for one, other in _similar_pairs([thumbnails[key] for key in keys]):
        low, high = sorted((leader(keys[one]), leader(keys[other])))
        leaders[high] = low
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(leader(key), []).append(key)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _similar_pairs(thumbnails: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of similar thumbnails.

    Thumbnails are sorted by brightness, because only those of similar brightness can be similar.
    """
    if len(thumbnails) < 2:
        return
    cells = np.frombuffer(b"".join(thumbnails), np.uint8).astype(np.int16)
    cells = cells.reshape(len(thumbnails), -1, 3)
    colours = cells.mean(axis=1)
    brightness = colours.mean(axis=1)
    order = np.argsort(brightness, kind="stable")
    cells, colours, brightness = cells[order], colours[order], brightness[order]
    ends = np.searchsorted(brightness, brightness + MAX_MEAN_DIFFERENCE, side="right")
    for at, end in enumerate(ends):
        near = np.abs(colours[at + 1 : end] - colours[at]).max(axis=1) <= MAX_MEAN_DIFFERENCE
        places = at + 1 + np.flatnonzero(near)
        differences = np.abs(cells[places] - cells[at])
        for place, difference in zip(places, differences, strict=True):
            if difference.max() <= MAX_CELL_DIFFERENCE and difference.mean() <= MAX_MEAN_DIFFERENCE:
                yield int(order[at]), int(order[place])


def quality_warnings(
    dataset: str, plan: BucketPlan, samples: Sequence[Sample], thumbnails: Mapping[str, bytes]
) -> list[str]:
    """Return a line each about samples that are dropped, enlarged, exact and near duplicates."""
    lines = []
    all_listed = "; `gracetune data check` lists all"
    if plan.dropped:
        first = plan.dropped[0]
        lines.append(
            f"{len(plan.dropped)} of {len(samples)} samples are dropped (the first is "
            f"{printable(first.sample.key)}: {first.reason}); buckets-*.json in the output folder "
            "lists all"
        )
    small = enlarged(plan)
    if small:
        worst = small[0]
        num_small = len({one.key for one in small})  # one may be small for several buckets
        lines.append(
            f"{num_small} of {len(samples)} samples are smaller than their bucket and are "
            f"enlarged, up to {worst.factor:.1f} times ({printable(worst.key)}, "
            f"{worst.size[0]}x{worst.size[1]}). Lower resolution, or leave them out with min_edge"
            f"{all_listed}"
        )
    for groups, what in (
        (exact_duplicates(samples), "are exact copies of others, so they are trained more often"),
        (near_duplicates(samples, thumbnails), "look like others"),
    ):
        if groups:
            extra = sum(len(group) - 1 for group in groups)
            example = " and ".join(map(printable, groups[0][:2]))
            lines.append(
                f"{extra} of {len(samples)} samples {what} (such as {example}){all_listed}"
            )
    return [f"dataset {dataset!r}: {line}" for line in lines]


def weight_warning(groups: Sequence[BucketGroup]) -> str:
    """Return a line if rounding changes how often a dataset is used; else an empty text.

    `groups` are the buckets of the dataset. Each is used a whole number of times in an epoch.
    """
    asked = sum(len(group.samples) * group.repeats * group.weight for group in groups)
    used = sum(group.draws_per_epoch for group in groups)
    if abs(used - asked) <= MAX_WEIGHT_ERROR * asked:
        return ""
    return (
        f"dataset {groups[0].samples[0].dataset!r}: weight is {groups[0].weight:g}, but an epoch "
        f"uses {used} samples instead of {asked:.3g}: each of its {len(groups)} buckets gives a "
        "whole number of samples, at least one. Set a larger weight, or fewer buckets with "
        "bucket_aspects or bucket_step"
    )
