"""What every source promises, whichever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gracetune.config.schema import InMemorySection, ShapesSection
from gracetune.data.folder import FolderSource
from gracetune.data.shapes import ShapesSource
from gracetune.data.staged import StagedSource

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gracetune.data.source import Source

FILES = {
    "b.png": b"second",
    "a.png": b"first " * 100,
    "deep/er/ünï cødé.txt": b"",
    "deep/z.bin": bytes(range(256)),
}


def _folder(root: Path) -> FolderSource:
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return FolderSource(root)


def _staged(compression: str) -> Callable[[Path], Source]:
    def make(root: Path) -> Source:
        folder = _folder(root)
        section = InMemorySection.model_validate({"compression": compression})
        return StagedSource.stage(folder, folder.keys(), section, lambda event: None)

    return make


def _shapes(root: Path) -> ShapesSource:
    return ShapesSource(root / "made", ShapesSection(copies=1, concept="star"), lambda event: None)


MAKERS = {
    "folder": _folder,
    "shapes": _shapes,
    **{
        f"staged-{name}": _staged(name)
        for name in ("none", "auto", "lz4", "zlib", "snappy", "zstd")
    },
}
HOLDING_FILES = [name for name in MAKERS if name != "shapes"]


@pytest.fixture(params=MAKERS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return MAKERS[request.param](tmp_path)


def test_keys_are_sorted_relative_and_the_same_each_time(source: Source) -> None:
    keys = list(source.keys())
    assert keys
    assert keys == sorted(set(keys)) == list(source.keys())
    assert not any(key.startswith(("/", ".")) or "\\" in key for key in keys)


def test_nbytes_is_the_length_of_what_is_read(source: Source) -> None:
    for key in source.keys():  # noqa: SIM118
        assert source.nbytes(key) == len(source.read(key))


@pytest.mark.parametrize("key", ["absent", "", "../outside", "/etc/hostname", "A.PNG"])
def test_an_unknown_key_is_an_os_error_that_names_it(source: Source, key: str) -> None:
    with pytest.raises(FileNotFoundError, match="has no"):
        source.read(key)
    with pytest.raises(FileNotFoundError, match="has no"):
        source.nbytes(key)


def test_describe_is_one_phrase(source: Source) -> None:
    assert source.describe()
    assert "\n" not in source.describe()


@pytest.mark.parametrize("maker", HOLDING_FILES)
def test_bytes_come_back_as_they_were(maker: str, tmp_path: Path) -> None:
    source = MAKERS[maker](tmp_path)
    assert {key: source.read(key) for key in source.keys()} == FILES  # noqa: SIM118
