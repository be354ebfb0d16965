"""Nobody reads memory before a copy has filled it, or gives it up while one needs it."""

import gc
import random
from functools import partial

import pytest
import torch
from offloaded_model import SMALL, WAYS, Lanes, Mixed, offloaded
from streamed_model import assert_same, made, step
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.offload.activations import IN_FLIGHT, offload_activations
from gracetune.offload.checkpointing import run_blocks
from gracetune.offload.copies import CopyStream, StreamError, SynchronousCopyEngine
from gracetune.offload.offloaded_tensors import OffloadCopies, OffloadedCall, OffloadedTensor


@pytest.mark.parametrize("late", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_copies_as_late_or_as_early_as_waits_allow(seed, late, told):
    dice = random.Random(seed)
    overtaken = 0
    for trial in range(2):
        count = dice.randint(2, 7)
        model = made(count, seed=trial)
        ways = [dice.choice([*WAYS, "offload", "offload"]) for _ in range(count)]
        streamed = [k for k in range(count) if dice.random() < 0.5]
        mover = Lanes(dice, late)
        twin = Mixed(model, ways, streamed, told, mover, ahead=dice.randint(1, 3)).model
        for repetition in range(4):
            order = None
            if repetition % 2:
                order = [dice.randrange(count) for _ in range(dice.randint(1, 9))]
            assert_same(step(twin, repetition, order, 2), step(model, repetition, order, 2))
        mover.finish()
        assert mover.faults == []
        overtaken += mover.overtaken
    assert overtaken or late == 0, "this is a test of lateness"


def test_graphs_are_thrown_away_and_forwards_fail_on_a_slow_link(told):
    dice = random.Random(0)
    model = made()
    mover = Lanes(dice, late=0.9)
    twin, _ = offloaded(model, told, mover=mover, ahead=2)

    def fail(module, args, output):
        raise ArithmeticError("of the user's")

    for seed in range(8):
        x = torch.randn(2, 5, 4)
        loss = twin(x).square().mean()
        if seed % 2:  # backward begins, brings blocks ahead, and goes no further
            torch.autograd.grad(loss, [twin.blocks[4].a], retain_graph=seed % 4 == 1)
        del loss
        hook = twin.blocks[dice.randrange(6)].down.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            twin(x)
        hook.remove()
        assert_same(step(twin, seed), step(model, seed))
    mover.finish()
    assert mover.faults == []


def no_wait(arrival, ahead):
    pass


BREAKAGES = {
    "leaves without waiting": (OffloadedCall, "land", "left"),
    "reads without waiting": (OffloadedTensor, "read", "arrival"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_wait_that_is_forgotten_would_be_seen(breakage, told, monkeypatch):
    owner, method, arrival = BREAKAGES[breakage]
    right = getattr(owner, method)

    def wrong(self):
        setattr(self, arrival, None)
        return right(self)

    monkeypatch.setattr(owner, method, wrong)
    assert trouble(told) > 0


def test_memory_that_is_given_up_too_early_would_be_seen(told, monkeypatch):
    """A graph is thrown away while a copy writes: only clearing up makes that safe."""

    def wrong(self):
        while self.left:
            self._pool.put_back(self.left.pop().host)

    monkeypatch.setattr(OffloadCopies, "clear_up", wrong)
    assert trouble(told) > 0


def trouble(told):
    """Faults of the device and steps that are not the resident one's."""
    model = made()
    mover = Lanes(random.Random(0), late=1.0)
    twin, _ = offloaded(model, told, mover=mover)
    wrong = 0
    for seed in range(4):
        loss = twin(torch.ones(2, 5, 4)).square().mean()
        torch.autograd.grad(loss, [twin.blocks[4].a])
        del loss
        try:
            assert_same(step(twin, seed), step(model, seed))
        except AssertionError:
            wrong += 1
    mover.finish()
    return len(mover.faults) + wrong


def test_the_same_steps_are_right_with_all_waits(told):
    assert trouble(told) == 0


class Watching(SynchronousCopyEngine):
    """Notes what is sent and brought, and which of it is still on the device."""

    def __init__(self):
        super().__init__()
        self.out, self.back = [], []

    def copy(self, target, source, poison, lane=CopyStream.WEIGHTS):
        if lane is CopyStream.OUT and source.storage_offset() == 0 and not (source == 0xFF).all():
            self.out.append((StorageWeakRef(source.untyped_storage()), len(source)))
        elif lane is CopyStream.BACK:
            self.back.append((StorageWeakRef(target.untyped_storage()), len(target)))
        return super().copy(target, source, poison, lane)

    def alive(self):
        return sum(n for ref, n in self.out + self.back if not ref.expired())


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_more_is_on_the_device_than_two_blocks_out_and_those_ahead_back(ahead, told):
    mover = Watching()
    twin, offload = offloaded(made(num_blocks=8), told, mover=mover, ahead=ahead)
    there, back = [], []
    for block in twin.blocks:
        block.register_forward_hook(lambda *_: there.append(mover.alive()))
        block.a.register_hook(lambda _: back.append(mover.alive()))
    step(twin, 0)
    block_nbytes = offload._packer.block_nbytes
    hidden_nbytes = 2 * 5 * 12 * 4
    assert max(there) <= IN_FLIGHT * block_nbytes + hidden_nbytes, "the next block has it too"
    assert min(there[2:]) > (IN_FLIGHT - 1) * block_nbytes
    assert max(back[2:]) <= (1 + ahead) * block_nbytes + hidden_nbytes
    gc.collect()
    assert mover.alive() == 0, "nothing is held between steps"
    assert offload.counters().on_demand == 0


@pytest.mark.parametrize("by", ["policy", "checkpoint"])
@pytest.mark.parametrize("named", [True, False])
def test_inputs_that_were_sent_end_on_the_device(by, named, told):
    """Whoever does a block again must not know its inputs by other ways."""
    model, mover = made(num_blocks=8), Watching()
    blocks = list(model.blocks)
    if by == "policy":
        run_blocks(blocks, ["recompute"] * 8, None)
        offload = offload_activations(blocks, mover, None, told, SMALL)
    else:
        offload = offload_activations([], mover, None, told, SMALL, others=blocks)
    x = torch.randn(2, 5, 12, requires_grad=True) * 1
    input_nbytes, alive = x.numel() * x.element_size(), []
    for block in blocks:
        given = ((), {"x": x, "shift": 0.1}) if named else ((x, 0.1), {})
        call = block if by == "policy" else partial(offload.checkpoint, block)
        x = call(*given[0], **given[1])
        del given
        alive.append(mover.alive())
    assert offload.counters().sent == 8
    assert max(alive) <= IN_FLIGHT * input_nbytes
    x.sum().backward()
    assert offload.counters().brought_nbytes == (8 - IN_FLIGHT) * input_nbytes


def test_blocks_that_are_kept_tell_how_far_a_pass_is(told):
    """Without them the last offloaded blocks would stay until backward, and come on demand."""
    mover = Watching()
    twin, offload = offloaded(made(num_blocks=8), told, [0, 1, 2], mover)
    there = []
    twin.blocks[6].register_forward_hook(lambda *_: there.append(mover.alive()))
    for seed in range(2):
        step(twin, seed)
    assert there == [0, 0]
    assert offload.counters().on_demand == 0
    assert offload.counters().brought_nbytes == offload.counters().sent_nbytes


def test_a_block_is_brought_when_backward_reaches_the_one_after(told):
    mover = Watching()
    twin, _ = offloaded(made(num_blocks=6), told, mover=mover)
    brought = []
    for index, block in enumerate(twin.blocks):
        block.b.register_hook(lambda _, index=index: brought.append((index, len(mover.back))))
    step(twin, 0)
    counts = dict(brought)
    assert counts[5] == 0, "the last blocks have not left yet"
    steps = [counts[k] - counts[k + 1] for k in range(4, -1, -1)]
    assert steps[0] > 0, "with block 4 comes 3"
    assert steps[-1] == 0, "with block 0 nothing is left to bring"


@pytest.mark.parametrize("when", [2, 3])
def test_a_tensor_that_is_changed_in_place_is_refused_as_autograd_does(when, told):
    """In its own block, or in the next while it is leaving."""
    model = made()
    twin, _ = offloaded(model, told)
    change_what_a_norm_saved(model, when)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, 0)
    hooks = change_what_a_norm_saved(twin, when)
    with pytest.raises(StreamError, match=r"tensor of \(2, 5, 12\) .* changed in place"):
        step(twin, 0)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert_same(step(twin, 1), step(made(), 1))


def test_a_tensor_that_is_changed_when_it_has_left_is_right(told):
    model = made()
    twin, _ = offloaded(model, told)
    change_what_a_norm_saved(twin, when=4)
    assert_same(step(twin, 0), step(model, 0))


def change_what_a_norm_saved(model, when):
    kept = []

    def change(module, args, output):
        with torch.no_grad():
            kept.pop().add_(1)

    return [
        model.blocks[2].norm.register_forward_hook(lambda m, args, _: kept.append(args[0])),
        model.blocks[when].mix.register_forward_hook(change),
    ]
