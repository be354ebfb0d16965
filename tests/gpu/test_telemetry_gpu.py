"""Telemetry on a GPU: times by CUDA events, sensors of NVML, and no sync in a step."""

import pytest

from gracetune.events.types import DeviceSensors, MemoryRoles, StepDone, StepTimes, UnifiedMemory
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu


def test_a_run_on_a_gpu_reports_times_sensors_and_memory(tiny_run, recorder):
    run = tiny_run(adapter={"rank": 4}, train={"max_train_steps": 20}, logging={"every": 5})
    run_training(run, sinks=[recorder], telemetry={"interval_s": 0.0})
    times = recorder.of(StepTimes)[-1]
    assert times.steps == 5
    assert times.seconds["compute"] > 0
    assert times.seconds["optimizer"] > 0
    done = recorder.of(StepDone)[-1]
    assert times.total == pytest.approx(done.seconds, rel=0.5)
    unified = recorder.of(UnifiedMemory)[-1]
    assert unified.headroom > 0
    assert unified.cap > 0
    assert recorder.of(MemoryRoles)[-1].roles["device"]["trained"] > 0
    pytest.importorskip("pynvml")
    (gpu,) = recorder.of(DeviceSensors)[-1].gpus
    assert gpu["temperature_c"] > 0
    assert gpu["memory_used"] > 0
    assert isinstance(gpu["throttle"], list)
