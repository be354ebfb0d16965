"""What a person sees while a run goes: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from gracetune.events.types import (
    BatchesFed,
    CheckpointSaved,
    MemoryUsed,
    Notice,
    RampChanged,
    RatesSpread,
    RunEnded,
    RunStarted,
    StageProgress,
    StepDone,
    Validated,
    WeightsStreamed,
)
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.events.types import Event, Sink


QUIET = (Notice, MemoryUsed, BatchesFed, WeightsStreamed, RatesSpread)
"""Events that say nothing of a step that was held back."""


def console_sink(
    stream: TextIO,
    is_terminal: bool,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = 5.0,
) -> Sink:
    """Choose once: bars on a terminal, else landmarks and a step every `every_s` seconds."""
    return LiveConsole(stream, clock) if is_terminal else PlainConsole(stream, clock, every_s)


class PlainConsole:
    """Lines for pipes, files and job logs: few, whole, and flushed."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], every_s: float) -> None:
        self._stream = stream
        self._clock = clock
        self._every_s = every_s
        self._shown_at: dict[str, float] = {}
        self._story = ConsoleState()
        self._held: str | None = None

    def handle(self, event: Event) -> None:
        """Print the event, or hold it back where a line was printed a moment ago."""
        self._story.add(event)
        if isinstance(event, StageProgress):
            if self._is_due(event.stage) or event.done >= event.total:
                self._print(stage(event))
        elif isinstance(event, StepDone):
            self._step(event)
        else:
            if not isinstance(event, QUIET):
                self._release()
            for line in self._story.landmark(event):
                self._print(line)

    def close(self) -> None:
        """Print a step that was held back, where the run ended without a last word."""
        self._release()

    def _step(self, event: StepDone) -> None:
        story = self._story
        line = step(event, story.total_steps, story.pace, story.memory)
        if self._is_due("step") or event.step >= story.total_steps:
            self._held = None
            self._print(line)
        else:
            self._held = line

    def _release(self) -> None:
        if self._held is not None:
            self._print(self._held)
            self._held = None

    def _is_due(self, what: str) -> bool:
        now = self._clock()
        if now - self._shown_at.get(what, -math.inf) < self._every_s:
            return False
        self._shown_at[what] = now
        return True

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveConsole:
    """Bars that move, with every landmark above them as a line that stays."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        console = Console(file=stream, force_terminal=True)
        # Drawn by `_live` with the numbers below, which so stay whole in 80 columns.
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            console=console,
            get_time=clock,
            expand=True,
        )
        self._numbers = Text()
        # What others print to stdout may be meant for a file.
        drawn = Group(self._bars, self._numbers)
        self._live = Live(drawn, console=console, redirect_stdout=False)
        self._tasks: dict[str, TaskID] = {}
        self._story = ConsoleState()

    def handle(self, event: Event) -> None:
        """Move a bar, or print a line above them."""
        self._story.add(event)
        self._live.start()
        if isinstance(event, StageProgress):
            self._move(event.stage, event.done, event.total)
            self._numbers.plain = "  ".join(stage_pace(event))
            if event.done >= event.total:
                self._bars.remove_task(self._tasks.pop(event.stage))
                self._numbers.plain = ""
                self._print(stage(event))
        elif isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, RunEnded):
            self._live.stop()
        warns = isinstance(event, Notice) and event.level == "warning"
        for line in self._story.landmark(event):
            self._print(line, style="yellow" if warns else None)

    def close(self) -> None:
        """Leave the bars as they are and give the cursor back."""
        self._live.stop()

    def _step(self, event: StepDone) -> None:
        story = self._story
        self._move("training", event.step, story.total_steps)
        numbers = step_parts(event, story.pace)
        numbers.append(f"eta {story.pace.eta(story.total_steps - event.step)}")
        if story.memory is not None:
            numbers.append(memory_used(story.memory))
        self._numbers.plain = "  ".join(numbers)

    def _move(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def _print(self, line: str, style: str | None = None) -> None:
        # Paths must survive being copied: neither wrapped, nor coloured, nor read as markup.
        self._live.console.print(
            line, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True
        )


class ConsoleState:
    """What later lines need of earlier events."""

    def __init__(self) -> None:
        self.total_steps = 0
        self.pace = Pace()
        self.memory: MemoryUsed | None = None
        self._fed: BatchesFed | None = None
        self._streamed: WeightsStreamed | None = None
        self._fallbacks = 0

    def add(self, event: Event) -> None:
        """Remember what a later line will ask for."""
        if isinstance(event, RunStarted):
            self.total_steps = event.total_steps
        elif isinstance(event, StepDone):
            self.pace.add(event)
        elif isinstance(event, MemoryUsed):
            self.memory = event
        elif isinstance(event, BatchesFed):
            self._fed = event
        elif isinstance(event, WeightsStreamed):
            self._streamed = event
        elif isinstance(event, Notice) and event.fallback:
            self._fallbacks += 1

    def landmark(self, event: Event) -> list[str]:
        """The lines of an event that is always shown; none for one that a bar or a pace shows."""
        match event:
            case RunStarted():
                return [run_started(event)]
            case Notice():
                return [notice(event)]
            case RampChanged():
                return [ramp_changed(event)]
            case Validated():
                return [validated(event)]
            case CheckpointSaved():
                return [checkpoint_saved(event)]
            case RunEnded():
                moved = [] if self._fed is None else [batches_fed(self._fed)]
                if self._streamed is not None:
                    moved.append(weights_streamed(self._streamed))
                return [*moved, *run_ended(event, self._fallbacks)]
            case (
                StageProgress()
                | StepDone()
                | MemoryUsed()
                | BatchesFed()
                | WeightsStreamed()
                | RatesSpread()
            ):
                return []


# ------------------------------------------------------------------------------------------
# Each event as a line for people; where and how often it is shown is `console`'s.


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
