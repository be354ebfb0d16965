"""The form of a diagnosis: findings with a verdict and what to do, and the report they make.

The checks themselves are `diagnose_host` (what can be read) and `diagnose_device` (what must be
tried and timed). Nothing here or in `diagnose_host` needs torch.
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
from gracetune.memory.platform import Link
from gracetune.memory.pool import PoolUnavailable
from gracetune.units import GIB, KIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gracetune.memory.driver import Driver
    from gracetune.memory.platform import Platform
    from gracetune.memory.pool import ManagedPool


Figure = int | float | str | bool | None


class Status(StrEnum):
    """How a check came out."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """Not tried, for the reason given."""


STATUS_MARKS = MappingProxyType({"OK": "✅", "WARN": "⚠️", "FAIL": "❌", "SKIP": "⏭️"})
"""The forks' checklist looks for these in the report."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    status: Status
    text: str
    advice: str = ""
    """What to do about it; every finding that is not OK has one, or its text is the reason."""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def ok(name: str, text: str, **figures: Figure) -> Finding:
    """All is well."""
    return Finding(name, Status.OK, text, "", figures)


def warn(name: str, text: str, advice: str, **figures: Figure) -> Finding:
    """It works, but less well than it could."""
    return Finding(name, Status.WARN, text, advice, figures)


def fail(name: str, text: str, advice: str, **figures: Figure) -> Finding:
    """It does not work."""
    return Finding(name, Status.FAIL, text, advice, figures)


def skip(name: str, text: str, advice: str = "", **figures: Figure) -> Finding:
    """It was not tried."""
    return Finding(name, Status.SKIP, text, advice, figures)


def gb_per_s(rate: float) -> float:
    """A rate as people quote it: 10^9 bytes a second, to a tenth."""
    return round(rate / 1e9, 1)


def exit_code(findings: Sequence[Finding], *, has_gpu: bool, allow_cpu: bool) -> int:
    """1 if anything failed, or if there is no GPU and nobody said that this is fine."""
    failed = any(finding.status is Status.FAIL for finding in findings)
    return int(failed or not (has_gpu or allow_cpu))


def build_report(findings: Sequence[Finding], code: int, date: str, version: str) -> dict[str, object]:
    """The whole diagnosis as plain data; it names no host, user or path."""
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


def format_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """The diagnosis as a person reads it."""
    width = max((len(finding.name) for finding in findings), default=0)
    for number, finding in enumerate(findings, start=1):
        yield f"{number:>2} {finding.status:<4} {finding.name:<{width}}  {finding.text}"
        if finding.advice:
            yield f"{'':>{width + 10}}-> {finding.advice}"


# ------------------------------------------------------------------------------------------
# Checks of what can be read: versions, environment, platform, memory, pages, NUMA.
#
# Each takes what it judges as arguments. No torch: a machine on which torch cannot be imported is
# diagnosed too.


MIN_TORCH_VERSION = (2, 11)


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What the kernel is set to; empty where it does not say."""

    release: str
    machine: str
    numa_balancing: str
    huge_pages: str
    node_cpus: Mapping[int, frozenset[int]]
    gpu_driver: str = ""
    """The version of NVIDIA's kernel module."""


def read_kernel(proc: Path, sys: Path, release: str, machine: str) -> KernelInfo:
    """Read the settings that matter to large host memory."""
    chosen = re.search(r"\[(\w+)\]", _text(sys / "kernel/mm/transparent_hugepage/enabled"))
    driver = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", _text(proc / "driver/nvidia/version"))
    nodes = sys / "devices/system/node"
    return KernelInfo(
        release=release,
        machine=machine,
        numa_balancing=_text(proc / "sys/kernel/numa_balancing").strip(),
        huge_pages=chosen[1] if chosen else "",
        node_cpus={
            int(path.name.removeprefix("node")): _cpus(_text(path / "cpulist"))
            for path in sorted(nodes.glob("node[0-9]*"))
        },
        gpu_driver=driver[1] if driver else "",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _cpus(text: str) -> frozenset[int]:
    """The kernel's list format: `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def check_versions(versions: Mapping[str, str | None], kernel: KernelInfo) -> Finding:
    """Python, torch and the packages beside it; none stands for what cannot be imported."""
    figures = {name: version or "absent" for name, version in versions.items()}
    figures |= {"kernel": kernel.release, "machine": kernel.machine}
    figures |= {"GPU driver": kernel.gpu_driver or "absent"}
    text = ", ".join(f"{name} {version}" for name, version in figures.items())
    torch = versions["torch"]
    if torch is None:
        return fail(
            "versions", text, "pip install 'torch>=2.11': nothing can train without it.", **figures
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch)[:2])
    if numbers < MIN_TORCH_VERSION:
        return fail(
            "versions",
            text,
            "pip install -U 'torch>=2.11'; older ones lack what pools need.",
            **figures,
        )
    return ok("versions", text, **figures)


def check_environment(
    variables: Mapping[str, str], effects: Sequence[str], problem: str
) -> Finding:
    """The variables we read, what each will do, and what is wrong with them."""
    figures = dict(variables)
    if problem:
        return fail(
            "environment", problem, "Correct or unset it; `gracetune env` explains each.", **figures
        )
    if not variables:
        return ok(
            "environment", "none of our variables is set; defaults hold (see `gracetune env`)"
        )
    return ok("environment", "; ".join(effects), **figures)


def check_torch_build(
    version: str | None, cuda: str | None, problem: str, device: str = ""
) -> Finding:
    """Whether torch can see a GPU, and if not, why."""
    name = "torch and CUDA"
    if version is None:
        return fail(name, f"torch cannot be imported: {problem}", "pip install 'torch>=2.11'.")
    if cuda is None:
        return warn(
            name,
            f"torch {version} is built without CUDA",
            "Install a CUDA build of torch to use a GPU; on a CPU machine this is as it should be.",
            cuda=None,
        )
    if problem:
        return fail(
            name,
            f"torch {version} (CUDA {cuda}) finds no device: {problem}",
            "Check `nvidia-smi`, the driver's age and CUDA_VISIBLE_DEVICES.",
            cuda=cuda,
        )
    text = f"torch {version} with CUDA {cuda} sees {device or 'a device'}"
    return ok(name, text, cuda=cuda, device=device)


def check_platform(platform: Platform) -> Finding:
    """What the link between host and device is, and why we say so."""
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
            "No GPU: training runs on the CPU, memory hints do nothing.",
            **figures,
        )
    if platform.link is Link.COPY:
        return warn(
            "platform",
            text,
            "Managed memory stays off; explicit copies are used instead.",
            **figures,
        )
    return ok("platform", text, **figures)


def check_memory(platform: Platform, device_free: int) -> Finding:
    """How much there is on both sides, and whether the host is the larger one."""
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
            "memory", text, "Something else holds half of the device: see `nvidia-smi`.", **figures
        )
    if platform.host_bytes < platform.device_bytes:
        return warn(
            "memory",
            text,
            "The host has less to give than the device holds: offloading will gain little.",
            **figures,
        )
    return ok("memory", text, **figures)


def check_pages(platform: Platform, kernel: KernelInfo) -> Finding:
    """The page size that hints are rounded to, and huge pages."""
    huge_pages = kernel.huge_pages or "unknown"
    figures: dict[str, Figure] = {"page_bytes": platform.page_bytes, "huge_pages": huge_pages}
    text = f"pages of {platform.page_bytes // KIB} KiB, transparent huge pages {huge_pages}"
    if platform.link is Link.COHERENT and platform.page_bytes < 64 * KIB:
        return warn(
            "pages",
            text,
            "A kernel with 64 KiB pages moves memory over NVLink-C2C in fewer, larger pieces.",
            **figures,
        )
    if kernel.huge_pages == "never" and platform.link is not Link.NONE:
        return warn("pages", text, "Set transparent huge pages to madvise or always.", **figures)
    return ok("pages", text, **figures)


def check_numa(platform: Platform, kernel: KernelInfo, affinity: frozenset[int]) -> Finding:
    """Whether this process runs, and allocates, near its device."""
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
                f"the device is near node {node}, but this process may run elsewhere",
                f"Start it with `numactl --cpunodebind={node} --membind={node}`.",
                **figures,
            )
    if platform.link is Link.COHERENT and kernel.numa_balancing not in ("0", ""):
        return warn(
            "NUMA",
            "automatic NUMA balancing is on and moves pages behind the driver's back",
            "As root: `sysctl kernel.numa_balancing=0`.",
            **figures,
        )
    where = "the driver names no node" if node is None else f"node {node} is the device's own"
    return ok("NUMA", where, **figures)


# ------------------------------------------------------------------------------------------
# Checks that try a device out: copies, faults against prefetch, hints, oversubscription.
#
# All ranges are small beside the device, but for the last check, which is meant to be larger than
# it
# and therefore runs only where that is safe.


MIN_COPY_RATE = {Link.COHERENT: 200e9, Link.MANAGED: 12e9, Link.COPY: 6e9}
"""Pinned copies under this are far below any healthy link of the kind."""
MIN_PREFETCH_GAIN = 5.0
"""A first touch after a prefetch should be at least so many times faster than a faulting one."""
SWEEP_CHUNK_BYTES = 256 * MIB
HOST_RESERVE_BYTES = 8 * GIB
"""Left to the rest of the machine when a device is oversubscribed on purpose."""


class DriverRefusedError(Exception):
    """A driver call within a check came back with a code."""


@contextmanager
def _managed(driver: Driver, nbytes: int) -> Iterator[int]:
    code, pointer = driver.allocate_managed(nbytes)
    _check(code, f"allocating {format_bytes(nbytes)} of managed memory")
    try:
        yield pointer
    finally:
        driver.free(pointer)


def _check(code: int, doing: str) -> None:
    if code != 0:
        raise DriverRefusedError(f"{doing} failed with code {code}")


def check_copies(bench: DeviceBench, nbytes: int) -> Finding:
    """Pinned copies in both directions."""
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
            f"Far below a {bench.platform.link.value} link: look at `nvidia-smi -q` (PCIe width "
            "and generation, C2C links) and at other programs on the link.",
            **figures,
        )
    return ok(name, text, **figures)


def check_faults(bench: DeviceBench, nbytes: int) -> Finding:
    """A first touch that faults, against one after a prefetch."""
    name = "faults against prefetch"
    refusal = _no_managed(bench)
    if refusal:
        return skip(name, refusal)
    driver, device = bench.driver, bench.platform.device
    try:
        with _managed(driver, nbytes) as pointer:
            bench.touch(pointer, nbytes, HOST)
            bench.touch(pointer, nbytes, device)  # warm: compiles the kernel, maps the range
            bench.synchronize()
            bench.touch(pointer, nbytes, HOST)
            faulting_s = bench.seconds(lambda: bench.touch(pointer, nbytes, device))
            bench.touch(pointer, nbytes, HOST)
            prefetch_s = bench.seconds(
                lambda: _check(driver.prefetch(pointer, nbytes, device, bench.stream), "a prefetch")
            )
            touched_s = bench.seconds(lambda: bench.touch(pointer, nbytes, device))
            back_s = bench.seconds(
                lambda: _check(driver.prefetch(pointer, nbytes, HOST, bench.stream), "a prefetch")
            )
    except DriverRefusedError as error:
        return fail(name, str(error), "Managed memory does not work: check the driver's log.")
    figures = {
        "fault_gb_per_s": gb_per_s(nbytes / faulting_s),
        "prefetch_in_gb_per_s": gb_per_s(nbytes / prefetch_s),
        "prefetch_out_gb_per_s": gb_per_s(nbytes / back_s),
        "first_touch_gain": round(faulting_s / touched_s, 1),
    }
    text = (
        f"faulting {figures['fault_gb_per_s']} GB/s, prefetch "
        f"{figures['prefetch_in_gb_per_s']} in and {figures['prefetch_out_gb_per_s']} out, "
        f"a first touch {figures['first_touch_gain']} times faster after it"
    )
    if bench.platform.link is Link.MANAGED and faulting_s < MIN_PREFETCH_GAIN * touched_s:
        return warn(
            name, text, "Prefetching gains little here; measure before using it.", **figures
        )
    return ok(name, text, **figures)


def check_hints(bench: DeviceBench, nbytes: int) -> Finding:
    """Hints are asked for, then read back from the driver."""
    name = "hint round trip"
    refusal = _no_managed(bench)
    if refusal:
        return skip(name, refusal)
    driver, device = bench.driver, bench.platform.device
    try:
        with _managed(driver, nbytes) as pointer:
            kind = driver.pointer_kind(pointer)
            _check(driver.advise(pointer, nbytes, Advice.SET_PREFERRED_LOCATION, HOST), "advice")
            _check(driver.advise(pointer, nbytes, Advice.SET_ACCESSED_BY, device), "advice")
            _check(driver.prefetch(pointer, nbytes, device, bench.stream), "a prefetch")
            bench.synchronize()
            state = driver.range_state(pointer, nbytes)
    except DriverRefusedError as error:
        return fail(name, str(error), "Hints do not work here; training goes on without them.")
    taken = (kind, state.preferred, state.last_prefetch, state.accessed_by)
    if taken != (PointerKind.MANAGED, HOST, device, (device,)):
        return fail(
            name,
            f"the driver took the hints but answers {state} for {kind.value} memory",
            "Report this with your driver's version: hints cannot be trusted here.",
        )
    return ok(name, "preferred location, accessed-by and prefetch read back as asked")


def check_pool(trial: PoolTrial | PoolUnavailable) -> Finding:
    """A tensor of ordinary torch in managed memory, made, used and given back."""
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
        text = f"{format_bytes(trial.held_bytes)} stayed out after the pool was closed"
        return warn(name, text, "Report this with your version of torch.", **figures)
    text = f"a managed tensor of ordinary torch, {format_bytes(trial.live_bytes)} out and back"
    return ok(name, text, **figures)


def check_oversubscription(bench: DeviceBench, scale: float, *, force: bool) -> Finding:
    """Managed memory larger than the device, every page of it touched by the device."""
    name = "oversubscription"
    refusal = _no_managed(bench)
    if refusal:
        return skip(name, refusal)
    platform = bench.platform
    if platform.link is not Link.COHERENT and not force:
        return skip(
            name,
            f"on a {platform.link.value} card an allocation beyond free memory can hang it",
            "Give --force-oversubscription if the machine is yours to restart.",
        )
    free, total = bench.driver.memory_info(platform.device)
    nbytes = int(scale * total) // SWEEP_CHUNK_BYTES * SWEEP_CHUNK_BYTES
    on_host = max(0, nbytes - free) + HOST_RESERVE_BYTES
    if on_host > platform.host_bytes:
        return skip(
            name,
            f"{scale} times the device is {format_bytes(nbytes)}; the host would have to take "
            f"{format_bytes(on_host)} and has {format_bytes(platform.host_bytes)}",
            "Lower --oversubscription-scale.",
        )
    if nbytes == 0:
        return skip(
            name, f"{scale} times the device is less than one piece of {format_bytes(SWEEP_CHUNK_BYTES)}"
        )
    try:
        with _managed(bench.driver, nbytes) as pointer:
            seconds = bench.seconds(lambda: _sweep(bench, pointer, nbytes))
    except DriverRefusedError as error:
        return fail(name, str(error), "Lower --oversubscription-scale, or the ratio of your runs.")
    rate = nbytes / seconds
    return ok(
        name,
        f"{format_bytes(nbytes)} ({scale} times the device) touched in {format_seconds(seconds)}",
        nbytes=nbytes,
        scale=scale,
        gb_per_s=gb_per_s(rate),
    )


def _sweep(bench: DeviceBench, pointer: int, nbytes: int) -> None:
    """Bring each piece before it is touched: what is out of room goes to the host meanwhile."""
    device = bench.platform.device
    for offset in range(0, nbytes, SWEEP_CHUNK_BYTES):
        code = bench.driver.prefetch(pointer + offset, SWEEP_CHUNK_BYTES, device, bench.stream)
        _check(code, f"the prefetch at {format_bytes(offset)}")
        bench.touch(pointer + offset, SWEEP_CHUNK_BYTES, device)


def _no_managed(bench: DeviceBench) -> str:
    """Why managed memory is not to be tried here, or nothing."""
    link = bench.platform.link
    if link is Link.COPY:
        return "managed memory is unsafe without concurrent access"
    if link is Link.INTEGRATED:
        return "host and device are one memory: there is nothing to move"
    return ""


# ------------------------------------------------------------------------------------------
# What a diagnosis needs to try memory out: a driver, a clock, copies and touches.
#
# `torch_bench` is the real one; tests build theirs over the simulated driver.


@dataclass(frozen=True, slots=True)
class DeviceBench:
    """One device, ready to be timed."""

    driver: Driver
    platform: Platform
    clock: Callable[[], float]
    """Seconds."""
    synchronize: Callable[[], object]
    """Wait for all that the device was given."""
    copy: Callable[[int, int, int], None]
    """Copy so many bytes between pinned and device memory: (nbytes, source, target)."""
    touch: Callable[[int, int, int], None]
    """Let a kernel or the CPU go over every byte of a range: (pointer, nbytes, place)."""
    stream: int = 0

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for something, from idle to idle."""
        self.synchronize()
        start = self.clock()
        work()
        self.synchronize()
        return self.clock() - start


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A range of device-visible bytes, in the form that torch takes without a copy."""

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
    """What became of a tensor made in a managed pool, and of the pool."""

    kind: PointerKind
    correct: bool
    """Whether the device read back what it wrote."""
    live_bytes: int
    """Managed bytes while the tensor lived."""
    held_bytes: int
    """Managed bytes still out after the pool was closed."""


def try_pool(pool: ManagedPool, driver: Driver, nbytes: int) -> PoolTrial:
    """Make a tensor in the pool, use it, let it go and close the pool."""
    import torch

    with pool.allocating():
        tensor = torch.full((nbytes,), 7, dtype=torch.uint8, device=f"cuda:{pool.device}")
    kind = driver.pointer_kind(tensor.data_ptr())
    correct = int(tensor.sum(dtype=torch.int64)) == 7 * nbytes
    live_bytes = pool.counters().live_bytes
    del tensor
    return PoolTrial(kind, correct, live_bytes, pool.close().held_bytes)


def open_torch_bench(driver: Driver, platform: Platform, copy_bytes: int) -> DeviceBench:
    """The bench of a real device; copies use one pair of buffers of `copy_bytes`, made here."""
    import torch

    device = torch.device("cuda", platform.device)
    pinned = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
    resident = torch.empty(copy_bytes, dtype=torch.uint8, device=device)

    def copy(nbytes: int, source: int, target: int) -> None:
        assert HOST in (source, target), f"a copy from {source} to {target} crosses no link"
        pair = (pinned, resident) if target == HOST else (resident, pinned)
        pair[0][:nbytes].copy_(pair[1][:nbytes], non_blocking=True)

    def touch(pointer: int, nbytes: int, place: int) -> None:
        if place == HOST:
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
