"""The schedule of two experts: no sample reaches the wrong one."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gracetune.config.dataset_schema import DatasetSection
from gracetune.config.schema import RunFile, TrainSection
from gracetune.data.batch_order import BatchOrder, BucketGroup
from gracetune.errors import ConfigError
from gracetune.train.experts import (
    SINGLE_SIZE,
    build_expert_schedule,
    drawn_token_counts,
    expected_token_counts,
)
from gracetune.train.timesteps import (
    DISTRIBUTIONS,
    expert_windows,
    sample_timesteps,
    window_probability,
)

SAMPLINGS = sorted(DISTRIBUTIONS)


def probability_or_none(section, window, tokens):
    try:
        return window_probability(section, window, tokens)
    except ConfigError:
        return None


@settings(max_examples=150, deadline=None)
@given(
    boundary=st.sampled_from([0.875, 0.9, 0.5, 1 / 3, 0.123456789, 0.999]),
    sampling=st.sampled_from(SAMPLINGS),
    shift=st.one_of(
        st.floats(0.2, 15.0), st.sampled_from(["flux", "qwen_image", "sd3"]), st.just(1.0)
    ),
    experts=st.sampled_from(["both", "high", "low"]),
    turns=st.sampled_from(["alternate", "proportional"]),
    every=st.integers(1, 7),
    step=st.integers(0, 10_000),
    seed=st.integers(0, 2**31),
    tokens=st.sampled_from([64, 1024, 4096]),
)
def test_every_timestep_belongs_to_the_expert_of_its_step(
    boundary, sampling, shift, experts, turns, every, step, seed, tokens
):
    section = TrainSection(
        timestep_sampling=sampling,
        timestep_shift=shift,
        experts=experts,
        expert_turns=turns,
        switch_every=every,
    )
    windows = expert_windows(boundary).values()
    shares = [probability_or_none(section, window, tokens) for window in windows]
    assume(all(shares))  # windows with too little probability are rejected
    schedule = build_expert_schedule(section, boundary, {tokens: 1})
    turn = schedule.expert_at(step)
    timesteps = sample_timesteps(
        section, 64, torch.Generator().manual_seed(seed), turn.window, tokens
    )
    assert experts in ("both", turn.expert)
    if turn.expert == "high":
        assert (timesteps.double() >= boundary).all()
        assert (timesteps >= boundary).all()
        assert (timesteps * 1000 >= torch.tensor(boundary * 1000) * (1 - 1e-6)).all()
    else:
        assert (timesteps.double() < boundary).all()
        assert (timesteps < boundary).all()
    assert ((timesteps >= 0) & (timesteps <= 1)).all()


@given(every=st.integers(1, 9), steps=st.integers(1, 400))
def test_alternating_turns_differ_by_one_at_most(every, steps):
    schedule = build_expert_schedule(TrainSection(switch_every=every), 0.875)
    high = sum(schedule.expert_at(step).expert == "high" for step in range(steps))
    assert abs(high - (steps - high)) <= every


@given(shift=st.floats(0.3, 12.0), steps=st.integers(1, 500))
def test_proportional_turns_follow_the_distribution_at_every_length(shift, steps):
    section = TrainSection(
        expert_turns="proportional", timestep_shift=shift, timestep_sampling="uniform"
    )
    schedule = build_expert_schedule(section, 0.875)
    high = sum(schedule.expert_at(step).expert == "high" for step in range(steps))
    assert abs(high - steps * window_probability(section, schedule.windows["high"])) <= 1


def test_high_shares_match_the_published_figures():
    """Wan 2.2 T2V: 12.5 % without shift, 41.7 % with shift 5, 63.2 % with shift 12."""
    for shift, share in ((1.0, 0.125), (5.0, 0.417), (12.0, 0.632)):
        section = TrainSection(
            expert_turns="proportional", timestep_shift=shift, timestep_sampling="uniform"
        )
        assert build_expert_schedule(section, 0.875).high_share == pytest.approx(share, abs=5e-4)


def test_the_high_share_is_a_mean_over_sample_sizes():
    section = TrainSection(
        expert_turns="proportional", timestep_shift="sd3", timestep_sampling="uniform"
    )
    image, clip = 4096, 21 * 4096
    alone = [
        build_expert_schedule(section, 0.875, {tokens: 1}).high_share for tokens in (image, clip)
    ]
    assert alone[0] == pytest.approx(0.3, abs=1e-3)  # shift 3: 0.875 comes from 0.7
    assert alone[1] == pytest.approx(0.6626, abs=1e-3)  # shift 13.75
    both = build_expert_schedule(section, 0.875, {image: 3, clip: 1}).high_share
    assert both == pytest.approx((3 * alone[0] + alone[1]) / 4)


def test_a_size_without_timesteps_for_an_expert_is_rejected():
    section = TrainSection(timestep_shift="flux", timestep_sampling="logit_normal")
    build_expert_schedule(section, 0.875, {4096: 1})
    with pytest.raises(ConfigError, match=r"too few to train on"):
        build_expert_schedule(section, 0.875, {4096: 999, 40 * 4096: 1})


class WanSizes:
    """The part of a family that schedules use, with the token counts of Wan."""

    boundary: float | None = 0.875

    def latent_shape(self, width, height, frames=1):
        return 16, (frames - 1) // 4 + 1, height // 8, width // 8

    def num_tokens(self, latent_shape):
        _, frames, height, width = latent_shape
        return frames * (height // 2) * (width // 2)


def test_expected_token_counts_include_every_clip_length():
    run = RunFile(
        datasets=(
            DatasetSection(id="images", resolution=1024),
            DatasetSection(id="clips", dataset_type="video", resolution=512, frames=(1, 81)),
        )
    )
    assert expected_token_counts(run, WanSizes()) == {4096: 1, 1024: 1, 21 * 1024: 1}


def test_drawn_samples_are_counted_by_tokens():
    def group(size, count, repeats=1):
        samples = tuple(object() for _ in range(count))
        return BucketGroup(samples, repeats, 0.0, size)

    order = BatchOrder([group((64, 64), 3), group((32, 128), 2), group((64, 64, 9), 1, 5)], 2, 0)
    assert drawn_token_counts(order, WanSizes()) == {16: 5, 48: 5}
    single = WanSizes()
    single.boundary = None
    assert drawn_token_counts(order, single) == SINGLE_SIZE


def test_a_timestep_on_the_boundary_is_high_noise():
    windows = build_expert_schedule(TrainSection(), 0.875).windows
    assert windows["high"] == (0.875, 1.0)
    assert windows["low"] == (0.0, 0.875)


def test_a_single_transformer_has_no_schedule_and_rejects_train_experts():
    assert build_expert_schedule(TrainSection(), None) is None
    with pytest.raises(ConfigError, match=r"train\.experts is 'low', but the model has one"):
        build_expert_schedule(TrainSection(experts="low"), None)


def test_a_timestep_window_outside_an_expert_is_rejected():
    section = TrainSection(timestep_window=(0.0, 0.5))
    with pytest.raises(ConfigError, match="train the other expert"):
        build_expert_schedule(section, 0.875)
    assert set(
        build_expert_schedule(section.model_copy(update={"experts": "low"}), 0.875).windows
    ) == {"low"}


def test_a_schedule_describes_its_turns():
    both = build_expert_schedule(TrainSection(switch_every=3), 0.875).describe(0.875)
    assert "high noise for timesteps from 0.875" in both
    assert "3 steps per turn, 50.0%" in both
    one = build_expert_schedule(TrainSection(experts="high"), 0.9).describe(0.9)
    assert "only high noise is trained" in one
