"""What keeps encoded entries, whoever it is; and one that keeps them in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    Entry = Mapping[str, Tensor]
    Allocate = Callable[[int], Tensor]
    """So many bytes of host memory."""
    TryAllocate = Callable[[int], Tensor | None]
    """The same; none where there is no room."""


class Store(Protocol):
    """Named tensors by key. Entries are read only: some are views of files."""

    def get(self, key: str) -> Entry | None:
        """What was put under this key, if it is there and whole."""
        ...

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The same for a batch, in the order of the keys: one question instead of many."""
        ...

    def gather(self, keys: Sequence[str], name: str, room: Allocate) -> Tensor | None:
        """One tensor of each entry, of one shape, side by side in memory that is asked for; none
        where one is missing."""
        ...

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:
        """Like `get_many`, with what is in files read into memory that is asked for; what is in
        memory already comes as it is."""
        ...

    def will_need(self, keys: Sequence[str]) -> None:
        """These will be asked for soon; returns at once."""
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

    def close(self) -> None:
        """Let go of files; what was got stays good, and who asks again opens them again."""
        ...


class DictStore:
    """Entries that live as long as the run."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """Look it up."""
        return self._entries.get(key)

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Look them up."""
        return [self._entries.get(key) for key in keys]

    def gather(self, keys: Sequence[str], name: str, room: Allocate) -> Tensor | None:
        """Copy them."""
        return stack_entries(self.get_many(keys), name, room)

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:  # noqa: ARG002
        """They are in memory."""
        return self.get_many(keys)

    def will_need(self, keys: Sequence[str]) -> None:
        """They are in memory."""

    def put(self, key: str, entry: Entry) -> None:
        """Take it as it is."""
        self._entries[key] = entry

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Take them as they are."""
        self._entries.update(entries)

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Which are there."""
        return [key in self._entries for key in keys]

    def close(self) -> None:
        """There are no files."""


def stack_entries(entries: Sequence[Entry | None], name: str, room: Allocate) -> Tensor | None:
    """Copy one tensor of each entry side by side; none where one is missing."""
    tensors = [entry[name] for entry in entries if entry is not None]
    if len(tensors) < len(entries):
        return None
    return stack_into(tensors, room)


def stack_into(tensors: Sequence[Tensor], room: Allocate) -> Tensor:
    """Copy tensors of one shape side by side into memory that is asked for."""
    first, count = tensors[0], len(tensors)
    out = room(count * first.nbytes).view(first.dtype).view(count, *first.shape)
    return torch.stack(list(tensors), out=out)
