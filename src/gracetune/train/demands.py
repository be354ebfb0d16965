"""What a data set must be for a family to train on it; all else is refused before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.data import buckets
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import DatasetSection
    from gracetune.models.family import Family


NOUNS = {"image": "images", "video": "videos", "audio": "sounds"}


def demand_kind(section: DatasetSection, index: int, family: Family) -> None:
    """What the family would not use is not read either."""
    if section.dataset_type not in family.kinds:
        raise ConfigError(
            f"datasets[{index}].dataset_type is {section.dataset_type!r}; {family.name} encodes "
            f"{' and '.join(NOUNS[kind] for kind in family.kinds)} alone. Set dataset_type: "
            f"{family.kinds[0]}, or choose another model.family."
        )
    unused = {"mask_data_dir": section.mask_data_dir}
    if not family.takes_control:
        unused["conditioning_data_dir"] = section.conditioning_data_dir
    for key, folder in unused.items():
        if folder is not None:
            raise ConfigError(
                f"datasets[{index}].{key} is {folder!r}; {family.name} trains on pictures and "
                "captions alone, so these files would have no effect. Leave it out."
            )
    if family.takes_control and section.conditioning_data_dir is None:
        raise ConfigError(
            f"datasets[{index}].conditioning_data_dir is missing; this {family.name} edits a "
            "picture. Name the folder of the pictures to be edited, each of its sample's name."
        )


def demand_fit(section: DatasetSection, index: int, step: int, family: Family) -> None:
    """Bucket edges that the model can place; sounds have none."""
    if section.dataset_type == "audio":
        return
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
