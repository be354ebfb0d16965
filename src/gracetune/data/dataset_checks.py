"""Check that the datasets of a run suit its model family, before any file is read.

A family supports some of images, videos and audio, accepts certain image sizes, and requires a
certain audio format. Masks and control images that it would not use are errors, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.config.dataset_schema import MASK_SETTINGS, DatasetSection
from gracetune.data import buckets
from gracetune.errors import ConfigError

if TYPE_CHECKING:
    from gracetune.config.schema import RunFile
    from gracetune.models.family import AudioFormat, Family

PLURALS = {"image": "images", "video": "videos", "audio": "audio"}


def check_data(run: RunFile, family: Family) -> None:
    """Raise an error if a dataset of the run does not suit the model family."""
    for index, section in enumerate(run.datasets):
        check_kind(section, index, family)
        check_fit(section, index, section.bucket_step or family.pixel_step, family)
        first, other = len(run.datasets[0].control_folders), len(section.control_folders)
        if first != other:  # samples of several datasets share a batch
            raise ConfigError(
                f"datasets[{index}].conditioning_data_dir has {other} folders, but that of "
                f"datasets[0] has {first}. Set the same number for all datasets."
            )


def check_kind(section: DatasetSection, index: int, family: Family) -> None:
    """Check that the family supports a dataset's medium, masks and control images.

    `index` is the number of the dataset in the run file, for error messages.
    """
    if section.dataset_type not in family.kinds:
        raise ConfigError(
            f"datasets[{index}].dataset_type is {section.dataset_type!r}, but {family.name} "
            f"encodes only {' and '.join(PLURALS[kind] for kind in family.kinds)}. If it "
            f"has {PLURALS[family.kinds[0]]}, set dataset_type: {family.kinds[0]}; otherwise set a "
            f"model.family that trains {PLURALS[section.dataset_type]}."
        )
    _check_mask(section, index)
    controls = section.control_folders
    if not family.takes_control and controls:
        raise ConfigError(
            f"datasets[{index}].conditioning_data_dir is {controls[0]!r}, but {family.name} does "
            "not use control images. Remove it."
        )
    if family.takes_control and not controls:
        raise ConfigError(
            f"datasets[{index}].conditioning_data_dir is missing, but this {family.name} edits "
            "images. Set it to a folder with the images to edit, named like the samples."
        )
    if family.takes_control and len(controls) > family.max_controls:
        raise ConfigError(
            f"datasets[{index}].conditioning_data_dir has {len(controls)} folders, but this "
            f"{family.name} takes at most {family.max_controls} for a sample. Remove the others."
        )


def _check_mask(section: DatasetSection, index: int) -> None:
    folder = section.mask_data_dir
    if folder is not None and section.dataset_type == "audio":
        raise ConfigError(
            f"datasets[{index}].mask_data_dir is {folder!r}, but masks do not apply to audio. "
            "Remove it."
        )
    changed = {
        key: value
        for key, value in section
        if key in MASK_SETTINGS and value != DatasetSection.model_fields[key].default
    }
    for key, value in changed.items():
        if folder is None:
            raise ConfigError(
                f"datasets[{index}].{key} is {value}, but there are no masks. Set mask_data_dir "
                f"to their folder, or remove {key}."
            )


def check_fit(section: DatasetSection, index: int, bucket_step: int, family: Family) -> None:
    """Check that the model accepts all bucket sizes of a dataset, or its audio format.

    `bucket_step` is the number of pixels that bucket edges are multiples of.
    """
    if family.audio is not None:
        _check_audio(section, index, family.name, family.audio)
        return
    if bucket_step % family.pixel_step:
        raise ConfigError(
            f"datasets[{index}].bucket_step is {bucket_step}, but {family.name} needs a multiple "
            f"of {family.pixel_step}. Set one, or remove bucket_step."
        )
    for resolution in section.resolutions:
        sizes = buckets.sizes_of_dataset(section, resolution, bucket_step)
        longest = max(max(size) for size in sizes)
        if longest > family.max_edge:
            raise ConfigError(
                f"datasets[{index}].resolution {resolution} with max_aspect "
                f"{section.max_aspect:g} gives edges of {longest} pixels, but {family.name} takes "
                f"at most {family.max_edge}. Lower one of them."
            )


def _check_audio(section: DatasetSection, index: int, name: str, audio: AudioFormat) -> None:
    for key, value, required in (
        ("sample_rate", section.sample_rate, audio.sample_rate),
        ("channels", section.channels, audio.channels),
    ):
        if value != required:
            raise ConfigError(
                f"datasets[{index}].{key} is {value}, but {name} works with {required}. Set it to "
                f"{required}; files with another value are converted."
            )
    longest = max(buckets.audio_lengths(section))
    if longest > audio.max_length:
        raise ConfigError(
            f"datasets[{index}].seconds is {longest / audio.sample_rate:g}, but {name} takes at "
            f"most {audio.max_length / audio.sample_rate:.5g}. Lower it."
        )
