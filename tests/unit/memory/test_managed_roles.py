"""Managed memory by role: cap, accounting, advice and prefetches, with a simulated driver."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import pytest
import torch
from fakes.managed import DirectPrefetcher, managed_memory
from fakes.platforms import simulated_machine

from gracetune.config.environment import environment_settings
from gracetune.memory import managed_roles
from gracetune.memory.driver import HOST, PointerKind
from gracetune.memory.managed_pool import PoolUnavailable
from gracetune.memory.managed_roles import (
    ManagedGroups,
    ManagedMemory,
    ManagedMemoryFullError,
    PrefetchThread,
)
from gracetune.memory.oversubscription import PCIE_CAP_PART
from gracetune.memory.platform import NO_GPU, Link, Machine
from gracetune.memory.session import MemorySession
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


def test_memory_in_use_is_never_freed(memory, machine, accounting):
    """A view keeps the pages, whether the slab is freed or the run is over."""
    for give_up in (memory.free, lambda slab: memory.close()):
        slab = memory.allocate("trained", MIB)
        pointer, parameter = slab.pointer, torch.nn.Parameter(torch.zeros(4))
        parameter.data = slab.memory[:16].view(torch.float32).fill_(1)
        give_up(slab)
        del slab
        assert memory.slabs == ()
        assert machine.gpu.pointer_kind(pointer) is PointerKind.MANAGED
        assert accounting.current(Tier.MANAGED) == MIB
        assert parameter.tolist() == [1] * 4
        del parameter
        assert machine.gpu.pointer_kind(pointer) is PointerKind.UNKNOWN
        assert accounting.current(Tier.MANAGED) == 0


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


def test_the_cap_is_read_at_every_allocation(memory, accounting):
    """It is lowered while the host has too little memory."""
    memory.check_room("ema", 4 * MIB)
    accounting.set_cap(Tier.MANAGED, 2 * MIB)
    assert memory.cap_bytes == 2 * MIB
    with pytest.raises(ManagedMemoryFullError):
        memory.check_room("ema", 4 * MIB)


def test_bytes_that_are_held_for_a_role_are_not_given_to_others(memory):
    memory.hold("optimizer", 6 * MIB)
    assert memory.free_bytes == 2 * MIB
    with pytest.raises(ManagedMemoryFullError, match=r"6\.0 MiB of 8\.0 MiB are in use"):
        memory.allocate("ema", 3 * MIB)
    memory.allocate("optimizer", 5 * MIB)
    assert memory.free_bytes == 2 * MIB, "one of six is still held"
    memory.hold("optimizer", 0)
    memory.allocate("ema", 3 * MIB)
    with pytest.raises(ManagedMemoryFullError):
        memory.hold("optimizer", 1)


def test_a_group_that_is_refused_frees_the_others(accounting):
    machine = simulated_machine(Link.MANAGED)
    memory = managed_memory(machine.gpu, accounting)
    calls, original = [], machine.gpu.allocate_managed

    def allocate(nbytes):
        calls.append(nbytes)
        return original(nbytes) if len(calls) < 3 else (2, 0)

    machine.gpu.allocate_managed = allocate
    with pytest.raises(ManagedMemoryFullError, match="driver refused"):
        memory.allocate_all("weights", [[torch.ones(4)], [torch.ones(4)], [torch.ones(4)]])
    assert len(calls) == 3
    assert memory.slabs == ()
    assert accounting.current(Tier.MANAGED) == 0


@pytest.mark.parametrize(
    ("override", "ranks", "cap"), [(GIB, 1, 1), (1 << 50, 1, 28), (None, 2, 12)]
)
def test_the_cap_is_limited_by_the_ranks_share_of_host_memory(override, ranks, cap):
    """The host has 32 GiB, of which 4 GiB are reserved."""
    session = session_on(Link.COHERENT, UVM)
    session.managed_cap_override, session.num_sharing_host = override, ranks
    assert session.managed_cap == cap * GIB
    assert ("host memory" in session.cap_reason) == (override != GIB)


class Pages(DirectPrefetcher):
    """Prefetches when it is drained, as a thread would some time later."""

    def __init__(self, driver):
        super().__init__(driver)
        self.waiting = []

    def start(self, ranges, location, after=None):
        self.waiting.append((ranges, location))
        return super().start([], location, after)

    def drain(self):
        for ranges, location in self.waiting:
            super().start(ranges, location)
        self.waiting.clear()


def test_requests_are_passed_on_before_their_memory_is_freed(machine, accounting):
    """The driver would get the address of freed memory."""
    memory = managed_memory(machine.gpu, accounting)
    memory._prefetcher = Pages(machine.gpu)
    slab = memory.allocate("ema", MIB, "prefetch")
    memory.prefetch(slab, "device")
    memory.free(slab)
    memory._prefetcher.drain()
    assert memory._prefetcher.waiting == []
    assert memory.slabs == ()


def test_garbage_that_is_collected_in_the_prefetch_thread_does_not_block_it(monkeypatch, machine):
    for name in ("set_device", "current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
    monkeypatch.setattr(managed_roles, "_event", MagicMock)
    thread = PrefetchThread(machine.gpu, 0, lambda notice: None)
    monkeypatch.setattr(machine.gpu, "prefetch", lambda *_: thread.drain() or 0)
    request = thread.start([(0, MIB)], 0)
    assert request.issued.wait(60)
    thread.close()


def test_a_prefetch_that_fails_is_reported_and_does_not_block(monkeypatch, machine):
    """Steps wait for the thread, so it must go on after an error."""
    notices: list[Notice] = []
    for name in ("set_device", "current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
    monkeypatch.setattr(managed_roles, "_event", MagicMock)
    thread = PrefetchThread(machine.gpu, 0, notices.append)
    monkeypatch.setattr(machine.gpu, "prefetch", MagicMock(side_effect=ValueError("broken\nmore")))
    requests = [thread.start([(0, MIB)], location) for location in (0, HOST, 0)]
    thread.drain()
    assert all(request.issued.is_set() for request in requests)
    for request in requests:
        request.wait()
    thread.close()
    (notice,) = notices
    assert notice.text == "prefetching managed memory failed (broken); steps will be slower"


def test_prefetches_to_the_host_are_awaited_by_the_memory_they_move(memory):
    """Two experts use different groups, so the position of a group says nothing."""
    first, second = (memory.allocate("ema", MIB, "prefetch") for _ in range(2))
    groups, calls = ManagedGroups(memory), []
    original = memory.prefetch_parts

    def prefetch_parts(parts, to, after=None):
        calls.append((parts[0][0], to, after is not None))
        return original(parts, to, after)

    memory.prefetch_parts = prefetch_parts
    for slab in (first, second, first):
        groups.for_each([[(slab, slab.memory)]], lambda number: None)
    to_device = [(slab, waits) for slab, to, waits in calls if to == "device"]
    assert to_device == [(first, False), (second, False), (first, True)]


def test_the_cap_can_be_set():
    session = session_on(Link.MANAGED, UVM)
    session.managed_cap_override = GIB
    assert session.managed.cap_bytes == GIB
    assert session.stats()["uvm.bytes.managed.cap"] == GIB
