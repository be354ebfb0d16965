"""Find shards (files with many samples each, local or remote), and read samples from tar shards.

Tar archives are not unpacked: members are read at their offset in the archive. As in the
WebDataset format, `x.jpg` is a sample and `x.txt` its caption. With several shards, the keys of
members start with the name of their shard, because members of different shards often have the same
names.
"""

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
    check_key,
    data_dir,
    file_stamp,
    is_hidden,
    read_range,
    unlistable,
    walk_folder,
)
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.config.dataset_schema import DatasetSection, RemoteSection
    from gracetune.events.dispatcher import Emit


class Shard(Protocol):
    """A file with many samples, such as a tar archive or a parquet file; local or remote."""

    @property
    def name(self) -> str:
        """Path or address of the shard, for messages and keys."""
        ...

    @property
    def folder(self) -> Path | None:
        """Folder that relative paths inside the shard refer to; None for remote shards."""
        ...

    def open(self, ahead_nbytes: int) -> BinaryIO:
        """Open the shard as a file object; a remote shard is read `ahead_nbytes` at a time."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of the shard from `offset` on; OSError if they cannot be read."""
        ...

    def place(self, offset: int, nbytes: int) -> FileRange | None:
        """Return the range of `nbytes` bytes from `offset` on as a `FileRange`, without reading it.

        Returns None for a remote shard.
        """
        ...

    def stamp(self) -> str:
        """Return a text that changes whenever the shard changes."""
        ...


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A shard on a local disk. It is opened for each read, since a process can keep only a limited
    number of files open.
    """

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
        return read_range(self.place(offset, nbytes))

    def place(self, offset: int, nbytes: int) -> FileRange:
        return FileRange(str(self.path), offset, nbytes)

    def stamp(self) -> str:
        return file_stamp([str(self.path)])


def find_shards(address: str, ending: str, remote: RemoteSection, setting: str) -> Sequence[Shard]:
    """Return the shards at an address: one file, all in a folder, or all that match a pattern.

    `ending` is the suffix of shard files, such as `.tar`.
    """
    if "://" in address:
        from gracetune.data.remote import find_remote_shards

        found: Sequence[Shard] = find_remote_shards(address, ending, remote, setting)
    else:
        found = [LocalShard(path) for path in _local(address, ending, setting)]
    if not found:
        raise DataError(
            f"{setting}.instance_data_dir is {address!r}: there is no {ending} file. Set a file, "
            f"a folder, or a pattern such as shards/*{ending}. Relative paths start at the "
            f"working directory, {Path.cwd()}."
        )
    return found


def stems(shards: Sequence[Shard]) -> list[str]:
    """Return the path of each shard without its suffix, relative to the folder common to all."""
    paths = [PurePosixPath(shard.name) for shard in shards]
    common = os.path.commonpath([path.parent for path in paths])
    return [str(path.relative_to(common).with_suffix("")) for path in paths]


def _local(address: str, ending: str, setting: str) -> list[Path]:
    root = os.path.expanduser(address)
    try:
        if os.path.isdir(root):
            keys = sorted(key for key in walk_folder(Path(root)) if key.lower().endswith(ending))
            return [Path(root, key) for key in keys]
        if os.path.exists(root):
            return [Path(root)]
        return [Path(name) for name in sorted(glob(root, recursive=True))]
    except OSError as error:
        raise unlistable(f"{setting}.instance_data_dir", address, error) from error


# Tar archives

_AHEAD_NBYTES = 8 * 1024**2
"""Bytes per request while the headers of a remote tar archive are read; large, so that one request
covers many small members."""
_CONCURRENT_LISTINGS = 8
"""Number of archives whose members are listed concurrently, to hide network latency."""


_TAR_ERRORS = (
    tarfile.TarError,
    OSError,
    ValueError,
    OverflowError,
    LookupError,
    EOFError,
    MemoryError,
)
"""Exceptions that tarfile raises for damaged archives."""


class _Members(NamedTuple):
    """The members of one tar archive."""

    places: dict[str, tuple[int, int]]
    """Offset and length in bytes of each member in the archive, by its name."""
    num_skipped: int
    """Number of members that are ignored: links, sparse and hidden files."""


class TarSource:
    """A source with the members of uncompressed tar archives.

    The members are listed once, when the source is created.
    """

    def __init__(self, shards: Sequence[Shard], emit: Emit, setting: str = "datasets") -> None:
        """List the members of all shards, which must be sorted by name.

        `setting` is the dataset's name in messages, such as `datasets[0]`.
        """
        name = f"{setting}.instance_data_dir"
        self._shards = tuple(shards)
        prefixes = [f"{stem}/" for stem in stems(shards)] if len(shards) > 1 else [""]
        found: dict[str, tuple[int, int, int]] = {}
        num_skipped = 0
        listed = ordered_map(
            partial(_list, setting=name), shards, min(_CONCURRENT_LISTINGS, len(shards))
        )
        for number, members in enumerate(listed):
            num_skipped += members.num_skipped
            for key, (offset, nbytes) in members.places.items():
                found[prefixes[number] + key] = (number, offset, nbytes)
        if not found:
            raise DataError(f"{name}: {self.describe()} contains no files. Set other shards.")
        if num_skipped:
            emit(
                Notice(
                    f"{self.describe()}: skipped {num_skipped} members that are links, sparse or "
                    "hidden files",
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
    """Open the source of a dataset of type `tar`.

    `instance_data_dir` is an archive, a folder of them, or a pattern such as `data/*.tar`.
    """
    address = data_dir(section, setting)
    return TarSource(find_shards(address, ".tar", section.remote, setting), emit, setting)


def _list(shard: Shard, setting: str) -> _Members:
    places: dict[str, tuple[int, int]] = {}
    num_skipped = 0
    for member in _members(shard, setting):
        key = _relative(member.name)
        if not member.isreg() or member.issparse() or is_hidden(key):
            num_skipped += not member.isdir()
            continue
        check_key(setting, key)
        places[key] = (member.offset_data, member.size)
    return _Members(places, num_skipped)


def _members(shard: Shard, setting: str) -> Iterator[tarfile.TarInfo]:
    """Yield the header of each member of a tar archive.

    The list of headers that tarfile keeps is cleared, because it can need much memory.
    """
    try:
        with (
            shard.open(_AHEAD_NBYTES) as file,
            tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]
                if not 0 <= member.size < 2**63:
                    raise tarfile.ReadError(f"a member of {member.size} bytes")
                yield member
            # tarfile ends its list at a damaged header, as if the archive ended there.
            file.seek(archive.offset)
            if any(file.read(tarfile.BLOCKSIZE)):
                raise tarfile.ReadError(f"the header at byte {archive.offset} is damaged")
    except _TAR_ERRORS as error:
        raise DataError(
            f"{setting}: {shard.name} cannot be read as a tar archive ({error}). Copy it again; a "
            "compressed archive must be decompressed to a plain .tar first."
        ) from error


def _relative(name: str) -> str:
    while name.startswith(("./", "/")):
        name = name.removeprefix("./").lstrip("/")
    return name
