"""Divide a small model among three ranks, and compare it with a plain copy of it.

Started by test_sharding.py. The model has tensors of fewer rows than ranks, so that some ranks
store nothing of them, and of rows that three does not divide.
"""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gracetune.config.schema import DistributedSection, OptimizerSection
from gracetune.distributed.layout import build_layout
from gracetune.distributed.ranks import connect_ranks
from gracetune.distributed.sharding import ShardedReducer, shard_model
from gracetune.errors import ModelError, RunFailedError
from gracetune.offload.checkpointing import wrap_blocks
from gracetune.optim.build import build_optimizer

CPU = torch.device("cpu")


class Model(nn.Module):
    """Blocks, and layers before and after them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)
        )
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def build(**settings):
    torch.manual_seed(0)
    plain = Model()
    divided = deepcopy(plain)
    section = DistributedSection(strategy="fsdp2", **settings)
    layout = build_layout(section, connect_ranks(60))
    return plain, divided, layout, section


def loss_of(model, seed):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return model(x).square().sum()


def backward(plain, divided, reducer, rank, world_size):
    """Let each rank compute a batch of its own, and one process the batches of all."""
    for seed in range(world_size):
        loss_of(plain, seed).backward()
    reducer.begin([])
    with reducer.overlapped():
        loss_of(divided, rank).backward()
    reducer.finish()


def check_training(name, **settings):
    """The parts of three ranks are trained like whole tensors, with this optimizer."""
    plain, divided, layout, section = build()
    sharded = shard_model(
        {"": divided}, list(divided.blocks), layout, section, CPU, print, torch.float32
    )
    reducer = ShardedReducer(sharded, CPU)
    options = OptimizerSection(name=name, **settings)
    whole = dict(plain.named_parameters())
    optimizers = (
        build_optimizer(whole, options),
        build_optimizer(sharded.local, options, 0, sharded),
    )
    for _ in range(3):
        backward(plain, divided, reducer, layout.ranks.rank, layout.ranks.world_size)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, parameter in whole.items():
        torch.testing.assert_close(sharded.full_tensor(key), parameter.detach())


def check_shards():
    plain, divided, layout, section = build()
    sharded = shard_model({"": divided}, list(divided.blocks), layout, section, CPU, print)
    rank = layout.ranks.rank
    assert [sharded.shard_of("last.weight").length, *sharded.local["last.weight"].shape] == (
        [1, 1, 5] if rank == 0 else [0, 0, 5]
    )
    shard = sharded.shard_of("blocks.1.0.weight")
    assert (shard.shape, shard.offset, shard.length) == ((7, 5), 3 * rank, (3, 3, 1)[rank])
    assert sharded.num_trained == sum(p.numel() for p in plain.parameters())
    for key, parameter in plain.named_parameters():
        assert torch.equal(sharded.full_tensor(key), parameter)
        assert sharded.numel(sharded.local[key]) == parameter.numel()


def check_gradients_and_norm():
    plain, divided, layout, section = build(prefetch_blocks=2, cpu_offload=True)
    sharded = shard_model({"": divided}, list(divided.blocks), layout, section, CPU, print)
    reducer = ShardedReducer(sharded, CPU)
    backward(plain, divided, reducer, layout.ranks.rank, layout.ranks.world_size)
    gradients = [p.grad for p in plain.parameters()]
    for (key, part), gradient in zip(sharded.local.items(), gradients, strict=True):
        torch.testing.assert_close(sharded.full_tensor(key, part.grad), gradient)
    found = reducer.total_norm([p.grad for p in sharded.local.values()])
    torch.testing.assert_close(found, nn.utils.get_total_norm(gradients))
    assert [reducer.num_passes(count) for count in (3, 4, 6)] == [1, 2, 2]


def check_changed_weights_are_gathered_again():
    """A pass without backward leaves weights gathered, which then would be old."""
    plain, divided, layout, section = build(reshard_after_forward=False)
    sharded = shard_model({"": divided}, list(divided.blocks), layout, section, CPU, print)
    with torch.no_grad():
        before = loss_of(divided, 0)
        for parameter in (*sharded.local.values(), *plain.parameters()):
            parameter.mul_(2)
        assert torch.equal(loss_of(divided, 0), before), "no weights were kept"
        sharded.free_gathered()
        torch.testing.assert_close(loss_of(divided, 0), loss_of(plain, 0))


def check_dtypes():
    """A unit has one dtype; weights may be gathered in another one."""
    _, divided, layout, section = build()
    divided.blocks.to(torch.bfloat16)
    divided.blocks[1][0].bias.data = divided.blocks[1][0].bias.float()
    notices = []
    sharded = shard_model({"": divided}, list(divided.blocks), layout, section, CPU, notices.append)
    assert [notice.text.split()[0] for notice in notices] == ["1"]
    dtypes = {name: p.dtype for name, p in sharded.local.items()}
    assert dtypes["blocks.1.0.bias"] == torch.bfloat16
    assert dtypes["first.bias"] == torch.float32

    _, divided, layout, section = build()
    seen = []
    for layer in (divided.first, divided.blocks[0][0]):
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))
    blocks = list(divided.blocks)
    types = torch.float32, torch.bfloat16
    sharded = shard_model({"": divided}, blocks, layout, section, CPU, print, *types)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(divided, 0).backward()
    sharded.collect_gradients()
    assert seen == [torch.float32, torch.bfloat16]
    assert {p.grad.dtype for p in sharded.local.values()} == {torch.float32}


def check_checkpointing():
    """Blocks may recompute their activations inside of the unit that gathers their weights."""
    plain, divided, layout, section = build()
    blocks = list(divided.blocks)
    sharded = shard_model({"": divided}, blocks, layout, section, CPU, print)
    wrap_blocks(blocks, ["keep", "lean", "recompute"], None)
    reducer = ShardedReducer(sharded, CPU)
    backward(plain, divided, reducer, layout.ranks.rank, layout.ranks.world_size)
    for key, parameter in plain.named_parameters():
        found = sharded.full_tensor(key, sharded.local[key].grad)
        torch.testing.assert_close(found, parameter.grad)


def check_errors():
    _, divided, layout, section = build()
    sharded = shard_model({"": divided}, list(divided.blocks), layout, section, CPU, print)
    with pytest.raises(RunFailedError, match=rf"rank {layout.ranks.rank} on .* \(no space\)"):
        ShardedReducer(sharded, CPU).abandon("no space")
    model = Model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ModelError, match="scale is a single number"):
        shard_model({"": model}, list(model.blocks), layout, section, CPU, print)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_shards()
    check_gradients_and_norm()
    check_changed_weights_are_gathered_again()
    check_dtypes()
    check_checkpointing()
    check_errors()
    check_training("adamw", lr=1e-2)
    check_training("automagic")
    check_training("automagic", lr_bump=1e-3)
    dist.barrier()  # a rank that leaves early would close the others' connections
    dist.destroy_process_group()
