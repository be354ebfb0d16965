from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gracetune.data.dataset import Corruption, CorruptionLog
from gracetune.errors import DataError
from gracetune.events.types import Event, Notice

if TYPE_CHECKING:
    from pathlib import Path


def _build_log(count: int) -> CorruptionLog:
    log = CorruptionLog(lambda event: None)
    for number in range(count):
        log.record("cats", f"{number}.png", "truncated")
    return log


def test_each_unreadable_file_is_reported_once() -> None:
    events: list[Event] = []
    log = CorruptionLog(events.append)
    log.record("cats", "a.png", "truncated")
    log.record("cats", "a.png", "truncated, again")
    log.record("dogs", "a.png", "empty")
    assert events == [
        Notice("dataset 'cats': skipped a.png: truncated", level="warning"),
        Notice("dataset 'dogs': skipped a.png: empty", level="warning"),
    ]
    assert log.entries == (
        Corruption("cats", "a.png", "truncated"),
        Corruption("dogs", "a.png", "empty"),
    )


def test_more_than_max_corruption_rate_is_an_error() -> None:
    _build_log(1).check("cats", 100, 0.01)
    _build_log(0).check("cats", 100, 0.0)
    _build_log(5).check("cats", 5, 1.0)
    _build_log(29).check("cats", 100, 0.29)
    with pytest.raises(DataError):
        _build_log(2).check("cats", 100, 0.01)
    with pytest.raises(DataError):
        _build_log(1).check("cats", 100, 0.0)


def test_each_dataset_is_counted_separately() -> None:
    log = _build_log(3)
    log.check("dogs", 3, 0.0)


def test_the_error_names_the_first_files_and_the_fix() -> None:
    with pytest.raises(DataError) as caught:
        _build_log(8).check("cats", 10, 0.5)
    text = str(caught.value)
    assert "'cats': 8 of 10 samples cannot be used, but max_corruption_rate is 0.5" in text
    assert "0.png (truncated); 1.png (truncated)" in text
    assert "4.png" in text
    assert "5.png" not in text
    assert "and 3 more" in text
    assert "raise max_corruption_rate" in text


def test_the_report_lists_every_unreadable_file(tmp_path: Path) -> None:
    log = CorruptionLog(lambda event: None)
    log.record("cats", "ü.png", "empty")
    log.write(tmp_path / "corrupt.json")
    assert json.loads((tmp_path / "corrupt.json").read_text(encoding="utf-8")) == {
        "unreadable": 1,
        "samples": [{"dataset": "cats", "key": "ü.png", "reason": "empty"}],
    }


def test_the_report_is_written_when_the_run_stops(tmp_path: Path) -> None:
    report = tmp_path / "corruption.json"
    log = CorruptionLog(lambda event: None, report)
    log.record("cats", "a.png", "truncated")
    log.check("cats", 100, 0.01)
    assert not report.exists()
    with pytest.raises(DataError, match=r"all of them in .*corruption\.json"):
        log.check("cats", 10, 0.01)
    assert json.loads(report.read_text())["samples"][0]["key"] == "a.png"


def test_newlines_in_names_and_reasons_are_escaped() -> None:
    events: list[Event] = []
    log = CorruptionLog(events.append)
    log.record("cats", "two\nlines.png", "bad\nbytes")
    assert events == [
        Notice("dataset 'cats': skipped two\\nlines.png: bad\\nbytes", level="warning")
    ]
    with pytest.raises(DataError) as caught:
        log.check("cats", 1, 0.0)
    assert "\n" not in str(caught.value)
    assert log.entries[0].key == "two\nlines.png"
