"""What a data set must be for a family to train on it; all else is refused before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.data import buckets
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import DatasetSection
    from gracetune.models.family import Family


def demand_kind(section: DatasetSection, index: int, family: Family) -> None:
    """No family encodes anything but pictures yet; what would not be used is not read either."""
    if section.dataset_type != "image":
        raise ConfigError(
            f"datasets[{index}].dataset_type is {section.dataset_type!r}; {family.name} encodes "
            "images alone. Set dataset_type: image, or choose another model.family."
        )
    for key in ("conditioning_data_dir", "mask_data_dir"):
        folder = section.model_dump(include={key})[key]
        if folder is not None:
            raise ConfigError(
                f"datasets[{index}].{key} is {folder!r}; {family.name} trains on pictures and "
                "captions alone, so these files would have no effect. Leave it out."
            )


def demand_fit(section: DatasetSection, index: int, step: int, family: Family) -> None:
    """Bucket edges that the model can place."""
    if step % family.pixel_step:
        raise ConfigError(
            f"datasets[{index}].bucket_step is {step}; {family.name} needs a multiple of "
            f"{family.pixel_step}."
        )
    sizes = buckets.bucket_sizes(
        section.resolution, step, section.max_aspect, section.resolution_type
    )
    longest = max(max(size) for size in sizes)
    if longest > family.max_edge:
        raise ConfigError(
            f"datasets[{index}].resolution {section.resolution} with max_aspect "
            f"{section.max_aspect:g} gives edges of {longest} pixels; {family.name} takes at most "
            f"{family.max_edge}. Lower one of them."
        )
