"""A plan applied to a model with two experts does not change its gradients."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gracetune.models.family import Experts
from gracetune.offload import buffer_autosize
from gracetune.offload.activations import OffloadSettings
from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.stall_timer import HostStallWindow
from gracetune.plan.apply import PlanLayout, apply_checkpointing, apply_plan
from gracetune.plan.result import BlockPlan

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, TOKENS = 16, 32
WAYS = [
    BlockPlan(weights, activations, offload_input)
    for weights, (activations, offload_input) in itertools.product(
        ("resident", "streamed"),
        [("keep", False), ("lean", False), ("offload", False), ("recompute", True)],
    )
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.trained = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x))) * (1 + self.trained)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in WAYS)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make():
    torch.manual_seed(0)
    model = Experts(Transformer(), Transformer())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("trained" in name)
    return model


def gradients(model, expert):
    x = torch.linspace(-1, 1, 2 * TOKENS * WIDTH).view(2, TOKENS, WIDTH).sin()
    model(x, expert=expert).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    assert len(found) == len(WAYS)
    return found


def parts(model):
    return {model.high: list(model.high.blocks), model.low: list(model.low.blocks)}


@pytest.mark.parametrize("compiled", [False, True])
def test_all_activation_modes_together_give_the_same_gradients(compiled):
    expected = {expert: gradients(make(), expert) for expert in ("high", "low")}
    model, events = make(), []
    torch._dynamo.reset()
    layout = PlanLayout(
        WAYS, compiled, slots=2, offload=OffloadSettings(poison=True), min_offload_nbytes=1
    )
    mover = SynchronousCopyEngine()
    placed = apply_plan(
        model, parts(model), layout, mover, events.append, "aot_eager_decomp_partition"
    )
    for expert in ("high", "low", "low", "high", "high"):
        for ours, theirs in zip(gradients(model, expert), expected[expert], strict=True):
            if compiled:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
            else:
                assert torch.equal(ours, theirs)
    with torch.no_grad():  # as in a sampling pipeline, which calls one expert
        model.low(torch.ones(1, TOKENS, WIDTH))
    assert placed.ring.counters().order_mismatches == 0
    assert (
        placed.ring.counters().on_demand <= 6
    )  # the first block of an expert after the other one ran
    assert placed.offload.counters().sent_nbytes > 0
    assert not [notice for notice in events if notice.fallback]
    placed.close()
    torch._dynamo.reset()
    for ours, theirs in zip(gradients(model, "low"), expected["low"], strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_that_cannot_be_compiled_offload_as_much_as_planned():
    """An eager block that is offloaded keeps all activations, so that the hooks see them."""

    def broken(*_):
        raise RuntimeError("no compiler here")

    sent = {}
    for name, compiled, backend in (("eager", False, ""), ("not compiled", True, broken)):
        model, events = make(), []
        torch._dynamo.reset()
        layout = PlanLayout([BlockPlan("resident", "offload")] * len(WAYS), compiled)
        layout = replace(layout, min_offload_nbytes=1)
        placed = apply_plan(
            model, parts(model), layout, SynchronousCopyEngine(), events.append, backend
        )
        gradients(model, "low")
        sent[name] = placed.offload.counters().sent_nbytes
        placed.close()
    torch._dynamo.reset()
    assert sent["not compiled"] == sent["eager"] > 0


@pytest.mark.parametrize(("eager_modes", "calls"), [((), 1), (("recompute",) * len(WAYS), 2)])
def test_blocks_that_cannot_be_compiled_use_their_eager_modes(eager_modes, calls):
    def broken(*_):
        raise RuntimeError("no compiler here")

    expected = gradients(make(), "low")
    model, with_gradient = make(), []
    model.low.blocks[0].up.register_forward_hook(
        lambda *_: with_gradient.append(torch.is_grad_enabled())
    )
    torch._dynamo.reset()
    layout = PlanLayout([BlockPlan("resident", "keep")] * len(WAYS), True, eager_modes=eager_modes)
    placed = apply_plan(model, parts(model), layout, SynchronousCopyEngine(), print, broken)
    found = gradients(model, "low")
    placed.close()
    torch._dynamo.reset()
    assert all(map(torch.equal, found, expected))
    assert sum(with_gradient) == calls, "once in forward, and once more if it is recomputed"


def test_divided_blocks_are_compiled_for_the_shapes_of_the_run():
    """`fully_shard` moves their weights, but batches of all sizes must share a graph here, too."""
    model, events = make(), []
    torch._dynamo.reset()
    plans = [BlockPlan("resident", "lean")] * len(WAYS)
    layout = PlanLayout(plans, True, dynamic_batch=True, num_graphs=1)
    blocks = [block for each in parts(model).values() for block in each]
    placed = apply_checkpointing(blocks, layout, events.append, "aot_eager_decomp_partition")
    for batch, expert in ((4, "high"), (3, "low"), (2, "high")):
        model(torch.ones(batch, TOKENS, WIDTH), expert=expert).mean().backward()
    assert placed.compiler.graphs == 1
    placed.close()
    torch._dynamo.reset()
    assert events[0].text == "compile: graph 1 of 1, Block (lean)"


class FallingStalls(SynchronousCopyEngine):
    """Each stall window reports half the stall time of the one before, whatever the clock says."""

    stalled_s = 1.0

    def begin_stall_window(self, stream):
        self.stalled_s /= 2
        window = HostStallWindow(now=0.0, stalled_s=0.0)
        window.end(now=1.0, stalled_s=self.stalled_s)
        return window


@pytest.mark.parametrize(("ways", "added"), [("recompute", 3), ("offload", 1)])
def test_spare_memory_is_shared_by_ring_slots_and_activations(ways, added, monkeypatch):
    """There is memory for three slots; half of it goes to prefetched activations, if any."""
    monkeypatch.setattr(buffer_autosize, "RING_WINDOW_PASSES", 1)
    model, events = make(), []
    layout = PlanLayout(
        [BlockPlan("streamed", ways)] * len(WAYS), False, slots=2, min_offload_nbytes=1
    )
    placed = apply_plan(model, parts(model), layout, FallingStalls(), events.append)
    expected = gradients(make(), "low")
    assert not placed.shrink_ring()
    placed.allow_ring_growth(3 * placed.ring.counters().slot_nbytes)
    for _ in range(6):
        for ours, theirs in zip(gradients(model, "low"), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert placed.ring.counters().slots == 2 + added
    assert placed.stall_seconds() > 0
    assert placed.shrink_ring()
    for ours, theirs in zip(gradients(model, "low"), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert placed.ring.counters().slots == 2
    placed.close()


def test_a_plan_that_fails_while_it_is_applied_leaves_no_hooks(monkeypatch):
    model = make()
    plans = [BlockPlan("streamed", "keep")] * len(WAYS)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("gracetune.plan.apply.wrap_blocks", full)
    with pytest.raises(torch.OutOfMemoryError):
        apply_plan(model, parts(model), PlanLayout(plans, False, 2), SynchronousCopyEngine(), print)
    for ours, theirs in zip(gradients(model, "low"), gradients(make(), "low"), strict=True):
        assert torch.equal(ours, theirs)
    assert not model.low._forward_pre_hooks


def test_blocks_that_keep_everything_are_not_wrapped():
    model = make()
    plans = [BlockPlan("resident", "keep")] * len(WAYS)
    placed = apply_plan(
        model, parts(model), PlanLayout(plans, False), SynchronousCopyEngine(), print
    )
    assert placed.ring is None
    assert placed.offload is None
    assert placed.compiler is None
    assert placed.stall_seconds() == 0.0
    placed.allow_ring_growth(10**9)
    assert not placed.shrink_ring()
    placed.close()
