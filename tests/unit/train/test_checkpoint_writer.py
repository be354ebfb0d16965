import random
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from fork_process import PythonProcess

from gracetune.config.schema import TrainSection
from gracetune.distributed.layout import SINGLE_LAYOUT
from gracetune.errors import CheckpointError
from gracetune.events.types import CheckpointSaved, Notice
from gracetune.offload.copy_engine import SynchronousCopyEngine, aligned
from gracetune.optim.offloaded_state import OptimizerStepper
from gracetune.train import checkpoint, checkpoint_writer
from gracetune.train.checkpoint import Snapshot
from gracetune.train.checkpoint_writer import CheckpointWriter, HostBuffers, StateCopy
from gracetune.train.step import TrainProgress

NUMEL = 100_000


class Training:
    """One parameter whose value is the number of its steps, and the writer of its checkpoints."""

    def __init__(self, folder, *, keep=2, in_background=True):
        self.parameter = torch.nn.Parameter(torch.zeros(NUMEL))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        engine = SynchronousCopyEngine()
        self.stepper = OptimizerStepper(self.optimizer, engine, 0.0)
        self.events = []
        self.writer = CheckpointWriter(
            folder,
            TrainSection(keep_checkpoints=keep),
            SINGLE_LAYOUT,
            engine,
            self.stepper,
            self.events.append,
            in_background=in_background,
        )
        self.step_number = 0

    @property
    def tensors(self):
        return {
            "weights": {"w": self.parameter.detach()},
            "optimizer": {"w|step:int": torch.tensor(self.step_number)},
            "generators-0": {"torch": torch.zeros(4, dtype=torch.uint8)},
        }

    def step(self):
        self.parameter.grad = torch.full((NUMEL,), -1.0)
        self.stepper.step()
        self.step_number += 1

    def save(self, *, in_background=True):
        number = self.step_number
        snapshot = Snapshot(TrainProgress(number, number, number), {}, self.tensors)
        self.writer.save(snapshot, None, "every N steps", in_background=in_background)

    def saved_steps(self):
        return [event.step for event in self.events if isinstance(event, CheckpointSaved)]


@pytest.fixture
def training(tmp_path):
    made = Training(tmp_path)
    yield made
    made.writer.close()


@pytest.fixture
def paused(monkeypatch):
    """Let writing threads wait until the event is set."""
    go_on = threading.Event()
    write = checkpoint.write_tensors

    def paused_write(*arguments):
        assert go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", paused_write)
    yield go_on
    go_on.set()


def value_in(path):
    found = checkpoint.load_snapshot(path)
    weights = found.tensors["weights"]["w"]
    assert weights.unique().numel() == 1
    assert found.tensors["optimizer"]["w|step:int"] == weights[0]
    return int(weights[0])


def test_a_background_checkpoint_has_the_state_of_its_step(training, paused, tmp_path):
    training.step()
    training.save()
    for _ in range(3):
        training.step()
        training.writer.poll()
    assert training.saved_steps() == []
    assert checkpoint.complete_checkpoints(tmp_path) == []
    paused.set()
    training.writer.finish()
    assert training.saved_steps() == [1]
    assert value_in(tmp_path / "step-000001") == 1
    (event,) = training.events
    assert event.stall_seconds < event.seconds


def test_a_step_completes_a_checkpoint_that_has_been_written(training):
    training.step()
    training.save()
    while not training.saved_steps():
        training.writer.poll()
    assert training.saved_steps() == [1]


def test_an_update_waits_until_the_state_is_copied(training, monkeypatch):
    """Without the wait, the copy would have the weights of the next step."""
    copy_may_start = threading.Event()
    finish = StateCopy.finish

    def late_finish(self):
        assert copy_may_start.wait(60)
        finish(self)

    monkeypatch.setattr(StateCopy, "finish", late_finish)
    training.step()
    training.save()
    update = threading.Thread(target=training.step)
    update.start()
    time.sleep(0.05)
    assert training.parameter[0] == 1.0
    copy_may_start.set()
    update.join()
    assert training.parameter[0] == 2.0
    training.writer.finish()


def test_a_second_save_waits_for_the_first_and_uses_its_memory(training, paused, tmp_path):
    training.step()
    training.save()
    training.step()
    threading.Timer(0.05, paused.set).start()
    training.save()
    training.step()
    training.writer.finish()
    notices = [event.text for event in training.events if isinstance(event, Notice)]
    assert "step 2 waits until that of step 1 is written" in notices[0]
    assert training.saved_steps() == [1, 2]
    assert [value_in(path) for path in checkpoint.complete_checkpoints(tmp_path)] == [1, 2]
    assert training.writer._buffers.nbytes == aligned(4 * NUMEL)


def test_the_last_save_of_a_process_is_complete_when_it_returns(training, tmp_path):
    training.step()
    training.save()
    training.step()
    training.save(in_background=False)
    assert training.saved_steps() == [1, 2]
    assert [value_in(path) for path in checkpoint.complete_checkpoints(tmp_path)] == [1, 2]


def test_a_run_that_fails_completes_its_checkpoint(tmp_path):
    training = Training(tmp_path)
    training.step()
    training.save()
    training.writer.close()
    assert training.saved_steps() == [1]
    assert value_in(tmp_path / "step-000001") == 1


@pytest.mark.parametrize("in_background", [True, False])
def test_a_failed_write_is_reported_and_keeps_the_checkpoint_before_it(
    training, tmp_path, in_background
):
    """A limit on the file size makes the kernel reject writes, as a full disk would."""
    training.step()
    training.save(in_background=False)
    training.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step-000002 cannot.*newest.*step-000001"):
            training.save(in_background=in_background)
            training.writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert value_in(tmp_path / "step-000001") == 1


def test_without_memory_for_a_copy_steps_wait(training, monkeypatch, tmp_path):
    host = checkpoint_writer.read_this_host()
    monkeypatch.setattr(
        checkpoint_writer, "HOST_RESERVE", host.usable_bytes() - 4 * NUMEL // 2 + (1 << 34)
    )
    for _ in range(2):
        training.step()
        training.save()
    assert training.saved_steps() == [1, 2]
    (notice,) = [event for event in training.events if isinstance(event, Notice)]
    assert notice.fallback
    assert "steps wait while checkpoints are written: copies" in notice.text
    assert value_in(tmp_path / "step-000002") == 2


def test_host_memory_is_allocated_in_pieces_and_used_again():
    buffers = HostBuffers(SynchronousCopyEngine(), slab_nbytes=1000)
    sizes = [300, 512, 2000, 1, 0]
    places = buffers.reserve(sizes)
    assert [len(place) for place in places] == sizes
    for number, place in enumerate(places):
        place.fill_(number)
    assert all((place == number).all() for number, place in enumerate(places))
    nbytes = buffers.nbytes
    again = buffers.reserve(sizes)
    assert [p.data_ptr() for p in again] == [p.data_ptr() for p in places]
    assert buffers.nbytes == nbytes


SAVE_FOREVER = """
import sys
from pathlib import Path
from test_checkpoint_writer import Training
training = Training(Path(sys.argv[1]), keep=1)
while True:
    training.step()
    training.writer.poll()
    training.save()
"""


def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path):
    """The process is killed at random moments while it writes, renames and deletes."""
    generator = random.Random(0)
    words = ("-c", f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n{SAVE_FOREVER}")
    for number in range(3):
        folder = tmp_path / str(number)
        process = PythonProcess(*words, folder)
        deadline = time.monotonic() + 60
        while not list(folder.glob("step-*/manifest.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.2))
        process.kill()
        process.wait()
        found = checkpoint.find_snapshot(folder, "auto", pytest.fail)
        assert found is not None
        assert value_in(folder / f"step-{found.progress.step:06d}") == found.progress.step
        survivor = Training(folder, keep=1)
        survivor.step_number = found.progress.step
        survivor.step()
        survivor.save(in_background=False)
        survivor.writer.close()
        assert not list(folder.glob(".*")), "nothing of the killed process is left"
