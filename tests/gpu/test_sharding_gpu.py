"""Divided weights on a GPU: gathered in bf16, with their parts in device or host memory.

NCCL refuses two ranks on one GPU, so that a single rank stores all rows. It gathers, reduces and
offloads them as several ranks do.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gracetune.config.schema import DistributedSection
from gracetune.distributed.layout import SINGLE_LAYOUT
from gracetune.distributed.sharding import ShardedReducer, shard_model
from gracetune.train.step import scale_and_clip_gradients

pytestmark = pytest.mark.gpu
WIDTH, DEPTH = 256, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def _one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_divided_weights_are_trained_like_whole_ones(offload, dtype):
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    plain, divided = Model(), Model()
    divided.load_state_dict(plain.state_dict())
    plain.to(device)
    section = DistributedSection(strategy="fsdp2", cpu_offload=offload, prefetch_blocks=2)
    blocks = list(divided.blocks)
    sharded = shard_model(
        {"": divided}, blocks, SINGLE_LAYOUT, section, device, print, torch.float32, dtype
    )
    assert {p.device.type for p in sharded.local.values()} == {"cpu" if offload else "cuda"}
    reducer = ShardedReducer(sharded, device)
    models = [(plain, list(plain.parameters())), (divided, list(sharded.local.values()))]
    optimizers = [torch.optim.AdamW(ps, lr=1e-3, eps=1e-2, fused=True) for _, ps in models]
    for step in range(4):
        norms = []
        for (model, parameters), optimizer in zip(models, optimizers, strict=True):
            is_divided = model is divided
            if is_divided:
                reducer.begin([])
            for part in range(2):  # two micro-batches
                generator = torch.Generator(device).manual_seed(2 * step + part)
                x = torch.randn(64, WIDTH, device=device, generator=generator)
                with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not None):
                    loss = model(x).float().square().sum()
                loss.backward()
            norm = nn.utils.get_total_norm
            if is_divided:
                reducer.finish()
                norm = reducer.total_norm
            scale = torch.tensor(1 / 128, device=device)
            norms.append(float(scale_and_clip_gradients(parameters, scale, 1.0, norm)))
            optimizer.step()
            optimizer.zero_grad()
        assert norms[1] == pytest.approx(norms[0], rel=1e-5 if dtype is None else 1e-2)
    limit = 1e-6 if dtype is None else 1e-3
    for name, parameter in plain.named_parameters():
        whole = sharded.full_tensor(name)
        assert float((whole - parameter.detach()).abs().max()) < limit, name
