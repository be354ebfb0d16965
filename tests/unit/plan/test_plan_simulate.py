"""The event simulation: order within a stream, dependencies, and a shared link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.plan.simulate import STREAMS, Task, simulate

COMPUTE, WEIGHTS, IN, OUT = range(4)


def test_tasks_of_a_stream_run_in_order() -> None:
    times = simulate([Task(COMPUTE, 2.0), Task(COMPUTE, 3.0)], 1.0)
    assert times.starts == (0.0, 2.0)
    assert times.ends == (2.0, 5.0)


def test_a_copy_overlaps_with_compute() -> None:
    tasks = [Task(COMPUTE, 2.0), Task(WEIGHTS, 5.0), Task(COMPUTE, 1.0, (1,))]
    times = simulate(tasks, 1.0)
    assert times.starts[2] == 5.0
    assert times.ends[2] == 6.0


def test_two_copies_in_one_direction_share_the_link() -> None:
    times = simulate([Task(WEIGHTS, 2.0), Task(IN, 2.0)], 1.0)
    assert times.ends == (4.0, 4.0)


def test_a_finished_copy_frees_its_share_of_the_link() -> None:
    times = simulate([Task(WEIGHTS, 1.0), Task(IN, 3.0)], 1.0)
    assert times.ends == (2.0, 4.0)


@pytest.mark.parametrize(("share", "end"), [(1.0, 2.0), (0.5, 4.0)])
def test_copies_in_both_directions_slow_each_other(share: float, end: float) -> None:
    times = simulate([Task(IN, 2.0), Task(OUT, 2.0)], share)
    assert times.ends == (end, end)


def test_a_task_without_duration_ends_at_once() -> None:
    assert simulate([Task(COMPUTE, 0.0), Task(COMPUTE, 1.0, (0,))], 1.0).ends == (0.0, 1.0)


def test_a_task_cannot_depend_on_a_later_one() -> None:
    with pytest.raises(AssertionError, match="waits for later"):
        simulate([Task(COMPUTE, 1.0, (1,)), Task(WEIGHTS, 1.0)], 1.0)


@st.composite
def build_tasks(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        lane = draw(st.integers(0, len(STREAMS) - 1))
        tasks.append(Task(lane, draw(st.floats(0, 5)), tuple(after)))
    return tasks


@given(build_tasks(), st.floats(0.4, 1.0))
def test_tasks_respect_dependencies_and_durations(tasks: list[Task], share: float) -> None:
    times = simulate(tasks, share)
    for number, task in enumerate(tasks):
        assert all(times.starts[number] >= times.ends[other] - 1e-9 for other in task.dependencies)
        assert times.ends[number] - times.starts[number] >= task.seconds - 1e-6
    longest = max(sum(t.seconds for t in tasks if t.stream == lane) for lane in range(len(STREAMS)))
    assert max(times.ends) >= longest - 1e-6
    assert max(times.ends) <= sum(t.seconds for t in tasks) * 2 / share + 1e-6
