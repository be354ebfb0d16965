import pytest
import torch

from gracetune.config.schema import TrainSection
from gracetune.train.timesteps import DISTRIBUTIONS, draw_levels, shifted


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_levels_stay_between_picture_and_noise(name, shift):
    section = TrainSection(timestep_sampling=name, timestep_shift=shift)
    s = draw_levels(section, 10_000, torch.Generator().manual_seed(0))
    assert s.min() >= 0
    assert s.max() <= 1


def test_the_shift_is_the_published_map():
    s = torch.tensor([0.0, 0.5, 1.0])
    assert shifted(s, 3.0).tolist() == [0.0, 0.75, 1.0]
    assert torch.equal(shifted(s, 1.0), s)


def test_logit_normal_has_its_median_in_the_middle():
    s = draw_levels(TrainSection(), 100_000, torch.Generator().manual_seed(0))
    assert abs(s.median().item() - 0.5) < 0.01


def test_the_same_generator_draws_the_same_levels():
    draws = [draw_levels(TrainSection(), 8, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*draws)
