from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from gracetune.data.source import (
    FileRange,
    check_key,
    file_stamp,
    is_hidden,
    printable,
    read_range,
)
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
def test_control_characters_in_names_are_escaped(key: str, shown: str) -> None:
    assert printable(key) == shown


@pytest.mark.parametrize("key", [".git/x", "a/._b.jpg", "../x", "a/../b", ".x"])
def test_a_path_with_a_part_that_starts_with_a_dot_is_hidden(key: str) -> None:
    assert is_hidden(key)


def test_a_dot_inside_a_name_does_not_hide_it() -> None:
    assert not is_hidden("a.b/c.d.jpg")


def test_names_must_be_utf8() -> None:
    check_key("datasets[0].instance_data_dir", "ü\n.png")
    with pytest.raises(DataError, match=r"datasets\[0\]\.instance_data_dir has.*\\xe9"):
        check_key("datasets[0].instance_data_dir", "caf\udce9")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(range(100)))
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: whole(fd, min(count, 7), offset))
    assert read_range(FileRange(str(path), 10, 50)) == bytes(range(10, 60))
    assert read_range(FileRange(str(path), 90, 0)) == b""
    assert read_range(FileRange(str(path), 0, None)) == bytes(range(100))
    with pytest.raises(OSError, match="ends 40 bytes too early"):
        read_range(FileRange(str(path), 90, 50))


@pytest.mark.parametrize("now", [b"", b"less", b"x" * 100, b"more" * 1000])
def test_a_file_that_changes_before_it_is_read_is_returned_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: bytes
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    whole = os.pread

    def after_a_change(descriptor: int, count: int, offset: int) -> bytes:
        if offset == 0:
            path.write_bytes(now)
        return whole(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", after_a_change)
    assert read_range(FileRange(str(path), 0, None)) == now


def test_the_stamp_changes_with_an_edit_that_keeps_size_and_mtime(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"one")
    before, status = file_stamp([str(path)]), path.stat()
    assert file_stamp([str(path)]) == before
    while file_stamp([str(path)]) == before:  # some kernels count time in steps of milliseconds
        path.write_bytes(b"two")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    path.unlink()
    assert file_stamp([str(path)]) not in (before, file_stamp([]))
