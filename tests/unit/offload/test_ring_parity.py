"""A streamed step equals the resident step bit for bit: loss and every gradient."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from streamed_model import assert_same, build_model, step, streamed
from torch import nn

from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

MODES = ["keep", "reentrant", "checkpoint", "pairs"]


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("slots", [2, 3, 4, 5, 9])
def test_steps_are_equal_with_any_number_of_slots(checkpointing, slots, recorder):
    model = build_model(checkpointing=checkpointing)
    twin, ring = streamed(model, recorder, slots=slots)
    for seed in range(3):
        assert_same(step(twin, seed, micro_batches=2), step(model, seed, micro_batches=2))
    assert ring.counters().order_mismatches == 0


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("block_indices", [[0], [5], [0, 2, 4], [1, 3, 5], [2, 3]])
def test_steps_are_equal_with_any_subset_of_blocks(checkpointing, block_indices, recorder):
    model = build_model(checkpointing=checkpointing)
    twin, _ = streamed(model, recorder, block_indices, slots=2)
    for seed in range(3):
        assert_same(step(twin, seed), step(model, seed))


@pytest.mark.parametrize("checkpointing", ["keep", "reentrant", "checkpoint"])
def test_all_blocks_are_prefetched_and_slots_are_reused_at_both_ends(checkpointing, recorder):
    twin, ring = streamed(build_model(checkpointing=checkpointing), recorder, slots=3)
    step(twin, 0)
    before = ring.counters()
    for seed in range(4):
        step(twin, seed)
    after = ring.counters()
    assert after.on_demand == before.on_demand == 0
    assert recorder.events == []
    # Forward and backward over 6 blocks; at both ends 3 blocks are still in the slots.
    assert after.fetches - before.fetches == 4 * (2 * 6 - 2 * 3)
    assert after.late == 0
    assert after.slots == 3
    assert after.extra_slots == 0


def test_the_counters_are_consistent(recorder):
    model = build_model()
    twin, ring = streamed(model, recorder, slots=2)
    frozen = [p for p in model.blocks[0].parameters() if not p.requires_grad]
    outside = {id(p) for p in model.outside.parameters()}
    nbytes = sum(-(-p.nbytes // 256) * 256 for p in frozen if id(p) not in outside)
    step(twin, 0)
    counters = ring.counters()
    assert counters.slot_nbytes == nbytes
    assert counters.host_nbytes == 6 * nbytes
    assert counters.fetched_nbytes == counters.fetches * nbytes
    assert counters.on_time + counters.late + counters.on_demand == 6 + 5
    assert counters.stalled_s > 0, "a synchronous copy is always waited for"


@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint"])
def test_sampling_between_steps_changes_nothing(checkpointing, recorder):
    model = build_model(checkpointing=checkpointing)
    twin, ring = streamed(model, recorder)
    x = torch.randn(1, 5, 4)
    for seed in range(3):
        assert_same(step(twin, seed), step(model, seed))
        with torch.no_grad():
            assert torch.equal(twin(x), model(x))
        with torch.inference_mode():
            assert torch.equal(twin(x), model(x))
    assert ring.counters().order_mismatches == 0
    assert ring.counters().on_demand == 0


@pytest.mark.parametrize("checkpointing", MODES)
def test_blocks_may_be_repeated_skipped_or_reordered(checkpointing, recorder):
    model = build_model(checkpointing=checkpointing)
    twin, ring = streamed(model, recorder, slots=2)
    orders = [None, [0, 1, 0, 1, 2, 3], [5, 3, 1], [2, 2, 2], None, [4], [5, 4, 3, 2, 1, 0], None]
    for seed, order in enumerate(orders):
        assert_same(step(twin, seed, order), step(model, seed, order))
    assert ring.counters().order_mismatches > 0
    warnings = [text for text in recorder.texts() if "where earlier passes used" in text]
    assert len(warnings) == 1


@pytest.mark.parametrize("checkpointing", ["keep", "checkpoint"])
def test_two_forwards_before_a_backward_and_a_retained_graph(checkpointing, recorder):
    def steps(model):
        generator = torch.Generator().manual_seed(3)
        model.zero_grad(set_to_none=True)
        x, y = (torch.randn(2, 5, 4, generator=generator) for _ in range(2))
        loss = model(x).square().mean() + model(y).abs().mean()
        loss.backward(retain_graph=checkpointing == "keep")
        if checkpointing == "keep":
            loss.backward()
        return [loss.detach()], {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    model = build_model(checkpointing=checkpointing)
    twin, _ = streamed(model, recorder, slots=2)
    for _ in range(3):
        assert_same(steps(twin), steps(model))


@pytest.mark.parametrize("sampling", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("checkpointing", MODES)
def test_sampling_between_forward_and_backward_changes_nothing(checkpointing, sampling, recorder):
    model = build_model(checkpointing=checkpointing)
    twin, _ = streamed(model, recorder, slots=2)
    grads = []
    for each in (model, twin):
        torch.manual_seed(0)
        x = torch.randn(2, 5, 4, requires_grad=True)
        loss = each(x).square().mean()
        with sampling():
            each(torch.ones(1, 5, 4))
        loss.backward()
        grads.append(([loss.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(grads[1], grads[0])


def test_calling_blocks_without_the_model_is_right_and_warns(recorder):
    model = build_model()
    twin, ring = streamed(model, recorder, slots=2)
    results = []
    for each in (model, twin):
        x = torch.ones(2, 5, 12)
        for block in each.blocks:
            x = block(x)
        x.square().mean().backward()
        results.append(([x.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(results[1], results[0])
    assert ring.counters().extra_slots > 0
    assert sum("so a slot was added" in text for text in recorder.texts()) == 1
    del x, results
    step(twin, 0)
    assert ring.counters().slots == 2, "the added slots are freed"


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_equal_with_peft_adapters(checkpointing, dtype, recorder):
    model = build_model(checkpointing=checkpointing)
    model.requires_grad_(False)
    targets = ["up", "down", "tied"]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
    inject_adapter_in_model(config, model)
    if dtype is torch.bfloat16:
        model.to(dtype)
    twin, ring = streamed(model, recorder, slots=2)
    assert not any("lora" in w.name for block in ring._block_weights for w in block.weights)
    for seed in range(2):
        results = []
        for each in (twin, model):
            torch.manual_seed(seed)  # dropout
            x = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
            each.zero_grad(set_to_none=True)
            loss = each(x).float().square().mean()
            loss.backward()
            grads = {n: p.grad for n, p in each.named_parameters() if p.requires_grad}
            results.append(([loss.detach()], grads))
        assert_same(*results)


def test_steps_are_equal_under_autocast(recorder):
    model = build_model(checkpointing="checkpoint")
    twin, _ = streamed(model, recorder)
    for seed in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(step(twin, seed), step(model, seed))


def test_training_gives_the_same_weights(recorder):
    model = build_model(checkpointing="checkpoint")
    twin, ring = streamed(model, recorder, slots=2)
    for each in (model, twin):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(5):
            step(each, seed)
            optimizer.step()
    ring.close()
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name


def test_weights_keep_their_memory_format(recorder):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
            self.requires_grad_(False)

        def forward(self, x):
            for block in self.blocks:
                strides.append(block.weight.stride())
                x = block(x)
            return x

    strides = []
    torch.manual_seed(0)
    model = Stack().to(memory_format=torch.channels_last)
    with torch.no_grad():
        model.blocks[1].weight.set_(
            model.blocks[1].weight.expand(8, 8, 3, 3)[:, :, ::2]
        )  # with gaps
    twin = copy.deepcopy(model)
    ring = stream_weights(twin, list(twin.blocks), SynchronousCopyEngine(), recorder)
    x = torch.randn(1, 8, 6, 6)
    assert torch.equal(twin(x), model(x))
    assert strides[:3][0] == strides[3:][0] == (72, 1, 24, 8)
    ring.close()
    assert twin.blocks[0].weight.stride() == model.blocks[0].weight.stride()
