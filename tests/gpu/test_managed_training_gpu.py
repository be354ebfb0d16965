"""Training with roles in managed memory on a GPU: same losses, and exact statistics."""

import gc

import pytest
import torch

from gracetune.events.types import ManagedOverflow, MemoryRoles, StepDone
from gracetune.memory import managed_roles
from gracetune.memory.driver import PointerKind, open_cuda_driver
from gracetune.train import step as stepping
from gracetune.train.run import run_training

pytestmark = pytest.mark.gpu

ROLES = ["trained", "gradients", "optimizer", "ema"]
UVM, CAP = {"use_uvm": True}, "256MB"


@pytest.fixture
def train(tiny_run, tmp_path, recorder):
    def run_once(name, adapter=None, **settings):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(tmp_path / name),
            adapter=adapter,
            train={"max_train_steps": 6, "batch_size": 2, "ema_decay": 0.9, "mixed_precision": "no"}
            | {"gradient_accumulation_steps": 2},
            **settings,
        )
        run_training(run, sinks=[recorder])
        return [event.loss for event in recorder.of(StepDone)]

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield run_once
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def at_end(monkeypatch):
    """Return a list that gets the slabs of each run when it ends: role, address, bytes, kind."""
    found, original, driver = [], managed_roles.ManagedMemory.close, open_cuda_driver()

    def close(memory):
        kinds = [driver.pointer_kind(slab.pointer) for slab in memory.slabs]
        found.extend(
            (slab.role, slab.pointer, slab.nbytes, kind)
            for slab, kind in zip(memory.slabs, kinds, strict=True)
        )
        original(memory)

    monkeypatch.setattr(managed_roles.ManagedMemory, "close", close)
    return found


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("access", ["in_place", "prefetch", "device"])
def test_managed_roles_change_no_loss(train, recorder, at_end, access):
    expected = train("device", plan="off")
    managed = {"managed": ROLES, "managed_access": access, "managed_memory": CAP}
    assert train("managed", plan="off", gh200_optimizations=UVM | managed) == expected
    booked = dict(recorder.of(MemoryRoles)[-1].roles["managed"])
    booked.pop("batches", None)
    assert booked.keys() == set(ROLES) == {role for role, *_ in at_end}
    assert {kind for *_, kind in at_end} == {PointerKind.MANAGED}
    assert sum(nbytes for _, _, nbytes, _ in at_end) == sum(booked.values())
    gc.collect()
    driver = open_cuda_driver()
    freed = {driver.pointer_kind(pointer) for _, pointer, _, _ in at_end}
    assert freed == {PointerKind.UNKNOWN}, "the run is over"


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("access", ["in_place", "prefetch"])
def test_frozen_weights_in_managed_memory_change_no_loss(train, recorder, at_end, access):
    expected = train("device", adapter={"rank": 2}, plan="off")
    managed = {"managed": ["weights"], "managed_access": access, "managed_memory": CAP}
    settings = {"adapter": {"rank": 2}, "plan": "off", "gh200_optimizations": UVM | managed}
    assert train("managed", **settings) == expected
    assert {role for role, *_ in at_end} == {"weights"}
    (event,) = recorder.of(ManagedOverflow)
    assert event.role == "weights"
    assert access in event.placement, "weights outside of blocks are used in place"


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_a_run_without_a_plan_that_is_out_of_memory_continues(train, recorder, monkeypatch):
    expected = train("device", plan="off")
    original, calls = stepping.batch_losses, []

    def batch_losses(*arguments):
        calls.append(1)
        if len(calls) in (3, 4):  # in the second step, twice
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return original(*arguments)

    monkeypatch.setattr(stepping, "batch_losses", batch_losses)
    managed = UVM | {"managed_memory": CAP}
    assert train("overflow", plan="off", gh200_optimizations=managed) == expected
    events = recorder.of(ManagedOverflow)
    assert [(event.step, event.role) for event in events] == [(1, "ema"), (1, "optimizer")]
    assert all("out of memory" in event.reason and event.nbytes > 0 for event in events)
