from io import StringIO

import pytest

from gracetune.events.console import LiveConsole, Pace, PlainConsole, console_sink
from gracetune.events.types import (
    CheckpointSaved,
    Event,
    MemoryUsed,
    Notice,
    RampChanged,
    RunEnded,
    RunStarted,
    StageProgress,
    StepDone,
    Validated,
)
from gracetune.units import GIB

LONG_PATH = "runs/" + "a-rather-long-folder-name/" * 8 + "grid-000003.png"


def started(total_steps: int = 100, start_step: int = 0) -> RunStarted:
    return RunStarted("runs/x", "tiny", 12345, total_steps, start_step, 640, "cpu", "no")


def step_done(step: int, samples: int = 8, seconds: float = 0.5) -> StepDone:
    return StepDone(step, 0.5, 1e-4, 1.0, samples, 2, 0, seconds)


class Plain:
    """A plain console whose clock stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stream = StringIO()
        self._sink = console_sink(self._stream, is_terminal=False, clock=lambda: self.now)

    def emit(self, *events: Event) -> list[str]:
        """The lines that these events add."""
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


def test_the_stream_decides_which() -> None:
    assert isinstance(console_sink(StringIO(), is_terminal=False), PlainConsole)
    assert isinstance(console_sink(StringIO(), is_terminal=True), LiveConsole)


def test_the_forks_lines_appear_as_they_were() -> None:
    lines = Plain().emit(
        Notice("GH200 gradient accumulation ramp enabled"), RampChanged(3, 17, accumulation=4)
    )
    assert lines == [
        "GH200 gradient accumulation ramp enabled",
        "GH200 ramp adjusted gradient_accumulation_steps -> 4",
    ]


def test_notices_are_marked_by_kind() -> None:
    assert Plain().emit(
        Notice("a"),
        Notice("b", "warning"),
        Notice("c", fallback=True),
        Notice("d", "warning", fallback=True),
    ) == ["a", "warning: b", "fallback: c", "warning, fallback: d"]


def test_the_start_says_what_is_trained() -> None:
    (line,) = Plain().emit(started())
    assert line == (
        "starting: tiny, 12,345 trainable parameters, 640 samples, 100 steps, cpu, fp32 -> runs/x"
    )
    (line,) = Plain().emit(started(start_step=40))
    assert line.startswith("resuming at step 40: ")


def test_steps_are_shown_first_last_and_now_and_then() -> None:
    plain = Plain()
    plain.emit(started(100))
    shown = []
    for step in range(1, 101):
        plain.now = step * 0.5
        shown += [line.split()[1] for line in plain.emit(step_done(step))]
    assert shown == [f"{step}/100" for step in (*range(1, 100, 10), 100)]
    assert plain.close() == []


def test_a_landmark_brings_the_step_that_led_to_it() -> None:
    plain = Plain()
    plain.emit(started(), step_done(1))
    assert plain.emit(step_done(2), step_done(3)) == []
    lines = plain.emit(Validated(3, "grid.png", (), {"holdout": 0.25}, 1.5))
    assert lines[0].startswith("step 3/100")
    assert lines[1] == "validated at step 3 in 1.5s: holdout 0.2500, grid.png"
    (line,) = plain.emit(CheckpointSaved(3, "checkpoints/3", 3 * GIB, 0.25, "every 3 steps"))
    assert line == "checkpoint at step 3 (every 3 steps): checkpoints/3, 3.0 GiB in 250ms"


def test_a_step_held_back_is_not_lost_where_the_run_dies() -> None:
    plain = Plain()
    plain.emit(started(), step_done(1), step_done(2))
    assert [line.split()[1] for line in plain.close()] == ["2/100"]


def test_a_validation_of_nothing_says_so() -> None:
    (line,) = Plain().emit(Validated(0, None, ()))
    assert line == "validated at step 0 in 0ms: nothing to measure or picture"


def test_stages_are_shown_first_last_and_now_and_then() -> None:
    plain = Plain()
    shown = []
    for done in range(1, 21):
        plain.now = done * 1.0
        shown += plain.emit(StageProgress("staging", done, 20))
    assert shown == [f"staging: {done} of 20 files" for done in (1, 6, 11, 16, 20)]
    assert plain.emit(StageProgress("encoding", 1, 4, "texts")) == ["encoding: 1 of 4 texts"]


def test_a_stage_that_counts_bytes_shows_its_pace() -> None:
    half = StageProgress("staging", 500, 1000, nbytes=10**9, total_nbytes=4 * 10**9, seconds=2.0)
    whole = StageProgress("staging", 9, 9, nbytes=10**9, total_nbytes=10**9, seconds=2.0)
    files = StageProgress("reading", 1, 4, seconds=2.0)
    empty = StageProgress("staging", 1, 2, nbytes=0, total_nbytes=0, seconds=0.5)
    assert [line for event in (half, whole, files, empty) for line in Plain().emit(event)] == [
        "staging: 500 of 1,000 files, 250 files/s, 0.50 GB/s, eta 6.0s",
        "staging: 9 of 9 files, 4 files/s, 0.50 GB/s",
        "reading: 1 of 4 files, 0 files/s, eta 6.0s",
        "staging: 1 of 2 files, 2 files/s, eta 500ms",
    ]


def test_the_numbers_of_a_step() -> None:
    plain = Plain()
    plain.emit(started(61), MemoryUsed(0, 2 * GIB, 0, 0))
    (line,) = plain.emit(step_done(1, samples=8, seconds=0.5))
    assert line == "step 1/61  loss 0.5000  lr 1.00e-04  16.0 samples/s  eta 30.0s  host 2.0 GiB"
    plain.now = 10
    plain.emit(MemoryUsed(1, 2 * GIB, GIB, 3 * GIB))
    (line,) = plain.emit(step_done(61))
    assert line.endswith("16.0 samples/s  device 1.0 GiB (peak 3.0 GiB)  host 2.0 GiB")


def test_the_pace_forgets_the_warm_up_and_smooths_the_rest() -> None:
    pace = Pace()
    assert (pace.samples_per_s(), pace.eta(10)) == (0.0, "?")
    pace.add(step_done(1, samples=8, seconds=60.0))
    assert pace.samples_per_s() == pytest.approx(8 / 60)
    pace.add(step_done(2, samples=8, seconds=1.0))
    assert pace.samples_per_s() == pytest.approx(8.0)
    pace.add(step_done(3, samples=8, seconds=2.0))
    assert pace.samples_per_s() == pytest.approx(8 / 1.1)
    assert pace.eta(10) == "11.0s"


@pytest.mark.parametrize(
    ("fallbacks", "said"),
    [(0, "no fallbacks"), (1, "1 fallback, named above"), (3, "3 fallbacks, named above")],
)
def test_the_end_names_what_to_look_at_and_counts_fallbacks(fallbacks: int, said: str) -> None:
    plain = Plain()
    plain.emit(*(Notice(f"lesser {n}", fallback=True) for n in range(fallbacks)), Notice("other"))
    outputs = {"result": "runs/x/result.json", "grid": "runs/x/grid.png"}
    assert plain.emit(RunEnded(100, "interrupted", 75.0, outputs, "state saved")) == [
        "interrupted at step 100 after 1m15s",
        "  result  runs/x/result.json",
        "  grid    runs/x/grid.png",
        said,
    ]


def test_a_terminal_shows_bars_and_keeps_the_lines() -> None:
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
    assert "staging: 2 of 2 files" in shown
    assert "warning: [bold]not markup[/bold] :smile:" in shown
    assert "  2/100" in shown
    assert "training" in shown
    assert LONG_PATH in shown
    assert "done at step 2 after 1.0s" in shown
    assert "  log  runs/x/log.jsonl" in shown
    assert shown.count("\x1b[?25h") >= 1
