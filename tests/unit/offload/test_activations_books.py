"""What is sent and what stays, what is told, what is refused, and who gets memory back."""

import gc

import pytest
import torch
from offloaded_model import Mixed, offloaded
from streamed_model import SaidLap, assert_same, made, step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gracetune.offload.activations import offload_activations
from gracetune.offload.copies import CopyStream, StreamError, SynchronousCopyEngine
from gracetune.offload.offloaded_tensors import room_for

KIB = 1024


class Recording(SynchronousCopyEngine):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def copy(self, target, source, poison, lane=CopyStream.WEIGHTS):
        if lane is CopyStream.OUT:
            self.sizes.append(len(source))
        return super().copy(target, source, poison, lane)


class Chain(nn.Module):
    """Blocks made of a function, with inputs that all of them share."""

    def __init__(self, *functions):
        super().__init__()
        self.blocks = nn.ModuleList(Step(function) for function in functions)

    def forward(self, x, *shared, **named):
        for block in self.blocks:
            x = block(x, *shared, **named)
        return x


class Step(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.full((256, 1), 0.5), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def sent_by(told, *functions, inputs=(), named=None, passes=1, **extra):
    """Sizes that a chain sends a pass, with its counters."""
    mover = Recording()
    model = Chain(*functions)
    offload = offload_activations(list(model.blocks), mover, None, told, KIB, **extra)
    sizes = []
    for _ in range(passes):
        mover.sizes.clear()
        x = torch.randn(256, 4)
        out = model(x, *inputs, **(named or {}))
        sizes.append(list(mover.sizes))
        out.sum().backward()
        del out
    return sizes, offload.counters()


WHOLE = 256 * 4 * 4


def test_a_storage_that_is_saved_in_several_views_travels_once(told):
    def twice(block, x):
        q = x * block.gain
        return (q * q.view(4, 256).t().exp()).sin() + q.t().reshape(256, 4)

    sizes, _ = sent_by(told, twice)
    assert sizes[0].count(WHOLE) == len(sizes[0])
    resident = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: resident.append(t) or t, lambda t: t):
        Chain(twice)(torch.randn(256, 4))
    large = [t for t in resident if t.untyped_storage().nbytes() >= KIB]
    assert len(sizes[0]) == len({t.untyped_storage()._cdata for t in large}) < len(large)


def test_parts_that_are_all_saved_travel_as_one_and_a_lone_part_stays(told):
    def parts(block, x):
        joint = (x * block.gain).repeat(1, 3)
        q, k, v = joint.chunk(3, dim=1)
        return q.sin() + k.sin() * v

    def lone(block, x):
        joint = (x * block.gain).repeat(1, 3)
        return joint.chunk(3, dim=1)[1].sin()

    (sizes,), counters = sent_by(told, parts)
    assert sizes.count(3 * WHOLE) == 1
    assert counters.unfit == 0
    (sizes,), counters = sent_by(told, lone)
    assert 3 * WHOLE not in sizes
    assert counters.unfit == 1


def test_what_stays_ends_with_its_graph(told):
    ends = []

    def lone(block, x):
        joint = (x * block.gain).repeat(1, 3)
        ends.append(StorageWeakRef(joint.untyped_storage()))
        return joint.chunk(3, dim=1)[1].sin()

    sent_by(told, lone, lone, passes=2)
    assert all(end.expired() for end in ends)


def test_inputs_that_blocks_share_stay_and_the_chain_is_sent(told):
    def use(block, x, rotary, text):
        return (x * block.gain * rotary[0] * rotary[1]).sin() + text * block.gain

    rotary, text = (torch.randn(256, 4), torch.randn(256, 4)), torch.randn(256, 4)
    sizes, counters = sent_by(told, use, use, use, inputs=(rotary,), named={"text": text}, passes=3)
    a_block = len(sizes[1]) // 3
    assert len(sizes[1]) == len(sizes[2]) == 3 * a_block, "by now the first block is known too"
    assert len(sizes[0]) == 3 * a_block + 3, "of the first block of all nothing was known"
    assert counters.shared == 3 * 3 * 3 - 3


def test_weights_stay_frozen_or_trained(told):
    def weigh(block, x):
        return (x * block.gain) @ block.big * block.weight

    def trained(block, x):
        block.weight.requires_grad_(True)
        return x * block.weight

    model = Chain(weigh, trained)
    for block in model.blocks:
        block.weight = nn.Parameter(torch.randn(256, 4), requires_grad=False)
        block.register_buffer("big", torch.randn(4, 4).repeat(32, 32)[:4, :4].contiguous())
    mover = Recording()
    offload = offload_activations(list(model.blocks), mover, None, told, KIB)
    model(torch.randn(256, 4)).sum().backward()
    assert offload.counters().shared == 2
    assert mover.sizes == [WHOLE, WHOLE], "a factor of the weight, and the second block's input"


def test_what_is_small_sparse_complex_or_elsewhere_stays(told):
    def small(block, x):
        return x + (x[:2].clone() * block.gain).exp().sum()

    (sizes,), counters = sent_by(told, small)
    assert sizes == []
    assert counters.too_small > 0

    def conjugate(block, x):
        z = torch.view_as_complex((x * block.gain).view(256, 2, 2)).conj()
        return torch.view_as_real(z * z).reshape(256, 4)

    _, counters = sent_by(told, conjugate)
    assert counters.unfit > 0

    def sparse(block, x):
        return torch.sparse.mm(torch.eye(256).to_sparse(), x * block.gain)

    _, counters = sent_by(told, sparse)
    assert counters.unfit == 1


def test_whole_numbers_and_masks_are_sent_too(told):
    def pick(block, x):
        order = torch.arange(1024).flip(0).view(256, 4) % 256
        return (x * block.gain).gather(0, order).masked_fill(order > 9, 0.0)

    (sizes,), _ = sent_by(told, pick)
    assert sorted(sizes) == [KIB, WHOLE, WHOLE, 2 * WHOLE], "a mask and the order too"


@pytest.mark.parametrize("way", ["inputs", "inside"])
def test_of_a_recomputed_block_the_input_alone_is_sent(way, told):
    mixed = Mixed(made(num_blocks=4), [way] * 4, [], told)
    step(mixed.model, 0)
    counters = mixed.offload.counters()
    assert counters.sent == 4
    assert counters.sent_nbytes == 4 * 2 * 5 * 12 * 4
    assert counters.on_demand == 0


def test_where_only_inputs_are_sent_what_else_is_saved_stays(told):
    """As of a compiled block that recomputes: its compiler may choose to keep more."""

    def wave(block, x):
        return (x * block.gain).sin()

    model, mover = Chain(wave, wave), Recording()
    offload = offload_activations([], mover, None, told, KIB, inputs_of=list(model.blocks))
    model(torch.randn(256, 4)).sum().backward()
    assert mover.sizes == [WHOLE, WHOLE]
    assert offload.counters().unfit == 2


def test_the_books_are_right(told):
    twin, offload = offloaded(made(), told)
    step(twin, 0)
    before = offload.counters()
    for seed in range(3):
        step(twin, seed)
    after = offload.counters()
    assert after.sent == 4 * before.sent
    assert after.sent_nbytes == 4 * before.sent_nbytes
    assert after.brought_nbytes == 4 * before.brought_nbytes
    at_the_turn = before.sent_nbytes - before.brought_nbytes
    assert at_the_turn * 3 == before.sent_nbytes, "2 of 6 blocks have not left when it turns"
    assert after.host_nbytes == before.host_nbytes
    assert after.waited_s > before.waited_s > 0, "plain copies are waited for"
    assert after.late == after.on_demand == 0
    assert after.too_small > 0
    assert after.shared > 0
    assert told.texts() == ["offloaded activations take 256.0 MiB of host memory."]


def test_host_memory_comes_back_whatever_becomes_of_a_graph(told):
    twin, offload = offloaded(made(), told)
    pool = offload._pool

    def fail(module, args, output):
        raise ArithmeticError("of the user's")

    twin(torch.randn(2, 5, 4))  # never used
    kept = twin(torch.randn(2, 5, 4)).square().mean()
    hook = twin.blocks[3].down.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        twin(torch.randn(2, 5, 4))
    hook.remove()
    kept.backward()
    del kept
    gc.collect()
    offload._transport.clear_up()
    assert pool._lent == 0
    assert set(pool._cut) == {0}, "slabs are whole again"


def test_other_shapes_need_no_more_memory_than_the_largest(told, monkeypatch):
    monkeypatch.setattr("gracetune.offload.activations.SLAB_NBYTES", 4 * KIB)
    model = made()
    twin, offload = offloaded(model, told)
    for rows in (4, 2, 3, 4, 1, 3):
        for each in (twin, model):
            each.zero_grad(set_to_none=True)
            torch.manual_seed(rows)
            each(torch.randn(rows, 5, 4)).square().mean().backward()
        assert torch.equal(twin.blocks[0].a.grad, model.blocks[0].a.grad)
    assert len(told.texts()) == 1, told.texts()
    each(torch.randn(9, 5, 4)).square().mean().backward()
    twin(torch.randn(9, 5, 4)).square().mean().backward()
    assert len(told.texts()) == 2
    assert "(before: " in told.texts()[1]
    assert offload.counters().host_nbytes > 0


def test_a_host_with_too_little_memory_is_refused_with_what_is_needed(told):
    model = made()
    twin, offload = offloaded(model, told, host_nbytes=8 * KIB)
    with pytest.raises(StreamError) as caught:
        step(twin, 0)
    said = str(caught.value)
    need = 6 * offload._packer.block_nbytes
    assert f"need about {need / KIB:.1f} KiB of host memory" in said
    assert "6 blocks); 8.0 KiB are taken and there is room for 0 B more" in said
    assert "Offload fewer blocks" in said
    gc.collect()
    offload.close()
    assert_same(step(twin, 0), step(model, 0))


def test_the_hosts_own_memory_is_the_limit_where_none_is_given(told):
    _, offload = offloaded(made(), told)
    assert room_for(100, 30) == 70
    assert 0 < offload._pool.room() < 2**44


class Late(SynchronousCopyEngine):
    """A link on which blocks are late, by less each pass."""

    laps = 0

    def lap(self, lane):
        assert lane is CopyStream.BACK
        self.laps += 1
        return SaidLap(0.8**self.laps, late=1)


def test_the_distance_grows_within_its_budget_and_is_told(told):
    model = made()
    twin, offload = offloaded(model, told, mover=Late(), ahead_nbytes=10 * KIB)
    for seed in range(10):
        assert_same(step(twin, seed), step(model, seed))
    block_nbytes = offload._packer.block_nbytes
    assert offload.counters().ahead == 10 * KIB // block_nbytes > 1
    changes = [text for text in told.texts() if "brought back ahead" in text]
    assert changes[0].startswith("blocks whose activations are brought back ahead: 2: backward")


def test_inputs_by_name_are_sent_too(told):
    def mix(block, x, *, text):
        return (x * block.gain).sin() * text

    model, mover = Chain(mix), Recording()
    offload = offload_activations([], mover, None, told, KIB, others=list(model.blocks))
    x, text = torch.randn(256, 4, requires_grad=True), torch.randn(256, 4)
    out = offload.checkpoint(model.blocks[0], text=text, x=x * 2)
    assert mover.sizes == [WHOLE, WHOLE]
    out.sum().backward()
    grad, x.grad = x.grad, None
    model(x * 2, text=text).sum().backward()
    assert torch.equal(x.grad, grad)


def test_a_block_that_backward_comes_to_again_and_again(told):
    """Its memory is given up when it was read, and fetched when it is asked for once more."""
    model = made(num_blocks=2)
    twin, offload = offloaded(model, told, [0])
    results = []
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        hidden = each.blocks[0](torch.randn(2, 5, 12))
        each.blocks[1](torch.randn(2, 5, 12))
        each.blocks[1](torch.randn(2, 5, 12))
        loss = hidden.square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        results.append(([loss.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(*results)
    counters = offload.counters()
    assert counters.brought_nbytes == 3 * counters.sent_nbytes
    assert counters.on_demand == 3 * counters.sent
