"""A model with one of everything that a ring meets, and how its steps are compared."""

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gracetune.offload.copies import SynchronousCopyEngine
from gracetune.offload.ring import stream_weights

WIDTH = 12


@dataclass
class SaidLap:
    """A window of passes whose waits are said by hand."""

    seconds: float = 0.0
    late: int = 0
    span_s: float = 1.0
    over: bool = True

    def is_over(self):
        return self.over


class Block(nn.Module):
    """Weights that autograd saves as they are, transposed, reshaped, twice, or not at all."""

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
        self.again = self.up.weight  # one weight under two names
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, shift=0.0):
        self.calls += 1
        x = x + self.table[0].to(x.dtype)
        hidden = functional.gelu(self.up(self.norm(x)) + shift) * self.again.sum(dim=1)
        x = x * self.table[1].to(x.dtype).exp() + self.down(hidden) + self.tied(x)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + x @ self.a.t() @ self.b.t()


class Model(nn.Module):
    """`how`: keep, reentrant, checkpoint, or pairs (one checkpoint around every two blocks)."""

    def __init__(self, num_blocks=6, how="keep"):
        super().__init__()
        self.how = how
        self.inside = nn.Linear(4, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)  # a module that blocks share
        self.outside = nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(num_blocks))
        for block in self.blocks:
            block.outside = self.outside  # and one that they share with the rest
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.split(".")[-1] in ("a", "b"))

    def forward(self, x, order=None):
        x = self.inside(x)
        for group in self.groups(order):
            if self.how == "keep" or not torch.is_grad_enabled():
                x = run(x, group)
            else:
                x = checkpoint(run, x, group, use_reentrant=self.how == "reentrant")
        return self.outside(x)

    def groups(self, order):
        blocks = [self.blocks[k] for k in (range(len(self.blocks)) if order is None else order)]
        size = 2 if self.how == "pairs" else 1
        return [blocks[k : k + size] for k in range(0, len(blocks), size)]


def run(x, blocks):
    for block in blocks:
        x = block(x, shift=0.1)
    return x


def made(num_blocks=6, how="keep", seed=0):
    torch.manual_seed(seed)
    model = Model(num_blocks, how)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones and zeros would pass for each other
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def streamed(model, told, which=None, slots=3, mover=None, poison=True):
    """A copy of the model and a ring under some of its blocks."""
    twin = copy.deepcopy(model)
    blocks = list(twin.blocks) if which is None else [twin.blocks[k] for k in which]
    return twin, stream_weights(twin, blocks, mover or SynchronousCopyEngine(), told, slots, poison)


def step(model, seed, order=None, micro_batches=1):
    """Losses and every gradient."""
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad(set_to_none=True)
    losses = []
    for _ in range(micro_batches):
        x = torch.randn(2, 5, 4, generator=generator).requires_grad_()  # reentrant asks for it
        loss = model(x, order).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same(mine, reference):
    """Bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(mine[0], reference[0], strict=True)), "loss"
    assert mine[1].keys() == reference[1].keys()
    for name, expected in reference[1].items():
        got = mine[1][name]
        if expected is None:
            assert got is None, name
        else:
            assert torch.equal(got, expected), f"{name}: {(got - expected).abs().max()}"
