import urllib.request

import pytest

from gracetune.errors import ConfigError
from gracetune.events.trackers.prometheus import PrometheusSink
from gracetune.events.types import (
    DeviceSensors,
    HealthChanged,
    LossParts,
    MemoryRoles,
    Notice,
    StepDone,
    StepTimes,
    UnifiedMemory,
)


@pytest.fixture
def sink():
    opened = PrometheusSink(0, "127.0.0.1", "mine")
    yield opened
    opened.close()


def scrape(sink):
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_the_newest_values_are_served(sink):
    sink.handle(StepDone(1, 2.5, 1e-4, 0.5, 4, 1, 0, 0.2))
    sink.handle(StepDone(2, 1.5, 1e-4, 0.5, 4, 1, 0, 0.2))
    sink.handle(StepTimes(2, 2, {"data": 0.05, "compute": 0.15}, 0.2))
    sink.handle(LossParts(2, {'a "b"': {"loss": 1.5, "samples": 4}, "c": {"samples": 0}}, {}))
    sink.handle(MemoryRoles(2, {"device": {"weights": 7}}))
    sink.handle(HealthChanged(2, "data_waits", "notice", "slow"))
    sink.handle(Notice("not a number"))
    found = scrape(sink)
    assert found['gracetune_step{run="mine"}'] == "2.0"
    assert found['gracetune_loss{run="mine"}'] == "1.5"
    assert found['gracetune_step_phase_seconds{phase="data",run="mine"}'] == "0.05"
    assert found['gracetune_loss_by_dataset{dataset="a \\"b\\"",run="mine"}'] == "1.5"
    assert found['gracetune_memory_role_bytes{role="weights",run="mine",tier="device"}'] == "7.0"
    assert found['gracetune_health{check="data_waits",run="mine"}'] == "1.0"
    assert not any('dataset="c"' in name for name in found)


def test_sensors_and_managed_memory_are_served(sink):
    gpu = {"index": 0, "temperature_c": 70, "throttle": ["power brake"]}
    sink.handle(DeviceSensors(2, (gpu,), {"memory_available": 5.0}))
    zeros = {"light": 0, "full": 0}
    sink.handle(UnifiedMemory(2, 1, 0, 9, 4, 6, 8, 2, 0, 0, zeros, {"applied": 3}))
    found = scrape(sink)
    assert found['gracetune_gpu_temperature_c{gpu="0:0",run="mine"}'] == "70.0"
    assert found['gracetune_gpu_throttled{gpu="0:0",run="mine"}'] == "1.0"
    assert found['gracetune_uvm_managed_current_bytes{run="mine"}'] == "4.0"
    assert found['gracetune_uvm_managed_denied{run="mine"}'] == "2.0"
    assert found['gracetune_uvm_hints{outcome="applied",run="mine"}'] == "3.0"


def test_a_port_in_use_is_an_error_that_names_the_setting(sink):
    with pytest.raises(ConfigError, match=r"logging\.prometheus_port is \d+ on 127.0.0.1"):
        PrometheusSink(sink.port, "127.0.0.1", "other")
