"""Which samples share a shape: pure functions from samples to buckets, and a report of both."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gracetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.sample import Sample, Shape, Size

NAMED = 5
"""How many dropped samples a report names for each reason."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that no bucket takes, and the setting that says so."""

    sample: Sample
    reason: str


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Where every sample goes."""

    buckets: Mapping[Shape, tuple[Sample, ...]]
    """Only those that hold samples, from tall to wide and from short to long."""
    dropped: tuple[Dropped, ...]


def bucket_sizes(
    resolution: int,
    step: int,
    max_aspect: float,
    resolution_type: Literal["area", "edge"] = "area",
) -> list[Size]:
    """Sizes whose edges are multiples of `step`, from tall to wide; the square is one of them.

    By area, each shorter edge has the long one that comes nearest to resolution^2. By edge, the
    shorter one is always the resolution.
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


def frame_counts(section: DatasetSection) -> tuple[int, ...]:
    """The lengths of a video's clips, from short to long; each 4n+1, as video encoders need."""
    counts = section.frames if isinstance(section.frames, tuple) else (section.frames,)
    for count in counts:
        if count % 4 != 1:
            raise ConfigError(
                f"data set {section.id!r}: frames is {count}; video models take 4n+1 frames. "
                f"Set {count - (count - 1) % 4} or {count - (count - 1) % 4 + 4}."
            )
    return _some(counts, section, "frames")


def sound_lengths(section: DatasetSection) -> tuple[int, ...]:
    """The lengths of a sound's clips in samples, from short to long."""
    seconds = section.seconds if isinstance(section.seconds, tuple) else (section.seconds,)
    return _some([max(1, round(s * section.sample_rate)) for s in seconds], section, "seconds")


def assign(samples: Sequence[Sample], section: DatasetSection, step: int) -> BucketPlan:
    """Give each sample the bucket that cuts off least. `step` is what the model's grid needs."""
    place = _place_sounds(section) if section.dataset_type == "audio" else _place(section, step)
    members: dict[Shape, list[Sample]] = {}
    dropped: list[Dropped] = []
    for sample in samples:
        shape = place(sample)
        if isinstance(shape, str):
            dropped.append(Dropped(sample, shape))
        else:
            members.setdefault(shape, []).append(sample)
    if samples and len(dropped) == len(samples):
        raise DataError(
            f"data set {section.id!r}: every one of its {len(samples)} samples is dropped; the "
            f"first, {dropped[0].sample.key}: {dropped[0].reason}. "
            f"Loosen {_LOOSEN[section.dataset_type]}."
        )
    buckets = {shape: tuple(members[shape]) for shape in sorted(members, key=_tall_to_wide)}
    return BucketPlan(buckets, tuple(dropped))


def cropped_share(size: Shape, samples: Sequence[Sample]) -> float:
    """The share of these samples' pixels that this bucket cuts off; a sound has none to lose."""
    if samples[0].kind == "audio":
        return 0.0
    pixels = sum(sample.width * sample.height for sample in samples)
    kept = 0.0
    for sample in samples:
        scale = max(size[0] / sample.width, size[1] / sample.height)
        kept += size[0] * size[1] / scale**2
    return max(0.0, 1 - kept / pixels)


def report(plan: BucketPlan) -> str:
    """The plan as a table for people."""
    lines = ["bucket       samples  cropped"]
    for size, samples in plan.buckets.items():
        shape = "x".join(map(str, size))
        lines.append(f"{shape:<11} {len(samples):>8}  {cropped_share(size, samples):>7.1%}")
    kinds = Counter(_kind(item) for item in plan.dropped)
    for kind, count in kinds.items():
        named = [item for item in plan.dropped if _kind(item) == kind][:NAMED]
        first = "; ".join(f"{item.sample.key}: {item.reason}" for item in named)
        lines.append(f"dropped by {kind}: {count} ({first}{'; ...' if count > NAMED else ''})")
    return "\n".join(lines)


def as_json(plan: BucketPlan) -> dict[str, object]:
    """The plan for machines: every bucket and every dropped sample by name."""
    return {
        "buckets": [
            {
                **dict(zip(_AXES[samples[0].kind], size, strict=True)),
                "samples": len(samples),
                "cropped_share": cropped_share(size, samples),
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
_LOOSEN = {
    "image": "max_aspect or min_edge",
    "video": "max_aspect or min_edge, or ask for fewer frames",
    "audio": "it: ask for fewer seconds",
}


def _place(section: DatasetSection, step: int) -> Callable[[Sample], Shape | str]:
    """From a picture or a video to its bucket, or the reason why it has none."""
    sizes = bucket_sizes(
        section.resolution, _step(section, step), section.max_aspect, section.resolution_type
    )
    aspects = [math.log(width / height) for width, height in sizes]
    counts = frame_counts(section) if section.dataset_type == "video" else ()

    def place(sample: Sample) -> Shape | str:
        reason = _why_not(sample, section)
        if reason is not None:
            return reason
        # The share cropped away grows with the distance of the logarithms of both aspects.
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
    """How many frames a video has at the rate that the run file asks for."""
    # Moments 0, 1/fps, ... before the end; Matroska rounds the end to milliseconds.
    return max(1, math.ceil((sample.seconds - 1.5e-3) * (section.fps or sample.fps)))


def _place_sounds(section: DatasetSection) -> Callable[[Sample], Shape | str]:
    lengths = sound_lengths(section)

    def place(sample: Sample) -> Shape | str:
        have = int(sample.seconds * section.sample_rate + 1e-3)
        fitting = [length for length in lengths if length <= have]
        if not fitting:
            return f"seconds is {lengths[0] / section.sample_rate:g}, it has {sample.seconds:g}"
        return (section.channels, fitting[-1])

    return place


def _some(values: Sequence[int], section: DatasetSection, key: str) -> tuple[int, ...]:
    if not values:
        raise ConfigError(f"data set {section.id!r}: {key} is an empty list. Name one length.")
    return tuple(sorted(set(values)))


def _tall_to_wide(shape: Shape) -> tuple[float, Shape]:
    return (shape[0] / shape[1], shape)


def _nearest(length: float, step: int) -> int:
    """The multiple of `step` nearest to `length`, the smaller one of two; never none at all."""
    return step * max(1, math.ceil(length / step - 0.5))


def _step(section: DatasetSection, step: int) -> int:
    if section.bucket_step is None:
        return step
    if section.bucket_step % step:
        raise ConfigError(
            f"data set {section.id!r}: bucket_step is {section.bucket_step}; the model needs edges "
            f"that are multiples of {step}. Set a multiple of it, or leave bucket_step out."
        )
    return section.bucket_step


def _why_not(sample: Sample, section: DatasetSection) -> str | None:
    short, long = sorted((sample.width, sample.height))
    if long / short > section.max_aspect:
        return f"max_aspect is {section.max_aspect:g}, its aspect {long / short:.2f}"
    if short < section.min_edge:
        return f"min_edge is {section.min_edge}, its shorter edge {short}"
    return None


def _kind(item: Dropped) -> str:
    return item.reason.split()[0]
