"""The checks on simulated machines, and the `diagnose` command on this one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.platforms import GPU_LINKS, RATES, SimulatedMachine, simulated_machine
from fork_process import run_python

from gracetune.cli.diagnose import (
    ALLOCATION_CHECKS,
    DEVICE_CHECKS,
    Tools,
    TorchInfo,
    add_arguments,
    check_libraries,
    diagnose,
    find_torch,
)
from gracetune.cli.env import VARIABLES
from gracetune.data.bulk_copy import LIBRARY as COPIER_LIBRARY
from gracetune.errors import ConfigError
from gracetune.memory.driver import NoDriverError, PointerKind, RangeState
from gracetune.memory.machine_checks import (
    STATUS_MARKS,
    SWEEP_CHUNK_BYTES,
    DeviceBench,
    KernelInfo,
    PoolTrial,
    Status,
    build_report,
    check_copies,
    check_environment,
    check_faults,
    check_hints,
    check_memory,
    check_numa,
    check_oversubscription,
    check_pages,
    check_platform,
    check_pool,
    check_torch_build,
    check_versions,
    exit_code,
    fail,
    format_findings,
    ok,
    read_kernel,
    skip,
    warn,
)
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.platform import Link, Machine, open_machine
from gracetune.memory.shim import LIBRARY as SHIM_LIBRARY
from gracetune.units import GIB, KIB, MIB

ROOT = Path(__file__).parents[3]
KERNEL = KernelInfo("6.1", "x86_64", "0", "madvise", {0: frozenset({0, 1}), 1: frozenset({2, 3})})
GOOD_TRIAL = PoolTrial(PointerKind.MANAGED, True, 20 * MIB, 0)
MANAGED_LINKS = (Link.MANAGED, Link.COHERENT)


def simulated_bench(machine: SimulatedMachine) -> DeviceBench:
    return DeviceBench(
        driver=machine.gpu,
        platform=machine.platform,
        clock=lambda: machine.gpu.time.now_s,
        synchronize=machine.gpu.synchronize,
        copy=lambda nbytes, source, target: machine.gpu.copy(nbytes, source, target, 0),
        touch=lambda pointer, nbytes, place: machine.gpu.touch(pointer, nbytes, place, write=True),
    )


class TestDevice:
    """Device checks, on simulated machines."""

    @pytest.mark.parametrize("link", GPU_LINKS)
    def test_copies_are_timed(self, link: Link) -> None:
        finding = check_copies(simulated_bench(simulated_machine(link)), 256 * MIB)
        assert finding.figures["in_gb_per_s"] == pytest.approx(50, rel=0.02)
        assert finding.figures["out_gb_per_s"] == pytest.approx(50, rel=0.02)
        # 50 GB/s is healthy for PCIe and a quarter of what NVLink-C2C should give.
        assert finding.status is (Status.WARN if link is Link.COHERENT else Status.OK)

    @pytest.mark.parametrize("link", MANAGED_LINKS)
    def test_prefetching_is_compared_with_page_faults(self, link: Link) -> None:
        finding = check_faults(simulated_bench(simulated_machine(link)), 256 * MIB)
        assert finding.status is Status.OK
        assert finding.figures["prefetch_in_gb_per_s"] == pytest.approx(45, rel=0.02)
        assert finding.figures["prefetch_out_gb_per_s"] == pytest.approx(10, rel=0.02)
        assert finding.figures["fault_gb_per_s"] == pytest.approx(5, rel=0.02)
        assert float(finding.figures["first_touch_gain"]) > 5

    def test_a_useless_prefetch_is_a_warning(self) -> None:
        machine = simulated_machine(Link.MANAGED)
        spec = replace(machine.gpu.devices[0], rates=replace(RATES, fault=4000e9))
        machine.gpu.devices = (spec,)
        assert check_faults(simulated_bench(machine), 256 * MIB).status is Status.WARN

    @pytest.mark.parametrize("link", MANAGED_LINKS)
    def test_hints_are_read_back(self, link: Link) -> None:
        assert check_hints(simulated_bench(simulated_machine(link)), MIB).status is Status.OK

    def test_a_driver_that_ignores_hints_fails(self) -> None:
        machine = simulated_machine(Link.MANAGED)
        machine.gpu.range_state = lambda pointer, nbytes: RangeState(None, None, False, ())
        finding = check_hints(simulated_bench(machine), MIB)
        assert finding.status is Status.FAIL
        assert finding.advice

    @pytest.mark.parametrize("link", [Link.COPY, Link.INTEGRATED])
    def test_managed_memory_checks_are_skipped_where_useless(self, link: Link) -> None:
        machine = simulated_machine(link, failing={"allocate_managed": 999})
        for finding in (
            check_faults(simulated_bench(machine), MIB),
            check_hints(simulated_bench(machine), MIB),
            check_oversubscription(simulated_bench(machine), 1.5, force=True),
        ):
            assert finding.status is Status.SKIP
            assert finding.text

    @pytest.mark.parametrize("verb", ["allocate_managed", "prefetch"])
    def test_a_driver_error_fails_the_check_and_leaks_nothing(self, verb: str) -> None:
        machine = simulated_machine(Link.COHERENT, failing={verb: 999})
        before = machine.gpu.memory_info(0)
        for finding in (
            check_faults(simulated_bench(machine), MIB),
            check_hints(simulated_bench(machine), MIB),
            check_oversubscription(simulated_bench(machine), 1.5, force=False),
        ):
            assert finding.status is Status.FAIL
            assert "999" in finding.text
            assert finding.advice
        assert machine.gpu.memory_info(0) == before

    def test_oversubscription_is_tested_on_a_coherent_machine(self) -> None:
        machine = simulated_machine(Link.COHERENT)
        finding = check_oversubscription(simulated_bench(machine), 1.5, force=False)
        assert finding.status is Status.OK
        assert finding.figures["nbytes"] == 12 * GIB
        assert machine.gpu.memory_info(0) == (8 * GIB, 8 * GIB)

    def test_oversubscription_on_pcie_is_skipped_unless_forced(self) -> None:
        finding = check_oversubscription(
            simulated_bench(simulated_machine(Link.MANAGED)), 1.5, force=False
        )
        assert finding.status is Status.SKIP
        assert "hang" in finding.text
        assert "--force-oversubscription" in finding.advice
        forced = check_oversubscription(
            simulated_bench(simulated_machine(Link.MANAGED)), 1.5, force=True
        )
        assert forced.status is Status.OK

    def test_oversubscription_is_skipped_if_the_host_is_too_small(self) -> None:
        finding = check_oversubscription(
            simulated_bench(simulated_machine(Link.COHERENT)), 9.0, force=False
        )
        assert finding.status is Status.SKIP
        assert finding.advice == "Lower --oversubscription-scale."

    def test_oversubscription_is_skipped_for_a_tiny_scale(self) -> None:
        scale = SWEEP_CHUNK_BYTES / (16 * GIB)
        finding = check_oversubscription(
            simulated_bench(simulated_machine(Link.COHERENT)), scale, force=False
        )
        assert finding.status is Status.SKIP

    @pytest.mark.parametrize(
        ("trial", "status"),
        [
            (PoolTrial(PointerKind.MANAGED, True, 20 * MIB, 0), Status.OK),
            (PoolTrial(PointerKind.DEVICE, True, 0, 0), Status.FAIL),
            (PoolTrial(PointerKind.MANAGED, False, 20 * MIB, 0), Status.FAIL),
            (PoolTrial(PointerKind.MANAGED, True, 20 * MIB, 20 * MIB), Status.WARN),
            (PoolUnavailable("no compiler"), Status.SKIP),
        ],
    )
    def test_the_pool_round_trip_checks_kind_contents_and_release(
        self, trial: PoolTrial | PoolUnavailable, status: Status
    ) -> None:
        finding = check_pool(trial)
        assert finding.status is status
        assert finding.advice or status in (Status.OK, Status.SKIP)


class TestHost:
    """Host checks."""

    @pytest.mark.parametrize(
        ("torch", "status"),
        [("2.13.0+cpu", "OK"), ("2.11.0", "OK"), ("2.9.1", "FAIL"), (None, "FAIL")],
    )
    def test_missing_or_old_torch_fails_the_version_check(
        self, torch: str | None, status: str
    ) -> None:
        finding = check_versions({"Python": "3.12", "torch": torch, "cupti-python": None}, KERNEL)
        assert finding.status == status
        assert finding.figures["cupti-python"] == finding.figures["GPU driver"] == "absent"

    def test_invalid_variables_fail_the_environment_check(self) -> None:
        assert check_environment({}, (), "").status is Status.OK
        fine = check_environment({"A": "1"}, ("hints are on",), "")
        assert (fine.status, fine.text, fine.figures) == (Status.OK, "hints are on", {"A": "1"})
        wrong = check_environment({"A": "x"}, (), "A is 'x'")
        assert wrong.status is Status.FAIL
        assert wrong.advice

    @pytest.mark.parametrize(
        ("version", "cuda", "problem", "status"),
        [
            (None, None, "No module named torch", "FAIL"),
            ("2.13", None, "", "WARN"),
            ("2.13", "13.0", "driver too old", "FAIL"),
            ("2.13", "13.0", "", "OK"),
        ],
    )
    def test_the_torch_build_check_needs_cuda_and_a_working_driver(
        self, version: str | None, cuda: str | None, problem: str, status: str
    ) -> None:
        finding = check_torch_build(version, cuda, problem)
        assert finding.status == status
        assert problem in finding.text

    @pytest.mark.parametrize("link", list(Link))
    def test_the_platform_check_gives_the_link_and_a_reason(self, link: Link) -> None:
        finding = check_platform(simulated_machine(link).platform)
        assert finding.text.startswith(f"{link.value}: ")
        assert (finding.status is Status.WARN) == (link in (Link.NONE, Link.COPY))

    def test_the_memory_check_advises_on_a_full_gpu_or_a_small_host(self) -> None:
        platform = simulated_machine(Link.MANAGED).platform
        assert check_memory(platform, 8 * GIB).status is Status.OK
        assert "nvidia-smi" in check_memory(platform, 3 * GIB).advice
        small = check_memory(replace(platform, host_bytes=GIB), 8 * GIB)
        assert "gain little" in small.advice
        assert check_memory(simulated_machine(Link.NONE).platform, 0).status is Status.OK

    def test_the_page_check_advises_on_page_sizes(self) -> None:
        assert check_pages(simulated_machine(Link.MANAGED).platform, KERNEL).status is Status.OK
        assert "64 KiB" in check_pages(simulated_machine(Link.COHERENT).platform, KERNEL).advice
        large = simulated_machine(Link.COHERENT, page_bytes=64 * KIB).platform
        assert check_pages(large, KERNEL).status is Status.OK
        never = replace(KERNEL, huge_pages="never")
        assert "madvise" in check_pages(simulated_machine(Link.MANAGED).platform, never).advice
        silent = replace(KERNEL, huge_pages="")
        assert (
            check_pages(simulated_machine(Link.NONE).platform, silent).figures["huge_pages"]
            == "unknown"
        )

    def test_the_numa_check_advises_on_binding_and_balancing(self) -> None:
        near = replace(simulated_machine(Link.COHERENT).platform, host_node=1)
        away = check_numa(near, KERNEL, frozenset({0, 2}))
        assert "--cpunodebind=1 --membind=1" in away.advice
        assert check_numa(near, KERNEL, frozenset({2})).status is Status.OK
        balancing = replace(KERNEL, numa_balancing="1")
        assert "numa_balancing=0" in check_numa(near, balancing, frozenset({2})).advice
        unnamed = replace(simulated_machine(Link.MANAGED).platform, host_node=None)
        assert check_numa(unnamed, KERNEL, frozenset({0})).status is Status.OK
        assert (
            check_numa(simulated_machine(Link.NONE).platform, KERNEL, frozenset()).status
            is Status.SKIP
        )

    def test_kernel_settings_are_read(self, tmp_path: Path) -> None:
        files = {
            "proc/sys/kernel/numa_balancing": "1\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64"
            "  580.95.05  Release Build  (dvs-builder)\nGCC version:  gcc version 13.3.0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "sys/devices/system/node/node0/cpulist": "0-2,8\n",
            "sys/devices/system/node/node2/cpulist": "\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        kernel = read_kernel(tmp_path / "proc", tmp_path / "sys", "6.1", "aarch64")
        nodes = {0: frozenset({0, 1, 2, 8}), 2: frozenset()}
        assert kernel == KernelInfo("6.1", "aarch64", "1", "madvise", nodes, "580.95.05")
        empty = read_kernel(tmp_path / "no", tmp_path / "no", "6.1", "aarch64")
        assert empty == KernelInfo("6.1", "aarch64", "", "", {})


class TestReport:
    """Text lines, the JSON report and exit codes."""

    findings = (ok("a", "fine", x=1), warn("bb", "slow", "hurry"), skip("c", "no GPU"))

    def test_findings_are_formatted_as_aligned_lines(self) -> None:
        assert list(format_findings(self.findings)) == [
            " 1 OK   a   fine",
            " 2 WARN bb  slow",
            "            -> hurry",
            " 3 SKIP c   no GPU",
        ]
        assert list(format_findings([])) == []

    def test_the_report_counts_and_numbers_the_checks(self) -> None:
        document = build_report(self.findings, 0, "2026-01-02", "1.0")
        assert document["summary"] == {"ok": 1, "warn": 1, "fail": 0, "skip": 1}
        checks = document["checks"]
        assert [check["number"] for check in checks] == [1, 2, 3]
        assert checks[0]["mark"] == "✅"
        assert checks[0]["figures"] == {"x": 1}
        assert set(STATUS_MARKS) == set(Status)

    @pytest.mark.parametrize(
        ("failed", "has_gpu", "allow_cpu", "code"),
        [
            (False, True, False, 0),
            (True, True, True, 1),
            (False, False, False, 1),
            (False, False, True, 0),
        ],
    )
    def test_the_exit_code_is_1_after_a_failure_or_without_a_gpu(
        self, failed: bool, has_gpu: bool, allow_cpu: bool, code: int
    ) -> None:
        findings = [*self.findings, *([fail("d", "broken", "fix it")] if failed else [])]
        assert exit_code(findings, has_gpu=has_gpu, allow_cpu=allow_cpu) == code


def arguments(folder: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--output", str(folder / "report.json"), *options])


def simulated_tools(
    machine: SimulatedMachine, trial: PoolTrial | PoolUnavailable = GOOD_TRIAL
) -> Tools:
    return Tools(
        find_torch=lambda: TorchInfo("2.13.0", "13.0", ""),
        open_machine=lambda device: Machine(machine.driver, machine.platform),
        open_bench=lambda driver, platform, nbytes: simulated_bench(machine),
        try_pool=lambda bench: trial,
    )


class TestWholeDiagnosis:
    """All checks together, on simulated machines."""

    def diagnose(self, folder: Path, tools: Tools, *options: str) -> tuple[int, dict[str, dict]]:
        code = diagnose(arguments(folder, *options), tools)
        document = json.loads((folder / "report.json").read_text())
        assert document["exit_code"] == code
        return code, {check["name"]: check for check in document["checks"]}

    def test_a_coherent_machine_passes_every_check(self, tmp_path: Path) -> None:
        code, checks = self.diagnose(tmp_path, simulated_tools(simulated_machine(Link.COHERENT)))
        assert code == 0
        assert len(checks) == 13
        assert all(checks[name]["status"] in ("OK", "WARN") for name in DEVICE_CHECKS)
        assert checks["oversubscription"]["figures"]["scale"] == 1.5

    def test_skip_allocation_skips_oversubscription(self, tmp_path: Path) -> None:
        machine = simulated_tools(simulated_machine(Link.COHERENT))
        _, checks = self.diagnose(tmp_path, machine, "--skip-allocation")
        assert checks["oversubscription"]["text"] == "--skip-allocation was given"

    def test_allocation_only_skips_copies(self, tmp_path: Path) -> None:
        machine = simulated_tools(simulated_machine(Link.COHERENT))
        _, checks = self.diagnose(tmp_path, machine, "--allocation-only")
        assert tuple(checks) == ALLOCATION_CHECKS

    @pytest.mark.parametrize("link", GPU_LINKS)
    def test_every_check_has_a_text_on_every_link(self, tmp_path: Path, link: Link) -> None:
        code, checks = self.diagnose(tmp_path, simulated_tools(simulated_machine(link)))
        assert code == 0
        for check in checks.values():
            assert check["text"]
            assert check["advice"] or check["status"] in ("OK", "SKIP")

    def test_a_cuda_error_fails_one_check_only(self, tmp_path: Path) -> None:
        def broken(simulated_bench: DeviceBench) -> PoolTrial:
            raise RuntimeError("CUDA error: an illegal memory access\nmore")

        tools = simulated_tools(simulated_machine(Link.COHERENT))._replace(try_pool=broken)
        code, checks = self.diagnose(tmp_path, tools)
        assert code == 1
        assert checks["pool round trip"]["text"] == "CUDA error: an illegal memory access"
        assert checks["oversubscription"]["status"] == "OK"

    def test_a_full_device_fails_the_device_checks(self, tmp_path: Path) -> None:
        machine = simulated_machine(Link.MANAGED)
        assert machine.gpu.allocate_device(8 * GIB - MIB, 0)[0] == 0
        code, checks = self.diagnose(tmp_path, simulated_tools(machine))
        assert code == 1
        assert {checks[name]["status"] for name in DEVICE_CHECKS} == {"FAIL"}

    def test_a_gpu_that_is_invisible_to_torch_skips_the_device_checks(self, tmp_path: Path) -> None:
        tools = simulated_tools(simulated_machine(Link.MANAGED))
        tools = tools._replace(find_torch=lambda: TorchInfo("2.13.0", "13.0", "driver too old"))
        code, checks = self.diagnose(tmp_path, tools, "--allow-cpu")
        assert code == 1
        assert {checks[name]["status"] for name in DEVICE_CHECKS} == {"SKIP"}

    @pytest.mark.parametrize("found", [("2.13.0", None, ""), ("2.13.0", "13.0", "no driver")])
    def test_a_machine_without_a_gpu_fails_unless_allow_cpu_is_given(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        found: tuple[str, str | None, str],
    ) -> None:
        tools = simulated_tools(simulated_machine(Link.NONE))
        tools = tools._replace(find_torch=lambda: TorchInfo(*found))
        assert self.diagnose(tmp_path, tools)[0] == 1
        assert "--allow-cpu" in capsys.readouterr().out
        assert self.diagnose(tmp_path, tools, "--allow-cpu")[0] == 0
        assert "allows" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--oversubscription-scale", "0"), "--oversubscription-scale is 0.0"),
            (("--oversubscription-scale", "nan"), "--oversubscription-scale is nan"),
            (("--output", "no/such/folder/r.json"), "cannot be written"),
        ],
    )
    def test_invalid_arguments_are_refused(
        self, tmp_path: Path, options: tuple[str, ...], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            diagnose(
                arguments(tmp_path, *options), simulated_tools(simulated_machine(Link.COHERENT))
            )

    def test_find_torch_describes_the_installed_torch(self) -> None:
        found = find_torch()
        assert found.version is not None
        assert found.sees_gpu or found.cuda is None or found.problem


class CountedDriver:
    """A simulated driver with a device count, like the real one."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._driver = machine.gpu
        self.device_count = 1

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)


def test_open_machine_detects_the_platform_or_the_missing_driver() -> None:
    opened = open_machine(0, lambda: CountedDriver(simulated_machine(Link.COHERENT)))
    assert opened.platform.link is Link.COHERENT
    assert opened.platform.host_bytes > 0
    with pytest.raises(ConfigError, match="device is 3, but this machine has 1"):
        open_machine(3, lambda: CountedDriver(simulated_machine(Link.COHERENT)))

    def absent() -> CountedDriver:
        raise NoDriverError("the driver is gone")

    without = open_machine(0, absent)
    assert (without.driver, without.platform.link) == (None, Link.NONE)
    assert without.platform.reasons["link"] == "the driver is gone"


class TestVerb:
    """`gracetune diagnose` and the forks' scripts, on this machine."""

    def environment(self, **changes: str) -> dict[str, str]:
        ours = {variable.name for variable in VARIABLES}
        outside = {name: value for name, value in os.environ.items() if name not in ours}
        return outside | changes

    def call(self, folder: Path, script: str, *options: str, **changes: str):
        return run_python(ROOT / script, *options, cwd=folder, env=self.environment(**changes))

    def call_before_torch(self, folder: Path, script: str, *options: str, **changes: str):
        """Run a script in a new interpreter, which reads its environment before it has torch."""
        return subprocess.run(
            [sys.executable, str(ROOT / script), *options],
            cwd=folder,
            env=self.environment(**changes),
            capture_output=True,
            text=True,
            check=False,
        )

    def test_without_a_gpu_the_output_says_so(self, tmp_path: Path) -> None:
        done = self.call(tmp_path, "gh200_diagnostic.py", "--skip-allocation", "--allow-cpu")
        document = json.loads((tmp_path / "gh200_diagnostic_report.json").read_text())
        assert done.returncode == document["exit_code"] == 0, done.stderr
        assert len(document["checks"]) == 13
        for check in document["checks"]:
            assert f"{check['number']:>2} {check['status']:<4} {check['name']}" in done.stdout
            assert check["text"]
        hidden = self.call(tmp_path, "gh200_diagnostic.py", CUDA_VISIBLE_DEVICES="")
        assert hidden.returncode == 1
        assert "--allow-cpu" in hidden.stdout

    def test_the_forks_variables_are_accepted(self, tmp_path: Path) -> None:
        conf = "use_uvm:True,uvm_oversubscription_ratio:3.0,uvm_access_pattern:gpu_first"
        done = self.call_before_torch(
            tmp_path,
            "gh200_diagnostic.py",
            *("--allow-cpu", "--json", "--output", "r.json"),
            PYTORCH_CUDA_ALLOC_CONF=conf,
        )
        document = json.loads(done.stdout)
        assert document == json.loads((tmp_path / "r.json").read_text())
        environment = document["checks"][1]
        assert environment["status"] == "OK"
        assert "3.0 times" in environment["text"]

    def test_an_invalid_variable_fails_its_check(self, tmp_path: Path) -> None:
        done = self.call(
            tmp_path,
            "gh200_diagnostic.py",
            *("--allow-cpu", "--json"),
            GH200_UVM_OVERSUBSCRIPTION_RATIO="lots",
        )
        assert done.returncode == 1
        assert json.loads(done.stdout)["checks"][1]["status"] == "FAIL"

    def test_a_broken_torch_is_reported_without_a_traceback(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken')")
        done = self.call_before_torch(
            tmp_path, "gh200_diagnostic.py", "--allow-cpu", PYTHONPATH=str(tmp_path)
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == 1
        assert "libtorch is broken" in done.stdout

    def test_validate_uvm_runs_the_allocation_checks(self, tmp_path: Path) -> None:
        done = self.call(tmp_path, "validate_uvm.py", "--allow-cpu", "--json")
        names = [check["name"] for check in json.loads(done.stdout)["checks"]]
        assert names == [
            "platform",
            "memory",
            "hint round trip",
            "pool round trip",
            "oversubscription",
        ]


def test_missing_and_broken_libraries_are_reported_without_their_paths(tmp_path: Path) -> None:
    assert check_libraries().status == "OK"
    missing = check_libraries(tmp_path, tmp_path)
    assert missing.status == "WARN"
    assert "memory shim was not built" in missing.text
    assert "bulk copier: it was not built" in missing.text
    for name in (SHIM_LIBRARY, COPIER_LIBRARY):
        (tmp_path / name).write_bytes(b"not a library")
    broken = check_libraries(tmp_path, tmp_path)
    assert broken.status == "WARN"
    assert "_shim.so cannot be loaded" in broken.text
    assert "bulk copier: it cannot be loaded" in broken.text
    assert str(tmp_path) not in broken.text


def test_the_committed_report_contains_no_host_name() -> None:
    text = (ROOT / "docs" / "reports" / "diagnostic-cpu.json").read_text(encoding="utf-8")
    document = json.loads(text)
    assert [check["number"] for check in document["checks"]] == list(range(1, 13))
    assert not any(word in text for word in ("/home", "/root", "/work", "/tmp", "localhost"))
