from __future__ import annotations

import gzip
import io
import tarfile
from typing import TYPE_CHECKING

import pytest
from source_files import FILES, write_tar

from gracetune.config.dataset_schema import DatasetSection
from gracetune.data.dataset import CorruptionLog, open_dataset
from gracetune.data.shard_files import TarSource, open_tar
from gracetune.errors import DataError
from gracetune.events.types import Event, Notice

if TYPE_CHECKING:
    from pathlib import Path


def _open(address: Path | str, recorder: list[Event] | None = None) -> TarSource:
    emit = ([] if recorder is None else recorder).append
    return open_tar(DatasetSection(instance_data_dir=str(address)), "datasets[2]", emit)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_tar_format_is_read(tmp_path: Path, form: int) -> None:
    files = {"a/b.jpg": b"1" * 70_000, "é.txt": b"two", "deep/" * 10 + "n.txt": b"three"}
    source = _open(write_tar(tmp_path / "x.tar", files, form))
    assert {key: source.read(key) for key in source.keys()} == files  # noqa: SIM118


def test_names_are_normalized_and_the_last_of_two_members_wins(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, data in (("./a.jpg", b"old"), ("/b.jpg", b"b"), (".//./a.jpg", b"new")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    source = _open(tmp_path / "x.tar")
    assert {key: source.read(key) for key in source.keys()} == {  # noqa: SIM118
        "a.jpg": b"new",
        "b.jpg": b"b",
    }


def test_links_and_hidden_members_are_skipped_with_a_warning(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name in ("a.jpg", "._a.jpg", "deep/../b.jpg", ".git/config"):
            archive.addfile(tarfile.TarInfo(name))
        for kind, name in ((tarfile.SYMTYPE, "link.jpg"), (tarfile.DIRTYPE, "folder")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.jpg"
            archive.addfile(member)
    events: list[Event] = []
    assert list(_open(tmp_path / "x.tar", events).keys()) == ["a.jpg"]
    (notice,) = events
    assert isinstance(notice, Notice)
    assert "skipped 4 members that are links, sparse or hidden files" in notice.text
    assert notice.level == "warning"


def test_the_names_of_several_shards_become_folders(tmp_path: Path) -> None:
    for name in ("s/0.tar", "s/1.tar"):
        write_tar(tmp_path / name, {"000.jpg": name.encode(), "000.txt": b"x"})
    keys = ["0/000.jpg", "0/000.txt", "1/000.jpg", "1/000.txt"]
    for address in (tmp_path / "s", tmp_path / "s/*.tar", f"{tmp_path}/s/[01].tar"):
        source = _open(address)
        assert list(source.keys()) == keys
        assert source.read("1/000.jpg") == b"s/1.tar"
    assert source.describe() == f"2 shards from {tmp_path}/s/0.tar on"


def test_members_with_the_same_stem_are_an_image_and_its_caption(
    tmp_path: Path, png: bytes
) -> None:
    write_tar(tmp_path / "x.tar", {"7.png": png, "7.txt": b"a pair", "8.png": png, "8.txt": b""})
    for kind in ("tar", "local", "in_memory"):
        section = DatasetSection(type=kind, instance_data_dir=str(tmp_path / "x.tar"))
        opened = open_dataset(section, 0, lambda e: None, CorruptionLog(lambda e: None))
        assert [(s.key, s.caption) for s in opened.samples] == [("7.png", "a pair"), ("8.png", "")]


@pytest.fixture
def png() -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (9, 9, 9)).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    """The names of the missing samples are unknown."""
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"whole", "b.jpg": b"x" * 100_000})
    with path.open("r+b") as file:
        file.truncate(50_000)
    with pytest.raises(DataError, match=r"x\.tar cannot be read.*unexpected end of data"):
        _open(path)


def test_a_member_beyond_the_end_of_a_shrunken_shard_is_unreadable(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"whole", "b.jpg": b"x" * 100_000})
    source = _open(path)
    with path.open("r+b") as file:
        file.truncate(50_000)
    assert source.read("a.jpg") == b"whole"
    with pytest.raises(OSError, match=r"the file that contains it ends 5\d+ bytes too early"):
        source.read("b.jpg")


def test_invalid_and_compressed_archives_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.tar").write_bytes(b"not a tar" * 1000)
    with pytest.raises(DataError, match=r"datasets\[2\]\.instance_data_dir.*no\.tar cannot be"):
        _open(tmp_path / "no.tar")
    (tmp_path / "gz.tar").write_bytes(gzip.compress(write_tar(tmp_path / "x", FILES).read_bytes()))
    with pytest.raises(DataError, match="compressed archive must be decompressed"):
        _open(tmp_path / "gz.tar")


def test_a_pattern_without_matches_and_an_empty_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"datasets\[2\].*there is no \.tar file.*shards/\*\.tar"):
        _open(tmp_path / "*.tar")
    with pytest.raises(DataError, match=r"the shard .* contains no files"):
        _open(write_tar(tmp_path / "empty.tar", {}))


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not UTF-8: caf\\xe9\.jpg"):
        _open(write_tar(tmp_path / "x.tar", {"caf\udce9.jpg": b"x"}, tarfile.GNU_FORMAT))


def test_a_damaged_header_does_not_end_the_list_silently(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2", "c.jpg": b"3"})
    data = bytearray(path.read_bytes())
    data[1024 + 148] ^= 1  # the checksum of the second member
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.tar cannot be read.*header at byte 1024 is damaged"):
        _open(path)


@pytest.mark.parametrize(
    "size",
    [b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"\x80" + bytes(3) + b"\x7f" * 8],
)
@pytest.mark.parametrize("kind", [b"0", b"L", b"x", b"g"])
def test_impossible_sizes_are_refused(tmp_path: Path, size: bytes, kind: bytes) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2"}, tarfile.GNU_FORMAT)
    data = bytearray(path.read_bytes())
    data[124:136], data[156:157] = size, kind
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.tar cannot be read|contains no files"):
        _open(path)
