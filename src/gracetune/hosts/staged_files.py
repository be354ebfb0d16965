"""Files of a data set by their absolute paths, held in memory; and what a backend serves."""

from __future__ import annotations

import os
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
    from collections.abc import Callable

    from gracetune.config.schema import InMemorySection
    from gracetune.events.dispatcher import Emit
    from gracetune.hosts.tensor_memory import FilePath, TensorMemory


TEXT_EXTENSIONS = frozenset((".txt", ".caption", ".jsonl", ".parquet", ".csv"))
HOST_METADATA_PREFIXES = ("aspect_ratio_bucket",)
"""Names that SimpleTuner writes into a data set's folder and changes later."""


class StagedFiles:
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
        """SimpleTuner hands out text, and asks with text or `Path`, of any spelling."""
        text = os.path.abspath(path)
        if not text.startswith(self._prefix):
            return None
        return text[len(self._prefix) :].replace(os.sep, "/")


def stage_dataset(chosen: StagedDatasetConfig, emit: Emit, meet_in: Path | None) -> StagedFiles:
    """Read a data set once; processes that meet in a folder share one copy."""
    setting = f"data set {chosen.id!r}"
    source = FolderSource(os.path.abspath(chosen.folder), setting)
    wanted = (
        frozenset(f".{each}" for each in chosen.extensions)
        or IMAGES | VIDEO | AUDIO | TEXT_EXTENSIONS
    )
    keys = list(filter(partial(_is_selected, endings=wanted), source.keys()))
    if not keys:
        raise DataError(
            f"{setting}: {source.describe()} has no file with one of the endings "
            f"{', '.join(sorted(wanted))}. Name another folder, or in_memory.file_extensions."
        )
    return StagedFiles(
        chosen.folder, StagedSource.stage(source, keys, chosen.section, emit, setting, meet_in)
    )


def _is_selected(key: str, endings: frozenset[str]) -> bool:
    name = Path(key)
    return name.suffix.lower() in endings and not name.name.startswith(HOST_METADATA_PREFIXES)


@dataclass(frozen=True, slots=True)
class BackendFiles:
    """What one backend serves from memory; a file that is written or deleted is the disk's."""

    shelf: StagedFiles | None
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


# ------------------------------------------------------------------------------------------
# What a host's files say of a data set that we hold; read before torch is loaded.


@dataclass(frozen=True, slots=True)
class StagedDatasetConfig:
    """A data set that is to be held in memory."""

    id: str
    folder: str
    section: InMemorySection
    extensions: tuple[str, ...]
    """Without dots, in lower case; empty: media, captions and tables."""
