"""What every place that samples come from can do, and what some can do beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gracetune.config.schema import DatasetSection
    from gracetune.events.dispatcher import Emit


_PIECE_NBYTES = 1024**2
"""What is asked for where a file has more than it had."""


class Source(Protocol):
    """Named byte strings: the files of a folder, the members of a shard, a staged arena."""

    def keys(self) -> Sequence[str]:
        """Every name, sorted; relative, with forward slashes."""
        ...

    def read(self, key: str) -> bytes:
        """The bytes behind one name; OSError where they cannot be read."""
        ...

    def nbytes(self, key: str) -> int:
        """How long they are, without reading them where that is possible."""
        ...

    def describe(self) -> str:
        """One phrase for messages: what and where this is."""
        ...


class FileRange(NamedTuple):
    """Bytes that lie in one piece in a file."""

    path: str
    offset: int
    nbytes: int | None
    """None: all that the file has."""


@runtime_checkable
class FileSource(Source, Protocol):
    """A source of plain files or parts of them: staging copies these inside the kernel."""

    def place(self, key: str) -> FileRange | None:
        """Where the bytes are; none where no file of this machine has them as they are."""
        ...


@runtime_checkable
class StampedSource(Source, Protocol):
    """A source that can tell whether files have changed, also where their lengths have not."""

    def stamp(self, keys: Sequence[str]) -> str:
        """Another text once one of these files is another, as far as that shows without reading."""
        ...


@runtime_checkable
class EstimatingSource(Source, Protocol):
    """A source that must decode to know one length, but can tell them all roughly for nothing."""

    def estimate(self) -> int:
        """About how many bytes its samples have together."""
        ...


def read_place(place: FileRange) -> bytes:
    """All of it, or OSError; the kernel gives at most 2 GiB a call."""
    path, offset, nbytes = place
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        has = os.fstat(descriptor).st_size
        check_whole(place, has)
        likely = has if nbytes is None else nbytes
        parts = [os.pread(descriptor, likely + (nbytes is None), offset)]
        done = len(parts[0])
        while parts[-1] and done != likely:  # it is long, or changes while it is read
            wanted = max(likely - done, _PIECE_NBYTES) if nbytes is None else nbytes - done
            parts.append(os.pread(descriptor, wanted, offset + done))
            done += len(parts[-1])
    finally:
        os.close(descriptor)
    return b"".join(parts) if len(parts) > 1 else parts[0]


def check_whole(place: FileRange, has: int) -> None:
    """OSError where a file of `has` bytes ends before the place does."""
    missing = place.offset + (place.nbytes or 0) - has
    if missing > 0:
        raise OSError(f"the file that it lies in ends {missing} bytes too early")


def stamp_of(paths: Iterable[str]) -> str:
    """When each file was last changed, and which file it is; one that is gone is another, too.

    The kernel sets the time of the last change itself: no tool that keeps dates can keep it.
    """
    digest = blake3()
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            digest.update(f"{error.errno}\n".encode())
        else:
            digest.update(f"{found.st_dev} {found.st_ino} {found.st_ctime_ns}\n".encode())
    return digest.hexdigest(length=16)


def check_name(setting: str, key: str) -> None:
    """Logs and reports are UTF-8; a name that is not could not stand in one."""
    try:
        key.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(key).decode(errors="backslashreplace")
        raise DataError(
            f"{setting} holds a file whose name is not UTF-8: {shown}. Logs and reports could not "
            "name it; rename it."
        ) from None


def printable(key: str) -> str:
    """The name on one line of a message, whatever characters it has."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in key)


def is_hidden(key: str) -> bool:
    """Whether a part of the name begins with a dot: `.git/x`, `a/._b.jpg`, and also `../x`."""
    return key.startswith(".") or "/." in key


# ------------------------------------------------------------------------------------------
# A folder of files as a source: what a run file's `instance_data_dir` names.


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


def open_folder(section: DatasetSection, setting: str, emit: Emit) -> FolderSource:  # noqa: ARG001
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
