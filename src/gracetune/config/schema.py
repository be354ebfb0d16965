"""Define the settings of a run file: one frozen pydantic model per section.

A run file is the JSON, YAML or TOML file that describes a training run. The docstring under a field
is the documentation of that setting, and `gracetune schema` prints all of them. `load.py` reads run
files, `aliases.py` translates the keys of other tools, and `checks.py` has the rules that involve
several settings.
"""

from __future__ import annotations

import os.path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    field_serializer,
    field_validator,
)

from gracetune.config.dataset_schema import DatasetSection
from gracetune.config.schema_base import (
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
)
from gracetune.errors import ConfigError, hide_path
from gracetune.models.registry import FAMILIES
from gracetune.optim.registry import OPTIMIZERS
from gracetune.units import parse_bytes

CacheType = Literal["unified_memory", "memory", "disk"]
HEALTH_CHECKS = (
    "gradient_spikes",
    "learning_rate_high",
    "weights_still",
    "dataset_dead",
    "part_untrained",
    "overfitting",
    "timestep_shift",
    "samples_empty",
    "samples_same",
    "text_embeddings",
    "validation_prompts",
    "captions",
    "few_samples",
    "duplicates",
    "unreadable_files",
    "small_batches",
    "latents_scale",
    "warmup",
    "batch_ramp",
    "clipping",
    "skipped_steps",
    "data_waits",
    "weight_waits",
    "slow_down",
    "throttling",
    "disk_space",
    "page_cache",
    "host_memory",
    "device_memory",
    "device_shared",
    "loader_stalled",
    "step_stalled",
    "previous_run",
)
"""Names of the health checks that a run file can leave out."""


class ModelSection(Section):
    """The model to train, the storage of its weights, and the kernels of its forward pass."""

    family: str = Field(
        default="tiny",
        description="Architecture of the model, which decides how it is loaded and trained: one of "
        f"{', '.join(sorted(FAMILIES))}, or a family that another package provides through an "
        "entry point. `tiny` is a small model for trying things out.",
    )
    path: PathText | None = None
    """The model: its name on the Hugging Face hub, a folder saved by diffusers, or a single-file
    checkpoint (`.safetensors`) with the tensor names of the original release. The other components
    of a single file come from the published model. Default: the first model of the family in
    docs/families.md, from the hub; `tiny` creates its model."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. Set it to pin a version. Default: the newest."""
    transformer_file: PathText | None = None
    """Safetensors file with the transformer's weights, under the tensor names of the original
    release or diffusers', in fp32, fp16, bf16 or fp8. Set it to train these weights instead of
    those in `path`, which still has all other components."""
    transformer_2_file: PathText | None = None
    """Safetensors file with the weights of the second transformer, which is the low-noise one in
    models of the family `wan22`, as in `transformer_file`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the model's weights in memory. `auto`: the data type in the model's files. Full
    fine-tuning converts the weights to fp32, unless this is `bfloat16` and the optimizer can keep
    fp32 master weights."""
    quantize: Literal["none", "fp8", "int8", "nf4"] = "none"
    """Format in which the frozen weights of the blocks' linear layers are stored and streamed.
    Anything but `none` saves memory, costs accuracy and some time (matmuls dequantize the weights
    first), and needs an adapter, which is not quantized. `nf4` needs the package bitsandbytes."""
    frozen_compute: Literal["bf16", "fp8"] = "bf16"
    """Precision of the matmuls with frozen weights. `fp8` stores and streams these weights in half
    the bytes and is faster. It needs an adapter and a GPU of compute capability 8.9 or higher."""
    task: Literal["auto", "text", "image"] = "auto"
    """Input that the model generates from, for models that can do both: `text` alone, or an `image`
    and text. `auto`: the task that the model was released for."""
    init_seed: Seed = 0
    """Seed of the random initial weights of the model family `tiny`, if `path` is not set."""
    attention_mechanism: str = "auto"
    """Attention backend, such as `sdpa`, `cudnn` or `flash_attn_3`. `auto` measures the installed
    backends when the run starts and uses the fastest; without a GPU it uses torch's default. Set a
    name to skip the measurement. If that backend is not installed, or the model cannot use it, a
    warning says so and torch's default is used."""


class OverrideSection(Section):
    """Adapter settings for the modules that match a pattern in `adapter.overrides`. A setting that
    is not given here keeps the value of the `adapter` section."""

    rank: PositiveInt | None = None
    """Rank of the adapter in the modules that match the pattern. Default: `adapter.rank`."""
    alpha: PositiveFloat | None = None
    """Alpha of the adapter in the modules that match the pattern. Default: `rank` if the override
    sets it, otherwise `adapter.alpha`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of the adapter in the modules that match the pattern. Default: `adapter.dropout`."""
    factor: Annotated[int, Field(ge=-1)] | None = None
    """`lokr` only: factor in the modules that match the pattern. Default: `adapter.factor`."""


class AdapterSection(Section):
    """An adapter: a small set of new weights that is trained while the model stays frozen."""

    kind: Literal["lora", "dora", "locon", "loha", "lokr", "full"] = "lora"
    """Adapter algorithm. `lora` is supported by most other tools. `full` trains a matrix of the
    size of each adapted weight, which is added to that weight."""
    rank: PositiveInt = 16
    """Rank of the adapter's matrices. A larger rank can learn more, and makes the adapter file
    larger."""
    alpha: PositiveFloat | None = None
    """Strength of the adapter: its output is multiplied by alpha / rank. Default: equal to `rank`,
    which multiplies by 1."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the adapter's inputs that is set to zero in training, against overfitting."""
    factor: Annotated[int, Field(ge=-1)] = -1
    """`lokr` only: upper limit for the dimensions of the smaller matrix of the Kronecker product.
    -1: no limit, so that both matrices are about equally large. A smaller factor means a larger
    adapter."""
    full_matrix: bool = False
    """`lokr` only: train both matrices of the Kronecker product without a low-rank factorization.
    `rank` and `alpha` then have no effect."""
    targets: tuple[str, ...] | None = None
    """Modules to adapt: names, name endings, patterns such as `blocks.*.attn1.*`, or `re:` followed
    by a regular expression. Default: the usual modules of the model family."""
    overrides: dict[str, OverrideSection] = Field(default_factory=dict)
    """Other settings for some modules, as {pattern: settings}. Patterns are written as in
    `targets`. If several patterns match a module, the last one wins."""


class CacheSection(Section):
    """The cache of encoded samples: latents from the VAE and text embeddings of the captions.

    A run encodes each sample and each caption once, and reads the result from the cache afterwards.
    """

    vae_cache_type: CacheType = "memory"
    """Where latents are kept while training. `memory`: host memory; `unified_memory`: host memory
    that the GPU copies from directly; `disk`: files that are read for each batch, for caches that
    do not fit into memory."""
    text_cache_type: CacheType = "memory"
    """Where text embeddings are kept while training; values as for `vae_cache_type`."""
    cache_dir: PathText | None = None
    """Folder of a cache on disk. Runs with the same folder share their entries. Default: `cache` in
    the output folder."""
    persistent_cache: bool = False
    """Keep the cache on disk after the run, so that later runs with the same data and model need
    not encode again."""
    host_budget_gb: PositiveFloat | None = None
    """Limit in GiB of the host memory that cached entries may use on each machine, whose ranks
    share one copy. Default: 3/4 of the free memory."""
    device_budget_gb: Annotated[float, Field(ge=0)] | None = None
    """Limit in GiB of the GPU memory for text embeddings that are used often and stay on the GPU.
    0: none. Default: 1/64 of the GPU's memory."""
    vae_tiling: Literal["auto"] | bool = "auto"
    """Encode images and video frames in tiles, which needs less GPU memory and changes the latents
    slightly where tiles meet. `auto`: only above 2048x2048 pixels. Set `true` if encoding runs out
    of memory."""
    prefetch_depth: Literal["auto"] | PositiveInt = "auto"
    """Number of batches that are copied to the GPU before they are needed. `auto` starts small and
    increases the number while steps wait for data."""
    prefetch_budget_gb: PositiveFloat = 2.0
    """Limit in GiB of the GPU memory for prefetched batches with `prefetch_depth: auto`. Raise it
    if steps wait for data."""


ManagedRoleName = Literal[
    "weights", "trained", "gradients", "optimizer", "ema", "caches", "activations"
]


class Gh200Section(Section):
    """Memory placement for GH200 and other GPUs with unified memory, and the batch-size ramp.

    The ramp lets the effective batch size (samples per optimizer step, over all ranks) grow in the
    course of training, by accumulating gradients over more and more micro-batches. If it starts
    below `train.batch_size`, the first micro-batches are smaller.
    """

    enable_uvm_hints: bool | None = None
    """Give the CUDA driver hints about where the tensors of a batch should live in unified memory.
    Default: the variable SIMPLETUNER_GH200_ENABLE_UVM_HINTS or AITK_GH200_ENABLE_UVM_HINTS if it is
    set, otherwise true on a GPU that is cache-coherent with the CPU."""
    use_uvm: bool | None = None
    """Let a run use CUDA managed memory: batches, and what the device has no space for (see
    `managed`). A run that would be out of memory then continues, but slower. Default:
    `use_uvm` in the variable PYTORCH_CUDA_ALLOC_CONF; otherwise, only batches use it, on a GPU that
    is cache-coherent with the CPU."""
    managed: Literal["auto", "off"] | tuple[ManagedRoleName, ...] = "auto"
    """Use of managed memory, if `use_uvm` is true. `auto`: the planner uses it
    if that is faster or nothing else fits, and a step that runs out of memory moves more there.
    `off`: never. A list of roles is always in managed memory: `weights` (frozen), `trained`,
    `gradients`, `optimizer`, `ema`, `caches`, `activations` (offloaded ones)."""
    managed_access: Literal["auto", "in_place", "prefetch", "device"] = "auto"
    """Access to managed memory. `in_place`: kernels use it in host memory; `prefetch`: it moves to
    the GPU before use and back afterwards (gradients, caches and activations are used in place);
    `device`: it stays on the GPU while there is space. `auto`: `uvm_access_pattern` decides;
    without it, weights that matmuls read are prefetched, and the rest is used in place."""
    managed_memory: str | None = None
    """Limit of managed memory, such as `16GB`. Default: a quarter of the free GPU memory; on a GPU
    that is cache-coherent with the CPU, `uvm_oversubscription_ratio` times the GPU memory. Host
    memory, divided by the ranks of the machine, limits it in any case."""
    placement: dict[str, Literal["host", "staged", "device", "leave"]] = Field(default_factory=dict)
    """Placement hints of a batch's tensors, as {role or tensor name: placement}. Roles are
    `latents`, `audio`, `text` and others. `host`: read in place from host memory; `staged`: kept in
    host memory and prefetched before use; `device`: moved to the GPU at once; `leave`: no hint."""
    enable_batch_size_rampup: bool = False
    """Turn on the batch-size ramp: the effective batch size grows during training."""
    initial_effective_batch_size: PositiveInt | None = None
    """Effective batch size at the start of the batch-size ramp, in samples over all ranks; at least
    one for each rank. It must be set if the ramp is on. Below `train.batch_size`, micro-batches
    start with this size, which doubles until it is `train.batch_size`."""
    target_effective_batch_size: PositiveInt | None = None
    """Effective batch size at the end of the batch-size ramp, in samples over all ranks. Default:
    `train.effective_batch_size`, or else `train.batch_size` times
    `train.gradient_accumulation_steps` times the number of ranks."""
    batch_rampup_steps: PositiveInt = 1000
    """Number of micro-batches, of all ranks together, during which the effective batch size
    grows."""
    rampup_shape: Literal["quadratic", "linear"] = "quadratic"
    """Growth of the effective batch size in the batch-size ramp: `linear` grows evenly, `quadratic`
    slowly at first."""

    @field_validator("managed_memory")
    @classmethod
    def _check_size(cls, value: str | None) -> str | None:
        return _checked_size(value)


class TrainSection(Section):
    """The training loop: its length, batches, precision, timesteps and checkpoints.

    Timesteps range from 0 (the clean sample) to 1 (pure noise).
    """

    max_train_steps: PositiveInt = 1000
    """Length of the run in optimizer steps."""
    batch_size: PositiveInt = 1
    """Micro-batch size: samples in one forward and backward pass, per rank."""
    gradient_accumulation_steps: PositiveInt = 1
    """Number of micro-batches per rank whose gradients are averaged in one optimizer step. Raise it
    for a larger effective batch without more memory. A batch-size ramp replaces it."""
    effective_batch_size: PositiveInt | None = None
    """Samples in one optimizer step, over all ranks: a multiple of `train.batch_size`. Set it
    instead of `train.gradient_accumulation_steps` to train with the same samples in each step on
    any number of GPUs."""
    similar_batches: PositiveInt = 1
    """Number of successive micro-batches with samples of similar size. If clips or images differ
    much in size, set it to the number of micro-batches in a step, over all ranks: they then take
    about equally long, and ranks wait less for each other. 1: all batches are shuffled."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Precision of forward and backward passes. `no`: fp32; `fp16` is replaced by bf16. `auto`: the
    variable ACCELERATE_MIXED_PRECISION if set, otherwise bf16 if the GPU supports it."""
    gradient_checkpointing: bool = False
    """Recompute the activations of every block in backward, which saves memory and costs time. A
    planned run ignores it, because the plan decides for each block."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of all gradients together; larger gradients are scaled down to it. 0: no
    clipping."""
    timestep_sampling: Literal["uniform", "logit_normal", "mode", "cosmap"] = "logit_normal"
    """Distribution from which the timestep of each sample is drawn (Esser et al. 2024).
    `logit_normal` prefers the middle of the range."""
    timestep_mean: float = 0.0
    """`logit_normal` only: mean of the normal distribution before the sigmoid. Above 0, timesteps
    have more noise; below 0, less."""
    timestep_std: PositiveFloat = 1.0
    """`logit_normal` only: standard deviation of the normal distribution before the sigmoid. A
    larger value spreads timesteps towards 0 and 1."""
    timestep_shift: PositiveFloat | Literal["flux", "qwen_image", "sd3"] = 1.0
    """Shift of the drawn timesteps towards noise: t becomes shift t / (1 + (shift - 1) t). 1: no
    shift. A name selects that model's rule, in which larger images have a larger shift."""
    timestep_window: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Range of timesteps to train on, as [start, end); the end is excluded. Within the range, the
    shape of the distribution is unchanged."""
    min_snr_gamma: PositiveFloat | None = None
    """Gamma of the min-SNR loss weights (Hang et al. 2023), which limit the weight of samples with
    little noise; the paper uses 5. Default: no loss weights. It affects flow-matching models only
    with `min_snr_in_flow: exact`."""
    min_snr_in_flow: Literal["identity", "exact"] = "identity"
    """Meaning of `min_snr_gamma` for flow-matching models. `identity`: all timesteps have the same
    weight; `exact`: the paper's weights, which are almost 0 for timesteps near 1."""
    experts: Literal["both", "high", "low"] = "both"
    """Transformers to train, for models with a high-noise and a low-noise transformer."""
    expert_turns: Literal["alternate", "proportional"] = "alternate"
    """Distribution of optimizer steps over the high-noise and the low-noise transformer, for models
    with both. `alternate`: the same number for each; `proportional`: as often as drawn timesteps
    fall into the range of each."""
    switch_every: PositiveInt = 1
    """Number of optimizer steps for which one of the two transformers is trained before the other
    may follow, for models with a high-noise and a low-noise transformer."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay per optimizer step of an exponential moving average of the trained weights, such as
    0.999. 0: no average. Of two transformers, a step averages only the one that it trains."""
    checkpoint_every: NonNegativeInt = 500
    """Number of optimizer steps between checkpoints. 0: none by steps; the last step always has
    one."""
    checkpoint_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Minutes between checkpoints, in addition to those of `checkpoint_every`. 0: none by time."""
    keep_checkpoints: PositiveInt = 3
    """Number of newest checkpoints to keep; older ones are deleted. Their adapters are kept, as
    `keep_adapters` says."""
    keep_adapters: Literal["all"] | PositiveInt = "all"
    """Number of newest adapters to keep in the folder `adapters`, which has the adapter of every
    checkpoint, also of those that `keep_checkpoints` has deleted. `all`: every one; adapters are
    small. A run that trains the whole model has none."""
    async_checkpoints: bool | Literal["auto"] = "auto"
    """Write checkpoints in the background while training continues. That needs host memory for a
    copy of weights, averages and optimizer state; without it, training waits. `auto`: if the run
    trains the whole model, whose checkpoints are large."""
    skip_bad_batches: bool = False
    """Skip a step whose loss or gradient is not finite, instead of ending the run. This changes the
    result; skipped steps are recorded in the checkpoint, and skipped again if the run is resumed.
    Each step then waits for the GPU once."""
    check_gradients: bool = True
    """Check the gradients of the first step: every trained tensor must have one, and in a planned
    run, or on several ranks, one block is compared with a plain copy of it. `false` (or `off`)
    turns it off; `gracetune check gradients` compares all blocks."""


class OptimizerSection(Section):
    """The optimizer and the learning-rate schedule."""

    name: str = Field(
        default="adamw",
        description=f"Name of the optimizer: one of {', '.join(OPTIMIZERS)}, or one that another "
        "package provides through an entry point.",
    )
    lr: PositiveFloat | None = None
    """Peak learning rate, reached after the warm-up. Default: depends on the optimizer; 1e-4 for
    `adamw`. For `automagic`, the learning rate of the first step (1e-6 by default)."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates per step of the running averages of the gradient and of its square, as in
    Adam."""
    eps: PositiveFloat = 1e-8
    """Small number that is added to the denominator of the update, against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay: each step multiplies every trained weight by
    1 - learning rate * weight_decay. 0: no decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay between the warm-up and the last step. `constant`: no
    decay."""
    warmup_steps: NonNegativeInt = 0
    """Length in optimizer steps of the warm-up, in which the learning rate rises from near zero to
    `lr`."""
    final_lr_share: Fraction = 0.0
    """Learning rate at the end of a `linear` or `cosine` schedule, as a fraction of `lr`."""
    state: Literal["auto", "device", "host"] = "auto"
    """Where the optimizer state is stored. `device`: in GPU memory; `host`: in host memory, which
    makes room on the GPU and slows steps down. `auto`: on the GPU, except that the planner may move
    part of it to host memory in full fine-tuning."""
    lr_bump: PositiveFloat | None = None
    """`automagic` only: amount by which the learning rate of each weight element rises or falls per
    step. Default: elements have no learning rates of their own; the optimizer adapts one learning
    rate per parameter group instead."""
    min_lr: PositiveFloat | None = None
    """`automagic` only: lower bound of the learning rates. Default: 1e-7."""
    max_lr: PositiveFloat | None = None
    """`automagic` only: upper bound of the learning rates. Default: 1e-3 with `lr_bump`, otherwise
    0.1."""
    high_noise_lr_bump: PositiveFloat | None = None
    """`automagic` only: replaces `lr_bump` for the high-noise transformer, if the model has two."""
    high_noise_min_lr: PositiveFloat | None = None
    """`automagic` only: replaces `min_lr` for the high-noise transformer, if the model has two."""
    high_noise_max_lr: PositiveFloat | None = None
    """`automagic` only: replaces `max_lr` for the high-noise transformer, if the model has two."""
    low_noise_lr_bump: PositiveFloat | None = None
    """`automagic` only: replaces `lr_bump` for the low-noise transformer, if the model has two."""
    low_noise_min_lr: PositiveFloat | None = None
    """`automagic` only: replaces `min_lr` for the low-noise transformer, if the model has two."""
    low_noise_max_lr: PositiveFloat | None = None
    """`automagic` only: replaces `max_lr` for the low-noise transformer, if the model has two."""


class PromptSection(Section):
    """One prompt of `validation.prompts` with settings of its own. A setting that is not given here
    has the value of the `validation` section."""

    prompt: str
    """Text to generate a sample from."""
    negative_prompt: str | None = None
    """Text that the sample is steered away from. Default: `validation.negative_prompt`."""
    seed: Seed | None = None
    """Seed of the sample's initial noise. Default: `validation.seed` plus the number of prompts
    before this one."""
    width: PositiveInt | None = None
    """Width of the sample in pixels. Default: `validation.width`."""
    height: PositiveInt | None = None
    """Height of the sample in pixels. Default: `validation.height`."""
    steps: PositiveInt | None = None
    """Number of denoising steps. Default: `validation.sample_steps`."""
    guidance: Annotated[float, Field(ge=0)] | None = None
    """Scale of classifier-free guidance. Default: `validation.guidance`."""
    images: PathText | tuple[PathText, ...] | None = None
    """Path of the input image, or a list of paths, for models that animate or edit an image.
    Default: the entry of `validation.images` for this prompt."""
    frames: PositiveInt | None = None
    """Number of frames of the video, of the form 4n+1. Default: `validation.frames`."""
    seconds: PositiveFloat | None = None
    """Length of the audio in seconds. Default: `validation.seconds`."""


class ValidationSection(Section):
    """Validation: samples generated from prompts, and the loss of held-out samples."""

    every: NonNegativeInt = 500
    """Number of optimizer steps between validations. A run also validates before the first step,
    unless `at_start` is `false`, and after the last. 0: no scheduled validation."""
    at_start: bool = True
    """Validate before the first step, which shows what the model does without training. `false`:
    the run starts sooner."""
    prompts: tuple[str | PromptSection, ...] | None = None
    """Prompts to generate a sample from in each validation. A prompt is a text, or an object with
    `prompt` and settings of its own, such as `seed`. Default: the first captions of the training
    samples."""
    negative_prompt: str = ""
    """Text that samples are steered away from, for models with classifier-free guidance. Default:
    the empty prompt."""
    num_prompts: PositiveInt = 4
    """Number of captions to use as prompts if `prompts` is not set."""
    seed: Seed = 0
    """Seed of the first prompt's initial noise; each further prompt uses the next integer."""
    sample_steps: PositiveInt = 24
    """Number of denoising steps per sample. More steps take longer and look better."""
    guidance: Annotated[float, Field(ge=0)] = 2.0
    """Scale of classifier-free guidance. Higher values follow the prompt more closely; 1 turns
    guidance off."""
    width: PositiveInt | None = None
    """Width of generated samples in pixels. Default: the largest `resolution` of the first
    dataset."""
    height: PositiveInt | None = None
    """Height of generated samples in pixels. Default: the largest `resolution` of the first
    dataset."""
    frames: PositiveInt | None = None
    """Number of frames of generated videos, of the form 4n+1. 1 generates images. Default: the
    longest clip length of the first dataset if it has videos, otherwise 1."""
    seconds: PositiveFloat | None = None
    """Length of generated audio in seconds. Default: the longest clip length of the first
    dataset."""
    images: tuple[PathText | tuple[PathText, ...], ...] | None = None
    """Paths of input images, one for each of `prompts`, for models that animate or edit an image.
    For models that take several, a list of paths can stand in place of each path."""
    holdout: Fraction = 0.0
    """Fraction of the files that is not trained on. Each validation measures the loss on them,
    always with the same noise; set it, for example to 0.05, to see overfitting. A file that has
    copies, or is in several datasets, is held out everywhere."""
    enable_manual_validation: bool = False
    """Also validate on request, with the command `gracetune now validate`."""


class LoggingSection(Section):
    """Progress lines on the console, and where else events are sent."""

    every: PositiveInt = 10
    """Number of optimizer steps between progress lines. Losses are copied from the GPU only then,
    so a small number slows short steps down."""
    tensorboard: bool = True
    """Write TensorBoard files into the output folder."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    """Trackers that get losses, samples, settings, the plan, memory and health: `wandb` (Weights &
    Biases), `trackio`, `mlflow`. Each needs its extra, as in `pip install 'gracetune[wandb]'`.
    `tensorboard` is on by default. A tracker that fails never ends the run."""
    tracker_project: Annotated[str, Field(min_length=1)] = "gracetune"
    """Name of the project in `wandb` and `trackio`, and of the experiment in `mlflow`."""
    tracker_run_name: str | None = None
    """Name of the run in trackers. Default: the name of the output folder."""
    tracker_offline: bool = False
    """Let trackers write to this machine only. `wandb` then writes files to the output folder,
    which `wandb sync` uploads later."""
    tracker_samples: bool = True
    """Send validation samples to trackers. `false`: only numbers and text."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on which the run serves its metrics to Prometheus, at `/metrics`. 0: any free port,
    which the log names. Default: none."""
    prometheus_host: str = "127.0.0.1"
    """Address of the network interface that `prometheus_port` is opened on. The metrics need no
    password: open another one only in a network that you trust."""
    webhooks: tuple[str, ...] = ()
    """Addresses (`https://...`) to which the run sends a JSON message when it starts, ends or
    fails, and when its health changes. An address that does not answer never stops the run."""

    @field_validator("webhooks")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(one.startswith(("https://", "http://")) for one in value):
            raise ValueError("addresses that start with https:// or http://")
        return value

    @field_serializer("webhooks", when_used="json")
    def _hide_paths(self, value: tuple[str, ...]) -> list[str]:
        """Leave out paths in files that a run writes: many services put a secret there."""
        return [hide_path(one) for one in value]


class HealthSection(Section):
    """Health checks, which name problems of a run and their causes while it trains."""

    enabled: bool = True
    """Check the health of the run. `false` turns all checks off; a loss that is not finite still
    ends the run."""
    ignore: tuple[str, ...] = ()
    """Names of checks to leave out, as listed in docs/watching-a-run.md."""
    degrade: bool = True
    """Let the run free memory by itself if it is about to run out: prefetch less, drop cached
    samples, use a smaller plan. `false`: only report it."""
    stop: bool = True
    """Let the run save a checkpoint and stop if host memory or disk space is about to run out.
    `false`: only report it."""
    wait_share: Fraction = 0.2
    """Share of a step's time that it may wait for data or for streamed weights before the run
    reports it."""
    slow_down: Annotated[float, Field(gt=1)] = 1.5
    """Factor by which steps may become slower than the first ones of the run before it is
    reported."""
    stall_s: PositiveFloat = 120
    """Seconds that a step may wait for a batch, or take altogether, before the run reports what it
    waits for. A step may also take three times as long as the longest one before it."""
    disk_min_gb: Annotated[float, Field(ge=0)] = 1.0
    """GiB of disk space below which the run reports that space runs out."""

    @field_validator("ignore")
    @classmethod
    def _check_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in HEALTH_CHECKS]
        if unknown:
            raise ValueError(f"names of checks: {', '.join(HEALTH_CHECKS)}")
        return value


class DistributedSection(Section):
    """Training with more than one process (rank)."""

    strategy: Literal["auto", "replicate", "fsdp2", "hsdp"] = "auto"
    """How ranks divide the model. `replicate`: each rank has all weights, and streams frozen ones
    that do not fit. `fsdp2`: each rank has a part of all weights, gradients and optimizer state,
    and gathers a block's weights while it computes the block. `hsdp`: as `fsdp2` within groups of
    `shard_size` ranks, and every group has the whole model. `auto`: `replicate`."""
    shard_size: PositiveInt | None = None
    """Number of ranks that together have one copy of the model, for `hsdp`. Default: the ranks of
    one machine."""
    context_parallel: PositiveInt = 1
    """Number of ranks that divide the tokens of one sample among them, for long videos and large
    images (Ulysses). It must divide the number of ranks and of the model's attention heads."""
    context_parallel_kind: Literal["ulysses", "ring"] = "ulysses"
    """How these ranks compute attention. `ulysses` exchanges heads for tokens; `ring` passes keys
    and values from rank to rank and has not been tested."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass, and gather them again in backward.
    False needs more memory and less network traffic (for `fsdp2` and `hsdp`)."""
    prefetch_blocks: PositiveInt = 1
    """Number of blocks whose weights are gathered ahead of the one that computes (for `fsdp2` and
    `hsdp`). Each takes memory for one block."""
    cpu_offload: bool = False
    """Keep each rank's part of weights, gradients and optimizer state in host memory, and run the
    optimizer on the CPU (for `fsdp2` and `hsdp`)."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks (for `fsdp2` and `hsdp`)."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Library with which ranks exchange gradients. `auto`: NCCL, or gloo on CPUs and if more ranks
    than GPUs are started on a machine, which NCCL refuses."""
    timeout_s: PositiveFloat = 1800
    """Seconds that a rank waits for the other ranks before the run fails. Raise it if one rank
    needs longer, for example to encode its part of the cache."""
    heartbeat_s: PositiveFloat = 5
    """Seconds between two heartbeats, by which a rank tells the others that it lives."""
    stall_timeout_s: PositiveFloat = 45
    """Seconds without a heartbeat after which a rank counts as lost: its process was stopped, or
    its machine or network is down. The other ranks then name it and end. A rank that is only busy
    sends heartbeats; `timeout_s` applies to it. At least three times `heartbeat_s`."""


class PlanSection(Section):
    """Limits for the planner, which decides for each block of the model whether its weights stream
    from host memory and whether its activations are kept, recomputed or offloaded.
    """

    device_memory: str | None = None
    """Limit of the GPU memory that a run may use, such as `96GB`. Set it to share a GPU. Default:
    all that is free."""
    host_memory: str | None = None
    """Limit of the host memory that a run may use on one machine, with all its GPUs together, such
    as `400GB`. Default: all that is free."""
    batch: Literal["auto", "fixed"] = "auto"
    """Micro-batch sizes that `gracetune plan` considers. `auto`: it also suggests a faster size
    that keeps the number of samples per optimizer step; `fixed`: only `train.batch_size`, which
    `gracetune train` always uses."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the blocks of the model with torch.compile. `auto`: only if the planner expects
    a faster run."""
    stream: bool = True
    """Allow the planner to keep frozen weights in host memory and to stream them to the GPU."""
    offload: bool = True
    """Allow the planner to keep activations in host memory between forward and backward."""

    @field_validator("device_memory", "host_memory")
    @classmethod
    def _check_size(cls, value: str | None) -> str | None:
        return _checked_size(value)


def _checked_size(value: str | None) -> str | None:
    if value is not None:
        try:
            parse_bytes(value)
        except ConfigError:
            raise ValueError("a number and a unit, such as 96GB") from None
    return value


class RunFile(Section):
    """All settings of one training run."""

    output_dir: Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)] = "runs/run"
    """Output folder of the run, for its settings, logs, samples, checkpoints and results. In every
    path, a leading `~` is your home folder."""
    seed: int = 0
    """Seed of all random numbers in training: data order, noise, timesteps, crops and dropout."""
    use_gh200_trainer: bool = True
    """Set it to false to ignore the section `gh200_optimizations`."""
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
    health: HealthSection = HealthSection()
    distributed: DistributedSection = DistributedSection()
    plan: Literal["auto", "off"] | PlanSection = "auto"
    """Memory planning. `auto`: the planner decides how the model fits into memory; `off`: no
    planning, so that the whole model must fit on the GPU. A section limits what the planner may
    decide."""
