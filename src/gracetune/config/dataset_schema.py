"""Define the settings of a dataset: the entries of `datasets` in a run file.

`schema.py` has the other sections.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator

from gracetune.config.schema_base import (
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Scalar,
    Section,
)
from gracetune.errors import REDACTED, SECRET_NAME, redact_urls

if TYPE_CHECKING:
    from collections.abc import Mapping


MIN_RESOLUTION = 8
Resolution = Annotated[int, Field(ge=MIN_RESOLUTION)]
STAGED_TYPES = frozenset(("in_memory", "shapes"))
"""Values of `datasets[].type` whose files are staged: read into host memory before training."""
MASK_SETTINGS = {"mask_invert", "mask_background", "mask_normalize"}
"""Settings that have an effect only if the dataset has masks."""
TRIGGER = "[trigger]"
"""Placeholder in captions and prompts, which `datasets[].trigger_word` replaces."""


PUBLIC_OPTIONS = frozenset(
    (
        "endpoint_url",
        "region_name",
        "region",
        "host",
        "hostname",
        "protocol",
        "project",
        "account_name",
        "container_name",
        "bucket",
        "profile",
        "signature_version",
        "addressing_style",
        "cache_type",
        "default_cache_type",
        "encoding",
        "compression",
        "repo_type",
        "revision",
        "location",
    )
)
"""Names of options of remote storage whose texts are no credentials."""


def redact_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of remote storage, with all texts that may be credentials replaced."""
    return {
        name: redact_options(value) if isinstance(value, dict) else _redact_option(name, value)
        for name, value in options.items()
    }


def _redact_option(name: str, value: Scalar) -> Scalar:
    if not value or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return redact_urls(value) if name in PUBLIC_OPTIONS else REDACTED
    return REDACTED if SECRET_NAME.search(name) else value


class InMemorySection(Section):
    """Staging: reading all files of a dataset into host memory before training."""

    compression: Literal["auto", "lz4", "zlib", "snappy", "zstd", "none"] | None = "auto"
    """Compression of the files that are kept in host memory. `auto` tries some files of each suffix
    and compresses the suffixes whose files become at least 5 % smaller; useful for text and raw
    data, not for JPEG or MP4. Default: `none` for the dataset type `in_memory`, else `auto`."""
    num_workers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of threads that read files. Default: the number of CPUs, at most 72."""
    chunk_size: PositiveInt | None = None
    """Largest number of files that a thread reads at a time. Default: chosen so that all threads
    have work."""
    memory_limit_gb: PositiveFloat | None = None
    """Limit in GiB of the host memory for the dataset's files. The run stops if they need more.
    Default: the free memory, less a reserve."""


class ColumnsSection(Section):
    """Columns to read from a parquet file or a saved Hugging Face dataset."""

    image: str | None = None
    """Name of the column with the samples: the bytes of each file, or a struct `{bytes, path}`.
    Default: found by its type and by common names such as `image`."""
    caption: str | None = None
    """Name of the column with the captions. Default: found by common names such as `text`."""


class RemoteSection(Section):
    """Requests to remote storage, for datasets at an address such as `s3://...` or `https://...`."""

    timeout_s: PositiveFloat = 60.0
    """Seconds after which a request counts as failed. Raise it for a slow connection."""
    retries: NonNegativeInt = 5
    """Number of times that a failed request is repeated, with growing pauses."""
    options: dict[str, Scalar | dict[str, Scalar]] = Field(default_factory=dict, repr=False)
    """Arguments for fsspec's file system, such as `anon` or `endpoint_url` for S3. Credentials in
    them are not written to any file, and may change when a run is resumed."""

    @field_serializer("options", when_used="json")
    def _options_without_credentials(self, options: dict[str, Any]) -> dict[str, Any]:
        return redact_options(options)


class ShapesSection(Section):
    """The dataset `type: shapes`: generated images of coloured shapes, for demos and tests."""

    copies: PositiveInt = 8
    """Number of images of each combination of shape, colour and background. Copies differ in
    position and size."""
    size: Annotated[int, Field(ge=16, multiple_of=4)] = 24
    """Width and height of the images in pixels."""
    seed: int = 0
    """Seed of the positions and sizes of the shapes."""
    concept: str | None = None
    """Generate images of this shape only. The one choice is `star`, which the default dataset
    lacks, so that an adapter can learn something new from it."""


class AugmentationSection(Section):
    """A random change of an image.

    Flips, crops and rotations change the mask and the control image of a sample in the same way.
    """

    name: Literal[
        "flip",
        "vertical_flip",
        "crop",
        "rotate",
        "brightness",
        "contrast",
        "saturation",
        "hue",
        "blur",
        "grayscale",
        "erase",
    ]
    """Kind of change. The augmentations of a dataset are applied in the order of the list."""
    probability: Fraction = 0.5
    """Probability that a sample is changed."""
    amount: PositiveFloat | None = None
    """Largest change that is drawn. `rotate` and `hue`: degrees; `crop` and `erase`: fraction of
    the edges or of the area; `brightness`, `contrast` and `saturation`: relative change; `blur`:
    fraction of the shorter edge. Flips and `grayscale` have none. Default: a mild change."""


class DatasetSection(Section):
    """A dataset: where its samples are, and how they are read, cropped, captioned and repeated."""

    id: str = "default"
    """Name of the dataset in messages and reports. It must be unique in the run file."""
    type: str = "local"
    """Kind of storage. `local`: files are read when needed; `in_memory`: all are read into
    host memory before training; `shapes`: generated images for demos.

    `local` and `in_memory` detect whether `instance_data_dir` is a folder, tar shards, parquet
    files, a saved Hugging Face dataset or a remote address. `tar`, `parquet`, `hf` and `remote`
    select one of these explicitly.
    """
    dataset_type: Literal["image", "video", "audio"] = "image"
    """Medium of the samples."""
    instance_data_dir: PathText | None = None
    """Location of the samples: a folder, a tar or parquet file, a pattern of such files, a saved
    Hugging Face dataset, or a remote address such as `s3://...`."""
    conditioning_data_dir: PathText | tuple[PathText, ...] | None = None
    """Folder of control images, for models that take an input image: one for each sample, with the
    same file name except for the suffix. A list of folders gives each sample one control image from
    each, in this order, for models that take several."""
    mask_data_dir: PathText | None = None
    """Folder of masks, to train on a part of each image: one for each sample, with the same file
    name except for the suffix. White is trained on, black is not."""
    mask_invert: bool = False
    """Train on the black parts of masks instead of the white ones."""
    mask_background: Fraction = 0.0
    """Loss weight of the parts that a mask excludes; the other parts have weight 1."""
    mask_normalize: bool = True
    """Divide the loss weights of each sample by their mean, so that a sample with a small mask
    counts as much as one without a mask.

    With `false`, the parts to train on have weight 1, so samples with small masks count less.
    """
    in_memory: InMemorySection = InMemorySection()
    """Settings for reading all files into host memory, for types `in_memory` and `shapes`."""
    columns: ColumnsSection = ColumnsSection()
    """Column names, for parquet files and saved Hugging Face datasets."""
    remote: RemoteSection = RemoteSection()
    """Settings of the requests to remote storage, if `instance_data_dir` is a remote address."""
    shapes: ShapesSection = ShapesSection()
    """Settings of the generated images, for type `shapes`."""
    resolution: Resolution | tuple[Resolution, ...] = 1024
    """Size in pixels that images and videos are resized to. Samples of similar aspect ratio share a
    bucket, a fixed width and height; `resolution_type` says how this number determines them. With a
    list, an epoch uses each sample at each of these sizes."""
    resolution_type: Literal["area", "edge"] = "area"
    """Meaning of `resolution`. `area`: each bucket has about resolution x resolution pixels;
    `edge`: the shorter edge of each bucket is `resolution`."""
    crop: Literal["center", "top", "random"] = "center"
    """Part of an image to keep where its aspect ratio differs from that of its bucket. The position
    of a `random` crop is derived from the run's seed."""
    decode: Literal["exact", "fast"] = "exact"
    """Decoding of JPEG files. `fast` decodes files that are much larger than their bucket at
    reduced size, which changes pixel values slightly. Use it if decoding is the bottleneck."""
    bucket_step: Annotated[int, Field(ge=1)] | None = None
    """Step in pixels between bucket sizes: all bucket edges are multiples of it. A larger step
    means fewer buckets and more cropping. Default: the smallest step that the model accepts."""
    bucket_aspects: tuple[PositiveFloat, ...] | None = None
    """Aspect ratios (width divided by height) of the buckets. Each image or video is cropped to the
    nearest of them; `[1.0]` crops all to squares. Default: every aspect ratio that `bucket_step`
    and `max_aspect` allow."""
    max_aspect: Annotated[float, Field(ge=1)] = 3.0
    """Largest ratio of the long to the short edge. Images and videos above it are dropped and
    reported."""
    min_edge: NonNegativeInt = 0
    """Smallest length in pixels of the shorter edge. Images and videos below it are dropped and
    reported. 0: none are dropped, and small ones are enlarged."""
    min_resolution: NonNegativeInt = 0
    """Smallest area: images and videos with fewer than min_resolution x min_resolution pixels are
    dropped and reported. 0: none are dropped."""
    frames: PositiveInt | tuple[PositiveInt, ...] = 81
    """Video only: number of frames of a clip, of the form 4n+1. With a list, each video uses the
    largest number that it is long enough for. Videos that are too short are dropped."""
    fps: PositiveFloat | None = None
    """Video only: frame rate in frames per second that clips are converted to. Default: each file's
    own frame rate."""
    sample_rate: PositiveInt = 44100
    """Audio only: sample rate in Hz that clips are resampled to. It must be the model's."""
    channels: Literal[1, 2] = 2
    """Audio only: number of channels, 1 for mono or 2 for stereo. It must be the model's."""
    seconds: PositiveFloat | tuple[PositiveFloat, ...] = 10.0
    """Audio only: length of a clip in seconds. With a list, each file uses the largest length that
    it is long enough for. Files that are too short are dropped."""
    clip: Literal["start", "center", "random"] = "start"
    """Part to use of a video or audio file that is longer than a clip. The position of a `random`
    clip is derived from the run's seed."""
    caption_strategy: Literal[
        "auto", "textfile", "jsonl", "parquet", "filename", "instanceprompt"
    ] = "auto"
    """Where captions come from. `textfile`: a text file next to each sample, see
    `caption_extension`; `jsonl` or `parquet`: a table metadata.jsonl or metadata.parquet with
    columns `file_name` and `text`; `filename`: the words of the file name; `instanceprompt`:
    `instance_prompt` for all samples. `auto`: `jsonl` if such a table exists, otherwise
    `textfile`."""
    caption_extension: str = "txt"
    """Suffix of the caption files of `caption_strategy: textfile`, such as `txt`, `caption` or
    `tags`. A file with the suffix `json` has an object with a text `caption` or `text`."""
    instance_prompt: str | None = None
    """Caption of all samples, for `caption_strategy: instanceprompt`."""
    trigger_word: str | None = None
    """Word that stands for what is trained, such as `ohwx`. It replaces `[trigger]` in captions and
    in validation prompts. Captions that do not contain it get it in front, followed by a comma."""
    caption_prefix: str = ""
    """Text in front of every caption, joined with a space."""
    caption_suffix: str = ""
    """Text after every caption, joined with a space unless it starts with punctuation."""
    caption_shuffle: bool = False
    """Shuffle the comma-separated tags of each caption. The prefix, the suffix and a trigger word
    in front stay where they are. The orders are derived from the run's seed and the sample, and
    each of them is encoded before training; see `caption_variants`."""
    caption_keep_tokens: NonNegativeInt = 0
    """Number of tags at the start of each caption that `caption_shuffle` leaves in place."""
    caption_variants: Annotated[int, Field(ge=2)] = 8
    """Number of orders of each caption's tags that `caption_shuffle` encodes; the first is the
    written one. The uses of a sample take them in turn. More variants take longer to encode and
    need more cache."""
    caption_dropout: Fraction = 0.0
    """Probability that a sample is trained with an empty caption, without trigger word, prefix and
    suffix, drawn again each time. A value such as 0.1 helps classifier-free guidance."""
    repeats: PositiveInt = 1
    """Number of times that an epoch uses each sample. Raise it for a small dataset that is mixed
    with larger ones."""
    weight: PositiveFloat = 1.0
    """Factor of `repeats` that need not be an integer. With 0.5, each epoch uses half of the
    samples, and the next epoch the other half."""
    max_corruption_rate: Fraction = 0.01
    """Largest fraction of unreadable samples. Up to it they are skipped and reported; above it the
    run stops."""
    timeout_s: PositiveFloat = 300.0
    """Seconds to wait until a sample is read and decoded, after which the run stops. Raise it for
    slow storage or long videos."""
    cache_latents_to_disk: bool | None = None
    """Keep the cache on disk after the run, as in ai-toolkit. It sets
    `cache_config.persistent_cache` and so applies to all datasets, because a run has one cache."""
    augmentations: tuple[AugmentationSection, ...] = ()
    """Random changes of each image. They are derived from the run's seed and the image's content,
    so a repeated run draws the same ones. Images only."""
    augmentations_cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] | None = None
    """Caching of samples with random crops, clips or augmentations; other samples ignore it.

    `static` (the default): the random changes are drawn, and the sample is encoded, once or
    `variants` times. `refresh_each_epoch`: they are drawn again for each epoch, and encoded in the
    background during the epoch before. `disable_cache`: they are drawn again for each epoch, and
    encoded when a batch needs the sample.
    """
    variants: PositiveInt = 1
    """Number of random versions of each sample that `augmentations_cache_mode: static` encodes.
    Epochs use them in turn."""
    augmentation_cache_epoch: NonNegativeInt = 0
    """Number of the epoch whose random changes the first epoch uses; the run counts on from it. To
    train on with new random changes after another run, set it to that run's number of epochs. It
    has no effect if `static` encodes one version."""

    @field_validator("caption_extension")
    @classmethod
    def _check_caption_extension(cls, value: str) -> str:
        name = value.removeprefix(".").lower()
        if re.fullmatch(r"[\w-]+(\.[\w-]+)*", name) is None:
            raise ValueError("a file suffix such as txt, without * and /")
        return name

    @field_validator("trigger_word")
    @classmethod
    def _check_trigger_word(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or TRIGGER in value):
            raise ValueError(f"a word that is not empty and does not contain {TRIGGER}")
        return value if value is None else value.strip()

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The values of `resolution` in ascending order; every sample is used at each."""
        values = self.resolution if isinstance(self.resolution, tuple) else (self.resolution,)
        return tuple(sorted(set(values)))

    @property
    def control_folders(self) -> tuple[str, ...]:
        """The folders of `conditioning_data_dir`; every sample has one control image in each."""
        folders = self.conditioning_data_dir or ()
        return (folders,) if isinstance(folders, str) else folders
