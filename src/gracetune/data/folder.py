"""A folder of files as a source: what a run file's `instance_data_dir` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.data.source import FileRange, check_name, read_place, stamp_of
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.data.progress import Tell

Identity = tuple[int, int]


class FolderSource:
    """Every file below a folder, listed once when it is opened; hidden ones are left out."""

    def __init__(self, path: str | Path, setting: str = "datasets") -> None:
        """`setting` is the data set's place in the run file, for messages: `datasets[0]`."""
        self._root = Path(os.path.expanduser(path))
        name = f"{setting}.instance_data_dir"
        try:
            if not self._root.exists():
                raise DataError(
                    f"{name} is {str(path)!r}: there is no such folder. Relative paths start at "
                    f"the working directory, {Path.cwd()}."
                )
            if not self._root.is_dir():
                raise DataError(
                    f"{name} is {str(path)!r}: that is a file. Name the folder it is in."
                )
            self._keys = tuple(sorted(walk(self._root)))
        except OSError as error:
            raise DataError(
                f"{name} is {str(path)!r}: it cannot be listed ({error.strerror}). Make every "
                "folder in it readable."
            ) from error
        if not self._keys:
            raise DataError(f"{name} is {str(path)!r}: the folder is empty. Put samples into it.")
        for key in self._keys:
            check_name(name, key)
        self._known = frozenset(self._keys)
        self._prefix = f"{self._root}/"

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        return read_place(self.place(key))

    def place(self, key: str) -> FileRange:
        return FileRange(self._path(key), 0, None)

    def stamp(self, keys: Sequence[str]) -> str:
        return stamp_of(map(self._path, keys))

    def nbytes(self, key: str) -> int:
        return os.stat(self._path(key)).st_size

    def describe(self) -> str:
        return f"the folder {self._root}"

    def _path(self, key: str) -> str:
        """Only what was listed: a key never leads out of the folder."""
        if key not in self._known:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        return self._prefix + key


def open_folder(section: DatasetSection, setting: str, tell: Tell) -> FolderSource:  # noqa: ARG001
    """The source of `local` and `in_memory`."""
    return FolderSource(data_dir(section, setting), setting)


def data_dir(section: DatasetSection, setting: str) -> str:
    """The folder that a data set cannot be without."""
    if section.instance_data_dir is None:
        raise DataError(
            f"{setting}.instance_data_dir is not set; a data set of type {section.type!r} needs "
            "it. Name the folder of its samples."
        )
    if "\0" in section.instance_data_dir:
        raise DataError(
            f"{setting}.instance_data_dir is {section.instance_data_dir!r}: no name can have a NUL "
            "in it. Take it out."
        )
    return section.instance_data_dir


def walk(folder: Path, prefix: str = "", above: tuple[Identity, ...] = ()) -> Iterator[str]:
    """Keys below `folder`, hidden ones left out; links are followed, unless they lead back up.

    A link that leads nowhere is listed too: it is a sample the user believes to have, so it must
    show up as unreadable instead of vanishing.
    """
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from walk(Path(entry.path), f"{prefix}{entry.name}/", (*above, identity))
            elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                yield prefix + entry.name
