"""A slot is not overwritten while a live tensor uses it.

That copies and kernels wait for each other is tested in `test_interleavings.py`.
"""

import gc
import random

import pytest
import torch
from streamed_model import assert_same, build_model, step, streamed
from torch.utils import dlpack

from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import MAX_ALIASES, SlotPool, SlotViews, slot_to_refill


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
def test_random_models_orders_and_subsets_equal_the_resident_step(slots, recorder):
    rng = random.Random(slots)
    for trial in range(4):
        num_blocks = rng.randint(2, 7)
        checkpointing = rng.choice(["keep", "reentrant", "checkpoint", "pairs"])
        model = build_model(num_blocks, checkpointing, seed=trial)
        block_indices = sorted(rng.sample(range(num_blocks), rng.randint(1, num_blocks)))
        twin, _ = streamed(model, recorder, block_indices, slots)
        for seed in range(4):
            order = None
            if seed % 2:
                order = [rng.randrange(num_blocks) for _ in range(rng.randint(1, 9))]
            micro_batches = rng.randint(1, 2)
            assert_same(
                step(twin, seed, order, micro_batches), step(model, seed, order, micro_batches)
            )


@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint"])
def test_every_gradient_is_right_where_forward_turns_to_backward(checkpointing, recorder):
    """The loss can be right while gradients are wrong: the turn reuses the slot in use."""
    model = build_model(num_blocks=4, checkpointing=checkpointing)
    twin, _ = streamed(model, recorder, slots=2)
    references = [step(model, seed) for seed in range(2)]
    for repetition in range(20):
        assert_same(step(twin, repetition % 2), references[repetition % 2])


def test_these_tests_detect_a_ring_that_overwrites_held_slots(recorder, monkeypatch):
    model = build_model(checkpointing="pairs")
    twin, ring = streamed(model, recorder, slots=2)
    monkeypatch.setattr("gracetune.offload.ring.Slot.is_in_use", lambda slot: False)
    with pytest.raises(AssertionError, match=r"loss|blocks"):
        for seed in range(3):
            assert_same(step(twin, seed), step(model, seed))
    assert ring.counters().extra_slots == 0


def build_slots(count, nbytes=512):
    return SlotPool(SynchronousCopyEngine(), nbytes, count)


def fill(slots, slot, block):
    slots.evict(slot)
    slots.assign(
        slot,
        block,
        SynchronousCopyEngine().copy(slot.memory, torch.ones(4, dtype=torch.uint8), False),
    )


def test_a_slot_is_held_until_the_last_tensor_made_from_an_alias_dies():
    slots = build_slots(2)
    slot = slot_to_refill(slots, {}, None, -1)
    fill(slots, slot, 7)
    alias = slot.new_alias()
    weight = alias.view(torch.float32).as_strided((2, 3), (3, 1), 5)
    assert weight.data_ptr() == slot.memory.data_ptr() + 20
    del alias
    assert slot.is_in_use()
    transposed = weight.t()
    del weight
    assert slot.is_in_use()
    x = torch.ones(1, 2, requires_grad=True)
    loss = (x @ transposed.t()).sum()
    del transposed
    assert slot.is_in_use(), "the autograd graph holds it"
    loss.backward()
    assert not slot.is_in_use()


def test_a_lease_has_a_view_of_every_dtype_and_holds_the_slot():
    slots = build_slots(1)
    slot = slot_to_refill(slots, {}, None, -1)
    fill(slots, slot, 7)
    views = SlotViews(slot)
    for dtype in (torch.bfloat16, torch.int8, torch.bfloat16):
        assert views[dtype].dtype is dtype
        assert views[dtype].data_ptr() == slot.memory.data_ptr()
    assert views[torch.int8] is views[torch.int8]
    del views
    assert not slot.is_in_use()


def test_a_held_slot_is_neither_chosen_nor_evicted():
    slots = build_slots(2)
    for block in (0, 1):
        fill(slots, slot_to_refill(slots, {}, None, -1), block)
    held = slots.find(0).new_alias()
    assert slot_to_refill(slots, {1: 0}, None, -1) is slots.find(1)
    assert slot_to_refill(slots, {}, 1, -1) is None, "one is held, the other is in use"
    with pytest.raises(AssertionError, match="block 0 is still in use"):
        slots.evict(slots.find(0))
    del held
    slots.evict(slots.find(0))
    assert slots.blocks() == [1]


def test_the_block_needed_last_is_evicted_but_not_for_a_later_one():
    slots = build_slots(3)
    for block in (0, 1, 2):
        fill(slots, slot_to_refill(slots, {}, None, -1), block)
    ranks = {1: 0, 2: 1, 3: 2, 0: 3}
    assert slot_to_refill(slots, ranks, 1, 2) is slots.find(0)
    assert slot_to_refill(slots, ranks, 0, 2) is None
    assert slot_to_refill(slots, {1: 0, 2: 1}, None, -1) is slots.find(0), "never needed again"


def test_expired_leases_are_dropped_even_if_held_is_not_called():
    slot = slot_to_refill(build_slots(1), {}, None, -1)
    for _ in range(10 * MAX_ALIASES):
        slot.new_alias()
    assert len(slot._aliases) <= MAX_ALIASES


def test_extra_slots_are_freed_once_they_are_not_held():
    slots = build_slots(2)
    extra = [slots.add(), slots.add()]
    fill(slots, extra[0], 5)
    fill(slots, extra[1], 6)
    held = extra[1].new_alias()
    slots.trim()
    assert len(slots) == 3
    assert slots.find(5) is None
    assert slots.find_address(extra[1].memory.data_ptr()) is extra[1]
    del held
    slots.trim()
    assert len(slots) == 2
    assert slots.blocks() == []


def test_a_slot_added_in_inference_mode_can_be_used_in_training():
    slots = build_slots(1)
    with torch.inference_mode():
        slot = slots.add()
    fill(slots, slot, 3)
    assert int(slot.memory[:4].sum()) == 4


def test_a_failing_block_leaves_the_model_and_the_ring_usable(recorder):
    model = build_model()
    twin, ring = streamed(model, recorder, slots=2)
    names = dict(twin.named_parameters())

    def fail(module, args, output):
        raise ArithmeticError("raised by user code")

    hook = twin.blocks[3].down.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        step(twin, 0)
    hook.remove()
    assert all(names[name] is parameter for name, parameter in twin.named_parameters())
    gc.collect()
    for seed in range(2):
        assert_same(step(twin, seed), step(model, seed))
    assert ring.counters().slots == 2


def test_saved_weights_become_references_and_activations_do_not(recorder):
    twin, ring = streamed(build_model(), recorder)
    packed = []

    class Spy(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self):
            super().__init__(self.pack, ring.unpack)

        def pack(self, tensor):
            packed.append(ring.pack(tensor))
            return packed[-1]

    block = twin.blocks[2]
    with Spy():
        block(torch.randn(2, 5, 12, requires_grad=True))
    weights = [item for item in packed if not isinstance(item, torch.Tensor)]
    assert {reference.block for reference in weights} == {2}
    mix = next(reference for reference in weights if reference.size == block.mix.weight.shape)
    slots = {slot.memory.data_ptr() for slot in ring._slots._slots}
    tensors = [item for item in packed if isinstance(item, torch.Tensor)]
    assert tensors
    assert not {t.untyped_storage().data_ptr() for t in tensors} & slots
    twin.blocks[0](torch.zeros(1, 1, 12))
    assert torch.equal(ring.unpack(mix), block.mix.weight)
    sparse = torch.eye(3).to_sparse()
    assert ring.pack(sparse) is sparse


def test_dlpack_gives_a_second_storage_over_the_same_bytes():
    """Leases are built on this behaviour of torch."""
    memory = torch.zeros(64, dtype=torch.uint8)
    alias = dlpack.from_dlpack(dlpack.to_dlpack(memory))
    assert alias.data_ptr() == memory.data_ptr()
    assert alias.untyped_storage()._cdata != memory.untyped_storage()._cdata
