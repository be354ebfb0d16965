"""bf16 weights with masters in fp32: the masters train as fp32 weights do, wherever they live."""

import random

import pytest
import torch
from late_mover import LateMover

from gracetune.config.schema import OptimizerSection
from gracetune.optim.automagic import Automagic
from gracetune.optim.build import build_optimizer, state_nbytes_per_element_of, state_nbytes_per_element
from gracetune.optim.master_weights import MASTER, MasterWeights
from gracetune.optim.registry import OPTIMIZERS
from gracetune.optim.schedule import set_lr
from gracetune.optim.offloaded_state import StateOffloadSettings, OptimizerStepper
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

SHAPES = {"high.a": (16, 8), "high.b": (8,), "low.a": (24, 8), "low.b": (40,)}
NAMES = sorted(name for name, info in OPTIMIZERS.items() if info.state_can_be_split)


def parameters(dtype, wide=()):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(
            torch.randn(shape, generator=generator)
            .bfloat16()
            .to(torch.float32 if name in wide else dtype)
        )
        for name, shape in SHAPES.items()
    }


class Case:
    def __init__(self, name, dtype, share=0.0, wide=()):
        self.named = parameters(dtype, wide)
        section = OptimizerSection(name=name, lr=1e-3, weight_decay=0.1)
        self.optimizer = build_optimizer(self.named, section)
        travel = StateOffloadSettings(bucket_numel=130, min_nbytes=48, poison=True)
        self.update = OptimizerStepper(self.optimizer, LateMover(random.Random(0)), 12.0, travel)
        self.update.set_host_share(share)

    def train(self, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in self.named.values():
                grad = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = grad.to(p.dtype)
            set_lr(self.optimizer, 1 / (1 + seed))
            self.update.step()

    def tensors(self):
        self.update.synchronize()
        found = flatten_optimizer_state(self.optimizer, self.named)
        weights = {name: p.detach() for name, p in self.named.items()}
        return {key: tensor.clone() for key, tensor in {**weights, **found}.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_masters_train_as_fp32_weights_do(name, share):
    wide, narrow = Case(name, torch.float32), Case(name, torch.bfloat16, share)
    for case in (wide, narrow):
        case.train(range(6))
    expected, found = wide.tensors(), narrow.tensors()
    for key in SHAPES:
        assert torch.equal(found.pop(f"{key}|{MASTER}"), expected[key]), key
        assert torch.equal(found.pop(key), expected.pop(key).bfloat16()), key
    assert_same(found, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.3)])
def test_masters_are_in_a_checkpoint(name, before, after):
    case = Case(name, torch.bfloat16, before)
    case.train(range(3))
    saved = case.tensors()
    case.train(range(3, 6))
    again = Case(name, torch.bfloat16, after)
    for key, p in again.named.items():
        p.data.copy_(saved.pop(key))
    restore_optimizer(again.optimizer, again.named, saved, again.update.load_state_dict)
    again.train(range(3, 6))
    assert_same(case.tensors(), again.tensors())


def test_steps_smaller_than_bf16_can_tell_add_up():
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = build_optimizer({"p": p}, OptimizerSection(lr=1e-4, weight_decay=0))
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(0.99, abs=2e-3)


def test_weights_that_are_wide_have_no_master():
    case = Case("adamw", torch.bfloat16, share=1.0, wide=("low.a",))
    case.train(range(3))
    with_masters = {key.partition("|")[0] for key in case.tensors() if key.endswith(f"|{MASTER}")}
    assert with_masters == SHAPES.keys() - {"low.a"}


def test_stand_ins_take_no_memory():
    p = torch.nn.Parameter(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    optimizer = build_optimizer({"p": p}, OptimizerSection())
    assert isinstance(optimizer, MasterWeights)
    (stand_in,) = optimizer._rule.param_groups[0]["params"]
    assert (stand_in.shape, stand_in.untyped_storage().nbytes()) == (p.shape, 4)
    p.grad = torch.ones_like(p)
    assert optimizer.step(lambda: 0.5) == 0.5
    assert optimizer._rule.param_groups[0]["params"] == []


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_gradients_are_widened_bucket_by_bucket(share, monkeypatch):
    case = Case("adamw", torch.bfloat16, share)
    case.train([0])
    seen = []
    rule = case.optimizer._rule
    step = rule.step

    def watched():
        seen.append(sum(p.numel() for group in rule.param_groups for p in group["params"]))
        step()

    monkeypatch.setattr(rule, "step", watched)
    case.train([1])
    assert sorted(seen) == sorted(bucket.numel for bucket in case.update._buckets)


def test_what_a_master_adds_is_counted():
    for name, each in (("adamw", 8), ("lion", 4)):
        section = OptimizerSection(name=name)
        assert state_nbytes_per_element(section) == pytest.approx(each, abs=0.01)
        assert state_nbytes_per_element(section, torch.bfloat16) == pytest.approx(each + 4, abs=0.01)
        mixed = [torch.zeros(9, dtype=torch.bfloat16), torch.zeros(2)]
        assert state_nbytes_per_element_of(section, mixed) == state_nbytes_per_element(section, torch.bfloat16)


def test_automagic_rounds_by_itself():
    assert isinstance(
        build_optimizer(parameters(torch.bfloat16), OptimizerSection(name="automagic")), Automagic
    )
