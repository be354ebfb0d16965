"""Runs that keep roles in managed memory compute what other runs compute, bit for bit."""

from __future__ import annotations

import gc
import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from diffusers import SD3Transformer2DModel
from fakes.managed import simulate_machine
from fork_process import run_ranks
from safetensors.torch import load_file

from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError, RunFailedError
from gracetune.events.console import notice_lines
from gracetune.events.types import ManagedOverflow, Notice, StepDone, Validated
from gracetune.memory import session
from gracetune.memory.shim import ShimCounters, ShimError
from gracetune.memory.stats import Tier
from gracetune.offload.copy_engine import OffloadError
from gracetune.plan import apply, planner
from gracetune.plan.controller import PlanController
from gracetune.plan.managed import managed_choices
from gracetune.plan.search import predict
from gracetune.plan.simulate import candidate_of
from gracetune.train import step as stepping
from gracetune.train import validate
from gracetune.train.managed_overflow import _placements
from gracetune.train.run import run_training
from gracetune.units import MIB, format_bytes

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."
UVM = {"use_uvm": True}
TRAIN = {
    "max_train_steps": 4,
    "batch_size": 2,
    "ema_decay": 0.9,
    "max_grad_norm": 0.1,
    "gradient_accumulation_steps": 2,
    "checkpoint_every": 4,
}
ALL_ROLES = ["trained", "gradients", "optimizer", "ema"]


@pytest.fixture
def train(tiny_run, tmp_path, recorder):
    """Return a function that trains all weights for four steps; it returns losses and tensors.

    With another number of steps, or in the folder of an earlier run, which is then resumed.
    """
    folders = (tmp_path / str(number) for number in itertools.count())

    def run_once(gh200=None, plan="off", steps=4, folder=None, **settings):
        recorder.events.clear()
        run = tiny_run(
            output_dir=str(folder or next(folders)),
            adapter=settings.pop("adapter", None),
            train=settings.pop("train", TRAIN | {"max_train_steps": steps}),
            gh200_optimizations=gh200 or {},
            plan=plan,
            **settings,
        )
        run_training(run, sinks=[recorder])
        if not run.train.checkpoint_every:
            return None
        folder = Path(run.output_dir) / "checkpoints" / f"step-{steps:06d}"
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
    # Gradients, and what is outside of blocks, are used at unknown moments.
    prefetched = {event.role for event in events if "prefetch" in event.placement}
    assert prefetched == ({"trained", "optimizer", "ema"} if access == "prefetch" else set())
    notices = [
        notice for notice in recorder.of(Notice) if "has no effect on gradients" in notice.text
    ]
    assert [notice.level for notice in notices] == ["warning"] * (len(prefetched) // 3)
    moved = sum(machine.traffic.prefetched.to_device for machine in machine.drivers)
    assert (moved > 0) == (access == "prefetch")


def test_forced_roles_are_lines_of_the_console(train, machine, recorder):
    train(UVM | {"managed": ["optimizer", "ema"], "managed_memory": "1GB"})
    events = {event.role: event for event in recorder.of(ManagedOverflow)}
    lines = [line for notice in recorder.of(Notice) for line in notice_lines(notice)]
    assert [line for line in lines if "managed memory has" in line] == [
        f"memory     managed memory has {name}, {format_bytes(events[role].nbytes)} "
        "(gh200_optimizations.managed)"
        for role, name in (
            ("optimizer", "the optimizer state"),
            ("ema", "the moving average of the weights"),
        )
    ]


def test_the_total_has_the_bytes_that_are_held(train, machine, recorder):
    """The state of an optimizer is allocated in its first step."""
    train(UVM | {"managed": ["optimizer", "ema"], "managed_memory": "1GB"})
    first, second = recorder.of(ManagedOverflow)
    assert first.role == "optimizer"
    assert first.total == first.nbytes > 0
    assert second.total == first.total + second.nbytes


def test_statistics_equal_what_the_driver_has_allocated(train, machine, recorder):
    from gracetune.events.types import MemoryRoles, UnifiedMemory

    train(UVM | {"managed": ALL_ROLES, "managed_memory": "1GB"})
    booked = recorder.of(MemoryRoles)[-1].roles["managed"]
    assert [booked] == machine.roles_at_end
    assert recorder.of(UnifiedMemory)[-1].current == sum(booked.values())
    assert [sum(booked.values())] == machine.bytes_at_end


def test_a_run_that_has_ended_keeps_no_managed_memory(train, machine):
    """Hooks of parameters form cycles that the garbage collector does not see."""
    for number in range(3):
        train(UVM | {"managed": ALL_ROLES, "managed_memory": "1GB"})
        assert machine.bytes_at_end[number] > 0
        gc.collect()
        assert machine.drivers[number]._memory.promised_bytes() == 0
        assert machine.memories[number].used_bytes == 0


def test_a_run_that_cannot_be_built_keeps_no_managed_memory(train, machine):
    """Nobody closes its session. The gradients fit, the trained weights do not."""
    with pytest.raises(ConfigError, match="trained, which does not fit"):
        train(UVM | {"managed": ["gradients", "trained"], "managed_memory": "6MB"})
    (driver,) = machine.drivers
    assert machine.memories.pop()._accounting.peak(Tier.MANAGED) > 0
    gc.collect()
    assert driver._memory.promised_bytes() == 0


class Slots:
    """The shim's slots for pools: a pool that is not closed keeps its slot."""

    path = Path("shim.so")

    def __init__(self):
        self.taken = set()

    def open(self, pattern, cap_bytes, driver_library):
        free = [number for number in range(16) if number not in self.taken]
        if not free:
            raise ShimError("all 16 pools are open")
        self.taken.add(free[0])
        return free[0]

    def close(self, slot):
        self.taken.remove(slot)
        return True

    def set_cap(self, slot, cap_bytes):
        assert slot in self.taken

    def counters(self, slot):
        assert slot in self.taken
        return ShimCounters(*[0] * len(ShimCounters.__slots__))


@pytest.mark.parametrize(("times", "cap"), [(20, "1GB"), (2, "1MB")], ids=["trained", "refused"])
def test_a_process_can_run_as_often_as_it_likes(train, machine, recorder, monkeypatch, times, cap):
    """A run that is refused because a role does not fit closes its pool as well."""
    slots = Slots()
    monkeypatch.setattr(session, "find_shim", lambda: slots)
    monkeypatch.setattr(session, "TorchMemPools", MagicMock)
    gh200 = UVM | {"managed": ["trained"], "managed_memory": cap}
    settings = {"max_train_steps": 1, "batch_size": 1, "checkpoint_every": 0}
    for _ in range(times):
        with pytest.raises(ConfigError) if cap == "1MB" else nullcontext():
            train(gh200, train=settings)
        assert not any("pools are open" in text for text in recorder.texts())
        gc.collect()
        assert not slots.taken
        assert machine.drivers[-1]._memory.promised_bytes() == 0
    assert len(machine.drivers) == times


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


# A validation

VALIDATION = {"every": 2, "sample_steps": 1, "prompts": ["one"], "holdout": 0.25}


def full_at_validation(monkeypatch, name, *numbers):
    """Let some calls of a function of the validation run out of memory."""
    calls, original = itertools.count(), getattr(validate, name)

    def call(*arguments):
        if next(calls) in numbers:
            raise torch.OutOfMemoryError(FULL)
        return original(*arguments)

    monkeypatch.setattr(validate, name, call)


@pytest.mark.parametrize("part", ["generate_samples", "held_out_loss"])
def test_a_validation_that_is_out_of_memory_overflows_and_is_repeated(
    train, machine, recorder, monkeypatch, part
):
    """Calls: step 0, step 2 and its repetition, step 4."""
    expected = train(validation=VALIDATION)
    losses = [event.losses for event in recorder.of(Validated)]
    full_at_validation(monkeypatch, part, 1)
    assert_equal(train(UVM, validation=VALIDATION), expected)
    assert [event.step for event in recorder.of(Validated)] == [0, 2, 4]
    assert [event.losses for event in recorder.of(Validated)] == losses
    reason = f"The validation of step 2 has too little memory: {FULL}"
    (event,) = recorder.of(ManagedOverflow)
    assert (event.step, event.role, event.reason) == (2, "ema", reason)
    texts = [event.text for event in recorder.of(Notice) if event.fallback]
    assert sum(text.startswith(f"{reason} Continuing, but slower, with") for text in texts) == 1


def test_a_validation_without_space_is_skipped_and_gradients_do_not_move_for_it(
    train, machine, recorder, monkeypatch
):
    full_at_validation(monkeypatch, "generate_samples", *range(40))
    validation = VALIDATION | {"every": 1}
    settings = TRAIN | {"max_train_steps": 5, "checkpoint_every": 5}
    train(UVM | {"managed_memory": "1GB"}, steps=5, validation=validation, train=settings)
    assert [event.step for event in recorder.of(StepDone)] == [1, 2, 3, 4, 5]
    assert recorder.of(Validated) == []
    moved = [(event.step, event.role) for event in recorder.of(ManagedOverflow)]
    assert moved == [(0, "ema"), (1, "optimizer"), (2, "trained")], "gradients exist in steps only"
    skipped = [text for text in recorder.texts() if text.startswith("no samples of step")]
    assert len(skipped) == 6
    assert skipped[-1].endswith(
        f"step 5: {FULL} Training continues. Lower validation.width, height or frames, or "
        "plan.device_memory; managed memory has ema, optimizer, trained, and "
        "gh200_optimizations.managed_memory limits it to 953.7 MiB."
    )


def test_without_use_uvm_a_skipped_validation_names_the_setting(
    train, machine, recorder, monkeypatch
):
    full_at_validation(monkeypatch, "generate_samples", 1)
    train(validation=VALIDATION)
    assert [event.step for event in recorder.of(Validated)] == [0, 4]
    (text,) = [text for text in recorder.texts() if text.startswith("no samples of step 2")]
    assert "gh200_optimizations.use_uvm: true" in text
    assert not recorder.of(ManagedOverflow)


def test_a_plan_is_not_corrected_after_a_validation_overflowed(train, machine, monkeypatch):
    """A corrected plan could fill the device again."""
    checked = []
    monkeypatch.setattr(PlanController, "_correct", lambda *given: checked.append(given) or False)
    monkeypatch.setattr("gracetune.plan.controller.plan_is_inaccurate", lambda *_: True)
    monkeypatch.setattr(
        "gracetune.plan.controller.StepMeasurement.is_known", property(lambda _: True)
    )
    settings = TRAIN | {"max_train_steps": 7, "checkpoint_every": 0}
    validation = VALIDATION | {"every": 7}
    train(UVM, PLAN, train=settings, validation=validation)
    assert len(checked) == 1
    full_at_validation(monkeypatch, "generate_samples", 0)
    train(UVM, PLAN, train=settings, validation=validation)
    assert len(checked) == 1


def test_without_use_uvm_the_error_names_the_setting(train, machine, recorder, monkeypatch):
    out_of_memory_at(monkeypatch, 2)
    with pytest.raises(RunFailedError, match=r"gh200_optimizations\.use_uvm: true") as caught:
        train()
    assert FULL.rstrip(".") in str(caught.value)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert not recorder.of(ManagedOverflow)
    assert not machine.memories


def refused_roles(recorder):
    texts = [event.text for event in recorder.of(Notice)]
    return {t.split(" cannot")[0] for t in texts if "cannot move to managed memory" in t}


def test_beyond_the_cap_the_error_names_the_limit(train, machine, recorder, monkeypatch):
    out_of_memory_at(monkeypatch, *range(20))
    with pytest.raises(
        RunFailedError, match=r"gh200_optimizations\.managed_memory limits it to 1\.0 KiB"
    ):
        train(UVM | {"managed_memory": "1KiB"})
    assert refused_roles(recorder) == {
        "the moving average of the weights",
        "the optimizer state",
        "the gradients",
        "the trained weights",
    }


def test_state_that_exceeds_the_cap_is_streamed_instead(train, machine, recorder, monkeypatch):
    """At step 0 it does not exist yet, but its size is known; it is twice that of the EMA."""
    expected = train()
    out_of_memory_at(monkeypatch, 0, 1)
    assert_equal(train(UVM | {"managed_memory": "10MB"}), expected)
    assert [event.role for event in recorder.of(ManagedOverflow)] == ["ema"]
    assert refused_roles(recorder) == {"the optimizer state"}
    assert any("the optimizer state streamed from host memory" in t for t in recorder.texts())


def test_streamed_state_does_not_overflow(train, machine, recorder, monkeypatch):
    expected = train()
    out_of_memory_at(monkeypatch, 3, 4)
    assert_equal(train(UVM, optimizer={"state": "host", "lr": 1e-3}), expected)
    assert [event.role for event in recorder.of(ManagedOverflow)] == ["ema", "gradients"]


@pytest.mark.parametrize("first", [0, 3], ids=["before the first step", "later"])
def test_as_many_weights_move_as_fit(train, machine, recorder, monkeypatch, first):
    """EMA, state and gradients do not fit together with all weights."""
    expected = train()
    out_of_memory_at(monkeypatch, first, first + 1, first + 2, first + 3)
    assert_equal(train(UVM | {"managed_memory": "22MB"}), expected)
    events = {event.role: event for event in recorder.of(ManagedOverflow)}
    assert list(events) == ["ema", "optimizer", "gradients", "trained"]
    assert 0 < events["gradients"].nbytes <= events["ema"].nbytes
    assert 0 < events["trained"].nbytes < events["ema"].nbytes
    (memory,) = machine.memories
    assert machine.roles_at_end[0]["trained"] == events["trained"].nbytes
    assert machine.bytes_at_end[0] <= memory.cap_bytes


@pytest.mark.parametrize("role", ["optimizer", "ema", "gradients", "trained"])
def test_a_role_that_exceeds_the_cap_is_an_error_of_the_run_file(train, machine, role):
    with pytest.raises(ConfigError) as caught:
        train(UVM | {"managed": [role], "managed_memory": "1MB"})
    text = str(caught.value)
    assert f"gh200_optimizations.managed has {role}, which does not fit" in text
    assert "976.6 KiB" in text, "the limit"
    assert "Raise gh200_optimizations.managed_memory." in text
    assert text.endswith(f"Or take {role} out of gh200_optimizations.managed.")


PLAN = {"device_memory": "1GB", "compile": "never", "stream": False}


@pytest.mark.parametrize("role", ["optimizer", "ema"])
def test_a_role_of_the_plan_that_exceeds_the_cap_is_not_blamed_on_the_run_file(
    train, machine, monkeypatch, role
):
    original = planner._saved_or_best_plan

    def managed(problem, saved, emit):
        plan, was_checked = original(problem, saved, emit)
        return replace(plan, managed=(role,)), was_checked

    monkeypatch.setattr(planner, "_saved_or_best_plan", managed)
    with pytest.raises(ConfigError, match=r"^The plan keeps the .* does not fit") as caught:
        train(UVM | {"managed_memory": "1MB"}, PLAN)
    assert "Raise gh200_optimizations.managed_memory" in str(caught.value)
    assert str(caught.value).endswith(
        "Or set gh200_optimizations.managed: off, to plan without managed memory."
    )


@pytest.mark.parametrize("access", ["prefetch", "in_place"])
def test_training_says_that_its_plan_predicts_another_access(train, machine, recorder, access):
    gh200 = {"managed": ["optimizer"], "managed_access": access, "managed_memory": "1GB"}
    train(UVM | gh200, PLAN)
    expected = "plan: times of managed memory are those of managed_access: auto, not of"
    notes = [notice for notice in recorder.of(Notice) if notice.text.startswith(expected)]
    assert [note.level for note in notes] == ["warning"] * (access == "prefetch")


# Before the first step


def full_for_ema(monkeypatch):
    """Let the device have no space for the moving average of the weights."""
    original = stepping.Ema.__init__

    def build(ema, parameters, decay, managed=None):
        if managed is None:
            raise torch.OutOfMemoryError(FULL)
        original(ema, parameters, decay, managed)

    monkeypatch.setattr(stepping.Ema, "__init__", build)


def full_for_model(monkeypatch, machine, role):
    """Let the device have no space for the model unless these weights are in managed memory."""
    original = torch.nn.Module.to

    def move(module, *arguments, **options):
        is_managed = machine.memories and role in machine.memories[-1].by_role()
        if isinstance(module, SD3Transformer2DModel) and not is_managed:
            raise torch.OutOfMemoryError(FULL)
        return original(module, *arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "to", move)


def test_a_moving_average_without_space_on_the_device_is_built_in_managed_memory(
    train, machine, recorder, monkeypatch
):
    expected = train()
    full_for_ema(monkeypatch)
    assert_equal(train(UVM), expected)
    (event,) = recorder.of(ManagedOverflow)
    assert (event.step, event.role, event.reason) == (0, "ema", FULL)
    assert (
        sum("Continuing, but slower, with the moving average" in t for t in recorder.texts()) == 1
    )


@pytest.mark.parametrize(("adapter", "role"), [(None, "trained"), ({"rank": 4}, "weights")])
def test_a_model_without_space_on_the_device_moves_to_managed_memory(
    train, machine, recorder, monkeypatch, adapter, role
):
    expected = train(adapter=adapter)
    full_for_model(monkeypatch, machine, role)
    assert_equal(train(UVM | {"managed_memory": "1GB"}, adapter=adapter), expected)
    (event,) = recorder.of(ManagedOverflow)
    assert (event.step, event.role, event.reason) == (0, role, FULL)


def test_weights_that_the_run_file_keeps_in_managed_memory_are_not_placed_on_the_device_first(
    train, machine, recorder, monkeypatch
):
    expected = train(adapter={"rank": 4})
    full_for_model(monkeypatch, machine, "weights")
    gh200 = UVM | {"managed": ["weights"], "managed_memory": "1GB"}
    assert_equal(train(gh200, adapter={"rank": 4}), expected)
    (event,) = recorder.of(ManagedOverflow)
    assert (event.role, event.reason) == ("weights", "gh200_optimizations.managed")


def test_without_use_uvm_errors_before_the_first_step_name_the_setting(train, machine, monkeypatch):
    setting = r"gh200_optimizations\.use_uvm: true"
    full_for_ema(monkeypatch)
    with pytest.raises(RunFailedError, match=rf"moving average .* does not fit.*{setting}"):
        train()
    full_for_model(monkeypatch, machine, "weights")
    with pytest.raises(RunFailedError, match=rf"The model does not fit.*{setting}.*plan: auto"):
        train()


# Resuming


def full_for_state(monkeypatch):
    """Let the device have no space to load the state of an optimizer."""
    original = torch.optim.Optimizer.load_state_dict

    def load(optimizer, state_dict):
        loaded = [value for state in state_dict["state"].values() for value in state.values()]
        if sum(value.nbytes for value in loaded if isinstance(value, torch.Tensor)) > MIB:
            raise torch.OutOfMemoryError(FULL)
        original(optimizer, state_dict)

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", load)


@pytest.mark.parametrize("limit", ["1GB", "22MB"])
def test_a_resumed_run_has_in_managed_memory_what_overflowed_before(
    train, machine, recorder, monkeypatch, tmp_path, limit
):
    """22 MB have space for a part of the trained weights only."""
    expected, gh200 = train(), UVM | {"managed_memory": limit}
    with monkeypatch.context() as patched:
        out_of_memory_at(patched, 0, 1, 2, 3)
        losses, _ = train(gh200, steps=2, folder=tmp_path / "parts")
    moved = {event.role: event.nbytes for event in recorder.of(ManagedOverflow)}
    assert list(moved) == ["ema", "optimizer", "gradients", "trained"]
    full_for_ema(monkeypatch)
    full_for_state(monkeypatch)
    rest, saved = train(gh200, folder=tmp_path / "parts")
    assert_equal((losses + rest, saved), expected)
    events = recorder.of(ManagedOverflow)
    assert {event.role: event.nbytes for event in events} == moved
    assert {(event.step, event.reason) for event in events} == {
        (0, "The run overflowed before it was resumed.")
    }
    train(gh200, steps=6, folder=tmp_path / "parts")
    events = recorder.of(ManagedOverflow)
    assert {event.role: event.nbytes for event in events} == moved, "the next checkpoint has them"


def test_a_planned_run_resumes_with_what_overflowed_before(
    train, machine, recorder, monkeypatch, tmp_path
):
    expected = train(plan=PLAN)
    with monkeypatch.context() as patched:
        patched.setattr(PlanController, "reduce_memory", lambda *_: False)
        out_of_memory_at(patched, 0, 1)
        losses, _ = train(UVM, PLAN, steps=2, folder=tmp_path / "parts")
    full_for_ema(monkeypatch)
    full_for_state(monkeypatch)
    rest, saved = train(UVM, PLAN, folder=tmp_path / "parts")
    assert_equal((losses + rest, saved), expected)
    assert {event.role for event in recorder.of(ManagedOverflow)} == {"ema", "optimizer"}


def test_a_resumed_run_overflows_if_the_checkpoint_does_not_fit(
    train, machine, recorder, monkeypatch, tmp_path
):
    expected = train()
    losses, _ = train(UVM, steps=2, folder=tmp_path / "parts")
    full_for_state(monkeypatch)
    rest, saved = train(UVM, folder=tmp_path / "parts")
    assert_equal((losses + rest, saved), expected)
    found = [(event.step, event.role, event.reason) for event in recorder.of(ManagedOverflow)]
    assert found == [(2, "ema", FULL), (2, "optimizer", FULL)]


def test_without_use_uvm_a_checkpoint_that_does_not_fit_is_an_error_that_names_it(
    train, machine, monkeypatch, tmp_path
):
    train(steps=2, folder=tmp_path / "parts")
    full_for_state(monkeypatch)
    with pytest.raises(RunFailedError, match=r"gh200_optimizations\.use_uvm: true"):
        train(folder=tmp_path / "parts")


# With a plan


def change_plans(monkeypatch, change):
    """Let the planner change the blocks of every plan by a function of their numbers."""
    original = planner._saved_or_best_plan

    def changed(problem, saved, emit):
        plan, was_checked = original(problem, saved, emit)
        candidate = candidate_of(plan)
        blocks = tuple(replace(b, **change(n)) for n, b in enumerate(candidate.blocks))
        candidate = replace(candidate, blocks=blocks, slots=2)
        return predict(problem.model, candidate, problem.fixed, simulated=False), was_checked

    monkeypatch.setattr(planner, "_saved_or_best_plan", changed)


@pytest.fixture
def offloading(monkeypatch):
    """Let plans offload all activations, also small ones."""
    change_plans(monkeypatch, lambda number: {"activations": "offload"})
    original = apply.offload_activations

    def offload_all(blocks, copy_engine, ring, emit, min_nbytes, **options):
        return original(blocks, copy_engine, ring, emit, 1, **options)

    monkeypatch.setattr(apply, "offload_activations", offload_all)


def test_offloaded_activations_are_in_managed_memory(train, machine, recorder, offloading):
    """A whole slab of host buffers would exceed the cap."""
    expected = train(plan=PLAN)
    gh200 = {"managed": ["activations"], "managed_access": "prefetch", "managed_memory": "64MB"}
    assert_equal(train(UVM | gh200, PLAN), expected)
    (event,) = recorder.of(ManagedOverflow)
    assert (event.role, event.placement) == ("activations", "in_place")
    assert event.total == event.nbytes > 0, "they are held: batches cannot take them"
    (memory,) = machine.memories
    assert event.nbytes // 2 < memory._accounting.peak(Tier.MANAGED) <= 64_000_000
    assert machine.drivers[-1].traffic.prefetched.to_device == 0, "they are copied"


def test_activations_beyond_the_cap_are_no_lack_of_device_memory(train, machine, offloading):
    """A plan that needs less of that would offload more."""
    with pytest.raises(OffloadError, match=r"for activations .* exceed the cap") as caught:
        train(UVM | {"managed": ["activations"], "managed_memory": "100KiB"}, PLAN)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    for setting in ("managed_memory.", "managed, or lower train.batch_size."):
        assert f"gh200_optimizations.{setting}" in str(caught.value)


@pytest.mark.parametrize(("plan", "why"), [("off", "there is no plan"), (PLAN, "offloads none")])
def test_roles_that_cannot_fill_are_named(train, machine, recorder, plan, why):
    train(UVM | {"managed": ["activations", "caches", "weights"], "managed_memory": "1GB"}, plan)
    assert not recorder.of(ManagedOverflow)
    warnings = [t for t in recorder.texts() if "cannot be in managed memory" in t]
    assert len(warnings) == 3
    assert why in warnings[0]


def test_forced_roles_move_when_the_plan_is_applied(train, machine, recorder):
    """Tracing moves the model, and an fp8 conversion replaces weights, so not before."""
    expected = train(plan=PLAN)
    result = train(UVM | {"managed": ALL_ROLES, "managed_memory": "1GB"}, PLAN)
    assert_equal(result, expected)
    planned = [type(e) for e in recorder.events].index(ManagedOverflow)
    texts = [event.text for event in recorder.events[:planned] if isinstance(event, Notice)]
    assert any(text.startswith("plan: expect") for text in texts)
    assert {event.role for event in recorder.of(ManagedOverflow)} == set(ALL_ROLES)
    assert {e.reason for e in recorder.of(ManagedOverflow)} == {"gh200_optimizations.managed"}


@pytest.mark.parametrize("access", ["auto", "in_place"])
def test_weights_are_prefetched_unless_the_run_file_wants_them_in_place(
    train, machine, recorder, access
):
    """In place, matrix products would read them over the link again and again."""
    gh200 = {"managed": ["weights"], "managed_access": access, "managed_memory": "1GB"}
    train(UVM | gh200, PLAN, adapter={})
    (event,) = recorder.of(ManagedOverflow)
    assert ("prefetch" in event.placement) == (access == "auto")
    moved = sum(machine.traffic.prefetched.to_device for machine in machine.drivers)
    assert (moved > 0) == (access == "auto")
    warned = [n for n in recorder.of(Notice) if "matmuls read weights over" in n.text]
    assert [notice.level for notice in warned] == ["warning"] * (access == "in_place")


@pytest.mark.parametrize(("cast", "placement"), [(True, None), (False, "prefetch")])
def test_trained_weights_are_prefetched_if_matrix_products_read_them(cast, placement):
    choose = partial(_placements, roles=(), emit=pytest.fail, trained_are_cast=cast)
    assert choose("auto", follows_pattern=False).get("trained") == placement
    assert choose("auto", follows_pattern=False)["weights"] == "prefetch"
    assert choose("auto", follows_pattern=True) == {"activations": "in_place"}


@pytest.mark.parametrize("access", ["auto", "in_place", "prefetch"])
def test_of_an_adapters_model_only_resident_weights_are_managed(
    train, machine, recorder, monkeypatch, access
):
    expected = train(plan=PLAN, adapter={})
    gh200 = UVM | {"managed": ["weights"], "managed_access": access, "managed_memory": "1GB"}
    assert_equal(train(gh200, PLAN, adapter={}), expected)
    (everything,) = recorder.of(ManagedOverflow)
    change_plans(monkeypatch, lambda number: {"weights": "streamed" if number else "resident"})
    assert_equal(train(gh200, PLAN | {"stream": True}, adapter={}), expected)
    (event,) = recorder.of(ManagedOverflow)
    assert 0 < event.nbytes < everything.nbytes
    assert machine.roles_at_end[-1] == {"weights": event.nbytes}


def test_a_state_of_small_tensors_is_named_instead_of_moved(train, machine, recorder):
    """A LoRA of rank 4 has none of 16 KiB."""
    train(UVM | {"managed": ["optimizer"], "managed_memory": "1GB"}, adapter={"rank": 4})
    assert not recorder.of(ManagedOverflow)
    (text,) = [t for t in recorder.texts() if "cannot be in managed memory" in t]
    assert "the optimizer state" in text
    assert "small tensors" in text


def test_ranks_keep_gradients_on_the_device(train, machine, recorder):
    """The sums of gradients replace them, so managed memory would be booked and unused."""
    run = RunFile.model_validate({"gh200_optimizations": UVM | {"managed": ["gradients", "ema"]}})
    assert managed_choices(run, num_ranks=2) == (("ema",),)
    auto = RunFile.model_validate({"train": {"ema_decay": 0.9}})
    assert any("gradients" in roles for roles in managed_choices(auto))
    assert not any("gradients" in roles for roles in managed_choices(auto, num_ranks=2))


def test_off_means_off(train, machine, monkeypatch):
    out_of_memory_at(monkeypatch, 0)
    with pytest.raises(RunFailedError, match=r"gh200_optimizations\.managed is off"):
        train(UVM | {"managed": "off"})


def test_without_managed_memory_the_same_run_file_trains(train, recorder):
    expected = train()
    assert_equal(train(UVM | {"managed": ALL_ROLES}), expected)
    (text,) = [t for t in recorder.texts() if t.startswith("managed memory is not in use")]
    assert "no effect: gh200_optimizations.managed" in text


# Several ranks


@pytest.fixture
def train_on_ranks(tiny_run, tmp_path):
    """Return a function that trains all weights on two ranks, and returns the results of each."""
    run = tiny_run(
        adapter=None,
        train={"max_train_steps": 3, "batch_size": 2, "ema_decay": 0.9},
        gh200_optimizations=UVM,
        plan="off",
    )
    (tmp_path / "run.json").write_text(run.model_dump_json(exclude_unset=True))

    def run_case(case):
        script = Path(__file__).with_name("managed_ranks.py")
        for done in run_ranks(script, tmp_path, case):
            assert done.returncode == 0, done.stdout + done.stderr
        files = (tmp_path / f"{case}-{rank}.result" for rank in range(2))
        return [json.loads(file.read_text()) for file in files]

    return run_case


def test_ranks_overflow_together_if_one_has_no_space_for_the_first_update(train_on_ranks):
    expected, results = train_on_ranks("plain"), train_on_ranks("full")
    for one, other in zip(results, expected, strict=True):
        assert one["error"] == ""
        assert one["losses"] == other["losses"]
        assert other["moved"] == []
        assert [(step, role) for step, role, _ in one["moved"]] == [(0, "ema"), (0, "optimizer")]
        for _, _, reason in one["moved"]:
            assert reason.startswith("rank 1 on ")
            assert reason.endswith(FULL)


def test_no_rank_overflows_if_one_has_no_managed_memory(train_on_ranks):
    expected, results = train_on_ranks("plain"), train_on_ranks("one-without")
    for one, other in zip(results, expected, strict=True):
        assert (one["error"], one["losses"]) == ("", other["losses"])
        texts = [t for t in one["warnings"] if "nothing is moved to managed memory" in t]
        assert len(texts) == 1
        assert "rank 1 on " in texts[0]
        assert "no managed memory" in texts[0]
    for one in train_on_ranks("one-full"):
        assert "managed" in one["error"]
        assert one["error"].count("rank 1 on ") == 2, "the one that is out of memory, and why"
