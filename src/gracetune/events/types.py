"""The events of a run, as frozen dataclasses, and the protocol of the sinks that receive them.

Class names map to event kinds in `events.jsonl` (`KINDS`), and field names are keys there. Both are
a file format that other tools read: do not rename them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run is set up and starts to train, from step 0 or from a checkpoint."""

    output_dir: str
    model: str
    """The name of the model family."""
    trainable_parameters: int
    """The number of trained weights (not of tensors)."""
    total_steps: int
    start_step: int
    """Steps done by earlier processes; 0 for a new run."""
    num_samples: int
    """Training samples, without held-out ones and without repeats."""
    device: str
    precision: str
    """`fp32` or `bf16`."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A remark for the log: a choice that was made, a fallback, a rounded value.

    The console shows warnings, fallbacks, and notices that start with a label, as in
    `plan: 34 of 57 blocks streamed` (see `LABELS` in console.py). Others are only logged.
    """

    text: str
    level: Literal["info", "warning"] = "info"
    fallback: bool = False
    """True if something that was asked for is done in a slower or lesser way."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of a stage before training, such as staging or encoding."""

    stage: str
    done: int
    total: int
    unit: str = "files"
    """The unit of `done` and `total`."""
    nbytes: int = 0
    """Bytes done; 0 if the stage does not count bytes."""
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
    """The mean over the samples of the step."""
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
    """Wall time of the step; a mean over the steps that were logged together."""
    expert: str = ""
    """The expert that was trained, `high` or `low`; empty for a model with one transformer."""


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """Memory in use, in bytes."""

    step: int
    host: int
    device: int
    device_peak: int
    """The highest value of `device` since the start."""
    managed: int = 0
    """Managed memory that gracetune allocated, wherever its pages are."""
    stage: int = 1
    """1: all managed memory is on the device; 2: the device is oversubscribed."""


@dataclass(frozen=True, slots=True)
class BatchesFed:
    """Statistics of loading batches, counted from the start of the process."""

    step: int
    batches: int
    hits: int
    """Cache entries that were found in memory."""
    reads: int
    """Cache entries that were read from files."""
    hot: int
    """Encoded texts that were on the device already."""
    waits: int
    """Batches that were not ready when a step asked for them; the first one never is."""
    nbytes: int
    """Bytes copied to the device."""
    waited_s: float
    """Seconds that steps waited for batches."""
    hidden_s: float
    """Seconds of loading that overlapped with steps."""
    depth: int
    """Batches that are prefetched by now; 0 if each is loaded when a step asks for it."""


@dataclass(frozen=True, slots=True)
class WeightsStreamed:
    """Statistics of streaming frozen weights, counted since the plan was applied."""

    step: int
    slots: int
    """Slots of the ring; the ring may have grown."""
    fetches: int
    """Copies of one block's weights to the device."""
    nbytes: int
    """Bytes copied to the device."""
    late: int
    """Blocks that waited although their weights were prefetched."""
    on_demand: int
    """Blocks whose weights had not been prefetched."""
    waited_s: float
    """Seconds that computation waited for weights."""
    hidden_s: float
    """Seconds of copying that overlapped with computation, from the link's measured bandwidth."""


@dataclass(frozen=True, slots=True)
class RatesSpread:
    """A histogram of the learning rates, for optimizers with one rate per element."""

    step: int
    expert: str
    """The expert, `high` or `low`; empty for a model with one transformer."""
    limits: tuple[float, ...]
    """The edges of the bins: one more than there are bins."""
    counts: tuple[int, ...]
    """Elements in each bin; the outermost bins include everything beyond them."""


@dataclass(frozen=True, slots=True)
class RampChanged:
    """The ramp changed the number of micro-batches in a step."""

    step: int
    micro_batches: int
    """Micro-batches done so far by each rank."""
    accumulation: int
    """Micro-batches in each step from now on."""


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
    """Why it was saved, for example `every N steps`."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run ended; the last event of a process."""

    step: int
    status: Literal["done", "interrupted", "failed"]
    seconds: float
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Paths of the output files by name: `log`, `pictures`, `checkpoint`, `result`."""
    message: str = ""
    """The error, unless the run is done."""


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
"""The kind of each event in the log: part of the file format."""


class Sink(Protocol):
    """A receiver of events, such as the console, the log or a tracker."""

    def handle(self, event: Event) -> None:
        """Process one event. Calls come in order and never at the same time."""
        ...

    def close(self) -> None:
        """Flush and release resources; no event comes after it."""
        ...
