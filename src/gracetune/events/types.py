"""Define the events of a run, and the protocol of the sinks that receive them.

`KINDS` maps each class to its event kind in `events.jsonl`, and field names are keys there. Kinds
and fields are a file format that other tools read: do not rename them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


FINISHED = "finished: "
"""Start of the notice that a run which is started again has no steps left."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run is set up and starts to train, from step 0 or from a checkpoint."""

    output_dir: str
    model: str
    """The name of the model family."""
    trainable_parameters: int
    """The number of trained weights, counted as elements."""
    total_steps: int
    start_step: int
    """Steps that earlier processes of this run have done; 0 for a new run."""
    num_samples: int
    """Number of training samples, without held-out samples and without repeats."""
    device: str
    precision: str
    """`fp32` or `bf16`."""


@dataclass(frozen=True, slots=True)
class StartTimed:
    """The seconds that a run took to start, until its first step begins, by phase."""

    seconds: Mapping[str, float]
    """Phase -> seconds. `imports`; `loading`: reading the model; `hashing`: waiting for the digest
    of its weights; `model`: quantization, adapter and optimizer; `encoding`: reading and encoding
    the data; `measuring`: the rates of the device; `tracing`; `searching`: timing kernels and
    finding the plan; `placing`: moving weights to where the plan wants them; `attention`: timing
    its backends; `other`. A phase that the run does not have is absent."""
    total: float
    """The sum of all phases."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A text message for the log, about a choice, a fallback or a rounded value.

    The console shows warnings, fallbacks, and notices that start with a label, as in
    `plan: 34 of 57 blocks streamed` (see `LABELS` in console.py). Others are only logged.
    """

    text: str
    level: Literal["info", "warning"] = "info"
    fallback: bool = False
    """True if a slower or less capable method is used than the one that was requested."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of a stage before training, such as reading or encoding the data."""

    stage: str
    done: int
    total: int
    unit: str = "files"
    """The unit of `done` and `total`."""
    nbytes: int = 0
    """Bytes processed so far; 0 if the stage does not count bytes."""
    total_nbytes: int = 0
    """Bytes in total, as far as they are known."""
    seconds: float = 0.0
    """Seconds since the stage started; 0 if its speed is not reported."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step is done."""

    step: int
    """The number of steps done, counted from 1."""
    loss: float
    """The mean loss over the samples of the step."""
    lr: float
    grad_norm: float
    """The gradient norm before clipping."""
    samples: int
    """Samples in this step, on all ranks."""
    accumulation: int
    """Micro-batches of each rank in this step."""
    epoch: int
    """The epoch that the next batch belongs to, from 0."""
    seconds: float
    """Wall time of the step in seconds: the mean over the steps that were logged together."""
    expert: str = ""
    """The trained transformer of Wan 2.2, `high` or `low` (noise); empty for other models."""


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """Host and device memory in use, in bytes."""

    step: int
    host: int
    device: int
    device_peak: int
    """The highest value of `device` since the process started."""
    managed: int = 0
    """CUDA managed memory that gracetune allocated, on the host or the device."""
    stage: int = 1
    """1: all managed memory is on the device; 2: the device is oversubscribed."""


@dataclass(frozen=True, slots=True)
class BatchesFed:
    """Statistics of loading batches, counted from the start of the process."""

    step: int
    batches: int
    hits: int
    """Encoded samples and captions that were found in the cache in memory."""
    reads: int
    """Encoded samples and captions that were read from cache files on disk."""
    hot: int
    """Encoded captions that were already on the device."""
    waits: int
    """Batches that were not ready when a step needed them; the first one never is."""
    nbytes: int
    """Bytes copied to the device."""
    waited_s: float
    """Seconds that steps waited for batches."""
    hidden_s: float
    """Seconds of loading that overlapped with steps."""
    depth: int
    """Current number of batches to prefetch; 0 if each is loaded when a step needs it."""


@dataclass(frozen=True, slots=True)
class WeightsStreamed:
    """Statistics of copying frozen weights to the device, counted from the start of the process."""

    step: int
    slots: int
    """Number of device buffers that weights are copied to; it may grow during the run."""
    fetches: int
    """Number of copies to the device; each is the weights of one block."""
    nbytes: int
    """Bytes copied to the device."""
    late: int
    """Times that a block waited for its weights although they were being prefetched."""
    on_demand: int
    """Times that a block needed weights that had not been prefetched."""
    waited_s: float
    """Seconds that computation waited for weights."""
    hidden_s: float
    """Seconds of copying that overlapped with computation, estimated from the link's bandwidth."""


@dataclass(frozen=True, slots=True)
class RatesSpread:
    """A histogram of learning rates, for optimizers with one rate per weight."""

    step: int
    expert: str
    """The transformer of Wan 2.2, `high` or `low` (noise); empty for other models."""
    limits: tuple[float, ...]
    """The edges of the bins: one more than there are bins."""
    counts: tuple[int, ...]
    """Number of weights in each bin; the outermost bins include all values beyond them."""


@dataclass(frozen=True, slots=True)
class RampChanged:
    """The ramp of the effective batch size changed the number or the size of micro-batches."""

    step: int
    micro_batches: int
    """Micro-batches done so far by each rank."""
    accumulation: int
    """Micro-batches in each step from now on."""
    batch_size: int = 0
    """Samples in a micro-batch from now on; 0 in logs of earlier versions."""


@dataclass(frozen=True, slots=True)
class Validated:
    """A validation is done: samples are written and the held-out loss is measured."""

    step: int
    grid: str | None
    """The path of an image with all samples; None on ranks that write no files."""
    prompts: tuple[str, ...]
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean losses on held-out samples, by name."""
    seconds: float = 0.0
    request: str = ""
    """The id of the request that asked for it; empty for a scheduled validation."""


@dataclass(frozen=True, slots=True)
class RunDescribed:
    """The machine, the versions, the data and the memory plan of a process, once at its start.

    The settings themselves are in `run.json`.
    """

    step: int
    """Steps done before this process; the same as `RunStarted.start_step`."""
    machine: Mapping[str, object]
    """`host`, `cpus`, `memory` (bytes), `link` (how host and device memory are connected), `ranks`,
    and `gpus`: a list of `name` and `memory`. `gpus` is empty on a CPU."""
    versions: Mapping[str, str]
    """Package -> version, with `python`."""
    settings: str
    """A digest of all settings; runs with the same digest have the same run file."""
    data: Mapping[str, object]
    """`samples`, `held_out`; `datasets`: a list of `id`, `type`, `samples`, `held_out`, `repeats`,
    `weight` and `share` (of all draws); `buckets`: a list of `size`, `samples` and `batches`;
    `corrupt`: a list of `file` and `reason`; `captions`: `samples`, `unique`, `empty`,
    `words_min`, `words_mean`, `words_max`."""
    plan: Mapping[str, object] | None = None
    """The memory plan: `batch`, `compiled`, `blocks` (a list of `name`, `weights`, `activations`),
    `seconds`, `launch_costs_s` (CPU seconds to launch kernels: measured, or on a CPU assumed),
    `device` and `host` (role -> bytes). None if the run has none."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step by phase: the mean of the steps since the last event of this kind."""

    step: int
    steps: int
    """Number of steps that the means are over."""
    seconds: Mapping[str, float]
    """Phase -> seconds per step. `compute`: forward and backward; `data`: waiting for batches;
    `weights`: waiting for streamed weights and activations; `host`: waiting for other ranks;
    `optimizer`: clipping and update; `other`: the rest, such as logging. Checkpoints and
    validations are not part of a step: their events have their seconds."""
    total: float
    """Wall time of a step in seconds: the sum of the phases."""


@dataclass(frozen=True, slots=True)
class LossParts:
    """The training loss in parts, averaged over the samples since the last event of this kind.

    Each part is a mapping of name -> `{"loss": mean, "samples": count}`, over the samples of all
    ranks.
    """

    step: int
    by_dataset: Mapping[str, Mapping[str, float]]
    """By `datasets[].id`. A dataset that was not drawn has 0 samples and no `loss`."""
    by_timestep: Mapping[str, Mapping[str, float]]
    """By range of timesteps, as in `t0.00-0.25`; 0 is the clean sample."""
    by_part: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By output of the model, such as `video` and `audio`; empty for a model with one output."""
    by_expert: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By transformer of Wan 2.2, `high` or `low` (noise); empty for other models."""


@dataclass(frozen=True, slots=True)
class WeightsMoved:
    """Distance of each block's trained weights from the start of the run."""

    step: int
    measure: Literal["adapter", "full"]
    """`adapter`: the norm of the adapter's product of matrices, scaled as in the model, relative to
    the norm of the frozen weights. `full`: the norm of the change since the run started, relative
    to the norm of the weights at that time."""
    blocks: Mapping[str, float]
    """Block -> relative distance; 0.01 means that the change is 1 % of the weights."""
    grad_norms: Mapping[str, float] = field(default_factory=dict)
    """Block -> norm of its gradient in this step, before clipping; may be empty."""
    weight_norms: Mapping[str, float] = field(default_factory=dict)
    """Block -> norm of its trained weights; in full fine-tuning an estimate from a sample."""


@dataclass(frozen=True, slots=True)
class DeviceSensors:
    """Temperature, clocks and power of the GPUs, and the state of the host."""

    step: int
    gpus: tuple[Mapping[str, object], ...]
    """For each GPU of this process: `index`, `name`, `temperature_c`, `sm_clock_mhz`,
    `max_sm_clock_mhz`, `power_w`, `power_limit_w`, `utilization` (0 to 1), `memory_used`,
    `memory_total`, and `throttle`, a list of the reasons why clocks are lowered. A value that the
    driver does not report is absent."""
    host: Mapping[str, float]
    """`memory_available`, `memory_total`, `swap_used`, `cgroup_used`, `cgroup_limit` (bytes),
    `oom_kills`; `refaults_per_s`: pages of files read again because the page cache had dropped
    them; `pressure_memory`, `pressure_io`, `pressure_cpu`: percent of the last 10 s in which some
    process waited (PSI); `output_free`, `cache_free`: free bytes on these disks; `cpu_s`: CPU
    seconds of this process. A value that the kernel does not report is absent."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Sensor -> the reason why it cannot be read."""


@dataclass(frozen=True, slots=True)
class MemoryRoles:
    """Memory in use by role and tier (device or host), with the planned bytes."""

    step: int
    roles: Mapping[str, Mapping[str, int]]
    """`device`, `host` or `managed` -> role (`weights`, `batches`, ...) -> bytes."""
    planned: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`device` or `host` -> role -> bytes that the plan expects; empty without a plan."""


@dataclass(frozen=True, slots=True)
class UnifiedMemory:
    """The accounting of CUDA managed memory: its stage, reclamations, hints and page faults.

    All counters are 0 in a run without managed memory. They count from the start of the process.
    """

    step: int
    stage: int
    """1: all managed memory is on the device; 2: the device is oversubscribed."""
    transitions: int
    """Changes of stage."""
    headroom: int
    """Free device memory in bytes, above which the device counts as having space: free bytes minus
    the threshold. Negative in stage 2; 0 on a CPU."""
    current: int
    peak: int
    cap: int
    denied: int
    """Reservations of managed memory that the cap has refused."""
    light_reclamations: int
    full_reclamations: int
    reclaimed_bytes: Mapping[str, int]
    """`light` and `full` -> bytes freed."""
    hints: Mapping[str, int]
    """`applied`, `unsupported`, `failed`, ... -> number of hints to the driver."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Page faults and migrated bytes, if CUPTI counts them; otherwise empty."""
    faults_unavailable: str = ""
    """The reason why page faults are not counted."""


@dataclass(frozen=True, slots=True)
class StageChanged:
    """Device memory became short (stage 2), or has space again (stage 1)."""

    step: int
    stage: int
    """1: the device has space; 2: it is oversubscribed, and memory is reclaimed."""
    device_free: int
    device_total: int
    threshold: int
    """Free bytes that were crossed: below the first threshold is stage 2, above the second (with
    the hysteresis) stage 1."""
    managed: int = 0
    """Bytes of CUDA managed memory at this time."""


@dataclass(frozen=True, slots=True)
class MemoryReclaimed:
    """Memory was reclaimed because the device is short of it, or may be used again."""

    step: int
    kind: Literal["light", "full", "restored", "cap"]
    """`light`: caches, prefetching and managed pages were trimmed; `full`: torch's allocator cache
    was emptied as well; `restored`: what was trimmed may be used again; `cap`: the limit of managed
    memory was changed, because the host has less memory or has it again."""
    freed: Mapping[str, int]
    """What was trimmed -> bytes. For `restored`, the bytes that were trimmed before and may be used
    again; for `cap`, the new limit."""
    nbytes: int
    """The sum of `freed`."""
    device_free: int
    """Free device memory in bytes before."""
    host_available: int
    """Host memory in bytes that was available before."""
    reason: str
    """Why this was decided, in words."""


@dataclass(frozen=True, slots=True)
class ManagedOverflow:
    """A role of the run was moved to CUDA managed memory, by the plan or because memory ran out."""

    step: int
    """Steps done before."""
    role: str
    """`optimizer`, `ema`, `gradients`, `trained`, `weights`, `caches` or `activations`."""
    nbytes: int
    """Bytes that were moved, or that will be allocated, such as the state of an optimizer before
    its first step."""
    placement: str
    """`in_place`: kernels use it in host memory; `prefetch`: it moves to the device before use;
    `device`: it stays on the device while there is space; `balanced`: it stays where it was used
    last. With several, parts of the role differ, such as weights outside of blocks."""
    reason: str
    total: int
    """Managed bytes of all roles afterwards, with those that are held for later allocations, such
    as the state of an optimizer before its first step."""
    cap: int
    """Largest number of managed bytes."""


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The loss on held-out samples, always with the same noise: comparable between steps and runs.

    The training loss of a step depends on the timesteps and the noise that it draws; this one does
    not. It is measured at every validation, if `validation.holdout` is above 0.
    """

    step: int
    losses: Mapping[str, float]
    """`held_out`, or `held_out_high` and `held_out_low` for the two transformers of Wan 2.2."""
    by_timestep: Mapping[str, Mapping[str, float]]
    """Range of timesteps, as in `t0.00-0.25` -> `{"loss": mean, "samples": count}`."""
    samples: int
    best_step: int
    """The step with the lowest mean of `losses` so far, in this and earlier processes."""
    best_loss: float


HealthLevel = Literal["ok", "notice", "degraded", "stopping"]


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """A health check changed its level: a problem was found, acted upon, or is over."""

    step: int
    check: str
    """The name of the check, such as `loader_stalled`; see docs/watching-a-run.md."""
    level: HealthLevel
    """`ok`: the problem is over; `notice`: training goes on as before; `degraded`: the run has
    changed something to cope; `stopping`: the run saves a checkpoint, if the weights are good, and
    ends."""
    cause: str
    """The cause in words, with the numbers that show it."""
    action: str = ""
    """What the run did about it; empty if nothing."""
    advice: str = ""
    """The setting to change, and to what."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The numbers by name."""


@dataclass(frozen=True, slots=True)
class RequestTaken:
    """A request to the run was taken, or refused, between two steps."""

    step: int
    request: str
    """`validate`, `save`, `stop` or `log`."""
    id: str
    """The id of the request's file; empty for a request without one."""
    accepted: bool = True
    reason: str = ""
    """Why the request was refused, or what it did."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    source: str = ""
    """Who sent it, such as `gracetune now` or `dashboard`."""


@dataclass(frozen=True, slots=True)
class BatchSkipped:
    """A step was skipped because its loss or gradient was not finite (`train.skip_bad_batches`)."""

    step: int
    loss: float
    grad_norm: float
    samples: tuple[str, ...]
    """The files of the samples in the step, as far as this rank has them."""
    skipped: int
    """Number of steps that this run has skipped so far."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A complete checkpoint is on disk."""

    step: int
    path: str
    nbytes: int
    seconds: float
    """Seconds that saving took."""
    reason: str
    """Why the checkpoint was saved, for example `every N steps`."""
    stall_seconds: float | None = None
    """Seconds that training waited for it: less than `seconds` if it was saved in the background.
    None in logs of earlier versions."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ended. This is the last event of a process."""

    step: int
    status: Literal["done", "interrupted", "failed"]
    seconds: float
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Paths of the output files by name: `log`, `pictures`, `checkpoint`, `result`, and `adapter`,
    the folder with the adapter of the newest checkpoint."""
    message: str = ""
    """The error message; empty if the run is done."""
    loads_in: tuple[str, ...] = ()
    """Names of the tools that load the adapter; empty for a whole model."""


Event = (
    RunStarted
    | StartTimed
    | Notice
    | StageProgress
    | StepDone
    | MemoryUsed
    | BatchesFed
    | WeightsStreamed
    | RatesSpread
    | RampChanged
    | Validated
    | RunDescribed
    | StepTimes
    | LossParts
    | WeightsMoved
    | DeviceSensors
    | MemoryRoles
    | UnifiedMemory
    | StageChanged
    | MemoryReclaimed
    | ManagedOverflow
    | HeldOutLoss
    | HealthChanged
    | RequestTaken
    | BatchSkipped
    | CheckpointSaved
    | RunEnded
)

KINDS: dict[type[Event], str] = {
    RunStarted: "run_started",
    StartTimed: "start_timed",
    Notice: "notice",
    StageProgress: "stage_progress",
    StepDone: "step_done",
    MemoryUsed: "memory_used",
    BatchesFed: "batches_fed",
    WeightsStreamed: "weights_streamed",
    RatesSpread: "rates_spread",
    RampChanged: "ramp_changed",
    Validated: "validated",
    RunDescribed: "run_described",
    StepTimes: "step_times",
    LossParts: "loss_parts",
    WeightsMoved: "weights_moved",
    DeviceSensors: "device_sensors",
    MemoryRoles: "memory_roles",
    UnifiedMemory: "unified_memory",
    StageChanged: "stage_changed",
    MemoryReclaimed: "memory_reclaimed",
    ManagedOverflow: "managed_overflow",
    HeldOutLoss: "held_out_loss",
    HealthChanged: "health",
    RequestTaken: "request_taken",
    BatchSkipped: "batch_skipped",
    CheckpointSaved: "checkpoint_saved",
    RunEnded: "run_ended",
}
"""Event class -> its name in the log. The names are part of the file format."""


class Sink(Protocol):
    """A receiver of events, such as the console, the log or a tracker."""

    def handle(self, event: Event) -> None:
        """Process one event. Events arrive in order, one call at a time."""
        ...

    def close(self) -> None:
        """Flush and release resources. No event follows this call."""
        ...
