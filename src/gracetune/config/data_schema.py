"""What a run file may say of a data set: where it is, how it is read, cropped and captioned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gracetune.config.section import Count, Plain, Positive, PositiveFloat, Section, Share

STAGED = frozenset(("in_memory", "shapes"))
"""Types of data sets that are read into host memory."""


class InMemorySection(Section):
    """How a data set is staged in host memory."""

    compression: Literal["auto", "lz4", "zlib", "snappy", "zstd", "none"] | None = "auto"
    """The codec of staged files; `auto` keeps one only where it shrinks them. Of a data set of type
    `in_memory` none is tried where nothing is said."""
    num_workers: Positive | None = None
    """Readers in parallel; none: min(72, CPUs)."""
    chunk_size: Positive | None = None
    """Most files that a reader takes at a time; none: by files and bytes, so that all have work."""
    memory_limit_gb: PositiveFloat | None = None
    """Most GiB that the staged bytes may take; more stops the run before it starts."""


class ColumnsSection(Section):
    """Which columns of a table (parquet, or a data set saved to disk) have what."""

    image: str | None = None
    """The files' bytes, plain or as `{bytes, path}`; none: found by type and usual name."""
    caption: str | None = None
    """The captions; none: the first of the usual names that is there, if any."""


class RemoteSection(Section):
    """How files at an address (`s3://...`, `https://...`) are asked for."""

    timeout_s: PositiveFloat = 60.0
    """How long one request may take before it counts as failed."""
    retries: Count = 5
    """How often a failed request is repeated, a little later each time."""
    options: dict[str, Plain | dict[str, Plain]] = Field(default_factory=dict)
    """What fsspec's file system is made with, such as `anon` or `endpoint_url` for s3."""


class ShapesSection(Section):
    """The made data set of coloured shapes."""

    copies: Positive = 8
    """Pictures of each combination, every one at another place and size."""
    size: Annotated[int, Field(ge=16, multiple_of=4)] = 24
    """Edge of a picture in pixels."""
    seed: int = 0
    """Seed of places and sizes."""
    concept: str | None = None
    """Make only this new shape (`star`), in every colour, instead of the usual ones."""


class AugmentationSection(Section):
    """One random change of a picture; masks and controls get the same warp."""

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
    """What changes. They are applied in the order of the list."""
    probability: Share = 0.5
    """How many of the samples it changes."""
    amount: PositiveFloat | None = None
    """How far at most: degrees for `rotate` and `hue`, else a share; none: a mild amount."""


class DatasetSection(Section):
    """One data set: where it is, how it is captioned, cropped and repeated."""

    id: str = "default"
    """A name for messages and reports."""
    type: str = "local"
    """`local`: read where it is; `in_memory`: staged once; `shapes`: made, then staged.

    Both take a folder, tar shards, parquet files, a saved Hugging Face data set or an address, and
    see which it is; `tar`, `parquet`, `hf` and `remote` say so.
    """
    dataset_type: Literal["image", "video", "audio"] = "image"
    """The kind of sample."""
    instance_data_dir: str | None = None
    """The folder of samples; or shards, tables or an address, as `type` tells."""
    conditioning_data_dir: str | None = None
    """The folder of control or reference pictures: one for each sample, of the same stem."""
    mask_data_dir: str | None = None
    """The folder of masks (white: learn this): one for each sample, of the same stem."""
    mask_invert: bool = False
    """Learn where masks are black instead."""
    mask_background: Share = 0.0
    """How much the loss counts where a mask says not to learn; elsewhere it counts 1."""
    mask_normalize: bool = True
    """Weights of a sample are 1 on average: a small white part counts as much as a whole picture.

    `false`: white counts 1 whatever its area, and a small part accordingly less.
    """
    in_memory: InMemorySection = InMemorySection()
    """Settings of staging."""
    columns: ColumnsSection = ColumnsSection()
    """Settings of tables."""
    remote: RemoteSection = RemoteSection()
    """Settings of addresses."""
    shapes: ShapesSection = ShapesSection()
    """Settings of the made data set."""
    resolution: Annotated[int, Field(ge=8)] = 1024
    """Edge in pixels of the square whose area each bucket has, or each bucket's shorter edge."""
    resolution_type: Literal["area", "edge"] = "area"
    """What `resolution` measures: buckets of one area, or of one shorter edge."""
    crop: Literal["center", "top", "random"] = "center"
    """Which part of a picture stays where its bucket has another aspect; `random`: by the seed."""
    decode: Literal["exact", "fast"] = "exact"
    """`fast`: large JPEG files are reduced while they are decoded; pixels differ by few levels."""
    bucket_step: Annotated[int, Field(ge=1)] | None = None
    """Bucket edges are multiples of this many pixels; none: the family's own step."""
    max_aspect: Annotated[float, Field(ge=1)] = 3.0
    """Pictures whose long edge is more than this times the short one are dropped, and reported."""
    min_edge: Count = 0
    """Pictures with a shorter edge than this are dropped, and reported; 0: enlarge any."""
    frames: Positive | tuple[Positive, ...] = 81
    """Video: frames of a clip, 4n+1; of several, the most that a video is long enough for."""
    fps: PositiveFloat | None = None
    """Video: frames a second that clips are resampled to; none: the file's own."""
    sample_rate: Positive = 44100
    """Audio: samples a second that clips are resampled to."""
    channels: Literal[1, 2] = 2
    """Audio: mono or stereo."""
    seconds: PositiveFloat | tuple[PositiveFloat, ...] = 10.0
    """Audio: length of a clip; of several, the longest that a file is long enough for."""
    clip: Literal["start", "center", "random"] = "start"
    """Which part of a longer video or sound is the clip; `random`: by the seed."""
    caption_strategy: Literal[
        "auto", "textfile", "jsonl", "parquet", "filename", "instanceprompt"
    ] = "auto"
    """Where captions come from; `auto`: metadata.jsonl if there is one, else a .txt beside each."""
    instance_prompt: str | None = None
    """The one caption of `instanceprompt`."""
    caption_dropout: Share = 0.0
    """Share of samples trained with the empty caption, drawn anew each epoch."""
    repeats: Positive = 1
    """How often an epoch shows each sample."""
    weight: PositiveFloat = 1.0
    """Times `repeats`, and may be a fraction: 0.5 shows half of the samples an epoch, in turn."""
    max_corruption_rate: Share = 0.01
    """Share of unreadable samples past which the run stops; below it they are left out, by name."""
    timeout_s: PositiveFloat = 300.0
    """How long one sample may take to be read and decoded; longer ends the run, by its name."""
    cache_latents_to_disk: bool | None = None
    """ai-toolkit's spelling of `cache_config.persistent_cache`."""
    augmentations: tuple[AugmentationSection, ...] = ()
    """Random changes of each picture, drawn from the run's seed and the picture's content."""
    augmentations_cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] | None = None
    """How random crops and augmentations meet the latent cache; without them it changes nothing.

    `static`: drawn once, and so where nothing is said; `refresh_each_epoch`: drawn anew for each
    epoch and encoded ahead of it; `disable_cache`: the same draws, encoded when they are used.
    """
    variants: Positive = 1
    """With `static`: so many draws of each sample are encoded, and epochs take turns with them."""
