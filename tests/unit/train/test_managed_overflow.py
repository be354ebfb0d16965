"""Runs that keep roles in managed memory compute what other runs compute, bit for bit."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch
from fakes.managed import simulate_machine
from safetensors.torch import load_file

from gracetune.errors import RunFailedError
from gracetune.events.types import ManagedOverflow, Notice, StepDone
from gracetune.train import step as stepping
from gracetune.train.run import run_training

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."
UVM = {"use_uvm": True}
ALL_ROLES = ["trained", "gradients", "optimizer", "ema"]


@pytest.fixture
def train(tiny_run, tmp_path, recorder):
    """Return a function that trains all weights for four steps; it returns losses and tensors."""
    folders = (tmp_path / str(number) for number in itertools.count())

    def run_once(gh200=None, plan="off", **settings):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(next(folders)),
            adapter=None,
            train={"max_train_steps": 4, "batch_size": 2, "ema_decay": 0.9, "max_grad_norm": 0.1}
            | {"gradient_accumulation_steps": 2, "checkpoint_every": 4},
            gh200_optimizations=gh200 or {},
            plan=plan,
            **settings,
        )
        run_training(run, sinks=[recorder])
        folder = Path(run.output_dir) / "checkpoints" / "step-000004"
        saved = {kind: load_file(folder / f"{kind}.safetensors") for kind in KINDS}
        return [event.loss for event in recorder.of(StepDone)], saved

    return run_once


KINDS = ("weights", "optimizer", "ema")


@pytest.fixture
def machine(monkeypatch):
    return simulate_machine(monkeypatch)


def assert_equal(result, expected):
    assert result[0] == expected[0]
    for kind in KINDS:
        assert result[1][kind].keys() == expected[1][kind].keys()
        for key, value in expected[1][kind].items():
            assert torch.equal(result[1][kind][key], value), (kind, key)


@pytest.mark.parametrize("access", ["in_place", "prefetch"])
def test_forced_roles_change_no_bit(train, machine, recorder, access):
    expected = train()
    result = train(UVM | {"managed": ALL_ROLES, "managed_access": access, "managed_memory": "1GB"})
    assert_equal(result, expected)
    events = recorder.of(ManagedOverflow)
    assert {event.role for event in events} == set(ALL_ROLES)
    assert {event.placement for event in events} == {access}
    moved = sum(machine.traffic.prefetched.to_device for machine in machine.drivers)
    assert (moved > 0) == (access == "prefetch")


def test_statistics_equal_what_the_driver_has_allocated(train, machine, recorder):
    from gracetune.events.types import MemoryRoles, UnifiedMemory

    train(UVM | {"managed": ALL_ROLES, "managed_memory": "1GB"})
    (driver,) = machine.drivers
    (memory,) = machine.memories
    booked = recorder.of(MemoryRoles)[-1].roles["managed"]
    assert booked == memory.by_role()
    assert recorder.of(UnifiedMemory)[-1].current == sum(booked.values())
    assert sum(booked.values()) == driver._memory.promised_bytes()


def test_a_run_that_has_ended_keeps_no_gradients(train, machine):
    """Hooks of parameters form cycles that the garbage collector does not see."""
    train(UVM | {"managed": ALL_ROLES, "managed_memory": "1GB"})
    gc.collect()
    (memory,) = machine.memories
    pointers = {slab.memory.untyped_storage().data_ptr(): slab.role for slab in memory.slabs}
    own = {id(slab.memory) for slab in memory.slabs}
    views = [
        pointers[found.untyped_storage().data_ptr()]
        for found in gc.get_objects()
        if type(found) is torch.Tensor
        and found.layout is torch.strided
        and id(found) not in own
        and found.untyped_storage().data_ptr() in pointers
    ]
    assert "gradients" not in views


def out_of_memory_at(monkeypatch, *numbers):
    """Let some calls of the loss run out of memory."""
    calls = itertools.count()
    original = stepping.batch_losses

    def batch_losses(*arguments):
        if next(calls) in numbers:
            raise torch.OutOfMemoryError(FULL)
        return original(*arguments)

    monkeypatch.setattr(stepping, "batch_losses", batch_losses)


def test_a_run_that_is_out_of_memory_continues_and_says_so(train, machine, recorder, monkeypatch):
    expected = train()
    out_of_memory_at(monkeypatch, 0, 1, 5)
    assert_equal(train(UVM), expected)
    events = recorder.of(ManagedOverflow)
    assert [(event.step, event.role) for event in events] == [
        (0, "ema"),
        (0, "optimizer"),
        (1, "gradients"),
    ]
    assert all(event.reason == FULL and event.total <= event.cap for event in events)
    assert events[0].nbytes > 0
    texts = [event.text for event in recorder.of(Notice) if event.fallback]
    assert sum("Continuing, but slower, with" in text for text in texts) == 3


def test_without_use_uvm_the_error_names_the_setting(train, machine, recorder, monkeypatch):
    out_of_memory_at(monkeypatch, 2)
    with pytest.raises(RunFailedError, match=r"gh200_optimizations\.use_uvm: true") as caught:
        train()
    assert FULL.rstrip(".") in str(caught.value)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert not recorder.of(ManagedOverflow)
    assert not machine.memories


def test_beyond_the_cap_the_error_names_the_limit(train, machine, recorder, monkeypatch):
    out_of_memory_at(monkeypatch, *range(20))
    with pytest.raises(
        RunFailedError, match=r"gh200_optimizations\.managed_memory limits it to 1\.0 KiB"
    ):
        train(UVM | {"managed_memory": "1KiB"})
    refused = [e.text for e in recorder.of(Notice) if "cannot move to managed memory" in e.text]
    assert len(refused) == 3, "the averages, the gradients and the trained weights"


def test_offloaded_activations_are_in_managed_memory(train, machine, recorder):
    plan = {"device_memory": "1GB", "compile": "never", "stream": False}
    expected = train(plan=plan)
    result = train(UVM | {"managed": ["activations", "caches"], "managed_memory": "1GB"}, plan)
    assert_equal(result, expected)
    assert "activations" in {event.role for event in recorder.of(ManagedOverflow)}


def test_off_means_off(train, machine, monkeypatch):
    out_of_memory_at(monkeypatch, 0)
    with pytest.raises(RunFailedError, match=r"gh200_optimizations\.managed is off"):
        train(UVM | {"managed": "off"})


def test_without_managed_memory_the_same_run_file_trains(train, recorder):
    expected = train()
    assert_equal(train(UVM | {"managed": ALL_ROLES}), expected)
    (text,) = [t for t in recorder.texts() if t.startswith("managed memory is not in use")]
    assert "no effect: gh200_optimizations.managed" in text
