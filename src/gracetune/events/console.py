"""Show a run to a person: progress bars on a terminal, plain lines in a pipe or job log.

Both print the same lines, one for each thing the user can act on or may want to find:

    gracetune 0.1.0   flux, LoRA rank 16, 40 steps -> runs/x
    data       staging: 48 of 48 files
    plan       34 of 57 blocks streamed, 51 recomputed, 6 kept
    start      54 s: loading 22, measuring 9, encoding 8, placing 7, searching 4, attention 4
    train      65,400,000 trainable parameters, 48 samples, cuda bf16
    step 12/40  loss 1.2900  lr 1.00e-04  1.5 samples/s  eta 19s  GPU 20.8 GiB
    done       40 steps in 2m39s
               adapter    runs/x/adapter/FILE.safetensors (loads in diffusers, ComfyUI)
               next       gracetune sample runs/x --prompt "..."

Everything else is only in the log (`events.jsonl`). For notices the rule is: warnings and fallbacks
are always shown; other notices only if their text starts with one of `LABELS` and a colon.
"""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from gracetune.events.types import (
    FINISHED,
    BatchesFed,
    BatchSkipped,
    CheckpointSaved,
    HealthChanged,
    MemoryReclaimed,
    MemoryUsed,
    Notice,
    RampChanged,
    RatesSpread,
    RequestTaken,
    RunEnded,
    RunStarted,
    StageChanged,
    StageProgress,
    StartTimed,
    StepDone,
    Validated,
    WeightsStreamed,
)
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.events.types import Event, Sink


LABELS = frozenset(
    {
        "adapter",
        "attention",
        "cache",
        "compile",
        "config",
        "data",
        "experts",
        "finished",
        "gradients",
        "memory",
        "model",
        "plan",
        "ramp",
        "tracker",
    }
)
"""An info notice `label: text` with one of these labels is shown; others are only logged."""
LABEL_WIDTH = 11
STAGE_LABELS = {"downloading": "model", "reading": "data", "staging": "data"}
"""Label of each preparation stage before training; all others fill or check the cache of encoded
samples."""
OUTPUT_NAMES = {"pictures": "samples"}
"""Key of `RunEnded.outputs` -> the name that is shown instead."""
STATUS_LABELS = {"done": "done", "interrupted": "stopped", "failed": "failed"}
WAIT_SHARE = 0.1
"""Share of a run's time that steps may wait for batches, or for streamed weights, before the end of
the run shows a warning."""
MIN_SHOWN_START_S = 10.0
"""A start of a run that takes longer is explained by a line with the seconds of its phases."""
MAX_SHOWN_SAMPLES = 4
"""Number of files that the line of a skipped step names."""
UNRELATED_TO_STEPS = (Notice, MemoryUsed, BatchesFed, WeightsStreamed, RatesSpread)
"""Events that `PlainConsole` prints at once. Before any other event, such as a saved checkpoint, it
first prints the latest step, if it has skipped that line (it prints a step every few seconds)."""


def console_sink(
    stream: TextIO,
    is_terminal: bool,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = 5.0,
    title: str = "",
) -> Sink:
    """Return a sink with progress bars for a terminal, else one with plain lines.

    The plain sink prints a step every `every_s` seconds. `title` is printed as the first line.
    """
    if is_terminal:
        return LiveConsole(stream, clock, title)
    return PlainConsole(stream, clock, every_s, title)


class PlainConsole:
    """An event sink that prints plain lines, for pipes, files and job logs."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float], every_s: float, title: str = ""
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._every_s = every_s
        self._printed_at: dict[str, float] = {}
        self._state = ConsoleState()
        self._held_step: str | None = None
        self._title = title

    def handle(self, event: Event) -> None:
        """Print an event.

        Steps, and the progress of stages before training, are printed only every few seconds, but
        the last one always.
        """
        if self._title:
            self._print(self._title)
            self._title = ""
        self._state.add(event)
        if isinstance(event, StageProgress):
            self._printed_at.setdefault(event.stage, self._clock())
            if event.done >= event.total or self._is_due(event.stage):
                self._print(stage_line(event))
        elif isinstance(event, StepDone):
            self._handle_step(event)
        else:
            lines = self._state.lines(event)
            if lines and not isinstance(event, UNRELATED_TO_STEPS):
                self._print_held_step()
            for line in lines:
                self._print(line)

    def close(self) -> None:
        """Print the last step if it has not been printed yet, as happens when a run is killed."""
        self._print_held_step()

    def _handle_step(self, event: StepDone) -> None:
        state = self._state
        line = step_line(event, state.total_steps, state.pace, state.memory)
        if self._is_due("step") or event.step >= state.total_steps:
            self._held_step = None
            self._print(line)
        else:
            self._held_step = line

    def _print_held_step(self) -> None:
        if self._held_step is not None:
            self._print(self._held_step)
            self._held_step = None

    def _is_due(self, name: str) -> bool:
        now = self._clock()
        if now - self._printed_at.get(name, -math.inf) < self._every_s:
            return False
        self._printed_at[name] = now
        return True

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveConsole:
    """An event sink that draws progress bars on a terminal and prints lines above them."""

    def __init__(self, stream: TextIO, clock: Callable[[], float], title: str = "") -> None:
        console = Console(file=stream, force_terminal=True)
        # `_live` draws the bars and, below them, the numbers: next to the bars they would not fit
        # into 80 columns.
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            # Named colours: a terminal with few would show a finished bar like an empty one.
            BarColumn(bar_width=None, complete_style="magenta", finished_style="green"),
            MofNCompleteColumn(),
            console=console,
            get_time=clock,
            expand=True,
        )
        self._numbers = Text()
        # stdout is not redirected: what others print there may be meant for a file.
        self._live = Live(Group(self._bars, self._numbers), console=console, redirect_stdout=False)
        self._tasks: dict[str, TaskID] = {}
        self._state = ConsoleState()
        self._title = title

    def handle(self, event: Event) -> None:
        """Move a bar, or print a line above the bars."""
        self._state.add(event)
        self._live.start()
        if self._title:
            self._print(self._title)
            self._title = ""
        if isinstance(event, StageProgress):
            self._handle_stage(event)
        elif isinstance(event, StepDone):
            self._handle_step(event)
        elif isinstance(event, RunEnded):
            self._live.stop()
        is_warning = (isinstance(event, Notice) and event.level == "warning") or (
            isinstance(event, HealthChanged) and event.level in ("degraded", "stopping")
        )
        for line in self._state.lines(event):
            self._print(line, style="yellow" if is_warning else None)

    def close(self) -> None:
        """Leave the bars as they are and show the cursor again."""
        self._live.stop()

    def _handle_stage(self, event: StageProgress) -> None:
        self._move_bar(event.stage, event.done, event.total)
        self._numbers.plain = "  ".join(stage_pace(event))
        if event.done >= event.total:
            self._bars.remove_task(self._tasks.pop(event.stage))
            self._numbers.plain = ""
            self._print(stage_line(event))

    def _handle_step(self, event: StepDone) -> None:
        state = self._state
        self._move_bar("training", event.step, state.total_steps)
        numbers = step_numbers(event, state.pace)
        numbers.append(f"eta {state.pace.eta(state.total_steps - event.step)}")
        if state.memory is not None:
            numbers.append(memory_used(state.memory))
        self._numbers.plain = "  ".join(numbers)

    def _move_bar(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def _print(self, line: str, style: str | None = None) -> None:
        # Paths must survive being copied: not wrapped, coloured or interpreted as markup.
        self._live.console.print(
            line, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True
        )


class ConsoleState:
    """Turns events into lines, and remembers numbers of earlier events for later lines."""

    def __init__(self) -> None:
        self.total_steps = 0
        self.start_step = 0
        self.pace = Pace()
        self.memory: MemoryUsed | None = None
        self._batches: BatchesFed | None = None
        self._weights: WeightsStreamed | None = None
        self._fallbacks = 0
        self._was_finished = False

    def add(self, event: Event) -> None:
        """Remember the numbers of an event that later lines show."""
        if isinstance(event, RunStarted):
            self.total_steps, self.start_step = event.total_steps, event.start_step
        elif isinstance(event, StepDone):
            self.pace.add(event)
        elif isinstance(event, MemoryUsed):
            self.memory = event
        elif isinstance(event, BatchesFed):
            self._batches = event
        elif isinstance(event, WeightsStreamed):
            self._weights = event
        elif isinstance(event, Notice) and event.fallback:
            self._fallbacks += 1
        elif isinstance(event, Notice) and event.text.startswith(FINISHED):
            self._was_finished = True

    def lines(self, event: Event) -> list[str]:
        """Return the lines to print for an event; none if only a bar or the log shows it."""
        match event:
            case RunStarted() | StartTimed():
                return start_lines(event)
            case Notice():
                return notice_lines(event)
            case RampChanged():
                return [ramp_changed_line(event)]
            case Validated():
                return [validated_line(event)]
            case CheckpointSaved():
                return [checkpoint_line(event)]
            case RunEnded():
                return [
                    *self._wait_warnings(event.seconds),
                    *run_ended_lines(
                        event,
                        self._fallbacks,
                        start_step=self.start_step,
                        was_finished=self._was_finished,
                    ),
                ]
            case HealthChanged():
                return health_lines(event)
            case RequestTaken():
                return [request_line(event)]
            case BatchSkipped() | StageChanged() | MemoryReclaimed():
                return [memory_or_skip_line(event)]
            case _:  # numbers for the log, the trackers and the page
                return []

    def _wait_warnings(self, seconds: float) -> list[str]:
        """Return a warning if steps waited long for batches, and one if for streamed weights.

        `seconds` is the duration of the run.
        """
        lines = []
        if self._batches is not None and self._batches.waited_s > WAIT_SHARE * seconds:
            waited = format_seconds(self._batches.waited_s)
            text = f"steps waited {waited} of {format_seconds(seconds)} for batches"
            hint = "Try a larger cache_config.prefetch_budget_gb, or a cache in memory."
            lines.append(labelled("warning", f"{text}. {hint}"))
        if self._weights is not None and self._weights.waited_s > WAIT_SHARE * seconds:
            waited = format_seconds(self._weights.waited_s)
            text = f"steps waited {waited} of {format_seconds(seconds)} for streamed weights"
            hint = "Try plan.compile: always, or a larger plan.device_memory."
            lines.append(labelled("warning", f"{text}. {hint}"))
        return lines


_SMOOTHING = 0.5 ** (1 / 20)
"""Weight of a step relative to the next one. After 20 steps it is half, as on the dashboard."""


@dataclass(slots=True)
class Pace:
    """Samples and seconds of the last steps, older ones with less weight."""

    samples: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    """Sum of the weights of the steps."""
    steps: int = 0

    def add(self, event: StepDone) -> None:
        """Add a step. The first one includes warm-up, so the second replaces it."""
        keep = _SMOOTHING if self.steps > 1 else 0.0
        self.samples = keep * self.samples + event.samples
        self.seconds = keep * self.seconds + event.seconds
        self.weight = keep * self.weight + 1
        self.steps += 1

    def samples_per_s(self) -> float:
        """Return the samples per second; 0 before the first step."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    def eta(self, steps_left: int) -> str:
        """Return the estimated time for the remaining steps, as text."""
        return format_seconds(self.seconds / self.weight * steps_left) if self.seconds > 0 else "?"


# Lines


def labelled(label: str, text: str) -> str:
    """Return `label`, padded to a fixed width, and the text, whose later lines are indented."""
    indented = text.replace("\n", "\n" + " " * LABEL_WIDTH)
    return f"{label:<{LABEL_WIDTH}}{indented}"


def notice_lines(event: Notice) -> list[str]:
    """Return the line for a notice that the console shows; empty for one that is only logged."""
    if event.level == "warning":
        return [labelled("warning", event.text)]
    if event.fallback:
        return [labelled("fallback", event.text)]
    label, colon, text = event.text.partition(": ")
    return [labelled(label, text)] if colon and label in LABELS else []


def run_started_line(event: RunStarted) -> str:
    """Return the line that says what is trained, with which data, and from which step."""
    begin = f"from step {event.start_step:,} of {event.total_steps:,}: " if event.start_step else ""
    text = (
        f"{begin}{event.trainable_parameters:,} trainable parameters, "
        f"{event.num_samples:,} samples, {event.device} {event.precision}"
    )
    return labelled("resume" if event.start_step else "train", text)


def start_lines(event: RunStarted | StartTimed) -> list[str]:
    """Return the line of a run that starts, or the phases of a slow start, the longest first."""
    if isinstance(event, RunStarted):
        return [run_started_line(event)]
    if event.total < MIN_SHOWN_START_S:
        return []
    phases = sorted(event.seconds.items(), key=lambda phase: -phase[1])
    parts = [f"{name} {seconds:.0f}" for name, seconds in phases if seconds >= 1]
    return [labelled("start", f"{event.total:.0f} s: {', '.join(parts)}")]


def stage_line(event: StageProgress) -> str:
    """Return the line with the progress of a stage before training, such as encoding the data."""
    text = f"{event.stage}: {event.done:,} of {event.total:,} {event.unit}"
    label = STAGE_LABELS.get(event.stage, "cache")
    return labelled(label, ", ".join([text, *stage_pace(event)]))


def stage_pace(event: StageProgress) -> list[str]:
    """Return the speed of a stage before training, and the remaining time, as text.

    The time is estimated from bytes if they are known, because files differ in size.
    """
    if not event.seconds:
        return []
    rate = event.done / event.seconds
    parts = [f"{rate:,.0f} {event.unit}/s" if rate >= 10 else f"{rate:.2g} {event.unit}/s"]
    share = event.done / event.total
    if event.nbytes:
        parts.append(f"{event.nbytes / event.seconds / 1e9:.2f} GB/s")
        share = event.nbytes / event.total_nbytes
    if event.done < event.total and share > 0:
        parts.append(f"eta {format_seconds(event.seconds * (1 - share) / share)}")
    return parts


def step_line(event: StepDone, total_steps: int, pace: Pace, memory: MemoryUsed | None) -> str:
    """Return the line of a training step, with the current speed and memory."""
    parts = [f"step {event.step}/{total_steps}", *step_numbers(event, pace)]
    if event.step < total_steps:
        parts.append(f"eta {pace.eta(total_steps - event.step)}")
    if memory is not None:
        parts.append(memory_used(memory))
    return "  ".join(parts)


def step_numbers(event: StepDone, pace: Pace) -> list[str]:
    """Return loss, learning rate and speed of a training step as text."""
    return [f"loss {event.loss:.4f}", f"lr {event.lr:.2e}", f"{pace.samples_per_s():.1f} samples/s"]


def memory_used(event: MemoryUsed) -> str:
    """Return the peak of GPU memory as text, or the host memory of a run without a GPU."""
    if event.device_peak:
        return f"GPU {format_bytes(event.device_peak)}"
    return f"host {format_bytes(event.host)}"


def ramp_changed_line(event: RampChanged) -> str:
    """Return the line that says that steps now have other micro-batches.

    It is worded as in the older GH200 trainers, because users search logs for it.
    """
    text = f"GH200 ramp adjusted gradient_accumulation_steps -> {event.accumulation}"
    if event.batch_size:
        text += f" (micro-batches of {event.batch_size})"
    return labelled("ramp", text)


def validated_line(event: Validated) -> str:
    """Return the line of a validation, with its losses and the path of the samples."""
    parts = [f"{name} {loss:.4f}" for name, loss in event.losses.items()]
    if event.grid is not None:
        parts.append(event.grid)
    text = ", ".join(parts) or "no held-out samples and no prompts"
    return labelled("validate", f"step {event.step} in {format_seconds(event.seconds)}: {text}")


def health_lines(event: HealthChanged) -> list[str]:
    """Return the lines of a health check: the cause, what the run does, and what to change."""
    if event.level == "ok":
        return [labelled("health", f"{event.check} is over: {event.cause}")]
    text = "\n".join(filter(None, (event.cause, event.action, event.advice)))
    return [labelled("health" if event.level == "notice" else "warning", text)]


def request_line(event: RequestTaken) -> str:
    """Return the line of a request from outside, taken or refused."""
    outcome = "taken" if event.accepted else "refused"
    reason = f": {event.reason}" if event.reason else ""
    return labelled("request", f"{event.request} {outcome} after step {event.step}{reason}")


def batch_skipped_line(event: BatchSkipped) -> str:
    """Return the line of a step that was skipped because of a loss that is not finite."""
    shown = ", ".join(event.samples[:MAX_SHOWN_SAMPLES])
    more = len(event.samples) - MAX_SHOWN_SAMPLES
    files = f"{shown} and {more} more" if more > 0 else shown
    text = (
        f"step {event.step} is skipped: its loss is {event.loss:g} and its gradient norm "
        f"{event.grad_norm:g} ({files}); {event.skipped} skipped so far"
    )
    return labelled("warning", text)


def memory_or_skip_line(event: BatchSkipped | StageChanged | MemoryReclaimed) -> str:
    """Return the line of a skipped step, or of a decision about memory."""
    if isinstance(event, BatchSkipped):
        return batch_skipped_line(event)
    if isinstance(event, StageChanged):
        return stage_changed_line(event)
    return memory_reclaimed_line(event)


def stage_changed_line(event: StageChanged) -> str:
    """Return the line of a change of the memory stage."""
    state = "the device is short of memory" if event.stage > 1 else "the device has space again"
    free = f"{format_bytes(event.device_free)} of {format_bytes(event.device_total)} free"
    return labelled("memory", f"stage {event.stage} after step {event.step}: {state} ({free})")


RECLAIMED = {
    "light": "trimmed",
    "full": "freed",
    "restored": "may be used again:",
    "cap": "managed memory is limited to",
}
"""Kind of `MemoryReclaimed` -> the words before its bytes."""


def memory_reclaimed_line(event: MemoryReclaimed) -> str:
    """Return the line of a reclamation, with the bytes of each part that had any."""
    parts = {name: nbytes for name, nbytes in event.freed.items() if nbytes}
    details = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items())
    text = f"{RECLAIMED[event.kind]} {format_bytes(event.nbytes)}"
    if event.kind != "cap" and details:
        text += f" ({details})"
    return labelled("memory", f"{text}: {event.reason}")


def checkpoint_line(event: CheckpointSaved) -> str:
    """Return the line of a checkpoint, with its path, its size and the reason for it."""
    size = f"{format_bytes(event.nbytes)} in {format_seconds(event.seconds)}"
    if event.stall_seconds is not None and event.stall_seconds < event.seconds:
        size += f", of which training waited {format_seconds(event.stall_seconds)}"
    return labelled("checkpoint", f"{event.path} ({event.reason}, {size})")


def run_ended_lines(
    event: RunEnded, fallbacks: int, *, start_step: int = 0, was_finished: bool = False
) -> list[str]:
    """Return the lines that say how the run ended, list its output files and name a next command.

    The time is that of this process, which a resumed run says with its `start_step`.
    `fallbacks` counts how often a slower method was used than requested. The adapter is the result
    of the run, or that of the newest checkpoint if the run has no result yet. If the run was
    finished before it was started again, no step was trained, so there is no line with their time.
    """
    seconds = format_seconds(event.seconds)
    text = f"{event.step} steps in {seconds}"
    if start_step:
        text = f"{event.step} steps; those after step {start_step} took {seconds}"
    if event.status != "done":
        text = f"at step {event.step} after {seconds}"
        text += f", resumed from step {start_step}" if start_step else ""
    is_old = was_finished and event.status == "done"
    lines = [] if is_old else [labelled(STATUS_LABELS[event.status], text)]
    files, model = _adapter_files(event), _model_folder(event)
    tools = f" (loads in {', '.join(event.loads_in)})" if event.loads_in else ""
    lines += [_output_line("adapter", f"{file}{tools}") for file in files]
    if model:
        is_pipeline = Path(model, "model_index.json").is_file()
        use = "loads in diffusers, and as model.path" if is_pipeline else "loads as model.path"
        lines.append(_output_line("model", f"{model} ({use})"))
    for name, path in event.outputs.items():
        if name not in ("result", "adapter"):
            lines.append(_output_line(OUTPUT_NAMES.get(name, name), path))
    if "log" in event.outputs and (files or model or "checkpoint" in event.outputs):
        folder = shlex.quote(str(Path(event.outputs["log"]).parent))
        lines.append(_output_line("next", f'gracetune sample {folder} --prompt "..."'))
    if fallbacks:
        count = "1 fallback was" if fallbacks == 1 else f"{fallbacks} fallbacks were"
        lines.append(labelled("", f"{count} taken; see above"))
    return lines


def _output_line(name: str, text: str) -> str:
    return labelled("", f"{name:<{LABEL_WIDTH}}{text}")


def _adapter_files(event: RunEnded) -> list[Path]:
    """Return the adapter files of a run, one for each trained transformer."""
    folder = event.outputs.get("result", event.outputs.get("adapter"))
    return [] if folder is None else sorted(Path(folder).glob("*.safetensors"))


def _model_folder(event: RunEnded) -> str:
    """Return the folder of the trained model; empty if the run trains an adapter."""
    result = event.outputs.get("result", "")
    return "" if _adapter_files(event) else result
