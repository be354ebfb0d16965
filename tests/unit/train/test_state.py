import random

import numpy as np
import pytest
import torch

from gracetune.errors import CheckpointError
from gracetune.train import state


def trained(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return model, optimizer


def named(model):
    return dict(model.named_parameters())


def step(model, optimizer, x):
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_restored_optimizer_continues_bit_for_bit():
    x = torch.randn(3, 4)
    model, optimizer = trained()
    step(model, optimizer, x)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    tensors = {
        k: t.clone() for k, t in state.flatten_optimizer_state(optimizer, named(model)).items()
    }
    assert "0.weight|exp_avg" in tensors
    step(model, optimizer, x)

    other, fresh = trained(seed=1)
    state.restore_weights(dict(other.named_parameters()), weights)
    state.restore_optimizer(fresh, named(other), tensors)
    step(other, fresh, x)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_of_another_model_are_rejected_by_name():
    model, _ = trained()
    parameters = dict(model.named_parameters())
    with pytest.raises(CheckpointError, match=r"first 1\.bias"):
        state.restore_weights(parameters, {n: p for n, p in parameters.items() if n != "1.bias"})
    wrong = {**parameters, "0.bias": torch.zeros(5)}
    with pytest.raises(
        CheckpointError, match=r"0\.bias has shape \(4,\), but was saved with \(5,\)"
    ):
        state.restore_weights(parameters, wrong)


def test_weights_are_not_loaded_into_a_narrower_dtype():
    saved = {name: p.detach() for name, p in trained()[0].named_parameters()}
    narrow = {name: torch.nn.Parameter(p.bfloat16()) for name, p in saved.items()}
    with pytest.raises(CheckpointError, match=r"saved as torch\.float32 and would be rounded"):
        state.restore_weights(narrow, saved)


def test_optimizer_state_of_an_untrained_parameter_is_rejected():
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match="ghost"):
        state.restore_optimizer(optimizer, named(model), {"ghost|exp_avg": torch.zeros(1)})


def test_every_global_rng_is_restored():
    def draw():
        return (
            torch.rand(3).tolist(),
            np.random.rand(3).tolist(),
            [random.random() for _ in range(3)],
            random.gauss(0, 1),
        )

    random.gauss(0, 1)  # Python draws two values and keeps the second one
    saved = state.rng_state()
    first = draw()
    state.restore_rng(saved)
    assert draw() == first
