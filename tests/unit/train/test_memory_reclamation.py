"""A run whose device memory becomes short: what is trimmed, and that the results stay the same.

The device is simulated: its memory is counted by a simulated driver, and its tensors are in the
CPU's memory. Caches, prefetching, stages and events are those of an ordinary run.
"""

from __future__ import annotations

import socket
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.managed import managed_memory
from fakes.simulated_driver import SimulatedDriver
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gracetune.gh200
from gracetune.cache import batch_transfer
from gracetune.cache.batch_transfer import BATCH_PLACEMENT, BatchTransfer, PinnedStaging
from gracetune.cache.memory_tier import allocate_page_aligned
from gracetune.config.environment import environment_settings
from gracetune.events.types import (
    BatchesFed,
    ManagedOverflow,
    MemoryReclaimed,
    Notice,
    StageChanged,
    StepDone,
    UnifiedMemory,
)
from gracetune.memory.driver import CudaCode
from gracetune.memory.placement import placement_table
from gracetune.memory.platform import DeviceSpec, HostFacts, Machine, Rates, detect_platform
from gracetune.memory.session import MemorySession
from gracetune.train import build
from gracetune.train.run import run_training
from gracetune.units import GIB, MIB

RATES = Rates(50e9, 50e9, 45e9, 10e9, 5e9, 30e9, 2000e9, 50e9)
GH200 = {
    "managed_memory": 1,
    "concurrent_managed_access": 1,
    "pageable_memory_access": 1,
    "pageable_memory_access_uses_host_page_tables": 1,
}
SHORT, ENOUGH = 4, 8
"""Steps after which another program fills the device, and after which it ends."""


class Done:
    def synchronize(self):
        pass


class SimulatedDevice(BatchTransfer):
    """Copies batches to a device whose tensors are in the CPU's memory."""

    needs_copy = True

    def __init__(self, session):
        super().__init__(session, torch.device("cpu"), placement_table(BATCH_PLACEMENT))
        self._staging = PinnedStaging(self.allocate_host, Done)

    def allocate_host(self, nbytes):
        return allocate_page_aligned(nbytes)

    def new_stream(self):
        return InOrder()


class InOrder:
    """A stream on which copies are complete when they return."""

    @contextmanager
    def active(self):
        with torch.no_grad():
            yield

    def record_arrival(self):
        return None

    def wait_for(self, batch, arrival):
        assert arrival is None


class SimulatedMachine:
    """A GH200 with 8 GiB of device memory, which another program may fill."""

    def __init__(self):
        self.driver = SimulatedDriver([DeviceSpec(8 * GIB, GH200, RATES)], 64 * GIB)
        self.host = HostFacts(64 * GIB, 64 * GIB, 4096)
        platform = detect_platform(self.driver, 0, self.host, rates=RATES)
        self.machine = Machine(self.driver, replace(platform, device_bytes=128 * MIB))
        self.transfer = None
        self._other = 0

    def build_transfer(self, section, device, emit, gc_freeze, managed_cap, num_sharing_host):
        assert num_sharing_host == 1
        session = MemorySession(
            lambda: self.machine,
            lambda: environment_settings({"PYTORCH_CUDA_ALLOC_CONF": "use_uvm:True"}),
            emit,
            gc_freeze,
            read_host=lambda: self.host,
        )
        session.hints_override = False
        session.managed_cap_override = managed_cap or GIB
        session.managed = managed_memory(self.driver, session.accounting, emit)
        slab = session.managed.allocate("ema", 256 * MIB, "device")
        session.managed.prefetch(slab, "device").wait()
        session._pool = gracetune.memory.managed_pool.PoolUnavailable("simulated")
        self.transfer = SimulatedDevice(session)
        return self.transfer

    def fill(self):
        code, self._other = self.driver.allocate_device(7 * GIB + 300 * MIB, 0)
        assert code == 0
        self.host = HostFacts(64 * GIB, 4 * GIB, 4096)

    def end_other_program(self):
        self.driver.free(self._other)
        self.host = HostFacts(64 * GIB, 64 * GIB, 4096)


class Watcher:
    """Fills the device during a run, and reads statistics as a user's code may."""

    def __init__(self, machine, port, is_short):
        self._machine, self._port, self._is_short = machine, port, is_short
        self.events = []
        self.stages = {}
        self.hot = {}
        self.metrics = ""

    def handle(self, event):
        self.events.append(event)
        if not isinstance(event, StepDone):
            return
        self.stages[event.step] = torch.cuda.memory_stats()["uvm.stage"]
        trimmers = self._machine.transfer._session.trimmers._on_device
        self.hot[event.step] = trimmers["texts on the device"].nbytes
        if self._is_short and event.step == SHORT:
            self._machine.fill()
        if self._is_short and event.step == ENOUGH:
            self._machine.end_other_program()
        if event.step == 12:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
                self.metrics = answer.read().decode()

    def close(self):
        pass

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def watched(tiny_run_in, tmp_path_factory):
    """Return a run on a device with space and one on a device that is short of memory."""
    found = {}
    gracetune.memory.stats.extend_torch_memory_stats(gracetune.gh200._process)
    for is_short in (False, True):
        folder = tmp_path_factory.mktemp("short" if is_short else "enough")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run = tiny_run_in(
            folder,
            train={"max_train_steps": 12, "ema_decay": 0.0},
            cache_config={"persistent_cache": True, "prefetch_depth": 3},
            logging={"tensorboard": True, "every": 1, "prometheus_port": port},
        )
        machine = SimulatedMachine()
        watcher = Watcher(machine, port, is_short)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "build_batch_transfer", machine.build_transfer)
            run_training(run, sinks=[watcher], telemetry={"interval_s": 0.0})
        found[is_short] = run, watcher
    return found


def test_short_memory_is_reclaimed_between_steps_and_used_again_later(watched):
    _, watcher = watched[True]
    changes = [(event.step, event.stage) for event in watcher.of(StageChanged)]
    assert changes == [(SHORT + 1, 2), (ENOUGH + 1, 1)]
    decisions = watcher.of(MemoryReclaimed)
    kinds = [(event.step, event.kind) for event in decisions]
    assert kinds == [
        *((SHORT + 1, "cap"), (SHORT + 1, "light")),
        *((ENOUGH + 1, "cap"), (ENOUGH + 1, "restored")),
    ]
    light, restored = decisions[1], decisions[3]
    trimmed = {
        *("texts on the device", "prefetched batches", "managed pages"),
        *("latents in host memory", "texts in host memory"),
    }
    assert {name for name, nbytes in light.freed.items() if nbytes > 0} == trimmed
    assert light.freed["managed pages"] == 256 * MIB
    assert light.freed["texts on the device"] == watcher.hot[SHORT] > 0
    assert light.nbytes == sum(light.freed.values()) == restored.nbytes
    assert "host memory could not take all managed pages" in light.reason


def test_the_results_do_not_change_and_trimmed_data_come_back_when_needed(watched):
    (_, enough), (_, short) = watched[False], watched[True]
    assert [e.loss for e in short.of(StepDone)] == [e.loss for e in enough.of(StepDone)]
    assert [e.grad_norm for e in short.of(StepDone)] == [e.grad_norm for e in enough.of(StepDone)]
    assert enough.of(MemoryReclaimed) == []
    assert short.hot[SHORT + 2] == 0 < short.hot[12] <= short.hot[SHORT]
    (before,), (fed,) = enough.of(BatchesFed), short.of(BatchesFed)
    assert before.reads == 0 < fed.reads, "latents were read from files"
    assert before.depth == fed.depth == 3


def test_statistics_of_the_run_are_in_torch_the_log_and_the_trackers(watched):
    run, watcher = watched[True]
    assert [watcher.stages[step] for step in (SHORT, SHORT + 1, ENOUGH, ENOUGH + 1)] == [1, 2, 2, 1]
    logged = {event.step: event for event in watcher.of(UnifiedMemory)}
    assert logged[SHORT].headroom < 0 < logged[SHORT - 1].headroom
    assert (logged[12].light_reclamations, logged[12].reclaimed_bytes["light"]) == (
        *(1, watcher.of(MemoryReclaimed)[1].nbytes),
    )
    assert logged[12].current >= 256 * MIB
    assert 'gracetune_uvm_light_reclamations{run="run"} 1.0' in watcher.metrics
    assert 'gracetune_uvm_stage{run="run"} 1.0' in watcher.metrics
    board = EventAccumulator(str(Path(run.output_dir) / "tensorboard"))
    board.Reload()
    stages = {point.step: point.value for point in board.Scalars("uvm/stage")}
    assert (stages[SHORT], stages[SHORT + 1], stages[12]) == (1, 2, 1)
    assert {point.step: point.value for point in board.Scalars("uvm/headroom_gib")}[SHORT] < 0
    assert board.Scalars("uvm/managed_current_gib")[-1].value >= 0.25


@pytest.mark.parametrize("is_refused", [False, True], ids=["no driver", "refused by the driver"])
def test_without_managed_memory_the_run_trains_and_one_line_says_what_is_not_in_use(
    tiny_run, recorder, monkeypatch, is_refused
):
    if is_refused:
        failing = {"allocate_managed": CudaCode.OUT_OF_MEMORY}
        driver = SimulatedDriver([DeviceSpec(8 * GIB, GH200, RATES)], 64 * GIB, failing=failing)
        host = HostFacts(64 * GIB, 64 * GIB, 4096)
        machine = Machine(driver, detect_platform(driver, 0, host, rates=RATES))
        monkeypatch.setattr(batch_transfer, "open_machine", lambda device: machine)
    monkeypatch.setenv("GRACETUNE_ALLOC_CONF", "uvm_oversubscription_ratio:3.0")
    run = tiny_run(
        gh200_optimizations={
            "use_uvm": True,
            "enable_uvm_hints": True,
            "managed": ["optimizer", "ema"],
            "managed_memory": "1GB",
        },
        cache_config={"vae_cache_type": "unified_memory"},
    )
    run_training(run, sinks=[recorder])
    assert [event.step for event in recorder.of(StepDone)] == [1, 2, 3]
    (line,) = (event.text for event in recorder.of(Notice) if event.fallback)
    reason = "the driver refuses managed memory (code 2)" if is_refused else "no NVIDIA driver "
    assert line.startswith(f"managed memory is not in use, although it is asked for: {reason}")
    section = "gh200_optimizations"
    settings = f"uvm_oversubscription_ratio, {section}.managed, {section}.managed_memory"
    assert line.endswith(f"Ordinary memory is used; no effect: {settings}")
    assert not recorder.of(ManagedOverflow)
