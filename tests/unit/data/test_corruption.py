from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gracetune.data.dataset import Corruption, CorruptionLog
from gracetune.errors import DataError
from gracetune.events.types import Event, Notice

if TYPE_CHECKING:
    from pathlib import Path


def _ledger(count: int) -> CorruptionLog:
    ledger = CorruptionLog(lambda event: None)
    for number in range(count):
        ledger.record("cats", f"{number}.png", "truncated")
    return ledger


def test_each_is_told_once_by_name() -> None:
    events: list[Event] = []
    ledger = CorruptionLog(events.append)
    ledger.record("cats", "a.png", "truncated")
    ledger.record("cats", "a.png", "truncated, again")
    ledger.record("dogs", "a.png", "empty")
    assert events == [
        Notice("dataset 'cats': skipped a.png: truncated", level="warning"),
        Notice("dataset 'dogs': skipped a.png: empty", level="warning"),
    ]
    assert ledger.entries == (
        Corruption("cats", "a.png", "truncated"),
        Corruption("dogs", "a.png", "empty"),
    )


def test_up_to_the_rate_is_fine_and_past_it_is_not() -> None:
    _ledger(1).check("cats", 100, 0.01)
    _ledger(0).check("cats", 100, 0.0)
    _ledger(5).check("cats", 5, 1.0)
    _ledger(29).check("cats", 100, 0.29)
    with pytest.raises(DataError):
        _ledger(2).check("cats", 100, 0.01)
    with pytest.raises(DataError):
        _ledger(1).check("cats", 100, 0.0)


def test_data_sets_are_counted_apart() -> None:
    ledger = _ledger(3)
    ledger.check("dogs", 3, 0.0)


def test_the_error_names_the_first_files_and_the_ways_out() -> None:
    with pytest.raises(DataError) as caught:
        _ledger(8).check("cats", 10, 0.5)
    text = str(caught.value)
    assert "'cats': 8 of 10 samples cannot be read, but max_corruption_rate is 0.5" in text
    assert "0.png (truncated); 1.png (truncated)" in text
    assert "4.png" in text
    assert "5.png" not in text
    assert "and 3 more" in text
    assert "raise max_corruption_rate" in text


def test_the_report_has_them_all(tmp_path: Path) -> None:
    ledger = CorruptionLog(lambda event: None)
    ledger.record("cats", "ü.png", "empty")
    ledger.write(tmp_path / "corrupt.json")
    assert json.loads((tmp_path / "corrupt.json").read_text(encoding="utf-8")) == {
        "unreadable": 1,
        "samples": [{"dataset": "cats", "key": "ü.png", "reason": "empty"}],
    }


def test_a_run_that_stops_leaves_the_report_behind(tmp_path: Path) -> None:
    report = tmp_path / "corruption.json"
    ledger = CorruptionLog(lambda event: None, report)
    ledger.record("cats", "a.png", "truncated")
    ledger.check("cats", 100, 0.01)
    assert not report.exists()
    with pytest.raises(DataError, match=r"all of them in .*corruption\.json"):
        ledger.check("cats", 10, 0.01)
    assert json.loads(report.read_text())["samples"][0]["key"] == "a.png"


def test_a_name_of_two_lines_is_told_on_one() -> None:
    events: list[Event] = []
    ledger = CorruptionLog(events.append)
    ledger.record("cats", "two\nlines.png", "bad\nbytes")
    assert events == [
        Notice("dataset 'cats': skipped two\\nlines.png: bad\\nbytes", level="warning")
    ]
    with pytest.raises(DataError) as caught:
        ledger.check("cats", 1, 0.0)
    assert "\n" not in str(caught.value)
    assert ledger.entries[0].key == "two\nlines.png"
