"""Tar shards as a source: members are read where they lie, nothing is unpacked.

Pairs as web data sets have them, `x.jpg` and `x.txt`, are a picture and its caption by the usual
rule. With several shards each one's name is a folder, for shards number their members alike.
"""

from __future__ import annotations

import tarfile
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gracetune.data.folder import data_dir
from gracetune.data.parallel import ordered_map
from gracetune.data.shards import find_shards, stems
from gracetune.data.source import check_name, is_hidden
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell
    from gracetune.data.shards import Shard
    from gracetune.data.source import FileRange

_AHEAD_NBYTES = 8 * 1024**2
"""From an address, headers come with what lies between them: one request for many small members."""
_AT_ONCE = 8
"""Shards that are listed at the same time: over a network each of them waits most of the time."""


class _Members(NamedTuple):
    """The files of one shard."""

    places: dict[str, tuple[int, int]]
    """By name: offset and length."""
    left_out: int


class TarSource:
    """The files in uncompressed tar archives, listed once when it is opened."""

    def __init__(self, shards: Sequence[Shard], tell: Tell, setting: str = "datasets") -> None:
        """`shards` in the order of their names; `setting` is for messages: `datasets[0]`."""
        name = f"{setting}.instance_data_dir"
        self._shards = tuple(shards)
        prefixes = [f"{stem}/" for stem in stems(shards)] if len(shards) > 1 else [""]
        found: dict[str, tuple[int, int, int]] = {}
        left_out = 0
        listed = ordered_map(partial(_list, setting=name), shards, min(_AT_ONCE, len(shards)))
        for number, members in enumerate(listed):
            left_out += members.left_out
            for key, (offset, nbytes) in members.places.items():
                found[prefixes[number] + key] = (number, offset, nbytes)
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
        number, offset, nbytes = self._find(key)
        return self._shards[number].read(offset, nbytes)

    def place(self, key: str) -> FileRange | None:
        number, offset, nbytes = self._find(key)
        return self._shards[number].place(offset, nbytes)

    def stamp(self, keys: Sequence[str]) -> str:
        numbers = sorted({self._find(key)[0] for key in keys})
        return " ".join(self._shards[number].stamp() for number in numbers)

    def nbytes(self, key: str) -> int:
        return self._find(key)[2]

    def describe(self) -> str:
        first, count = self._shards[0].name, len(self._shards)
        return f"the shard {first}" if count == 1 else f"{count} shards from {first} on"

    def _find(self, key: str) -> tuple[int, int, int]:
        if key not in self._rows:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        number, offset, nbytes = self._places[self._rows[key]].tolist()
        return number, offset, nbytes


def open_tar(section: DatasetSection, setting: str, tell: Tell) -> TarSource:
    """The source of `tar`: one archive, a folder of them, or a pattern such as `data/*.tar`."""
    address = data_dir(section, setting)
    return TarSource(find_shards(address, ".tar", section.remote, setting), tell, setting)


def _list(shard: Shard, setting: str) -> _Members:
    places: dict[str, tuple[int, int]] = {}
    left_out = 0
    for member in _members(shard, setting):
        key = _relative(member.name)
        if not member.isreg() or member.issparse() or is_hidden(key):
            left_out += not member.isdir()
            continue
        check_name(setting, key)
        places[key] = (member.offset_data, member.size)
    return _Members(places, left_out)


def _members(shard: Shard, setting: str) -> Iterator[tarfile.TarInfo]:
    """Headers in their order. The list that tarfile keeps is emptied: it is large for many."""
    try:
        with (
            shard.open(_AHEAD_NBYTES) as file,
            tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]
                yield member
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{setting}: {shard.name} cannot be read as a tar archive ({error}). Copy it anew; one "
            "that is compressed must be unpacked to a plain .tar first, since its members have no "
            "place."
        ) from error


def _relative(name: str) -> str:
    while name.startswith(("./", "/")):
        name = name.removeprefix("./").lstrip("/")
    return name
