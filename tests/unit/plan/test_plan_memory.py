"""Bytes by role, reckoned by hand on a model in round numbers."""

from dataclasses import replace
from math import ceil

import pytest
from cost_model_factory import made_choice, made_model

from gracetune.plan.cost import CostModel
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.result import Bytes
from gracetune.plan.search import PlanBudget, required_device_nbytes

NOTHING = FixedMemory(optimizer_nbytes=0, batches_ahead=0)


def test_a_kept_step_is_highest_in_the_last_blocks_backward() -> None:
    model = made_model(8)
    peak = device_bytes(model.at(1), made_choice(model), FixedMemory(16, batches_ahead=1))
    assert peak == Bytes(
        weights=50 + 8 * 100,
        adapters=16,
        gradients=2,
        optimizer=16,
        activations=3 + 8 * (80 + 10),
        caches=2 * 4,
        workspace=10,
    )
    assert peak.total == 850 + 16 + 2 + 16 + 723 + 8 + 10


@pytest.mark.parametrize(
    ("way", "held"),
    [("keep", 8 * 90), ("lean", 8 * 50), ("recompute", 8 * 10), ("offload", 2 * 50)],
)
def test_each_way_holds_what_it_says(way: str, held: int) -> None:
    model = made_model(8)
    peak = device_bytes(model.at(1), made_choice(model, way), NOTHING)
    assert peak.activations == pytest.approx(3 + held, abs=10)


def test_the_batch_scales_activations_and_nothing_else() -> None:
    model = made_model(8)
    one, four = (
        device_bytes(model.at(batch), made_choice(model, batch=batch), NOTHING) for batch in (1, 4)
    )
    assert four.activations == 4 * one.activations
    assert four.weights == one.weights
    assert four.workspace == 4 * one.workspace


def test_streamed_blocks_leave_slots_behind_and_a_slab_in_the_host() -> None:
    model = made_model(8)
    choice = made_choice(model, streamed=6, slots=3)
    assert device_bytes(model.at(1), choice, NOTHING).weights == 50 + 2 * 100 + 3 * 100
    assert host_bytes(model.at(1), choice, NOTHING).weights == 600


def test_offloaded_activations_are_in_the_host() -> None:
    model = made_model(8)
    fixed = FixedMemory(0, host_caches_nbytes=7, host_weights_nbytes=5)
    host = host_bytes(model.at(2), made_choice(model, "offload", batch=2), fixed)
    assert host == Bytes(weights=5, activations=8 * 2 * 50, caches=7)


def test_offloaded_inputs_are_in_the_host() -> None:
    model = made_model(8)
    kept = made_choice(model, "recompute")
    moved = replace(kept, blocks=tuple(replace(b, offload_input=True) for b in kept.blocks))
    here, there = (device_bytes(model.at(1), c, NOTHING).activations for c in (kept, moved))
    assert here - there == (8 - 2) * 10  # one is in use, the next on its way
    assert host_bytes(model.at(1), moved, NOTHING).activations == 80


def test_kept_blocks_last_are_gone_before_the_first_ones_recompute() -> None:
    model = made_model(8)
    keep, again = (made_choice(model, way).blocks[0] for way in ("keep", "recompute"))
    choice = made_choice(model)
    kept_last, kept_first = (
        device_bytes(model.at(1), replace(choice, blocks=blocks), NOTHING).total
        for blocks in ((again,) * 6 + (keep,) * 2, (keep,) * 2 + (again,) * 6)
    )
    assert kept_last < kept_first


def test_gradients_are_all_there_when_they_are_accumulated() -> None:
    model = made_model(8)
    once, often = (
        device_bytes(model.at(1), made_choice(model, accumulation=n), NOTHING).gradients
        for n in (1, 2)
    )
    assert (once, often) == (2, 16)


def test_a_step_that_holds_little_else_is_highest_at_the_update() -> None:
    model = made_model(8)
    small = replace(
        model.at(1),
        trained_nbytes=10_000,
        blocks=tuple(replace(block, trained_nbytes=1250) for block in model.at(1).blocks),
    )
    assert device_bytes(small, made_choice(model, "recompute"), NOTHING).gradients == 10_000


def test_two_experts_have_two_sets_of_weights_and_one_of_slots() -> None:
    model = made_model(8)
    choice = made_choice(model, streamed=4)
    two = FixedMemory(0, experts=2, averages_nbytes=9, batches_ahead=0)
    device = device_bytes(model.at(1), choice, two)
    assert device.weights == 2 * (50 + 400) + 300
    assert device.adapters == 2 * 16 + 9
    assert host_bytes(model.at(1), choice, two).weights == 800


def with_copies(copies_nbytes: int, trained_nbytes: int = 4) -> CostModel:
    """Blocks that train so many bytes each, which are copied for their products."""
    model = made_model(8)
    (kind,) = model._shapes.kinds
    kind = replace(kind, trained_nbytes=trained_nbytes, cast_copies_nbytes=copies_nbytes)
    return CostModel(replace(model._shapes, kinds=(kind,)), model.rates)


def test_copies_are_there_all_the_time_and_their_gradients_come_first() -> None:
    plain, copied = with_copies(0), with_copies(2)
    choice = made_choice(plain)
    before, after = (device_bytes(m.at(1), choice, NOTHING) for m in (plain, copied))
    assert (before.adapters, after.adapters) == (8 * 4, 8 * (4 + 2))
    assert (before.gradients, after.gradients) == (4, 2)  # of the last block, where most is held


def test_at_the_end_gradients_of_copies_become_gradients_of_what_is_trained() -> None:
    copied = with_copies(500, 1000)
    held = device_bytes(copied.at(1), made_choice(copied), NOTHING)
    assert held.gradients == 8 * (500 + 1000)
    assert held.activations == 0
    twice = device_bytes(copied.at(1), made_choice(copied, accumulation=2), NOTHING)
    assert twice.gradients == held.gradients + 8 * 1000  # beside those of the first micro-batch


def test_an_allocator_holds_more_than_is_used() -> None:
    model = made_model(8)
    choice = made_choice(model)
    held = device_bytes(model.at(1), choice, NOTHING)
    budget = PlanBudget(10**6, 10**6, fragmentation=0.5)
    assert required_device_nbytes(model, choice, NOTHING, budget) == ceil(held.total * 1.5)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_activations_that_are_brought_back_ahead_are_on_the_device(ahead: int) -> None:
    model = made_model(8)
    sent = replace(made_choice(model, "offload"), activation_prefetch=ahead)
    assert device_bytes(model.at(1), sent, NOTHING).activations == 3 + (1 + ahead) * 50
    # Blocks in between count too: of two neighbours one sends, and one more comes every second.
    kept = made_choice(model, "keep").blocks
    mixed = tuple(s if i % 2 else k for i, (s, k) in enumerate(zip(sent.blocks, kept, strict=True)))
    held = device_bytes(model.at(1), replace(sent, blocks=mixed), NOTHING).activations
    assert held == 3 + 4 * 90 + (1 + ahead // 2) * 50
