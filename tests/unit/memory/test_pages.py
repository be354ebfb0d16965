"""Runs of pages against a plain list of pages."""

from itertools import pairwise

from fakes.simulated_driver import PageState, PageTable
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 2)), max_size=30))
def test_runs_of_pages_behave_like_a_list_of_pages(changes: list[tuple[int, int, int]]) -> None:
    table, plain = PageTable(40), [PageState()] * 40
    for first, last, place in changes:
        state = PageState(places=frozenset({place}))
        table.update(first, last, lambda _, state=state: state)
        plain[first:last] = [state] * len(plain[first:last])
        runs = list(table.runs())
        assert [run.state for run in runs for _ in range(run.first, run.last)] == plain
        assert all(one.state != two.state for one, two in pairwise(runs))
        cut = list(table.runs(first, last))
        assert [run.state for run in cut for _ in range(run.first, run.last)] == plain[first:last]
