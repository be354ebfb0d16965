"""Serve the files of a dataset from memory."""

import pytest

from gracetune.config.dataset_schema import InMemorySection
from gracetune.errors import DataError
from gracetune.hosts.in_memory_files import BackendFiles, StagedDatasetConfig, stage_dataset


def staged_config(folder) -> StagedDatasetConfig:
    return StagedDatasetConfig("pics", str(folder), InMemorySection(), ())


@pytest.fixture
def staged(tmp_path):
    """A folder, and its staged files."""
    folder = tmp_path / "pics"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.png", "sub/b.JPG", "a.txt", "aspect_ratio_bucket_x.txt", "cache.pt"):
        (folder / name).write_bytes(name.encode())
    return folder, stage_dataset(staged_config(folder), lambda event: None, None)


def test_media_and_captions_are_staged_and_host_metadata_is_not(staged):
    folder, files = staged
    names = ("a.png", "sub/b.JPG", "a.txt", "aspect_ratio_bucket_x.txt", "cache.pt", "no.png")
    assert [files.holds(str(folder / name)) for name in names] == [True] * 3 + [False] * 3
    assert files.read(str(folder / "sub/b.JPG")) == b"sub/b.JPG"
    assert not files.holds("a.png")
    assert files.holds(folder / "a.png"), "paths may be strings or Path objects"
    files.forget(folder / "a.png")
    assert not files.holds(str(folder / "a.png"))


def test_relative_and_redundant_paths_name_the_same_file(staged, monkeypatch):
    folder, files = staged
    monkeypatch.chdir(folder.parent)
    assert files.read("pics/a.png") == b"a.png"
    assert files.read(f"{folder}//sub/../a.png") == b"a.png"
    files.forget("./pics/a.png")
    assert not files.holds(folder / "a.png")


def test_a_file_opened_for_writing_is_read_from_disk_afterwards(staged):
    folder, files = staged
    backend = BackendFiles(files, None)
    path = str(folder / "a.txt")
    assert backend.read(path) == b"a.txt"
    assert backend.open_file(path, "r").read() == "a.txt"
    assert backend.open_file(path, "rb").read() == b"a.txt"
    assert backend.open_file(path, "w") is None
    assert backend.read(path) is None
    assert not backend.holds(path)


def test_a_folder_without_media_files_is_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"x")
    with pytest.raises(DataError, match=r"has no file with an extension of \.aac, "):
        stage_dataset(staged_config(tmp_path), lambda event: None, None)
