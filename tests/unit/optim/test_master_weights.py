"""bf16 weights with fp32 master weights train like fp32 weights, wherever the state lives."""

import pytest
import torch

from gracetune.config.schema import OptimizerSection
from gracetune.offload.copy_engine import SynchronousCopyEngine
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import (
    build_optimizer,
    state_nbytes_per_element,
    state_nbytes_per_element_of,
)
from gracetune.optim.master_weights import MASTER, MasterWeights
from gracetune.optim.offloaded_state import OptimizerStepper, StateOffloadSettings
from gracetune.optim.registry import OPTIMIZERS
from gracetune.optim.schedule import set_lr
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

SHAPES = {"high.a": (16, 8), "high.b": (8,), "low.a": (24, 8), "low.b": (40,)}
NAMES = sorted(name for name, info in OPTIMIZERS.items() if info.state_can_be_split)


def build_parameters(dtype, fp32_names=()):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(
            torch.randn(shape, generator=generator)
            .bfloat16()
            .to(torch.float32 if name in fp32_names else dtype)
        )
        for name, shape in SHAPES.items()
    }


class Training:
    def __init__(self, name, dtype, host_share=0.0, fp32_names=()):
        self.named = build_parameters(dtype, fp32_names)
        section = OptimizerSection(name=name, lr=1e-3, weight_decay=0.1)
        self.optimizer = build_optimizer(self.named, section)
        settings = StateOffloadSettings(bucket_numel=130, min_nbytes=48, poison=True)
        self.stepper = OptimizerStepper(self.optimizer, SynchronousCopyEngine(), 12.0, settings)
        self.stepper.set_host_share(host_share)

    def train(self, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in self.named.values():
                grad = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = grad.to(p.dtype)
            set_lr(self.optimizer, 1 / (1 + seed))
            self.stepper.step()

    def tensors(self):
        self.stepper.synchronize()
        state = flatten_optimizer_state(self.optimizer, self.named)
        weights = {name: p.detach() for name, p in self.named.items()}
        return {key: tensor.clone() for key, tensor in {**weights, **state}.items()}


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    for key in result:
        assert result[key].dtype == expected[key].dtype, key
        assert torch.equal(result[key], expected[key]), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_master_weights_train_exactly_like_fp32_weights(name, share):
    fp32, bf16 = Training(name, torch.float32), Training(name, torch.bfloat16, share)
    for training in (fp32, bf16):
        training.train(range(6))
    expected, found = fp32.tensors(), bf16.tensors()
    for key in SHAPES:
        assert torch.equal(found.pop(f"{key}|{MASTER}"), expected[key]), key
        assert torch.equal(found.pop(key), expected.pop(key).bfloat16()), key
    assert_same(found, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_master_weights_are_saved_and_restored(name, before, after):
    training = Training(name, torch.bfloat16, before)
    training.train(range(3))
    saved = training.tensors()
    training.train(range(3, 6))
    resumed = Training(name, torch.bfloat16, after)
    for key, p in resumed.named.items():
        p.data.copy_(saved.pop(key))
    restore_optimizer(resumed.optimizer, resumed.named, saved, resumed.stepper.load_state_dict)
    resumed.train(range(3, 6))
    assert_same(training.tensors(), resumed.tensors())


def test_steps_below_bf16_precision_add_up():
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = build_optimizer({"p": p}, OptimizerSection(lr=1e-4, weight_decay=0))
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(0.99, abs=2e-3)


def test_fp32_weights_have_no_master():
    training = Training("adamw", torch.bfloat16, host_share=1.0, fp32_names=("low.a",))
    training.train(range(3))
    with_masters = {
        key.partition("|")[0] for key in training.tensors() if key.endswith(f"|{MASTER}")
    }
    assert with_masters == SHAPES.keys() - {"low.a"}


def test_placeholders_take_no_memory():
    p = torch.nn.Parameter(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    optimizer = build_optimizer({"p": p}, OptimizerSection())
    assert isinstance(optimizer, MasterWeights)
    (placeholder,) = optimizer._inner.param_groups[0]["params"]
    assert (placeholder.shape, placeholder.untyped_storage().nbytes()) == (p.shape, 4)
    p.grad = torch.ones_like(p)
    assert optimizer.step(lambda: 0.5) == 0.5
    assert optimizer._inner.param_groups[0]["params"] == []


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gradients_are_converted_to_fp32_one_bucket_at_a_time(share, monkeypatch):
    training = Training("adamw", torch.bfloat16, share)
    training.train([0])
    stepped_numels = []
    inner = training.optimizer._inner
    step = inner.step

    def watched_step():
        stepped_numels.append(
            sum(p.numel() for group in inner.param_groups for p in group["params"])
        )
        step()

    monkeypatch.setattr(inner, "step", watched_step)
    training.train([1])
    assert sorted(stepped_numels) == sorted(bucket.numel for bucket in training.stepper._buckets)


def test_master_weights_count_as_state():
    for name, nbytes in (("adamw", 8), ("lion", 4)):
        section = OptimizerSection(name=name)
        assert state_nbytes_per_element(section) == pytest.approx(nbytes, abs=0.01)
        assert state_nbytes_per_element(section, torch.bfloat16) == pytest.approx(
            nbytes + 4, abs=0.01
        )
        mixed = [torch.zeros(9, dtype=torch.bfloat16), torch.zeros(2)]
        assert state_nbytes_per_element_of(section, mixed) == state_nbytes_per_element(
            section, torch.bfloat16
        )


def test_automagic_gets_no_master_weights():
    assert isinstance(
        build_optimizer(build_parameters(torch.bfloat16), OptimizerSection(name="automagic")),
        Automagic,
    )
