"""Platform detection, from recorded files and attributes of real machines."""

# ruff: noqa: N802  NVML's own names

import dataclasses
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.simulated_driver import SimulatedDriver

from gracetune.errors import RunFailedError
from gracetune.memory.platform import (
    LINK_RULES,
    NO_GPU,
    DeviceSpec,
    HostFacts,
    Link,
    NumaNode,
    Platform,
    Rates,
    anonymous_nbytes,
    detect_platform,
    import_nvml,
    pci_bus_id,
    platform_without_gpu,
    read_host,
    read_nvml,
)

GIB = 1024**3
MACHINES = Path(__file__).parents[2] / "data" / "machines"
NAMES = sorted(path.name for path in MACHINES.iterdir())
RATES = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9)


class FakeNvml:
    """Answers numbers, and raises for text, as NVML does for Not Supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, answers: Mapping[str, object], at: str = "00000000:00:00.0") -> None:
        self.answers = answers
        self.at = at
        self.running = 0

    def nvmlInit(self) -> None:
        self.running += 1
        if "init" in self.answers:
            self.running -= 1
            raise self.NVMLError(self.answers["init"])

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus: str, /) -> object:
        if bus != self.at:
            raise self.NVMLError(f"no device at {bus}")
        return bus

    def _answer(self, name: str) -> int:
        answer = self.answers[name]
        if isinstance(answer, str):
            raise self.NVMLError(answer)
        assert isinstance(answer, int)
        return answer

    def nvmlDeviceGetC2cModeInfoV(self, handle: object, /) -> SimpleNamespace:
        return SimpleNamespace(isC2cEnabled=self._answer("c2c"))

    def nvmlDeviceGetAddressingMode(self, handle: object, /) -> int:
        return self._answer("addressing")


def driver(attributes: Mapping[str, int], nbytes: int = GIB) -> SimulatedDriver:
    return SimulatedDriver([DeviceSpec(nbytes, attributes, RATES)], host_bytes=GIB)


def detected(name: str) -> tuple[Platform, dict[str, object]]:
    folder = MACHINES / name
    facts = json.loads((folder / "facts.json").read_text())
    nbytes = int(facts["device_gib"] * GIB)
    asked = driver(facts["attributes"], nbytes)
    host = read_host(folder / "proc", folder / "sys", facts["page_bytes"])
    nvml = None
    if facts["nvml"] is not None:
        bus = f"00000000:{facts['attributes'].get('pci_bus_id', 0):02x}:00.0"
        nvml = read_nvml(FakeNvml(facts["nvml"], bus), asked, 0)
    return detect_platform(asked, 0, host, nvml), facts


@pytest.mark.parametrize("name", NAMES)
def test_each_machine_is_what_it_is(name: str) -> None:
    platform, facts = detected(name)
    expect = facts["expect"]
    assert isinstance(expect, dict)
    assert platform.link.value == expect["link"]
    assert platform.host_bytes == pytest.approx(expect["host_gib"] * GIB, abs=4096)
    assert platform.host_total_bytes == pytest.approx(expect["host_total_gib"] * GIB, abs=4096)
    assert platform.device_bytes == pytest.approx(expect["device_gib"] * GIB, abs=4096)
    assert platform.page_bytes == facts["page_bytes"]
    assert platform.host_node == expect["host_node"]
    assert platform.device_node == expect["device_node"]
    assert platform.c2c == expect["c2c"]
    assert platform.has_managed == (platform.link is not Link.COPY)


@pytest.mark.parametrize("name", NAMES)
def test_each_value_has_a_reason(name: str) -> None:
    platform, _ = detected(name)
    concluded = {field.name for field in dataclasses.fields(Platform)} - {"device", "reasons"}
    assert set(platform.reasons) == concluded
    assert all(platform.reasons.values())


def test_a_platform_becomes_json() -> None:
    platform, _ = detected("gh200-numa")
    text = json.dumps(dataclasses.asdict(platform), default=lambda value: value.value)
    assert json.loads(text)["reasons"]["link"].startswith("the device translates addresses")


def test_gpu_memory_that_is_a_node_is_not_host_memory() -> None:
    platform, _ = detected("gh200-numa")
    assert "MemAvailable minus 90.0 GiB of GPU memory" in platform.reasons["host_bytes"]


def test_nodes_without_memory_are_not_listed() -> None:
    platform, _ = detected("gh200-numa")
    assert [(node.id, node.has_cpus) for node in platform.numa_nodes] == [(0, True), (1, False)]


def test_the_link_reason_mentions_nvml() -> None:
    assert detected("gh200-numa")[0].reasons["link"].endswith("; NVML reports addressing mode ats")
    assert "NVML" not in detected("gb10")[0].reasons["link"]


def test_cdmm_is_named_as_the_reason_for_no_node() -> None:
    assert "CDMM" in detected("gh200-cdmm")[0].reasons["device_node"]
    assert "CDMM" not in detected("h200-pcie")[0].reasons["device_node"]


def test_a_container_gets_what_its_tightest_limit_leaves() -> None:
    assert "cgroup" in detected("container")[0].reasons["host_bytes"]


def test_one_host_may_hold_two_kinds_of_device() -> None:
    coherent = {"concurrent_managed_access": 1, "pageable_memory_access_uses_host_page_tables": 1}
    both = SimulatedDriver(
        [
            DeviceSpec(GIB, coherent, RATES),
            DeviceSpec(GIB, {"concurrent_managed_access": 1}, RATES),
        ],
        host_bytes=GIB,
    )
    host = HostFacts(GIB, GIB, 4096)
    assert [detect_platform(both, i, host).link for i in (0, 1)] == [Link.COHERENT, Link.MANAGED]


def test_unknown_attributes_give_a_copy_link() -> None:
    platform = detect_platform(driver({}), 0, HostFacts(GIB, GIB, 4096))
    assert platform.link is Link.COPY
    assert "integrated unknown" in platform.reasons["link"]


def test_the_last_rule_requires_nothing() -> None:
    assert LINK_RULES[-1].required == {}
    assert {rule.link for rule in LINK_RULES} == set(Link) - {Link.NONE}


def test_given_rates_are_used() -> None:
    platform = detect_platform(driver({}), 0, HostFacts(GIB, GIB, 4096), rates=RATES)
    assert platform.rates is RATES
    assert platform.reasons["rates"] == "given by the caller"


def test_a_numa_node_without_a_number_is_none() -> None:
    platform = detect_platform(
        driver({"numa_config": 1, "numa_id": -1}), 0, HostFacts(GIB, GIB, 4096)
    )
    assert platform.device_node is None


def test_gpu_memory_does_not_count_as_usable_host_memory() -> None:
    nodes = (
        NumaNode(0, 480 * GIB, 40 * GIB, has_cpus=True),
        NumaNode(1, 96 * GIB, 90 * GIB, has_cpus=False),
    )
    host = HostFacts(576 * GIB, 130 * GIB, 4096, nodes, includes_gpu_memory=True)
    assert (host.usable_bytes(), host.capacity_bytes()) == (40 * GIB, 480 * GIB)
    alone = dataclasses.replace(
        host, includes_gpu_memory=False
    )  # memory of another kind, which is the host's
    assert (alone.usable_bytes(), alone.capacity_bytes()) == (130 * GIB, 576 * GIB)
    limited = dataclasses.replace(host, cgroup_free_bytes=8 * GIB)
    assert (limited.usable_bytes(), limited.capacity_bytes()) == (8 * GIB, 8 * GIB)
    unsaid = tuple(dataclasses.replace(node, has_cpus=False) for node in nodes)
    assert dataclasses.replace(host, nodes=unsaid).usable_bytes() == 130 * GIB


@pytest.mark.parametrize(
    ("files", "counted"),
    [
        ({"iomem": "0-0 : System RAM\n0-0 : System RAM (NVIDIA)\n"}, True),
        ({"iomem": "0-0 : System RAM\n", "driver/nvidia/params": ""}, False),
        ({"driver/nvidia/params": "EnableMSI: 1\n"}, True),
        ({"driver/nvidia/params": 'CoherentGPUMemoryMode: "driver"\n'}, False),
        ({}, False),
    ],
    ids=["given", "none given", "hidden", "hidden, but the driver keeps it", "no GPU"],
)
def test_kernels_that_count_gpu_memory_are_detected(
    tmp_path: Path, files: dict[str, str], counted: bool
) -> None:
    for name, text in (files | {"meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_host(tmp_path, tmp_path, 4096).includes_gpu_memory == counted


def test_gpu_nodes_never_make_host_memory_negative() -> None:
    nodes = (NumaNode(1, 2 * GIB, 2 * GIB, has_cpus=False),)
    host = HostFacts(3 * GIB, GIB, 4096, nodes)
    platform = detect_platform(driver({"numa_config": 1, "numa_id": 1}), 0, host)
    assert (platform.host_bytes, platform.host_total_bytes) == (0, GIB)


def test_without_a_gpu_host_memory_is_known() -> None:
    platform = platform_without_gpu(
        HostFacts(4 * GIB, 3 * GIB, 4096), "cuda-bindings is not installed"
    )
    assert platform.link is Link.NONE
    assert platform.host_bytes == 3 * GIB
    assert platform.reasons["link"] == "cuda-bindings is not installed"
    assert not platform.has_managed
    assert not NO_GPU.has_managed


def test_this_machine_can_be_read() -> None:
    host = read_host(Path("/proc"), Path("/sys"), 4096)
    assert 0 < host.available_bytes <= host.total_bytes


def test_a_meminfo_without_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="has no MemTotal"):
        read_host(tmp_path, tmp_path, 4096)
    (tmp_path / "meminfo").write_text("MemTotal: 12 kB\n")
    with pytest.raises(RunFailedError, match="has no MemAvailable"):
        read_host(tmp_path, tmp_path, 4096)


def test_nvml_is_optional() -> None:
    facts = read_nvml(None, driver({}), 0)
    assert facts.c2c is None
    assert "nvidia-ml-py" in facts.c2c_reason


def test_installed_or_not_nvml_is_found_without_an_error() -> None:
    nvml = import_nvml()
    assert nvml is None or issubclass(nvml.NVMLError, Exception)


def test_a_failure_of_nvml_becomes_a_reason() -> None:
    nvml = FakeNvml({"init": "Driver Not Loaded"})
    facts = read_nvml(nvml, driver({}), 0)
    assert facts.c2c_reason == facts.addressing_reason == "NVML did not start: Driver Not Loaded"
    assert nvml.running == 0


def test_a_device_unknown_to_nvml_becomes_a_reason() -> None:
    nvml = FakeNvml({}, at="00000000:07:00.0")
    facts = read_nvml(nvml, driver({"pci_bus_id": 8}), 0)
    assert "no device at 00000000:08:00.0" in facts.c2c_reason
    assert nvml.running == 0


def test_nvml_answers_are_read() -> None:
    nvml = FakeNvml({"c2c": 1, "addressing": 2})
    facts = read_nvml(nvml, driver({}), 0)
    assert (facts.c2c, facts.addressing) == (True, "ats")
    assert nvml.running == 0


def test_an_unknown_addressing_mode_is_reported_by_number() -> None:
    facts = read_nvml(FakeNvml({"c2c": 0, "addressing": 7}), driver({}), 0)
    assert facts.addressing is None
    assert facts.addressing_reason == "NVML reports addressing mode 7"


def test_older_nvml_bindings_become_a_reason() -> None:
    class Older(FakeNvml):
        @property
        def nvmlDeviceGetC2cModeInfoV(self) -> None:  # type: ignore[override]
            raise AttributeError("no such function")

    facts = read_nvml(Older({"addressing": 1}), driver({}), 0)
    assert (facts.c2c, facts.addressing) == (None, "hmm")
    assert "no such function" in facts.c2c_reason


def test_pci_addresses_have_the_format_of_nvml() -> None:
    at = {"pci_domain_id": 9, "pci_bus_id": 0xAB, "pci_device_id": 1}
    assert pci_bus_id(driver(at), 0) == "00000009:ab:01.0"


MAPS = """\
1000-3000 r--p 00000000 08:01 17 /lib/some.so
3000-5000 rw-p 00000000 00:00 0
8000-9000 rw-p 00001000 08:01 18 /models/a b.safetensors
7f0000000000-7f0000010000 rw-p 00000000 00:00 0 [heap]
"""


def test_file_backed_memory_is_not_anonymous(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text(MAPS)
    inside = [(0x1000, 1), (0x2FFF, 10), (0x8800, 100)]
    outside = [(0x3000, 1000), (0x9000, 10000), (0x10, 100000), (0x7F0000000000, 10**6)]
    assert anonymous_nbytes(tmp_path, inside) == 0
    assert anonymous_nbytes(tmp_path, [*inside, *outside]) == 1111000


def test_allocated_tensors_are_anonymous_and_mapped_ones_are_not(tmp_path):
    proc, made = Path("/proc"), torch.zeros(1 << 20)
    assert anonymous_nbytes(proc, [(made.data_ptr(), made.nbytes)]) == made.nbytes
    (tmp_path / "weights").write_bytes(bytes(1 << 16))
    with (tmp_path / "weights").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        assert anonymous_nbytes(proc, [(tensor.data_ptr(), tensor.nbytes)]) == 0
        del tensor
        mapped.close()
