"""The sink of trackers: what it sends, and how a run survives a tracker that fails."""

import json
import threading
from pathlib import Path

import pytest
from PIL import Image

from gracetune.errors import ConfigError
from gracetune.events.dispatcher import EventDispatcher
from gracetune.events.trackers import tracker as module
from gracetune.events.trackers.tracker import (
    NO_STEP,
    TrackerSink,
    TrackerState,
    check_installed,
    flatten_settings,
    read_validation_samples,
)
from gracetune.events.types import (
    HealthChanged,
    MemoryUsed,
    Notice,
    RatesSpread,
    RunDescribed,
    RunEnded,
    StartTimed,
    StepDone,
    Validated,
)

END = RunEnded(3, "done", 1.0)


class Recorder:
    """A tracker that keeps its calls, and fails where it is told to."""

    address = "a place"

    def __init__(self, last_step=NO_STEP, fails=lambda name, step: False):
        self.last_step = last_step
        self.calls = []
        self._fails = fails

    def _keep(self, name, step, *values):
        if self._fails(name, step):
            raise OSError(f"no connection for {name}.")
        self.calls.append((name, step, *values))

    def describe(self, parts):
        self._keep("describe", None, *parts)

    def log_scalars(self, step, values):
        self._keep("scalars", step, dict(values))

    def log_histogram(self, step, name, edges, counts):
        self._keep("histogram", step, name)

    def log_samples(self, step, grid, samples):
        self._keep("samples", step, [sample.path.name for sample in samples])

    def log_health(self, event, text):
        self._keep("health", event.step, text)

    def finish(self, status):
        self._keep("finish", None, status)


class Kept:
    """An event sink that keeps events."""

    def __init__(self):
        self.events = []

    def handle(self, event):
        self.events.append(event)

    def close(self):
        pass

    def warnings(self):
        return [e.text for e in self.events if isinstance(e, Notice) and e.fallback]


def step_done(step, loss=0.5):
    return StepDone(step, loss, 1e-4, 1.0, 8, 2, 0, 0.5)


def run_events(recorder, events, **options):
    """Pass events to a tracker as a run does; return the tracker's sink and the other one."""
    opened = recorder if callable(recorder) else lambda: recorder
    sink = TrackerSink("tool", opened, settings={"seed": 1}, **options)
    kept = Kept()
    with EventDispatcher([sink, kept]) as dispatcher:
        sink.report_to(dispatcher.emit)
        for event in events:
            dispatcher.emit(event)
    return sink, kept


def scalars(recorder):
    return {call[1]: call[2] for call in recorder.calls if call[0] == "scalars"}


def write_samples(grid):
    Image.new("RGB", (4, 4)).save(grid)
    folder = grid.with_suffix("")
    folder.mkdir()
    record = {"number": 0, "file": "000.mp4", "kind": "video", "prompt": "a cat"}
    (folder / "samples.json").write_text(json.dumps({"samples": [record]}))


def test_the_numbers_of_a_step_are_sent_together():
    recorder = Recorder()
    events = [step_done(1), step_done(2), MemoryUsed(2, 2**30, 0, 0), step_done(3), END]
    run_events(recorder, events)
    sent = scalars(recorder)
    assert list(sent) == [1, 2, 3]
    assert sent[2]["train/loss"] == 0.5
    assert sent[2]["memory/host_gib"] == 1.0
    assert recorder.calls[-1] == ("finish", None, "done")


def test_descriptions_samples_health_and_histograms_are_sent(tmp_path):
    grid = tmp_path / "step-000003.png"
    write_samples(grid)
    recorder = Recorder()
    events = [
        StartTimed({"loading": 8.0}, 8.0),  # without a step, so it is only in the log
        RunDescribed(0, {}, {}, "", {"corrupt": [{"file": "a.png"}]}, {"batch": 1}),
        step_done(3),
        RatesSpread(3, "high", (1e-6, 1e-5), (4,)),
        Validated(3, str(grid), ("a cat",), {"held_out": 0.25}),
        HealthChanged(2, "overfitting", "notice", "it rises"),
        END,
    ]
    run_events(recorder, events)
    assert recorder.calls[:2] == [
        ("describe", None, "settings"),
        ("describe", None, "machine", "versions", "data", "plan"),
    ]
    assert ("histogram", 3, "train/rates_high") in recorder.calls
    assert ("samples", 3, ["000.mp4"]) in recorder.calls
    assert ("health", 2, "notice: it rises") in recorder.calls
    assert scalars(recorder)[3]["validation/held_out"] == 0.25
    assert scalars(recorder)[3]["health/overfitting"] == 1, "steps must not go back"


def test_samples_can_be_kept_private(tmp_path):
    grid = tmp_path / "step-000003.png"
    write_samples(grid)
    recorder = Recorder()
    run_events(recorder, [Validated(3, str(grid), ("a",)), END], send_samples=False)
    assert not [call for call in recorder.calls if call[0] == "samples"]


def test_steps_that_an_earlier_process_has_sent_are_not_sent_again():
    recorder = Recorder(last_step=2)
    run_events(recorder, [step_done(1), step_done(2), step_done(3), END])
    assert list(scalars(recorder)) == [3]


def test_a_failing_tracker_is_reported_once_and_counted_and_the_rest_is_sent():
    recorder = Recorder(fails=lambda name, step: name == "scalars" and step in (1, 3))
    sink, kept = run_events(recorder, [*map(step_done, range(1, 6)), END])
    assert list(scalars(recorder)) == [2, 4, 5]
    first, last = kept.warnings()
    assert first.startswith("tool: failed: OSError: no connection for scalars. Training is not")
    assert last.startswith("tool: 2 of 7 records are missing there")
    assert (sink.num_missing, sink.num_calls) == (2, 7)
    assert kept.events[-1] == END


def test_a_tracker_that_always_fails_is_left_alone():
    tried = []
    recorder = Recorder(fails=lambda name, step: tried.append(name) or True)
    _, kept = run_events(recorder, [*map(step_done, range(1, 50)), END])
    assert len(tried) == module.MAX_FAILURES
    assert [e.step for e in kept.events if isinstance(e, StepDone)] == list(range(1, 50))
    assert len(kept.warnings()) == 2


def test_a_tracker_that_cannot_start_does_not_end_the_run():
    def fail():
        raise ValueError("no key")

    _, kept = run_events(fail, [step_done(1), END])
    assert kept.warnings()[0].startswith("tool: could not be started: ValueError: no key.")
    assert kept.events[-1] == END


def test_a_tracker_that_hangs_does_not_keep_the_run_from_ending():
    release = threading.Event()
    recorder = Recorder(fails=lambda name, step: name == "finish" and not release.wait(60))
    _, kept = run_events(recorder, [step_done(1), END], close_s=0.05)
    release.set()
    assert any("did not finish within" in text for text in kept.warnings())
    assert kept.events[-1] == END


def test_a_full_queue_leaves_events_out_and_counts_them(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    release = threading.Event()

    def open_late():
        release.wait(60)
        return Recorder()

    sink = TrackerSink("tool", open_late, settings={})
    for step in range(1, 6):
        sink.handle(step_done(step))
    release.set()
    sink.handle(END)
    assert sink.num_missing >= 3


def test_without_a_thread_every_value_is_written_at_once():
    recorder = Recorder()
    sink = TrackerSink("tool", lambda: recorder, settings={}, in_thread=False)
    sink.handle(step_done(1))
    assert list(scalars(recorder)) == [1]


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", {"wandb": "a_package_nobody_has"})
    check_installed(["tensorboard"])
    with pytest.raises(ConfigError, match=r"pip install 'gracetune\[wandb\]'"):
        check_installed(["tensorboard", "wandb"])


def test_settings_are_flattened_and_state_is_found_again(tmp_path):
    nested = {"a": {"b": 1}, "list": [{"c": 2}], "plain": [1, 2], "empty": {}}
    assert flatten_settings(nested) == {"a.b": 1, "list.0.c": 2, "plain": [1, 2], "empty": {}}
    TrackerState(tmp_path, "tool").update(id="x")
    TrackerState(tmp_path, "tool").update(step=3)
    assert TrackerState(tmp_path, "tool").values == {"id": "x", "step": 3}


def test_samples_are_read_beside_their_grid(tmp_path):
    grid = tmp_path / "step-000001.png"
    write_samples(grid)
    (sample,) = read_validation_samples(grid)
    assert (sample.path, sample.kind, sample.prompt) == (
        Path(tmp_path / "step-000001" / "000.mp4"),
        "video",
        "a cat",
    )
