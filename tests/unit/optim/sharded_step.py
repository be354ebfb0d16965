"""Two ranks, parameters in shards by torch's own fully_shard: run by test_automagic_sharded."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gracetune.optim.automagic import Automagic, local_shard


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def train(net, optimizer, rank, world):
    """The whole batch, or this rank's half of it: the gradient's mean is the same."""
    for step in range(12):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(world)[rank]
        loss = (net(mine) - mine[:, :3].cos()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    settings = {"bump": {"lr_bump": 1e-3, "max_lr": 1e-2}, "found": {"start_lr": 1e-4}}[sys.argv[1]]
    dist.init_process_group("gloo")
    whole, shards = model(), model()
    fully_shard(shards)
    ours = Automagic(whole.parameters(), weight_decay=0.1, **settings)
    theirs = Automagic(shards.parameters(), weight_decay=0.1, **settings)
    train(whole, ours, 0, 1)
    train(shards, theirs, dist.get_rank(), dist.get_world_size())
    for one, other in zip(whole.parameters(), shards.parameters(), strict=True):
        assert local_shard(other).numel() < one.numel(), "nothing was sharded"
        torch.testing.assert_close(other.full_tensor(), one, rtol=1e-4, atol=1e-6)
        rate = theirs.state[other]["rate"]
        rate = rate.full_tensor() if rate.ndim else rate
        torch.testing.assert_close(rate, ours.state[one]["rate"], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(theirs.mean_lr(), ours.mean_lr(), rtol=1e-4, atol=1e-7)
    counts, expected = (o.lr_histogram(-9, 0, 9)[""] for o in (theirs, ours))
    assert torch.equal(counts, expected), (counts, expected)
    dist.barrier()  # who leaves first takes the connection along
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
