"""What a run file may say: one frozen model a section, every key with its meaning.

Only shapes and ranges live here; those of data sets are in `data_schema`. Reading files is `load`,
the forks' spellings are `spellings`, what must hold between sections is `rules`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gracetune.errors import ConfigError
from gracetune.units import parse_bytes

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Scalar = str | int | float | bool | None
CacheType = Literal["unified_memory", "memory", "disk"]


class Section(BaseModel):
    """A section of a run file: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


# ------------------------------------------------------------------------------------------
# What a run file may say: one frozen model a section, every key with its meaning.
#
# Only shapes and ranges live here; those of data sets are in `data_schema`. Reading files is
# `load`,
# the forks' spellings are `spellings`, what must hold between sections is `rules`.


__all__ = [
    "AdapterSection",
    "AugmentationSection",
    "CacheSection",
    "ColumnsSection",
    "DatasetSection",
    "DistributedSection",
    "Gh200Section",
    "InMemorySection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "OverrideSection",
    "RemoteSection",
    "RunFile",
    "Section",
    "ShapesSection",
    "TrainSection",
    "ValidationSection",
]


class ModelSection(Section):
    """Which model is trained, and how its forward pass is computed."""

    family: str = "tiny"
    """The model family: `tiny`, `wan22`, ..., or one that a package adds by an entry point."""
    path: str | None = None
    """A folder as diffusers saves it, or a name on the Hugging Face hub; `tiny` needs none."""
    revision: str | None = None
    """Of a hub name: the branch, tag or commit; none: the newest."""
    transformer_file: str | None = None
    """One safetensors file, in the model's original names, instead of the folder's transformer."""
    transformer_2_file: str | None = None
    """The same for the second transformer: of `wan22`, the low-noise expert."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the weights are kept in; `auto`: what the files have."""
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Keep the frozen weights of linear layers in fewer bits; adapters are trained beside them."""
    frozen_compute: Literal["bf16", "fp8"] = "bf16"
    """How products with frozen weights are computed; `fp8`: rounded by rows, with half the bytes in
    memory and on the link, where the GPU has such products."""
    task: Literal["auto", "text", "image"] = "auto"
    """What a sample starts from, where a model can do both; `auto`: what it was made for."""
    init_seed: int = 0
    """The seed of the weights where a family can make its own."""
    attention_mechanism: str = "auto"
    """The attention backend; `auto`: on a GPU the fastest by measuring, else torch's own choice."""


class OverrideSection(Section):
    """What is different for some of the adapted modules; what is not said stays as it is."""

    rank: PositiveInt | None = None
    """Their rank."""
    alpha: PositiveFloat | None = None
    """Their alpha; none: equal to their rank, or the section's where the rank is the section's."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Their dropout."""
    factor: Annotated[int, Field(ge=-1)] | None = None
    """Their factor."""


class AdapterSection(Section):
    """A small set of new weights trained beside frozen ones."""

    kind: Literal["lora", "dora", "locon", "loha", "lokr", "full"] = "lora"
    """The algorithm; `full`: a whole difference matrix for each module."""
    rank: PositiveInt = 16
    """The inner width of each adapter."""
    alpha: PositiveFloat | None = None
    """Scale of the update times rank; none: equal to `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's input that is dropped while training."""
    factor: Annotated[int, Field(ge=-1)] = -1
    """`lokr`: size of the smaller matrix; -1: as near to the larger one as can be."""
    full_matrix: bool = False
    """`lokr`: neither matrix is made of two thin ones, and rank and alpha have no effect."""
    targets: tuple[str, ...] | None = None
    """Modules to adapt, by name, ending, pattern (`blocks.*.attn1.*`) or `re:` and an expression;
    none: the family's own choice."""
    overrides: dict[str, OverrideSection] = Field(default_factory=dict)
    """Other settings by module, written as targets are; where two match, the later counts."""


class CacheSection(Section):
    """Where encoded latents and texts are kept."""

    vae_cache_type: CacheType = "memory"
    """Home of latents."""
    text_cache_type: CacheType = "memory"
    """Home of text embeddings."""
    cache_dir: str | None = None
    """Folder of a persistent cache; none: `cache` in the run folder."""
    persistent_cache: bool = False
    """Keep encoded entries on disk, so that the next run finds them."""
    host_budget_gb: PositiveFloat | None = None
    """Most GiB of host memory for entries on each rank; none: a share of 3/4 of what is free."""
    device_budget_gb: Annotated[float, Field(ge=0)] | None = None
    """Most GiB of device memory for text that stays there; none: one 64th of the device's."""
    vae_tiling: Literal["auto"] | bool = "auto"
    """Encode by tiles, in less memory; `auto`: pictures and frames above 2048x2048 pixels."""
    prefetch_depth: Literal["auto"] | PositiveInt = "auto"
    """Batches brought to the device ahead of use; `auto`: more while steps wait for one."""
    prefetch_budget_gb: PositiveFloat = 2.0
    """With `auto`: most GiB that batches brought ahead may take."""


class Gh200Section(Section):
    """Unified-memory hints, and the ramp of gradient accumulation."""

    enable_uvm_hints: bool | None = None
    """Force placement hints on or off; none: the environment decides."""
    placement: dict[str, Literal["host", "staged", "device", "leave"]] = Field(default_factory=dict)
    """Where tensors of a batch live, by role (`latents`, `audio`, `text`, ...) or by name."""
    enable_batch_size_rampup: bool = False
    """Let the effective batch grow while training."""
    initial_effective_batch_size: PositiveInt | None = None
    """Samples in the first optimizer steps, over all ranks."""
    target_effective_batch_size: PositiveInt | None = None
    """Samples in an optimizer step once the ramp is done; none: the batch without a ramp."""
    batch_rampup_steps: PositiveInt = 1000
    """Micro-batches over which the ramp goes."""
    rampup_shape: Literal["quadratic", "linear"] = "quadratic"
    """How the effective batch grows with micro-batches."""


class TrainSection(Section):
    """The loop: how long, in which batches and precision."""

    max_train_steps: PositiveInt = 1000
    """Optimizer steps."""
    batch_size: PositiveInt = 1
    """Samples in a micro-batch, on each rank."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches in an optimizer step where no ramp says otherwise."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """`auto`: ACCELERATE_MIXED_PRECISION, else bf16 on a GPU and fp32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward instead of keeping them."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "logit_normal"
    """How noise levels are drawn."""
    timestep_mean: float = 0.0
    """`logit_normal`: the mean before the sigmoid; above 0 draws more noise."""
    timestep_std: PositiveFloat = 1.0
    """`logit_normal`: the standard deviation before the sigmoid."""
    timestep_shift: PositiveFloat | Literal["flux", "qwen_image", "sd3"] = 1.0
    """Noise levels s become shift*s / (1 + (shift-1)*s); a name: by size, as that model."""
    timestep_window: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Levels are drawn from the first up to, and without, the second; the shape stays."""
    min_snr_gamma: PositiveFloat | None = None
    """Weigh losses by min-SNR (Hang et al. 2023) with this gamma; flow matching: see the next."""
    min_snr_in_flow: Literal["identity", "exact"] = "identity"
    """For flow matching: no weights, or the exact ones, which all but leave out high noise."""
    experts: Literal["both", "high", "low"] = "both"
    """Of models with two experts: which are trained."""
    expert_turns: Literal["alternate", "proportional"] = "alternate"
    """Both experts get as many steps, or as many as the noise levels that are drawn."""
    switch_every: PositiveInt = 1
    """Optimizer steps before the other expert may have its turn."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the moving average of the trained weights; 0: none is kept."""
    checkpoint_every: NonNegativeInt = 500
    """Optimizer steps between checkpoints; 0: only at the end."""
    checkpoint_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Minutes between checkpoints, beside the steps; 0: never by time."""
    keep_checkpoints: PositiveInt = 3
    """How many of the newest checkpoints stay."""


class OptimizerSection(Section):
    """The update rule and the learning rate over time."""

    name: str = "adamw"
    """`adamw`, `adamw_8bit`, `adafactor`, `automagic`, `lion`, `muon`, `prodigy` or
    `schedule_free`, or one that a package adds by an entry point."""
    lr: PositiveFloat | None = None
    """The highest learning rate; none: the optimizer's usual one. Automagic: where rates begin."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decays of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the rate rises from zero."""
    final_lr_share: Fraction = 0.0
    """Where `linear` and `cosine` end, as a share of `lr`."""
    state: Literal["auto", "device", "host"] = "auto"
    """Where the optimizer's state lives; `auto`: on the device, and as far as a plan of full
    training needs that room, in host memory."""
    lr_bump: PositiveFloat | None = None
    """Automagic: how far each element's rate moves in one step; none: a rate is found instead."""
    min_lr: PositiveFloat | None = None
    """Automagic: the lowest rate."""
    max_lr: PositiveFloat | None = None
    """Automagic: the highest rate."""
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
    """Pictures and losses that show how far the run is."""

    every: NonNegativeInt = 500
    """Optimizer steps between validations, beside step 0 and the last; 0: none at all."""
    prompts: tuple[str, ...] | None = None
    """What to picture; none: a few captions of the data set."""
    num_prompts: PositiveInt = 4
    """How many captions are taken where no prompts are given."""
    seed: int = 0
    """Seed of the first picture's noise; the next pictures count on from it."""
    sample_steps: PositiveInt = 24
    """Steps of the sampler."""
    guidance: Annotated[float, Field(ge=0)] = 2.0
    """Classifier-free guidance; 1: none."""
    width: PositiveInt | None = None
    """Width of the pictures; none: the first data set's resolution."""
    height: PositiveInt | None = None
    """Height of the pictures; none: the first data set's resolution."""
    frames: PositiveInt | None = None
    """Frames of the videos; none: as many as the first data set's clips have, pictures have 1."""
    seconds: PositiveFloat | None = None
    """Length of the sounds; none: that of the first data set's clips."""
    images: tuple[str, ...] | None = None
    """For models that start from a picture or edit one: a file for each of `prompts`."""
    holdout: Fraction = 0.0
    """Share of the samples kept out of training, whose loss is measured with fixed noise."""
    enable_manual_validation: bool = False
    """Also validate when `gracetune now validate` asks for it."""


class LoggingSection(Section):
    """Where the run tells what it does."""

    every: PositiveInt = 10
    """Optimizer steps between lines; losses reach the host no more often."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""


class DistributedSection(Section):
    """What Accelerate is told about more than one process."""

    timeout_s: PositiveFloat = 1800
    """How long a rank waits for another."""


class PlanSection(Section):
    """What the planner may decide: which blocks stream, what is recomputed, the batch."""

    device_memory: str | None = None
    """Most device memory that a plan may take, such as `96GB`; none: what the device has."""
    host_memory: str | None = None
    """Most host memory, such as `400GB`; none: what the machine can give."""
    batch: Literal["auto", "fixed"] = "auto"
    """`auto`: smaller micro-batches may be accumulated to the same number of samples."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Whether blocks are compiled; `auto`: where it is faster."""
    stream: bool = True
    """Whether frozen weights may live in host memory."""
    offload: bool = True
    """Whether activations may wait in host memory between forward and backward."""

    @field_validator("device_memory", "host_memory")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_bytes(value)
            except ConfigError:
                raise ValueError("a number and a unit, such as 96GB") from None
        return value


class RunFile(Section):
    """One training run."""

    output_dir: Annotated[str, Field(min_length=1)] = "runs/run"
    """The run folder: resolved run file, log, pictures, checkpoints, result."""
    seed: int = 0
    """The seed of data order, noise, timesteps and dropout."""
    use_gh200_trainer: bool = True
    """False: the run goes on without `gh200_optimizations`, and says so."""
    model: ModelSection = ModelSection()
    adapter: AdapterSection | None = None
    """None trains every weight of the model."""
    datasets: tuple[DatasetSection, ...] = ()
    cache_config: CacheSection = CacheSection()
    gh200_optimizations: Gh200Section = Gh200Section()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    validation: ValidationSection = ValidationSection()
    logging: LoggingSection = LoggingSection()
    distributed: DistributedSection = DistributedSection()
    plan: Literal["auto", "off"] | PlanSection = "auto"
    """What is resident, streamed, kept and recomputed; `off`: as the sections above say."""


# ------------------------------------------------------------------------------------------
# What a run file may say of a data set: where it is, how it is read, cropped and captioned.


STAGED_TYPES = frozenset(("in_memory", "shapes"))
"""Types of data sets that are read into host memory."""


class InMemorySection(Section):
    """How a data set is staged in host memory."""

    compression: Literal["auto", "lz4", "zlib", "snappy", "zstd", "none"] | None = "auto"
    """The codec of staged files; `auto` keeps one only where it shrinks them. Of a data set of type
    `in_memory` none is tried where nothing is said."""
    num_workers: PositiveInt | None = None
    """Readers in parallel; none: min(72, CPUs)."""
    chunk_size: PositiveInt | None = None
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
    retries: NonNegativeInt = 5
    """How often a failed request is repeated, a little later each time."""
    options: dict[str, Scalar | dict[str, Scalar]] = Field(default_factory=dict)
    """What fsspec's file system is made with, such as `anon` or `endpoint_url` for s3."""


class ShapesSection(Section):
    """The made data set of coloured shapes."""

    copies: PositiveInt = 8
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
    probability: Fraction = 0.5
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
    mask_background: Fraction = 0.0
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
    min_edge: NonNegativeInt = 0
    """Pictures with a shorter edge than this are dropped, and reported; 0: enlarge any."""
    frames: PositiveInt | tuple[PositiveInt, ...] = 81
    """Video: frames of a clip, 4n+1; of several, the most that a video is long enough for."""
    fps: PositiveFloat | None = None
    """Video: frames a second that clips are resampled to; none: the file's own."""
    sample_rate: PositiveInt = 44100
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
    caption_dropout: Fraction = 0.0
    """Share of samples trained with the empty caption, drawn anew each epoch."""
    repeats: PositiveInt = 1
    """How often an epoch shows each sample."""
    weight: PositiveFloat = 1.0
    """Times `repeats`, and may be a fraction: 0.5 shows half of the samples an epoch, in turn."""
    max_corruption_rate: Fraction = 0.01
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
    variants: PositiveInt = 1
    """With `static`: so many draws of each sample are encoded, and epochs take turns with them."""
