"""Which pictures share a shape: pure functions from samples to buckets, and a report of both."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.sample import Sample, Size

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

    buckets: Mapping[Size, tuple[Sample, ...]]
    """Only those that hold samples, from tall to wide."""
    dropped: tuple[Dropped, ...]


def bucket_sizes(resolution: int, step: int, max_aspect: float) -> list[Size]:
    """Sizes whose edges are multiples of `step` and whose area is close to resolution^2.

    The square, and for each shorter edge the long one that comes nearest in area, both ways round;
    from tall to wide.
    """
    if resolution < step:
        raise ConfigError(
            f"resolution is {resolution}; bucket edges are multiples of {step} pixels, so it must "
            f"be {step} or more."
        )
    square = _nearest(resolution, step)
    sizes: set[Size] = {(square, square)}
    for short in range(step, square, step):
        long = _nearest(resolution**2 / short, step)
        if long / short <= max_aspect:
            sizes |= {(short, long), (long, short)}
    return sorted(sizes, key=lambda size: (size[0] / size[1], size))


def assign(samples: Sequence[Sample], section: DatasetSection, step: int) -> BucketPlan:
    """Give each sample the bucket that crops it least. `step` is what the model's grid needs."""
    sizes = bucket_sizes(section.resolution, _step(section, step), section.max_aspect)
    aspects = [math.log(width / height) for width, height in sizes]
    members: dict[Size, list[Sample]] = {size: [] for size in sizes}
    dropped: list[Dropped] = []
    for sample in samples:
        reason = _why_not(sample, section)
        if reason is not None:
            dropped.append(Dropped(sample, reason))
            continue
        # The share cropped away grows with the distance of the logarithms of both aspects.
        aspect = math.log(sample.width / sample.height)
        place = bisect_left(aspects, aspect)
        near = range(max(0, place - 1), min(len(sizes), place + 1))
        members[sizes[min(near, key=lambda at: abs(aspects[at] - aspect))]].append(sample)
    if samples and len(dropped) == len(samples):
        raise DataError(
            f"data set {section.id!r}: every one of its {len(samples)} samples is dropped; the "
            f"first, {dropped[0].sample.key}: {dropped[0].reason}. Loosen max_aspect or min_edge."
        )
    buckets = {size: tuple(group) for size, group in members.items() if group}
    return BucketPlan(buckets, tuple(dropped))


def cropped_share(size: Size, samples: Sequence[Sample]) -> float:
    """The share of these samples' pixels that this bucket cuts off."""
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
        shape = f"{size[0]}x{size[1]}"
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
                "width": size[0],
                "height": size[1],
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
