"""The protocol of cache stores (`Store`).

A store maps keys to entries. An entry is a mapping from names to tensors: a sample's latents, or
a caption's embeddings.
Implementations: `MemoryTier` (bounded host memory), `SharedTier` (the same, once for all ranks of a
machine) and `ShardStore` (files).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    Entry = Mapping[str, Tensor]
    """Named tensors."""
    Allocate = Callable[[int], Tensor]
    """Allocates a number of bytes of host memory, as a uint8 tensor."""
    TryAllocate = Callable[[int], Tensor | None]
    """Like `Allocate`, but returns None if there is no memory left."""


class Store(Protocol):
    """A cache of encoded entries by key. Entries are read-only: some are views of mapped files."""

    def get(self, key: str) -> Entry | None:
        """Return the entry of a key; None if the entry is missing or damaged."""
        ...

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return the entries of several keys, in the same order; faster than single calls."""
        ...

    def gather(self, keys: Sequence[str], name: str, allocate: Allocate) -> Tensor | None:
        """Stack one tensor of each entry into newly allocated memory; None if an entry is missing.

        The tensors must have the same shape and dtype.
        """
        ...

    def load(self, keys: Sequence[str], allocate: TryAllocate) -> list[Entry | None]:
        """Return entries like `get_many`, but read from files into memory from `allocate`.

        Entries that are already in memory are returned without a copy.
        """
        ...

    def will_need(self, keys: Sequence[str]) -> None:
        """Announce that these entries will be read soon; does not wait for the disk."""
        ...

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry; an existing one is kept, since equal keys mean equal contents."""
        ...

    def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Store several entries; faster than single calls."""
        ...

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its entry exists, without reading it."""
        ...

    def close(self) -> None:
        """Close all files. Returned entries stay valid, and later calls open the files again."""
        ...


def stack_entries(entries: Sequence[Entry | None], name: str, allocate: Allocate) -> Tensor | None:
    """Stack one tensor of each entry into newly allocated memory; None if an entry is missing."""
    tensors = [entry[name] for entry in entries if entry is not None]
    if len(tensors) < len(entries):
        return None
    return stack_into(tensors, allocate)


def stack_into(tensors: Sequence[Tensor], allocate: Allocate) -> Tensor:
    """Stack tensors of one shape and dtype into newly allocated memory."""
    first, count = tensors[0], len(tensors)
    out = allocate(count * first.nbytes).view(first.dtype).view(count, *first.shape)
    return torch.stack(list(tensors), out=out)
