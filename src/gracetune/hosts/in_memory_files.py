"""Serve the files of a dataset from memory, under their absolute paths.

`stage_dataset` reads a dataset into memory once. The storage backend of a host (SimpleTuner,
ai-toolkit) then asks `BackendFiles` before it reads from disk. A file that the host writes or
deletes is read from disk from then on.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from gracetune.data.audio import EXTENSIONS as AUDIO
from gracetune.data.images import EXTENSIONS as IMAGES
from gracetune.data.source import FolderSource
from gracetune.data.staging import StagedSource
from gracetune.data.video import EXTENSIONS as VIDEO
from gracetune.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gracetune.config.dataset_schema import InMemorySection
    from gracetune.events.dispatcher import Emit
    from gracetune.hosts.tensor_cache import FilePath, TensorCache


TEXT_EXTENSIONS = frozenset((".txt", ".caption", ".jsonl", ".parquet", ".csv"))
HOST_METADATA_PREFIXES = ("aspect_ratio_bucket",)
"""Prefixes of names of files that are not held in memory, because SimpleTuner changes them."""


@dataclass(frozen=True, slots=True)
class StagedDatasetConfig:
    """The settings of a dataset that is to be held in memory."""

    id: str
    folder: str
    section: InMemorySection
    extensions: tuple[str, ...]
    """File extensions to hold, lower case without dots; empty: media, captions and tables."""


class StagedFiles:
    """The files of one dataset that are held in memory, by absolute or relative path."""

    def __init__(self, root: str, staged: StagedSource) -> None:
        self._prefix = os.path.abspath(root) + os.sep
        self._staged = staged
        self._keys = frozenset(staged.keys())
        self._forgotten: set[str] = set()

    def holds(self, path: FilePath) -> bool:
        """Return True if a path is served from memory."""
        key = self._key(path)
        return key in self._keys and key not in self._forgotten

    def read(self, path: FilePath) -> bytes:
        """Return the bytes of a file that is held in memory."""
        key = self._key(path)
        assert key is not None, path
        return self._staged.read(key)

    def paths(self) -> Iterator[str]:
        """Yield the absolute paths of the files that are served from memory."""
        return (self._prefix + key for key in sorted(self._keys - self._forgotten))

    def forget(self, path: FilePath) -> None:
        """Serve a file from disk from now on."""
        key = self._key(path)
        if key is not None:
            self._forgotten.add(key)

    def _key(self, path: FilePath) -> str | None:
        text = os.path.abspath(path)
        if not text.startswith(self._prefix):
            return None
        return text[len(self._prefix) :].replace(os.sep, "/")


def stage_dataset(
    config: StagedDatasetConfig, emit: Emit, shared_folder: Path | None
) -> StagedFiles:
    """Read a dataset into memory; processes with the same `shared_folder` share one copy."""
    setting = f"dataset {config.id!r}"
    source = FolderSource(os.path.abspath(config.folder), setting)
    extensions = (
        frozenset(f".{each}" for each in config.extensions)
        or IMAGES | VIDEO | AUDIO | TEXT_EXTENSIONS
    )
    keys = list(filter(partial(_is_selected, extensions=extensions), source.keys()))
    if not keys:
        raise DataError(
            f"{setting}: {source.describe()} has no file with an extension of "
            f"{', '.join(sorted(extensions))}. Name another folder, or set "
            "in_memory.file_extensions."
        )
    return StagedFiles(
        config.folder,
        StagedSource.stage(source, keys, config.section, emit, setting, shared_folder),
    )


@contextmanager
def path_in_memory(data: bytes) -> Iterator[str]:
    """Yield the path of a file with these bytes in memory, for decoders that need a path.

    Processes that this one starts can read it too, for example ffmpeg.
    """
    with os.fdopen(os.memfd_create("gracetune-file"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _is_selected(key: str, extensions: frozenset[str]) -> bool:
    path = Path(key)
    return path.suffix.lower() in extensions and not path.name.startswith(HOST_METADATA_PREFIXES)


@dataclass(frozen=True, slots=True)
class BackendFiles:
    """The files and tensors that one storage backend of a host serves from memory."""

    staged: StagedFiles | None
    memory: TensorCache | None

    def holds(self, path: FilePath) -> bool:
        """Return True if a file of the dataset is held in memory."""
        return self.staged is not None and self.staged.holds(path)

    def read(self, path: FilePath) -> bytes | None:
        """Return the bytes of a file from memory, or None if it must be read from disk."""
        return self.staged.read(path) if self.staged is not None and self.holds(path) else None

    def open_file(self, path: FilePath, mode: str) -> BytesIO | TextIOWrapper | None:
        """Open a file in memory for reading, or return None if it must be opened on disk.

        A mode other than reading may change the file, so it is read from disk afterwards.
        """
        if mode not in ("r", "rt", "rb"):
            self.forget(path)
            return None
        data = self.read(path)
        if data is None:
            return None
        return BytesIO(data) if mode == "rb" else TextIOWrapper(BytesIO(data), encoding="utf-8")

    def load(self, path: FilePath, load: Callable[[str], object]) -> object:
        """Return the tensors of a cache file, from memory if it is kept there."""
        return load(os.fspath(path)) if self.memory is None else self.memory.get(path, load)

    def forget(self, path: FilePath) -> None:
        """Drop a file from memory because it is about to change."""
        if self.staged is not None:
            self.staged.forget(path)
        if self.memory is not None:
            self.memory.forget(path)
