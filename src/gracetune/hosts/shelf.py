"""Files of a data set by their absolute paths, held in memory; and tensors of cache files."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gracetune.data.audio import EXTENSIONS as AUDIO
from gracetune.data.folder import FolderSource
from gracetune.data.images import EXTENSIONS as IMAGES
from gracetune.data.staged import StagedSource
from gracetune.data.video import EXTENSIONS as VIDEO
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gracetune.data.progress import Tell
    from gracetune.hosts.staged_set import StagedSet

FilePath = str | os.PathLike[str]
TABLES = frozenset((".txt", ".caption", ".jsonl", ".parquet", ".csv"))
WRITTEN_BY_HOST = ("aspect_ratio_bucket",)
"""Names that SimpleTuner writes into a data set's folder and changes later."""


class Shelf:
    """The staged files of one data set; a file that is written or deleted leaves it."""

    def __init__(self, root: str, staged: StagedSource) -> None:
        self._prefix = os.path.abspath(root) + os.sep
        self._staged = staged
        self._known = frozenset(staged.keys())
        self._forgotten: set[str] = set()

    def holds(self, path: FilePath) -> bool:
        """Whether a path is served from here."""
        key = self._key(path)
        return key in self._known and key not in self._forgotten

    def read(self, path: FilePath) -> bytes:
        """The bytes as they were staged."""
        key = self._key(path)
        assert key is not None, path
        return self._staged.read(key)

    def forget(self, path: FilePath) -> None:
        """From now on the disk has the word."""
        key = self._key(path)
        if key is not None:
            self._forgotten.add(key)

    def _key(self, path: FilePath) -> str | None:
        """SimpleTuner hands out text, and asks with text or `Path`."""
        text = os.fspath(path)
        if not text.startswith(self._prefix):
            return None
        return text[len(self._prefix) :].replace(os.sep, "/")


def stage(chosen: StagedSet, tell: Tell, meet_in: Path | None) -> Shelf:
    """Read a data set once; processes that meet in a folder share one copy."""
    setting = f"data set {chosen.id!r}"
    source = FolderSource(os.path.abspath(chosen.folder), setting)
    wanted = frozenset(f".{each}" for each in chosen.extensions) or IMAGES | VIDEO | AUDIO | TABLES
    keys = list(filter(partial(_is_wanted, endings=wanted), source.keys()))
    if not keys:
        raise DataError(
            f"{setting}: {source.describe()} has no file with one of the endings "
            f"{', '.join(sorted(wanted))}. Name another folder, or in_memory.file_extensions."
        )
    return Shelf(
        chosen.folder, StagedSource.stage(source, keys, chosen.section, tell, setting, meet_in)
    )


def _is_wanted(key: str, endings: frozenset[str]) -> bool:
    name = Path(key)
    return name.suffix.lower() in endings and not name.name.startswith(WRITTEN_BY_HOST)


@dataclass(slots=True)
class _Held:
    """A value, which file it was, and how often each tensor of it had been written by then."""

    value: object
    file: tuple[int, int, int]
    versions: tuple[int, ...]
    nbytes: int


class TensorMemory:
    """What `torch_load` gave, kept within a budget; the least recently used leaves first.

    A hit is checked: the file on disk must be the one that was read, and no tensor may have been
    written to since. Containers are handed out as copies, because callers change them.
    """

    def __init__(self, budget_nbytes: int, pin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.budget_nbytes = budget_nbytes
        self.hits = 0
        self.misses = 0
        self.nbytes = 0
        self._pin = pin
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, where: FilePath, load: Callable[[str], object]) -> object:
        """The value of a file, from memory where it is there."""
        path = os.fspath(where)
        file = _identity(path)
        with self._lock:
            held = self._held.get(path)
            if held is not None and held.file == file and _versions(held.value) == held.versions:
                self._held.move_to_end(path)
                self.hits += 1
                return _copied(held.value)
            self._drop(path)
            self.misses += 1
        value = load(path)
        # A file that was replaced while it was read is not kept: nobody can say which one it is.
        if file is not None and _identity(path) == file:
            value = self._keep(path, value, file)
        return value

    def forget(self, path: FilePath) -> None:
        """The file is about to change."""
        with self._lock:
            self._drop(os.fspath(path))

    def _keep(self, path: str, value: object, file: tuple[int, int, int]) -> object:
        nbytes = sum(tensor.nbytes for tensor in _tensors(value))
        if nbytes > self.budget_nbytes:
            return value
        pinned = _mapped(value, self._pin)
        with self._lock:
            self._drop(path)
            while self._held and self.nbytes + nbytes > self.budget_nbytes:
                self._drop(next(iter(self._held)))
            self._held[path] = _Held(pinned, file, _versions(pinned), nbytes)
            self.nbytes += nbytes
        return _copied(pinned)

    def _drop(self, path: str) -> None:
        held = self._held.pop(path, None)
        if held is not None:
            self.nbytes -= held.nbytes


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _versions(value: object) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in _tensors(value))


def _mapped(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(each, change) for key, each in value.items()}
    if type(value) is list:
        return [_mapped(each, change) for each in value]
    if type(value) is tuple:
        return tuple(_mapped(each, change) for each in value)
    return value


def _copied(value: object) -> object:
    return _mapped(value, lambda tensor: tensor)


@dataclass(frozen=True, slots=True)
class Served:
    """What one backend serves from memory; a file that is written or deleted is the disk's."""

    shelf: Shelf | None
    memory: TensorMemory | None

    def holds(self, path: FilePath) -> bool:
        """Whether a file is staged."""
        return self.shelf is not None and self.shelf.holds(path)

    def read(self, path: FilePath) -> bytes | None:
        """The bytes of a staged file; none: ask the disk."""
        return self.shelf.read(path) if self.shelf is not None and self.shelf.holds(path) else None

    def open_file(self, path: FilePath, mode: str) -> BytesIO | TextIOWrapper | None:
        """A staged file to read from; who opens it in any other way changes it."""
        if mode not in ("r", "rt", "rb"):
            self.forget(path)
            return None
        data = self.read(path)
        if data is None:
            return None
        return BytesIO(data) if mode == "rb" else TextIOWrapper(BytesIO(data), encoding="utf-8")

    def load(self, path: FilePath, load: Callable[[str], object]) -> object:
        """The tensors of a cache file."""
        return load(os.fspath(path)) if self.memory is None else self.memory.get(path, load)

    def forget(self, path: FilePath) -> None:
        """The disk has the word."""
        if self.shelf is not None:
            self.shelf.forget(path)
        if self.memory is not None:
            self.memory.forget(path)
