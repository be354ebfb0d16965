"""Define the run file: one frozen pydantic model per section, with every key's meaning and range.

The docstring under a key is its documentation; `gracetune schema` prints them all. Reading files is
in `load.py`, other tools' spellings of keys are in `aliases.py`, and rules between sections are in
`checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gracetune.errors import ConfigError
from gracetune.models.registry import FAMILIES
from gracetune.optim.registry import OPTIMIZERS
from gracetune.units import parse_bytes

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Scalar = str | int | float | bool | None
CacheType = Literal["unified_memory", "memory", "disk"]

STAGED_TYPES = frozenset(("in_memory", "shapes"))
"""Types of data sets that are read into host memory before training."""


class Section(BaseModel):
    """A section of a run file. It is frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """The model to train, and how its forward pass is computed."""

    family: str = Field(
        default="tiny",
        description=f"The model family: one of {', '.join(sorted(FAMILIES))}, or one that another "
        "package provides through an entry point.",
    )
    path: str | None = None
    """A folder saved by diffusers, or the name of a model on the Hugging Face hub. `tiny` needs
    none."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: the newest."""
    transformer_file: str | None = None
    """A safetensors file with the original tensor names, to read instead of the folder's
    transformer."""
    transformer_2_file: str | None = None
    """The same for the second transformer; for `wan22`, the low-noise expert."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights in memory. `auto`: the type in the files."""
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Store the frozen weights of linear layers in fewer bits. Needs an adapter, which stays in
    full precision."""
    frozen_compute: Literal["bf16", "fp8"] = "bf16"
    """Precision of matmuls with frozen weights. `fp8` scales each row and halves the bytes in
    memory and on the link; the GPU must support fp8 matmuls."""
    task: Literal["auto", "text", "image"] = "auto"
    """Input of generation, for models that support both: text alone, or an image and text. `auto`:
    what the model was made for."""
    init_seed: int = 0
    """Seed of randomly initialised weights, for families that need no files."""
    attention_mechanism: str = "auto"
    """Attention backend, such as `sdpa`, `cudnn` or `flash_attn_3`. `auto`: the fastest by
    measurement on a GPU, otherwise torch's default."""


class OverrideSection(Section):
    """Settings that differ for some of the adapted modules. Missing ones are inherited."""

    rank: PositiveInt | None = None
    """Rank of these modules."""
    alpha: PositiveFloat | None = None
    """Alpha of these modules. Default: their rank if that is set here, otherwise the adapter's
    alpha."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of these modules."""
    factor: Annotated[int, Field(ge=-1)] | None = None
    """Factor of these modules (`lokr`)."""


class AdapterSection(Section):
    """A small set of new weights that is trained while the model stays frozen."""

    kind: Literal["lora", "dora", "locon", "loha", "lokr", "full"] = "lora"
    """The algorithm. `full` trains a full difference matrix for each module."""
    rank: PositiveInt = 16
    """Inner width of each adapter."""
    alpha: PositiveFloat | None = None
    """The update is scaled by alpha / rank. Default: equal to `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the adapter's inputs that is dropped in training."""
    factor: Annotated[int, Field(ge=-1)] = -1
    """`lokr`: size of the smaller matrix. -1: as close as possible to the larger one."""
    full_matrix: bool = False
    """`lokr`: do not factorise either matrix. Rank and alpha then have no effect."""
    targets: tuple[str, ...] | None = None
    """Modules to adapt: names, name endings, patterns such as `blocks.*.attn1.*`, or `re:` followed
    by a regular expression. Default: the family's choice."""
    overrides: dict[str, OverrideSection] = Field(default_factory=dict)
    """Different settings for some modules, by the same kinds of pattern as `targets`. If two
    patterns match a module, the later one counts."""


class CacheSection(Section):
    """The cache of encoded latents and captions."""

    vae_cache_type: CacheType = "memory"
    """Storage of latents."""
    text_cache_type: CacheType = "memory"
    """Storage of text embeddings."""
    cache_dir: str | None = None
    """Folder of a persistent cache. Default: `cache` in the run folder."""
    persistent_cache: bool = False
    """Keep encoded entries on disk for later runs."""
    host_budget_gb: PositiveFloat | None = None
    """Limit in GiB of host memory for entries, per rank. Default: this rank's part of 3/4 of the
    free memory."""
    device_budget_gb: Annotated[float, Field(ge=0)] | None = None
    """Limit in GiB of device memory for text embeddings that stay on the GPU. Default: 1/64 of the
    device's memory."""
    vae_tiling: Literal["auto"] | bool = "auto"
    """Encode in tiles, which needs less memory. `auto`: for images and frames larger than 2048x2048
    pixels."""
    prefetch_depth: Literal["auto"] | PositiveInt = "auto"
    """Number of batches that are copied to the device in advance. `auto`: grows while steps wait
    for data."""
    prefetch_budget_gb: PositiveFloat = 2.0
    """Limit in GiB for the batches of `prefetch_depth: auto`."""


class Gh200Section(Section):
    """Placement hints for unified memory, and the ramp of the effective batch size."""

    enable_uvm_hints: bool | None = None
    """Turn placement hints on or off. Default: the environment decides."""
    placement: dict[str, Literal["host", "staged", "device", "leave"]] = Field(default_factory=dict)
    """Placement of a batch's tensors, by role (`latents`, `audio`, `text`, ...) or by name."""
    enable_batch_size_rampup: bool = False
    """Let the effective batch size grow during training."""
    initial_effective_batch_size: PositiveInt | None = None
    """Samples in the first optimizer steps, over all ranks."""
    target_effective_batch_size: PositiveInt | None = None
    """Samples in an optimizer step after the ramp, over all ranks. Default: the effective batch
    size without a ramp."""
    batch_rampup_steps: PositiveInt = 1000
    """Length of the ramp in micro-batches."""
    rampup_shape: Literal["quadratic", "linear"] = "quadratic"
    """Growth of the effective batch size over micro-batches."""


class TrainSection(Section):
    """The training loop: its length, batches, precision, noise and checkpoints."""

    max_train_steps: PositiveInt = 1000
    """Number of optimizer steps."""
    batch_size: PositiveInt = 1
    """Samples in a micro-batch, per rank."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches in an optimizer step. A batch-size ramp overrides it."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Precision of forward and backward. `auto`: ACCELERATE_MIXED_PRECISION if set, otherwise bf16
    on a GPU and fp32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward instead of keeping them."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are clipped to this norm. 0: no clipping."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "logit_normal"
    """Distribution of the noise levels (sigmas) that are drawn."""
    timestep_mean: float = 0.0
    """`logit_normal`: mean before the sigmoid. Values above 0 draw more noise."""
    timestep_std: PositiveFloat = 1.0
    """`logit_normal`: standard deviation before the sigmoid."""
    timestep_shift: PositiveFloat | Literal["flux", "qwen_image", "sd3"] = 1.0
    """Shift of the sigmas: s becomes shift*s / (1 + (shift-1)*s). A name: depends on the image size
    as in that model."""
    timestep_window: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Range of sigmas to train on, without its end. The distribution inside stays the same."""
    min_snr_gamma: PositiveFloat | None = None
    """Gamma of min-SNR loss weights (Hang et al. 2023). Default: no weights. For flow matching see
    `min_snr_in_flow`."""
    min_snr_in_flow: Literal["identity", "exact"] = "identity"
    """Effect of `min_snr_gamma` on flow matching. `identity`: none; `exact`: the exact weights,
    which almost ignore high noise."""
    experts: Literal["both", "high", "low"] = "both"
    """Which experts are trained, for models with two."""
    expert_turns: Literal["alternate", "proportional"] = "alternate"
    """Division of the steps between two experts: equal, or in proportion to the sigmas of each."""
    switch_every: PositiveInt = 1
    """Optimizer steps before the other expert can have its turn."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the trained weights. 0: no average."""
    checkpoint_every: NonNegativeInt = 500
    """Optimizer steps between checkpoints. 0: only at the end."""
    checkpoint_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Minutes between checkpoints, in addition to `checkpoint_every`. 0: not by time."""
    keep_checkpoints: PositiveInt = 3
    """Number of checkpoints to keep; older ones are deleted."""


class OptimizerSection(Section):
    """The optimizer and the learning-rate schedule."""

    name: str = Field(
        default="adamw",
        description=f"The optimizer: one of {', '.join(OPTIMIZERS)}, or one that another package "
        "provides through an entry point.",
    )
    lr: PositiveFloat | None = None
    """Peak learning rate. Default: the optimizer's usual one. For `automagic`, where the rates
    start."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps in which the learning rate rises from zero."""
    final_lr_share: Fraction = 0.0
    """Final learning rate of `linear` and `cosine`, as a fraction of `lr`."""
    state: Literal["auto", "device", "host"] = "auto"
    """Memory for the optimizer's state. `auto`: on the device; in full fine-tuning, a plan that
    needs the room moves part of it to host memory."""
    lr_bump: PositiveFloat | None = None
    """Automagic: change of each element's learning rate per step. Default: found automatically."""
    min_lr: PositiveFloat | None = None
    """Automagic: lowest learning rate."""
    max_lr: PositiveFloat | None = None
    """Automagic: highest learning rate."""
    high_noise_lr_bump: PositiveFloat | None = None
    """Automagic: `lr_bump` of the high-noise expert."""
    high_noise_min_lr: PositiveFloat | None = None
    """Automagic: `min_lr` of the high-noise expert."""
    high_noise_max_lr: PositiveFloat | None = None
    """Automagic: `max_lr` of the high-noise expert."""
    low_noise_lr_bump: PositiveFloat | None = None
    """Automagic: `lr_bump` of the low-noise expert."""
    low_noise_min_lr: PositiveFloat | None = None
    """Automagic: `min_lr` of the low-noise expert."""
    low_noise_max_lr: PositiveFloat | None = None
    """Automagic: `max_lr` of the low-noise expert."""


class ValidationSection(Section):
    """Samples and held-out losses that show the progress of a run."""

    every: NonNegativeInt = 500
    """Optimizer steps between validations, in addition to those before the first and after the last
    step. 0: no validation."""
    prompts: tuple[str, ...] | None = None
    """Prompts to sample. Default: some captions of the data set."""
    num_prompts: PositiveInt = 4
    """Number of captions to use if `prompts` is not set."""
    seed: int = 0
    """Seed of the first sample's noise; the next samples use the following seeds."""
    sample_steps: PositiveInt = 24
    """Steps of the sampler."""
    guidance: Annotated[float, Field(ge=0)] = 2.0
    """Scale of classifier-free guidance. 1: no guidance."""
    width: PositiveInt | None = None
    """Width of samples in pixels. Default: the first data set's resolution."""
    height: PositiveInt | None = None
    """Height of samples in pixels. Default: the first data set's resolution."""
    frames: PositiveInt | None = None
    """Frames of sampled videos. Default: those of the first data set's clips; 1 for images."""
    seconds: PositiveFloat | None = None
    """Length of sampled audio. Default: that of the first data set's clips."""
    images: tuple[str, ...] | None = None
    """Image files to start from or to edit, one for each of `prompts`, for models that need one."""
    holdout: Fraction = 0.0
    """Fraction of the samples that is kept out of training. Their loss is measured with fixed
    noise."""
    enable_manual_validation: bool = False
    """Also validate when `gracetune now validate` asks for it."""


class LoggingSection(Section):
    """Progress output."""

    every: PositiveInt = 10
    """Optimizer steps between progress lines. Losses are copied from the GPU only this often."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""


class DistributedSection(Section):
    """Runs with more than one process."""

    timeout_s: PositiveFloat = 1800
    """Seconds that a rank waits for another before it gives up."""


class PlanSection(Section):
    """Limits for the planner, which decides what streams, what is recomputed and the batch size."""

    device_memory: str | None = None
    """Limit of device memory, such as `96GB`. Default: what the device has."""
    host_memory: str | None = None
    """Limit of host memory, such as `400GB`. Default: what the machine has free."""
    batch: Literal["auto", "fixed"] = "auto"
    """`auto`: the planner may use smaller micro-batches and accumulate them to the same number of
    samples."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the blocks with torch.compile. `auto`: if that is faster."""
    stream: bool = True
    """Allow frozen weights to stay in host memory and stream to the device."""
    offload: bool = True
    """Allow activations to be kept in host memory between forward and backward."""

    @field_validator("device_memory", "host_memory")
    @classmethod
    def _check_size(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_bytes(value)
            except ConfigError:
                raise ValueError("a number and a unit, such as 96GB") from None
        return value


class InMemorySection(Section):
    """Staging: reading a data set into host memory before training."""

    compression: Literal["auto", "lz4", "zlib", "snappy", "zstd", "none"] | None = "auto"
    """Compression of the staged files. `auto` compresses only if that saves memory. The default for
    data sets of type `in_memory` is `none`."""
    num_workers: PositiveInt | None = None
    """Parallel readers. Default: the number of CPUs, at most 72."""
    chunk_size: PositiveInt | None = None
    """Largest number of files that a reader takes at once. Default: chosen so that all readers
    are busy."""
    memory_limit_gb: PositiveFloat | None = None
    """Limit in GiB for the staged data. A larger data set is refused before training starts."""


class ColumnsSection(Section):
    """Columns of a table: a parquet file or a saved Hugging Face data set."""

    image: str | None = None
    """Column with the bytes of the files, or with `{bytes, path}`. Default: found by its type and
    by common names."""
    caption: str | None = None
    """Column with the captions. Default: the first of the common names that exists, if any."""


class RemoteSection(Section):
    """Access to files at an address such as `s3://...` or `https://...`."""

    timeout_s: PositiveFloat = 60.0
    """Seconds after which a request counts as failed."""
    retries: NonNegativeInt = 5
    """Number of times a failed request is repeated, with growing pauses."""
    options: dict[str, Scalar | dict[str, Scalar]] = Field(default_factory=dict)
    """Arguments of fsspec's file system, such as `anon` or `endpoint_url` for S3."""


class ShapesSection(Section):
    """The generated data set of coloured shapes."""

    copies: PositiveInt = 8
    """Images of each combination of shape and colour, with varying position and size."""
    size: Annotated[int, Field(ge=16, multiple_of=4)] = 24
    """Edge of an image in pixels."""
    seed: int = 0
    """Seed of positions and sizes."""
    concept: str | None = None
    """Generate only this new shape (`star`), in every colour, instead of the usual shapes."""


class AugmentationSection(Section):
    """A random change of images. Masks and control images are warped in the same way."""

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
    """The kind of change. Augmentations are applied in the order of the list."""
    probability: Fraction = 0.5
    """Fraction of the samples that are changed."""
    amount: PositiveFloat | None = None
    """Largest change: degrees for `rotate` and `hue`, otherwise a fraction. Default: a mild
    change."""


class DatasetSection(Section):
    """A data set: where it is and how it is read, cropped, captioned and repeated."""

    id: str = "default"
    """Name in messages and reports."""
    type: str = "local"
    """`local`: read during training; `in_memory`: read into host memory first; `shapes`: generated.

    `local` and `in_memory` accept a folder, tar shards, parquet files, a saved Hugging Face data
    set or an address, and detect which it is; `tar`, `parquet`, `hf` and `remote` state it.
    """
    dataset_type: Literal["image", "video", "audio"] = "image"
    """Kind of the samples."""
    instance_data_dir: str | None = None
    """Folder of the samples, or the shards, tables or address for other types."""
    conditioning_data_dir: str | None = None
    """Folder of control or reference images: one for each sample, with the same stem."""
    mask_data_dir: str | None = None
    """Folder of masks (white: learn this): one for each sample, with the same stem."""
    mask_invert: bool = False
    """Learn the black parts of masks instead."""
    mask_background: Fraction = 0.0
    """Weight of the loss outside the mask; inside it is 1."""
    mask_normalize: bool = True
    """Scale the weights of a sample to an average of 1, so that a small mask counts as much as a
    whole image.

    `false`: the weight inside a mask is 1, so samples with small masks count less.
    """
    in_memory: InMemorySection = InMemorySection()
    """Settings of staging."""
    columns: ColumnsSection = ColumnsSection()
    """Settings of tables."""
    remote: RemoteSection = RemoteSection()
    """Settings of remote files."""
    shapes: ShapesSection = ShapesSection()
    """Settings of the generated data set."""
    resolution: Annotated[int, Field(ge=8)] = 1024
    """Size of the buckets in pixels: the edge of a square with the same area, or the shorter edge.
    See `resolution_type`."""
    resolution_type: Literal["area", "edge"] = "area"
    """What `resolution` sets: the area of buckets, or their shorter edge."""
    crop: Literal["center", "top", "random"] = "center"
    """Part of an image to keep if its bucket has another aspect ratio. `random` depends on the
    run's seed."""
    decode: Literal["exact", "fast"] = "exact"
    """`fast` decodes large JPEG files at reduced size; pixel values differ slightly."""
    bucket_step: Annotated[int, Field(ge=1)] | None = None
    """Bucket edges are multiples of this many pixels. Default: the family's step."""
    max_aspect: Annotated[float, Field(ge=1)] = 3.0
    """Images whose long edge is more than this many times the short edge are dropped and
    reported."""
    min_edge: NonNegativeInt = 0
    """Images with a shorter edge than this many pixels are dropped and reported. 0: none; small
    images are enlarged."""
    frames: PositiveInt | tuple[PositiveInt, ...] = 81
    """Video: frames of a clip, 4n+1. From a list, the largest number that the video has."""
    fps: PositiveFloat | None = None
    """Video: frames per second that clips are resampled to. Default: those of the file."""
    sample_rate: PositiveInt = 44100
    """Audio: samples per second that clips are resampled to."""
    channels: Literal[1, 2] = 2
    """Audio: 1 for mono, 2 for stereo."""
    seconds: PositiveFloat | tuple[PositiveFloat, ...] = 10.0
    """Audio: length of a clip. From a list, the longest that the file has."""
    clip: Literal["start", "center", "random"] = "start"
    """Part of a longer video or audio file to use. `random` depends on the run's seed."""
    caption_strategy: Literal[
        "auto", "textfile", "jsonl", "parquet", "filename", "instanceprompt"
    ] = "auto"
    """Source of the captions. `auto`: metadata.jsonl if it exists, otherwise a .txt file next to
    each sample."""
    instance_prompt: str | None = None
    """The caption of all samples, for `caption_strategy: instanceprompt`."""
    caption_dropout: Fraction = 0.0
    """Fraction of samples trained with the empty caption, drawn again in each epoch."""
    repeats: PositiveInt = 1
    """Number of times each sample is used per epoch."""
    weight: PositiveFloat = 1.0
    """Multiplies `repeats` and can be a fraction: 0.5 uses half of the samples per epoch, in
    turn."""
    max_corruption_rate: Fraction = 0.01
    """Largest fraction of unreadable samples. Below it they are skipped and listed; above it the
    run stops."""
    timeout_s: PositiveFloat = 300.0
    """Seconds after which reading and decoding one sample is given up and the run stops."""
    cache_latents_to_disk: bool | None = None
    """ai-toolkit's name for `cache_config.persistent_cache`."""
    augmentations: tuple[AugmentationSection, ...] = ()
    """Random changes of each image, drawn from the run's seed and the image's content."""
    augmentations_cache_mode: Literal["disable_cache", "static", "refresh_each_epoch"] | None = None
    """How the latent cache treats random crops and augmentations. Without them it has no effect.

    `static`, the default: drawn once. `refresh_each_epoch`: drawn again for each epoch and encoded
    in advance. `disable_cache`: the same draws, encoded when they are used.
    """
    variants: PositiveInt = 1
    """With `static`: number of draws of each sample to encode. Epochs use them in turn."""


class RunFile(Section):
    """One training run."""

    output_dir: Annotated[str, Field(min_length=1)] = "runs/run"
    """The run folder, for the resolved run file, logs, samples, checkpoints and results."""
    seed: int = 0
    """Seed of data order, noise, timesteps and dropout."""
    use_gh200_trainer: bool = True
    """False: ignore `gh200_optimizations`, with a notice."""
    model: ModelSection = ModelSection()
    adapter: AdapterSection | None = None
    """The adapter to train. Default: none, so that every weight of the model is trained."""
    datasets: tuple[DatasetSection, ...] = ()
    cache_config: CacheSection = CacheSection()
    gh200_optimizations: Gh200Section = Gh200Section()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    validation: ValidationSection = ValidationSection()
    logging: LoggingSection = LoggingSection()
    distributed: DistributedSection = DistributedSection()
    plan: Literal["auto", "off"] | PlanSection = "auto"
    """What the planner may decide. `auto`: everything; `off`: nothing, so that the other sections
    apply as written."""
