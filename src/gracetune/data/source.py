"""Define the `Source` protocol, by which all code reads datasets, and the source for folders.

A source is a read-only set of named files, such as the files of a folder or the members of a tar
archive. The name of a file in its source is called its key. Folders, tar shards, tables, remote
storage and staged data all have a source, so that the code that uses them does not differ.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from blake3 import blake3

from gracetune.data.sample import UnreadableSampleError
from gracetune.errors import DataError
from gracetune.events.types import Notice

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gracetune.config.dataset_schema import DatasetSection
    from gracetune.events.dispatcher import Emit


_PIECE_NBYTES = 1024**2
"""Number of bytes to request at a time from a file that grows while it is read."""


class Source(Protocol):
    """A read-only set of named files, such as the files of a folder or the members of a tar shard.

    The names are called keys.
    """

    def keys(self) -> Sequence[str]:
        """Return the names of all files, sorted. They are relative paths with forward slashes."""
        ...

    def read(self, key: str) -> bytes:
        """Return the bytes of one file; raise OSError if it cannot be read."""
        ...

    def nbytes(self, key: str) -> int:
        """Return the length of one file in bytes, without reading it if possible."""
        ...

    def describe(self) -> str:
        """Return a description of the source for messages, such as "the folder /data/cats"."""
        ...


class FileRange(NamedTuple):
    """A contiguous range of bytes in a local file, or a whole file."""

    path: str
    offset: int
    """Start of the range in bytes."""
    nbytes: int | None
    """Length of the range in bytes; None for the whole file."""


@runtime_checkable
class FileSource(Source, Protocol):
    """A source whose data lies in local files.

    The kernel can copy such data to shared memory directly, without a detour through Python.
    """

    def place(self, key: str) -> FileRange | None:
        """Return where the bytes of a key are on disk; None if they are not in a local file."""
        ...


@runtime_checkable
class StampedSource(Source, Protocol):
    """A source that can detect that files have changed, even if their lengths are the same."""

    def stamp(self, keys: Sequence[str]) -> str:
        """Return a text that changes when one of these files changes, without reading them."""
        ...


@runtime_checkable
class EstimatingSource(Source, Protocol):
    """A source that knows its approximate total size, but not the lengths of single files.

    It would have to read a file to know its length.
    """

    def estimate(self) -> int:
        """Return the approximate total size of all samples in bytes."""
        ...


def read_unchanged(source: Source, key: str, digest: str) -> bytes:
    """Return the bytes of a file if they still have the BLAKE3 digest from opening the dataset.

    Cache keys contain that digest, so other bytes must not be encoded under it. Raises
    UnreadableSampleError if the file has changed.
    """
    data = source.read(key)
    if blake3(data).hexdigest() != digest:
        raise UnreadableSampleError(
            f"{printable(key)} has changed since the dataset was opened. Leave it unchanged while "
            "the run uses it, and start the run again"
        )
    return data


def read_range(place: FileRange) -> bytes:
    """Return all bytes of a file range, with several reads if it is larger than 2 GiB."""
    path, offset, nbytes = place
    descriptor = open_for_reading(path)
    try:
        file_nbytes = os.fstat(descriptor).st_size
        check_not_truncated(place, file_nbytes)
        likely = file_nbytes if nbytes is None else nbytes
        parts = [os.pread(descriptor, likely + (nbytes is None), offset)]
        done = len(parts[0])
        while parts[-1] and done != likely:  # a long file, or one that changes while it is read
            wanted = max(likely - done, _PIECE_NBYTES) if nbytes is None else nbytes - done
            parts.append(os.pread(descriptor, wanted, offset + done))
            done += len(parts[-1])
    finally:
        os.close(descriptor)
    return b"".join(parts) if len(parts) > 1 else parts[0]


def open_for_reading(path: str) -> int:
    """Return a file descriptor of a regular file; raise OSError for a named pipe or a device.

    Opening a named pipe would wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return descriptor


def check_not_truncated(place: FileRange, file_nbytes: int) -> None:
    """Raise OSError if a range extends beyond its file, which has `file_nbytes` bytes."""
    missing = place.offset + (place.nbytes or 0) - file_nbytes
    if missing > 0:
        raise OSError(f"the file that contains it ends {missing} bytes too early")


def file_stamp(paths: Iterable[str]) -> str:
    """Return a digest of the inodes and change times of files, which changes when a file does.

    It uses ctime, because the kernel sets it and copying tools cannot preserve it.
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


def check_key(setting: str, key: str) -> None:
    """Raise an error if a file name is not valid UTF-8; logs and reports could not contain it."""
    try:
        key.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(key).decode(errors="backslashreplace")
        raise DataError(
            f"{setting} has a file whose name is not UTF-8: {shown}. Rename it; logs and "
            "reports are UTF-8."
        ) from None


def printable(key: str) -> str:
    """Return a text with its non-printable characters escaped, for messages."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in key)


def is_hidden(key: str) -> bool:
    """Return whether a file or one of its folders is hidden: its name starts with a dot.

    This also holds for paths that leave the folder, such as `../x`.
    """
    return key.startswith(".") or "/." in key


# Folders


class FolderSource:
    """A source with all files below a folder, except hidden ones.

    The files are listed once, when the source is created.
    """

    def __init__(self, path: str | Path, setting: str = "datasets") -> None:
        """List the files; `setting` is the dataset's name in messages, such as `datasets[0]`."""
        self.root = Path(os.path.expanduser(path))
        """The folder."""
        name = f"{setting}.instance_data_dir"
        try:
            check_exists(path, name)
            if not self.root.is_dir():
                raise DataError(
                    f"{name} is {str(path)!r}: it is a file. Set the folder that contains it."
                )
            self.skipped: dict[str, list[str]] = {}
            """Paths of entries that are not listed, by the reason."""
            self._keys = tuple(sorted(walk_folder(self.root, self.skipped)))
        except OSError as error:
            raise unlistable(name, path, error) from error
        if not self._keys:
            raise DataError(f"{name} is {str(path)!r}: the folder is empty. Put samples into it.")
        for key in self._keys:
            check_key(name, key)
        self._known = frozenset(self._keys)
        self._prefix = f"{self.root}/"

    def keys(self) -> Sequence[str]:
        return self._keys

    def read(self, key: str) -> bytes:
        return read_range(self.place(key))

    def place(self, key: str) -> FileRange:
        return FileRange(self._path(key), 0, None)

    def stamp(self, keys: Sequence[str]) -> str:
        return file_stamp(map(self._path, keys))

    def nbytes(self, key: str) -> int:
        return os.stat(self._path(key)).st_size

    def describe(self) -> str:
        return f"the folder {self.root}"

    def _path(self, key: str) -> str:
        """Return the path of a key; raise FileNotFoundError unless it was listed.

        A key can therefore not refer to a file outside the folder.
        """
        if key not in self._known:
            raise FileNotFoundError(f"{self.describe()} has no {key!r}")
        return self._prefix + key


def open_folder(section: DatasetSection, setting: str, emit: Emit) -> FolderSource:
    """Open the source of a dataset whose samples are files in a folder."""
    source = FolderSource(data_dir(section, setting), setting)
    for reason, names in source.skipped.items():
        text = f"{source.describe()}: skipped {len(names)} {reason}, such as {printable(names[0])}"
        emit(Notice(text, level="warning"))
    return source


def check_exists(path: str | Path, name: str) -> None:
    """Raise if a folder or file that the setting `name` names does not exist."""
    if not Path(os.path.expanduser(path)).exists():
        kind = "file" if Path(path).suffix.lower() in (".tar", ".parquet") else "folder"
        raise DataError(
            f"{name} is {str(path)!r}: the {kind} does not exist. Relative paths start at the "
            f"working directory, {Path.cwd()}."
        )


def data_dir(section: DatasetSection, setting: str) -> str:
    """Return `instance_data_dir`, or raise an error if it is missing or invalid."""
    if section.instance_data_dir is None:
        raise DataError(
            f"{setting}.instance_data_dir is not set; a dataset of type {section.type!r} needs "
            "it. Set it to the folder of the samples."
        )
    if "\0" in section.instance_data_dir:
        raise DataError(
            f"{setting}.instance_data_dir is {section.instance_data_dir!r}: a path cannot "
            "contain a NUL character. Remove it."
        )
    return section.instance_data_dir


def walk_folder(folder: Path, skipped: dict[str, list[str]] | None = None) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, except hidden ones.

    Symbolic links are followed, and each real folder is listed once: under its own path if that is
    below `folder`, else under the first link to it. Links to a folder that contains `folder` are
    not followed. A broken link is yielded as well, so that it is reported as an unreadable sample.
    The paths of other entries are added to `skipped`, by the reason.
    """
    skipped = {} if skipped is None else skipped
    root = os.path.realpath(folder)
    seen: set[tuple[int, int]] = set()
    folders, links = [(str(folder), "")], deque[tuple[str, str]]()
    while folders or links:
        path, prefix = folders.pop() if folders else links.popleft()
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen or _contains(
            os.path.realpath(path), root, prefix
        ):
            skipped.setdefault("links to folders that are listed already", []).append(prefix[:-1])
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(path) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            if entry.name.startswith("."):
                continue
            name = prefix + entry.name
            match _entry_kind(entry):
                case "folder":
                    folders.append((entry.path, f"{name}/"))
                case "link to a folder":
                    links.append((entry.path, f"{name}/"))
                case "file":
                    yield name
                case _:
                    skipped.setdefault("named pipes, sockets or devices", []).append(name)


def _contains(path: str, root: str, prefix: str) -> bool:
    """Return whether the folder `path`, reached as `prefix`, contains the listed folder `root`."""
    return bool(prefix) and f"{root}/".startswith(f"{path.rstrip('/')}/")


def _entry_kind(entry: os.DirEntry[str]) -> Literal["folder", "link to a folder", "file", "other"]:
    try:
        if not entry.is_symlink():
            if entry.is_dir(follow_symlinks=False):
                return "folder"
            return "file" if entry.is_file(follow_symlinks=False) else "other"
        mode = os.stat(entry.path).st_mode
    except OSError:  # a broken link, or one that leads to itself
        return "file"
    if stat.S_ISDIR(mode):
        return "link to a folder"
    return "file" if stat.S_ISREG(mode) else "other"


def unlistable(setting: str, path: object, error: OSError) -> DataError:
    """Return the error for a folder that cannot be listed, which names the inner folder."""
    inner = error.filename if isinstance(error.filename, str) else ""
    what = "it" if inner in ("", str(path)) else f"its folder {printable(inner)}"
    return DataError(
        f"{setting} is {str(path)!r}: {what} cannot be listed ({error.strerror or error}). Make "
        "every folder in it readable."
    )
