"""Checkpointed blocks give the same numbers, eager or compiled, resident or streamed."""

from contextlib import closing, nullcontext

import pytest
import torch
from fakes.cuda_tensors import CudaGenerator, CudaTensor
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gracetune import __version__
from gracetune.errors import GracetuneError
from gracetune.offload import checkpointing
from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks
from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

pytestmark = pytest.mark.filterwarnings("ignore")
"""Torch's tracer reads attributes that torch warns about."""

WIDTH, HEADS, TOKENS = 16, 2, 32
MODES = ("keep", "lean", "recompute")
MIXED = ("keep", "lean", "recompute", "lean", "keep")
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKEND = "aot_eager_decomp_partition"
"""The partitioner of the real compiler, without its code generator."""


class Block(nn.Module):
    """Norm, attention, matmuls, and a trained tensor."""

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
            x = block(x, x.mean().detach())
        return x


def build_model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def compiler():
    notices = []
    torch._dynamo.reset()
    compiler = BlockCompiler(notices.append, BACKEND)
    compiler.warnings = lambda: [notice for notice in notices if notice.fallback]
    yield compiler
    compiler.close()
    torch._dynamo.reset()


def gradients(model, tokens=TOKENS):
    x = torch.linspace(-1, 1, 2 * tokens * WIDTH).view(2, tokens, WIDTH).sin()
    loss = model(x).square().mean()
    loss.backward()
    found = [loss.detach(), *(block.trained.grad for block in model.blocks)]
    model.zero_grad()
    return found


def saved_nbytes(model):
    """Return the bytes that autograd holds after forward, without the weights."""
    found = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.ones(2, TOKENS, WIDTH))
    assert out.grad_fn is not None
    return sum(found.values())


def all_equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("modes", [MIXED, ("lean",) * 5, ("recompute",) * 5])
def test_eager_blocks_give_the_same_numbers_bit_for_bit(modes):
    expected = gradients(build_model())
    model = build_model()
    wrap_blocks(model.blocks, modes, None)
    assert all_equal(gradients(model), expected)
    assert all_equal(gradients(model), expected)


class CountAttention(TorchDispatchMode):
    """Counts the operators of attention's forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is FLASH_ATTENTION
        return func(*args, **(kwargs or {}))


class Observable(nn.Module):
    """Two attentions, called through an observable processor."""

    class Processor:
        def __init__(self):
            self.attention_mode = None

        def __call__(self, x):
            with self.attention_mode or nullcontext():
                return attend(x)

    def __init__(self):
        super().__init__()
        self.processor = self.Processor()
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return self.processor(self.processor(x * self.scale).sin())


class Transposing(Observable):
    """A processor that changes the layout before and after attention, as diffusers does."""

    class Processor(Observable.Processor):
        def __call__(self, x):
            with self.attention_mode or nullcontext():
                return attend(x.permute(0, 2, 1, 3).contiguous()).permute(0, 2, 1, 3)


class Unobservable(Observable):
    """The same, called as a function of torch and as an operator."""

    def forward(self, x):
        return FLASH_ATTENTION(*[attend(x * self.scale).sin()] * 3)[0]


def attend(x):
    return functional.scaled_dot_product_attention(x, x, x)


def test_only_attention_is_observed_in_python(monkeypatch):
    """The CPU limits eager steps of small batches, so Python code at each operator counts."""
    observed = []
    for mode in (checkpointing._SaveOutputs, checkpointing._ReuseOutputs):

        def dispatch(self, func, types, args=(), kwargs=None, original=mode.__torch_dispatch__):
            observed.append(func)
            return original(self, func, types, args, kwargs)

        monkeypatch.setattr(mode, "__torch_dispatch__", dispatch)
    block, x = Transposing(), torch.linspace(-1, 1, 128).view(1, 2, 8, 8).sin()
    wrap_blocks([block], ["recompute"], None)
    block(x).square().sum().backward()
    assert observed.count(FLASH_ATTENTION) == 4
    assert not {torch.ops.aten.permute.default, torch.ops.aten.clone.default} & {*observed}


@pytest.mark.parametrize("cls", [Observable, Transposing, Unobservable])
def test_recomputation_does_not_run_attention_again(cls):
    block, x = cls(), torch.linspace(-1, 1, 128).view(1, 2, 8, 8).sin()
    block(x).square().sum().backward()
    expected = block.scale.grad.clone()
    block.zero_grad()
    if cls is Unobservable:
        del block.processor
    wrap_blocks([block], ["recompute"], None)
    with CountAttention() as counter:
        loss = block(x).square().sum()
        loss.backward(retain_graph=True)
    assert counter.count == 2
    assert torch.equal(block.scale.grad, expected)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_give_the_same_numbers_and_share_their_graphs(mode, compiler):
    expected = gradients(build_model())
    model = build_model()
    wrap_blocks(model.blocks, [mode] * 5, compiler)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    # The first block's input needs no gradient, the others' does.
    assert compiler.warnings() == []
    assert compiler.graphs == 1
    assert compiler.seconds > 0
    for tokens in (TOKENS, TOKENS + 8, 2 * TOKENS, TOKENS - 16):
        expected = gradients(build_model(), tokens)
        for ours, theirs in zip(gradients(model, tokens), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert compiler.graphs == 1, "sequences of any length use the same graphs"


def test_each_mode_saves_less_than_the_one_before(compiler):
    sizes = []
    for mode in MODES:
        model = build_model()
        wrap_blocks(model.blocks, [mode] * 5, compiler)
        sizes.append(saved_nbytes(model))
    keep, lean, recompute = sizes
    assert compiler.warnings() == []
    assert recompute < lean < keep


UNIFORM = [(mode,) * len(MIXED) for mode in MODES]


@pytest.mark.parametrize(
    ("compiled", "modes"),
    [
        *((False, modes) for modes in [*UNIFORM, MIXED]),
        (True, MIXED),  # has blocks of every mode
        *(pytest.param(True, modes, marks=pytest.mark.slow) for modes in UNIFORM),
    ],
)
def test_streamed_blocks_equal_resident_ones_bit_for_bit(modes, compiled, compiler):
    chosen_compiler = compiler if compiled else None
    resident = build_model()
    wrap_blocks(resident.blocks, modes, chosen_compiler)
    expected = gradients(resident)
    model = build_model()
    streamed = [model.blocks[index] for index in (0, 1, 3, 4)]
    ring = stream_weights(model, streamed, SynchronousCopyEngine(), print, slots=2, poison=True)
    wrap_blocks(model.blocks, modes, chosen_compiler, ring)
    for _ in range(3):
        assert all_equal(gradients(model), expected)
    assert compiler.warnings() == []
    counters = ring.counters()
    assert counters.on_demand == 0
    assert counters.extra_slots == 0
    assert counters.fetches > 3 * len(streamed)


def test_without_dynamic_lengths_each_length_has_its_own_graphs():
    torch._dynamo.reset()
    compiler = BlockCompiler(print, BACKEND, dynamic=False)
    model = build_model()
    wrap_blocks(model.blocks, ["lean"] * 5, compiler)
    graphs = []
    for tokens in (TOKENS, 2 * TOKENS, TOKENS):
        gradients(model, tokens)
        graphs.append(compiler.graphs)
    compiler.close()
    torch._dynamo.reset()
    assert graphs == [1, 2, 2]


def test_batches_of_several_sizes_share_a_graph_except_those_of_one_sample():
    torch._dynamo.reset()
    compiler = BlockCompiler(print, BACKEND, dynamic_batch=True)
    model = build_model()
    wrap_blocks(model.blocks, ["lean"] * 5, compiler)
    graphs = []
    for batch in (2, 4, 3, 1, 4):
        x = torch.linspace(-1, 1, batch * TOKENS * WIDTH).view(batch, TOKENS, WIDTH).sin()
        torch.testing.assert_close(model(x), build_model()(x))
        graphs.append(compiler.graphs)
    compiler.close()
    torch._dynamo.reset()
    assert graphs == [1, 1, 1, 2, 2]


class Masked(nn.Module):
    """A block like Chroma's: it adds a mask of floats, and reads twelve vectors of a modulation."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, temb, attention_mask):
        scale, shift = temb.chunk(2, dim=1)
        scores = x @ x.transpose(1, 2) + attention_mask[:, None]
        return scores @ x * (self.trained + scale.sum(1, keepdim=True)) + shift.sum(1, keepdim=True)


def test_masks_of_floats_are_as_long_as_any_sequence(compiler):
    blocks = nn.ModuleList(Masked() for _ in range(2))
    wrap_blocks(blocks, ["keep"] * 2, compiler)
    for tokens in (TOKENS, TOKENS + 8, 2 * TOKENS):
        x, temb, mask = (
            torch.ones(1, tokens, WIDTH),
            torch.ones(1, 12, WIDTH),
            torch.ones(1, tokens),
        )
        for block in blocks:
            x = block(x, temb=temb, attention_mask=mask)
        x.mean().backward()
    assert compiler.graphs == 1
    assert not hasattr(temb, "_dynamo_weak_dynamic_indices"), "a modulation does not vary"


class Stage(nn.Module):
    """An inner block of a U-Net, whose images have few rows and columns."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return x + self.mixed(functional.silu(x))


def test_images_of_few_rows_share_a_graph(compiler):
    blocks = nn.ModuleList(Stage() for _ in range(2))
    wrap_blocks(blocks, ["keep"] * 2, compiler)
    for rows, columns in ((6, 10), (8, 8), (10, 6), (12, 5)):
        x = torch.ones(1, WIDTH, rows, columns, requires_grad=True)
        for block in blocks:
            x = block(x)
        x.mean().backward()
    assert compiler.graphs == 1


class Joint(nn.Module):
    """A block of text and image that returns slices of one tensor."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Parameter(torch.ones(WIDTH))

    def forward(self, image, text):
        both = torch.cat([text, image], dim=1)
        both = both + self.mixed(functional.gelu(both * self.trained))
        return both[:, : text.shape[1]], both[:, text.shape[1] :]


def joint_gradients(blocks, batch):
    image = torch.linspace(-1, 1, batch * TOKENS * WIDTH).view(batch, TOKENS, WIDTH)
    text = torch.linspace(0, 1, batch * 24 * WIDTH).view(batch, 24, WIDTH)
    for block in blocks:
        text, image = block(image, text)
    (image.square().mean() + text.mean()).backward()
    found = [block.trained.grad for block in blocks]
    blocks.zero_grad()
    return found


@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_that_return_slices_share_a_graph_with_the_first_one(batch, compiler):
    blocks = nn.ModuleList(Joint() for _ in range(4))
    expected = joint_gradients(blocks, batch)
    wrap_blocks(blocks, ["lean", "lean", "keep", "keep"], compiler)
    for ours, theirs in zip(joint_gradients(blocks, batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert compiler.graphs == 2


class Reader(nn.Module):
    """A block that reads text, and passes on only its hidden states."""

    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, text):
        self.seen = x.requires_grad, text.requires_grad
        return x * self.trained + text.mean(1, keepdim=True)


def test_only_hidden_states_get_a_gradient_that_nothing_needs(compiler):
    blocks = nn.ModuleList(Reader() for _ in range(3))
    x, text = torch.ones(2, TOKENS, WIDTH), torch.ones(2, TOKENS, WIDTH)
    uniform = compiler.uniform_inputs
    hidden = x
    for block in blocks:
        args, kwargs = uniform(block, block.forward, (hidden,), {"text": text})
        hidden = block(*args, **kwargs)
        assert block.seen == (True, False)
    hidden.sum().backward()
    assert x.grad is None
    assert all(block.trained.grad is not None for block in blocks)
    blocks[0].requires_grad_(False)
    args, _ = uniform(blocks[0], blocks[0].forward, (x,), {"text": text})
    assert not args[0].requires_grad, "a frozen block at the start needs no backward"


def test_the_trial_call_of_a_block_draws_no_random_numbers_of_the_device(compiler, monkeypatch):
    generator, block = CudaGenerator(monkeypatch), Reader()

    def forward(x, text):
        generator.drawn += 1
        return block(x, text)

    x = torch.ones(2, TOKENS, WIDTH).as_subclass(CudaTensor)
    compiler.uniform_inputs(block, forward, (), {"x": x, "text": torch.ones(2, TOKENS, WIDTH)})
    assert generator.drawn == 0


def test_progress_is_reported_with_the_number_of_graphs():
    notices = []
    torch._dynamo.reset()
    compiler = BlockCompiler(notices.append, BACKEND, expected=2)
    model = build_model()
    wrap_blocks(model.blocks, ["keep", "lean", "lean", "keep", "keep"], compiler)
    gradients(model)
    gradients(model)
    compiler.close()
    torch._dynamo.reset()
    first, second, last = (notice.text for notice in notices)
    assert first == "compile: graph 1 of 2, Block (keep)"
    assert second.startswith("compile: graph 2 of 2, Block (lean), ")
    assert last.startswith("compile: 2 graphs in ")


def test_sampling_runs_blocks_eagerly(compiler):
    model = build_model()
    wrap_blocks(model.blocks, ["lean"] * 5, compiler)
    with torch.no_grad():
        out = model(torch.ones(1, TOKENS, WIDTH))
        assert torch.equal(out, build_model()(torch.ones(1, TOKENS, WIDTH)))
    assert compiler.graphs == 0


def test_too_many_graphs_stop_compilation_with_a_warning():
    notices = []
    torch._dynamo.reset()
    compiler = BlockCompiler(notices.append, BACKEND, max_graphs=1)
    model = build_model()
    wrap_blocks(model.blocks, ["keep"] * 5, compiler)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        x = torch.ones(1, TOKENS, WIDTH, dtype=dtype)
        torch.testing.assert_close(model(x), build_model().to(dtype)(x))
    compiler.close()
    torch._dynamo.reset()
    (notice,) = (notice for notice in notices if notice.fallback)
    assert notice.fallback
    assert "blocks run eagerly from now on" in notice.text


def test_a_backward_pass_that_cannot_be_compiled_leaves_the_block_eager():
    def broken(*_):
        raise RuntimeError("no compiler here")

    notices = []
    torch._dynamo.reset()
    compiler = BlockCompiler(
        notices.append, aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=broken)
    )
    model = build_model()
    wrap_blocks(model.blocks, ["lean"] * 5, compiler)
    assert all_equal(gradients(model), gradients(build_model()))
    compiler.close()
    torch._dynamo.reset()
    (notice,) = (notice for notice in notices if notice.fallback)
    assert "no compiler here" in notice.text


@pytest.mark.parametrize(
    ("mode", "failing"),
    [*((mode, "compiler") for mode in MODES), ("lean", "model"), ("recompute", "model")],
)
def test_streamed_blocks_that_cannot_be_compiled_use_weights_on_the_device(mode, failing):
    """Also while they are recomputed, which does not go through the block's hooks."""

    def broken(*_):
        raise RuntimeError("no compiler here")

    expected, notices, weight_types = gradients(build_model()), [], set()
    torch._dynamo.reset()
    compiler = BlockCompiler(notices.append, broken if failing == "compiler" else BACKEND)
    model = build_model()
    ring = stream_weights(model, list(model.blocks), SynchronousCopyEngine(), notices.append, 2)
    wrap_blocks(model.blocks, [mode] * 5, compiler, ring)

    def inspect(layer, _):
        weight_types.add(type(layer.weight))
        if failing == "model":
            torch._dynamo.graph_break()

    for block in model.blocks:
        block.up.register_forward_pre_hook(inspect)
    for _ in range(2):
        assert all_equal(gradients(model), expected)
    assert weight_types == {torch.Tensor}, "weights in host memory are parameters"
    compiler.close()
    torch._dynamo.reset()
    (notice,) = (notice for notice in notices if notice.fallback)
    assert notice.fallback
    assert ("no compiler here" in notice.text) == (mode == "keep")


def test_graph_breaks_are_reported_once_and_give_the_same_numbers(compiler):
    expected, model = gradients(build_model()), build_model()
    wrap_blocks(model.blocks, ["keep"] * 5, compiler)
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break("by a hook"))
    for _ in range(2):
        for ours, theirs in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    (notice,) = compiler.warnings()
    assert notice.fallback
    assert notice.text.startswith(
        "blocks are compiled in several parts (graph breaks), which is slower: "
    )
    assert "graph_break" in notice.text


def test_cached_graphs_of_another_version_are_not_used():
    """torch's cache has graphs by their code, and by this tag."""
    before = torch.compiler.config.cache_key_tag
    with closing(BlockCompiler(print, BACKEND)):
        assert torch.compiler.config.cache_key_tag == f"{before} gracetune {__version__}".strip()
    assert torch.compiler.config.cache_key_tag == before


def test_close_restores_the_original_forward():
    model = build_model()
    wrapped = wrap_blocks(model.blocks, ["recompute"] * 5, None)
    with pytest.raises(GracetuneError, match="is already wrapped"):
        wrap_blocks(model.blocks, ["keep"] * 5, None)
    wrapped.close()
    assert all_equal(gradients(model), gradients(build_model()))
    assert "forward" not in model.blocks[0].__dict__
