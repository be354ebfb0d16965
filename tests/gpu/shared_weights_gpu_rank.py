"""One rank of test_shared_weights_gpu.py: stream shared weights to a GPU, and print what it saw."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gracetune.distributed.ranks import connect_ranks
from gracetune.memory.platform import Link
from gracetune.offload.copy_engine import open_copy_engine
from gracetune.offload.ring import stream_weights

sys.path.insert(0, str(Path(__file__).parents[1]))
from fakes.frozen_layers import FrozenLayers, private_nbytes

NUM_BLOCKS, WIDTH = 8, 4096
"""The model has 8 blocks of 64 MiB."""
DEVICE = torch.device("cuda", 0)


def gradients(model):
    x = torch.linspace(-1, 1, WIDTH, device=DEVICE).repeat(64, 1)
    model.scales.grad = None
    model(x).square().mean().backward()
    return model.scales.grad.cpu()


def stream(link, ranks, expected):
    """Stream a new model twice, as when a plan is changed; return what was seen."""
    before = private_nbytes()
    model, notices = FrozenLayers(NUM_BLOCKS, WIDTH), []
    seen = {"gradients": [], "pinned": [], "unpinned": []}
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
    model = FrozenLayers(NUM_BLOCKS, WIDTH).to(DEVICE)
    expected = gradients(model)  # also creates the CUDA context
    del model
    torch.cuda.empty_cache()
    seen = {link.name: stream(link, ranks, expected) for link in (Link.MANAGED, Link.COHERENT)}
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
