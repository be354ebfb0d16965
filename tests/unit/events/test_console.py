from io import StringIO
from pathlib import Path
from typing import Literal

import pytest

from gracetune.events.console import LiveConsole, Pace, PlainConsole, console_sink, stage_line
from gracetune.events.types import (
    BatchesFed,
    CheckpointSaved,
    Event,
    MemoryReclaimed,
    MemoryUsed,
    Notice,
    RampChanged,
    RunEnded,
    RunStarted,
    StageChanged,
    StageProgress,
    StartTimed,
    StepDone,
    Validated,
    WeightsStreamed,
)
from gracetune.units import GIB, format_seconds

LONG_PATH = "runs/" + "a-rather-long-folder-name/" * 8 + "grid-000003.png"


def started(total_steps: int = 100, start_step: int = 0) -> RunStarted:
    return RunStarted("runs/x", "tiny", 12345, total_steps, start_step, 640, "cpu", "fp32")


def step_done(step: int, samples: int = 8, seconds: float = 0.5) -> StepDone:
    return StepDone(step, 0.5, 1e-4, 1.0, samples, 2, 0, seconds)


class Plain:
    """A plain console with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stream = StringIO()
        self._sink = console_sink(self._stream, is_terminal=False, clock=lambda: self.now)

    def emit(self, *events: Event) -> list[str]:
        """Handle the events and return the lines they print."""
        before = len(self._stream.getvalue())
        for event in events:
            self._sink.handle(event)
        return self._stream.getvalue()[before:].splitlines()

    def close(self) -> list[str]:
        before = len(self._stream.getvalue())
        self._sink.close()
        return self._stream.getvalue()[before:].splitlines()


def live(*events: Event) -> str:
    stream = StringIO()
    sink = console_sink(stream, is_terminal=True, clock=lambda: 0.0)
    for event in events:
        sink.handle(event)
    sink.close()
    return stream.getvalue()


def test_a_terminal_gets_bars_and_a_pipe_plain_lines() -> None:
    assert isinstance(console_sink(StringIO(), is_terminal=False), PlainConsole)
    assert isinstance(console_sink(StringIO(), is_terminal=True), LiveConsole)


def test_the_lines_of_the_fork_are_kept() -> None:
    lines = Plain().emit(
        Notice("ramp: GH200 gradient accumulation ramp enabled"), RampChanged(3, 17, accumulation=4)
    )
    assert lines == [
        "ramp       GH200 gradient accumulation ramp enabled",
        "ramp       GH200 ramp adjusted gradient_accumulation_steps -> 4",
    ]


def test_warnings_fallbacks_and_labelled_notices_are_shown_and_others_are_not() -> None:
    assert Plain().emit(
        Notice("only in the log"),
        Notice("other: only in the log"),
        Notice("plan: 34 of 57 blocks streamed"),
        Notice("memory: managed memory: batches, at most 2.0 GiB"),
        Notice("two\nlines", "warning"),
        Notice("c", fallback=True),
        Notice("d", "warning", fallback=True),
    ) == [
        "plan       34 of 57 blocks streamed",
        "memory     managed memory: batches, at most 2.0 GiB",
        "warning    two",
        "           lines",
        "fallback   c",
        "warning    d",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_title_is_the_first_line(is_terminal: bool) -> None:
    stream = StringIO()
    sink = console_sink(stream, is_terminal, title="gracetune 1.0   tiny, 3 steps")
    sink.handle(Notice("a", "warning"))
    sink.handle(Notice("b", "warning"))
    sink.close()
    shown = stream.getvalue()
    assert shown.index("gracetune 1.0   tiny, 3 steps") < shown.index("warning    a")
    assert shown.count("gracetune") == 1


def test_the_start_describes_what_is_trained() -> None:
    (line,) = Plain().emit(started())
    assert line == "train      12,345 trainable parameters, 640 samples, cpu fp32"
    (line,) = Plain().emit(started(start_step=40))
    assert line.startswith("resume     from step 40 of 100: ")


def test_a_slow_start_is_explained_by_its_phases() -> None:
    phases = {"loading": 8.2, "hashing": 0.4, "placing": 21.7}
    assert Plain().emit(StartTimed(phases, 30.3)) == ["start      30 s: placing 22, loading 8"]
    assert Plain().emit(StartTimed(phases, 9.9)) == []


def test_the_first_and_last_step_and_one_every_five_seconds_are_shown() -> None:
    plain = Plain()
    plain.emit(started(100))
    shown = []
    for step in range(1, 101):
        plain.now = step * 0.5
        shown += [line.split()[1] for line in plain.emit(step_done(step))]
    assert shown == [f"{step}/100" for step in (*range(1, 100, 10), 100)]
    assert plain.close() == []


def test_a_validation_is_preceded_by_its_step() -> None:
    plain = Plain()
    plain.emit(started(), step_done(1))
    assert plain.emit(step_done(2), step_done(3)) == []
    lines = plain.emit(Validated(3, "grid.png", (), {"holdout": 0.25}, 1.5))
    assert lines[0].startswith("step 3/100")
    assert lines[1] == "validate   step 3 in 1.5s: holdout 0.2500, grid.png"
    (line,) = plain.emit(CheckpointSaved(3, "checkpoints/3", 3 * GIB, 0.25, "every 3 steps"))
    assert line == "checkpoint checkpoints/3 (every 3 steps, 3.0 GiB in 250ms)"


def test_the_last_step_of_a_killed_run_is_shown() -> None:
    plain = Plain()
    plain.emit(started(), step_done(1), step_done(2))
    assert [line.split()[1] for line in plain.close()] == ["2/100"]


def test_a_validation_without_samples_and_losses() -> None:
    (line,) = Plain().emit(Validated(0, None, ()))
    assert line == "validate   step 0 in 0ms: no held-out samples and no prompts"


def test_a_long_stage_is_shown_every_five_seconds_and_at_its_end() -> None:
    plain = Plain()
    shown = []
    for done in range(1, 21):
        plain.now = done * 1.0
        shown += plain.emit(StageProgress("staging", done, 20))
    assert shown == [f"data       staging: {done} of 20 files" for done in (6, 11, 16, 20)]
    assert plain.emit(StageProgress("encoding", 1, 4, "texts")) == []
    line = "cache      encoding: 4 of 4 texts"
    assert plain.emit(StageProgress("encoding", 4, 4, "texts")) == [line]


def test_a_stage_shows_its_speed() -> None:
    half = StageProgress("staging", 500, 1000, nbytes=10**9, total_nbytes=4 * 10**9, seconds=2.0)
    whole = StageProgress("staging", 9, 9, nbytes=10**9, total_nbytes=10**9, seconds=2.0)
    files = StageProgress("reading", 1, 4, seconds=2.0)
    empty = StageProgress("staging", 1, 2, nbytes=0, total_nbytes=0, seconds=0.5)
    assert [stage_line(event) for event in (half, whole, files, empty)] == [
        "data       staging: 500 of 1,000 files, 250 files/s, 0.50 GB/s, eta 6.0s",
        "data       staging: 9 of 9 files, 4.5 files/s, 0.50 GB/s",
        "data       reading: 1 of 4 files, 0.5 files/s, eta 6.0s",
        "data       staging: 1 of 2 files, 2 files/s, eta 500ms",
    ]


def test_a_step_shows_its_numbers() -> None:
    plain = Plain()
    plain.emit(started(61), MemoryUsed(0, 2 * GIB, 0, 0))
    (line,) = plain.emit(step_done(1, samples=8, seconds=0.5))
    assert line == "step 1/61  loss 0.5000  lr 1.00e-04  16.0 samples/s  eta 30.0s  host 2.0 GiB"
    plain.now = 10
    plain.emit(MemoryUsed(1, 2 * GIB, GIB, 3 * GIB))
    (line,) = plain.emit(step_done(61))
    assert line.endswith("16.0 samples/s  GPU 3.0 GiB")


def test_the_pace_ignores_the_first_step_and_smooths_the_rest() -> None:
    pace = Pace()
    assert (pace.samples_per_s(), pace.eta(10)) == (0.0, "?")
    pace.add(step_done(1, samples=8, seconds=60.0))
    assert pace.samples_per_s() == pytest.approx(8 / 60)
    pace.add(step_done(2, samples=8, seconds=1.0))
    assert pace.samples_per_s() == pytest.approx(8.0)
    pace.add(step_done(3, samples=8, seconds=2.0))
    kept = 0.5 ** (1 / 20)  # 20 steps halve the weight
    assert pace.samples_per_s() == pytest.approx((8 * kept + 8) / (kept + 2.0))
    assert pace.eta(1000) == format_seconds(1000 * (kept + 2.0) / (kept + 1))


@pytest.mark.parametrize(
    ("fallbacks", "lines"),
    [
        (0, []),
        (1, ["           1 fallback was taken; see above"]),
        (3, ["           3 fallbacks were taken; see above"]),
    ],
)
def test_the_end_lists_the_outputs_and_counts_fallbacks(fallbacks: int, lines: list[str]) -> None:
    plain = Plain()
    plain.emit(*(Notice(f"slower {n}", fallback=True) for n in range(fallbacks)), Notice("other"))
    outputs = {"log": "runs/x/events.jsonl", "pictures": "runs/x/grid.png"}
    assert plain.emit(RunEnded(100, "interrupted", 75.0, outputs, "state saved")) == [
        "stopped    at step 100 after 1m15s",
        "           log        runs/x/events.jsonl",
        "           samples    runs/x/grid.png",
        *lines,
    ]


def test_the_end_of_a_resumed_run_says_which_steps_its_time_is_for() -> None:
    plain = Plain()
    plain.emit(started(600, start_step=227))
    (done,) = plain.emit(RunEnded(600, "done", 17.6))
    assert done == "done       600 steps; those after step 227 took 17.6s"
    (stopped,) = plain.emit(RunEnded(300, "interrupted", 5.0))
    assert stopped == "stopped    at step 300 after 5.0s, resumed from step 227"


def test_a_finished_bar_has_a_colour_on_a_terminal_with_few(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM", raising=False)
    shown = live(started(2), step_done(1), step_done(2))
    assert "\x1b[32m━" in shown


@pytest.mark.parametrize("status", ["done", "interrupted"])
def test_the_end_names_the_adapter_files_the_tools_and_the_next_command(
    status: Literal["done", "interrupted"], tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    folder = run / ("adapter" if status == "done" else "adapters/step-000100")
    folder.mkdir(parents=True)
    for name in ("high_noise.safetensors", "low_noise.safetensors"):
        (folder / name).touch()
    outputs = {
        "log": str(run / "events.jsonl"),
        "checkpoint": str(run / "checkpoints/step-000100"),
        "result" if status == "done" else "adapter": str(folder),
    }
    tools = ("diffusers", "ComfyUI")
    lines = Plain().emit(RunEnded(100, status, 75.0, outputs, loads_in=tools))
    assert lines[1:] == [
        f"           adapter    {folder}/high_noise.safetensors (loads in diffusers, ComfyUI)",
        f"           adapter    {folder}/low_noise.safetensors (loads in diffusers, ComfyUI)",
        f"           log        {run}/events.jsonl",
        f"           checkpoint {run}/checkpoints/step-000100",
        f"           next       gracetune sample '{run}' --prompt \"...\"",
    ]


def test_a_run_that_was_finished_before_lists_its_outputs_without_a_time() -> None:
    outputs = {"log": "runs/x/events.jsonl"}
    plain = Plain()
    plain.emit(Notice("finished: all 6 steps are done."))
    assert plain.emit(RunEnded(6, "done", 0.5, outputs)) == [
        "           log        runs/x/events.jsonl"
    ]


def test_the_end_of_full_training_names_the_model_folder() -> None:
    outputs = {"log": "runs/x/events.jsonl", "result": "runs/x/model"}
    lines = Plain().emit(RunEnded(100, "done", 75.0, outputs))
    assert lines[1] == ("           model      runs/x/model (loads as model.path)")
    assert lines[-1] == '           next       gracetune sample runs/x --prompt "..."'


@pytest.mark.parametrize("seconds", [9.0, 90.0])
def test_long_waits_for_batches_and_weights_are_reported_at_the_end(seconds: float) -> None:
    plain = Plain()
    plain.emit(
        BatchesFed(40, 40, 620, 20, 160, 3, 5 * 2**20, 1.5, 1.5, 4),
        WeightsStreamed(40, 4, 3120, 5 * 2**40, 17, 3, 2.5, 90.0),
    )
    warnings = [line for line in plain.emit(RunEnded(40, "done", seconds)) if "waited" in line]
    expected = [
        "warning    steps waited 1.5s of 9.0s for batches.",
        "warning    steps waited 2.5s of 9.0s for streamed weights.",
    ]
    assert [line.partition(" Try")[0] for line in warnings] == (expected if seconds == 9 else [])


def test_a_terminal_shows_bars_and_keeps_the_lines_above_them() -> None:
    shown = live(
        StageProgress("staging", 1, 2),
        StageProgress("staging", 2, 2),
        StageProgress("encoding", 1, 2),
        started(),
        Notice("[bold]not markup[/bold] :smile:", "warning"),
        MemoryUsed(1, 2 * GIB, 0, 0),
        step_done(1),
        step_done(2),
        Validated(2, LONG_PATH, ()),
        RunEnded(2, "done", 1.0, {"log": "runs/x/log.jsonl"}),
    )
    assert "data       staging: 2 of 2 files" in shown
    assert "warning    [bold]not markup[/bold] :smile:" in shown
    assert "  2/100" in shown
    assert "training" in shown
    assert LONG_PATH in shown
    assert "done       2 steps in 1.0s" in shown
    assert "           log        runs/x/log.jsonl" in shown
    assert shown.count("\x1b[?25h") >= 1


def test_decisions_about_memory_are_lines_with_their_bytes() -> None:
    plain = Plain()
    plain.emit(started(61))
    freed = {"garbage": 0, "managed pages": 2 * GIB}
    lines = plain.emit(
        StageChanged(7, 2, GIB, 8 * GIB, GIB),
        MemoryReclaimed(7, "light", freed, 2 * GIB, GIB, GIB, "1.0 GiB are free"),
        MemoryReclaimed(7, "cap", {"cap": GIB}, GIB, GIB, GIB, "the host is full"),
    )
    assert "stage 2 after step 7: the device is short of memory (1.0 GiB of 8.0 GiB" in lines[0]
    assert "trimmed 2.0 GiB (managed pages 2.0 GiB): 1.0 GiB are free" in lines[1]
    assert "managed memory is limited to 1.0 GiB: the host is full" in lines[2]
