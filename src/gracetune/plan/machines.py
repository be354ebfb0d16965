"""Memory sizes and rates of known machines, each figure with its source.

`MACHINES` describes one GPU of each machine and its share of the host. Each figure says whether it
was measured by us, published by others, inferred from a similar measurement, or assumed. A plan for
one of these machines is marked as simulated wherever it is printed.

`CLUSTERS` has the links between the GPUs of such machines. None of them was measured by us: plans
for several GPUs use published and assumed figures, and `gracetune plan --strategies` says so.

`FITTED_CONSTANTS` are the shares of these rates that a training step reaches, fitted on an H200:

    effective rate of a kind of kernel = machine's rate * fitted share
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from gracetune.errors import ConfigError
from gracetune.memory.platform import DeviceSpec, Link, Platform, Rates
from gracetune.plan.launch_overhead import LaunchCosts
from gracetune.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gracetune.plan.trace_records import Op

    Timer = Callable[[Op, float], float | None]
    """Returns the seconds of one kernel at a multiple of the traced batch; None if it cannot time
    the kernel."""


Kind = Literal["measured", "published", "inferred", "assumed"]
"""Origin of a figure: measured by this project, published by others, inferred from a similar
measurement, or assumed."""


@dataclass(frozen=True, slots=True)
class SourcedFigure:
    """A number, with the source that it comes from."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """One GPU with its share of the host: memory sizes, bandwidths and matmul rate."""

    title: str
    link: Link
    device_memory: SourcedFigure
    """Bytes of device memory that a program can use, which is less than the advertised size."""
    host_memory: SourcedFigure
    page_bytes: int
    attributes: Mapping[str, int]
    bf16_flops: SourcedFigure
    """Flops per second that large bf16 matmuls reach."""
    figures: Mapping[str, SourcedFigure]
    """Bandwidths, by field name of `memory.platform.Rates`."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return int(self.host_memory.value)

    def rates(self) -> Rates:
        """Return the bandwidths without their sources."""
        return Rates(**{name: figure.value for name, figure in self.figures.items()})

    def device(self) -> DeviceSpec:
        """Return the GPU's description, which can also configure a simulated CUDA driver."""
        return DeviceSpec(int(self.device_memory.value), self.attributes, self.rates())

    def platform(self) -> Platform:
        """Return what hardware detection would find on this machine, with all host memory free."""
        shared = self.link is Link.INTEGRATED
        why = f"published data of {self.title}, not this machine"
        return Platform(
            link=self.link,
            device=0,
            device_bytes=self.host_bytes if shared else int(self.device_memory.value),
            host_bytes=self.host_bytes,
            host_total_bytes=self.host_bytes,
            page_bytes=self.page_bytes,
            host_node=None,
            device_node=None,
            c2c=self.link in (Link.COHERENT, Link.INTEGRATED),
            rates=self.rates(),
            reasons={field.name: why for field in fields(Platform) if field.name != "reasons"},
        )


def find_machine(name: str) -> MachineSpec:
    """Return a machine by name; the error lists the known names."""
    if name not in MACHINES:
        raise ConfigError(
            f"--machine {name} is unknown. Known machines: {', '.join(sorted(MACHINES))}. "
            "Omit --machine to plan for this machine."
        )
    return MACHINES[name]


_HERE = "this project, one H200 SXM on a PCIe 5 host, driver 580, torch 2.11, 2026-11-15"
_DNHKNG = "dnhkng, memory measurements of a GH200 with 480 GB"
_SCHIEFFER = "Schieffer et al., arXiv 2407.07850, as quoted in later work"
_MEGATRON = "NVIDIA/Megatron-LM issue 6491: per GPU, both busy"
_GARDEN = "glennklockwood.com/garden, from NVIDIA's architecture briefs"
_SPARK = "NVIDIA DGX Spark data sheet"
_GH200_SHEET = "NVIDIA GH200 data sheet"

_MATMUL_SHARE = 769 / 989.4
"""Share of the published dense bf16 rate that an 8192 x 8192 x 8192 matmul reached on an H200.
Other GPUs are assumed to reach it too."""
_STREAM_SHARE = 4194 / 4800
"""Share of the published memory bandwidth that a device copy reached on an H200. Other GPUs are
assumed to reach it too."""
_PREFETCH_IN_SHARE = 49.5 / 55.5
_IN_PLACE_SHARE = 36 / 55.5
_PREFETCH_OUT_SHARE = 10.5 / 55.3


def _measured(value: float, source: str = _HERE) -> SourcedFigure:
    return SourcedFigure(value, "measured", source)


def _inferred(value: float, source: str) -> SourcedFigure:
    return SourcedFigure(value, "inferred", source)


def _matmul(published_tflops: float, source: str) -> SourcedFigure:
    return _inferred(
        published_tflops * 1e12 * _MATMUL_SHARE,
        f"{published_tflops:g} dense TFLOP/s ({source}) times the share reached on an H200",
    )


def _device_rate(published: float, source: str) -> SourcedFigure:
    return _inferred(
        published * _STREAM_SHARE,
        f"{published / 1e12:g} TB/s ({source}) times the share reached on an H200",
    )


_CALLS = {
    "copy_call_s": _measured(6e-6),
    "prefetch_call_s": _measured(18e-6),
    "prefetch_blocking_share": _measured(1010 / 1389),
}

_PCIE_5 = {
    "copy_in": _measured(55.5e9),
    "copy_out": _measured(55.3e9),
    "prefetch_in": _measured(49.5e9),
    "prefetch_out": _measured(10.5e9),
    "fault": _measured(5.0e9),
    "read_in_place": _measured(36e9),
    "host": SourcedFigure(
        100e9, "assumed", "a few channels of DDR5; only simulated CPU work uses it"
    ),
    "both_ways_share": _measured(45.6 / 55.4),
    **_CALLS,
}

_C2C = {
    "copy_in": _measured(375e9, f"{_SCHIEFFER}; 377 by {_DNHKNG}"),
    "copy_out": _measured(297e9, f"{_SCHIEFFER}; 297 by {_DNHKNG}"),
    "prefetch_in": _inferred(375e9 * _PREFETCH_IN_SHARE, "the copy's rate times the H200's share"),
    "prefetch_out": _inferred(
        297e9 * _PREFETCH_OUT_SHARE, "the copy's rate times the H200's share"
    ),
    "fault": _measured(23.5e9, f"{_DNHKNG}: 18 to 29 when CPU and GPU take turns"),
    "read_in_place": _measured(333e9, f"{_DNHKNG}: 328 to 339"),
    "host": _measured(348e9, f"{_DNHKNG}: best, at 32 threads"),
    "both_ways_share": _measured(0.5, "NVIDIA/nvbandwidth issue 41: about half each way"),
    **_CALLS,
}

_C2C_SHARED = {
    **_C2C,
    "copy_in": _measured(176e9, _MEGATRON),
    "copy_out": _inferred(176e9 * 297 / 375, "GH200's ratio of the two directions"),
    "prefetch_in": _inferred(176e9 * _PREFETCH_IN_SHARE, "the copy's rate times the H200's share"),
    "prefetch_out": _inferred(
        176e9 * 297 / 375 * _PREFETCH_OUT_SHARE, "the copy's rate times the H200's share"
    ),
    "read_in_place": _inferred(176e9 * 333 / 375, "GH200's ratio of reading to copying"),
    "host": _inferred(348e9 / 2, "GH200's rate, shared by two GPUs"),
}

_PCIE_ATTRIBUTES = {
    "managed_memory": 1,
    "integrated": 0,
    "concurrent_managed_access": 1,
    "pageable_memory_access": 0,
    "pageable_memory_access_uses_host_page_tables": 0,
    "async_engine_count": 3,
    "host_numa_id": 0,
}
_C2C_ATTRIBUTES = {
    **_PCIE_ATTRIBUTES,
    "pageable_memory_access": 1,
    "pageable_memory_access_uses_host_page_tables": 1,
    "direct_managed_mem_access_from_host": 1,
}

_HOST_1_TIB = SourcedFigure(1024 * GIB, "assumed", "a common size; pass --host-memory for yours")

MACHINES: Mapping[str, MachineSpec] = {
    "gh200-96": MachineSpec(
        title="GH200, 96 GB HBM3, 480 GB LPDDR5X",
        link=Link.COHERENT,
        device_memory=_measured(94.9 * GIB, "Lightning-AI/litgpt issue 1892: what torch reports"),
        host_memory=SourcedFigure(480e9, "published", _GH200_SHEET),
        page_bytes=65536,
        attributes=_C2C_ATTRIBUTES,
        bf16_flops=_matmul(989.4, _GARDEN),
        figures={**_C2C, "device": _measured(3.73e12, f"{_DNHKNG}, BabelStream")},
    ),
    "gh200-144": MachineSpec(
        title="GH200, 144 GB HBM3e, 480 GB LPDDR5X",
        link=Link.COHERENT,
        device_memory=_measured(142.5 * GIB, "vllm-project/vllm issue 35313: the driver's total"),
        host_memory=SourcedFigure(480e9, "published", _GH200_SHEET),
        page_bytes=65536,
        attributes=_C2C_ATTRIBUTES,
        bf16_flops=_matmul(989.4, _GARDEN),
        figures={**_C2C, "device": _device_rate(4.9e12, _GH200_SHEET)},
    ),
    "gb200": MachineSpec(
        title="GB200, one of its two GPUs and half of its 480 GB LPDDR5X",
        link=Link.COHERENT,
        device_memory=SourcedFigure(186e9, "published", "NVIDIA GB200 NVL72: 13.4 TB for 72 GPUs"),
        host_memory=SourcedFigure(
            240e9, "published", "NVIDIA GB200 data sheet: 480 GB for two GPUs"
        ),
        page_bytes=65536,
        attributes=_C2C_ATTRIBUTES,
        bf16_flops=_matmul(2500, _GARDEN),
        figures={**_C2C_SHARED, "device": _device_rate(8e12, _GARDEN)},
    ),
    "gb10": MachineSpec(
        title="DGX Spark (GB10), 128 GB shared by CPU and GPU",
        link=Link.INTEGRATED,
        device_memory=_inferred(119.6 * GIB, "128 GB less what firmware and kernel reserve"),
        host_memory=_inferred(119.6 * GIB, "128 GB less what firmware and kernel reserve"),
        page_bytes=4096,
        attributes={**_C2C_ATTRIBUTES, "integrated": 1},
        bf16_flops=_matmul(125, f"{_SPARK}: 1000 sparse FP4, an eighth of it"),
        figures={
            **{
                name: _inferred(273e9 / 2, "a copy reads and writes the shared memory")
                for name in ("copy_in", "copy_out", "prefetch_in", "prefetch_out", "fault")
            },
            "read_in_place": SourcedFigure(273e9, "published", _SPARK),
            "device": SourcedFigure(273e9, "published", _SPARK),
            "host": SourcedFigure(273e9, "published", _SPARK),
            "both_ways_share": _inferred(0.5, "both directions use the same memory"),
            **_CALLS,
        },
    ),
    "h100-pcie": MachineSpec(
        title="H100 80 GB on a PCIe 5 host",
        link=Link.MANAGED,
        device_memory=SourcedFigure(
            79 * GIB, "assumed", "an 80 GB GPU, less what the driver reserves"
        ),
        host_memory=_HOST_1_TIB,
        page_bytes=4096,
        attributes=_PCIE_ATTRIBUTES,
        bf16_flops=_matmul(989.4, _GARDEN),
        figures={**_PCIE_5, "device": _device_rate(3.35e12, _GARDEN)},
    ),
    "h200-pcie": MachineSpec(
        title="H200 141 GB on a PCIe 5 host",
        link=Link.MANAGED,
        device_memory=_measured(139 * GIB, f"{_HERE}; to the GiB"),
        host_memory=_HOST_1_TIB,
        page_bytes=4096,
        attributes=_PCIE_ATTRIBUTES,
        bf16_flops=_measured(769e12),
        figures={**_PCIE_5, "device": _measured(4194e9)},
    ),
    "b200-pcie": MachineSpec(
        title="B200 on a PCIe 5 host",
        link=Link.MANAGED,
        device_memory=SourcedFigure(
            179 * GIB, "published", "Vultr, HGX B200 hardware overview, 2026"
        ),
        host_memory=_HOST_1_TIB,
        page_bytes=4096,
        attributes=_PCIE_ATTRIBUTES,
        bf16_flops=_matmul(2250, _GARDEN),
        figures={**_PCIE_5, "device": _device_rate(8e12, _GARDEN)},
    ),
}


# Links between GPUs, and to storage. Rates are per GPU and direction, unless they say otherwise.


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The connections between the GPUs of several machines of one kind."""

    gpus_per_machine: SourcedFigure
    """Number of GPUs that share a host."""
    nvlink: SourcedFigure
    """Bytes per second of a GPU's NVLink, in one direction."""
    network: SourcedFigure
    """Bytes per second of the network between machines, for each GPU and direction."""
    cpu_memory: SourcedFigure
    """Bytes per second with which the CPUs of a machine read and write their memory."""
    nvlink_gpus: SourcedFigure | None = None
    """Number of GPUs of an NVLink domain; None: those of a machine."""
    storage: SourcedFigure = SourcedFigure(
        5e9, "assumed", "one client of a parallel file system, on a 100 Gb/s card"
    )
    """Bytes per second that a machine reads from storage."""
    all_storage: SourcedFigure = SourcedFigure(
        100e9, "assumed", "a parallel file system with a few dozen drives"
    )
    """Bytes per second that all machines together read from storage."""


_FUSCO = "Fusco et al., arXiv 2408.11556: nodes of Alps with four GH200"
_HGX = "NVIDIA HGX H100 data sheet: 900 GB/s in both directions, eight GPUs"
_NDR = SourcedFigure(50e9, "published", "NVIDIA DGX H100: one 400 Gb/s card per GPU")
_DDR5 = SourcedFigure(400e9, "assumed", "16 channels of DDR5-4800 have 614 GB/s; two thirds of it")


def _grace(count: int) -> SourcedFigure:
    return _inferred(count * 348e9, f"{count} times the rate of one Grace ({_DNHKNG})")


def _gpus(count: int, source: str) -> SourcedFigure:
    return SourcedFigure(count, "published", source)


_QUAD_GH200 = ClusterSpec(
    gpus_per_machine=_gpus(4, f"{_FUSCO}; machines with one or two exist too"),
    nvlink=SourcedFigure(3 * 150e9, "published", f"{_FUSCO}: 150 GB/s to each of three others"),
    network=SourcedFigure(25e9, "published", f"{_FUSCO}: one 200 Gb/s card per GPU"),
    cpu_memory=_grace(4),
)
_HGX_HOPPER = ClusterSpec(
    gpus_per_machine=_gpus(8, _HGX),
    nvlink=SourcedFigure(450e9, "published", _HGX),
    network=_NDR,
    cpu_memory=_DDR5,
)

CLUSTERS: Mapping[str, ClusterSpec] = {
    "gh200-96": _QUAD_GH200,
    "gh200-144": _QUAD_GH200,
    "gb200": ClusterSpec(
        gpus_per_machine=_gpus(4, "NVIDIA GB200 NVL72: 18 trays with two GB200 each"),
        nvlink=SourcedFigure(900e9, "published", "NVIDIA GB200 NVL72: 1.8 TB/s in both directions"),
        nvlink_gpus=_gpus(72, "NVIDIA GB200 NVL72"),
        network=_NDR,
        cpu_memory=_grace(2),
    ),
    "gb10": ClusterSpec(
        gpus_per_machine=_gpus(1, _SPARK),
        nvlink=SourcedFigure(25e9, "published", f"{_SPARK}: no NVLink, a 200 Gb/s card"),
        network=SourcedFigure(25e9, "published", f"{_SPARK}: a 200 Gb/s card"),
        cpu_memory=SourcedFigure(273e9, "published", _SPARK),
    ),
    "h100-pcie": _HGX_HOPPER,
    "h200-pcie": _HGX_HOPPER,
    "b200-pcie": ClusterSpec(
        gpus_per_machine=_gpus(8, "NVIDIA HGX B200 data sheet"),
        nvlink=SourcedFigure(900e9, "published", "NVIDIA HGX B200: 1.8 TB/s in both directions"),
        network=_NDR,
        cpu_memory=_DDR5,
    ),
}
"""How machines of `MACHINES` are connected, by the same names."""
THIS_CLUSTER = _HGX_HOPPER
"""Links that are assumed between GPUs like the one in this machine, whose own are not measured."""

_NCCL_TUNING = "NVIDIA/nccl, src/graph/tuning.cc: ring, protocol Simple"
NETWORK_CONSTANTS: Mapping[str, SourcedFigure] = {
    "nvlink_share": SourcedFigure(
        0.8, "assumed", "about 360 GB/s of 450 that all-gathers of large messages reach on H100"
    ),
    "network_share": SourcedFigure(
        0.93, "published", "NVIDIA/nccl-tests issue 290: 46 to 48 GB/s of a card with 50"
    ),
    "base_latency_s": SourcedFigure(8.4e-6, "published", _NCCL_TUNING),
    "nvlink_hop_s": SourcedFigure(3.4e-6, "published", f"{_NCCL_TUNING}, a step over NVLink"),
    "network_hop_s": SourcedFigure(14e-6, "published", f"{_NCCL_TUNING}, a step over the network"),
}
"""Constants of the time of collectives. A `share` is the part of the published rate that large
collectives reach."""


# Fitted constants. The fit is on an H200; other machines get the same shares of their own rates.


_STEP = "8 blocks of Wan-14B, compiled, batch 2, by kernel time on an H200, torch 2.11, 2026-11-15"
_LONG = "40 blocks of Wan-14B on an H200: compiled and kept at batch 2, 0.985 s; eager, 0.654 s"
_FUSED = "8 blocks of Wan-14B with fused LoRA, compiled, kept, batch 2, on an H200: 728 TFLOP/s"
_RING = "ten blocks of Wan-14B, resident, eager and kept at batch 2, on an H200: 0.312 s"
_HOST = (
    "launch probe on two busy x86 cores, Python 3.11, torch 2.13, 2026-11-18; other hosts may "
    "differ by factors"
)
_HOOKS = "half and all of Flux's blocks streamed, eager, on an H200, 2026-11-15"
_KERNELS = "one kernel at a time on an H200, torch 2.11, 2026-11-15"

FITTED_CONSTANTS: Mapping[str, SourcedFigure] = {
    "gemm_share": SourcedFigure(0.89, "measured", f"{_LONG}; {_STEP} would give 0.97"),
    "fp8_share": SourcedFigure(
        1548 / 769 * 0.88,
        "inferred",
        f"{_KERNELS}: row-wise matmuls without quantization, less what bf16 loses in a step",
    ),
    "attention_forward_share": SourcedFigure(0.76, "measured", f"{_STEP}: 10 ms; and {_LONG}"),
    "attention_backward_share": SourcedFigure(0.62, "measured", f"{_STEP}: 31 ms; and {_LONG}"),
    "compiled_share": SourcedFigure(
        0.75, "measured", f"{_FUSED}; 16.8 ms of fused and small kernels for what 11 ms would copy"
    ),
    "eager_share": SourcedFigure(0.75, "inferred", f"what matmuls and attention leave of {_RING}"),
    "step_share": SourcedFigure(
        0.88, "inferred", f"{_FUSED} where matmuls alone reach 757 to 805 TFLOP/s; and {_LONG}"
    ),
    "gap_s": SourcedFigure(2e-6, "assumed", "gap between two kernels of one stream"),
    "forward_s": SourcedFigure(8e-6, "measured", f"an operator that the model calls: {_HOST}"),
    "backward_s": SourcedFigure(5e-6, "measured", f"an operator that autograd calls: {_HOST}"),
    "custom_op_s": SourcedFigure(
        90e-6, "measured", f"a custom operator, without its kernels: {_HOST}"
    ),
    "custom_op_backward_s": SourcedFigure(
        13e-6, "measured", f"a custom operator that autograd calls: {_HOST}"
    ),
    "checkpoint_s": SourcedFigure(6e-6, "measured", f"what checkpointing adds to a call: {_HOST}"),
    "checkpoint_recompute_s": SourcedFigure(
        6e-6, "measured", f"what it adds to a recomputed call: {_HOST}"
    ),
    "optimizer_s": SourcedFigure(
        18e-6, "measured", f"clipping and an optimizer step, per tensor: {_HOST}"
    ),
    "cast_s": SourcedFigure(3e-6, "assumed", "an allocation, and a share of a few kernels"),
    "cast_backward_s": SourcedFigure(3e-6, "assumed", "as in forward"),
    "stream_s": SourcedFigure(0.25e-3, "measured", f"streaming, per block in forward: {_HOOKS}"),
    "stream_backward_s": SourcedFigure(
        0.22e-3, "measured", f"streaming, per block in backward: {_HOOKS}"
    ),
    "send_s": SourcedFigure(
        0.6e-3, "inferred", "what other hooks leave of the gap before an eager block on an H200"
    ),
    "send_backward_s": SourcedFigure(0.3e-3, "assumed", "half of forward's, which has more hooks"),
    "fragmentation": SourcedFigure(
        0.03,
        "assumed",
        "share of the peak that torch's allocator holds unused. A video planned for 96 GB needed "
        "1 % with expandable segments; fixed segments may need more",
    ),
    "context_nbytes": SourcedFigure(0.6 * GIB, "assumed", "device memory of the CUDA context"),
    "library_nbytes": SourcedFigure(
        0.05 * GIB, "inferred", "workspaces of cuBLAS and cuDNN, from measured peaks"
    ),
}
"""Constants of the cost model, by name. A `share` is the part of the machine's matmul rate or
memory bandwidth that a kind of kernel reaches in a training step."""
NO_LAUNCH_COSTS = LaunchCosts()
"""Launch costs of zero, for tests with round numbers."""
TYPICAL_LAUNCH_COSTS = LaunchCosts(
    **{field.name: FITTED_CONSTANTS[field.name].value for field in fields(LaunchCosts)}
)
"""CPU launch costs assumed for machines known only by name. Those of the machine at hand are
measured."""


@dataclass(frozen=True, slots=True)
class EffectiveRates:
    """Rates that a training step reaches on one machine, in flops or bytes per second."""

    gemm: float
    fp8: float
    attention_forward: float
    attention_backward: float
    compiled: float
    """Bandwidth of fused elementwise kernels."""
    eager: float
    """Bandwidth of eager elementwise kernels."""
    memory: float
    """Bandwidth of a plain copy, which limits matmuls with few flops per byte."""
    gap_s: float
    """Idle seconds between two consecutive kernels."""
    link_in: float
    """Bandwidth from host to device."""
    link_out: float
    """Bandwidth from device to host."""
    both_ways_share: float
    """Share of its bandwidth that the host-device link keeps per direction while both are busy."""
    timer: Timer | None = None
    """Function that times single kernels on the machine at hand; None: use the rates above."""
    in_place: float = float("inf")
    """Bandwidth of kernels that use host memory in place."""
    prefetch: float = float("inf")
    """Bandwidth of managed pages that move to the device and back, in the slower direction."""
    step_share: float = 1.0
    """Speed of a matmul inside a long step, as a share of its speed when timed alone. A GPU that
    computes for seconds reaches its power limit and lowers its clock."""
    host: LaunchCosts = NO_LAUNCH_COSTS


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Peak rates of a machine (of large matmuls and plain copies), measured or published."""

    flops: float
    """Flops per second of large bf16 matmuls."""
    memory: float
    """Bytes per second that a copy within device memory reads and writes."""
    link_in: float
    link_out: float
    both_ways_share: float = 1.0
    """Share of its bandwidth that the host-device link keeps per direction while both are busy."""
    timer: Timer | None = None
    """Function that times single kernels on the machine at hand; None for other machines."""
    host: LaunchCosts = TYPICAL_LAUNCH_COSTS
    """CPU time to launch kernels, measured or typical."""
    in_place: float | None = None
    """Bytes per second of kernels that use host memory in place. None: the share of the link's
    bandwidth that was measured on an H200."""


def machine_rates(machine: MachineSpec) -> MachineRates:
    """Return the peak rates of a known machine."""
    rates = machine.rates()
    return MachineRates(
        flops=machine.bf16_flops.value,
        memory=rates.device,
        link_in=rates.copy_in,
        link_out=rates.copy_out,
        both_ways_share=rates.both_ways_share,
        in_place=rates.read_in_place,
    )


def effective_rates(rates: MachineRates) -> EffectiveRates:
    """Return the rates that a training step reaches: peak rates times fitted shares."""
    share = {name: figure.value for name, figure in FITTED_CONSTANTS.items()}
    return EffectiveRates(
        gemm=rates.flops * share["gemm_share"],
        fp8=rates.flops * share["fp8_share"],
        attention_forward=rates.flops * share["attention_forward_share"],
        attention_backward=rates.flops * share["attention_backward_share"],
        compiled=rates.memory * share["compiled_share"],
        eager=rates.memory * share["eager_share"],
        memory=rates.memory,
        gap_s=share["gap_s"],
        link_in=rates.link_in,
        link_out=rates.link_out,
        both_ways_share=rates.both_ways_share,
        timer=rates.timer,
        in_place=rates.in_place or rates.link_in * _IN_PLACE_SHARE,
        prefetch=rates.link_out * _PREFETCH_OUT_SHARE,
        step_share=share["step_share"],
        host=rates.host,
    )
