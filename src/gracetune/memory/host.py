"""What the kernel says about host memory: sizes, nodes, pages, a container's limit.

Read from files anyone may read, under roots that arrive as arguments.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gracetune.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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
    limit_bytes: int | None = None
    """What the cgroup leaves us; none: no limit."""
    coherent_memory_mode: str = ""
    """The NVIDIA module's parameter: `driver` is CDMM; empty: default, or no module."""

    counts_gpus: bool = False
    """Whether memory of GPUs is counted as the kernel's own."""

    def gpu_nodes(self, known: int | None = None) -> tuple[NumaNode, ...]:
        """Memory without CPUs is some GPU's where one GPU's is a node: by the driver, which may
        have named one, or by the kernel's files."""
        if known is None and not (self.counts_gpus and any(node.has_cpus for node in self.nodes)):
            return ()
        return tuple(node for node in self.nodes if not node.has_cpus or node.id == known)

    def room_bytes(self, gpu_node: int | None = None) -> int:
        """What a process could still take of the host's own memory."""
        elsewhere = sum(node.available_bytes for node in self.gpu_nodes(gpu_node))
        room = max(0, self.available_bytes - elsewhere)
        return room if self.limit_bytes is None else min(room, self.limit_bytes)

    def own_bytes(self, gpu_node: int | None = None) -> int:
        """All of the host's own memory."""
        return self.total_bytes - sum(node.total_bytes for node in self.gpu_nodes(gpu_node))

    def size_bytes(self) -> int:
        """As much of it as a process may take."""
        own = self.own_bytes()
        return own if self.limit_bytes is None else min(own, self.limit_bytes)


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
        limit_bytes=_cgroup_leaves(proc, sys / "fs/cgroup"),
        coherent_memory_mode=_coherent_mode(proc / "driver/nvidia/params"),
        counts_gpus=_counts_gpus(proc),
    )


def private_nbytes(proc: Path, spans: Iterable[tuple[int, int]]) -> int:
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
