"""Bytes by role, computed by hand on a model in round numbers."""

from dataclasses import replace
from math import ceil

import pytest
from cost_model_factory import build_candidate, build_model

from gracetune.plan.cost import CostModel
from gracetune.plan.memory import FixedMemory, device_bytes, host_bytes
from gracetune.plan.result import Bytes
from gracetune.plan.search import PlanBudget, required_device_nbytes

NOTHING = FixedMemory(optimizer_nbytes=0, batches_ahead=0)


def test_a_step_that_keeps_all_peaks_in_the_last_blocks_backward() -> None:
    model = build_model(8)
    peak = device_bytes(model.at(1), build_candidate(model), FixedMemory(16, batches_ahead=1))
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
def test_each_mode_holds_its_saved_bytes(way: str, held: int) -> None:
    model = build_model(8)
    peak = device_bytes(model.at(1), build_candidate(model, way), NOTHING)
    assert peak.activations == pytest.approx(3 + held, abs=10)


def test_only_activations_grow_with_the_batch() -> None:
    model = build_model(8)
    one, four = (
        device_bytes(model.at(batch), build_candidate(model, batch=batch), NOTHING)
        for batch in (1, 4)
    )
    assert four.activations == 4 * one.activations
    assert four.weights == one.weights
    assert four.workspace == 4 * one.workspace


def test_streamed_blocks_need_slots_and_host_memory() -> None:
    model = build_model(8)
    choice = build_candidate(model, streamed=6, slots=3)
    assert device_bytes(model.at(1), choice, NOTHING).weights == 50 + 2 * 100 + 3 * 100
    assert host_bytes(model.at(1), choice, NOTHING).weights == 600


def test_offloaded_activations_are_in_host_memory() -> None:
    model = build_model(8)
    fixed = FixedMemory(0, host_caches_nbytes=7)
    host = host_bytes(model.at(2), build_candidate(model, "offload", batch=2), fixed)
    assert host == Bytes(activations=8 * 2 * 50, caches=7)


def test_offloaded_inputs_are_in_host_memory() -> None:
    model = build_model(8)
    kept = build_candidate(model, "recompute")
    moved = replace(kept, blocks=tuple(replace(b, offload_input=True) for b in kept.blocks))
    here, there = (device_bytes(model.at(1), c, NOTHING).activations for c in (kept, moved))
    assert here - there == (8 - 2) * 10  # one is in use, the next is prefetched
    assert host_bytes(model.at(1), moved, NOTHING).activations == 80


def test_late_kept_blocks_are_freed_before_early_ones_recompute() -> None:
    model = build_model(8)
    keep, again = (build_candidate(model, way).blocks[0] for way in ("keep", "recompute"))
    choice = build_candidate(model)
    kept_last, kept_first = (
        device_bytes(model.at(1), replace(choice, blocks=blocks), NOTHING).total
        for blocks in ((again,) * 6 + (keep,) * 2, (keep,) * 2 + (again,) * 6)
    )
    assert kept_last < kept_first


def test_accumulated_gradients_are_always_held() -> None:
    model = build_model(8)
    once, often = (
        device_bytes(model.at(1), build_candidate(model, accumulation=n), NOTHING).gradients
        for n in (1, 2)
    )
    assert (once, often) == (2, 16)


def test_a_step_with_few_activations_peaks_at_the_update() -> None:
    model = build_model(8)
    small = replace(
        model.at(1),
        trained_nbytes=10_000,
        blocks=tuple(replace(block, trained_nbytes=1250) for block in model.at(1).blocks),
    )
    assert device_bytes(small, build_candidate(model, "recompute"), NOTHING).gradients == 10_000


def test_two_experts_share_the_ring_slots() -> None:
    model = build_model(8)
    choice = build_candidate(model, streamed=4)
    two = FixedMemory(0, num_transformers=2, averages_nbytes=9, batches_ahead=0)
    device = device_bytes(model.at(1), choice, two)
    assert device.weights == 2 * (50 + 400) + 300
    assert device.adapters == 2 * 16 + 9
    assert host_bytes(model.at(1), choice, two).weights == 800


def with_copies(copies_nbytes: int, trained_nbytes: int = 4) -> CostModel:
    """Blocks whose trained weights are copied to the compute dtype."""
    model = build_model(8)
    (kind,) = model._shapes.kinds
    kind = replace(kind, trained_nbytes=trained_nbytes, cast_copies_nbytes=copies_nbytes)
    return CostModel(replace(model._shapes, kinds=(kind,)), model.rates)


def test_cast_copies_are_always_held() -> None:
    plain, copied = with_copies(0), with_copies(2)
    choice = build_candidate(plain)
    before, after = (device_bytes(m.at(1), choice, NOTHING) for m in (plain, copied))
    assert (before.adapters, after.adapters) == (8 * 4, 8 * (4 + 2))
    assert (before.gradients, after.gradients) == (4, 2)  # of the last block, where the peak is


def test_gradients_of_cast_copies_are_converted_at_the_end() -> None:
    copied = with_copies(500, 1000)
    held = device_bytes(copied.at(1), build_candidate(copied), NOTHING)
    assert held.gradients == 8 * (500 + 1000)
    assert held.activations == 0
    twice = device_bytes(copied.at(1), build_candidate(copied, accumulation=2), NOTHING)
    assert twice.gradients == held.gradients + 8 * 1000  # besides those of the first micro-batch


def test_fragmentation_is_part_of_the_required_memory() -> None:
    model = build_model(8)
    choice = build_candidate(model)
    held = device_bytes(model.at(1), choice, NOTHING)
    budget = PlanBudget(10**6, 10**6, fragmentation=0.5)
    assert required_device_nbytes(model, choice, NOTHING, budget) == ceil(held.total * 1.5)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_prefetched_activations_are_counted(ahead: int) -> None:
    model = build_model(8)
    sent = replace(build_candidate(model, "offload"), activation_prefetch=ahead)
    assert device_bytes(model.at(1), sent, NOTHING).activations == 3 + (1 + ahead) * 50
    # If every second block is offloaded, a prefetch distance of two adds one block.
    kept = build_candidate(model, "keep").blocks
    mixed = tuple(s if i % 2 else k for i, (s, k) in enumerate(zip(sent.blocks, kept, strict=True)))
    held = device_bytes(model.at(1), replace(sent, blocks=mixed), NOTHING).activations
    assert held == 3 + 4 * 90 + (1 + ahead // 2) * 50
