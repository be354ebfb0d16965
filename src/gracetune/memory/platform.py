"""What the hardware is: the link between host and device memory, their sizes, and why we say so.

Decided once a device, from attributes the driver reports, never from a card's name: one host can
hold a coherent GPU beside PCIe ones. Files under /proc and /sys are read through roots that arrive
as arguments, so that a folder can stand in for a machine. What to do with the answer is for others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gracetune.memory.host import HostFacts, NumaNode, read_host
from gracetune.memory.nvml import NvmlFacts, import_nvml, read_nvml
from gracetune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gracetune.memory.driver import Driver

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
    "detect",
    "import_nvml",
    "read_host",
    "read_nvml",
    "without_gpu",
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
    call_s: float = 6e-6
    """What issuing one copy costs the calling thread."""
    prefetch_call_s: float = 18e-6
    """What issuing one prefetch costs the calling thread, however small."""
    prefetch_held_share: float = 0.7
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
    why: Mapping[str, str] = field(hash=False)
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
    why={"link": "there is no CUDA device"},
)
"""The platform of a machine without a GPU, where host memory was not asked about either."""


@dataclass(frozen=True, slots=True)
class LinkRule:
    """A link, and the facts that prove it."""

    link: Link
    needs: Mapping[str, int]
    why: str


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


def detect(
    driver: Driver,
    device: int,
    host: HostFacts,
    nvml: NvmlFacts | None = None,
    rates: Rates | None = None,
) -> Platform:
    """What one device is, asked of the driver, the kernel's files and, where there is one, NVML."""
    facts = {name: driver.attribute(name, device) for name in _LINK_ATTRIBUTES}
    c2c, c2c_why = _c2c(nvml)
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
        host_total_bytes=host.own_bytes(device_node),
        page_bytes=host.page_bytes,
        host_node=host_node,
        device_node=device_node,
        c2c=None if c2c is None else bool(c2c),
        rates=rates,
        numa_nodes=host.nodes,
        why={
            "link": f"{rule.why} ({_spell(facts)}){_addressing(nvml)}",
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
            "c2c": c2c_why,
            "numa_nodes": "the kernel's list of nodes with memory",
            "rates": (
                "not measured yet: `gracetune diagnose` measures them"
                if rates is None
                else "given by who asked"
            ),
        },
    )


def without_gpu(host: HostFacts, reason: str) -> Platform:
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
        why={"link": reason, "host_bytes": host_why, "page_bytes": "the kernel's page size"},
    )


def _rule(facts: Mapping[str, int | None]) -> LinkRule:
    for rule in LINK_RULES:
        if all(facts[name] == value for name, value in rule.needs.items()):
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
        return None, nvml.c2c_why
    return int(nvml.c2c), nvml.c2c_why


def _addressing(nvml: NvmlFacts | None) -> str:
    return "" if nvml is None or nvml.addressing is None else f"; {nvml.addressing_why}"


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
    nbytes, nodes = host.room_bytes(device_node), host.gpu_nodes(device_node)
    if nbytes == host.limit_bytes:
        return nbytes, "what the memory limit of this container (cgroup) leaves"
    if not nodes:
        return nbytes, "MemAvailable"
    elsewhere = format_bytes(sum(node.available_bytes for node in nodes))
    return nbytes, f"MemAvailable, less {elsewhere} of it that is GPU memory"
