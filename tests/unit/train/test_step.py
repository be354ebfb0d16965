"""The step's arithmetic: whatever the window looks like, every sample weighs the same."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from gracetune.events.run_control import RunControl
from gracetune.train.build import build, start_accelerator
from gracetune.train.run import SignalHandler
from gracetune.train.state import TrainProgress
from gracetune.train.step import batch_losses, losses_given_noise, scale_and_clip_gradients, train_step


@pytest.fixture
def session(tiny_run, told, tmp_path):
    def make(**sections):
        run = tiny_run(**sections)
        (tmp_path / "run").mkdir(exist_ok=True)
        accelerator = start_accelerator(run)
        return build(run, accelerator, told, RunControl(tmp_path), SignalHandler()).session

    return make


def batches(session, sizes):
    """Batches of the given sizes, cut from the order's own draws."""
    draws = [draw for index in range(8) for draw in session.pipeline.order.batch_at(index)]
    cuts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return [session.pipeline.load(draws[a:b]) for a, b in pairwise(cuts)]


def weights(session):
    return {n: p.detach().clone() for n, p in session.state.parameters.items()}


@pytest.mark.parametrize("sizes", [[4, 4], [4, 1], [1, 2, 3], [5]])
def test_the_loss_is_the_mean_over_what_was_really_accumulated(session, sizes):
    s = session(train={"max_grad_norm": 0})
    window = batches(s, sizes)
    generators = [s.state.rng.at("train", i, 0).initial_seed() for i in range(len(sizes))]
    expected_losses = []
    for batch, seed in zip(window, generators, strict=True):
        generator = torch.Generator().manual_seed(seed)
        levels = torch.randn(len(batch), generator=generator).sigmoid()
        noise = torch.randn(batch.latents.shape, generator=generator)
        expected_losses.append(losses_given_noise(s.state, batch, levels, noise))
    mean = torch.cat(expected_losses).mean()
    expected = torch.autograd.grad(mean, list(s.state.parameters.values()), allow_unused=True)

    seen = {}
    s.state.optimizer.step = lambda: seen.update(
        {n: None if p.grad is None else p.grad.clone() for n, p in s.state.parameters.items()}
    )
    result = train_step(s.state, window, len(window), TrainProgress())
    torch.testing.assert_close(result.loss, mean.detach())
    assert result.samples.item() == sum(sizes)
    for gradient, wanted in zip(seen.values(), expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_a_ramp_never_changes_the_weight_of_a_step(session):
    """The guides' ramp, 4 to 32: the samples of each step are those of whole micro-batches."""
    s = session(
        gh200_optimizations={
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 4,
            "target_effective_batch_size": 32,
            "batch_rampup_steps": 20,
        }
    )
    done = 0
    for step in range(5):
        length = s.ramp.accumulation(done)
        window = batches(s, [4] * length)
        result = train_step(s.state, window, length, TrainProgress(step, done))
        assert result.samples.item() == 4 * length
        done += length


def test_the_draws_depend_on_the_position_alone(session):
    s = session()
    window = batches(s, [4])
    before = weights(s)
    first = train_step(s.state, window, 1, TrainProgress(step=3, micro_batches=7)).loss
    for name, parameter in s.state.parameters.items():
        parameter.data.copy_(before[name])
    again = train_step(s.state, window, 1, TrainProgress(step=9, micro_batches=7)).loss
    assert torch.equal(first, again)


def test_gradients_are_scaled_and_then_clipped():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([30.0, 40.0])
    norm = scale_and_clip_gradients([weight], torch.tensor(0.1), max_norm=1.0)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    weight.grad = torch.tensor([30.0, 40.0])
    scale_and_clip_gradients([weight], torch.tensor(0.1), max_norm=0)
    torch.testing.assert_close(weight.grad, torch.tensor([3.0, 4.0]))


def test_the_rate_of_the_schedule_is_the_one_that_is_used(session):
    s = session(optimizer={"lr": 0.5, "warmup_steps": 4})
    result = train_step(s.state, batches(s, [2]), 1, TrainProgress(step=1))
    assert result.lr == pytest.approx(0.5 * 2 / 5)
    assert s.state.optimizer.param_groups[0]["lr"] == result.lr


def test_checkpointed_gradients_equal_kept_ones(session):
    gradients = []
    for recompute in (False, True):
        s = session(train={"gradient_checkpointing": recompute})
        s.state.transformer.train()
        window = batches(s, [4])
        kept = {}
        s.state.optimizer.step = lambda s=s, kept=kept: kept.update(
            {n: p.grad.clone() for n, p in s.state.parameters.items() if p.grad is not None}
        )
        train_step(s.state, window, 1, TrainProgress())
        gradients.append(kept)
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        assert torch.equal(gradients[0][name], gradients[1][name]), name


def test_a_window_is_read_lazily(session):
    s = session()
    taken = []

    def window():
        for batch in batches(s, [2, 2]):
            taken.append(len(batch))
            yield batch

    train_step(s.state, window(), 2, replace(TrainProgress(), step=0))
    assert taken == [2, 2]


def test_a_step_of_fewer_micro_batches_than_it_says_is_none(session):
    s = session()
    before = {name: p.detach().clone() for name, p in s.state.parameters.items()}
    with pytest.raises(AssertionError, match="1 micro-batches for a step of 2"):
        train_step(s.state, batches(s, [4]), 2, TrainProgress())
    assert all(torch.equal(p, before[name]) for name, p in s.state.parameters.items())


def test_weights_of_levels_are_those_of_the_samples_they_were_drawn_for(session):
    s = session(train={"min_snr_gamma": 5.0, "min_snr_in_flow": "exact"})
    (batch,) = batches(s, [4])
    generator = s.state.rng.at("train", 0, 0)
    levels = torch.randn(4, generator=generator).sigmoid()
    noise = torch.randn(batch.latents.shape, generator=generator)
    plain = losses_given_noise(s.state, batch, levels, noise)
    weights = torch.minimum((1 - levels) ** 2, 5 * levels**2)
    torch.testing.assert_close(batch_losses(s.state, batch, 0), plain * weights)


def test_the_run_files_window_reaches_the_step(session, monkeypatch):
    s = session(train={"timestep_window": [0.5, 0.6]})
    seen = []
    predict = type(s.state.family).predict

    def watched(self, transformer, noisy, levels, text):
        seen.extend(levels.tolist())
        return predict(self, transformer, noisy, levels, text)

    monkeypatch.setattr(type(s.state.family), "predict", watched)
    train_step(s.state, batches(s, [4, 4]), 2, TrainProgress())
    assert len(seen) == 8
    assert all(0.5 <= level < 0.6 for level in seen)


def test_min_snr_for_flow_matching_is_told_once(session, told):
    session(train={"min_snr_gamma": 5.0})
    assert sum("min_snr_gamma 5 changes nothing" in text for text in told.texts()) == 1
