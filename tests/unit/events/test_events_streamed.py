import io

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gracetune.events.console import console_sink
from gracetune.events.log import JsonlLog
from gracetune.events.tensorboard import TensorBoardSink
from gracetune.events.types import RunEnded, WeightsStreamed

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
LINE = (
    "streamed 5.0 TiB of weights in 3,120 fetches through 4 slots; "
    "steps waited 20 times for 2.5s, 1m30s hidden"
)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_person_sees_it_once_when_the_run_ends(is_terminal):
    stream = io.StringIO()
    sink = console_sink(stream, is_terminal)
    sink.handle(STREAMED)
    assert "fetches" not in stream.getvalue()
    sink.handle(RunEnded(40, "done", 9.0))
    sink.close()
    assert LINE in stream.getvalue()


def test_the_log_has_every_number(tmp_path):
    log = JsonlLog(tmp_path / "events.jsonl")
    log.handle(STREAMED)
    log.close()
    line = (tmp_path / "events.jsonl").read_text()
    assert '"event": "weights_streamed"' in line
    assert '"slots": 4' in line
    assert '"hidden_s": 90.0' in line


def test_tensorboard_draws_slots_and_waits(tmp_path):
    sink = TensorBoardSink(tmp_path, None)
    sink.handle(STREAMED)
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Scalars("stream/slots")[0].value == 4
    assert read.Scalars("stream/late")[0].value == 20
    assert read.Scalars("stream/hidden_s")[0].step == 40
