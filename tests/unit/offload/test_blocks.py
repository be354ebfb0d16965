"""Blocks that keep less, compiled or not, give the same numbers; streamed ones too."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gracetune.errors import GracetuneError
from gracetune.offload.checkpointing import Compiler, run_blocks
from gracetune.offload.copies import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

pytestmark = pytest.mark.filterwarnings("ignore")
"""torch's tracer looks at what torch warns of looking at."""

WIDTH, HEADS, TOKENS = 16, 2, 32
WAYS = ("keep", "lean", "recompute")
MIXED = ("keep", "lean", "recompute", "lean", "keep")
BACKEND = "aot_eager_decomp_partition"
"""The partitioner of the real compiler, without its code generator."""


class Block(nn.Module):
    """Norm, attention, products, and a trained tensor."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.trained = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x, shift):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(*heads.chunk(3, dim=1))
        x = x + mixed.transpose(1, 2).flatten(2) * (1 + self.trained) + shift
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in MIXED)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("trained" in name)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, x.mean())
        return x


def make():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def compiler():
    told = []
    torch._dynamo.reset()
    compiler = Compiler(told.append, BACKEND)
    compiler.told = told
    yield compiler
    compiler.close()
    torch._dynamo.reset()


def gradients(model):
    x = torch.linspace(-1, 1, 2 * TOKENS * WIDTH).view(2, TOKENS, WIDTH).sin()
    loss = model(x).square().mean()
    loss.backward()
    found = [loss.detach(), *(block.trained.grad for block in model.blocks)]
    model.zero_grad()
    return found


def saved_nbytes(model):
    """What autograd holds after forward, weights aside."""
    found = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.ones(2, TOKENS, WIDTH))
    assert out.grad_fn is not None
    return sum(found.values())


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("keeping", [MIXED, ("lean",) * 5, ("recompute",) * 5])
def test_eager_blocks_give_the_same_bits(keeping):
    expected = gradients(make())
    model = make()
    run_blocks(model.blocks, keeping, None)
    assert same(gradients(model), expected)
    assert same(gradients(model), expected)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_blocks_give_the_same_numbers_and_share_their_graphs(way, compiler):
    expected = gradients(make())
    model = make()
    run_blocks(model.blocks, [way] * 5, compiler)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    # The first block's input needs no gradient, the others' does: two graphs, forward and backward.
    assert compiler.told == []
    assert compiler.graphs == 4
    assert compiler.seconds > 0
    gradients(model)
    assert compiler.graphs == 4


def test_each_way_keeps_less_than_the_one_before(compiler):
    sizes = []
    for way in WAYS:
        model = make()
        run_blocks(model.blocks, [way] * 5, compiler)
        sizes.append(saved_nbytes(model))
    keep, lean, recompute = sizes
    assert compiler.told == []
    assert recompute < lean < keep


@pytest.mark.parametrize("keeping", [("keep",) * 5, ("lean",) * 5, ("recompute",) * 5, MIXED])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_streamed_blocks_equal_resident_ones_bit_for_bit(keeping, is_compiled, compiler):
    chosen = compiler if is_compiled else None
    resident = make()
    run_blocks(resident.blocks, keeping, chosen)
    expected = gradients(resident)
    model = make()
    streamed = [model.blocks[index] for index in (0, 1, 3, 4)]
    ring = stream_weights(model, streamed, SynchronousCopyEngine(), print, slots=2, poison=True)
    run_blocks(model.blocks, keeping, chosen, ring)
    for _ in range(3):
        assert same(gradients(model), expected)
    assert compiler.told == []
    counters = ring.counters()
    assert counters.on_demand == 0
    assert counters.extra_slots == 0
    assert counters.fetches > 3 * len(streamed)


def test_sampling_runs_the_block_as_it_is(compiler):
    model = make()
    run_blocks(model.blocks, ["lean"] * 5, compiler)
    with torch.no_grad():
        out = model(torch.ones(1, TOKENS, WIDTH))
        assert torch.equal(out, make()(torch.ones(1, TOKENS, WIDTH)))
    assert compiler.graphs == 0


def test_too_many_shapes_end_compilation_with_a_warning():
    told = []
    torch._dynamo.reset()
    compiler = Compiler(told.append, BACKEND, max_graphs=2)
    model = make()
    run_blocks(model.blocks, ["keep"] * 5, compiler)
    for tokens in (4, 6, 8):
        out = model(torch.ones(1, tokens, WIDTH))
        torch.testing.assert_close(out, make()(torch.ones(1, tokens, WIDTH)))
    compiler.close()
    torch._dynamo.reset()
    (notice,) = told
    assert notice.fallback
    assert "not compiled from here on" in notice.text


@pytest.mark.parametrize(
    ("way", "why"),
    [*((way, "compiler") for way in WAYS), ("lean", "model"), ("recompute", "model")],
)
def test_streamed_blocks_that_cannot_be_compiled_compute_with_weights_on_the_device(way, why):
    """Nor when they are done again, by a call that hooks of the block know nothing of."""

    def broken(*_):
        raise RuntimeError("no compiler here")

    expected, told, kinds = gradients(make()), [], set()
    torch._dynamo.reset()
    compiler = Compiler(told.append, broken if why == "compiler" else BACKEND)
    model = make()
    ring = stream_weights(model, list(model.blocks), SynchronousCopyEngine(), told.append, 2)
    run_blocks(model.blocks, [way] * 5, compiler, ring)

    def look(layer, _):
        kinds.add(type(layer.weight))
        if why == "model":
            torch._dynamo.graph_break()

    for block in model.blocks:
        block.up.register_forward_pre_hook(look)
    for _ in range(2):
        assert same(gradients(model), expected)
    assert kinds == {torch.Tensor}, "in host memory they are parameters"
    compiler.close()
    torch._dynamo.reset()
    (notice,) = told
    assert notice.fallback
    assert ("no compiler here" in notice.text) == (way == "keep")


def test_blocks_that_are_compiled_in_parts_say_so_once_and_give_the_same_numbers(compiler):
    expected, model = gradients(make()), make()
    run_blocks(model.blocks, ["keep"] * 5, compiler)
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break("by a hook"))
    for _ in range(2):
        for ours, theirs in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    (notice,) = compiler.told
    assert notice.fallback
    assert notice.text.startswith("blocks are compiled in parts, which costs speed: ")
    assert "graph_break" in notice.text


def test_closing_gives_the_blocks_their_own_forward_back():
    model = make()
    running = run_blocks(model.blocks, ["recompute"] * 5, None)
    with pytest.raises(GracetuneError, match="already has a forward"):
        run_blocks(model.blocks, ["keep"] * 5, None)
    running.close()
    assert same(gradients(model), gradients(make()))
    assert "forward" not in model.blocks[0].__dict__
