import pytest
import torch

from gracetune.config.schema import TrainSection
from gracetune.train import objective


def test_timestep_0_is_the_latent_and_1_is_noise():
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    ends = objective.add_noise(x0, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(ends[0], x0[0])
    assert torch.equal(ends[1], noise[1])


def test_velocity_is_the_derivative_of_the_path():
    x0, noise = torch.randn(1, 3, 4, 4).double(), torch.randn(1, 3, 4, 4).double()
    t, h = torch.tensor([0.3]).double(), 1e-6
    slope = (objective.add_noise(x0, noise, t + h) - objective.add_noise(x0, noise, t)) / h
    torch.testing.assert_close(slope, objective.velocity(x0, noise), rtol=1e-6, atol=1e-8)


def test_losses_are_per_sample_and_in_fp32():
    predicted = torch.zeros(2, 3, 2, 2, dtype=torch.bfloat16)
    target = torch.stack([torch.ones(3, 2, 2), torch.full((3, 2, 2), 2.0)])
    losses = objective.sample_losses(predicted, target)
    assert losses.dtype == torch.float32
    assert losses.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("frames", [(), (3,)], ids=["images", "videos"])
def test_a_mask_weighs_each_cell_of_the_loss(frames):
    predicted, target = (torch.randn(2, 5, *frames, 2, 3) for _ in range(2))
    weights = torch.rand(2, 2, 3)
    found = objective.sample_losses(predicted, target, weights)
    squared = (predicted - target).square()
    by_hand = [
        sum(squared[n, ..., y, x].mean() * weights[n, y, x] for y in range(2) for x in range(3)) / 6
        for n in range(2)
    ]
    torch.testing.assert_close(found, torch.stack(by_hand))
    plain = objective.sample_losses(predicted, target)
    assert torch.equal(objective.sample_losses(predicted, target, torch.ones(2, 2, 3)), plain)


def test_timesteps_broadcast_over_video_latents():
    x0 = torch.zeros(2, 3, 5, 4, 4)
    out = objective.add_noise(x0, torch.ones_like(x0), torch.tensor([0.25, 0.75]))
    assert out[0].unique().tolist() == [0.25]
    assert out[1].unique().tolist() == [0.75]


@pytest.mark.parametrize("prediction", ["flow", "epsilon", "v"])
def test_every_path_leads_from_the_latent_to_noise(prediction):
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    ends = objective.add_noise(x0, noise, torch.tensor([0.0, 1.0]), prediction)
    torch.testing.assert_close(ends[0], x0[0])
    torch.testing.assert_close(ends[1], noise[1])


@pytest.mark.parametrize("prediction", ["flow", "epsilon", "v"])
def test_x0_follows_from_the_target_and_the_noisy_latent(prediction):
    """By the formulas of the papers."""
    x0, noise = torch.randn(5, 3, 4, 4).double(), torch.randn(5, 3, 4, 4).double()
    t = torch.linspace(0.1, 0.9, 5).double()
    x = objective.add_noise(x0, noise, t, prediction)
    target = objective.target(x0, noise, t, prediction)
    alpha, sigma = (a.view(-1, 1, 1, 1) for a in objective.alpha_sigma(t, prediction))
    recovered = {
        "flow": x - sigma * target,
        "epsilon": (x - sigma * target) / alpha,
        "v": alpha * x - sigma * target,
    }[prediction]
    torch.testing.assert_close(recovered, x0)


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_min_snr_weights_are_the_published_ones(prediction, gamma):
    t = torch.linspace(0.01, 0.99, 50).double()
    alpha, sigma = objective.alpha_sigma(t, prediction)
    snr = (alpha / sigma) ** 2
    divisor = {"epsilon": snr, "v": snr + 1}[prediction]
    weights = objective.loss_weights(t, TrainSection(min_snr_gamma=gamma), prediction)
    torch.testing.assert_close(weights, snr.clamp(max=gamma) / divisor)


def test_min_snr_has_no_effect_on_flow_matching_unless_it_is_exact():
    t = torch.tensor([0.1, 0.5, 0.875])
    assert objective.loss_weights(t, TrainSection(), "epsilon") is None
    assert objective.loss_weights(t, TrainSection(min_snr_gamma=5), "flow") is None
    exact = TrainSection(min_snr_gamma=5, min_snr_in_flow="exact")
    weights = objective.loss_weights(t, exact, "flow")
    torch.testing.assert_close(weights, torch.tensor([0.05, 0.25, 0.015625]))


@pytest.mark.parametrize("prediction", ["flow", "epsilon", "v"])
def test_min_snr_weights_are_finite_at_both_ends(prediction):
    section = TrainSection(min_snr_gamma=5, min_snr_in_flow="exact")
    weights = objective.loss_weights(torch.tensor([0.0, 1.0]), section, prediction)
    expected = {"flow": [0.0, 0.0], "epsilon": [0.0, 1.0], "v": [0.0, 0.0]}[prediction]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_effect_of_min_snr_on_flow_matching_is_described():
    section = TrainSection(min_snr_gamma=5)
    (identity,) = objective.min_snr_notes(section, "flow")
    assert identity.startswith("config: train.min_snr_gamma is 5 but has no effect"), "is shown"
    (exact,) = objective.min_snr_notes(
        section.model_copy(update={"min_snr_in_flow": "exact"}), "flow"
    )
    assert "0.016 at t = 0.875" in exact
    assert objective.min_snr_notes(section, "v") == []
    assert objective.min_snr_notes(TrainSection(), "flow") == []
