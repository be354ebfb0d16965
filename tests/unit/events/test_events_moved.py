"""What batches and streamed weights have cost: in the log, in charts, to a person at the end."""

import io
import json
from dataclasses import asdict

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gracetune.events.console import console_sink
from gracetune.events.log import JsonlLog
from gracetune.events.trackers.tensorboard import TensorBoardSink
from gracetune.events.types import BatchesFed, RunEnded, WeightsStreamed

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
LINES = {
    FED: "fed 40 batches (620 in memory, 20 read from files, 160 hot; 5.0 MiB moved); "
    "steps waited 3 times for 250ms, 1.5s of work hidden, 4 ahead",
    STREAMED: "streamed 5.0 TiB of weights in 3,120 fetches through 4 slots; "
    "steps waited 20 times for 2.5s, 1m30s hidden",
}
CHARTS = {
    FED: {"feed/waits": 3, "feed/depth": 4},
    STREAMED: {"stream/slots": 4, "stream/late": 20, "stream/hidden_s": 90},
}

each = pytest.mark.parametrize("event", [FED, STREAMED], ids=["fed", "streamed"])


@each
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_person_sees_it_once_when_the_run_ends(event, is_terminal):
    stream = io.StringIO()
    sink = console_sink(stream, is_terminal)
    sink.handle(event)
    first_word = LINES[event].partition(" ")[0]
    assert first_word not in stream.getvalue()
    sink.handle(RunEnded(40, "done", 9.0))
    sink.close()
    assert stream.getvalue().count(LINES[event]) == 1


@each
def test_the_log_has_every_number(tmp_path, event):
    log = JsonlLog(tmp_path / "events.jsonl")
    log.handle(event)
    log.close()
    line = json.loads((tmp_path / "events.jsonl").read_text())
    assert line.pop("event") == {FED: "batches_fed", STREAMED: "weights_streamed"}[event]
    assert line.pop("time") > 0
    assert line == asdict(event)


@each
def test_tensorboard_draws_it(tmp_path, event):
    sink = TensorBoardSink(tmp_path, None)
    sink.handle(event)
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    for chart, value in CHARTS[event].items():
        (point,) = read.Scalars(chart)
        assert (point.step, point.value) == (40, value), chart
