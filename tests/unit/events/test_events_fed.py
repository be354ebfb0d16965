import io

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gracetune.events.console import console_sink
from gracetune.events.log import JsonlLog
from gracetune.events.tensorboard import TensorBoardSink
from gracetune.events.types import BatchesFed, RunEnded

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
LINE = (
    "fed 40 batches (620 in memory, 20 read from files, 160 hot; 5.0 MiB moved); "
    "steps waited 3 times for 250ms, 1.5s of work hidden, 4 ahead"
)


def test_a_person_sees_it_once_when_the_run_ends():
    for is_terminal in (False, True):
        stream = io.StringIO()
        sink = console_sink(stream, is_terminal)
        sink.handle(FED)
        assert "fed 40" not in stream.getvalue()
        sink.handle(RunEnded(40, "done", 9.0))
        sink.close()
        assert LINE in stream.getvalue()


def test_the_log_has_every_number(tmp_path):
    log = JsonlLog(tmp_path / "events.jsonl")
    log.handle(FED)
    log.close()
    line = (tmp_path / "events.jsonl").read_text()
    assert '"event": "batches_fed"' in line
    assert '"hidden_s": 1.5' in line


def test_tensorboard_draws_waits(tmp_path):
    sink = TensorBoardSink(tmp_path, None)
    sink.handle(FED)
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Scalars("feed/waits")[0].value == 3
    assert read.Scalars("feed/depth")[0].step == 40
