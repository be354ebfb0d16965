"""A cache store in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gracetune.cache.store import stack_entries

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.store import Allocate, Entry, TryAllocate


class DictStore:
    """A store that keeps all entries in a dictionary, without a memory limit."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key; None if it is missing."""
        return self._entries.get(key)

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return the entries of several keys."""
        return [self._entries.get(key) for key in keys]

    def gather(self, keys: Sequence[str], name: str, allocate: Allocate) -> Tensor | None:
        """Stack one tensor of each entry into newly allocated memory."""
        return stack_entries(self.get_many(keys), name, allocate)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:
        """Return the entries of several keys; nothing is allocated, they are already in memory."""
        return self.get_many(keys)

    def will_need(self, keys: Sequence[str]) -> None:
        """Do nothing: the entries are in memory."""

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry without copying it."""
        self._entries[key] = entry

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Store entries without copying them."""
        self._entries.update(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its entry exists."""
        return [key in self._entries for key in keys]

    def close(self) -> None:
        """Do nothing: there are no files."""
