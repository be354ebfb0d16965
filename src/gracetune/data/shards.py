"""Files that hold many samples each, archives and tables: on this machine, or at an address."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

import numpy as np

from gracetune.data.prefetch import ordered_map
from gracetune.data.source import (
    FileRange,
    check_name,
    data_dir,
    is_hidden,
    read_place,
    stamp_of,
    walk,
)
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.config.schema import DatasetSection, RemoteSection
    from gracetune.events.dispatcher import Emit


class Shard(Protocol):
    """One such file, of which parts are read."""

    @property
    def name(self) -> str:
        """Its path or address, for messages and keys."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where relative paths in it start; none where that is not on this machine."""
        ...

    def open(self, ahead_nbytes: int) -> BinaryIO:
        """To be looked into, with so much read ahead where reading is slow to begin."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """A part of it; OSError where it cannot be read."""
        ...

    def place(self, offset: int, nbytes: int) -> FileRange | None:
        """Where that part is on this machine, if it is."""
        ...

    def stamp(self) -> str:
        """Another text once the file is another."""
        ...


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A file of this machine, opened for each read: there may be more than a process may hold."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> Path:
        return self.path.parent

    def open(self, ahead_nbytes: int) -> BinaryIO:  # noqa: ARG002  the kernel reads ahead
        return self.path.open("rb")

    def read(self, offset: int, nbytes: int) -> bytes:
        return read_place(self.place(offset, nbytes))

    def place(self, offset: int, nbytes: int) -> FileRange:
        return FileRange(str(self.path), offset, nbytes)

    def stamp(self) -> str:
        return stamp_of([str(self.path)])


def find_shards(address: str, ending: str, remote: RemoteSection, setting: str) -> Sequence[Shard]:
    """What an address means: the file itself, those below it, or those that match it; sorted."""
    if "://" in address:
        from gracetune.data.remote import find_remote_shards

        found: Sequence[Shard] = find_remote_shards(address, ending, remote, setting)
    else:
        found = [LocalShard(path) for path in _local(address, ending, setting)]
    if not found:
        raise DataError(
            f"{setting}.instance_data_dir is {address!r}: no {ending} file is there. Name a file, "
            f"a folder, or a pattern such as shards/*{ending}. Relative paths start at the "
            f"working directory, {Path.cwd()}."
        )
    return found


def stems(shards: Sequence[Shard]) -> list[str]:
    """Their names without endings, from the folder that all of them are in."""
    paths = [PurePosixPath(shard.name) for shard in shards]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common).with_suffix("")) for path in paths]


def _local(address: str, ending: str, setting: str) -> list[Path]:
    root = os.path.expanduser(address)
    try:
        if os.path.isdir(root):
            keys = sorted(key for key in walk(Path(root)) if key.lower().endswith(ending))
            return [Path(root, key) for key in keys]
        if os.path.exists(root):
            return [Path(root)]
        return [Path(name) for name in sorted(glob(root, recursive=True))]
    except OSError as error:
        raise DataError(
            f"{setting}.instance_data_dir is {address!r}: it cannot be listed ({error.strerror}). "
            "Make every folder in it readable."
        ) from error


# ------------------------------------------------------------------------------------------
# Tar shards as a source: members are read where they lie, nothing is unpacked.
#
# Pairs as web data sets have them, `x.jpg` and `x.txt`, are a picture and its caption by the usual
# rule. With several shards each one's name is a folder, for shards number their members alike.


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

    def __init__(self, shards: Sequence[Shard], emit: Emit, setting: str = "datasets") -> None:
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
            emit(
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


def open_tar(section: DatasetSection, setting: str, emit: Emit) -> TarSource:
    """The source of `tar`: one archive, a folder of them, or a pattern such as `data/*.tar`."""
    address = data_dir(section, setting)
    return TarSource(find_shards(address, ".tar", section.remote, setting), emit, setting)


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
