"""Tar shards as a source: members are read where they lie, nothing is unpacked.

Pairs as web data sets have them, `x.jpg` and `x.txt`, are a picture and its caption by the usual
rule. With several shards each one's name is a folder, for shards number their members alike.
"""

from __future__ import annotations

import os
import tarfile
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gracetune.data.folder import data_dir, walk
from gracetune.data.source import Place, check_name, is_hidden, read_place, stamp_of
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell


class TarSource:
    """The files in uncompressed tar archives, listed once when it is opened."""

    def __init__(self, shards: Sequence[Path], tell: Tell, setting: str = "datasets") -> None:
        """`shards` in the order of their names; `setting` is for messages: `datasets[0]`."""
        name = f"{setting}.instance_data_dir"
        self._shards = tuple(map(str, shards))
        found: dict[str, tuple[int, int, int]] = {}
        left_out = 0
        for number, shard in enumerate(shards):
            prefix = f"{_stem(shards, number)}/" if len(shards) > 1 else ""
            for member in _members(shard, name):
                key = prefix + _relative(member.name)
                if not member.isreg() or member.issparse() or is_hidden(key):
                    left_out += not member.isdir()
                    continue
                check_name(name, key)
                found[key] = (number, member.offset_data, member.size)
        if not found:
            raise DataError(f"{name}: there are no files in {self.describe()}. Name other shards.")
        if left_out:
            tell(
                Notice(
                    f"{self.describe()}: {left_out} members are links, sparse or hidden files and "
                    "are left out",
                    level="warning",
                )
            )
        self._keys = tuple(sorted(found))
        self._places = np.array([found[key] for key in self._keys], np.uint64)
        self._rows = {key: row for row, key in enumerate(self._keys)}

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        return read_place(self.place(key))

    def place(self, key: str) -> Place:
        number, offset, nbytes = self._place(key)
        return Place(self._shards[number], offset, nbytes)

    def stamp(self, keys: Sequence[str]) -> str:
        return stamp_of(self._shards[n] for n in sorted({self._place(key)[0] for key in keys}))

    def nbytes(self, key: str) -> int:
        return self._place(key)[2]

    def describe(self) -> str:
        first, count = self._shards[0], len(self._shards)
        return f"the shard {first}" if count == 1 else f"{count} shards from {first} on"

    def _place(self, key: str) -> tuple[int, int, int]:
        if key not in self._rows:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        number, offset, nbytes = self._places[self._rows[key]].tolist()
        return number, offset, nbytes


def open_tar(section: DatasetSection, setting: str, tell: Tell) -> TarSource:
    """The source of `tar`: one archive, a folder of them, or a pattern such as `data/*.tar`."""
    return TarSource(find_files(data_dir(section, setting), ".tar", setting), tell, setting)


def find_files(address: str, ending: str, setting: str) -> list[Path]:
    """The files that an address means: itself, those in it, or those that match it."""
    root = os.path.expanduser(address)
    try:
        if os.path.isdir(root):
            keys = sorted(key for key in walk(Path(root)) if key.lower().endswith(ending))
            found = [Path(root, key) for key in keys]
        elif os.path.exists(root):
            found = [Path(root)]
        else:
            found = [Path(name) for name in sorted(glob(root, recursive=True))]
    except OSError as error:
        raise DataError(
            f"{setting}.instance_data_dir is {address!r}: it cannot be listed ({error.strerror}). "
            "Make every folder in it readable."
        ) from error
    if not found:
        raise DataError(
            f"{setting}.instance_data_dir is {address!r}: no {ending} file is there. Name a file, "
            f"a folder, or a pattern such as shards/*{ending}. Relative paths start at the "
            f"working directory, {Path.cwd()}."
        )
    return found


def _members(shard: Path, setting: str) -> Iterator[tarfile.TarInfo]:
    """Headers in their order. The list that tarfile keeps is emptied: it is large for many."""
    try:
        with tarfile.open(shard, "r:", errorlevel=2) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]
                yield member
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{setting}: {shard} cannot be read as a tar archive ({error}). Copy it anew; one that "
            "is compressed must be unpacked to a plain .tar first, since its members have no place."
        ) from error


def _relative(name: str) -> str:
    while name.startswith(("./", "/")):
        name = name.removeprefix("./").lstrip("/")
    return name


def _stem(shards: Sequence[Path], number: int) -> str:
    """The shard's name without its ending, from the folder that all shards are in."""
    common = os.path.commonpath([shard.parent for shard in shards])
    return str(shards[number].relative_to(common).with_suffix(""))
