from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.prefetch import CHUNK_FILES, CHUNK_NBYTES, chunks, default_workers, ordered_map


def test_results_are_in_order_however_long_each_takes() -> None:
    def slow_start(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        return number * number

    assert list(ordered_map(slow_start, range(50), 4)) == [number**2 for number in range(50)]


def test_workers_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=10)
    assert sorted(ordered_map(lambda _: meeting.wait(), range(3), 3)) == [0, 1, 2]


def test_few_items_are_in_flight_and_closing_ends_the_threads() -> None:
    started: list[int] = []
    results = ordered_map(started.append, range(1000), 2)
    next(results)
    results.close()
    assert len(started) <= 6
    assert not [t for t in threading.enumerate() if t.name.startswith("gracetune-read")]


def test_an_error_is_raised_in_place_of_its_result() -> None:
    def fail_at_two(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    results = ordered_map(fail_at_two, range(10), 2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(results)


def test_default_workers_is_bounded() -> None:
    assert 1 <= default_workers() <= 72


@given(
    sizes=st.lists(st.integers(0, 2 * CHUNK_NBYTES), max_size=300),
    num_workers=st.integers(1, 80),
    most_files=st.none() | st.integers(1, 50),
)
def test_chunks_cover_every_row_once_within_the_limits(
    sizes: list[int], num_workers: int, most_files: int | None
) -> None:
    cut = list(chunks(sizes, num_workers, most_files))
    assert [row for piece in cut for row in piece] == list(range(len(sizes)))
    for piece in cut:
        assert 1 <= len(piece) <= (most_files or CHUNK_FILES)
        assert len(piece) == 1 or sum(sizes[row] for row in piece) <= CHUNK_NBYTES


def test_few_files_are_split_into_chunks_of_one() -> None:
    assert len(list(chunks([1] * 40, 10, None))) == 40
    assert len(list(chunks([1] * 1_000_000, 10, None))) == -(-1_000_000 // CHUNK_FILES)
