"""Optimizer state in managed memory gives the results of state on the device, bit for bit."""

import pytest
import torch
from fakes.managed import managed_memory
from fakes.simulated_driver import SimulatedDriver
from test_offloaded_state import Training, assert_same

from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.optim.offloaded_state import ManagedState
from gracetune.plan.machines import find_machine
from gracetune.train.state import flatten_optimizer_state, restore_optimizer
from gracetune.units import MIB

CAP = 64 * MIB


class Managed(Training):
    """A training whose optimizer state is in managed memory."""

    def __init__(self, name="adamw", share=1.0, placement="in_place", cap=CAP, host_share=0.0):
        super().__init__(name, host_share)
        spec = find_machine("h200-pcie")
        self.driver = SimulatedDriver([spec.device()], spec.host_bytes)
        self.accounting = MemoryAccounting({Tier.MANAGED: cap})
        self.state = ManagedState(managed_memory(self.driver, self.accounting), placement)
        if share:
            self.stepper.set_host_share(share, self.state)

    def booked(self):
        return self.accounting.current(Tier.MANAGED)


@pytest.mark.parametrize("placement", ["in_place", "prefetch", "device"])
@pytest.mark.parametrize(("name", "share"), [("adamw", 1.0), ("adamw", 0.3), ("muon", 1.0)])
def test_results_are_those_of_state_on_the_device(name, share, placement):
    on_device, managed = Training(name), Managed(name, share, placement)
    for training in (on_device, managed):
        training.train(range(5))
    assert_same(managed.tensors(), on_device.tensors())
    assert managed.booked() == managed.stepper.managed_nbytes > 0
    assert managed.stepper.host_nbytes == 0
    moved = managed.state.memory.prefetched_bytes
    assert (moved["device"] == moved["host"] > 0) == (placement == "prefetch")


def test_parameters_that_get_their_first_gradient_later():
    on_device, managed = Training(), Managed()
    for training in (on_device, managed):
        training.train(range(5), without=lambda seed: ("a", "d") if seed < 2 else ())
    assert_same(managed.tensors(), on_device.tensors())


@pytest.mark.parametrize("host_share", [0.0, 0.5, 1.0])
def test_state_moves_during_a_run(host_share):
    on_device, managed = Training(), Managed(share=0.0, host_share=host_share)
    for training in (on_device, managed):
        training.train(range(3))
    managed.stepper.set_host_share(1.0, managed.state)
    assert managed.stepper.host_nbytes == 0
    for training in (on_device, managed):
        training.train(range(3, 6))
    assert_same(managed.tensors(), on_device.tensors())
    managed.stepper.set_host_share(0.0)
    assert managed.booked() == 0
    for training in (on_device, managed):
        training.train(range(6, 8))
    assert_same(managed.tensors(), on_device.tensors())


def test_state_that_cannot_be_loaded_leaves_no_tensors_of_freed_memory(monkeypatch):
    """The run then moves state, which would read them, and loads the checkpoint again."""
    before, managed = Training(), Managed(share=0.3)
    for training in (before, managed):
        training.train(range(3))
    saved = flatten_optimizer_state(before.optimizer, before.named)
    load, calls = torch.optim.Optimizer.load_state_dict, []

    def full_once(*given):
        calls.append(given)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        load(*given)

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", full_once)
    arguments = managed.optimizer, managed.named, saved, managed.stepper.load_state_dict
    with pytest.raises(torch.OutOfMemoryError):
        restore_optimizer(*arguments)
    assert managed.booked() == 0
    assert not managed.optimizer.state
    managed.stepper.keep_managed(managed.state)
    restore_optimizer(*arguments)
    restored = flatten_optimizer_state(managed.optimizer, managed.named)
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())


def test_a_checkpoint_is_loaded_into_managed_memory():
    before, managed = Training(), Managed()
    before.train(range(3))
    managed.train([9])
    saved = flatten_optimizer_state(before.optimizer, before.named)
    saved = {key: tensor.clone() for key, tensor in saved.items()}
    with torch.no_grad():
        for name, p in managed.named.items():
            p.copy_(before.named[name])
    restore_optimizer(managed.optimizer, managed.named, saved, managed.stepper.load_state_dict)
    for training in (before, managed):
        training.train(range(3, 5))
    assert_same(managed.tensors(), before.tensors())
    assert managed.booked() == managed.stepper.managed_nbytes > 0


def test_the_cap_is_checked_before_weights_change():
    managed = Managed(cap=256)
    weights = {name: p.detach().clone() for name, p in managed.named.items()}
    with pytest.raises(torch.OutOfMemoryError, match=r"gh200_optimizations\.managed_memory"):
        managed.train([0])
    assert_same({name: p.detach() for name, p in managed.named.items()}, weights)


@pytest.mark.parametrize("host_share", [0.0, 0.5, 1.0])
def test_state_that_exceeds_the_cap_stays_where_it_was(host_share):
    """Half of it would fit; the steps after the refusal are those of a run without one."""
    on_device, managed = Training(), Managed(share=0.0, host_share=host_share)
    for training in (on_device, managed):
        training.train(range(2))
    stepper = managed.stepper
    before = stepper.host_nbytes, stepper.device_nbytes
    managed.accounting.set_cap(Tier.MANAGED, stepper.unmanaged_nbytes // 2)
    for refused in (
        lambda: stepper.keep_managed(managed.state),
        lambda: stepper.set_host_share(1.0, managed.state),
    ):
        with pytest.raises(torch.OutOfMemoryError, match="exceed the cap"):
            refused()
    assert managed.booked() == 0
    assert stepper.host_nbytes == before[0]
    for training in (on_device, managed):
        training.train(range(2, 4))
    assert (stepper.host_nbytes, stepper.device_nbytes) == before
    stepper.keep_in_host()
    stepper.set_host_share(0.0)
    assert stepper.host_nbytes > 0, "kept, whatever a plan asks for"
    for training in (on_device, managed):
        training.train(range(4, 6))
    assert_same(managed.tensors(), on_device.tensors())


def test_state_moves_from_pinned_memory_or_not_at_all():
    """The driver refuses the second bucket, although the cap allows it."""
    on_device, managed = Training(), Managed(share=0.0, host_share=1.0)
    for training in (on_device, managed):
        training.train(range(2))
    calls, original = [], managed.driver.allocate_managed

    def allocate(nbytes):
        calls.append(nbytes)
        return original(nbytes) if len(calls) == 1 else (2, 0)

    managed.driver.allocate_managed = allocate
    with pytest.raises(torch.OutOfMemoryError, match="driver refused"):
        managed.stepper.keep_managed(managed.state)
    assert len(calls) == 2
    assert managed.booked() == 0
    assert managed.state.memory.free_bytes == CAP, "nothing is held either"
    for training in (on_device, managed):
        training.train(range(2, 4))
    assert_same(managed.tensors(), on_device.tensors())


def test_room_is_held_for_state_that_does_not_exist_yet():
    managed = Managed(share=0.0)
    memory, stepper = managed.state.memory, managed.stepper
    predicted = stepper.unmanaged_nbytes
    assert 0 < predicted == pytest.approx(stepper.movable_nbytes)
    managed.accounting.set_cap(Tier.MANAGED, predicted - 1)
    with pytest.raises(torch.OutOfMemoryError, match="exceed the cap"):
        stepper.keep_managed(managed.state)
    managed.accounting.set_cap(Tier.MANAGED, predicted)
    stepper.keep_managed(managed.state)
    assert (managed.booked(), memory.free_bytes) == (0, 0)
    managed.train(range(1))
    assert 0 < stepper.managed_nbytes <= predicted
    managed.train(range(1, 2))
    assert memory.free_bytes == predicted - managed.booked(), "nothing is held any more"
    assert stepper.movable_nbytes == 0
