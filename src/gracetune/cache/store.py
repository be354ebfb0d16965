"""Where encoded entries are kept: in memory, or in memory and a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gracetune.durable import new_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    Entry = Mapping[str, Tensor]


class Store(Protocol):
    """Named tensors by key. Entries are read only: some are views of files."""

    def get(self, key: str) -> Entry | None:
        """What was put under this key, if it is there and whole."""
        ...

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The same for a batch, in the order of the keys: one question instead of many."""
        ...

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry; the same key always means the same content."""
        ...

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Keep a batch, for the price of one."""
        ...

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which of these are there, without reading them."""
        ...


class MemoryStore:
    """Entries that live as long as the run."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """Look it up."""
        return self._entries.get(key)

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Look them up."""
        return [self._entries.get(key) for key in keys]

    def put(self, key: str, entry: Entry) -> None:
        """Take it as it is."""
        self._entries[key] = entry

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Take them as they are."""
        self._entries.update(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which are there."""
        return [key in self._entries for key in keys]


class FolderStore:
    """One safetensors file an entry, whole or absent; kept in memory too where asked."""

    def __init__(self, folder: Path, *, keep_in_memory: bool) -> None:
        self._folder = folder
        self._memory = MemoryStore() if keep_in_memory else None

    def get(self, key: str) -> Entry | None:
        """From memory, else from the folder; a damaged file is as good as none."""
        found = self._memory.get(key) if self._memory is not None else None
        path = self._path(key)
        if found is not None or not path.exists():
            return found
        try:
            entry = load_file(path)
        except SafetensorError:
            path.unlink(missing_ok=True)
            return None
        self._remember(key, entry)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Write it, then keep it."""
        with new_file(self._path(key)) as staging:
            save_file({name: t.contiguous() for name, t in entry.items()}, staging)
        self._remember(key, entry)

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """One after the other."""
        return [self.get(key) for key in keys]

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """One after the other."""
        for key, entry in entries.items():
            self.put(key, entry)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """A damaged file is as good as none, so each is read."""
        return [self.get(key) is not None for key in keys]

    def _remember(self, key: str, entry: Entry) -> None:
        if self._memory is not None:
            self._memory.put(key, entry)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.safetensors"
