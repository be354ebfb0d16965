"""The fetch schedule predicts the next block from the order of earlier passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.offload.ring import LONGEST_PASS, FetchSchedule, PassKind

FORWARD_BACKWARD = [0, 1, 2, 3, 2, 1, 0]


def run(schedule, kind, uses):
    schedule.begin_pass(kind)
    return [schedule.record_use(block) for block in uses]


def test_the_first_pass_is_assumed_to_go_forward_and_backward():
    schedule = FetchSchedule(4)
    schedule.begin_pass(PassKind.TRAIN)
    for block in FORWARD_BACKWARD:
        assert schedule.expected() == block
        schedule.record_use(block)
    assert schedule.expected() is None


def test_the_first_sampling_pass_is_assumed_to_go_forward_only():
    schedule = FetchSchedule(3)
    schedule.begin_pass(PassKind.SAMPLE)
    for block in range(3):
        assert schedule.expected() == block
        schedule.record_use(block)
    assert schedule.upcoming() == [0, 1, 2], "the next sample"


def test_upcoming_blocks_are_listed_soonest_first_across_the_end_of_the_pass():
    schedule = FetchSchedule(4)
    run(schedule, PassKind.TRAIN, [0, 1, 2])
    assert schedule.upcoming() == [3, 2, 1, 0]
    schedule.record_use(3)
    schedule.record_use(2)
    schedule.record_use(1)
    assert schedule.upcoming() == [0, 1, 2, 3], (
        "the end of backward is where the next forward starts"
    )


def test_an_order_is_learnt_from_the_first_pass_without_mismatches():
    schedule = FetchSchedule(3)
    unusual = [2, 0, 2, 1, 0]
    assert all(run(schedule, PassKind.TRAIN, unusual))
    assert all(run(schedule, PassKind.TRAIN, unusual))
    assert schedule.mismatches == 0
    schedule.begin_pass(PassKind.TRAIN)
    assert schedule.upcoming() == [2, 0, 1]


def test_a_skipped_block_is_one_mismatch_and_the_rest_is_predicted():
    schedule = FetchSchedule(5)
    forward_backward = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    run(schedule, PassKind.TRAIN, forward_backward)
    as_expected = run(schedule, PassKind.TRAIN, [0, 1, 3, 4, 3, 2, 1, 0])
    assert as_expected == [True, True, False, True, True, True, True, True]
    assert schedule.mismatches == 1


def test_a_repeated_block_resumes_in_forward_and_not_in_backward():
    schedule = FetchSchedule(8)
    order = [*range(8), *range(6, -1, -1)]
    run(schedule, PassKind.TRAIN, order)
    run(schedule, PassKind.TRAIN, [0, 1, 2])
    assert schedule.record_use(1) is False
    assert schedule.expected() == 2


def test_a_changed_order_is_expected_from_the_next_pass_on():
    schedule = FetchSchedule(3)
    run(schedule, PassKind.TRAIN, [0, 1, 2, 1, 0])
    run(schedule, PassKind.TRAIN, [0, 2, 0])
    assert all(run(schedule, PassKind.TRAIN, [0, 2, 0]))


def test_a_pass_without_its_backward_teaches_nothing():
    schedule = FetchSchedule(4)
    run(schedule, PassKind.TRAIN, FORWARD_BACKWARD)
    assert all(run(schedule, PassKind.TRAIN, [0, 1, 2, 3]))
    assert all(run(schedule, PassKind.TRAIN, FORWARD_BACKWARD))


def test_sampling_between_steps_does_not_change_the_order_of_steps():
    schedule = FetchSchedule(4)
    for _ in range(3):
        assert all(run(schedule, PassKind.TRAIN, FORWARD_BACKWARD))
        assert all(run(schedule, PassKind.SAMPLE, [0, 1, 2, 3]))
    assert schedule.mismatches == 0


def test_two_forwards_before_one_backward_are_learnt():
    schedule = FetchSchedule(3)
    both = [0, 1, 2, 1, 0, 2, 1, 0]
    for _ in range(2):
        run(schedule, PassKind.TRAIN, [0, 1, 2])
        run(schedule, PassKind.TRAIN, both)
    learnt = schedule.mismatches
    run(schedule, PassKind.TRAIN, [0, 1, 2])
    run(schedule, PassKind.TRAIN, both)
    assert schedule.mismatches == learnt


def test_a_block_that_no_pass_used_is_only_a_mismatch():
    schedule = FetchSchedule(3)
    run(schedule, PassKind.SAMPLE, [0, 1])
    run(schedule, PassKind.SAMPLE, [1, 0])  # learnt: block 2 is not used
    run(schedule, PassKind.SAMPLE, [])
    assert schedule.record_use(2) is False
    assert schedule.expected() == 1


def test_unannounced_passes_do_not_use_up_memory():
    schedule = FetchSchedule(2)
    schedule.begin_pass(PassKind.SAMPLE)
    for step in range(5 * LONGEST_PASS):
        schedule.record_use(step % 2)
    assert len(schedule._used) == 2 * LONGEST_PASS
    schedule.begin_pass(PassKind.SAMPLE)
    assert schedule.upcoming() == [0, 1]


@pytest.mark.parametrize("kind", list(PassKind))
def test_one_block_alone(kind):
    schedule = FetchSchedule(1)
    assert run(schedule, kind, [0]) == [True]
    assert schedule.upcoming() == [0]


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(PassKind)), min_size=4, max_size=4),
)
def test_any_order_is_predicted_the_second_time(passes, kinds):
    schedule = FetchSchedule(6)
    for uses, kind in zip(passes, kinds, strict=False):
        run(schedule, kind, uses)
    longest = [*passes[-1], *range(5, -1, -1), *range(6), 0]
    run(schedule, kinds[0], longest)
    before = schedule.mismatches
    schedule.begin_pass(kinds[0])
    for block in longest:
        assert schedule.upcoming()[0] == block
        assert sorted(schedule.upcoming()) == list(range(6))
        assert schedule.record_use(block)
    assert schedule.mismatches == before


def test_each_submodel_has_its_own_order():
    schedule = FetchSchedule(5, first_blocks=(0, 3))
    orders = [[0, 1, 2, 1, 0], [3, 4, 3]]
    for submodel in (0, 1, 1, 0):
        schedule.begin_pass(PassKind.TRAIN, submodel)
        assert all(schedule.record_use(block) for block in orders[submodel])
    assert schedule.mismatches == 0
    schedule.begin_pass(PassKind.SAMPLE, 1)
    assert schedule.upcoming() == [3, 4]
