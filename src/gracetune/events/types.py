"""Every event a run can tell, as frozen dataclasses; a sink sees nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run begins, or goes on from a checkpoint."""

    output_dir: str
    model: str
    trainable_parameters: int
    total_steps: int
    start_step: int
    num_samples: int
    device: str
    precision: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something the user should know once: a choice made, a fallback taken, a value rounded."""

    text: str
    level: Literal["info", "warning"] = "info"
    fallback: bool = False
    """Whether something asked for is done in a lesser way; these are counted at the end."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a preparatory stage is (staging, encoding, sampling)."""

    stage: str
    done: int
    total: int
    unit: str = "files"
    nbytes: int = 0
    """Bytes done; 0 where the stage does not count them."""
    total_nbytes: int = 0
    """Bytes in all, as far as they are known."""
    seconds: float = 0.0
    """Since the stage began; 0 where its pace is not told."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    samples: int
    """Samples that this step averaged over, on all ranks."""
    accumulation: int
    epoch: int
    seconds: float
    """Wall time since the step before."""
    expert: str = ""
    """Of a model with two: which was trained, `high` or `low`."""


@dataclass(frozen=True, slots=True)
class MemoryUsed:
    """Bytes in use, by tier."""

    step: int
    host: int
    device: int
    device_peak: int
    managed: int = 0
    """Of ours, on either side."""
    stage: int = 1
    """1: all resident; 2: oversubscribed."""


@dataclass(frozen=True, slots=True)
class BatchesFed:
    """What bringing batches has cost and spared so far; counted from the start of the process."""

    step: int
    batches: int
    hits: int
    """Entries that were found in memory."""
    reads: int
    """Entries that were read from files."""
    hot: int
    """Texts that were on the device already."""
    waits: int
    """Batches that were not there when a step asked for them; the first always is one."""
    nbytes: int
    """Brought to the device."""
    waited_s: float
    """How long steps waited."""
    hidden_s: float
    """How long batches were worked on while steps went on."""
    depth: int
    """Batches that are brought ahead by now; 0: each when it is asked for."""


@dataclass(frozen=True, slots=True)
class WeightsStreamed:
    """What streaming frozen weights has cost and hidden since the model was placed."""

    step: int
    slots: int
    """Blocks that have room on the device at once; steps that wait may have added some."""
    fetches: int
    nbytes: int
    """Brought to the device."""
    late: int
    """Uses whose weights were asked for ahead, and still waited for."""
    on_demand: int
    """Uses whose weights nobody had asked for."""
    waited_s: float
    """How long computing stood still for weights."""
    hidden_s: float
    """How long the link was busy beside computing, by its measured rate."""


@dataclass(frozen=True, slots=True)
class RatesSpread:
    """How learning rates are spread, where every element has one of its own."""

    step: int
    expert: str
    """Of a model with two: whose rates these are; else empty."""
    limits: tuple[float, ...]
    """Where bins begin, and where the last one ends."""
    counts: tuple[int, ...]
    """Elements in each bin; what lies outside counts in the outermost."""


@dataclass(frozen=True, slots=True)
class RampChanged:
    """The ramp chose another number of micro-batches for the steps to come."""

    step: int
    micro_batches: int
    accumulation: int


@dataclass(frozen=True, slots=True)
class Validated:
    """Pictures and losses at one step."""

    step: int
    grid: str | None
    """The picture, as a path that can be opened as it stands; none where nothing was pictured."""
    prompts: tuple[str, ...]
    losses: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A complete checkpoint is on disk."""

    step: int
    path: str
    nbytes: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The last event of a process."""

    step: int
    status: Literal["done", "interrupted", "failed"]
    seconds: float
    outputs: Mapping[str, str] = field(default_factory=dict)
    """What to look at, by name: the result, the newest grid, the log."""
    message: str = ""


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
"""The name of each event in the log: part of the file format."""


class Sink(Protocol):
    """Something that events go to."""

    def handle(self, event: Event) -> None:
        """Take one event; called in order, from one thread."""
        ...

    def close(self) -> None:
        """Flush; nothing comes after."""
        ...
