from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from source_files import JPEG, image_table, save_to_disk, write_folder, write_parquet, write_tar

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.dataset import address_kind, open_address
from gracetune.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["a.jpg", "a.txt"], "folder"),
        (["0.tar", "deep/1.TAR", "README.md", "sizes.json"], "tar"),
        (["data/train-0.parquet", ".gitattributes", ".git/x.jpg", "README.md"], "parquet"),
        (["0.tar", "1.parquet"], "folder"),
        (["0.tar", "a.jpg"], "folder"),
        (["metadata.parquet", "a.jpg"], "folder"),
        (["README.md"], "folder"),
        (["state.json", "data.arrow"], "hf"),
        (["dataset_dict.json", "train/state.json"], "hf"),
    ],
)
def test_the_kind_of_a_folder_follows_from_its_files(
    tmp_path: Path, files: list[str], kind: str
) -> None:
    write_folder(tmp_path, dict.fromkeys(files, b"x"))
    assert address_kind(str(tmp_path)) == kind


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("s3://bucket/data", "remote"),
        ("https://host/data.tar", "tar"),
        ("https://host/data.parquet?signature=x.jpg", "parquet"),
        ("https://host/data?file=x.tar", "remote"),
        ("s3://bucket/shards/*.TAR", "tar"),
        ("shards/*.tar", "tar"),
        ("one.parquet", "parquet"),
        ("no/such/folder", "folder"),
        ("x" * 300, "folder"),
        ("~no-such-user/x.TAR", "tar"),
    ],
)
def test_the_kind_of_an_address_follows_from_its_name(address: str, kind: str) -> None:
    assert address_kind(address) == kind


def test_a_folder_named_like_a_shard_is_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "x.tar", {"a.jpg": b"x"})
    assert address_kind(str(tmp_path / "x.tar")) == "folder"


def test_open_address_opens_each_kind(tmp_path: Path) -> None:
    table = image_table([JPEG], ["x"])
    places = {
        write_folder(tmp_path / "folder", {"a.jpg": JPEG}): "a.jpg",
        write_tar(tmp_path / "x.tar", {"a.jpg": JPEG}): "a.jpg",
        write_parquet(tmp_path / "tables/x.parquet", table).parent: "row-000000.jpg",
        save_to_disk(tmp_path / "saved", table): "row-000000.jpg",
        f"file://{tmp_path}/folder": "a.jpg",
    }
    for address, key in places.items():
        section = DatasetSection(instance_data_dir=str(address))
        assert open_address(section, "datasets[0]", lambda event: None).read(key) == JPEG


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("x" * 300, "File name too long"),
        ("~no-such-user/pictures", "folder does not exist"),
        ("a\0b", "NUL"),
        ("a\0*.tar", "NUL"),
        ("no-*.parquet", r"there is no \.parquet file"),
    ],
)
def test_an_invalid_address_is_an_error_that_names_the_setting(address: str, rule: str) -> None:
    section = DatasetSection(instance_data_dir=address)
    with pytest.raises(DataError, match=rf"datasets\[0\]\.instance_data_dir.*{rule}"):
        open_address(section, "datasets[0]", lambda event: None)


def test_shards_behind_links_or_with_uppercase_suffixes_are_found(tmp_path: Path) -> None:
    write_tar(tmp_path / "far/1.TAR", {"a.jpg": JPEG})
    write_tar(tmp_path / "near/0.tar", {"a.jpg": JPEG})
    write_tar(tmp_path / "near/.hidden/2.tar", {"a.jpg": JPEG})
    (tmp_path / "near/link").symlink_to(tmp_path / "far")
    section = DatasetSection(instance_data_dir=str(tmp_path / "near"))
    source = open_address(section, "datasets[0]", lambda event: None)
    assert list(source.keys()) == ["0/a.jpg", "link/1/a.jpg"]


def test_instance_data_dir_must_be_set() -> None:
    with pytest.raises(DataError, match=r"datasets\[4\]\.instance_data_dir is not set"):
        open_address(DatasetSection(), "datasets[4]", lambda event: None)
