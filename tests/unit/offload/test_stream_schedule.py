import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.offload.ring import LONGEST_PASS, FetchSchedule, Pass

THERE_AND_BACK = [0, 1, 2, 3, 2, 1, 0]


def run(schedule, kind, uses):
    schedule.begin(kind)
    return [schedule.used(block) for block in uses]


def test_the_first_pass_is_guessed_there_and_back():
    schedule = FetchSchedule(4)
    schedule.begin(Pass.TRAIN)
    for block in THERE_AND_BACK:
        assert schedule.expected() == block
        schedule.used(block)
    assert schedule.expected() is None


def test_sampling_is_guessed_as_forward_alone():
    schedule = FetchSchedule(3)
    schedule.begin(Pass.SAMPLE)
    for block in range(3):
        assert schedule.expected() == block
        schedule.used(block)
    assert schedule.ahead() == [0, 1, 2], "the next sample"


def test_what_comes_is_told_soonest_first_and_across_the_turn():
    schedule = FetchSchedule(4)
    run(schedule, Pass.TRAIN, [0, 1, 2])
    assert schedule.ahead() == [3, 2, 1, 0]
    schedule.used(3)
    schedule.used(2)
    schedule.used(1)
    assert schedule.ahead() == [0, 1, 2, 3], "the end of backward is where the next forward starts"


def test_an_order_is_learnt_from_the_first_pass_without_complaint():
    schedule = FetchSchedule(3)
    odd = [2, 0, 2, 1, 0]
    assert all(run(schedule, Pass.TRAIN, odd))
    assert all(run(schedule, Pass.TRAIN, odd))
    assert schedule.surprises == 0
    schedule.begin(Pass.TRAIN)
    assert schedule.ahead() == [2, 0, 1]


def test_a_skipped_block_is_one_surprise_and_the_rest_is_foreseen_again():
    schedule = FetchSchedule(5)
    there_and_back = [0, 1, 2, 3, 4, 3, 2, 1, 0]
    run(schedule, Pass.TRAIN, there_and_back)
    verdicts = run(schedule, Pass.TRAIN, [0, 1, 3, 4, 3, 2, 1, 0])
    assert verdicts == [True, True, False, True, True, True, True, True]
    assert schedule.surprises == 1


def test_a_repeated_block_does_not_send_us_to_the_end_of_backward():
    schedule = FetchSchedule(8)
    order = [*range(8), *range(6, -1, -1)]
    run(schedule, Pass.TRAIN, order)
    run(schedule, Pass.TRAIN, [0, 1, 2])
    assert schedule.used(1) is False
    assert schedule.expected() == 2


def test_a_surprising_order_is_the_next_one_expected():
    schedule = FetchSchedule(3)
    run(schedule, Pass.TRAIN, [0, 1, 2, 1, 0])
    run(schedule, Pass.TRAIN, [0, 2, 0])
    assert all(run(schedule, Pass.TRAIN, [0, 2, 0]))


def test_a_pass_without_its_backward_teaches_nothing():
    schedule = FetchSchedule(4)
    run(schedule, Pass.TRAIN, THERE_AND_BACK)
    assert all(run(schedule, Pass.TRAIN, [0, 1, 2, 3]))
    assert all(run(schedule, Pass.TRAIN, THERE_AND_BACK))


def test_sampling_between_steps_leaves_the_steps_order_alone():
    schedule = FetchSchedule(4)
    for _ in range(3):
        assert all(run(schedule, Pass.TRAIN, THERE_AND_BACK))
        assert all(run(schedule, Pass.SAMPLE, [0, 1, 2, 3]))
    assert schedule.surprises == 0


def test_two_forwards_before_one_backward_are_learnt():
    schedule = FetchSchedule(3)
    both = [0, 1, 2, 1, 0, 2, 1, 0]
    for _ in range(2):
        run(schedule, Pass.TRAIN, [0, 1, 2])
        run(schedule, Pass.TRAIN, both)
    learnt = schedule.surprises
    run(schedule, Pass.TRAIN, [0, 1, 2])
    run(schedule, Pass.TRAIN, both)
    assert schedule.surprises == learnt


def test_a_block_never_seen_is_a_surprise_and_nothing_more():
    schedule = FetchSchedule(3)
    run(schedule, Pass.SAMPLE, [0, 1])
    run(schedule, Pass.SAMPLE, [1, 0])  # learnt: block 2 is not used
    run(schedule, Pass.SAMPLE, [])
    assert schedule.used(2) is False
    assert schedule.expected() == 1


def test_passes_that_nobody_announces_do_not_fill_memory():
    schedule = FetchSchedule(2)
    schedule.begin(Pass.SAMPLE)
    for step in range(5 * LONGEST_PASS):
        schedule.used(step % 2)
    assert len(schedule._seen) == 2 * LONGEST_PASS
    schedule.begin(Pass.SAMPLE)
    assert schedule.ahead() == [0, 1]


@pytest.mark.parametrize("kind", list(Pass))
def test_one_block_alone(kind):
    schedule = FetchSchedule(1)
    assert run(schedule, kind, [0]) == [True]
    assert schedule.ahead() == [0]


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(Pass)), min_size=4, max_size=4),
)
def test_any_order_is_foreseen_the_second_time(passes, kinds):
    schedule = FetchSchedule(6)
    for uses, kind in zip(passes, kinds, strict=False):
        run(schedule, kind, uses)
    longest = [*passes[-1], *range(5, -1, -1), *range(6), 0]
    run(schedule, kinds[0], longest)
    before = schedule.surprises
    schedule.begin(kinds[0])
    for block in longest:
        assert schedule.ahead()[0] == block
        assert sorted(schedule.ahead()) == list(range(6))
        assert schedule.used(block)
    assert schedule.surprises == before


def test_of_two_models_each_keeps_its_own_order():
    schedule = FetchSchedule(5, starts=(0, 3))
    orders = [[0, 1, 2, 1, 0], [3, 4, 3]]
    for model in (0, 1, 1, 0):
        schedule.begin(Pass.TRAIN, model)
        assert all(schedule.used(block) for block in orders[model])
    assert schedule.surprises == 0
    schedule.begin(Pass.SAMPLE, 1)
    assert schedule.ahead() == [3, 4]
