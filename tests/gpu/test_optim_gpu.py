"""Optimizers on a GPU: the same numbers as on a CPU, bf16 rounded there, and no step that waits.

State in host memory: the same bits as on the device, whoever is slow, in less device memory.
"""

import random

import pytest
import torch
from waiting import never_waiting

from gracetune.config.schema import OptimizerSection
from gracetune.offload.copies import CopyStream, CudaCopyEngine
from gracetune.optim.automagic import Automagic, stochastic_round_
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import StateOffloadSettings, OptimizerStepper
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

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
    with never_waiting():
        optimizer.step()
        optimizer.mean_lr()


def test_weights_in_bf16_are_rounded_on_the_device():
    source = torch.full((200_000,), 1.001, device=DEVICE)
    target = torch.empty_like(source, dtype=torch.bfloat16)
    stochastic_round_(target, source, (0, 0, 1))
    assert target.double().mean().item() == pytest.approx(1.001, abs=1e-4)
    again = torch.empty_like(target)
    stochastic_round_(again, source, (0, 0, 1))
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
    saved = {key: t.cpu().clone() for key, t in flatten_optimizer_state(optimizer, ours).items()}
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


SMALL = StateOffloadSettings(bucket_numel=20_000, min_nbytes=256, poison=True)


class SlowLink(CudaCopyEngine):
    """Copies that take at random no time or far longer than an update."""

    def __init__(self, seed):
        super().__init__(DEVICE, pin=True)
        self.dice = random.Random(seed)

    def copy(self, target, source, poison, lane=CopyStream.WEIGHTS):
        with torch.cuda.stream(self._streams[lane]):
            torch.cuda._sleep(self.dice.choice([0, 0, 1_000_000]))
        return super().copy(target, source, poison, lane)


def wide_parameters(numel=16_000, count=9, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(numel // 125, 125) if index % 3 else (numel,) for index in range(count)]
    return {
        f"p{index}": torch.nn.Parameter(
            torch.randn(shape, generator=generator, device=DEVICE).bfloat16().to(dtype)
        )
        for index, shape in enumerate(shapes)
    }


def give_on_device(named, seed, without=()):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for name, p in named.items():
        grad = torch.randn(p.shape, generator=generator, device=DEVICE).bfloat16()
        p.grad = None if name in without else grad.to(p.dtype)


def made(name, share, mover, travel=SMALL, **sizes):
    named = wide_parameters(**sizes)
    optimizer = build_optimizer(named, OptimizerSection(name=name, lr=1e-2, weight_decay=0.1))
    update = OptimizerStepper(optimizer, mover, 8.0, travel)
    update.set_host_share(share)
    return named, optimizer, update


def everything(named, optimizer, update):
    update.rest()
    state = {key: t.cpu().clone() for key, t in flatten_optimizer_state(optimizer, named).items()}
    return {**{name: p.detach().cpu() for name, p in named.items()}, **state}


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion"])
def test_state_in_host_memory_gives_the_same_bits(name, share):
    if name == "lion":
        pytest.importorskip("lion_pytorch")
    ended = []
    for where in (0.0, share):
        case = made(name, where, SlowLink(seed=1))
        for seed in range(12):
            give_on_device(case[0], seed, without=("p4",) if seed < 5 else ())
            case[2].step()
        ended.append(everything(*case))
    assert ended[0].keys() == ended[1].keys()
    for key, value in ended[0].items():
        assert torch.equal(value, ended[1][key]), key


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_masters_of_bf16_weights_train_as_fp32_weights_do(share):
    wide = made("adamw", 0.0, SlowLink(seed=4))
    narrow = made("adamw", share, SlowLink(seed=5), dtype=torch.bfloat16)
    for seed in range(8):
        for named, _, update in (wide, narrow):
            give_on_device(named, seed)
            update.step()
    expected, found = everything(*wide), everything(*narrow)
    for name in wide[0]:
        assert torch.equal(found[f"{name}|master"], expected[name]), name
        assert torch.equal(found[name], expected[name].bfloat16()), name
        assert torch.equal(found[f"{name}|exp_avg"], expected[f"{name}|exp_avg"]), name


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_state_moves_with_a_checkpoint(before, after):
    whole = made("adamw", before, SlowLink(seed=2))
    for seed in range(4):
        give_on_device(whole[0], seed)
        whole[2].step()
    saved = everything(*whole)
    named, optimizer, update = made("adamw", after, SlowLink(seed=3))
    for name, p in named.items():
        p.data.copy_(saved.pop(name))
    restore_optimizer(optimizer, named, saved, update.load_state_dict)
    for seed in range(4, 8):
        for parameters_, each in ((whole[0], whole[2]), (named, update)):
            give_on_device(parameters_, seed)
            each.step()
    expected, found = everything(*whole), everything(named, optimizer, update)
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_its_state_in_host_memory_waits_for_nothing(dtype):
    named, _, update = made("adamw", 1.0, CudaCopyEngine(DEVICE, pin=True), dtype=dtype)
    for seed in range(3):
        give_on_device(named, seed)
        update.step()
    give_on_device(named, 3)
    with never_waiting():
        update.step()


def test_state_in_host_memory_leaves_the_device_to_others():
    """Also while it is made, saved and loaded: 256 MiB of state through slots of 48 MiB in all."""
    travel = StateOffloadSettings(bucket_numel=2_000_000)
    named, optimizer, update = made(
        "adamw", 1.0, CudaCopyEngine(DEVICE, pin=True), travel, numel=2_000_000, count=16
    )
    give_on_device(named, 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        update.step()
    update.synchronize()
    saved = {key: t.cpu().clone() for key, t in flatten_optimizer_state(optimizer, named).items()}
    restore_optimizer(optimizer, named, saved, update.load_state_dict)
    update.step()
    torch.cuda.synchronize()
    assert update.host_nbytes >= 16 * 16_000_000
    assert torch.cuda.max_memory_allocated() - before < 4 * 16_500_000
    update.close()


def test_a_full_device_is_found_out_before_anything_changes():
    named, _, update = made(
        "adamw", 0.0, CudaCopyEngine(DEVICE, pin=True), numel=2_000_000, count=8
    )
    give_on_device(named, 0)
    kept = {name: p.detach().clone() for name, p in named.items()}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 40_000_000) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            update.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(p, kept[name]) for name, p in named.items())
    update.step()
    assert all(not torch.equal(p, kept[name]) for name, p in named.items())
