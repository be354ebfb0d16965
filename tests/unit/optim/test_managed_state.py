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


def test_state_that_exceeds_the_cap_stays_where_it_was():
    on_device, managed = Training(), Managed(share=0.0, cap=2048)
    for training in (on_device, managed):
        training.train(range(2))
    with pytest.raises(torch.OutOfMemoryError):
        managed.stepper.set_host_share(1.0, managed.state)
    assert 0 < managed.booked() <= 2048
    for training in (on_device, managed):
        training.train(range(2, 4))
    assert_same(managed.tensors(), on_device.tensors())
