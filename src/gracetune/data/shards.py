"""Files that hold many samples each, archives and tables: on this machine, or at an address."""

from __future__ import annotations

import os
from dataclasses import dataclass
from glob import glob
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol

from gracetune.data.folder import walk
from gracetune.data.source import FileRange, read_place, stamp_of
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gracetune.config.schema import RemoteSection


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
        from gracetune.data.remote_files import find_remote_shards

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
