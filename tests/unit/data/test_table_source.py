"""Parquet files and saved Hugging Face datasets: rows as pictures with captions."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_files import JPEG, PNG, image_table, save_to_disk, write_parquet

from gracetune.config.dataset_schema import ColumnsSection, DatasetSection, InMemorySection
from gracetune.data import table_source
from gracetune.data.staging import StagedSource
from gracetune.data.table_source import open_hf, open_parquet
from gracetune.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from gracetune.data.table_source import TableSource


def _parquet(address: Path, **columns: str) -> TableSource:
    section = DatasetSection(instance_data_dir=str(address), columns=ColumnsSection(**columns))
    return open_parquet(section, "datasets[1]", lambda event: None)


def _hf(address: Path) -> TableSource:
    section = DatasetSection(instance_data_dir=str(address))
    return open_hf(section, "datasets[1]", lambda event: None)


def test_image_and_caption_columns_are_found_by_type_and_name(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2], "caption": ["x", "y"], "jpg": [JPEG, JPEG + b"2"]})
    source = _parquet(write_parquet(tmp_path / "t.parquet", table))
    assert source.read("row-000001.jpg") == JPEG + b"2"
    assert source.read("row-000001.txt") == b"y"


def test_a_single_binary_column_is_the_image_column(tmp_path: Path) -> None:
    table = pa.table({"blob": pa.array([PNG], pa.large_binary())})
    source = _parquet(write_parquet(tmp_path / "t.parquet", table))
    assert list(source.keys()) == ["row-000000.png"]


@pytest.mark.parametrize(
    ("data", "ending"),
    [
        (b"RIFF....WEBP", ".webp"),
        (b"\0\0\0 ftypavif", ".avif"),
        (b"\0\0\0 ftypheic", ".heic"),
        (b"\0\0\0 ftypisom", ".mp4"),
        (b"RIFF....WAVE", ".wav"),
        (b"who knows", ".bin"),
        (b"", ".bin"),
    ],
)
def test_the_suffix_of_a_row_follows_from_its_contents(
    tmp_path: Path, data: bytes, ending: str
) -> None:
    source = _parquet(write_parquet(tmp_path / "t.parquet", pa.table({"image": [data]})))
    assert list(source.keys()) == [f"row-000000{ending}"]


def test_columns_can_be_named(tmp_path: Path) -> None:
    table = pa.table({"a": [PNG], "b": [JPEG], "text": ["no"], "long_text": ["yes"]})
    path = write_parquet(tmp_path / "t.parquet", table)
    source = _parquet(path, image="b", caption="long_text")
    assert source.read("row-000000.jpg") == JPEG
    assert source.read("row-000000.txt") == b"yes"
    with pytest.raises(DataError, match=r"columns\.image is None.*no obvious.*a \(binary\), b"):
        _parquet(path)
    with pytest.raises(DataError, match=r"datasets\[1\]\.columns\.image is 'c'.*no such column"):
        _parquet(path, image="c")
    with pytest.raises(DataError, match=r"columns\.caption is 'a'.*Text columns: text, long_text"):
        _parquet(path, image="a", caption="a")


def test_a_null_caption_is_empty_and_a_null_image_unreadable(tmp_path: Path) -> None:
    source = _parquet(write_parquet(tmp_path / "t.parquet", image_table([JPEG, None], [None, "x"])))
    assert source.read("row-000000.txt") == b""
    for ask in (source.read, source.nbytes):
        with pytest.raises(OSError, match="neither bytes nor a path"):
            ask("row-000001.jpg")


def test_a_path_without_bytes_is_read_relative_to_the_table(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(PNG + b"x")
    path = write_parquet(
        tmp_path / "t.parquet", image_table([None, None], ["x", "y"], ["x.png", "gone.png"])
    )
    source = _parquet(path)
    assert source.read("row-000000.png") == PNG + b"x"
    assert source.nbytes("row-000000.png") == len(PNG) + 1
    with pytest.raises(FileNotFoundError):
        source.read("row-000001.png")


def test_invalid_missing_and_empty_parquet_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"datasets\[1\].*no\.parquet cannot be read as parquet"):
        _parquet(tmp_path / "no.parquet")
    with pytest.raises(DataError, match=r"there is no \.parquet file"):
        _parquet(tmp_path / "nothing")
    with pytest.raises(DataError, match="has no rows"):
        _parquet(write_parquet(tmp_path / "empty.parquet", image_table([], [])))


def test_parquet_files_with_the_same_name_in_two_folders_are_kept_apart(tmp_path: Path) -> None:
    for split, data in (("train", JPEG), ("test", PNG)):
        write_parquet(tmp_path / split / "0000.parquet", image_table([data], [split]))
    source = _parquet(tmp_path)
    assert source.read("train/0000/row-000000.jpg") == JPEG
    assert source.read("train/0000/row-000000.txt") == b"train"
    assert source.read("test/0000/row-000000.png") == PNG
    assert source.read("test/0000/row-000000.txt") == b"test"


def test_parquet_files_that_differ_only_in_their_suffix_are_refused(tmp_path: Path) -> None:
    for ending in ("parquet", "PARQUET"):
        write_parquet(tmp_path / f"0000.{ending}", image_table([JPEG], [ending]))
    with pytest.raises(DataError, match=r"datasets\[1\].*two files named '0000'"):
        _parquet(tmp_path)


def test_a_path_with_an_unknown_suffix_gets_the_suffix_of_its_contents(tmp_path: Path) -> None:
    paths = ["a.png", "b.jpg?width=512", "scan v1.2", "d.jfif", "e.JPG", None]
    table = image_table([PNG] * len(paths), ["x"] * len(paths), paths)
    source = _parquet(write_parquet(tmp_path / "t.parquet", table))
    pictures = [key for key in source.keys() if not key.endswith(".txt")]  # noqa: SIM118
    endings = [".png", ".png", ".png", ".png", ".jpg", ".png"]
    assert pictures == [f"row-{row:06d}{ending}" for row, ending in enumerate(endings)]


def test_a_damaged_row_group_makes_its_rows_unreadable(tmp_path: Path) -> None:
    images = [JPEG + bytes([n]) * 20_000 for n in range(4)]
    path = write_parquet(tmp_path / "t.parquet", image_table(images, list("abcd"), ["x.jpg"] * 4))
    source = _parquet(path)
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)  # the first page's header
    path.write_bytes(data)
    with pytest.raises(OSError, match="row group cannot be read"):
        source.read("row-000000.jpg")
    assert source.read("row-000003.jpg") == images[3]


def test_sequential_reads_decode_each_row_group_once(tmp_path: Path) -> None:
    images = [JPEG + bytes([n]) * 1000 for n in range(40)]
    source = _parquet(write_parquet(tmp_path / "t.parquet", image_table(images, ["x"] * 40), 10))
    decoded = []
    for group in source._parts[0].groups:
        true = group.column
        group.column = lambda name, true=true: decoded.append(name) or true(name)
    keys = [key for key in source.keys() if key.endswith(".jpg")]  # noqa: SIM118
    assert [source.read(key) for key in keys] == images
    assert decoded == ["image.bytes"] * 4


def test_staging_does_not_query_the_size_of_each_row(tmp_path: Path) -> None:
    images = [JPEG + bytes([n]) * 1000 for n in range(40)]
    source = _parquet(write_parquet(tmp_path / "t.parquet", image_table(images, ["x"] * 40), 10))
    asked = []
    source.nbytes = asked.append
    keys = [key for key in source.keys() if key.endswith(".jpg")]  # noqa: SIM118
    staged = StagedSource.stage(source, keys, InMemorySection(), lambda event: None)
    assert [staged.read(key) for key in keys] == images
    assert asked == []


def test_the_splits_of_a_saved_dataset_become_folders(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    for split, data in (("train", JPEG), ("test", PNG)):
        save_to_disk(root / split, image_table([data], [split]))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    source = _hf(root)
    assert source.read("train/data-00000-of-00001/row-000000.jpg") == JPEG
    assert source.read("test/data-00000-of-00001/row-000000.txt") == b"test"
    assert source.describe() == f"the dataset on disk {root}"


def test_an_invalid_saved_dataset_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"datasets\[1\].*has no state\.json"):
        _hf(tmp_path)
    folder = save_to_disk(tmp_path / "saved", image_table([JPEG], ["x"]))
    (folder / "data-00000-of-00001.arrow").write_bytes(b"not arrow at all")
    with pytest.raises(DataError, match="cannot be read as an arrow file"):
        _hf(folder)
    (folder / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="cannot be read as an arrow file"):
        _hf(folder)
    (folder / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        _hf(folder)


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("table_source", "pyarrow", "parquet"),
        ("remote", "aiohttp", "remote"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    module: str, package: str, extra: str
) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from gracetune.errors import DataError
try:
    import gracetune.data.{module}
except DataError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert f"pip install 'gracetune[{extra}]'" in done.stdout
    assert package in done.stdout


# Damaged and hostile tables


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.png"
    path.write_bytes(PNG + b"secret")
    return path


@pytest.mark.parametrize("name", ["{secret}", "../secret.png", "a/../../secret.png", "link.png"])
@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_a_row_may_not_name_a_file_outside_of_the_folder(
    tmp_path: Path, secret: Path, name: str, form: str
) -> None:
    table = image_table([PNG, None], ["x", "y"], ["in.png", name.format(secret=secret)])
    folder = tmp_path / "tables"
    if form == "parquet":
        source = _parquet(write_parquet(folder / "t.parquet", table))
    else:
        source = _hf(save_to_disk(folder, table))
    (folder / "a").mkdir()
    (folder / "link.png").symlink_to(secret)
    assert source.read("row-000000.png") == PNG
    for ask in (source.read, source.nbytes):
        with pytest.raises(
            DataError, match=r"row 1 of .* names the file .*leads out of the folder"
        ):
            ask("row-000001.png")


@pytest.mark.parametrize("name", ["../outside", "/etc"])
def test_a_saved_dataset_may_not_name_files_outside_of_its_folder(
    tmp_path: Path, name: str
) -> None:
    folder = save_to_disk(tmp_path / "saved", image_table([PNG], ["x"]))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match=r"state\.json names the file .* leads out of the folder"):
        _hf(folder)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(DataError, match=r"dataset_dict\.json names the folder .* leads out"):
        _hf(folder)


@pytest.mark.parametrize(
    "text", ['{"_data_files": [3]}', '{"_data_files": [{"filename": 3}]}', "[" * 100_000, "[]"]
)
def test_an_invalid_state_file_is_refused(tmp_path: Path, text: str) -> None:
    folder = save_to_disk(tmp_path / "saved", image_table([PNG], ["x"]))
    (folder / "state.json").write_text(text)
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        _hf(folder)


LARGE = bytes(2**18)


@pytest.mark.parametrize("staged", [False, True])
def test_a_value_that_repeats_in_many_rows_is_not_expanded(tmp_path: Path, staged: bool) -> None:
    path = tmp_path / "t.parquet"
    table = image_table([PNG + LARGE] * 400, ["x"] * 400)
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 50_000
    del table
    source = _parquet(path)
    before = pa.total_allocated_bytes()
    if staged:
        limited = InMemorySection(memory_limit_gb=0.05, num_workers=1, compression=None)
        with pytest.raises(DataError, match=r"memory_limit_gb is 0\.05"):
            StagedSource.stage(source, source.keys(), limited, lambda event: None)
    else:
        assert source.read("row-000399.png") == PNG + LARGE
    assert pa.total_allocated_bytes() - before < 16 * 2**20


def test_a_row_group_that_decompresses_to_more_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    table = image_table([LARGE] * 16, ["x"] * 16)
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    del table
    section = DatasetSection(
        instance_data_dir=str(path), in_memory=InMemorySection(memory_limit_gb=0.001)
    )
    assert open_parquet(section, "datasets[0]", lambda event: None)  # the limit is 256 MiB at least
    monkeypatch.setattr(table_source, "MIN_GROUP_NBYTES", 2**20)
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match=r"row group 0 of t has 4\.0 MiB.*smaller row groups"):
        open_parquet(section, "datasets[0]", lambda event: None)
    assert pa.total_allocated_bytes() - before < 2**20


def test_one_caption_that_is_not_utf8_does_not_harm_the_others(tmp_path: Path) -> None:
    captions = pa.array([b"caf\xe9", b"a cat"]).view(pa.string())
    table = pa.table({"image": [PNG, PNG], "text": captions})
    for source in (
        _parquet(write_parquet(tmp_path / "t.parquet", table)),
        _hf(save_to_disk(tmp_path / "saved", table)),
    ):
        assert source.read("row-000000.txt") == b"caf\xe9"
        assert source.read("row-000001.txt") == b"a cat"


@pytest.mark.parametrize("form", ["parquet", "hf"])
def test_damaged_tables_are_refused_or_have_unreadable_rows(tmp_path: Path, form: str) -> None:
    table = image_table([JPEG * 9] * 12, [f"caption {n}" for n in range(12)])
    if form == "parquet":
        path, open_table = write_parquet(tmp_path / "t.parquet", table), _parquet
    else:
        save_to_disk(tmp_path / "saved", table)
        path, open_table = next((tmp_path / "saved").glob("*.arrow")), _hf
    intact, random = path.read_bytes(), np.random.default_rng(0)
    address = path if form == "parquet" else path.parent
    outcomes = {"read": 0, "refused": 0}
    for _ in range(100):
        data = bytearray(intact)
        for at in random.integers(0, len(data), 2):
            data[at] ^= 1 << int(random.integers(8))
        path.write_bytes(data[: int(random.integers(len(data)))] if random.random() < 0.2 else data)
        try:
            source = open_table(address)
            for key in source.keys():  # noqa: SIM118
                with contextlib.suppress(OSError):
                    source.read(key)
            outcomes["read"] += 1
        except DataError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_files_of_one_table_must_have_the_same_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t/0.parquet", pa.table({"image": [PNG], "text": ["x"]}))
    write_parquet(tmp_path / "t/1.parquet", pa.table({"image": [PNG]}))
    with pytest.raises(DataError, match=r"1 has no column 'text' of the type string, unlike 0"):
        _parquet(tmp_path / "t")
