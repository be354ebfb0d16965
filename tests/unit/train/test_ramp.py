import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.schema import RunFile
from gracetune.errors import ConfigError
from gracetune.train.ramp import AccumulationRamp, build_ramp, constant


def run_file(batch=4, **ramp):
    section = {"enable_batch_size_rampup": True, **ramp}
    return RunFile.model_validate({"train": {"batch_size": batch}, "gh200_optimizations": section})


def test_the_guides_example_goes_from_4_to_32_in_400_micro_batches():
    ramp, notes = build_ramp(
        run_file(
            initial_effective_batch_size=4, target_effective_batch_size=32, batch_rampup_steps=400
        ),
        world_size=1,
    )
    assert [ramp.accumulation(m) for m in (0, 200, 400, 5000)] == [1, 3, 8, 8]
    assert notes[0].startswith("GH200 gradient accumulation ramp enabled")


def test_linear_on_request():
    ramp = AccumulationRamp(4, 32, 400, "linear", 4)
    assert ramp.accumulation(200) == 5


def test_effective_batch_counts_the_ranks():
    ramp, _ = build_ramp(
        run_file(initial_effective_batch_size=8, target_effective_batch_size=64), world_size=2
    )
    assert ramp.accumulation(0) == 1
    assert ramp.accumulation(10**6) == 8


def test_a_target_between_multiples_rounds_up_and_says_so():
    ramp, notes = build_ramp(
        run_file(initial_effective_batch_size=4, target_effective_batch_size=30), world_size=1
    )
    assert ramp.accumulation(10**6) == 8
    assert any("30 is no multiple" in note and "rounded up to 32" in note for note in notes)


def test_a_start_below_one_micro_batch_rounds_up_and_a_flat_ramp_says_so():
    ramp, notes = build_ramp(run_file(batch=32, initial_effective_batch_size=4), world_size=1)
    assert ramp.is_constant
    assert any("rounded up to 32" in note for note in notes)
    assert any("the ramp changes nothing" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"initial_effective_batch_size": 64, "target_effective_batch_size": 8}, "a ramp grows"),
        ({"initial_effective_batch_size": 2, "target_effective_batch_size": 3}, "micro-batch"),
    ],
)
def test_impossible_ramps_are_refused(settings, word):
    with pytest.raises(ConfigError, match=word):
        build_ramp(run_file(**settings), world_size=1)


def test_no_ramp_keeps_the_accumulation():
    run = RunFile.model_validate({"train": {"gradient_accumulation_steps": 3}})
    ramp, notes = build_ramp(run, world_size=4)
    assert ramp == constant(3)
    assert ramp.accumulation(0) == ramp.accumulation(10**6) == 3
    assert notes == []


@given(
    initial=st.integers(1, 64),
    growth=st.integers(0, 512),
    length=st.integers(1, 2000),
    shape=st.sampled_from(["quadratic", "linear"]),
    per_micro_batch=st.integers(1, 64),
)
def test_a_ramp_only_grows_and_ends_at_its_target(initial, growth, length, shape, per_micro_batch):
    target = initial + growth
    ramp = AccumulationRamp(initial, target, length, shape, per_micro_batch)
    values = [ramp.accumulation(m) for m in range(0, length + 1, max(1, length // 50))]
    assert values == sorted(values)
    assert values[0] == -(-initial // per_micro_batch)
    assert ramp.accumulation(length) == -(-target // per_micro_batch)
