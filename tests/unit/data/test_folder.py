from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.shard_files import open_tar
from gracetune.data.source import FolderSource, open_folder
from gracetune.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.events.types import Notice


def _write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_a_folder_is_listed_recursively_without_hidden_files(tmp_path: Path) -> None:
    _write(tmp_path, "b.PNG", "a/é.jpg", "a/b/c.txt", ".hidden", ".git/config", "a/.DS_Store")
    assert list(FolderSource(tmp_path).keys()) == ["a/b/c.txt", "a/é.jpg", "b.PNG"]


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    _write(tmp_path, "real/x.png", "elsewhere/y.png")
    (tmp_path / "real/link.png").symlink_to(tmp_path / "elsewhere/y.png")
    (tmp_path / "real/folder").symlink_to(tmp_path / "elsewhere")
    source = FolderSource(tmp_path / "real")
    assert list(source.keys()) == ["folder/y.png", "link.png", "x.png"]
    assert source.read("link.png") == b"elsewhere/y.png"


def test_a_link_to_a_parent_folder_does_not_loop(tmp_path: Path) -> None:
    _write(tmp_path, "a/x.png")
    (tmp_path / "a/round").symlink_to(tmp_path)
    assert list(FolderSource(tmp_path).keys()) == ["a/x.png"]


@pytest.mark.parametrize("target", ["loop.png", "other.png"])
def test_a_link_to_itself_is_listed_but_cannot_be_read(tmp_path: Path, target: str) -> None:
    _write(tmp_path, "x.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / target)
    (tmp_path / "other.png").symlink_to(tmp_path / "loop.png")
    source = FolderSource(tmp_path)
    assert list(source.keys()) == ["loop.png", "other.png", "x.png"]
    with pytest.raises(OSError, match="symbolic links"):
        source.read("loop.png")


def test_each_real_folder_is_listed_once(tmp_path: Path) -> None:
    names = [f"folder {number}" for number in range(7)]
    _write(tmp_path, *(f"{name}/x.png" for name in names))
    for name in names:
        for other in names:
            (tmp_path / name / f"to {other}").symlink_to(tmp_path / other)
    source = FolderSource(tmp_path)
    assert list(source.keys()) == [f"{name}/x.png" for name in names]
    assert {reason: len(paths) for reason, paths in source.skipped.items()} == {
        "links to folders that are listed already": 49
    }


def test_a_folder_outside_is_listed_under_the_first_link_to_it(tmp_path: Path) -> None:
    _write(tmp_path, "real/a.png", "outside/deep/x.png")
    (tmp_path / "real/2").symlink_to(tmp_path / "outside")
    (tmp_path / "real/1").symlink_to(tmp_path / "outside/deep")
    (tmp_path / "real/3").symlink_to(tmp_path / "outside/deep")
    source = FolderSource(tmp_path / "real")
    assert list(source.keys()) == ["1/x.png", "a.png"]


@pytest.mark.parametrize("target", ["..", "../..", "/"])
def test_a_link_to_a_folder_around_the_dataset_is_not_followed(tmp_path: Path, target: str) -> None:
    _write(tmp_path, "real/x.png", "private/y.png")
    (tmp_path / "real/up").symlink_to(target)
    source = FolderSource(tmp_path / "real")
    assert list(source.keys()) == ["x.png"]
    assert source.skipped == {"links to folders that are listed already": ["up"]}


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "a/x.png", "a/locked/y.png")
    scandir = os.scandir

    def refuse(path: str) -> object:  # root may read every folder
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    locked = tmp_path / "a/locked"
    with pytest.raises(DataError, match=rf"its folder {locked} cannot be listed \(Permission"):
        FolderSource(tmp_path)
    section = DatasetSection(instance_data_dir=str(tmp_path), type="tar")
    with pytest.raises(DataError, match=rf"its folder {locked} cannot be listed \(Permission"):
        open_tar(section, "datasets[0]", lambda event: None)


def test_a_file_that_becomes_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    _write(tmp_path, "x.png")
    source = FolderSource(tmp_path)
    (tmp_path / "x.png").unlink()
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(OSError, match="not a regular file"):
        source.read("x.png")


def test_a_dangling_link_is_listed_but_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    source = FolderSource(tmp_path)
    assert list(source.keys()) == ["gone.png"]
    with pytest.raises(FileNotFoundError):
        source.read("gone.png")


def test_pipes_sockets_and_devices_are_not_listed_but_counted(tmp_path: Path) -> None:
    _write(tmp_path, "x.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "null.png").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(tmp_path / "s.png"))
    notices: list[Notice] = []
    section = DatasetSection(instance_data_dir=str(tmp_path))
    source = open_folder(section, "datasets[0]", notices.append)
    assert list(source.keys()) == ["x.png"]
    (notice,) = notices
    assert notice.text.endswith("skipped 3 named pipes, sockets or devices, such as null.png")


def test_a_tilde_is_expanded_to_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "pictures/x.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(FolderSource("~/pictures").keys()) == ["x.png"]


@pytest.mark.parametrize(
    ("name", "rule"),
    [("missing", "folder does not exist"), ("file", "it is a file"), ("empty", "is empty")],
)
def test_the_error_names_setting_path_and_rule(tmp_path: Path, name: str, rule: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty/.hidden").mkdir(parents=True)
    with pytest.raises(DataError, match=rule) as caught:
        FolderSource(tmp_path / name, "datasets[2]")
    assert "datasets[2].instance_data_dir" in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_name_that_is_not_utf8_is_refused_with_a_printable_error(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.png", "wb"):
        pass
    with pytest.raises(DataError, match=r"not UTF-8: caf\\xe9\.png.*Rename") as caught:
        FolderSource(tmp_path)
    str(caught.value).encode()


def test_the_error_for_a_folder_that_cannot_be_listed_has_the_reason(tmp_path: Path) -> None:
    deep = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):  # deeper than a path may be long
        os.mkdir("y" * 250, dir_fd=deep)
        deeper = os.open("y" * 250, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = deeper
    os.close(deep)
    with pytest.raises(DataError, match=r"datasets\.instance_data_dir.*File name too long"):
        FolderSource(tmp_path)


def test_a_path_that_is_too_long_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match=r"datasets\.instance_data_dir.*File name too long"):
        FolderSource("x" * 300)


def test_open_folder_needs_instance_data_dir() -> None:
    with pytest.raises(DataError, match=r"datasets\[1\]\.instance_data_dir is not set.*'local'"):
        open_folder(DatasetSection(), "datasets[1]", lambda event: None)


def test_open_folder_opens_instance_data_dir(tmp_path: Path) -> None:
    _write(tmp_path, "x.png")
    section = DatasetSection(instance_data_dir=str(tmp_path))
    source = open_folder(section, "datasets[0]", lambda event: None)
    assert source.read("x.png") == b"x.png"
    assert source.describe() == f"the folder {tmp_path}"
