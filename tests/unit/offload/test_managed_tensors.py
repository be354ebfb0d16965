"""Weights in managed memory: all of a group or nothing, fetched ahead of each block, and freed."""

from types import SimpleNamespace

import pytest
import torch
from fakes.managed import managed_memory
from fakes.platforms import simulated_machine
from torch import nn
from torch.utils.checkpoint import checkpoint

from gracetune.cache.batch_transfer import DeviceTextCache
from gracetune.memory.managed_roles import slab_nbytes
from gracetune.memory.platform import Link
from gracetune.memory.stats import MemoryAccounting, Tier
from gracetune.offload.managed_tensors import ManagedWeights, fitting_parameters
from gracetune.train import managed_overflow
from gracetune.train.managed_overflow import ManagedRun
from gracetune.units import MIB

NUM_BLOCKS, WIDTH = 4, 64


class Model(nn.Module):
    """Blocks in a row, with or without activation checkpointing, and a layer outside of them."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            x = torch.relu(x)
        return self.head(x)


@pytest.fixture
def memory():
    return managed_memory(
        simulated_machine(Link.MANAGED).gpu, MemoryAccounting({Tier.MANAGED: 8 * MIB})
    )


def gradients(model):
    inputs = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).requires_grad_()
    model(inputs).sum().backward()
    return [inputs.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_blocks_are_fetched_before_use_and_sent_home_after_their_own_backward(memory, checkpointed):
    expected = gradients(Model(checkpointed))
    model, log, numbers = Model(checkpointed), [], {}
    weights = ManagedWeights("trained", model.parameters(), model.blocks, memory, "prefetch")
    numbers.update({slab: number for number, slab in weights._slabs.items()})
    original = memory.prefetch

    def prefetch(slab, to, after=None):
        log.append((to, numbers[slab]))
        return original(slab, to, after)

    memory.prefetch = prefetch
    on_device, missing = set(), []

    def used(number):
        for to, moved in log:
            (on_device.add if to == "device" else on_device.discard)(moved)
        log.clear()
        if number not in on_device:
            missing.append(number)

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, n=number: used(n), prepend=True)
        block.weight.register_post_accumulate_grad_hook(lambda _, n=number: used(n))
    found = gradients(model)
    assert missing == [], "used in forward, recomputation or backward while it was at home"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    used(0)
    assert on_device == {0}, "the first block, which the next step needs first"
    weights.close()
    assert not any(block._forward_pre_hooks for block in model.blocks)


def test_nothing_moves_if_not_all_of_it_fits():
    model = Model()
    total = sum(slab_nbytes(block.parameters()) for block in model.blocks)
    memory = managed_memory(
        simulated_machine(Link.MANAGED).gpu, MemoryAccounting({Tier.MANAGED: total})
    )
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(torch.OutOfMemoryError):
        ManagedWeights("trained", model.parameters(), model.blocks, memory)
    assert [p.data_ptr() for p in model.parameters()] == before
    assert memory.slabs == ()
    fitting = fitting_parameters(model.parameters(), model.blocks, memory.free_bytes)
    assert fitting == list(model.blocks.parameters())
    assert ManagedWeights("trained", fitting, model.blocks, memory).nbytes == total


def managed_run(model, memory, **settings):
    return ManagedRun(
        memory=memory,
        emit=lambda event: None,
        parameters={},
        model=model,
        blocks=list(model.blocks),
        stepper=None,
        texts=DeviceTextCache({}),
        **settings,
    )


def plan(*streamed):
    return SimpleNamespace(
        managed=("weights",), streamed=streamed, host=SimpleNamespace(activations=0)
    )


@pytest.mark.parametrize(
    ("num_transformers", "streamed", "resident"), [(1, (2, 3), [0, 1]), (2, (1,), [0, 2])]
)
def test_only_weights_that_the_plan_keeps_resident_move(
    memory, num_transformers, streamed, resident
):
    """A plan has the blocks of one transformer, and is applied to each of two."""
    model = Model().requires_grad_(False)
    run = managed_run(model, memory, num_transformers=num_transformers)
    run.place_planned(plan(*streamed))
    moved = {slab.memory.untyped_storage().data_ptr() for slab in memory.slabs}

    def is_managed(module):
        return {p.untyped_storage().data_ptr() in moved for p in module.parameters()}

    assert is_managed(model.head) == {True}
    for number, block in enumerate(model.blocks):
        assert is_managed(block) == {number in resident}


def test_another_plan_moves_and_frees_what_has_changed(memory):
    model = Model().requires_grad_(False)
    run = managed_run(model, memory)
    run.place_planned(plan(2, 3))
    all_but = memory.used_bytes
    run.place_planned(plan(3))
    assert memory.used_bytes - all_but == slab_nbytes(model.blocks[2].parameters())
    run.place_planned(plan(0, 3))
    for parameter in model.blocks[0].parameters():
        parameter.data = parameter.data.clone()  # the weight ring takes them
    run.free_unused()
    assert memory.used_bytes == all_but, "those of block 2 instead of block 0"
    assert run.roles == {"weights": all_but}


def test_gradients_do_not_move_on_several_ranks(memory):
    events, model = [], Model()
    run = managed_run(model, memory, excluded=("gradients",), forced=("gradients",))
    run.emit = events.append
    run.place()
    (notice,) = events
    assert "the gradients cannot be in managed memory: the ranks add up" in notice.text
    assert not run._is_on_device("gradients")
    assert memory.slabs == ()


def test_room_for_a_moving_average_that_overflowed_before_is_held_until_it_is_built(memory):
    model = Model()
    run = managed_run(model, memory, resumed=["ema"])
    run.parameters = dict(model.named_parameters())
    run.place()
    held = memory.held_bytes
    run.build_ema(run.parameters, 0.9)
    assert memory.by_role() == {"ema": held}
    run.place_planned(SimpleNamespace(managed=(), streamed=()))
    assert memory.held_bytes == 0, "another plan holds nothing for it again"


def test_cached_texts_overflow_first_if_that_helps(memory, monkeypatch):
    texts = DeviceTextCache({"a prompt": {"embeddings": torch.ones(MIB // 4)}})
    run = managed_run(Model(), memory)
    run.texts = texts
    assert not run._is_on_device("caches"), "it is too small to help"
    monkeypatch.setattr(managed_overflow, "MIN_CACHES_NBYTES", MIB)
    assert run.overflow("full", 3)
    assert memory.by_role() == {"caches": MIB}
    (entry,) = texts.get_all(["a prompt"])
    assert torch.equal(entry["embeddings"], torch.ones(MIB // 4))
