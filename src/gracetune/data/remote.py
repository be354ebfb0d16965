"""Anything that fsspec can address as a source: s3, http and the others, each file a sample."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from blake3 import blake3

from gracetune.data.address import is_shard, open_address
from gracetune.data.folder import data_dir
from gracetune.data.remote_files import RANGE_NBYTES, RemoteFiles, mark_of
from gracetune.data.source import check_name, is_hidden
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gracetune.config.schema import DatasetSection, RemoteSection
    from gracetune.data.progress import Tell
    from gracetune.data.source import Source


class RemoteSource:
    """Every file below an address, listed once when it is opened; hidden ones are left out."""

    def __init__(
        self,
        address: str,
        section: RemoteSection,
        setting: str = "datasets",
        range_nbytes: int = RANGE_NBYTES,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`setting` is the data set's place in the run file, for messages: `datasets[0]`."""
        self._address = address
        self._files = RemoteFiles(address, section, setting, range_nbytes, pause)
        self._paths: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        self._marks: dict[str, str] = {}
        for path, about in self._files.find().items():
            key = self._files.shown(path.removeprefix(self._files.root).lstrip("/"))
            if key and not is_hidden(key):
                check_name(f"{setting}.instance_data_dir", key)
                self._paths[key] = path
                self._sizes[key] = about["size"]
                self._marks[key] = mark_of(about)
        if not self._paths:
            raise DataError(
                f"{setting}.instance_data_dir is {address!r}: there are no files below it. Name a "
                "folder, or what stands for one; over http the server must list it."
            )
        self._keys = tuple(sorted(self._paths))

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        """By ranges, each asked for again where it fails; what has come is kept."""
        nbytes = self.nbytes(key)
        return self._files.read(self._paths[key], 0, nbytes, nbytes)

    def nbytes(self, key: str) -> int:
        if key not in self._paths:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        size = self._sizes[key]
        if size is None:
            size = self._sizes[key] = int(self._files.info(self._paths[key])["size"])
        return size

    def stamp(self, keys: Sequence[str]) -> str:
        """What the listing told; over http it tells nothing but names."""
        return blake3("\n".join(self._marks[key] for key in keys).encode()).hexdigest(length=16)

    def describe(self) -> str:
        return f"the files below {self._address}"


def open_remote(section: DatasetSection, setting: str, tell: Tell) -> Source:
    """The source of `remote`, and of any address with a scheme that does not say more."""
    address = data_dir(section, setting)
    if "://" in address and is_shard(address):
        return open_address(section, setting, tell)
    return RemoteSource(address, section.remote, setting)
