from types import SimpleNamespace

import pytest

from gracetune.events.log import JsonlLog
from gracetune.events.types import (
    HeldOutLoss,
    LossParts,
    Notice,
    RunStarted,
    StepDone,
    WeightsMoved,
)
from gracetune.memory.sensors import SensorReading
from gracetune.train.health import HealthMonitor
from gracetune.train.health_checks import LearningRateHigh, Measurements, RunFacts
from gracetune.train.telemetry import Telemetry, earlier_measurements


def started(start_step):
    return RunStarted("run", "tiny", 100, 300, start_step, 16, "cpu", "fp32")


def done(step, loss):
    return StepDone(step, loss, 1e-3, 0.1, 4, 1, 0, 0.1)


@pytest.fixture
def log(tmp_path):
    """Write a log: 60 steps, of which the last 20 are lost and repeated, with a smaller loss."""
    parts = LossParts(40, {"data": {"loss": 0.5, "samples": 4}}, {"t0.00-0.25": {"samples": 0}})
    first = [done(step, 1.5 - 0.02 * step) for step in range(1, 61)]
    events = [started(0), *first[:40], parts, WeightsMoved(40, "adapter", {"blocks.0": 0.7})]
    events += [HeldOutLoss(40, {"held_out": 0.6}, {}, 8, 40, 0.6), *first[40:]]
    events += [started(40), Notice("resumed"), *(done(step, 0.3) for step in range(41, 61))]
    events += [done(61, float("nan")), started(60)]
    writer = JsonlLog(tmp_path / "events.jsonl")
    for event in events:
        writer.handle(event)
    writer.close()
    return tmp_path / "events.jsonl", parts


def test_a_resumed_run_reads_what_earlier_processes_have_measured(log):
    path, parts = log
    found = earlier_measurements(path, 60)
    steps = [one for measured in found for one in measured.steps]
    assert [one.step for one in steps] == list(range(1, 61))
    assert [one.loss for one in steps[39:41]] == [1.5 - 0.02 * 40, 0.3]
    assert [one.losses for one in found if one.losses is not None] == [parts]
    assert [one.held_out.losses for one in found if one.held_out] == [{"held_out": 0.6}]
    assert earlier_measurements(path.with_name("none.jsonl"), 60) == []


def test_a_loss_that_fell_before_the_interruption_has_fallen(log):
    path, _ = log
    monitor = HealthMonitor([LearningRateHigh(RunFacts(300, start_step=60))], settings=None)
    monitor.remember(earlier_measurements(path, 60))
    flat = [done(step, 0.3) for step in range(61, 200)]
    assert monitor.look(Measurements(199, flat)) == []


def test_disk_space_is_that_of_the_rank_that_writes():
    readings = [
        SensorReading((), {"memory_available": 9, "memory_total": 10, "output_free": 5}),
        SensorReading((), {"memory_available": 1, "memory_total": 10, "output_free": 700}),
        SensorReading((), {"memory_available": 5, "memory_total": 10, "cache_free": 3}),
    ]
    ranks = SimpleNamespace(gather=lambda _: readings)
    telemetry = SimpleNamespace(_ranks=ranks, _sensors=SimpleNamespace(read=lambda: None))
    host = Telemetry._read_sensors(telemetry, 7).host
    assert host == {"memory_available": 1, "memory_total": 10, "output_free": 5, "cache_free": 3}
