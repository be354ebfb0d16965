"""Managed memory by role: cap, accounting, advice and prefetches, with a simulated driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from fakes.managed import managed_memory
from fakes.platforms import simulated_machine

from gracetune.config.environment import environment_settings
from gracetune.memory.driver import HOST, PointerKind
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.managed_roles import ManagedMemory, ManagedMemoryFullError
from gracetune.memory.platform import NO_GPU, Link, Machine
from gracetune.memory.session import PCIE_CAP_PART, MemorySession
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.units import GIB, MIB

if TYPE_CHECKING:
    from gracetune.events.types import Notice

UVM = {"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"}


@pytest.fixture
def accounting() -> MemoryAccounting:
    return MemoryAccounting({Tier.MANAGED: 8 * MIB})


@pytest.fixture
def machine():
    return simulated_machine(Link.MANAGED)


@pytest.fixture
def memory(machine, accounting) -> ManagedMemory:
    return managed_memory(machine.gpu, accounting)


def session_on(link: Link, environment: dict[str, str]) -> MemorySession:
    machine = simulated_machine(link)
    return MemorySession(
        lambda: Machine(machine.driver, machine.platform),
        lambda: environment_settings(environment),
        lambda notice: None,
    )


def test_bytes_are_booked_by_role_and_released(memory, machine, accounting):
    state = memory.allocate("optimizer", 3 * MIB)
    memory.allocate("ema", MIB)
    assert memory.by_role() == {"optimizer": 3 * MIB, "ema": MIB}
    assert accounting.by_role() == {
        (Tier.MANAGED, "optimizer"): 3 * MIB,
        (Tier.MANAGED, "ema"): MIB,
    }
    kinds = [machine.gpu.pointer_kind(slab.pointer) for slab in memory.slabs]
    assert kinds == [PointerKind.MANAGED] * 2
    pointer = state.pointer
    memory.free(state)
    assert accounting.current(Tier.MANAGED) == MIB
    assert accounting.peak(Tier.MANAGED) == 4 * MIB
    assert machine.gpu.pointer_kind(pointer) is PointerKind.UNKNOWN


def test_the_cap_is_checked_before_the_allocation(memory, machine, accounting):
    memory.allocate("optimizer", 7 * MIB)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"2\.0 MiB .* for ema .*gh200_optimizations\.managed_memory"
    ):
        memory.allocate("ema", 2 * MIB)
    assert accounting.denied(Tier.MANAGED) == 1
    assert memory.by_role() == {"optimizer": 7 * MIB}
    assert memory.free_bytes == MIB


def test_a_refusal_of_the_driver_books_nothing(accounting):
    machine = simulated_machine(Link.MANAGED, failing={"allocate_managed": 2})
    memory = managed_memory(machine.gpu, accounting)
    with pytest.raises(ManagedMemoryFullError, match=r"code 2"):
        memory.allocate("gradients", MIB)
    assert accounting.current(Tier.MANAGED) == 0


@pytest.mark.parametrize(
    ("placement", "home"), [("in_place", HOST), ("prefetch", HOST), ("device", 0)]
)
def test_placements_advise_the_home(memory, machine, placement, home):
    slab = memory.allocate("optimizer", MIB, placement)
    state = machine.gpu.range_state(slab.pointer, MIB)
    assert (state.preferred, state.accessed_by) == (home, (0,))


def test_failed_advice_is_reported_once(accounting):
    machine = simulated_machine(Link.MANAGED, failing={"advise": 1})
    notices: list[Notice] = []
    memory = managed_memory(machine.gpu, accounting, notices.append)
    memory.allocate("ema", MIB)
    memory.allocate("ema", MIB)
    assert [notice.fallback for notice in notices] == [True, True]
    assert "preferred_location" in notices[0].text
    assert "accessed_by" in notices[1].text


def test_prefetches_move_the_pages_of_a_part(memory, machine):
    originals = [torch.ones(MIB // 4), torch.ones(MIB // 2).view(2, -1).t()]
    slab, copies = memory.allocate_like("optimizer", originals, "prefetch")
    assert [(c.shape, c.stride()) for c in copies] == [(o.shape, o.stride()) for o in originals]
    machine.gpu.touch(slab.pointer, slab.nbytes, HOST, write=True)
    memory.prefetch_parts([(slab, copies[0])], "device").wait()
    assert machine.gpu.residency(slab.pointer, slab.nbytes) == {0: MIB, HOST: 2 * MIB}
    memory.prefetch(slab, "host").wait()
    assert machine.gpu.residency(slab.pointer, slab.nbytes) == {HOST: 3 * MIB}
    assert memory.prefetched_bytes == {"device": MIB, "host": 3 * MIB}


def test_overflow_needs_use_uvm():
    session = session_on(Link.MANAGED, {})
    assert isinstance(session.managed, PoolUnavailable)
    assert "gh200_optimizations.use_uvm" in session.managed.reason
    assert isinstance(session_on(Link.MANAGED, UVM).managed, ManagedMemory)


@pytest.mark.parametrize(("override", "environment"), [(True, {}), (False, UVM)])
def test_the_run_file_wins_over_the_environment(override, environment):
    session = session_on(Link.COHERENT, environment)
    session.use_uvm_override = override
    assert isinstance(session.managed, ManagedMemory) is override


@pytest.mark.parametrize("link", [Link.COPY, Link.INTEGRATED])
def test_machines_without_memory_to_move_say_why(link):
    managed = session_on(link, UVM).managed
    assert isinstance(managed, PoolUnavailable)
    assert managed.reason.startswith(("no managed memory", "nothing to oversubscribe"))


def test_no_gpu_says_why():
    session = MemorySession(
        lambda: Machine(None, NO_GPU), lambda: environment_settings(UVM), lambda notice: None
    )
    assert isinstance(session.managed, PoolUnavailable)


def test_the_cap_over_pcie_is_a_quarter_of_the_free_device_memory():
    session = session_on(Link.MANAGED, UVM)
    free, _ = session.machine.driver.memory_info(0)
    assert session.managed_cap == free // PCIE_CAP_PART
    assert session.managed.cap_bytes == session.managed_cap


def test_the_cap_of_a_coherent_machine_is_the_ratio():
    session = session_on(Link.COHERENT, UVM | {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "2"})
    assert session.managed_cap == 2 * session.machine.platform.device_bytes


def test_the_cap_can_be_set():
    session = session_on(Link.MANAGED, UVM)
    session.managed_cap_override = GIB
    assert session.managed.cap_bytes == GIB
    assert session.stats()["uvm.bytes.managed.cap"] == GIB
