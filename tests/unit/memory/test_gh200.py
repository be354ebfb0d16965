"""The free functions of the forks, and `MemorySession` behind them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fakes.platforms import simulated_machine
from fork_process import run_python

import gracetune
from gracetune import gh200
from gracetune.config.environment import environment_settings
from gracetune.errors import ConfigError
from gracetune.events.types import Notice, StageChanged
from gracetune.memory.driver import HOST
from gracetune.memory.hints import HintOutcome
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.oversubscription import Stage
from gracetune.memory.platform import Link, Machine
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import Tier
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = Path(__file__).parents[2] / "data" / "seeds"
FREE_FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "prefer_cpu_residency": gh200.prefer_cpu_residency,
    "prefer_gpu_residency": gh200.prefer_gpu_residency,
    "prefetch_to_device": gh200.prefetch_to_device,
    "discard": gh200.discard,
    "residency": gh200.residency,
}


def process(link: Link, environment: dict[str, str] | None = None) -> MemorySession:
    machine = simulated_machine(link)
    return MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings(environment or {}),
        lambda notice: None,
    )


@pytest.mark.parametrize("link", list(Link))
def test_the_hardware_decides_by_default(link: Link) -> None:
    assert process(link).hints_enabled is (link is Link.COHERENT)


@pytest.mark.parametrize(
    "name", ["SIMPLETUNER_GH200_ENABLE_UVM_HINTS", "AITK_GH200_ENABLE_UVM_HINTS"]
)
def test_the_override_beats_the_environment_which_beats_the_hardware(name: str) -> None:
    environment = {name: "0"}
    memory = process(Link.COHERENT, environment)
    assert memory.hints_enabled is False
    memory.hints_override = True
    assert memory.hints_enabled is True
    memory.hints_override = None
    assert memory.hints_enabled is False
    environment[name] = "1"
    assert memory.hints_enabled is True
    memory.hints_override = False
    assert memory.hints_enabled is False


def test_an_invalid_flag_is_an_error() -> None:
    with pytest.raises(ConfigError, match="AITK_GH200_ENABLE_UVM_HINTS"):
        _ = process(Link.NONE, {"AITK_GH200_ENABLE_UVM_HINTS": "maybe"}).hints_enabled


def test_the_override_takes_effect_at_once() -> None:
    machine = simulated_machine(Link.MANAGED)
    memory = MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings({}),
        lambda notice: None,
    )
    tensor = machine.tensor(MIB)
    assert memory.hints.prefer_cpu_residency(tensor).verdict is HintOutcome.UNSUPPORTED
    memory.hints_override = True
    assert memory.hints.prefer_cpu_residency(tensor)
    assert memory.hints.residency(tensor).location == HOST


def test_settings_of_the_environment_are_applied() -> None:
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": (
            "use_uvm:True,uvm_oversubscription_ratio:2.0,uvm_access_pattern:cpu_first,"
            "uvm_stage1_threshold:0.15,uvm_stage1_min_bytes:1073741824"
        )
    }
    memory = process(Link.COHERENT, environment)
    assert memory.policy.threshold == 0.15
    assert memory.policy.min_free_bytes == GIB
    assert memory.policy.oversubscription_ratio == 2.0
    assert memory.accounting.caps[Tier.MANAGED] == 16 * GIB


def test_the_cap_is_limited_by_host_memory() -> None:
    memory = process(Link.COHERENT, {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "50"})
    assert memory.managed_cap == 32 * GIB - memory.policy.host_reserve_bytes


def test_statistics_of_a_simulated_machine() -> None:
    machine = simulated_machine(Link.COHERENT)
    memory = MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings({}),
        lambda notice: None,
    )
    memory.hints.prefetch_to_device(machine.tensor(MIB))
    stats = memory.stats()
    assert stats["uvm.platform"] == "coherent"
    assert stats["uvm.prefetched_to_device_bytes"] == MIB
    assert stats["uvm.hints.applied"] == 1
    assert "cupti" in str(stats["uvm.faults_unavailable"]).lower()
    assert stats["uvm.pool_unavailable"] == "no pool was opened"


@pytest.mark.parametrize("link", [Link.NONE, Link.COPY, Link.INTEGRATED])
def test_an_unavailable_pool_has_a_reason(link: Link) -> None:
    memory = process(link)
    pool = memory.pool()
    assert isinstance(pool, PoolUnavailable)
    assert pool.reason
    assert memory.pool() is pool
    assert memory.stats()["uvm.pool_unavailable"] == pool.reason


def test_without_cuda_the_stage_stays_resident() -> None:
    assert process(Link.NONE).observe(reclaim=True) is Stage.RESIDENT


def test_notices_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gracetune.memory")
    gh200.log_event(Notice("something fell back", level="warning"))
    gh200.log_event(Notice("something was chosen"))
    gh200.log_event(StageChanged(7, 2, 1, 3, 2))
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "something fell back"),
        ("INFO", "something was chosen"),
        ("INFO", str(StageChanged(7, 2, 1, 3, 2))),
    ]


class TestThisMachine:
    """The free functions on the machine that runs the tests."""

    @pytest.fixture(autouse=True)
    def _restore(self) -> object:
        yield
        gh200.set_uvm_hint_override(None)

    @pytest.mark.parametrize("wanted", [True, False])
    def test_set_uvm_hint_override_enables_and_disables_hints(self, wanted: bool) -> None:
        gracetune.set_uvm_hint_override(wanted)
        assert gracetune.gh200_uvm_enabled() is wanted

    @pytest.mark.parametrize("verb", FREE_FUNCTIONS)
    def test_every_function_returns_a_verdict(self, verb: str) -> None:
        assert getattr(gracetune, verb) is FREE_FUNCTIONS[verb]
        for wanted in (True, False):
            gh200.set_uvm_hint_override(wanted)
            hint = FREE_FUNCTIONS[verb](torch.zeros(MIB))
            assert hint.verb == verb
            assert hint.verdict in HintOutcome
            assert hint or hint.reason

    def test_optimize_batch_for_gh200_reports_one_hint_per_tensor(self) -> None:
        report = gracetune.optimize_batch_for_gh200({"latents": torch.zeros(MIB)})
        assert all(hint or hint.reason for hint in report.hints)
        assert len(report.hints) == 1

    def test_memory_stats_has_the_uvm_counters(self) -> None:
        stats = gracetune.memory_stats()
        for key in ("stage", "light_reclamations", "hard_reclamations", "stage_transitions"):
            assert isinstance(stats[f"uvm.{key}"], int)

    def test_manage_memory_returns_a_stage_and_unified_pool_is_shared(self) -> None:
        assert gracetune.manage_memory() in Stage
        assert gracetune.unified_pool() is gh200.unified_pool()


def test_the_classes_of_the_forks_are_available() -> None:
    assert gh200.GH200InMemoryBackend.__name__ == "GH200InMemoryBackend"
    with pytest.raises(AttributeError, match="GH200Magic"):
        _ = gh200.GH200Magic


def test_importing_opens_no_machine() -> None:
    script = (
        "import sys, gracetune; assert 'torch' not in sys.modules; import gracetune.gh200 as g; "
        "assert 'machine' not in vars(g._process), 'a machine was opened at import'"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_guides_snippet_prints_the_stage_and_the_reclamations() -> None:
    """The snippet is run as it stands, after the two imports."""
    guide = next(SEEDS.glob("004*")).read_text("utf-8").splitlines()
    start = guide.index("   stats = torch.cuda.memory_stats()")
    snippet = "\n".join(line.strip() for line in guide[start : start + 4])
    done = run_python("-c", f"import torch, gracetune.gh200\n{snippet}")
    assert done.stdout.splitlines() == [
        *("UVM Stage: 1", "Light Reclamations: 0", "Hard Reclamations: 0"),
    ], done.stderr


def test_importing_removes_the_forks_allocator_keys() -> None:
    script = (
        "import os\n"
        "from gracetune.gh200 import prefer_cpu_residency\n"
        "print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])\n"
    )
    conf = "use_uvm:True,max_split_size_mb:64,uvm_oversubscription_ratio:5.0"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "max_split_size_mb:64", done.stderr
