"""Optimizer state in host memory gives the same results bit for bit as state on the device."""

import itertools

import pytest
import torch
from counted_copies import CountingCopyEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.config.schema import OptimizerSection
from gracetune.errors import RunFailedError
from gracetune.offload.copy_engine import CopyStream, SynchronousCopyEngine
from gracetune.optim.build import build_optimizer
from gracetune.optim.offloaded_state import OptimizerStepper, StateOffloadSettings
from gracetune.train.state import flatten_optimizer_state, restore_optimizer

SHAPES = {"a": (16, 8), "b": (8,), "c": (4, 4), "d": (24, 8), "e": (40,), "f": (8, 8)}
STATE_NBYTES_PER_ELEMENT = {"adamw": 8.0, "adafactor": 0.1, "lion": 4.0, "muon": 4.0}
SETTINGS = StateOffloadSettings(bucket_numel=128, min_nbytes=48, poison=True)


def build_parameters(prefixes=("",), shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return {
        prefix + name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for prefix in prefixes
        for name, shape in shapes.items()
    }


def set_gradients(named, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for name, p in named.items():
        grad = torch.randn(p.shape, generator=generator)
        p.grad = None if name.startswith(tuple(without)) and without else grad


class Training:
    """Parameters with an optimizer of which a share of the state is in host memory."""

    def __init__(self, name="adamw", host_share=0.0, *, settings=SETTINGS, prefixes=("",)):
        self.named = build_parameters(prefixes)
        section = OptimizerSection(name=name, lr=1e-2, weight_decay=0.1)
        self.optimizer = build_optimizer(self.named, section)
        self.copy_engine = CountingCopyEngine()
        self.stepper = OptimizerStepper(
            self.optimizer, self.copy_engine, STATE_NBYTES_PER_ELEMENT[name], settings
        )
        self.stepper.set_host_share(host_share)

    def train(self, seeds, without=lambda seed: ()):
        for seed in seeds:
            set_gradients(self.named, seed, without(seed))
            self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
            self.stepper.step()

    def tensors(self):
        self.stepper.synchronize()
        state = flatten_optimizer_state(self.optimizer, self.named)
        weights = {name: p.detach().clone() for name, p in self.named.items()}
        return {**weights, **{key: tensor.clone() for key, tensor in state.items()}}


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    for key in result:
        assert torch.equal(result[key], expected[key]), key


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", sorted(STATE_NBYTES_PER_ELEMENT))
def test_results_are_the_same_as_with_state_on_the_device(name, share):
    on_device, in_host = Training(name), Training(name, share)
    for training in (on_device, in_host):
        training.train(range(7))
    assert on_device.stepper.host_nbytes == 0
    assert on_device.copy_engine.copied_nbytes[CopyStream.STATE_IN] == 0
    if name != "adafactor":  # it stores rows and columns, too small to move
        assert in_host.copy_engine.copied_nbytes[CopyStream.STATE_IN] > 0
    assert_same(on_device.tensors(), in_host.tensors())


@given(
    share=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
    numel=st.integers(1, 600),
    slots=st.integers(2, 5),
    min_nbytes=st.sampled_from([0, 48, 512]),
    turns=st.lists(st.sampled_from(["", "high.", "low."]), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_buckets_are_stepped_in_any_combination(share, numel, slots, min_nbytes, turns):
    """Experts are trained in turns."""
    offload_settings = StateOffloadSettings(numel, min_nbytes, slots, poison=True)
    on_device = Training(prefixes=("high.", "low."))
    in_host = Training(host_share=share, settings=offload_settings, prefixes=("high.", "low."))
    for training in (on_device, in_host):
        training.train(range(len(turns)), lambda step: turns[step] and (turns[step],))
    assert_same(on_device.tensors(), in_host.tensors())


@given(shares=st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_state_may_move_between_steps(shares):
    on_device, in_host = Training(), Training()
    for step, share in enumerate(shares):
        in_host.stepper.set_host_share(share)
        for training in (on_device, in_host):
            training.train([step])
        assert (in_host.stepper.host_nbytes > 0) == (share > 0)
        assert len(in_host.copy_engine.host_memory) == sum(
            len(b.host_pieces) for b in in_host.stepper._buckets
        )
    assert_same(on_device.tensors(), in_host.tensors())


@pytest.mark.parametrize("name", sorted(STATE_NBYTES_PER_ELEMENT))
@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.4, 0.8)])
def test_a_checkpoint_resumes_wherever_the_state_lives(name, before, after):
    training = Training(name, before)
    training.train(range(4))
    saved = training.tensors()
    training.train(range(4, 7))

    resumed = Training(name, after)
    resumed.train([9])  # state that loading must replace
    for key, p in resumed.named.items():
        p.data.copy_(saved.pop(key))
    restore_optimizer(resumed.optimizer, resumed.named, saved, resumed.stepper.load_state_dict)
    resumed.train(range(4, 7))
    assert_same(training.tensors(), resumed.tensors())


@pytest.mark.parametrize("late", [("a", "d"), ("e",)])
@pytest.mark.parametrize("numel", [200, 10_000])
def test_state_of_a_late_first_gradient_joins_its_bucket(late, numel):
    trainings = [
        Training(),
        Training(host_share=1.0, settings=StateOffloadSettings(numel, 16, poison=True)),
    ]
    for training in trainings:
        training.train(range(5), lambda seed: late if seed < 2 else late[:1] if seed < 3 else ())
    assert_same(trainings[0].tensors(), trainings[1].tensors())
    assert max(len(bucket.host_pieces) for bucket in trainings[1].stepper._buckets) > 1


def test_only_slots_and_small_state_are_on_the_device():
    training = Training(host_share=1.0)
    training.train(range(3))
    state = sum(
        tensor.nbytes
        for values in training.optimizer.state.values()
        for tensor in values.values()
        if tensor.nbytes >= SETTINGS.min_nbytes
    )
    padding = training.stepper.host_nbytes - state
    assert 0 <= padding < 256 * 2 * len(training.named)
    largest = max(bucket.nbytes for bucket in training.stepper._buckets)
    assert training.stepper.slots_nbytes == SETTINGS.slots * largest
    predicted = SETTINGS.slots_nbytes([p.numel() for p in training.named.values()], 8.0)
    assert predicted == 3 * 192 * 8 == training.stepper.slots_nbytes
    assert SETTINGS.slots_nbytes([5, 6], 8.0) == 11 * 8
    assert SETTINGS.slots_nbytes([200, 100], 8.0) == 2 * 200 * 8


def test_buckets_still_in_a_slot_are_not_fetched_again():
    training = Training(host_share=1.0)
    training.train(range(2))
    state_nbytes = training.stepper.host_nbytes
    copied = dict(training.copy_engine.copied_nbytes)
    training.train([2])
    assert (
        training.copy_engine.copied_nbytes[CopyStream.STATE_OUT] - copied[CopyStream.STATE_OUT]
        == state_nbytes
    )
    fetched = training.copy_engine.copied_nbytes[CopyStream.STATE_IN] - copied[CopyStream.STATE_IN]
    first, *_, last = training.stepper._buckets
    assert len(training.stepper._buckets) == SETTINGS.slots + 1
    assert fetched in (first.nbytes, last.nbytes)


class OutOfMemoryInStep(torch.optim.AdamW):
    """An optimizer that runs out of memory in the middle of a step."""

    def step(self, closure=None):
        super().step(closure)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_running_out_of_memory_inside_a_step_ends_the_run(share):
    named = build_parameters()
    stepper = OptimizerStepper(
        OutOfMemoryInStep(named.items()), SynchronousCopyEngine(), 8.0, SETTINGS
    )
    stepper.set_host_share(share)
    set_gradients(named, 0)
    with pytest.raises(
        RunFailedError,
        match=r"Tried to allocate 2 GiB.*weights had changed.*optimizer\.state: host.*lower",
    ):
        stepper.step()


class FullDeviceEngine(SynchronousCopyEngine):
    def allocate_device(self, nbytes):
        raise torch.OutOfMemoryError("full")


def test_running_out_of_memory_before_a_step_changes_nothing():
    named = build_parameters()
    stepper = OptimizerStepper(torch.optim.AdamW(named.items()), FullDeviceEngine(), 8.0, SETTINGS)
    stepper.set_host_share(1.0)
    set_gradients(named, 0)
    stepper.step()  # creates the state, and needs no slots yet
    before = {name: p.detach().clone() for name, p in named.items()}
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step()
    assert all(torch.equal(p, before[name]) for name, p in named.items())


def test_memory_for_new_state_is_probed_before_the_step(monkeypatch):
    named = build_parameters()
    optimizer = torch.optim.AdamW(named.items())
    stepper = OptimizerStepper(optimizer, SynchronousCopyEngine(), 8.0, SETTINGS)
    probed = []
    monkeypatch.setattr(torch, "empty_like", lambda p, **_: probed.append(p.numel()))
    set_gradients(named, 0)
    stepper.step()
    assert sorted(probed) == sorted(2 * [p.numel() for p in named.values()])
    probed.clear()
    set_gradients(named, 1)
    stepper.step()
    assert probed == []


def test_state_that_does_not_fit_on_the_device_stays_intact_in_host_memory(monkeypatch):
    on_device, in_host = Training(host_share=1.0), Training(host_share=1.0)
    for training in (on_device, in_host):
        training.train(range(3))
    calls, to = itertools.count(), torch.Tensor.to

    def full(tensor, *args, **kwargs):
        if kwargs.get("copy") and next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        in_host.stepper.set_host_share(0.0)
    in_host.stepper.set_host_share(1.0)
    for training in (on_device, in_host):
        training.train(range(3, 6))
    assert_same(on_device.tensors(), in_host.tensors())


class ReplacingOptimizer(torch.optim.Optimizer):
    """An optimizer that replaces its state tensors instead of updating them in place."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("sum", torch.zeros_like(p))
                self.state[p]["sum"] = before + p.grad
                p.sub_(self.state[p]["sum"], alpha=group["lr"])


def test_an_optimizer_may_replace_its_state_tensors():
    results = []
    for share in (0.0, 1.0):
        named = build_parameters()
        stepper = OptimizerStepper(
            ReplacingOptimizer(named.items()), SynchronousCopyEngine(), 4.0, SETTINGS
        )
        stepper.set_host_share(share)
        for seed in range(4):
            set_gradients(named, seed)
            stepper.step()
        results.append(named)
    assert all(torch.equal(p, results[1][name]) for name, p in results[0].items())


def test_state_can_be_read_after_close():
    training = Training(host_share=1.0)
    training.train(range(3))
    expected = training.tensors()
    training.stepper.close()
    assert_same(training.tensors(), expected)
    assert training.stepper.slots_nbytes == 0
