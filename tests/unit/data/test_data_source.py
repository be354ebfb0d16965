from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gracetune.data.source import Span, check_name, is_hidden, printable, read_span
from gracetune.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("plain é 日本.png", "plain é 日本.png"),
        ("two\nlines.png", "two\\nlines.png"),
        ("tab\there", "tab\\there"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\u2028b", "a\\u2028b"),
    ],
)
def test_a_name_stays_on_its_line(key: str, shown: str) -> None:
    assert printable(key) == shown


@pytest.mark.parametrize("key", [".git/x", "a/._b.jpg", "../x", "a/../b", ".x"])
def test_hidden_in_any_part(key: str) -> None:
    assert is_hidden(key)


def test_a_dot_inside_hides_nothing() -> None:
    assert not is_hidden("a.b/c.d.jpg")


def test_names_must_be_utf8() -> None:
    check_name("datasets[0].instance_data_dir", "ü\n.png")
    with pytest.raises(DataError, match=r"datasets\[0\]\.instance_data_dir holds.*\\xe9"):
        check_name("datasets[0].instance_data_dir", "caf\udce9")


def test_a_span_is_read_in_as_many_calls_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: whole(fd, min(count, 7), offset))
    with (tmp_path / "x").open("rb") as file:
        assert read_span(Span(file.fileno(), 10, 50)) == bytes(range(10, 60))
        assert read_span(Span(file.fileno(), 90, 50)) == bytes(range(90, 100))
        assert read_span(Span(file.fileno(), 90, 0)) == b""
