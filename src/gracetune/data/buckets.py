"""Assign samples to buckets of equal shape, and report the assignment.

A bucket is a shape that samples are cropped and resized to: (width, height) of images, plus frames
of videos, and (channels, length) of audio. All functions are pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.data.sample import Sample, Shape, Size

MAX_LISTED_DROPS = 5
"""Number of dropped samples that the bucket report lists for each reason."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that fits no bucket and is not trained on."""

    sample: Sample
    reason: str
    """The setting that excludes the sample and its value, such as "min_edge is 512, ..."."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The assignment of a dataset's samples to buckets."""

    buckets: Mapping[Shape, tuple[Sample, ...]]
    """Samples of each non-empty bucket, ordered by aspect ratio from tall to wide."""
    dropped: tuple[Dropped, ...]
    """Samples that fit no bucket."""


def bucket_sizes(
    resolution: int,
    step: int,
    max_aspect: float,
    resolution_type: Literal["area", "edge"] = "area",
) -> list[Size]:
    """Return all bucket sizes (width, height) in pixels for a resolution, from tall to wide.

    All edges are multiples of `step`, and no aspect ratio exceeds `max_aspect`. With the resolution
    type "area", each size has about resolution^2 pixels. With "edge", the shorter edge is the
    multiple of `step` nearest to the resolution.
    """
    if resolution < step:
        raise ConfigError(
            f"resolution is {resolution}; bucket edges are multiples of {step} pixels, so it must "
            f"be {step} or more."
        )
    square = _nearest(resolution, step)
    sizes: set[Size] = {(square, square)}
    if resolution_type == "edge":
        pairs = [(square, long) for long in range(square, int(square * max_aspect) + 1, step)]
    else:
        pairs = [(s, _nearest(resolution**2 / s, step)) for s in range(step, square, step)]
    for short, long in pairs:
        if long / short <= max_aspect:
            sizes |= {(short, long), (long, short)}
    return sorted(sizes, key=lambda size: (size[0] / size[1], size))


def sizes_of_dataset(section: DatasetSection, resolution: int, step: int) -> list[Size]:
    """Return the bucket sizes of a dataset at one of its resolutions, from tall to wide.

    With `bucket_aspects`, these are the sizes whose aspect ratios are nearest to them.
    """
    sizes = bucket_sizes(resolution, step, section.max_aspect, section.resolution_type)
    if section.bucket_aspects is None:
        return sizes
    nearest = {
        min(sizes, key=lambda size: abs(math.log(size[0] / size[1] / aspect)))
        for aspect in section.bucket_aspects
    }
    return [size for size in sizes if size in nearest]


def frame_counts(section: DatasetSection) -> tuple[int, ...]:
    """Return the clip lengths of a video dataset in frames, in ascending order.

    Raises an error for a length that is not of the form 4n+1, which video VAEs need.
    """
    counts = section.frames if isinstance(section.frames, tuple) else (section.frames,)
    for count in counts:
        if count % 4 != 1:
            raise ConfigError(
                f"dataset {section.id!r}: frames is {count}; video models take 4n+1 frames. "
                f"Set {count - (count - 1) % 4} or {count - (count - 1) % 4 + 4}."
            )
    return _ascending(counts, section, "frames")


def audio_lengths(section: DatasetSection) -> tuple[int, ...]:
    """Return the clip lengths of an audio dataset, in audio samples and in ascending order."""
    seconds = section.seconds if isinstance(section.seconds, tuple) else (section.seconds,)
    return _ascending([max(1, round(s * section.sample_rate)) for s in seconds], section, "seconds")


def assign(samples: Sequence[Sample], section: DatasetSection, step: int) -> BucketPlan:
    """Assign each sample to the bucket that crops it least, or drop it.

    With several resolutions, a sample has a bucket of each. `step` is the number of pixels that
    edges must be multiples of for the model; the dataset's `bucket_step` takes precedence.
    """
    if section.dataset_type == "audio":
        finders = [_audio_bucket_finder(section)]
    else:
        finders = [_bucket_finder(section, edge, step) for edge in section.resolutions]
    members: dict[Shape, list[Sample]] = {}
    dropped: list[Dropped] = []
    for sample in samples:
        # Two resolutions may round to the same shape, which has the sample only once.
        for shape in dict.fromkeys(place(sample) for place in finders):
            if isinstance(shape, str):
                dropped.append(Dropped(sample, shape))
            else:
                members.setdefault(shape, []).append(sample)
    if samples and len(dropped) == len(samples):
        raise DataError(
            f"dataset {section.id!r}: all {len(samples)} samples are dropped; the first is "
            f"{dropped[0].sample.key}: {dropped[0].reason}. {_REMEDY[section.dataset_type]}"
        )
    buckets = {shape: tuple(members[shape]) for shape in sorted(members, key=_tall_to_wide)}
    return BucketPlan(buckets, tuple(dropped))


def cropped_fraction(size: Shape, samples: Sequence[Sample]) -> float:
    """Return the fraction of all pixels of these samples that is cropped to fit a bucket.

    `size` is the bucket's shape. For audio, the result is 0.
    """
    if samples[0].kind == "audio":
        return 0.0
    pixels = sum(sample.width * sample.height for sample in samples)
    kept = 0.0
    for sample in samples:
        scale = max(size[0] / sample.width, size[1] / sample.height)
        kept += size[0] * size[1] / scale**2
    return max(0.0, 1 - kept / pixels)


def report(plan: BucketPlan) -> str:
    """Format buckets and dropped samples as a text table."""
    lines = ["bucket       samples  cropped"]
    for size, samples in plan.buckets.items():
        shape = "x".join(map(str, size))
        lines.append(f"{shape:<11} {len(samples):>8}  {cropped_fraction(size, samples):>7.1%}")
    kinds = Counter(_kind(item) for item in plan.dropped)
    for kind, count in kinds.items():
        named = [item for item in plan.dropped if _kind(item) == kind][:MAX_LISTED_DROPS]
        first = "; ".join(f"{item.sample.key}: {item.reason}" for item in named)
        lines.append(
            f"dropped by {kind}: {count} ({first}{'; ...' if count > MAX_LISTED_DROPS else ''})"
        )
    return "\n".join(lines)


def as_json(plan: BucketPlan) -> dict[str, object]:
    """Return buckets and dropped samples as a JSON-serialisable dictionary."""
    return {
        "buckets": [
            {
                **dict(zip(_AXES[samples[0].kind], size, strict=True)),
                "samples": len(samples),
                "cropped_share": cropped_fraction(size, samples),
            }
            for size, samples in plan.buckets.items()
        ],
        "dropped": [
            {"dataset": item.sample.dataset, "key": item.sample.key, "reason": item.reason}
            for item in plan.dropped
        ],
    }


_AXES = {
    "image": ("width", "height"),
    "video": ("width", "height", "frames"),
    "audio": ("channels", "length"),
}
_REMEDY = {
    "image": "Raise max_aspect, or lower min_edge or min_resolution.",
    "video": "Raise max_aspect, lower min_edge or min_resolution, or set fewer frames.",
    "audio": "Set fewer seconds.",
}


def _bucket_finder(
    section: DatasetSection, resolution: int, step: int
) -> Callable[[Sample], Shape | str]:
    """Return a function that maps an image or video to the shape of its bucket at a resolution.

    If no bucket fits, the function returns the reason as text, which is the same at every
    resolution.
    """
    sizes = sizes_of_dataset(section, resolution, _step(section, step))
    aspects = [math.log(width / height) for width, height in sizes]
    counts = frame_counts(section) if section.dataset_type == "video" else ()

    def place(sample: Sample) -> Shape | str:
        reason = _reason_to_drop(sample, section)
        if reason is not None:
            return reason
        # The cropped fraction grows with the difference between the log aspect ratios.
        aspect = math.log(sample.width / sample.height)
        at = bisect_left(aspects, aspect)
        near = range(max(0, at - 1), min(len(sizes), at + 1))
        size = sizes[min(near, key=lambda at: abs(aspects[at] - aspect))]
        if not counts:
            return size
        have = available_frames(sample, section)
        fitting = [count for count in counts if count <= have]
        if not fitting:
            return f"frames is {counts[0]}, it has {have}"
        return (*size, fitting[-1])

    return place


def available_frames(sample: Sample, section: DatasetSection) -> int:
    """Return the number of frames of a video after conversion to the dataset's `fps`."""
    # Times 0, 1/fps, ... before the end; Matroska rounds the end to milliseconds.
    return max(1, math.ceil((sample.seconds - 1.5e-3) * (section.fps or sample.fps)))


def _audio_bucket_finder(section: DatasetSection) -> Callable[[Sample], Shape | str]:
    lengths = audio_lengths(section)

    def place(sample: Sample) -> Shape | str:
        have = int(sample.seconds * section.sample_rate + 1e-3)
        fitting = [length for length in lengths if length <= have]
        if not fitting:
            return f"seconds is {lengths[0] / section.sample_rate:g}, it has {sample.seconds:g}"
        return (section.channels, fitting[-1])

    return place


def _ascending(values: Sequence[int], section: DatasetSection, key: str) -> tuple[int, ...]:
    if not values:
        raise ConfigError(
            f"dataset {section.id!r}: {key} is an empty list. Set at least one length."
        )
    return tuple(sorted(set(values)))


def _tall_to_wide(shape: Shape) -> tuple[float, Shape]:
    return (shape[0] / shape[1], shape)


def _nearest(length: float, step: int) -> int:
    """Return the multiple of `step` nearest to `length` (ties round down), at least `step`."""
    return step * max(1, math.ceil(length / step - 0.5))


def _step(section: DatasetSection, step: int) -> int:
    if section.bucket_step is None:
        return step
    if section.bucket_step % step:
        raise ConfigError(
            f"dataset {section.id!r}: bucket_step is {section.bucket_step}; the model needs edges "
            f"that are multiples of {step}. Set a multiple of {step}, or remove bucket_step."
        )
    return section.bucket_step


def _reason_to_drop(sample: Sample, section: DatasetSection) -> str | None:
    short, long = sorted((sample.width, sample.height))
    if long / short > section.max_aspect:
        return f"max_aspect is {section.max_aspect:g}, its aspect ratio is {long / short:.2f}"
    if short < section.min_edge:
        return f"min_edge is {section.min_edge}, its shorter edge is {short}"
    if short * long < section.min_resolution**2:
        area = math.sqrt(short * long)
        return f"min_resolution is {section.min_resolution}, its area is {area:.0f}x{area:.0f}"
    return None


def _kind(item: Dropped) -> str:
    return item.reason.split()[0]
