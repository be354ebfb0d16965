"""What a data set must be for a family to train on it; all else is refused before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.config.schema import DatasetSection
from gracetune.data import buckets
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import RunFile
    from gracetune.models.family import Family, Sound


MASK_SETTINGS = {"mask_invert", "mask_background", "mask_normalize"}
NOUNS = {"image": "images", "video": "videos", "audio": "sounds"}


def check_data(run: RunFile, family: Family) -> None:
    """Every data set of a run, before anything is read."""
    for index, section in enumerate(run.datasets):
        check_kind(section, index, family)
        check_fit(section, index, section.bucket_step or family.pixel_step, family)


def check_kind(section: DatasetSection, index: int, family: Family) -> None:
    """What the family would not use is not read either."""
    if section.dataset_type not in family.kinds:
        raise ConfigError(
            f"datasets[{index}].dataset_type is {section.dataset_type!r}; {family.name} encodes "
            f"{' and '.join(NOUNS[kind] for kind in family.kinds)} alone. Set dataset_type: "
            f"{family.kinds[0]}, or choose another model.family."
        )
    _check_mask(section, index)
    if not family.takes_control and section.conditioning_data_dir is not None:
        raise ConfigError(
            f"datasets[{index}].conditioning_data_dir is {section.conditioning_data_dir!r}; "
            f"{family.name} trains on pictures and captions alone, so these files would have no "
            "effect. Leave it out."
        )
    if family.takes_control and section.conditioning_data_dir is None:
        raise ConfigError(
            f"datasets[{index}].conditioning_data_dir is missing; this {family.name} edits a "
            "picture. Name the folder of the pictures to be edited, each of its sample's name."
        )


def _check_mask(section: DatasetSection, index: int) -> None:
    """A mask lies over a picture or over every frame of a clip."""
    folder = section.mask_data_dir
    if folder is not None and section.dataset_type == "audio":
        raise ConfigError(
            f"datasets[{index}].mask_data_dir is {folder!r}; no picture lies over a sound, so "
            "these files would have no effect. Leave it out."
        )
    said = {
        key: value
        for key, value in section.model_dump(include=MASK_SETTINGS).items()
        if value != DatasetSection.model_fields[key].default
    }
    for key, value in said.items():
        if folder is None:
            raise ConfigError(
                f"datasets[{index}].{key} is {value}, but there are no masks. Name their folder in "
                "mask_data_dir, or leave it out."
            )


def check_fit(section: DatasetSection, index: int, step: int, family: Family) -> None:
    """Bucket edges that the model can place, or sounds as it hears them."""
    if family.sound is not None:
        _check_sound(section, index, family.name, family.sound)
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


def _check_sound(section: DatasetSection, index: int, name: str, sound: Sound) -> None:
    for key, value, wanted in (
        ("sample_rate", section.sample_rate, sound.sample_rate),
        ("channels", section.channels, sound.channels),
    ):
        if value != wanted:
            raise ConfigError(
                f"datasets[{index}].{key} is {value}; {name} works with {wanted}. Set it to that: "
                "files of another are converted."
            )
    longest, most = max(buckets.sound_lengths(section)), sound.max_length
    if longest > most:
        raise ConfigError(
            f"datasets[{index}].seconds is {longest / sound.sample_rate:g}; {name} takes at most "
            f"{most / sound.sample_rate:.5g}. Lower it."
        )
