"""The ring refuses what it cannot stream, and close() restores the model."""

import copy

import pytest
import torch
from streamed_model import assert_same, build_model, step, streamed
from torch import nn

from gracetune.memory.platform import Link
from gracetune.offload.copy_engine import OffloadError, SynchronousCopyEngine, open_copy_engine
from gracetune.offload.ring import stream_weights


def error_of(model, blocks, recorder, **settings):
    with pytest.raises(OffloadError) as caught:
        stream_weights(model, blocks, SynchronousCopyEngine(), recorder, **settings)
    return str(caught.value)


@pytest.mark.parametrize("slots", [-1, 0, 1])
def test_too_few_slots_are_refused(slots, recorder):
    model = build_model()
    message = error_of(model, list(model.blocks), recorder, slots=slots)
    assert f"slots is {slots}" in message
    assert "at least 2" in message


def test_an_empty_list_of_blocks_is_refused(recorder):
    assert "no blocks to stream" in error_of(build_model(), [], recorder)


def test_blocks_of_another_model_are_refused(recorder):
    message = error_of(build_model(), [build_model().blocks[0]], recorder)
    assert "block 0 (Block) is not part of the model (Model)" in message


def test_submodels_with_mixed_or_missing_blocks_are_refused(recorder):
    high, low = build_model(), build_model()
    both = nn.ModuleList([high, low])
    mixed = [high.blocks[0], low.blocks[0], high.blocks[1]]
    assert "submodel 0 (Model)" in error_of(both, mixed, recorder, submodels=[high, low])
    assert "submodel 1 (Model)" in error_of(
        both, list(high.blocks), recorder, submodels=[high, low]
    )


def test_a_block_that_is_passed_twice_is_refused(recorder):
    model = build_model()
    assert "was passed twice" in error_of(model, [model.blocks[0], model.blocks[0]], recorder)


def test_nested_blocks_are_refused(recorder):
    model = build_model()
    message = error_of(model, [model.blocks[0].up, model.blocks[0]], recorder)
    assert "'blocks.0.up' is inside block 'blocks.0'" in message


def test_a_model_without_frozen_weights_is_refused(recorder):
    model = build_model()
    model.requires_grad_(True)
    assert "nothing to stream" in error_of(model, list(model.blocks), recorder)


class Quantized(torch.Tensor):
    """A tensor subclass like those of torchao."""


def test_weights_of_tensor_subclasses_are_refused(recorder):
    model = build_model()
    weight = nn.Parameter(torch.randn(24, 12).as_subclass(Quantized), requires_grad=False)
    model.blocks[1].up.weight = weight
    message = error_of(model, list(model.blocks), recorder)
    assert "'blocks.1.up.weight' cannot be streamed: it is a Quantized" in message
    assert "Leave its block out" in message
    twin, _ = streamed(build_model(), recorder, block_indices=[0, 2])
    step(twin, 0)


def test_meta_weights_are_refused(recorder):
    model = build_model()
    model.blocks[4].down.to("meta")
    message = error_of(model, list(model.blocks), recorder)
    assert "'blocks.4.down.weight'" in message
    assert "meta device" in message


def test_sparse_weights_are_refused(recorder):
    model = build_model()
    sparse = nn.Parameter(torch.eye(12).to_sparse(), requires_grad=False)
    model.blocks[0].register_parameter("spare", sparse)
    assert "torch.sparse_coo" in error_of(model, list(model.blocks), recorder)


def test_recurrent_modules_are_refused(recorder):
    model = build_model()
    model.blocks[0].memory = nn.GRU(4, 4).requires_grad_(False)
    assert "GRU keeps its own list of weights" in error_of(model, list(model.blocks), recorder)


def test_a_weight_that_starts_to_require_a_gradient_is_refused(recorder):
    twin, _ = streamed(build_model(), recorder)
    twin.blocks[2].mix.requires_grad_(True)
    with pytest.raises(OffloadError, match=r"'blocks\.2\.mix\.weight' requires a gradient"):
        step(twin, 0)
    twin.blocks[2].mix.requires_grad_(False)
    step(twin, 0)


def test_a_replaced_weight_is_refused_and_left_in_place(recorder):
    twin, _ = streamed(build_model(), recorder)
    new = nn.Parameter(torch.zeros(12, 24), requires_grad=False)
    twin.blocks[2].down.weight = new
    with pytest.raises(OffloadError, match=r"'blocks\.2\.down\.weight' was moved, replaced"):
        step(twin, 0)
    assert twin.blocks[2].down.weight is new, "the user's change is not undone"


def test_weights_loaded_while_streaming_are_refused(recorder):
    """A slot would keep the old values."""
    twin, ring = streamed(build_model(), recorder)
    step(twin, 0)
    twin.load_state_dict({name: t + 1 for name, t in twin.state_dict().items()})
    with pytest.raises(OffloadError, match="was moved, replaced or written to"):
        step(twin, 1)
    ring.close()
    step(twin, 1)


def test_a_converted_model_is_refused(recorder):
    twin, ring = streamed(build_model(), recorder)
    step(twin, 0)
    twin.to(torch.bfloat16)
    with pytest.raises(OffloadError, match="was moved, replaced or written to"):
        twin(torch.randn(1, 5, 4, dtype=torch.bfloat16))
    ring.close()
    assert twin(torch.randn(1, 5, 4, dtype=torch.bfloat16)).isfinite().all()


def test_copying_a_streamed_model_is_refused(recorder):
    twin, ring = streamed(build_model(), recorder)
    with pytest.raises(OffloadError, match="cannot be copied"):
        copy.deepcopy(twin)
    ring.close()
    copy.deepcopy(twin)


def test_backward_after_close_is_refused(recorder):
    twin, ring = streamed(build_model(), recorder, slots=2)
    loss = twin(torch.randn(2, 5, 4)).square().mean()
    ring.close()
    with pytest.raises(OffloadError, match="its ring is closed"):
        loss.backward()


@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint"])
def test_close_restores_the_model(checkpointing, recorder):
    model = build_model(checkpointing=checkpointing)
    twin, ring = streamed(model, recorder)
    step(twin, 0)
    before = dict(twin.named_parameters())
    ring.close()
    ring.close()
    for name, parameter in twin.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, dict(model.named_parameters())[name])
    assert twin.blocks[0].alias is twin.blocks[0].up.weight
    assert twin.blocks[0].tied.weight is twin.blocks[1].tied.weight
    storages = {p.untyped_storage().data_ptr() for p in twin.parameters()}
    assert len(storages) == len(list(twin.parameters())), "parameters share no memory"
    for module in twin.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert_same(step(twin, 1), step(model, 1))


def test_close_inside_a_pass_removes_all_hooks(recorder):
    twin, ring = streamed(build_model(), recorder)
    handle = twin.outside.register_forward_pre_hook(lambda module, args: ring.close())
    loss = twin(torch.randn(1, 5, 4)).mean()
    handle.remove()
    assert loss.isfinite()
    step(twin, 0)


def test_streamed_weights_can_be_read_and_saved(recorder):
    model = build_model()
    twin, _ = streamed(model, recorder)
    step(twin, 0)
    for name, value in model.state_dict().items():
        if not name.endswith("calls"):
            assert torch.equal(twin.state_dict()[name], value), name


def test_weights_shared_with_the_rest_of_the_model_are_not_streamed(recorder):
    _, ring = streamed(build_model(), recorder)
    names = {weight.name for block in ring._block_weights for weight in block.weights}
    assert "blocks.0.tied.weight" in names
    assert not any("outside" in name for name in names)


def test_buffers_stay_in_use(recorder):
    model = build_model()
    twin, _ = streamed(model, recorder)
    for each in (model, twin):
        step(each, 0)
        step(each, 1)
    assert [int(block.calls) for block in twin.blocks] == [2] * 6
    assert torch.equal(model.blocks[0].calls, twin.blocks[0].calls)


def test_a_block_without_frozen_weights_gets_no_hooks(recorder):
    model = build_model()
    model.blocks[1].requires_grad_(True)
    model.blocks[1].tied.requires_grad_(False)
    model.blocks[1].outside.requires_grad_(False)
    model.blocks[1].tied = nn.Identity()
    twin, ring = streamed(model, recorder, slots=2)
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


def test_a_block_may_call_itself(recorder):
    torch.manual_seed(0)
    model = nn.Sequential(SelfCaller(), SelfCaller())
    twin = copy.deepcopy(model)
    stream_weights(twin, list(twin), SynchronousCopyEngine(), recorder)
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("link", list(Link))
def test_the_cpu_uses_the_synchronous_engine_on_every_link(link):
    copy_engine = open_copy_engine(torch.device("cpu"), link)
    assert isinstance(copy_engine, SynchronousCopyEngine)
    assert copy_engine.device == torch.device("cpu")
