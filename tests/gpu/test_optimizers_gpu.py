"""Optimizers on a GPU: same results as on the CPU, no host syncs, and state in host memory."""

import random

import pytest
import torch
from sync_checks import forbid_host_syncs

from gracetune.config.schema import OptimizerSection
from gracetune.offload.copy_engine import CopyStream, CudaCopyEngine
from gracetune.optim.automagic import Automagic, stochastic_round_
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import OptimizerStepper, StateOffloadSettings
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def build_parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (64, 32), "b": (32,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for name, shape in shapes.items()
    }


def set_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator).to(p)


@pytest.mark.parametrize("settings", [{"lr_bump": 1e-4}, {}])
def test_automagic_trains_on_the_gpu_as_on_the_cpu(settings):
    results = []
    for device in ("cpu", DEVICE):
        named = build_parameters(device)
        optimizer = Automagic(list(named.items()), weight_decay=0.1, **settings)
        for seed in range(20):
            set_gradients(named, seed)
            optimizer.step()
        results.append([p.detach().cpu() for p in named.values()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"lr_bump": 1e-4}, {}])
def test_a_step_of_automagic_has_no_host_syncs(dtype, settings):
    named = build_parameters(DEVICE, dtype)
    optimizer = Automagic(list(named.items()), weight_decay=0.1, **settings)
    set_gradients(named, 0)
    optimizer.step()
    set_gradients(named, 1)
    with forbid_host_syncs():
        optimizer.step()
        optimizer.mean_lr()


def test_bf16_weights_are_rounded_stochastically_on_the_gpu():
    source = torch.full((200_000,), 1.001, device=DEVICE)
    target = torch.empty_like(source, dtype=torch.bfloat16)
    stochastic_round_(target, source, (0, 0, 1))
    assert target.double().mean().item() == pytest.approx(1.001, abs=1e-4)
    repeated = torch.empty_like(target)
    stochastic_round_(repeated, source, (0, 0, 1))
    assert torch.equal(repeated, target)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "automagic", "muon", "adafactor"])
def test_restored_state_continues_exactly(name):
    if name == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    section = OptimizerSection(name=name)
    params = build_parameters(DEVICE)
    optimizer = build_optimizer(params, section)
    for seed in range(4):
        set_gradients(params, seed)
        optimizer.step()
    saved = {key: t.cpu().clone() for key, t in flatten_optimizer_state(optimizer, params).items()}
    restored_params = build_parameters(DEVICE)
    for key, p in restored_params.items():
        p.data.copy_(params[key].data)
    restored = build_optimizer(restored_params, section)
    restore_optimizer(restored, restored_params, saved)
    for seed in range(4, 8):
        for named, each in ((params, optimizer), (restored_params, restored)):
            set_gradients(named, seed)
            each.step()
    for key, p in params.items():
        assert torch.equal(p, restored_params[key])


SETTINGS = StateOffloadSettings(bucket_numel=20_000, min_nbytes=256, poison=True)


class SlowCopyEngine(CudaCopyEngine):
    """Delays copies at random, by nothing or by far more than a step takes."""

    def __init__(self, seed):
        super().__init__(DEVICE, pin=True)
        self.rng = random.Random(seed)

    def copy(self, target, source, poison, stream=CopyStream.WEIGHTS):
        with torch.cuda.stream(self._streams[stream]):
            torch.cuda._sleep(self.rng.choice([0, 0, 1_000_000]))
        return super().copy(target, source, poison, stream)


def wide_parameters(numel=16_000, count=9, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(numel // 125, 125) if index % 3 else (numel,) for index in range(count)]
    return {
        f"p{index}": torch.nn.Parameter(
            torch.randn(shape, generator=generator, device=DEVICE).bfloat16().to(dtype)
        )
        for index, shape in enumerate(shapes)
    }


def set_gradients_on_device(named, seed, without=()):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for name, p in named.items():
        grad = torch.randn(p.shape, generator=generator, device=DEVICE).bfloat16()
        p.grad = None if name in without else grad.to(p.dtype)


def build_stepper(name, host_share, copy_engine, settings=SETTINGS, **sizes):
    named = wide_parameters(**sizes)
    optimizer = build_optimizer(named, OptimizerSection(name=name, lr=1e-2, weight_decay=0.1))
    stepper = OptimizerStepper(optimizer, copy_engine, 8.0, settings)
    stepper.set_host_share(host_share)
    return named, optimizer, stepper


def all_tensors(named, optimizer, stepper):
    stepper.synchronize()
    state = {key: t.cpu().clone() for key, t in flatten_optimizer_state(optimizer, named).items()}
    return {**{name: p.detach().cpu() for name, p in named.items()}, **state}


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion"])
def test_state_in_host_memory_gives_the_same_results(name, share):
    if name == "lion":
        pytest.importorskip("lion_pytorch")
    results = []
    for where in (0.0, share):
        training = build_stepper(name, where, SlowCopyEngine(seed=1))
        for seed in range(12):
            set_gradients_on_device(training[0], seed, without=("p4",) if seed < 5 else ())
            training[2].step()
        results.append(all_tensors(*training))
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_master_weights_train_like_fp32_weights_on_the_gpu(share):
    fp32 = build_stepper("adamw", 0.0, SlowCopyEngine(seed=4))
    bf16 = build_stepper("adamw", share, SlowCopyEngine(seed=5), dtype=torch.bfloat16)
    for seed in range(8):
        for named, _, stepper in (fp32, bf16):
            set_gradients_on_device(named, seed)
            stepper.step()
    expected, found = all_tensors(*fp32), all_tensors(*bf16)
    for name in fp32[0]:
        assert torch.equal(found[f"{name}|master"], expected[name]), name
        assert torch.equal(found[name], expected[name].bfloat16()), name
        assert torch.equal(found[f"{name}|exp_avg"], expected[f"{name}|exp_avg"]), name


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_a_checkpoint_may_move_the_state(before, after):
    uninterrupted = build_stepper("adamw", before, SlowCopyEngine(seed=2))
    for seed in range(4):
        set_gradients_on_device(uninterrupted[0], seed)
        uninterrupted[2].step()
    saved = all_tensors(*uninterrupted)
    named, optimizer, stepper = build_stepper("adamw", after, SlowCopyEngine(seed=3))
    for name, p in named.items():
        p.data.copy_(saved.pop(name))
    restore_optimizer(optimizer, named, saved, stepper.load_state_dict)
    for seed in range(4, 8):
        for params, each in ((uninterrupted[0], uninterrupted[2]), (named, stepper)):
            set_gradients_on_device(params, seed)
            each.step()
    expected, found = all_tensors(*uninterrupted), all_tensors(named, optimizer, stepper)
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_state_in_host_memory_has_no_host_syncs(dtype):
    named, _, stepper = build_stepper("adamw", 1.0, CudaCopyEngine(DEVICE, pin=True), dtype=dtype)
    for seed in range(3):
        set_gradients_on_device(named, seed)
        stepper.step()
    set_gradients_on_device(named, 3)
    with forbid_host_syncs():
        stepper.step()


def test_state_in_host_memory_uses_only_the_slots_on_the_device():
    """Also while it is created, saved and loaded: 256 MiB of state through 48 MiB of slots."""
    settings = StateOffloadSettings(bucket_numel=2_000_000)
    named, optimizer, stepper = build_stepper(
        "adamw", 1.0, CudaCopyEngine(DEVICE, pin=True), settings, numel=2_000_000, count=16
    )
    set_gradients_on_device(named, 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        stepper.step()
    stepper.synchronize()
    saved = {key: t.cpu().clone() for key, t in flatten_optimizer_state(optimizer, named).items()}
    restore_optimizer(optimizer, named, saved, stepper.load_state_dict)
    stepper.step()
    torch.cuda.synchronize()
    assert stepper.host_nbytes >= 16 * 16_000_000
    assert torch.cuda.max_memory_allocated() - before < 4 * 16_500_000
    stepper.close()


def test_running_out_of_memory_changes_no_weight():
    named, _, stepper = build_stepper(
        "adamw", 0.0, CudaCopyEngine(DEVICE, pin=True), numel=2_000_000, count=8
    )
    set_gradients_on_device(named, 0)
    before = {name: p.detach().clone() for name, p in named.items()}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 40_000_000) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            stepper.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    stepper.step()
    assert all(not torch.equal(p, before[name]) for name, p in named.items())
