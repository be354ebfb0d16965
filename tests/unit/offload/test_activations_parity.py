"""An offloaded step equals the resident step bit for bit, in every mix of modes."""

import copy
import itertools
import random

import pytest
import torch
from offloaded_model import MIN_NBYTES, MODES, MixedModel, offloaded
from peft import LoraConfig, inject_adapter_in_model
from streamed_model import assert_same, build_model, step

from gracetune.offload.activations import OffloadSettings, offload_activations
from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

KINDS = list(itertools.product(MODES, [False, True]))
"""(mode of a block's activations, True if its weights are streamed)."""


def build_mixed(model, kinds, recorder, **settings):
    streamed = [k for k, (_, streams) in enumerate(kinds) if streams]
    return MixedModel(model, [mode for mode, _ in kinds], streamed, recorder, **settings)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{'ring' * kind[1]}")
def test_every_mode_works_next_to_every_other(kind, recorder):
    model = build_model(num_blocks=3)
    references = [step(model, seed, micro_batches=2) for seed in range(2)]
    for other in KINDS:
        twin = build_mixed(model, [kind, other, kind], recorder).model
        for seed, reference in enumerate(references):
            assert_same(step(twin, seed, micro_batches=2), reference)


@pytest.mark.parametrize("seed", range(6))
def test_random_mixes_orders_and_prefetch_distances(seed, recorder):
    rng = random.Random(seed)
    for trial in range(4):
        count = rng.randint(1, 7)
        model = build_model(count, seed=trial)
        kinds = [rng.choice(KINDS) for _ in range(count)]
        twin = build_mixed(model, kinds, recorder, prefetch_blocks=rng.randint(1, 4)).model
        for repetition in range(4):
            order = [rng.randrange(count) for _ in range(rng.randint(1, 9))]
            order = rng.choice([None, order])
            times = rng.randint(1, 2)
            assert_same(step(twin, repetition, order, times), step(model, repetition, order, times))


@pytest.mark.parametrize("checkpointing", ["keep", "reentrant", "checkpoint", "pairs"])
@pytest.mark.parametrize("block_indices", [None, [0, 2, 4], [1, 2, 5]])
def test_offloaded_blocks_inside_other_checkpoints(checkpointing, block_indices, recorder):
    """A checkpoint around an offloaded block has nothing to recompute, and does no harm."""
    model = build_model(checkpointing=checkpointing)
    twin, offload = offloaded(model, recorder, block_indices)
    for seed in range(3):
        assert_same(step(twin, seed, micro_batches=2), step(model, seed, micro_batches=2))
    assert (offload.counters().sent == 0) == (checkpointing == "reentrant"), (
        "reentrant forward runs without gradients"
    )


def test_a_retained_graph_can_be_used_twice(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder)
    results = []
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        x, y = torch.randn(2, 2, 5, 4)
        loss = each(x).square().mean() + each(y).abs().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(([loss.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(*results)
    counters = offload.counters()
    assert counters.fetched_nbytes > counters.sent_nbytes, "it was fetched twice"


def test_second_order_gradients_are_equal(recorder):
    model = build_model(num_blocks=3)
    twin, offload = offloaded(model, recorder)
    results = []
    for each in (model, twin):
        torch.manual_seed(0)
        loss = each(torch.randn(2, 5, 4)).square().mean()
        trained = [p for p in each.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss, trained, create_graph=True)
        sum(gradient.square().sum() for gradient in first).backward()
        results.append(([loss.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(*results)
    assert offload.counters().fetched_nbytes > 0


def test_gradients_of_some_parameters_only(recorder):
    model = build_model()
    twin, _ = offloaded(model, recorder)
    for seed in range(2):
        grads = []
        for each in (model, twin):
            torch.manual_seed(seed)
            loss = each(torch.randn(2, 5, 4)).square().mean()
            grads.append(torch.autograd.grad(loss, [each.blocks[4].a, each.blocks[5].b]))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert_same(step(twin, 2), step(model, 2))


def test_sampling_offloads_nothing_and_changes_nothing(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder)
    x = torch.randn(1, 5, 4)
    for seed in range(2):
        assert_same(step(twin, seed), step(model, seed))
        sent = offload.counters().sent
        with torch.no_grad():
            assert torch.equal(twin(x), model(x))
        with torch.inference_mode():
            assert torch.equal(twin(x), model(x))
        assert offload.counters().sent == sent
    results = []
    for each in (model, twin):
        each.zero_grad(set_to_none=True)
        loss = each(torch.ones(2, 5, 4)).square().mean()
        with torch.no_grad():
            each(x)
        loss.backward()
        results.append(([loss.detach()], {n: p.grad for n, p in each.named_parameters()}))
    assert_same(*results)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_is_exact_with_peft_and_dropout(streams, dtype, recorder):
    model = build_model()
    model.requires_grad_(False)
    targets = ["up", "down", "tied"]
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.1), model
    )
    if dtype is torch.bfloat16:
        model.to(dtype)
    twin = build_mixed(model, [("offload", streams)] * 6, recorder).model
    for seed in range(2):
        results = []
        for each in (twin, model):
            torch.manual_seed(seed)
            each.zero_grad(set_to_none=True)
            loss = each(torch.randn(2, 5, 4, dtype=dtype)).float().square().mean()
            loss.backward()
            grads = {n: p.grad for n, p in each.named_parameters() if p.requires_grad}
            results.append(([loss.detach()], grads))
        assert_same(*results)


def test_offload_is_exact_under_autocast(recorder):
    model = build_model()
    twin, _ = offloaded(model, recorder)
    for seed in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(step(twin, seed), step(model, seed))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # raised inside the compiler
@pytest.mark.parametrize("streams", [False, True])
def test_compiled_blocks_are_compiled_once(streams, recorder):
    """Compiled graphs do not depend on the hooks."""
    model = build_model(num_blocks=3)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    try:
        twin = copy.deepcopy(model)
        for each in (model, twin):
            for block in each.blocks:
                block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
        copy_engine = SynchronousCopyEngine()
        ring = (
            stream_weights(twin, list(twin.blocks), copy_engine, recorder, 2, True)
            if streams
            else None
        )
        offload = offload_activations(
            list(twin.blocks),
            copy_engine,
            ring,
            recorder,
            MIN_NBYTES,
            settings=OffloadSettings(poison=True),
        )
        for seed in range(3):
            assert_same(step(twin, seed), step(model, seed))
        assert offload.counters().sent_nbytes > 0
        compiled = len(graphs)
        for seed in range(3):
            step(twin, seed)
        assert len(graphs) == compiled
    finally:
        torch._dynamo.reset()


def test_training_with_offload_gives_the_same_weights(recorder):
    model = build_model()
    twin, offload = offloaded(model, recorder)
    for each in (model, twin):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(5):
            step(each, seed)
            optimizer.step()
    offload.close()
    for name, value in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value), name
