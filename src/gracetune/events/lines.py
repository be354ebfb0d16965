"""Each event as a line for people; where and how often it is shown is `console`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from gracetune.events.types import (
        BatchesFed,
        CheckpointSaved,
        MemoryUsed,
        Notice,
        RampChanged,
        RunEnded,
        RunStarted,
        StageProgress,
        StepDone,
        Validated,
        WeightsStreamed,
    )

_SMOOTHING = 0.9
"""How much of the pace so far stays in it: about the last ten steps count."""


@dataclass(slots=True)
class Pace:
    """Smoothed samples and seconds of a step, from the events' own clock."""

    samples: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, event: StepDone) -> None:
        """Count a step. The first one warms kernels and caches up, so the second replaces it."""
        keep = _SMOOTHING if self.steps > 1 else 0.0
        self.samples = keep * self.samples + (1 - keep) * event.samples
        self.seconds = keep * self.seconds + (1 - keep) * event.seconds
        self.steps += 1

    def samples_per_s(self) -> float:
        """The rate; zero before anything is known."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    def eta(self, steps_left: int) -> str:
        """How long the steps that are left will take."""
        return format_seconds(self.seconds * steps_left) if self.seconds > 0 else "?"


def run_started(event: RunStarted) -> str:
    """What is trained on what."""
    precision = "fp32" if event.precision == "no" else event.precision
    begin = f"resuming at step {event.start_step}" if event.start_step else "starting"
    return (
        f"{begin}: {event.model}, {event.trainable_parameters:,} trainable parameters, "
        f"{event.num_samples:,} samples, {event.total_steps:,} steps, {event.device}, "
        f"{precision} -> {event.output_dir}"
    )


def notice(event: Notice) -> str:
    """The text as it stands, marked where it is a warning or a fallback."""
    marks = {
        (False, False): "",
        (False, True): "fallback: ",
        (True, False): "warning: ",
        (True, True): "warning, fallback: ",
    }
    return marks[event.level == "warning", event.fallback] + event.text


def stage(event: StageProgress) -> str:
    """How far a stage is, and how fast where it says so."""
    far = f"{event.stage}: {event.done:,} of {event.total:,} {event.unit}"
    return ", ".join([far, *stage_pace(event)])


def stage_pace(event: StageProgress) -> list[str]:
    """Files and bytes a second, and how long the rest will take: by bytes, for files differ."""
    if not event.seconds:
        return []
    parts = [f"{event.done / event.seconds:,.0f} {event.unit}/s"]
    share = event.done / event.total
    if event.nbytes:
        parts.append(f"{event.nbytes / event.seconds / 1e9:.2f} GB/s")
        share = event.nbytes / event.total_nbytes
    if event.done < event.total and share > 0:
        parts.append(f"eta {format_seconds(event.seconds * (1 - share) / share)}")
    return parts


def step(event: StepDone, total_steps: int, pace: Pace, memory: MemoryUsed | None) -> str:
    """One step, with the pace and the memory known by then."""
    parts = [f"step {event.step}/{total_steps}", *step_parts(event, pace)]
    if event.step < total_steps:
        parts.append(f"eta {pace.eta(total_steps - event.step)}")
    if memory is not None:
        parts.append(memory_used(memory))
    return "  ".join(parts)


def step_parts(event: StepDone, pace: Pace) -> list[str]:
    """The numbers of a step that a bar does not already show."""
    return [f"loss {event.loss:.4f}", f"lr {event.lr:.2e}", f"{pace.samples_per_s():.1f} samples/s"]


def memory_used(event: MemoryUsed) -> str:
    """Bytes by tier; the device's only where there is one."""
    host = f"host {format_bytes(event.host)}"
    if not event.device_peak:
        return host
    device = f"device {format_bytes(event.device)} (peak {format_bytes(event.device_peak)})"
    return f"{device}  {host}"


def batches_fed(event: BatchesFed) -> str:
    """Where entries came from, and what waiting was spared."""
    found = f"{event.hits:,} in memory, {event.reads:,} read from files, {event.hot:,} hot"
    return (
        f"fed {event.batches:,} batches ({found}; {format_bytes(event.nbytes)} moved); "
        f"steps waited {event.waits:,} times for {format_seconds(event.waited_s)}, "
        f"{format_seconds(event.hidden_s)} of work hidden, {event.depth} ahead"
    )


def weights_streamed(event: WeightsStreamed) -> str:
    """How much travelled, and how much of that nobody waited for."""
    return (
        f"streamed {format_bytes(event.nbytes)} of weights in {event.fetches:,} fetches through "
        f"{event.slots} slots; steps waited {event.late + event.on_demand:,} times for "
        f"{format_seconds(event.waited_s)}, {format_seconds(event.hidden_s)} hidden"
    )


def ramp_changed(event: RampChanged) -> str:
    """The forks' own words, which people search their logs for."""
    return f"GH200 ramp adjusted gradient_accumulation_steps -> {event.accumulation}"


def validated(event: Validated) -> str:
    """Losses, and where the pictures are."""
    parts = [f"{name} {loss:.4f}" for name, loss in event.losses.items()]
    if event.grid is not None:
        parts.append(event.grid)
    shown = ", ".join(parts) or "nothing to measure or picture"
    return f"validated at step {event.step} in {format_seconds(event.seconds)}: {shown}"


def checkpoint_saved(event: CheckpointSaved) -> str:
    """Where a checkpoint is, and why it was made."""
    return (
        f"checkpoint at step {event.step} ({event.reason}): {event.path}, "
        f"{format_bytes(event.nbytes)} in {format_seconds(event.seconds)}"
    )


def run_ended(event: RunEnded, fallbacks: int) -> list[str]:
    """How it ended, what to look at, and what was done in a lesser way than asked for."""
    head = f"{event.status} at step {event.step} after {format_seconds(event.seconds)}"
    width = max((len(name) for name in event.outputs), default=0)
    outputs = [f"  {name:<{width}}  {path}" for name, path in event.outputs.items()]
    counted = {0: "no fallbacks", 1: "1 fallback, named above"}
    return [head, *outputs, counted.get(fallbacks, f"{fallbacks} fallbacks, named above")]
