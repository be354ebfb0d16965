from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.data import staging
from gracetune.data.staging import StagingBudget, staging_room
from gracetune.errors import DataError
from gracetune.units import GIB

MACHINES = Path(__file__).parents[2] / "data" / "machines"


def _budget(limit: float | None, room: int, raw: int = 100 * GIB) -> StagingBudget:
    return StagingBudget(limit, raw, 1000, "datasets[1]", lambda: room)


def test_the_smaller_limit_applies() -> None:
    assert _budget(10, 50 * GIB).nbytes == 10 * GIB
    assert _budget(80, 50 * GIB).nbytes == 50 * GIB
    assert _budget(None, 50 * GIB).nbytes == 50 * GIB
    assert _budget(None, -5).nbytes == 0


def test_the_error_names_memory_limit_gb_and_how_many_files_fit() -> None:
    with pytest.raises(DataError) as caught:
        _budget(10, 50 * GIB).check(100 * GIB)
    text = str(caught.value)
    assert "datasets[1].in_memory.memory_limit_gb is 10" in text
    assert "needs about 100 GiB; about 100 of its 1,000 files would fit. Raise the limit" in text


def test_the_error_names_the_hosts_memory_if_that_is_smaller() -> None:
    with pytest.raises(DataError, match=r"datasets\[1\]: this machine has 50\.0 GiB.*Free memory"):
        _budget(80, 50 * GIB).check(100 * GIB)


def test_the_limit_is_exact_to_the_byte() -> None:
    budget = StagingBudget(100 / GIB, 200, 2, "datasets[0]", lambda: GIB)
    budget.take(150, 100)
    with pytest.raises(DataError, match="would fit"):
        budget.take(1, 1)


def test_the_required_memory_is_extrapolated_from_the_files_read() -> None:
    budget = _budget(1, 50 * GIB)
    budget.take(2 * GIB, GIB)
    with pytest.raises(DataError, match="needs about 40 GiB"):  # two fifths of 100
        budget.take(3 * GIB, GIB)


def test_free_host_memory_is_checked_again_while_staging() -> None:
    rooms = [10 * GIB, 5 * GIB, -1]
    budget = StagingBudget(None, GIB, 9, "datasets[0]", lambda: rooms.pop(0))
    budget.take(1, 1)  # not worth a look
    assert len(rooms) == 2
    budget.take(staging.WATCH_NBYTES, staging.WATCH_NBYTES)
    with pytest.raises(DataError, match=r"ran out of memory after 512\.0 MiB.*other processes use"):
        budget.take(staging.WATCH_NBYTES, staging.WATCH_NBYTES)


def test_staging_room_is_the_available_memory_minus_a_reserve() -> None:
    root = MACHINES / "h200-pcie"
    lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    assert staging_room(root / "proc", root / "sys") == available - 4 * GIB


def test_the_memory_limit_of_a_container_reduces_staging_room() -> None:
    root = MACHINES / "container"
    whole = staging_room(root / "proc", root / "nowhere")
    assert staging_room(root / "proc", root / "sys") < whole


def test_staging_room_of_this_machine_is_positive() -> None:
    assert staging_room() > 0
