"""What the hardware is: the link between host and device memory, their sizes, and why we say so.

Decided once a device, from attributes the driver reports, never from a card's name: one host can
hold a coherent GPU beside PCIe ones. Files under /proc and /sys are read through roots that arrive
as arguments, so that a folder can stand in for a machine. What to do with the answer is for others.
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
    "read_host",
    "read_nvml",
    "platform_without_gpu",
]


class Link(Enum):
    """How a device reaches host memory, from nothing to one memory for both."""

    NONE = "none"
    """There is no GPU."""
    COPY = "copy"
    """Explicit copies alone: managed memory would stop the host while a kernel runs."""
    MANAGED = "managed"
    """Managed pages move over PCIe; both sides may touch them at any time."""
    COHERENT = "coherent"
    """NVLink-C2C: the GPU walks the host's page tables and reads any host memory in place."""
    INTEGRATED = "integrated"
    """One physical memory: there is nothing to move."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast bytes move, in bytes per second; measured here or published (`plan.machines`)."""

    copy_in: float
    """Copy engine, pinned host memory to device."""
    copy_out: float
    """Copy engine, device to pinned host memory."""
    prefetch_in: float
    """Managed pages moved to the device ahead of use."""
    prefetch_out: float
    fault: float
    """Managed pages pulled by whoever touches them first."""
    read_in_place: float
    """A kernel reading host memory over the link."""
    device: float
    """A kernel reading or writing device memory."""
    host: float
    """The CPU reading or writing host memory."""
    both_ways_share: float = 1.0
    """What is left of each direction's rate while the other is busy too."""
    copy_call_s: float = 6e-6
    """What issuing one copy costs the calling thread."""
    prefetch_call_s: float = 18e-6
    """What issuing one prefetch costs the calling thread, however small."""
    prefetch_blocking_share: float = 0.7
    """Share of a prefetch's transfer during which the call does not return."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device as data: what a simulated driver stands for, and a published machine is made of."""

    nbytes: int
    attributes: Mapping[str, int] = field(hash=False)
    """By their CUDA names in snake case; what is absent, the driver does not know."""
    rates: Rates


@dataclass(frozen=True, slots=True)
class Platform:
    """One device, the host memory behind it, and the reason for each conclusion."""

    link: Link
    device: int
    """The ordinal; -1 where there is none."""
    device_bytes: int
    """All memory of the device; of an integrated one, what the host could give it."""
    host_bytes: int
    """Host memory that could be taken now without swapping."""
    host_total_bytes: int
    page_bytes: int
    """Of the kernel: the grain to which the driver rounds hints."""
    host_node: int | None
    """The NUMA node of host memory nearest to the device."""
    device_node: int | None
    """The NUMA node that is the device's own memory, where the kernel sees it as one."""
    c2c: bool | None
    """Whether an NVLink-C2C link is up; none: nobody could tell."""
    rates: Rates | None
    reasons: Mapping[str, str] = field(hash=False)
    """The reason for each field, by its name."""
    numa_nodes: tuple[NumaNode, ...] = ()
    """Every node with memory, the devices' own among them."""

    @property
    def has_managed(self) -> bool:
        """Whether managed memory may be touched from both sides at any time."""
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
"""The platform of a machine without a GPU, where host memory was not asked about either."""


@dataclass(frozen=True, slots=True)
class LinkRule:
    """A link, and the facts that prove it."""

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
"""The first rule whose facts all hold decides."""

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
    """What one device is, asked of the driver, the kernel's files and, where there is one, NVML."""
    facts = {name: driver.attribute(name, device) for name in _LINK_ATTRIBUTES}
    c2c, c2c_reason = _c2c(nvml)
    rule = _rule(facts | {"c2c": c2c})
    host_node = _node(driver.attribute("host_numa_id", device))
    device_node, node_why = _device_node(driver, device, host)
    host_bytes, host_why = _host_bytes(host, device_node)
    device_bytes, device_why = driver.memory_info(device)[1], "the driver's total"
    if rule.link is Link.INTEGRATED:
        device_bytes = host_bytes
        device_why = "one memory for both: what the host could give now, not the driver's figure"
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
            "device_bytes": device_why,
            "host_bytes": host_why,
            "host_total_bytes": "MemTotal, less the memory nodes that are GPUs",
            "page_bytes": "the kernel's page size",
            "host_node": (
                "the driver names no node near the device"
                if host_node is None
                else "the node the driver names as nearest"
            ),
            "device_node": node_why,
            "c2c": c2c_reason,
            "numa_nodes": "the kernel's list of nodes with memory",
            "rates": (
                "not measured yet: `gracetune diagnose` measures them"
                if rates is None
                else "given by who asked"
            ),
        },
    )


def platform_without_gpu(host: HostFacts, reason: str) -> Platform:
    """The platform of a machine whose GPU is missing or unusable, with its host memory."""
    host_bytes, host_why = _host_bytes(host, None)
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
        reasons={"link": reason, "host_bytes": host_why, "page_bytes": "the kernel's page size"},
    )


def _rule(facts: Mapping[str, int | None]) -> LinkRule:
    for rule in LINK_RULES:
        if all(facts[name] == value for name, value in rule.required.items()):
            return rule
    raise AssertionError(f"the last rule needs nothing, yet none fits {facts}")


def _spell(facts: Mapping[str, int | None]) -> str:
    return ", ".join(
        f"{name} {'unknown' if value is None else value}" for name, value in facts.items()
    )


def _c2c(nvml: NvmlFacts | None) -> tuple[int | None, str]:
    if nvml is None:
        return None, "NVML was not asked"
    if nvml.c2c is None:
        return None, nvml.c2c_reason
    return int(nvml.c2c), nvml.c2c_reason


def _addressing(nvml: NvmlFacts | None) -> str:
    return "" if nvml is None or nvml.addressing is None else f"; {nvml.addressing_reason}"


def _node(value: int | None) -> int | None:
    return None if value is None or value < 0 else value


def _device_node(driver: Driver, device: int, host: HostFacts) -> tuple[int | None, str]:
    """The device's own NUMA node: there in NUMA mode, gone in CDMM and on PCIe."""
    if driver.attribute("numa_config", device) == 1:
        node = _node(driver.attribute("numa_id", device))
        if node is not None:
            return node, "the kernel sees the device's memory as this node (NUMA mode)"
    if host.coherent_memory_mode == "driver":
        return None, "the kernel module runs with CoherentGPUMemoryMode=driver (CDMM)"
    return None, "the device's memory is no NUMA node"


def _host_bytes(host: HostFacts, device_node: int | None) -> tuple[int, str]:
    """MemAvailable, less what it counts that is a GPU's, and no more than a container may take."""
    nbytes, nodes = host.usable_bytes(device_node), host.gpu_nodes(device_node)
    if nbytes == host.cgroup_free_bytes:
        return nbytes, "what the memory limit of this container (cgroup) leaves"
    if not nodes:
        return nbytes, "MemAvailable"
    elsewhere = format_bytes(sum(node.available_bytes for node in nodes))
    return nbytes, f"MemAvailable, less {elsewhere} of it that is GPU memory"


# ------------------------------------------------------------------------------------------
# What NVML adds to the driver's attributes, where it is installed and willing to say.
#
# NVML is optional: `pynvml` may be missing, and on some machines (DGX Spark) most questions are
# answered Not Supported. Neither is an error; each becomes a reason.


ADDRESSING_MODES = {0: "none", 1: "hmm", 2: "ats"}
"""NVML's addressing modes by number."""


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """One device as NVML sees it."""

    c2c: bool | None
    """Whether the NVLink-C2C link is up; none: not said."""
    c2c_reason: str
    addressing: str | None
    """`ats`, `hmm` or `none`; none: not said."""
    addressing_reason: str


class C2cMode(Protocol):
    """NVML's answer about NVLink-C2C."""

    isC2cEnabled: int  # noqa: N815  NVML's spelling


class Nvml(Protocol):
    """The part of `pynvml` that is asked; a test hands in its own."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByPciBusId(self, bus: str, /) -> object: ...  # noqa: N802
    def nvmlDeviceGetC2cModeInfoV(self, handle: object, /) -> C2cMode: ...  # noqa: N802
    def nvmlDeviceGetAddressingMode(self, handle: object, /) -> int: ...  # noqa: N802


def import_nvml() -> Nvml | None:
    """The installed NVML bindings, or none: they only add certainty."""
    try:
        import pynvml
    except ImportError:
        return None
    module: Nvml = pynvml
    return module


def read_nvml(nvml: Nvml | None, driver: Driver, device: int) -> NvmlFacts:
    """Ask NVML about the device that the driver calls `device`, matched by its place on the bus."""
    if nvml is None:
        return _nothing("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _nothing(f"NVML did not start: {error}")
    try:
        return _ask(nvml, pci_bus_id(driver, device))
    except nvml.NVMLError as error:
        return _nothing(f"NVML does not know the device: {error}")
    finally:
        nvml.nvmlShutdown()


def pci_bus_id(driver: Driver, device: int) -> str:
    """The device's PCI address; ordinals differ between CUDA and NVML, addresses do not."""
    domain, bus, slot = (
        driver.attribute(name, device) or 0
        for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _ask(nvml: Nvml, address: str) -> NvmlFacts:
    handle = nvml.nvmlDeviceGetHandleByPciBusId(address)
    c2c: bool | None = None
    addressing: str | None = None
    try:
        c2c = bool(nvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled)
        c2c_reason = f"NVML says NVLink-C2C is {'on' if c2c else 'off'}"
    except (nvml.NVMLError, AttributeError) as error:  # older bindings lack the newer questions
        c2c_reason = f"NVML does not say whether there is a C2C link: {error}"
    try:
        mode = nvml.nvmlDeviceGetAddressingMode(handle)
        addressing = ADDRESSING_MODES.get(mode)
        addressing_reason = f"NVML says addressing mode {addressing or mode}"
    except (nvml.NVMLError, AttributeError) as error:
        addressing_reason = f"NVML does not say the addressing mode: {error}"
    return NvmlFacts(c2c, c2c_reason, addressing, addressing_reason)


def _nothing(reason: str) -> NvmlFacts:
    return NvmlFacts(None, reason, None, reason)


# ------------------------------------------------------------------------------------------
# What the kernel says about host memory: sizes, nodes, pages, a container's limit.
#
# Read from files anyone may read, under roots that arrive as arguments.


_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)", re.MULTILINE)
_LINE = re.compile(r"^(?:Node \d+ )?([A-Za-z_()]+):\s+(\d+) kB", re.MULTILINE)
_GIVEN_BY_NVIDIA = "System RAM (NVIDIA)"


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node that has memory."""

    id: int
    total_bytes: int
    available_bytes: int
    """Free, or page cache that could be dropped."""
    has_cpus: bool


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Host memory as the kernel counts it, before any of it is known to be a GPU's."""

    total_bytes: int
    available_bytes: int
    page_bytes: int
    nodes: tuple[NumaNode, ...] = ()
    cgroup_free_bytes: int | None = None
    """What the cgroup leaves us; none: no limit."""
    coherent_memory_mode: str = ""
    """The NVIDIA module's parameter: `driver` is CDMM; empty: default, or no module."""

    includes_gpu_memory: bool = False
    """Whether memory of GPUs is counted as the kernel's own."""

    def gpu_nodes(self, known: int | None = None) -> tuple[NumaNode, ...]:
        """Memory without CPUs is some GPU's where one GPU's is a node: by the driver, which may
        have named one, or by the kernel's files."""
        if known is None and not (self.includes_gpu_memory and any(node.has_cpus for node in self.nodes)):
            return ()
        return tuple(node for node in self.nodes if not node.has_cpus or node.id == known)

    def usable_bytes(self, gpu_node: int | None = None) -> int:
        """What a process could still take of the host's own memory."""
        elsewhere = sum(node.available_bytes for node in self.gpu_nodes(gpu_node))
        room = max(0, self.available_bytes - elsewhere)
        return room if self.cgroup_free_bytes is None else min(room, self.cgroup_free_bytes)

    def total_host_bytes(self, gpu_node: int | None = None) -> int:
        """All of the host's own memory."""
        return self.total_bytes - sum(node.total_bytes for node in self.gpu_nodes(gpu_node))

    def capacity_bytes(self) -> int:
        """As much of it as a process may take."""
        own = self.total_host_bytes()
        return own if self.cgroup_free_bytes is None else min(own, self.cgroup_free_bytes)


def read_host(proc: Path, sys: Path, page_bytes: int) -> HostFacts:
    """Read the facts; `page_bytes` is `os.sysconf("SC_PAGE_SIZE")` on the machine itself."""
    memory = _kilobytes(proc / "meminfo")
    for name in ("MemTotal", "MemAvailable"):
        if name not in memory:
            raise RunFailedError(
                f"{proc / 'meminfo'} has no {name}: host memory cannot be counted. "
                "gracetune needs Linux 3.14 or newer with /proc mounted."
            )
    return HostFacts(
        total_bytes=memory["MemTotal"],
        available_bytes=memory["MemAvailable"],
        page_bytes=page_bytes,
        nodes=_nodes(sys / "devices/system/node"),
        cgroup_free_bytes=_cgroup_leaves(proc, sys / "fs/cgroup"),
        coherent_memory_mode=_coherent_mode(proc / "driver/nvidia/params"),
        includes_gpu_memory=_counts_gpus(proc),
    )


def anonymous_nbytes(proc: Path, spans: Iterable[tuple[int, int]]) -> int:
    """Of spans of this process, each an address and its bytes, those that no file backs.

    Letting go of them makes room. Pages of a file that is mapped count as available anyway.
    """
    mapped = [
        (int(match[1], 16), int(match[2], 16))
        for match in _MAPPING.finditer(_text(proc / "self/maps"))
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
    """The `Name: 123 kB` lines of a meminfo file, in bytes; a missing file has none."""
    return {name: int(value) * 1024 for name, value in _LINE.findall(_text(path))}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _nodes(folder: Path) -> tuple[NumaNode, ...]:
    """Nodes with memory; a GPU announces empty ones too, one for each MIG slice it may become."""
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
                has_cpus=_text(path / "cpulist").strip() != "",
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def _counts_gpus(proc: Path) -> bool:
    """The driver names what it gives to the kernel; where that is hidden, it may have given."""
    regions = _text(proc / "iomem")
    if regions:
        return _GIVEN_BY_NVIDIA in regions
    driver = proc / "driver/nvidia"
    return driver.is_dir() and _coherent_mode(driver / "params") != "driver"


def _cgroup_leaves(proc: Path, mount: Path) -> int | None:
    """What the tightest cgroup (v2) from ours to the root leaves; its page cache can be dropped."""
    match = re.search(r"^0::(/.*)$", _text(proc / "self/cgroup"), re.MULTILINE)
    if match is None:
        return None
    parts = [part for part in match[1].split("/") if part]
    leaves = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit = _text(folder / "memory.max").strip()
        if not limit.isdecimal():
            continue
        used = int(_text(folder / "memory.current").strip() or 0)
        cache = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        leaves.append(max(0, int(limit) - used + (int(cache[1]) if cache else 0)))
    return min(leaves, default=None)


def _coherent_mode(params: Path) -> str:
    match = re.search(r'^CoherentGPUMemoryMode:\s*"?(\w*)"?', _text(params), re.MULTILINE)
    return match[1] if match else ""


# ------------------------------------------------------------------------------------------
# The machine this process runs on: its driver and its platform, opened together.


@dataclass(frozen=True, slots=True)
class Machine:
    """A platform, and the driver under it."""

    driver: Driver | None
    """None exactly where the platform has no GPU."""
    platform: Platform


class CountedDriver(Driver, Protocol):
    """A driver that knows how many devices it drives."""

    device_count: int


def read_this_host() -> HostFacts:
    """Host memory as it is now."""
    return read_host(Path("/proc"), Path("/sys"), os.sysconf("SC_PAGE_SIZE"))


def open_machine(
    device: int = 0, open_driver: Callable[[], CountedDriver] = open_cuda_driver
) -> Machine:
    """One device of this machine, or the machine without one and why."""
    host = read_this_host()
    try:
        driver = open_driver()
    except NoDriverError as error:
        return Machine(None, platform_without_gpu(host, str(error)))
    if not 0 <= device < driver.device_count:
        raise ConfigError(
            f"device is {device}; this machine shows {driver.device_count} GPU(s), counted from 0. "
            "CUDA_VISIBLE_DEVICES may hide others."
        )
    nvml = read_nvml(import_nvml(), driver, device)
    return Machine(driver, detect_platform(driver, device, host, nvml))
