import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gracetune.memory.sensors import (
    GpuSensors,
    MachineSensors,
    find_memory_cgroup,
    open_gpu_sensors,
    open_sensors,
)

MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n"


@pytest.fixture
def machine(tmp_path):
    """Return the folders /proc and /sys of a recorded machine, and a function that writes there."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/meminfo", MEMINFO)
    return tmp_path / "proc", tmp_path / "sys", write


def test_host_values_come_from_proc_and_sys(machine):
    proc, sys, write = machine
    write("proc/self/cgroup", "0::/job\n")
    write("sys/fs/cgroup/job/memory.current", "600\n")
    write("sys/fs/cgroup/job/memory.max", "1000\n")
    write(
        "sys/fs/cgroup/job/memory.stat",
        "inactive_file 60\nactive_file 40\nworkingset_refault_file 7\n",
    )
    write("sys/fs/cgroup/job/memory.events", "oom 3\noom_kill 2\n")
    write("proc/pressure/io", "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=9\n")
    clock = [10.0]
    sensors = MachineSensors(
        "none", {"output": proc, "cache": proc / "no"}, proc, sys, lambda: clock[0]
    )
    host = sensors.read().host
    assert host["memory_available"] == 500  # what the cgroup leaves: 1000 - 600 + 100
    assert (host["memory_total"], host["swap_used"]) == (1000 * 1024, 30 * 1024)
    assert (host["cgroup_used"], host["cgroup_limit"], host["oom_kills"]) == (500, 1000, 2)
    assert (host["pressure_io"], host["refaults_per_s"]) == (12.5, 0)
    assert host["output_free"] > 0
    assert "cache_free" not in host
    clock[0] = 12.0
    write("sys/fs/cgroup/job/memory.stat", "workingset_refault_file 107\n")
    assert sensors.read().host["refaults_per_s"] == 50


def test_the_first_version_of_cgroups_is_read_too(machine):
    proc, sys, write = machine
    write("proc/self/cgroup", "4:memory:/job\n0::/\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "600")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712")
    write("sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n")
    group = find_memory_cgroup(proc, sys / "fs/cgroup")
    assert group.read() == {"cgroup_used": 600, "oom_kills": 4}  # the limit means none


def test_what_cannot_be_read_is_absent_with_a_reason(machine):
    proc, sys, _ = machine
    reading = MachineSensors("the run has no GPU", {}, proc, sys).read()
    assert reading.gpus == ()
    assert set(reading.unavailable) == {"gpu", "refaults", "pressure"}
    assert "refaults_per_s" not in reading.host


def test_refaults_of_the_whole_machine_count_without_a_cgroup(machine):
    proc, sys, write = machine
    clock = [0.0]
    write("proc/vmstat", "nr_free_pages 1\nworkingset_refault_file 10\n")
    sensors = MachineSensors("none", {}, proc, sys, lambda: clock[0])
    sensors.read()
    write("proc/vmstat", "workingset_refault_file 40\n")
    clock[0] = 3.0
    assert sensors.read().host["refaults_per_s"] == 10


def test_pages_that_are_read_back_from_swap_are_counted(machine):
    proc, sys, write = machine
    clock = [0.0]
    write("proc/vmstat", "pswpin 10\n")
    sensors = MachineSensors("none", {}, proc, sys, lambda: clock[0])
    assert sensors.read().host["swapped_in_per_s"] == 0
    write("proc/vmstat", "pswpin 40\n")
    clock[0] = 3.0
    assert sensors.read().host["swapped_in_per_s"] == 10 * os.sysconf("SC_PAGE_SIZE")


def test_the_sensors_of_this_machine_can_be_read(tmp_path):
    reading = open_sensors(None, tmp_path, tmp_path).read()
    assert 0 < reading.host["memory_available"] <= reading.host["memory_total"]
    assert reading.host["output_free"] > 0
    assert reading.host["cpu_s"] > 0


class Nvml:
    """The functions of pynvml, with the values of one throttled GPU."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1

    def __getattr__(self, name):
        values = {
            "nvmlDeviceGetName": b"H200",
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetClockInfo": 900,
            "nvmlDeviceGetTemperature": 91,
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3, total=10),
            "nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x4 | 0x1,
        }
        if name not in values:
            raise AttributeError(name)
        return lambda handle, *_: values[name]


def test_gpu_values_are_named_and_scaled():
    read = GpuSensors(Nvml(), object(), 2).read()
    assert read == {
        "index": 2,
        "name": "H200",
        "temperature_c": 91,
        "sm_clock_mhz": 900,
        "max_sm_clock_mhz": 1980,
        "power_w": 350.0,
        "utilization": 0.5,
        "memory_used": 3,
        "memory_total": 10,
        "throttle": ["software power cap", "hardware thermal slowdown"],
    }


@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        ([os.getpid()], {"other_processes": 0, "other_memory": 0}),
        ([1, os.getpid()], {"other_processes": 1, "other_memory": 7}),
        ([1, 2], {"other_processes": 1}),  # one of them is this process, under another number
        ([], {"other_processes": 0}),
    ],
)
def test_other_processes_on_the_gpu_are_counted(pids, expected):
    nvml = Nvml()
    found = [SimpleNamespace(pid=pid, usedGpuMemory=7) for pid in pids]
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: found
    read = GpuSensors(nvml, object(), 0).read()
    assert {name: read[name] for name in read if name.startswith("other")} == expected


def test_a_missing_nvml_is_named():
    assert "pip install 'gracetune[nvml]'" in open_gpu_sensors(None, 0)


def test_nvml_without_a_driver_gives_a_reason():
    pynvml = pytest.importorskip("pynvml")
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    assert "NVML did not start" in open_gpu_sensors(pynvml, 0)
