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
    | Notice
    | StageProgress
    | StepDone
    | MemoryUsed
    | BatchesFed
    | WeightsStreamed
    | RatesSpread
    | RampChanged
    | Validated
    | CheckpointSaved
    | RunEnded
)

KINDS: dict[type[Event], str] = {
    RunStarted: "run_started",
    Notice: "notice",
    StageProgress: "stage_progress",
    StepDone: "step_done",
    MemoryUsed: "memory_used",
    BatchesFed: "batches_fed",
    WeightsStreamed: "weights_streamed",
    RatesSpread: "rates_spread",
    RampChanged: "ramp_changed",
    Validated: "validated",
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
