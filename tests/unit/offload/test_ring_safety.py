"""No slot is overwritten while someone may still read it, and nobody reads before the copy."""

import gc
import random

import pytest
import torch
from streamed_model import assert_same, made, step, streamed
from torch.utils import dlpack

from gracetune.offload.copies import POISON, SynchronousCopyEngine
from gracetune.offload.ring import PRUNE_FROM, Lease, Slots, slot_to_refill


class LastMinute(SynchronousCopyEngine):
    """A link so slow that a copy is done only when it is waited for; until then all is NaN."""

    def __init__(self):
        super().__init__()
        self.unread = 0

    def copy(self, target, source, poison):
        target.fill_(POISON)
        self.unread += 1
        return Pending(self, target, source)


class Pending:
    def __init__(self, mover, target, source):
        self.mover, self.target, self.source = mover, target, source

    def wait(self, ahead):
        if self.source is not None:
            self.target[: len(self.source)].copy_(self.source)
            self.source = None
            self.mover.unread -= 1


@pytest.mark.parametrize("mover", [SynchronousCopyEngine, LastMinute])
@pytest.mark.parametrize("slots", [2, 3, 4, 5])
def test_random_models_orders_and_subsets(mover, slots, told):
    """A copy as early as it may come, and one as late: both must give the resident step."""
    dice = random.Random(slots)
    for trial in range(4):
        num_blocks = dice.randint(2, 7)
        how = dice.choice(["keep", "reentrant", "checkpoint", "pairs"])
        model = made(num_blocks, how, seed=trial)
        which = sorted(dice.sample(range(num_blocks), dice.randint(1, num_blocks)))
        twin, _ = streamed(model, told, which, slots, mover())
        for seed in range(4):
            order = None
            if seed % 2:
                order = [dice.randrange(num_blocks) for _ in range(dice.randint(1, 9))]
            micro_batches = dice.randint(1, 2)
            assert_same(
                step(twin, seed, order, micro_batches), step(model, seed, order, micro_batches)
            )


@pytest.mark.parametrize("how", ["keep", "checkpoint"])
def test_every_gradient_at_every_turn(how, told):
    """Loss can be right while gradients are not: a turn reuses the slot of the block in use."""
    model = made(num_blocks=4, how=how)
    twin, _ = streamed(model, told, slots=2)
    references = [step(model, seed) for seed in range(2)]
    for repetition in range(20):
        assert_same(step(twin, repetition % 2), references[repetition % 2])


def test_a_ring_that_forgets_to_wait_would_be_seen(told):
    """The tests above can fail: without its waits the same step is full of NaN."""

    class Hasty(LastMinute):
        def copy(self, target, source, poison):
            arrival = super().copy(target, source, poison)
            arrival.wait = lambda ahead: None
            return arrival

    twin, _ = streamed(made(), told, mover=Hasty())
    (loss,), _ = step(twin, 0)
    assert torch.isnan(loss)


def test_a_ring_that_takes_held_slots_would_be_seen(told, monkeypatch):
    model = made(how="pairs")
    twin, ring = streamed(model, told, slots=2)
    monkeypatch.setattr("gracetune.offload.ring.Slot.held", lambda slot: False)
    with pytest.raises(AssertionError, match=r"loss|blocks"):
        for seed in range(3):
            assert_same(step(twin, seed), step(model, seed))
    assert ring.counters().extra_slots == 0


def slots_of(count, nbytes=512):
    return Slots(SynchronousCopyEngine(), nbytes, count)


def put(slots, slot, block):
    slots.vacate(slot)
    slots.put(
        slot,
        block,
        SynchronousCopyEngine().copy(slot.memory, torch.ones(4, dtype=torch.uint8), False),
    )


def test_a_lease_ends_with_the_last_tensor_made_of_it():
    slots = slots_of(2)
    slot = slot_to_refill(slots, {}, None, -1)
    put(slots, slot, 7)
    lease = slot.lend()
    weight = lease.view(torch.float32).as_strided((2, 3), (3, 1), 5)
    assert weight.data_ptr() == slot.memory.data_ptr() + 20
    del lease
    assert slot.held()
    transposed = weight.t()
    del weight
    assert slot.held()
    x = torch.ones(1, 2, requires_grad=True)
    loss = (x @ transposed.t()).sum()
    del transposed
    assert slot.held(), "a graph holds it"
    loss.backward()
    assert not slot.held()


def test_a_lease_shows_its_slot_in_any_type_and_holds_it_as_long_as_it_lives():
    slots = slots_of(1)
    slot = slot_to_refill(slots, {}, None, -1)
    put(slots, slot, 7)
    lease = Lease(slot)
    for dtype in (torch.bfloat16, torch.int8, torch.bfloat16):
        assert lease[dtype].dtype is dtype
        assert lease[dtype].data_ptr() == slot.memory.data_ptr()
    assert lease[torch.int8] is lease[torch.int8]
    del lease
    assert not slot.held()


def test_a_held_slot_is_neither_chosen_nor_vacated():
    slots = slots_of(2)
    for block in (0, 1):
        put(slots, slot_to_refill(slots, {}, None, -1), block)
    held = slots.holding(0).lend()
    assert slot_to_refill(slots, {1: 0}, None, -1) is slots.holding(1)
    assert slot_to_refill(slots, {}, 1, -1) is None, "one is held, the other in use"
    with pytest.raises(AssertionError, match="block 0 is still in use"):
        slots.vacate(slots.holding(0))
    del held
    slots.vacate(slots.holding(0))
    assert slots.blocks() == [1]


def test_the_block_needed_last_makes_room_and_never_for_a_later_one():
    slots = slots_of(3)
    for block in (0, 1, 2):
        put(slots, slot_to_refill(slots, {}, None, -1), block)
    ranks = {1: 0, 2: 1, 3: 2, 0: 3}
    assert slot_to_refill(slots, ranks, 1, 2) is slots.holding(0)
    assert slot_to_refill(slots, ranks, 0, 2) is None
    assert slot_to_refill(slots, {1: 0, 2: 1}, None, -1) is slots.holding(0), "never needed again"


def test_ended_leases_are_forgotten_even_if_nobody_asks():
    slot = slot_to_refill(slots_of(1), {}, None, -1)
    for _ in range(10 * PRUNE_FROM):
        slot.lend()
    assert len(slot._leases) <= PRUNE_FROM


def test_slots_beyond_the_number_asked_for_go_when_they_can():
    slots = slots_of(2)
    extra = [slots.grow(), slots.grow()]
    put(slots, extra[0], 5)
    put(slots, extra[1], 6)
    held = extra[1].lend()
    slots.trim()
    assert len(slots) == 3
    assert slots.holding(5) is None
    assert slots.at(extra[1].memory.data_ptr()) is extra[1]
    del held
    slots.trim()
    assert len(slots) == 2
    assert slots.blocks() == []


def test_a_slot_added_while_sampling_serves_steps_too():
    slots = slots_of(1)
    with torch.inference_mode():
        slot = slots.grow()
    put(slots, slot, 3)
    assert int(slot.memory[:4].sum()) == 4


def test_a_block_that_fails_leaves_the_model_and_the_ring_whole(told):
    model = made()
    twin, ring = streamed(model, told, slots=2)
    names = dict(twin.named_parameters())

    def fail(module, args, output):
        raise ArithmeticError("of the user's")

    hook = twin.blocks[3].down.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        step(twin, 0)
    hook.remove()
    assert all(names[name] is parameter for name, parameter in twin.named_parameters())
    gc.collect()
    for seed in range(2):
        assert_same(step(twin, seed), step(model, seed))
    assert ring.counters().slots == 2


def test_saved_weights_are_references_and_activations_stay(told):
    twin, ring = streamed(made(), told)
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
    weights = [one for one in packed if not isinstance(one, torch.Tensor)]
    assert {reference.block for reference in weights} == {2}
    mix = next(reference for reference in weights if reference.size == block.mix.weight.shape)
    slots = {slot.memory.data_ptr() for slot in ring._slots._slots}
    tensors = [one for one in packed if isinstance(one, torch.Tensor)]
    assert tensors
    assert not {t.untyped_storage().data_ptr() for t in tensors} & slots
    twin.blocks[0](torch.zeros(1, 1, 12))
    assert torch.equal(ring.unpack(mix), block.mix.weight)
    sparse = torch.eye(3).to_sparse()
    assert ring.pack(sparse) is sparse


def test_an_alias_is_what_we_think_it_is():
    """What leases are built on: a second storage over the same bytes."""
    memory = torch.zeros(64, dtype=torch.uint8)
    alias = dlpack.from_dlpack(dlpack.to_dlpack(memory))
    assert alias.data_ptr() == memory.data_ptr()
    assert alias.untyped_storage()._cdata != memory.untyped_storage()._cdata
