"""Detect the hardware: the link between a device and host memory, memory sizes and NUMA nodes.

Each detected value comes with the reason for it. The platform is detected once per device, from the
attributes that the driver reports and never from the name of the GPU: one machine can have a
coherent GPU next to PCIe ones. /proc and /sys are passed as arguments, so that tests can use
recordings of other machines.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gracetune.errors import ConfigError, RunFailedError
from gracetune.memory.driver import Driver, NoDriverError, open_cuda_driver
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


__all__ = [
    "LINK_RULES",
    "NO_GPU",
    "DeviceSpec",
    "HostFacts",
    "Link",
    "LinkRule",
    "NumaNode",
    "NvmlFacts",
    "Platform",
    "Rates",
    "detect_platform",
    "import_nvml",
    "platform_without_gpu",
    "read_host",
    "read_nvml",
]


class Link(Enum):
    """Kind of connection between a device and host memory."""

    NONE = "none"
    """There is no GPU."""
    COPY = "copy"
    """Explicit copies only: the CPU must not touch managed memory while a kernel runs."""
    MANAGED = "managed"
    """Managed pages migrate over PCIe; host and device may touch them at any time."""
    COHERENT = "coherent"
    """NVLink-C2C: the GPU uses the host's page tables and reads any host memory in place."""
    INTEGRATED = "integrated"
    """Host and device share one physical memory: there is nothing to move."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidths of a machine in bytes per second, measured or published (plan/machines.py)."""

    copy_in: float
    """Bandwidth of copies from pinned host memory to the device."""
    copy_out: float
    """Bandwidth of copies from the device to pinned host memory."""
    prefetch_in: float
    """Bandwidth of prefetching managed pages to the device."""
    prefetch_out: float
    """Bandwidth of prefetching managed pages to the host."""
    fault: float
    """Bandwidth of moving managed pages by page faults."""
    read_in_place: float
    """Bandwidth of a kernel that reads host memory over the link."""
    device: float
    """Bandwidth of a kernel that reads or writes device memory."""
    host: float
    """Bandwidth of the CPU reading or writing host memory."""
    both_ways_share: float = 1.0
    """Share of its bandwidth that a direction keeps while the other is busy too (0 to 1)."""
    copy_call_s: float = 6e-6
    """Seconds that the calling thread needs to queue one copy."""
    prefetch_call_s: float = 18e-6
    """Seconds that the calling thread needs to queue one prefetch, however small."""
    prefetch_blocking_share: float = 0.7
    """Share of a prefetch's transfer time for which the call blocks the calling thread."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device described by its specifications, for the simulated driver and for planning."""

    nbytes: int
    attributes: Mapping[str, int] = field(hash=False)
    """Device attributes by CUDA name in lower case; missing ones are unknown to the driver."""
    rates: Rates


@dataclass(frozen=True, slots=True)
class Platform:
    """One device, its connection to host memory, and the reason for each detected value."""

    link: Link
    device: int
    """Ordinal of the device; -1 without a GPU."""
    device_bytes: int
    """Total device memory in bytes; for an integrated device, the available host memory."""
    host_bytes: int
    """Host memory in bytes that a process could allocate now without swapping."""
    host_total_bytes: int
    page_bytes: int
    """Page size of the kernel in bytes; the driver rounds the ranges of hints to whole pages."""
    host_node: int | None
    """NUMA node of the host memory nearest to the device; None if unknown."""
    device_node: int | None
    """NUMA node of the device's own memory; None if the kernel does not list it as a node."""
    c2c: bool | None
    """True if an NVLink-C2C link is up; None if unknown."""
    rates: Rates | None
    """Bandwidths of the machine; None if they were not measured."""
    reasons: Mapping[str, str] = field(hash=False)
    """Explanation of how each value was detected, by field name."""
    numa_nodes: tuple[NumaNode, ...] = ()
    """All NUMA nodes with memory, including those of devices."""

    @property
    def has_managed(self) -> bool:
        """True if managed memory is safe: host and device may touch it at the same time."""
        return self.link in (Link.MANAGED, Link.COHERENT, Link.INTEGRATED)


NO_GPU = Platform(
    link=Link.NONE,
    device=-1,
    device_bytes=0,
    host_bytes=0,
    host_total_bytes=0,
    page_bytes=4096,
    host_node=None,
    device_node=None,
    c2c=None,
    rates=None,
    reasons={"link": "there is no CUDA device"},
)
"""Platform of a machine without a GPU, for callers that do not need its host memory."""


@dataclass(frozen=True, slots=True)
class LinkRule:
    """A kind of link between device and host memory, and the device attributes that identify it."""

    link: Link
    required: Mapping[str, int]
    reason: str


LINK_RULES = (
    LinkRule(
        Link.INTEGRATED,
        {"integrated": 1},
        "the device is integrated: host and device share one memory",
    ),
    LinkRule(
        Link.COHERENT,
        {"concurrent_managed_access": 1, "pageable_memory_access_uses_host_page_tables": 1},
        "the device translates addresses with the host's page tables (ATS)",
    ),
    LinkRule(
        Link.COHERENT,
        {"concurrent_managed_access": 1, "pageable_memory_access": 1, "c2c": 1},
        "the device reads pageable memory and NVML shows an NVLink-C2C link",
    ),
    LinkRule(
        Link.MANAGED,
        {"concurrent_managed_access": 1},
        "host and device may touch managed memory at the same time, over PCIe",
    ),
    LinkRule(
        Link.COPY,
        {},
        "the driver has no concurrent managed access (WSL, Windows, old or virtual GPUs)",
    ),
)
"""Rules that find the link between device and host memory; the first that matches decides."""

_LINK_ATTRIBUTES = (
    "integrated",
    "concurrent_managed_access",
    "pageable_memory_access",
    "pageable_memory_access_uses_host_page_tables",
)


def detect_platform(
    driver: Driver,
    device: int,
    host: HostFacts,
    nvml: NvmlFacts | None = None,
    rates: Rates | None = None,
) -> Platform:
    """Detect the platform of one device from the driver, /proc and /sys, and NVML if present."""
    facts = {name: driver.attribute(name, device) for name in _LINK_ATTRIBUTES}
    c2c, c2c_reason = _c2c(nvml)
    rule = _find_rule(facts | {"c2c": c2c})
    host_node = _node(driver.attribute("host_numa_id", device))
    device_node, node_reason = _device_node(driver, device, host)
    host_bytes, host_reason = _host_bytes(host, device_node)
    device_bytes, device_reason = driver.memory_info(device)[1], "the driver's total"
    if rule.link is Link.INTEGRATED:
        device_bytes = host_bytes
        device_reason = "one memory for both: the available host memory, not the driver's total"
    return Platform(
        link=rule.link,
        device=device,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        host_total_bytes=host.total_host_bytes(device_node),
        page_bytes=host.page_bytes,
        host_node=host_node,
        device_node=device_node,
        c2c=None if c2c is None else bool(c2c),
        rates=rates,
        numa_nodes=host.nodes,
        reasons={
            "link": f"{rule.reason} ({_spell(facts)}){_addressing(nvml)}",
            "device_bytes": device_reason,
            "host_bytes": host_reason,
            "host_total_bytes": "MemTotal minus the NUMA nodes that are GPU memory",
            "page_bytes": "the kernel's page size",
            "host_node": (
                "the driver reports no NUMA node for the device"
                if host_node is None
                else "the nearest node according to the driver"
            ),
            "device_node": node_reason,
            "c2c": c2c_reason,
            "numa_nodes": "the kernel's nodes with memory",
            "rates": (
                "not measured; `gracetune diagnose` measures them"
                if rates is None
                else "given by the caller"
            ),
        },
    )


def platform_without_gpu(host: HostFacts, reason: str) -> Platform:
    """Return the platform of a machine whose GPU is missing or unusable."""
    host_bytes, host_reason = _host_bytes(host, None)
    return Platform(
        link=Link.NONE,
        device=-1,
        device_bytes=0,
        host_bytes=host_bytes,
        host_total_bytes=host.total_bytes,
        page_bytes=host.page_bytes,
        host_node=None,
        device_node=None,
        c2c=None,
        rates=None,
        numa_nodes=host.nodes,
        reasons={"link": reason, "host_bytes": host_reason, "page_bytes": "the kernel's page size"},
    )


def _find_rule(facts: Mapping[str, int | None]) -> LinkRule:
    for rule in LINK_RULES:
        if all(facts[name] == value for name, value in rule.required.items()):
            return rule
    raise AssertionError(f"the last rule requires nothing, but no rule matches {facts}")


def _spell(facts: Mapping[str, int | None]) -> str:
    return ", ".join(
        f"{name} {'unknown' if value is None else value}" for name, value in facts.items()
    )


def _c2c(nvml: NvmlFacts | None) -> tuple[int | None, str]:
    if nvml is None:
        return None, "NVML was not queried"
    if nvml.c2c is None:
        return None, nvml.c2c_reason
    return int(nvml.c2c), nvml.c2c_reason


def _addressing(nvml: NvmlFacts | None) -> str:
    return "" if nvml is None or nvml.addressing is None else f"; {nvml.addressing_reason}"


def _node(value: int | None) -> int | None:
    return None if value is None or value < 0 else value


def _device_node(driver: Driver, device: int, host: HostFacts) -> tuple[int | None, str]:
    """Return the NUMA node of the device's memory, and the reason.

    There is none on PCIe, and none if the driver manages the memory instead of the kernel (CDMM,
    coherent driver-based memory management).
    """
    if driver.attribute("numa_config", device) == 1:
        node = _node(driver.attribute("numa_id", device))
        if node is not None:
            return node, "the kernel lists the device's memory as this node (NUMA mode)"
    if host.coherent_memory_mode == "driver":
        return None, "the kernel module runs with CoherentGPUMemoryMode=driver (CDMM)"
    return None, "the device's memory is not a NUMA node"


def _host_bytes(host: HostFacts, device_node: int | None) -> tuple[int, str]:
    """Return the available host memory, without GPU memory and within the cgroup limit, and why."""
    nbytes, nodes = host.usable_bytes(device_node), host.gpu_nodes(device_node)
    if nbytes == host.cgroup_free_bytes:
        return nbytes, "the memory limit of this container (cgroup)"
    if not nodes:
        return nbytes, "MemAvailable"
    gpu_memory = format_bytes(sum(node.available_bytes for node in nodes))
    return nbytes, f"MemAvailable minus {gpu_memory} of GPU memory"


# NVML is optional: `pynvml` may be missing, and some machines (DGX Spark) answer most queries with
# Not Supported. Neither is an error; each becomes a reason in the platform.

ADDRESSING_MODES = {0: "none", 1: "hmm", 2: "ats"}
"""Names of NVML's addressing modes, by number."""


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """The information that NVML has about one device."""

    c2c: bool | None
    """True if the NVLink-C2C link is up; None if unknown."""
    c2c_reason: str
    addressing: str | None
    """Mechanism by which the device reads pageable host memory; None if unknown.

    `ats`: in hardware; `hmm`: by page faults in software; `none`: it cannot.
    """
    addressing_reason: str


class C2cMode(Protocol):
    """The NVML struct that tells if NVLink-C2C is enabled."""

    isC2cEnabled: int  # noqa: N815  NVML's spelling


class Nvml(Protocol):
    """The functions of `pynvml` that gracetune calls; tests pass their own."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByPciBusId(self, bus: str, /) -> object: ...  # noqa: N802
    def nvmlDeviceGetC2cModeInfoV(self, handle: object, /) -> C2cMode: ...  # noqa: N802
    def nvmlDeviceGetAddressingMode(self, handle: object, /) -> int: ...  # noqa: N802


def import_nvml() -> Nvml | None:
    """Import the NVML bindings; return None if they are not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    module: Nvml = pynvml
    return module


def read_nvml(nvml: Nvml | None, driver: Driver, device: int) -> NvmlFacts:
    """Query NVML about a CUDA device, which is found by its PCI address."""
    if nvml is None:
        return _no_nvml_facts("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _no_nvml_facts(f"NVML did not start: {error}")
    try:
        return _query_nvml(nvml, pci_bus_id(driver, device))
    except nvml.NVMLError as error:
        return _no_nvml_facts(f"NVML does not know the device: {error}")
    finally:
        nvml.nvmlShutdown()


def pci_bus_id(driver: Driver, device: int) -> str:
    """Return a device's PCI address, since CUDA and NVML may number devices differently."""
    domain, bus, slot = (
        driver.attribute(name, device) or 0
        for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _query_nvml(nvml: Nvml, address: str) -> NvmlFacts:
    handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
    c2c: bool | None = None
    addressing: str | None = None
    try:
        c2c = bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled)
        c2c_reason = f"NVML reports NVLink-C2C {'on' if c2c else 'off'}"
    except (nvml.NVMLError, AttributeError) as error:  # older bindings lack these functions
        c2c_reason = f"NVML does not report whether there is a C2C link: {error}"
    try:
        mode = nvml.nvmlDeviceGetAddressingMode(handle)
        addressing = ADDRESSING_MODES.get(mode)
        addressing_reason = f"NVML reports addressing mode {addressing or mode}"
    except (nvml.NVMLError, AttributeError) as error:
        addressing_reason = f"NVML does not report the addressing mode: {error}"
    return NvmlFacts(c2c, c2c_reason, addressing, addressing_reason)


def _no_nvml_facts(reason: str) -> NvmlFacts:
    return NvmlFacts(None, reason, None, reason)


# Host memory, read from files under /proc and /sys that need no privileges.

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)", re.MULTILINE)
_LINE = re.compile(r"^(?:Node \d+ )?([A-Za-z_()]+):\s+(\d+) kB", re.MULTILINE)
_NVIDIA_REGION = "System RAM (NVIDIA)"
"""Label in /proc/iomem of GPU memory that the kernel uses as system memory."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node with memory."""

    id: int
    total_bytes: int
    available_bytes: int
    """Free memory plus page cache that the kernel could drop."""
    has_cpus: bool


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host memory as the kernel reports it; the numbers may include GPU memory."""

    total_bytes: int
    available_bytes: int
    page_bytes: int
    nodes: tuple[NumaNode, ...] = ()
    cgroup_free_bytes: int | None = None
    """Bytes that the process may still allocate under its cgroup limit; None without a limit."""
    coherent_memory_mode: str = ""
    """CoherentGPUMemoryMode of the NVIDIA kernel module; empty if unknown.

    With `driver`, the driver manages GPU memory, and the kernel does not see it as a NUMA node.
    """

    includes_gpu_memory: bool = False
    """True if the kernel's memory sizes include GPU memory, because it is a NUMA node."""

    def gpu_nodes(self, known: int | None = None) -> tuple[NumaNode, ...]:
        """Return the NUMA nodes that are GPU memory; `known` is one that the driver reported.

        If one GPU's memory is a node, every node without CPUs counts as GPU memory.
        """
        if known is None and not (
            self.includes_gpu_memory and any(node.has_cpus for node in self.nodes)
        ):
            return ()
        return tuple(node for node in self.nodes if not node.has_cpus or node.id == known)

    def usable_bytes(self, gpu_node: int | None = None) -> int:
        """Return the host memory in bytes that this process could still allocate.

        If GPU memory is a NUMA node (GH200), `gpu_node` names one such node; memory of all such
        nodes is left out.
        """
        on_gpus = sum(node.available_bytes for node in self.gpu_nodes(gpu_node))
        usable = max(0, self.available_bytes - on_gpus)
        return usable if self.cgroup_free_bytes is None else min(usable, self.cgroup_free_bytes)

    def total_host_bytes(self, gpu_node: int | None = None) -> int:
        """Return the total host memory in bytes, without GPU memory."""
        return self.total_bytes - sum(node.total_bytes for node in self.gpu_nodes(gpu_node))

    def capacity_bytes(self) -> int:
        """Return the total host memory in bytes; at most what the cgroup limit still allows."""
        total = self.total_host_bytes()
        return total if self.cgroup_free_bytes is None else min(total, self.cgroup_free_bytes)


def read_host(proc: Path, sys: Path, page_bytes: int) -> HostFacts:
    """Read the host memory sizes from /proc and /sys; `page_bytes` is the kernel's page size."""
    memory = _kilobytes(proc / "meminfo")
    for name in ("MemTotal", "MemAvailable"):
        if name not in memory:
            raise RunFailedError(
                f"{proc / 'meminfo'} has no {name}, so host memory is unknown. "
                "gracetune needs Linux 3.14 or newer with /proc mounted."
            )
    return HostFacts(
        total_bytes=memory["MemTotal"],
        available_bytes=memory["MemAvailable"],
        page_bytes=page_bytes,
        nodes=_nodes(sys / "devices/system/node"),
        cgroup_free_bytes=_cgroup_free_bytes(proc, sys / "fs/cgroup"),
        coherent_memory_mode=_coherent_mode(proc / "driver/nvidia/params"),
        includes_gpu_memory=_includes_gpu_memory(proc),
    )


def anonymous_nbytes(proc: Path, spans: Iterable[tuple[int, int]]) -> int:
    """Return how many bytes of the spans (address, bytes) are not in memory-mapped files.

    Only freeing those makes memory available: pages of mapped files count as available anyway.
    """
    mapped = [
        (int(match[1], 16), int(match[2], 16))
        for match in _MAPPING.finditer(text_or_empty(proc / "self/maps"))
        if match[3] != "0"
    ]
    starts = [start for start, _ in mapped]
    total = 0
    for address, nbytes in spans:
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= mapped[at][1]:
            total += nbytes
    return total


def _kilobytes(path: Path) -> dict[str, int]:
    """Parse the `Name: 123 kB` lines of a meminfo file to bytes; empty if there is no file."""
    return {name: int(value) * 1024 for name, value in _LINE.findall(text_or_empty(path))}


def text_or_empty(path: Path) -> str:
    """Return the text of a system file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _nodes(folder: Path) -> tuple[NumaNode, ...]:
    """Read the NUMA nodes that have memory; GPUs also create empty ones for MIG slices."""
    nodes = []
    for path in folder.glob("node[0-9]*"):
        number = int(path.name.removeprefix("node"))
        memory = _kilobytes(path / "meminfo")
        if memory.get("MemTotal", 0) == 0:
            continue
        cached = memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)
        nodes.append(
            NumaNode(
                id=number,
                total_bytes=memory["MemTotal"],
                available_bytes=memory.get("MemFree", 0) + cached,
                has_cpus=text_or_empty(path / "cpulist").strip() != "",
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def _includes_gpu_memory(proc: Path) -> bool:
    """Return True if the kernel's memory sizes include GPU memory; when in doubt, True.

    /proc/iomem has the answer, but only root can read it.
    """
    regions = text_or_empty(proc / "iomem")
    if regions:
        return _NVIDIA_REGION in regions
    driver = proc / "driver/nvidia"
    return driver.is_dir() and _coherent_mode(driver / "params") != "driver"


def _cgroup_free_bytes(proc: Path, mount: Path) -> int | None:
    """Return the bytes that this process's cgroup (v2) and its parents leave; None without a limit.

    The page cache counts as free, as in MemAvailable: the kernel drops it before it kills a
    process.
    """
    match = re.search(r"^0::(/.*)$", text_or_empty(proc / "self/cgroup"), re.MULTILINE)
    if match is None:
        return None
    parts = [part for part in match[1].split("/") if part]
    free = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit = text_or_empty(folder / "memory.max").strip()
        if not limit.isdecimal():
            continue
        used = int(text_or_empty(folder / "memory.current").strip() or 0)
        sizes = re.findall(
            r"^(?:in)?active_file (\d+)$", text_or_empty(folder / "memory.stat"), re.MULTILINE
        )
        free.append(max(0, int(limit) - used + sum(map(int, sizes))))
    return min(free, default=None)


def _coherent_mode(params: Path) -> str:
    match = re.search(r'^CoherentGPUMemoryMode:\s*"?(\w*)"?', text_or_empty(params), re.MULTILINE)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device's hardware description (`Platform`), and the CUDA driver through which to use it."""

    driver: Driver | None
    """The CUDA driver; None if the machine has no GPU."""
    platform: Platform


class CountedDriver(Driver, Protocol):
    """A CUDA driver interface that also has the number of devices."""

    device_count: int


def read_this_host() -> HostFacts:
    """Read the current host memory sizes of this machine."""
    return read_host(Path("/proc"), Path("/sys"), os.sysconf("SC_PAGE_SIZE"))


def open_machine(
    device: int = 0, open_driver: Callable[[], CountedDriver] = open_cuda_driver
) -> Machine:
    """Open the driver and detect the platform of one device.

    Without a usable GPU, the platform has the link NONE and the reason.
    """
    host = read_this_host()
    try:
        driver = open_driver()
    except NoDriverError as error:
        return Machine(None, platform_without_gpu(host, str(error)))
    if not 0 <= device < driver.device_count:
        raise ConfigError(
            f"device is {device}, but this machine has {driver.device_count} GPU(s), counted from "
            "0. CUDA_VISIBLE_DEVICES may hide others."
        )
    nvml = read_nvml(import_nvml(), driver, device)
    return Machine(driver, detect_platform(driver, device, host, nvml))
