"""The source contract over every source that gracetune has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from source_files import (
    FILES,
    JPEG,
    PNG,
    image_table,
    save_to_disk,
    write_folder,
    write_parquet,
    write_tar,
)

from gracetune.config.dataset_schema import (
    ColumnsSection,
    DatasetSection,
    InMemorySection,
    RemoteSection,
    ShapesSection,
)
from gracetune.data.demo_dataset import ShapesSource
from gracetune.data.remote import RemoteSource
from gracetune.data.shard_files import LocalShard, TarSource
from gracetune.data.source import FolderSource
from gracetune.data.source_contract import CHECKS, Check
from gracetune.data.staging import StagedSource
from gracetune.data.table_source import open_hf, open_parquet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gracetune.data.source import Source

    SourceAndFiles = tuple[Source, Mapping[str, bytes]]

IMAGES = [JPEG + bytes([number]) * 50_000 for number in range(5)]
TEXTS = ["a cat", "a dog", "", "zwölf", "a bird"]
ROWS = {f"row-00000{n}.jpg": data for n, data in enumerate(IMAGES)} | {
    f"row-00000{n}.txt": text.encode() for n, text in enumerate(TEXTS)
}


def _quiet(event: object) -> None:
    pass


def _folder(root: Path) -> SourceAndFiles:
    return FolderSource(write_folder(root)), FILES


def _shapes(root: Path) -> SourceAndFiles:
    source = ShapesSource(root / "made", ShapesSection(copies=1, concept="star"), _quiet)
    return source, {
        str(path.relative_to(root / "made")): path.read_bytes()
        for path in (root / "made").rglob("[!.]*")
        if path.is_file()
    }


def _tar(root: Path) -> SourceAndFiles:
    return TarSource([LocalShard(write_tar(root / "one.tar", FILES))], _quiet), FILES


def _tars(root: Path) -> SourceAndFiles:
    shards = [write_tar(root / f"{name}.tar", FILES) for name in ("first", "second")]
    expected = {f"{shard.stem}/{key}": data for shard in shards for key, data in FILES.items()}
    return TarSource([LocalShard(shard) for shard in shards], _quiet), expected


def _parquet(root: Path) -> SourceAndFiles:
    path = write_parquet(root / "rows.parquet", image_table(IMAGES, TEXTS))
    section = DatasetSection(instance_data_dir=str(path))
    return open_parquet(section, "datasets[0]", _quiet), ROWS


def _parquets(root: Path) -> SourceAndFiles:
    names = ["x.png", "y.png", "z.JPEG", None, "v.png"]
    write_parquet(root / "a.parquet", image_table(IMAGES, TEXTS, names))
    write_parquet(root / "b.parquet", image_table([PNG + b"1"], ["one"]))
    columns = ColumnsSection(image="image", caption="text")
    section = DatasetSection(instance_data_dir=str(root), columns=columns)
    endings = [".png", ".png", ".jpeg", ".jpg", ".png"]
    expected = {f"a/row-00000{n}{endings[n]}": data for n, data in enumerate(IMAGES)}
    expected |= {f"a/row-00000{n}.txt": text.encode() for n, text in enumerate(TEXTS)}
    expected |= {"b/row-000000.png": PNG + b"1", "b/row-000000.txt": b"one"}
    return open_parquet(section, "datasets[0]", _quiet), expected


def _hf(stream: bool) -> Callable[[Path], SourceAndFiles]:
    def make(root: Path) -> SourceAndFiles:
        folder = save_to_disk(root / "saved", image_table(IMAGES, TEXTS), stream=stream)
        section = DatasetSection(instance_data_dir=str(folder))
        return open_hf(section, "datasets[0]", _quiet), ROWS

    return make


def _file_address(root: Path) -> SourceAndFiles:
    return RemoteSource(f"file://{write_folder(root)}", RemoteSection(), range_nbytes=1000), FILES


def _staged(
    compression: str, origin: Callable[[Path], SourceAndFiles]
) -> Callable[[Path], SourceAndFiles]:
    def make(root: Path) -> SourceAndFiles:
        source, expected = origin(root)
        section = InMemorySection.model_validate({"compression": compression})
        return StagedSource.stage(source, list(source.keys()), section, _quiet), expected

    return make


def _attached(root: Path) -> SourceAndFiles:
    source, expected = _staged("auto", _folder)(root)
    assert isinstance(source, StagedSource)
    return _AttachedSource(StagedSource.attach(source.handle), source), expected


class _AttachedSource(StagedSource):
    """An attached source, and the staged source that owns its memory."""

    def __init__(self, attached: StagedSource, owner: StagedSource) -> None:
        super().__init__(attached._arena)
        self.owner = owner


FACTORIES: dict[str, Callable[[Path], SourceAndFiles]] = {
    "folder": _folder,
    "shapes": _shapes,
    "tar": _tar,
    "tars": _tars,
    "parquet": _parquet,
    "parquets": _parquets,
    "hf": _hf(stream=True),
    "hf-file": _hf(stream=False),
    "address": _file_address,
    "attached": _attached,
    "staged-tars": _staged("none", _tars),
    "staged-parquet": _staged("auto", _parquet),
    **{
        f"staged-{name}": _staged(name, _folder)
        for name in ("none", "auto", "lz4", "zlib", "snappy", "zstd")
    },
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("factory", FACTORIES)
def test_every_source_fulfils_the_source_contract(
    factory: str, check: Check, tmp_path: Path
) -> None:
    check(*FACTORIES[factory](tmp_path))


class _BrokenSource:
    """A folder source that breaks one promise."""

    def __init__(self, root: Path, **broken: object) -> None:
        self._folder_source = FolderSource(root)
        self._broken = broken

    def keys(self) -> list[str]:
        return list(self._broken.get("keys", self._folder_source.keys()))  # type: ignore[call-overload]

    def read(self, key: str) -> bytes:
        return self._broken["read"] if "read" in self._broken else self._folder_source.read(key)  # type: ignore[return-value]

    def nbytes(self, key: str) -> int:
        return self._folder_source.nbytes(key) + int("nbytes" in self._broken)

    def describe(self) -> str:
        return str(self._broken.get("describe", "files"))


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        ({"keys": ["b", "a"]}, "keys_are_sorted_and_complete"),
        ({"keys": ["a"]}, "keys_are_sorted_and_complete"),
        ({"keys": ["/a"]}, "keys_are_relative_names"),
        ({"keys": ["a/../b"]}, "keys_are_relative_names"),
        ({"read": b"other"}, "read_returns_exact_bytes"),
        ({"read": bytearray(b"1")}, "read_returns_exact_bytes"),
        ({"read": b"any"}, "unknown_keys_are_not_found"),
        ({"read": b"other"}, "threads_may_read_at_once"),
        ({"nbytes": True}, "nbytes_is_exact"),
        ({"describe": "two\nlines"}, "describe_is_one_phrase"),
        ({"describe": ""}, "describe_is_one_phrase"),
    ],
)
def test_the_contract_detects_a_source_that_breaks_it(
    broken: dict[str, object], check: str, tmp_path: Path
) -> None:
    files = {"a": b"1", "b": b"2"}
    source = _BrokenSource(write_folder(tmp_path, files), **broken)
    (chosen,) = (each for each in CHECKS if each.__name__ == check)
    with pytest.raises(AssertionError):
        chosen(source, files)
