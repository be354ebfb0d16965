"""What a person sees while a run goes: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from gracetune.events import lines
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
        self._story = Story()
        self._held: str | None = None

    def handle(self, event: Event) -> None:
        """Print the event, or hold it back where a line was printed a moment ago."""
        self._story.add(event)
        if isinstance(event, StageProgress):
            if self._is_due(event.stage) or event.done >= event.total:
                self._print(lines.stage(event))
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
        line = lines.step(event, story.total_steps, story.pace, story.memory)
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
        self._story = Story()

    def handle(self, event: Event) -> None:
        """Move a bar, or print a line above them."""
        self._story.add(event)
        self._live.start()
        if isinstance(event, StageProgress):
            self._move(event.stage, event.done, event.total)
            self._numbers.plain = "  ".join(lines.stage_pace(event))
            if event.done >= event.total:
                self._bars.remove_task(self._tasks.pop(event.stage))
                self._numbers.plain = ""
                self._print(lines.stage(event))
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
        numbers = lines.step_parts(event, story.pace)
        numbers.append(f"eta {story.pace.eta(story.total_steps - event.step)}")
        if story.memory is not None:
            numbers.append(lines.memory_used(story.memory))
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


class Story:
    """What later lines need of earlier events."""

    def __init__(self) -> None:
        self.total_steps = 0
        self.pace = lines.Pace()
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
                return [lines.run_started(event)]
            case Notice():
                return [lines.notice(event)]
            case RampChanged():
                return [lines.ramp_changed(event)]
            case Validated():
                return [lines.validated(event)]
            case CheckpointSaved():
                return [lines.checkpoint_saved(event)]
            case RunEnded():
                moved = [] if self._fed is None else [lines.batches_fed(self._fed)]
                if self._streamed is not None:
                    moved.append(lines.weights_streamed(self._streamed))
                return [*moved, *lines.run_ended(event, self._fallbacks)]
            case (
                StageProgress()
                | StepDone()
                | MemoryUsed()
                | BatchesFed()
                | WeightsStreamed()
                | RatesSpread()
            ):
                return []
