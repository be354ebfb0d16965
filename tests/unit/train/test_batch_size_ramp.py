import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError
from gracetune.train.batch_size_ramp import (
    AccumulationRamp,
    build_ramp,
    micro_batches_per_step,
    ramp_notes,
)


def run_file(batch=4, **ramp):
    section = {"enable_batch_size_rampup": True, **ramp}
    return RunFile.model_validate({"train": {"batch_size": batch}, "gh200_optimizations": section})


def test_the_example_of_the_guide_ramps_from_4_to_32_in_400_micro_batches():
    ramp = build_ramp(
        run_file(
            initial_effective_batch_size=4, target_effective_batch_size=32, batch_rampup_steps=400
        ),
        world_size=1,
    )
    assert [ramp.accumulation(m) for m in (0, 200, 400, 5000)] == [1, 3, 8, 8]
    assert ramp_notes(ramp)[0].startswith("ramp: GH200 gradient accumulation ramp enabled")


def test_a_ramp_can_be_linear():
    ramp = AccumulationRamp(4, 32, 400, "linear", 4)
    assert ramp.accumulation(200) == 5


def test_the_effective_batch_includes_all_ranks():
    ramp = build_ramp(
        run_file(initial_effective_batch_size=8, target_effective_batch_size=64), world_size=2
    )
    assert ramp.accumulation(0) == 2
    assert ramp.accumulation(10**6) == 16


def test_the_first_guides_ramp_starts_with_small_micro_batches():
    """Document 000: train_batch_size 32, initial_effective_batch_size 4."""
    settings = {"initial_effective_batch_size": 4, "target_effective_batch_size": 128}
    ramp = build_ramp(run_file(batch=32, batch_rampup_steps=400, **settings), world_size=1)
    steps = [(ramp.accumulation(m), ramp.micro_batch_size(m)) for m in (0, 1, 80, 150, 200, 400)]
    assert steps == [(1, 4), (1, 8), (1, 16), (1, 32), (2, 32), (4, 32)]
    sizes = ramp.first_sizes()
    assert (sizes[0], sizes[-1], len(sizes)) == (4, 16, 125)
    notes = ramp_notes(ramp)
    assert "effective batch 4 -> 128 over 400 micro-batches" in notes[0]
    assert any("first micro-batches have 4, 8, 16 samples" in note for note in notes)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_ramp_is_the_same_at_any_number_of_ranks(world_size):
    settings = {"initial_effective_batch_size": 4, "target_effective_batch_size": 64}
    ramp = build_ramp(run_file(batch=16, batch_rampup_steps=40, **settings), world_size)
    alone = build_ramp(run_file(batch=16, batch_rampup_steps=40, **settings), world_size=1)
    assert [ramp.samples(m) for m in range(50)] == [alone.samples(m) for m in range(50)]


def test_a_start_below_one_sample_for_each_rank_is_reported():
    settings = {"initial_effective_batch_size": 2, "target_effective_batch_size": 64}
    notes = ramp_notes(build_ramp(run_file(**settings), world_size=4))
    assert any("4 ranks need one each" in note for note in notes)


def test_a_run_of_an_earlier_version_keeps_whole_micro_batches_for_every_rank():
    settings = {"initial_effective_batch_size": 2, "target_effective_batch_size": 64}
    ramp = build_ramp(run_file(**settings), world_size=4, is_split=False)
    assert (ramp.accumulation(0), ramp.micro_batch_size(0), ramp.first_sizes()) == (4, 4, [])
    assert any("less than one on each of 4 ranks: rounded up to 16" in n for n in ramp_notes(ramp))


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_an_effective_batch_size_is_the_same_at_any_number_of_ranks(world_size):
    run = RunFile.model_validate({"train": {"batch_size": 4, "effective_batch_size": 24}})
    assert micro_batches_per_step(run, world_size) == 6


def test_an_effective_batch_size_below_one_micro_batch_per_rank_is_rejected():
    run = RunFile.model_validate({"train": {"batch_size": 4, "effective_batch_size": 24}})
    with pytest.raises(ConfigError, match=r"7 ranks .* need at least 28"):
        micro_batches_per_step(run, 7)


def test_a_target_that_is_not_a_multiple_is_rounded_up_and_reported():
    ramp = build_ramp(
        run_file(initial_effective_batch_size=4, target_effective_batch_size=30), world_size=1
    )
    assert ramp.accumulation(10**6) == 8
    assert any("30 is not a multiple" in n and "rounded up to 32" in n for n in ramp_notes(ramp))


def test_a_constant_ramp_is_reported():
    ramp = build_ramp(run_file(batch=32, initial_effective_batch_size=32), world_size=1)
    assert ramp.is_constant
    assert any("ramp: no effect" in note for note in ramp_notes(ramp))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (
            {"initial_effective_batch_size": 64, "target_effective_batch_size": 8},
            "a ramp can only grow",
        ),
        ({"initial_effective_batch_size": 2, "target_effective_batch_size": 3}, "micro-batch"),
    ],
)
def test_impossible_ramps_are_rejected(settings, word):
    with pytest.raises(ConfigError, match=word):
        build_ramp(run_file(**settings), world_size=1)


def test_without_the_setting_there_is_no_ramp():
    run = RunFile.model_validate({"train": {"gradient_accumulation_steps": 3}})
    assert build_ramp(run, world_size=4) is None


@given(
    initial=st.integers(1, 64),
    growth=st.integers(0, 512),
    length=st.integers(1, 2000),
    shape=st.sampled_from(["quadratic", "linear"]),
    per_micro_batch=st.integers(1, 64),
)
def test_a_ramp_grows_and_ends_at_its_target(initial, growth, length, shape, per_micro_batch):
    target = initial + growth
    ramp = AccumulationRamp(initial, target, length, shape, per_micro_batch)
    places = range(0, length + 1, max(1, length // 50))
    values = [ramp.samples(m) for m in places]
    assert values == sorted(values)
    assert all(value >= ramp.effective(m) for value, m in zip(values, places, strict=True))
    whole = -(-initial // per_micro_batch) * per_micro_batch
    assert values[0] == (initial if initial < per_micro_batch else whole)
    if target >= per_micro_batch:
        assert ramp.samples(length) == -(-target // per_micro_batch) * per_micro_batch
    sizes = ramp.first_sizes()
    assert sizes == sorted(sizes)
    assert all(size < per_micro_batch for size in sizes)
