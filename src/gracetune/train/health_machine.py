"""Health checks of a run's speed and of its machine: waits, clocks, disk and memory.

`health_checks.py` explains what a check is, and has those of training.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from typing import TYPE_CHECKING

from gracetune.train.health_checks import FINE, UNKNOWN, Finding
from gracetune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.events.types import HealthLevel, StepTimes
    from gracetune.train.health_checks import Measurements, NoFinding, RunFacts


# Speed


class DataWaits:
    """Steps that wait for batches."""

    name = "data_waits"

    def __init__(self, facts: RunFacts, limit: float) -> None:
        self._facts = facts
        self._limit = limit
        self._streak = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the time that steps wait for data with their total."""
        times = measured.times
        if times is None or times.total <= 0 or times.step <= self._facts.start_step + 2:
            return UNKNOWN
        waited = times.seconds.get("data", 0.0)
        share = waited / times.total
        self._streak = self._streak + 1 if share > self._limit else 0
        if self._streak < 2:
            return FINE
        if self._facts.caches_in_memory:
            advice = (
                "Decoding or augmenting is slow: set augmentations_cache_mode: static, raise "
                "datasets[].in_memory.num_workers, or use smaller files."
            )
        else:
            advice = (
                "The cache on disk is slow: set cache_config.vae_cache_type: memory, put "
                "cache_config.cache_dir on a local disk, or raise cache_config.prefetch_budget_gb."
            )
        return Finding(
            f"the data loader is slow: steps wait {share:.0%} of their time for data "
            f"({format_seconds(waited)} of {format_seconds(times.total)})",
            advice,
            values={"share": share, "seconds": waited},
        )


class WeightWaits:
    """Steps that wait for streamed weights or offloaded activations."""

    name = "weight_waits"

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._streak = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the time that steps wait for weights with their total."""
        times = measured.times
        if times is None or times.total <= 0:
            return UNKNOWN
        share = times.seconds.get("weights", 0.0) / times.total
        self._streak = self._streak + 1 if share > self._limit else 0
        if self._streak < 2:
            return FINE
        return Finding(
            f"steps wait {share:.0%} of their time for weights from host memory",
            "Give the run more plan.device_memory, try plan.compile: always, or a larger "
            "train.batch_size, which computes longer per copy.",
            values={"share": share},
        )


class SlowDown:
    """Steps that have become slower than the first steps of this process.

    Steps of earlier processes do not count: the machine may be another one.
    """

    name = "slow_down"
    SKIP, BASELINE, RECENT, MIN_SECONDS = 3, 20, 20, 0.05

    def __init__(self, facts: RunFacts, factor: float) -> None:
        self._start_step = facts.start_step
        self._factor = factor
        self._skipped = 0
        self._baseline: list[float] = []
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._early: Mapping[str, float] = {}

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the time per sample of the last steps with that of the first ones."""
        for done in measured.steps:
            if done.step <= self._start_step:
                continue
            if self._skipped < self.SKIP:  # compilation and warm-up
                self._skipped += 1
                continue
            seconds = done.seconds / max(1, done.samples)
            if len(self._baseline) < self.BASELINE:
                self._baseline.append(seconds)
                if measured.times is not None:
                    self._early = measured.times.seconds
            self._recent.append(seconds)
        if not measured.steps or len(self._baseline) < self.BASELINE:
            return UNKNOWN
        before, now = statistics.median(self._baseline), statistics.median(self._recent)
        samples = max(1, measured.steps[-1].samples)
        if now < self._factor * before or (now - before) * samples < self.MIN_SECONDS:
            return FINE
        phase, extra = self._grown(measured.times)
        where = f", mostly in {phase} (+{format_seconds(extra)} per step)" if phase else ""
        slower = "times as long as at the start of the run"
        if self._start_step:
            slower = "times as long as after the run was resumed"
        return Finding(
            f"steps take {now / before:.1f} {slower}"
            f" ({format_seconds(now * samples)} instead of {format_seconds(before * samples)})"
            f"{where}",
            _SLOW_ADVICE.get(phase, _SLOW_ADVICE[""]),
            values={"factor": now / before, "seconds": now * samples},
        )

    def _grown(self, times: StepTimes | None) -> tuple[str, float]:
        if times is None or not self._early:
            return "", 0.0
        grown = {name: s - self._early.get(name, 0.0) for name, s in times.seconds.items()}
        phase = max(grown, key=lambda name: grown[name])
        return (phase, grown[phase]) if grown[phase] > 0 else ("", 0.0)


_SLOW_ADVICE = {
    "": "See the step times by phase, and the GPU's clocks and temperature.",
    "data": "See `data_waits`; another process may use the disk or the CPU.",
    "weights": "Another process may use the link or host memory; see plan.device_memory.",
    "host": "Another rank is slow; a notice names it.",
    "compute": "Look for throttling, another process on the GPU or the CPU, or longer samples.",
    "optimizer": "Optimizer state may be in host memory: see optimizer.state.",
    "other": "Logging or a tracker is slow: raise logging.every.",
}


# The machine


class Throttling:
    """A GPU that lowers its clocks because of heat or power."""

    name = "throttling"
    SLOW_CLOCK = 0.75

    def __init__(self) -> None:
        self._streak = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Look at the reasons that the driver gives for lower clocks."""
        if measured.sensors is None or not measured.sensors.gpus:
            return UNKNOWN
        found = next(filter(None, map(self._throttled, measured.sensors.gpus)), None)
        self._streak = self._streak + 1 if found else 0
        return FINE if found is None or self._streak < 2 else found

    def _throttled(self, gpu: Mapping[str, object]) -> Finding | None:
        reasons = gpu.get("throttle")
        if not isinstance(reasons, list | tuple) or not reasons:
            return None
        clock, fastest = _number(gpu.get("sm_clock_mhz")), _number(gpu.get("max_sm_clock_mhz"))
        is_slow = clock > 0 and fastest > 0 and clock < self.SLOW_CLOCK * fastest
        # Large GPUs run at their power limit all day; that alone is not a problem.
        if set(reasons) <= {"software power cap", "sync boost"} and not is_slow:
            return None
        heat = f" at {_number(gpu['temperature_c']):.0f} °C" if "temperature_c" in gpu else ""
        clocks = f" to {clock:.0f} of {fastest:.0f} MHz" if clock and fastest else ""
        return Finding(
            f"GPU {gpu.get('index', 0)} ({gpu.get('name', '')}) is throttling: it lowers its clock"
            f"{clocks} because of {', '.join(map(str, reasons))}{heat}",
            "Improve its cooling or raise its power limit (nvidia-smi -q -d PERFORMANCE shows "
            "both). Training is correct, only slower.",
            values={"sm_clock_mhz": clock, "temperature_c": _number(gpu.get("temperature_c"))},
        )


class DiskSpace:
    """Too little space for the next checkpoints."""

    name = "disk_space"
    SPARE = 16 * 2**20

    def __init__(self, facts: RunFacts, min_gb: float) -> None:
        self._need = facts.checkpoint_nbytes + self.SPARE
        self._least = min_gb * 2**30

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the free space with the size of a checkpoint."""
        host = {} if measured.sensors is None else measured.sensors.host
        if "output_free" not in host:
            return UNKNOWN
        free, need = host["output_free"], self._need
        values = {"free": free, "checkpoint": need}
        advice = (
            "Free some space on the disk of output_dir, or lower train.keep_checkpoints and "
            "train.keep_adapters."
        )
        text = f"{format_bytes(int(free))} are free on the disk of output_dir, and a checkpoint"
        if free < 1.5 * need:
            cause = f"{text} takes {format_bytes(int(need))}: the disk is almost full"
            return Finding(cause, advice, "stopping", values)
        if free < max(4 * need, self._least):
            return Finding(f"{text} takes {format_bytes(int(need))}", advice, values=values)
        if host.get("cache_free", math.inf) < self._least:
            cause = f"{format_bytes(int(host['cache_free']))} are free on the disk of the cache"
            advice = "Free some space, or move cache_config.cache_dir."
            return Finding(cause, advice, values=values, kind="cache")
        return FINE


class PageCache:
    """Files that are read again and again, because memory cannot hold them."""

    name = "page_cache"
    BYTES_PER_S, PRESSURE, WAIT = 10e6, 5.0, 0.1

    def __init__(self, facts: RunFacts) -> None:
        self._page_bytes = facts.page_bytes
        self._streak = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Look at refaults of the page cache, together with waits for the disk."""
        host = {} if measured.sensors is None else measured.sensors.host
        if "refaults_per_s" not in host:
            return UNKNOWN
        rate = host["refaults_per_s"] * self._page_bytes
        times = measured.times
        waits = times.seconds.get("data", 0.0) / times.total if times and times.total else 0.0
        hurts = host.get("pressure_io", 0.0) > self.PRESSURE or waits > self.WAIT
        self._streak = self._streak + 1 if rate > self.BYTES_PER_S and hurts else 0
        if self._streak < 2:
            return FINE
        return Finding(
            f"the page cache is thrashing: {rate / 1e6:.0f} MB/s of files are read again, because "
            "memory is too small to keep them",
            "Free host memory, or set cache_config.vae_cache_type: disk, which reads each entry "
            "once and past the page cache; datasets[].in_memory.compression makes files smaller.",
            values={"bytes_per_s": rate, "pressure_io": host.get("pressure_io", 0.0)},
        )


class HostMemory:
    """Host memory, or the memory of the process's control group, that is about to run out."""

    name = "host_memory"
    NOTICE, DEGRADE, STOP, SWAP = 0.10, 0.05, 0.02, 5e6

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._streak = 0
        self._swaps = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Compare the available memory with the total, of the host and of the group."""
        host = {} if measured.sensors is None else measured.sensors.host
        if not host.get("memory_total"):
            return UNKNOWN
        share = host["memory_available"] / host["memory_total"]
        swapped = host.get("swapped_in_per_s", 0.0)
        self._swaps = self._swaps + 1 if swapped > self.SWAP else 0
        left, of, where = host["memory_available"], host["memory_total"], "host memory"
        limit = host.get("cgroup_limit", 0.0)
        if limit and host.get("cgroup_used") is not None and limit <= host["memory_total"]:
            free = max(0.0, limit - host["cgroup_used"])
            if free / limit < share:
                share, left, of, where = free / limit, free, limit, "the memory of the cgroup"
        if share >= self.NOTICE:
            self._streak = 0
            return FINE if self._swaps < 2 else self._swapping(swapped)
        self._streak += 1
        level: HealthLevel = "notice"
        if share < self.STOP and self._streak > 2:
            level = "stopping"
        elif share < self.DEGRADE and self._streak > 1:
            level = "degraded"
        return Finding(
            f"{where} is almost full: {format_bytes(int(left))} of {format_bytes(int(of))} are left"
            + (" (the kernel kills processes at 0)" if share < self.DEGRADE else ""),
            self._advice(),
            level,
            {"available": left, "total": of},
        )

    def _swapping(self, rate: float) -> Finding:
        return Finding(
            f"the machine swaps: {rate / 1e6:.0f} MB/s are read back from its swap space, because "
            "host memory does not suffice for all processes",
            self._advice(),
            values={"swapped_in_per_s": rate},
            kind="swap",
        )

    def _advice(self) -> str:
        text = "End other processes on the machine"
        if self._facts.caches_in_memory:
            text += "; lower cache_config.host_budget_gb, or set cache_config.vae_cache_type: disk"
        if self._facts.is_planned:
            text += "; lower plan.host_memory"
        return f"{text}."


class DeviceMemory:
    """Device memory that is so full that torch's allocator has to free and try again."""

    name = "device_memory"

    def __init__(self) -> None:
        self._retries = 0
        self._streak = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Count the retries of torch's allocator since the last look."""
        if measured.memory is None or not measured.memory.device_peak:
            return UNKNOWN
        new = measured.alloc_retries - self._retries
        self._retries = measured.alloc_retries
        self._streak = self._streak + 1 if new > 0 else 0
        if not self._streak:
            return FINE
        return Finding(
            f"device memory is full: torch's allocator had to free its cache {new} times since the "
            f"last look, with {format_bytes(measured.memory.device_peak)} in use at most",
            "Lower plan.device_memory or train.batch_size, or end other processes on the GPU.",
            "degraded" if self._streak > 1 else "notice",
            {"retries": new},
        )


class DeviceShared:
    """Another process that computes on one of the run's GPUs."""

    name = "device_shared"
    MEMORY = 512 * 2**20

    def __init__(self) -> None:
        self._streak = 0

    def look(self, measured: Measurements) -> Finding | NoFinding:
        """Look for other processes that the driver lists for a GPU."""
        seen = () if measured.sensors is None else measured.sensors.gpus
        gpus = [gpu for gpu in seen if "other_processes" in gpu]
        if not gpus:
            return UNKNOWN
        ranks = Counter(gpu.get("index") for gpu in gpus)  # two ranks may have one GPU
        shared = next((g for g in gpus if self._is_shared(g, ranks[g.get("index")] - 1)), None)
        self._streak = self._streak + 1 if shared is not None else 0
        if shared is None or self._streak < 2:
            return FINE
        count, memory = int(_number(shared["other_processes"])), shared.get("other_memory")
        who = "another process computes" if count == 1 else f"{count} other processes compute"
        takes = f", with {format_bytes(int(_number(memory)))} of its memory" if memory else ""
        return Finding(
            f"{who} on GPU {shared.get('index', 0)}{takes}: steps are slower, and memory may run "
            "out",
            "End it (nvidia-smi lists it), or choose another GPU with CUDA_VISIBLE_DEVICES.",
            values={"processes": count, "memory": _number(memory)},
        )

    def _is_shared(self, gpu: Mapping[str, object], own: int) -> bool:
        # A process with little memory, such as a monitor, does not compute.
        memory = gpu.get("other_memory")
        is_small = memory is not None and _number(memory) < self.MEMORY
        return _number(gpu["other_processes"]) > own and not is_small


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
