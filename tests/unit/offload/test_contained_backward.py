"""A compiled block that fails while it runs does not end the pass, if the compiler contains it."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from gracetune.offload.checkpointing import BlockCompiler, wrap_blocks

pytestmark = pytest.mark.filterwarnings("ignore")
"""Torch's tracer reads attributes that torch warns about."""

WIDTH, TOKENS = 16, 32


class Block(nn.Module):
    """Takes and returns text and image, as blocks of transformers do."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, image, text, rotary=None, flag=True):
        assert flag
        both = torch.cat([text, image * rotary[0]], dim=1)
        both = both + functional.gelu(self.mixed(both))
        return both[:, : text.shape[1]], both[:, text.shape[1] :]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, image, text):
        for block in self.blocks:
            text, image = block(image, text, rotary=(torch.ones(WIDTH),), flag=True)
        return image


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield Model()
    torch._dynamo.reset()


class Graphs:
    """A compiler whose graphs fail at a call of forward or backward, counted over all graphs."""

    def __init__(self, part="", number=0, error=None):
        self.calls = {"forward": 0, "backward": 0}
        self.part, self.number = part, number
        self.error = error or RuntimeError("out of resource: shared memory")
        self.backend = aot_autograd(
            fw_compiler=self.compiler_of("forward"), bw_compiler=self.compiler_of("backward")
        )

    def compiler_of(self, part):
        def compile_graph(graph, _inputs):
            @make_boxed_func
            def run(*values):
                self.calls[part] += 1
                if (part, self.calls[part]) == (self.part, self.number):
                    raise self.error
                return graph(*values)

            return run

        return compile_graph


def gradients(model):
    """Return the loss and the gradients of the inputs and the weights."""
    image = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH).sin()
    text = torch.linspace(0, 1, 24 * WIDTH).view(1, 24, WIDTH).requires_grad_()
    loss = model(image, text).square().mean()
    loss.backward()
    found = [loss.detach(), text.grad, *(block.mixed.weight.grad for block in model.blocks)]
    model.zero_grad()
    return found


def contained(model, graphs, notices):
    compiler = BlockCompiler(notices.append, graphs.backend, contains_failures=True)
    return compiler, wrap_blocks(model.blocks, ["keep"] * 3, compiler)


def assert_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_blocks_that_do_not_fail_have_the_gradients_of_eager_ones(model):
    expected, graphs = gradients(model), Graphs()
    compiler, _ = contained(model, graphs, [])
    for _ in range(2):
        assert_close(gradients(model), expected)
    compiler.close()
    assert graphs.calls == {"forward": 6, "backward": 6}
    assert compiler.take_contained_failure() == ""


def test_weights_have_gradients_if_no_input_needs_one(model):
    image, text = torch.ones(1, TOKENS, WIDTH), torch.ones(1, 24, WIDTH)
    model(image, text).sum().backward()
    expected = [block.mixed.weight.grad.clone() for block in model.blocks]
    model.zero_grad()
    compiler, _ = contained(model, Graphs(), [])
    model(image, text).sum().backward()
    compiler.close()
    assert_close([block.mixed.weight.grad for block in model.blocks], expected)


def test_a_backward_that_fails_gives_zeros_and_the_rest_of_the_pass_runs(model):
    expected, notices = gradients(model), []
    compiler, _ = contained(model, Graphs("backward", 2), notices)
    loss, text, *weights = gradients(model)
    assert_close([loss, weights[2]], [expected[0], expected[4]])
    assert [int(gradient.count_nonzero()) for gradient in (text, *weights[:2])] == [0, 0, 0]
    (warning,) = [notice.text for notice in notices if notice.fallback]
    assert warning.startswith("a compiled block failed, so blocks run eagerly from now on")
    assert compiler.take_contained_failure() == "out of resource: shared memory"
    assert compiler.take_contained_failure() == "", "it is told once"
    assert_close(gradients(model), expected)
    compiler.close()


def test_the_weights_of_a_block_that_failed_have_gradients_as_on_other_ranks(model):
    compiler, _ = contained(model, Graphs("backward", 2), [])
    image, text = torch.ones(1, TOKENS, WIDTH), torch.ones(1, 24, WIDTH)
    model(image, text).sum().backward()
    compiler.close()
    for block in model.blocks:
        assert block.mixed.weight.grad is not None
        assert block.unused.weight.grad is None


def test_a_forward_that_fails_continues_eagerly(model):
    expected, notices = gradients(model), []
    compiler, _ = contained(model, Graphs("forward", 2), notices)
    assert_close(gradients(model), expected)
    compiler.close()
    assert compiler.take_contained_failure() == "", "all gradients are right"
    (warning,) = [notice.text for notice in notices if notice.fallback]
    assert "out of resource" in warning
    assert compiler.failure


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_memory_that_runs_out_ends_the_pass(model, part):
    compiler, _ = contained(model, Graphs(part, 2, torch.OutOfMemoryError("full")), [])
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        gradients(model)
    compiler.close()
    assert compiler.failure == ""
