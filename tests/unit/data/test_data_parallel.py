from __future__ import annotations

import threading
import time

import pytest

from gracetune.data.parallel import default_workers, ordered_map


def test_results_come_in_order_whoever_is_first() -> None:
    def slow_start(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        return number * number

    assert list(ordered_map(slow_start, range(50), 4)) == [number**2 for number in range(50)]


def test_workers_really_work_at_once() -> None:
    meeting = threading.Barrier(3, timeout=10)
    assert sorted(ordered_map(lambda _: meeting.wait(), range(3), 3)) == [0, 1, 2]


def test_few_are_in_flight() -> None:
    started: list[int] = []
    results = ordered_map(started.append, range(1000), 2)
    next(results)
    results.close()
    assert len(started) <= 6
    assert not [t for t in threading.enumerate() if t.name.startswith("gracetune-read")]


def test_an_error_comes_out_where_it_belongs() -> None:
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
