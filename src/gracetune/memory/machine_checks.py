"""The checks of `gracetune diagnose`; each returns a `MachineFinding` with a status and advice.

Host checks read versions, environment variables, memory sizes, page settings and NUMA nodes. They
do not import torch, so they also work where importing it fails. Device checks use and time device
memory through a `DeviceBench`; tests build one on the simulated driver.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from gracetune.memory.driver import HOST, Advice, PointerKind
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.platform import Link, text_or_empty
from gracetune.units import GIB, KIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gracetune.memory.driver import Driver
    from gracetune.memory.managed_pool import ManagedPool
    from gracetune.memory.platform import Platform


Figure = int | float | str | bool | None
"""Type of a measured or read value in the JSON report of `gracetune diagnose`."""


class Status(StrEnum):
    """Result of a check of `gracetune diagnose`."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """The check was not made; the finding's text says why."""


STATUS_MARKS = MappingProxyType({"OK": "✅", "WARN": "⚠️", "FAIL": "❌", "SKIP": "⏭️"})
"""Emoji of each status in the JSON report, for existing GH200 checklists that expect them."""


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """Result of one check of `gracetune diagnose`."""

    name: str
    status: Status
    text: str
    """Result of the check in one sentence."""
    advice: str = ""
    """Advice to the user; empty if there is nothing to do."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Measured values by name, for the JSON report."""


def ok(name: str, text: str, **figures: Figure) -> MachineFinding:
    """Return a finding with status OK, which needs no action."""
    return MachineFinding(name, Status.OK, text, "", figures)


def warn(name: str, text: str, advice: str, **figures: Figure) -> MachineFinding:
    """Return a finding with status WARN: something works, but not as well as it could."""
    return MachineFinding(name, Status.WARN, text, advice, figures)


def fail(name: str, text: str, advice: str, **figures: Figure) -> MachineFinding:
    """Return a finding with status FAIL: something does not work."""
    return MachineFinding(name, Status.FAIL, text, advice, figures)


def skip(name: str, text: str, advice: str = "", **figures: Figure) -> MachineFinding:
    """Return a finding with status SKIP, for a check that was not made."""
    return MachineFinding(name, Status.SKIP, text, advice, figures)


def gb_per_s(rate: float) -> float:
    """Convert bytes per second to GB/s (10^9 bytes/s), rounded to one decimal."""
    return round(rate / 1e9, 1)


def exit_code(findings: Sequence[MachineFinding], *, has_gpu: bool, allow_cpu: bool) -> int:
    """Return exit code 1 if a check failed, or if there is no GPU and `allow_cpu` is False."""
    failed = any(finding.status is Status.FAIL for finding in findings)
    return int(failed or not (has_gpu or allow_cpu))


def build_report(
    findings: Sequence[MachineFinding], code: int, date: str, version: str
) -> dict[str, object]:
    """Return the JSON report of `gracetune diagnose`, without host name, user name or paths."""
    counts = Counter(finding.status for finding in findings)
    return {
        "tool": "gracetune diagnose",
        "version": version,
        "date": date,
        "exit_code": code,
        "summary": {status.lower(): counts[status] for status in Status},
        "checks": [
            {
                "number": number,
                "name": finding.name,
                "status": str(finding.status),
                "mark": STATUS_MARKS[finding.status],
                "text": finding.text,
                "advice": finding.advice,
                "figures": dict(finding.figures),
            }
            for number, finding in enumerate(findings, start=1)
        ],
    }


def format_findings(findings: Sequence[MachineFinding]) -> Iterator[str]:
    """Yield the lines of text that `gracetune diagnose` prints."""
    width = max((len(finding.name) for finding in findings), default=0)
    for number, finding in enumerate(findings, start=1):
        yield f"{number:>2} {finding.status:<4} {finding.name:<{width}}  {finding.text}"
        if finding.advice:
            yield f"{'':>{width + 10}}-> {finding.advice}"


# Host checks

MIN_TORCH_VERSION = (2, 11)


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Linux kernel settings that matter for large host memory; unknown ones are empty."""

    release: str
    machine: str
    """CPU architecture, such as aarch64."""
    numa_balancing: str
    """Value of the sysctl `kernel.numa_balancing`; `0` is off."""
    huge_pages: str
    """Setting of transparent huge pages: `always`, `madvise` or `never`."""
    node_cpus: Mapping[int, frozenset[int]]
    """CPU numbers of each NUMA node."""
    gpu_driver: str = ""
    """Version of NVIDIA's kernel module."""


def read_kernel(proc: Path, sys: Path, release: str, machine: str) -> KernelInfo:
    """Read the kernel settings from /proc and /sys."""
    chosen = re.search(r"\[(\w+)\]", text_or_empty(sys / "kernel/mm/transparent_hugepage/enabled"))
    driver = re.search(
        r"NVRM version:.*?\s(\d+\.[\d.]+)\s", text_or_empty(proc / "driver/nvidia/version")
    )
    nodes = sys / "devices/system/node"
    return KernelInfo(
        release=release,
        machine=machine,
        numa_balancing=text_or_empty(proc / "sys/kernel/numa_balancing").strip(),
        huge_pages=chosen[1] if chosen else "",
        node_cpus={
            int(path.name.removeprefix("node")): _cpus(text_or_empty(path / "cpulist"))
            for path in sorted(nodes.glob("node[0-9]*"))
        },
        gpu_driver=driver[1] if driver else "",
    )


def _cpus(text: str) -> frozenset[int]:
    """Parse a CPU list in the kernel's format, such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def check_versions(versions: Mapping[str, str | None], kernel: KernelInfo) -> MachineFinding:
    """Check the versions of Python, torch and other packages; None means not installed."""
    figures = {name: version or "absent" for name, version in versions.items()}
    figures |= {"kernel": kernel.release, "machine": kernel.machine}
    figures |= {"GPU driver": kernel.gpu_driver or "absent"}
    text = ", ".join(f"{name} {version}" for name, version in figures.items())
    torch = versions["torch"]
    if torch is None:
        return fail(
            "versions", text, "Run `pip install 'torch>=2.11'`; training needs it.", **figures
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch)[:2])
    if numbers < MIN_TORCH_VERSION:
        return fail(
            "versions",
            text,
            "Run `pip install -U 'torch>=2.11'`; older versions cannot use managed pools.",
            **figures,
        )
    return ok("versions", text, **figures)


def check_environment(
    variables: Mapping[str, str], effects: Sequence[str], problem: str
) -> MachineFinding:
    """Check gracetune's environment variables.

    `variables` are those that are set, `effects` says what they do, and `problem` is the error
    message if one is invalid.
    """
    figures = dict(variables)
    if problem:
        return fail(
            "environment",
            problem,
            "Correct or unset it. `gracetune env` explains each variable.",
            **figures,
        )
    if not variables:
        return ok(
            "environment", "no gracetune variable is set; defaults apply (see `gracetune env`)"
        )
    return ok("environment", "; ".join(effects), **figures)


def check_torch_build(
    version: str | None,
    cuda: str | None,
    problem: str,
    device: str = "",
    *,
    allow_cpu: bool = False,
) -> MachineFinding:
    """Check that torch sees a GPU; `problem` is the error message if it does not.

    With `allow_cpu`, that is a warning: pip installs a CUDA build on machines without a GPU too.
    """
    name = "torch and CUDA"
    if version is None:
        advice = "Run `pip install 'torch>=2.11'`."
        return fail(name, f"torch cannot be imported: {problem}", advice)
    if cuda is None:
        return warn(
            name,
            f"torch {version} is built without CUDA",
            "Install a CUDA build of torch to use a GPU. On a machine without one this is fine.",
            cuda=None,
        )
    if problem:
        text = f"torch {version} (CUDA {cuda}) finds no device: {problem}"
        advice = "Check `nvidia-smi`, the driver's version and CUDA_VISIBLE_DEVICES."
        if allow_cpu:
            advice += " On a machine without a GPU this is fine."
        return (warn if allow_cpu else fail)(name, text, advice, cuda=cuda)
    text = f"torch {version} with CUDA {cuda} sees {device or 'a device'}"
    return ok(name, text, cuda=cuda, device=device)


def check_platform(platform: Platform) -> MachineFinding:
    """Report how host memory and device are connected, and how that was detected."""
    why = platform.reasons["link"]
    figures: dict[str, Figure] = {
        "link": platform.link.value,
        **{f"why_{name}": reason for name, reason in platform.reasons.items()},
    }
    text = f"{platform.link.value}: {why}"
    if platform.link is Link.NONE:
        return warn(
            "platform",
            text,
            "Without a GPU, training runs on the CPU and memory hints do nothing.",
            **figures,
        )
    if platform.link is Link.COPY:
        return warn(
            "platform",
            text,
            "Managed memory is not used here; gracetune uses explicit copies instead.",
            **figures,
        )
    return ok("platform", text, **figures)


def check_memory(platform: Platform, device_free: int) -> MachineFinding:
    """Check the free memory of device and host."""
    figures = {
        "device_bytes": platform.device_bytes,
        "device_free_bytes": device_free,
        "host_bytes": platform.host_bytes,
        "host_total_bytes": platform.host_total_bytes,
    }
    text = (
        f"device {format_bytes(device_free)} free of {format_bytes(platform.device_bytes)}, "
        f"host {format_bytes(platform.host_bytes)} available of "
        f"{format_bytes(platform.host_total_bytes)}"
    )
    if platform.link in (Link.NONE, Link.INTEGRATED):
        return ok("memory", text, **figures)
    if device_free < platform.device_bytes // 2:
        return warn(
            "memory", text, "Other processes use half of the device: see `nvidia-smi`.", **figures
        )
    if platform.host_bytes < platform.device_bytes:
        return warn(
            "memory",
            text,
            "The host has less memory available than the device; offloading will gain little.",
            **figures,
        )
    return ok("memory", text, **figures)


def check_pages(platform: Platform, kernel: KernelInfo) -> MachineFinding:
    """Check the kernel's page size and transparent huge pages."""
    huge_pages = kernel.huge_pages or "unknown"
    figures: dict[str, Figure] = {"page_bytes": platform.page_bytes, "huge_pages": huge_pages}
    text = f"pages of {platform.page_bytes // KIB} KiB, transparent huge pages {huge_pages}"
    if platform.link is Link.COHERENT and platform.page_bytes < 64 * KIB:
        return warn(
            "pages",
            text,
            "A kernel with 64 KiB pages moves memory over NVLink-C2C more efficiently.",
            **figures,
        )
    if kernel.huge_pages == "never" and platform.link is not Link.NONE:
        return warn("pages", text, "Set transparent huge pages to madvise or always.", **figures)
    return ok("pages", text, **figures)


def check_numa(platform: Platform, kernel: KernelInfo, affinity: frozenset[int]) -> MachineFinding:
    """Check that this process runs on the CPUs nearest to the device."""
    node = platform.host_node
    figures: dict[str, Figure] = {
        "host_node": node,
        "device_node": platform.device_node,
        "nodes": len(kernel.node_cpus),
        "numa_balancing": kernel.numa_balancing or "unknown",
    }
    if platform.link is Link.NONE:
        return skip("NUMA", "without a GPU no node is nearer than another", "", **figures)
    if node is not None:
        near = kernel.node_cpus.get(node, frozenset())
        if near and not affinity <= near:
            return warn(
                "NUMA",
                f"the device is near node {node}, but this process may run on other nodes",
                f"Start it with `numactl --cpunodebind={node} --membind={node}`.",
                **figures,
            )
    if platform.link is Link.COHERENT and kernel.numa_balancing not in ("0", ""):
        return warn(
            "NUMA",
            "automatic NUMA balancing is on; it moves pages without the driver's knowledge",
            "Run `sysctl kernel.numa_balancing=0` as root.",
            **figures,
        )
    where = (
        "the driver reports no node" if node is None else f"node {node} is nearest to the device"
    )
    return ok("NUMA", where, **figures)


@dataclass(frozen=True, slots=True)
class DeviceBench:
    """A GPU, and the operations on it that device checks call and time."""

    driver: Driver
    platform: Platform
    clock: Callable[[], float]
    """Returns the current time in seconds."""
    synchronize: Callable[[], object]
    """Waits for all work queued on the device."""
    copy: Callable[[int, int, int], None]
    """Copies bytes between pinned host and device memory; arguments: nbytes, source, target."""
    touch: Callable[[int, int, int], None]
    """Touches a memory range from the device or the CPU; arguments: pointer, nbytes, location."""
    stream: int = 0

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes on the device, synchronizing before and after."""
        self.synchronize()
        start = self.clock()
        work()
        self.synchronize()
        return self.clock() - start


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A memory range that torch can view as a CUDA tensor without a copy."""

    pointer: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class PoolTrial:
    """Result of `try_pool`, which allocates a tensor in a pool of CUDA managed memory."""

    kind: PointerKind
    """Kind of memory in which the tensor was allocated."""
    correct: bool
    """True if the device read back what it wrote."""
    live_bytes: int
    """Bytes of managed memory that the pool had allocated while the tensor existed."""
    held_bytes: int
    """Bytes of managed memory that closing the pool did not free."""


def try_pool(pool: ManagedPool, driver: Driver, nbytes: int) -> PoolTrial:
    """Test a pool of managed memory: allocate a tensor in it, use and free it, close the pool."""
    import torch

    with pool.allocating():
        tensor = torch.full((nbytes,), 7, dtype=torch.uint8, device=f"cuda:{pool.device}")
    kind = driver.pointer_kind(tensor.data_ptr())
    correct = int(tensor.sum(dtype=torch.int64)) == 7 * nbytes
    live_bytes = pool.counters().live_bytes
    del tensor
    return PoolTrial(kind, correct, live_bytes, pool.close().held_bytes)


def open_torch_bench(driver: Driver, platform: Platform, copy_bytes: int) -> DeviceBench:
    """Return the `DeviceBench` of a CUDA device, with copy buffers of `copy_bytes`."""
    import torch

    device = torch.device("cuda", platform.device)
    pinned = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
    resident = torch.empty(copy_bytes, dtype=torch.uint8, device=device)

    def copy(nbytes: int, source: int, target: int) -> None:
        assert HOST in (source, target), f"a copy from {source} to {target} does not cross the link"
        pair = (pinned, resident) if target == HOST else (resident, pinned)
        pair[0][:nbytes].copy_(pair[1][:nbytes], non_blocking=True)

    def touch(pointer: int, nbytes: int, location: int) -> None:
        if location == HOST:
            torch.cuda.synchronize(device)
            ctypes.memset(pointer, 1, nbytes)
        else:
            torch.as_tensor(DeviceBytes(pointer, nbytes), device=device).view(torch.int64).sum()

    return DeviceBench(
        driver=driver,
        platform=platform,
        clock=time.perf_counter,
        synchronize=lambda: torch.cuda.synchronize(device),
        copy=copy,
        touch=touch,
        stream=torch.cuda.current_stream(device).cuda_stream,
    )


# Device checks. All but the last use little memory; `check_oversubscription` allocates more than
# the device has and therefore runs only where that is safe.

MIN_COPY_RATE = {Link.COHERENT: 200e9, Link.MANAGED: 12e9, Link.COPY: 6e9}
"""Rate of pinned copies (bytes/s) below which `check_copies` warns, by type of connection."""
MIN_PREFETCH_GAIN = 5.0
"""Speed-up of a first touch by a prefetch below which `check_faults` warns."""
SWEEP_CHUNK_BYTES = 256 * MIB
"""Number of bytes that the oversubscription check prefetches and touches at a time."""
HOST_RESERVE_BYTES = 8 * GIB
"""Host memory in bytes that the oversubscription check leaves free."""


class DriverCallError(Exception):
    """Raised if a CUDA driver call in a check returns an error code."""


@contextmanager
def _managed_range(driver: Driver, nbytes: int) -> Iterator[int]:
    code, pointer = driver.allocate_managed(nbytes)
    _require_success(code, f"allocating {format_bytes(nbytes)} of managed memory")
    try:
        yield pointer
    finally:
        driver.free(pointer)


def _require_success(code: int, call: str) -> None:
    if code != 0:
        raise DriverCallError(f"{call} failed with code {code}")


def check_copies(bench: DeviceBench, nbytes: int) -> MachineFinding:
    """Time copies between pinned host memory and the device, in both directions."""
    name, device = "pinned copies", bench.platform.device
    bench.copy(nbytes, HOST, device)
    rate_in = nbytes / bench.seconds(lambda: bench.copy(nbytes, HOST, device))
    rate_out = nbytes / bench.seconds(lambda: bench.copy(nbytes, device, HOST))
    figures = {"in_gb_per_s": gb_per_s(rate_in), "out_gb_per_s": gb_per_s(rate_out)}
    text = f"{gb_per_s(rate_in)} GB/s in, {gb_per_s(rate_out)} GB/s out"
    if bench.platform.link in MIN_COPY_RATE and rate_in < MIN_COPY_RATE[bench.platform.link]:
        return warn(
            name,
            text,
            f"This is far too slow for a {bench.platform.link.value} link. Check `nvidia-smi -q` "
            "(PCIe width and generation, C2C links) and other programs that use the link.",
            **figures,
        )
    return ok(name, text, **figures)


def check_faults(bench: DeviceBench, nbytes: int) -> MachineFinding:
    """Time how fast the device first touches managed memory, with page faults and prefetched."""
    name = "faults against prefetch"
    refusal = _managed_memory_refusal(bench)
    if refusal:
        return skip(name, refusal)
    driver, device = bench.driver, bench.platform.device
    try:
        with _managed_range(driver, nbytes) as pointer:
            bench.touch(pointer, nbytes, HOST)
            bench.touch(pointer, nbytes, device)  # warm-up: compiles the kernel, maps the range
            bench.synchronize()
            bench.touch(pointer, nbytes, HOST)
            faulting_s = bench.seconds(lambda: bench.touch(pointer, nbytes, device))
            bench.touch(pointer, nbytes, HOST)
            prefetch_s = bench.seconds(
                lambda: _require_success(
                    driver.prefetch(pointer, nbytes, device, bench.stream), "a prefetch"
                )
            )
            touched_s = bench.seconds(lambda: bench.touch(pointer, nbytes, device))
            back_s = bench.seconds(
                lambda: _require_success(
                    driver.prefetch(pointer, nbytes, HOST, bench.stream), "a prefetch"
                )
            )
    except DriverCallError as error:
        return fail(name, str(error), "Managed memory does not work; check the driver's log.")
    figures = {
        "fault_gb_per_s": gb_per_s(nbytes / faulting_s),
        "prefetch_in_gb_per_s": gb_per_s(nbytes / prefetch_s),
        "prefetch_out_gb_per_s": gb_per_s(nbytes / back_s),
        "first_touch_gain": round(faulting_s / touched_s, 1),
    }
    text = (
        f"faulting {figures['fault_gb_per_s']} GB/s, prefetch "
        f"{figures['prefetch_in_gb_per_s']} in and {figures['prefetch_out_gb_per_s']} out, "
        f"first touch {figures['first_touch_gain']} times faster after a prefetch"
    )
    if bench.platform.link is Link.MANAGED and faulting_s < MIN_PREFETCH_GAIN * touched_s:
        return warn(
            name,
            text,
            "Prefetching gains little on this machine; measure before using it.",
            **figures,
        )
    return ok(name, text, **figures)


def check_hints(bench: DeviceBench, nbytes: int) -> MachineFinding:
    """Give the driver memory hints, and check that it reports them back."""
    name = "hint round trip"
    refusal = _managed_memory_refusal(bench)
    if refusal:
        return skip(name, refusal)
    driver, device = bench.driver, bench.platform.device
    try:
        with _managed_range(driver, nbytes) as pointer:
            kind = driver.pointer_kind(pointer)
            _require_success(
                driver.advise(pointer, nbytes, Advice.SET_PREFERRED_LOCATION, HOST), "advice"
            )
            _require_success(
                driver.advise(pointer, nbytes, Advice.SET_ACCESSED_BY, device), "advice"
            )
            _require_success(driver.prefetch(pointer, nbytes, device, bench.stream), "a prefetch")
            bench.synchronize()
            state = driver.range_state(pointer, nbytes)
    except DriverCallError as error:
        return fail(
            name, str(error), "Hints do not work on this machine; training works without them."
        )
    found = (kind, state.preferred, state.last_prefetch, state.accessed_by)
    if found != (PointerKind.MANAGED, HOST, device, (device,)):
        return fail(
            name,
            f"the driver accepted the hints but reports {state} for {kind.value} memory",
            "Report this with your driver's version. Do not rely on hints on this machine.",
        )
    return ok(name, "preferred location, accessed-by and prefetch were read back as set")


def check_pool(trial: PoolTrial | PoolUnavailable) -> MachineFinding:
    """Return the finding for the test of a pool of CUDA managed memory (see `try_pool`)."""
    name = "pool round trip"
    if isinstance(trial, PoolUnavailable):
        return skip(name, trial.reason)
    figures: dict[str, Figure] = {
        "kind": trial.kind.value,
        "correct": trial.correct,
        "live_bytes": trial.live_bytes,
        "held_bytes": trial.held_bytes,
    }
    if trial.kind is not PointerKind.MANAGED:
        text = f"the pool's tensor is {trial.kind.value} memory, not managed"
        return fail(name, text, "Report this with your versions of torch and driver.", **figures)
    if not trial.correct:
        text = "the device did not read back what it wrote"
        return fail(name, text, "Do not use managed memory on this machine.", **figures)
    if trial.held_bytes:
        text = f"{format_bytes(trial.held_bytes)} were not freed when the pool was closed"
        return warn(name, text, "Report this with your version of torch.", **figures)
    text = (
        f"a managed torch tensor of {format_bytes(trial.live_bytes)} was allocated, used and freed"
    )
    return ok(name, text, **figures)


def check_oversubscription(bench: DeviceBench, scale: float, *, force: bool) -> MachineFinding:
    """Allocate `scale` times the device's memory as managed memory and touch all of it.

    Unless `force` is set, this is skipped on devices without NVLink-C2C, where it can hang the GPU.
    """
    name = "oversubscription"
    refusal = _managed_memory_refusal(bench)
    if refusal:
        return skip(name, refusal)
    platform = bench.platform
    if platform.link is not Link.COHERENT and not force:
        return skip(
            name,
            f"allocating more than the free memory can hang a {platform.link.value} GPU",
            "Pass --force-oversubscription if you can restart the machine.",
        )
    free, total = bench.driver.memory_info(platform.device)
    nbytes = int(scale * total) // SWEEP_CHUNK_BYTES * SWEEP_CHUNK_BYTES
    on_host = max(0, nbytes - free) + HOST_RESERVE_BYTES
    if on_host > platform.host_bytes:
        return skip(
            name,
            f"{scale} times the device is {format_bytes(nbytes)}. That needs "
            f"{format_bytes(on_host)} of host memory, but only "
            f"{format_bytes(platform.host_bytes)} are available",
            "Lower --oversubscription-scale.",
        )
    if nbytes == 0:
        return skip(
            name, f"{scale} times the device is less than {format_bytes(SWEEP_CHUNK_BYTES)}"
        )
    try:
        with _managed_range(bench.driver, nbytes) as pointer:
            seconds = bench.seconds(lambda: _sweep(bench, pointer, nbytes))
    except DriverCallError as error:
        return fail(
            name,
            str(error),
            "Lower --oversubscription-scale, and uvm_oversubscription_ratio in your runs.",
        )
    rate = nbytes / seconds
    return ok(
        name,
        f"{format_bytes(nbytes)} ({scale} times the device) touched in {format_seconds(seconds)}",
        nbytes=nbytes,
        scale=scale,
        gb_per_s=gb_per_s(rate),
    )


def _sweep(bench: DeviceBench, pointer: int, nbytes: int) -> None:
    """Prefetch and touch a managed range chunk by chunk, so that the driver evicts old chunks."""
    device = bench.platform.device
    for offset in range(0, nbytes, SWEEP_CHUNK_BYTES):
        code = bench.driver.prefetch(pointer + offset, SWEEP_CHUNK_BYTES, device, bench.stream)
        _require_success(code, f"the prefetch at {format_bytes(offset)}")
        bench.touch(pointer + offset, SWEEP_CHUNK_BYTES, device)


def _managed_memory_refusal(bench: DeviceBench) -> str:
    """Return why managed memory must not be tested on this machine; empty if it may."""
    link = bench.platform.link
    if link is Link.COPY:
        return "managed memory is unsafe without concurrent access"
    if link is Link.INTEGRATED:
        return "host and device share one memory: there is nothing to move"
    return ""
