import torch

from gracetune.train import objective


def test_the_two_ends_are_picture_and_noise():
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    ends = objective.noisy(x0, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(ends[0], x0[0])
    assert torch.equal(ends[1], noise[1])


def test_velocity_is_the_derivative_of_the_path():
    x0, noise = torch.randn(1, 3, 4, 4).double(), torch.randn(1, 3, 4, 4).double()
    s, h = torch.tensor([0.3]).double(), 1e-6
    slope = (objective.noisy(x0, noise, s + h) - objective.noisy(x0, noise, s)) / h
    torch.testing.assert_close(slope, objective.velocity(x0, noise), rtol=1e-6, atol=1e-8)


def test_losses_are_per_sample_and_in_fp32():
    predicted = torch.zeros(2, 3, 2, 2, dtype=torch.bfloat16)
    target = torch.stack([torch.ones(3, 2, 2), torch.full((3, 2, 2), 2.0)])
    losses = objective.losses(predicted, target)
    assert losses.dtype == torch.float32
    assert losses.tolist() == [1.0, 4.0]


def test_levels_broadcast_over_video_too():
    x0 = torch.zeros(2, 3, 5, 4, 4)
    out = objective.noisy(x0, torch.ones_like(x0), torch.tensor([0.25, 0.75]))
    assert out[0].unique().tolist() == [0.25]
    assert out[1].unique().tolist() == [0.75]
