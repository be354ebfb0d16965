"""Pinned slots that batches are gathered in, and texts that need not be gathered at all."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import torch

from gracetune.cache.packing import PAGE, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from gracetune.cache.store import Entry, Room

    Filling = Callable[[Room], Tensor]
    """Puts a tensor in room that it asks for."""

SLOTS = 2
"""One is filled while the other is copied from."""
ALIGNMENT = 512
"""Of device allocations."""


class Mark(Protocol):
    """A point in what a device does."""

    def synchronize(self) -> None:
        """Wait until the device is past it."""
        ...


class Staging:
    """Slots of host memory in turn; one is written again only after the copy out of it is done."""

    def __init__(self, allocate: Callable[[int], Tensor], mark: Callable[[], Mark]) -> None:
        """`mark` is asked for after the copies of a slot were given to the device."""
        self._slots = [_PinnedSlot(allocate) for _ in range(SLOTS)]
        self._mark = mark
        self._marks: list[Mark | None] = [None] * SLOTS
        self._turn = 0
        self._lock = threading.Lock()
        self.nbytes_sent = 0

    def send(
        self, parts: Mapping[str, Filling], new_on_device: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Have each part put in a slot and copy it to the device, without waiting for the copy.

        A part that turns out to be on the device stays as it is.
        """
        moved = {}
        with self._lock:
            slot = self._next_slot()
            for name, fill in parts.items():
                staged = fill(slot.room)
                if staged.is_cuda:
                    moved[name] = staged
                    continue
                moved[name] = new_on_device(staged).copy_(staged, non_blocking=True)
                self.nbytes_sent += staged.nbytes
            self._marks[self._turn] = self._mark()
            self._turn = (self._turn + 1) % SLOTS
        return moved

    def _next_slot(self) -> _PinnedSlot:
        mark = self._marks[self._turn]
        if mark is not None:
            mark.synchronize()
        slot = self._slots[self._turn]
        slot.empty()
        return slot


class _PinnedSlot:
    """Host memory that is handed out piece by piece, each beginning with a page, and begun anew."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[Tensor] = []
        self._used = 0

    def room(self, nbytes: int) -> Tensor:
        """The next piece; a slot that is too small is replaced by one that is not."""
        if self._used + nbytes > len(self._memory):
            # The device may still read what was handed out of it.
            self._outgrown.append(self._memory)
            self._memory = self._allocate(2 * self._used + aligned(nbytes, PAGE))
            self._used = 0
        start = self._used
        self._used += aligned(nbytes, PAGE)
        return self._memory[start : start + nbytes]

    def empty(self) -> None:
        """Nobody reads any of it."""
        self._outgrown.clear()
        self._used = 0


def copied(tensor: Tensor, room: Room) -> Tensor:
    """The tensor again, in memory that is asked for."""
    return room(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


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
    return aligned(nbytes, ALIGNMENT)
