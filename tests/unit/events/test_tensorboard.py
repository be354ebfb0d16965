import json
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gracetune.errors import RunFailedError
from gracetune.events.trackers.tensorboard import TensorBoardTracker
from gracetune.events.trackers.tracker import TrackerSink
from gracetune.events.types import (
    BatchesFed,
    Event,
    HealthChanged,
    MemoryUsed,
    Notice,
    RatesSpread,
    RunDescribed,
    RunEnded,
    StepDone,
    Validated,
    WeightsStreamed,
)
from gracetune.units import GIB


def open_sink(folder: Path, purge_step: int | None) -> TrackerSink:
    return TrackerSink(
        "tensorboard",
        lambda: TensorBoardTracker(folder, purge_step),
        settings={"seed": 7},
        in_thread=False,
    )


def step_done(step: int, loss: float, seconds: float = 0.5) -> StepDone:
    return StepDone(step, loss, 1e-4, 1.0, 8, 2, 0, seconds)


def write_sound(folder: Path) -> None:
    folder.mkdir()
    with wave.open(str(folder / "000.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8))
    record = {"number": 0, "file": "000.wav", "kind": "audio", "prompt": "a"}
    (folder / "samples.json").write_text(json.dumps({"samples": [record]}))


def read(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def losses(folder: Path) -> dict[int, float]:
    return {event.step: event.value for event in read(folder).Scalars("train/loss")}


def test_scalars_have_the_values_of_the_events(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, None)
    sink.handle(step_done(1, 0.5))
    sink.handle(step_done(2, 0.25, seconds=0.0))
    sink.handle(MemoryUsed(2, 3 * GIB, GIB, 2 * GIB))
    sink.handle(Notice("not drawn"))
    sink.close()
    assert losses(tmp_path) == {1: 0.5, 2: 0.25}
    board = read(tmp_path)
    assert [(event.step, event.value) for event in board.Scalars("train/samples_per_s")] == [
        (1, 16.0)
    ]
    assert board.Scalars("memory/host_gib")[0].value == 3.0
    assert board.Scalars("memory/device_peak_gib")[0].value == 2.0


def test_learning_rates_are_a_histogram_of_their_logarithm(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, None)
    limits = (1e-6, 1e-5, 1e-4, 1e-3)
    sink.handle(RatesSpread(5, "", limits, (0, 3, 1)))
    sink.handle(RatesSpread(5, "high", limits, (0, 0, 0)))
    sink.close()
    board = read(tmp_path)
    (event,) = board.Histograms("train/log10_rate")
    assert event.step == 5
    assert event.histogram_value.num == 4
    assert (event.histogram_value.min, event.histogram_value.max) == (-4.5, -3.5)
    assert event.histogram_value.sum == 3 * -4.5 - 3.5
    filled = {
        round(limit, 6): count
        for limit, count in zip(
            event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True
        )
        if count
    }
    assert filled == {-4.0: 3, -3.0: 1}
    assert board.Histograms("train/log10_rate_high")[0].histogram_value.num == 0


def test_a_validation_writes_its_grid_and_losses(tmp_path: Path) -> None:
    grid = tmp_path / "grid.png"
    Image.new("RGB", (6, 4), "red").save(grid)
    write_sound(tmp_path / "grid")
    sink = open_sink(tmp_path / "tb", None)
    sink.handle(Validated(7, str(grid), ("a",), {"holdout": 0.125}))
    sink.handle(Validated(8, None, ()))
    sink.close()
    board = read(tmp_path / "tb")
    (picture,) = board.Images("validation/grid")
    assert (picture.step, picture.width, picture.height) == (7, 6, 4)
    assert picture.encoded_image_string == grid.read_bytes()
    (sound,) = board.Audio("validation/000")
    assert (sound.step, sound.sample_rate, sound.length_frames) == (7, 8000, 4)
    assert sound.encoded_audio_string == (tmp_path / "grid" / "000.wav").read_bytes()
    assert [event.value for event in board.Scalars("validation/holdout")] == [0.125]


def test_settings_plan_and_health_are_text(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, None)
    sink.handle(RunDescribed(0, {"cpus": 2}, {}, "", {}, {"batch": 4}))
    sink.handle(HealthChanged(3, "overfitting", "notice", "the loss rises", advice="stop."))
    sink.handle(RunEnded(3, "done", 1.0))
    board = read(tmp_path)

    def text(tag: str) -> str:
        (event,) = board.Tensors(tag)
        return event.tensor_proto.string_val[0].decode()

    assert '"seed": 7' in text("run/settings")
    assert '"batch": 4' in text("run/plan")
    assert text("health/overfitting") == "notice: the loss rises. stop"
    assert text("run/status") == "done"


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    first = open_sink(tmp_path, None)
    for step in range(1, 6):
        first.handle(step_done(step, 1.0))
    first.close()
    second = open_sink(tmp_path, purge_step=4)
    second.handle(step_done(4, 2.0))
    second.close()
    assert losses(tmp_path) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}


def test_a_killed_run_loses_no_record(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, None)
    sink.handle(step_done(1, 0.5))
    assert losses(tmp_path) == {1: 0.5}
    sink.close()


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailedError, match=r"logging\.tensorboard: false"):
        TensorBoardTracker(tmp_path / "file" / "tb", None)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda _path, _mode: real(Path("/dev/full"), "wb"))
    with pytest.raises(RunFailedError, match="No space left"):
        TensorBoardTracker(tmp_path, None)


def test_the_sink_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from gracetune.events.trackers.tensorboard import TensorBoardTracker\n"
        "TensorBoardTracker(Path(sys.argv[1]), None).finish('done')\n"
        "sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, tmp_path],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


FED = BatchesFed(
    step=40,
    batches=40,
    hits=620,
    reads=20,
    hot=160,
    waits=3,
    nbytes=5 * 2**20,
    waited_s=0.25,
    hidden_s=1.5,
    depth=4,
)
STREAMED = WeightsStreamed(
    step=40,
    slots=4,
    fetches=3120,
    nbytes=5 * 2**40,
    late=17,
    on_demand=3,
    waited_s=2.5,
    hidden_s=90.0,
)


@pytest.mark.parametrize(
    ("event", "charts"),
    [
        (FED, {"feed/waits": 3, "feed/depth": 4}),
        (STREAMED, {"stream/slots": 4, "stream/late": 20, "stream/hidden_s": 90}),
    ],
    ids=["batches", "weights"],
)
def test_transfer_statistics_are_drawn(tmp_path: Path, event: Event, charts: dict) -> None:
    sink = open_sink(tmp_path, None)
    sink.handle(event)
    sink.close()
    board = read(tmp_path)
    for chart, value in charts.items():
        (point,) = board.Scalars(chart)
        assert (point.step, point.value) == (40, value), chart
