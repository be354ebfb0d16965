"""A model of large frozen layers, and the private memory of a process that streams them."""

import gc
from pathlib import Path

import torch
from torch import nn


class FrozenLayers(nn.Module):
    """Frozen square layers, each with a trained scale, with the same values on every rank."""

    def __init__(self, num_blocks, width):
        super().__init__()
        self.blocks = nn.ModuleList()
        for number in range(num_blocks):
            block = nn.Linear(width, width, bias=False, device="meta")
            values = torch.arange(width**2, dtype=torch.float32).add_(number)
            weight = values.remainder_(7).div_(width).view(width, width)
            block.weight = nn.Parameter(weight, requires_grad=False)
            self.blocks.append(block)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, num_blocks))

    def forward(self, x):
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return x


def private_nbytes():
    """Return the memory in bytes that this process shares with no other."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [line.split() for line in lines if line.startswith("Private_")]
    return 1024 * sum(int(words[1]) for words in private)
