"""State in host memory: the same bits as on the device, whatever moves when, and wherever to."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_mover import LateMover

from gracetune.config.schema import OptimizerSection
from gracetune.errors import RunFailedError
from gracetune.offload.copies import CopyStream, SynchronousCopyEngine
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import StateOffloadSettings, OptimizerStepper
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

SHAPES = {"a": (16, 8), "b": (8,), "c": (4, 4), "d": (24, 8), "e": (40,), "f": (8, 8)}
EACH = {"adamw": 8.0, "adafactor": 0.1, "lion": 4.0, "muon": 4.0}
SMALL = StateOffloadSettings(bucket_numel=128, min_nbytes=48, poison=True)


def parameters(prefixes=("",), shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return {
        prefix + name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for prefix in prefixes
        for name, shape in shapes.items()
    }


def give(named, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for name, p in named.items():
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if name.startswith(tuple(without)) and without else grad


class Case:
    """An optimizer, and how its state moves."""

    def __init__(self, name="adamw", host=0.0, *, dice=0, travel=SMALL, prefixes=("",)):
        self.named = parameters(prefixes)
        section = OptimizerSection(name=name, lr=1e-2, weight_decay=0.1)
        self.optimizer = build_optimizer(self.named, section)
        self.mover = LateMover(random.Random(dice))
        self.update = OptimizerStepper(self.optimizer, self.mover, EACH[name], travel)
        self.update.set_host_share(host)

    def train(self, seeds, without=lambda seed: ()):
        for seed in seeds:
            give(self.named, seed, without(seed))
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
            self.update.step()

    def tensors(self):
        self.update.synchronize()
        found = flatten_optimizer_state(self.optimizer, self.named)
        weights = {name: p.detach().clone() for name, p in self.named.items()}
        return {**weights, **{key: tensor.clone() for key, tensor in found.items()}}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", sorted(EACH))
def test_the_same_bits_as_on_the_device(name, share):
    here, there = Case(name), Case(name, share)
    for case in (here, there):
        case.train(range(7))
    assert here.update.host_nbytes == 0 == here.mover.moved[CopyStream.STATE_IN]
    if name != "adafactor":  # which keeps rows and columns: nothing that is large here
        assert there.mover.moved[CopyStream.STATE_IN] > 0
    assert_same(here.tensors(), there.tensors())


@given(
    dice=st.integers(0, 10_000),
    share=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
    numel=st.integers(1, 600),
    slots=st.integers(2, 5),
    least=st.sampled_from([0, 48, 512]),
    turns=st.lists(st.sampled_from(["", "high.", "low."]), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_no_order_of_copies_changes_a_bit(dice, share, numel, slots, least, turns):
    """Experts rest in turns, so buckets come and go in every order."""
    travel = StateOffloadSettings(numel, least, slots, poison=True)
    here = Case(prefixes=("high.", "low."))
    there = Case(host=share, dice=dice, travel=travel, prefixes=("high.", "low."))
    for case in (here, there):
        case.train(range(len(turns)), lambda seed: turns[seed] and (turns[seed],))
    assert_same(here.tensors(), there.tensors())


@given(shares=st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_state_may_change_its_place_between_steps(shares):
    here, there = Case(), Case()
    for step, share in enumerate(shares):
        there.update.set_host_share(share)
        for case in (here, there):
            case.train([step])
        hosted = there.update.host_nbytes
        assert (hosted > 0) == (share > 0)
        assert len(there.mover.lent) == sum(len(b.host_pieces) for b in there.update._buckets)
    assert_same(here.tensors(), there.tensors())


@pytest.mark.parametrize("name", sorted(EACH))
@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.4, 0.8)])
def test_a_checkpoint_goes_on_wherever_the_state_is(name, before, after):
    case = Case(name, before)
    case.train(range(4))
    saved = case.tensors()
    case.train(range(4, 7))

    again = Case(name, after)
    again.train([9])  # something that loading must replace
    for key, p in again.named.items():
        p.data.copy_(saved.pop(key))
    restore_optimizer(again.optimizer, again.named, saved, again.update.load_state_dict)
    again.train(range(4, 7))
    assert_same(case.tensors(), again.tensors())


@pytest.mark.parametrize("late", [("a", "d"), ("e",)])
@pytest.mark.parametrize("numel", [200, 10_000])
def test_state_of_a_parameter_that_comes_late_joins_its_bucket(late, numel):
    cases = [Case(), Case(host=1.0, travel=StateOffloadSettings(numel, 16, poison=True))]
    for case in cases:
        case.train(range(5), lambda seed: late if seed < 2 else late[:1] if seed < 3 else ())
    assert_same(cases[0].tensors(), cases[1].tensors())
    assert max(len(bucket.host_pieces) for bucket in cases[1].update._buckets) > 1


def test_what_is_on_the_device_is_the_slots_and_what_is_small():
    case = Case(host=1.0)
    case.train(range(3))
    state = sum(
        tensor.nbytes
        for values in case.optimizer.state.values()
        for tensor in values.values()
        if tensor.nbytes >= SMALL.min_nbytes
    )
    padding = case.update.host_nbytes - state
    assert 0 <= padding < 256 * 2 * len(case.named)
    largest = max(bucket.nbytes for bucket in case.update._buckets)
    assert case.update.slots_nbytes == SMALL.slots * largest
    foreseen = SMALL.slots_nbytes([p.numel() for p in case.named.values()], 8.0)
    assert foreseen == 3 * 192 * 8 == case.update.slots_nbytes
    assert SMALL.slots_nbytes([5, 6], 8.0) == 11 * 8
    assert SMALL.slots_nbytes([200, 100], 8.0) == 2 * 200 * 8


def test_what_is_still_in_a_slot_is_not_fetched_again():
    case = Case(host=1.0)
    case.train(range(2))
    whole = case.update.host_nbytes
    moved = dict(case.mover.moved)
    case.train([2])
    assert case.mover.moved[CopyStream.STATE_OUT] - moved[CopyStream.STATE_OUT] == whole
    fetched = case.mover.moved[CopyStream.STATE_IN] - moved[CopyStream.STATE_IN]
    first, *_, last = case.update._buckets
    assert len(case.update._buckets) == SMALL.slots + 1
    assert fetched in (first.nbytes, last.nbytes)


class Crowded(torch.optim.AdamW):
    """Runs out of memory in the middle of a step."""

    def step(self, closure=None):
        super().step(closure)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_memory_that_ends_in_the_middle_of_an_update_ends_the_run(share):
    named = parameters()
    update = OptimizerStepper(Crowded(named.items()), SynchronousCopyEngine(), 8.0, SMALL)
    update.set_host_share(share)
    give(named, 0)
    with pytest.raises(RunFailedError, match=r"Tried to allocate 2 GiB.*others have not.*lower"):
        update.step()


class Full(SynchronousCopyEngine):
    def device_memory(self, nbytes):
        raise torch.OutOfMemoryError("full")


def test_memory_that_ends_before_an_update_changes_nothing():
    named = parameters()
    update = OptimizerStepper(torch.optim.AdamW(named.items()), Full(), 8.0, SMALL)
    update.set_host_share(1.0)
    give(named, 0)
    update.step()  # makes the state, and has no need of slots
    before = {name: p.detach().clone() for name, p in named.items()}
    with pytest.raises(torch.OutOfMemoryError):
        update.step()
    assert all(torch.equal(p, before[name]) for name, p in named.items())


def test_room_for_new_state_is_asked_for_before_the_update(monkeypatch):
    named = parameters()
    optimizer = torch.optim.AdamW(named.items())
    update = OptimizerStepper(optimizer, SynchronousCopyEngine(), 8.0, SMALL)
    asked = []
    monkeypatch.setattr(torch, "empty_like", lambda p, **_: asked.append(p.numel()))
    give(named, 0)
    update.step()
    assert sorted(asked) == sorted(2 * [p.numel() for p in named.values()])
    asked.clear()
    give(named, 1)
    update.step()
    assert asked == []


def test_state_that_finds_no_room_on_the_device_stays_whole_in_host_memory(monkeypatch):
    here, there = Case(host=1.0), Case(host=1.0)
    for case in (here, there):
        case.train(range(3))
    calls, to = itertools.count(), torch.Tensor.to

    def full(tensor, *args, **kwargs):
        if kwargs.get("copy") and next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        there.update.set_host_share(0.0)
    there.update.set_host_share(1.0)
    for case in (here, there):
        case.train(range(3, 6))
    assert_same(here.tensors(), there.tensors())


class Replacing(torch.optim.Optimizer):
    """Makes a new tensor of state in every step, where others change theirs."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("sum", torch.zeros_like(p))
                self.state[p]["sum"] = before + p.grad
                p.sub_(self.state[p]["sum"], alpha=group["lr"])


def test_an_optimizer_may_put_other_tensors_in_place_of_its_state():
    ended = []
    for share in (0.0, 1.0):
        named = parameters()
        update = OptimizerStepper(Replacing(named.items()), LateMover(random.Random(0)), 4.0, SMALL)
        update.set_host_share(share)
        for seed in range(4):
            give(named, seed)
            update.step()
        ended.append(named)
    assert all(torch.equal(p, ended[1][name]) for name, p in ended[0].items())


def test_closing_leaves_state_that_can_be_read():
    case = Case(host=1.0)
    case.train(range(3))
    expected = case.tensors()
    case.update.close()
    assert_same(case.tensors(), expected)
    assert case.update.slots_nbytes == 0
