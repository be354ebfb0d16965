"""One rank of test_shared_weights_gpu.py: stream shared weights to a GPU, and print what it saw."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gracetune.distributed.ranks import connect_ranks
from gracetune.memory.platform import Link
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.offload.ring import stream_weights

NUM_BLOCKS, WIDTH = 8, 4096
"""The model has 8 blocks of 64 MiB."""
DEVICE = torch.device("cuda", 0)


class Model(nn.Module):
    """Frozen layers, each with a trained scale, with the same values on every rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for number in range(NUM_BLOCKS):
            block = nn.Linear(WIDTH, WIDTH, bias=False, device="meta")
            values = torch.arange(WIDTH**2, dtype=torch.float32).add_(number)
            weight = values.remainder_(7).div_(WIDTH).view(WIDTH, WIDTH)
            block.weight = nn.Parameter(weight, requires_grad=False)
            self.blocks.append(block)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, NUM_BLOCKS))

    def forward(self, x):
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return x


def gradients(model):
    x = torch.linspace(-1, 1, WIDTH, device=DEVICE).repeat(64, 1)
    model.scales.grad = None
    model(x).square().mean().backward()
    return model.scales.grad.cpu()


def private_nbytes():
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [line.split() for line in lines if line.startswith("Private_")]
    return 1024 * sum(int(words[1]) for words in private)


def stream(link, ranks, expected):
    """Stream a new model twice, as when a plan is changed; return what was seen."""
    before = private_nbytes()
    model, notices, seen = Model(), [], {"gradients": [], "pinned": [], "unpinned": []}
    blocks = list(model.blocks)
    for _ in range(2):
        engine = open_copy_engine(DEVICE, link)
        ring = stream_weights(model, blocks, engine, notices.append, 3, True, ranks=ranks)
        seen["gradients"].append(torch.equal(gradients(model), expected))
        seen["pinned"].append(all(block.weight.is_pinned() for block in model.blocks))
        dist.barrier()
        seen["added"] = private_nbytes() - before
        dist.barrier()
        ring.close(to_device=False)
        seen["unpinned"].append(not any(block.weight.is_pinned() for block in model.blocks))
    seen["nbytes"] = sum(block.weight.nbytes for block in model.blocks)
    seen["notices"] = [notice.text for notice in notices]
    return seen


def main():
    dist.init_process_group("gloo")
    ranks = connect_ranks(60)
    expected = gradients(Model().to(DEVICE))  # also creates the CUDA context
    torch.cuda.empty_cache()
    seen = {link.name: stream(link, ranks, expected) for link in (Link.MANAGED, Link.COHERENT)}
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
