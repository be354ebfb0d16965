"""Stages that govern managed memory, on simulated machines: pages, access patterns, the cap."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from fakes.managed import DirectPrefetcher, unbacked_tensor_of
from fakes.platforms import simulated_machine

from gracetune.config.environment import environment_settings
from gracetune.events.types import MemoryReclaimed, StageChanged
from gracetune.memory.driver import HOST, CudaCode
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.managed_roles import ManagedMemory
from gracetune.memory.oversubscription import Stage
from gracetune.memory.platform import HostFacts, Link, Machine
from gracetune.memory.session import MemorySession
from gracetune.memory.stats import Tier
from gracetune.units import GIB

if TYPE_CHECKING:
    from fakes.simulated_driver import SimulatedDriver

    from gracetune.events.types import Event

USE_UVM = "use_uvm:True,uvm_oversubscription_ratio:3.0"


class SimulatedRun:
    """A session on a simulated GPU with 8 GiB; slabs have no real memory behind them."""

    def __init__(self, conf: str = USE_UVM, host_free: int = 64 * GIB) -> None:
        machine = simulated_machine(Link.COHERENT)
        self.driver: SimulatedDriver = machine.gpu
        self.events: list[Event] = []
        self.host = HostFacts(64 * GIB, host_free, 4096)
        platform = replace(machine.platform, host_bytes=64 * GIB)
        self.session = MemorySession(
            lambda: Machine(machine.driver, platform),
            lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": conf}),
            self.events.append,
            read_host=lambda: self.host,
        )
        self.memory = ManagedMemory(
            self.driver,
            0,
            self.session.accounting,
            DirectPrefetcher(self.driver),
            self.events.append,
            unbacked_tensor_of,
            self.session.pattern,
            self.session.policy.stage1_above,
        )
        self.session.managed = self.memory

    def allocate(self, role: str, nbytes: int, placement: str) -> int:
        """Allocate a slab, move it to the device for a kernel, and return its address."""
        slab = self.memory.allocate(role, nbytes, placement)
        self.memory.prefetch(slab, "device").wait()
        self.driver.touch(slab.pointer, nbytes, 0, write=True)
        return slab.pointer

    def of_kind(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def test_the_stage_moves_cold_pages_to_the_host_until_enough_is_free() -> None:
    run = SimulatedRun()
    weights = run.allocate("weights", 4 * GIB, "device")
    optimizer = run.allocate("optimizer", 2 * GIB, "device")
    ema = run.allocate("ema", GIB + GIB // 2, "balanced")
    assert run.driver.memory_info(0)[0] == GIB // 2
    assert run.session.observe(reclaim=True, step=7) is Stage.OVERSUBSCRIBED
    changed, reclaimed = run.events
    assert isinstance(changed, StageChanged)
    assert (changed.step, changed.stage, changed.managed) == (7, 2, 7 * GIB + GIB // 2)
    assert isinstance(reclaimed, MemoryReclaimed)
    assert reclaimed.kind == "light"
    assert reclaimed.freed == {"garbage": 0, "managed pages": GIB + GIB // 2}
    assert run.driver.residency(ema, GIB) == {HOST: GIB}
    assert run.driver.residency(optimizer, GIB) == {0: GIB}, "EMA was enough"
    assert run.driver.residency(weights, GIB) == {0: GIB}
    assert run.session.uvm_stats()["uvm.stage"] == 2, "until the next step"
    run.session.observe(reclaim=True, step=8)
    stats = run.session.uvm_stats()
    assert stats["uvm.stage"] == 1
    assert (stats["uvm.light_reclamations"], stats["uvm.light_bytes"]) == (1, GIB + GIB // 2)
    assert stats["uvm.headroom"] == 2 * GIB - int(0.1 * 8 * GIB)
    assert stats["uvm.bytes.managed.current"] == 7 * GIB + GIB // 2
    assert stats["uvm.bytes.managed.peak"] == 7 * GIB + GIB // 2


@pytest.mark.parametrize(
    ("pattern", "preferred", "restored"),
    [
        ("gpu_first", 0, {0: 2 * GIB}),
        ("balanced", None, {HOST: 2 * GIB}),
        ("cpu_first", HOST, {HOST: 2 * GIB}),
        ("", HOST, {HOST: 2 * GIB}),
    ],
)
def test_the_access_pattern_decides_about_homes_and_about_the_return_of_pages(
    pattern: str, preferred: int | None, restored: dict[int, int]
) -> None:
    """With the default placement: a run file that does not set `managed_access`."""
    run = SimulatedRun(f"{USE_UVM},uvm_access_pattern:{pattern}" if pattern else USE_UVM)
    slab = run.memory.allocate("optimizer", 2 * GIB)
    optimizer = slab.pointer
    for place in (HOST, 0):  # filled by the CPU, then used by a kernel
        run.driver.touch(optimizer, 2 * GIB, place, write=True)
    state = run.driver.range_state(optimizer, 2 * GIB)
    assert (state.preferred, state.accessed_by) == (preferred, (0,))
    on_device = {0: 2 * GIB}
    at_home = {HOST: 2 * GIB} if preferred == HOST else on_device
    assert run.driver.residency(optimizer, 2 * GIB) == at_home
    weights = run.memory.allocate("weights", 5 * GIB + GIB // 2, "device")
    run.driver.prefetch(weights.pointer, weights.nbytes, 0, 0)
    run.session.observe(reclaim=True)
    is_full = at_home == on_device
    assert run.driver.residency(optimizer, 2 * GIB) == {HOST: 2 * GIB}
    run.memory.free(weights)
    run.session.observe(reclaim=True)
    assert run.driver.residency(optimizer, 2 * GIB) == restored
    kinds = [event.kind for event in run.of_kind(MemoryReclaimed)]
    assert kinds == (["light", "restored"] if is_full else [])


@pytest.mark.parametrize("placement", ["device", "balanced"])
def test_pages_that_were_moved_to_the_host_are_used_there_until_the_device_has_space(
    placement: str,
) -> None:
    """Otherwise they would return when they are used, and still count as moved."""
    run = SimulatedRun()
    slab = run.memory.allocate("ema", 4 * GIB, placement)
    run.driver.touch(slab.pointer, slab.nbytes, 0, write=True)
    code, other = run.driver.allocate_device(3 * GIB + GIB // 2, 0)
    assert code == CudaCode.SUCCESS
    free = []
    for step in range(4):
        run.session.observe(reclaim=True, step=step)
        run.driver.touch(slab.pointer, slab.nbytes, 0, write=True)
        free.append(run.driver.memory_info(0)[0])
        if step == 1:
            run.driver.free(other)
    assert run.driver.residency(slab.pointer, slab.nbytes) == {0: 4 * GIB}
    assert free == [4 * GIB + GIB // 2, 4 * GIB + GIB // 2, 4 * GIB, 4 * GIB]
    decisions = [(event.step, event.kind, event.nbytes) for event in run.of_kind(MemoryReclaimed)]
    assert decisions == [(0, "light", 4 * GIB), (2, "restored", 4 * GIB)]
    assert slab.placement == placement


def test_what_is_prefetched_for_its_use_is_left_alone() -> None:
    """It goes back to the host after its use, and steps rely on its arrival."""
    run = SimulatedRun()
    weights = run.allocate("weights", 7 * GIB + GIB // 2, "prefetch")
    assert run.session.observe(reclaim=True) is Stage.OVERSUBSCRIBED
    assert run.driver.residency(weights, GIB) == {0: GIB}
    (reclaimed,) = run.of_kind(MemoryReclaimed)
    assert reclaimed.freed == {"garbage": 0, "managed pages": 0}


def test_gpu_first_uses_the_device_only_while_it_has_headroom() -> None:
    """5 % and 10 % of 8 GiB must stay free."""
    run = SimulatedRun(f"{USE_UVM},uvm_access_pattern:gpu_first")
    assert run.memory.allocate("ema", 7 * GIB).placement == "in_place"
    first = run.memory.allocate("optimizer", 4 * GIB)
    assert first.placement == "device"
    run.driver.touch(first.pointer, first.nbytes, 0, write=True)
    assert run.memory.allocate("optimizer", 4 * GIB).placement == "in_place"
    assert run.memory.placements_of("optimizer") == "device, in_place"


def test_the_cap_shrinks_with_the_memory_of_the_host_and_comes_back() -> None:
    run = SimulatedRun()
    run.allocate("ema", GIB, "prefetch")
    assert run.memory.cap_bytes == 24 * GIB
    run.host = HostFacts(64 * GIB, 6 * GIB, 4096)
    run.session.observe(reclaim=True, step=3)
    run.session.observe(reclaim=True, step=4)
    (lowered,) = run.of_kind(MemoryReclaimed)
    assert (lowered.step, lowered.kind, lowered.freed) == (3, "cap", {"cap": 3 * GIB})
    with pytest.raises(torch.OutOfMemoryError, match="exceed the cap"):
        run.memory.allocate("optimizer", 3 * GIB, "prefetch")
    assert run.session.uvm_stats()["uvm.bytes.managed.denied"] == 1
    run.host = HostFacts(64 * GIB, 64 * GIB, 4096)
    run.session.observe(reclaim=True, step=5)
    assert run.of_kind(MemoryReclaimed)[1].freed == {"cap": 24 * GIB}
    run.memory.allocate("optimizer", 3 * GIB, "prefetch")


def test_a_lower_cap_keeps_what_is_held_for_a_role() -> None:
    """The state of an optimizer is planned there, and allocated in the first step."""
    run = SimulatedRun()
    run.memory.hold("optimizer", 5 * GIB)
    run.allocate("ema", GIB, "prefetch")
    run.host = HostFacts(64 * GIB, 6 * GIB, 4096)
    run.session.observe(reclaim=True, step=1)
    assert run.memory.cap_bytes == 6 * GIB
    with pytest.raises(torch.OutOfMemoryError, match="exceed the cap"):
        run.memory.allocate("weights", GIB)
    run.memory.allocate("optimizer", 5 * GIB)
    assert run.memory.held_bytes == 0


def test_thresholds_of_the_settings_govern_the_stage() -> None:
    for conf, stage in (("", 1), (",uvm_stage1_threshold:0.6", 2)):
        run = SimulatedRun(USE_UVM + conf)
        run.allocate("ema", 4 * GIB, "prefetch")
        run.session.observe(reclaim=False)
        assert run.session.stages.state.stage == stage
    run = SimulatedRun(f"{USE_UVM},uvm_stage1_min_bytes:5368709120")
    run.allocate("ema", 4 * GIB, "prefetch")
    run.session.observe(reclaim=False)
    assert run.session.stages.state.stage == 2


def test_a_driver_that_refuses_managed_memory_is_found_by_a_trial() -> None:
    machine = simulated_machine(Link.MANAGED, failing={"allocate_managed": CudaCode.OUT_OF_MEMORY})
    session = MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"}),
        lambda event: None,
    )
    for found in (session.managed, session.pool()):
        assert isinstance(found, PoolUnavailable)
        assert found.reason == "the driver refuses managed memory (code 2)"


def test_a_machine_with_managed_memory_has_it_for_roles() -> None:
    machine = simulated_machine(Link.MANAGED)
    session = MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"}),
        lambda event: None,
    )
    assert isinstance(session.managed, ManagedMemory)
    assert session.accounting.current(Tier.MANAGED) == 0
