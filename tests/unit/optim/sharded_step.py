"""Compare Automagic on two ranks, sharded by `fully_shard`, with one process.

Started by test_automagic_sharded.py with the rule to test as its argument.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gracetune.optim.automagic import Automagic, local_shard


def build_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def train(model, optimizer, rank, world_size):
    """Train on this rank's part of each batch; the mean gradient is that of the whole batch."""
    for step in range(12):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        x = batch.chunk(world_size)[rank]
        loss = (model(x) - x[:, :3].cos()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    settings = {
        "per_element": {"lr_bump": 1e-3, "max_lr": 1e-2},
        "per_group": {"start_lr": 1e-4},
    }[sys.argv[1]]
    dist.init_process_group("gloo")
    model, sharded_model = build_model(), build_model()
    fully_shard(sharded_model)
    optimizer = Automagic(model.parameters(), weight_decay=0.1, **settings)
    sharded_optimizer = Automagic(sharded_model.parameters(), weight_decay=0.1, **settings)
    train(model, optimizer, 0, 1)
    train(sharded_model, sharded_optimizer, dist.get_rank(), dist.get_world_size())
    for p, sharded_p in zip(model.parameters(), sharded_model.parameters(), strict=True):
        assert local_shard(sharded_p).numel() < p.numel(), "nothing was sharded"
        torch.testing.assert_close(sharded_p.full_tensor(), p, rtol=1e-4, atol=1e-6)
        rate = sharded_optimizer.state[sharded_p]["rate"]
        rate = rate.full_tensor() if rate.ndim else rate
        torch.testing.assert_close(rate, optimizer.state[p]["rate"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(
        sharded_optimizer.mean_lr(), optimizer.mean_lr(), rtol=1e-4, atol=1e-7
    )
    counts, expected = (o.lr_histogram(-9, 0, 9)[""] for o in (sharded_optimizer, optimizer))
    assert torch.equal(counts, expected), (counts, expected)
    dist.barrier()  # a rank that leaves early would close the other's connection
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
