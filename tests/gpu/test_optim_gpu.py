"""Optimizers on a GPU: the same numbers as on a CPU, bf16 rounded there, and no step that waits."""

import pytest
import torch

from gracetune.config.schema import OptimizerSection
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import build_optimizer
from gracetune.optim.rounding import round_into
from gracetune.train.state import optimizer_tensors, restore_optimizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (64, 32), "b": (32,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for name, shape in shapes.items()
    }


def give(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p)


@pytest.mark.parametrize("settings", [{"lr_bump": 1e-4}, {}])
def test_a_gpu_trains_as_a_cpu_does(settings):
    ended = []
    for device in ("cpu", DEVICE):
        named = parameters(device)
        optimizer = Automagic(list(named.items()), weight_decay=0.1, **settings)
        for seed in range(20):
            give(named, seed)
            optimizer.step()
        ended.append([p.detach().cpu() for p in named.values()])
    torch.testing.assert_close(*ended, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"lr_bump": 1e-4}, {}])
def test_no_step_waits_for_the_device(dtype, settings):
    named = parameters(DEVICE, dtype)
    optimizer = Automagic(list(named.items()), weight_decay=0.1, **settings)
    give(named, 0)
    optimizer.step()
    give(named, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.mean_rate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weights_in_bf16_are_rounded_on_the_device():
    source = torch.full((200_000,), 1.001, device=DEVICE)
    target = torch.empty_like(source, dtype=torch.bfloat16)
    round_into(target, source, (0, 0, 1))
    assert target.double().mean().item() == pytest.approx(1.001, abs=1e-4)
    again = torch.empty_like(target)
    round_into(again, source, (0, 0, 1))
    assert torch.equal(again, target)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "automagic", "muon", "adafactor"])
def test_state_comes_back_exactly(name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    section = OptimizerSection(name=name)
    ours = parameters(DEVICE)
    optimizer = build_optimizer(ours, section)
    for seed in range(4):
        give(ours, seed)
        optimizer.step()
    saved = {key: t.cpu().clone() for key, t in optimizer_tensors(optimizer, ours).items()}
    theirs = parameters(DEVICE)
    for key, p in theirs.items():
        p.data.copy_(ours[key].data)
    fresh = build_optimizer(theirs, section)
    restore_optimizer(fresh, theirs, saved)
    for seed in range(4, 8):
        for named, each in ((ours, optimizer), (theirs, fresh)):
            give(named, seed)
            each.step()
    for key, p in ours.items():
        assert torch.equal(p, theirs[key])
