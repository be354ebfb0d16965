"""Checks of what can be read: versions, environment, platform, memory, pages, NUMA.

Each takes what it judges as arguments. No torch: a machine on which torch cannot be imported is
diagnosed too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.memory.diagnose import Figure, Finding, fail, ok, skip, warn
from gracetune.memory.platform import Link
from gracetune.units import KIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gracetune.memory.platform import Platform

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel is set to; empty where it does not say."""

    release: str
    machine: str
    numa_balancing: str
    huge_pages: str
    node_cpus: Mapping[int, frozenset[int]]
    gpu_driver: str = ""
    """The version of NVIDIA's kernel module."""


def read_kernel(proc: Path, sys: Path, release: str, machine: str) -> Kernel:
    """Read the settings that matter to large host memory."""
    chosen = re.search(r"\[(\w+)\]", _text(sys / "kernel/mm/transparent_hugepage/enabled"))
    driver = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", _text(proc / "driver/nvidia/version"))
    nodes = sys / "devices/system/node"
    return Kernel(
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


def check_versions(versions: Mapping[str, str | None], kernel: Kernel) -> Finding:
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
    if numbers < OLDEST_TORCH:
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
    why = platform.why["link"]
    figures: dict[str, Figure] = {
        "link": platform.link.value,
        **{f"why_{name}": reason for name, reason in platform.why.items()},
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


def check_pages(platform: Platform, kernel: Kernel) -> Finding:
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


def check_numa(platform: Platform, kernel: Kernel, affinity: frozenset[int]) -> Finding:
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
