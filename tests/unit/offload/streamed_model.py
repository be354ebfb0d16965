"""A small model that exercises every feature of the weight ring, and comparisons of its steps."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

WIDTH = 12


@dataclass
class FakeStallWindow:
    """A stall window whose measurements the test sets."""

    stalled_s: float = 0.0
    late: int = 0
    span_s: float = 1.0
    complete: bool = True

    def is_complete(self):
        return self.complete


class Block(nn.Module):
    """Weights that autograd saves unchanged, transposed, reshaped, twice, or not at all."""

    def __init__(self, tied):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.table = nn.Parameter(torch.randn(2, WIDTH, dtype=torch.float64) * 0.1)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.3)  # the adapter: these two are trained
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)
        self.tied = tied
        self.alias = self.up.weight  # one weight under two names
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, shift=0.0):
        self.calls += 1
        x = x + self.table[0].to(x.dtype)
        hidden = functional.gelu(self.up(self.norm(x)) + shift) * self.alias.sum(dim=1)
        x = x * self.table[1].to(x.dtype).exp() + self.down(hidden) + self.tied(x)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + x @ self.a.t() @ self.b.t()


class SmallBlock(nn.Module):
    """One streamed weight with its bias, and an adapter: few operations, so few interleavings."""

    def __init__(self, tied):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x, shift=0.0):
        x = x + functional.gelu(self.up(x) + shift)
        return x + x @ self.a.t() @ self.b.t()


class Model(nn.Module):
    """`checkpointing`: keep, reentrant, checkpoint, or pairs (one checkpoint per two blocks)."""

    def __init__(self, num_blocks=6, checkpointing="keep", block_class=Block):
        super().__init__()
        self.checkpointing = checkpointing
        self.inside = nn.Linear(4, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)  # a module that blocks share
        self.outside = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(block_class(shared) for _ in range(num_blocks))
        for block in self.blocks:
            block.outside = self.outside  # and one that they share with the rest of the model
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.split(".")[-1] in ("a", "b"))

    def forward(self, x, order=None):
        x = self.inside(x)
        for group in self.groups(order):
            if self.checkpointing == "keep" or not torch.is_grad_enabled():
                x = run(x, group)
            else:
                reentrant = self.checkpointing == "reentrant"
                x = checkpoint(run, x, group, use_reentrant=reentrant)
        return self.outside(x)

    def groups(self, order):
        blocks = [self.blocks[k] for k in (range(len(self.blocks)) if order is None else order)]
        size = 2 if self.checkpointing == "pairs" else 1
        return [blocks[k : k + size] for k in range(0, len(blocks), size)]


def run(x, blocks):
    for block in blocks:
        x = block(x, shift=0.1)
    return x


def build_model(num_blocks=6, checkpointing="keep", seed=0, block_class=Block):
    torch.manual_seed(seed)
    model = Model(num_blocks, checkpointing, block_class)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # the default ones and zeros could be mistaken for each other
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def streamed(model, recorder, block_indices=None, slots=3, copy_engine=None, poison=True):
    """Return a copy of the model and a ring that streams some of its blocks."""
    twin = copy.deepcopy(model)
    blocks = list(twin.blocks)
    if block_indices is not None:
        blocks = [blocks[k] for k in block_indices]
    copy_engine = copy_engine or SynchronousCopyEngine()
    return twin, stream_weights(twin, blocks, copy_engine, recorder, slots, poison)


def step(model, seed, order=None, micro_batches=1, shape=(2, 5)):
    """Run forward and backward; return the losses and all gradients."""
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad(set_to_none=True)
    losses = []
    for _ in range(micro_batches):
        # Reentrant checkpointing needs an input that requires a gradient.
        x = torch.randn(*shape, 4, generator=generator).requires_grad_()
        loss = model(x, order).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same(result, reference):
    """Assert that losses and gradients are equal bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(result[0], reference[0], strict=True)), "loss"
    assert result[1].keys() == reference[1].keys()
    for name, expected in reference[1].items():
        got = result[1][name]
        if expected is None:
            assert got is None, name
        else:
            assert torch.equal(got, expected), f"{name}: {(got - expected).abs().max()}"
