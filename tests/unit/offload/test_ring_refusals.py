"""What cannot be streamed is refused by name; what is put back is as it was."""

import copy

import pytest
import torch
from streamed_model import assert_same, made, step, streamed
from torch import nn

from gracetune.memory.platform import Link
from gracetune.offload.copies import StreamError, SynchronousCopyEngine, open_copy_engine
from gracetune.offload.ring import stream_weights


def refused(model, blocks, told, **settings):
    with pytest.raises(StreamError) as caught:
        stream_weights(model, blocks, SynchronousCopyEngine(), told, **settings)
    return str(caught.value)


@pytest.mark.parametrize("slots", [-1, 0, 1])
def test_too_few_slots(slots, told):
    model = made()
    said = refused(model, list(model.blocks), told, slots=slots)
    assert f"{slots} slot(s)" in said
    assert "at least 2" in said


def test_no_blocks(told):
    assert "no blocks to stream" in refused(made(), [], told)


def test_blocks_of_another_model(told):
    said = refused(made(), [made().blocks[0]], told)
    assert "block 0 (Block) is not part of the model (Model)" in said


def test_parts_whose_blocks_are_mixed_or_missing(told):
    high, low = made(), made()
    both = nn.ModuleList([high, low])
    mixed = [high.blocks[0], low.blocks[0], high.blocks[1]]
    assert "part 0 (Model)" in refused(both, mixed, told, parts=[high, low])
    assert "part 1 (Model)" in refused(both, list(high.blocks), told, parts=[high, low])


def test_a_block_twice(told):
    model = made()
    assert "given twice" in refused(model, [model.blocks[0], model.blocks[0]], told)


def test_blocks_inside_each_other(told):
    model = made()
    said = refused(model, [model.blocks[0].up, model.blocks[0]], told)
    assert "'blocks.0.up' is inside block 'blocks.0'" in said


def test_nothing_frozen(told):
    model = made()
    model.requires_grad_(True)
    assert "nothing to stream" in refused(model, list(model.blocks), told)


class Quantized(torch.Tensor):
    """As torchao's: a tensor that wraps others."""


def test_weights_of_special_classes(told):
    model = made()
    weight = nn.Parameter(torch.randn(24, 12).as_subclass(Quantized), requires_grad=False)
    model.blocks[1].up.weight = weight
    said = refused(model, list(model.blocks), told)
    assert "'blocks.1.up.weight' cannot be streamed: it is a Quantized" in said
    assert "Leave its block out" in said
    twin, _ = streamed(made(), told, which=[0, 2])
    step(twin, 0)


def test_weights_without_values(told):
    model = made()
    model.blocks[4].down.to("meta")
    said = refused(model, list(model.blocks), told)
    assert "'blocks.4.down.weight'" in said
    assert "meta device" in said


def test_sparse_weights(told):
    model = made()
    sparse = nn.Parameter(torch.eye(12).to_sparse(), requires_grad=False)
    model.blocks[0].register_parameter("spare", sparse)
    assert "torch.sparse_coo" in refused(model, list(model.blocks), told)


def test_recurrent_modules(told):
    model = made()
    model.blocks[0].memory = nn.GRU(4, 4).requires_grad_(False)
    assert "GRU keeps its own list of weights" in refused(model, list(model.blocks), told)


def test_a_weight_that_is_to_be_trained_after_all(told):
    twin, _ = streamed(made(), told)
    twin.blocks[2].mix.requires_grad_(True)
    with pytest.raises(StreamError, match=r"'blocks\.2\.mix\.weight' is to be trained"):
        step(twin, 0)
    twin.blocks[2].mix.requires_grad_(False)
    step(twin, 0)


def test_a_weight_that_was_replaced(told):
    twin, _ = streamed(made(), told)
    new = nn.Parameter(torch.zeros(12, 24), requires_grad=False)
    twin.blocks[2].down.weight = new
    with pytest.raises(StreamError, match=r"'blocks\.2\.down\.weight' was moved, replaced"):
        step(twin, 0)
    assert twin.blocks[2].down.weight is new, "theirs is not undone"


def test_a_weight_that_was_loaded_anew(told):
    """What sits in a slot would go on with the old bytes."""
    twin, ring = streamed(made(), told)
    step(twin, 0)
    twin.load_state_dict({name: t + 1 for name, t in twin.state_dict().items()})
    with pytest.raises(StreamError, match="was moved, replaced or written to"):
        step(twin, 1)
    ring.close()
    step(twin, 1)


def test_a_model_that_is_converted(told):
    twin, ring = streamed(made(), told)
    step(twin, 0)
    twin.to(torch.bfloat16)
    with pytest.raises(StreamError, match="was moved, replaced or written to"):
        twin(torch.randn(1, 5, 4, dtype=torch.bfloat16))
    ring.close()
    assert twin(torch.randn(1, 5, 4, dtype=torch.bfloat16)).isfinite().all()


def test_a_model_that_is_copied(told):
    twin, ring = streamed(made(), told)
    with pytest.raises(StreamError, match="cannot be copied"):
        copy.deepcopy(twin)
    ring.close()
    copy.deepcopy(twin)


def test_backward_after_the_ring_is_closed(told):
    twin, ring = streamed(made(), told, slots=2)
    loss = twin(torch.randn(2, 5, 4)).square().mean()
    ring.close()
    with pytest.raises(StreamError, match="whose ring is closed"):
        loss.backward()


@pytest.mark.parametrize("how", ["keep", "checkpoint"])
def test_closing_puts_everything_back(how, told):
    model = made(how=how)
    twin, ring = streamed(model, told)
    step(twin, 0)
    before = dict(twin.named_parameters())
    ring.close()
    ring.close()
    for name, parameter in twin.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, dict(model.named_parameters())[name])
    assert twin.blocks[0].again is twin.blocks[0].up.weight
    assert twin.blocks[0].tied.weight is twin.blocks[1].tied.weight
    own = {p.untyped_storage().data_ptr() for p in twin.parameters()}
    assert len(own) == len(list(twin.parameters())), "no slab behind them"
    for module in twin.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert_same(step(twin, 1), step(model, 1))


def test_closing_inside_a_pass_leaves_no_hooks_behind(told):
    twin, ring = streamed(made(), told)
    handle = twin.outside.register_forward_pre_hook(lambda module, args: ring.close())
    loss = twin(torch.randn(1, 5, 4)).mean()
    handle.remove()
    assert loss.isfinite()
    step(twin, 0)


def test_weights_can_be_read_and_saved_while_they_are_streamed(told):
    model = made()
    twin, _ = streamed(model, told)
    step(twin, 0)
    for name, value in model.state_dict().items():
        if not name.endswith("calls"):
            assert torch.equal(twin.state_dict()[name], value), name


def test_what_the_rest_of_the_model_uses_too_is_not_streamed(told):
    _, ring = streamed(made(), told)
    names = {place.name for region in ring._regions for place in region.places}
    assert "blocks.0.tied.weight" in names
    assert not any("outside" in name for name in names)


def test_buffers_count_on(told):
    model = made()
    twin, _ = streamed(model, told)
    for each in (model, twin):
        step(each, 0)
        step(each, 1)
    assert [int(block.calls) for block in twin.blocks] == [2] * 6
    assert torch.equal(model.blocks[0].calls, twin.blocks[0].calls)


def test_a_block_with_nothing_frozen_is_left_alone(told):
    model = made()
    model.blocks[1].requires_grad_(True)
    model.blocks[1].tied.requires_grad_(False)
    model.blocks[1].outside.requires_grad_(False)
    model.blocks[1].tied = nn.Identity()
    twin, ring = streamed(model, told, slots=2)
    for seed in range(3):
        assert_same(step(twin, seed), step(model, seed))
    assert len(twin.blocks[1]._forward_pre_hooks) == 0
    assert ring.counters().on_demand == 0


class SelfCaller(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, depth=2):
        x = self.linear(x)
        return self(x, depth - 1) + self.linear(x) if depth else x


def test_a_block_that_calls_itself(told):
    torch.manual_seed(0)
    model = nn.Sequential(SelfCaller(), SelfCaller())
    twin = copy.deepcopy(model)
    stream_weights(twin, list(twin), SynchronousCopyEngine(), told)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("link", list(Link))
def test_a_cpu_has_the_plain_mover_whatever_the_link(link):
    mover = open_copy_engine(torch.device("cpu"), link)
    assert isinstance(mover, SynchronousCopyEngine)
    assert mover.device == torch.device("cpu")
