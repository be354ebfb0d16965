"""Pinned slots that batches are gathered in, and texts that need not be gathered at all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.store import Entry

SLOTS = 2
"""One is filled while the other is copied from."""
ALIGNMENT = 512
"""Of device allocations, and good for host ones."""


class Mark(Protocol):
    """A point in what a device does."""

    def synchronize(self) -> None:
        """Wait until the device is past it."""
        ...


class Staging:
    """Slots of host memory in turn; one is written again only after the copy out of it is done."""

    def __init__(self, allocate: Callable[[int], Tensor], mark: Callable[[], Mark]) -> None:
        """`mark` is asked for after the copies of a slot were given to the device."""
        self._allocate = allocate
        self._mark = mark
        self._slots = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        self._marks: list[Mark | None] = [None] * SLOTS
        self._turn = 0
        self._lock = threading.Lock()
        self.nbytes_sent = 0

    def send(
        self,
        parts: Mapping[str, Sequence[Tensor]],
        new_on_device: Callable[[Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """Stack each part in a slot and copy it to the device, without waiting for the copy."""
        shapes = {name: (len(tensors), *tensors[0].shape) for name, tensors in parts.items()}
        sizes = {name: sum(t.nbytes for t in tensors) for name, tensors in parts.items()}
        with self._lock:
            slot = self._next_slot(sum(map(_aligned, sizes.values())))
            moved, start = {}, 0
            for name, tensors in parts.items():
                room = slot[start : start + sizes[name]]
                staged = room.view(tensors[0].dtype).view(shapes[name])
                torch.stack(list(tensors), out=staged)
                moved[name] = new_on_device(staged).copy_(staged, non_blocking=True)
                start += _aligned(sizes[name])
            self._marks[self._turn] = self._mark()
            self._turn = (self._turn + 1) % SLOTS
            self.nbytes_sent += sum(sizes.values())
        return moved

    def _next_slot(self, nbytes: int) -> Tensor:
        mark = self._marks[self._turn]
        if mark is not None:
            mark.synchronize()
        if len(self._slots[self._turn]) < nbytes:
            self._slots[self._turn] = self._allocate(nbytes)
        return self._slots[self._turn]


class HotTexts:
    """Embeddings that stay on the device: chosen once, so that a resumed run has the same ones."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self.found = 0

    def all_of(self, captions: Sequence[str]) -> list[Entry] | None:
        """Only where every one is there: a batch is put together on one side."""
        if not self._entries or any(caption not in self._entries for caption in captions):
            return None
        self.found += len(captions)
        return [self._entries[caption] for caption in captions]

    def __len__(self) -> int:
        return len(self._entries)


def keep_hot(
    captions: Sequence[str],
    texts: Callable[[Sequence[str]], Sequence[Entry]],
    device: torch.device,
    budget_nbytes: int,
) -> HotTexts:
    """Bring the first captions of the row to the device, as many as the budget holds."""
    chosen = {}
    for caption, entry in _within(captions, texts, budget_nbytes):
        chosen[caption] = {name: t.to(device) for name, t in entry.items()}
    return HotTexts(chosen)


def _within(
    captions: Sequence[str],
    texts: Callable[[Sequence[str]], Sequence[Entry]],
    budget_nbytes: int,
) -> Iterator[tuple[str, Entry]]:
    left = budget_nbytes
    for caption in captions:
        (entry,) = texts([caption])
        left -= sum(_aligned(t.nbytes) for t in entry.values())
        if left < 0:
            return
        yield caption, entry


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
