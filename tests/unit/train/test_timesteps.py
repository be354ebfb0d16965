import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.config.schema import TrainSection
from gracetune.errors import ConfigError
from gracetune.train.timesteps import (
    DISTRIBUTIONS,
    FULL_WINDOW,
    TimestepWindow,
    apply_shift,
    expert_windows,
    fp32_bounds,
    intersect,
    sample_timesteps,
    scheduled_timesteps,
    shift_for,
    window_probability,
)

SHIFTS = [0.5, 1.0, 3.0, 12.0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def section(name="logit_normal", shift=1.0, **settings):
    return TrainSection(timestep_sampling=name, timestep_shift=shift, **settings)


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("shift", SHIFTS)
def test_timesteps_lie_between_0_and_1(name, shift):
    s = sample_timesteps(section(name, shift), 10_000, generator())
    assert s.dtype == torch.float32
    assert s.min() >= 0
    assert s.max() <= 1


def test_the_shift_is_the_published_formula():
    s = torch.tensor([0.0, 0.5, 1.0])
    assert apply_shift(s, 3.0).tolist() == [0.0, 0.75, 1.0]
    assert torch.equal(apply_shift(s, 1.0), s)


def test_logit_normal_has_its_median_in_the_middle():
    s = sample_timesteps(TrainSection(), 100_000, generator())
    assert abs(s.median().item() - 0.5) < 0.01


def test_the_mean_and_spread_of_logit_normal_are_those_of_its_logits():
    s = sample_timesteps(section(timestep_mean=0.7, timestep_std=0.4), 100_000, generator())
    logits = s.double().logit()
    assert logits.mean().item() == pytest.approx(0.7, abs=0.01)
    assert logits.std().item() == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("window", [FULL_WINDOW, TimestepWindow(0.2, 0.9)])
def test_the_same_seed_draws_the_same_timesteps(window):
    draws = [sample_timesteps(TrainSection(), 8, generator(5), window) for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_the_density_matches_diffusers(name):
    """Other trainers use diffusers' own draws."""
    from diffusers.training_utils import compute_density_for_timestep_sampling

    scheme = {"uniform": "none"}.get(name, name)
    if name == "cosmap":  # theirs is another path to the same formula, from a uniform u
        u = torch.rand(100_000, generator=generator(1)).double()
        theirs = 1 - 1 / (torch.tan(torch.pi / 2 * u) + 1)
    else:
        theirs = compute_density_for_timestep_sampling(
            scheme, 100_000, 0.0, 1.0, 1.29, generator=generator(1)
        )
    ours = sample_timesteps(section(name), 100_000, generator(2))
    marks = torch.linspace(0.02, 0.98, 25)
    torch.testing.assert_close(
        torch.quantile(ours, marks), torch.quantile(theirs.float(), marks), rtol=0, atol=0.01
    )


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_the_cdf_is_the_inverse_of_the_quantile_function(name):
    distribution, settings_ = DISTRIBUTIONS[name], section(name)
    for share in (0.001, 0.1, 0.5, 0.87, 0.999):
        timestep = distribution.quantile(torch.tensor(share).double(), settings_).item()
        assert distribution.cdf(timestep, settings_) == pytest.approx(share, abs=1e-6)


@given(
    name=st.sampled_from(sorted(DISTRIBUTIONS)),
    shift=st.floats(0.5, 6),
    low=st.floats(0, 0.9),
    width=st.floats(0.05, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_a_window_contains_every_draw_and_keeps_the_density(name, shift, low, width, seed):
    window = TimestepWindow(low, min(1.0, low + width))
    s = sample_timesteps(section(name, shift), 400, generator(seed), window)
    for compared in (s, s.double()):  # as fp32 and as Python numbers see the edges
        assert bool((compared >= window.low).all())
        assert bool((compared < window.high).all())
    whole = sample_timesteps(section(name, shift), 60_000, generator(seed + 1))
    inside = whole[(whole >= window.low) & (whole < window.high)]
    if len(inside) > 2000:  # Kolmogorov and Smirnov: the two samples are of one distribution
        marks = torch.cat([s, inside]).sort().values
        below = [torch.searchsorted(part.sort().values, marks, right=True) for part in (s, inside)]
        gap = (below[0] / len(s) - below[1] / len(inside)).abs().max().item()
        assert gap < 2.6 * math.sqrt(1 / len(s) + 1 / len(inside))  # one in 10^6


@given(boundary=st.floats(0.05, 0.95), name=st.sampled_from(sorted(DISTRIBUTIONS)))
@settings(max_examples=100, deadline=None)
def test_no_timestep_reaches_the_wrong_expert(boundary, name):
    windows = expert_windows(boundary)
    for stage, window in windows.items():
        s = sample_timesteps(section(name, 5.0), 500, generator(), window)
        assert bool(((s >= boundary) == (stage == "high")).all())
        assert all((t >= boundary) == (stage == "high") for t in s.tolist())


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("boundary", [0.875, 0.9])
def test_draws_cover_a_window_up_to_its_edges(name, boundary):
    for window in expert_windows(boundary).values():
        s = sample_timesteps(section(name, 3.0), 200_000, generator(), window)
        width = window.high - window.low
        assert s.min() < window.low + 0.06 * width
        assert s.max() > window.high - 0.06 * width


def test_fp32_bounds_are_the_outermost_numbers_of_a_window():
    below_nine_tenths = np.float32(0.9)  # 0.89999998
    assert float(below_nine_tenths) < 0.9
    low, _ = fp32_bounds(TimestepWindow(0.9, 1.0))
    _, high = fp32_bounds(TimestepWindow(0.0, 0.9))
    assert low == float(np.nextafter(below_nine_tenths, np.float32(1)))
    assert high == float(np.nextafter(below_nine_tenths, np.float32(0)))
    assert fp32_bounds(TimestepWindow(0.875, 1.0)) == (
        0.875,
        float(np.nextafter(np.float32(1), np.float32(0))),
    )


@pytest.mark.parametrize(
    ("name", "shift", "share"),
    [("uniform", 1.0, 0.125), ("logit_normal", 1.0, 0.0258), ("uniform", 5.0, 0.4167)],
)
def test_the_window_probability_equals_the_share_of_unrestricted_draws(name, shift, share):
    high = expert_windows(0.875)["high"]
    assert window_probability(section(name, shift), high) == pytest.approx(share, abs=1e-3)
    drawn = sample_timesteps(section(name, shift), 100_000, generator())
    assert (drawn >= 0.875).float().mean().item() == pytest.approx(share, abs=5e-3)


def test_train_timestep_window_restricts_all_draws():
    half = section(timestep_window=(0.25, 0.5))
    s = sample_timesteps(half, 2000, generator())
    assert s.min() >= 0.25
    assert s.max() < 0.5
    assert window_probability(half, TimestepWindow(0.0, 1.0)) == 1.0
    assert window_probability(half, TimestepWindow(0.0, 0.375)) < 0.5
    assert intersect(TimestepWindow(0.1, 0.6), TimestepWindow(0.3, 0.9)) == TimestepWindow(0.3, 0.6)


def test_empty_windows_are_rejected():
    with pytest.raises(ConfigError, match=r"the two do not overlap\. Widen"):
        sample_timesteps(
            section(timestep_window=(0.0, 0.5)), 1, generator(), TimestepWindow(0.5, 1.0)
        )
    with pytest.raises(ConfigError, match=r"Set train\.timestep_sampling: uniform"):
        sample_timesteps(section(timestep_std=0.1), 1, generator(), TimestepWindow(0.99, 1.0))


def test_shifts_depend_on_the_resolution_as_in_the_models():
    assert shift_for(section(shift=2.5), 77) == 2.5
    assert shift_for(section(shift="flux"), 256) == pytest.approx(math.exp(0.5))
    assert shift_for(section(shift="flux"), 4096) == pytest.approx(math.exp(1.15))
    assert shift_for(section(shift="qwen_image"), 8192) == pytest.approx(math.exp(0.9))
    assert shift_for(section(shift="sd3"), 4096) == 3.0
    assert shift_for(section(shift="sd3"), 1024) == 1.5


@pytest.mark.parametrize("rule", ["flux", "qwen_image"])
def test_the_shift_equals_that_of_diffusers(rule):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    (x0, y0), (x1, y1) = {
        "flux": ((256, 0.5), (4096, 1.15)),
        "qwen_image": ((256, 0.5), (8192, 0.9)),
    }[rule]
    mu = calculate_shift(1536, x0, x1, y0, y1)
    assert shift_for(section(shift=rule), 1536) == pytest.approx(math.exp(mu))


def test_larger_images_are_drawn_noisier():
    small, large = (
        sample_timesteps(section(shift="flux"), 1000, generator(), num_tokens=n).mean()
        for n in (256, 4096)
    )
    assert large > small + 0.05


def test_positions_in_a_discrete_schedule_are_its_timesteps():
    schedule = torch.tensor([0.02, 0.1, 0.5, 0.95])
    positions = torch.tensor([0.0, 0.24, 0.25, 0.5, 0.76, 1.0])
    expected = torch.tensor([0.02, 0.02, 0.1, 0.5, 0.95, 0.95])
    assert torch.equal(scheduled_timesteps(positions, schedule), expected)
    assert scheduled_timesteps(positions, None) is positions
