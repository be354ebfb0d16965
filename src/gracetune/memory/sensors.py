"""Read the sensors of a machine: GPU clocks and temperature, host memory, pressure, disk space.

GPU values come from NVML (package `nvidia-ml-py`, extra `nvml`), host values from files under /proc
and /sys that need no privileges. A value that cannot be read is absent, and
`SensorReading.unavailable` has the reason. Paths and the NVML module are arguments, so that tests
can use recordings of other machines; a run takes any object with the method `read`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gracetune.memory.platform import import_nvml, read_host, text_or_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

THROTTLE_REASONS = {
    0x0000000000000004: "software power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "sync boost",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "power brake",
}
"""Bits of `nvmlDeviceGetCurrentClocksEventReasons` that mean lower clocks than the GPU could run.
Idle clocks, clocks set by the user and display clocks are left out."""
PRESSURES = ("memory", "io", "cpu")
"""Files of the kernel's pressure stall information (PSI)."""
_AVERAGE = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SensorReading:
    """The values of all sensors at one moment; `DeviceSensors` (events/types.py) names the keys."""

    gpus: tuple[Mapping[str, object], ...] = ()
    host: Mapping[str, float] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)


class Sensors(Protocol):
    """Reads the sensors of this process's machine; tests pass their own."""

    def read(self) -> SensorReading:
        """Return the current values; called every `logging.every` steps."""
        ...


class MachineSensors:
    """The sensors of the machine that this process runs on."""

    def __init__(
        self,
        gpu: GpuSensors | str,
        disks: Mapping[str, Path],
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gpu` is the reason as text if there is none; `disks` maps names to folders on them."""
        self._gpu = gpu
        self._disks = disks
        self._proc = proc
        self._sys = sys
        self._clock = clock
        self._cgroup = find_memory_cgroup(proc, sys / "fs/cgroup")
        self._counters: dict[str, tuple[float, int]] = {}
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read(self) -> SensorReading:
        """Return the current values of all sensors."""
        gpus: tuple[Mapping[str, object], ...] = ()
        unavailable: dict[str, str] = {}
        if isinstance(self._gpu, str):
            unavailable["gpu"] = self._gpu
        else:
            gpus = (self._gpu.read(),)
        host = {**self._memory(), **self._pressure(), **self._disk_space()}
        refaults = self._per_s("refaults", self._refaults())
        if refaults is None:
            unavailable["refaults"] = "the kernel does not count page-cache refaults"
        else:
            host["refaults_per_s"] = refaults
        swapped = self._per_s("swap", _counter(self._proc / "vmstat", ("pswpin",)))
        if swapped is not None:
            host["swapped_in_per_s"] = swapped * self._page_bytes
        if not any(name.startswith("pressure_") for name in host):
            unavailable["pressure"] = f"{self._proc / 'pressure'} does not exist"
        times = os.times()
        host["cpu_s"] = times.user + times.system
        return SensorReading(gpus, host, unavailable)

    def _memory(self) -> dict[str, float]:
        found = read_host(self._proc, self._sys, self._page_bytes)
        values: dict[str, float] = {
            "memory_available": found.usable_bytes(),
            "memory_total": found.total_host_bytes(),
        }
        swap = re.findall(
            r"^Swap(Total|Free):\s+(\d+) kB", text_or_empty(self._proc / "meminfo"), re.M
        )
        if len(swap) == 2:
            sizes = {name: int(kib) * 1024 for name, kib in swap}
            values["swap_used"] = sizes["Total"] - sizes["Free"]
        if self._cgroup is not None:
            values.update(self._cgroup.read())
        return values

    def _pressure(self) -> dict[str, float]:
        found = {}
        for name in PRESSURES:
            match = _AVERAGE.search(text_or_empty(self._proc / "pressure" / name))
            if match:
                found[f"pressure_{name}"] = float(match[1])
        return found

    def _disk_space(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, folder in self._disks.items():
            try:
                found[f"{name}_free"] = shutil.disk_usage(folder).free
            except OSError:  # the folder does not exist yet
                continue
        return found

    def _refaults(self) -> int | None:
        """Return how many pages were read again because the page cache had dropped them."""
        total = None if self._cgroup is None else self._cgroup.refaults()
        if total is None:
            total = _counter(self._proc / "vmstat", ("workingset_refault_file",))
        return total

    def _per_s(self, name: str, total: int | None) -> float | None:
        """Return by how much a counter has grown per second since the last call."""
        if total is None:
            return None
        now = self._clock()
        last = self._counters.get(name)
        self._counters[name] = now, total
        if last is None or now <= last[0]:
            return 0.0
        return max(0, total - last[1]) / (now - last[0])


def open_sensors(device: int | None, output_dir: Path, cache_dir: Path) -> MachineSensors:
    """Open the sensors of a run; `device` is the CUDA device, None on a CPU."""
    disks = {"output": output_dir, "cache": cache_dir}
    if device is None:
        return MachineSensors("the run has no GPU", disks)
    return MachineSensors(open_gpu_sensors(import_nvml(), device), disks)


# The memory control group


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """The files of the control group that limits this process's memory, in version 1 or 2."""

    folder: Path
    used: str
    limit: str

    def read(self) -> dict[str, float]:
        """Return the bytes used and the limit, and how often the kernel has killed a process."""
        found: dict[str, float] = {}
        used, limit = _number(self.folder / self.used), _number(self.folder / self.limit)
        if used is not None:
            # The kernel drops pages of files, active ones too, before it kills a process.
            cached = [
                _counter(self.folder / "memory.stat", (f"total_{kind}", kind)) or 0
                for kind in ("inactive_file", "active_file")
            ]
            found["cgroup_used"] = max(0, used - sum(cached))
        if limit is not None and limit < 1 << 60:  # version 1 has a huge number for "no limit"
            found["cgroup_limit"] = limit
        kills = self.oom_kills()
        if kills is not None:
            found["oom_kills"] = kills
        return found

    def oom_kills(self) -> int | None:
        """Return how many processes of this group the kernel has killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            kills = _counter(self.folder / name, ("oom_kill",))
            if kills is not None:
                return kills
        return None

    def refaults(self) -> int | None:
        """Return how many pages of files had to be read again."""
        names = ("workingset_refault_file", "total_workingset_refault_file")
        return _counter(self.folder / "memory.stat", names)


def find_memory_cgroup(proc: Path, mount: Path) -> MemoryCgroup | None:
    """Return the memory control group of this process; None if the machine has none."""
    groups = text_or_empty(proc / "self/cgroup")
    for pattern, root, used, limit in (
        (r"^0::(/.*)$", mount, "memory.current", "memory.max"),
        (
            r"^\d+:[\w,]*\bmemory\b[\w,]*:(/.*)$",
            mount / "memory",
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
        ),
    ):
        match = re.search(pattern, groups, re.MULTILINE)
        # In a container, the group's path is that of the host, and its files are at the mount.
        for folder in () if match is None else (root / match[1].lstrip("/"), root):
            if (folder / used).is_file():
                return MemoryCgroup(folder, used, limit)
    return None


# GPUs


class GpuSensors:
    """Reads one GPU through NVML, which stays open for the run."""

    def __init__(self, nvml: Any, handle: object, index: int) -> None:
        self._nvml = nvml
        self._handle = handle
        self._index = index
        self._name = _decode(self._ask("nvmlDeviceGetName"))
        self._max_clock = self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
        self._power_limit = self._ask("nvmlDeviceGetEnforcedPowerLimit")

    def read(self) -> dict[str, object]:
        """Return the values that the driver reports; names as in `DeviceSensors.gpus`."""
        values: dict[str, object] = {"index": self._index, "name": self._name}
        self._add(values, "temperature_c", self._ask("nvmlDeviceGetTemperature", 0))
        clock = self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)
        self._add(values, "sm_clock_mhz", clock)
        self._add(values, "max_sm_clock_mhz", self._max_clock)
        self._add(values, "power_w", self._ask("nvmlDeviceGetPowerUsage"), 1e-3)
        self._add(values, "power_limit_w", self._power_limit, 1e-3)
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        if rates is not None:
            values["utilization"] = rates.gpu / 100
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        if memory is not None:
            values["memory_used"], values["memory_total"] = int(memory.used), int(memory.total)
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        if processes is not None:
            values |= _other_processes(processes)
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # the name of this function in drivers before 535
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is not None:
            values["throttle"] = [text for bit, text in THROTTLE_REASONS.items() if bits & bit]
        return values

    @staticmethod
    def _add(values: dict[str, object], name: str, value: Any, factor: float = 1) -> None:
        if value is not None:
            values[name] = value * factor

    def _ask(self, function: str, *arguments: object) -> Any:
        """Call a function of NVML; None if the driver or the bindings do not have it."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None


def open_gpu_sensors(nvml: Any, device: int) -> GpuSensors | str:
    """Open NVML for one CUDA device; return the reason as text if that fails.

    NVML and CUDA may number devices differently, so the device is found by its UUID.
    """
    if nvml is None:
        return "pynvml is not installed (pip install 'gracetune[nvml]')"
    import torch

    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                return GpuSensors(nvml, nvml.nvmlDeviceGetHandleByUUID(name), device)
            except nvml.NVMLError as error:
                reason = f"NVML does not know the device: {error}"
    except (nvml.NVMLError, AttributeError) as error:
        return f"NVML did not start: {error}"
    return reason


def _other_processes(processes: Sequence[Any]) -> dict[str, object]:
    """Return the number of other processes on a GPU, and the memory of those that NVML knows.

    A container may have other process numbers than the driver. Then this process cannot be told
    from others, so one of them is counted as this one and their memory is left out.
    """
    others = [one for one in processes if one.pid != os.getpid()]
    if len(others) == len(processes):
        return {"other_processes": max(0, len(processes) - 1)}
    known = [one.usedGpuMemory for one in others if one.usedGpuMemory]
    return {"other_processes": len(others), "other_memory": sum(known)}


def _decode(name: str | bytes | None) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name or ""


# Files


def _number(path: Path) -> int | None:
    text = text_or_empty(path).strip()
    return int(text) if text.isdecimal() else None


def _counter(path: Path, names: Sequence[str]) -> int | None:
    """Return the first of some counters in a file of `name value` lines."""
    text = text_or_empty(path)
    for name in names:
        match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
        if match:
            return int(match[1])
    return None
