"""Remote tar and parquet files, read by ranges from a local HTTP server and from moto's S3."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING

import pytest
from source_files import FILES, JPEG, image_table, write_parquet, write_tar

from gracetune.config.dataset_schema import DatasetSection, InMemorySection, RemoteSection
from gracetune.data.dataset import open_address
from gracetune.data.remote import RemoteFiles, RemoteShard, RemoteSource, open_remote
from gracetune.data.shard_files import TarSource
from gracetune.data.source import StampedSource
from gracetune.data.source_contract import CHECKS, Check
from gracetune.data.staging import StagedSource
from gracetune.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from http_server import Server

    from gracetune.data.source import Source

BIG = {f"{n:02d}.jpg": JPEG + bytes([n]) * 300_000 for n in range(4)}
IMAGES = [JPEG + bytes([number]) * 50_000 for number in range(5)]
TEXTS = ["a cat", "a dog", "", "zwölf", "a bird"]
ROWS = {f"row-00000{n}.jpg": data for n, data in enumerate(IMAGES)} | {
    f"row-00000{n}.txt": text.encode() for n, text in enumerate(TEXTS)
}


def _open(address: str, kind: str = "local", **options: object) -> Source:
    section = DatasetSection.model_validate(
        {
            "type": kind,
            "instance_data_dir": address,
            "remote": {"timeout_s": 20.0, "options": {"skip_instance_cache": True, **options}},
        }
    )
    opener = open_remote if kind == "remote" else open_address
    return opener(section, "datasets[3]", lambda event: None)


def _read_all(source: Source) -> dict[str, bytes]:
    return {key: source.read(key) for key in source.keys()}  # noqa: SIM118


@pytest.fixture
def shards(server: Server, tmp_path: Path) -> Server:
    server.files = {
        "one.tar": write_tar(tmp_path / "one.tar", FILES).read_bytes(),
        "set/0 a.tar": write_tar(tmp_path / "0.tar", BIG).read_bytes(),
        "set/1.tar": write_tar(tmp_path / "1.tar", {"x.png": b"x"}).read_bytes(),
        "set/README.md": b"what this is",
        "rows.parquet": write_parquet(
            tmp_path / "rows.parquet", image_table(IMAGES, TEXTS)
        ).read_bytes(),
    }
    return server


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_tar_over_http_fulfils_the_source_contract(shards: Server, check: Check) -> None:
    check(_open(f"{shards.address}/one.tar"), FILES)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_table_over_http_fulfils_the_source_contract(shards: Server, check: Check) -> None:
    check(_open(f"{shards.address}/rows.parquet"), ROWS)


@pytest.mark.parametrize("where", ["set", "set/", "set/*.tar"])
def test_the_names_of_remote_shards_become_folders(shards: Server, where: str) -> None:
    expected = {f"0 a/{key}": data for key, data in BIG.items()} | {"1/x.png": b"x"}
    source = _open(f"{shards.address}/{where}")
    assert isinstance(source, TarSource)
    assert _read_all(source) == expected


def test_type_remote_lists_every_file_unless_the_address_is_a_shard(shards: Server) -> None:
    assert isinstance(_open(f"{shards.address}/set", "remote"), RemoteSource)
    assert _read_all(_open(f"{shards.address}/one.tar", "remote")) == FILES


def test_staged_remote_shards_are_not_requested_again(shards: Server) -> None:
    for name, expected in (("one.tar", FILES), ("rows.parquet", ROWS)):
        source = _open(f"{shards.address}/{name}")
        staged = StagedSource.stage(source, source.keys(), InMemorySection(), lambda event: None)
        shards.requests.clear()
        assert _read_all(staged) == expected
        assert shards.requests == []


def test_only_the_range_of_a_member_is_requested(shards: Server) -> None:
    source = _open(f"{shards.address}/set/0 a.tar")
    shards.requests.clear()
    assert source.read("02.jpg") == BIG["02.jpg"]
    ((_, span),) = shards.requests
    start, stop = map(int, span.removeprefix("bytes=").split("-"))
    assert stop - start + 1 == len(BIG["02.jpg"])


def test_the_footer_of_a_table_is_read_once(shards: Server, tmp_path: Path) -> None:
    images = [JPEG + random.Random(n).randbytes(100_000) for n in range(6)]
    table = write_parquet(tmp_path / "large.parquet", image_table(images, [""] * 6))
    shards.files["rows.parquet"] = table.read_bytes()
    source = _open(f"{shards.address}/rows.parquet")
    shards.requests.clear()
    assert source.read("row-000000.jpg") == images[0]
    assert shards.requests
    assert not any(span.endswith(f"-{table.stat().st_size - 1}") for _, span in shards.requests)


@pytest.mark.parametrize("failure", ["broken", "busy", "short"])
@pytest.mark.parametrize("name", ["one.tar", "rows.parquet"])
def test_a_failed_range_is_requested_again(shards: Server, name: str, failure: str) -> None:
    shards.failures[name] = [failure]
    source = _open(f"{shards.address}/{name}")
    shards.failures[name] = [failure]
    assert _read_all(source) == (FILES if name == "one.tar" else ROWS)


def test_a_member_that_cannot_be_read_raises_the_servers_error(shards: Server) -> None:
    source = _open(f"{shards.address}/one.tar")
    shards.failures["one.tar"] = ["forbidden"]
    with pytest.raises(OSError, match=r"403.*after 1 attempts"):
        source.read("deep/z.bin")


def test_a_server_without_range_support_cannot_serve_shards(shards: Server) -> None:
    shards.supports_ranges = False
    source = _open(f"{shards.address}/one.tar")  # the small file is read in one request
    with pytest.raises(
        OSError, match=r"does not support range requests.*copy the file to this machine"
    ):
        source.read("deep/z.bin")


def test_invalid_and_missing_shards_are_refused_by_name(shards: Server) -> None:
    shards.files |= {"bad.tar": b"not a tar" * 1000, "bad.parquet": b"not a table" * 1000}
    with pytest.raises(DataError, match=r"datasets\[3\].*bad\.tar cannot be read as a tar"):
        _open(f"{shards.address}/bad.tar")
    with pytest.raises(DataError, match=r"datasets\[3\].*bad\.parquet cannot be read as parquet"):
        _open(f"{shards.address}/bad.parquet")
    with pytest.raises(DataError, match=r"datasets\[3\].*absent\.tar.*FileNotFoundError"):
        _open(f"{shards.address}/absent.tar")
    with pytest.raises(DataError, match=r"datasets\[3\].*there is no \.tar file"):
        _open(f"{shards.address}/none*.tar")


def test_a_remote_row_with_only_a_path_cannot_be_read(shards: Server, tmp_path: Path) -> None:
    table = image_table([IMAGES[0], None], ["x", "y"], ["a.jpg", "b.jpg"])
    shards.files["rows.parquet"] = write_parquet(tmp_path / "r.parquet", table).read_bytes()
    source = _open(f"{shards.address}/rows.parquet")
    assert source.read("row-000000.jpg") == IMAGES[0]
    for ask in (source.read, source.nbytes):
        with pytest.raises(OSError, match=r"has only the path 'b\.jpg'"):
            ask("row-000001.jpg")


def test_a_remote_shard_is_a_seekable_file(shards: Server) -> None:
    files = RemoteFiles(f"{shards.address}/one.tar", RemoteSection(), "datasets[3]", 1000)
    shard = RemoteShard(files, files.root)
    whole = shards.files["one.tar"]
    with shard.open(4096) as file:
        assert file.seek(-10, io.SEEK_END) == len(whole) - 10
        assert (file.read(), file.read()) == (whole[-10:], b"")
        assert file.seek(5) == 5
        assert (file.read(3), file.seek(4, io.SEEK_CUR), file.read(2)) == (
            whole[5:8],
            12,
            whole[12:14],
        )
    assert shard.place(0, 1) is None
    with pytest.raises(OSError, match="ends 1 bytes too early"):
        shard.read(len(whole), 1)


def _s3(bucket: dict[str, object], name: str) -> Source:
    return _open(f"s3://photos/{name}", **bucket)


@pytest.fixture
def in_bucket(bucket: dict[str, object], tmp_path: Path) -> dict[str, object]:
    import fsspec

    files = fsspec.filesystem("s3", **bucket)
    for name, members in (("0.tar", BIG), ("deep/1.tar", FILES)):
        files.pipe_file(f"photos/tars/{name}", write_tar(tmp_path / name, members).read_bytes())
    table = write_parquet(tmp_path / "t.parquet", image_table(IMAGES, TEXTS))
    files.pipe_file("photos/tables/rows.parquet", table.read_bytes())
    return bucket


def test_tar_shards_are_read_from_s3(in_bucket: dict[str, object]) -> None:
    expected = {f"0/{key}": data for key, data in BIG.items()}
    expected |= {f"deep/1/{key}": data for key, data in FILES.items()}
    assert _read_all(_s3(in_bucket, "tars")) == expected
    assert _read_all(_s3(in_bucket, "tars/*.tar")) == BIG
    assert _read_all(_s3(in_bucket, "tars/deep/1.tar")) == FILES


def test_parquet_files_are_read_from_s3(in_bucket: dict[str, object]) -> None:
    for name in ("tables", "tables/rows.parquet"):
        assert _read_all(_s3(in_bucket, name)) == ROWS


def test_the_stamp_changes_with_the_object_on_s3(in_bucket: dict[str, object]) -> None:
    import fsspec

    files = fsspec.filesystem("s3", **in_bucket)
    found = {}
    for name, content in (("one.jpg", b"one"), ("two.jpg", b"two")):
        files.pipe_file("photos/same/x.jpg", content)
        source = _s3(in_bucket, "same")
        assert isinstance(source, StampedSource)
        found[name] = source.stamp(["x.jpg"])
        assert source.stamp(["x.jpg"]) == found[name]
    assert found["one.jpg"] != found["two.jpg"]
    before = _s3(in_bucket, "tars/0.tar")
    files.pipe_file("photos/tars/0.tar", files.cat_file("photos/tars/0.tar")[::-1][::-1] + b"\0")
    after = _s3(in_bucket, "tars/0.tar")
    assert isinstance(before, TarSource)
    assert isinstance(after, TarSource)
    assert before.stamp(["00.jpg"]) != after.stamp(["00.jpg"])
